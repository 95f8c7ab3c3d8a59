"""Updates: the values that the Adam steps of an iteration need (`memory.update.Update`), and whether these steps have
begun.

Eager updates run inside backward, each as soon as a chunk's gradients are complete. Other updates run in
`optimizer.step()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, cast

import torch

from executor.devices.adam import Hyper
from executor.devices.backend import StreamBackend
from executor.memory.update import Update
from executor.queues.interface import ComputeSide, Progress, Stillness, Timing
from executor.scaling import LossScaling
from executor.session.hosting import BytesHost, LoopHost
from pstar_sim.core.step import Kind, Queue
from pstar_sim.errors import PlanError

__all__ = ["Host", "Updates"]


class QueuesAsked(ComputeSide, Stillness, Timing, Protocol):
    """The part of the queues that this file uses."""


class Host(BytesHost, LoopHost, Protocol):
    """The part of the session that this file uses."""

    @property
    def queues(self) -> QueuesAsked: ...
    @property
    def progress(self) -> Progress: ...
    @property
    def scaling(self) -> LossScaling | None: ...


class Updates:
    """The updates of one plan.

    hyper: returns the current settings of the optimizer's groups.
    clock: gives seconds.

    Attributes:
        eager: whether updates run inside backward.
        max_grad_norm: the global norm at which gradients are clipped; None without clipping.
        last: the update of the last finished iteration that had one. `Iteration.update_of` gives the updates of the
            current iteration and of the iteration before.
    """

    def __init__(
        self,
        host: Host,
        hyper: Callable[[], list[Hyper]],
        *,
        eager: bool,
        max_grad_norm: float | None,
        clock: Callable[[], float],
    ) -> None:
        self.host = host
        self.eager = eager
        self.max_grad_norm = max_grad_norm
        self.last: Update | None = None
        self._hyper = hyper
        self._clock = clock

    def new(self) -> Update:
        """Returns the update of an iteration, with the optimizer's present settings."""
        host = self.host
        sliced = host.ranks is not None and host.contents.sliced
        agree = self._agreed if sliced else None
        streams = cast(StreamBackend, host.backend) if hasattr(host.backend, "record") else None
        return Update(hyper=self._hyper(), max_grad_norm=self.max_grad_norm, agree=agree, streams=streams)

    def _agreed(self, norm: torch.Tensor) -> torch.Tensor:
        """Returns the norm on which all ranks agree. If an update on the accelerator needs it first, the training
        thread waits, and the queues note the wait."""
        host = self.host
        assert host.ranks is not None
        begun_s = self._clock()
        found = host.ranks.agree(norm)
        if getattr(host.backend, "queue", None) is Queue.COMPUTE:
            host.queues.note_wait(self._clock() - begun_s)
        return found

    def settings_changed(self) -> bool:
        """Returns whether the optimizer's settings have changed since the first eager update of this iteration."""
        update = self.host.now.update
        return self.eager and update is not None and update.hyper != self._hyper()

    @property
    def begun(self) -> set[int]:
        """Tensors whose eager update of this iteration has begun."""
        now = self.host.now
        return now.early if now.number == self.host.iteration else set()

    @property
    def running(self) -> bool:
        """Whether parameters may be changing: with eager updates, from the first chunk whose gradients are complete
        until `optimizer.step()`. The plan's moments decide, not the speed of the queues, so that the same loop always
        gets the same answer."""
        return self.eager and (self.host.cursor.moment > self.host.timetable.first_complete or bool(self.begun))

    def decide_scaling(self, update: Update) -> None:
        """Under loss scaling, once all gradients of the iteration have arrived: set the factor that undoes the scale,
        and skip the update if a gradient on any rank is not finite. Every rank calls this in the same place."""
        host = self.host
        if host.scaling is None:
            return
        update.unscale = 1.0 / host.scaling.scale
        begun_s = self._clock()
        overflowed = host.scaling.overflowed()
        if host.ranks is not None:
            overflowed = host.ranks.any(overflowed)
        host.queues.note_wait(self._clock() - begun_s)
        if overflowed:
            update.skip_all()
        host.scaling.close_iteration(overflowed)

    def norms(self, iteration: int) -> Iterable[torch.Tensor]:
        """Returns the norms of all gradients of an iteration. Its first Adam step calls this under clipping. On several
        ranks the norms are of this rank's part of the gradients' sums."""
        host = self.host
        contents, progress = host.contents, host.progress
        update = host.now.update_of(iteration)
        assert update is not None
        if host.ranks is not None:
            host.queues.await_steps(host.timetable.sums, iteration)
            if host.plan.workload.micro_batches == 1:
                norms = contents.exchange.summed_norms
                return [norms[t] for t in sorted(norms)]
            contents.gradients.fold_on_gpu()
        if host.plan.workload.micro_batches == 1:
            return [update.norms[t] for t in sorted(update.norms)]  # in the order of clip_grad_norm_
        for i in progress.order.get(Queue.ADAM, []):
            if host.plan.steps[i].kind is Kind.CPU_ADD and progress.done[i] < iteration:
                raise PlanError(
                    f"an Adam step of iteration {iteration} runs before {progress.word(i, iteration)}: the plan's "
                    "barrier does not hold"
                )
        arrived = sorted(t for state in contents.chunks for t in state.with_gradient())
        return [contents.gradients.norm(t) for t in arrived]

    @property
    def grad_norm(self) -> float | None:
        """Global norm of the last iteration's gradients before clipping; None without clipping or before the first
        update."""
        update = self.last
        if update is None or update.max_grad_norm is None:
            return None
        if update.norm is None:
            self.host.queues.settle(self.host.iteration - 1)
        return None if update.norm is None else float(update.norm)
