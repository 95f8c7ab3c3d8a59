"""Steps unrolled over iterations, with a vector clock each: [Note: what precedes what] in __init__.py."""

from __future__ import annotations

from collections.abc import Iterator

from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Kind, Step

OTHERS = {"remote": "param", "grad_remote": "grad", "grad32_remote": "grad32"}
"""List of the other ranks' slices -> list of the own slice."""


def label(step: Step) -> str:
    words = [step.kind.value]
    if step.chunk is not None:
        words.append(f"chunk {step.chunk}")
    if step.stash is not None:
        words.append(f"stash {step.stash}")
    if step.list is not None:
        words.append(step.list)
    if step.part is not None:
        words.append(f"part {step.part}")
    if step.kind is Kind.COMPUTE:
        words = [f"moment {step.moment}"]
    return f"step {step.id} ({' '.join(words)})"


class Unrolled:
    """An instance is iteration * len(steps) + position."""

    def __init__(self, plan: Plan, order: list[int], iterations: int) -> None:
        steps = plan.steps
        self.steps = steps
        self.count = len(steps)
        self.iterations = iterations
        self.order = [k * self.count + i for k in range(iterations + 1) for i in order]
        self.queues = sorted({step.queue for step in steps})
        index = {queue: q for q, queue in enumerate(self.queues)}
        position = {step.id: i for i, step in enumerate(steps)}
        self.queue_of = [index[step.queue] for step in steps]
        self.length = [0] * len(self.queues)
        self.rank: list[int] = []  # place of each step on its queue
        for q in self.queue_of:
            self.rank.append(self.length[q])
            self.length[q] += 1

        # clock[s][q]: number of steps of queue q that must have ended before instance s starts.
        zero = [0] * len(self.queues)
        self.clock: list[list[int]] = [zero] * (self.count * (iterations + 1))
        ended = [zero] * len(self.queues)  # clock at the end of the last instance on each queue
        at_end: list[list[int]] = [zero] * (self.count * (iterations + 1))
        for s in self.order:
            k, i = divmod(s, self.count)
            q = self.queue_of[i]
            now = list(ended[q])
            for ref in steps[i].after:
                if ref.back > k:
                    continue
                j = position[ref.id]
                p = self.queue_of[j]
                lap = k - ref.back
                if now[p] > lap * self.length[p] + self.rank[j]:
                    continue  # a step that waits for it has ended, so the clock contains it already
                now = list(map(max, now, at_end[lap * self.count + j]))
            self.clock[s] = now
            after = list(now)
            after[q] = k * self.length[q] + self.rank[i] + 1
            at_end[s] = ended[q] = after

    def step(self, instance: int) -> Step:
        return self.steps[instance % self.count]

    def iteration(self, instance: int) -> int:
        return instance // self.count

    def sequence(self, instance: int) -> int:
        """Place of an instance among all instances on its queue."""
        k, i = divmod(instance, self.count)
        return k * self.length[self.queue_of[i]] + self.rank[i]

    def precedes(self, first: int, then: int) -> bool:
        """Whether `first` has ended when `then` starts in every legal interleaving."""
        return self.clock[then][self.queue_of[first % self.count]] > self.sequence(first)

    def _ahead(self) -> Iterator[int]:
        """That can start iteration N before 0 has ended everywhere."""
        seen: set[int] = set()
        for i in range(self.count):
            q = self.queue_of[i]
            if q in seen:
                continue
            seen.add(q)
            clock = self.clock[self.iterations * self.count + i]
            if any(done < length for done, length in zip(clock, self.length)):
                yield q

    def bounded(self) -> bool:
        """At most `iterations` iterations are under way at any time."""
        return next(self._ahead(), None) is None

    def unbounded_queue(self) -> str:
        return self.queues[next(self._ahead())].value
