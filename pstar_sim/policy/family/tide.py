"""tide: chunks use the room that the non-model data of each single moment leave free.

Asynchronous prefetch (the earliest deadline among the copies that are ready), Belady's keep set, write-back at once,
CPU Adam in deadline order, as many pinned chunks as pay: see asynchronous.py. With several micro-batches, tide has room
at low tide, between a backward pass and the next forward pass, that the peak does not leave. Its aim is time: it keeps
chunks there, or pins more of them and copies more than static_partition where that is faster. Of equally fast plans it
takes the one that moves less. With one micro-batch no chunk sees low tide between two uses, and tide copies what
static_partition copies.
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
CAPABILITIES = Capabilities(point=Point(), yardstick=True)


def tide(workload: Workload, machine: Machine, settings: Settings, **changes: Unpack[Coordinates]) -> Plan:
    """Capacity = budget - non-model bytes of the moment. changes: coordinates of another point.

    Raises DoesNotFit only if some moment's own chunks, the small chunks and its non-model data exceed the GPU, or if
    parameters and states exceed the host.
    """
    point = Point(**changes)
    if point.streams or point.sums:
        return searched("tide", workload, machine, settings, point)
    return Asynchronous("tide", workload, machine, settings, point=point).plan()
