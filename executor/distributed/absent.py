"""Absent gradients: a rank does not call a module of the plan (a routed expert).

The collectives of a plan are the same on every rank. So an iteration on several ranks cannot continue off the plan, as
an iteration of one process does (`demand.py`). If the next event of a rank belongs to a later moment of the
micro-batch, the rank passes over the moments in between. Each of them begins and ends with nothing computed in it, so
that its fetches, gathers and sums take place. A gradient that is due and has not come is zero in the sum. A gradient
that comes before its moment waits in `.grad` (the last module that uses the parameter is then passed over). A gradient
that comes after its moment ends the run, as does any other order of events.

[Note: zero or none] In plain torch an unused parameter has no gradient and is not updated. With a gradient of zero its
moments would decay, and its weight would change. Therefore, before the updates, the ranks tell each other which
parameters had no gradient in any micro-batch. A parameter that no rank used is not updated on any rank, as in one
process on the joined batch. Eager updates run before the ranks can tell each other, so with eager updates such an
iteration still ends the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from executor.contract import raw_grad
from executor.distributed.ranks import Ranks
from executor.moments.hooks import ModuleEvent
from executor.session.following import Following
from executor.session.hosting import BytesHost
from pstar_sim.workload.workload import Phase

__all__ = ["Absent"]


class Host(BytesHost, Protocol):
    """The part of the session that this file uses."""

    @property
    def following(self) -> Following: ...
    @property
    def ranks(self) -> Ranks | None: ...
    @property
    def parameters(self) -> Sequence[nn.Parameter]: ...

    def note_deviation(self, reason: str) -> None: ...


class Absent:
    """Handles modules of the plan that this rank does not call."""

    def __init__(self, session: Host) -> None:
        self.session = session

    def moment_of(self, event: ModuleEvent) -> int | None:
        """Returns the moment that the event opens, if it is a later moment of the micro-batch whose moment is open;
        else None."""
        s = self.session
        moments = s.plan.workload.moments
        if s.cursor.moment < 0:
            return None
        for m in range(s.cursor.moment + 1, len(moments)):
            moment = moments[m]
            if moment.micro_batch != moments[s.cursor.moment].micro_batch or moment.phase is Phase.ADAM:
                return None
            if moment.name == event.name:
                return m if moment.phase is event.phase else None
            if moment.name.startswith("backward-end"):
                return None  # a moment after the backward does not count
        return None

    def pass_to(self, moment: int) -> None:
        """Pass over the moments before this moment, from the open moment on: nothing more is computed in them."""
        s = self.session
        self.settle()
        while s.cursor.moment + 1 < moment:
            following = s.cursor.moment + 1
            if not s.now.passed_over:
                s.now.passed_over = True
                name = s.timetable.names[following]
                s.note_deviation(f"{name} does not come on this rank; gradients that are not there count as zero")
            s.following.advance(following)
            self.settle()

    def settle(self) -> None:
        """Take the gradients that are due in the open moment. A gradient that has not come counts as zero."""
        s = self.session
        for tensor in sorted(s.now.outstanding):
            if raw_grad(s.parameters[tensor]) is not None:
                s.following.on_gradient(tensor, s.parameters[tensor])
                continue
            dtype = s.arena.dtype(s.timetable.chunk_of[tensor], "param")
            zero = torch.zeros((), dtype=dtype, device=s.backend.device)
            with torch.no_grad():
                s.contents.gradients.accept(
                    tensor,
                    zero.expand(s.plan.workload.tensors[tensor].numel),
                    s.timetable.gradient_list(s.cursor.moment, tensor),
                )
            s.backend.touch()
            s.now.missed.add(tensor)
        s.now.outstanding = set()

    def waits(self, tensor: int) -> bool:
        """Returns whether a gradient that came stays in `.grad`, because its moment is a later moment of the
        micro-batch."""
        s = self.session
        return s.cursor.moment >= 0 and s.timetable.final_in(s.cursor.moment, tensor) > s.cursor.moment

    def unused(self) -> frozenset[int]:
        """Returns the tensors without a gradient on any rank in this iteration. Every rank calls this before its
        updates."""
        s = self.session
        assert s.ranks is not None
        mine = s.now.missed - s.now.arrived
        if not s.ranks.any(bool(mine)):
            return frozenset()
        order = sorted(s.timetable.chunk_of)
        rows = s.ranks.meet([float(tensor in mine) for tensor in order])
        return frozenset(tensor for i, tensor in enumerate(order) if all(row[i] for row in rows))
