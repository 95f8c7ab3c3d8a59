"""Sums of gradients on the GPU while states live on the host, by hand: two layers of 2**20 parameters, bf16, a chunk
each, three micro-batches.

A working list of 2 MiB, a sum and three state lists of 4 MiB each. Forward 1 s, backward 2 s per layer and micro-batch;
Adam 1 s per chunk on either side; the link carries 4 MiB/s each way, so a working list takes half a second and a sum
one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from bounded import random_job

from pstar_sim.bounds.bounds import lower_bound
from pstar_sim.core.plan import Plan, Settings, load_plan
from pstar_sim.core.step import Kind, Place
from pstar_sim.errors import PlanError
from pstar_sim.planner.explain import explain
from pstar_sim.policy import find_policy
from pstar_sim.policy.family.attempt import attempt
from pstar_sim.policy.family.course import Course, Knobs
from pstar_sim.policy.family.pace import period_s
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.points import Point
from pstar_sim.policy.kit.schedule import Modes
from pstar_sim.policy.passes import gradient_rows
from pstar_sim.sim.play import play
from pstar_sim.testing import chain_workload, round_machine
from pstar_sim.units import MIB

NONE: frozenset[int] = frozenset()
BOTH = frozenset({0, 1})


def job(
    gpu_mib: int,
    *,
    clip: bool = False,
    layers: int = 2,
    forward_s: float = 1.0,
    gpu_adam_s: float = 1.0,
    ranks: int = 1,
    sums: str = "32-bit",
    micro_batches: int = 3,
    effort: float = 1.0,
) -> Job:
    workload = chain_workload(layers, MIB, forward_s=forward_s, micro_batches=micro_batches)
    settings = Settings(update="step" if clip else "eager", clip=clip, chunk_bytes=2 * MIB, sums=sums, effort=effort)
    hbm = 28 * MIB / gpu_adam_s
    machine = round_machine(
        h2d_bytes_per_s=4 * MIB,
        gpu_memory_bytes=gpu_mib * MIB,
        hbm_bytes_per_s=hbm,
        ranks=ranks,
        peer_bytes_per_s=None if ranks == 1 else 100 * MIB,
    )
    return Job("by hand", workload, machine, settings, Point(streams=True, sums=True))


def planned(where: Job, modes: Modes) -> Plan:
    """The plan with these modes, proved."""
    made = attempt(where, modes, Knobs(linger=False, stay=0.25))  # so that some parameters leave over the border
    assert made.window.stuck is None
    plan = made.plan()
    plan.check()
    assert period_s(plan) == pytest.approx(play(plan).iteration_s, rel=1e-9)
    return plan


@pytest.mark.parametrize("clip", [False, True])
def test_a_sum_for_cpu_adam_goes_down_once(clip: bool) -> None:
    """On the host: each of the three gradients goes down (2 MiB per chunk), and the host adds two of them, or all for
    the norm. On the GPU: the sum goes down (4 MiB per chunk), and the host adds nothing."""
    roomy = job(24, clip=clip)
    apart, summed = (planned(roomy, Modes(NONE, NONE, chunks)) for chunks in (NONE, BOTH))
    assert apart.moved_bytes["d2h"] == 2 * 3 * 2 * MIB
    assert sum(s.kind is Kind.CPU_ADD for s in apart.steps) == (6 if clip else 4)
    assert summed.moved_bytes["d2h"] == 2 * 4 * MIB
    assert not any(s.kind is Kind.CPU_ADD for s in summed.steps)
    assert apart.moved_bytes["h2d"] == summed.moved_bytes["h2d"]


@pytest.mark.parametrize("clip", [False, True])
def test_the_sum_of_a_streamed_chunk_waits_on_the_gpu(clip: bool) -> None:
    """Down: the states of each chunk (12 MiB), and its parameters where they do not stay (2 MiB). With clipping and the
    sum on the host the last gradient goes down in the parameters' list (2 MiB), and they follow. Up: the states alone,
    while a sum on the host comes up with them. The host has no list for a sum that never comes there."""
    roomy = job(40, clip=clip)
    apart, held = (planned(roomy, Modes(NONE, BOTH, chunks)) for chunks in (NONE, BOTH))
    there = {r.chunk for r in held.initial if r.list == "param" and r.place is Place.HOST}  # they leave and come back
    assert held.moved_bytes["d2h"] == (2 * 12 + 2 * len(there)) * MIB and len(there) == (0 if clip else 1)
    assert apart.moved_bytes["d2h"] - held.moved_bytes["d2h"] == 2 * (4 if clip else 2) * 2 * MIB
    assert apart.moved_bytes["h2d"] - held.moved_bytes["h2d"] == 2 * 4 * MIB
    on_host = [{r.chunk for r in p.initial if r.list == "grad32" and r.place is Place.HOST} for p in (apart, held)]
    assert on_host == [BOTH, NONE]
    assert play(held).iteration_s <= play(apart).iteration_s


def test_a_sum_takes_its_room_from_the_first_gradient_to_the_last() -> None:
    """The tightest position has both sums (8 MiB) and a working list: 14 MiB leave 4, without the sums 10 less the list
    of a gradient on its way down (2)."""
    where = job(14)
    assert Course(where, Modes(NONE, NONE, BOTH), Knobs(linger=False)).least_room_bytes == 4 * MIB
    assert Course(where, Modes(NONE), Knobs(linger=False)).least_room_bytes == 10 * MIB
    assert play(planned(where, Modes(NONE, NONE, BOTH))).peak_bytes["gpu"] <= 14 * MIB
    assert Course(job(8), Modes(NONE, NONE, BOTH), Knobs(linger=False)).least_room_bytes < 0


@pytest.mark.parametrize("clip", [False, True])
def test_the_first_of_two_gradients_waits_in_half_the_room_of_a_sum(clip: bool) -> None:
    """Both chunks hold a gradient (2 MiB) or a sum (4 MiB) between the backward passes. The link carries the same, and
    the host adds nothing."""
    where = job(14, clip=clip, micro_batches=2)
    waiting, summed = (Modes(NONE, BOTH, BOTH, waiting=chunks) for chunks in (BOTH, NONE))
    courses = [Course(where, modes, Knobs(linger=False)) for modes in (waiting, summed)]
    held = [gradient_rows.held(c.job, c.modes, c.sums, c.at, len(c.positions)) for c in courses]
    assert [max(sizes) for sizes in held] == [4 * MIB, 8 * MIB]
    plans = [planned(job(28, clip=clip, micro_batches=2), modes) for modes in (waiting, summed)]
    assert plans[0].moved_bytes == plans[1].moved_bytes
    assert not any(s.kind is Kind.CPU_ADD for plan in plans for s in plan.steps)
    names = [{s.list for s in plan.steps if s.kind is Kind.ALLOC and s.place is Place.GPU} for plan in plans]
    assert "grad" in names[0] and "grad32" not in names[0] and "grad32" in names[1]


@pytest.mark.parametrize("clip", [False, True])
def test_sums_that_spill_go_down_and_come_up_between_micro_batches(clip: bool) -> None:
    """9 MiB: a working list, a sum, and 3 MiB for nothing else. Up: parameters once (2 MiB per chunk, they stay from
    forward to backward in turn) and each sum (4 MiB) before the second and the third micro-batch. Down: each sum three
    times. With 12 MiB both sums and two working lists have room, and each sum goes down once."""
    tight, roomy = (
        planned(job(mib, clip=clip), Modes(NONE, NONE, BOTH, some)) for mib, some in ((9, BOTH), (12, NONE))
    )
    assert tight.moved_bytes["h2d"] == 2 * (2 + 2 * 4) * MIB
    assert tight.moved_bytes["d2h"] == 2 * 3 * 4 * MIB
    assert play(tight).peak_bytes["gpu"] <= 9 * MIB
    assert roomy.moved_bytes["h2d"] == 2 * 2 * MIB
    assert roomy.moved_bytes["d2h"] == 2 * 4 * MIB
    for plan in (tight, roomy):
        assert not any(step.kind is Kind.CPU_ADD for step in plan.steps)
    text = explain(tight, play(tight), width=200)
    assert "and are on the host between micro-batches" in text


def test_behind_a_barrier_the_sum_of_a_streamed_chunk_may_wait_on_the_host() -> None:
    """20 MiB: the states of one chunk (12 MiB), its sum and its list leave no room for the other chunk's sum. That of
    the second chunk goes down behind its last gradient (moment 10) and comes up with the states. Eager, none waits."""
    parked = planned(job(20, clip=True), Modes(NONE, BOTH, BOTH, frozenset({1})))
    eager = planned(job(20), Modes(NONE, BOTH, BOTH, BOTH))
    downs = [
        [
            (step.chunk, step.moment)
            for step in sorted(plan.steps, key=lambda step: (step.chunk or 0, step.moment or 0))
            if step.kind is Kind.WRITEBACK and step.list == "grad32"
        ]
        for plan in (parked, eager)
    ]
    assert downs == [[(1, 2), (1, 6), (1, 10)], [(0, 3), (0, 7), (1, 2), (1, 6)]]


def test_sums_in_16_bits_take_half(tmp_path: Path) -> None:
    """A sum of 2 MiB, 6 bytes of traffic per parameter and addition on the host instead of 10."""
    halved = job(24, sums="16-bit")
    on_gpu, on_host = (planned(halved, Modes(NONE, NONE, chunks)) for chunks in (BOTH, NONE))
    assert on_gpu.moved_bytes["d2h"] == 2 * 2 * MIB
    assert {step.bytes for step in on_host.steps if step.kind is Kind.CPU_ADD} == {6 * MIB}
    assert play(on_gpu).peak_bytes["gpu"] == play(planned(job(24), Modes(NONE, NONE, BOTH))).peak_bytes["gpu"] - 4 * MIB
    bound = lower_bound(halved.workload, halved.machine, halved.settings, halved.layout)
    assert bound.method == "joint LP" and not bound.notes
    assert bound.seconds <= play(on_gpu).iteration_s
    assert "gradients added in bf16" in explain(on_gpu, play(on_gpu))
    on_gpu.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").layout == on_gpu.layout
    exact = replace(on_gpu, settings=replace(on_gpu.settings, sums="32-bit"))
    exact.save(tmp_path / "other.json")
    with pytest.raises(PlanError, match=r"layout.sum_bytes' is 2; with sums='32-bit' it must be 4"):
        load_plan(tmp_path / "other.json")
    wide = replace(on_gpu, workload=replace(on_gpu.workload, dtype="fp32"))
    with pytest.raises(PlanError, match=r"16 bits are for 16-bit models; chain-.* is fp32, whose gradients have 32"):
        wide.check()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_ranks_that_add_up_in_16_bits_send_half(dtype: str) -> None:
    """Two chunks of 2**20 parameters each, summed over three micro-batches and then over the ranks."""
    workload, machine = chain_workload(2, MIB, dtype=dtype, micro_batches=3), job(64, ranks=2).machine
    sent = {}
    for sums in ("32-bit", "16-bit"):
        plan = find_policy("all_on_gpu")(workload, machine, Settings(sums=sums, chunk_bytes=2 * MIB))
        plan.check()
        assert lower_bound(workload, machine, plan.settings, plan.layout).seconds <= play(plan).iteration_s
        sent[sums] = [step.bytes for step in plan.steps if step.kind is Kind.REDUCE_SCATTER]
    assert sent == {"32-bit": [4 * MIB] * 2, "16-bit": [2 * MIB] * 2}


def test_sums_are_in_16_or_32_bits() -> None:
    with pytest.raises(PlanError, match="sums = '8-bit': it must be one of 32-bit, 16-bit"):
        Settings(sums="8-bit")


def test_the_search_finds_them_and_explain_says_where() -> None:
    """Twelve layers, 3.6 s of computing per micro-batch: copies down of all gradients take 3 x 12 x 0.5 s."""
    where = job(100, layers=12, forward_s=0.1, gpu_adam_s=0.01, effort=0.2)
    plans = {
        word: find_policy(f"optimal:sums={word}")(where.workload, where.machine, where.settings)
        for word in ("on", "off")
    }
    assert plans["on"].predictions["policy_iteration_s"] < plans["off"].predictions["policy_iteration_s"]
    for plan in plans.values():
        plan.check()
    text = explain(plans["on"], play(plans["on"]), width=200)
    assert "gradients of 3 micro-batches add up" in text
    assert "on the GPU" in text.partition("micro-batches add up\n")[2].splitlines()[0]
    tide = find_policy("tide:sums=on")(where.workload, where.machine, where.settings)
    tide.check()
    assert "stream" not in tide.modes


def test_where_nothing_asks_for_a_barrier_one_of_the_plans_own_makes_room_for_sums() -> None:
    w, machine, settings = random_job(Random("options 413"))
    settings = replace(settings, sums="16-bit")
    assert settings.update == "eager" and w.micro_batches == 2
    plan, eager = (find_policy(name)(w, machine, settings) for name in ("optimal", "tide"))
    plan.check()
    assert plan.settings == settings and "barrier" in plan.choices
    assert play(plan).iteration_s < 0.9 * play(eager).iteration_s


def test_a_barrier_of_the_plans_own_leaves_out_no_rival() -> None:
    w, machine, settings = random_job(Random("review 35"))
    settings = replace(settings, update="eager", clip=False, effort=0.1)
    best, rival = (play(find_policy(name)(w, machine, settings)) for name in ("optimal", "static_partition"))
    assert best.iteration_s <= rival.iteration_s * 1.0001


@pytest.mark.parametrize("clip", [False, True])
def test_on_two_gpus_each_gradient_is_summed_over_them_and_the_slice_of_the_sum_goes_down_once(clip: bool) -> None:
    """A slice of a gradient is 1 MiB and one of a sum 2 MiB. On the GPU the sum is added to by a reduce-scatter."""
    roomy = job(24, clip=clip, ranks=2)
    apart, summed = (planned(roomy, Modes(NONE, NONE, chunks)) for chunks in (NONE, BOTH))
    for plan, down, adds in ((apart, 2 * 3 * MIB, 6 if clip else 4), (summed, 2 * 2 * MIB, 0)):
        assert plan.moved_bytes["d2h"] == down
        assert sum(s.kind is Kind.CPU_ADD for s in plan.steps) == adds
        assert sum(s.kind is Kind.REDUCE_SCATTER for s in plan.steps) == 2 * 3
    words = explain(summed, play(summed), width=200)
    assert "gradients of 3 micro-batches, each summed over the GPUs first, add up" in words
    assert "of 2 chunks (4.194 MB as a sum) on the GPU, and go to the host once, for the update" in words


@pytest.mark.parametrize("clip", [False, True])
def test_on_two_gpus_sums_wait_for_their_states_or_spill(clip: bool) -> None:
    """Streamed chunks: the sum waits on the GPU. With room for little else, sums go down and come up in between."""
    where = job(26, clip=clip, ranks=2)
    held = planned(where, Modes(NONE, BOTH, BOTH))
    assert not any(s.list == "grad32" and s.kind in (Kind.WRITEBACK, Kind.FETCH) for s in held.steps)
    every = frozenset(range(4))
    spilt = planned(job(9, clip=clip, layers=4, ranks=2), Modes(NONE, NONE, every, every))
    ups = [s.chunk for s in spilt.steps if s.kind is Kind.FETCH and s.list == "grad32"]
    assert sorted(ups) == [0, 0, 1, 1, 2, 2, 3, 3]  # before the second micro-batch and the third


def test_on_two_gpus_the_search_finds_them() -> None:
    where = job(24, layers=12, forward_s=0.1, gpu_adam_s=0.01, ranks=2, effort=0.2)
    seconds = {}
    for word in ("on", "off"):
        plan = find_policy(f"optimal:sums={word}")(where.workload, where.machine, where.settings)
        plan.check()
        seconds[word] = play(plan).iteration_s
        assert seconds[word] >= lower_bound(where.workload, where.machine, where.settings, plan.layout).seconds
    assert seconds["on"] < seconds["off"] * 0.95
