"""A log of each step and each iteration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pstar_sim.core.plan import Plan
from pstar_sim.core.step import COUNTED, ROUTES, Step


class StepLog(NamedTuple):
    """Times by the session's clock.

    copied_bytes: in the copy primitive, while the step ran.
    """

    step: Step
    iteration: int
    ready_s: float
    start_s: float
    cause: str
    end_s: float = 0.0
    copied_bytes: int = 0

    def at(self, start_s: float, end_s: float) -> StepLog:
        """The step counts as ready when it began."""
        return self._replace(ready_s=start_s, start_s=start_s, end_s=end_s)

    def after_wait(self, ready_s: float, cause: str) -> StepLog:
        """Delayed from `ready_s` on by `cause`."""
        return self._replace(ready_s=ready_s, cause=cause)


def counted_bytes(plan: Plan, log: Iterable[StepLog], iteration: int) -> dict[str, int]:
    """Route -> bytes copied in an iteration, of the plan's routes."""
    moved = dict.fromkeys((route for route in plan.moved_bytes if route in COUNTED), 0)
    for row in log:
        if row.iteration == iteration and (route := ROUTES.get(row.step.kind)) in COUNTED:
            moved[route] += row.copied_bytes
    return moved


@dataclass(frozen=True, slots=True)
class IterationLog:
    """end_s: of the last compute step.
    shares: elements of each micro-batch over the plan's.
    captured: whether a batch was captured inside, which takes time.
    """

    number: int
    end_s: float
    on_plan: bool
    exchanges: int = 0
    shares: tuple[float, ...] = ()
    captured: bool = False

    @property
    def planned(self) -> bool:
        return all(share == 1.0 for share in self.shares)
