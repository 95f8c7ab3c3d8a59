"""Leaks: whether memory grows from step to step.

Resident memory of the process, bytes of payloads on the accelerator and bytes of host payloads are read after every
step. Growth is the slope of a straight line through means of blocks of steps (single readings are not independent of
each other), with its 95 % interval. The test passes if the interval contains 0, or lies below a bound at which growth
would take a million steps to matter.
"""

from __future__ import annotations

import gc
import math
import os
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from _interleavings import MICRO_BATCHES, job_of

from executor import AdamW, VirtualBackend, prepare
from pstar_sim.core.step import Place

__all__ = ["BOUND_BYTES", "Slope", "resident_bytes", "run_leaks", "slope_of"]

BOUND_BYTES = 256.0  # bytes per step: 256 MB in a million steps
BLOCKS = 25
# Student's t, 97.5 %, by degrees of freedom (n - 2).
_T = {3: 3.182, 8: 2.306, 18: 2.101, 23: 2.069}


@dataclass(frozen=True)
class Slope:
    """Bytes per step: the slope and its 95 % interval."""

    per_step: float
    low: float
    high: float

    @property
    def passes(self) -> bool:
        """Whether there is no growth that matters. Falling memory is no growth."""
        return self.low <= 0 or self.high < BOUND_BYTES


def slope_of(readings: Sequence[float], blocks: int = BLOCKS) -> Slope:
    """Returns the slope through the means of `blocks` equal blocks of readings, one reading per step."""
    size = len(readings) // blocks
    means = [sum(readings[n * size : (n + 1) * size]) / size for n in range(blocks)]
    middle, level = (blocks - 1) / 2, sum(means) / blocks
    spread = sum((n - middle) ** 2 for n in range(blocks))
    slope = sum((n - middle) * (mean - level) for n, mean in enumerate(means)) / spread
    left = sum((mean - level - slope * (n - middle)) ** 2 for n, mean in enumerate(means))
    error = math.sqrt(left / (blocks - 2) / spread)
    reach = _T[blocks - 2] * error
    return Slope(slope / size, (slope - reach) / size, (slope + reach) / size)


def resident_bytes() -> int:
    """Returns the resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_leaks(steps: int, *, policy: str = "tide", warm_up: int | None = None) -> dict[str, object]:
    """Train `steps` steps after a warm-up (by default a fifth of their number), with one thread per queue. Returns the
    slopes of the readings."""
    model, plan = job_of(policy)
    backend = VirtualBackend()
    model, optimizer = prepare(model, plan, AdamW(lr=1e-3, max_grad_norm=0.5), backend=backend)
    session = optimizer.session
    draw = torch.Generator().manual_seed(1)
    # Taken before the first step, so that the readings themselves do not grow.
    read = {name: array("d", bytes(8 * steps)) for name in ("resident", "accelerator", "host payloads")}
    first = steps // 5 if warm_up is None else warm_up
    begun_s = time.perf_counter()
    gc.collect()
    try:
        for step in range(first + steps):
            for _ in range(MICRO_BATCHES):
                loss = model(torch.randn(2, 24, generator=draw), torch.randn(2, 24, generator=draw)) / MICRO_BATCHES
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step >= first:
                with session.still():
                    held = session.arena.payload_bytes(Place.HOST)
                    on_gpu = session.plan.layout.payload_bytes
                    cut = sum(
                        on_gpu(r.chunk, r.list)
                        for r in session.arena.present
                        if r.place is Place.GPU and (r.place, r.chunk, r.list) in session.timetable.cut
                    )
                read["resident"][step - first] = resident_bytes()
                read["accelerator"][step - first] = cut
                read["host payloads"][step - first] = held
        deviations = session.deviations
        peak = session.arena.peak_gpu_payload_bytes
    finally:
        session.close(restore=False)
    figures: dict[str, object] = {
        "steps": steps, "policy": policy, "deviations": deviations, "peak_payload_bytes": peak,
        "budget_bytes": plan.gpu_budget_bytes, "bytes_left_after_close": backend.payload_bytes,
        "bound_bytes_per_step": BOUND_BYTES, "seconds": round(time.perf_counter() - begun_s, 1),
    }  # fmt: skip
    misses = 0 if backend.payload_bytes == 0 and deviations == 0 else 1
    for name, readings in read.items():
        slope = slope_of(readings)
        misses += not slope.passes
        figures[f"{name} bytes/step"] = round(slope.per_step, 2)
        figures[f"{name} 95% interval"] = [round(slope.low, 2), round(slope.high, 2)]
        figures[f"{name} first and last bytes"] = [readings[0], readings[-1]]
    return figures | {"misses": misses}
