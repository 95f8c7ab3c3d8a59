"""Capabilities: what a policy can do besides making a plan, for code that chooses among policies without knowing them.

A policy's module, a user's too, declares them as `CAPABILITIES` and its options as `OPTIONS`. Without `CAPABILITIES` it
has none.
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
    """point: in the asynchronous family; None outside of it. The family's checks of room can then be asked without a
        plan.
    tries_others: whether it also tries other chunk sizes and policies. Its own checks are then not final, its plan is
        at least as fast as theirs, and planning takes seconds.
    one_at_a_time: copies, updates and computing wait for each other. An ablation begins with such a policy by default.
    near: for a policy outside of the family, the point most like it, from which an ablation that begins with it goes
        on; None: from the plainest.
    yardstick: whether a question about many machines asks it by default.
    streams_states: whether the policy updates chunks on the GPU whose states live elsewhere.
    reorders: whether its plans are layer-major in any order of the workload, which a loop of the user cannot follow.
    counts_host: whether its plans count all that a run takes of the host, with the rounding of pinned memory and the
        weights while they are loaded.
    from_disks: options under which lists live on disks; they are tried if the host has no room.
    balance: chooses the ranks' shares of the batch if GPUs differ, with the policy's options (planner/balance.py).
        None: the machine's shares.
    fastest_shares: whether the planner gives it the shares with which it is fastest, if GPUs differ, unless its option
        `shares` asks for the machine's.
    activations: its own ways to keep, recompute or offload activations block by block: (the workload with all of them
        recomputed, with all kept, machine, settings) -> workloads. None: the planner's ways.
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
    found: Any = getattr(sys.modules.get(getattr(policy, "__module__", "")), "CAPABILITIES", None)
    return found if isinstance(found, Capabilities) else Capabilities()
