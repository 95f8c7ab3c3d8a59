"""A lower bound of the seconds of a pipeline's iteration, for any plans of its stages.

[Note: the bound of stages] No iteration is shorter than the moments of the stage that computes longest. If the
optimizer steps of all stages meet, none is shorter than the longest path from one meeting to the next: through the
moments of a stage in their order, and through each transfer, which begins when both stages have ended the moments that
it follows and for which the moments that need it wait. Updates, copies, and the order of transfers on their queues are
left out; they only delay. The bound is that of the cut, the schedule and the micro-batches: another cut may be faster.
"""

from __future__ import annotations

from collections import defaultdict

from pstar_sim.core.plan_set import BorderKey, PlanSet, border_key, has_barrier
from pstar_sim.cost import CostModel, cost_of


def stages_bound_s(plans: PlanSet) -> float:
    """[Note: the bound of stages]"""
    costs = [cost_of(plan.workload, plan.machine, plan.layout) for plan in plans.plans]
    longest_s = max(sum(cost.moments_s) for cost in costs)
    return max(longest_s, _path_s(plans, costs)) if has_barrier(plans.plans) else longest_s


def _path_s(plans: PlanSet, costs: list[CostModel]) -> float:
    """The end of the last moment of any stage, if all begin at 0."""
    needs: list[defaultdict[int, list[BorderKey]]] = [defaultdict(list) for _ in costs]
    makes: list[defaultdict[int, list[tuple[BorderKey, float]]]] = [defaultdict(list) for _ in costs]
    for stage, (plan, cost) in enumerate(zip(plans.plans, costs)):
        for border in plan.workload.borders:
            key = border_key(stage, border)
            needs[stage][border.until].append(key)
            makes[stage][border.behind].append((key, cost.border_s(border)))
    posted: dict[BorderKey, float] = {}  # transfer -> when the first of its two stages came to it
    over_s: dict[BorderKey, float] = {}
    clock, at = [0.0] * len(costs), [0] * len(costs)
    moved = True
    while moved:
        moved = False
        for stage, cost in enumerate(costs):
            while at[stage] < len(cost.moments_s) and all(key in over_s for key in needs[stage][at[stage]]):
                m = at[stage]
                clock[stage] = max([clock[stage], *(over_s[key] for key in needs[stage][m])]) + cost.moments_s[m]
                for key, seconds in makes[stage][m]:
                    if key in posted:
                        over_s[key] = max(posted[key], clock[stage]) + seconds
                    posted[key] = clock[stage]
                at[stage], moved = m + 1, True
    return max(clock)
