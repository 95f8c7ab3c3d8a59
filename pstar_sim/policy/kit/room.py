from __future__ import annotations

from collections.abc import Sequence

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.step import Place, Queue
from pstar_sim.units import format_bytes
from pstar_sim.workload.workload import Workload


def budget_bytes(machine: Machine, place: Place) -> int:
    """What one rank may use."""
    return {
        Place.GPU: machine.gpu_budget_bytes,
        Place.HOST: machine.host_budget_bytes,
        Place.NVME: machine.nvme_budget_bytes,
    }[place]


def queue_of_writes(machine: Machine) -> Queue:
    """To disks: [Note: reads beside writes] in machine.py."""
    return Queue.NVME if machine.nvme is None or not machine.nvme.gain else Queue.NVME_WRITE


def describe_moment(workload: Workload, moment: int) -> str:
    """Such as "moment 361 (grad:h.5.mlp, 12.40 GB of non-model data)"."""
    m = workload.moments[moment]
    return f"moment {moment} ({m.name}, {format_bytes(m.peak_bytes)} of non-model data)"


def worst_moment(tide: Sequence[int]) -> int:
    """The first of the highest."""
    return max(range(len(tide)), key=lambda m: tide[m])
