"""The host: CPU Adam by threads, other optimizers' updates beside it, and DRAM bandwidth."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from itertools import cycle

import torch

from executor.calibration.bench import Bench
from executor.calibration.measured_device import torch_threads
from executor.devices.rules import RULES
from executor.devices.updates import Span, UpdateRange, update
from executor.memory.slots import COLUMN, ROW, SCALE, list_of
from pstar_sim.workload.optimizers import OPTIMIZERS, States

_SHAPE = (2048, 1024)
_CHUNK_PARAMS = 2048 * 1024
_ADAM_BYTES = 20  # bytes per parameter in fp32: param32, momentum, variance, the working copy with the gradient in it
_SETTINGS = {
    "lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "dampening": 0.0,
    "nesterov": False, "clip_threshold": 1.0, "decay_rate": -0.8, "scale_parameter": False, "relative_step": False,
    "warmup_init": False,
}  # fmt: skip
_DRAM_BYTES = 64 << 20


def thread_counts(cores: int) -> list[int]:
    """1, 2, 4, ... and `cores`."""
    counts = [1]
    while counts[-1] * 2 < cores:
        counts.append(counts[-1] * 2)
    return counts if cores == 1 else [*counts, cores]


def adam_update(memory_bytes: int, states: States | None = None) -> tuple[int, Callable[[], None]]:
    """(parameters of a chunk, an action that updates the next of several fp32 chunks as `Contents.adam` does).

    states: of the chunks; None: AdamW's.
    """
    states = states or OPTIMIZERS["adamw"].all_states[0]
    rule, block = RULES[states.name], states.block
    count = max(1, memory_bytes // (_CHUNK_PARAMS * _ADAM_BYTES))
    lengths = {SCALE: _CHUNK_PARAMS // block, ROW: _SHAPE[0], COLUMN: _SHAPE[1]}

    def state(field: str) -> torch.Tensor:
        numel = next((numel for end, numel in lengths.items() if field.endswith(end)), _CHUNK_PARAMS)
        codes = numel == _CHUNK_PARAMS and any(row.per_block for row in states.lists if row.name == list_of(field))
        return torch.full((numel,), 100, dtype=torch.uint8) if codes else torch.full((numel,), 1e-3)

    def span(field: str) -> Span:
        if field.endswith((ROW, COLUMN)):
            return lambda start, stop: (0, lengths[field[field.rindex(".") :]])
        unit = block if field.endswith(SCALE) else 1
        return lambda start, stop: (start // unit, -(-stop // unit))

    fields = tuple(rule.states.values())
    lists = [
        [*(torch.full((_CHUNK_PARAMS,), 1e-3) for _ in range(2)), *(state(each) for each in fields)]
        for _ in range(count)
    ]
    chunks, spans, scale = cycle(lists), [span(each) for each in fields], torch.ones(())
    settings = {**_SETTINGS, "momentum": 0.9 if fields else 0.0, **({"eps": (1e-30, 1e-3)} if rule.room else {})}
    runs = [UpdateRange(0, _CHUNK_PARAMS, 1, _SHAPE if rule.room else ())]

    def action() -> None:
        param32, param, *moments = next(chunks)
        update(rule, runs, param=param32, grad=param, moments=moments, spans=spans, settings=settings, scale=scale)
        param.copy_(param32)

    return _CHUNK_PARAMS, action


def update_shares(bench: Bench, threads: int, *, clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """Rule -> parameters/s over AdamW's, for rules with a rate of their own whose package is installed."""
    known = {states.name: states for spec in OPTIMIZERS.values() for states in spec.all_states}
    rules = [
        states
        for name, states in known.items()
        if name == "adamw"
        or ((states.cpu_share or states.cpu_core_params_per_s) and (not RULES[name].needs or RULES[name].has_plain))
    ]

    def timed(action: Callable[[], object]) -> float:
        start_s = clock()
        action()
        return clock() - start_s

    with torch_threads(threads):
        actions = {states.name: adam_update(bench.effort.memory_bytes // 8, states)[1] for states in rules}
        seconds = bench.medians(actions, timed, longest_s=math.inf)  # a first call may import a package
    return {name: seconds["adamw"] / s for name, s in seconds.items() if name != "adamw"}


def adam_rates(
    bench: Bench,
    counts: list[int],
    *,
    clock: Callable[[], float] = time.thread_time,
    wall_clock: Callable[[], float] = time.perf_counter,
) -> tuple[tuple[int, float], ...]:
    """((threads, parameters/s), ...), ascending. For one thread by its median CPU seconds, for several by the fastest
    update's wall seconds: if another program delays one thread, all wait many times as long."""
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
    """Bytes/s of copies in host memory, read and written together, at the best number of threads."""
    size = min(_DRAM_BYTES, bench.effort.memory_bytes // (2 * max(counts)))
    buffers = [(torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)) for _ in range(max(counts))]
    best = 0.0
    for count in counts:
        repeats = max(2, round(bench.effort.window_s * 4e9 / size))  # about one window at 8 GB/s per thread
        rates = [_copy_together(buffers[:count], repeats, clock) for _ in range(bench.effort.rounds)]
        best = max(best, *rates)
    return best


def _copy_together(buffers: list[tuple[torch.Tensor, torch.Tensor]], repeats: int, clock: Callable[[], float]) -> float:
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
