"""On several ranks: others' slices come before a use and go behind it, and each last gradient is summed."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from pstar_sim.core.step import Kind, Queue
from pstar_sim.policy.kit.blocks import Stretch
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.passes.draft_rows import After, DraftRows
from pstar_sim.policy.passes.floors import Floors

# The earliest start of a gather before its use, in multiples of the gather's own seconds. Without a limit, whole chunks
# take the room that states on their way need.
GATHERS_AHEAD = 20


def room(job: Job, whole: Mapping[int, Sequence[Stretch]], count: int) -> list[int]:
    """Bytes of others' slices at each position, small chunks' always."""
    held = [0] * count
    for c, stretches in whole.items():
        if c not in job.small:
            for stretch in stretches:
                for n in range(stretch.first, stretch.last + 1):
                    held[n] += job.remote[c]
    return held


def reduce(rows: DraftRows, c: int, list_name: str, moment: int, n: int, after: After) -> int:
    """Frees the others' slices of the gradient. Returns its row."""
    return rows.add(Queue.NET, Kind.REDUCE_SCATTER, c, list_name, moment, after=after, key=(float(n), -1.0))


class Collectives:
    """A gather for each stretch that needs all slices, and the last gradient's sum behind the last (gradient_rows.py's,
    if all micro-batches' add up on the GPU)."""

    def __init__(self, rows: DraftRows, floors: Floors) -> None:
        self._rows = rows
        self._floors = floors
        # chunk -> its first gather, and whether this rank's slice was fetched for this gather
        self._first_gathers: dict[int, tuple[int, bool]] = {}
        self._ends_s = list(accumulate(position.seconds for position in rows.schedule.positions))
        self._earlier: list[tuple[int, int]] = []  # (gather, position of the previous iteration that it waits for)
        self._gathers_before: defaultdict[int, list[int]] = defaultdict(list)  # position -> chunks
        self._drops_behind: defaultdict[int, list[int]] = defaultdict(list)
        self._sums_behind: defaultdict[int, list[int]] = defaultdict(list)
        for c, stretches in rows.schedule.whole.items():
            for stretch in stretches:
                self._gathers_before[stretch.first].append(c)
                self._drops_behind[stretch.last].append(c)
            if rows.schedule.job.uses.updated(c) and not rows.schedule.adds_up(c):
                self._drops_behind[stretches[-1].last].remove(c)
                self._sums_behind[stretches[-1].last].append(c)

    @property
    def before_at(self) -> Iterable[int]:
        return {*self._gathers_before, self._rows.schedule.at[-1]} if self._gathers_before else ()

    @property
    def behind_at(self) -> Iterable[int]:
        return {*self._drops_behind, *self._sums_behind}

    def before(self, n: int) -> Sequence[int]:
        waits = [self._gather(c, n) for c in self._gathers_before.get(n, ())]
        if n == self._rows.schedule.at[-1]:  # the optimizer step, by which the gradients of all ranks are summed
            waits += self._rows.sum_of.values()
        return waits

    def _gather(self, c: int, n: int) -> int:
        rows = self._rows
        at, row = rows.fetch_of.get(c, (-1, -1))
        fetched = at == n
        floor = self._ahead(c, n)
        after: After = (*(((row, 0),) if fetched else ()), *self._floors.of(c, n))
        if floor >= 0:
            after += ((rows.last_rows[floor], 0),)
        if c in rows.others_release_of:
            after += ((rows.others_release_of[c], 0),)
        moment, deadline = rows.moment_of(n), (float(n), float(c))
        gather = rows.add(Queue.NET, Kind.GATHER, c, "remote", moment, after=after, key=deadline, use=n)
        self._floors.serve(c, n, gather)
        if floor < 0:
            self._earlier.append((gather, floor))
        self._first_gathers.setdefault(c, (gather, fetched))
        return gather

    def _ahead(self, c: int, n: int) -> int:
        """What ends before the gather for position n, so that others' slices take room only as long as they must;
        negative in the previous iteration."""
        job, ends, count = self._rows.schedule.job, self._ends_s, len(self._ends_s)
        begin_s = (ends[n - 1] if n else 0.0) - GATHERS_AHEAD * job.gather_s[c]
        if begin_s >= 0:
            return min(n, bisect_right(ends, begin_s)) - 1
        return max(n + 1, bisect_right(ends, begin_s + ends[-1])) - 1 - count

    def behind(self, n: int, here: int) -> None:
        rows, job = self._rows, self._rows.schedule.job
        for c in self._drops_behind.get(n, ()):
            moment = job.blocks[rows.schedule.positions[n].block].last
            rows.others_release_of[c] = rows.drop(c, "remote", moment)
        for c in self._sums_behind.get(n, ()):
            moment = job.uses.last_gradient(c)
            rows.sum_of[c] = rows.others_release_of[c] = reduce(rows, c, "remote", moment, n, ((here, 0),))

    def close(self) -> None:
        """A first gather waits until the last iteration's slices are gone, and for the update, if no fetch does."""
        rows = self._rows
        for gather, floor in self._earlier:
            rows.wait(gather, (rows.last_rows[floor + len(rows.last_rows)], 1))
        for c, (gather, fetched) in self._first_gathers.items():
            rows.wait(gather, (rows.others_release_of[c], 1))
            if not fetched and c in rows.gpu_update_of:
                rows.wait(gather, (rows.gpu_update_of[c], 1))
