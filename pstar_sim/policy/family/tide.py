"""tide: chunks use the room that the non-model data of each moment leave free.

Chunks are fetched asynchronously (the earliest deadline among the copies that are ready) and kept by Belady's rule.
Gradients leave at once, CPU Adam runs in deadline order, and as many chunks are pinned as pay (asynchronous.py). With
several micro-batches, tide has more room than static_partition at low tide, between a backward pass and the next
forward pass: it keeps chunks, or pins more and copies more. Of equally fast plans it takes the one that moves less.
With one micro-batch low tide never lies between two uses of a chunk, so both copy the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.policy.family.asynchronous import Asynchronous
from pstar_sim.policy.family.searched import searched
from pstar_sim.policy.kit.capabilities import Capabilities
from pstar_sim.policy.kit.points import Coordinates, Point, point_options
from pstar_sim.workload.workload import Workload

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["CAPABILITIES", "OPTIONS", "tide"]

OPTIONS = point_options(Point())
CAPABILITIES = Capabilities(point=Point(), searches=True, yardstick=True, shards={"parameters": ""})


def tide(workload: Workload, machine: Machine, settings: Settings, **changes: Unpack[Coordinates]) -> Plan:
    """Returns the plan with capacity = budget - non-model bytes of the moment.

    changes: coordinates of another point.

    Raises DoesNotFit only if the chunks of some moment, the small chunks and the moment's non-model data exceed the
    GPU, or if parameters and states exceed the host.
    """
    point = Point(**changes)
    if point.streams or point.sums:
        return searched("tide", workload, machine, settings, point)
    return Asynchronous("tide", workload, machine, settings, point=point).plan()
