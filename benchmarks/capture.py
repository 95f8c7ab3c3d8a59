"""Capture of a 13B Llama against one iteration of torch's own MemTracker on the same fake model, in one run.

Each side runs in its own process (so that peak RSS is its own), in turns, `--repeats` times. Times are medians, in CPU
seconds as well as wall seconds, because machines are shared. MemTracker leaves gradients in their parameters, so the
capture that is compared with its peak does too (`keep_gradients=True`).

    python benchmarks/capture.py [--model llama-13b] [--batch 4] [--sequence 1024] [--repeats 3]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _results import write_result

SIDES = ("ours", "ours, gradients kept", "MemTracker")


def one_side(side: str, model: str, batch: int, sequence: int) -> dict[str, Any]:
    """Returns the figures of one measurement, in this process."""
    import torch

    from executor.capture import capture_module
    from executor.models import build, forward_loss

    torch.set_num_threads(1)
    start = _clocks()
    built = build(model, batch=batch, sequence=sequence, dtype="bf16", device="meta")
    built_at = _clocks()
    if side == "MemTracker":
        peak_bytes = _mem_tracker(built.module, built.example_batch, forward_loss)
        moments = None
    else:
        w = capture_module(
            built.module,
            built.example_batch,
            name=model,
            batch=batch,
            sequence=sequence,
            keep_gradients="kept" in side,
        )
        peak_bytes, moments = w.peak_non_model_bytes, len(w.moments)
    end = _clocks()
    return {
        "side": side,
        "peak_bytes": peak_bytes,
        "moments": moments,
        "wall_s": end[0] - built_at[0],
        "cpu_s": end[1] - built_at[1],
        "build_wall_s": built_at[0] - start[0],
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _mem_tracker(module: Any, example: Any, forward_loss: Any) -> int:
    """Returns the peak bytes beside parameters of one iteration under MemTracker, on fake CPU tensors as in a
    capture."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from executor.capture import fake_module
    from executor.models import unpacked_sequences

    with contextlib.ExitStack() as stack:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        inputs = stack.enter_context(fake_module(module, example, mode))
        stack.enter_context(unpacked_sequences())
        stack.enter_context(mode)
        tracker = MemTracker()
        tracker.track_external(module)
        with tracker:
            forward_loss(module, inputs).backward()
        peak = tracker.get_tracker_snapshot("peak")
    (categories,) = (row for device, row in peak.items() if torch.device(device).type == "cpu")
    total = next(size for name, size in categories.items() if str(name) == "Total")
    parameters = next(size for name, size in categories.items() if str(name).endswith(("Parameter", "PARAM")))
    return int(total - parameters)


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-13b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side:
        print(json.dumps(one_side(asked.side, asked.model, asked.batch, asked.sequence)))
        return
    rows: list[dict[str, Any]] = []
    setting = ["--model", asked.model, "--batch", str(asked.batch), "--sequence", str(asked.sequence)]
    for _ in range(asked.repeats):
        for side in SIDES:
            command = [sys.executable, __file__, *setting, "--side", side]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(rows[-1], flush=True)

    def median(side: str, field: str) -> float:
        return statistics.median(row[field] for row in rows if row["side"] == side)

    ours, kept, theirs = SIDES
    result = {
        "model": asked.model,
        "batch": asked.batch,
        "sequence": asked.sequence,
        "dtype": "bf16",
        "checkpointing": False,
        "peak_rss_bytes": median(ours, "peak_rss_bytes"),
        "wall_s": median(ours, "wall_s"),
        "cpu_s": median(ours, "cpu_s"),
        "mem_tracker_wall_s": median(theirs, "wall_s"),
        "mem_tracker_cpu_s": median(theirs, "cpu_s"),
        "mem_tracker_peak_rss_bytes": median(theirs, "peak_rss_bytes"),
        "times_as_fast_wall": median(theirs, "wall_s") / median(ours, "wall_s"),
        "times_as_fast_cpu": median(theirs, "cpu_s") / median(ours, "cpu_s"),
        "peak_bytes": median(ours, "peak_bytes"),
        "peak_bytes_gradients_kept": median(kept, "peak_bytes"),
        "mem_tracker_peak_bytes": median(theirs, "peak_bytes"),
        "peak_ratio": median(kept, "peak_bytes") / median(theirs, "peak_bytes"),
        "goals": {"peak_rss_bytes": 2e9, "times_as_fast": 5, "peak_ratio_within": 0.02},
        "rows": rows,
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "platform": platform.platform()},
    }  # fmt: skip
    write_result("capture", result)
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=1))


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
