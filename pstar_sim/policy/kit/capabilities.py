"""Capabilities: what a policy can do beside making a plan, for code that chooses among policies without knowing them.

A policy's module declares its capabilities as `CAPABILITIES` and its options as `OPTIONS`. A policy of the user's own
may do the same; without `CAPABILITIES` it has none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.policy.kit.points import Point
from pstar_sim.workload.workload import Workload

__all__ = ["Capabilities", "capabilities_of"]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Abilities of a policy that planner and executor may ask about.

    point: the point of the asynchronous family that the policy is; its checks of room can be asked without a plan.
    tries_others: whether the policy also tries other chunk sizes and policies. Its own checks are then not final. Its
        plan is at least as fast as theirs, and planning takes seconds.
    one_at_a_time: whether copies, updates and computing wait for each other; an ablation begins with such a policy by
        default.
    near: the point of the asynchronous family that the policy is most like, where it is none itself: an ablation that
        begins with the policy goes on from there. None: from the plainest point.
    yardstick: whether the policy is one of the few that a question about many machines asks by default.
    streams_states: whether the policy updates chunks on the GPU whose states live elsewhere.
    reorders: whether its plans are layer-major whatever the order of the workload, so that a loop of the user's own
        cannot follow them.
    from_disks: options under which lists live on disks, tried if the host has no room.
    balance: chooses the ranks' shares of the batch where their GPUs differ (planner/balance.py calls it before it asks
        for the plan); takes the policy's options. None: the policy takes the shares of the machine.
    activations: the policy's own ways to keep, recompute or offload activations block by block: (the workload with all
        of them recomputed, the workload with all kept, machine, settings) -> workloads. None leaves the ways to the
        planner.
    """

    point: Point | None = None
    tries_others: bool = False
    one_at_a_time: bool = False
    near: Point | None = None
    yardstick: bool = False
    streams_states: bool = False
    reorders: bool = False
    from_disks: tuple[str, ...] = ()
    balance: Callable[..., tuple[int, ...]] | None = None
    activations: Callable[[Workload, Workload, Machine, Settings], Iterable[Workload]] | None = None


def capabilities_of(policy: Callable[..., Plan]) -> Capabilities:
    """The capabilities that the policy's module declares; none for a policy with options set, which counts as a policy
    of its own."""
    found: Any = getattr(sys.modules.get(getattr(policy, "__module__", "")), "CAPABILITIES", None)
    return found if isinstance(found, Capabilities) else Capabilities()
