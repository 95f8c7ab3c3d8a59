"""A plan compiled once to columns of integers, for all code that follows its steps.

Steps are positions in `plan.steps`, queues in `queues`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pstar_sim.core.plan import Plan
from pstar_sim.core.step import COPIES, Kind, Queue, Step
from pstar_sim.errors import PlanError


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """waits: per step, (step, back) that have to end first, in this iteration (0) or the previous (1).
    copies: per step, whether it crosses the link.
    lanes: cause of a wait per step: its queue, or "barrier".
    """

    ids: tuple[int, ...]
    position: Mapping[int, int]
    kinds: tuple[Kind, ...]
    queues: tuple[Queue, ...]
    queue_of: tuple[int, ...]
    order: tuple[tuple[int, ...], ...]
    waits: tuple[tuple[tuple[int, int], ...], ...]
    copies: tuple[bool, ...]
    lanes: tuple[str, ...]
    compute: int

    @classmethod
    def of(cls, plan: Plan) -> Program:
        """Raises PlanError for a duplicate id, a wait for a step not in the plan, and a plan without compute steps."""
        steps, index = plan.steps, _positions(plan)
        queues = tuple(dict.fromkeys(step.queue for step in steps))
        number = {queue: q for q, queue in enumerate(queues)}
        queue_of = tuple([number[step.queue] for step in steps])
        order: list[list[int]] = [[] for _ in queues]
        for i, q in enumerate(queue_of):
            order[q].append(i)
        waits = _waits(steps, index)
        if Queue.COMPUTE not in number:
            raise PlanError(f"plan of {plan.policy!r} has no compute steps")
        names = [queue.value for queue in queues]
        lanes = [names[q] for q in queue_of]
        for i in _behind_the_barrier(plan, order[number[Queue.ADAM]] if Queue.ADAM in number else (), waits):
            lanes[i] = "barrier"
        return cls(
            ids=tuple(index),
            position=index,
            kinds=tuple([step.kind for step in steps]),
            queues=queues,
            queue_of=queue_of,
            order=tuple(map(tuple, order)),
            waits=waits,
            copies=tuple([step.kind in COPIES for step in steps]),
            lanes=tuple(lanes),
            compute=number[Queue.COMPUTE],
        )

    def previous(self) -> list[int]:
        """Step -> the step before it on its queue, or -1."""
        before = np.full(len(self.ids), -1)
        for row in map(np.array, self.order):
            before[row[1:]] = row[:-1]
        return before.tolist()

    def following(self) -> list[int]:
        """After the last comes the next iteration's first."""
        behind = np.zeros(len(self.ids), dtype=int)
        for row in map(np.array, self.order):
            behind[row] = np.roll(row, -1)
        return behind.tolist()

    def missing(self, i: int, iteration: int, done: Sequence[int]) -> list[tuple[int, int]]:
        """[Note: readiness] Step i may start in an iteration when each (step, back) for which it waits has ended in the
        iteration `back` before it.

        done: per step, its last iteration that ended, -1 before the first.
        """
        return [(j, back) for j, back in self.waits[i] if done[j] < iteration - back]

    def backs(self, i: int, j: int) -> int:
        """Iterations by which j, for which i waits, comes before it."""
        return min(back for other, back in self.waits[i] if other == j)


def _positions(plan: Plan) -> dict[int, int]:
    index = {step.id: i for i, step in enumerate(plan.steps)}
    if len(index) < len(plan.steps):
        again = next(step.id for i, step in enumerate(plan.steps) if index[step.id] != i)
        raise PlanError(f"plan of {plan.policy!r} gives id {again} to several steps")
    return index


def _waits(steps: Sequence[Step], index: Mapping[int, int]) -> tuple[tuple[tuple[int, int], ...], ...]:
    try:
        return tuple([tuple([(index[ref.id], ref.back) for ref in step.after]) for step in steps])
    except KeyError:
        step, ref = next((step, ref) for step in steps for ref in step.after if ref.id not in index)
        raise PlanError(f"step {step.id} waits for step {ref}, which is not in the plan") from None


def _behind_the_barrier(plan: Plan, adam: Sequence[int], waits: Sequence[Sequence[tuple[int, int]]]) -> Iterator[int]:
    steps, last_moment = plan.steps, len(plan.workload.moments) - 1
    behind = False
    for i in adam:
        behind = behind or any(
            steps[j].kind is Kind.COMPUTE and steps[j].moment == last_moment and not back for j, back in waits[i]
        )
        if behind and steps[i].kind is Kind.CPU_UPDATE:
            yield i


NO_STEPS = Program(
    ids=(), position={}, kinds=(), queues=(), queue_of=(), order=(), waits=(), copies=(), lanes=(), compute=-1
)
"""Program of a plan without steps, with which a warm-up runs on demand. No driver follows it: `Program.of` refuses
it."""
