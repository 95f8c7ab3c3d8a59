"""Bytes that crossed the link, from the memcpy events of a profile, independent of the program's own counts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

__all__ = ["bytes_by_direction", "profiled_bytes"]

_DIRECTIONS = {"HtoD": "h2d", "DtoH": "d2h"}


def bytes_by_direction(events: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Returns {"h2d", "d2h"} of a chrome trace's events: category gpu_memcpy, named "Memcpy HtoD (Pinned -> Device)"
    and the like, with the bytes among their arguments."""
    moved = {"h2d": 0, "d2h": 0}
    for event in events:
        if event.get("cat") != "gpu_memcpy":
            continue
        for word, direction in _DIRECTIONS.items():
            if f"Memcpy {word}" in str(event.get("name")):
                moved[direction] += int(event["args"]["bytes"])
    return moved


def profiled_bytes(iteration: Callable[[], object]) -> dict[str, int]:
    """Returns the bytes that one call of `iteration` copies over the link."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        iteration()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return bytes_by_direction(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])
