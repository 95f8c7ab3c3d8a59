"""The lower bound: figures worked out by hand, and no layer-major plan ever under it; plans of all policies are in
properties/test_policies.py."""

import random
from functools import partial

import hypothesis
import numpy as np
import pytest
from drawn import TIME_TO_SHRINK, Drawn, chances, planned
from hypothesis import given

from pstar_sim.bounds import pinned
from pstar_sim.bounds.bound_facts import BoundFacts
from pstar_sim.bounds.bounds import lower_bound
from pstar_sim.bounds.fluid import fluid_bound
from pstar_sim.bounds.fluid_facts import shortened
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Settings
from pstar_sim.cost import CostModel
from pstar_sim.policy.registry import find_policy
from pstar_sim.sim import play
from pstar_sim.testing import chain_workload, random_workload, round_machine
from pstar_sim.units import MIB
from pstar_sim.workload.relay import relay

EAGER, STEP, CLIP = (
    Settings(update="eager", clip=False),
    Settings(update="step", clip=False),
    Settings(update="eager", clip=True),
)
MPARAM = 2**20


pytestmark = TIME_TO_SHRINK

machine = partial(
    round_machine,
    gpu_memory_bytes=2**40,
    host_memory_bytes=2**40,
    h2d_bytes_per_s=1e9,
    d2h_bytes_per_s=1e9,
    hbm_bytes_per_s=1e12,
    adam_params_per_s=1e9,
)


def test_compute_binds_when_all_fits() -> None:
    """4 layers: 4*1 + 4*2 = 12 s, and GPU Adam of 4 Mi parameters at 28 B and 28 MiB/s each: 4 s: 16 s."""
    w = chain_workload(4, MPARAM, forward_s=1.0)
    m = machine(hbm_bytes_per_s=28 * MIB, adam_params_per_s=1e4)
    b = lower_bound(w, m, EAGER, build_layout(w), stream=False)
    assert (b.seconds, b.binding) == (pytest.approx(16.0), "compute")
    assert b.pinned_params == b.max_pinned_params == 4 * MPARAM
    joint = lower_bound(w, m, EAGER, build_layout(w))
    assert (joint.seconds, joint.binding) == (pytest.approx(16.0), "compute")
    assert joint.pinned_params + joint.streamed_params == pytest.approx(4 * MPARAM, abs=2)


def test_held_sums_count_at_every_turn_between_two_backward_passes() -> None:
    """Of three micro-batches: the first has one turn, the others two, each where all sums are held."""
    w = chain_workload(4, MPARAM, forward_s=1.0, micro_batches=3)
    m, layout = machine(), build_layout(w)
    facts = BoundFacts(w, m, layout, CostModel(w, m, layout))
    moments = [turn.moment for turn in facts.turns_between()]
    first, *others = sorted(moments)
    assert len(moments) == 5 and first < facts.between(1)[0]
    spans = [facts.between(batch) for batch in (1, 1, 2, 2)]
    assert all(low <= moment < high for moment, (low, high) in zip(others, spans))


def test_most_pinned_is_what_the_peak_leaves() -> None:
    """Budget 60 MiB, tide 10 MiB, a chunk of 2 MiB each of 4: 14 x <= 50 Mi: 3.57 Mi parameters, and beside what a
    moment reads 12 x + 2 <= 50: 4. With two micro-batches the same: a sum of gradients need not stay on the GPU."""
    w = chain_workload(4, MPARAM, forward_s=1.0, tide_bytes=10 * MIB)
    m = machine(gpu_memory_bytes=60 * MIB)
    assert lower_bound(w, m, EAGER, build_layout(w), stream=False).max_pinned_params == int(50 / 14 * MPARAM)
    two = chain_workload(4, MPARAM, forward_s=1.0, tide_bytes=10 * MIB, micro_batches=2)
    assert lower_bound(two, m, EAGER, build_layout(two), stream=False).max_pinned_params == int(50 / 14 * MPARAM)


def test_h2d_bytes_of_two_micro_batches_by_hand() -> None:
    """6 layers of 2 MiB, 2 micro-batches, no pins. Room at the peak (every moment) 8 MiB.

    Up after Adam: 12 MiB. Turns: FWD-BWD of the first, BWD-FWD, FWD-BWD of the last: at each, all that is read again
    is 12 MiB (the chunk of the turn included), of which 8 stay: 4 each. 12 + 3*4 = 24 MiB at 1 MiB/s.
    """
    w = chain_workload(6, MPARAM, forward_s=1e-6, micro_batches=2)
    m = machine(gpu_memory_bytes=8 * MIB, h2d_bytes_per_s=MIB, d2h_bytes_per_s=MIB * 1e3, adam_params_per_s=1e15)
    b = lower_bound(w, m, EAGER, build_layout(w), max_pinned=0, stream=False)
    assert b.terms["h2d"] == pytest.approx(24.0, rel=1e-3)
    assert b.binding == "h2d"


def test_low_tide_between_micro_batches_keeps_more() -> None:
    """The same with a tide of 4 MiB but about the BWD-FWD turn, where it is 0 for the first two layers (budget 12
    MiB): that turn keeps all 12 MiB. 12 + 4 + 0 + 4 = 20 MiB; a capacity for the peak would make 24 (Lemma 2 and its
    exception)."""
    tide = [0, 0, *[4 * MIB] * 8, 0, 0, 0]
    w = chain_workload(6, MPARAM, forward_s=1e-6, micro_batches=2, tide_bytes=tide)
    m = machine(gpu_memory_bytes=12 * MIB, h2d_bytes_per_s=MIB, d2h_bytes_per_s=MIB * 1e3, adam_params_per_s=1e15)
    assert lower_bound(w, m, EAGER, build_layout(w), max_pinned=0, stream=False).terms["h2d"] == pytest.approx(
        20.0, rel=1e-3
    )


def test_half_duplex_adds_up_and_down() -> None:
    """4 chunks of 2 MiB up and down at 1 MiB/s: 8 s and 8 s, one after the other 16 s."""
    w = chain_workload(4, MPARAM, forward_s=1e-6)
    m = machine(h2d_bytes_per_s=MIB, d2h_bytes_per_s=MIB, adam_params_per_s=1e15, duplex=False)
    b = lower_bound(w, m, EAGER, build_layout(w), max_pinned=0, stream=False)
    assert (b.terms["link"], b.binding) == (pytest.approx(16.0), "link")


def test_dram_carries_copies_and_adam() -> None:
    """(2 + 2 + 28) B/param of 4 Mi parameters at 32 MiB/s: 4 s."""
    w = chain_workload(4, MPARAM, forward_s=1e-6)
    b = lower_bound(
        w,
        machine(h2d_bytes_per_s=1e15, d2h_bytes_per_s=1e15, adam_params_per_s=1e15, dram_bytes_per_s=32 * MIB),
        EAGER,
        build_layout(w),
        max_pinned=0,
        stream=False,
    )
    assert (b.seconds, b.binding) == (pytest.approx(4.0), "dram")


def test_a_barrier_never_lowers_the_bound_and_pins_never_raise_it() -> None:
    for seed in range(20):
        w = random_workload(seed)
        layout = build_layout(w)
        m = machine(gpu_memory_bytes=w.peak_non_model_bytes + w.params * 10, adam_params_per_s=3e7, flops_per_s=1e12)
        eager = lower_bound(w, m, EAGER, layout).seconds
        assert lower_bound(w, m, STEP, layout).seconds >= eager - 1e-12
        assert lower_bound(w, m, EAGER, layout, max_pinned=0, stream=False).seconds >= eager - 1e-12


def test_least_maximum_is_found_exactly() -> None:
    """Against a grid of 4001 points on random lines with random ends: never above any point, and reached."""
    rng = random.Random(5)
    for _ in range(100):
        lines = [pinned._BoundLine("compute", rng.uniform(0, 5), rng.uniform(0, 2))]
        lines += [
            pinned._BoundLine("adam", rng.uniform(0, 9), rng.uniform(-3, 0.5), until_x=rng.uniform(0, 5))
            for _ in range(6)
        ]
        x_max = rng.uniform(0, 4)
        x, value = pinned._least_maximum(lines, x_max)
        xs = np.linspace(0, x_max, 4001)
        ys = np.array([[line.value + line.slope * at if at < line.until_x else -np.inf for at in xs] for line in lines])
        best = ys.max(axis=0).min()
        assert value <= best + 1e-9
        assert value >= best - 3 * x_max / 4000 - 1e-9
        assert 0 <= x <= x_max


def test_a_layer_major_iteration_turns_once_by_hand() -> None:
    """6 layers of 2 MiB, no pins, room for 8 MiB: 12 MiB come up after Adam, and of 12 that the turn's backward reads
    again 8 stay. 16 MiB at 1 MiB/s, for any number of micro-batches; depth-first it is 24 s for two."""
    m = machine(gpu_memory_bytes=8 * MIB, h2d_bytes_per_s=MIB, d2h_bytes_per_s=MIB * 1e3, adam_params_per_s=1e15)
    for count in (2, 4):
        w = relay(chain_workload(6, MPARAM, forward_s=1e-6, micro_batches=count))
        b = lower_bound(w, m, EAGER, build_layout(w), max_pinned=0, stream=False)
        assert b.terms["h2d"] == pytest.approx(16.0, rel=1e-3)
        assert (b.seconds, b.binding) == (b.terms["h2d"], "h2d")


@pytest.mark.parametrize(
    ("spec", "examples"),
    [("l2l", 6), ("tide:order=relay", 5), ("tide:order=relay-host", 5), ("tide:streams=on,order=relay", 4)],
)
def test_no_layer_major_plan_is_under_its_bounds(spec: str, examples: int, whole: bool) -> None:
    """Random models of 2 to 4 micro-batches: the closed form (of plans that stream nothing), the joint and the fluid
    program."""
    played = 0

    @hypothesis.settings(max_examples=examples * (20 if whole else 1))
    @given(chances())
    def holds(chance: random.Random) -> None:
        nonlocal played
        host = "host" in spec
        layers, count = chance.randint(1, 5), chance.choice((2, 3, 4))
        w = random_workload(chance, layers=layers, micro_batches=count, checkpointing=True if host else None)
        model_bytes = sum(t.bytes for t in w.tensors) + w.trainable_params * 12
        m = machine(
            gpu_memory_bytes=int(relay(w).peak_non_model_bytes + model_bytes * chance.choice((0.2, 0.4, 0.7, 1.2))),
            h2d_bytes_per_s=chance.choice((1e8, 1e9, 1e10)),
            d2h_bytes_per_s=chance.choice((1e8, 1e9, 1e10)),
            adam_params_per_s=chance.choice((1e7, 1e8, 1e9)),
            dram_bytes_per_s=chance.choice((1e9, 1e10)),
            flops_per_s=chance.choice((1e11, 1e12, 1e13)),
            duplex=chance.random() < 0.7,
        )
        plan = planned(find_policy(spec), Drawn(w, m, chance.choice((EAGER, STEP, CLIP))))
        if plan is None:
            return
        assert not plan.workload.order.of_loop
        job = (plan.workload, m, plan.settings, plan.layout)
        bounds = [lower_bound(*job), fluid_bound(*job)]
        if "stream" not in plan.modes:
            bounds.append(lower_bound(*job, stream=False))
        played += 1
        for bound in bounds:
            assert play(plan).iteration_s >= bound.seconds * (1 - 1e-9), bound
            assert not bound.notes

    holds()
    assert played >= examples // 2


@pytest.mark.parametrize("settings", [EAGER, CLIP])
def test_a_micro_batch_may_stand_for_those_that_are_alike(settings: Settings) -> None:
    """Nine micro-batches with little room, so that gradients, sums and parameters all move: the program that shows five
    of them gives no more than the one that shows all, nearly as much, and no plan is below it. It shows all where they
    are not too many points."""
    w = chain_workload(6, MPARAM, forward_s=4e-4, micro_batches=9)
    m = machine(gpu_memory_bytes=22 * MIB, h2d_bytes_per_s=8e8, d2h_bytes_per_s=6e8, adam_params_per_s=3e8)
    plan = find_policy("tide:sums=on")(w, m, settings)
    job = (w, m, settings, plan.layout)
    short, times = shortened(w, plan.layout, 60)
    assert (short.micro_batches, times) == (5, 5)
    assert shortened(w, plan.layout, len(w.moments)) == (w, 1)
    few, every = fluid_bound(*job, most_points=60), fluid_bound(*job, most_points=len(w.moments))
    assert lower_bound(*job).seconds * 1.01 < few.seconds <= play(plan).iteration_s
    assert every.seconds * 0.99 <= few.seconds <= every.seconds * (1 + 1e-6)
