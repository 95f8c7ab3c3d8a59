"""Whale's balance against shares worked out by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Settings
from pstar_sim.errors import CannotPlan, DoesNotFit
from pstar_sim.policy.registry import find_policy
from pstar_sim.policy.systems.whale import balance, deal, whale
from pstar_sim.testing import chain_workload, round_machine
from pstar_sim.units import MIB
from pstar_sim.workload.workload import Workload

STATES = 14 * 2 * MIB
"""Of two layers of MIB bf16 parameters: 2 + 12 bytes each."""


def job(sequences: int) -> Workload:
    """Two layers; each sequence has 1 MiB of tide and takes 1e9 flops per forward moment."""
    w = chain_workload(2, MIB, flops=sequences * 10**9, tide_bytes=sequences * MIB)
    return replace(w, batch=sequences)


def mixed(speeds: list[float], room_mib: list[int]) -> Machine:
    """GPUs with so many flops per second and so many MiB beside the states."""
    one = round_machine(ranks=len(speeds), peer_bytes_per_s=1e12).ranks[0]
    gpus = [
        replace(
            one.gpu,
            flops_per_s={"bf16": speed * 1e9},
            memory_bytes=STATES + room * MIB,
            usable_bytes=STATES + room * MIB,
        )
        for speed, room in zip(speeds, room_mib)
    ]
    machine = round_machine(ranks=len(speeds), peer_bytes_per_s=1e12)
    return replace(machine, ranks=tuple(replace(r, gpu=gpu) for r, gpu in zip(machine.ranks, gpus)))


@pytest.mark.parametrize(
    ("batch", "speeds", "most", "shares"),
    [
        (12, [2.0, 1.0], [12, 12], (8, 4)),
        (12, [2.0, 1.0], [6, 12], (6, 6)),
        (5, [1.0, 1.0], [5, 5], (3, 2)),
        (7, [100.0, 1.0, 1.0], [7, 7, 7], (5, 1, 1)),  # one at least
        (10, [3.0, 1.0, 1.0], [4, 10, 10], (4, 3, 3)),
        (10, [157.0, 106.0], [10, 10], (6, 4)),  # 5.97 and 4.03
    ],
)
def test_each_sequence_goes_to_the_rank_that_then_ends_first(
    batch: int, speeds: list[float], most: list[int], shares: tuple[int, ...]
) -> None:
    assert deal(batch, speeds, most) == shares


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=2, max_size=3), st.data())
def test_no_other_shares_end_earlier(gpus: list[tuple[int, int]], data: st.DataObject) -> None:
    speeds, most = [float(speed) for speed, _ in gpus], [room for _, room in gpus]
    batch = data.draw(st.integers(len(gpus), sum(most)))
    shares = deal(batch, speeds, most)
    assert sum(shares) == batch and all(1 <= n <= room for n, room in zip(shares, most))
    others = (n for n in itertools.product(*(range(1, room + 1) for room in most)) if sum(n) == batch)
    ends = [max(n / speed for n, speed in zip(each, speeds)) for each in (shares, *others)]
    assert ends[0] == min(ends)


def test_shares_follow_the_speeds_where_there_is_room() -> None:
    assert balance(12, mixed([2, 1], [64, 64]), job, Settings()) == (8, 4)
    assert balance(12, mixed([2, 1, 1], [64, 64, 64]), job, Settings()) == (6, 3, 3)


def test_the_excess_of_a_small_gpu_goes_where_there_is_room() -> None:
    """The fast GPU would take 8 of 12 and has room for 5; of the two slow ones the third has room for 2."""
    assert balance(12, mixed([2, 1], [5, 64]), job, Settings()) == (5, 7)
    assert balance(12, mixed([2, 1, 1.01], [5, 64, 2]), job, Settings()) == (5, 5, 2)


def test_the_excess_may_overflow_the_next_gpu() -> None:
    """By speed 9, 2 and 1. The first has room for 4; the second would take 5 then and has room for 3."""
    assert balance(12, mixed([9, 2, 1], [4, 3, 64]), job, Settings()) == (4, 3, 5)


def test_no_room_is_said_in_sequences() -> None:
    with pytest.raises(DoesNotFit, match=r"whale does not fit: .* 4 sequences, and all GPUs together have room for 8"):
        balance(12, mixed([2, 1], [5, 3]), job, Settings(), schedule="all_on_gpu")
    with pytest.raises(DoesNotFit, match="with 4 sequences"):
        balance(12, mixed([2, 1], [64, -1]), job, Settings(), schedule="all_on_gpu")


def test_the_first_schedule_that_fits() -> None:
    """Whole lists on each GPU leave room for 5 and 3 of 12 sequences. Slices take half of the 24 MiB of states: 12 MiB
    more room, so that the shares are those by speed."""
    machine = mixed([2, 1], [5, 3])
    assert balance(12, machine, job, Settings()) == (8, 4)
    plan = find_policy("whale")(job(8), machine, Settings())
    assert plan.choices["schedule"] == "that of zero3_resident"
    with pytest.raises(DoesNotFit, match="whale:schedule=all_on_gpu does not fit"):
        find_policy("whale:schedule=all_on_gpu")(job(8), machine, Settings())


def test_the_speed_of_the_job_itself() -> None:
    """The second GPU computes as fast, and its memory takes four times as long as that besides."""
    machine = mixed([1, 1.0001], [64, 64])
    first, second = (replace(rank.gpu, launch_s=0.0) for rank in machine.ranks)
    slow = replace(second, hbm_bytes_per_s=1e6)
    machine = replace(machine, ranks=tuple(replace(r, gpu=gpu) for r, gpu in zip(machine.ranks, (first, slow))))

    def streaming(sequences: int) -> Workload:
        w = job(sequences)
        return replace(w, moments=tuple(replace(m, bytes_read=m.flops // 250) for m in w.moments))

    assert balance(10, machine, streaming, Settings()) == (5, 5)
    assert balance(10, machine, streaming, Settings(), speed="seconds") == (8, 2)


def test_every_rank_has_a_sequence() -> None:
    with pytest.raises(CannotPlan, match="1 sequences for 2 ranks"):
        balance(1, mixed([2, 1], [64, 64]), job, Settings())


@pytest.mark.parametrize("schedule", ["all_on_gpu", "zero3_resident", "zero_offload", "tide"])
def test_the_schedule_is_that_of_the_other_policy(schedule: str) -> None:
    machine = mixed([2, 1], [96, 96])
    plan = find_policy(f"whale:schedule={schedule}")(job(8), machine, Settings())
    other = find_policy(schedule)(job(8), machine, Settings())
    assert (plan.steps, plan.initial, plan.modes) == (other.steps, other.initial, other.modes)
    plan.check()
    assert whale(job(8), machine, Settings()).policy == "whale"
