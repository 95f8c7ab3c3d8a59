"""follow: advances a program in its own order, by the clock, until two successive iterations agree.

[Note: events at equal times] Events at equal times are handled in the order in which they were scheduled: the end of a
step when it begins or when its speed last changes, a waiting queue when the step for which it waits ends.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pstar_sim.core.program import Program
from pstar_sim.core.rules import Rates, StepCosts, is_steady, pace_s
from pstar_sim.core.step import Queue
from pstar_sim.errors import PlanError

_WAKE, _END, _SHARED_END = range(3)
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
        """Computes `times` when every queue has ended iteration k, and returns whether it is steady ([Note: when an
        iteration is steady] in rules.py)."""
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
    return _Follower(program, costs, rates, jitter=factor is not None, most=most).follow(factor, most)


class Deadlock(PlanError):
    """Every queue waits.

    record: events before it; None after pickling.
    """

    def __init__(self, message: str, record: Record | None = None) -> None:
        super().__init__(message)
        self.record = record


@dataclass(slots=True, eq=False)
class _Sharer:
    """A running step that shares DRAM or the link.

    left_s: nominal.
    demand: of DRAM, in bytes per second.
    loss_before_s: to DRAM before it began.
    end: number of the end scheduled last; earlier ones are void.
    """

    left_s: float
    demand: float
    loss_before_s: float
    speed: float = 0.0
    end: int = -1


class _Follower:
    """Events: (time, number in the order of scheduling, kind, step)."""

    def __init__(self, program: Program, costs: StepCosts, rates: Rates, *, jitter: bool, most: int) -> None:
        self.program, self.costs, self.rates = program, costs, rates
        self.over = False
        self.shared = rates.may_be_short(program.queue_of, costs, jitter=jitter) or Queue.NVME_WRITE in program.queues
        self.record = Record.empty(program, most, shared=self.shared)
        self.names = [queue.value for queue in program.queues]
        self.heap: list[tuple[float, int, int, int]] = []
        self.number = itertools.count()
        # Per step, the last iteration in which it ended. In the next iteration it waits or runs.
        self.done = [-1] * len(program.ids)
        self.queues_done = [0] * most  # per iteration
        self.sharing: dict[int, _Sharer] = {}  # steps, in the order in which they joined
        # [Note: compute beside collectives]: the step that computes, with the time and the number of its end; ends with
        # other numbers are void.
        self.computing = _NOTHING
        self.net_runs = False
        self.settled_s = self.loss_s = 0.0
        self.share = 1.0

    def follow(self, factor: Factor | None, most: int) -> Record:
        program, record, heap, number, done = self.program, self.record, self.heap, self.number, self.done
        waits, ids, following = program.waits, program.ids, program.following()
        lasts = frozenset(row[-1] for row in program.order)
        seconds, dram, shared, shares = self.costs.seconds, self.costs.dram_bytes, self.shared, self.rates.shares
        event, time, pop, push = record.events.append, record.at_s.append, heapq.heappop, heapq.heappush
        slow = self.rates.compute_while_net
        net = program.queues.index(Queue.NET) if slow > 1 and Queue.NET in program.queues else -1
        beside = [net >= 0 and q in (net, program.compute) for q in range(len(program.queues))]
        queue_of = program.queue_of
        waiters: defaultdict[int, list[int]] = defaultdict(list)  # step -> steps that wait for it
        for row in program.order:
            push(heap, (0.0, next(number), _WAKE, row[0]))
        while heap:
            now, n, what, i = pop(heap)
            if what == _SHARED_END:
                if i in self.sharing and n == self.sharing[i].end:
                    self._leave(i, now)
                continue
            if what == _END and net >= 0 and queue_of[i] == program.compute and n != self.computing[2]:
                continue
            while True:
                if what == _END:
                    if beside[queue_of[i]] and seconds[i] > 0:
                        self._end_beside(queue_of[i] == net, now, slow)
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
                    i = following[i]
                for j, back in waits[i]:
                    if done[j] + back <= done[i]:  # [Note: readiness] in program.py, one wait at a time
                        waiters[j].append(i)
                        record.last_wait[done[i] + 1][i] = j
                        break
                else:
                    takes_s = seconds[i]
                    if factor is not None:
                        takes_s *= factor(ids[i], done[i] + 1)
                    event(2 * i)
                    time(now)
                    if takes_s > 0:
                        if shared and shares(takes_s, dram[i]):
                            self._join(i, takes_s, dram[i] / takes_s, now)
                            break
                        if beside[queue_of[i]]:
                            takes_s = self._begin_beside(queue_of[i] == net, takes_s, now, slow)
                        end_s = now + takes_s
                        if heap and heap[0][0] <= end_s:
                            push(heap, (end_s, end := next(number), _END, i))
                            if beside[queue_of[i]] and queue_of[i] != net:
                                self.computing = (i, end_s, end)
                            break
                        now = end_s  # no other event comes before
                    what = _END
                    continue
                break
        if not self.over:
            at = {program.queue_of[i]: (i, done[i] + 1) for row in waiters.values() for i in row}
            raise deadlock(record, at, done)
        return record

    def _ends_all(self, i: int, most: int) -> bool:
        program, record, k = self.program, self.record, self.done[i]
        if program.queue_of[i] == program.compute:
            record.marks.append(len(record.events))
        self.queues_done[k] += 1
        if self.queues_done[k] == len(program.order):  # [Note: when an iteration is steady]
            record.steady = record.end_iteration(k)
            self.over = record.steady or k == most - 1
        return k == most - 1

    # -- compute beside collectives -----------------------------------------------------------------------------------

    def _begin_beside(self, of_net: bool, takes_s: float, now: float, slow: float) -> float:
        if of_net:
            self.net_runs = True
            self._stretch(now, slow)
        elif self.net_runs:
            return takes_s * slow
        return takes_s

    def _end_beside(self, of_net: bool, now: float, slow: float) -> None:
        if not of_net:
            self.computing = _NOTHING
        elif self.net_runs:
            self.net_runs = False
            self._stretch(now, 1 / slow)

    def _stretch(self, now: float, by: float) -> None:
        """[Note: compute beside collectives]"""
        i, end_s, _ = self.computing
        if i >= 0:
            self.computing = i, now + (end_s - now) * by, next(self.number)
            heapq.heappush(self.heap, (self.computing[1], self.computing[2], _END, i))

    # -- shared rates -------------------------------------------------------------------------------------------------

    def _join(self, i: int, takes_s: float, demand: float, now: float) -> None:
        self._settle(now)
        self.sharing[i] = _Sharer(takes_s, demand, self.loss_s)
        self._retime(now)

    def _leave(self, i: int, now: float) -> None:
        """Its end is scheduled after the new ends of the others."""
        self._settle(now)
        self.record.dram_loss_s[self.done[i] + 1][i] = self.loss_s - self.sharing.pop(i).loss_before_s
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
        queue_of, copies, duty = self.program.queue_of, self.program.copies, self.costs.duty
        speeds, self.share = self.rates.speeds(
            [self.names[queue_of[i]] for i in self.sharing],
            [step.demand for step in self.sharing.values()],
            [copies[i] for i in self.sharing],
            [duty[i] for i in self.sharing],
        )
        for (i, step), speed in zip(self.sharing.items(), speeds):
            if speed != step.speed:
                step.speed, step.end = speed, next(self.number)
                heapq.heappush(self.heap, (now + max(0.0, step.left_s) / speed, step.end, _SHARED_END, i))


def deadlock(record: Record, at: dict[int, tuple[int, int]], done: Sequence[int]) -> Deadlock:
    """at: queue -> (step, iteration)."""
    program, lines = record.program, []
    for q, (i, k) in sorted(at.items(), key=lambda item: program.queues[item[0]]):
        missing = [
            f"{program.ids[j]}@-{back}" if back else str(program.ids[j]) for j, back in program.missing(i, k, done)
        ]
        lines.append(
            f"{program.queues[q]} at step {program.ids[i]} ({program.kinds[i]}) waits for {', '.join(missing)}"
        )
    return Deadlock(f"the plan deadlocks in iteration {min(k for _, k in at.values())}: {'; '.join(lines)}", record)
