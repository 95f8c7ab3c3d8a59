"""Each act of the training loop is looked up in the contract's table, and the answer carried out.

An iteration that leaves the plan ends on demand; the next begins on plan again.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from executor.devices.torch_private import transforms_running
from executor.driving.act_facts import ActFacts, Facts
from executor.moments.hooks import ModuleEvent
from executor.moments.unseen import modes_standing, unseen
from executor.off_plan.ladder import Ladder
from executor.off_plan.outgrown import NewPlan, Outgrown, refuse, why_not
from executor.session.cursor import ACTS, Act, Answer, State, answer
from executor.session.refusals import Refusal, refused
from pstar_sim.core.plan import Plan
from pstar_sim.errors import ContractError, OutOfMemory, PstarError

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


class Loop:
    def __init__(
        self,
        facts: Facts,
        ladder: Ladder,
        outgrown: Outgrown,
        renew: Callable[[Plan], None],
        clock: Callable[[], float],
    ) -> None:
        state = facts.state
        self.state = state
        self.cursor = state.cursor
        self.at_work = state.at_work
        self.listeners = state.listeners
        self.reader = facts.reader
        self.updates = facts.reader.updates
        self.standstill = facts.reader.standstill
        self.clock = facts.clock
        self.shortage = facts.shortage
        self.ladder = ladder
        self.outgrown = outgrown
        self.facts = facts
        self._renew = renew
        self._now = clock
        self._of_event = ActFacts(facts)  # memory of the event being handled
        self._alone = state.ranks is None and self.updates.scaling is None
        self._left = 0  # iterations that have left the plan
        self._followed = False  # an iteration has run on plan
        self._short = 0  # steps in a row with fewer backwards than planned
        self._warned_of_short = False
        self._whole = False  # a step had all of its backwards

    def ask(self, act: Act, *, tensor: int = -1, what: str = "", keeps: bool = False) -> Answer:
        """Raises ContractError where the call is refused."""
        return answer(self._loop_state(), act, ActFacts(self.facts, tensor=tensor, what=what, keeps=keeps))

    def _ask_of(self, event: ModuleEvent, act: Act) -> Answer:
        self._of_event.event = event
        return answer(self._loop_state(), act, self._of_event)

    def _loop_state(self) -> State:
        if self.state.closed:
            return State.CLOSED
        if self.at_work.loading:
            return State.HALF_LOADED
        return State.INTERRUPTED if self.at_work.torn else self.cursor.state

    def refuse_while_updating(self, what: str) -> None:
        """Refuse where `what` would read some parameters before and others after their update."""
        if self.updates.running:
            raise refused(Refusal.UPDATING, ActFacts(self.facts, what=what))

    # -- events -------------------------------------------------------------------------------------------------------

    def on_event(self, event: ModuleEvent) -> None:
        """Called by the clock; between events the user's thread computes."""
        at_work = self.at_work
        if self._as_planned(event):
            at_work.run(self._next_moment, event)
            return
        if self.state.closed:
            return
        act = ACTS[event.kind, event.phase]
        if act is not Act.STEP:
            if at_work.depth:
                at_work.outermost()
            if at_work.torn:
                self.standstill.require_running()
        try:
            found = self._ask_of(event, act)
        except ContractError:
            failure = self.state.run.queues.failure
            if failure is not None:
                raise failure from None  # an error that ended the run comes before a mistake of the loop
            raise
        if found is Answer.MEND:
            self.mend()
            found = self._ask_of(event, act)
        with at_work:
            self._carry_out(event, act, found)

    def _as_planned(self, event: ModuleEvent) -> bool:
        """The plan's next, unhindered, no counter listening: the table would answer FOLLOW. An iteration has
        hundreds."""
        state, cursor = self.state, self.cursor
        now, table = state.now, state.run.timetable
        return (
            event.name == table.following[cursor.moment]
            and event.module != ""
            and event.micro_batch >= 0
            and not (cursor.off_plan or cursor.visiting or cursor.stepped)
            and not (now.outstanding or now.given >= table.micro_batches)
            and self._undisturbed()
        )

    def _undisturbed(self) -> bool:
        """A module runs, and nothing (interruption, lack of memory, listener) has to hear of events."""
        at_work, reader, state = self.at_work, self.reader, self.state
        return (
            not (state.closed or at_work.torn or at_work.loading or at_work.depth)
            and reader.is_open
            and not (reader.switched or self.shortage.given_up or state.run.queues.troubled)
            and self._alone
            and not (self.listeners or modes_standing())
        )

    def _next_moment(self, event: ModuleEvent) -> None:
        try:
            self.state.run.following.advance(self.cursor.moment + 1)
        except OutOfMemory as error:
            self._climb(event, error)

    def _carry_out(self, event: ModuleEvent, act: Act, found: Answer) -> None:
        state, listeners = self.state, self.listeners
        if listeners:
            self._close_moment()
            if any(listener.takes_event(event, found) for listener in listeners):
                return
        if modes_standing():
            with unseen():
                found = self._go_on(event, act, found)
        else:
            found = self._go_on(event, act, found)
        if found is Answer.STAY:
            return
        if state.run.timetable.stashes:
            state.run.stashes.settle()
        if act is Act.BACKWARD_END:
            state.now.end_backward()
        for listener in listeners:
            listener.open_moment()

    def _close_moment(self) -> None:
        if self.cursor.moment >= 0:
            for listener in self.listeners:
                listener.close_moment(self.cursor.moment)

    def _go_on(self, event: ModuleEvent, act: Act, found: Answer) -> Answer:
        failure = self.state.run.queues.failure
        if failure is not None:
            raise failure
        if self.ladder.on_event(event):
            found = self._ask_of(event, act)
        if found is Answer.END_VISIT:
            self.end_visit()
            found = self._ask_of(event, act)
        run = self.state.run
        if found is not Answer.STAY:
            run.following.weigh(event, found)
        if found is not Answer.FOLLOW:
            run.demand.on_event(event, found)
            return found
        try:
            run.following.follow(event)
        except OutOfMemory as error:
            return self._climb(event, error)
        return found

    def _climb(self, event: ModuleEvent, error: OutOfMemory) -> Answer:
        self.ladder.climb(error)
        found = self._ask_of(event, ACTS[event.kind, event.phase])
        run = self.state.run
        if found is Answer.FOLLOW:
            run.following.follow(event)
        else:
            run.demand.on_event(event, found)
        return found

    def end_visit(self) -> None:
        self.state.run.demand.end_visit()
        if self.shortage.pending:
            self.ladder.replan()

    def hook_gradients(self, wrap: Callable[[Callable[..., None]], Callable[..., None]]) -> list[Any]:
        parameters = self.reader.parameters
        return [
            parameters[t].register_post_accumulate_grad_hook(wrap(self._gradient_hook(t)))  # type: ignore[no-untyped-call]
            for t in sorted(self.state.run.timetable.trainable)
        ]

    def _gradient_hook(self, tensor: int) -> Callable[[torch.Tensor], None]:
        keeper = weakref.ref(self)  # weak: objects that a parameter's hooks hold are not collected

        def hook(parameter: torch.Tensor) -> None:
            loop = keeper()
            if loop is not None and not loop.state.closed:
                loop.at_work.run(loop.state.run.following.on_gradient, tensor, parameter)

        return hook

    def see_batch(self, args: Any, kwargs: Any) -> None:
        if transforms_running():
            return  # the first event refuses
        if torch.is_grad_enabled():
            for listener in self.listeners:
                listener.require_plan()
        with unseen():
            try:
                self.state.run.batches.see(args, kwargs)
                new = self.outgrown.see()
                if new is not None and self._outgrow(new):
                    self.state.run.batches.see(args, kwargs)
            except Exception as error:
                if self.state.ranks is not None:  # the other ranks are about to wait for this rank
                    self.state.ranks.life.fail(f"{type(error).__name__}: {error}")
                raise

    def _outgrow(self, new: NewPlan) -> bool:
        try:
            self._renew(new.plan)
        except PstarError as error:
            why = why_not(new.shape, error)
        else:
            self.outgrown.take(new)
            return True
        refuse(new.refusal, why)
        return False

    # -- the optimizer ------------------------------------------------------------------------------------------------

    def optimizer_step(self) -> None:
        """Returns without waiting for steps that run into the next forward."""
        state, cursor = self.state, self.cursor
        self.standstill.require_running()
        self.at_work.outermost()
        found = self.ask(Act.UPDATE)
        if found in (Answer.MEND, Answer.FINISH):
            self.mend()
            if found is Answer.FINISH:
                return
            found = self.ask(Act.UPDATE)
        if found is Answer.NOTHING:
            return
        run = state.run
        self._see_backwards(state.now.given, run.timetable.micro_batches)
        with self.at_work, unseen(), torch.no_grad():
            self.reader.set_open(False)
            if found is Answer.LEAVE:
                count = len(run.timetable.names)
                run.demand.leave(f"optimizer.step() came in moment {cursor.moment} of {count}")
            if cursor.off_plan:
                run.demand.stepping.step()
                self.clock.reset()
                cursor.stepped = True
                self._end_off_plan()
            else:
                self._step_on_plan()
            cursor.stepped = True
        if self.listeners and state.run.steps.logs and state.run.steps.logs[-1].on_plan:
            with self.at_work:
                for listener in list(self.listeners):
                    listener.end_iteration()

    def _see_backwards(self, count: int, planned: int) -> None:
        """Warn, once, of too few: one such step is an epoch's last, two in a row are not."""
        self._whole |= count >= planned
        self._short = self._short + 1 if count < planned else 0
        if self._short > self._whole and not self._warned_of_short:
            self._warned_of_short = True
            log.warning(
                "optimizer.step() after %d of the %d backwards that the plan was made for: the step is taken; if the "
                "loop accumulates gradients, call step() and zero_grad() after backward %d, else make the plan for %d "
                "(%s)",
                count, planned, planned, count, self.state.spelling.micro_batches,
            )  # fmt: skip

    def _step_on_plan(self) -> None:
        state, cursor, updates = self.state, self.cursor, self.updates
        run, k, now = state.run, state.iteration, state.now
        run.demand.in_a_row = 0
        update = now.update if updates.eager else updates.new()
        assert update is not None
        now.update = update
        update.norms = now.norms
        updates.decide_scaling(update)
        if run.following.passes_over:
            run.following.settle()
            begun_s = self._now()
            update.unused = run.following.unused()
            run.queues.note_wait(self._now() - begun_s)
        if run.timetable.micro_batches == 1 and state.ranks is None and not update.skip:
            update.coefficient(lambda: updates.norms(k))
        cursor.committed = k
        self.clock.step()  # fires the event "step", which calls on_event
        assert cursor.moment == len(run.timetable.names) - 1 or cursor.off_plan
        if not cursor.off_plan:
            self._close_moment()
            try:
                run.following.end_last_moment()
            except OutOfMemory as error:
                self.ladder.climb(error)
            else:
                run.following.next_iteration()
                self._followed = True
                return
        run.demand.stepping.step()
        cursor.stepped = True
        self._end_off_plan()

    def _end_off_plan(self) -> None:
        """A new plan if due; warns, once, of a plan never followed though batches and backwards are its own."""
        state, run = self.state, self.state.run
        self._left += not run.timetable.on_demand_only
        planned = run.batches.planned and state.now.given == run.timetable.micro_batches
        if self._left == NEVER and not self._followed and planned:
            log.warning(
                "none of %d iterations followed the plan of %s, last %s; results are plain torch's, and copies do not "
                "overlap with compute: %s",
                NEVER, run.plan.policy, state.deviation_log[-1], self._remedy(),
            )  # fmt: skip
        if self.shortage.pending:
            self.ladder.replan()
        else:
            self._replan()

    def _replan(self) -> None:
        state, demand, count = self.state, self.state.run.demand, self.state.replan_after
        shapes, form = demand.batches.shapes, demand.batches.form
        try:
            plan = demand.plan_due()
            if plan is None:
                return
            self._renew(plan)
        except PstarError as error:
            # Training continues on demand: slower, not wrong.
            if str(error) != demand.no_plan:
                demand.no_plan = str(error)
                log.warning("no new plan after %d iterations off plan: %s", count, error)
            return
        shapes.plan_for(form)
        log.info("new plan after %d iterations off plan", count)
        state.note(f"new plan, by policy {plan.policy}")

    def _remedy(self) -> str:
        run = self.state.run
        if run.demand.left_in_parts:
            return _IN_PARTS
        if run.plan.workload.source == "recorded":
            return _RECORDED
        return _CAPTURED.format(own_plan=self.state.spelling.own_plan)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Raises ContractError."""
        state = self.state
        self.standstill.require_running()
        self.at_work.outermost()
        found = self.ask(Act.CLEAR, keeps=not set_to_none)
        if found is Answer.MEND:
            self.mend()
        elif found is Answer.HALF:
            raise state.run.demand.mending.half_update_error()
        elif found is Answer.DROP:
            with self.at_work, unseen(), torch.no_grad():
                self.ladder.discard()
        self.reader.forget_gradients()
        state.now.arrived.clear()
        state.now.missed.clear()
        self.cursor.stepped = False

    # -- interruptions, loads, and standing still ---------------------------------------------------------------------

    def meet_interruption(self) -> None:
        """Before values are read; raises ContractError if only the loop can decide to drop gradients."""
        if self.at_work.torn or self.at_work.loading:
            self.standstill.require_running()
            if self.ask(Act.LOOK) is Answer.MEND:
                self.mend()

    def mend(self) -> None:
        """[Note: interrupted] in off_plan/mending.py."""
        following, cursor = self.state.run.following, self.cursor
        with self.at_work, unseen(), torch.no_grad():
            following.in_parts = following.keeps_tied = self.standstill.inside = False
            finished = self.state.run.demand.mending.mend()
            self.clock.reset()
            if finished:
                cursor.stepped = True
            elif self.shortage.pending:
                self.ladder.replan()
        self.at_work.torn = False

    @contextlib.contextmanager
    def loading(self, call: str) -> Iterator[None]:
        """Nothing moves, and values may be written; after an error or interruption all is refused until `call` or LOAD
        has ended.

        call: what loads.
        """
        at_work = self.at_work
        if not at_work.loading or call not in (at_work.loading, LOAD):
            self.meet_interruption()
        elif at_work.torn:
            self.mend()
        with at_work, self.standstill.still():
            at_work.loading = call
            yield
            at_work.loading = ""
