"""Loop: looks up each act of the training loop in the contract's table and carries the answer out.

An iteration is on plan until an event, a gradient or a batch leaves the plan. Then the on-demand mode carries the
iteration to its end, and the next begins on plan again. `cursor.py` has the answer to each act; this file carries it
out.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from executor.devices.torch_private import transforms_running
from executor.moments.hooks import ModuleEvent
from executor.moments.unseen import Watching, modes_standing, unseen
from executor.queues.interface import Health, Stillness, Timing
from executor.session.accelerated import Accelerated
from executor.session.act_facts import ActFacts
from executor.session.batches import Batches
from executor.session.cursor import ACTS, Act, Answer, State, answer
from executor.session.following import Following
from executor.session.hosting import BytesHost, LoopHost
from executor.session.reader import Reader
from executor.session.refusals import Refusal, refused
from executor.session.steps import Steps
from executor.session.updates import Updates
from pstar_sim.errors import ContractError, Interrupted, OutOfMemory

__all__ = ["LOAD", "Host", "Loop"]

LOAD = "optimizer.load"
"""The call that loads every value."""

log = logging.getLogger("executor")

NEVER = 3  # iterations off plan after which a plan that none has followed is named

_IN_PARTS = (
    "session.step runs the backward of this model's parts in another order than autograd; make a plan in depth-first "
    "order (tide) and call loss.backward() in a loop of your own"
)
_CAPTURED = "record an iteration of this loop (executor.record), make the plan from it, and run it with {own_plan}"
_RECORDED = (
    "the iterations differ from the recorded one that the plan was made from; record one with the loop's own batches, "
    "loss and settings of the model"
)


class Absence(Protocol):
    """The part of `distributed.absent.Absent` that this file uses."""

    def settle(self) -> None: ...

    def unused(self) -> frozenset[int]: ...


class OffPlan(Protocol):
    """The part of `off_plan.demand.Demand` that this file uses."""

    in_a_row: int

    @property
    def left_in_parts(self) -> bool: ...

    def on_event(self, event: ModuleEvent, found: Answer) -> None: ...

    def leave(self, reason: str) -> None: ...

    def end_visit(self) -> None: ...

    def step(self) -> None: ...

    def replan(self) -> None: ...

    def discard(self) -> None: ...

    def mend(self) -> None: ...

    def half_update_error(self) -> Interrupted: ...


class Climbing(Protocol):
    """The part of `off_plan.ladder.Ladder` that this file uses."""

    @property
    def given_up(self) -> bool: ...

    def on_event(self, event: ModuleEvent) -> bool: ...

    def climb(self, error: OutOfMemory) -> None: ...


class Stashing(Protocol):
    """The part of the stashes of activations that this file uses."""

    def settle(self) -> None: ...


class First(Protocol):
    """The part of the comparison of the first tide that this file uses."""

    def require_plan(self) -> None: ...

    def end_iteration(self) -> None: ...


class WarmingUp(Protocol):
    """The part of a warm-up that this file uses."""

    def on_event(self, event: ModuleEvent, found: Answer) -> None: ...


class Growing(Protocol):
    """The part of `off_plan.outgrown.Outgrown` that this file uses."""

    def see(self, args: Any, kwargs: Any) -> None: ...


class QueuesAsked(Stillness, Timing, Health, Protocol):
    """The part of the queues that this file uses."""


class Host(BytesHost, LoopHost, Protocol):
    """The part of the session that this file uses."""

    @property
    def queues(self) -> QueuesAsked: ...
    @property
    def held(self) -> bool: ...
    @property
    def reader(self) -> Reader: ...
    @property
    def steps(self) -> Steps: ...
    @property
    def updates(self) -> Updates: ...
    @property
    def following(self) -> Following: ...
    @property
    def batches(self) -> Batches: ...
    @property
    def scaling(self) -> object | None: ...
    @property
    def guard(self) -> object | None: ...
    @property
    def watches(self) -> Sequence[Watching]: ...
    @property
    def absent(self) -> Absence | None: ...
    @property
    def demand(self) -> OffPlan: ...
    @property
    def ladder(self) -> Climbing: ...
    @property
    def stashes(self) -> Stashing: ...
    @property
    def first(self) -> First | None: ...
    @property
    def warming(self) -> WarmingUp | None: ...
    @property
    def outgrown(self) -> Growing: ...
    @property
    def deviation_log(self) -> deque[str]: ...
    @property
    def accelerated(self) -> Accelerated: ...


class Loop:
    """Carries out the acts of the training loop.

    clock: gives seconds.
    """

    def __init__(self, host: Host, clock: Callable[[], float]) -> None:
        self.host = host
        self._now = clock
        self._of_event = ActFacts(host)  # memory of the event being handled
        self._standing = False  # inside `still`
        self._alone = host.ranks is None and host.scaling is None
        self._left = 0  # iterations that have left the plan
        self._followed = False  # an iteration has run on plan
        self._short = 0  # steps in a row with fewer backwards than planned
        self._warned_of_short = False
        self._whole = False  # a step had all of its backwards

    def ask(self, act: Act, *, tensor: int = -1, what: str = "", keeps: bool = False) -> Answer:
        """Returns the table's answer to a call of the loop: see `cursor.py`. Raises ContractError where the call is
        refused."""
        return answer(self._state(), act, ActFacts(self.host, tensor=tensor, what=what, keeps=keeps))

    def _ask_of(self, event: ModuleEvent, act: Act) -> Answer:
        """Returns the table's answer to an event of the clock."""
        self._of_event.event = event
        return answer(self._state(), act, self._of_event)

    def _state(self) -> State:
        host = self.host
        if host.closed:
            return State.CLOSED
        if host.at_work.loading:
            return State.HALF_LOADED
        return State.INTERRUPTED if host.at_work.torn else host.cursor.state

    def refuse_while_updating(self, what: str) -> None:
        """Raise ContractError where the act `what` would read some parameters before and others after their update."""
        if self.host.updates.running:
            raise refused(Refusal.UPDATING, ActFacts(self.host, what=what))

    def require_running(self) -> None:
        if self.host.closed:
            raise refused(Refusal.CLOSED, self)
        if self.host.queues.failure is not None:
            raise self.host.queues.failure

    # -- events -------------------------------------------------------------------------------------------------------

    def on_event(self, event: ModuleEvent) -> None:
        """Handle an event of the clock, which alone calls this. Between events the user's thread computes."""
        host = self.host
        if self._as_planned(event):
            host.at_work.run(self._next_moment, event)
            return
        if host.closed:
            return
        act = ACTS[event.kind, event.phase]
        at_work = host.at_work
        if act is not Act.STEP:
            if at_work.depth:
                at_work.outermost()
            if at_work.torn:
                self.require_running()
        try:
            found = self._ask_of(event, act)
        except ContractError:
            if host.queues.failure is not None:
                raise host.queues.failure from None  # an error that ended the run comes before a mistake of the loop
            raise
        if found is Answer.MEND:
            self.mend()
            found = self._ask_of(event, act)
        with at_work:
            self._carry_out(event, act, found)

    def _as_planned(self, event: ModuleEvent) -> bool:
        """Returns whether the event is the plan's next, nothing hinders it and no counter listens. The table then
        answers FOLLOW for every act, and only `follow` has to be done. An iteration has hundreds of such events. All
        other events, including those of the root and of calls, go through the table."""
        host = self.host
        cursor, now, table = host.cursor, host.now, host.timetable
        return (
            event.name == table.following[cursor.moment]
            and event.module != ""
            and event.micro_batch >= 0
            and not (cursor.off_plan or cursor.visiting or cursor.stepped)
            and not (now.outstanding or now.given >= table.micro_batches)
            and self._undisturbed()
        )

    def _undisturbed(self) -> bool:
        """Returns whether only the plan's rows need events: a module runs, and nothing else (an interruption, a lack of
        memory, a warm-up, a counter) has to hear of them."""
        host = self.host
        at_work, reader = host.at_work, host.reader
        return (
            not (host.closed or at_work.torn or at_work.loading or at_work.depth)
            and reader.is_open
            and not (reader.switched or host.ladder.given_up or host.queues.troubled)
            and self._alone
            and host.guard is None
            and host.warming is None
            and not (host.watches or modes_standing())
        )

    def _next_moment(self, event: ModuleEvent) -> None:
        """Handle an event that is as planned: go to its moment."""
        host = self.host
        try:
            host.following.advance(host.cursor.moment + 1)
        except OutOfMemory as error:
            self._climb(event, error)

    def _carry_out(self, event: ModuleEvent, act: Act, found: Answer) -> None:
        host = self.host
        watches = host.watches
        if watches and host.cursor.moment >= 0:
            for watch in watches:
                watch.close_moment(host.cursor.moment)
        if host.warming is not None:
            host.warming.on_event(event, found)
            return
        if modes_standing():
            with unseen():
                found = self._go_on(event, act, found)
        else:
            found = self._go_on(event, act, found)
        if found is Answer.STAY:
            return
        if host.timetable.stashes:
            host.stashes.settle()
        if act is Act.BACKWARD_END:
            host.now.end_backward()
        for watch in watches:
            watch.open_moment()

    def _go_on(self, event: ModuleEvent, act: Act, found: Answer) -> Answer:
        """Carry out the answer `found` to the event. Returns the answer that was carried out in the end."""
        host = self.host
        if host.queues.failure is not None:
            raise host.queues.failure
        if host.ladder.on_event(event):
            found = self._ask_of(event, act)
        if found is Answer.END_VISIT:
            host.demand.end_visit()
            found = self._ask_of(event, act)
        if host.ranks is not None and found is not Answer.STAY:
            host.following.weigh(event, found)
        if found is not Answer.FOLLOW:
            host.demand.on_event(event, found)
            return found
        try:
            host.following.follow(event)
        except OutOfMemory as error:
            return self._climb(event, error)
        return found

    def _climb(self, event: ModuleEvent, error: OutOfMemory) -> Answer:
        """Let the ladder climb after memory ran out on the way to the event's moment, then carry out the answer to the
        event. Returns that answer."""
        host = self.host
        host.ladder.climb(error)
        found = self._ask_of(event, ACTS[event.kind, event.phase])
        if found is Answer.FOLLOW:
            host.following.follow(event)
        else:
            host.demand.on_event(event, found)
        return found

    def see_batch(self, args: Any, kwargs: Any) -> None:
        """Handle the batch with which the root's forward is about to begin."""
        host = self.host
        if transforms_running():
            return  # the first event refuses
        if host.first is not None and torch.is_grad_enabled():
            host.first.require_plan()
        with unseen():
            try:
                host.batches.see(args, kwargs)
                host.outgrown.see(args, kwargs)
            except Exception as error:
                if host.ranks is not None:  # the other ranks are about to wait for this rank
                    host.ranks.life.fail(f"{type(error).__name__}: {error}")
                raise

    # -- the optimizer ------------------------------------------------------------------------------------------------

    def optimizer_step(self) -> None:
        """Do `optimizer.step()`. Returns without waiting for steps that the plan lets run into the next forward."""
        host = self.host
        self.require_running()
        host.at_work.outermost()
        found = self.ask(Act.UPDATE)
        if found in (Answer.MEND, Answer.FINISH):
            self.mend()
            if found is Answer.FINISH:
                return
            found = self.ask(Act.UPDATE)
        if found is Answer.NOTHING:
            return
        self._see_backwards(host.now.given, host.plan.workload.micro_batches)
        with host.at_work, unseen(), torch.no_grad():
            host.reader.set_open(False)
            if found is Answer.LEAVE:
                count = len(host.timetable.names)
                host.demand.leave(f"optimizer.step() came in moment {host.cursor.moment} of {count}")
            if host.cursor.off_plan:
                host.demand.step()
                host.clock.reset()
                host.cursor.stepped = True
                self._end_off_plan()
            else:
                self._step_on_plan()
            host.cursor.stepped = True
        if host.first is not None and host.steps.logs and host.steps.logs[-1].on_plan:
            with host.at_work:
                host.first.end_iteration()

    def _see_backwards(self, count: int, planned: int) -> None:
        """Warn, once, of a step with fewer backwards than planned. After a step with all of them, one is the last of an
        epoch, whose micro-batches are fewer; two in a row are not."""
        self._whole |= count >= planned
        self._short = self._short + 1 if count < planned else 0
        if self._short > self._whole and not self._warned_of_short:
            self._warned_of_short = True
            log.warning(
                "optimizer.step() after %d of the %d backwards that the plan was made for: the step is taken; if the "
                "loop accumulates gradients, call step() and zero_grad() after backward %d, else make the plan for %d "
                "(%s)",
                count, planned, planned, count, self.host.spelling.micro_batches,
            )  # fmt: skip

    def _step_on_plan(self) -> None:
        host = self.host
        k = host.iteration
        host.demand.in_a_row = 0
        update = host.now.update if host.updates.eager else host.updates.new()
        assert update is not None
        host.now.update = update
        update.norms = host.now.norms
        host.updates.decide_scaling(update)
        if host.absent is not None:
            host.absent.settle()
            begun_s = self._now()
            update.unused = host.absent.unused()
            host.queues.note_wait(self._now() - begun_s)
        if host.plan.workload.micro_batches == 1 and host.ranks is None and not update.skip:
            update.coefficient(lambda: host.updates.norms(k))
        host.cursor.committed = k
        host.clock.step()  # fires the event "step", which calls on_event
        assert host.cursor.moment == len(host.timetable.names) - 1 or host.cursor.off_plan
        if not host.cursor.off_plan:
            for watch in host.watches:
                watch.close_moment(host.cursor.moment)
            try:
                host.following.end_last_moment()
            except OutOfMemory as error:
                host.ladder.climb(error)
            else:
                host.following.next_iteration()
                self._followed = True
                return
        host.demand.step()
        host.cursor.stepped = True
        self._end_off_plan()

    def _end_off_plan(self) -> None:
        """After an optimizer step off plan, make a new plan if one is due. Warn, once, of a plan that no iteration has
        followed, if its batches and backwards are the plan's."""
        host = self.host
        self._left += not host.timetable.on_demand_only
        planned = host.batches.planned and host.now.given == host.plan.workload.micro_batches
        if self._left == NEVER and not self._followed and planned:
            log.warning(
                "none of %d iterations followed the plan of %s, last %s; results are plain torch's, and copies do not "
                "overlap with compute: %s",
                NEVER, host.plan.policy, host.deviation_log[-1], self._remedy(),
            )  # fmt: skip
        host.demand.replan()

    def _remedy(self) -> str:
        """Returns what would make iterations follow the plan."""
        host = self.host
        if host.demand.left_in_parts:
            return _IN_PARTS
        if host.plan.workload.source == "recorded":
            return _RECORDED
        return _CAPTURED.format(own_plan=host.spelling.own_plan)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do `optimizer.zero_grad()`. Raises ContractError where the contract refuses it."""
        host = self.host
        self.require_running()
        host.at_work.outermost()
        found = self.ask(Act.CLEAR, keeps=not set_to_none)
        if found is Answer.MEND:
            self.mend()
        elif found is Answer.HALF:
            raise host.demand.half_update_error()
        elif found is Answer.DROP:
            with host.at_work, unseen(), torch.no_grad():
                host.demand.discard()
        host.reader.forget_gradients()
        host.now.arrived.clear()
        host.now.missed.clear()
        host.cursor.stepped = False

    # -- interruptions, loads, and standing still ---------------------------------------------------------------------

    def meet_interruption(self) -> None:
        """Mend an interruption before values are read: [Note: interrupted] in off_plan/mending.py. Raises ContractError
        if only the loop can decide that the iteration's gradients are to be dropped."""
        if self.host.at_work.torn or self.host.at_work.loading:
            self.require_running()
            if self.ask(Act.LOOK) is Answer.MEND:
                self.mend()

    def mend(self) -> None:
        """After an interruption, drop the interrupted iteration or finish the interrupted optimizer step. Raises the
        error that ends the run if neither is possible."""
        host = self.host
        with host.at_work, unseen(), torch.no_grad():
            host.following.in_parts = host.following.keeps_tied = self._standing = False
            host.demand.mend()
        host.at_work.torn = False

    def drain(self) -> None:
        """Return when every update of the finished iterations is in the parameters, and nothing moves."""
        self.require_running()
        self.host.queues.settle(self.host.iteration - 1)
        self.host.queues.pause()

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Inside this context, updates of finished iterations are done and nothing moves. The queues continue
        afterwards."""
        host = self.host
        if not host.at_work.depth:
            self.meet_interruption()
        # The queues may stand still already.
        held = host.held or self._standing or host.cursor.off_plan or host.cursor.visiting
        with host.at_work:
            if not held:
                self.drain()
                self._standing = True
            try:
                yield
            finally:
                if not held:
                    self._standing = False
                    host.queues.resume()

    @contextlib.contextmanager
    def loading(self, call: str) -> Iterator[None]:
        """Inside this context nothing moves, and values may be written. If the context ends with an error or an
        interruption, every act is refused until `call` or LOAD has ended.

        call: the call that loads, for the refusal.
        """
        at_work = self.host.at_work
        if not at_work.loading or call not in (at_work.loading, LOAD):
            self.meet_interruption()
        elif at_work.torn:
            self.mend()
        with at_work, self.still():
            at_work.loading = call
            yield
            at_work.loading = ""
