"""Seconds per iteration of a finished plan by the simulator's rules, to compare plans of any policy."""

from __future__ import annotations

from dataclasses import replace

from pstar_sim.core.follow import Member, follow_once
from pstar_sim.core.plan import Plan
from pstar_sim.core.program import Program
from pstar_sim.core.step import part_counts
from pstar_sim.cost import CostModel, cost_of
from pstar_sim.policy.passes.parts import in_parts


def period_s(plan: Plan, cost: CostModel | None = None) -> float:
    """Of one rank, once steady. Raises PlanError for a deadlock."""
    cost = cost or cost_of(plan.workload, plan.machine, plan.layout)
    return follow_once(plan, Member(Program.of(plan), cost.step_costs(plan), cost.rates())).iteration_s


def faster_in_parts(plan: Plan, seconds: float) -> tuple[Plan, float]:
    """Updates of large chunks in parts (passes/parts.py), if that is faster."""
    parted = in_parts(plan)
    if parted is plan or (parted_s := period_s(parted)) >= seconds:
        return plan, seconds
    tensors, chunks = plan.workload.tensors, plan.layout.chunks
    counts = part_counts(parted.steps)
    words = ", ".join(f"{tensors[chunks[c].slots[0].tensor].name} in {count}" for c, count in counts.items())
    predictions = {**plan.predictions, "policy_iteration_s": parted_s}
    return replace(parted, choices={**plan.choices, "parts": words}, predictions=predictions), parted_s
