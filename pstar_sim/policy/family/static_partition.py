"""static_partition: tide with a constant capacity, sized for the peak of the non-model data.

All other rules are those of tide (asynchronous.py). The difference between the two shows what following the tide is
worth.
"""

from __future__ import annotations

from dataclasses import replace
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

__all__ = ["CAPABILITIES", "OPTIONS", "static_partition"]

POINT = Point(capacity="peak")
OPTIONS = point_options(POINT)
CAPABILITIES = Capabilities(point=POINT, searches=True, shards={"parameters": ""})


def static_partition(workload: Workload, machine: Machine, settings: Settings, **changes: Unpack[Coordinates]) -> Plan:
    """Returns the plan with capacity = budget - the highest non-model bytes of any moment.

    changes: coordinates of another point.

    Raises DoesNotFit if the chunks of some moment, the small chunks and that peak exceed the GPU, or if parameters and
    states exceed the host.
    """
    point = replace(POINT, **changes)
    if point.streams or point.sums:
        return searched("static_partition", workload, machine, settings, point)
    return Asynchronous("static_partition", workload, machine, settings, point=point).plan()
