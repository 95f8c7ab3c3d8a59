"""Policies by name: the built-in ones and those that installed packages offer as entry points `pstar.policies`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.errors import UnknownName
from pstar_sim.policy.all_on_gpu import all_on_gpu
from pstar_sim.policy.patrickstar import patrickstar
from pstar_sim.policy.tide import static_partition, tide
from pstar_sim.policy.zero_offload import zero_offload
from pstar_sim.workload.workload import Workload

__all__ = ["ENTRY_POINTS", "Policy", "find_policy", "policies"]

Policy = Callable[[Workload, Machine, Settings], Plan]
"""A policy is a pure function; it raises DoesNotFit where it can place nothing."""

ENTRY_POINTS = "pstar.policies"


def policies() -> dict[str, Policy]:
    """Name -> policy. A built-in name cannot be taken over by an entry point."""
    found: dict[str, Policy] = {
        "all_on_gpu": all_on_gpu,
        "zero_offload": zero_offload,
        "static_partition": static_partition,
        "patrickstar": patrickstar,
        "tide": tide,
    }
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda p: p.name):
        if point.name not in found:
            found[point.name] = point.load()
    return found


def find_policy(name: str) -> Policy:
    """The policy of that name. Raises UnknownName with the nearest names."""
    known = policies()
    if name not in known:
        raise UnknownName("policy", name, tuple(known))
    return known[name]
