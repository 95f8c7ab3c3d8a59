"""Demand: runs an iteration on demand after it has left the plan.

A parameter is fetched when it is read, and other chunks are dropped to make room. Nothing is overlapped, every update
happens in `optimizer.step()`, and results are those of plain torch. At the optimizer step the payloads are brought back
to the plan's cut, and the next iteration is on plan again.

The same mode serves an evaluation between two iterations (`visiting`: nothing is counted, and the payloads are put back
to their places) and a warm-up, which is a session whose plan has no steps.

This file decides when the plan is left and what an event then means. `room_maker.py` and `states.py` decide which
chunks have to be on the gpu and which leave it, `gradients_off_plan.py` where gradients go. `stepping.py` updates,
`cut.py` returns to the plan, `mending.py` continues after an interruption. `inline.py` performs the steps. `reads.py`
detects parameters that are read where the plan does not say so.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from typing import Protocol

import torch

from executor.contract import tensor_of
from executor.memory.shares import Shares
from executor.moments.hooks import ModuleEvent
from executor.off_plan import cut, gradients_off_plan, inline, mending, room_maker, states, stepping
from executor.off_plan.in_use import InUse
from executor.off_plan.ladder import Ladder
from executor.session.batches import Shapes
from executor.session.cursor import Answer
from executor.session.loop import Loop
from executor.session.steps import Steps
from pstar_sim.core.plan import Plan
from pstar_sim.errors import Interrupted, OutOfMemory, PstarError
from pstar_sim.policy.registry import find_policy
from pstar_sim.workload.workload import Phase

__all__ = ["Demand"]

log = logging.getLogger("executor")


class Host(cut.Host, gradients_off_plan.Host, inline.Host, mending.Host, room_maker.Host, stepping.Host, Protocol):
    """The part of the session that this file uses."""

    @property
    def deviation_log(self) -> deque[str]: ...
    @property
    def ladder(self) -> Ladder: ...
    @property
    def loop(self) -> Loop: ...
    @property
    def replan_after(self) -> int: ...
    @property
    def shapes(self) -> Shapes: ...
    @property
    def steps(self) -> Steps: ...

    def note_deviation(self, reason: str) -> None: ...

    def renew(self, plan: Plan) -> None: ...


class Demand:
    """The on-demand half of a session.

    Attributes:
        in_a_row: number of iterations off plan since the last on plan.
        left_in_parts: whether the plan was last left in a backward that runs part by part.
        moment: the plan's moment that corresponds to the code that runs off plan; -1 without one.
    """

    def __init__(self, session: Host) -> None:
        self.session = session
        self.in_a_row = 0
        self._backwards = 0  # the most of an iteration that `zero_grad()` has dropped, since the last new plan
        self.left_in_parts = False
        self._no_plan = ""  # why there was no new plan
        self.moment = -1
        self._in_use = InUse()
        self._inline = inline.Inline(session)
        shares = Shares(session.contents)
        self._states = states.States(session, self._inline, shares)
        self._room = room_maker.RoomMaker(session, self._inline, self._in_use, self._states)
        self._arrivals = room_maker.Arrivals(session, self._inline, self._in_use, self._room)
        self._gradients = gradients_off_plan.OffPlanGradients(session, self._inline, shares, self._states)
        self._cut = cut.PlanCut(session, self._inline, self._in_use, shares, self._states)
        self._stepping = stepping.Stepping(session, self._inline, self._states, self._room, self._gradients, self._cut)
        self._mending = mending.Mending(session, self._gradients, self._states, self._stepping, self._cut)
        self._before_visit: cut.Places | None = None  # during a visit: the payloads' places before it
        self._tides = room_maker.Tides(session.plan.workload.moments)
        self._owned: dict[str, set[int]] = {}  # module -> chunks of its own parameters
        self._prefix = False  # the current iteration began on plan

    # -- leaving the plan ---------------------------------------------------------------------------------------------

    def on_event(self, event: ModuleEvent, found: Answer, known_tide_bytes: int | None = None) -> None:
        """Carry out an event off the plan.

        found: the answer of the contract's table to the event.
        known_tide_bytes: non-model bytes of the moment that begins, where they are measured; else the plan's for an
            event of that name.
        """
        s = self.session
        if found is Answer.VISIT:
            self.visit()
        elif found is Answer.LEAVE:
            self.leave(self._reason(event))
        if event.kind == "step":
            return
        s.reader.set_open(False)
        self._in_use.see(event)
        tide_bytes = self._tide_of(event) if known_tide_bytes is None else known_tide_bytes
        self._room.set_tide(tide_bytes + s.ladder.unforeseen_bytes)
        at = s.timetable.next_of_name(event.name, self._in_use.position)
        if at is not None:
            self._in_use.position = at
        self.moment = -1 if at is None else at
        if self._prefix and event.phase in (Phase.BWD, Phase.RECOMPUTE):
            self.ensure(s.timetable.read_in(event.name) | self._own_chunks(event.module))
            self._arrivals.ensure(s.timetable.read_behind(event.name), required=False)

    def _tide_of(self, event: ModuleEvent) -> int:
        s = self.session
        tides = self._tides if s.batches.moments is None else room_maker.Tides(s.batches.moments)
        return tides.no_grad_bytes if s.cursor.visiting else tides.at(event.name, s.arena.tide_bytes)

    def _reason(self, event: ModuleEvent) -> str:
        s = self.session
        if s.now.outstanding:
            names = ", ".join(repr(s.reader.name_of(t)) for t in sorted(s.now.outstanding)[:3])
            return f"{event.name} came before the gradient of {names}"
        expected = (
            s.timetable.names[s.cursor.moment + 1] if s.cursor.moment + 1 < len(s.timetable.names) else "nothing more"
        )
        if event.name != expected:
            return f"{event.name} came where the plan has {expected}"
        if s.batches.differentiated:
            return "a batch that gets a gradient itself"
        above = s.batches.above()
        return "a batch of another shape" + (f": {above}" if above else "")

    def _own_chunks(self, module: str) -> set[int]:
        """Returns the chunks of the parameters that the module owns directly. The module's backward reads tensors that
        autograd saved of them, also where the plan has no such moment."""
        if module not in self._owned:
            s = self.session
            own = s.clock.units[module].parameters(recurse=False) if module in s.clock.units else ()
            self._owned[module] = {
                s.timetable.chunk_of[t] for p in own if (t := tensor_of(p)) is not None and t in s.timetable.chunk_of
            }
        return self._owned[module]

    def leave(self, reason: str) -> None:
        """Leave the plan: the rest of the iteration runs on demand. Raises PlanError on several ranks, which have to
        keep to the plan."""
        s = self.session
        if s.ranks is not None:
            raise s.ranks.cannot_leave(reason)
        if not s.timetable.on_demand_only:
            s.note_deviation(reason)
        self.left_in_parts = s.following.in_parts
        s.batches.doubt()
        s.queues.settle(s.iteration - 1)
        s.queues.pause()
        if s.cursor.moment < 0:
            s.following.begin_iteration()
        s.cursor.off_plan = True
        self._prefix = s.cursor.moment >= 0
        self._in_use.position = max(s.cursor.moment, 0)
        self.moment = s.cursor.moment
        s.following.forget_open_step()
        with torch.no_grad():
            s.contents.end_parts()
            self._gradients.leave_gpu()
            self._states.send_streams_home()
        s.reader.set_open(False)
        self._in_use.only(s.timetable.reads[s.cursor.moment] if s.cursor.moment >= 0 else ())
        s.cursor.moment = max(s.cursor.moment, 0)

    # -- needs of an iteration off the plan ---------------------------------------------------------------------------

    def ensure(self, chunks: Iterable[int]) -> None:
        """Make the working lists of `chunks` readable on the gpu. Raises DoesNotFit if there is no room."""
        self._arrivals.ensure(chunks)

    def held(self, chunk: int) -> bool:
        """Returns whether the working list may be read on the gpu."""
        return self._arrivals.held(chunk)

    def join(self, chunk: int) -> None:
        """Gather the other ranks' slices of the working list, if there is room for them."""
        self._inline.join(chunk)

    def accept(self, tensor: int, gradient: torch.Tensor) -> None:
        """Take an accumulated gradient: see `Gradients.accept`."""
        self._gradients.accept(tensor, gradient)

    def give_back(self, size: int, *, needed: set[int]) -> tuple[list[int], int]:
        """Returns (chunks dropped, bytes): see `RoomMaker.give_back`."""
        return self._room.give_back(size, needed=needed)

    def states_to_host(self, size: int, *, needed: set[int]) -> tuple[list[int], int]:
        """Returns (chunks moved, bytes): see `RoomMaker.unpin`."""
        return self._room.unpin(size, needed=needed)

    # -- coming back --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Make every update of the iteration, then return to the cut."""
        self._stepping.step()

    def discard(self) -> None:
        """Do `zero_grad()` before `step()`: drop the gradients and begin the iteration anew."""
        s = self.session
        self._backwards = max(self._backwards, s.now.given)
        if not s.cursor.off_plan:
            s.queues.settle(s.iteration - 1)
            s.queues.pause()
            s.following.forget_open_step()
            with torch.no_grad():
                s.contents.end_parts()
            s.cursor.off_plan = True
        self._cut.start_over()

    def mend(self) -> None:
        """Repair an interruption inside the engine's own work: see `mending.py`. Raises the error that ends the run if
        this is not possible."""
        self._mending.mend()

    def half_update_error(self) -> Interrupted:
        """Returns the error for a backward that ended in the middle of its eager updates."""
        return self._mending.half_update_error()

    def replan(self) -> None:
        """Make a new plan, if one is due, after an optimizer step off plan. If memory ran out, it is the ladder's plan.
        Otherwise, if the last iterations were all off plan, the same policy makes a plan for their batches."""
        s = self.session
        if s.ladder.pending:
            s.ladder.replan()
            return
        self.in_a_row += 1
        if s.timetable.on_demand_only or not s.replan_after or self.in_a_row < s.replan_after:
            return
        self.in_a_row = 0
        try:
            policy = find_policy(s.plan.policy)
            form = s.batches.form
            backwards, self._backwards = max(self._backwards, s.now.given), 0
            s.renew(policy(s.batches.workload_of_last(backwards), s.plan.machine, s.plan.settings))
            s.shapes.plan_for(form)
        except PstarError as error:
            # Training continues on demand: slower, not wrong.
            if str(error) != self._no_plan:
                self._no_plan = str(error)
                log.warning("no new plan after %d iterations off plan: %s", s.replan_after, error)
            return
        log.info("new plan after %d iterations off plan", s.replan_after)
        s.deviation_log.append(f"iteration {s.iteration}: new plan, by policy {s.plan.policy}")

    # -- evaluation between iterations --------------------------------------------------------------------------------

    def visit(self) -> None:
        """Begin an evaluation between two iterations: wait for the updates and pause the queues."""
        s = self.session
        if s.cursor.visiting:
            return
        s.loop.drain()
        self._before_visit = self._cut.places
        s.cursor.visiting = True
        if s.ranks is not None:
            # The ranks' copies have run ahead differently; from equal places on, all ranks ask for the same.
            s.arena.set_tide(0)
            self._cut.reach(s.timetable.cut)
        self._in_use.only(())
        s.reader.set_open(False)

    def end_visit(self) -> None:
        """End the evaluation: put the payloads back to their places."""
        s, before = self.session, self._before_visit
        assert before is not None  # reaching no places would drop every payload
        self._in_use.only(())
        s.arena.set_tide(0)
        if not s.ladder.pending:
            try:
                self._cut.reach(before)
            except OutOfMemory as error:
                if s.ranks is not None:
                    raise s.ladder.ends_ranks(error) from error
                s.ladder.note(error, "a new plan is made for the present places")
        s.steps.moved.others(s.iteration, s.backend.copied_bytes)
        s.cursor.visiting = False
        self._before_visit = None
        if s.ladder.pending:
            s.ladder.replan()
        else:
            s.queues.resume()
