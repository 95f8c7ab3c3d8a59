"""The bound over all shares of a batch, where GPUs differ: against every share, and against exact optima."""

from __future__ import annotations

import random
from itertools import product

import hypothesis
import pytest
from drawn import TIME_TO_SHRINK, chances
from hypothesis import given
from tiny import random_tiny
from unequal import bounds_of_two, exact_of_two

from pstar_sim.bounds.bounds import lower_bound
from pstar_sim.bounds.shares import NEAR, AnyShares, any_job, may_differ, tightest
from pstar_sim.catalog.loader import load_machine
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Settings
from pstar_sim.planner.compare import compare
from pstar_sim.workload.presets import preset

pytestmark = TIME_TO_SHRINK

MOST_STATES = 20_000
BY_ROUNDING = 1e-7


def test_no_bound_is_above_the_exact_optimum_of_two_unequal_gpus(whole: bool) -> None:
    """A sequence takes half or a third of the units on the second GPU. With whole chunks on
    each GPU a rank is an instance of its own: no iteration is shorter than its exact optimum with its share. The least
    over all shares, of the larger of the two, is at least the bound."""
    compared: list[float] = []

    @hypothesis.settings(max_examples=100 if whole else 4)
    @given(chances())
    def holds(chance: random.Random) -> None:
        t = random_tiny(chance, micro_batches=chance.choice((1, 1, 2)))
        speed, batch = chance.choice((2, 3)), chance.randint(2, 4)
        try:
            exact = exact_of_two(t, speed, batch, most_states=MOST_STATES)
        except MemoryError:
            return
        bound, fluid = bounds_of_two(t, speed, batch)
        if exact is None or bound is None or fluid is None:
            return
        assert bound <= float(exact) * (1 + BY_ROUNDING), (t, speed, batch)
        assert fluid <= float(exact) * (1 + BY_ROUNDING), (t, speed, batch)
        compared.append(float(exact) / fluid)

    holds()
    assert len(compared) >= 2


@pytest.mark.parametrize(
    ("gpus", "batch"),
    [
        ("v100-32+h100-80", 8),
        pytest.param("a100-40x2+p100-16", 9, marks=pytest.mark.whole),
        pytest.param("v100-32x2+rtx3090-64gbx2", 8, marks=pytest.mark.whole),
    ],
)
def test_it_is_the_least_bound_of_all_shares(gpus: str, batch: int) -> None:
    machine = load_machine(gpus)
    w = preset("gpt2", batch=batch, seq=512, dtype="fp16")
    job_of = any_job(w, machine)
    assert job_of is not None
    settings, layout = Settings(), build_layout(w, ranks=machine.world_size)
    found = AnyShares(batch, machine, settings, layout, job_of)
    first = next(found.leaves())
    assert sum(first.shares) == batch and min(first.shares) >= 1
    each = []
    for shares in product(range(1, batch), repeat=machine.world_size):
        if sum(shares) == batch:
            ranked = [job_of(n) for n in shares]
            each.append(lower_bound(tightest(ranked, machine), machine, settings, layout, ranked=ranked).seconds)
    assert found.least_s <= min(each) * (1 + BY_ROUNDING)
    assert found.least_s >= min(each) * (1 - NEAR)


def test_a_sequence_that_tiles_do_not_divide_has_a_bound_for_its_shares_alone() -> None:
    machine = load_machine("a100-40+v100-32")
    assert may_differ(preset("tiny-gpt2", batch=4, seq=128), machine)
    assert not may_differ(preset("tiny-gpt2", batch=4, seq=77), machine)
    row = compare(preset("tiny-gpt2", batch=4, seq=32), machine, policies=["tide"], near=False).rows[0]
    assert row.certificate is not None and "1 micro-batch of 2," in str(row.certificate["relative_to"])
