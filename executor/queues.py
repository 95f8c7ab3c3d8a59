"""The queues of a plan in motion: each runs its steps in order, a step starts when what it names in `after` has ended.

Compute runs in the user's thread; the other queues run in a thread each (`ThreadQueues`) or, one step at a time and in
an order that a chooser decides, inside the user's thread (`SerialQueues`: tests of interleavings, and measurements that
follow a predicted order). Neither knows what a step does: they call `Work`.

[Note: iterations] Every queue runs all steps of iteration k before those of k+1. `allow(k)` lets steps of iterations up
to k run. Those of the net queue wait for `allow_net(k)` besides, which comes with the first moment of iteration k:
between two iterations no collective is in flight on any rank. `done[i]` is the last iteration in which step i ended, -1
before the first, so `id@-1` is satisfied at the start.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Kind, Queue, Step
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import OutOfMemory, PlanError
from pstar_sim.python310 import add_note

if TYPE_CHECKING:
    from executor.arena import ByteChange
    from executor.measured import IterationLog, StepLog

__all__ = ["Program", "QueueEvent", "Queues", "SerialQueues", "ThreadQueues", "Work", "follow"]

log = logging.getLogger("executor")

SIDE_QUEUES = (Queue.H2D, Queue.D2H, Queue.ADAM, Queue.NET)


class Program:
    """A plan's steps by position, ready to be run. done: see [Note: iterations]."""

    def __init__(self, plan: Plan) -> None:
        self.steps = plan.steps
        index = {step.id: i for i, step in enumerate(plan.steps)}
        if len(index) < len(plan.steps):
            raise PlanError(f"plan of {plan.policy!r} gives one id to several steps")
        self.after: list[tuple[tuple[int, int], ...]] = []
        self.order: dict[Queue, list[int]] = defaultdict(list)
        self.wakes: list[set[Queue]] = [set() for _ in plan.steps]  # queues that have a step after this one
        for i, step in enumerate(plan.steps):
            for ref in step.after:
                if ref.id not in index:
                    raise PlanError(f"step {step.id} waits for step {ref}, which the plan does not have")
                self.wakes[index[ref.id]].add(step.queue)
            self.after.append(tuple((index[ref.id], ref.back) for ref in step.after))
            self.order[step.queue].append(i)
        unknown = set(self.order) - {Queue.COMPUTE, *SIDE_QUEUES}
        if unknown:
            raise PlanError(f"this executor has no queue {', '.join(sorted(unknown))}")
        self.done = [-1] * len(plan.steps)

    def ready(self, i: int, iteration: int) -> bool:
        done = self.done
        return all(done[j] >= iteration - back for j, back in self.after[i])

    def missing(self, i: int, iteration: int) -> list[int]:
        """Positions of the steps that step i still waits for."""
        return [j for j, back in self.after[i] if self.done[j] < iteration - back]

    def waiting(self, i: int, iteration: int) -> str:
        """For the watchdog: the step, and the steps it waits for."""
        missing = [self.word(j, iteration - back) for j, back in self.after[i] if self.done[j] < iteration - back]
        return self.word(i, iteration) + (f", which waits for {', '.join(missing[:4])}" if missing else "")

    def word(self, i: int, iteration: int) -> str:
        """For messages: "step 12 (fetch of chunk 3) of iteration 4"."""
        step = self.steps[i]
        about = f" of chunk {step.chunk}" if step.chunk is not None else f" of moment {step.moment}"
        return f"step {step.id} ({step.kind.value}{about}) of iteration {iteration}"


class Work(Protocol):
    """What a step does, in two halves: `begin` takes memory, `finish` (after `work`) frees it and writes the log.

    [Note: short of memory] `begin` may raise OutOfMemory, having changed nothing. The queue then keeps the step and
    starts nothing until `jump`; the others go on. The user's thread gets the error from `wait`, or finds it in `short`.
    """

    def begin(self, i: int, iteration: int, ready_s: float, waited_for: int | None) -> None: ...

    def work(self, i: int, iteration: int) -> None: ...

    def finish(self, i: int, iteration: int) -> None: ...

    def landed(self, chunk: int) -> None:
        """The compute queue may read what was copied to the gpu for this chunk from now on."""
        ...

    def enter_thread(self, queue: Queue) -> None: ...


class Queues(Protocol):
    """The side queues. All methods are called from the user's thread."""

    def start(self, program: Program, work: Work) -> None:
        """Begin; nothing runs before the first `allow`."""
        ...

    def allow(self, iteration: int) -> None:
        """Steps of iterations up to this one may run."""
        ...

    def allow_net(self, iteration: int) -> None:
        """Steps of the net queue of iterations up to this one may run."""
        ...

    def wait(self, i: int, iteration: int) -> int | None:
        """Return when compute-queue step i may start; the step it waited for last, None if it did not wait."""
        ...

    def before_end(self, i: int, iteration: int) -> None:
        """The compute step i is about to end."""
        ...

    def ended(self, i: int, iteration: int) -> None:
        """Compute-queue step i has ended."""
        ...

    def await_steps(self, steps: Sequence[int], iteration: int) -> None:
        """Return when these steps of the iteration have ended. For a step that is being executed, in any thread."""
        ...

    def settle(self, iteration: int) -> None:
        """Return when every step of iterations up to this one has ended."""
        ...

    def pause(self) -> None:
        """Return when no step is being executed; none starts before `resume`."""
        ...

    def resume(self) -> None: ...

    def jump(self, iteration: int) -> None:
        """While paused: every step of iterations up to this one counts as done, the queues stand at the next."""
        ...

    def stop(self) -> None:
        """End the queues; returns when they have."""
        ...

    def renew(self) -> Queues:
        """Queues of the same kind that have not been started."""
        ...

    def waited(self, seconds: float) -> None:
        """The training thread has waited so long for the device or the other ranks, outside these queues."""
        ...

    def standing(self) -> dict[Queue, tuple[int, int]]:
        """While paused: (iteration, index in the queue's order) of each queue's next step."""
        ...

    def stand(self, at: Mapping[Queue, tuple[int, int]]) -> None:
        """While paused: go on from there."""
        ...

    @property
    def in_flight(self) -> Container[int]:
        """Chunks whose copy to the gpu is issued and that the compute queue has not `land`ed yet."""
        ...

    def land(self, chunk: int) -> None:
        """What the compute queue does from now on comes after the chunk's copy, if one is in flight."""
        ...

    def measured(
        self,
        steps: Sequence[StepLog],
        iterations: Sequence[IterationLog],
        changes: Sequence[ByteChange],
        *,
        wait: bool = True,
    ) -> tuple[Sequence[StepLog], Sequence[IterationLog], Sequence[ByteChange]]:
        """The logs in the time in which things happened; they were written when things were issued. wait: for what has
        not happened yet (else it keeps the time it was issued at)."""
        ...

    @property
    def program(self) -> Program | None:
        """What `start` was given; None before."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """What a queue died of."""
        ...

    @property
    def short(self) -> OutOfMemory | None:
        """What holds a queue back: see [Note: short of memory]."""
        ...

    def fail(self, error: BaseException) -> None:
        """From any thread: the run is over, whoever waits raises this."""
        ...


class _AtOnce:
    """What queues share whose steps have happened when they have ended."""

    @property
    def in_flight(self) -> Container[int]:
        return frozenset()

    def land(self, chunk: int) -> None:
        return None

    def waited(self, seconds: float) -> None:
        return None

    def measured(
        self,
        steps: Sequence[StepLog],
        iterations: Sequence[IterationLog],
        changes: Sequence[ByteChange],
        *,
        wait: bool = True,
    ) -> tuple[Sequence[StepLog], Sequence[IterationLog], Sequence[ByteChange]]:
        return steps, iterations, changes


class ThreadQueues(_AtOnce):
    """A daemon thread a queue.

    watchdog_s: after so long without any step ending while the user's thread waits, the log names the step that waits;
    if nothing is being executed either, nothing can ever end and PlanError is raised. join_s: how long `stop` waits for
    a step that is being executed.
    """

    def __init__(
        self, *, watchdog_s: float = 30.0, join_s: float = 10.0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._watchdog_s = watchdog_s
        self._join_s = join_s
        self._clock = clock
        self._lock = threading.Lock()
        self._conditions = {queue: threading.Condition(self._lock) for queue in (Queue.COMPUTE, *SIDE_QUEUES)}
        self._at: dict[Queue, tuple[int, int]] = {}  # queue -> (iteration, index in its order)
        self._busy: set[Queue] = set()
        self._waiting: set[Queue] = set()
        self._threads: list[threading.Thread] = []
        self._allowed = -1
        self._net_allowed = -1
        self._ended_here = threading.Condition(self._lock)  # for steps that wait for others (await_steps)
        self._paused = False
        self._stopping = False
        self._ended_steps = 0
        self._started: Program | None = None
        self._failure: BaseException | None = None
        self._short: dict[Queue, OutOfMemory] = {}

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    @property
    def short(self) -> OutOfMemory | None:
        return next(iter(self._short.values()), None)

    @property
    def program(self) -> Program | None:
        return self._started

    def renew(self) -> ThreadQueues:
        return ThreadQueues(watchdog_s=self._watchdog_s, join_s=self._join_s, clock=self._clock)

    def standing(self) -> dict[Queue, tuple[int, int]]:
        return dict(self._at)

    def stand(self, at: Mapping[Queue, tuple[int, int]]) -> None:
        with self._lock:
            self._at.update(at)

    def start(self, program: Program, work: Work) -> None:
        self._program, self._work = program, work
        self._started = program
        for queue in SIDE_QUEUES:
            if program.order.get(queue):
                self._at[queue] = (0, 0)
                thread = threading.Thread(target=self._run, args=(queue,), name=f"executor-{queue.value}", daemon=True)
                self._threads.append(thread)
        for thread in self._threads:
            thread.start()

    def _run(self, queue: Queue) -> None:
        try:
            self._work.enter_thread(queue)
            while self._one(queue):
                pass
        except BaseException as error:  # handed to the user's thread, which raises it
            with self._lock:
                iteration, at = self._at[queue]
                word = self._program.word(self._program.order[queue][at], iteration)
                add_note(error, f"raised in queue {queue.value}, at {word}")
                self._busy.discard(queue)
                self._failure = self._failure or error
                self._notify_all()

    def _one(self, queue: Queue) -> bool:
        """Run the queue's next step; False when the queues stop."""
        program, condition = self._program, self._conditions[queue]
        order = program.order[queue]
        ready_s = self._clock()
        waited_for: int | None = None
        with self._lock:
            while True:
                if self._stopping or self._failure is not None:
                    return False
                iteration, at = self._at[queue]
                i = order[at]
                if not self._paused and iteration <= self._limit(queue) and queue not in self._short:
                    missing = program.missing(i, iteration)
                    if not missing:
                        break
                    waited_for = missing[-1]
                self._waiting.add(queue)
                condition.wait()
                self._waiting.discard(queue)
            self._busy.add(queue)
        self._arrive(queue, i, iteration)
        try:
            self._work.begin(i, iteration, ready_s, waited_for)
        except OutOfMemory as error:
            self._refused(i)
            with self._lock:
                self._busy.discard(queue)
                self._short[queue] = error
                self._notify_all()
            return True
        self._work.work(i, iteration)
        self._work.finish(i, iteration)
        self._depart(queue, i, iteration)
        with self._lock:
            self._busy.discard(queue)
            self._at[queue] = (iteration, at + 1) if at + 1 < len(order) else (iteration + 1, 0)
            self._mark(i, iteration)
        return True

    def _arrive(self, queue: Queue, i: int, iteration: int) -> None:
        """The step's edges are satisfied and it is about to begin. Called in its queue's thread, without the lock."""

    def _refused(self, i: int) -> None:
        """The step that arrived last got no memory; it will arrive again, or the queues jump over it."""

    def _depart(self, queue: Queue, i: int, iteration: int) -> None:
        """The step has ended, which nobody knows yet. Called as `_arrive`."""

    def _limit(self, queue: Queue) -> int:
        return min(self._allowed, self._net_allowed) if queue is Queue.NET else self._allowed

    def _mark(self, i: int, iteration: int) -> None:
        self._program.done[i] = iteration
        self._ended_steps += 1
        self._ended_here.notify_all()
        for queue in self._program.wakes[i]:
            if queue in self._waiting:
                self._conditions[queue].notify_all()
        if Queue.COMPUTE in self._waiting:
            self._conditions[Queue.COMPUTE].notify_all()

    def _notify_all(self) -> None:
        for condition in (*self._conditions.values(), self._ended_here):
            condition.notify_all()

    def allow(self, iteration: int) -> None:
        with self._lock:
            self._allowed = max(self._allowed, iteration)
            self._notify_all()

    def allow_net(self, iteration: int) -> None:
        with self._lock:
            self._net_allowed = max(self._net_allowed, iteration)
            self._notify_all()

    def await_steps(self, steps: Sequence[int], iteration: int) -> None:
        with self._lock:
            while any(self._program.done[i] < iteration for i in steps):
                if self._failure is not None:
                    raise self._failure
                if self._stopping:
                    raise PlanError("the queues were stopped while a step waited for another")
                self._ended_here.wait(self._watchdog_s)

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error
            self._notify_all()

    def wait(self, i: int, iteration: int) -> int | None:
        program = self._program
        waited_for: int | None = None

        def ready() -> bool:
            nonlocal waited_for
            missing = program.missing(i, iteration)
            if missing:
                waited_for = missing[-1]
            return not missing

        self._wait_until(ready, lambda: program.waiting(i, iteration), needs_all=True)
        return waited_for

    def before_end(self, i: int, iteration: int) -> None:
        return None

    def ended(self, i: int, iteration: int) -> None:
        with self._lock:
            self._mark(i, iteration)

    def settle(self, iteration: int) -> None:
        side = [i for queue in SIDE_QUEUES for i in self._program.order.get(queue, ())]
        self._wait_until(
            lambda: all(self._program.done[i] >= iteration for i in side),
            lambda: f"the end of iteration {iteration}",
        )

    def pause(self) -> None:
        with self._lock:
            self._paused = True
        self._wait_until(lambda: not self._busy, lambda: "a step that is being executed to end", idle_is_stuck=False)

    def resume(self) -> None:
        with self._lock:
            self._paused = False
            self._notify_all()

    def jump(self, iteration: int) -> None:
        with self._lock:
            self._program.done[:] = [iteration] * len(self._program.done)
            for queue in self._at:
                self._at[queue] = (iteration + 1, 0)
            self._short.clear()

    def stop(self) -> None:
        with self._lock:
            self._stopping = True
            self._notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(self._join_s)
        stuck = [thread.name for thread in self._threads if thread.is_alive()]
        if stuck:
            log.warning("%s did not stop within %.0f s", ", ".join(stuck), self._join_s)

    def _wait_until(
        self,
        condition: Callable[[], bool],
        what: Callable[[], str],
        *,
        idle_is_stuck: bool = True,
        needs_all: bool = False,
    ) -> None:
        """Wait in the user's thread. Raises what a queue died of; PlanError if nothing can ever end; OutOfMemory if a
        queue is short of memory and nothing else moves (needs_all: at once)."""
        compute = self._conditions[Queue.COMPUTE]
        with self._lock:
            try:
                self._waiting.add(Queue.COMPUTE)
                ended = self._ended_steps
                while True:
                    if self._failure is not None:
                        raise self._failure
                    if condition():
                        return
                    if self._short and (needs_all or not self._moves()):
                        raise next(iter(self._short.values()))
                    if compute.wait(self._watchdog_s) or self._ended_steps != ended:
                        ended = self._ended_steps
                        continue
                    message = f"waiting for {what()}: no step has ended for {self._watchdog_s:g} s; {self._standing()}"
                    if idle_is_stuck and not self._busy:
                        raise PlanError(f"the queues are stuck: {message}")
                    log.warning("%s", message)
            finally:
                self._waiting.discard(Queue.COMPUTE)

    def _moves(self) -> bool:
        """A step is being executed or may start."""
        if self._busy:
            return True
        return not self._paused and any(
            queue not in self._short
            and iteration <= self._allowed
            and self._program.ready(self._program.order[queue][at], iteration)
            for queue, (iteration, at) in self._at.items()
        )

    def _standing(self) -> str:
        """Where every queue stands, for the watchdog."""
        words = []
        for queue, (iteration, at) in self._at.items():
            i = self._program.order[queue][at]
            if queue in self._busy:
                words.append(f"{queue.value} executes {self._program.word(i, iteration)}")
            elif queue in self._short:
                words.append(f"{queue.value} is short of memory for {self._program.word(i, iteration)}")
            elif iteration > self._limit(queue) or self._paused:
                words.append(f"{queue.value} is held")
            else:
                missing = [self._program.steps[j].id for j in self._program.missing(i, iteration)]
                words.append(f"{queue.value} at {self._program.word(i, iteration)} waits for steps {missing}")
        return "; ".join(words)


@dataclass(frozen=True, slots=True)
class QueueEvent:
    """A step that could start, or one in flight that could end (kind "start" or "end"), by position in the plan."""

    kind: str
    step: Step
    iteration: int


Chooser = Callable[[Sequence[QueueEvent], QueueEvent, bool], int | None]
"""(possible events, what the compute queue is about to do, whether it may) -> index of the event to let happen, or None
to let compute go on; None where compute may not go on yet stands for the first event."""


class SerialQueues(_AtOnce):
    """No threads: at each point where the compute queue starts or ends a step, the chooser decides which steps of the
    other queues start and end first. works_early(step): whether the step's work is done when it starts rather than when
    it ends (a missing edge then shows as a wrong result either way)."""

    def __init__(self, chooser: Chooser, *, works_early: Callable[[Step], bool] | None = None) -> None:
        self._chooser = chooser
        self._works_early = works_early or (lambda step: False)
        self._at: dict[Queue, tuple[int, int]] = {}
        self._started: Program | None = None
        self._flying: dict[Queue, bool] = {}  # queue -> whether the step it executes has done its work
        self._allowed = -1
        self._net_allowed = -1
        self._inside: set[Queue] = set()  # queues whose step is being executed right now
        self._paused = False
        self._failure: BaseException | None = None
        self._short: dict[Queue, OutOfMemory] = {}

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    @property
    def short(self) -> OutOfMemory | None:
        return next(iter(self._short.values()), None)

    @property
    def program(self) -> Program | None:
        return self._started

    def renew(self) -> SerialQueues:
        return SerialQueues(self._chooser, works_early=self._works_early)

    def standing(self) -> dict[Queue, tuple[int, int]]:
        return dict(self._at)

    def stand(self, at: Mapping[Queue, tuple[int, int]]) -> None:
        self._at.update(at)

    def start(self, program: Program, work: Work) -> None:
        self._program, self._work = program, work
        self._started = program
        self._at = {queue: (0, 0) for queue in SIDE_QUEUES if program.order.get(queue)}

    def allow(self, iteration: int) -> None:
        self._allowed = max(self._allowed, iteration)

    def allow_net(self, iteration: int) -> None:
        self._net_allowed = max(self._net_allowed, iteration)

    def fail(self, error: BaseException) -> None:
        self._failure = self._failure or error

    def await_steps(self, steps: Sequence[int], iteration: int) -> None:
        while any(self._program.done[i] < iteration for i in steps):
            possible = [row for row in self._possible() if row[1] not in self._inside]
            if not possible:
                raise PlanError(f"the queues are stuck: a step waits for steps {list(steps)} of iteration {iteration}")
            self._happen(*min(possible, key=lambda row: row[1] is not Queue.NET))

    def _possible(self) -> list[tuple[QueueEvent, Queue, int]]:
        found: list[tuple[QueueEvent, Queue, int]] = []
        for queue, (iteration, at) in self._at.items():
            i = self._program.order[queue][at]
            step = self._program.steps[i]
            limit = min(self._allowed, self._net_allowed) if queue is Queue.NET else self._allowed
            if queue in self._flying:
                found.append((QueueEvent("end", step, iteration), queue, i))
            elif (
                not self._paused
                and iteration <= limit
                and queue not in self._short
                and self._program.ready(i, iteration)
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
        self._program.done[i] = iteration
        at = self._at[queue][1] + 1
        self._at[queue] = (iteration, at) if at < len(self._program.order[queue]) else (iteration + 1, 0)

    def _execute(self, queue: Queue, i: int, iteration: int) -> None:
        self._inside.add(queue)
        try:
            self._work.work(i, iteration)
        finally:
            self._inside.discard(queue)

    def _let_others(self, compute: QueueEvent, i: int) -> None:
        while True:
            possible = self._possible()
            may = compute.kind == "end" or self._program.ready(i, compute.iteration)
            if not possible:
                if may:
                    return
                if self.short is not None:
                    raise self.short
                raise PlanError(
                    f"the queues are stuck: {self._program.word(i, compute.iteration)} waits for steps "
                    f"{[self._program.steps[j].id for j in self._program.missing(i, compute.iteration)]}"
                )
            pick = self._chooser([event for event, _, _ in possible], compute, may)
            if pick is None:
                if may:
                    return
                pick = 0
            self._happen(*possible[pick])

    def wait(self, i: int, iteration: int) -> int | None:
        self._let_others(QueueEvent("start", self._program.steps[i], iteration), i)
        return None

    def before_end(self, i: int, iteration: int) -> None:
        self._let_others(QueueEvent("end", self._program.steps[i], iteration), i)

    def ended(self, i: int, iteration: int) -> None:
        self._program.done[i] = iteration

    def settle(self, iteration: int) -> None:
        side = [i for queue in SIDE_QUEUES for i in self._program.order.get(queue, ())]
        while any(self._program.done[i] < iteration for i in side):
            possible = [row for row in self._possible() if row[0].iteration <= iteration or row[0].kind == "end"]
            if not possible:
                if self.short is not None:
                    raise self.short
                raise PlanError(f"the queues are stuck before the end of iteration {iteration}")
            with contextlib.suppress(OutOfMemory):  # it is in `short`; the others go on
                self._happen(*possible[0])

    def pause(self) -> None:
        self._paused = True
        while self._flying and self._started is not None:
            self._happen(*self._possible()[0])

    def resume(self) -> None:
        self._paused = False

    def jump(self, iteration: int) -> None:
        self._program.done[:] = [iteration] * len(self._program.done)
        for queue in self._at:
            self._at[queue] = (iteration + 1, 0)
        self._short.clear()

    def stop(self) -> None:
        self._at.clear()
        self._flying.clear()


def follow(timeline: Timeline, plan: Plan) -> Chooser:
    """A chooser that lets steps start and end in the order a timeline predicts for its steady (last) iteration, which
    then repeats with the timeline's period. Ends come before starts at equal times."""
    last = timeline.iterations - 1
    begun: dict[int, float] = {}
    ended: dict[int, float] = {}
    for span in timeline.spans:
        if span.iteration == last:
            begun[span.step], ended[span.step] = span.start_s, span.end_s
    missing = [step.id for step in plan.steps if step.id not in begun]
    if missing:
        raise PlanError(f"the timeline's last iteration has no span of step {missing[0]}; it is of another plan")
    period = timeline.iteration_s

    def rank(event: QueueEvent) -> tuple[float, int]:
        starts = event.kind == "start"
        time_s = (begun if starts else ended)[event.step.id] + event.iteration * period
        # 1 ns of slack: times of two iterations are compared, each with its own rounding
        return (round(time_s, 9), 1 if starts and event.step.kind is not Kind.DROP else 0)

    def choose(possible: Sequence[QueueEvent], compute: QueueEvent, may: bool) -> int | None:
        best = min(range(len(possible)), key=lambda i: rank(possible[i]))
        if may and rank(possible[best]) > rank(compute):
            return None
        return best

    return choose
