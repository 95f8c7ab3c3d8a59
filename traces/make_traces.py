"""Makes the shipped traces: captures under fake tensors, no weights and no GPU; about two minutes in all.

    python traces/make_traces.py [NAME...]

One file a model, with variants that `load_trace(file, batch=..., checkpointing=...)` tells apart.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from executor.capture import capture
from pstar_sim.units import format_bytes
from pstar_sim.workload.trace import save_trace

HERE = Path(__file__).parent

# file -> preset, sequence, (batch, checkpointing) of each variant. bf16, flash attention, one micro-batch (a loader
# repeats it). Images: the sequence follows from the image.
TRACES: dict[str, tuple[str, int, tuple[tuple[int, bool], ...]]] = {
    "gpt2": ("gpt2", 1024, ((4, False), (4, True), (8, False), (8, True))),
    "gpt2-xl": ("gpt2-xl", 1024, ((4, False), (4, True), (8, False), (8, True))),
    "llama-7b": ("llama-7b", 2048, ((1, False), (1, True), (4, False), (4, True))),
    "llama-13b": ("llama-13b", 1024, ((4, False), (4, True), (8, False), (8, True))),
    "bert-large": ("bert-large", 512, ((8, False), (8, True), (32, False), (32, True))),
    "vit-l-16": ("vit-l-16", 197, ((32, False), (32, True), (128, False), (128, True))),
}


def main(names: list[str]) -> None:
    for name in names or list(TRACES):
        preset, sequence, variants = TRACES[name]
        start_s = time.perf_counter()
        common: dict[str, Any] = {"sequence": sequence, "dtype": "bf16", "attention": "flash"}
        workloads = [capture(preset, batch=batch, checkpointing=on, **common) for batch, on in variants]
        path = HERE / f"{name}.parquet"
        save_trace(workloads, path)
        print(f"{path.name}: {path.stat().st_size:,} bytes, {time.perf_counter() - start_s:.1f} s")
        for w in workloads:
            print(
                f"  batch {w.batch} x {w.sequence}, checkpointing {'on' if w.checkpointing else 'off'}: "
                f"{len(w.moments)} moments, {w.flops / 1e12:.1f} Tflop, "
                f"peak non-model {format_bytes(w.peak_non_model_bytes)}"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
