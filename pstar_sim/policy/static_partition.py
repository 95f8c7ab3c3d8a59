"""static_partition: tide with a constant capacity, sized for the peak of the non-model data.

The same prefetch, keep set, Adam order and pin rule (asynchronous.py); only what the peak leaves free is used in every
moment. Whatever differs between the two is what following the tide is worth.
"""

from __future__ import annotations

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.policy.asynchronous import Asynchronous
from pstar_sim.policy.points import Point
from pstar_sim.workload.workload import Workload

__all__ = ["static_partition"]


def static_partition(workload: Workload, machine: Machine, settings: Settings) -> Plan:
    """Capacity = budget - the highest non-model bytes of any moment. Raises DoesNotFit if some moment's own chunks, the
    small ones and that peak exceed the GPU, or parameters and states the host."""
    return Asynchronous("static_partition", workload, machine, settings, point=Point(capacity="peak")).plan()
