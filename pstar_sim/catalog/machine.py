"""Machine, Rank, Gpu, Link, Host: the hardware a plan is made for, as plain values.

What the fields mean is here; where the numbers come from is in the TOML files and `loader.py`. Knows no
workload and no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Gpu", "Host", "Link", "Machine", "Rank"]


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One accelerator.

    memory_bytes: what the card has. usable_bytes: what a process can take of it. context_bytes: taken by the
    driver context, workspaces and fragmentation before the first tensor; a plan's budget is usable - context.
    flops_per_s: effective matrix rate by dtype ("fp32", "fp16", "bf16"); a dtype that is missing is not supported.
    """

    name: str
    memory_bytes: int
    usable_bytes: int
    context_bytes: int
    hbm_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    measured: bool
    source: str

    @property
    def budget_bytes(self) -> int:
        return self.usable_bytes - self.context_bytes


@dataclass(frozen=True, kw_only=True)
class Link:
    """Host to GPU. A transfer lasts latency_s + bytes / rate; full duplex unless duplex is False."""

    name: str
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    latency_s: float
    duplex: bool
    measured: bool
    source: str


@dataclass(frozen=True, kw_only=True)
class Host:
    """Host memory and its CPU. adam_params_per_s: fused AdamW over fp32 states, all cores given to it.

    dram_bytes_per_s is shared by DMA (each transfer's bytes once) and CPU Adam (`OptimizerSpec.dram_bytes_per_param`).
    reserved_bytes: left for the operating system and the training process itself; a plan's budget is memory - reserved.
    """

    name: str
    memory_bytes: int
    reserved_bytes: int
    dram_bytes_per_s: float
    cores: int
    adam_params_per_s: float
    measured: bool
    source: str

    @property
    def budget_bytes(self) -> int:
        return self.memory_bytes - self.reserved_bytes


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One worker: its GPU, its link to the host, its share of the batch."""

    gpu: Gpu
    link: Link
    batch_share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A host and its ranks (one rank for a single GPU). confidence: "calibrated" or "datasheet" (the weakest part)."""

    name: str
    ranks: tuple[Rank, ...]
    host: Host
    notes: str = ""
    price_usd_per_hour: float | None = None
    extra: Mapping[str, float] = field(default_factory=dict)

    @property
    def gpu(self) -> Gpu:
        return self.ranks[0].gpu

    @property
    def link(self) -> Link:
        return self.ranks[0].link

    @property
    def gpu_budget_bytes(self) -> int:
        return self.gpu.budget_bytes

    @property
    def host_budget_bytes(self) -> int:
        return self.host.budget_bytes

    @property
    def confidence(self) -> str:
        parts = [self.host.measured, *(r.gpu.measured and r.link.measured for r in self.ranks)]
        return "calibrated" if all(parts) else "datasheet"
