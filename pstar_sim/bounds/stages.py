"""A lower bound of the seconds of a pipeline's iteration, for any plans of its stages with their layouts.

[Note: the bound of stages] One stage has the bound of its job. Of several, none is faster than it would be alone, with
its own machine and layout: receives and meetings only delay. If the optimizer steps of all stages meet, no iteration is
shorter than the longest path from one meeting to the next: through the moments of a stage in their order, and through
each transfer, which begins when both stages have ended the moments that it follows and for which the moments that need
it wait. Updates, copies, and the order of transfers on their queues are left out of the path; they only delay. The
larger is the bound, that of the cut, the schedule and the micro-batches: another cut may be faster. Kinds of GPUs that
split layers wait for each other at each sum instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from pstar_sim.bounds.bounds import lower_bound
from pstar_sim.bounds.certificate import certificate_of
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan
from pstar_sim.core.plan_set import BorderKey, PlanSet, border_key, has_barrier
from pstar_sim.cost import CostModel, cost_of
from pstar_sim.workload.tape import TENSOR
from pstar_sim.workload.workload import Workload

_ALONE = ("bound of a stage alone",)  # key of `Workload.derived`: of its last plan


class _Alone(NamedTuple):
    machine: Machine
    asked: tuple[object, ...]
    seconds: float


def stages_bound_s(plans: PlanSet) -> float:
    """[Note: the bound of stages]"""
    if plans.parallelism.only_shares_batch:
        return certificate_of(plans.plans[0]).seconds
    alone_s = max(map(_alone_s, plans.plans))
    costs = [cost_of(plan.workload, plan.machine, plan.layout) for plan in plans.plans]
    if plans.shares:
        jobs = [(cost.workload, cost.moments_s) for cost in costs]
        return max(alone_s, seconds_in_step(jobs, again=not has_barrier(plans.plans)))
    return max(alone_s, _path_s(plans, costs)) if has_barrier(plans.plans) else alone_s


def _alone_s(plan: Plan) -> float:
    known, asked = plan.workload.derived.get(_ALONE), (plan.settings, plan.layout, plan.ranked)
    if not isinstance(known, _Alone) or known.machine is not plan.machine or known.asked != asked:
        found = lower_bound(plan.workload, plan.machine, plan.settings, plan.layout, ranked=plan.ranked)
        plan.workload.derived[_ALONE] = known = _Alone(plan.machine, asked, found.seconds)
    return known.seconds


def seconds_in_step(jobs: Sequence[tuple[Workload, Sequence[float]]], *, again: bool = False) -> float:
    """By [Note: shares of layers] in core/plan_set.py.

    jobs: with the seconds of their moments.
    again: the next iteration begins without a meeting.
    """
    each = [_stretches(workload, seconds) for workload, seconds in jobs]
    if again:
        each = [[own[0] + own[-1], *own[1:-1]] if len(own) > 1 else own for own in each]
    return float(sum(max(stretch) for stretch in zip(*each, strict=True)))


def _stretches(workload: Workload, seconds: Sequence[float]) -> list[float]:
    found = [0.0]
    for moment, own_s in zip(workload.moments, seconds):
        found[-1] += own_s
        if any(group == TENSOR for _, group, _ in moment.collectives):
            found.append(0.0)
    return found


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
