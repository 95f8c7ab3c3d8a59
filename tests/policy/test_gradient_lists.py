"""Gradients of micro-batches and ranks, for policies that write their steps one by one.

Two layers of one chunk each, 2 MiB. Moments of a micro-batch: F0, F1, B1, B0.
"""

from __future__ import annotations

from dataclasses import replace

import pstar_sim as ps
from pstar_sim.core.plan import Settings
from pstar_sim.core.step import Queue
from pstar_sim.policy import Builder
from pstar_sim.policy.passes.step_by_step.gradient_lists import GradientLists
from pstar_sim.testing import chain_workload
from pstar_sim.units import MIB


def builder(*, ranks: int = 1, micro_batches: int = 1, clip: bool = False) -> Builder:
    one = ps.machine("rtx4090")
    machine = replace(one, ranks=(replace(one.ranks[0], batch_share=1 / ranks),) * ranks)
    workload = chain_workload(2, MIB, micro_batches=micro_batches)
    return Builder("mine", workload, machine, Settings(update="step", clip=clip, chunk_bytes=2 * MIB))


def written(b: Builder) -> list[str]:
    """The steps in short: queue, kind, list, what they wait for."""
    return [
        f"{s.queue.value} {s.kind.value} {s.list} {[ref.id for ref in s.after]}"
        for s in b.steps
        if s.queue is not Queue.COMPUTE or s.kind.value != "compute"
    ]


def test_one_micro_batch_on_one_rank_goes_to_the_host() -> None:
    b = builder()
    lists = GradientLists(b, [0, 1])
    assert dict(lists.opens) == dict(lists.closes) == {2: [1], 3: [0]}
    assert (lists.host_list, lists.bytes_of(1), lists.passing_bytes(1)) == ("grad", 2 * MIB, 0)
    lists.open(1, 2)
    assert lists.close(1, 2, [0]) == lists.freed[1] == 2
    assert written(b) == ["compute alloc grad []", "d2h writeback grad [0]", "d2h free grad []"]
    assert lists.all_there() == []


def test_gradients_of_micro_batches_are_added_on_the_host_one_behind_the_other() -> None:
    """The second copy waits for the first sum, whose gradient is where the copy goes."""
    b = builder(micro_batches=2)
    lists = GradientLists(b, [0, 1])
    assert dict(lists.opens) == {2: [1], 3: [0], 6: [1], 7: [0]}
    assert dict(GradientLists(b, [0, 1], last=False).opens) == {2: [1], 3: [0]}
    assert (lists.host_list, lists.passing_bytes(1)) == ("grad32", 2 * MIB)
    for m in (2, 6):
        done = lists.close(1, m, [lists.open(1, m)])
    assert written(b) == [
        "compute alloc grad []", "d2h writeback grad [0]", "d2h free grad []", "adam cpu_add grad [2]",
        "compute alloc grad [2]", "d2h writeback grad [4, 3]", "d2h free grad []", "adam cpu_add grad [6]",
    ]  # fmt: skip
    assert done == lists.added[1] == 7
    assert lists.all_there() == [7]


def test_on_several_ranks_a_gradient_is_whole_until_it_is_summed() -> None:
    """Half of the chunk is this rank's; under clipping every update waits for the latest sum."""
    b = builder(ranks=2, clip=True)
    lists = GradientLists(b, [0, 1])
    assert lists.bytes_of(1) == 2 * MIB
    lists.close(1, 2, [lists.open(1, 2)])
    assert written(b) == [
        "compute alloc grad []", "compute alloc grad_remote []", "net reduce_scatter grad_remote [1]",
        "d2h writeback grad [2]", "d2h free grad []",
    ]  # fmt: skip
    assert lists.all_there() == [2]


def test_what_stays_has_lists_for_the_sum_over_the_ranks_only() -> None:
    alone = GradientLists(builder(micro_batches=2), [0, 1], stay=[1])
    assert alone.chunks == {0} and dict(alone.closes) == {3: [0], 7: [0]}
    b = builder(ranks=2, micro_batches=2)
    lists = GradientLists(b, [0, 1], stay=[1])
    assert lists.chunks == {0, 1} and lists.passing_bytes(1) == 0
    lists.close(1, 2, [lists.open(1, 2)])
    assert written(b)[2:] == ["net reduce_scatter grad_remote [1]", "net free grad [2]"]


def test_one_by_one_nothing_is_waited_for_but_what_is_named() -> None:
    b = builder(micro_batches=2)
    lists = GradientLists(b, [0, 1], one_by_one=True)
    last = lists.close(1, 2, [lists.open(1, 2)])
    assert written(b)[-1] == "adam cpu_add grad [2]"
    lists.close(1, 6, [lists.open(1, 6, [last])])
    assert written(b)[4:6] == ["compute alloc grad [3]", "d2h writeback grad [4]"]
