"""An iteration on demand, after it has left the plan: chunks are dropped to make room, nothing is overlapped, and all
updates happen in `optimizer.step()`, where payloads return to the plan's cut.

Also for an evaluation between two iterations (`visiting`: nothing is counted, and payloads are put back) and a warm-up,
whose plan has no steps.
"""

from __future__ import annotations

import torch

from executor.contract import tensor_of
from executor.memory.arena import PLACES
from executor.memory.shares import Shares
from executor.moments.hooks import ModuleEvent, MomentClock
from executor.moments.unseen import unseen
from executor.off_plan.cut import Places, PlanCut
from executor.off_plan.gradients_off_plan import OffPlanGradients
from executor.off_plan.in_use import InUse
from executor.off_plan.inline import Inline
from executor.off_plan.mending import Mending
from executor.off_plan.room_maker import Relief, RoomMaker, Tides
from executor.off_plan.shortage import Shortage
from executor.off_plan.states import States
from executor.off_plan.stepping import Stepping
from executor.session.cursor import Answer
from executor.session.following import Following
from executor.session.standstill import Standstill
from pstar_sim.core.plan import Plan
from pstar_sim.errors import OutOfMemory
from pstar_sim.policy.registry import plan_to_run
from pstar_sim.workload.workload import Phase


class Demand:
    """in_a_row: off plan since the last on plan.
    left_in_parts: the plan was left in a backward that runs part by part.
    no_plan: why there was none, in words.
    """

    def __init__(
        self, following: Following, standstill: Standstill, shortage: Shortage, clock: MomentClock, relieve: Relief
    ) -> None:
        run, state, batches = following.run, following.state, following.batches
        self.run = run
        self.state = state
        self.cursor = state.cursor
        self.reader = following.reader
        self.batches = batches
        self.following = following
        self.standstill = standstill
        self.shortage = shortage
        self.clock = clock
        self.in_a_row = 0
        self._backwards = 0  # the most of an iteration that `zero_grad()` has dropped, since the last new plan
        self.left_in_parts = False
        self.no_plan = ""
        in_use, shares, inline = InUse(), Shares(run.contents), Inline(run, state.ranks)
        states = States(run, inline, shares)
        self.room = RoomMaker(batches, shortage, inline, in_use, states, relieve)
        self.gradients = OffPlanGradients(run, self.reader, inline, shares, states)
        self.inline = inline
        self._cut = PlanCut(following, shortage, inline, in_use, shares, states)
        self.stepping = Stepping(state, inline, states, self.room, self.gradients, self._cut)
        self.mending = Mending(following, standstill, self.gradients, states, self.stepping, self._cut)
        self._in_use = in_use
        self._states = states
        self._before_visit: Places | None = None  # during a visit: the payloads' places before it
        self._tides = Tides(run.plan.workload.moments)
        self._owned: dict[str, set[int]] = {}  # module -> chunks of its own parameters
        self._prefix = False  # the current iteration began on plan

    # -- leaving the plan ---------------------------------------------------------------------------------------------

    def on_event(self, event: ModuleEvent, found: Answer, known_tide_bytes: int | None = None) -> None:
        """known_tide_bytes: measured, of the moment that begins; None: the plan's."""
        table = self.run.timetable
        if found is Answer.VISIT:
            self.visit()
        elif found is Answer.LEAVE:
            self.leave(self._reason(event))
        if event.kind == "step":
            return
        self.reader.set_open(False)
        self._in_use.see(event)
        tide_bytes = self._tide_of(event) if known_tide_bytes is None else known_tide_bytes
        self.room.set_tide(tide_bytes + self.shortage.unforeseen_bytes)
        at = table.next_of_name(event.name, self._in_use.position)
        if at is not None:
            self._in_use.position = at
        self.state.moment_off_plan = -1 if at is None else at
        if self._prefix and event.phase in (Phase.BWD, Phase.RECOMPUTE):
            self.room.ensure(table.read_in(event.name) | self._own_chunks(event.module))
            self.room.ensure(table.read_behind(event.name), required=False)

    def _tide_of(self, event: ModuleEvent) -> int:
        tides = self._tides if self.batches.moments is None else Tides(self.batches.moments)
        return tides.no_grad_bytes if self.cursor.visiting else tides.at(event.name, self.run.arena.tide_bytes)

    def _reason(self, event: ModuleEvent) -> str:
        outstanding, names = self.state.now.outstanding, self.run.timetable.names
        if outstanding:
            missing = ", ".join(repr(self.reader.name_of(t)) for t in sorted(outstanding)[:3])
            return f"{event.name} came before the gradient of {missing}"
        following = self.cursor.moment + 1
        expected = names[following] if following < len(names) else "nothing more"
        if event.name != expected:
            return f"{event.name} came where the plan has {expected}"
        if self.batches.differentiated:
            return "a batch that gets a gradient itself"
        above = self.batches.above()
        return "a batch of another shape" + (f": {above}" if above else "")

    def _own_chunks(self, module: str) -> set[int]:
        """Of parameters owned directly: its backward reads what autograd saved of them."""
        if module not in self._owned:
            units, chunk_of = self.clock.units, self.run.timetable.chunk_of
            own = units[module].parameters(recurse=False) if module in units else ()
            tensors = (tensor_of(p) for p in own)
            self._owned[module] = {chunk_of[t] for t in tensors if t is not None and t in chunk_of}
        return self._owned[module]

    def leave(self, reason: str) -> None:
        """The rest of the iteration runs on demand. Raises PlanError on several ranks."""
        state, cursor, table, following = self.state, self.cursor, self.run.timetable, self.following
        if state.ranks is not None:
            raise state.ranks.cannot_leave(reason)
        if not table.on_demand_only:
            state.note_deviation(reason)
        self.left_in_parts = following.in_parts
        self.batches.doubt()
        self.standstill.rest()
        if cursor.moment < 0:
            following.begin_iteration()
        cursor.off_plan = True
        self._prefix = cursor.moment >= 0
        self._in_use.position = max(cursor.moment, 0)
        state.moment_off_plan = cursor.moment
        following.forget_open_step()
        with torch.no_grad():
            self.run.contents.end_parts()
            self.gradients.leave_gpu()
            self._states.send_streams_home()
        self.reader.set_open(False)
        self._in_use.only(table.reads[cursor.moment] if cursor.moment >= 0 else ())
        cursor.moment = max(cursor.moment, 0)

    def rewrite_from_master(self, tensor: int) -> None:
        """The master copy has changed (a loaded state)."""
        with unseen(), torch.no_grad(), self.standstill.still():
            run = self.state.run  # another one, if standing still has mended an interruption
            contents, chunk = run.contents, run.timetable.chunk_of[tensor]
            for place in PLACES:
                if place in contents.chunks[chunk].current:
                    contents.values.restore(place, tensor)
            if contents.chunks[chunk].whole:  # the other ranks' slices, which have changed too
                self.inline.join(chunk)

    # -- coming back --------------------------------------------------------------------------------------------------

    def discard(self) -> None:
        """`zero_grad()` before `step()`: start over, with a new plan if the shortage is pending."""
        self._backwards = max(self._backwards, self.state.now.given)
        if not self.cursor.off_plan:
            self.standstill.rest()
            self.following.forget_open_step()
            with torch.no_grad():
                self.run.contents.end_parts()
            self.cursor.off_plan = True
        self._cut.start_over()
        self.clock.reset()

    def plan_due(self) -> Plan | None:
        """By the same policy for the last batches, if due. Raises PstarError if none fits."""
        self.in_a_row += 1
        replan_after = self.state.replan_after
        if self.run.timetable.on_demand_only or not replan_after or self.in_a_row < replan_after:
            return None
        self.in_a_row = 0
        plan = self.run.plan
        backwards, self._backwards = max(self._backwards, self.state.now.given), 0
        workload = self.batches.workload_of_last(backwards)
        return plan_to_run(plan.policy, workload, plan.machine, plan.settings)

    # -- evaluation between iterations --------------------------------------------------------------------------------

    def visit(self) -> None:
        if self.cursor.visiting:
            return
        self.standstill.drain()
        self._before_visit = self._cut.places
        self.cursor.visiting = True
        if self.state.ranks is not None:
            # The ranks' copies have run ahead differently; from equal places on, all ranks ask for the same.
            self.run.arena.set_tide(0)
            self._cut.reach(self.run.timetable.cut)
        self._in_use.only(())
        self.reader.set_open(False)

    def end_visit(self) -> None:
        """Payloads are put back; then a new plan if the shortage is pending, else the queues continue."""
        run, before = self.run, self._before_visit
        assert before is not None  # reaching no places would drop every payload
        self._in_use.only(())
        run.arena.set_tide(0)
        if not self.shortage.pending:
            try:
                self._cut.reach(before)
            except OutOfMemory as error:
                if self.state.ranks is not None:
                    raise self.shortage.ends_ranks(error) from error
                self.shortage.note(error, "a new plan is made for the present places")
        self.following.steps.moved.others(self.state.iteration, run.backend.copied_bytes)
        self.cursor.visiting = False
        self._before_visit = None
        if not self.shortage.pending:
            run.queues.resume()
