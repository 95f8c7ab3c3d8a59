"""The policies shipped beside `optimal`, which takes the best of them, in the order of the registry."""

from __future__ import annotations

from collections.abc import Callable

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.policy.family.static_partition import static_partition
from pstar_sim.policy.family.tide import tide
from pstar_sim.policy.systems.all_on_gpu import all_on_gpu
from pstar_sim.policy.systems.deep_optimizer_states import deep_optimizer_states
from pstar_sim.policy.systems.karma import karma
from pstar_sim.policy.systems.l2l import l2l
from pstar_sim.policy.systems.patrickstar import patrickstar
from pstar_sim.policy.systems.stronghold import stronghold
from pstar_sim.policy.systems.whale import whale
from pstar_sim.policy.systems.zero3_offload import zero3_offload
from pstar_sim.policy.systems.zero3_resident import zero3_resident
from pstar_sim.policy.systems.zero_infinity import zero_infinity
from pstar_sim.policy.systems.zero_offload import zero_offload
from pstar_sim.workload.workload import Workload

Policy = Callable[[Workload, Machine, Settings], Plan]
"""A policy is a pure function. It raises DoesNotFit for a job that does not fit."""

BEFORE_OPTIMAL: dict[str, Policy] = {
    "all_on_gpu": all_on_gpu,
    "zero_offload": zero_offload,
    "static_partition": static_partition,
    "patrickstar": patrickstar,
    "l2l": l2l,
    "tide": tide,
}

AFTER_OPTIMAL: dict[str, Policy] = {
    "zero3_resident": zero3_resident,
    "zero3_offload": zero3_offload,
    "deep_optimizer_states": deep_optimizer_states,
    "zero_infinity": zero_infinity,
    "stronghold": stronghold,
    "whale": whale,
    "karma": karma,
}
