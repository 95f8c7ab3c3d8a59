"""Following: an iteration on plan. Events become moments, gradients go into their chunks, the side queues run.

The user's thread is the compute queue. An event ends the open moment. The thread then runs the other steps of the
compute queue before the next moment, waits for that moment's `after` edges and begins it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from executor.contract import raw_grad, set_raw_grad
from executor.moments.hooks import ModuleEvent
from executor.moments.unseen import modes_standing, unrecorded, unseen
from executor.queues.interface import ComputeSide, Landing, Timing
from executor.scaling import LossScaling
from executor.session.batches import Batches
from executor.session.cursor import Answer
from executor.session.hosting import BytesHost, LoopHost
from executor.session.iteration import Iteration
from executor.session.reader import Reader
from executor.session.refusals import Refusal, refused
from executor.session.steps import Steps
from executor.session.updates import Updates
from pstar_sim.core.step import Place
from pstar_sim.errors import ContractError, PlanError
from pstar_sim.workload.workload import Phase

__all__ = ["Following", "Host"]


class Absence(Protocol):
    """The part of `distributed.absent.Absent` that this file uses."""

    def moment_of(self, event: ModuleEvent) -> int | None: ...

    def pass_to(self, moment: int) -> None: ...

    def waits(self, tensor: int) -> bool: ...


class OffPlan(Protocol):
    """The part of `off_plan.demand.Demand` that this file uses."""

    def leave(self, reason: str) -> None: ...

    def accept(self, tensor: int, gradient: torch.Tensor) -> None: ...


class Stashing(Protocol):
    """The part of the stashes of activations that this file uses."""

    def at(self, moment: int) -> None: ...


class First(Protocol):
    """The part of the comparison of the first tide that this file uses."""

    def begin_iteration(self) -> None: ...


class WarmingUp(Protocol):
    """The part of a warm-up that this file uses."""

    def accept(self, tensor: int, gradient: torch.Tensor) -> None: ...

    def gradient_is_final(self, tensor: int) -> bool: ...


class QueuesAsked(ComputeSide, Landing, Timing, Protocol):
    """The part of the queues that this file uses."""


class Host(BytesHost, LoopHost, Protocol):
    """The part of the session that this file uses."""

    now: Iteration
    iteration: int
    other_shapes: int

    @property
    def queues(self) -> QueuesAsked: ...
    @property
    def reader(self) -> Reader: ...
    @property
    def steps(self) -> Steps: ...
    @property
    def updates(self) -> Updates: ...
    @property
    def scaling(self) -> LossScaling | None: ...
    @property
    def stashes(self) -> Stashing: ...
    @property
    def absent(self) -> Absence | None: ...
    @property
    def demand(self) -> OffPlan: ...
    @property
    def parameters(self) -> Sequence[nn.Parameter]: ...
    @property
    def first(self) -> First | None: ...
    @property
    def warming(self) -> WarmingUp | None: ...
    @property
    def batches(self) -> Batches: ...

    def note_deviation(self, reason: str) -> None: ...


class Following:
    """Carries out an iteration on plan.

    clock: gives seconds.

    Attributes:
        in_parts: whether a backward runs part by part (driving/drive.py).
        keeps_tied: whether the gradient of a tied parameter stays in the parameter until `take_tied`, off the plan
            too: its parts are added first, as autograd adds them.
        takes_norms: whether the norm of each gradient is taken off the plan and dropped, so that recording a run that
            will clip takes as long as the run.
    """

    def __init__(self, host: Host, clock: Callable[[], float]) -> None:
        self.host = host
        self.in_parts = False
        self.keeps_tied = False
        self.takes_norms = False
        self._clock = clock
        self._weight = 1.0  # weight of this rank's gradients in the running micro-batch

    # -- moments ------------------------------------------------------------------------------------------------------

    def moment_of(self, event: ModuleEvent) -> int | None:
        """Returns the moment that the event opens on plan: the next moment, or a later moment if this rank has nothing
        to compute before it."""
        host, table = self.host, self.host.timetable
        if table.on_demand_only:
            return None
        following = host.cursor.moment + 1
        if following < len(table.names) and table.names[following] == event.name:  # not after the last moment
            return following
        return None if host.absent is None else host.absent.moment_of(event)

    def weigh(self, event: ModuleEvent, found: Answer) -> None:
        """On several ranks, give the micro-batch that begins its weight ([Note: the weight of a rank] in
        distributed/ranks.py), whether its batch may run on plan or not."""
        host = self.host
        if event.kind != "begin" or event.module != "":
            return
        assert host.ranks is not None
        if found in (Answer.FOLLOW, Answer.LEAVE) and self.moment_of(event) is not None:
            begun_s = self._clock()
            self._weight = host.ranks.weight(host.batches.samples)
            host.queues.note_wait(self._clock() - begun_s)

    def follow(self, event: ModuleEvent) -> None:
        """Go to the moment that the event opens."""
        host = self.host
        table = host.timetable
        following = self.moment_of(event)
        assert following is not None
        begins = event.module == "" and event.kind == "begin"
        if begins and not host.batches.planned:
            host.other_shapes += 1
            host.note_deviation("a batch of another shape than planned (it fits the plan's tide and runs on plan)")
        if host.absent is not None:
            host.absent.pass_to(following)
        self.advance(following)
        if begins:
            host.now.see(host.batches.share, captured=host.batches.captured)
        if event.module == "" and (event.kind == "backward-end" or (event.kind == "end" and event.phase is Phase.FWD)):
            host.reader.set_open(bool(table.reads[following]) and not host.updates.running)
        elif event.kind != "step" and not host.reader.is_open:
            host.reader.set_open(True)

    def advance(self, moment: int) -> None:
        """End the open moment, run the compute queue up to `moment`, begin it."""
        host = self.host
        k, queues, steps, values = host.iteration, host.queues, host.steps, host.contents.values
        ready_s = self._clock()
        if host.cursor.moment >= 0:
            self._end_moment(ready_s)
        else:
            self.begin_iteration()
        before, i, reads, peak_bytes, due = host.timetable.rows[moment]
        for other in before:
            steps.run_inline(other, k)
        waited_for = queues.wait(i, k)
        for chunk in reads:
            queues.land(chunk)
        host.arena.tide("in", moment, peak_bytes)
        if host.timetable.stashes:
            host.stashes.at(moment)
        for chunk in reads:
            if not values.holds(chunk):
                name = host.timetable.names[moment]
                raise PlanError(f"moment {moment} ({name}) reads chunk {chunk}, which the gpu does not hold")
        host.cursor.moment = moment
        if due or host.now.outstanding:
            host.now.outstanding = set(due)
        steps.begin(i, k, ready_s, waited_for, take=False)

    def _end_moment(self, now_s: float) -> None:
        host = self.host
        k, table, queues, moment = host.iteration, host.timetable, host.queues, host.cursor.moment
        i = table.compute[moment]
        queues.before_end(i, k)
        host.arena.tide("after", moment, table.between[moment])
        host.steps.note_end(i, k, now_s)
        queues.end_step(i, k)

    def end_last_moment(self) -> None:
        """End the optimizer's moment, and with it the iteration's compute."""
        self._end_moment(self._clock())
        for i in self.host.timetable.tail:
            self.host.steps.run_inline(i, self.host.iteration)

    def forget_open_step(self) -> None:
        """Forget the open moment's step. That step will not end by the plan, because the iteration left the plan."""
        host = self.host
        if host.cursor.moment >= 0 and not host.timetable.on_demand_only:
            host.steps.forget(host.timetable.compute[host.cursor.moment])
        host.now.outstanding = set()

    # -- iterations ---------------------------------------------------------------------------------------------------

    def begin_iteration(self) -> None:
        """Begin the iteration whose first event has come, on plan or off. `host.now` becomes a new value;
        `host.iteration` is its number already."""
        host = self.host
        host.now = host.now.next(host.iteration, host.updates.new() if host.updates.eager else None)
        if host.first is not None:
            host.first.begin_iteration()
        if host.scaling is not None:
            host.scaling.begin_iteration()
        host.queues.allow_net(host.iteration)

    def next_iteration(self, *, on_plan: bool = True) -> None:
        """Go to the next iteration. Compute is over; the side queues finish this iteration's steps and begin those of
        the next."""
        host = self.host
        host.steps.close_iteration(host.iteration, on_plan=on_plan)
        host.updates.last = host.now.update_of(host.iteration) or host.updates.last
        host.iteration += 1
        host.cursor.moment = -1
        host.now.outstanding = set()
        host.queues.allow(host.iteration)

    # -- gradients ----------------------------------------------------------------------------------------------------

    def hook_gradients(
        self, parameters: Sequence[nn.Parameter], wrap: Callable[[Callable[..., None]], Callable[..., None]]
    ) -> list[torch.utils.hooks.RemovableHandle]:
        """Hook every gradient that autograd accumulates in a trainable parameter. Returns the hooks' handles."""
        return [
            parameters[t].register_post_accumulate_grad_hook(wrap(self._gradient_hook(t)))  # type: ignore[no-untyped-call]
            for t in sorted(self.host.timetable.trainable)
        ]

    def _gradient_hook(self, tensor: int) -> Callable[[torch.Tensor], None]:
        keeper = weakref.ref(self)  # weak: objects that a parameter's hooks hold are not collected

        def hook(parameter: torch.Tensor) -> None:
            held = keeper()
            if held is None or held.host.closed:
                return
            held.host.at_work.run(held.on_gradient, tensor, parameter)

        return hook

    def on_gradient(self, tensor: int, parameter: torch.Tensor) -> None:
        """Take the gradient accumulated into `parameter`."""
        host = self.host
        cursor = host.cursor
        if raw_grad(parameter) is None:
            return  # a hook of the user's own has dropped it
        if cursor.stepped and tensor in host.reader.consumed:
            raise refused(Refusal.NOT_CLEARED, host)
        as_planned = cursor.moment >= 0 and tensor in host.timetable.due[cursor.moment]
        if not (as_planned or cursor.off_plan or self._is_final(tensor)):
            return
        if host.warming is not None and not host.warming.gradient_is_final(tensor):
            return
        if self.keeps_tied and cursor.off_plan and tensor in host.timetable.tied:
            return
        self._take_out(tensor, parameter)

    def take_tied(self) -> None:
        """Take the gradients left in tied parameters, which are whole at the end of a micro-batch."""
        for tensor in self.host.timetable.tied:
            parameter = self.host.parameters[tensor]
            if raw_grad(parameter) is not None:
                with self.host.at_work:
                    self._take_out(tensor, parameter)

    def _take_out(self, tensor: int, parameter: torch.Tensor) -> None:
        """Take the gradient, which is whole, out of the parameter."""
        grad = raw_grad(parameter)
        assert grad is not None
        if grad.layout is not torch.strided:
            raise ContractError(
                f"the gradient of {self.host.reader.name_of(tensor)!r} is sparse, and chunks hold dense gradients "
                "alone; give sparse=False to its Embedding or EmbeddingBag"
            )
        if modes_standing() or torch.is_grad_enabled():
            with unseen(), unrecorded():
                self._take(tensor, grad)
        else:
            self._take(tensor, grad)
        set_raw_grad(parameter, None)

    def _take(self, tensor: int, grad: torch.Tensor) -> None:
        """Take a whole gradient out of autograd into its chunk."""
        host = self.host
        if host.cursor.off_plan:
            if self.takes_norms:
                torch.linalg.vector_norm(grad, dtype=torch.float32)
            if host.warming is None:
                host.demand.accept(tensor, grad)
            else:
                host.warming.accept(tensor, grad)
        else:
            self._accept(tensor, grad)
        if host.scaling is not None:
            host.scaling.see(grad)
        if not host.cursor.off_plan:
            host.now.outstanding.discard(tensor)
        host.backend.touch()
        host.reader.consumed.add(tensor)
        host.now.arrived.add(tensor)
        host.now.gives = True
        host.cursor.stepped = False

    def _is_final(self, tensor: int) -> bool:
        """Returns whether a gradient that is not due in the open moment is whole. If the plan has no such gradient
        there, the iteration leaves the plan."""
        host = self.host
        table, moment = host.timetable, host.cursor.moment
        if moment >= 0 and tensor in table.early[moment]:
            return False  # the gradient fires again in this micro-batch
        if self.in_parts and table.final_in(moment, tensor) > moment:
            return False  # the gradient comes again: each part that uses the parameter gives its share
        if host.absent is not None and host.absent.waits(tensor):
            return False
        host.demand.leave(
            f"gradient of {host.reader.name_of(tensor)!r} arrives in moment {moment}, the plan has it elsewhere"
        )
        return True

    def _accept(self, tensor: int, grad: torch.Tensor) -> None:
        """Move the gradient to its list by the plan."""
        host = self.host
        goes_to = host.timetable.gradient_list(host.cursor.moment, tensor)
        if self._weight == 0.0:  # an empty batch: the mean over no items is not a number
            grad.zero_()
        elif self._weight != 1.0:
            grad.mul_(self._weight)
        host.contents.gradients.accept(tensor, grad, goes_to)
        clips = host.updates.max_grad_norm is not None
        if clips and host.plan.workload.micro_batches == 1 and host.ranks is None:
            slot = host.contents.slots.at(Place.GPU, tensor, goes_to)
            host.now.norms[tensor] = torch.linalg.vector_norm(slot, dtype=torch.float32)
