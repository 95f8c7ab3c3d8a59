"""A comparison plans every policy, and one that tries the others (`Capabilities.tries_others`) most of them again.
Plans are large, so only `plans_shared` keeps them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.follow import RECORDS
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.errors import CannotPlan, DoesNotFit
from pstar_sim.workload.workload import Workload

# Key of `Workload.derived`, for (policy, settings, id of the machine) -> (machine, plan or refusal), and for id of a
# plan's steps, which stay when a plan is moved to another machine -> (steps, seconds per iteration).
_PLANS = ("plans",)
_MACHINES = "machines"  # in keys of the same, for different machines with a host's bytes
_LEAST = ("least seconds",)  # key of the same, for (policy, settings, id of the machine) -> (machine, seconds)
_MOST_RECORDS = 4  # a plan is followed when it is made, when its memory is asked for, and when it is shown

T = TypeVar("T")
Function = Callable[[Workload, Machine, Settings], Plan]


@contextlib.contextmanager
def plans_shared(*workloads: Workload) -> Iterator[None]:
    """`plan_once` and `follow_once` remember for these workloads."""
    opened = []
    for workload in workloads:
        if _PLANS not in workload.derived:
            workload.derived[_PLANS] = {}
            workload.derived[RECORDS] = deque(maxlen=_MOST_RECORDS)
            opened.append(workload)
    try:
        yield
    finally:
        for workload in opened:
            workload.derived.pop(_PLANS, None)
            workload.derived.pop(RECORDS, None)


def plan_once(policy: Function, workload: Workload, machine: Machine, settings: Settings) -> Plan:
    """By a pure policy; inside `plans_shared`, equal machines give the same plan. Raises the policy's errors."""
    known = workload.derived.get(_PLANS)
    if not isinstance(known, dict):
        return policy(workload, machine, settings)
    alike = known.setdefault((_MACHINES, machine.host.memory_bytes), [])
    if machine not in alike:
        alike.append(machine)
    machine = alike[alike.index(machine)]
    _, outcome = known.get((policy, settings, id(machine)), (None, None))
    if outcome is None:
        try:
            outcome = policy(workload, machine, settings)
        except (CannotPlan, DoesNotFit) as refusal:
            outcome = refusal
        known[policy, settings, id(machine)] = machine, outcome  # kept, so no other machine has its id
    if isinstance(outcome, Plan):
        return outcome
    raise outcome.with_traceback(None)  # its frames hold everything up to here


def remember_s(plan: Plan, seconds: float) -> None:
    """For `known_s`."""
    known = plan.workload.derived.get(_PLANS)
    if isinstance(known, dict):
        known[id(plan.steps)] = plan.steps, seconds  # kept, so no other steps have their id


def known_s(plan: Plan) -> float | None:
    """Seconds per iteration, if remembered."""
    known = plan.workload.derived.get(_PLANS)
    _, seconds = known.get(id(plan.steps), (None, None)) if isinstance(known, dict) else (None, None)
    return seconds


def once_for_steps(plan: Plan, of: Callable[[Plan], T]) -> T:
    """As `plan_once`, for the plan's steps."""
    known = plan.workload.derived.get(_PLANS)
    if not isinstance(known, dict):
        return of(plan)
    if (of, id(plan.steps)) not in known:
        known[of, id(plan.steps)] = plan.steps, of(plan)  # kept, so no other steps have their id
    answer: T = known[of, id(plan.steps)][1]
    return answer


def remember_least_s(
    policy: Function, workload: Workload, machine: Machine, settings: Settings, seconds: float
) -> None:
    """For `least_known_s`, anywhere."""
    known = workload.derived.setdefault(_LEAST, {})
    assert isinstance(known, dict)
    known[policy, settings, id(machine)] = machine, seconds


def least_known_s(policy: Function, workload: Workload, machine: Machine, settings: Settings) -> float:
    """Per iteration; 0 if not remembered."""
    known = workload.derived.get(_LEAST)
    _, seconds = known.get((policy, settings, id(machine)), (None, 0.0)) if isinstance(known, dict) else (None, 0.0)
    return seconds
