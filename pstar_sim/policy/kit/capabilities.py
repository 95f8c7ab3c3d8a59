"""Capabilities: what a policy can do besides making a plan, for code that chooses among policies without knowing them.

A policy's module declares its capabilities as `CAPABILITIES` and its options as `OPTIONS`. A user's policy may do the
same; without `CAPABILITIES` it has no capability.
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
    """What planner and executor may ask about a policy.

    point: the policy's point in the asynchronous family; None outside of the family. The family's checks of room can
        then be asked without a plan.
    tries_others: whether the policy also tries other chunk sizes and policies. Its own checks are then not final, its
        plan is at least as fast as the plans of these policies, and planning takes seconds.
    one_at_a_time: copies, updates and computing wait for each other. By default an ablation begins with such a policy.
    near: for a policy outside of the asynchronous family, the point that is most like it. An ablation that begins with
        the policy continues from this point; None: from the plainest point.
    yardstick: whether a question about many machines asks it by default.
    streams_states: whether the policy updates chunks on the GPU whose states live elsewhere.
    reorders: whether its plans are layer-major in any order of the workload. A loop of the user cannot follow such
        plans.
    counts_host: whether its plans count all that a run takes of the host, with the rounding of pinned memory and the
        weights while they are loaded.
    from_disks: options under which lists live on disks; they are tried if the host has no room.
    balance: a function that chooses the ranks' shares of the batch if their GPUs differ. planner/balance.py calls it,
        with the policy's options, before it asks for the plan. None: the policy takes the shares of the machine.
    fastest_shares: whether the planner gives it those shares of the batch with which it is fastest, if GPUs differ. Its
        option `shares` may ask for the machine's instead.
    activations: the policy's own ways to keep, recompute or offload activations block by block, as a function (the
        workload with all of them recomputed, the workload with all kept, machine, settings) -> workloads. None leaves
        the ways to the planner.
    """

    point: Point | None = None
    tries_others: bool = False
    one_at_a_time: bool = False
    near: Point | None = None
    yardstick: bool = False
    streams_states: bool = False
    reorders: bool = False
    counts_host: bool = False
    from_disks: tuple[str, ...] = ()
    balance: Callable[..., tuple[int, ...]] | None = None
    fastest_shares: bool = False
    activations: Callable[[Workload, Workload, Machine, Settings], Iterable[Workload]] | None = None


def capabilities_of(policy: Callable[..., Plan]) -> Capabilities:
    """A policy with options set counts as a user's and has none."""
    found: Any = getattr(sys.modules.get(getattr(policy, "__module__", "")), "CAPABILITIES", None)
    return found if isinstance(found, Capabilities) else Capabilities()
