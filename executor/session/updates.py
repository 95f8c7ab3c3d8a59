"""`memory.update.Update` of each iteration, and whether its Adam steps have begun.

Eager updates run inside backward, each once a chunk's gradients are complete; others in `optimizer.step()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from executor.devices.rules import Settings
from executor.memory.update import Update
from executor.scaling import LossScaling
from executor.session.state import RunState
from pstar_sim.core.step import Kind, Queue
from pstar_sim.errors import PlanError


class Updates:
    """last: that of the last finished iteration with one."""

    def __init__(
        self,
        state: RunState,
        scaling: LossScaling | None,
        hyper: Callable[[], list[Mapping[str, Settings]]],
        *,
        eager: bool,
        max_grad_norm: float | None,
        stochastic: bool,
        clock: Callable[[], float],
    ) -> None:
        self.state = state
        self.scaling = scaling
        self.eager = eager
        self.max_grad_norm = max_grad_norm
        self.stochastic = stochastic
        self.last: Update | None = None
        self._hyper = hyper
        self._clock = clock

    def new(self) -> Update:
        run = self.state.run
        agree = self._agreed if self.state.ranks is not None and run.contents.sliced else None
        return Update(
            hyper=self._hyper(),
            max_grad_norm=self.max_grad_norm,
            stochastic=self.stochastic,
            agree=agree,
            streams=run.backend.streams,
        )

    def _agreed(self, norm: torch.Tensor) -> torch.Tensor:
        run, ranks = self.state.run, self.state.ranks
        assert ranks is not None
        begun_s = self._clock()
        agreed = ranks.agree(norm)
        streams = run.backend.streams
        if streams is not None and streams.queue is Queue.COMPUTE:
            run.queues.note_wait(self._clock() - begun_s)
        return agreed

    def settings_changed(self) -> bool:
        """Since the first eager update of this iteration."""
        update = self.state.now.update
        return self.eager and update is not None and update.hyper != self._hyper()

    @property
    def begun(self) -> set[int]:
        """Tensors whose eager update of this iteration has begun."""
        now = self.state.now
        return now.early if now.number == self.state.iteration else set()

    @property
    def running(self) -> bool:
        """Parameters may be changing: eagerly, from the first chunk with complete gradients until `optimizer.step()`.
        The plan's moments decide, so a loop always gets the same answer."""
        state = self.state
        return self.eager and (state.cursor.moment > state.run.timetable.first_complete or bool(self.begun))

    def decide_scaling(self, update: Update) -> None:
        """Under loss scaling, set `unscale`, and skip the update if a gradient on any rank is not finite. Every rank
        calls this once all have arrived."""
        scaling, ranks = self.scaling, self.state.ranks
        if scaling is None:
            return
        update.unscale = 1.0 / scaling.scale
        begun_s = self._clock()
        overflowed = scaling.overflowed()
        if ranks is not None:
            overflowed = ranks.any(overflowed)
        self.state.run.queues.note_wait(self._clock() - begun_s)
        if overflowed:
            update.skip_all()
        scaling.close_iteration(overflowed)

    def norms(self, iteration: int) -> Iterable[torch.Tensor]:
        """For the first Adam under clipping: on several ranks, of this rank's part of the sums."""
        run = self.state.run
        contents, progress = run.contents, run.progress
        update = self.state.now.update_of(iteration)
        assert update is not None
        if self.state.ranks is not None:
            run.queues.await_steps(run.timetable.sums, iteration)
            if run.timetable.micro_batches == 1:
                norms = contents.exchange.summed_norms
                return [norms[t] for t in sorted(norms)]
            contents.gradients.fold_on_gpu()
        if run.timetable.micro_batches == 1:
            return [update.norms[t] for t in sorted(update.norms)]  # in the order of clip_grad_norm_
        for i in progress.order.get(Queue.ADAM, []):
            if progress.steps[i].kind is Kind.CPU_ADD and progress.done[i] < iteration:
                raise PlanError(
                    f"an Adam step of iteration {iteration} runs before {progress.word(i, iteration)}: the plan's "
                    "barrier does not hold"
                )
        arrived = sorted(t for state in contents.chunks for t in state.with_gradient())
        return [contents.gradients.norm(t) for t in arrived]

    @property
    def grad_norm(self) -> float | None:
        update = self.last
        if update is None or update.max_grad_norm is None:
            return None
        if update.norm is None:
            self.state.run.queues.settle(self.state.iteration - 1)
        return None if update.norm is None else float(update.norm)
