"""follow: advances a program in its own order, by the clock, until two successive iterations agree.

[Note: events at equal times] Events at equal times are handled in the order in which they were scheduled: the end of a
step when it begins or when its speed last changes, a waiting queue when the step for which it waits ends.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from pstar_sim.core.plan import Plan
from pstar_sim.core.program import Program
from pstar_sim.core.rules import Rates, StepCosts, is_steady, pace_s
from pstar_sim.core.step import Queue
from pstar_sim.errors import PlanError

_WAKE, _MET, _END, _OVER, _SHARED_END = range(5)
_NOTHING = (-1, 0.0, -1)

Factor = Callable[[int, int], float]
"""(step id, iteration) -> factor on the step's nominal seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class Times:
    """Seconds since the run began, per iteration and step.

    ready: when the queue came to the step.
    """

    ready: NDArray[np.float64]
    begin: NDArray[np.float64]
    end: NDArray[np.float64]


@dataclass(slots=True, eq=False)
class Record:
    """The last of `iterations` counts; events of later ones may follow.

    events: starts (2 * step) and ends (2 * step + 1), in order of time.
    marks: events when the compute queue had ended each iteration.
    last_wait: per iteration, step -> the step it waited for last.
    arrival_s: per iteration, step that meets other ranks' -> when this rank was ready.
    dram_loss_s: per iteration and step, no rows if DRAM is never short.
    times: of iterations that every queue had ended at the last `end_iteration`.
    steady: the last two iterations agree.
    """

    program: Program
    last_wait: list[dict[int, int]]
    arrival_s: list[dict[int, float]]
    dram_loss_s: list[list[float]]
    times: Times
    steady: bool = False
    events: array[int] = field(default_factory=lambda: array("q"))
    at_s: array[float] = field(default_factory=lambda: array("d"))
    marks: list[int] = field(default_factory=list)

    @classmethod
    def empty(cls, program: Program, most: int, *, shared: bool) -> Record:
        """most: iterations at most.
        shared: DRAM can be short.
        """
        steps = len(program.ids)
        lost = [[0.0] * steps for _ in range(most)] if shared else []
        none_yet = Times(*np.zeros((3, 0, steps)))
        return cls(program, [{} for _ in range(most)], [{} for _ in range(most)], lost, none_yet)

    @property
    def iterations(self) -> int:
        return len(self.times.end)

    @property
    def iteration_s(self) -> float:
        return pace_s(self.program, self.times.end, steady=self.steady)

    def end_iteration(self, k: int) -> bool:
        """Computes `times`; whether k, ended, is steady ([Note: when an iteration is steady] in rules.py)."""
        if k == 0:
            return False
        order, at_s = self.program.order, np.array(self.at_s)
        queue = np.array(self.program.queue_of, dtype=np.int8)[np.array(self.events) // 2]
        self.times = times = Times(*np.zeros((3, k + 1, len(self.program.ids))))
        for q, steps in enumerate(order):
            begun, ended = at_s[queue == q][: 2 * (k + 1) * len(steps)].reshape(-1, 2).T
            columns, shape = np.array(steps), (k + 1, len(steps))
            times.begin[:, columns] = begun.reshape(shape)
            times.end[:, columns] = ended.reshape(shape)
            times.ready[:, columns] = np.append(0.0, ended[:-1]).reshape(shape)
        return is_steady(times.end[k], times.end[k - 1])


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A rank that shares nothing with others."""

    program: Program
    costs: StepCosts
    rates: Rates


def follow(
    program: Program,
    costs: StepCosts,
    rates: Rates,
    *,
    factor: Factor | None = None,
    most: int = 8,
) -> Record:
    """Until the program is steady, for at most `most` (>= 2) iterations.

    factor: on the seconds of each step, for jitter.

    Raises Deadlock, naming the step at which each queue stands.
    """
    return follow_all([Member(program, costs, rates)], factor=factor, most=most)[0]


# Key of `Workload.derived`, for the latest (plan's steps, arguments of `follow`, record).
RECORDS = ("records",)


def follow_once(plan: Plan, member: Member, *, factor: Factor | None = None, most: int = 8) -> Record:
    """`follow`; where records are kept, the same arguments give the same."""
    arguments = (member.costs, member.rates, factor, most)
    latest = plan.workload.derived.get(RECORDS)
    for steps, others, record in latest if isinstance(latest, deque) else ():
        if steps is plan.steps and others == arguments:
            assert isinstance(record, Record)
            return record
    record = follow(member.program, member.costs, member.rates, factor=factor, most=most)
    if isinstance(latest, deque):
        latest.append((plan.steps, arguments, record))
    return record


def follow_all(
    members: Sequence[Member],
    *,
    begins: Sequence[Sequence[tuple[int, int]]] = (),
    ends: Sequence[Sequence[tuple[int, int]]] = (),
    factor: Factor | None = None,
    most: int = 8,
) -> list[Record]:
    """As `follow`, until all are steady.

    begins: (member, step) that begin together and last as long as the longest.
    ends: that end together.
    """
    return _Follower(members, begins, ends, jitter=factor is not None, most=most).follow(factor, most)


class Deadlock(PlanError):
    """Every queue waits.

    records: until then; () after pickling.
    """

    def __init__(self, message: str, records: Sequence[Record] = ()) -> None:
        super().__init__(message)
        self.records = records


@dataclass(slots=True, eq=False)
class _Sharer:
    """A running step that shares DRAM or the link.

    left_s: nominal.
    row: for `Rates.speeds`.
    loss_before_s: to DRAM before it began.
    end: number of the end scheduled last; earlier ones are void.
    """

    left_s: float
    row: tuple[str, float, bool, float]
    loss_before_s: float
    speed: float = 0.0
    end: int = -1


_Heap = list[tuple[float, int, int, int]]


class _Rank:
    """What a member's queues share.

    marks: of all members' events.
    """

    def __init__(self, member: Member, first: int, heap: _Heap, number: Iterator[int], *, jitter: bool, most: int):
        program, rates = member.program, member.rates
        self.program, self.costs, self.rates = program, member.costs, rates
        self.first, self.last = first, first + len(program.ids)
        self.heap, self.number = heap, number
        self.shared = rates.may_be_short(program.queue_of, member.costs, jitter=jitter)
        self.shared = self.shared or Queue.NVME_WRITE in program.queues
        self.record = Record.empty(program, most, shared=self.shared)
        self.marks = self.record.marks
        self.names = [queue.value for queue in program.queues]
        self.sharing: dict[int, _Sharer] = {}  # steps, in the order in which they joined
        # [Note: compute beside collectives]: the step that computes, with the time and the number of its end; ends with
        # other numbers are void.
        self.computing = _NOTHING
        self.net_runs = False
        self.settled_s = self.loss_s = 0.0
        self.share = 1.0
        self.speeds: dict[tuple[tuple[str, float, bool, float], ...], tuple[list[float], float]] = {}

    # -- compute beside collectives -----------------------------------------------------------------------------------

    def begin_beside(self, of_net: bool, takes_s: float, now: float) -> float:
        if of_net:
            self.net_runs = True
            self._stretch(now, self.rates.compute_while_net)
        elif self.net_runs:
            return takes_s * self.rates.compute_while_net
        return takes_s

    def end_beside(self, of_net: bool, now: float) -> None:
        if not of_net:
            self.computing = _NOTHING
        elif self.net_runs:
            self.net_runs = False
            self._stretch(now, 1 / self.rates.compute_while_net)

    def _stretch(self, now: float, by: float) -> None:
        """[Note: compute beside collectives]"""
        i, end_s, _ = self.computing
        if i >= 0:
            self.computing = i, now + (end_s - now) * by, next(self.number)
            heapq.heappush(self.heap, (self.computing[1], self.computing[2], _END, i))

    # -- shared rates -------------------------------------------------------------------------------------------------

    def join(self, i: int, takes_s: float, now: float) -> None:
        self._settle(now)
        own, costs, program = i - self.first, self.costs, self.program
        name = self.names[program.queue_of[own]]
        row = (name, costs.dram_bytes[own] / takes_s, program.copies[own], costs.duty[own])
        self.sharing[i] = _Sharer(takes_s, row, self.loss_s)
        self._retime(now)

    def leave(self, i: int, k: int, end: int, now: float) -> None:
        """Its end is scheduled after the new ends of the others."""
        if i not in self.sharing or end != self.sharing[i].end:
            return
        self._settle(now)
        self.record.dram_loss_s[k][i - self.first] = self.loss_s - self.sharing.pop(i).loss_before_s
        self._retime(now)
        heapq.heappush(self.heap, (now, next(self.number), _END, i))

    def _settle(self, now: float) -> None:
        elapsed_s = now - self.settled_s
        if elapsed_s > 0:
            self.loss_s += elapsed_s * (1.0 - self.share)
            for step in self.sharing.values():
                step.left_s -= elapsed_s * step.speed
        self.settled_s = now

    def _retime(self, now: float) -> None:
        rows = tuple([step.row for step in self.sharing.values()])
        known = self.speeds.get(rows)
        if known is None:
            queues, demands, copies, duty = zip(*rows) if rows else ((), (), (), ())
            known = self.speeds[rows] = self.rates.speeds(queues, demands, copies, duty)
        speeds, self.share = known
        for (i, step), speed in zip(self.sharing.items(), speeds):
            if speed != step.speed:
                step.speed, step.end = speed, next(self.number)
                heapq.heappush(self.heap, (now + max(0.0, step.left_s) / speed, step.end, _SHARED_END, i))


class _Follower:
    """Events: (time, number in the order of scheduling, kind, step).

    of_net: by queue; None on all but the two of [Note: compute beside collectives].
    """

    def __init__(
        self,
        members: Sequence[Member],
        begins: Sequence[Sequence[tuple[int, int]]],
        ends: Sequence[Sequence[tuple[int, int]]],
        *,
        jitter: bool,
        most: int,
    ) -> None:
        self.over = False
        self.heap: _Heap = []
        self.number = itertools.count()
        self.ranks: list[_Rank] = []
        self.rank_of: list[_Rank] = []
        self.of_net: list[bool | None] = []
        self.queue_of: list[int] = []
        self.waits: list[Sequence[tuple[int, int]]] = []
        self.following: list[int] = []
        self.order: list[list[int]] = []
        for member in members:
            program, first = member.program, len(self.waits)
            rank = _Rank(member, first, self.heap, self.number, jitter=jitter, most=most)
            slowed = member.rates.compute_while_net > 1 and Queue.NET in program.queues
            beside = {program.compute: False, program.queues.index(Queue.NET): True} if slowed else {}
            self.queue_of += [len(self.rank_of) + q for q in program.queue_of]
            self.rank_of += [rank] * len(program.queues)
            self.of_net += [beside.get(q) for q in range(len(program.queues))]
            self.waits += [tuple([(first + j, back) for j, back in row]) for row in program.waits]
            self.following += [first + i for i in program.following()]
            self.order += [[first + i for i in row] for row in program.order]
            self.ranks.append(rank)
        # Per step, the last iteration in which it ended. In the next iteration it waits or runs.
        self.done = [-1] * len(self.waits)
        self.queues_done = [0] * most  # per iteration
        # Of all members; one has them in its record.
        alone = self.ranks[0].record if len(members) == 1 else None
        self.events = array("q") if alone is None else alone.events
        self.at_s = array("d") if alone is None else alone.at_s
        self.last_wait: list[dict[int, int]] = [{} for _ in range(most)] if alone is None else alone.last_wait
        self.begins, self.ends = self._met(begins), self._met(ends)
        # Meeting -> the steps that have come, with their seconds.
        self.there: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
        self.longest_s: dict[int, float] = {}  # of steps whose meeting is complete

    def _met(self, meetings: Sequence[Sequence[tuple[int, int]]]) -> dict[int, tuple[int, int]]:
        """Step -> the meeting's first, and how many it has."""
        steps = [[self.ranks[member].first + i for member, i in meeting] for meeting in meetings]
        return {i: (meeting[0], len(meeting)) for meeting in steps for i in meeting}

    def follow(self, factor: Factor | None, most: int) -> list[Record]:
        heap, number, done, waits, following = self.heap, self.number, self.done, self.waits, self.following
        queue_of, rank_of, of_net, last_wait = self.queue_of, self.rank_of, self.of_net, self.last_wait
        begins, ends, lasts = self.begins, self.ends, frozenset(row[-1] for row in self.order)
        ids = list(chain.from_iterable(rank.program.ids for rank in self.ranks))
        seconds = list(chain.from_iterable(rank.costs.seconds for rank in self.ranks))
        dram = list(chain.from_iterable(rank.costs.dram_bytes for rank in self.ranks))
        shares = [rank.rates.shares if rank.shared else None for rank in rank_of]
        event, time, pop, push = self.events.append, self.at_s.append, heapq.heappop, heapq.heappush
        waiters: defaultdict[int, list[int]] = defaultdict(list)  # step -> steps that wait for it
        for row in self.order:
            push(heap, (0.0, next(number), _WAKE, row[0]))
        while heap:
            now, n, what, i = pop(heap)
            q = queue_of[i]
            net, share = of_net[q], shares[q]
            if what == _SHARED_END:
                rank_of[q].leave(i, done[i] + 1, n, now)
                continue
            if what == _END and net is False and n != rank_of[q].computing[2]:
                continue
            while True:
                if what == _END:
                    if net is not None:
                        rank_of[q].end_beside(net, now)
                    if i in ends and self._gathered(ends[i], i, 0.0, now, _OVER) is None:
                        break
                    what = _OVER
                if what == _OVER:
                    event(2 * i + 1)
                    time(now)
                    done[i] += 1
                    if i in waiters:
                        for other in waiters.pop(i):
                            push(heap, (now, next(number), _WAKE, other))
                    if i in lasts and self._ends_all(i, most):
                        break
                    if self.over:
                        break
                    i, what = following[i], _WAKE
                if what == _WAKE:
                    for j, back in waits[i]:
                        if done[j] + back <= done[i]:  # [Note: readiness] in program.py, one wait at a time
                            waiters[j].append(i)
                            last_wait[done[i] + 1][i] = j
                            break
                    else:
                        what = _MET
                    if what == _WAKE:
                        break
                    takes_s = seconds[i]
                    if factor is not None:
                        takes_s *= factor(ids[i], done[i] + 1)
                    if i in begins:
                        rank = rank_of[q]
                        rank.record.arrival_s[done[i] + 1][i - rank.first] = now
                        longest_s = self._gathered(begins[i], i, takes_s, now, _MET)
                        if longest_s is None:
                            break
                        takes_s = longest_s
                else:
                    takes_s = self.longest_s.pop(i)
                event(2 * i)
                time(now)
                what = _END
                if takes_s > 0:
                    if share is not None and share(takes_s, dram[i]):
                        rank_of[q].join(i, takes_s, now)
                        break
                    if net is not None:
                        takes_s = rank_of[q].begin_beside(net, takes_s, now)
                    end_s = now + takes_s
                    if heap and heap[0][0] <= end_s:
                        push(heap, (end_s, end := next(number), _END, i))
                        if net is False:
                            rank_of[q].computing = (i, end_s, end)
                        break
                    now = end_s  # no other event comes before
        if not self.over:
            raise self._deadlock(i for row in chain(waiters.values(), self._gathering()) for i in row)
        self._divide_waits()
        return self._records()

    def _gathered(self, meeting: tuple[int, int], i: int, seconds: float, now: float, what: int) -> float | None:
        """The longest; None until all have come."""
        there = self.there[meeting[0]]
        there.append((i, seconds))
        if len(there) < meeting[1]:
            return None
        longest_s = max(seconds for _, seconds in self.there.pop(meeting[0]))
        for other, _ in there[:-1]:
            if what == _MET:
                self.longest_s[other] = longest_s
            heapq.heappush(self.heap, (now, next(self.number), what, other))
        return longest_s

    def _gathering(self) -> Iterator[list[int]]:
        return ([i for i, _ in there] for there in self.there.values())

    def _ends_all(self, i: int, most: int) -> bool:
        rank, k = self.rank_of[self.queue_of[i]], self.done[i]
        if rank.program.queue_of[i - rank.first] == rank.program.compute:
            rank.marks.append(len(self.events))
        self.queues_done[k] += 1
        if self.queues_done[k] == len(self.order):  # [Note: when an iteration is steady]
            verdicts = [record.end_iteration(k) for record in self._records()]  # each computes its times
            for rank in self.ranks:
                rank.record.steady = all(verdicts)
            self.over = all(verdicts) or k == most - 1
        return k == most - 1

    def _records(self) -> list[Record]:
        records = [rank.record for rank in self.ranks]
        if len(records) == 1:
            return records
        events, at_s = np.array(self.events), np.array(self.at_s)
        for rank, record in zip(self.ranks, records):
            own = (events >= 2 * rank.first) & (events < 2 * rank.last)
            record.events = array("q", (events[own] - 2 * rank.first).tobytes())
            record.at_s = array("d", at_s[own].tobytes())
            record.marks = np.cumsum(own)[np.array(rank.marks, dtype=int) - 1].tolist()
        return records

    def _divide_waits(self) -> None:
        """Among members."""
        for k, waits in enumerate(self.last_wait if len(self.ranks) > 1 else ()):
            for i, j in waits.items():
                rank = self.rank_of[self.queue_of[i]]
                rank.record.last_wait[k][i - rank.first] = j - rank.first

    def _deadlock(self, steps: Iterable[int]) -> Deadlock:
        stuck = list(steps)
        least = min(stuck, key=lambda i: (self.done[i], i))  # in the earliest iteration
        stage, rank = next((n, rank) for n, rank in enumerate(self.ranks) if least < rank.last)
        done = self.done[rank.first : rank.last]
        own = [i - rank.first for i in stuck if rank.first <= i < rank.last]
        at = {rank.program.queue_of[i]: (i, done[i] + 1) for i in own}
        of = f"stage {stage}: " if len(self.ranks) > 1 else ""
        return Deadlock(of + deadlock(rank.program, at, done), self._records())


def deadlock(program: Program, at: dict[int, tuple[int, int]], done: Sequence[int]) -> str:
    """at: queue -> (step, iteration)."""
    lines = []
    for q, (i, k) in sorted(at.items(), key=lambda item: program.queues[item[0]]):
        missing = [
            f"{program.ids[j]}@-{back}" if back else str(program.ids[j]) for j, back in program.missing(i, k, done)
        ]
        awaited = ", ".join(missing) or "the other end of its meeting"
        lines.append(f"{program.queues[q]} at step {program.ids[i]} ({program.kinds[i]}) waits for {awaited}")
    return f"the plan deadlocks in iteration {min(k for _, k in at.values())}: {'; '.join(lines)}"
