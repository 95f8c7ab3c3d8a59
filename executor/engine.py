"""Session: a model under a plan. A session joins the parts of the executor and holds them.

The user's thread is the compute queue; the other queues run by themselves (`queues/`). `session/loop.py` receives the
acts of the training loop. `session/cursor.py` is the one table of acts that may come next. `session/following.py`
carries out an iteration on plan, `off_plan/demand.py` an iteration that left the plan. `contract.py` says what a loop
may do.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from executor.activations.stashes import Stashes
from executor.devices.adam import Hyper
from executor.devices.backend import Backend, VirtualBackend
from executor.distributed.absent import Absent
from executor.distributed.ranks import Ranks, count_of
from executor.driving.drive import Driver, Loss, StepResult
from executor.lifetime.ending import Ending
from executor.lifetime.renewal import renew
from executor.lifetime.resources import Resources
from executor.measuring.first import FirstIteration
from executor.measuring.measure import measure_iteration
from executor.measuring.measured import Measured
from executor.measuring.status import Status, status_of
from executor.memory.arena import Arena
from executor.memory.contents import Contents
from executor.models import forward_loss
from executor.moments.compiled import untraced
from executor.moments.hooks import MomentClock
from executor.moments.unseen import Watching
from executor.off_plan.demand import Demand
from executor.off_plan.guard import Guard
from executor.off_plan.ladder import Ladder
from executor.off_plan.outgrown import Outgrown
from executor.off_plan.reads import Reads
from executor.off_plan.warm_up import WarmUp
from executor.queues.interface import Progress, Queues
from executor.scaling import LossScaling, guard_boundary
from executor.session.accelerated import Accelerated
from executor.session.at_work import AtWork
from executor.session.batches import Batches, Capture, Shapes
from executor.session.cursor import Cursor
from executor.session.following import Following
from executor.session.iteration import Iteration
from executor.session.loop import Loop
from executor.session.others import CountOf
from executor.session.reader import Reader
from executor.session.spelling import COMMAND, Spelling
from executor.session.steps import Steps
from executor.session.timetable import Timetable
from executor.session.updates import Updates
from pstar_sim.core.plan import Plan
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import ContractError, PlanError

__all__ = ["Session", "SessionOptions"]

log = logging.getLogger("executor")


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """Options of a session.

    hyper: returns the current settings of the optimizer's groups.
    max_grad_norm: see `session.updates`.
    eager: whether updates run inside backward.
    capture: makes a workload of a model and a batch; see `session.batches.Shapes`.
    skeleton: a copy of the model without memory; see `session.batches.Shapes`.
    scaling: the loss scaling of the run; None without loss scaling.
    replan_after: see `executor.prepare`.
    count: see `executor.prepare`.
    clock: gives seconds.
    """

    hyper: Callable[[], list[Hyper]]
    max_grad_norm: float | None
    eager: bool
    capture: Capture
    scaling: LossScaling | None = None
    skeleton: nn.Module | None = None
    replan_after: int = 3
    count: CountOf = count_of
    clock: Callable[[], float] = time.perf_counter


class Session:
    """One model being trained under one plan. Made by `executor.prepare`; ended by `close()`.

    Attributes:
        deviations: number of iterations or events that left the plan.
        other_shapes: number of these that are batches of another shape than planned, on plan.
        deviation_log: the latest deviations, in words.
        iteration: number of the current or next iteration, from 0.
        hooks: functions that remove hooks, for `close`; see `lifetime/ending.py`.
        on_close: functions that undo other changes of the model, for `close`.
        watches: counters that get each moment on plan.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        parameters: Sequence[nn.Parameter],
        *,
        arena: Arena,
        backend: Backend,
        queues: Queues,
        ranks: Ranks | None,
        options: SessionOptions,
    ) -> None:
        self.model = model
        self.ranks = ranks
        self.parameters = parameters
        self.backend = backend
        self.options = options
        self.scaling = options.scaling
        self.home = torch.device("cpu")  # the model's device before `prepare` and after `close`; prepare sets it
        self.iteration = 0
        self.iterations_before = 0  # iterations of earlier runs that this run continues
        self.now = Iteration(number=-1)  # the current one; between two iterations, the one that ended last
        self.cursor = Cursor()
        self.at_work = AtWork()
        self.held = False  # the queues stay paused until there is a new plan
        self.renewing = False  # values are moving into the chunks of a new plan
        self.closed = False
        self.trained = False  # a Trainer's training is over: see `end_after_training`
        self.replan_after = options.replan_after
        self.deviations = 0
        self.other_shapes = 0
        self.deviation_log: deque[str] = deque(maxlen=100)
        self.on_close: list[Callable[[], object]] = []
        self.watches: list[Watching] = []
        self.first: FirstIteration | None = None  # counts until the tide is compared; its report stays
        self.warming: WarmUp | None = None
        self.guard: Guard | None = None
        self.weights_note = ""  # origin of the values, in words
        self.spelling: Spelling = COMMAND  # names of the plan's settings in the user's program
        self.accelerated = Accelerated()
        self.optimizer: Callable[[], torch.optim.Optimizer | None] = lambda: None  # prepare sets it
        self._driver: Driver | None = None
        self.resources = Resources(backend, ranks)
        dropped = weakref.finalize(self, self.resources.let_go)
        dropped.atexit = False  # `prepare` handles the interpreter's end
        self.ending = Ending(self, dropped)
        self.absent = None if ranks is None or options.eager else Absent(self)
        self.shapes = Shapes(model, options.skeleton, options.capture)
        self.reader = Reader(self, parameters)
        self.loop = Loop(self, options.clock)
        self.following = Following(self, options.clock)
        self.updates = Updates(
            self, options.hyper, eager=options.eager, max_grad_norm=options.max_grad_norm, clock=options.clock
        )
        self.ladder = Ladder(self)
        self.outgrown = Outgrown(self)
        if ranks is not None:
            ranks.on_loss = _hear_of_loss(weakref.ref(self))
            ranks.giver = weakref.ref(self.reader)
        self.install(plan, arena, queues)
        self.clock = MomentClock(model, self.loop.on_event, trains=lambda: self.reader.trains, wrap=untraced)
        self.hooks: list[Any] = []  # undone when the session ends

    def listen(self) -> None:
        """Hook the model. `close` removes the hooks, also if only some of them were placed."""
        self.clock.listen()
        self.hooks += self.following.hook_gradients(self.parameters, untraced)
        scaling = self.scaling
        if scaling is not None:
            self.hooks += guard_boundary(self.model, lambda: scaling.at_boundary, wrap=untraced)

    def install(self, plan: Plan, arena: Arena, queues: Queues) -> None:
        """Make the objects of one plan, each after the objects that it reads. `start` is called later, when the values
        are in the chunks."""
        self.plan = plan
        self.arena = arena
        self.queues = queues
        self.resources.arena = arena
        self.resources.stoppers = [queues.stopper()]
        self.contents = Contents(arena, self.reader.refresh, None if self.ranks is None else self.ranks.wire)
        self.progress = Progress(plan)
        self.timetable: Timetable = Timetable(plan)
        self.steps = Steps(self, self.options.clock)
        self.batches = Batches(self, self.options.count)
        self.demand = Demand(self)
        self.reads = Reads(self)
        self.stashes = Stashes(self)
        self.reader.on_demand = untraced(self.reads.touch)
        if self.guard is not None:
            self.guard.bind()
        if self.first is not None:
            self.first.bind()

    def start(self) -> None:
        """Start the plan's queues, once per plan: they may fetch what the first moments of the next iteration need."""
        self.arena.set_tide(self.timetable.cut_tide)
        self.queues.pause()
        self.steps.start()
        self.queues.start(self.progress, self.steps)
        if self.iteration:
            self.queues.jump(self.iteration - 1)
        self.queues.allow(self.iteration)
        self.queues.resume()

    def guard_memory(self, *, always: bool = False) -> None:
        """Watch every operator from now on, if the accelerator is virtual and has a memory limit, or if `always`."""
        limited = isinstance(self.backend, VirtualBackend) and self.backend.gpu_bytes is not None
        if self.guard is None and (limited or always):
            self.guard = Guard(self)
            self.guard.begin()
            self.resources.at_end.append(self.guard.end)

    def compare_first_tide(self) -> None:
        """Compare the tide of the first iteration that runs on plan with the plan's tide: `measuring/first.py`."""
        self.first = FirstIteration(self)
        self.first.begin()
        self.resources.at_end.append(self.first.end)

    # -- what a user calls --------------------------------------------------------------------------------------------

    def step(self, micro_batches: Sequence[Any], *, loss: Loss = forward_loss, order: str | None = None) -> StepResult:
        """Run one whole iteration with the engine's order of blocks: forward and backward of every micro-batch,
        `optimizer.step()` and `zero_grad()`. Returns the loss and figures of the iteration. See
        `executor.driving.drive`.

        micro_batches: as the model takes them (a mapping: keyword arguments; a tuple: positional arguments).
        loss: loss(model, batch) -> a scalar; by default the model's own loss.
        order: "depth-first" or "relay"; None: the plan's.

        Raises ContractError, before anything runs, for an order that is unknown or not the plan's, for no micro-batch
        or more than planned, and inside an iteration.
        """
        if self._driver is None:
            self._driver = Driver(self)
        return self._driver.step(micro_batches, loss, order)

    @property
    def max_grad_norm(self) -> float | None:
        return self.options.max_grad_norm

    @property
    def loss_scale(self) -> float | None:
        """Factor by which gradients inside the model are scaled in the next iteration; None without loss scaling."""
        return None if self.scaling is None else self.scaling.scale

    def scaled(self, loss: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """Returns a context that gives the loss for a backward inside the context: multiplied by the loss scale, where
        there is one."""
        return nullcontext(loss) if self.scaling is None else self.scaling.of_loss(loss)

    @property
    def skipped_steps(self) -> int:
        """Number of iterations without an update because a gradient was not finite (loss scaling)."""
        return 0 if self.scaling is None else self.scaling.skipped_steps

    @property
    def grad_norm(self) -> float | None:
        """Global norm of the last iteration's gradients before clipping; None without clipping or before the first
        update."""
        return self.updates.grad_norm

    def timeline(self, last: int | None = None) -> Timeline:
        """Returns the timeline of the latest iterations that ran on plan one after another, in the simulator's schema.
        Waits for their last copies and updates.

        last: number of the timeline's last iteration, of the 16 that are kept; None: the newest.

        Raises PlanError if no iteration has run on plan.
        """
        return self.steps.timeline(last)

    def status(self) -> Status:
        """Returns the state of the run, for a progress line: see `executor.measuring.status.Status`. Waits for
        nothing."""
        return status_of(self)

    def measure_iteration(self, step_fn: Callable[[], Any], order: Timeline | None = None) -> Measured:
        """Returns the measured bytes of an iteration, which runs `step_fn` twice: see
        `executor.measuring.measure.measure_iteration`."""
        return measure_iteration(self, step_fn, order)

    def drain(self) -> None:
        """Return when every update of the finished iterations is in the parameters, and nothing moves."""
        self.loop.drain()

    def still(self) -> AbstractContextManager[None]:
        """Returns a context in which the updates of finished iterations are done and nothing moves. The queues continue
        afterwards."""
        return self.loop.still()

    def renew(self, plan: Plan) -> None:
        """Continue under another plan: see `lifetime.renewal`. Ends a running evaluation first. Raises PlanError on
        several ranks."""
        if self.ranks is not None:
            raise PlanError(
                "session.renew on several ranks: each rank holds slices that the other plan cuts elsewhere; save a "
                "checkpoint (optimizer.save), prepare the model under the new plan on all ranks, and load it"
            )
        if self.cursor.visiting:
            self.demand.end_visit()
        renew(self, plan)

    def use_queues(self, queues: Queues) -> None:
        """Continue with other queues from the position of the present queues, which pause. Both may be used again."""
        self.queues.pause()
        standing = self.queues.standing()
        queues.pause()
        if queues.progress is None:
            queues.start(self.progress, self.steps)
            self.resources.stoppers.append(queues.stopper())
        queues.stand(standing)
        queues.allow(self.iteration)
        self.queues = queues
        queues.resume()

    def note_deviation(self, reason: str) -> None:
        """Count a deviation from the plan, and log it."""
        self.deviations += 1
        self.deviation_log.append(f"iteration {self.iteration}: {reason}")
        log.info("iteration %d left the plan: %s", self.iteration, reason)

    def end_after_training(self) -> bool:
        """End the run, as `close()`, if its training is over (`trained`). Called when the user's code does something
        that a prepared model does not allow. Returns whether it did. Raises ContractError on several ranks, where
        `close` is for all of them at once."""
        if not self.trained or self.closed:
            return False
        if self.ranks is not None:
            raise ContractError(
                "training is over, and the run of several ranks still holds the parameters: each rank has a part of "
                "them; call session.close() on all ranks (trainer.offload_session.close()), then write weights, load, "
                "move or copy the model"
            )
        self.close()
        return True

    def close(self, *, restore: bool = True) -> None:
        """Stop the queues and remove the hooks. A second call does nothing.

        restore: whether parameters become plain parameters with their current values.

        Afterwards raises the error of a queue that died, unless that error was raised before.
        """
        self.ending.close(restore=restore)


def _hear_of_loss(keeper: weakref.ref[Session]) -> Callable[[BaseException], None]:
    """Returns the function that the lifeline's thread calls when another rank is lost: every wait for a queue of this
    rank then raises."""

    def hear(error: BaseException) -> None:
        held = keeper()
        if held is not None:
            held.queues.fail(error)

    return hear
