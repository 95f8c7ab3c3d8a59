"""What a policy can do besides making a plan.

Its module, a user's too, declares it as `CAPABILITIES` (default: nothing) and options as `OPTIONS`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.policy.kit.options import Specified
from pstar_sim.policy.kit.points import Coordinates, Point
from pstar_sim.workload.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """point: in the asynchronous family, whose checks of room need no plan; None outside.
    tries_others: also other chunk sizes and policies: own checks are not final, the plan is at least as fast as theirs,
        and takes seconds.
    searches: with more effort (`Settings.effort`) plans may be faster.
    one_at_a_time: copies, updates and computing wait for each other; an ablation begins with such a one.
    near: outside the family, the point most like it, where an ablation goes on, None: the plainest.
    yardstick: asked by default about many machines.
    streams_states: updates on the GPU chunks whose states live elsewhere.
    cpu_updates: all updates, without options, run on the CPU.
    reorders: plans are always layer-major, which a user's loop cannot follow.
    counts_host: plans count rounding and loading on the host.
    disks: lists may live on the machine's disks.
    from_disks: options under which they otherwise do, tried if the host has no room.
    balance: chooses the ranks' shares if GPUs differ, with the policy's options (planner/balance.py),
        None: the machine's.
    fastest_shares: has the planner's fastest shares if GPUs differ, unless its option `shares` asks for the machine's.
    shards: one of SHARDS (workload/parallelism.py) -> options under which ranks that share a batch slice that, the
        usual first; empty: as the policy has it.
    activations: its ways to keep, recompute or offload block by block: (all recomputed, all kept, machine, settings) ->
        workloads. None: the planner's ways.
    """

    point: Point | None = None
    tries_others: bool = False
    searches: bool = False
    one_at_a_time: bool = False
    near: Point | None = None
    yardstick: bool = False
    streams_states: bool = False
    cpu_updates: bool = False
    reorders: bool = False
    counts_host: bool = False
    disks: bool = True
    from_disks: tuple[str, ...] = ()
    balance: Callable[..., tuple[int, ...]] | None = None
    fastest_shares: bool = False
    shards: Mapping[str, str] = field(default_factory=dict)
    activations: Callable[[Workload, Workload, Machine, Settings], Iterable[Workload]] | None = None


def capabilities_of(policy: Callable[..., Plan]) -> Capabilities:
    if isinstance(policy, Specified):
        return _elsewhere(capabilities_of(policy.policy), policy.values)
    found: Any = getattr(sys.modules.get(getattr(policy, "__module__", "")), "CAPABILITIES", None)
    return found if isinstance(found, Capabilities) else Capabilities()


def _elsewhere(able: Capabilities, values: Mapping[str, object]) -> Capabilities:
    """With options: a coordinate leaves other policies out; needs that only a plan knows have no point."""
    able = replace(able, disks=able.disks or bool(able.from_disks and values))
    moved: dict[str, Any] = {key: value for key, value in values.items() if key in Coordinates.__annotations__}
    if able.point is None or not moved:
        return able
    if able.tries_others or "pins" in moved:
        return replace(able, point=None, tries_others=False)
    return replace(able, point=replace(able.point, **moved))
