"""Session: a model under a plan.

The user's thread is the compute queue. `driving/loop.py` receives the acts of the training loop, `session/cursor.py`
has the table of those that may come next. `session/following.py` carries out an iteration on plan, `off_plan/demand.py`
one that left it.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from executor.activations.stashes import SavedParameters, Stashes
from executor.devices.backend import Backend
from executor.devices.rules import Settings
from executor.distributed.ranks import CountOf, Ranks, count_of
from executor.driving.act_facts import Facts
from executor.driving.drive import Driver, Loss, StepResult
from executor.driving.loop import Loop
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
from executor.moments.hooks import ModuleEvent, MomentClock
from executor.off_plan.demand import Demand
from executor.off_plan.ladder import Ladder
from executor.off_plan.outgrown import Outgrown
from executor.off_plan.plan_run import PlanRun, WholeState
from executor.off_plan.reads import Contract, Reads
from executor.off_plan.shortage import Shortage
from executor.queues.interface import Queues
from executor.scaling import LossScaling, guard_boundary
from executor.session.absent import Absent
from executor.session.accelerated import Accelerated
from executor.session.batches import Batches, Capture, Shapes
from executor.session.following import Following, OffPlan
from executor.session.reader import Reader
from executor.session.standstill import Standstill
from executor.session.steps import Steps
from executor.session.timetable import Timetable
from executor.session.updates import Updates
from executor.session.weakly import weakly
from pstar_sim.core.plan import Plan
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import ContractError, PlanError


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """capture, skeleton: see `session.batches.Shapes`."""

    hyper: Callable[[], list[Mapping[str, Settings]]]
    max_grad_norm: float | None
    eager: bool
    stochastic: bool
    capture: Capture
    scaling: LossScaling | None = None
    skeleton: nn.Module | None = None
    replan_after: int = 3
    count: CountOf = count_of
    clock: Callable[[], float] = time.perf_counter


class Session:
    """One model being trained under one plan. Made by `executor.prepare`; ended by `close()`.

    first: counts until the tide is compared with the plan's; its report stays.
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
        self.backend = backend
        self.options = options
        self.scaling = options.scaling
        self.iterations_before = 0  # iterations of earlier runs that this run continues
        self.first: FirstIteration | None = None
        self.weights_note = ""  # origin of the values, in words
        self.optimizer: Callable[[], torch.optim.Optimizer | None] = lambda: None  # prepare sets it
        self._driver: Driver | None = None
        self.resources = Resources(backend, ranks)
        dropped = weakref.finalize(self, self.resources.let_go)
        dropped.atexit = False  # `prepare` handles the interpreter's end
        self.state = state = WholeState(ranks, options.replan_after)
        self.shapes = Shapes(model, options.skeleton, options.capture)
        self.clock = MomentClock(model, _unheard, trains=lambda: self.reader.trains, wrap=untraced)
        self.standstill = Standstill(state, lambda: self.loop.meet_interruption())
        self.shortage = Shortage(state, self.standstill)
        self.updates = Updates(
            state,
            options.scaling,
            options.hyper,
            eager=options.eager,
            max_grad_norm=options.max_grad_norm,
            stochastic=options.stochastic,
            clock=options.clock,
        )
        self.reader = Reader(
            state,
            self.updates,
            self.standstill,
            parameters,
            ask=lambda act, **about: self.loop.ask(act, **about),
            touch=untraced(lambda *call: state.run.reads.touch(*call)),
        )
        self.ladder = Ladder(state, self.shortage, self.reader, self.clock, self.renew, self.resources.at_end)
        self.outgrown = Outgrown(state, self.shortage)
        facts = Facts(state, self.reader, self.clock, self.shortage, Accelerated())
        self.loop = Loop(facts, self.ladder, self.outgrown, self.renew, options.clock)
        self.ending = Ending(self.loop, self.resources, dropped)
        if ranks is not None:
            ranks.on_loss = _hear_of_loss(weakref.ref(state))
            ranks.still, ranks.own_slice = weakly(self.standstill.still), weakly(self.reader.own_slice)
        self.install(plan, arena, queues)

    def listen(self) -> None:
        """`close` removes the hooks, also if only some were placed."""
        self.clock.listen(self.loop.on_event)
        hooks, scaling = self.ending.hooks, self.scaling
        hooks += self.loop.hook_gradients(untraced)
        if scaling is not None:
            hooks += guard_boundary(self.model, lambda: scaling.at_boundary, wrap=untraced)

    def install(self, plan: Plan, arena: Arena, queues: Queues) -> None:
        """Make the parts of one plan, each after those that it reads: [Note: one plan] in session/state.py. `start` is
        called later, when the values are in the chunks."""
        state, options, shapes, keeper = self.state, self.options, self.shapes, weakref.ref(self.state)
        self.resources.arena = arena
        self.resources.stoppers = [queues.stopper()]
        contents = Contents(arena, self.reader.refresh, None if state.ranks is None else state.ranks.wire)
        run = PlanRun(plan, arena, contents, queues)
        run.stashes = Stashes(
            arena,
            self.model.buffers(),
            self.clock,
            SavedParameters(lambda tensor: run.reads.keep(tensor), lambda kept: run.reads.unpack(kept)),
            off_plan=lambda: state.cursor.off_plan,
            note_deviation=state.note_deviation,
            present=lambda: None if (held := keeper()) is None else held.run.stashes,
        )
        run.steps = Steps(run, state, self.reader, run.stashes, options.clock)
        run.batches = Batches(run, state, self.reader, shapes, options.count)
        kind = Following if state.ranks is None or options.eager else Absent
        off_plan = OffPlan(
            lambda reason: run.demand.leave(reason),
            lambda tensor, gradient: run.demand.gradients.accept(tensor, gradient),
        )
        run.following = kind(run, state, run.steps, run.batches, run.stashes, off_plan, options.clock)
        run.demand = Demand(run.following, self.standstill, self.shortage, self.clock, self.ladder.give_back)
        loop = self.loop
        asks = Contract(
            loop.ask, loop.refuse_while_updating, loop.meet_interruption, self.end_after_training, lambda: self.home
        )
        run.reads = Reads(run.demand, asks)
        state.moment_off_plan = -1
        former, state.run = getattr(state, "run", None), run
        if former is not None:
            former.let_go()
        for listener in state.listeners:
            listener.bind()

    def start(self) -> None:
        """Once per plan: the queues may fetch what the first moments of the next iteration need."""
        run, iteration = self.state.run, self.state.iteration
        run.arena.set_tide(run.timetable.cut_tide)
        run.queues.pause()
        run.steps.start()
        run.queues.start(run.progress, run.steps)
        if iteration:
            run.queues.jump(iteration - 1)
        run.queues.allow(iteration)
        run.queues.resume()

    def guard_memory(self, *, always: bool = False) -> None:
        """See `Ladder.watch`."""
        self.ladder.watch(self.model, always=always)

    def compare_first_tide(self) -> None:
        """See `measuring/first.py`."""
        self.first = FirstIteration(self.model, self.state, self.clock, self.renew)
        self.first.begin()
        self.resources.at_end.append(self.first.end)

    # -- the parts of the present plan, and the place of the run ------------------------------------------------------

    @property
    def plan(self) -> Plan:
        return self.state.run.plan

    @property
    def arena(self) -> Arena:
        return self.state.run.arena

    @property
    def contents(self) -> Contents:
        return self.state.run.contents

    @property
    def queues(self) -> Queues:
        return self.state.run.queues

    @property
    def timetable(self) -> Timetable:
        return self.state.run.timetable

    @property
    def steps(self) -> Steps:
        return self.state.run.steps

    @property
    def following(self) -> Following:
        return self.state.run.following

    @property
    def batches(self) -> Batches:
        return self.state.run.batches

    @property
    def ranks(self) -> Ranks | None:
        return self.state.ranks

    @property
    def closed(self) -> bool:
        return self.state.closed

    @property
    def iteration(self) -> int:
        """Number of the current or next iteration, from 0."""
        return self.state.iteration

    @property
    def deviations(self) -> int:
        """Number of iterations or events that left the plan."""
        return self.state.deviations

    @property
    def other_shapes(self) -> int:
        """Number of these that are batches of another shape than planned, on plan."""
        return self.state.other_shapes

    @property
    def deviation_log(self) -> deque[str]:
        """The latest deviations, in words."""
        return self.state.deviation_log

    @property
    def home(self) -> torch.device:
        """The model's device before `prepare` and after `close`."""
        return self.ending.home

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
            self._driver = Driver(self.model, self.loop, self.ending.on_close, lambda: self.optimizer())
        return self._driver.step(micro_batches, loss, order)

    @property
    def max_grad_norm(self) -> float | None:
        return self.options.max_grad_norm

    @property
    def loss_scale(self) -> float | None:
        """Factor by which gradients inside the model are scaled in the next iteration; None without loss scaling."""
        return None if self.scaling is None else self.scaling.scale

    def scaled(self, loss: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """Returns a context that gives the loss for a backward inside it, multiplied by the loss scale, if any."""
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

        last: number of the timeline's last iteration, of the 16 (fewer with disks) that are kept; None: the newest.

        Raises PlanError if no iteration has run on plan.
        """
        return self.state.run.steps.timeline(last)

    def status(self) -> Status:
        """Returns the state of the run: see `executor.measuring.status.Status`. Waits for nothing."""
        return status_of(self.state, self.first)

    def measure_iteration(self, step_fn: Callable[[], Any], order: Timeline | None = None) -> Measured:
        """Returns the measured bytes of an iteration, with `step_fn` called twice: see
        `executor.measuring.measure.measure_iteration`."""
        return measure_iteration(self.model, self.loop, self.use_queues, step_fn, order)

    def drain(self) -> None:
        """Return when every update of the finished iterations is in the parameters, and nothing moves."""
        self.standstill.drain()

    def still(self) -> AbstractContextManager[None]:
        """Returns a context in which the updates of finished iterations are done and nothing moves. Then the queues
        continue."""
        return self.standstill.still()

    def renew(self, plan: Plan) -> None:
        """Continue under another plan: see `lifetime.renewal`. Ends a running evaluation first. Raises PlanError on
        several ranks."""
        if self.state.ranks is not None:
            raise PlanError(
                "session.renew on several ranks: each rank holds slices that the other plan cuts elsewhere; save a "
                "checkpoint (optimizer.save), prepare the model under the new plan on all ranks, and load it"
            )
        if self.state.cursor.visiting:
            self.loop.end_visit()
        renew(self.reader, plan, self.install, self.start)

    def use_queues(self, queues: Queues) -> None:
        """Continue with other queues from the position of the present ones, which pause. Both may be used again."""
        run = self.state.run
        run.queues.pause()
        standing = run.queues.standing()
        queues.pause()
        if queues.progress is None:
            queues.start(run.progress, run.steps)
            self.resources.stoppers.append(queues.stopper())
        queues.stand(standing)
        queues.allow(self.state.iteration)
        run.queues = queues
        queues.resume()

    def end_after_training(self) -> bool:
        """End the run, as `close()`, if its training is over (`trained`), because the user's code does what a prepared
        model does not allow. Returns whether it did. Raises ContractError on several ranks, which `close` together."""
        if not self.state.trained or self.state.closed:
            return False
        if self.state.ranks is not None:
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


def _unheard(event: ModuleEvent) -> None:
    """Stands for the loop until `Session.listen`."""


def _hear_of_loss(keeper: weakref.ref[WholeState]) -> Callable[[BaseException], None]:
    """When a rank is lost, every wait for a queue here raises."""

    def hear(error: BaseException) -> None:
        state = keeper()
        if state is not None:
            state.run.queues.fail(error)

    return hear
