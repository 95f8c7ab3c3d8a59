"""Program: a plan compiled once to columns of integers, for everything that follows its steps.

A step is its position in `plan.steps`; a queue is its position in `queues`. Knows no clock and no bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pstar_sim.core.plan import Plan
from pstar_sim.core.step import COPIES, Kind, Queue
from pstar_sim.errors import PlanError

__all__ = ["NO_STEPS", "Program"]


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """position: of each step id.
    queues: in the order in which the plan first names them.
    queue_of: queue of each step.
    order: steps of each queue, in the order in which the queue runs them.
    waits: of each step, (step, back) that have to end first, in this iteration (back 0) or the one before (back 1).
    copies: whether the step crosses the link between host and gpu.
    lanes: what a wait for the step is put down to: the name of its queue, or "barrier".
    compute: the compute queue.
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
        """Compile a plan. Raises PlanError for an id given twice, a wait for a step that is not in the plan, and a plan
        without compute steps."""
        steps = plan.steps
        index = {step.id: i for i, step in enumerate(steps)}
        if len(index) < len(steps):
            raise PlanError(f"plan of {plan.policy!r} gives one id to several steps")
        number: dict[Queue, int] = {}
        order: list[list[int]] = []
        queue_of: list[int] = []
        waits: list[tuple[tuple[int, int], ...]] = []
        for i, step in enumerate(steps):
            q = number.setdefault(step.queue, len(number))
            if q == len(order):
                order.append([])
            order[q].append(i)
            queue_of.append(q)
            for ref in step.after:
                if ref.id not in index:
                    raise PlanError(f"step {step.id} waits for step {ref}, which is not in the plan")
            waits.append(tuple((index[ref.id], ref.back) for ref in step.after))
        if Queue.COMPUTE not in number:
            raise PlanError(f"plan of {plan.policy!r} has no compute steps")
        return cls(
            ids=tuple(index),
            position=index,
            kinds=tuple(step.kind for step in steps),
            queues=tuple(number),
            queue_of=tuple(queue_of),
            order=tuple(map(tuple, order)),
            waits=tuple(waits),
            copies=tuple(step.kind in COPIES for step in steps),
            lanes=_lanes(plan, order[number[Queue.ADAM]] if Queue.ADAM in number else ()),
            compute=number[Queue.COMPUTE],
        )

    def previous(self) -> list[int]:
        """Of each step, the one before it on its queue; -1 for the first."""
        before = [-1] * len(self.ids)
        for row in self.order:
            for a, b in pairwise(row):
                before[b] = a
        return before

    def following(self) -> list[int]:
        """Of each step, the next one on its queue; behind the last comes the first, of the next iteration."""
        behind = [-1] * len(self.ids)
        for row in self.order:
            for a, b in zip(row, (*row[1:], row[0])):
                behind[a] = b
        return behind

    def missing(self, i: int, iteration: int, done: Sequence[int]) -> list[tuple[int, int]]:
        """[Note: readiness] Step i may start in an iteration when each (step, back) that it waits for has ended in the
        iteration `back` before it; those that have not. done: of each step, the last iteration in which it ended, -1
        before the first."""
        return [(j, back) for j, back in self.waits[i] if done[j] < iteration - back]

    def backs(self, i: int, j: int) -> int:
        """How many iterations before its own the step i waits for step j."""
        return min(back for other, back in self.waits[i] if other == j)


def _lanes(plan: Plan, adam: list[int] | tuple[()]) -> tuple[str, ...]:
    lanes = [step.queue.value for step in plan.steps]
    last_moment = len(plan.workload.moments) - 1
    ends = {step.id for step in plan.steps if step.kind is Kind.COMPUTE and step.moment == last_moment}
    behind = False
    for i in adam:
        step = plan.steps[i]
        behind = behind or any(ref.id in ends and not ref.back for ref in step.after)
        if behind and step.kind is Kind.CPU_ADAM:
            lanes[i] = "barrier"
    return tuple(lanes)


NO_STEPS = Program(
    ids=(), position={}, kinds=(), queues=(), queue_of=(), order=(), waits=(), copies=(), lanes=(), compute=-1
)
"""Of a plan without steps, under which a warm-up runs on demand. Nothing follows it: `Program.of` refuses it."""
