"""The engine in order again after Ctrl-C came inside its own work.

[Note: interrupted] Ctrl-C there, between any two lines, sets `AtWork.torn`, and `zero_grad()` (or the first act that
loses no gradient) mends the engine. Before `optimizer.step()` has begun to update, gradients are dropped, values that
they overwrote are restored from the master copy, and payloads return to the cut. From then on (`Cursor.committed`) the
step is finished
instead: a chunk that has a gradient is not updated yet. What cannot be mended (a chunk amid its update, eager updates
of half a backward) ends the run with `Interrupted`. See [Note: between two lines] in memory/chunk_state.py.
"""

from __future__ import annotations

from executor.off_plan.cut import PlanCut
from executor.off_plan.gradients_off_plan import OffPlanGradients
from executor.off_plan.states import States
from executor.off_plan.stepping import Stepping
from executor.session.following import Following
from executor.session.standstill import Standstill
from pstar_sim.errors import Interrupted


class Mending:
    def __init__(
        self,
        following: Following,
        standstill: Standstill,
        gradients: OffPlanGradients,
        states: States,
        stepping: Stepping,
        cut: PlanCut,
    ) -> None:
        self.run = following.run
        self.state = following.state
        self.following = following
        self.standstill = standstill
        self.gradients = gradients
        self.states = states
        self.stepping = stepping
        self.cut = cut

    def mend(self) -> bool:
        """[Note: interrupted]; was the step finished? Otherwise the iteration begins anew. Raises the error that ends
        the run if neither is possible."""
        run, state, cursor = self.run, self.state, self.state.cursor
        self._refuse_to_mend()
        self.standstill.rest()
        self._refuse_half_an_update()
        run.contents.end_parts()
        self.following.forget_open_step()
        run.arena.mend()
        for chunk in range(len(run.plan.layout.chunks)):
            run.contents.free_hollow(chunk)
        cursor.visiting = False
        if cursor.committed != state.iteration:
            cursor.off_plan = True
            self.cut.start_over()
            return False
        if not cursor.off_plan:
            cursor.off_plan = True
            self.gradients.leave_gpu()
            self.states.send_streams_home()
        for chunk in range(len(run.plan.layout.chunks)):
            self.states.send_to_disks(chunk)  # else lists whose gradients are on disks stay on the host
        assert state.now.update is not None
        self.stepping.carry_out(state.now.update)
        return True

    def _refuse_to_mend(self) -> None:
        state = self.state
        if state.ranks is not None:
            raise self.standstill.interrupt(
                f"rank {state.ranks.rank} was interrupted in iteration {state.iteration} and the other ranks have "
                "continued; continue from the last checkpoint (--save-every, --resume)"
            )
        self.standstill.require_running()

    def _refuse_half_an_update(self) -> None:
        run, state = self.run, self.state
        committed = state.cursor.committed == state.iteration
        if self.following.updates.begun and not committed:
            raise self.half_update_error()
        for chunk, each in enumerate(run.contents.chunks):
            if each.updating or (committed and each.adding):
                names = ", ".join(repr(self.following.reader.name_of(t)) for t in run.timetable.tensors_of[chunk][:2])
                raise self.standstill.interrupt(
                    f"optimizer.step() of iteration {state.iteration} was interrupted in the middle of the update of "
                    f"chunk {chunk} ({names}, ...): some of its values are updated and some are not; continue from "
                    "the last checkpoint"
                )

    def half_update_error(self) -> Interrupted:
        """For a backward that ended amid its eager updates."""
        count = len(self.following.updates.begun)
        return self.standstill.interrupt(
            f"iteration {self.state.iteration} was interrupted when {count} parameters had had their eager "
            "update and others had not; continue from the last checkpoint (AdamW(eager=False) updates nothing "
            "before optimizer.step())"
        )
