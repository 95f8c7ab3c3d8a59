"""Seconds per iteration of a finished plan, by the rules of the simulator.

`choose` predicts seconds while it decides the order. `period_s` takes the order of a finished plan, so it compares
plans of any policy by the figure that the simulator will find.
"""

from __future__ import annotations

from pstar_sim.core.follow import follow
from pstar_sim.core.plan import Plan
from pstar_sim.core.program import Program
from pstar_sim.cost import CostModel, cost_of

__all__ = ["period_s"]


def period_s(plan: Plan, cost: CostModel | None = None) -> float:
    """Returns the seconds per iteration of one rank, once the plan is steady. Raises PlanError for a plan that
    deadlocks."""
    cost = cost or cost_of(plan.workload, plan.machine, plan.layout)
    return follow(Program.of(plan), cost.step_costs(plan), cost.rates()).iteration_s
