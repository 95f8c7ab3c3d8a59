"""A row of a draft becomes a step whose bytes are those of the table in core/step.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pstar_sim.catalog.loader import load_machine
from pstar_sim.core.draft import Row
from pstar_sim.core.plan import Settings
from pstar_sim.core.step import Kind, Place, Queue, Step
from pstar_sim.policy import Builder
from pstar_sim.testing import chain_workload
from pstar_sim.units import MIB

PARAMS = MIB  # of each of two layers, a chunk each: 2 bytes a parameter in the working list, 4 in a state or a sum


@pytest.mark.parametrize(
    "row, size",
    [
        (Row(Queue.H2D, Kind.FETCH, 0, moment=0), 2 * PARAMS),
        (Row(Queue.D2H, Kind.WRITEBACK, 0, "grad", moment=3), 2 * PARAMS),
        (Row(Queue.H2D, Kind.FETCH, 0, "momentum", moment=3), 4 * PARAMS),
        (Row(Queue.D2H, Kind.DROP, 1, "grad32", moment=2), 4 * PARAMS),
        (Row(Queue.COMPUTE, Kind.ALLOC, 1, "grad", moment=2), 2 * PARAMS),
    ],
)
def test_bytes_come_from_the_table(row: Row, size: int) -> None:
    b = Builder("any", chain_workload(2, PARAMS, micro_batches=2), load_machine("t4"), Settings(chunk_bytes=2 * PARAMS))
    b.row(row, ())
    place = Place.GPU if row.kind is Kind.ALLOC else None
    want = Step(id=0, queue=row.queue, kind=row.kind, bytes=size, chunk=row.chunk, list=row.list_name, place=place)
    assert b.steps[0] == replace(want, moment=row.moment)


def test_what_is_summed_over_the_ranks_has_the_bytes_of_all_slices() -> None:
    """On four ranks each holds a quarter of a chunk, a collective moves all of it; Adam's bytes are traffic."""
    machine = load_machine("h100-80x4")
    b = Builder("any", chain_workload(2, PARAMS), machine, Settings(chunk_bytes=2 * PARAMS))
    b.row(Row(Queue.NET, Kind.GATHER, 0, "remote", moment=0), ())
    b.row(Row(Queue.H2D, Kind.FETCH, 0, moment=0), ())
    b.row(Row(Queue.ADAM, Kind.CPU_ADAM, 0), ())
    gather, fetch, adam = b.steps
    assert gather.bytes == 4 * fetch.bytes == b.layout.whole_bytes(0)
    assert (adam.bytes, adam.moment, adam.list) == (b.cost.cpu_adam_bytes(0), b.uses.last_gradient(0), None)
