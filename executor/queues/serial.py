"""One step at a time, chosen, in the user's thread: for tests of interleavings, and measurements that `follow` a
predicted order."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from executor.queues.interface import SIDE_QUEUES, Progress, QueuesBase, Work
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Kind, Queue, Step
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import OutOfMemory, PlanError


@dataclass(frozen=True, slots=True)
class QueueEvent:
    """kind: "start" or "end" of a step that could do so."""

    kind: str
    step: Step
    iteration: int


Chooser = Callable[[Sequence[QueueEvent], QueueEvent, bool], int | None]
"""(possible events, the compute queue's next event, whether it may happen) -> index of the event that happens, or None
for the compute queue's event. If that event may not happen yet, None stands for index 0."""


class SerialQueues(QueuesBase):
    """Whenever the compute queue starts or ends a step, the chooser decides which steps of the other queues start and
    end first.

    works_early(step): whether the step's work is done when it starts rather than when it ends (a missing edge then
        shows as a wrong result either way).
    """

    def __init__(self, chooser: Chooser, *, works_early: Callable[[Step], bool] | None = None) -> None:
        super().__init__()
        self._chooser = chooser
        self._works_early = works_early or (lambda step: False)
        self._flying: dict[Queue, bool] = {}  # queue -> whether its running step has done its work
        self._inside: set[Queue] = set()  # queues inside a call of their step's work

    def renew(self) -> SerialQueues:
        return SerialQueues(self._chooser, works_early=self._works_early)

    def stand(self, at: Mapping[Queue, tuple[int, int]]) -> None:
        self._at.update(at)

    def start(self, progress: Progress, work: Work) -> None:
        self._progress, self._worker = progress, weakref.ref(work)
        self._started = progress
        self._at = {queue: (0, 0) for queue in SIDE_QUEUES if progress.order.get(queue)}

    def allow(self, iteration: int) -> None:
        self._allowed = max(self._allowed, iteration)

    def allow_net(self, iteration: int) -> None:
        self._net_allowed = max(self._net_allowed, iteration)

    def fail(self, error: BaseException) -> None:
        self._failure = self._failure or error

    def await_steps(self, steps: Sequence[int], iteration: int) -> None:
        while any(self._progress.done[i] < iteration for i in steps):
            possible = [row for row in self._possible() if row[1] not in self._inside]
            if not possible:
                raise PlanError(f"the queues are stuck: a step waits for steps {list(steps)} of iteration {iteration}")
            self._happen(*min(possible, key=lambda row: row[1] is not Queue.NET))

    def _possible(self) -> list[tuple[QueueEvent, Queue, int]]:
        found: list[tuple[QueueEvent, Queue, int]] = []
        for queue, (iteration, at) in self._at.items():
            i = self._progress.order[queue][at]
            step = self._progress.steps[i]
            limit = min(self._allowed, self._net_allowed) if queue is Queue.NET else self._allowed
            if queue in self._flying:
                found.append((QueueEvent("end", step, iteration), queue, i))
            elif (
                not self._paused
                and iteration <= limit
                and queue not in self._short
                and self._progress.ready(i, iteration)
            ):
                found.append((QueueEvent("start", step, iteration), queue, i))
        return found

    def _happen(self, event: QueueEvent, queue: Queue, i: int) -> None:
        if self._failure is not None:
            raise self._failure
        work, iteration = self._work, event.iteration
        if event.kind == "start":
            try:
                work.begin(i, iteration, 0.0, None)
            except OutOfMemory as error:
                self._short[queue] = error
                raise
            early = self._works_early(event.step)
            if early:
                self._execute(queue, i, iteration)
            self._flying[queue] = early
            return
        if not self._flying.pop(queue):
            self._execute(queue, i, iteration)
        work.finish(i, iteration)
        self._progress.done[i] = iteration
        at = self._at[queue][1] + 1
        self._at[queue] = (iteration, at) if at < len(self._progress.order[queue]) else (iteration + 1, 0)

    def _execute(self, queue: Queue, i: int, iteration: int) -> None:
        self._inside.add(queue)
        try:
            self._work.work(i, iteration)
        finally:
            self._inside.discard(queue)

    def _let_others(self, compute: QueueEvent, i: int) -> None:
        while True:
            possible = self._possible()
            may = compute.kind == "end" or self._progress.ready(i, compute.iteration)
            if not possible:
                if may:
                    return
                if self.short is not None:
                    raise self.short
                raise PlanError(
                    f"the queues are stuck: {self._progress.word(i, compute.iteration)} waits for steps "
                    f"{[self._progress.steps[j].id for j in self._progress.missing(i, compute.iteration)]}"
                )
            pick = self._chooser([event for event, _, _ in possible], compute, may)
            if pick is None:
                if may:
                    return
                pick = 0
            self._happen(*possible[pick])

    def wait(self, i: int, iteration: int) -> int | None:
        self._let_others(QueueEvent("start", self._progress.steps[i], iteration), i)
        return None

    def before_end(self, i: int, iteration: int) -> None:
        self._let_others(QueueEvent("end", self._progress.steps[i], iteration), i)

    def end_step(self, i: int, iteration: int) -> None:
        self._progress.done[i] = iteration

    def settle(self, iteration: int) -> None:
        side = [i for queue in SIDE_QUEUES for i in self._progress.order.get(queue, ())]
        while any(self._progress.done[i] < iteration for i in side):
            possible = [row for row in self._possible() if row[0].iteration <= iteration or row[0].kind == "end"]
            if not possible:
                if self.short is not None:
                    raise self.short
                raise PlanError(f"the queues are stuck before the end of iteration {iteration}")
            with contextlib.suppress(OutOfMemory):  # the error is in `short`; the other queues continue
                self._happen(*possible[0])

    def pause(self) -> None:
        self._paused = True
        while self._flying and self._started is not None:
            self._happen(*self._possible()[0])

    def resume(self) -> None:
        self._paused = False

    def jump(self, iteration: int) -> None:
        self._progress.done[:] = [iteration] * len(self._progress.done)
        for queue in self._at:
            self._at[queue] = (iteration + 1, 0)
        self._short.clear()

    def stop(self) -> None:
        self._at.clear()
        self._flying.clear()


def follow(timeline: Timeline, plan: Plan) -> Chooser:
    """Returns a chooser that lets steps start and end in the order that a timeline predicts for its steady (last)
    iteration, repeated with the timeline's period. Ends come before starts at equal times."""
    last = timeline.iterations - 1
    begun: dict[int, float] = {}
    ended: dict[int, float] = {}
    for span in timeline.spans:
        if span.iteration == last:
            begun[span.step], ended[span.step] = span.start_s, span.end_s
    missing = [step.id for step in plan.steps if step.id not in begun]
    if missing:
        raise PlanError(
            f"the timeline's last iteration has no span of step {missing[0]}; the timeline belongs to another plan"
        )
    period = timeline.iteration_s

    def rank(event: QueueEvent) -> tuple[float, int]:
        starts = event.kind == "start"
        time_s = (begun if starts else ended)[event.step.id] + event.iteration * period
        # 1 ns of slack, because the compared times of two iterations are rounded separately
        return (round(time_s, 9), 1 if starts and event.step.kind is not Kind.DROP else 0)

    def choose(possible: Sequence[QueueEvent], compute: QueueEvent, may: bool) -> int | None:
        best = min(range(len(possible)), key=lambda i: rank(possible[i]))
        if may and rank(possible[best]) > rank(compute):
            return None
        return best

    return choose
