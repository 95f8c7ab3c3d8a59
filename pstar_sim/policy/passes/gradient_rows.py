"""Gradients. In micro-batches but the last each has a list of its own: it opens, is summed over the ranks, goes down
and is added; the last overwrites the working list and goes down in it. In a layer-major workload, and in
`Modes.summed`, one list takes all micro-batches', and may go down and up between two (`Schedule.sums`); in the end it
goes down, or waits on the GPU for a streamed chunk's update. In `Modes.waiting` the first of two gradients waits in a
list of its own beside the last, which the update adds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

from pstar_sim.core.step import Kind, Queue
from pstar_sim.errors import CannotPlan
from pstar_sim.policy.kit.blocks import Stretch
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.schedule import Modes
from pstar_sim.policy.passes.collective_rows import reduce
from pstar_sim.policy.passes.disk_rows import DiskTrips
from pstar_sim.policy.passes.draft_rows import After, DraftRows
from pstar_sim.policy.passes.working_lists import WorkingLists


def room(job: Job, block: int, summed: frozenset[int] = frozenset()) -> int:
    """Of gradient lists, per block.

    summed: pinned, or with a sum on the GPU: they add up in place, unless summed over ranks first.
    """
    return sum(size for c, size in job.gradient_lists[block] if job.ranks > 1 or c not in summed)


def held(job: Job, modes: Modes, sums: Mapping[int, Sequence[Stretch]], at: Sequence[int], count: int) -> list[int]:
    """Sums that modes ask for, per position, on several ranks with lists of last gradients.

    at, sums: as in `Schedule`.
    """
    change = [0] * (count + 1)
    for c, stretches in sums.items():
        if job.ranks > 1:
            first, last = job.lists_of(c, summed=True)[-1]
            arriving = sum(job.layout.payload_bytes(c, name) for name in job.gradient_names(summed=True))
            change[at[job.block_of[first]]] += arriving
            change[at[job.block_of[last]] + 1] -= arriving
        size = job.layout.payload_bytes(c, modes.sum_list(c))
        for stretch in stretches:
            change[stretch.first] += size
            change[stretch.last + 1] -= size
    return list(accumulate(change[:count]))


def adds_s(job: Job, modes: Modes) -> list[float]:
    """Block -> adds on the GPU to earlier micro-batches."""
    seconds = [0.0] * len(job.blocks)
    there = job.small | modes.pinned | modes.summed - modes.waiting
    for (c, _), at in job.cost.gpu_adds.moments_s.items():
        if job.sums_on_gpu or c in there:
            for moment, took_s in at.items():
                seconds[job.block_of[moment]] += took_s
    return seconds


class GradientRows:
    def __init__(self, rows: DraftRows, working: WorkingLists, trips: DiskTrips) -> None:
        self._rows = rows
        self._working = working
        self._trips = trips
        self._lists: dict[int, Sequence[tuple[int, int]]] = {}  # chunk -> first and last moment of each
        self._freed: dict[int, int] = {}  # chunk -> row that freed its gradient list on the GPU
        self._opened: list[tuple[int, int]] = []  # (chunk, first row that opens one of its lists), in order
        self._opens: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # position -> (chunk, its micro-batch)
        self._closes: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self._comes_before: defaultdict[int, list[int]] = defaultdict(list)  # position -> chunks whose sum comes up
        self._goes_behind: defaultdict[int, list[int]] = defaultdict(list)  # position -> chunks whose sum goes down
        self._sends_behind: defaultdict[int, list[int]] = defaultdict(list)  # position -> chunks updated on the CPU
        self._parks_behind: defaultdict[int, list[int]] = defaultdict(list)  # streamed chunks that wait on the host
        self._adds_behind: defaultdict[int, list[int]] = defaultdict(list)  # streamed chunks that stay
        schedule = rows.schedule
        job = schedule.job
        uses, at = job.uses, schedule.at
        for c in filter(uses.updated, schedule.visits):
            stretches, update = schedule.visits[c], schedule.updates.get(c)
            self._plan_lists(c)
            if update is None:
                self._sends_behind[stretches[-1].last].append(c)
            elif len(stretches) > 1 and stretches[-1].first == update:
                self._parks_behind[stretches[-2].last].append(c)
            elif not schedule.sums_on_gpu(c) and job.add_last:
                self._adds_behind[at[job.block_of[uses.last_gradient(c)]]].append(c)
        for c in filter(uses.updated, schedule.whole):  # each gradient to sum over ranks has a list of its own
            if schedule.is_resident(c):
                self._plan_lists(c)

    def _plan_lists(self, c: int) -> None:
        schedule = self._rows.schedule
        job, at = schedule.job, schedule.at
        for stretch, following in pairwise(schedule.sums.get(c, ())):
            if following.first != schedule.updates.get(c):  # otherwise the sum comes up with the states
                self._goes_behind[stretch.last].append(c)
                self._comes_before[following.first].append(c)
        self._lists[c] = schedule.job.lists_of(c, summed=schedule.sums_on_gpu(c))
        for number, (first, last) in enumerate(self._lists[c]):
            self._opens[at[job.block_of[first]]].append((c, number))
            self._closes[at[job.block_of[last]]].append((c, number))

    @property
    def before_at(self) -> Iterable[int]:
        return {*self._opens, *self._comes_before}

    @property
    def behind_at(self) -> Iterable[int]:
        return {*self._closes, *self._goes_behind, *self._sends_behind, *self._parks_behind, *self._adds_behind}

    def before(self, n: int) -> Sequence[int]:
        rows, schedule = self._rows, self._rows.schedule
        for c, number in self._opens.get(n, ()):
            after: After = ((self._freed[c], 0),) if number else ()
            after += self._behind_older(c)
            self._opened.append((c, len(rows.rows)))
            there = schedule.sums_on_gpu(c) and c not in schedule.modes.waiting
            names = schedule.job.gradient_names(summed=there)
            if number == 0 and schedule.job.ranks > 1 and schedule.adds_up(c):
                names = ("grad32", *names)
            for name in names:
                rows.add(Queue.COMPUTE, Kind.ALLOC, c, name, self._lists[c][number][0], after=after)
        return [self._working.fetch(c, n, "grad32") for c in self._comes_before.get(n, ())]

    def behind(self, n: int, here: int) -> None:
        schedule = self._rows.schedule
        for c, number in self._closes.get(n, ()):
            if not schedule.sums_on_gpu(c):
                self._close_list(c, number, n, here)
                continue
            added = self._add_up(c, number, n, here)
            if number == len(self._lists[c]) - 1 and not schedule.sum_waits(c):
                self._send_sum(c, added)
        for c in self._goes_behind.get(n, ()):
            moment, key = schedule.job.blocks[schedule.positions[n].block].last, (0.0, self._rows.next_number())
            self._rows.writeback(c, "grad32", moment, ((self._rows.sum_of.get(c, here), 0),), key, drop=True)
        for c in self._sends_behind.get(n, ()):
            self._rows.send_of[c] = self._leave(c, here)
        for c in self._parks_behind.get(n, ()):
            self._leave(c, here)
        for c in self._adds_behind.get(n, ()):
            self._send_last(c, here, drop=False)

    def _behind_older(self, c: int) -> After:
        job, most = self._rows.schedule.job, self._rows.schedule.lists_at_once
        if most is None or len(self._opened) < most:
            return ()
        older, _ = self._opened[-most]
        if older not in self._freed:
            raise CannotPlan(
                f"{job.name}: gradients of chunks {older} and {c} arrive side by side, and at most {most} gradient "
                "lists may be on the GPU at a time; give a larger lists_at_once"
            )
        return ((self._freed[older], 0),)

    def close(self) -> None:
        """With a limit of lists on the GPU, first ones wait for the previous iteration's last."""
        most = self._rows.schedule.lists_at_once
        if most is None:
            return
        for n, (_, row) in enumerate(self._opened[:most]):
            older = len(self._opened) - most + n
            if older >= 0:
                self._rows.wait(row, (self._freed[self._opened[older][0]], 1))

    def _close_list(self, c: int, number: int, n: int, here: int) -> None:
        rows, job = self._rows, self._rows.schedule.job
        moment, done = self._lists[c][number][1], here
        if job.ranks > 1:
            done = reduce(rows, c, "grad_remote", moment, n, ((here, 0),))
        if rows.schedule.is_resident(c):
            # The sum is added in place.
            self._freed[c] = rows.add(Queue.NET, Kind.FREE, c, "grad", moment, behind=done)
            return
        key = (0.0, rows.next_number())
        after: After = ((done, 0),) if number == 0 else ((done, 0), (rows.add_of[c], 0))
        down = rows.add(Queue.D2H, Kind.WRITEBACK, c, "grad", moment, after=after, key=key)
        freed = self._freed[c] = rows.add(Queue.D2H, Kind.FREE, c, "grad", moment, behind=down)
        self._add(c, "grad", ((freed, 0),), key)

    def _add(self, c: int, list_name: str, after: After, key: tuple[float, ...]) -> int:
        """Returns the row after which the sum waits for more."""
        rows, down = self._rows, after[0][0]
        moment = rows.rows[down].moment
        brought = self._trips.bring_sum(c, moment)
        rows.add_of[c] = rows.add(Queue.ADAM, Kind.CPU_ADD, c, list_name, moment, after=(*after, *brought), key=key)
        return self._trips.send_sum(c, rows.add_of[c], brought)

    def _add_up(self, c: int, number: int, n: int, here: int) -> int:
        """A micro-batch's, to the sum on the GPU: by the sum over ranks, or without a row. Returns the row after which
        it is added."""
        rows, job = self._rows, self._rows.schedule.job
        if job.ranks == 1:
            return here
        moment = self._lists[c][number][1]
        done = reduce(rows, c, "grad_remote", moment, n, ((here, 0),))
        self._freed[c] = rows.sum_of[c] = rows.add(Queue.NET, Kind.FREE, c, "grad", moment, behind=done)
        return self._freed[c]

    def _send_sum(self, c: int, here: int) -> None:
        rows, job = self._rows, self._rows.schedule.job
        moment = job.uses.last_gradient(c)
        down = rows.writeback(c, "grad32", moment, ((here, 0),), rows.down_key(c), drop=True)
        self._freed[c] = rows.add_of[c] = rows.release_of[c, "grad32"]
        sent = self._trips.send_sum(c, down, ())
        if job.settings.clip:
            rows.last_adds.append(rows.add_of[c] if sent == down else sent)

    def _leave(self, c: int, here: int) -> int:
        """End the last visit before the update. Returns the last gradient's copy down, or the working list's drop if
        the sum stays."""
        rows, schedule = self._rows, self._rows.schedule
        if not schedule.sums_on_gpu(c):
            return self._send_last(c, here)
        gone = rows.release_of[c, "param"] = rows.drop(c, "param", schedule.job.uses.last_gradient(c))
        return rows.add_of.get(c, gone)

    def _send_last(self, c: int, here: int, *, drop: bool = True) -> int:
        """Also added on the host, if clipping takes the sum's norm."""
        rows, job = self._rows, self._rows.schedule.job
        moment = job.uses.last_gradient(c)
        ready: After = ((rows.sum_of.get(c, here), 0), *self._trips.before_gradient(c))
        down = rows.writeback(c, "param", moment, ready, rows.down_key(c), drop=drop)
        if job.add_last:
            key = (0.0, rows.next_number())
            # The add also waits for the chunk's earlier gradients, which may still be on their way down.
            after: After = ((down, 0), (rows.add_of[c], 0)) if c in rows.add_of else ((down, 0),)
            rows.last_adds.append(self._add(c, "param", after, key))
        self._trips.send(c, down, rows.add_of[c] if job.add_last else None)
        return down
