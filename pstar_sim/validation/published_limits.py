"""Published largest models on machines of the catalog, and each system's policy."""

from __future__ import annotations

from dataclasses import dataclass

from pstar_sim.catalog.machine import Machine
from pstar_sim.validation.rows import published_rows

_HARDWARE = {
    "8xV100-SXM2-32GB 240GB DRAM (Yard)": ("v100-32x8", 8),
    "1 DGX-2 16xV100": ("dgx2", 16),
}
"""Hardware as published -> (machine of the catalog, ranks)."""

_POLICIES = {
    "PatrickStar": "patrickstar",
    "ZeRO-Offload": "zero_offload",
    "ZeRO-3": "zero3_resident",
    "ZeRO-Inf CPU": "zero_infinity",
    "ZeRO-Inf NVMe": "zero_infinity",
    "DP": "all_on_gpu",
}


@dataclass(frozen=True, kw_only=True)
class PublishedLimit:
    """policy: stands for the system; None if none does."""

    system: str
    policy: str | None
    params: float
    source: str


def published_limits(machine: Machine) -> tuple[PublishedLimit, ...]:
    """Of this machine with all its ranks."""
    return tuple(
        PublishedLimit(system=row.system, policy=_POLICIES.get(row.system), params=row.value, source=row.source)
        for row in published_rows()
        if row.metric == "max_trainable_model" and _HARDWARE.get(row.hardware) == (machine.name, machine.world_size)
    )
