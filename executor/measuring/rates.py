"""Rates of the virtual accelerator on this machine, measured: copies, CPU Adam, matrix products, memory.

What a plan for a machine that was not calibrated needs so that predicted seconds mean something here. Takes about two
seconds; `executor.calibrate` takes its time and finds much more. The virtual accelerator computes on one thread and
updates on one other, so both are measured on one thread.
"""

from __future__ import annotations

import platform
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from pstar_sim.catalog.machine import Machine

__all__ = ["measure_virtual_machine", "throttled"]

_COPY_BYTES = 64 << 20
_ADAM_PARAMS = 8 << 20
_MATMUL = 512


def _median_s(action: Callable[[], object], *, repeats: int = 7) -> float:
    """Median seconds of one call, after one that warms caches and pages."""
    action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _adam_s() -> float:
    """Seconds of one fused AdamW over `_ADAM_PARAMS` fp32 parameters on one thread."""
    flat = [torch.zeros(_ADAM_PARAMS) for _ in range(4)]
    flat[1].fill_(1e-3)
    step = torch.ones(())
    taken: list[float] = []

    def update() -> None:
        torch._fused_adamw_(
            [flat[0]], [flat[1]], [flat[2]], [flat[3]], [], [step],
            lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    def on_one_thread() -> None:
        torch.set_num_threads(1)
        taken.append(_median_s(update))

    worker = threading.Thread(target=on_one_thread, name="measure-adam")
    worker.start()
    worker.join()
    return taken[0]


def _flops_per_s(dtype: torch.dtype) -> float:
    a = torch.randn(_MATMUL, _MATMUL).to(dtype)
    return 2 * _MATMUL**3 / _median_s(lambda: a @ a, repeats=5)


def throttled(machine: Machine, h2d_bytes_per_s: float, d2h_bytes_per_s: float) -> Machine:
    """The machine over links of at most these rates."""
    links = [
        replace(
            rank.link,
            h2d_bytes_per_s=min(rank.link.h2d_bytes_per_s, h2d_bytes_per_s),
            d2h_bytes_per_s=min(rank.link.d2h_bytes_per_s, d2h_bytes_per_s),
        )
        for rank in machine.ranks
    ]
    return replace(machine, ranks=tuple(replace(rank, link=link) for rank, link in zip(machine.ranks, links)))


def measure_virtual_machine(
    base: Machine, *, h2d_bytes_per_s: float | None = None, d2h_bytes_per_s: float | None = None
) -> Machine:
    """`base` (its budgets and name kept) with this machine's measured rates, the same for every rank: where there
    are several, each measures at the same time.

    A throttle (bytes per second, per direction) caps the copy rate measured; None leaves the copies unthrottled.
    """
    source, target = torch.ones(_COPY_BYTES, dtype=torch.uint8), torch.empty(_COPY_BYTES, dtype=torch.uint8)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        copy_bytes_per_s = _COPY_BYTES / _median_s(lambda: target.copy_(source))
        flops = {"fp32": _flops_per_s(torch.float32), "bf16": _flops_per_s(torch.bfloat16)}
    finally:
        torch.set_num_threads(before)
    adam_params_per_s = _ADAM_PARAMS / _adam_s()
    origin = f"measured here: torch {torch.__version__}, {platform.machine()}, one thread each for compute and Adam"
    ranks = [
        replace(
            rank,
            gpu=replace(
                rank.gpu, flops_per_s=flops, hbm_bytes_per_s=2 * copy_bytes_per_s, measured=True, source=origin
            ),
            link=replace(
                rank.link,
                h2d_bytes_per_s=min(copy_bytes_per_s, h2d_bytes_per_s or copy_bytes_per_s),
                d2h_bytes_per_s=min(copy_bytes_per_s, d2h_bytes_per_s or copy_bytes_per_s),
                latency_s=0.0,
                duplex=True,
                measured=True,
                source=origin,
            ),
        )
        for rank in base.ranks
    ]
    each = adam_params_per_s * base.local_ranks  # this was one rank's part of the host
    host = replace(base.host, adam_params_per_s=each, measured=True, source=origin)
    return replace(base, ranks=tuple(ranks), host=host)
