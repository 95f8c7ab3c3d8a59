"""follow: a program in its own order, by the clock, until two successive iterations agree.

A step starts when its queue has come to it and every step that it waits for has ended. Nothing is decided here: order
and waits are the program's, seconds are given.

[Note: events at equal times] are handled in the order in which they were set off: the end of a step when the step
began (or when its speed changed last), a queue that waits when the step that it waited for ended. A queue whose step
ends goes on at once, before anything else that happens at that time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pstar_sim.core.program import Program
from pstar_sim.core.rules import Columns, Rates, is_steady, pace_s
from pstar_sim.errors import PlanError

__all__ = ["Deadlock", "Factor", "Record", "deadlock", "follow"]

_WAKE, _END, _SHARED_END = range(3)

Factor = Callable[[int, int], float]
"""(step id, iteration) -> factor on the step's nominal seconds."""


@dataclass(slots=True, eq=False)
class Record:
    """What happened, by iteration and step. The last row is the iteration that counts.

    ready: when the queue came to the step.
    arrived: when it could have started; later than `ready` where it waited for other steps, earlier than `begun` where
        it had to meet the same step of other ranks.
    begun, ended: seconds.
    waited_for: the step that it waited for last, of those that waited.
    dram_lost: seconds that it lost because DRAM was short; no rows where it never can be.
    steady: whether the last two iterations agree ([Note: when an iteration is steady] in rules.py).
    events, at_s: every start (2 * step) and end (2 * step + 1) in the order in which they happened, and when. Those of
        iterations that were cut off are among them.
    marks: number of events when the compute queue had ended each iteration.
    """

    program: Program
    ready: list[list[float]]
    arrived: list[list[float]]
    begun: list[list[float]]
    ended: list[list[float]]
    waited_for: list[dict[int, int]]
    dram_lost: list[list[float]]
    steady: bool = False
    events: list[int] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)

    @classmethod
    def empty(cls, program: Program, iterations: int, *, shared: bool) -> Record:
        count = len(program.ids)

        def rows() -> list[list[float]]:
            return [[0.0] * count for _ in range(iterations)]

        begun = rows()
        waited: list[dict[int, int]] = [{} for _ in range(iterations)]
        return cls(program, rows(), begun, begun, rows(), waited, rows() if shared else [])

    def cut(self, last: int) -> None:
        """Forget what came after iteration `last`."""
        for rows in (self.ready, self.begun, self.ended, self.waited_for, self.dram_lost):
            del rows[last + 1 :]
        if self.arrived is not self.begun:
            del self.arrived[last + 1 :]

    @property
    def iteration_s(self) -> float:
        return pace_s(self.program, self.ended, steady=self.steady)


def follow(
    program: Program,
    columns: Columns,
    rates: Rates,
    *,
    factor: Factor | None = None,
    most: int = 8,
) -> Record:
    """Play the program until it is steady, `most` (>= 2) iterations at most. Raises Deadlock for one that deadlocks,
    naming the step at which each queue stands."""
    return _Follow(program, columns, rates, jitter=factor is not None, most=most).run(factor, most)


class Deadlock(PlanError):
    """Every queue waits. record: what happened before; None where it was not kept, as after pickling."""

    def __init__(self, message: str, record: Record | None = None) -> None:
        super().__init__(message)
        self.record = record


class _Follow:
    """One run. Events are (time, number in which it was set off, what, queue, stamp): [Note: events at equal times]."""

    def __init__(self, program: Program, columns: Columns, rates: Rates, *, jitter: bool, most: int) -> None:
        self.program, self.columns, self.rates = program, columns, rates
        self.shared = rates.may_be_short(program.queue_of, columns, jitter=jitter)
        self.record = Record.empty(program, most, shared=self.shared)
        queues = len(program.queues)
        self.names = [queue.value for queue in program.queues]
        self.now = 0.0
        self.heap: list[tuple[float, int, int, int, int]] = []
        self.set_off = 0
        self.current = [row[0] for row in program.order]  # step at which each queue stands
        # Queues whose step shares something, in the order in which they joined; seconds left, speed, bytes per second
        # wanted of DRAM, number of changes of speed (an end that was set off before the last one is void).
        self.sharing: list[int] = []
        self.left_s = [0.0] * queues
        self.speed = [0.0] * queues
        self.demand = [0.0] * queues
        self.stamp = [0] * queues
        self.settled_s = self.lost_s = 0.0
        self.share = 1.0
        self.lost_before_s = [0.0] * queues

    def run(self, factor: Factor | None, most: int) -> Record:
        program, columns, record, heap, current = self.program, self.columns, self.record, self.heap, self.current
        order, waits, ids, compute = program.order, program.waits, program.ids, program.compute
        seconds, dram, shares = columns.seconds, columns.dram_bytes, self.rates.shares
        ready, begun, ended, waited_for = record.ready, record.begun, record.ended, record.waited_for
        event, time = record.events.append, record.at_s.append
        queues = len(order)
        done = [-1] * len(ids)  # last iteration in which the step ended
        waiters: list[list[int]] = [[] for _ in ids]  # queues
        position, lap, wait = [0] * queues, [0] * queues, [0] * queues
        finished = [0] * most  # queues that have ended the iteration
        stopped, last = False, most - 1
        for q in range(queues):
            heap.append((0.0, q, _WAKE, q, 0))
        self.set_off = queues
        while heap:
            self.now, _, what, q, stamp = heapq.heappop(heap)
            if what == _SHARED_END:
                if stamp == self.stamp[q]:
                    self._leave(q)
                continue
            now, k, i = self.now, lap[q], current[q]
            ending = what == _END
            while True:
                if ending:
                    ended[k][i] = now
                    if self.shared and begun[k][i] < now and shares(1.0, dram[i]):
                        record.dram_lost[k][i] = self._dram_lost_s() - self.lost_before_s[q]
                    event(2 * i + 1)
                    time(now)
                    done[i] += 1
                    if waiters[i]:
                        for other in waiters[i]:
                            heapq.heappush(heap, (now, self.set_off, _WAKE, other, 0))
                            self.set_off += 1
                        waiters[i].clear()
                    position[q] += 1
                    if position[q] == len(order[q]):
                        position[q] = 0
                        lap[q] = k + 1
                        if q == compute:
                            record.marks.append(len(record.events))
                        finished[k] += 1
                        if finished[k] == queues:  # [Note: when an iteration is steady]
                            record.steady = k >= 1 and is_steady(ended[k], ended[k - 1])
                            if record.steady or k == most - 1:
                                stopped, last = True, k
                        k += 1
                    if stopped or k == most:
                        break
                    i = current[q] = order[q][position[q]]
                    ready[k][i] = now
                    wait[q] = 0
                blocked = False
                row = waits[i]
                for n in range(wait[q], len(row)):
                    j, back = row[n]
                    if done[j] < k - back:  # [Note: readiness] in program.py, one wait at a time
                        waiters[j].append(q)
                        waited_for[k][i] = j
                        wait[q] = n
                        blocked = True
                        break
                if blocked:
                    break
                takes_s = seconds[i]
                if factor is not None:
                    takes_s *= factor(ids[i], k)
                begun[k][i] = now
                event(2 * i)
                time(now)
                if takes_s > 0:
                    if self.shared and shares(takes_s, dram[i]):
                        self._join(q, takes_s, dram[i] / takes_s)
                    else:
                        heapq.heappush(heap, (now + takes_s, self.set_off, _END, q, 0))
                        self.set_off += 1
                    break
                ending = True
        if not stopped:
            raise deadlock(record, {q: (current[q], lap[q]) for q in range(queues) if lap[q] < most}, done)
        record.cut(last)
        return record

    # -- shared rates -------------------------------------------------------------------------------------------------

    def _dram_lost_s(self) -> float:
        """Integral over time of (1 - share of DRAM)."""
        return self.lost_s + (self.now - self.settled_s) * (1.0 - self.share)

    def _join(self, q: int, takes_s: float, demand: float) -> None:
        """The step of the queue shares something from now on."""
        self.lost_before_s[q] = self._dram_lost_s()
        self._settle()
        self.left_s[q], self.speed[q], self.demand[q] = takes_s, 0.0, demand
        self.sharing.append(q)
        self._retime()

    def _leave(self, q: int) -> None:
        """The step of the queue has done all its work; its end is set off behind the new ends of the others."""
        self._settle()
        self.sharing.remove(q)
        self.stamp[q] += 1
        self._retime()
        heapq.heappush(self.heap, (self.now, self.set_off, _END, q, 0))
        self.set_off += 1

    def _settle(self) -> None:
        """Book the progress made at the old speeds."""
        elapsed_s = self.now - self.settled_s
        if elapsed_s > 0:
            self.lost_s += elapsed_s * (1.0 - self.share)
            for q in self.sharing:
                self.left_s[q] -= elapsed_s * self.speed[q]
        self.settled_s = self.now

    def _retime(self) -> None:
        """New speeds, and another end for each step whose speed changed."""
        copies, duty = self.program.copies, self.columns.duty
        running = [self.current[q] for q in self.sharing]
        speeds, self.share = self.rates.speeds(
            [self.names[q] for q in self.sharing],
            [self.demand[q] for q in self.sharing],
            [copies[i] for i in running],
            [duty[i] for i in running],
        )
        for q, speed in zip(self.sharing, speeds):
            if speed != self.speed[q]:
                self.speed[q] = speed
                self.stamp[q] += 1
                end_s = self.now + max(0.0, self.left_s[q]) / speed
                heapq.heappush(self.heap, (end_s, self.set_off, _SHARED_END, q, self.stamp[q]))
                self.set_off += 1


def deadlock(record: Record, at: dict[int, tuple[int, int]], done: Sequence[int]) -> Deadlock:
    """Every queue waits: say for what. at: queue -> (step, iteration) at which it stands."""
    program, lines = record.program, []
    for q, (i, k) in sorted(at.items(), key=lambda item: program.queues[item[0]]):
        missing = [
            f"{program.ids[j]}@-{back}" if back else str(program.ids[j]) for j, back in program.missing(i, k, done)
        ]
        lines.append(
            f"{program.queues[q]} at step {program.ids[i]} ({program.kinds[i]}) waits for {', '.join(missing)}"
        )
    return Deadlock(f"the plan deadlocks in iteration {min(k for _, k in at.values())}: {'; '.join(lines)}", record)
