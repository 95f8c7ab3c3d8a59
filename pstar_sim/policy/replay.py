"""Replay: the pace of a finished plan on one rank, its steps in their order, by the rules of the simulator.

The event loop decides while it plays and predicts what it has decided; here nothing is decided any more, so that plans
of any policy can be compared by the figure the simulator will find. No memory, no causes, no timeline: seconds only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pstar_sim.core.plan import Plan
from pstar_sim.core.step import COPIES, Queue
from pstar_sim.cost import CostModel

__all__ = ["period_s"]

TOLERANCE = 1e-9
MOST_ITERATIONS = 8


def period_s(plan: Plan, cost: CostModel | None = None) -> float:
    """Seconds of one steady iteration (of one that is not steady after 8, the pace of its slowest queue over the later
    half). Raises ValueError for a plan that deadlocks."""
    run = _Replay(plan, cost or CostModel(plan.workload, plan.machine, plan.layout))
    return run.shared() if run.rates_may_be_short() else run.alone()


class _Replay:
    def __init__(self, plan: Plan, cost: CostModel) -> None:
        steps = plan.steps
        self.machine = plan.machine
        self.dram_bytes_per_s = (
            plan.machine.host.dram_bytes_per_s / plan.machine.local_ranks
        )  # equal ranks share evenly
        index = {step.id: i for i, step in enumerate(steps)}
        self.queues = list(dict.fromkeys(step.queue for step in steps))
        number = {queue: q for q, queue in enumerate(self.queues)}
        self.queue_of = [number[step.queue] for step in steps]
        self.rows: list[list[int]] = [[] for _ in self.queues]
        for i, q in enumerate(self.queue_of):
            self.rows[q].append(i)
        self.after = [tuple((index[ref.id], ref.back) for ref in step.after) for step in steps]
        self.seconds = [cost.seconds(step) for step in steps]
        self.dram = [float(cost.dram_bytes(step)) for step in steps]
        self.copies = [step.kind in COPIES for step in steps]
        slow = self.machine.slowdowns
        self.duty = [cost.duty(step) for step in steps] if slow else [1.0] * len(steps)
        self.ended: list[list[float]] = []
        self.compute = number[Queue.COMPUTE]

    def rates_may_be_short(self) -> bool:
        if not self.machine.link.duplex or self.machine.slowdowns:
            return True
        most = [0.0] * len(self.queues)
        for q, size, seconds in zip(self.queue_of, self.dram, self.seconds):
            if size and seconds > 0:
                most[q] = max(most[q], size / seconds)
        return sum(most) > self.dram_bytes_per_s

    def _pace(self) -> float | None:
        """The period if the last iteration is steady, or the last that may be played."""
        if len(self.ended) < 2:
            return None
        now, before = self.ended[-1], self.ended[-2]
        shift = [a - b for a, b in zip(now, before)]
        last = self.rows[self.compute][-1]
        if max(shift) - min(shift) <= TOLERANCE * max(shift):
            return shift[last]
        if len(self.ended) < MOST_ITERATIONS:
            return None
        half = max(1, (len(self.ended) - 1) // 2)
        earlier = self.ended[-1 - half]
        return max((now[row[-1]] - earlier[row[-1]]) / half for row in self.rows)

    def _order(self) -> list[int]:
        """Steps so that each comes behind those of its iteration that it waits for."""
        count = len(self.after)
        waiting = [0] * count
        followers: list[list[int]] = [[] for _ in range(count)]
        for row in self.rows:
            for i, j in pairwise(row):
                followers[i].append(j)
                waiting[j] += 1
        for i, refs in enumerate(self.after):
            for j, back in refs:
                if not back:
                    followers[j].append(i)
                    waiting[i] += 1
        ready = [i for i in range(count) if not waiting[i]]
        order: list[int] = []
        while ready:
            i = ready.pop()
            order.append(i)
            for j in followers[i]:
                waiting[j] -= 1
                if not waiting[j]:
                    ready.append(j)
        if len(order) < count:
            raise ValueError("the plan's steps wait for each other in a circle")
        return order

    def alone(self) -> float:
        """Where nothing is shared a step lasts its nominal seconds: each end is a maximum and a sum."""
        seconds, queue_of, after = self.seconds, self.queue_of, self.after
        order = self._order()
        free = [0.0] * len(self.queues)
        before: list[float] = [0.0] * len(seconds)
        while True:
            ended = [0.0] * len(seconds)
            for i in order:
                q = queue_of[i]
                start = free[q]
                for j, back in after[i]:
                    other = before[j] if back else ended[j]
                    if other > start:
                        start = other
                free[q] = ended[i] = start + seconds[i]
            self.ended.append(ended)
            before = ended
            pace = self._pace()
            if pace is not None:
                return pace

    def shared(self) -> float:
        """Event by event: speeds change whenever a step that shares something begins or ends."""
        count, queues = len(self.seconds), len(self.queues)
        at = [0] * queues  # steps begun on each queue, over all iterations
        done = [0] * count
        waiting: list[list[int]] = [[] for _ in range(count)]  # queues to look at again when a step has ended
        running = [-1] * queues
        left = [0.0] * queues
        speed = [0.0] * queues
        until = [0.0] * queues
        sharing = [False] * queues
        slow = bool(self.machine.slowdowns)
        now = settled = 0.0
        laps = [0] * queues
        self.ended.append([0.0] * count)
        rows: list[list[float]] = self.ended
        finished = [0] * (MOST_ITERATIONS + 1)
        look = list(range(queues))
        while True:
            while look:
                q = look.pop()
                if running[q] >= 0 or laps[q] == MOST_ITERATIONS:
                    continue
                i = self.rows[q][at[q]]
                blocked = next((j for j, back in self.after[i] if done[j] < laps[q] + 1 - back), -1)
                if blocked >= 0:
                    waiting[blocked].append(q)
                    continue
                running[q] = i
                sharing[q] = self.seconds[i] > 0 and (self.dram[i] > 0 or slow)
                until[q] = now + self.seconds[i]
                if sharing[q]:
                    left[q], speed[q] = self.seconds[i], 0.0
                    settled = self._retime(now, settled, running, sharing, left, speed, until)
            busy = [q for q in range(queues) if running[q] >= 0]
            if not busy:
                raise ValueError("the plan's steps wait for each other in a circle")
            q = min(busy, key=lambda q: until[q])
            now = until[q]
            i = running[q]
            running[q] = -1
            if sharing[q]:
                sharing[q] = False
                settled = self._retime(now, settled, running, sharing, left, speed, until)
            k = laps[q]
            while len(rows) <= k:
                rows.append([0.0] * count)
            rows[k][i] = now
            done[i] += 1
            look += [*waiting[i], q]
            waiting[i].clear()
            at[q] += 1
            if at[q] == len(self.rows[q]):
                at[q], laps[q] = 0, k + 1
                finished[k] += 1
                if finished[k] == queues:
                    later, self.ended = self.ended[k + 1 :], self.ended[: k + 1]
                    pace = self._pace()
                    if pace is not None:
                        return pace
                    self.ended += later
                    rows = self.ended

    def _retime(
        self,
        now: float,
        settled: float,
        running: Sequence[int],
        sharing: Sequence[bool],
        left: list[float],
        speed: list[float],
        until: list[float],
    ) -> float:
        """New speeds and ends of the steps that share something; the time up to which progress is booked."""
        busy = [q for q in range(len(running)) if sharing[q]]
        copies = sum(self.copies[running[q]] for q in busy)
        halved = 0.5 if copies > 1 and not self.machine.link.duplex else 1.0
        wanted = 0.0
        for q in busy:
            i = running[q]
            left[q] -= (now - settled) * speed[q]
            wanted += self.dram[i] / self.seconds[i] * (halved if self.copies[i] else 1.0)
        share = min(1.0, self.dram_bytes_per_s / wanted) if wanted > 0 else 1.0
        for q in busy:
            on_link = halved if self.copies[running[q]] else 1.0
            speed[q] = min(share, self._beside(q, busy, running)) * on_link
            until[q] = now + max(0.0, left[q]) / speed[q]
        return now

    def _beside(self, q: int, busy: Sequence[int], running: Sequence[int]) -> float:
        """Speed beside the steps that run now, by the measured factors of the machine."""
        slowdowns = self.machine.slowdowns
        if not slowdowns:
            return 1.0
        factor = 1.0
        for p in busy:
            if p != q:
                alone = slowdowns.get(f"{self.queues[q].value}_while_{self.queues[p].value}", 1.0)
                factor *= 1 + (alone - 1) * self.duty[running[p]]
        return 1 / max(1.0, factor * self.duty[running[q]])
