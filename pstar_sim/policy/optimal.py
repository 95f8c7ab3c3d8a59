"""optimal: the plan of a search, or of another policy where that is faster; at most 0.01 % slower than any policy.

The plan that the search found (family/searched.py) and the plans of the other policies are followed, and the fastest is
taken. It has the name `optimal`; `choices` name the policy that made it.

[Note: what is left] The largest gaps to the fluid bound (benchmarks/optimal.py) are in short iterations in which
compute, both ways of the link and CPU Adam are all busy for nearly all of the time. As far as is known, the plan causes
these gaps and not the bound: a longer search still finds faster plans there, and the closed form with a plan's own
numbers of pinned and streamed parameters put in is within 2 % of that plan (of Llama-3-8B and Qwen2.5-7B on an H100: 3
to 5 %). For Qwen2.5-7B, at 0.6 s per iteration, the CPU Adam of one tensor alone takes 6 % of the iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.errors import DoesNotFit, PstarError
from pstar_sim.policy.family.pace import period_s
from pstar_sim.policy.family.searched import SearchResult, own_plans
from pstar_sim.policy.kit.capabilities import Capabilities, capabilities_of
from pstar_sim.policy.kit.collector import without_garbage_collection
from pstar_sim.policy.kit.options import specified
from pstar_sim.policy.kit.points import Coordinates, Point, point_options
from pstar_sim.policy.kit.sharing import plan_once
from pstar_sim.policy.kit.ties import burden, least_of
from pstar_sim.units import format_s
from pstar_sim.workload.workload import Workload

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["CAPABILITIES", "OPTIONS", "optimal"]

# Of the closed form for pins alone: no policy without streams comes there. 0 (all are tried): the same plans by 5 %
# more effort (benchmarks/search_constants.py).
FAR_AHEAD = 0.97
OPTIONS = point_options(Point(streams=True))
CAPABILITIES = Capabilities(point=Point(streams=True), tries_others=True)


@without_garbage_collection()
def optimal(workload: Workload, machine: Machine, settings: Settings, **changes: Unpack[Coordinates]) -> Plan:
    """The fastest plan this project knows how to make. changes: coordinates of another point; with any, the other
    policies are left out.

    Raises DoesNotFit, with what its own modes would need, where no policy fits.
    """
    point = Point(**({"streams": True} | changes))
    reason: DoesNotFit | None = None
    found: list[SearchResult] = []
    try:
        found = list(own_plans(workload, machine, settings, point, "optimal"))
    except DoesNotFit as short:
        reason = short
    if not changes:
        found += _others(workload, machine, settings, found)
        if not found and machine.nvme is not None:
            found += _from_disks(workload, machine, settings)
    if not found:
        assert reason is not None
        raise reason
    own = min((f.seconds for f in found if f.of == "optimal"), default=None)
    best = least_of(found, seconds=lambda f: f.seconds, burden=lambda f: burden(f.plan))
    choices = dict(best.plan.choices)
    if best.of != "optimal":
        choices["schedule"] = f"that of {best.of}: " + (
            f"its own modes do not fit ({reason})"
            if own is None
            else f"faster than its own best, {format_s(own)}"
            if best.seconds < own
            else f"as fast as its own best, {format_s(own)}, and moves less"
        )
    elif len(found) > 1:
        rivals = {f.of: format_s(f.seconds) for f in found if f.of != "optimal"}
        if rivals:
            choices["others"] = rivals
    predictions = dict(best.plan.predictions) | {"policy_iteration_s": best.seconds}
    return replace(best.plan, policy="optimal", choices=choices, predictions=predictions)


def _others(
    workload: Workload, machine: Machine, settings: Settings, own: Sequence[SearchResult]
) -> Iterator[SearchResult]:
    """The plans of the other shipped policies that fit. Policies whose plans have another order of the iteration are
    left out. So are policies that bring no states to the GPU, if the closed form says that pins alone come nowhere near
    (on several GPUs this leaves out only policies of optimal's own space)."""
    beaten = any(f.seconds < f.pins_alone_s * FAR_AHEAD for f in own)
    for name, policy in _rivals().items():
        able = capabilities_of(policy)
        if able.reorders and not workload.layer_major:
            continue
        if beaten and ((len(machine.ranks) == 1 and not able.streams_states) or able.point is not None):
            continue
        try:
            plan = plan_once(policy, workload, machine, settings)
        except PstarError:  # it does not fit, or does not apply to this machine
            continue
        yield SearchResult(period_s(plan), name, plan)


def _from_disks(workload: Workload, machine: Machine, settings: Settings) -> Iterator[SearchResult]:
    """Plans with lists on the disks, for jobs that fit nowhere else."""
    for name, policy in _rivals().items():
        for options in capabilities_of(policy).from_disks:
            try:
                plan = specified(name, policy, options)(workload, machine, settings)
            except PstarError:
                continue
            yield SearchResult(period_s(plan), f"{name}:{options}", plan)


def _rivals() -> dict[str, Callable[[Workload, Machine, Settings], Plan]]:
    from pstar_sim.policy.registry import built_in  # the registry knows this policy too

    mine = {name: policy for name, policy in built_in().items() if policy is not optimal}
    return {name: policy for name, policy in mine.items() if capabilities_of(policy).balance is None}
