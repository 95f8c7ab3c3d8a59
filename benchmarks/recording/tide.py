"""The tide of plain training on a card: the allocator's peak in each moment, without model data.

The moments are the executor's own (MomentClock). Gradients are dropped as soon as they are final, as in a run by a
plan, so that the figures can be compared with a capture's moment by moment. Nothing is updated: of the model data only
the parameters are on the card.
"""

from __future__ import annotations

import gzip
import importlib.util
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _keep import FILE_BYTES
from contenders.drawn import draw_weights
from torch import nn

from executor.capture import capture
from executor.devices.headroom import measure_room
from executor.devices.on_meta import parameters_on_meta
from executor.models import build, forward_loss, map_batch
from executor.moments.hooks import ModuleEvent, MomentClock
from pstar_sim.workload.workload import Workload

__all__ = ["Peaks", "record_tide", "tide_rows"]


class Peaks:
    """Peak of allocated bytes in every moment, by a clock's events.

    read, forget: give the allocator's peak since the last `forget`, and begin it anew.
    """

    def __init__(self, read: Any = None, forget: Any = None) -> None:
        self._read = read or torch.cuda.max_memory_allocated
        self._forget = forget or torch.cuda.reset_peak_memory_stats
        self.names: list[str] = []
        self.bytes: list[int] = []

    def __call__(self, event: ModuleEvent) -> None:
        self._close()
        self.names.append(event.name)

    def finish(self) -> None:
        self._close()

    def _close(self) -> None:
        if len(self.bytes) < len(self.names):
            self.bytes.append(self._read())
        self._forget()


@dataclass(frozen=True, kw_only=True)
class Tide:
    """Non-model bytes of moments.

    names, bytes: of every moment.
    reserved_bytes: at the end.
    snapshot: torch's own.
    """

    names: tuple[str, ...]
    bytes: tuple[int, ...]
    reserved_bytes: int
    snapshot: dict[str, Any]


def record_tide(model: nn.Module, batch: Any) -> Tide:
    """Returns the tide of one iteration, after one to warm up. Workspaces of cuBLAS stay allocated between products and
    are no part of it."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_drop)
    base_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    peaks = Peaks()
    forward_loss(model, batch).backward()
    base_bytes += measure_room(torch.device("cuda", torch.cuda.current_device())).workspace_bytes
    torch.cuda.memory._record_memory_history(context=None, stacks="python", max_entries=200_000)
    clock = MomentClock(model, peaks)
    clock.listen()
    try:
        forward_loss(model, batch).backward()
        clock.step()
        peaks.finish()
    finally:
        clock.close()
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    return Tide(
        names=tuple(peaks.names),
        bytes=tuple(value - base_bytes for value in peaks.bytes),
        reserved_bytes=torch.cuda.memory_reserved(),
        snapshot=snapshot,
    )


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


def tide_rows(workload: Workload, names: tuple[str, ...], measured: tuple[int, ...]) -> dict[str, Any]:
    """Returns predicted (capture) against measured bytes, and the worst moment. Where the moments differ, the first
    difference."""
    expected = [m.name for m in workload.moments]
    if list(names) != expected:
        at = next((i for i, (a, b) in enumerate(zip(names, expected)) if a != b), min(len(names), len(expected)))
        return {"moments_differ_at": at, "measured_name": names[at : at + 1], "predicted_name": expected[at : at + 1]}
    rows = [(m.peak_bytes, value) for m, value in zip(workload.moments, measured)]
    worst = max(range(len(rows)), key=lambda i: abs(rows[i][0] - rows[i][1]))
    return {
        "moments": len(rows),
        "predicted_peak_bytes": max(p for p, _ in rows),
        "measured_peak_bytes": max(m for _, m in rows),
        "worst": {
            "moment": worst,
            "name": names[worst],
            "predicted_bytes": rows[worst][0],
            "measured_bytes": rows[worst][1],
        },
        "predicted_bytes": [p for p, _ in rows],
        "measured_bytes": [m for _, m in rows],
    }


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Do a stage: {"model", "batch", "sequence", "checkpointing", "dtype", "folder", "slug", "gpu", "snapshot"} ->
    figures. Writes the trace with the measured tide (if pyarrow is installed); with "snapshot" also torch's snapshot of
    memory."""
    options = {"batch": job["batch"], "sequence": job["sequence"], "checkpointing": job["checkpointing"]}
    options["dtype"] = job["dtype"]
    workload = capture(job["model"], **options)
    with parameters_on_meta():
        built = build(job["model"], **options)
    model = draw_weights(built.module, seed=0, shared=True).to("cuda")  # on the card weights do not share memory
    tide = record_tide(model, map_batch(built.example_batch, lambda t: t.to("cuda")))
    figures = tide_rows(workload, tide.names, tide.bytes)
    figures |= {"measured_reserved_bytes": tide.reserved_bytes, "params": workload.params}
    folder = Path(job["folder"])
    figures["files"] = []
    if job["snapshot"]:
        snapshot = folder / f"{job['slug']}_snapshot.pickle.gz"
        snapshot.write_bytes(gzip.compress(pickle.dumps(tide.snapshot)))
        if snapshot.stat().st_size > FILE_BYTES:
            snapshot.unlink()
            figures["snapshot_skipped"] = f"more than {FILE_BYTES >> 20} MiB"
        else:
            figures["files"].append(snapshot.name)
    if "worst" in figures:
        if importlib.util.find_spec("pyarrow") is None:
            figures["trace_skipped"] = "pyarrow cannot be imported"
        else:
            from pstar_sim.workload.trace import save_trace

            moments = tuple(
                replace(m, peak_bytes=max(value, m.start_bytes, m.end_bytes, 0))
                for m, value in zip(workload.moments, tide.bytes)
            )
            trace = folder / f"{job['slug']}.parquet"
            save_trace(replace(workload, moments=moments, source="recorded", recorded_on=job["gpu"]), trace)
            figures["files"].append(trace.name)
    return figures
