"""Streamed chunks by hand: two layers of 2**20 parameters, bf16, a chunk each.

A working list of 2 MiB, three state lists of 4 MiB. Forward 1 s, backward 2 s a layer; Adam 1 s a chunk on either side;
the link carries 4 MiB/s each way, so a working list takes half a second and a state list one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Kind, Place
from pstar_sim.policy import find_policy
from pstar_sim.policy.family.attempt import attempt
from pstar_sim.policy.family.course import Knobs
from pstar_sim.policy.family.modes import interleave
from pstar_sim.policy.family.pace import period_s
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.points import Point
from pstar_sim.policy.kit.schedule import Modes
from pstar_sim.sim.play import play
from pstar_sim.testing import chain_workload, round_machine
from pstar_sim.units import MIB
from pstar_sim.workload.workload import Workload

EAGER = Settings(update="eager", clip=False, chunk_bytes=2 * MIB)
TIDE = [0, 4, 4, 0, 0]  # MiB: F0 F1 B1 B0 step


machine = partial(round_machine, h2d_bytes_per_s=4 * MIB)


def chain(micro_batches: int = 1) -> Workload:
    return chain_workload(2, MIB, forward_s=1.0, tide_bytes=[n * MIB for n in TIDE], micro_batches=micro_batches)


def streaming(first: frozenset[int], where: Machine, settings: Settings = EAGER, micro_batches: int = 1) -> Plan:
    """The plan that streams these chunks and leaves the others to the CPU, proved."""
    job = Job("by hand", chain(micro_batches), where, settings, Point(streams=True))
    made = attempt(job, Modes(frozenset(), first), Knobs(states_first=True))
    assert made.window.stuck is None
    plan = made.plan()
    plan.check()
    assert period_s(plan) == pytest.approx(play(plan).iteration_s, rel=1e-9)
    return plan


def test_a_streamed_first_chunk_has_no_window() -> None:
    """By CPU Adam chunk 0 takes F0 to B0, 6 s, its gradient down (0.5), Adam (1), up (0.5): 8 s. Streamed, its states
    come while others compute, GPU Adam follows B0 at once (7 s), and its parameters stay on the GPU for ever: they
    need no copy down, and the host has no list for them. Chunk 1 meanwhile: B1 ends at 4 s, down 4.5, Adam 5.5, up 6 s,
    long before the next F1 at 8 s."""
    roomy = machine(gpu_memory_bytes=18 * MIB)
    assert play(streaming(frozenset(), roomy)).iteration_s == pytest.approx(8.0)
    plan = streaming(frozenset({0}), roomy)
    timeline = play(plan)
    assert timeline.iteration_s == pytest.approx(7.0)
    assert timeline.moved_bytes == {"h2d": (12 + 2) * MIB, "d2h": (12 + 2) * MIB}
    assert plan.modes == ("stream", "cpu")
    assert {(r.chunk, r.place) for r in plan.initial if r.list == "param"} == {(0, Place.GPU), (1, Place.HOST)}


def test_states_wait_for_room() -> None:
    """16 MiB: at F1 and B1 (tide 4, both working lists) 8 MiB are left, two state lists. The third comes when B1 has
    ended and its gradient is down: from 4.5 to 5.5 s, before B0 ends at 6 s. With 14 MiB one list fits at B1 (6 MiB
    left); with chunk 1 gone at 4.5 s, and the tide, the others come until 6.5 s: Adam until 7.5 s."""
    assert play(streaming(frozenset({0}), machine(gpu_memory_bytes=16 * MIB))).iteration_s == pytest.approx(7.0)
    assert play(streaming(frozenset({0}), machine(gpu_memory_bytes=14 * MIB))).iteration_s >= 7.0
    assert play(streaming(frozenset({0}), machine(gpu_memory_bytes=14 * MIB))).peak_bytes["gpu"] <= 14 * MIB


def test_a_half_duplex_link_carries_both_ways_in_turn() -> None:
    """Up 14 MiB and down 14 MiB at 3.5 MiB/s: 8 s of the link each iteration, more than the 7 s of computing."""
    slow = partial(machine, gpu_memory_bytes=18 * MIB, h2d_bytes_per_s=3.5 * MIB)
    assert play(streaming(frozenset({0}), slow(duplex=False))).iteration_s >= 8.0 - 1e-9
    assert play(streaming(frozenset({0}), slow())).iteration_s < 8.0


def test_short_dram_is_shared() -> None:
    """Copies of 30 MiB and Adam's 28 MiB through DRAM of 5.8 MiB/s: at least 10 s."""
    assert (
        play(streaming(frozenset({0}), machine(gpu_memory_bytes=18 * MIB, dram_bytes_per_s=5.8 * MIB))).iteration_s
        >= 10.0 - 1e-9
    )


@pytest.mark.parametrize("clip", [False, True])
def test_accumulated_gradients_come_along(clip: bool) -> None:
    """Two micro-batches: grad32 (4 MiB) is fetched too and not written back."""
    settings = replace(EAGER, clip=clip)
    plan = streaming(frozenset({0}), machine(gpu_memory_bytes=40 * MIB), settings, micro_batches=2)
    fetched = [s.list for s in plan.steps if s.kind is Kind.FETCH and s.chunk == 0 and s.list != "param"]
    assert sorted(fetched) == ["grad32", "momentum", "param32", "variance"]
    down = [s.list for s in plan.steps if s.kind is Kind.WRITEBACK and s.chunk == 0]
    assert down.count("grad32") == 0
    assert down.count("param") == (2 if clip else 0)  # with clipping the last gradient is added on the host


def test_behind_a_barrier_the_update_waits_for_the_step() -> None:
    """Chunk 0: GPU Adam after the step moment at 6 s, so that F0 begins at 7 s. Chunk 1: CPU Adam from 6 to 7 s, up
    until 7.5 s, and F1 waits for nothing at 8 s."""
    plan = streaming(frozenset({0}), machine(gpu_memory_bytes=18 * MIB), replace(EAGER, update="step"))
    assert play(plan).iteration_s == pytest.approx(7.0)


def test_optimal_streams_where_nothing_can_be_pinned() -> None:
    """At F1 and B1 a pinned chunk (14 MiB), the other one's working list and the tide take 20 MiB; there are 18."""
    workload, where = chain(), machine(gpu_memory_bytes=18 * MIB)
    plan = find_policy("optimal")(workload, where, EAGER)
    plan.check()
    assert plan.modes[0] == "stream" and "pin" not in plan.modes
    assert play(plan).iteration_s == pytest.approx(7.0)
    assert plan.predictions["policy_iteration_s"] == pytest.approx(7.0)
    assert play(find_policy("tide")(workload, where, EAGER)).iteration_s == pytest.approx(8.0)
    assert play(find_policy("tide:streams=on")(workload, where, EAGER)).iteration_s == pytest.approx(7.0)
    without = find_policy("optimal:streams=off")(workload, where, EAGER)
    assert "stream" not in without.modes
    assert play(without).iteration_s == pytest.approx(8.0)


def test_interleaving_spreads_the_modes_evenly() -> None:
    order, sizes = list(range(12)), [1] * 12
    pinned, streamed = interleave(order, sizes, 3, 4)
    assert (len(pinned), len(streamed)) == (3, 4)
    for run in range(0, 12, 4):  # a third of each in every third of the chunks
        assert sum(run <= c < run + 4 for c in pinned) == 1
        assert 1 <= sum(run <= c < run + 4 for c in streamed) <= 2
    assert interleave(order, sizes, 3, 2, head=2, front=1) == (
        [1, 2, *interleave(order, sizes, 3, 2, 2, 1)[0][2:]],
        interleave(order, sizes, 3, 2, 2, 1)[1],
    )
    assert interleave(order, sizes, 3, 2, head=2, front=1)[1][0] == 0
    big = [100, *[1] * 11]  # a large first chunk is worth a hundred of the others: nobody is owed so much
    assert all(0 not in chosen for chosen in interleave(order, big, 3, 4))
    assert interleave([], [], 3, 4) == ([], [])
