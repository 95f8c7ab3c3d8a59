"""A plan run on a card, with the allocator's memory of every moment beside the plan's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from contenders.drawn import draw_weights
from contenders.memory import NOT_MEASURABLE, forget_peak, host_bytes, less, peak_host_bytes

from executor import AdamW, prepare
from executor.capture import capture
from executor.devices.on_meta import parameters_on_meta
from executor.memory.byte_log import ByteChange
from executor.models import build, map_batch
from executor.moments.hooks import MomentClock
from executor.running.data import batches_like, open_data
from executor.training import train_step
from pstar_sim.catalog.loader import load_machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Place
from pstar_sim.policy.registry import find_policy
from pstar_sim.sim.play import play
from recording.memcpy import profiled_bytes
from recording.tide import Peaks

__all__ = ["payload_peaks", "run", "worst_row"]

WARM_UP, TIMED = 2, 3


def payload_peaks(begun_bytes: int, changes: Iterable[ByteChange], moments: int) -> list[int]:
    """Returns the most payload bytes on the gpu in each moment, from the bytes at the iteration's begin and the changes
    since. Each change names its moment. A moment without a change holds the bytes that the moment before left."""
    held, at, peaks = begun_bytes, 0, [begun_bytes] * moments
    for change in changes:
        if change.place is not Place.GPU or change.category == "non-model":
            continue
        moment = max(change.mark[1], 0)
        if moment < at:  # the border: the next iteration's copies begin
            moment = moments - 1
        for passed in range(at + 1, moment + 1):
            peaks[passed] = held
        at = max(at, moment)
        held += change.change
        peaks[at] = max(peaks[at], held)
    for passed in range(at + 1, moments):
        peaks[passed] = held
    return peaks


def worst_row(names: Sequence[str], predicted: Sequence[int], measured: Sequence[int]) -> dict[str, Any]:
    """Returns the moment whose measured bytes are furthest from the predicted bytes."""
    worst = max(range(len(names)), key=lambda i: abs(predicted[i] - measured[i]))
    return {
        "moment": worst,
        "name": names[worst],
        "predicted_bytes": predicted[worst],
        "measured_bytes": measured[worst],
    }


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Do a stage: {"model", "batch", "sequence", "checkpointing", "dtype", "policy", "machine", "gpu_memory_bytes",
    "device"}. A stage that only has to train may also have "host_memory_bytes" and "steps" (to warm up, timed). On the
    virtual accelerator, figures that need a card (its allocator, its profiler) are None. Raises DoesNotFit where there
    is no plan within the caps."""
    on_card = job["device"] == "cuda"
    options = {"batch": job["batch"], "sequence": job["sequence"], "checkpointing": job["checkpointing"]}
    options["dtype"] = job["dtype"]
    workload = capture(job["model"], **options)
    host_memory = job.get("host_memory_bytes")
    machine = load_machine(job["machine"], gpu_memory=job["gpu_memory_bytes"], host_memory=host_memory)
    warm_up, timed = job.get("steps", (WARM_UP, TIMED))
    plan = find_policy(job["policy"])(workload, machine, Settings(update="eager", clip=False))
    iteration_s = play(plan).iteration_s
    print(f"planned: {len(plan.layout.chunks)} chunks, {_modes(plan)}, {iteration_s:.3f} s an iteration", flush=True)
    baseline_bytes, begun_s = host_bytes(), time.perf_counter()
    forgotten = forget_peak()
    with parameters_on_meta():
        built = build(job["model"], **options)
    draw_weights(built.module, seed=0, shared=True)
    batches = batches_like(built.example_batch, open_data(None), vocabulary=built.vocabulary, seed=0)
    there = (map_batch(batch, lambda t: t.to("cuda" if on_card else "cpu")) for batch in batches)
    where: dict[str, Any] = {"device": "virtual"}
    if on_card:
        where = {"device": "cuda", "gpu_memory": job["gpu_memory_bytes"]}
    model, optimizer = prepare(built.module, plan, AdamW(lr=1e-4, eager=True), **where)
    session = optimizer.session
    print(f"prepared in {time.perf_counter() - begun_s:.1f} s", flush=True)

    def step() -> None:
        train_step(model, optimizer, there, workload.micro_batches)

    try:
        start_peak_bytes = less(peak_host_bytes(), baseline_bytes) if forgotten else None
        for _ in range(warm_up):
            print(f"warm-up step: {_timed(step):.3f} s", flush=True)
        forgotten = forget_peak()
        exchanges = getattr(session.backend, "exchanges", None)
        times_s = [_timed(step) for _ in range(timed)]
        print(f"steps: {', '.join(f'{s:.3f}' for s in times_s)} s", flush=True)
        settle(session)
        exchanged = None if exchanges is None else (session.backend.exchanges - exchanges) / timed
        moved = profiled_bytes(lambda: whole(session, step)) if on_card and "steps" not in job else None
        figures = _moments(session, plan, model, step) if on_card and "steps" not in job else {}
        measured = {"steady": less(peak_host_bytes(), baseline_bytes) if forgotten else None, "start": start_peak_bytes}
        return {
            **figures,
            "plan": {"policy": plan.policy, "chunks": len(plan.layout.chunks), "modes": _modes(plan)},
            "deviations": list(session.deviation_log)[:5],
            "iteration_s": {"predicted": iteration_s, "measured": statistics.median(times_s)},
            "exchanges_per_step": exchanged,
            "moved_bytes": {"plan": plan.moved_bytes, "profiler": moved},
            "gpu_budget_bytes": plan.gpu_budget_bytes,
            "max_memory_allocated_bytes": torch.cuda.max_memory_allocated() if on_card else None,
            "max_memory_reserved_bytes": torch.cuda.max_memory_reserved() if on_card else None,
            "host_bytes": {
                "predicted": sum(session.arena.slabs.room.slab_bytes),
                **{f"measured_{when}": NOT_MEASURABLE if size is None else size for when, size in measured.items()},
            },
        }
    finally:
        session.close(restore=False)


def settle(session: Any) -> None:
    """Return when every update of the finished iterations is done. The queues continue."""
    with session.still():
        pass


def whole(session: Any, step: Callable[[], None]) -> None:
    """Run one iteration and the work that runs on after it."""
    step()
    settle(session)


def _timed(step: Callable[[], None]) -> float:
    _synchronize()
    begun_s = time.perf_counter()
    step()
    _synchronize()
    return time.perf_counter() - begun_s


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _moments(session: Any, plan: Plan, model: Any, step: Callable[[], None]) -> dict[str, Any]:
    """Run one iteration. Returns the allocator's peak of every moment, beside payload (counted by the arena) and
    tide."""
    settle(session)
    most_allocated, most_reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    begun, log_at = session.arena.payload_bytes(Place.GPU), len(session.arena.log.changes)
    peaks = Peaks()
    clock = MomentClock(model, peaks)
    clock.listen()
    try:
        step()
        clock.step()
        peaks.finish()
    finally:
        clock.close()
    names = [m.name for m in plan.workload.moments]
    # optimizer.step() ran inside the last backward moment of this clock: its own "step" comes after it.
    if peaks.names != names:
        return {"moments_differ": {"measured": len(peaks.names), "predicted": len(names)}}
    payload = payload_peaks(begun, session.arena.log.changes[log_at:], len(names))
    predicted = [held + m.peak_bytes for held, m in zip(payload, plan.workload.moments)]
    return {
        "predicted_bytes": predicted,
        "measured_bytes": peaks.bytes,
        "worst": worst_row(names, predicted, peaks.bytes),
        "peak_allocated_bytes": {"predicted": max(predicted), "measured": max(most_allocated, *peaks.bytes)},
        "peak_reserved_bytes": {"plan": plan.gpu_budget_bytes, "measured": most_reserved},
    }


def _modes(plan: Plan) -> dict[str, int]:
    return {mode: plan.modes.count(mode) for mode in sorted(set(plan.modes))}
