"""choose: finds the order of a draft's steps on each queue, until the iteration repeats.

It gives the order and the window from which memory edges are made; `follow` then times the plan, by the same rules
(rules.py). The compute queue runs in the order of the draft, and every other queue takes the ready step with the
smallest key.

[Note: what follows at once] A row that follows another row at once (`DraftRow.behind`) frees its bytes, and lets other
rows start, in the instant in which the other row ends. While the order is chosen it is a part of the other row.

[Note: fetching ahead] A fetch (or gather) for the use at compute position u may start if, at every position up to u,
the room that is not needed otherwise (`Draft.room`) holds its bytes, and a lead unless it is the earliest of its queue
that has not started. So the last slots stay free for urgent copies. Without `room`, a step may take bytes before
earlier steps of the draft only if these could still run one after the other in the remaining room (the banker's rule).

[Note: a window again] If an iteration begins in the state of the one before it, the same steps follow in the same
order, and only the clock is advanced over them: the same seconds, added in the same order, are bit-identical. If
rounding would let another step end first, the window is run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import pairwise
from typing import overload

import numpy as np
from numpy.typing import NDArray

from pstar_sim.core.choose_clock import Clock
from pstar_sim.core.choose_columns import COMPUTE, Columns
from pstar_sim.core.draft import Draft
from pstar_sim.core.rules import agree
from pstar_sim.errors import PlanError

# Limit of the iterations that are run until two agree; if none agree, the last one counts.
# benchmarks/search_constants.md says what a smaller limit costs.
MOST_WINDOWS = 6
TOLERANCE = 1e-6  # relative difference within which two successive periods agree
ROUNDING = 1e-9  # relative; far more than the rounding error of the seconds of a window


@dataclass(frozen=True, slots=True)
class Events(Sequence[tuple[int, int, bool]]):
    """(row, iteration relative to the window, ended?); an op's parts come after its end. Read from the log each time,
    because a search reads those of its best attempts alone.
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
    """One iteration of a schedule that repeats.

    gpu_free_bytes, host_free_bytes: when the window opens.
    stuck: (row, place, bytes wanted, bytes free) of the step that can never start.
    periods_s: of each iteration that was tried.
    starts_s: ops of the compute queue, from the begin of the window, empty if the search gave up.
    """

    iteration_s: float
    events: Sequence[tuple[int, int, bool]]
    gpu_free_bytes: int
    host_free_bytes: int
    stuck: tuple[int, str, int, int] | None = None
    periods_s: list[float] = field(default_factory=list)
    starts_s: Sequence[float] = ()

    @property
    def repeats(self) -> bool:
        """If not, a plan made from this window may take other seconds than `iteration_s`."""
        return len(self.periods_s) > 1 and agree(self.periods_s[-1], self.periods_s[-2], TOLERANCE)


def choose(draft: Draft, *, limit_s: float = math.inf) -> Window:
    """Advance the draft until its window repeats and two successive periods agree within TOLERANCE, for at most
    MOST_WINDOWS windows, and return the last.

    Gives up, without events, once a window is certain to take longer than limit_s and at least as long as the one
    before: `iteration_s` is then a lower bound.
    """
    return _Chooser(draft, limit_s).run()


class _Chooser:
    """Steps are numbered as in choose_columns.py. Lists with an entry per iteration grow as iterations open.

    waits: row -> ops for which it still waits.
    over: op -> whether it has ended, or has no bytes.
    ready: queue -> heap of the ops that wait for nothing more.
    unstarted: queue -> its ops in its iteration that have not started.
    at: index in `Columns.compute` of the next op; position: through all iterations.
    """

    __slots__ = (
        "ahead", "at", "begun", "clock", "columns", "current", "draft", "ended", "gpu_free", "host_free", "lap",
        "latest_s", "log", "over", "position", "ready", "started", "starts_s", "unstarted", "waits", "windows",
    )  # fmt: skip

    def __init__(self, draft: Draft, limit_s: float) -> None:
        self.draft = draft
        self.columns = c = Columns(draft)
        self.clock = Clock(c, draft.rates)
        self.ahead = None if draft.room is None else _RoomAhead(draft, c)
        self.gpu_free, self.host_free = draft.gpu_free_bytes, draft.host_free_bytes
        self.log: list[int] = []
        self.starts_s = [0.0] * len(c.compute)
        self.windows = _WindowLog(draft, c, self.log, limit_s)
        self.waits: list[list[int]] = []
        self.started: list[bytearray] = []
        self.ended: list[bytearray] = []
        self.over: list[bytearray] = []
        self.ready: list[list[int]] = [[] for _ in range(c.queues)]
        self.unstarted = list(c.lengths)
        self.current = [0] * c.queues
        self.lap = self.at = self.position = 0
        self.latest_s = limit_s * (1 + ROUNDING)  # by this time the compute queue has to end its iteration
        self.begun: tuple[object, ...] = ()  # the state in which the latest iteration began

    def run(self) -> Window:
        columns, clock, ready, running = self.columns, self.clock, self.ready, self.clock.running
        self._open_iteration()
        self._open_iteration()
        self.windows.mark(0.0, self.gpu_free, self.host_free)
        while True:
            if running[COMPUTE] < 0:
                outcome = self._start_compute()
                if outcome is not None:
                    return outcome
            # Whether a step that took no time has made room for, or freed, a queue that was looked at before.
            at_once = False
            for q in columns.others:
                if ready[q] and running[q] < 0:
                    at_once |= self._start_ready(q)
            for q in columns.reserving:
                if ready[q] and running[q] < 0:
                    at_once |= self._start_ahead(q)
            if at_once:
                continue
            q = clock.advance()
            if q < 0:
                return self._stuck()
            k, i = divmod(running[q], columns.count)
            clock.vacate(q)
            self._finish(i, k)

    # -- iterations and steps --

    def _open_iteration(self) -> None:
        c, ready, k = self.columns, self.ready, len(self.waits)
        row = list(c.base_waits if k else c.first_waits)
        opened = c.at_once if k else [i for i in c.by_rank if not row[i]]
        for i in opened:
            heappush(ready[c.queue_of[i]], k * c.count + c.rank[i])
        if k:  # steps of the previous iteration that have ended already
            previous = self.ended[k - 1]
            for j, behind in c.successors.items():
                if previous[j]:
                    self._free(row, behind, k * c.count)
        self.waits.append(row)
        self.started.append(bytearray(c.count))
        self.ended.append(bytearray(c.is_part))
        self.over.append(bytearray(c.no_bytes))
        if self.ahead is not None:
            self.ahead.open_iteration()

    def _free(self, waits: list[int], rows: Sequence[int], base: int) -> None:
        rank, queue_of, ready = self.columns.rank, self.columns.queue_of, self.ready
        for j in rows:
            waits[j] = waiting = waits[j] - 1
            if not waiting and rank[j] >= 0:
                heappush(ready[queue_of[j]], base + rank[j])

    def _start(self, q: int, i: int, k: int) -> bool:
        c = self.columns
        if q != COMPUTE:
            heappop(self.ready[q])
            self.unstarted[q] = rest = self.unstarted[q] - 1
            if not rest:
                self.current[q] += 1
                self.unstarted[q] = c.lengths[q]
        self.gpu_free -= c.gpu_take[i]
        self.host_free -= c.host_take[i]
        self.started[k][i] = 1
        op = k * c.count + i
        self.log.append(2 * op)
        seconds = c.seconds[i]
        if seconds <= 0.0:
            self._finish(i, k)
            return True
        self.clock.occupy(q, op, seconds)
        return False

    def _finish(self, i: int, k: int) -> None:
        c = self.columns
        self.gpu_free += c.gpu_free[i]
        self.host_free += c.host_free[i]
        self.ended[k][i] = self.over[k][i] = 1
        base = k * c.count
        self.log.append(2 * (base + i) + 1)
        self.position += c.is_position[i]
        if c.followers[i]:
            self._free(self.waits[k], c.followers[i], base)
        if i in c.successors and k + 1 < len(self.waits):
            self._free(self.waits[k + 1], c.successors[i], base + c.count)

    # -- what can start --

    def _start_compute(self) -> Window | None:
        c, running = self.columns, self.clock.running
        compute, gpu_take, host_take = c.compute, c.gpu_take, c.host_take
        while running[COMPUTE] < 0:
            i, lap = compute[self.at], self.lap
            if self.waits[lap][i] or gpu_take[i] > self.gpu_free or host_take[i] > self.host_free:
                return None
            if c.banked[i] and not self._safe(i, lap):
                return None
            if self.at == 0 and lap > 0:
                outcome = self._end_window()
                if outcome is not None:
                    return outcome
            elif self.clock.now + c.rest_s[self.at] > self.latest_s:
                self.windows.mark(self.clock.now + c.rest_s[self.at], self.gpu_free, self.host_free)
                return self.windows.given_up()
            self.starts_s[self.at] = self.clock.now
            self._start(COMPUTE, i, lap)
            self.at += 1
            if self.at == len(compute):
                self.at, self.lap = 0, lap + 1
                if lap + 2 >= len(self.waits):
                    self._open_iteration()
        return None

    def _start_ready(self, q: int) -> bool:
        c, ready, running = self.columns, self.ready[q], self.clock.running
        gpu_take, host_take = c.gpu_take, c.host_take
        at_once = False
        while ready and running[q] < 0:
            k, place = divmod(ready[0], c.count)
            i = c.by_rank[place]
            if k > self.current[q] or host_take[i] > self.host_free or gpu_take[i] > self.gpu_free:
                break
            if c.banked[i] and not self._safe(i, k):
                break
            at_once |= self._start(q, i, k)
        return at_once

    def _start_ahead(self, q: int) -> bool:
        """On a queue whose steps take bytes ahead of use: whether any step took no time."""
        c, ready, running, ahead = self.columns, self.ready[q], self.clock.running, self.ahead
        at_once = False
        while ready and running[q] < 0:
            if ahead is not None and ahead.was_refused(q, ready[0], self.position):
                break
            k, place = divmod(ready[0], c.count)
            i = c.by_rank[place]
            size = c.gpu_take[i]
            if k > self.current[q]:
                break
            if ahead is not None and c.use[i] is not None:
                upcoming = c.upcoming[self.at] if running[COMPUTE] < 0 else 0
                if size + upcoming > self.gpu_free or not ahead.reserve(q, i, k, self.position, self.started):
                    break
            elif size > self.gpu_free or not (ahead is not None or self._safe(i, k)):
                break
            if ahead is not None:
                ahead.refused[q] = (-1, -1)  # a step without room may be the most urgent step now
            at_once |= self._start(q, i, k)
        return at_once

    def _safe(self, i: int, k: int) -> bool:
        """The banker's rule: could all earlier steps of the draft still run one by one if this one took its bytes
        now?"""
        c = self.columns
        gpu_left, host_left = self.gpu_free - c.gpu_take[i], self.host_free - c.host_take[i]
        for lap in range(max(0, k - 1), k + 1):
            on, off = self.started[lap], self.over[lap]
            end = len(off) if lap < k else i
            j = off.find(0, 0, end)
            while j >= 0:
                if not on[j]:
                    gpu_left -= c.gpu_take[j]
                    host_left -= c.host_take[j]
                    if gpu_left < 0 or host_left < 0:
                        return False
                gpu_left += c.gpu_free[j]
                host_left += c.host_free[j]
                j = off.find(0, j + 1, end)
        return True

    # -- when it ends --

    def _end_window(self) -> Window | None:
        windows = self.windows
        windows.mark(self.clock.now, self.gpu_free, self.host_free)
        outcome = windows.outcome()
        if outcome is not None:
            return self._with_starts(outcome)
        before, self.begun = self.begun, self._state()
        if self.begun and self.begun == before and (outcome := windows.repeated(self.clock)) is not None:
            return self._with_starts(outcome)
        self.latest_s = self.clock.now + max(windows.limit_s, windows.period_s) * (1 + ROUNDING)
        return None

    def _with_starts(self, outcome: Window) -> Window:
        begin_s = self.starts_s[0]
        return replace(outcome, starts_s=[start_s - begin_s for start_s in self.starts_s])

    def _state(self) -> tuple[object, ...]:
        """What determines the order after a mark, counted from the iteration before; empty while an older step is under
        way."""
        last = self.lap - 1
        if last and 0 in self.ended[last - 1]:
            return ()
        zero = last * self.columns.count
        return (
            self.gpu_free,
            self.host_free,
            self.position - last * self.columns.positions,
            [list(row) for row in self.waits[last:]],
            [bytes(ops) for ops in self.started[last:]],
            [bytes(ops) for ops in self.ended[last:]],
            [sorted([op - zero for op in ops]) for ops in self.ready],
            [op - zero if op >= 0 else op for op in self.clock.running],
            [k - last for k in self.current[COMPUTE + 1 :]],
            list(self.unstarted),
            b"" if self.ahead is None else self.ahead.slack[self.position :].tobytes(),
        )

    def _stuck(self) -> Window:
        c, gpu_free, host_free = self.columns, self.gpu_free, self.host_free
        at = c.compute[self.at]
        candidates = [at] if not self.waits[self.lap][at] else []
        candidates += [c.by_rank[queue[0] % c.count] for queue in self.ready if queue]
        if not candidates:
            raise ValueError("the draft's steps wait for each other in a circle")
        short = [(i, "host", c.host_take[i], host_free) for i in candidates if c.host_take[i] > host_free]
        short += [(i, "gpu", c.gpu_take[i], gpu_free) for i in candidates if c.gpu_take[i] > gpu_free]
        first = candidates[0]  # if each has room for its own bytes, room further ahead is short
        return Window(
            0.0, [], gpu_free, host_free, stuck=short[0] if short else (first, "gpu", c.gpu_take[first], gpu_free)
        )


class _RoomAhead:
    """[Note: fetching ahead]. The room at a position never grows.

    slack: at each position, through all iterations, bytes neither needed nor reserved.
    urgent: queue -> (index into `Columns.fetch_order`, iteration) of its earliest unstarted step.
    refused: queue -> the last step (as in `ready`) without room, and until which position.
    """

    __slots__ = ("_base", "_columns", "_lead", "refused", "slack", "urgent")

    def __init__(self, draft: Draft, columns: Columns) -> None:
        self._columns, self._lead = columns, draft.lead_bytes
        self._base: NDArray[np.int64] = np.asarray(draft.room, dtype=np.int64)
        self.slack: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self.urgent = [(0, 0)] * columns.queues
        self.refused = [(-1, -1)] * columns.queues

    def open_iteration(self) -> None:
        self.slack = np.concatenate((self.slack, self._base))

    def was_refused(self, q: int, step: int, position: int) -> bool:
        refused, until = self.refused[q]
        return refused == step and position <= until

    def reserve(self, q: int, i: int, k: int, position: int, started: Sequence[bytearray]) -> bool:
        """From `position` to the use of step i of iteration k, if there is room."""
        c = self._columns
        use = c.use[i]
        assert use is not None
        high = k * c.positions + use
        if high <= position:
            return True
        size = c.gpu_take[i]
        wanted = size if self._most_urgent(q, started) == (k, i) else size + self._lead
        span = self.slack[position:high]
        if np.minimum.reduce(span) < wanted:
            self.refused[q] = (k * c.count + c.rank[i], position + int((span < wanted).nonzero()[0][-1]))
            return False
        span -= size
        return True

    def _most_urgent(self, q: int, started: Sequence[bytearray]) -> tuple[int, int]:
        order = self._columns.fetch_order[q]
        n, lap = self.urgent[q]
        while started[lap][order[n]]:
            n += 1
            if n == len(order):
                n, lap = 0, lap + 1
        self.urgent[q] = (n, lap)
        return lap, order[n]


class _WindowLog:
    """log: starts and ends of ops, as numbers (choose_columns.py).
    marks: of each window's end: time, length of the log, bytes free on the GPU and on the host.
    """

    __slots__ = ("_columns", "_draft", "limit_s", "log", "marks")

    def __init__(self, draft: Draft, columns: Columns, log: list[int], limit_s: float) -> None:
        self._draft, self._columns, self.log, self.limit_s = draft, columns, log, limit_s
        self.marks: list[tuple[float, int, int, int]] = []

    @property
    def period_s(self) -> float:
        return self.marks[-1][0] - self.marks[-2][0]

    def mark(self, now: float, gpu_free: int, host_free: int) -> None:
        self.marks.append((now, len(self.log), gpu_free, host_free))

    def outcome(self) -> Window | None:
        """None unless the latest window took too long, or is as long as the one before and contains every step once."""
        marks = self.marks
        periods = self._periods()
        period = periods[-1]
        if period > self.limit_s and (len(periods) == 1 or period >= periods[-2]):
            return self.given_up()
        lap = len(marks) - 2
        give_up = lap + 1 >= MOST_WINDOWS
        if not give_up and (len(periods) < 2 or not agree(period, periods[-2], TOLERANCE)):
            return None
        log, whole, ops = self.log, 2 * self._columns.count, self._columns.ops
        (_, low, gpu_free, host_free), (_, high, _, _) = marks[-2], marks[-1]
        shown: list[int] = log[low:high]
        if not high - low == 2 * ops == len({entry % whole for entry in shown}):
            if not give_up:
                return None
            # [Note: a window that does not repeat] One iteration by itself is always a legal schedule of a cyclic plan
            # that begins at the cut. Bytes of other iterations beside it only made it wait longer.
            shown = []
            while len(shown) < 2 * ops:
                lap -= 1
                if lap < 0:
                    raise PlanError(f"none of {MOST_WINDOWS} iterations is complete: a queue falls behind for ever")
                shown = [entry for entry in log if entry // whole == lap]
            gpu_free, host_free = self._draft.gpu_free_bytes, self._draft.host_free_bytes
        return Window(
            iteration_s=period,
            events=Events(shown, lap, self._columns.count, self._columns.parts),
            gpu_free_bytes=gpu_free,
            host_free_bytes=host_free,
            periods_s=periods,
        )

    def repeated(self, clock: Clock) -> Window | None:
        """[Note: a window again], if the latest comes again. Else nothing changes."""
        log, marks = self.log, self.marks
        kept, entries, windows = clock.kept(), len(log), len(marks)
        (_, _, gpu_free, host_free), outcome = marks[-1], None
        window = log[marks[-2][1] :]
        while outcome is None:
            window = [entry + 2 * self._columns.count for entry in window]
            if not clock.pass_over(window):
                clock.set_back(kept)
                del log[entries:], marks[windows:]
                break
            log.extend(window)
            self.mark(clock.now, gpu_free, host_free)
            outcome = self.outcome()
        return outcome

    def given_up(self) -> Window:
        periods = self._periods()
        return Window(periods[-1], [], self.marks[-1][2], self.marks[-1][3], periods_s=periods)

    def _periods(self) -> list[float]:
        return [b[0] - a[0] for a, b in pairwise(self.marks)]
