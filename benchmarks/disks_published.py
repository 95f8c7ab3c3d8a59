"""Predicted beside published: layer-major training with states on disks against ZeRO-Infinity, on one and four A100.

Published are ratios alone (GreedySnake's abstract: 65B on one and on four A100, 175B on one, with solid-state disks).
The batch, the host and the disks are not known here, so a row is given for each of several hosts and numbers of
micro-batches. `zero_infinity` has states and gradients on disks; parameters too where the host has no room for them.
`l2l` is the layer-major order: parameters and gradients cross the link once an iteration, and updates go on beside the
passes, into the next forward. `tide` keeps the usual order. Nothing is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from _help import only_help
from _results import write_result

import pstar_sim as ps
from pstar_sim.catalog.loader import load_machine
from pstar_sim.catalog.machine import Nvme
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.errors import CannotPlan, DoesNotFit
from pstar_sim.planner.compare import play_plan
from pstar_sim.policy.registry import find_policy

DISKS = Nvme(
    name="4 x PCIe 4.0",
    memory_bytes=8 * 10**12,
    read_bytes_per_s=10e9,
    write_bytes_per_s=5e9,
    latency_s=1e-4,
    measured=False,
    source="rates that DeepNVMe published for four drives",
)
SYSTEMS = {
    "zero_infinity": ("zero_infinity:params=cpu,states=nvme", "zero_infinity:params=nvme,states=nvme"),
    "l2l": ("l2l:stash=host", "l2l"),
    "tide": ("tide",),
}
BATCH, SEQUENCE = 4, 2048  # of a micro-batch, on each GPU


@dataclass(frozen=True)
class Claim:
    """ratio: published, of ZeRO-Infinity's seconds to the layer-major order's."""

    model: str
    gpus: int
    ratio: float
    hosts: tuple[str, ...]


CLAIMS = (
    Claim("llama-65b", 1, 1.96, ("180GB", "512GB")),
    Claim("llama-65b", 4, 1.93, ("180GB", "512GB")),
    Claim("gpt-175b", 1, 2.53, ("512GB", "1TB", "2TB")),
)
MICRO_BATCHES = (1, 4)


def planned(claim: Claim, host: str, micro_batches: int, system: str) -> tuple[float, Plan] | None:
    """The fastest of the system's ways that fit, and its seconds; None if none does."""
    machine = replace(load_machine("a100-80", gpus=claim.gpus, host_memory=host), nvme=DISKS)
    workload = ps.preset(claim.model, batch=BATCH, seq=SEQUENCE, dtype="bf16", micro_batches=micro_batches)
    plans: list[tuple[float, Plan]] = []
    for policy in SYSTEMS[system]:
        try:
            plan = find_policy(policy)(workload, machine, Settings(clip=False))
        except (CannotPlan, DoesNotFit):
            continue
        plans.append((play_plan(plan).iteration_s, plan))
    return min(plans, key=lambda row: row[0], default=None)


def row_of(claim: Claim, host: str, micro_batches: int) -> dict[str, object]:
    row: dict[str, object] = {
        "model": claim.model, "gpus": claim.gpus, "host": host, "micro_batches": micro_batches,
        "published_ratio": claim.ratio,
    }  # fmt: skip
    for system in SYSTEMS:
        best = planned(claim, host, micro_batches, system)
        row[system] = None
        if best is not None:
            seconds, plan = best
            moved = plan.moved_bytes
            row[system] = {
                "policy": plan.policy,
                "seconds": seconds,
                "disk_bytes": sum(moved.get(lane, 0) for lane in ("nvme_read", "nvme_write")) * claim.gpus,
                "gpu_bytes": moved["h2d"] * claim.gpus,
            }
    print(row, flush=True)
    return row


def main() -> None:
    only_help(__doc__)
    rows = [row_of(claim, host, count) for claim in CLAIMS for host in claim.hosts for count in MICRO_BATCHES]
    write_result(
        "disks_published",
        {
            "rows": rows, "batch": BATCH, "sequence": SEQUENCE,
            "read_bytes_per_s": DISKS.read_bytes_per_s, "write_bytes_per_s": DISKS.write_bytes_per_s,
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
