"""An iteration on plan: events become moments, gradients go into their chunks, the side queues run.

The user's thread is the compute queue. An event ends the open moment; then the thread runs the other compute steps
before the next, waits for its `after` edges and begins it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from executor.activations.stashes import Stashes
from executor.contract import raw_grad, set_raw_grad
from executor.devices.updates import norm_of
from executor.moments.hooks import ModuleEvent
from executor.moments.unseen import modes_standing, unrecorded, unseen
from executor.session.batches import Batches
from executor.session.cursor import Answer
from executor.session.refusals import Refusal, refused
from executor.session.state import PlanBytes, RunState
from executor.session.steps import Steps
from pstar_sim.errors import ContractError, PlanError
from pstar_sim.workload.workload import Phase


@dataclass(frozen=True)
class OffPlan:
    """Where an iteration continues off the plan: `off_plan.demand.Demand`.

    accept(tensor, gradient): takes a whole gradient.
    """

    leave: Callable[[str], None]
    accept: Callable[[int, torch.Tensor], None]


class Following:
    """in_parts: a backward runs part by part (driving/drive.py).
    keeps_tied: a tied parameter's gradient stays in it until `take_tied`, off the plan too: its parts are added first,
        as autograd does.
    takes_norms: each gradient's norm is taken off the plan and dropped, so that recording a run that will clip takes as
        long.
    passes_over: moments without events on this rank: absent.py.
    """

    passes_over = False

    def __init__(
        self,
        run: PlanBytes,
        state: RunState,
        steps: Steps,
        batches: Batches,
        stashes: Stashes,
        off_plan: OffPlan,
        clock: Callable[[], float],
    ) -> None:
        self.run = run
        self.state = state
        self.cursor = state.cursor
        self.steps = steps
        self.reader = steps.reader
        self.updates = steps.updates
        self.batches = batches
        self.stashes = stashes
        self.off_plan = off_plan
        self.in_parts = False
        self.keeps_tied = False
        self.takes_norms = False
        self._clock = clock
        self._weight = 1.0  # weight of this rank's gradients in the running micro-batch

    # -- moments ------------------------------------------------------------------------------------------------------

    def moment_of(self, event: ModuleEvent) -> int | None:
        """The next, or a later one if this rank computes nothing before it."""
        table = self.run.timetable
        if table.on_demand_only:
            return None
        following = self.cursor.moment + 1
        if following < len(table.names) and table.names[following] == event.name:  # not after the last moment
            return following
        return self.later_moment_of(event)

    def later_moment_of(self, event: ModuleEvent) -> int | None:
        return None

    def pass_to(self, moment: int) -> None:
        """See `Absent.pass_to`."""

    def settle(self) -> None:
        """Take the due gradients that have not come."""

    def waits(self, tensor: int) -> bool:
        """Whether the gradient stays in `.grad`, because its moment comes later."""
        return False

    def unused(self) -> frozenset[int]:
        """See `Absent.unused`."""
        return frozenset()

    def weigh(self, event: ModuleEvent, found: Answer) -> None:
        """A micro-batch that begins gets its weight: [Note: the weight of a rank] in distributed/ranks.py."""
        ranks = self.state.ranks
        if ranks is None or event.kind != "begin" or event.module != "":
            return
        if found in (Answer.FOLLOW, Answer.LEAVE) and self.moment_of(event) is not None:
            begun_s = self._clock()
            self._weight = ranks.weight(self.batches.samples)
            self.run.queues.note_wait(self._clock() - begun_s)

    def follow(self, event: ModuleEvent) -> None:
        state, batches, reader = self.state, self.batches, self.reader
        following = self.moment_of(event)
        assert following is not None
        begins = event.module == "" and event.kind == "begin"
        if begins and not batches.planned:
            state.other_shapes += 1
            state.note_deviation("a batch of another shape than planned (it fits the plan's tide and runs on plan)")
        self.pass_to(following)
        self.advance(following)
        if begins:
            state.now.see(batches.share, captured=batches.captured)
        if event.module == "" and (event.kind == "backward-end" or (event.kind == "end" and event.phase is Phase.FWD)):
            reader.set_open(bool(self.run.timetable.reads[following]) and not self.updates.running)
        elif event.kind != "step" and not reader.is_open:
            reader.set_open(True)

    def advance(self, moment: int) -> None:
        """End the open moment, run the compute queue up to `moment`, begin it."""
        run, state, steps = self.run, self.state, self.steps
        k, queues, table, values = state.iteration, run.queues, run.timetable, run.contents.values
        ready_s = self._clock()
        if self.cursor.moment >= 0:
            self._end_moment(ready_s)
        else:
            self.begin_iteration()
        before, i, reads, peak_bytes, due = table.rows[moment]
        for other in before:
            steps.run_inline(other, k)
        waited_for = queues.wait(i, k)
        for chunk in reads:
            queues.land(chunk)
        run.arena.tide("in", moment, peak_bytes)
        if table.stashes:
            self.stashes.at(moment)
        for chunk in reads:
            if not values.holds(chunk):
                raise PlanError(
                    f"moment {moment} ({table.names[moment]}) reads chunk {chunk}, which the gpu does not hold"
                )
        self.cursor.moment = moment
        if due or state.now.outstanding:
            state.now.outstanding = set(due)
        steps.begin(i, k, ready_s, waited_for, take=False)

    def _end_moment(self, now_s: float) -> None:
        run, k, moment = self.run, self.state.iteration, self.cursor.moment
        table, queues = run.timetable, run.queues
        i = table.compute[moment]
        queues.before_end(i, k)
        run.arena.tide("after", moment, table.between[moment])
        self.steps.note_end(i, k, now_s)
        queues.end_step(i, k)

    def end_last_moment(self) -> None:
        self._end_moment(self._clock())
        for i in self.run.timetable.tail:
            self.steps.run_inline(i, self.state.iteration)

    def forget_open_step(self) -> None:
        """The open moment's step will not end by the plan."""
        table = self.run.timetable
        if self.cursor.moment >= 0 and not table.on_demand_only:
            self.steps.forget(table.compute[self.cursor.moment])
        self.state.now.outstanding = set()

    # -- iterations ---------------------------------------------------------------------------------------------------

    def begin_iteration(self) -> None:
        """`state.now` becomes a new value; `state.iteration` is its number already."""
        state, updates = self.state, self.updates
        state.now = state.now.next(state.iteration, updates.new() if updates.eager else None)
        for listener in list(state.listeners):
            listener.begin_iteration()
        if updates.scaling is not None:
            updates.scaling.begin_iteration()
        self.run.queues.allow_net(state.iteration)

    def next_iteration(self, *, on_plan: bool = True) -> None:
        """Compute is over; side queues finish the iteration."""
        state, updates = self.state, self.updates
        self.steps.close_iteration(state.iteration, on_plan=on_plan)
        updates.last = state.now.update_of(state.iteration) or updates.last
        state.iteration += 1
        self.cursor.moment = -1
        state.now.outstanding = set()
        self.run.queues.allow(state.iteration)

    # -- gradients ----------------------------------------------------------------------------------------------------

    def on_gradient(self, tensor: int, parameter: torch.Tensor) -> None:
        cursor, table, listeners = self.cursor, self.run.timetable, self.state.listeners
        if raw_grad(parameter) is None:
            return  # a hook of the user's own has dropped it
        if cursor.stepped and tensor in self.reader.consumed:
            raise refused(Refusal.NOT_CLEARED, self)
        as_planned = cursor.moment >= 0 and tensor in table.due[cursor.moment]
        if not (as_planned or cursor.off_plan or self._is_final(tensor)):
            return
        if listeners and not all(listener.gradient_is_final(tensor) for listener in listeners):
            return
        if self.keeps_tied and cursor.off_plan and tensor in table.tied:
            return
        self._take_out(tensor, parameter)

    def take_tied(self) -> None:
        """Takes tied parameters' gradients, whole at the end of a micro-batch."""
        for tensor in self.run.timetable.tied:
            parameter = self.reader.parameters[tensor]
            if raw_grad(parameter) is not None:
                with self.state.at_work:
                    self._take_out(tensor, parameter)

    def _take_out(self, tensor: int, parameter: torch.Tensor) -> None:
        grad = raw_grad(parameter)
        assert grad is not None
        if grad.layout is not torch.strided:
            raise ContractError(
                f"the gradient of {self.reader.name_of(tensor)!r} is sparse, and chunks hold dense gradients "
                "alone; give sparse=False to its Embedding or EmbeddingBag"
            )
        if modes_standing() or torch.is_grad_enabled():
            with unseen(), unrecorded():
                self._take(tensor, grad)
        else:
            self._take(tensor, grad)
        set_raw_grad(parameter, None)

    def _take(self, tensor: int, grad: torch.Tensor) -> None:
        state, now = self.state, self.state.now
        if self.cursor.off_plan:
            if self.takes_norms:
                torch.linalg.vector_norm(grad, dtype=torch.float32)
            if not any(listener.takes_gradient(tensor, grad) for listener in state.listeners):
                self.off_plan.accept(tensor, grad)
        else:
            self._accept(tensor, grad)
        if self.updates.scaling is not None:
            self.updates.scaling.see(grad)
        if not self.cursor.off_plan:
            now.outstanding.discard(tensor)
        self.run.backend.touch()
        self.reader.consumed.add(tensor)
        now.arrived.add(tensor)
        now.gives = True
        self.cursor.stepped = False

    def _is_final(self, tensor: int) -> bool:
        """Not due in the open moment, but whole? If the plan has none there, the iteration leaves it."""
        table, moment = self.run.timetable, self.cursor.moment
        if moment >= 0 and tensor in table.early[moment]:
            return False  # the gradient fires again in this micro-batch
        if self.in_parts and table.final_in(moment, tensor) > moment:
            return False  # the gradient comes again: each part that uses the parameter gives its share
        if self.waits(tensor):
            return False
        self.off_plan.leave(
            f"gradient of {self.reader.name_of(tensor)!r} arrives in moment {moment}, the plan has it elsewhere"
        )
        return True

    def _accept(self, tensor: int, grad: torch.Tensor) -> None:
        run = self.run
        goes_to = run.timetable.gradient_list(self.cursor.moment, tensor)
        if self._weight == 0.0:  # an empty batch: the mean over no items is not a number
            grad.zero_()
        elif self._weight != 1.0:
            grad.mul_(self._weight)
        slot = run.contents.gradients.accept(tensor, grad, goes_to)
        clips = self.updates.max_grad_norm is not None
        if clips and run.timetable.micro_batches == 1 and self.state.ranks is None:
            dtype = run.contents.gradients.norm_dtype
            self.state.now.norms[tensor] = norm_of(slot.view(-1), dtype)
