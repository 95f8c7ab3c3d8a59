"""choose: finds the order of a draft's steps on each queue, until the iteration repeats.

Policies use it to find the order of steps and the window their memory edges are made from. It decides only what a
policy may decide; `follow` then times the plan, by the same rules (rules.py).
The compute queue always runs in the order of the draft; the others take, among the steps that are ready, the one with
the smallest key.

[Note: what follows at once] A row that follows another one at once (`DraftRow.behind`) frees its bytes and lets others
go in the instant in which that one ends. So it is a part of that row while the order is chosen, and a row of its own
only in the window.

[Note: fetching ahead] A fetch (or a gather, on the net queue) for the use at compute position u may start when, at
every position from the running one up to u, the room that is not needed otherwise (`Draft.room`) still holds it, plus
a lead unless it is the earliest of its queue not yet started: memory is reserved when a copy starts, never before it is
ready, and the last slots stay for urgent ones. Without `room` (the steps have an order already), a step may take
bytes before earlier ones of the draft only if these could still run one after the other in what is left (the banker's
rule).

[Note: a window again] What starts next follows from what has started and ended, from the bytes that are free, and from
which step ends first. So where an iteration begins as the one before it began, the same steps follow in the same order,
and only the clock is advanced over them. That gives the same seconds to the bit, because the same seconds are added in
the same order; where rounding would let another step end first, the window is run like the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from typing import overload

import numpy as np
from numpy.typing import NDArray

from pstar_sim.core.draft import Draft, DraftRow
from pstar_sim.core.rules import StepCosts, agree
from pstar_sim.core.step import Queue
from pstar_sim.errors import PlanError

__all__ = ["Window", "choose"]

# Iterations that are run until two agree; where none do, the last one counts. docs/results/search-constants.md says
# what fewer cost.
MOST_WINDOWS = 6
TOLERANCE = 1e-6  # relative, within which two successive periods agree
ROUNDING = 1e-9  # relative, far more than the seconds of a window can be off by adding them up
COMPUTE, H2D, D2H, ADAM, NET, NVME = range(6)
_INDEX = {
    Queue.COMPUTE: COMPUTE,
    Queue.H2D: H2D,
    Queue.D2H: D2H,
    Queue.ADAM: ADAM,
    Queue.NET: NET,
    Queue.NVME: NVME,
}


@dataclass(frozen=True, slots=True)
class Events(Sequence[tuple[int, int, bool]]):
    """(row, iteration relative to the window, ended?) in the order in which they happened. Behind the end of an op come
    the events of its parts. A search looks at the events of its best attempts alone, so they are read from the log each
    time.

    log: entries of one iteration.
    lap: number of that iteration.
    rows: number of rows of the draft.
    parts: op -> its parts.
    """

    log: Sequence[int]
    lap: int
    rows: int
    parts: Mapping[int, Sequence[int]]

    def __len__(self) -> int:
        return len(self.log) + 2 * sum(map(len, self.parts.values()))

    @overload
    def __getitem__(self, index: int) -> tuple[int, int, bool]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[int, int, bool]]: ...

    def __getitem__(self, index: int | slice) -> tuple[int, int, bool] | Sequence[tuple[int, int, bool]]:
        return list(self)[index]

    def __iter__(self) -> Iterator[tuple[int, int, bool]]:
        for entry in self.log:
            k, i = divmod(entry // 2, self.rows)
            k -= self.lap
            yield (i, k, bool(entry % 2))
            if entry % 2:
                for part in self.parts.get(i, ()):
                    yield (part, k, False)
                    yield (part, k, True)


@dataclass(slots=True)
class Window:
    """One iteration of a schedule that repeats, from the first step of its compute queue to the first step of the next
    iteration.

    iteration_s: predicted seconds per iteration.
    events: what happened, in order.
    gpu_free_bytes, host_free_bytes: free when the window opens.
    stuck: None, or (row, place, bytes wanted, bytes free) of the step that can never start.
    periods_s: seconds of each iteration that was tried.
    """

    iteration_s: float
    events: Sequence[tuple[int, int, bool]]
    gpu_free_bytes: int
    host_free_bytes: int
    stuck: tuple[int, str, int, int] | None = None
    periods_s: list[float] = field(default_factory=list)


def choose(draft: Draft, *, limit_s: float = math.inf) -> Window:
    """Advance the draft from the cut until its window repeats and two successive periods agree within TOLERANCE, for
    MOST_WINDOWS windows at most.

    Gives up, without events, once a window is certain to take longer than limit_s and at least as long as the one
    before. (As a rule the first window is the shortest, because it waits for nothing of an earlier iteration.)
    `iteration_s` is then a lower bound of the window's seconds.
    """
    return _Chooser(draft).choose(limit_s)


class _Chooser:
    """Plain numbers stand for steps, since there are hundreds of thousands: op i of iteration k is k * count + i where
    it runs, k * count + rank (place of its key among all) where it is ready, and in the log twice the former, plus 1
    where it ends. An op is a row and its parts ([Note: what follows at once]); it has the row's number."""

    def __init__(self, draft: Draft) -> None:
        assert not draft.rates.slowdowns
        self.draft = draft
        rows = draft.rows
        count = len(rows)
        dram_bytes = self._read(rows)
        self.parts: dict[int, list[int]] = {}  # op -> rows that follow it at once
        op_of = self._join(rows)
        self._link(rows, op_of)
        self.queue_of = [_INDEX[row.queue] for row in rows]
        ops = [i for i, op in enumerate(op_of) if i == op]
        self.ops = len(ops)
        self.compute = [i for i in ops if self.queue_of[i] == COMPUTE]
        free = [i for i in ops if self.queue_of[i] != COMPUTE]  # start when they are ready, in whatever order
        self.queues = max(ADAM, *self.queue_of) + 1
        self.on_dram = (H2D, D2H, ADAM, NVME) if self.queues > NVME else (H2D, D2H, ADAM)
        self.lengths = [0] * self.queues
        for i in free:
            self.lengths[self.queue_of[i]] += 1
        keys = {i: key if (key := rows[i].key) is not None else (float(i),) for i in free}
        self.by_rank = sorted(free, key=keys.__getitem__)
        self.rank = [-1] * count  # of those alone
        for rank, i in enumerate(self.by_rank):
            self.rank[i] = rank
        self.at_once = [i for i in free if not self.base_waits[i]]  # wait for nothing
        self.positions = sum(self.is_position)
        self._look_ahead()
        self.shared = draft.rates.may_be_short(self.queue_of, StepCosts(self.seconds, dram_bytes, ()))
        # Of DRAM, bytes/s.
        self.demand = [
            size / seconds if size and seconds > 0.0 else 0.0 for size, seconds in zip(dram_bytes, self.seconds)
        ]
        self._reserve(free)

    def _read(self, rows: Sequence[DraftRow]) -> list[int]:
        """Read the columns of the rows. Returns bytes of host DRAM, which only the demand is made of."""
        charges = [row.charge for row in rows]
        self.use = [row.use for row in rows]
        self.is_position = [row.is_position for row in rows]
        self.seconds = [charge.seconds for charge in charges]
        self.gpu_take, self.gpu_free = [c.gpu_take for c in charges], [c.gpu_free for c in charges]
        self.host_take, self.host_free = [c.host_take for c in charges], [c.host_free for c in charges]
        return [charge.dram_bytes for charge in charges]

    def _join(self, rows: Sequence[DraftRow]) -> list[int]:
        """The op that each row is, or is a part of. Raises ValueError for a row that cannot be a part."""
        op_of = list(range(len(rows)))
        self.is_part = bytearray(len(rows))
        for i, row in enumerate(rows):
            if row.behind is not None:
                if not 0 <= row.behind < i or rows[row.behind].queue is not row.queue or row.after:
                    raise ValueError(f"row {i}: behind={row.behind} is no earlier row of its queue, or the row waits")
                op = op_of[i] = op_of[row.behind]
                self.is_part[i] = 1
                self.parts.setdefault(op, []).append(i)
                self.gpu_free[op] += self.gpu_free[i]
                self.host_free[op] += self.host_free[i]
        self.no_bytes = bytearray(  # on the GPU
            part or not (take or free) for part, take, free in zip(self.is_part, self.gpu_take, self.gpu_free)
        )
        return op_of

    def _link(self, rows: Sequence[DraftRow], op_of: Sequence[int]) -> None:
        """Compute which rows wait for which."""
        self.followers: list[list[int]] = [[] for _ in rows]  # in the same iteration
        self.successors: dict[int, list[int]] = {}  # in the next one
        self.base_waits = [len(row.after) for row in rows]
        self.first_waits = list(self.base_waits)  # of the first iteration, whose predecessor is taken as done
        followers = self.followers
        for i, row in enumerate(rows):
            for j, back in row.after:
                if back:
                    self.successors.setdefault(op_of[j], []).append(i)
                    self.first_waits[i] -= 1
                else:
                    followers[op_of[j]].append(i)

    def _reserve(self, free: Sequence[int]) -> None:
        """Find the queues whose steps take bytes ahead of their use, and sort these steps by use. free: steps that
        start when they are ready."""
        served = [i for i in free if self.use[i] is not None]
        self.reserving = (H2D, NET) if any(self.queue_of[i] == NET for i in served) else (H2D,)
        self.others = tuple(q for q in (D2H, ADAM, *range(NET, self.queues)) if q not in self.reserving)
        served.sort(key=lambda i: (self.use[i], self.rank[i]))
        self.fetch_order = [[i for i in served if self.queue_of[i] == q] for q in range(self.queues)]

    def _look_ahead(self) -> None:
        """For each step of the compute queue: bytes that the queue takes up to its next moment, and nominal seconds
        from there to the end of the iteration."""
        self.upcoming = [0] * len(self.compute)
        self.rest_s = [0.0] * len(self.compute)
        need, rest_s = 0, 0.0
        for n in range(len(self.compute) - 1, -1, -1):
            i = self.compute[n]
            need = self.gpu_take[i] + (0 if self.is_position[i] else need)
            rest_s += self.seconds[i]
            self.upcoming[n], self.rest_s[n] = need, rest_s

    def choose(self, limit_s: float) -> Window:
        draft, count = self.draft, len(self.queue_of)
        gpu_take, gpu_give, host_take, host_give = self.gpu_take, self.gpu_free, self.host_take, self.host_free
        seconds_of, use, is_position = self.seconds, self.use, self.is_position
        followers, successors, rank, by_rank = self.followers, self.successors, self.rank, self.by_rank
        queue_of, queues, on_dram = self.queue_of, self.queues, self.on_dram
        gpu_free, host_free = draft.gpu_free_bytes, draft.host_free_bytes
        log: list[int] = []
        marks: list[tuple[float, int, int, int]] = []  # time, length of the log, gpu_free, host_free
        waits: list[list[int]] = []
        started: list[bytearray] = []
        ended: list[bytearray] = []
        over: list[bytearray] = []  # ended, or without bytes on the GPU
        ready: list[list[int]] = [[] for _ in range(queues)]
        unstarted = list(self.lengths)  # of each queue, in the iteration it is at
        current = [0] * queues  # that iteration
        running = [-1] * queues
        until = [math.inf] * queues
        shared, rates = self.shared, draft.rates
        left = [0.0] * queues  # where rates are shared: nominal seconds still to do, since `settled_s`
        speed = [1.0] * queues
        settled_s = 0.0
        compute = self.compute
        length = len(compute)
        at = 0  # index of the next compute op in its iteration
        lap = 0
        position = 0  # compute position running or next, unrolled
        ahead = draft.room is not None
        slack: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        base: NDArray[np.int64] = np.asarray(draft.room if ahead else (), dtype=np.int64)
        least = np.minimum.reduce
        urgent = [(0, 0)] * queues  # per queue: index into fetch_order of the earliest not started, its iteration
        # Per queue: step without room ahead, and the last position that has none. Room only shrinks.
        refused = [(-1, -1)] * queues
        latest_s = limit_s * (1 + ROUNDING)  # when the compute queue has to be done with its iteration
        now = 0.0
        begun: tuple[object, ...] = ()  # the state in which the latest iteration began

        def open_iteration() -> None:
            nonlocal slack
            k = len(waits)
            row = list(self.base_waits if k else self.first_waits)
            opened = self.at_once if k else [i for i in by_rank if not row[i]]
            for i in opened:
                heappush(ready[queue_of[i]], k * count + rank[i])
            if k:  # steps of the previous iteration that have ended already
                previous = ended[k - 1]
                for j, behind in successors.items():
                    if previous[j]:
                        for i in behind:
                            row[i] -= 1
                            if not row[i] and rank[i] >= 0:
                                heappush(ready[queue_of[i]], k * count + rank[i])
            waits.append(row)
            started.append(bytearray(count))
            ended.append(bytearray(self.is_part))
            over.append(bytearray(self.no_bytes))
            if ahead:
                slack = np.concatenate((slack, base))

        def finish(i: int, k: int) -> None:
            nonlocal gpu_free, host_free, position
            gpu_free += gpu_give[i]
            host_free += host_give[i]
            ended[k][i] = over[k][i] = 1
            base = k * count
            log.append(2 * (base + i) + 1)
            position += is_position[i]
            row = waits[k]
            for j in followers[i]:
                row[j] = waiting = row[j] - 1
                if not waiting and rank[j] >= 0:
                    heappush(ready[queue_of[j]], base + rank[j])
            if i in successors and k + 1 < len(waits):
                row = waits[k + 1]
                for j in successors[i]:
                    row[j] = waiting = row[j] - 1
                    if not waiting and rank[j] >= 0:
                        heappush(ready[queue_of[j]], base + count + rank[j])

        def start(q: int, i: int, k: int) -> bool:
            """Start step i of iteration k on queue q. Returns whether the step has ended already, because it takes no
            time."""
            nonlocal gpu_free, host_free
            gpu_free -= gpu_take[i]
            host_free -= host_take[i]
            started[k][i] = 1
            op = k * count + i
            log.append(2 * op)
            if seconds_of[i] <= 0.0:
                finish(i, k)
                return True
            occupy(q, op, seconds_of[i])
            return False

        def occupy(q: int, op: int, seconds: float) -> None:
            running[q] = op
            until[q] = now + seconds
            if shared and q in on_dram:
                left[q] = seconds
                speed[q] = 0.0  # until now
                retime()

        def vacate(q: int) -> None:
            running[q], until[q] = -1, math.inf
            if shared and q in on_dram:
                retime()

        def leave(q: int) -> None:
            """The first of the steps that are ready leaves its queue."""
            heappop(ready[q])
            unstarted[q] -= 1
            if not unstarted[q]:
                current[q] += 1
                unstarted[q] = self.lengths[q]

        def retime() -> None:
            """Compute new ends of the steps that run now, after a step has started or ended."""
            nonlocal settled_s
            elapsed, settled_s = now - settled_s, now
            sharing = [q for q in on_dram if running[q] >= 0]
            for q in sharing:
                left[q] -= elapsed * speed[q]
            demands = [self.demand[running[q] % count] for q in sharing]
            copies = [q in (H2D, D2H) for q in sharing]
            for q, rate in zip(sharing, rates.speeds((), demands, copies, ())[0]):
                speed[q] = rate
                until[q] = now + max(0.0, left[q]) / rate

        def state() -> tuple[object, ...]:
            """All that the order of the steps after a mark follows from, counted from the iteration before it; empty
            while something older is still under way."""
            last = lap - 1
            if last and 0 in ended[last - 1]:
                return ()
            zero = last * count
            return (
                gpu_free,
                host_free,
                position - last * self.positions,
                [list(row) for row in waits[last:]],
                [bytes(ops) for ops in started[last:]],
                [bytes(ops) for ops in ended[last:]],
                [sorted([op - zero for op in ops]) for ops in ready],
                [op - zero if op >= 0 else op for op in running],
                [k - last for k in current[H2D:]],
                list(unstarted),
                slack[position:].tobytes(),
            )

        def pass_over(entries: Sequence[int]) -> bool:
            """Advance the clock over these entries of the log. Returns whether their steps end in that order."""
            nonlocal now
            for entry in entries:
                op = entry // 2
                i = op % count
                if seconds_of[i] <= 0.0:
                    continue
                q = queue_of[i]
                if not entry % 2:
                    occupy(q, op, seconds_of[i])
                    continue
                now = min(until)
                if until.index(now) != q:
                    return False
                vacate(q)
            return True

        def again() -> Window | None:
            """The outcome, where the latest window comes again; None, and all is as before, where it does not: [Note: a
            window again]."""
            nonlocal now, settled_s
            clock = now, settled_s, running[:], until[:], left[:], speed[:]
            entries, windows = len(log), len(marks)
            window, outcome = log[marks[-2][1] :], None
            while outcome is None:
                window = [entry + 2 * count for entry in window]
                if not pass_over(window):
                    now, settled_s, running[:], until[:], left[:], speed[:] = clock
                    del log[entries:], marks[windows:]
                    break
                log.extend(window)
                marks.append((now, len(log), gpu_free, host_free))
                outcome = self._outcome(marks, log, limit_s)
            return outcome

        open_iteration()
        open_iteration()
        marks.append((0.0, 0, gpu_free, host_free))
        while True:
            # The compute queue: everything that can go at this instant.
            while running[COMPUTE] < 0:
                i = compute[at]
                if waits[lap][i] or gpu_take[i] > gpu_free or host_take[i] > host_free:
                    break
                if not ahead and gpu_take[i] and not self._safe(i, lap, gpu_free, started, over):
                    break
                if at == 0 and lap > 0:
                    marks.append((now, len(log), gpu_free, host_free))
                    outcome = self._outcome(marks, log, limit_s)
                    if outcome is not None:
                        return outcome
                    before, begun = begun, state()
                    if begun and begun == before and (outcome := again()) is not None:
                        return outcome
                    latest_s = now + max(limit_s, marks[-1][0] - marks[-2][0]) * (1 + ROUNDING)
                elif now + self.rest_s[at] > latest_s:
                    marks.append((now + self.rest_s[at], len(log), gpu_free, host_free))
                    return _given_up(marks)
                start(COMPUTE, i, lap)
                at += 1
                if at == length:
                    at, lap = 0, lap + 1
                    if lap + 1 >= len(waits):
                        open_iteration()
            # Whether a step that took no time has made room, or set others free, after these were looked at.
            at_once = False
            for q in self.others:
                while ready[q] and running[q] < 0:
                    k, place = divmod(ready[q][0], count)
                    i = by_rank[place]
                    if k > current[q] or host_take[i] > host_free or gpu_take[i] > gpu_free:
                        break
                    if gpu_take[i] and not ahead and not self._safe(i, k, gpu_free, started, over):
                        break
                    leave(q)
                    at_once |= start(q, i, k)
            for q in self.reserving:
                while ready[q] and running[q] < 0:
                    first_ready = ready[q][0]
                    if refused[q][0] == first_ready and position <= refused[q][1]:
                        break
                    k, place = divmod(first_ready, count)
                    i = by_rank[place]
                    if k > current[q]:
                        break
                    size, served = gpu_take[i], use[i]
                    low = high = 0
                    if ahead and served is not None:
                        upcoming = self.upcoming[at] if running[COMPUTE] < 0 else 0
                        if size + upcoming > gpu_free:
                            break
                        low, high = position, k * self.positions + served
                        if high > low:
                            first = self.fetch_order[q]
                            n, lap_of = urgent[q]
                            while started[lap_of][first[n]]:
                                n += 1
                                if n == len(first):
                                    n, lap_of = 0, lap_of + 1
                            urgent[q] = (n, lap_of)
                            wanted = size if (lap_of, first[n]) == (k, i) else size + draft.lead_bytes
                            span = slack[low:high]
                            if least(span) < wanted:
                                refused[q] = (first_ready, low + int((span < wanted).nonzero()[0][-1]))
                                break
                            span -= size
                    elif size > gpu_free or not (ahead or self._safe(i, k, gpu_free, started, over)):
                        break
                    refused[q] = (-1, -1)
                    leave(q)
                    at_once |= start(q, i, k)
            if at_once:
                continue
            # Advance to the next end.
            now = min(until)
            if now == math.inf:
                return self._stuck(waits, lap, compute[at], gpu_free, host_free, ready)
            q = until.index(now)
            k, i = divmod(running[q], count)
            vacate(q)
            finish(i, k)

    def _safe(self, i: int, k: int, gpu_free: int, started: Sequence[bytearray], over: Sequence[bytearray]) -> bool:
        """The banker's rule: could all earlier steps of the draft still run one by one if step i of iteration k took
        its bytes now?"""
        gpu_take, gpu_free_of = self.gpu_take, self.gpu_free
        left = gpu_free - gpu_take[i]
        for lap in range(max(0, k - 1), k + 1):
            on, off = started[lap], over[lap]
            end = len(off) if lap < k else i
            j = off.find(0, 0, end)
            while j >= 0:
                if not on[j]:
                    left -= gpu_take[j]
                    if left < 0:
                        return False
                left += gpu_free_of[j]
                j = off.find(0, j + 1, end)
        return True

    def _outcome(self, marks: list[tuple[float, int, int, int]], log: list[int], limit_s: float) -> Window | None:
        """The outcome if the window that just ended took too long, or is as long as the one before and contains every
        step once."""
        if (abandoned := _too_long(marks, limit_s)) is not None:
            return abandoned
        lap = len(marks) - 2
        give_up = lap + 1 >= MOST_WINDOWS
        (begin_s, low, gpu_free, host_free), (end_s, high, _, _) = marks[-2], marks[-1]
        period = end_s - begin_s
        periods = [b[0] - a[0] for a, b in pairwise(marks)]
        if not give_up and (len(periods) < 2 or not agree(period, periods[-2], TOLERANCE)):
            return None
        whole = 2 * len(self.queue_of)
        closed = high - low == 2 * self.ops == len({entry % whole for entry in log[low:high]})
        if not closed:
            if not give_up:
                return None
            # [Note: a window that does not repeat] One iteration by itself is always a legal schedule of a cyclic
            # plan, begun at the cut: what other iterations held beside it only made it wait longer.
            shown: list[int] = []
            while len(shown) < 2 * self.ops:
                lap -= 1
                if lap < 0:
                    raise PlanError(f"no iteration is whole within {MOST_WINDOWS}: a queue falls behind for ever")
                shown = [entry for entry in log if entry // whole == lap]
            gpu_free, host_free = self.draft.gpu_free_bytes, self.draft.host_free_bytes
        else:
            shown = log[low:high]
        return Window(
            iteration_s=period,
            events=Events(shown, lap, len(self.queue_of), self.parts),
            gpu_free_bytes=gpu_free,
            host_free_bytes=host_free,
            periods_s=periods,
        )

    def _stuck(
        self,
        waits: Sequence[Sequence[int]],
        lap: int,
        at: int,
        gpu_free: int,
        host_free: int,
        ready: Sequence[Sequence[int]],
    ) -> Window:
        """Nothing runs and nothing can start: name the step that wants more bytes than there are."""
        candidates = [at] if not waits[lap][at] else []
        candidates += [self.by_rank[queue[0] % len(self.queue_of)] for queue in ready if queue]
        if not candidates:
            raise ValueError("the draft's steps wait for each other in a circle")
        short = [(i, "host", self.host_take[i], host_free) for i in candidates if self.host_take[i] > host_free]
        short += [(i, "gpu", self.gpu_take[i], gpu_free) for i in candidates if self.gpu_take[i] > gpu_free]
        first = candidates[0]  # where each has its own bytes, room further ahead is what is short
        return Window(
            0.0, [], gpu_free, host_free, stuck=short[0] if short else (first, "gpu", self.gpu_take[first], gpu_free)
        )


def _too_long(marks: Sequence[tuple[float, int, int, int]], limit_s: float) -> Window | None:
    """An outcome without a window if the last window took more than limit_s and no less than the one before."""
    periods = [b[0] - a[0] for a, b in pairwise(marks)]
    if periods[-1] <= limit_s or (len(periods) > 1 and periods[-1] < periods[-2]):
        return None
    return _given_up(marks)


def _given_up(marks: Sequence[tuple[float, int, int, int]]) -> Window:
    """The outcome of a search that gave up: no window, only the seconds of the iterations tried."""
    periods = [b[0] - a[0] for a, b in pairwise(marks)]
    return Window(periods[-1], [], marks[-1][2], marks[-1][3], periods_s=periods)
