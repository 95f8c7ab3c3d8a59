"""The card's own rates, as a machine file for the plans of the other stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["run"]


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Do a stage: {"path"} -> the measured rates, and the reasons for rates that could not be measured."""
    from executor.calibrate import calibrate

    machine, found = calibrate(Path(job["path"]), device="cuda", quick=True)
    return {
        "file": Path(job["path"]).name,
        "gpu": machine.gpu.name,
        "flops_per_s": dict(machine.gpu.flops_per_s),
        "h2d_bytes_per_s": machine.link.h2d_bytes_per_s,
        "d2h_bytes_per_s": machine.link.d2h_bytes_per_s,
        "adam_params_per_s": machine.host.adam_params_per_s,
        "dram_bytes_per_s": machine.host.dram_bytes_per_s,
        "skipped": list(found.skipped),
        "taken_by_others": found.taken_by_others,
    }
