"""A plan is made once for all who ask for it: a comparison plans every policy, and one that tries the others
(`Capabilities.tries_others`) most of them again. Plans are large, so they are kept only inside `plans_shared`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.workload.workload import Workload

_PLANS = ("plans",)  # key of `Workload.derived`, for (policy, settings) -> plan


@contextlib.contextmanager
def plans_shared(*workloads: Workload) -> Iterator[None]:
    """`plan_once` keeps its plans for these workloads."""
    opened = []
    for workload in workloads:
        if _PLANS not in workload.derived:
            workload.derived[_PLANS] = {}
            opened.append(workload)
    try:
        yield
    finally:
        for workload in opened:
            workload.derived.pop(_PLANS, None)


def plan_once(
    policy: Callable[[Workload, Machine, Settings], Plan], workload: Workload, machine: Machine, settings: Settings
) -> Plan:
    """By a pure policy; inside `plans_shared`, the same objects give the same plan. Raises the policy's errors."""
    known = workload.derived.get(_PLANS)
    if not isinstance(known, dict):
        return policy(workload, machine, settings)
    plan: Plan | None = known.get((policy, settings))
    if plan is None or plan.machine is not machine:
        plan = known[policy, settings] = policy(workload, machine, settings)
    return plan
