"""Rates of the virtual accelerator here, in about two seconds with calibration's tools.

The accelerator computes on one thread and updates on another, so each is measured on one, in wall time: the run will
have other programs' load too.
"""

from __future__ import annotations

import platform
import time
from dataclasses import replace

import torch

from executor.calibration import compute, host
from executor.calibration.bench import Bench, Effort
from executor.calibration.measured_device import VirtualDevice
from pstar_sim.catalog.machine import Machine

__all__ = ["measure_virtual_machine", "throttled"]

_A_LOOK = Effort(point_s=0.08, rounds=3, least=2, most=7, memory_bytes=128 << 20)
_EXTENT = 512  # extent of a product


def throttled(machine: Machine, h2d_bytes_per_s: float, d2h_bytes_per_s: float) -> Machine:
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
    """`base` (budgets and name kept) with rates measured on all ranks at the same time, the same for each.

    h2d_bytes_per_s, d2h_bytes_per_s: caps.
    """
    bench, device = Bench(_A_LOOK), VirtualDevice(clock=time.perf_counter)
    copy_bytes_per_s = compute.memory_rate(device, bench) / 2  # the rate counts the bytes read and the bytes written
    flops = {dtype: rates[-1][1] for dtype, rates in compute.matmul_rates(device, bench, (_EXTENT,)).items()}
    ((_, adam_params_per_s),) = host.adam_rates(bench, [1], clock=time.perf_counter)
    origin = f"measured here: torch {torch.__version__}, {platform.machine()}, one thread each for compute and Adam"
    ranks = [
        replace(
            rank,
            gpu=replace(
                rank.gpu,
                flops_per_s=flops,
                hbm_bytes_per_s=2 * copy_bytes_per_s,
                launch_s=None,  # only products are measured
                products=None,
                measured=True,
                source=origin,
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
    each = adam_params_per_s * base.local_ranks  # the measured rate is that of one rank's part of the host
    its_host = replace(base.host, adam_params_per_s=each, measured=True, source=origin)
    return replace(base, ranks=tuple(ranks), host=its_host, framework=None)
