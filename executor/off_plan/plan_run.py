"""PlanRun: what lives as long as one plan, [Note: one plan] in session/state.py."""

from __future__ import annotations

from executor.activations.stashes import Stashes
from executor.off_plan.demand import Demand
from executor.off_plan.reads import Reads
from executor.session.batches import Batches
from executor.session.following import Following
from executor.session.state import PlanBytes, RunState
from executor.session.steps import Steps

_HOLD_MEMORY = ("arena", "contents", "stashes", "steps", "batches", "following", "demand", "reads")


class PlanRun(PlanBytes):
    """`Session.install` makes the parts, each after those it reads."""

    stashes: Stashes
    steps: Steps
    batches: Batches
    following: Following
    demand: Demand
    reads: Reads

    def let_go(self) -> None:
        """Parts that hold memory hold one another until garbage is collected: forget them once another plan has taken
        over."""
        for name in _HOLD_MEMORY:
            vars(self).pop(name, None)


class WholeState(RunState):
    """A `RunState` for code above the parts of a plan."""

    run: PlanRun
