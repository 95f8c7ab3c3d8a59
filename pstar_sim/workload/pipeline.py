"""A stage's micro-batches in the order of a schedule.

[Note: schedules] A cell is one pass of a micro-batch through a part of the model. "gpipe" runs all forward passes, then
the backward passes; "1f1b" runs p - r - 1 forward passes ahead on stage r of p, then both in turns, then the backward
passes left, so at most p - r micro-batches are in flight. A backward takes the oldest micro-batch.

With "interleaved" a stage has v parts of the model: part k of stage r is the (k p + r)-th of p v. In groups of p
micro-batches each part runs all of a group, backward the last part first. 2 (p - r - 1) + (v - 1) p passes run ahead,
so one more at most are in flight, each of a v-th of the stage.
Source: Huang et al., 2019 (GPipe); Narayanan et al., 2019 and 2021 (PipeDream-Flush, Megatron-LM).

[Note: room for borders] Inputs may arrive during the cell before, and outputs leave during the next: their peaks count
the bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from pstar_sim.errors import ModelError
from pstar_sim.workload.mixing import others_of
from pstar_sim.workload.orders import Order
from pstar_sim.workload.tape import Crossing
from pstar_sim.workload.workload import Border, Moment, Phase, Tensor, Use, Workload, copy_moment, repeat_micro_batch

INTERLEAVED = "interleaved"
SCHEDULES = ("1f1b", "gpipe", INTERLEAVED)


class Cell(NamedTuple):
    """One pass of one micro-batch through a part of the stage ([Note: schedules])."""

    micro_batch: int
    backward: bool
    part: int = 0


Part = tuple[Workload, Sequence[Crossing]]
"""One micro-batch of a part of the model, and what crosses its borders."""
_Moments = tuple[Sequence[Moment], Sequence[Crossing]]


def cells_of(schedule: str, stages: int, micro_batches: int, parts: int = 1) -> list[list[Cell]]:
    """Of each stage.

    parts: of a stage.

    Raises ModelError for an unknown schedule, and for micro-batches that interleaved stages do not run.
    """
    if schedule not in SCHEDULES:
        raise ModelError(f"schedule is {schedule!r}; it is one of {', '.join(SCHEDULES)}")
    if parts > 1 and micro_batches % stages:
        near = max(1, round(micro_batches / stages)) * stages
        raise ModelError(
            f"schedule={schedule}: {micro_batches} micro-batches are no multiple of {stages} stages; {near} would be"
        )
    ahead = {
        "1f1b": range(stages, 0, -1),
        "gpipe": [micro_batches] * stages,
        INTERLEAVED: range(2 * stages + (parts - 1) * stages - 1, 0, -2),
    }[schedule]
    return [_cells(min(ahead[stage], micro_batches * parts), stages, micro_batches, parts) for stage in range(stages)]


def _cells(ahead: int, stages: int, micro_batches: int, parts: int) -> list[Cell]:
    def cell(n: int, backward: bool) -> Cell:
        if parts == 1:
            return Cell(n, backward)
        group, within = divmod(n, stages * parts)
        part, own = divmod(within, stages)
        return Cell(group * stages + own, backward, parts - 1 - part if backward else part)

    count = micro_batches * parts
    cells = [cell(n, False) for n in range(ahead)]
    for n in range(count):
        cells.append(cell(n, True))
        cells += [cell(n + ahead, False)] if n + ahead < count else []
    return cells


def in_flight(cells: Sequence[Cell]) -> int:
    """Most passes through a part that wait for their backward."""
    return max(accumulate(-1 if cell.backward else 1 for cell in cells))


def in_schedule(parts: Sequence[Part], cells: Sequence[Sequence[Cell]], stage: int) -> Workload:
    """Stage `stage`'s job, depth-first if each forward comes right before its own backward.

    parts: those of the stage.
    cells: of all stages.
    """
    mine = cells[stage]
    if _one_by_one(parts[0][1], mine):
        return repeat_micro_batch(parts[0][0], len(mine) // 2)
    turns = _in_turns([(one.moments, crossings) for one, crossings in parts], cells, stage)
    borders = sorted(turns.borders, key=lambda b: (b.behind, not b.receives, _ONCE.get(b.what, 0)))
    begins = list(accumulate((len(one.tensors) for one, _ in parts), initial=0))
    passes = [_passes(one.moments[:-1]) for one, _ in parts]
    used = [[[use for use in one.uses if use.moment in run] for run in runs] for (one, _), runs in zip(parts, passes)]
    uses, first = list[Use](), 0
    for _, backward, part in mine:
        row = passes[part][backward]
        uses += [
            Use(moment=first + use.moment - row[0], tensor=begins[part] + use.tensor, kind=use.kind)
            for use in used[part][backward]
        ]
        first += len(row)
    return replace(
        parts[0][0],
        micro_batches=1 + turns.owners[-1],
        tensors=parts[0][0].tensors if len(parts) == 1 else _tensors([one for one, _ in parts], begins),
        moments=tuple(map(copy_moment, turns.moments, turns.start, turns.peak, turns.end, turns.owners)),
        uses=tuple(uses),
        borders=tuple(borders),
        order=Order.PIPELINED,
    )


def peak_in_schedule(parts: Sequence[_Moments], cells: Sequence[Sequence[Cell]], stage: int) -> int:
    """Non-model bytes of `in_schedule`'s job, at most."""
    alone = _one_by_one(parts[0][1], cells[stage])
    return max([m.peak_bytes for m in parts[0][0]] if alone else _in_turns(parts, cells, stage).peak)


def _one_by_one(crossings: Sequence[Crossing], mine: Sequence[Cell]) -> bool:
    return not crossings and all(mine[n].micro_batch == mine[n + 1].micro_batch for n in range(0, len(mine), 2))


class _Turns(NamedTuple):
    """By moment, with the borders' bytes."""

    moments: list[Moment]
    owners: list[int]
    start: list[int]
    peak: list[int]
    end: list[int]
    borders: list[Border]


def _in_turns(parts: Sequence[_Moments], cells: Sequence[Sequence[Cell]], stage: int) -> _Turns:
    mine, bodies = cells[stage], [moments[:-1] for moments, _ in parts]
    passes = [_passes(body) for body in bodies]
    rows = [passes[cell.part][cell.backward] for cell in mine]
    first = list(accumulate((len(row) for row in rows), initial=0))  # moment of each cell, then the optimizer step
    count = 1 + max(cell.micro_batch for cell in mine)
    once = (c for _, crossings in parts for c in crossings if c.counted and c.what in _ONCE)
    again = (count - 1) * sum(crossing.bytes for crossing in once)  # what all micro-batches share is counted once
    runs = [((cell.micro_batch, cell.part), [bodies[cell.part][m] for m in row]) for cell, row in zip(mine, rows)]
    made = _Turns([], [], [], [], [], [])
    for ((own, _), run), others in zip(runs, others_of(runs)):
        made.moments.extend(run)
        made.owners.extend([own] * len(run))
        made.start.extend([max(0, m.start_bytes + others) - again for m in run])
        made.peak.extend([max(0, m.peak_bytes + others) - again for m in run])
        made.end.extend([max(0, m.end_bytes + others) - again for m in run])
    made.moments.append(parts[0][0][-1])
    made.owners.append(count - 1)
    last = made.end[-1]
    for sizes in (made.start, made.peak, made.end):
        sizes.append(last)
    turns = {"each": range(count), "first": (0,), "last": (count - 1,)}
    arrivals = _arrivals(cells, stage) if len(parts) > 1 else {}
    found = [
        (crossing, n, row[0])
        for n, (cell, row) in enumerate(zip(mine, rows))
        for crossing in parts[cell.part][1]
        if crossing.moment in row and cell.micro_batch in turns[crossing.turn]
    ]
    # Among those behind one moment, receives come in the order in which other stages make them.
    found.sort(key=lambda row: arrivals.get((row[1], row[0].what), _Arrival(0, 0)).made if row[0].receives else 0)
    for crossing, n, begin in found:
        border = _border(crossing, n, first, begin, cells, stage, arrivals.get((n, crossing.what)))
        made.borders.append(border)
        _add_border(made, crossing, border)
    return made


def _passes(body: Sequence[Moment]) -> tuple[range, range]:
    turn = next(i for i, m in enumerate(body) if m.phase is not Phase.FWD)
    return range(turn), range(turn, len(body))


def _tensors(parts: Sequence[Workload], begins: Sequence[int]) -> tuple[Tensor, ...]:
    """Parts have optimizer groups of their own: a chunk of two would get a micro-batch's gradients at two times."""
    groups = 1 + max(t.group for one in parts for t in one.tensors)
    return tuple(
        replace(t, group=n * groups + t.group, tied_to=None if t.tied_to is None else begins[n] + t.tied_to)
        for n, one in enumerate(parts)
        for t in one.tensors
    )


class _Arrival(NamedTuple):
    made: int
    during: int


def _arrivals(cells: Sequence[Sequence[Cell]], stage: int) -> dict[tuple[int, str], _Arrival]:
    """(cell that needs it, what) -> when another stage has made it, if a backward takes two forwards and links no time.
    A later receive would hold up all that the peer sends."""
    stages, parts = len(cells), 1 + max(cell.part for cell in cells[0])
    end: dict[tuple[int, int, bool], int] = {}  # (part of the model, micro-batch, backward)
    begin: list[list[int]] = [[] for _ in cells]
    moved = True
    while moved:
        moved = False
        for r, own in enumerate(cells):
            while len(begin[r]) < len(own):
                u, backward, k = own[n := len(begin[r])]
                s = k * stages + r
                needs = s + 1 if backward else s - 1
                if 0 <= needs < stages * parts and (needs, u, backward) not in end:
                    break
                clear = end[_key(own[n - 1], stages, r)] if n else 0
                begin[r].append(max(clear, end.get((needs, u, backward), 0)))
                end[s, u, backward] = begin[r][n] + 1 + backward
                moved = True
    arrivals = {}
    for n, (u, backward, k) in enumerate(cells[stage]):
        s = k * stages + stage
        made = end.get((s + 1 if backward else s - 1, u, backward))
        if made is not None:
            during = min(bisect_right(begin[stage], made), n) - 1
            arrivals[n, "gradients" if backward else "activations"] = _Arrival(made, max(0, during))
    return arrivals


def _key(cell: Cell, stages: int, stage: int) -> tuple[int, int, bool]:
    return cell.part * stages + stage, cell.micro_batch, cell.backward


_ONCE = {"tied weights": -1, "tied gradients": 1}
"""What crosses once per iteration -> its place beside what crosses behind the same moment."""
_FORWARD = ("activations", "tied weights")
"""What an earlier stage sends to a later one."""


def _border(
    crossing: Crossing,
    n: int,
    first: Sequence[int],
    begin: int,
    cells: Sequence[Sequence[Cell]],
    stage: int,
    arrival: _Arrival | None,
) -> Border:
    """begin: moment of the pass in its part.
    arrival: None: during the cell before.
    """
    stages, cell, several = len(cells), cells[stage][n], any(other.part for other in cells[stage])
    here = first[n] + crossing.moment - begin
    if crossing.what == "tied gradients" and several and not crossing.receives:
        behind, until = first[-1] - 1, first[-1]  # they are large, and hold up no other gradients
    elif not crossing.receives:
        behind, until = here, first[min(n + 2, len(first) - 1)]
    elif arrival is not None:
        behind, until = first[arrival.during], here + 1
    elif crossing.what in _ONCE:
        behind, until = 0 if crossing.what in _FORWARD else first[n], here + 1
    else:
        behind, until = min(here, first[max(0, n - 1)]), here + 1
    ahead = (crossing.what in _FORWARD) != crossing.receives  # whether the peer comes behind this stage
    far = stages - 1 if ahead else 0
    own = cell.part * stages + stage
    return Border(
        peer=far if crossing.what in _ONCE else (stage + 1 if ahead else stage - 1) % stages,
        receives=crossing.receives,
        what=crossing.what,
        micro_batch=cell.micro_batch,
        bytes=crossing.bytes,
        behind=behind,
        until=until,
        part=(own if ahead else own - 1) if several and crossing.what not in _ONCE else 0,
    )


def _add_border(made: _Turns, crossing: Crossing, border: Border) -> None:
    begin, over = border.behind, border.until
    if crossing.counted and crossing.what in _ONCE:
        return  # the peaks of all moments count the bytes
    if crossing.counted and border.receives:
        over -= 1  # from here on the tape counts them
    for m in range(begin, over + 1) if begin != over else ():
        made.start[m] += border.bytes if m > begin else 0
        made.peak[m] += border.bytes if m > begin or border.receives or not crossing.counted else 0
        made.end[m] += border.bytes if m < over else 0
