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
    periods_s: of each iteration tried.
    starts_s: ops of the compute queue, from the begin of the window, empty if given up.
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
    """Steps are numbered as in choose_columns.py. Lists with an entry per op grow as iterations open.

    waits: op -> ops for which it still waits.
    over: op -> whether it has ended, or has no bytes.
    ready: queue -> heap of the ops that wait for nothing more.
    unstarted: queue -> ops of its iteration that have not started; beyond: the next's first.
    at: index in `Columns.compute` of the next op; position: through all iterations.
    """

    __slots__ = (
        "ahead", "at", "begun", "beyond", "clock", "columns", "draft", "ended", "gpu_free", "host_free", "lap",
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
        self.waits: list[int] = []
        self.started, self.ended, self.over = bytearray(), bytearray(), bytearray()
        self.ready: list[list[int]] = [[] for _ in range(c.queues)]
        self.unstarted = list(c.lengths)
        self.beyond = [c.count] * c.queues
        self.lap = self.at = self.position = 0
        self.latest_s = limit_s * (1 + ROUNDING)  # by this time the compute queue has to end its iteration
        self.begun: tuple[object, ...] = ()  # the state in which the latest iteration began

    def run(self) -> Window:
        columns, clock, ready, running = self.columns, self.clock, self.ready, self.clock.running
        refused, until = ([-1] * columns.queues,) * 2 if self.ahead is None else (self.ahead.refused, self.ahead.until)
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
                if ready[q] and running[q] < 0 and self._start_ready(q):
                    at_once = True
            for q in columns.reserving:
                if ready[q] and running[q] < 0 and (ready[q][0] != refused[q] or self.position > until[q]):
                    at_once |= self._start_ahead(q)
            if at_once:
                continue
            q = clock.advance()
            if q < 0:
                return self._stuck()
            op = running[q]
            clock.vacate(q)
            self._finish(op, op % columns.count)

    # -- iterations and steps --

    def _open_iteration(self) -> None:
        c, ready, base = self.columns, self.ready, len(self.waits)
        self.waits += c.base_waits if base else c.first_waits
        for i in c.at_once if base else [i for i in c.by_rank if not self.waits[i]]:
            heappush(ready[c.queue_of[i]], base + c.rank[i])
        for j, behind in c.successors.items() if base else ():
            if self.ended[base - c.count + j]:
                self._free(behind, base)
        self.started += bytes(c.count)
        self.ended += c.is_part
        self.over += c.no_bytes
        if self.ahead is not None:
            self.ahead.open_iteration()

    def _free(self, rows: Sequence[int], base: int) -> None:
        c, waits = self.columns, self.waits
        for j in rows:
            waits[base + j] = waiting = waits[base + j] - 1
            if waiting:
                continue
            if c.rank[j] >= 0:
                heappush(self.ready[c.queue_of[j]], base + c.rank[j])
            elif j == c.gate:
                self._free(c.followers[j], base)

    def _start(self, q: int, op: int, i: int) -> bool:
        c = self.columns
        if q != COMPUTE:
            heappop(self.ready[q])
            self.unstarted[q] = rest = self.unstarted[q] - 1
            if not rest:
                self.beyond[q] += c.count
                self.unstarted[q] = c.lengths[q]
        self.gpu_free -= c.gpu_take[i]
        self.host_free -= c.host_take[i]
        self.started[op] = 1
        self.log.append(2 * op)
        if c.seconds[i] > 0.0:
            self.clock.occupy(q, op, c.seconds[i])
            return False
        self._finish(op, i)
        return True

    def _finish(self, op: int, i: int) -> None:
        c = self.columns
        self.gpu_free += c.gpu_free[i]
        self.host_free += c.host_free[i]
        self.ended[op] = self.over[op] = 1
        self.log.append(2 * op + 1)
        self.position += c.is_position[i]
        if c.followers[i]:
            self._free(c.followers[i], op - i)
        if i in c.successors and (base := op - i + c.count) < len(self.waits):
            self._free(c.successors[i], base)

    # -- what can start --

    def _start_compute(self) -> Window | None:
        c, running = self.columns, self.clock.running
        while running[COMPUTE] < 0:
            i = c.compute[self.at]
            op = self.lap * c.count + i
            if self.waits[op] or c.gpu_take[i] > self.gpu_free or c.host_take[i] > self.host_free:
                return None
            if c.banked[i] and not self._safe(op, i):
                return None
            if self.at == 0 and self.lap > 0:
                outcome = self._end_window()
                if outcome is not None:
                    return outcome
            elif self.clock.now + c.rest_s[self.at] > self.latest_s:
                self.windows.mark(self.clock.now + c.rest_s[self.at], self.gpu_free, self.host_free)
                return self.windows.given_up()
            self.starts_s[self.at] = self.clock.now
            self._start(COMPUTE, op, i)
            self.at += 1
            if self.at == len(c.compute):
                self.at, self.lap = 0, self.lap + 1
                if (self.lap + 1) * c.count >= len(self.waits):
                    self._open_iteration()
        return None

    def _start_ready(self, q: int) -> bool:
        """Whether any step took no time."""
        c, ready, running = self.columns, self.ready[q], self.clock.running
        at_once = False
        while ready and running[q] < 0:
            place = ready[0] % c.count
            i = c.by_rank[place]
            if ready[0] >= self.beyond[q] or c.host_take[i] > self.host_free or c.gpu_take[i] > self.gpu_free:
                break
            op = ready[0] - place + i
            if c.banked[i] and not self._safe(op, i):
                break
            at_once |= self._start(q, op, i)
        return at_once

    def _start_ahead(self, q: int) -> bool:
        """As `_start_ready`, for bytes ahead of use."""
        c, ready, running, ahead = self.columns, self.ready[q], self.clock.running, self.ahead
        at_once = False
        while ready and running[q] < 0 and ready[0] < self.beyond[q]:
            place = ready[0] % c.count
            i = c.by_rank[place]
            op = ready[0] - place + i
            size = c.gpu_take[i]
            if ahead is not None and c.use[i] is not None:
                upcoming = c.upcoming[self.at] if running[COMPUTE] < 0 else 0
                if size + upcoming > self.gpu_free or not ahead.reserve(q, op, i, self.position, self.started):
                    break
            elif size > self.gpu_free or not (ahead is not None or self._safe(op, i)):
                break
            if ahead is not None:
                ahead.refused[q] = -1  # a step without room may be the most urgent step now
            at_once |= self._start(q, op, i)
        return at_once

    def _safe(self, op: int, i: int) -> bool:
        """The banker's rule: could all earlier steps of the draft still run one by one if this one took its bytes
        now?"""
        c, on, off = self.columns, self.started, self.over
        gpu_left, host_left = self.gpu_free - c.gpu_take[i], self.host_free - c.host_take[i]
        earlier = off.find(0, max(0, op - i - c.count), op)
        while earlier >= 0:
            j = earlier % c.count
            if not on[earlier]:
                gpu_left -= c.gpu_take[j]
                host_left -= c.host_take[j]
                if gpu_left < 0 or host_left < 0:
                    return False
            gpu_left += c.gpu_free[j]
            host_left += c.host_free[j]
            earlier = off.find(0, earlier + 1, op)
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
        zero = last * self.columns.count
        if 0 in self.ended[max(0, zero - self.columns.count) : zero]:
            return ()
        return (
            self.gpu_free,
            self.host_free,
            self.position - last * self.columns.positions,
            self.waits[zero:],
            self.started[zero:],
            self.ended[zero:],
            [sorted([op - zero for op in ops]) for ops in self.ready],
            [op - zero if op >= 0 else op for op in self.clock.running],
            [op - zero for op in self.beyond[COMPUTE + 1 :]],
            list(self.unstarted),
            b"" if self.ahead is None else self.ahead.slack[self.position :].tobytes(),
        )

    def _stuck(self) -> Window:
        c, gpu_free, host_free = self.columns, self.gpu_free, self.host_free
        at = c.compute[self.at]
        candidates = [at] if not self.waits[self.lap * c.count + at] else []
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
    urgent: queue -> (index into `Columns.fetch_order`, iteration's first op) of its earliest unstarted step.
    refused: queue -> the last step (as in `ready`) without room; until: to which position.
    """

    __slots__ = ("_base", "_columns", "_lead", "refused", "slack", "until", "urgent")

    def __init__(self, draft: Draft, columns: Columns) -> None:
        self._columns, self._lead = columns, draft.lead_bytes
        self._base: NDArray[np.int64] = np.asarray(draft.room, dtype=np.int64)
        self.slack: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self.urgent = [(0, 0)] * columns.queues
        self.refused, self.until = [-1] * columns.queues, [-1] * columns.queues

    def open_iteration(self) -> None:
        self.slack = np.concatenate((self.slack, self._base))

    def reserve(self, q: int, op: int, i: int, position: int, started: bytearray) -> bool:
        """From `position` to the use of op (row i), if there is room."""
        c = self._columns
        use = c.use[i]
        assert use is not None
        high = op // c.count * c.positions + use
        if high <= position:
            return True
        size = c.gpu_take[i]
        wanted = size if self._most_urgent(q, started) == op else size + self._lead
        span = self.slack[position:high]
        if span[span.argmin()] < wanted:
            self.refused[q], self.until[q] = op - i + c.rank[i], position + int((span < wanted).nonzero()[0][-1])
            return False
        span -= size
        return True

    def _most_urgent(self, q: int, started: bytearray) -> int:
        order = self._columns.fetch_order[q]
        n, base = self.urgent[q]
        while started[base + order[n]]:
            n += 1
            if n == len(order):
                n, base = 0, base + self._columns.count
        self.urgent[q] = (n, base)
        return base + order[n]


class _WindowLog:
    """log: starts and ends of ops, as numbers (choose_columns.py).
    marks: of each window's end: time, length of the log, bytes free on GPU and host.
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
