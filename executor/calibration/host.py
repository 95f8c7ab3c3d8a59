"""The host: CPU Adam by threads as the executor runs it, and DRAM bandwidth."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import cycle

import torch

from executor.calibration.bench import Bench
from executor.calibration.measured_device import torch_threads
from executor.devices.rules import RULES
from executor.devices.updates import UpdateRange, update

__all__ = ["adam_rates", "adam_update", "dram_rate", "thread_counts"]

_CHUNK_PARAMS = 2 << 20
_ADAM_BYTES = 20  # bytes per parameter in fp32: param32, momentum, variance, the working copy with the gradient in it
_SETTINGS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
_DRAM_BYTES = 64 << 20


def thread_counts(cores: int) -> list[int]:
    """Returns 1, 2, 4, ... and `cores`."""
    counts = [1]
    while counts[-1] * 2 < cores:
        counts.append(counts[-1] * 2)
    return counts if cores == 1 else [*counts, cores]


def adam_update(memory_bytes: int) -> tuple[int, Callable[[], None]]:
    """Returns (parameters of one chunk, an action). It updates the next of several fp32 chunks, as `Contents.adam`
    does: the gradient in the working list is scaled (clipping), and the list is rewritten at the end."""
    count = max(1, memory_bytes // (_CHUNK_PARAMS * _ADAM_BYTES))
    chunks = cycle([[torch.full((_CHUNK_PARAMS,), 1e-3) for _ in range(4)] for _ in range(count)])
    scale = torch.ones(())
    runs = [UpdateRange(0, _CHUNK_PARAMS, 1)]

    def action() -> None:
        param32, param, momentum, variance = next(chunks)
        moments, rule = (momentum, variance), RULES["adamw"]
        update(rule, runs, param=param32, grad=param, moments=moments, settings=_SETTINGS, scale=scale)
        param.copy_(param32)

    return _CHUNK_PARAMS, action


def adam_rates(
    bench: Bench,
    counts: list[int],
    *,
    clock: Callable[[], float] = time.thread_time,
    wall_clock: Callable[[], float] = time.perf_counter,
) -> tuple[tuple[int, float], ...]:
    """Returns ((threads, parameters/s), ...), ascending. For one thread the rate is by the median of its CPU seconds;
    for several it is by the wall seconds of the fastest update: if another program delays one thread, all wait many
    times as long."""
    params, update = adam_update(bench.effort.memory_bytes)

    def with_threads(count: int) -> Callable[[], None]:
        def action() -> None:
            torch.set_num_threads(count)
            update()

        return action

    def timed_by(read: Callable[[], float]) -> Callable[[Callable[[], object]], float]:
        def timed(action: Callable[[], object]) -> float:
            start_s = read()
            action()
            return read() - start_s

        return timed

    several = [count for count in counts if count > 1]
    with torch_threads(1):
        seconds = bench.medians({count: with_threads(count) for count in counts if count == 1}, timed_by(clock))
        seconds |= bench.medians({count: with_threads(count) for count in several}, timed_by(wall_clock), reduce=min)
    return tuple((count, params / s) for count, s in seconds.items())


def dram_rate(bench: Bench, counts: list[int], *, clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns the bytes/s that copies in host memory read and write together, at the best number of threads."""
    size = min(_DRAM_BYTES, bench.effort.memory_bytes // (2 * max(counts)))
    buffers = [(torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)) for _ in range(max(counts))]
    best = 0.0
    for count in counts:
        repeats = max(2, round(bench.effort.window_s * 4e9 / size))  # about one window at 8 GB/s per thread
        rates = [_copy_together(buffers[:count], repeats, clock) for _ in range(bench.effort.rounds)]
        best = max(best, *rates)
    return best


def _copy_together(buffers: list[tuple[torch.Tensor, torch.Tensor]], repeats: int, clock: Callable[[], float]) -> float:
    """Returns the bytes/s of all threads together, from the last start to the first end."""
    begun: list[float] = []
    ended: list[float] = []
    gate = threading.Barrier(len(buffers))

    def work(source: torch.Tensor, target: torch.Tensor) -> None:
        torch.set_num_threads(1)
        target.copy_(source)
        gate.wait()
        begun.append(clock())
        for _ in range(repeats):
            target.copy_(source)
        ended.append(clock())

    threads = [threading.Thread(target=work, args=pair, name="calibrate-dram") for pair in buffers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    moved = sum(2 * source.numel() * repeats for source, _ in buffers)
    return moved / (max(ended) - min(begun))
