"""Batches that need more memory than the plan has.

Between two iterations the same policy makes a plan for such a batch and those of the old plan; a later micro-batch runs
on demand first. Where no plan fits, it runs on demand if it can, else it is refused.

The n-th new plan comes after 2**n outgrown batches, except for one that cannot run otherwise.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from executor.moments.unseen import unseen
from executor.off_plan.plan_run import WholeState
from executor.off_plan.shortage import Shortage
from executor.session.forms import Form, covers
from pstar_sim.core.plan import Plan
from pstar_sim.errors import DoesNotFit, PstarError
from pstar_sim.policy.registry import plan_to_run
from pstar_sim.workload.workload import Workload

log = logging.getLogger("executor")


@dataclass(frozen=True)
class NewPlan:
    """form, shape: of that batch.
    holds: for the old plan's batches too.
    refusal: of the present batch, None if it can run on demand.
    """

    plan: Plan
    form: Form
    shape: tuple[int, ...]
    holds: bool
    refusal: DoesNotFit | None


def why_not(shape: tuple[int, ...], error: PstarError) -> str:
    """Logs and returns why there is no plan for batches of this shape."""
    log.warning("no new plan for a batch of shape %s: %s", list(shape), error)
    return error.what if isinstance(error, DoesNotFit) else str(error)


def refuse(refusal: DoesNotFit | None, why: str) -> None:
    """why: there is no new plan either."""
    if refusal is not None:
        raise refusal.restated(what=f"{refusal.what}; a new plan for this batch: {why}")


class Outgrown:
    """plans: new plans made."""

    def __init__(self, state: WholeState, shortage: Shortage) -> None:
        self.state = state
        self.shortage = shortage
        self.plans = 0
        self._met = 0  # outgrown batches since the last new plan
        self._wanted: tuple[Form, tuple[int, ...], tuple[Any, Any]] | None = None  # the largest of them

    def see(self) -> NewPlan | None:
        """The plan to continue under, if due. Raises DoesNotFit, before anything changes, if the last batch runs
        neither under a new plan nor on demand."""
        batches = self.state.run.batches
        if batches.outgrown:
            self._note()
        refusal = None if batches.fits else batches.refusal()
        if refusal is not None and self._wanted is None:
            self._note()
        if self._may_plan() and (refusal is not None or self._met >= 2**self.plans):
            return self._plan(refusal)
        if refusal is not None:
            raise refusal
        return None

    def _note(self) -> None:
        batches = self.state.run.batches
        assert batches.last is not None
        self._met += 1
        if self._wanted is None or not covers(self._wanted[0], batches.form):
            self._wanted = batches.form, batches.shape, batches.last

    def _may_plan(self) -> bool:
        state = self.state
        idle = not state.cursor.inside and not self.shortage.pending
        return idle and state.ranks is None and bool(state.replan_after) and self._wanted is not None

    def _plan(self, refusal: DoesNotFit | None) -> NewPlan | None:
        batches, old = self.state.run.batches, self.state.run.plan
        assert self._wanted is not None
        (form, shape, batch), self._wanted, self._met = self._wanted, None, 0
        self.plans += 1
        try:
            with unseen():
                workload, holds = _for_both(batches.workload_of(batch, old.workload.micro_batches), old.workload)
                plan = plan_to_run(old.policy, workload, old.machine, old.settings)
        except PstarError as error:
            why = why_not(shape, error)
        else:
            return NewPlan(plan, form, shape, holds, refusal)
        refuse(refusal, why)
        return None

    def take(self, new: NewPlan) -> None:
        state, shapes = self.state, self.state.run.batches.shapes
        covered = () if shapes.planned is None or not new.holds else (shapes.planned, *shapes.covered)
        shapes.plan_for(new.form, covered=covered)
        done = f"new plan by {new.plan.policy} for a longer batch, of shape {list(new.shape)}"
        log.info("iteration %d: %s", state.iteration, done)
        state.note(done)


def _for_both(longer: Workload, old: Workload) -> tuple[Workload, bool]:
    if [m.name for m in longer.moments] != [m.name for m in old.moments]:
        return longer, False
    moments = tuple(
        replace(m, peak_bytes=max(m.peak_bytes, was.peak_bytes)) for m, was in zip(longer.moments, old.moments)
    )
    return replace(longer, moments=moments), True
