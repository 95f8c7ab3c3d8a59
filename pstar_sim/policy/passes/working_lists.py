"""Working lists are fetched for each visit, and dropped behind it if unchanged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from pstar_sim.core.step import Kind, Queue
from pstar_sim.policy.passes.disk_rows import DiskTrips
from pstar_sim.policy.passes.draft_rows import After, DraftRows
from pstar_sim.policy.passes.floors import Floors


class WorkingLists:
    """Changed lists hold gradients (gradient_rows.py) or updated parameters (update_rows.py)."""

    def __init__(self, rows: DraftRows, floors: Floors, trips: DiskTrips) -> None:
        self._rows = rows
        self._trips = trips
        self._floors = floors
        self._first_fetches: list[tuple[int, str, int]] = []  # rows that take lists of the previous iteration
        self._fetches_before: defaultdict[int, list[int]] = defaultdict(list)  # position -> chunks
        self._drops_behind: defaultdict[int, list[int]] = defaultdict(list)
        schedule = rows.schedule
        for c, stretches in schedule.visits.items():
            update = schedule.updates.get(c)
            for stretch in schedule.fetched(c):
                # If all of the gradient is in grad32, an update needs only room.
                if not (stretch.first == update and schedule.all_in_grad32(c)):
                    self._fetches_before[stretch.first].append(c)
            for stretch, following in pairwise(stretches):
                if following.first != update:
                    self._drops_behind[stretch.last].append(c)
            if c not in schedule.stays and not schedule.job.uses.updated(c):
                self._drops_behind[stretches[-1].last].append(c)

    @property
    def before_at(self) -> Iterable[int]:
        return self._fetches_before

    @property
    def behind_at(self) -> Iterable[int]:
        return self._drops_behind

    def before(self, n: int) -> Sequence[int]:
        fetched = []
        for c in self._fetches_before.get(n, ()):
            row = self.fetch(c, n)
            self._rows.fetch_of[c] = (n, row)
            fetched.append(row)
        return fetched

    def fetch(self, c: int, n: int, list_name: str = "param", after: After = ()) -> int:
        """Once the list that was there before is gone."""
        rows, key = self._rows, (c, list_name)
        after += self._floors.of(c, n)
        if key in rows.release_of:
            after = ((rows.release_of[key], 0), *after)
        read = self._trips.read(c, n) if list_name == "param" else ()
        moment, deadline = rows.moment_of(n), (float(n), float(c))
        row = rows.add(Queue.H2D, Kind.FETCH, c, list_name, moment, after=(*read, *after), key=deadline, use=n)
        self._trips.fetched(c, row, read)
        self._floors.serve(c, n, row)
        if key not in rows.release_of:
            self._first_fetches.append((c, list_name, row))
        return row

    def behind(self, n: int, here: int) -> None:
        """A streamed chunk's list that stayed over the border may still be on its way down; it is dropped behind that,
        without compute waiting."""
        rows, schedule = self._rows, self._rows.schedule
        for c in self._drops_behind.get(n, ()):
            moment = schedule.job.blocks[schedule.positions[n].block].last
            if (c, "param") not in rows.release_of and c in schedule.stays and c in schedule.updates:
                key, after = (-2.0, float(n)), ((here, 0),)
                row = rows.first_drop_of[c] = rows.add(Queue.D2H, Kind.DROP, c, moment=moment, after=after, key=key)
            else:
                row = rows.drop(c, "param", moment)
            rows.release_of[c, "param"] = row

    def close(self) -> None:
        """A first fetch waits until the last iteration's list has left the GPU, and CPU Adam has updated the chunk."""
        rows = self._rows
        for c, name, row in self._first_fetches:
            updated: After = ((rows.cpu_update_of[c], 1),) if c in rows.cpu_update_of else ()
            rows.wait(row, (rows.release_of[c, name], 1), *updated)
