"""Collectives, on several ranks: the other ranks' slices come before a use and go behind it, and each last gradient is
summed over the ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from pstar_sim.core.step import Kind, Queue
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.schedule import Stretch
from pstar_sim.policy.passes.draft_rows import After, DraftRows
from pstar_sim.policy.passes.floors import Floors

__all__ = ["Collectives", "reduce", "room"]


def room(job: Job, whole: Mapping[int, Sequence[Stretch]], count: int) -> list[int]:
    """Bytes of the others' slices at each of `count` positions; the slices of small chunks count at all positions."""
    held = [0] * count
    for c, stretches in whole.items():
        if c not in job.small:
            for stretch in stretches:
                for n in range(stretch.first, stretch.last + 1):
                    held[n] += job.remote[c]
    return held


def reduce(rows: DraftRows, c: int, list_name: str, moment: int, n: int, after: After) -> int:
    """A gradient that is complete is summed over the ranks; the others' slices of it are gone then."""
    return rows.add(Queue.NET, Kind.REDUCE_SCATTER, c, list_name, moment, after=after, key=(float(n), -1.0))


class Collectives:
    """Gathers a chunk for each stretch in which it has to be whole, and sums its last gradient behind the last stretch.
    Where gradients of all micro-batches add up on the GPU, gradients.py sums the last one, too."""

    def __init__(self, rows: DraftRows, floors: Floors) -> None:
        self._rows = rows
        self._floors = floors
        # chunk -> its first gather, and whether its own slice was fetched for that
        self._first_gathers: dict[int, tuple[int, bool]] = {}
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

    def before(self, n: int) -> Sequence[int]:
        waits = [self._gather(c, n) for c in self._gathers_before.get(n, ())]
        if n == self._rows.schedule.at[-1]:  # the step: gradients of all ranks are there
            waits += self._rows.sum_of.values()
        return waits

    def _gather(self, c: int, n: int) -> int:
        """Gather the other ranks' slices for position n, behind this rank's own slice."""
        rows = self._rows
        at, row = rows.fetch_of.get(c, (-1, -1))
        fetched = at == n
        after: After = (*(((row, 0),) if fetched else ()), *self._floors.of(c, n))
        if c in rows.others_release_of:
            after += ((rows.others_release_of[c], 0),)
        moment, deadline = rows.moment_of(n), (float(n), float(c))
        gather = rows.add(Queue.NET, Kind.GATHER, c, "remote", moment, after=after, key=deadline, use=n)
        self._floors.serve(c, n, gather)
        self._first_gathers.setdefault(c, (gather, fetched))
        return gather

    def behind(self, n: int, here: int) -> None:
        rows, job = self._rows, self._rows.schedule.job
        for c in self._drops_behind.get(n, ()):
            moment = job.blocks[rows.schedule.positions[n].block].last
            rows.others_release_of[c] = rows.drop(c, "remote", moment)
        for c in self._sums_behind.get(n, ()):
            moment = job.uses.last_gradient(c)
            rows.sum_of[c] = rows.others_release_of[c] = reduce(rows, c, "remote", moment, n, ((here, 0),))

    def close(self) -> None:
        """Let a first gather wait until the slices of the previous iteration are gone, and for the update where no
        fetch waits for it."""
        rows = self._rows
        for c, (gather, fetched) in self._first_gathers.items():
            rows.wait(gather, (rows.others_release_of[c], 1))
            if not fetched and c in rows.gpu_update_of:
                rows.wait(gather, (rows.gpu_update_of[c], 1))
