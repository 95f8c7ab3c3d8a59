"""Mending: puts the engine in order after Ctrl-C came inside its own work.

[Note: interrupted] Ctrl-C may come between any two lines. Inside the engine's own work it sets `AtWork.torn`.
`zero_grad()` (or the first act of the loop that loses no gradient) then mends the engine. Before `optimizer.step()` has
begun to update, the iteration is dropped: its gradients are dropped, values that they overwrote are restored from the
master copy, and the payloads return to the cut. From then on (`Cursor.committed`) the optimizer step is finished
instead: a chunk that has a gradient is not updated yet. An interruption that cannot be mended (a chunk in the middle of
its update, eager updates of half a backward) ends the run with `Interrupted`. See [Note: between two lines] in
memory/chunk_state.py.
"""

from __future__ import annotations

from typing import Protocol

from executor.lifetime.ending import Ending
from executor.off_plan.cut import PlanCut
from executor.off_plan.gradients_off_plan import OffPlanGradients
from executor.off_plan.states import States
from executor.off_plan.stepping import Stepping
from executor.queues.interface import Stillness
from executor.session.following import Following
from executor.session.hosting import BytesHost, LoopHost
from executor.session.reader import Reader
from executor.session.updates import Updates
from pstar_sim.errors import Interrupted

__all__ = ["Host", "Mending"]


class Host(BytesHost, LoopHost, Protocol):
    """The part of the session that this file uses."""

    @property
    def queues(self) -> Stillness: ...
    @property
    def ending(self) -> Ending: ...
    @property
    def following(self) -> Following: ...
    @property
    def reader(self) -> Reader: ...
    @property
    def renewing(self) -> bool: ...
    @property
    def updates(self) -> Updates: ...


class Mending:
    def __init__(
        self, host: Host, gradients: OffPlanGradients, states: States, stepping: Stepping, cut: PlanCut
    ) -> None:
        self.host = host
        self.gradients = gradients
        self.states = states
        self.stepping = stepping
        self.cut = cut

    def mend(self) -> None:
        """Repair the work that an interruption left half done: [Note: interrupted]. Raises the error that ends the run
        if this is not possible."""
        host = self.host
        self._refuse_to_mend()
        host.queues.settle(host.iteration - 1)
        host.queues.pause()
        self._refuse_half_an_update()
        host.contents.end_parts()
        host.following.forget_open_step()
        host.arena.mend()
        for chunk in range(len(host.plan.layout.chunks)):
            host.contents.free_hollow(chunk)
        host.cursor.visiting = False
        if host.cursor.committed != host.iteration:
            host.cursor.off_plan = True
            self.cut.start_over()
            return
        if not host.cursor.off_plan:
            host.cursor.off_plan = True
            self.gradients.leave_gpu()
            self.states.send_streams_home()
        assert host.now.update is not None
        self.stepping.carry_out(host.now.update)
        host.clock.reset()
        host.cursor.stepped = True

    def _refuse_to_mend(self) -> None:
        host = self.host
        if host.ranks is not None:
            raise host.ending.interrupt(
                f"rank {host.ranks.rank} was interrupted in iteration {host.iteration} and the other ranks have "
                "continued; continue from the last checkpoint (--save-every, --resume)"
            )
        if host.renewing:
            raise host.ending.interrupt(
                f"iteration {host.iteration} was interrupted while values moved into the chunks of a new plan; "
                "continue from the last checkpoint"
            )

    def _refuse_half_an_update(self) -> None:
        host = self.host
        committed = host.cursor.committed == host.iteration
        if host.updates.begun and not committed:
            raise self.half_update_error()
        for chunk, state in enumerate(host.contents.chunks):
            if state.updating or (committed and state.adding):
                names = ", ".join(repr(host.reader.name_of(t)) for t in host.timetable.tensors_of[chunk][:2])
                raise host.ending.interrupt(
                    f"optimizer.step() of iteration {host.iteration} was interrupted in the middle of the update of "
                    f"chunk {chunk} ({names}, ...): some of its values are updated and some are not; continue from "
                    "the last checkpoint"
                )

    def half_update_error(self) -> Interrupted:
        """Returns the error for a backward that ended in the middle of its eager updates."""
        host = self.host
        return host.ending.interrupt(
            f"iteration {host.iteration} was interrupted when {len(host.updates.begun)} parameters had had their eager "
            "update and others had not; continue from the last checkpoint (AdamW(eager=False) updates nothing "
            "before optimizer.step())"
        )
