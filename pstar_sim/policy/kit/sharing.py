"""Sharing: a plan of one job is made once for all callers that ask for it. A comparison plans every policy, and a
policy that tries the others (`Capabilities.tries_others`) plans most of them again. Plans are large, so they are kept
only inside `plans_shared`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.workload.workload import Workload

__all__ = ["plan_once", "plans_shared"]

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
    """The policy has to be pure. Inside `plans_shared`, the same objects give the same plan. Raises the policy's
    errors."""
    known = workload.derived.get(_PLANS)
    if not isinstance(known, dict):
        return policy(workload, machine, settings)
    plan: Plan | None = known.get((policy, settings))
    if plan is None or plan.machine is not machine:
        plan = known[policy, settings] = policy(workload, machine, settings)
    return plan
