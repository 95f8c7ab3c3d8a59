"""Seconds and host-memory traffic of a step on a machine: policies order by it, the simulator times by it.

Knows a workload, a machine and a layout; knows no schedule, so every figure here is that of a step running alone.
What happens when copies and CPU Adam want more host DRAM bandwidth than there is, is the simulator's matter.

[Note: which rate computes a moment]
1. A moment recorded on this very machine (`workload.recorded_on == machine.name`) lasts what was measured.
2. A GPU with calibrated values (`gpu.measured`): flops / F. F is an end-to-end effective rate (whole iterations over
   their flops), so normalisation, activation functions and kernel launches are already in it; adding a bytes term
   would count them twice. A moment without flops then costs nothing of its own.
3. A GPU with kernel rates (`gpu.launch_s` given, see catalog/efficiency.py): flops / rate + bytes / HBM bandwidth +
   launch_s. Large products and element-wise operators of a module run one after the other, so their times add. A
   moment without flops and bytes (the optimizer step's) costs nothing.
4. Otherwise the roofline: max(flops / rate, (bytes read + bytes written) / HBM bandwidth).

A dtype that the catalog does not give for the GPU (bf16 forced on a V100) is timed at the rate of the other 2-byte
dtype, and at the fp32 rate when that is missing too: the hardware would have to emulate it, so this flatters the
machine; whether the dtype may be asked for at all is decided above this module.
"""

from __future__ import annotations

from functools import cached_property

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import Layout
from pstar_sim.core.step import Kind, Step
from pstar_sim.errors import PlanError
from pstar_sim.workload.workload import Workload

__all__ = ["ADAM_TRAFFIC_BYTES_PER_PARAM", "CostModel", "flops_rate"]

ADAM_TRAFFIC_BYTES_PER_PARAM = 28
"""Host memory traffic of AdamW with fp32 states for which `Host.adam_params_per_s` is quoted."""

_FREE = frozenset({Kind.DROP, Kind.ALLOC, Kind.FREE})
_UPDATES = frozenset({Kind.CPU_ADAM, Kind.CPU_ADD, Kind.GPU_ADAM})
_ON_HOST = frozenset({Kind.FETCH, Kind.WRITEBACK, Kind.CPU_ADAM, Kind.CPU_ADD})
_FALLBACK = {"bf16": ("bf16", "fp16", "fp32"), "fp16": ("fp16", "bf16", "fp32"), "fp32": ("fp32",)}


def flops_rate(machine: Machine, dtype: str) -> float:
    """Effective matrix rate in flops/s for `dtype`, by the module's fallback. PlanError if there is none."""
    for name in _FALLBACK.get(dtype, (dtype,)):
        if name in machine.gpu.flops_per_s:
            return machine.gpu.flops_per_s[name]
    raise PlanError(f"gpu {machine.gpu.name!r} has no rate for {dtype!r}; it has {', '.join(machine.gpu.flops_per_s)}")


class CostModel:
    """Nominal seconds of every step of a plan for `workload` on `machine` with `layout` (of one rank, its whole batch).

    Raises PlanError for a dtype no rate is known for, and for a kind of step it cannot time.
    """

    def __init__(self, workload: Workload, machine: Machine, layout: Layout) -> None:
        self.workload = workload
        self.machine = machine
        self.layout = layout

    @cached_property
    def moments_s(self) -> tuple[float, ...]:
        """Seconds of each moment, by [Note: which rate computes a moment]."""
        w, gpu = self.workload, self.machine.gpu
        recorded = w.recorded_on is not None and w.recorded_on == self.machine.name
        rate = flops_rate(self.machine, w.dtype)
        out: list[float] = []
        for m in w.moments:
            if recorded and m.duration_s is not None:
                out.append(m.duration_s)
            elif gpu.measured:
                out.append(m.flops / rate)
            elif gpu.launch_s is not None:
                moved = m.bytes_read + m.bytes_written
                busy = m.flops or moved
                out.append(m.flops / rate + moved / gpu.hbm_bytes_per_s + gpu.launch_s if busy else 0.0)
            else:
                out.append(max(m.flops / rate, (m.bytes_read + m.bytes_written) / gpu.hbm_bytes_per_s))
        return tuple(out)

    @cached_property
    def params(self) -> tuple[int, ...]:
        """Trainable parameters of each chunk (padding left out); 0 for a frozen chunk."""
        return tuple(0 if c.frozen else sum(s.numel for s in c.slots) for c in self.layout.chunks)

    @cached_property
    def adam_bytes_per_s(self) -> float:
        """Host memory traffic per second of CPU Adam running alone."""
        return self.machine.host.adam_params_per_s * ADAM_TRAFFIC_BYTES_PER_PARAM

    def compute_s(self, moment: int) -> float:
        """Seconds of the moment's own work, waiting left out."""
        return self.moments_s[moment]

    def transfer_s(self, size_bytes: int, direction: str) -> float:
        """latency + bytes / rate over the link; direction "h2d" or "d2h". A copy of nothing takes no time."""
        link = self.machine.link
        if size_bytes == 0:
            return 0.0
        rate = {"h2d": link.h2d_bytes_per_s, "d2h": link.d2h_bytes_per_s}[direction]
        return link.latency_s + size_bytes / rate

    def cpu_adam_bytes(self, chunk: int) -> int:
        """Host memory traffic of one CPU update of the chunk: what `Step.bytes` of its cpu_adam should be."""
        return self.params[chunk] * self.workload.optimizer.dram_bytes_per_param

    def cpu_adam_s(self, chunk: int) -> float:
        """One CPU update of the chunk: params / rate, scaled by traffic for one that is not 28 B/param AdamW."""
        return self.cpu_adam_bytes(chunk) / self.adam_bytes_per_s

    def cpu_add_bytes(self, chunk: int) -> int:
        """Host memory traffic of grad32 += grad: read the gradient (working dtype), read and write 4 bytes."""
        return self.params[chunk] * 8 + self.params[chunk] * (4 if self.layout.chunks[chunk].dtype == "fp32" else 2)

    def cpu_add_s(self, chunk: int) -> float:
        """One accumulation on the host, at the memory rate that CPU Adam reaches."""
        return self.cpu_add_bytes(chunk) / self.adam_bytes_per_s

    def gpu_adam_bytes(self, chunk: int) -> int:
        """GPU memory traffic of one update on the GPU."""
        return self.params[chunk] * self.workload.optimizer.dram_bytes_per_param

    def gpu_adam_s(self, chunk: int) -> float:
        """One update on the GPU: its traffic over the HBM bandwidth (28 B/param for AdamW)."""
        return self.gpu_adam_bytes(chunk) / self.machine.gpu.hbm_bytes_per_s

    def seconds(self, step: Step) -> float:
        """Nominal seconds of one step running alone."""
        kind = step.kind
        if kind is Kind.COMPUTE:
            if step.moment is None:
                raise PlanError(f"step {step.id}: a compute step needs a moment")
            return self.moments_s[step.moment]
        if kind in _FREE:
            return 0.0
        if kind is Kind.FETCH:
            return self.transfer_s(step.bytes, "h2d")
        if kind is Kind.WRITEBACK:
            return self.transfer_s(step.bytes, "d2h")
        if kind not in _UPDATES:
            raise PlanError(f"step {step.id}: no cost is known for {kind} on one GPU")
        if step.chunk is None:
            raise PlanError(f"step {step.id}: {kind} needs a chunk")
        if kind is Kind.CPU_ADAM:
            return self.cpu_adam_s(step.chunk)
        return self.cpu_add_s(step.chunk) if kind is Kind.CPU_ADD else self.gpu_adam_s(step.chunk)

    def dram_bytes(self, step: Step) -> int:
        """Bytes that the step moves through host DRAM: a copy's bytes once, Adam's `step.bytes`, otherwise 0."""
        return step.bytes if step.kind in _ON_HOST else 0
