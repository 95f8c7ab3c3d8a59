"""Hypothesis strategies of random jobs: a failure shrinks to the simplest job that fails.

The generators of pstar_sim.testing take all randomness from a `random.Random`. `chances()` draws such a generator whose
numbers hypothesis chooses; a test may also pass it on. Values with more numbers than hypothesis keeps (jitter of every
step) take a seed instead: `seeds()`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.errors import CannotPlan, DoesNotFit
from pstar_sim.testing import random_machine, random_ranks, random_settings, random_workload
from pstar_sim.workload.workload import Workload

__all__ = ["LITTLE_EFFORT", "TIME_TO_SHRINK", "Drawn", "chances", "jobs", "planned", "seeds", "workloads"]

TIME_TO_SHRINK = pytest.mark.timeout(900)
"""Hypothesis shrinks a failure for up to five minutes; a test that passes takes nowhere near as long."""

MOST_LAYERS = 5
"""Chunks of so many layers are kept, given up, streamed and updated elsewhere; more take longer alone."""

LITTLE_EFFORT = 0.1
"""`Settings.effort` for what holds of every plan, however long it was sought."""


class Chance(random.Random):
    """Random numbers drawn by hypothesis. They shrink to the simplest: a rare event (`random() < 0.3`) does not happen,
    a choice is the first, a number the lowest."""

    def __init__(self, draw_integer: Callable[[int, int], int]) -> None:
        super().__init__(0)
        self._draw_integer = draw_integer

    def random(self) -> float:
        return 1 - (self._below(2**16) + 1) / 2**16

    def _randbelow(self, n: int) -> int:
        """Returns a number below n. choice, randint, randrange, sample and shuffle use it."""
        return self._below(n)

    def getrandbits(self, k: int) -> int:
        return self._below(2**k)

    def _below(self, n: int) -> int:
        """Returns a number below n, drawn byte by byte: of more than a few hundred numbers hypothesis mostly draws low
        ones."""
        if n <= 256:
            return self._draw_integer(0, n - 1)
        size = (n.bit_length() + 7) // 8
        number = 0
        for _ in range(size):
            number = 256 * number + self._draw_integer(0, 255)
        return number * n >> 8 * size


class Chances(st.SearchStrategy[random.Random]):
    """Draws from hypothesis's data itself. With `draw(st.integers(...))` for each number, hypothesis would make five
    jobs in six by copying one number of the job before over another: hardly a new job."""

    def do_draw(self, data: Any) -> random.Random:
        return Chance(data.draw_integer)


def chances() -> st.SearchStrategy[random.Random]:
    return Chances()


def seeds() -> st.SearchStrategy[random.Random]:
    """Returns a strategy of generators for many numbers, of which only the seed shrinks."""
    return st.integers(0, 2**20).map(random.Random)


@st.composite
def workloads(draw: st.DrawFn, **settled: Any) -> Workload:
    """Draws a workload.

    settled: arguments of random_workload.
    """
    return _workload(draw(chances()), settled)


def _workload(chance: random.Random, settled: dict[str, Any]) -> Workload:
    return random_workload(chance, **{"layers": chance.randint(1, MOST_LAYERS), **settled})


class Drawn(NamedTuple):
    """A random job: the arguments of a policy."""

    workload: Workload
    machine: Machine
    settings: Settings


@st.composite
def jobs(draw: st.DrawFn, *, ranks: tuple[int, ...] = (1,), **settled: Any) -> Drawn:
    """Draws a job.

    ranks: numbers of GPUs to choose from.
    settled: arguments of random_workload.
    """
    chance = draw(chances())
    workload = _workload(chance, settled)
    machine = random_ranks(chance, random_machine(chance, workload), chance.choice(ranks))
    return Drawn(workload, machine, replace(random_settings(chance), effort=LITTLE_EFFORT))


def planned(policy: Callable[[Workload, Machine, Settings], Plan], job: Drawn) -> Plan | None:
    """Returns the policy's plan; None where it has no plan for the job."""
    try:
        return policy(*job)
    except (DoesNotFit, CannotPlan):
        return None
