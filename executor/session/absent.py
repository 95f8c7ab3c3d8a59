"""Absent gradients: a rank does not call a module of the plan (a routed expert).

A plan's collectives are the same on every rank, so an iteration on several ranks cannot continue off the plan. If a
rank's next event belongs to a later moment of the micro-batch, it passes over those in between: their fetches, gathers
and sums take place. A due gradient that has not come is zero in the sum; one before its moment waits in `.grad` (the
last module that uses the parameter is then passed over); one after it ends the run, as does any other order of events.

[Note: zero or none] In plain torch a parameter without a gradient is not updated; one of zero would decay moments and
change weights. So before the updates the ranks tell each other which parameters had none in any micro-batch, and what
no rank used is not updated. Eager updates run before that: with them such an iteration ends the run.
"""

from __future__ import annotations

import torch

from executor.contract import raw_grad
from executor.moments.hooks import ModuleEvent
from executor.session.following import Following
from pstar_sim.workload.workload import Phase


class Absent(Following):
    passes_over = True

    def later_moment_of(self, event: ModuleEvent) -> int | None:
        """The moment that the event opens, if a later one of the micro-batch."""
        moments, at = self.run.plan.workload.moments, self.cursor.moment
        if at < 0:
            return None
        for m in range(at + 1, len(moments)):
            moment = moments[m]
            if moment.micro_batch != moments[at].micro_batch or moment.phase is Phase.ADAM:
                return None
            if moment.name == event.name:
                return m if moment.phase is event.phase else None
            if moment.name.startswith("backward-end"):
                return None  # a moment after the backward does not count
        return None

    def pass_to(self, moment: int) -> None:
        """Passes over moments up to this one: nothing more is computed in them."""
        state = self.state
        self.settle()
        while self.cursor.moment + 1 < moment:
            following = self.cursor.moment + 1
            if not state.now.passed_over:
                state.now.passed_over = True
                name = self.run.timetable.names[following]
                state.note_deviation(f"{name} does not come on this rank; gradients that are not there count as zero")
            self.advance(following)
            self.settle()

    def settle(self) -> None:
        """Gradients due in the open moment; one that has not come is zero."""
        run, now, parameters = self.run, self.state.now, self.reader.parameters
        for tensor in sorted(now.outstanding):
            if raw_grad(parameters[tensor]) is not None:
                self.on_gradient(tensor, parameters[tensor])
                continue
            dtype = run.arena.dtype(run.timetable.chunk_of[tensor], "param")
            zero = torch.zeros((), dtype=dtype, device=run.backend.device)
            with torch.no_grad():
                run.contents.gradients.accept(
                    tensor,
                    zero.expand(run.plan.workload.tensors[tensor].numel),
                    run.timetable.gradient_list(self.cursor.moment, tensor),
                )
            run.backend.touch()
            now.missed.add(tensor)
        now.outstanding = set()

    def waits(self, tensor: int) -> bool:
        at = self.cursor.moment
        return at >= 0 and self.run.timetable.final_in(at, tensor) > at

    def unused(self) -> frozenset[int]:
        """Tensors without a gradient on any rank; every rank calls this before its updates."""
        ranks, now = self.state.ranks, self.state.now
        assert ranks is not None
        mine = now.missed - now.arrived
        if not ranks.any(bool(mine)):
            return frozenset()
        order = sorted(self.run.timetable.chunk_of)
        rows = ranks.meet([float(tensor in mine) for tensor in order])
        return frozenset(tensor for i, tensor in enumerate(order) if all(row[i] for row in rows))
