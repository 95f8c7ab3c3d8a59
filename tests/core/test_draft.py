"""A row of a draft becomes a step whose bytes are those of the table in core/step.py; what follows another row at once
is played as a part of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from msgspec import structs

from pstar_sim.catalog.loader import load_machine
from pstar_sim.core.choose import choose
from pstar_sim.core.draft import Charge, Draft, DraftRow
from pstar_sim.core.plan import Settings
from pstar_sim.core.rules import Rates
from pstar_sim.core.step import Kind, Place, Queue, Step
from pstar_sim.errors import PlanError
from pstar_sim.policy import Builder
from pstar_sim.policy.passes.write_plan import step_of
from pstar_sim.testing import chain_workload
from pstar_sim.units import MIB

PARAMS = MIB  # of each of two layers, a chunk each: 2 bytes per parameter in the working list, 4 in a state or a sum


@pytest.mark.parametrize(
    "row, size",
    [
        (DraftRow(Queue.H2D, Kind.FETCH, 0, moment=0), 2 * PARAMS),
        (DraftRow(Queue.D2H, Kind.WRITEBACK, 0, "grad", moment=3), 2 * PARAMS),
        (DraftRow(Queue.H2D, Kind.FETCH, 0, "momentum", moment=3), 4 * PARAMS),
        (DraftRow(Queue.D2H, Kind.DROP, 1, "grad32", moment=2), 4 * PARAMS),
        (DraftRow(Queue.COMPUTE, Kind.ALLOC, 1, "grad", moment=2), 2 * PARAMS),
    ],
)
def test_bytes_come_from_the_table(row: DraftRow, size: int) -> None:
    b = Builder("any", chain_workload(2, PARAMS, micro_batches=2), load_machine("t4"), Settings(chunk_bytes=2 * PARAMS))
    step_of(b, row, ())
    place = Place.GPU if row.kind is Kind.ALLOC else None
    want = Step(id=0, queue=row.queue, kind=row.kind, bytes=size, chunk=row.chunk, list=row.list_name, place=place)
    assert b.steps[0] == structs.replace(want, moment=row.moment)


def test_what_is_summed_over_the_ranks_has_the_bytes_of_all_slices() -> None:
    """On four ranks each holds a quarter of a chunk, a collective moves all of it; Adam's bytes are traffic."""
    machine = load_machine("h100-80x4")
    b = Builder("any", chain_workload(2, PARAMS), machine, Settings(chunk_bytes=2 * PARAMS))
    step_of(b, DraftRow(Queue.NET, Kind.GATHER, 0, "remote", moment=0), ())
    step_of(b, DraftRow(Queue.H2D, Kind.FETCH, 0, moment=0), ())
    step_of(b, DraftRow(Queue.ADAM, Kind.CPU_UPDATE, 0), ())
    gather, fetch, adam = b.steps
    assert gather.bytes == 4 * fetch.bytes == b.layout.whole_bytes(0)
    assert (adam.bytes, adam.moment, adam.list) == (b.cost.cpu_adam_bytes(0), b.uses.last_gradient(0), None)


def test_bytes_of_what_follows_at_once_count_once_for_the_room_of_what_comes_later() -> None:
    """The fetch may not take the 4 bytes that the drop frees: the compute step behind the slow Adam needs them first,
    and the fetched chunk gives them back only in the next iteration."""
    rows = [
        DraftRow(Queue.COMPUTE, Kind.COMPUTE, charge=Charge(seconds=1.0)),
        DraftRow(Queue.D2H, Kind.WRITEBACK, 0, charge=Charge(seconds=1.0), after=((0, 0),), key=(0.0,)),
        DraftRow(Queue.D2H, Kind.DROP, 0, charge=Charge(gpu_free=4), behind=1),
        DraftRow(Queue.ADAM, Kind.CPU_UPDATE, 0, charge=Charge(seconds=5.0), after=((2, 0),), key=(0.0,)),
        DraftRow(Queue.COMPUTE, Kind.COMPUTE, charge=Charge(seconds=1.0, gpu_take=4, gpu_free=4), after=((3, 0),)),
        DraftRow(Queue.H2D, Kind.FETCH, 0, charge=Charge(seconds=1.0, gpu_take=4), after=((2, 0),), key=(0.0,)),
        DraftRow(Queue.COMPUTE, Kind.COMPUTE, charge=Charge(seconds=1.0), after=((5, 0),)),
    ]
    window = choose(Draft(rows, gpu_free_bytes=0, host_free_bytes=0, rates=Rates(dram_bytes_per_s=math.inf)))
    assert (window.iteration_s, window.stuck) == (10.0, None)


@pytest.mark.parametrize(("behind", "after"), [(-1, ()), (2, ()), (0, ()), (1, ((0, 0),))])
def test_a_row_that_cannot_follow_at_once_is_refused(behind: int, after: tuple[tuple[int, int], ...]) -> None:
    rows = [
        DraftRow(Queue.COMPUTE, Kind.COMPUTE, charge=Charge(seconds=1.0), is_position=True),
        DraftRow(Queue.D2H, Kind.WRITEBACK, 0, charge=Charge(seconds=1.0), after=((0, 0),), key=(0.0,)),
        DraftRow(Queue.D2H, Kind.DROP, 0, charge=Charge(gpu_free=4), behind=behind, after=after),
    ]
    with pytest.raises(ValueError, match=f"row 2: behind={behind}; it must be an earlier row of the same queue"):
        choose(Draft(rows, gpu_free_bytes=0, host_free_bytes=0, rates=Rates(dram_bytes_per_s=math.inf)))


def test_a_queue_that_falls_behind_for_ever_is_refused() -> None:
    """Nothing waits for Adam, which takes seven times as long as the moments."""
    rows = [
        DraftRow(Queue.COMPUTE, Kind.COMPUTE, charge=Charge(seconds=1.0), is_position=True),
        DraftRow(Queue.D2H, Kind.WRITEBACK, 0, charge=Charge(seconds=2.0), after=((0, 0),), key=(0.0,)),
        DraftRow(Queue.ADAM, Kind.CPU_UPDATE, 0, charge=Charge(seconds=7.0), after=((1, 0),), key=(0.0,)),
    ]
    with pytest.raises(PlanError, match="a queue falls behind for ever"):
        choose(Draft(rows, gpu_free_bytes=0, host_free_bytes=0, rates=Rates(dram_bytes_per_s=math.inf)))


def test_what_follows_at_once_frees_its_bytes_with_the_row_before() -> None:
    """A copy down of 2 s and its drop, which frees 4 bytes; a fetch takes 4 of the 6 bytes and waits for the drop. The
    window shows the drop by itself, behind the end of the copy."""
    rows = [
        DraftRow(Queue.COMPUTE, Kind.COMPUTE, charge=Charge(seconds=1.0), after=((3, 1),), is_position=True),
        DraftRow(Queue.D2H, Kind.WRITEBACK, 0, charge=Charge(seconds=2.0), after=((0, 0),), key=(0.0,)),
        DraftRow(Queue.D2H, Kind.DROP, 0, charge=Charge(gpu_free=4), behind=1),
        DraftRow(Queue.H2D, Kind.FETCH, 0, charge=Charge(seconds=1.0, gpu_take=4), after=((2, 0),), key=(0.0,)),
    ]
    window = choose(Draft(rows, gpu_free_bytes=2, host_free_bytes=0, rates=Rates(dram_bytes_per_s=math.inf)))
    assert window.iteration_s == 4.0
    assert [(row, ended) for row, _, ended in window.events] == [
        (i, ended) for i in range(4) for ended in (False, True)
    ]
    assert {iteration for _, iteration, _ in window.events} == {0}


def test_gated_rows_wait_for_every_row_of_the_gate() -> None:
    free = Draft((), gpu_free_bytes=0, host_free_bytes=0, rates=Rates(dram_bytes_per_s=math.inf))
    rows = [
        DraftRow(Queue.COMPUTE, Kind.COMPUTE, charge=Charge(seconds=1.0)),
        DraftRow(Queue.D2H, Kind.WRITEBACK, 0, charge=Charge(seconds=1.0), after=((0, 0),), key=(0.0,)),
        DraftRow(Queue.D2H, Kind.DROP, 0, behind=1),
        DraftRow(Queue.ADAM, Kind.CPU_ADD, 0, charge=Charge(seconds=3.0), after=((1, 0),), key=(1.0,)),
        DraftRow(Queue.ADAM, Kind.CPU_UPDATE, 0, charge=Charge(seconds=1.0), key=(0.0,), gated=True),
        DraftRow(Queue.COMPUTE, Kind.GPU_UPDATE, 1, charge=Charge(seconds=2.0), after=((0, 0),), gated=True),
    ]
    gated = choose(replace(free, rows=rows, gate=(2, 3)))
    edges = [structs.replace(row, after=(*row.after, (2, 0), (3, 0))) if row.gated else row for row in rows]
    assert gated.iteration_s == 7.0
    assert list(gated.events) == list(choose(replace(free, rows=edges)).events)
