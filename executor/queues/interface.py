"""A plan's running queues: each runs its steps in order, each step when those in its `after` have ended.

[Note: iterations] Every queue runs iteration k before k+1. `allow(k)` lets steps up to k run; those of the net queue
also wait for `allow_net(k)`, at the first moment of k: between two iterations no collective is in flight on any rank.
`done[i]` is step i's last ended iteration, -1 before, so `id@-1` is satisfied at the start.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from pstar_sim.core.plan import Plan
from pstar_sim.core.program import NO_STEPS, Program
from pstar_sim.core.step import DISK_QUEUES, Queue
from pstar_sim.errors import OutOfMemory, PlanError

if TYPE_CHECKING:
    from executor.memory.byte_log import ByteChange
    from executor.queues.logs import IterationLog, StepLog

SIDE_QUEUES = (Queue.H2D, Queue.D2H, Queue.ADAM, Queue.NET, *DISK_QUEUES)
"""The queues besides compute."""


def without_locals(error: BaseException) -> None:
    """So that the error does not keep the work alive."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


class Progress:
    """done: see [Note: iterations]."""

    def __init__(self, plan: Plan) -> None:
        self.steps = plan.steps
        self.compiled = compiled = Program.of(plan) if plan.steps else NO_STEPS
        self.after = compiled.waits
        self.order = dict(zip(compiled.queues, compiled.order))
        self.wakes: list[set[Queue]] = [set() for _ in plan.steps]  # other queues with a step that waits for this one
        for step, waits in zip(plan.steps, compiled.waits):
            for j, _ in waits:
                if plan.steps[j].queue is not step.queue:
                    self.wakes[j].add(step.queue)
        unknown = set(self.order) - {Queue.COMPUTE, *SIDE_QUEUES}
        if unknown:
            raise PlanError(f"this executor has no queue {', '.join(sorted(unknown))}")
        self.done = [-1] * len(plan.steps)

    def ready(self, i: int, iteration: int) -> bool:
        return not self.after[i] or not self.compiled.missing(i, iteration, self.done)

    def missing(self, i: int, iteration: int) -> list[int]:
        """Steps for which step i still waits."""
        return [j for j, _ in self.compiled.missing(i, iteration, self.done)]

    def waiting(self, i: int, iteration: int) -> str:
        """The step and those that it waits for, in words for the watchdog."""
        missing = [self.word(j, iteration - back) for j, back in self.compiled.missing(i, iteration, self.done)]
        return self.word(i, iteration) + (f", which waits for {', '.join(missing[:4])}" if missing else "")

    def word(self, i: int, iteration: int) -> str:
        """Such as "step 12 (fetch of chunk 3) of iteration 4"."""
        step = self.steps[i]
        about = f" of chunk {step.chunk}" if step.chunk is not None else f" of moment {step.moment}"
        return f"step {step.id} ({step.kind.value}{about}) of iteration {iteration}"


class Work(Protocol):
    """`begin` takes memory, `finish` (after `work`) frees it and writes the log (`session.steps.Steps`).

    [Note: short of memory] `begin` may raise OutOfMemory, having changed nothing: the queue keeps the step and starts
    nothing until `jump`; the other queues continue. The user's thread gets the error from `wait`, or finds it in
    `short`.
    """

    def begin(self, i: int, iteration: int, ready_s: float, waited_for: int | None) -> None: ...

    def work(self, i: int, iteration: int) -> None: ...

    def finish(self, i: int, iteration: int) -> None: ...

    def note_landing(self, chunk: int) -> None:
        """The compute queue may read its copied lists on the gpu."""
        ...

    def enter_thread(self, queue: Queue) -> None: ...


class Queues(Protocol):
    """All methods but `fail` are called from the user's thread."""

    # -- Begin and end of queues --------------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress | None:
        """None before `start`."""
        ...

    def start(self, progress: Progress, work: Work) -> None:
        """Nothing runs before `allow`; the work is held weakly, except by a running step."""
        ...

    def stop(self) -> None:
        """On return the queues have ended."""
        ...

    def stopper(self) -> Callable[[], object]:
        """Returns a function that ends the queues' threads once the work is collected; it holds neither."""
        ...

    def renew(self) -> Queues:
        """New queues of the same kind."""
        ...

    # -- Calls from the compute queue, which is the user's thread, to the other queues --------------------------------

    def allow(self, iteration: int) -> None:
        """Let steps of iterations up to this one run."""
        ...

    def allow_net(self, iteration: int) -> None:
        """The same for the net queue."""
        ...

    def wait(self, i: int, iteration: int) -> int | None:
        """Returns when compute step i may start, with the last step that it waited for."""
        ...

    def before_end(self, i: int, iteration: int) -> None:
        """The compute step i is about to end."""
        ...

    def end_step(self, i: int, iteration: int) -> None: ...

    def await_steps(self, steps: Sequence[int], iteration: int) -> None:
        """Returns when these steps have ended; called for a running step, in any thread."""
        ...

    # -- Copies to the gpu, for code that reads the copied lists ------------------------------------------------------

    @property
    def in_flight(self) -> Container[int]:
        """Chunks with a copy to the gpu issued and no `land` yet."""
        ...

    def land(self, chunk: int) -> None:
        """Later compute comes after the chunk's copy, if one is in flight."""
        ...

    # -- Pausing the queues, so that other code can move bytes --------------------------------------------------------

    def settle(self, iteration: int) -> None:
        """Wait for all steps up to the iteration."""
        ...

    def pause(self) -> None:
        """Return when no step is running. None starts before `resume`."""
        ...

    def resume(self) -> None: ...

    def jump(self, iteration: int) -> None:
        """All steps up to it count as done; only while paused."""
        ...

    # -- The positions of paused queues, from which other queues can continue -----------------------------------------

    def standing(self) -> dict[Queue, tuple[int, int]]:
        """(iteration, index in its order) of each next step; only while paused."""
        ...

    def stand(self, at: Mapping[Queue, tuple[int, int]]) -> None:
        """Only while paused."""
        ...

    # -- The times at which work of a run happened --------------------------------------------------------------------

    def note_wait(self, seconds: float) -> None:
        """A wait of the training thread for the device or other ranks."""
        ...

    def in_device_time(
        self,
        steps: Sequence[StepLog],
        iterations: Sequence[IterationLog],
        changes: Sequence[ByteChange],
        *,
        wait: bool = True,
    ) -> tuple[Sequence[StepLog], Sequence[IterationLog], Sequence[ByteChange]]:
        """With times at which work happened, not was issued.

        wait: for work that has not happened yet; else its entries keep times of issue.
        """
        ...

    # -- Reasons for which queues cannot continue ---------------------------------------------------------------------

    @property
    def failure(self) -> BaseException | None: ...

    @property
    def short(self) -> OutOfMemory | None:
        """The error that stops a queue: [Note: short of memory]."""
        ...

    @property
    def troubled(self) -> bool: ...

    def fail(self, error: BaseException) -> None:
        """Every wait raises `error`. May be called from any thread."""
        ...


class QueuesBase:
    """`in_flight` to `measured` are for steps that have happened when they end; StreamQueues has its own."""

    def __init__(self) -> None:
        self._at: dict[Queue, tuple[int, int]] = {}  # queue -> (iteration, index in its order)
        self._allowed = -1
        self._net_allowed = -1
        self._paused = False
        self._started: Progress | None = None
        self._failure: BaseException | None = None
        self._short: dict[Queue, OutOfMemory] = {}
        self._worker: Callable[[], Work | None] = lambda: None

    @property
    def _work(self) -> Work:
        work = self._worker()
        if work is None:
            raise PlanError("these queues' work is gone: start them first, and keep the session")
        return work

    def stopper(self) -> Callable[[], object]:
        return lambda: None

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    @property
    def short(self) -> OutOfMemory | None:
        return next(iter(self._short.values())) if self._short else None

    @property
    def troubled(self) -> bool:
        return self._failure is not None or bool(self._short)

    @property
    def progress(self) -> Progress | None:
        return self._started

    def standing(self) -> dict[Queue, tuple[int, int]]:
        return dict(self._at)

    @property
    def in_flight(self) -> Container[int]:
        return frozenset()

    def land(self, chunk: int) -> None:
        return None

    def note_wait(self, seconds: float) -> None:
        return None

    def in_device_time(
        self,
        steps: Sequence[StepLog],
        iterations: Sequence[IterationLog],
        changes: Sequence[ByteChange],
        *,
        wait: bool = True,
    ) -> tuple[Sequence[StepLog], Sequence[IterationLog], Sequence[ByteChange]]:
        return steps, iterations, changes
