"""Session: a model under a plan. Turns the clock's events into the compute queue's steps, gradients into chunk
contents.

The user's thread is the compute queue: an event ends the open moment, runs what the plan has for the compute queue
before the next one, waits for that moment's `after` edges and begins it. The other queues run by themselves
(`queues/`). What reality does that the plan does not know is `off_plan/demand.py`'s matter; what a loop may do at all
is `contract.py`'s.

An iteration is on plan until an event, a gradient or a batch says otherwise; then `demand` carries it to its end, and
the next begins on plan again. What comes of each act of the loop is in one table, `session/cursor.py`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from executor.activations.planned import as_planned, recomputing
from executor.activations.stashes import Stashes
from executor.adam import Hyper
from executor.at_work import AtWork
from executor.compiled import untraced
from executor.contract import raw_grad, set_raw_grad
from executor.devices.backend import Backend, StreamBackend, VirtualBackend, available_host_bytes
from executor.distributed.absent import Absent
from executor.distributed.ranks import CountOf, Ranks, count_of
from executor.driving.drive import Driver, Loss, StepResult
from executor.holdings import Holdings
from executor.hooks import Event, MomentClock, tensors_of
from executor.measuring.first import FirstIteration
from executor.measuring.live_bytes import LiveStorages
from executor.measuring.measure import Measured, Watching, measure_iteration, unseen
from executor.measuring.measured import IterationLog, Moved, StepLog, build_timeline
from executor.measuring.status import Status, status_of
from executor.memory.arena import Arena, check_host_memory
from executor.memory.contents import Contents, Update
from executor.models import forward_loss
from executor.moments import MomentRecorder
from executor.off_plan.demand import Demand
from executor.off_plan.guard import Guard
from executor.off_plan.ladder import Ladder
from executor.off_plan.warm_up import WarmUp
from executor.queues.interface import Program, Queues
from executor.scaling import LossScaling, guard_boundary
from executor.session.cursor import Act, Answer, Cursor, Refusal, State, act_of, answer, refused
from executor.session.facts import ActFacts
from executor.session.iteration import Iteration
from executor.session.reader import Reader
from executor.session.timetable import Timetable
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import COPIES, Kind, Place, Queue
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import DoesNotFit, Interrupted, ModelError, OutOfMemory, PlanError
from pstar_sim.workload.workload import Moment, Phase, Workload

__all__ = ["Session"]

log = logging.getLogger("executor")

KEPT_ITERATIONS = 16
KEPT_CHANGES = 2_000  # of bytes, at least; older ones are summed up once there are twice as many as those kept


class Session:
    """One model being trained under one plan. Made by `executor.prepare`; ended by `close()`.

    deviations: iterations or events that left the plan, counted. iteration: number of the current or next one, from 0.
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
        hyper: Callable[[], list[Hyper]],
        max_grad_norm: float | None,
        eager: bool,
        scaling: LossScaling | None = None,
        skeleton: nn.Module | None = None,
        replan_after: int = 3,
        ranks: Ranks | None = None,
        count: CountOf = count_of,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.ranks = ranks
        if ranks is not None:
            ranks.on_loss = self._hear_of_loss(weakref.ref(self))
        self._count = count
        self.absent = None if ranks is None or eager else Absent(self)
        self._weight = 1.0  # of this rank's gradients in the micro-batch that runs
        self.parameters = parameters
        self.backend = backend
        self.home = torch.device("cpu")  # where the model was, and will be after `close`
        self.iteration = 0
        self.iterations_before = 0  # done by runs that this one goes on from
        self.cursor = Cursor()
        self.at_work = AtWork()
        self.renewing = False  # values are on their way into the chunks of a new plan
        self.deviations = 0
        self.deviation_log: deque[str] = deque(maxlen=100)
        self.replan_after = replan_after
        self.skeleton = skeleton
        self.on_close: list[Callable[[], object]] = []
        self.watches: list[Watching] = []
        self.first: FirstIteration | None = None  # until the tide is compared; its report stays
        self.takes_norms = False  # a warm-up of a run that will clip does the same work
        self._warm: WarmUp | None = None
        self.closed = False
        self.weights_note = ""  # where the values came from, in words
        self.max_grad_norm = max_grad_norm
        self.eager = eager
        self.scaling = scaling
        self.last_update: Update | None = None
        self.optimizer: Callable[[], torch.optim.Optimizer | None] = lambda: None  # prepare sets it
        self.in_parts = False  # a backward runs part by part (driving/drive.py)
        self._driver: Driver | None = None
        self.holdings = Holdings(backend, ranks)
        self._dropped = weakref.finalize(self, self.holdings.let_go)
        self._dropped.atexit = False  # the interpreter's end is `prepare`'s matter
        self._hyper = hyper
        self._now = clock
        self.reader = Reader(self, parameters)
        if ranks is not None:
            ranks.giver = weakref.ref(self.reader)
        self.now = Iteration(number=-1)  # the current one; between two, the one that ended last
        self.held = False  # nothing moves until there is a new plan
        self._standing = False  # inside `still`
        self.guard: Guard | None = None
        self.ladder = Ladder(self)
        self._install(plan, arena, queues)
        self.clock = MomentClock(model, self.on_event, trains=lambda: self.reader.trains, wrap=untraced)
        self._hooks = [
            parameters[t].register_post_accumulate_grad_hook(untraced(self._gradient_hook(t)))  # type: ignore[no-untyped-call]
            for t in sorted(self.timetable.trainable)
        ]
        if scaling is not None:
            self._hooks += guard_boundary(model, lambda: scaling.scale, wrap=untraced)

    @staticmethod
    def _hear_of_loss(keeper: weakref.ref[Session]) -> Callable[[BaseException], None]:
        """From the lifeline's thread: whoever waits for a queue of this rank raises that another rank is lost."""

        def hear(error: BaseException) -> None:
            held = keeper()
            if held is not None:
                held.queues.fail(error)

        return hear

    def _install(self, plan: Plan, arena: Arena, queues: Queues) -> None:
        """Everything that belongs to one plan."""
        self.plan = plan
        self.arena = arena
        self.queues = queues
        self.holdings.arena = arena
        self.holdings.stoppers = [queues.stopper()]
        self.contents = Contents(arena, self.reader.refresh, None if self.ranks is None else self.ranks.wire)
        self.program = Program(plan)
        self.timetable: Timetable = Timetable(plan)
        self.logs: deque[IterationLog] = deque(maxlen=KEPT_ITERATIONS)
        self._most_changes = KEPT_CHANGES
        self.span_log: deque[StepLog] = deque(maxlen=KEPT_ITERATIONS * max(1, len(plan.steps)))
        self.first_s = self._now()
        self._steps: dict[tuple[int, int], StepLog] = {}
        self.demand = Demand(self)
        self.touch = untraced(self.demand.touch)
        self.join = self.demand.join
        self.stashes = Stashes(self)
        if self.guard is not None:
            self.guard.bind()
        if self.first is not None:
            self.first.bind()

    # -- eager updates ------------------------------------------------------------------------------------------------

    @property
    def updated_early(self) -> set[int]:
        """Tensors whose eager update of this iteration has begun."""
        return self.now.early if self.now.number == self.iteration else set()

    @property
    def updating(self) -> bool:
        """Parameters may be changing: with eager updates, from the first chunk whose gradients are complete until
        `optimizer.step()`. Told by the plan's moments, so that the same loop is always answered alike, however fast the
        queues are."""
        return self.eager and (self.cursor.moment > self.timetable.first_complete or bool(self.updated_early))

    def refuse_while_updating(self, what: str) -> None:
        """Raise ContractError where `what` would see some parameters updated and others not."""
        if self.updating:
            raise refused(Refusal.UPDATING, ActFacts(self, what=what))

    # -- events -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin the next iteration: the queues may fetch what its first moments need."""
        self.arena.set_tide(self.timetable.cut_tide)
        self.queues.pause()
        self.moved = Moved(self.backend.copied_bytes)  # without what it took to get here
        self.queues.start(self.program, self)
        if self.iteration:
            self.queues.jump(self.iteration - 1)
        self.queues.allow(self.iteration)
        self.queues.resume()

    def guard_memory(self, *, always: bool = False) -> None:
        """Watch every operator from now on, where the accelerator has a limit of its own (or always)."""
        limited = isinstance(self.backend, VirtualBackend) and self.backend.gpu_bytes is not None
        if self.guard is None and (limited or always):
            self.guard = Guard(self)
            self.guard.begin()
            self.holdings.at_end.append(self.guard.end)

    def compare_first_tide(self) -> None:
        """Hold the tide of the first iteration that runs on plan against the plan's: `measuring/first.py`."""
        self.first = FirstIteration(self)
        self.first.begin()
        self.holdings.at_end.append(self.first.end)

    def ask(
        self, act: Act, event: Event | None = None, *, tensor: int = -1, what: str = "", keeps: bool = False
    ) -> Answer:
        """What comes of an act of the loop: see `session/cursor.py`. Raises ContractError where it is refused."""
        if self.closed:
            state = State.CLOSED
        elif self.at_work.torn:
            state = State.INTERRUPTED
        else:
            state = self.cursor.state
        return answer(state, act, ActFacts(self, event, tensor=tensor, what=what, keeps=keeps))

    def on_event(self, event: Event) -> None:
        """The clock's only caller. Between events the user's thread computes."""
        if self.closed:
            return
        act = act_of(event.kind, event.phase)
        if act is not Act.STEP:
            self.at_work.outermost()
            if self.at_work.torn:
                self.require_running()
        found = self.ask(act, event)
        if found is Answer.MEND:
            self._mend()
            found = self.ask(act, event)
        with self.at_work:
            self._on_event(event, act, found)

    def _on_event(self, event: Event, act: Act, found: Answer) -> None:
        if self.cursor.moment >= 0:
            for watch in self.watches:
                watch.closes(self.cursor.moment)
        if self._warm is not None:
            self._warm.on_event(event, found)
            return
        with unseen():
            if self.queues.failure is not None:
                raise self.queues.failure
            if self.ladder.on_event(event):
                found = self.ask(act, event)
            if found is Answer.END_VISIT:
                self.demand.end_visit()
                found = self.ask(act, event)
            if found is Answer.STAY:
                self.demand.on_event(event, found)
                return
            self._weigh(event, found)
            try:
                if found is Answer.FOLLOW:
                    self._follow(event)
            except OutOfMemory as error:
                self.ladder.climb(error)
                found = self.ask(act, event)
                if found is Answer.FOLLOW:
                    self._follow(event)
            if found is not Answer.FOLLOW:
                self.demand.on_event(event, found)
        self.stashes.settle()
        if act is Act.BACKWARD_END:
            self.now.backwards += 1
        for watch in self.watches:
            watch.opens()

    def moment_of(self, event: Event) -> int | None:
        """The moment that the event opens on plan: the next one, or a later one where this rank has nothing to compute
        before it."""
        following = self.cursor.moment + 1
        if self.timetable.on_demand_only:
            return None
        if self.timetable.names[following] == event.name:
            return following
        return None if self.absent is None else self.absent.moment_of(event)

    def _follow(self, event: Event) -> None:
        """Go to the moment that the event opens."""
        following = self.moment_of(event)
        assert following is not None
        if event.kind == "begin" and event.module == "" and not self.demand.planned_batch:
            self.note_deviation("a batch of another shape than planned (it fits the plan's tide and runs on plan)")
        if self.absent is not None:
            self.absent.pass_to(following)
        self.advance(following)
        if (event.phase is Phase.FWD and event.kind == "end" and event.module == "") or event.kind == "backward-end":
            self.reader.set_open(bool(self.timetable.reads[following]) and not self.updating)
        elif event.kind != "step":
            self.reader.set_open(True)

    def _weigh(self, event: Event, found: Answer) -> None:
        """[Note: the weight of a rank] in distributed/ranks.py, for the micro-batch that begins where the plan has it,
        whether its batch may run on plan or not."""
        if self.ranks is None or event.kind != "begin" or event.module != "":
            return
        if found in (Answer.FOLLOW, Answer.LEAVE) and self.moment_of(event) is not None:
            begun_s = self._now()
            self._weight = self.ranks.weight(self._samples)
            self.queues.waited(self._now() - begun_s)

    @property
    def batch_fits(self) -> bool:
        """The batch of the forward that begins may run on plan."""
        return self.demand.batch_fits

    @property
    def given_up(self) -> bool:
        """The iteration did not fit into memory and is to be run again."""
        return self.ladder.given_up

    def advance(self, moment: int) -> None:
        """End the open moment, run the compute queue up to `moment`, begin it."""
        k = self.iteration
        ready_s = self._now()
        if self.cursor.moment >= 0:
            self._end_moment(ready_s)
        else:
            self._begin_iteration()
        for i in self.timetable.before[moment]:
            self._run_inline(i)
        i = self.timetable.compute[moment]
        waited_for = self.queues.wait(i, k)
        for chunk in self.timetable.reads[moment]:
            self.queues.land(chunk)
        self.arena.mark("in", moment)
        self.arena.set_tide(self.timetable.peaks[moment])
        self.stashes.at(moment)
        for chunk in self.timetable.reads[moment]:
            if not self.contents.holds(chunk):
                raise PlanError(
                    f"moment {moment} ({self.timetable.names[moment]}) reads chunk {chunk}, which the gpu does not hold"
                )
        self.cursor.moment = moment
        self.now.outstanding = set(self.timetable.due[moment])
        self.begin(i, k, ready_s, waited_for, take=False)

    def _end_moment(self, now_s: float) -> None:
        moment = self.cursor.moment
        i = self.timetable.compute[moment]
        self.queues.before_end(i, self.iteration)
        following = self.timetable.following_peak(moment)
        self.arena.mark("after", moment)
        if following < self.timetable.peaks[moment]:
            self.arena.set_tide(following)
        self._steps[i, self.iteration].end_s = now_s
        self._log(i, self.iteration)
        self.queues.ended(i, self.iteration)

    def _run_inline(self, i: int) -> None:
        """A step of the compute queue that is not a moment."""
        k = self.iteration
        ready_s = self._now()
        waited_for = self.queues.wait(i, k)
        self.begin(i, k, ready_s, waited_for)
        self.work(i, k)
        self.queues.before_end(i, k)
        self.finish(i, k)
        self.queues.ended(i, k)

    def _begin_iteration(self) -> None:
        self.now = self.now.next(self.iteration, self.new_update() if self.eager else None)
        if self.first is not None:
            self.first.begins()
        if self.scaling is not None:
            self.scaling.begin_iteration()
        self.queues.allow_net(self.iteration)

    def new_update(self) -> Update:
        sliced = self.ranks is not None and self.contents.sliced
        agree = self._agreed if sliced else None
        streams = cast(StreamBackend, self.backend) if hasattr(self.backend, "record") else None
        return Update(hyper=self._hyper(), max_grad_norm=self.max_grad_norm, agree=agree, streams=streams)

    def _agreed(self, norm: torch.Tensor) -> torch.Tensor:
        """`Ranks.agree`, whose wait is the training thread's where an update on the accelerator asks first."""
        assert self.ranks is not None
        begun_s = self._now()
        found = self.ranks.agree(norm)
        if getattr(self.backend, "queue", None) is Queue.COMPUTE:
            self.queues.waited(self._now() - begun_s)
        return found

    # -- gradients ----------------------------------------------------------------------------------------------------

    def _gradient_hook(self, tensor: int) -> Callable[[torch.Tensor], None]:
        keeper = weakref.ref(self)  # what a parameter's hooks hold is not collected

        def hook(parameter: torch.Tensor) -> None:
            held = keeper()
            if held is not None and not held.closed:
                with held.at_work:
                    held.on_gradient(tensor, parameter)

        return hook

    def on_gradient(self, tensor: int, parameter: torch.Tensor) -> None:
        """A gradient was accumulated into `parameter`."""
        moment = self.cursor.moment
        if not self.cursor.off_plan:
            if moment >= 0 and tensor in self.timetable.early[moment]:
                return  # it fires again in this micro-batch
            if self.in_parts and self.timetable.final_in(moment, tensor) > moment:
                return  # the same: each part that uses it gives its share
            if moment < 0 or tensor not in self.timetable.due[moment]:
                if self.absent is not None and self.absent.waits(tensor):
                    return
                self.demand.leave(
                    f"gradient of {self.reader.name_of(tensor)!r} arrives in moment {moment}, the plan has it elsewhere"
                )
        if self._warm is not None and not self._warm.gradient_is_final(tensor):
            return
        grad = raw_grad(parameter)
        assert grad is not None
        with unseen(), torch.no_grad():
            if self.cursor.off_plan:
                if self.takes_norms:
                    torch.linalg.vector_norm(grad, dtype=torch.float32)
                self.demand.accept(tensor, grad)
            else:
                goes_to = self.timetable.gradient_list(moment, tensor)
                if self._weight == 0.0:  # of an empty batch: what a mean over nothing gives is no number
                    grad.zero_()
                elif self._weight != 1.0:
                    grad.mul_(self._weight)
                self.contents.accept(tensor, grad, goes_to)
                if self.max_grad_norm is not None and self.plan.workload.micro_batches == 1 and self.ranks is None:
                    self.now.norms[tensor] = torch.linalg.vector_norm(
                        self.contents.slot(Place.GPU, tensor, goes_to), dtype=torch.float32
                    )
            if self.scaling is not None:
                self.scaling.see(grad)
            if not self.cursor.off_plan:
                self.now.outstanding.discard(tensor)
            self.backend.touch()
            self.reader.consumed.add(tensor)
            self.now.arrived.add(tensor)
            self.cursor.stepped = False
        set_raw_grad(parameter, None)

    # -- the engine's own loop ----------------------------------------------------------------------------------------

    def step(
        self, micro_batches: Sequence[Any], *, loss: Loss = forward_loss, order: str = "depth-first"
    ) -> StepResult:
        """One whole iteration, whose order of blocks is the engine's: forward and backward of every micro-batch,
        `optimizer.step()` and `zero_grad()`. See `executor.driving.drive`.

        micro_batches: as the model takes them (a mapping: keyword arguments; a tuple: positional ones). loss(model,
        batch): a scalar; default: the model's own. Raises ContractError, before anything runs, for an unknown order, no
        micro-batch or more than planned, and inside an iteration.
        """
        if self._driver is None:
            self._driver = Driver(self)
        return self._driver.step(micro_batches, loss, order)

    # -- the optimizer ------------------------------------------------------------------------------------------------

    def optimizer_step(self) -> None:
        """What `optimizer.step()` does. Returns without waiting for what the plan lets run into the next forward."""
        self.require_running()
        self.at_work.outermost()
        found = self.ask(Act.UPDATE)
        if found in (Answer.MEND, Answer.FINISH):
            self._mend()
            if found is Answer.FINISH:
                return
            found = self.ask(Act.UPDATE)
        if found is Answer.NOTHING:
            return
        with self.at_work, unseen(), torch.no_grad():
            self.reader.set_open(False)
            if found is Answer.LEAVE:
                count = len(self.timetable.names)
                self.demand.leave(f"optimizer.step() came in moment {self.cursor.moment} of {count}")
            if self.cursor.off_plan:
                self.demand.step()
                self.clock.reset()
                self.cursor.stepped = True
                self.demand.replan()
            else:
                self._step_on_plan()
            self.cursor.stepped = True
        if self.first is not None and self.logs and self.logs[-1].on_plan:
            with self.at_work:
                self.first.ended()

    def _step_on_plan(self) -> None:
        k = self.iteration
        self.demand.in_a_row = 0
        update = self.now.update if self.eager else self.new_update()
        assert update is not None
        self.now.update = update
        update.norms = self.now.norms
        self.decide_scaling(update)
        if self.absent is not None:
            self.absent.settle()
            begun_s = self._now()
            update.unused = self.absent.unused()
            self.queues.waited(self._now() - begun_s)
        if self.plan.workload.micro_batches == 1 and self.ranks is None and not update.skip:
            update.coefficient(lambda: self.update_norms(k))
        self.cursor.committed = k
        self.clock.step()  # the event "step": comes back through on_event
        assert self.cursor.moment == len(self.timetable.names) - 1 or self.cursor.off_plan
        if not self.cursor.off_plan:
            for watch in self.watches:
                watch.closes(self.cursor.moment)
            try:
                self._end_moment(self._now())
                for i in self.timetable.tail:
                    self._run_inline(i)
            except OutOfMemory as error:
                self.ladder.climb(error)
            else:
                self.next_iteration()
                return
        self.demand.step()
        self.cursor.stepped = True
        self.demand.replan()

    def decide_scaling(self, update: Update) -> None:
        """All gradients of the iteration are there: whether it updates, and what undoes the scale."""
        if self.scaling is None:
            return
        update.unscale = 1.0 / self.scaling.scale
        begun_s = self._now()
        overflowed = self.scaling.overflowed()
        if self.ranks is not None:
            overflowed = self.ranks.any(overflowed)
        self.queues.waited(self._now() - begun_s)
        if overflowed:
            update.skip_all()
        self.scaling.close_iteration(overflowed)

    @property
    def loss_scale(self) -> float | None:
        """What gradients of the next iteration will be multiplied with inside the model; None without loss scaling."""
        return None if self.scaling is None else self.scaling.scale

    @property
    def skipped_steps(self) -> int:
        """Iterations without an update because a gradient was not finite (loss scaling)."""
        return 0 if self.scaling is None else self.scaling.skipped_steps

    @property
    def grad_norm(self) -> float | None:
        """Global norm of the last step's gradients before clipping; None without clipping or before the first step."""
        update = self.last_update
        if update is None or update.max_grad_norm is None:
            return None
        if update.norm is None:
            self.queues.settle(self.iteration - 1)
        return None if update.norm is None else float(update.norm)

    def settings_changed(self) -> bool:
        """Settings of the optimizer are not those that the eager updates of this iteration were made with."""
        return self.eager and self.now.update is not None and self.now.update.hyper != self._hyper()

    def next_iteration(self, *, on_plan: bool = True) -> None:
        """The iteration's compute is over; the side queues go on with its steps and begin the next one's."""
        exchanges = getattr(self.backend, "exchanges", 0)
        self.logs.append(IterationLog(self.iteration, self._now(), on_plan, exchanges))
        if not on_plan:
            self.moved.others(self.iteration, self.backend.copied_bytes)
        self.moved.forget(self.logs[0].number)
        self.last_update = self.now.update_of(self.iteration) or self.last_update
        measured = self.arena.marks is not None  # somebody counts the changes of this iteration
        if len(self.logs) == KEPT_ITERATIONS and len(self.arena.log) > self._most_changes and not measured:
            self.arena.trim(self.logs[0].end_s)
            self._most_changes = max(KEPT_CHANGES, 2 * len(self.arena.log))
        self.iteration += 1
        self.cursor.moment = -1
        self.now.outstanding = set()
        self.queues.allow(self.iteration)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """What `optimizer.zero_grad()` does."""
        self.require_running()
        self.at_work.outermost()
        found = self.ask(Act.CLEAR, keeps=not set_to_none)
        if found is Answer.MEND:
            self._mend()
        elif found is Answer.HALF:
            raise self.demand.half_updated()
        elif found is Answer.DROP:
            with self.at_work, unseen(), torch.no_grad():
                self.demand.discard()
        self.reader.forget_gradients()
        self.now.arrived.clear()
        self.cursor.stepped = False

    def update_norms(self, iteration: int) -> Iterable[torch.Tensor]:
        """Norms of all gradients of an iteration, called by its first Adam step under clipping. On several ranks: of
        what this one holds of their sums."""
        update = self.now.update_of(iteration)
        assert update is not None
        if self.ranks is not None:
            self.queues.await_steps(self.timetable.sums, iteration)
            if self.plan.workload.micro_batches == 1:
                norms = self.contents.summed_norms
                return [norms[t] for t in sorted(norms)]
            self.contents.fold_on_gpu()
        if self.plan.workload.micro_batches == 1:
            return [update.norms[t] for t in sorted(update.norms)]  # as clip_grad_norm_ has them
        for i in self.program.order.get(Queue.ADAM, []):
            if self.plan.steps[i].kind is Kind.CPU_ADD and self.program.done[i] < iteration:
                raise PlanError(
                    f"an Adam step of iteration {iteration} runs before {self.program.word(i, iteration)}: the plan's "
                    "barrier does not hold"
                )
        arrived = sorted(t for state in self.contents.chunks for t in state.with_gradient())
        return [self.contents.gradient_norm(t) for t in arrived]

    # -- Work: what queues call ---------------------------------------------------------------------------------------

    def enter_thread(self, queue: Queue) -> None:
        self.backend.enter_thread(queue)

    def landed(self, chunk: int) -> None:
        self.reader.refresh(chunk)

    def begin(self, i: int, iteration: int, ready_s: float, waited_for: int | None, *, take: bool = True) -> None:
        step = self.plan.steps[i]
        start_s = self._now()
        cause = ""
        if waited_for is not None:
            other = self.plan.steps[waited_for]
            barrier = other.kind is Kind.COMPUTE and other.moment == len(self.timetable.names) - 1
            cause = "barrier" if barrier else other.queue.value
        self._steps[i, iteration] = StepLog(step, iteration, ready_s or start_s, start_s, cause)
        if take and step.stash is None:
            self.contents.begin(step)

    def work(self, i: int, iteration: int) -> None:
        step = self.plan.steps[i]
        ahead_bytes = 0
        if step.kind in COPIES:
            before = self.stashes.copied_bytes(step.queue)
        with torch.no_grad():
            early = self.eager and step.kind in (Kind.CPU_ADAM, Kind.GPU_ADAM) and iteration == self.iteration
            if early and step.chunk is not None:
                self.now.early.update(self.contents.chunks[step.chunk].with_gradient())
                self.reader.refresh(step.chunk)
            if step.stash is not None:
                ahead_bytes = self.stashes.move(step)
            else:
                self.contents.work(step, self.now.update_of(iteration), lambda: self.update_norms(iteration))
        if step.kind in COPIES:
            copied_bytes = self.stashes.copied_bytes(step.queue) - before
            self._steps[i, iteration].copied_bytes = copied_bytes + ahead_bytes
            self.moved.step(iteration, step.queue.value, copied_bytes + ahead_bytes)

    def finish(self, i: int, iteration: int) -> None:
        if self.plan.steps[i].stash is None:
            self.contents.finish(self.plan.steps[i])
        self._steps[i, iteration].end_s = self._now()
        self._log(i, iteration)

    def _log(self, i: int, iteration: int) -> None:
        self.span_log.append(self._steps.pop((i, iteration)))

    def forget_open_step(self) -> None:
        """The open moment's step will not end as the plan has it: the iteration left the plan."""
        if self.cursor.moment >= 0:
            self._steps.pop((self.timetable.compute[self.cursor.moment], self.iteration), None)
        self.now.outstanding = set()

    def timeline(self) -> Timeline:
        """What the last iterations on plan did, in the simulator's schema; waits for their last copies and updates.
        Raises PlanError before the first has run."""
        if not self.closed:
            self.queues.settle(self.iteration - 1)
        steps, iterations, changes = self.queues.measured(list(self.span_log), list(self.logs), list(self.arena.log))
        return build_timeline(self.plan, steps, iterations, changes, self.first_s)

    def status(self) -> Status:
        """What the run is doing, for a progress line: see `executor.measuring.status.Status`. Waits for nothing."""
        return status_of(self)

    # -- state and end ------------------------------------------------------------------------------------------------

    def meet_interruption(self) -> None:
        """Before values are looked at after an interruption: see [Note: interrupted] in off_plan/demand.py. Raises
        ContractError where only the loop can say that the iteration's gradients are to be dropped."""
        if self.at_work.torn:
            self.require_running()
            if self.ask(Act.LOOK) is Answer.MEND:
                self._mend()

    def _mend(self) -> None:
        with self.at_work, unseen(), torch.no_grad():
            self.in_parts = self._standing = False
            self.demand.mend()
        self.at_work.torn = False

    def end(self, why: str) -> Interrupted:
        """What to raise, now and whatever is asked of the session from now on."""
        error = Interrupted(why)
        self.queues.fail(error)
        if self.ranks is not None:
            self.ranks.announce(error, self.iteration)
        return error

    def require_running(self) -> None:
        if self.closed:
            raise refused(Refusal.CLOSED, self)
        if self.queues.failure is not None:
            raise self.queues.failure

    def drain(self) -> None:
        """Return when every update of the finished iterations is in the parameters, and nothing moves."""
        self.require_running()
        self.queues.settle(self.iteration - 1)
        self.queues.pause()

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Updates of finished iterations are done and nothing moves inside; the queues go on afterwards."""
        if not self.at_work.depth:
            self.meet_interruption()
        held = self.held or self._standing or self.cursor.off_plan or self.cursor.visiting  # they stand still already
        with self.at_work:
            if not held:
                self.drain()
                self._standing = True
            try:
                yield
            finally:
                if not held:
                    self._standing = False
                    self.queues.resume()

    def see_batch(self, args: Any, kwargs: Any) -> None:
        if self.first is not None and torch.is_grad_enabled():
            self.first.require_plan()
        with unseen():
            try:
                self._samples = self._counted(args, kwargs) if self.ranks is not None else 1.0
                self.demand.see_batch(args, kwargs)
            except Exception as error:
                if self.ranks is not None:  # the others are about to wait for this one
                    self.ranks.life.fail(f"{type(error).__name__}: {error}")
                raise

    def _counted(self, args: Any, kwargs: Any) -> float:
        found: Any = self._count(args, kwargs)
        try:
            return float(found)
        except (TypeError, ValueError, RuntimeError):
            raise ModelError(
                f"prepare(count=...) gives {found!r:.60} for a micro-batch; let it give a number: over how many "
                "(sequences, tokens) the rank's loss is a mean"
            ) from None

    def add_hook(self, handle: Any) -> None:
        """A hook that goes when the session ends."""
        self._hooks.append(handle)

    # -- warm-up (measuring/record.py) --------------------------------------------------------------------------------

    def warm_up(self, recorder: MomentRecorder | None, live: LiveStorages | None, firings: Mapping[int, int]) -> None:
        """Tell `recorder` of every event and gradient from now on; None: no more."""
        self._warm = None if recorder is None or live is None else WarmUp(self, firings, recorder=recorder, live=live)

    def time_moments(
        self,
        script: Sequence[tuple[set[int], int]],
        firings: Mapping[int, int],
        iteration: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> list[float]:
        """Seconds of each moment of one iteration, waits left out. script: (chunks read, non-model peak) of each
        moment."""
        warm = WarmUp(self, firings, script=script, clock=clock)
        self._warm = warm
        try:
            iteration()
            warm.close()
        finally:
            self._warm = None
        return warm.durations

    def use_queues(self, queues: Queues) -> None:
        """Go on with other queues from where these stand. Both may be used again."""
        self.queues.pause()
        standing = self.queues.standing()
        queues.pause()
        if queues.program is None:
            queues.start(self.program, self)
            self.holdings.stoppers.append(queues.stopper())
        queues.stand(standing)
        queues.allow(self.iteration)
        self.queues = queues
        queues.resume()

    def measure_iteration(self, step_fn: Callable[[], Any], order: Timeline | None = None) -> Measured:
        """See `executor.measuring.measure.measure_iteration`: runs `step_fn` twice."""
        return measure_iteration(self, step_fn, order)

    def renew(self, plan: Plan) -> None:
        """Go on under another plan of the same model, between two iterations; values and states move into its chunks.

        Raises DoesNotFit, before anything changes, if the host cannot hold both while they move.
        """
        from executor.prepare import load_parameters  # it imports this module

        assert not self.cursor.inside
        arena = Arena(plan, self.backend)
        layout = self.plan.layout
        moving = sum(layout.payload_bytes(c.index, "param") + layout.states_bytes(c.index) for c in layout.chunks)
        check_host_memory(
            plan,
            arena.room,
            available_bytes=available_host_bytes(),
            gpu_is_host=self.backend.device.type == "cpu",
            model_bytes=-moving,  # between two sets of chunks every value has a third place
        )
        with torch.no_grad():
            self.drain()
            try:
                arena.allocate_slabs()
            except DoesNotFit:
                self.backend.begin(self.plan)
                if not self.held:
                    self.queues.resume()
                raise
            self.held = True
            old, contents, queues = self.arena, self.contents, self.queues
            steps_taken = contents.steps_taken
            lists = plan.layout.state_lists
            masters = self.plan.layout.chunks
            values = {t: self.reader.current_value(t) for t in self.timetable.chunk_of}
            states = {
                (s.tensor, name): self.reader.state_value(s.tensor, name)
                for c in masters
                for s in c.slots
                for name in lists
                if any(old.has(place, c.index, name) for place in (Place.GPU, Place.HOST))
            }
            self.renewing = True
            self.queues.stop()
            self.reader.set_open(False)
            for t, value in values.items():
                self.parameters[t].__class__ = nn.Parameter
                self.parameters[t].data = value
            old.empty()  # the accelerator may not hold both
            self._install(plan, arena, queues.renew())
            load_parameters(self)
            for (t, name), value in states.items():
                self.reader.put_state(t, name, value)
            self.contents.steps_taken.update(steps_taken)
        del old, contents, queues, values, states
        self.backend.give_host_back()  # the former plan's slabs
        self.held = False
        self.start()
        self.renewing = False

    # -- deviations ---------------------------------------------------------------------------------------------------

    @property
    def planned_batch(self) -> int:
        """Sequences of this rank's micro-batch; a plan for ranks with unequal shares is made for the largest."""
        batch = self.plan.workload.batch
        if self.ranks is None:
            return batch
        shares = [rank.batch_share for rank in self.plan.machine.ranks]
        return round(batch * shares[self.ranks.rank] / max(shares))

    def note_deviation(self, reason: str) -> None:
        self.deviations += 1
        self.deviation_log.append(f"iteration {self.iteration}: {reason}")
        log.info("iteration %d left the plan: %s", self.iteration, reason)

    def moments_of_batch(self, args: Any, kwargs: Any) -> tuple[Moment, ...]:
        """Moments (with the exact tide) of one micro-batch of this shape, captured under fake tensors."""
        return self.capture_batch(args, kwargs).moments

    def capture_batch(self, args: Any, kwargs: Any) -> Workload:
        """The model's workload for a batch of this shape. Raises ModelError where the model cannot be captured."""
        from executor.capture import capture_module

        if self.skeleton is None:
            raise ModelError(
                f"a batch of another shape than planned, and {type(self.model).__name__} cannot be copied to look at "
                "it under fake tensors; make a plan for this shape"
            )
        self.follow()
        planned = self.plan.workload
        with recomputing(self.skeleton, planned):
            captured = capture_module(self.skeleton, (args, kwargs), name=planned.model, loss=_some_loss)
        return as_planned(captured, planned)

    def follow(self) -> None:
        """Give the skeleton the plain attributes the model has by now (`training`, switches of its own)."""
        assert self.skeleton is not None
        copies = dict(self.skeleton.named_modules())
        for name, module in self.model.named_modules():
            twin = copies.get(name)
            if twin is None:
                continue
            for key, value in module.__dict__.items():
                if not key.startswith("_") and key in twin.__dict__ and not callable(value):
                    twin.__dict__[key] = value

    def end_ranks(self, error: BaseException | None) -> None:
        """The other ranks hear that this one's run is over. error: what it ends with, as far as is known."""
        if self.ranks is not None and not self.closed:
            self.ranks.announce(self.queues.failure or error, self.iteration)

    def close(self, *, restore: bool = True) -> None:
        """End the session: queues stop, hooks go, and (restore) parameters become plain ones with their current
        values.

        Raises, once all of that is done, what a queue died of if nobody has been told yet."""
        if self.closed:
            return
        values: dict[int, torch.Tensor] = {}
        self.at_work.outermost()
        if restore and self.at_work.torn and self.queues.failure is None:
            try:
                self._mend()
            except Exception as error:  # the device's own, say: the session ends all the same
                self.queues.fail(error)
        if restore and self.queues.failure is None:
            if self.updating:
                log.warning(
                    "closed between the last backward and optimizer.step() with eager updates: some parameters keep "
                    "the update of iteration %d, others do not have it",
                    self.iteration,
                )
            values = {t: self.reader.value_now(t) for t in self.timetable.chunk_of}
        elif restore:
            log.warning("the parameters are left without values: the run ended with %s", self.queues.failure)
        self.end_ranks(sys.exc_info()[1])
        self.closed = True
        self._dropped.detach()
        try:
            self.queues.stop()
        finally:
            self._let_go(values)

    def _let_go(self, values: Mapping[int, torch.Tensor]) -> None:
        """values: tensor -> what its parameter holds from now on."""
        if self.ranks is not None:
            self.ranks.close()
        self.clock.close()
        for handle in self._hooks:
            handle.remove()
        for action in self.on_close:
            action()
        self.reader.make_plain(lambda t: values[t].to(self.home) if t in values else None)
        self.holdings.end()


def _some_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """A scalar to run backward from: the model's loss, or (where the loop computes the loss itself) the sum of its
    outputs."""
    args, kwargs = batch
    outputs = [t for t in tensors_of(model(*args, **kwargs)) if t.requires_grad]
    if not outputs:
        raise ModelError(f"no output of {type(model).__name__} depends on a trainable parameter")
    scalar = next((t for t in outputs if t.numel() == 1), None)
    return outputs[0].sum() if scalar is None else scalar.reshape(())
