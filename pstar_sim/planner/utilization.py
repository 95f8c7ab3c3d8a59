"""How much of a GPU's peak the model's own work takes: floating-point operations of forward and backward pass, without
what is recomputed, so that plans with and without checkpointing compare.
"""

from __future__ import annotations

from collections.abc import Sequence

from pstar_sim.catalog.loader import peak_flops_per_s
from pstar_sim.catalog.machine import Machine
from pstar_sim.workload.workload import Phase, Workload


def tflops_and_mfu(workloads: Sequence[Workload], iteration_s: float, *machines: Machine) -> tuple[float, float | None]:
    """Returns the mean of the ranks in TFLOPS of a GPU, and this over the mean peak of the GPUs' datasheets; None for
    the latter on a mixed machine, and for a GPU or a dtype that the catalog has no peak of.

    workloads: of an iteration, of ranks that count alike.
    machines: of stages, which have equal numbers of GPUs; or one.
    """
    known: dict[int, float] = {}
    for w in workloads:
        if id(w) not in known:
            known[id(w)] = sum(m.flops for m in w.moments if m.phase is not Phase.RECOMPUTE)
    flops_per_s = sum(known[id(w)] for w in workloads) / len(workloads) / iteration_s
    dtype = workloads[0].compute_dtype
    peaks = [0.0 if each.mixed else peak_flops_per_s(each.gpu.name, dtype) or 0.0 for each in machines]
    return flops_per_s / 1e12, flops_per_s * len(peaks) / sum(peaks) if all(peaks) else None
