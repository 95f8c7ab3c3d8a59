"""What each coordinate of a point does, with the figures worked out by hand.

The chain of four layers of test_policies.py: 2 MiB a chunk, 2 s a copy either way; a layer's forward takes 1
s, its backward 2 s, so an iteration computes for 12 s; Adam takes 1 s a chunk unless said otherwise. Eager, no
clipping. Backward of layer 3 follows its forward at once, so chunk 3 comes once an iteration.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from drawn import LITTLE_EFFORT, TIME_TO_SHRINK, Drawn, jobs, planned
from hypothesis import given, settings

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Kind, Queue
from pstar_sim.core.timeline import Timeline
from pstar_sim.policy import find_policy
from pstar_sim.sim.play import play
from pstar_sim.testing import (
    chain_workload,
    check_once,
    random_machine,
    random_settings,
    random_workload,
    round_machine,
)
from pstar_sim.units import MIB
from pstar_sim.workload.workload import Use, UseKind, Workload

EAGER = Settings(update="eager", clip=False, chunk_bytes=2 * MIB)
STEP = replace(EAGER, update="step")
POINTS = [
    "tide:eviction=lru", "static_partition:eviction=fifo", "tide:prefetch=none", "tide:prefetch=2",
    "tide:adam=after-backward", "tide:adam=fifo", "tide:pins=1", "tide:barrier=on",
    "static_partition:streams=on", "optimal:pins=0,prefetch=1,adam=fifo",
    "optimal:eviction=fifo,prefetch=none,barrier=on",
    "tide:capacity=peak,eviction=lru,prefetch=none,adam=after-backward,pins=0,barrier=on",
]  # fmt: skip


def machine(gpu_mib: int, *, adam_s: float = 1.0, down_s: float = 2.0) -> Machine:
    return round_machine(
        gpu_memory_bytes=gpu_mib * MIB, d2h_bytes_per_s=2 * MIB / down_s, adam_params_per_s=MIB / adam_s
    )


def chain(*, micro_batches: int = 1, tide_mib: int = 0) -> Workload:
    return chain_workload(4, MIB, forward_s=1.0, tide_bytes=tide_mib * MIB, micro_batches=micro_batches)


def played(
    spec: str, gpu_mib: int, *, workload: Workload | None = None, settings: Settings = EAGER, **speeds: float
) -> tuple[Plan, Timeline]:
    plan = find_policy(spec)(workload or chain(), machine(gpu_mib, **speeds), settings)
    plan.check()
    return plan, play(plan)


def seconds(spec: str, gpu_mib: int, *, settings: Settings = EAGER, **speeds: float) -> float:
    return played(spec, gpu_mib, settings=settings, **speeds)[1].iteration_s


@pytest.mark.parametrize("spec", POINTS)
def test_every_point_makes_correct_plans(spec: str, whole: bool) -> None:
    """As `check_policy`, with a tenth of the effort: any plan is to be correct."""
    most, few = (4, 2) if spec.startswith("optimal") else (8, 4)  # a search takes most of the time
    examples = most if whole else few
    fitted = 0
    for number in range(20_000, 20_000 + examples):
        rng = random.Random(f"check_policy {number}")
        workload = random_workload(rng)
        job = workload, random_machine(rng, workload), replace(random_settings(rng), effort=LITTLE_EFFORT)
        fitted += check_once(find_policy(spec), *job, rng=rng)
    assert fitted >= examples // 2 - 1


# prefetch


@pytest.mark.parametrize(("gpu_mib", "fetched"), [(12, 4), (4, 6)])
def test_on_demand_nothing_is_copied_up_while_anything_is_computed(gpu_mib: int, fetched: int) -> None:
    """12 s of compute, 2 s a fetch, and at the border the gradient of chunk 0 down (2 s) and its Adam (1 s)."""
    plan, timeline = played("tide:prefetch=none,pins=0", gpu_mib)
    assert plan.moved_bytes["h2d"] == fetched * 2 * MIB
    assert timeline.iteration_s == pytest.approx(12 + 2 * fetched + 2 + 1)
    busy = [(s.start_s, s.end_s) for s in timeline.spans if s.queue is Queue.COMPUTE and s.end_s > s.start_s]
    for fetch in (s for s in timeline.spans if s.queue is Queue.H2D and s.kind is Kind.FETCH):
        assert all(fetch.end_s <= start + 1e-9 or fetch.start_s >= end - 1e-9 for start, end in busy)


def test_the_farther_ahead_the_less_is_waited_for() -> None:
    """With room for all. At 0 backward ends; chunk 0 is there again at 5 (down 2, Adam 1, up 2) in every case.

    One ahead: chunk 1 came before it, chunk 2 may be fetched when F0 has ended (6 to 8), chunk 3 when F1 has (8 to 10):
    F3 at 10, 9 s to the end: 19. Two ahead: chunk 2 from 5 to 7, chunk 3 from 7 to 9: 18. As far as there is room:
    chunks 1 and 2 before backward ends, chunk 3 after chunk 0 from 5 to 7: 17, the update window of chunk 0.
    """
    assert [seconds(f"tide:prefetch={k},pins=0", 12) for k in (1, 2, "edf")] == pytest.approx([19, 18, 17])


# adam


def test_order_of_updates() -> None:
    """Adam of 3 s a chunk, copies of 2 s. By the end of backward (B3 ends at 0, B0 at 6):

    after backward: Adam of all four from 6 to 18, chunk 3 there again at 20, F3 until 21, B3 until 23.
    As gradients arrive: 3, 2, 1, 0, the last until 14; up until 16, F0 to F3 until 20, B3 until 22.
    By deadline: 3 (2 to 5) and 2 (to 8) before the others are ready, then 0 (to 11) and 1 (to 14), which comes
    from 14 to 16; F1 to F3 until 19, B3 until 21.
    """
    orders = ("after-backward", "fifo", "edf")
    assert [seconds(f"tide:adam={a},pins=0", 12, adam_s=3.0) for a in orders] == pytest.approx([23, 22, 21])


def test_adam_after_backward_is_the_barrier_where_nothing_is_updated_on_the_gpu() -> None:
    """Serial: four updates of 3 s, a copy up, F3 and all of backward: 12 + 2 + 1 + 8 s."""
    after = seconds("tide:adam=after-backward,pins=0", 12, adam_s=3.0)
    assert after == pytest.approx(23)
    assert seconds("tide:pins=0,barrier=on", 12, adam_s=3.0) == pytest.approx(after)
    assert seconds("tide:pins=0", 12, adam_s=3.0, settings=STEP) == pytest.approx(after)


# pins and barrier


def test_pins_are_as_many_as_asked_for() -> None:
    """Of 57 MiB with a tide of 1 MiB, four chunks take 14 MiB each. One pinned takes the window of chunk 0 away; all
    pinned are 4 s of GPU Adam and nothing else."""
    by_hand = {0: 17.0, 1: 14.0, 2: 14.0, 4: 16.0}
    for pins, expected in by_hand.items():
        plan, timeline = played(f"tide:pins={pins}", 57, workload=chain(tide_mib=1))
        assert plan.modes.count("pin") == pins
        assert timeline.iteration_s == pytest.approx(expected)
    assert played("tide:pins=9", 57, workload=chain(tide_mib=1))[0].modes.count("pin") == 4


def test_a_barrier_of_the_policys_own_holds_every_update_back() -> None:
    """One chunk pinned: its GPU Adam (1 s) behind the step, then F0; the others' windows are longer."""
    plan, timeline = played("tide:pins=1,barrier=on", 57, workload=chain(tide_mib=1))
    last = next(s.id for s in plan.steps if s.kind is Kind.COMPUTE and s.moment == len(plan.workload.moments) - 1)
    gpu_adam = next(s for s in plan.steps if s.kind is Kind.GPU_UPDATE)
    assert gpu_adam.id > last
    updates = [s for s in plan.steps if s.kind is Kind.CPU_UPDATE]
    assert any(ref.id >= last for s in updates for ref in s.after if not ref.back)
    assert timeline.iteration_s > 14.0


@pytest.mark.parametrize("barrier", ["off", "on"])
def test_without_streams_nothing_is_streamed(barrier: str) -> None:
    """Where streaming is what the search would do: Adam on the CPU takes 30 s a chunk."""
    for streams in ("on", "off"):
        plan, _ = played(f"optimal:pins=0,streams={streams},barrier={barrier}", 40, adam_s=30.0)
        assert (plan.modes.count("stream") > 0) == (streams == "on"), streams


@pytest.mark.parametrize("policy", ["tide", "static_partition"])
def test_the_others_of_the_family_may_stream_too(policy: str) -> None:
    plan, timeline = played(f"{policy}:pins=0,streams=on", 40, adam_s=30.0)
    assert plan.policy == f"{policy}:pins=0,streams=on"
    assert plan.modes.count("stream") > 0
    assert timeline.iteration_s < seconds(f"{policy}:pins=0", 40, adam_s=30.0)


# eviction


def rereading(tide_mib: list[int]) -> Workload:
    """The chain, with layer 0 read again in F3, as a tied head would."""
    w = chain_workload(4, MIB, forward_s=1.0, tide_bytes=[n * MIB for n in tide_mib])
    uses = sorted(
        (*w.uses, Use(moment=3, tensor=0, kind=UseKind.READ)), key=lambda u: (u.moment, u.kind.value, u.tensor)
    )
    return replace(w, uses=tuple(uses))


def test_lru_gives_up_what_belady_keeps_and_copies_it_again() -> None:
    """6 MiB; during F2 2 MiB are non-model, so one of chunks 0 and 1 can stay. Chunk 0 was used earlier and is needed
    sooner. LRU keeps chunk 1, until in F3 (which needs chunks 0 and 3) chunk 2, used after it, takes the room. Belady
    keeps chunk 0 from F0 to F3 and fetches four chunks and 1 again in B1; LRU fetches chunk 0 again too, in F3."""
    w = rereading([0, 0, 2, 0, 0, 0, 0, 0, 0])
    fetched = {}
    for rule in ("belady", "lru"):
        plan, _ = played(f"tide:eviction={rule},pins=0", 6, workload=w, down_s=0.02)
        fetched[rule] = [s.chunk for s in plan.steps if s.kind is Kind.FETCH]
        assert plan.moved_bytes["h2d"] == len(fetched[rule]) * 2 * MIB
    assert sorted(fetched["belady"], key=str) == [0, 1, 1, 2, 3]
    assert sorted(fetched["lru"], key=str) == [0, 0, 1, 1, 2, 3]


def test_in_a_palindrome_lru_is_belady() -> None:
    """Forward up, backward down: what was used the longest ago is needed last, so both rules copy the same. With
    several micro-batches gradient lists come and go between, and knowing the future is worth something."""
    up: dict[tuple[int, int, str], int] = {}
    for micro_batches in (1, 3):
        for gpu_mib in (4, 6, 8, 10):
            for rule in ("belady", "lru", "fifo"):
                plan, _ = played(f"tide:eviction={rule},pins=0", gpu_mib, workload=chain(micro_batches=micro_batches))
                up[micro_batches, gpu_mib, rule] = plan.moved_bytes["h2d"]
    for gpu_mib in (4, 6, 8, 10):
        assert up[1, gpu_mib, "lru"] == up[1, gpu_mib, "belady"]
        assert up[3, gpu_mib, "belady"] <= min(up[3, gpu_mib, "lru"], up[3, gpu_mib, "fifo"])
    assert up[3, 8, "belady"] < up[3, 8, "lru"]


# several ranks


@TIME_TO_SHRINK
@pytest.mark.parametrize("spec", ["tide:prefetch=none", "optimal:eviction=lru,prefetch=1,adam=fifo,barrier=on"])
def test_every_point_makes_correct_plans_on_several_ranks(spec: str, whole: bool) -> None:
    fitted = 0

    @settings(max_examples=8 if whole else 4)
    @given(jobs(ranks=(2, 3, 4)))
    def holds(job: Drawn) -> None:
        nonlocal fitted
        plan = planned(find_policy(spec), job)
        if plan is None:
            return
        plan.check(job.workload, job.machine)
        play(plan)
        fitted += 1

    holds()
    assert fitted >= 2


def test_on_demand_other_ranks_slices_wait_too() -> None:
    """Two ranks: neither this rank's slice nor the other's comes while anything is computed."""
    two = round_machine(gpu_memory_bytes=12 * MIB, ranks=2, peer_bytes_per_s=MIB)
    plan = find_policy("tide:prefetch=none,pins=0")(chain(), two, EAGER)
    plan.check()
    timeline = play(plan)
    busy = [(s.start_s, s.end_s) for s in timeline.spans if s.queue is Queue.COMPUTE and s.end_s > s.start_s]
    comes = [s for s in timeline.spans if s.kind in (Kind.FETCH, Kind.GATHER)]
    assert {s.kind for s in comes} == {Kind.FETCH, Kind.GATHER}
    for copy in comes:
        assert all(copy.end_s <= start + 1e-9 or copy.start_s >= end - 1e-9 for start, end in busy)
