"""A stage's micro-batches in the order of a schedule.

[Note: schedules] A cell is one pass of a micro-batch through a part of the model. "gpipe" runs all forward passes, then
the backward passes; "1f1b" runs p - r - 1 forward passes ahead on stage r of p, then both in turns, then the backward
passes left, so at most p - r micro-batches are in flight. A backward always takes the oldest micro-batch.
Source: Huang et al., 2019 (GPipe); Narayanan et al., 2019 and 2021 (PipeDream-Flush, Megatron-LM).

[Note: room for borders] What a cell needs may arrive during the cell before, and what it made may leave during the
next: their peaks count the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from pstar_sim.errors import ModelError
from pstar_sim.workload.mixing import levelled
from pstar_sim.workload.orders import Order
from pstar_sim.workload.tape import Crossing
from pstar_sim.workload.workload import Border, Moment, Phase, Use, Workload, copy_moment, repeat_micro_batch

SCHEDULES = ("1f1b", "gpipe")


class Cell(NamedTuple):
    """One pass of one micro-batch ([Note: schedules])."""

    micro_batch: int
    backward: bool


def cells_of(schedule: str, stage: int, stages: int, micro_batches: int) -> list[Cell]:
    """Raises ModelError for an unknown schedule."""
    if schedule not in SCHEDULES:
        raise ModelError(f"schedule is {schedule!r}; it is one of {', '.join(SCHEDULES)}")
    ahead = micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage)
    cells = [Cell(u, False) for u in range(ahead)]
    for u in range(micro_batches):
        cells.append(Cell(u, True))
        cells += [Cell(u + ahead, False)] if u + ahead < micro_batches else []
    return cells


def in_schedule(
    workload: Workload, crossings: Sequence[Crossing], cells: Sequence[Cell], stage: int, stages: int
) -> Workload:
    """Stage `stage`'s job: `workload`, one micro-batch of it, in the order of `cells`, depth-first if each forward
    comes right before its own backward.

    crossings: at the micro-batch's borders to other stages.
    """
    if not crossings and all(cells[n].micro_batch == cells[n + 1].micro_batch for n in range(0, len(cells), 2)):
        return repeat_micro_batch(workload, len(cells) // 2)
    body = workload.moments[:-1]
    turn = next(i for i, m in enumerate(body) if m.phase is not Phase.FWD)
    passes = range(turn), range(turn, len(body))
    rows = [passes[cell.backward] for cell in cells]
    first = list(accumulate((len(row) for row in rows), initial=0))  # moment of each cell, then the optimizer step
    count = 1 + max(cell.micro_batch for cell in cells)
    held = sum(crossing.bytes for crossing in crossings if crossing.counted and crossing.what in _ONCE)
    again = (count - 1) * held  # what all micro-batches share is counted once
    levels = levelled([(cell.micro_batch, [body[m] for m in row]) for cell, row in zip(cells, rows)])
    owners = (cell.micro_batch for cell, row in zip(cells, rows) for _ in row)
    moments = [
        copy_moment(m, m.start_bytes - again, m.peak_bytes - again, m.end_bytes - again, own)
        for m, own in zip(levels, owners)
    ]
    last = moments[-1].end_bytes
    moments.append(copy_moment(workload.moments[-1], last, last, last, count - 1))
    turns = {"each": range(count), "first": (0,), "last": (count - 1,)}
    crossed = [
        (crossing, _border(crossing, cell, n, first, passes[cell.backward], stage, stages))
        for n, cell in enumerate(cells)
        for crossing in crossings
        if crossing.moment in passes[cell.backward] and cell.micro_batch in turns[crossing.turn]
    ]
    moments = _with_borders(moments, crossed)
    borders = sorted((border for _, border in crossed), key=lambda b: (b.behind, not b.receives, _ONCE.get(b.what, 0)))
    uses = [
        Use(moment=first[n] + use.moment - row[0], tensor=use.tensor, kind=use.kind)
        for n, row in enumerate(rows)
        for use in workload.uses
        if use.moment in row
    ]
    return replace(
        workload,
        micro_batches=count,
        moments=tuple(moments),
        uses=tuple(uses),
        borders=tuple(borders),
        order=Order.PIPELINED,
    )


_ONCE = {"tied weights": -1, "tied gradients": 1}
"""What crosses once per iteration -> its place beside what crosses behind the same moment."""
_FORWARD = ("activations", "tied weights")
"""What an earlier stage sends to a later one."""


def _border(
    crossing: Crossing, cell: Cell, n: int, first: Sequence[int], moments: range, stage: int, stages: int
) -> Border:
    here = first[n] + crossing.moment - moments[0]
    if not crossing.receives:
        behind, until = here, first[min(n + 2, len(first) - 1)]
    elif crossing.what in _ONCE:
        behind, until = first[n], here + 1
    else:
        behind, until = min(here, first[max(0, n - 1)]), here + 1
    ahead = (crossing.what in _FORWARD) != crossing.receives  # whether the peer comes behind this stage
    far = stages - 1 if ahead else 0
    return Border(
        peer=far if crossing.what in _ONCE else stage + 1 if ahead else stage - 1,
        receives=crossing.receives,
        what=crossing.what,
        micro_batch=cell.micro_batch,
        bytes=crossing.bytes,
        behind=behind,
        until=until,
    )


def _with_borders(moments: Sequence[Moment], crossed: Sequence[tuple[Crossing, Border]]) -> list[Moment]:
    start, peak, end = ([0] * len(moments) for _ in range(3))
    for crossing, border in crossed:
        begin, over = border.behind, border.until
        if crossing.counted and crossing.what in _ONCE:
            continue  # the peaks of all moments count the bytes
        if crossing.counted and border.receives:
            over -= 1  # from here on the tape counts them
        if begin == over:
            continue
        for m in range(begin, over + 1):
            start[m] += border.bytes if m > begin else 0
            peak[m] += border.bytes if m > begin or border.receives or not crossing.counted else 0
            end[m] += border.bytes if m < over else 0
    return [
        copy_moment(m, m.start_bytes + a, m.peak_bytes + b, m.end_bytes + c) if a or b or c else m
        for m, a, b, c in zip(moments, start, peak, end)
    ]
