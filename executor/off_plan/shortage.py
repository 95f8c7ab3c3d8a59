"""Memory that was refused although planned, until there is a new plan.

[Note: what is measured] A virtual accelerator with a limit counts every live byte (`guard.py`), so each moment's tide
is known; elsewhere only the refusal: the budget shrinks to the bytes held then.
"""

from __future__ import annotations

import logging

from executor.off_plan.rungs import Rung
from executor.queues.interface import without_locals
from executor.session.standstill import Standstill
from executor.session.state import RunState
from pstar_sim.errors import OutOfMemory, PlanError
from pstar_sim.units import format_bytes

log = logging.getLogger("executor")


class Shortage:
    """pending: memory ran out, and there is no new plan yet.
    unforeseen_bytes: of the measured tide above the plan's where memory ran out.
    """

    def __init__(self, state: RunState, standstill: Standstill) -> None:
        self.state = state
        self.standstill = standstill
        self.pending = False
        self.given_up = False
        self.rungs: list[Rung] = []
        self.error: OutOfMemory | None = None
        self.in_fragments = False
        self.unforeseen_bytes = 0

    def note(
        self, error: OutOfMemory, done: str, alive_bytes: int | None = None, *, in_fragments: bool = False
    ) -> None:
        """alive_bytes: non-model, needed, if known.
        in_fragments: as many bytes as requested were idle.
        """
        self.pending = True
        without_locals(error)
        self.error, self.in_fragments = error, in_fragments
        self.log(error, done)
        if not self.state.cursor.off_plan:  # a step that begins now would count on the plan's budget
            self.standstill.drain()
        if not (in_fragments and error.limit_bytes is None):  # else the accelerator has the bytes
            self._shrink(error, error.other_bytes if alive_bytes is None else alive_bytes)

    def log(self, error: OutOfMemory, done: str) -> None:
        state, moment = self.state, self.state.moment
        name = state.run.timetable.names[moment] if moment >= 0 else ""
        rung = Rung(
            state.iteration, moment, name, error.what, error.asked_bytes, error.payload_bytes, error.other_bytes,
            error.limit_bytes, done,
        )  # fmt: skip
        self.rungs.append(rung)
        log.warning("%s", rung)

    def _shrink(self, error: OutOfMemory, alive_bytes: int) -> None:
        moment, run = self.state.moment, self.state.run
        foreseen = run.timetable.peaks[moment] if moment >= 0 else run.arena.tide_bytes
        budget = error.payload_bytes + foreseen
        if error.limit_bytes is not None:
            budget = error.limit_bytes
            self.unforeseen_bytes = max(self.unforeseen_bytes, alive_bytes - foreseen)
        run.arena.gpu_budget_bytes = min(run.arena.gpu_budget_bytes, budget)

    def ends_ranks(self, error: OutOfMemory) -> PlanError:
        """The error of a rank that was refused memory; tells the other ranks: they wait for the plan's next steps, so
        this one can neither leave the plan nor begin again."""
        state, plan, ranks = self.state, self.state.run.plan, self.state.ranks
        assert ranks is not None
        moment = state.cursor.moment
        if state.cursor.visiting:
            where = f"in an evaluation after step {state.iteration - 1}"
        elif moment < 0:
            where = f"before iteration {state.iteration}"
        else:
            where = f"in iteration {state.iteration}, moment {moment} ({state.run.timetable.names[moment]})"
        planned, limit = plan.gpu_budget_bytes, error.limit_bytes
        less = max(0, planned - max(error.asked_bytes, planned // 8))
        budget = limit if limit is not None and limit < planned else less
        return ranks.ends(
            f"rank {ranks.rank} ran out of memory {where}: {error}. One process would continue with a smaller "
            "plan; several end, because the others wait for the next steps of this plan. Plan again for "
            f"{state.spelling.gpu_memory} {format_bytes(budget)} or less (this one has {format_bytes(planned)}), or "
            "for a smaller batch, and continue from the last checkpoint (--save-every, --resume)"
        )
