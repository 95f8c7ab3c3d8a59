"""Captured peaks of memory against recorded ones: models whose iteration runs here, on the virtual accelerator.

A capture runs an iteration on fake tensors; a recording runs it for real and counts the storages that live. Both give
the most bytes at once beside parameters and optimizer states. Both count storages with the same code: what it leaves
out, both leave out. (torch's MemTracker counts independently: benchmarks/capture.py.) A peak that a capture
underestimates is a plan that runs out of memory, and a published run that only seems to fit. Models of the catalog have
random weights; the small GPT-2 has the kernels of --kernels eager, fused and megatron
(tests/executor/moments/test_kernel_flavours.py). The third figure is the peak of the model's preset, which needs no
torch. The script ends with 1 if a captured peak is more than 3 % off.

    python benchmarks/captured_peaks.py    # writes benchmarks/results/captured_peaks.json
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from _help import only_help
from _results import write_result

import pstar_sim as ps
from executor.capture import capture
from executor.models import build
from executor.recording.record import record
from pstar_sim.catalog.loader import load_machine
from pstar_sim.workload.workload import Workload

GOAL = 0.03
MODELS = (
    ("gpt2", 2, 256, "bf16"),
    ("gpt2", 4, 512, "fp32"),
    ("gpt2-medium", 2, 256, "bf16"),
    ("qwen2.5-0.5b", 1, 256, "bf16"),
    ("bert-base", 4, 128, "bf16"),
    ("vit-b-16", 4, 197, "bf16"),
)
"""Model, sequences, tokens of each, dtype."""
FLAVOURS = Path(__file__).parent.parent / "tests" / "executor" / "moments" / "test_kernel_flavours.py"


def row(name: str, kernels: str, captured: Workload, recorded: Workload, preset: Workload | None) -> dict[str, object]:
    if recorded.source != "recorded" or captured.source == "recorded":
        raise ValueError(f"{name}: the peaks of a {captured.source} and of a {recorded.source} iteration were compared")
    peaks = captured.peak_non_model_bytes, recorded.peak_non_model_bytes
    found = {
        "model": name,
        "kernels": kernels,
        "batch": captured.batch,
        "sequence": captured.sequence,
        "dtype": captured.dtype,
        "checkpointing": captured.checkpointing,
        "captured_bytes": peaks[0],
        "recorded_bytes": peaks[1],
        "preset_bytes": None if preset is None else preset.peak_non_model_bytes,
        "off": peaks[0] / peaks[1] - 1,
        "preset_off": None if preset is None else preset.peak_non_model_bytes / peaks[1] - 1,
    }
    print(
        f"{name:14s} {kernels:9s} {captured.dtype} {'checkpointing' if captured.checkpointing else '':13s} "
        f"captured {peaks[0] / 1e6:9.2f} MB  recorded {peaks[1] / 1e6:9.2f} MB  {found['off']:+.2%}",
        flush=True,
    )
    return found


def of_the_catalog(name: str, batch: int, sequence: int, dtype: str, checkpointing: bool) -> dict[str, object]:
    model = build(name, batch=batch, sequence=sequence, dtype=dtype, checkpointing=checkpointing, device="cpu")
    captured = capture(name, batch=batch, sequence=sequence, dtype=dtype, checkpointing=checkpointing)
    ran = record(
        model.module, [model.example_batch], load_machine("virtual", gpu_memory="12GB"), name=name, batch=model.batch,
        sequence=model.sequence, timed=0,
    )  # fmt: skip
    preset = ps.preset(name, batch=batch, seq=sequence, dtype=dtype, checkpointing=checkpointing)
    return row(name, "eager", captured, ran, preset)


def of_a_flavour(flavours: ModuleType, kernels: str, checkpointing: bool) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        model = flavours.model_with(Path(folder), kernels, "cpu", checkpointing=checkpointing)
        captured = flavours.captured(model, kernels)
        loss = flavours.LOSSES[kernels]
        ran = record(model.module, [model.example_batch], load_machine("virtual"), name="small", timed=0, **loss)
    return row("small GPT-2", kernels, captured, ran, None)


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def main() -> int:
    only_help(__doc__)
    flavours = loaded(FLAVOURS)
    rows = [of_a_flavour(flavours, kernels, on) for kernels in flavours.ACTIVATIONS for on in (False, True)]
    rows += [of_the_catalog(*model, on) for model in MODELS for on in (False, True)]
    largest = max(abs(float(str(r["off"]))) for r in rows)
    presets = max(abs(float(str(r["preset_off"]))) for r in rows if r["preset_off"] is not None)
    print(f"{len(rows)} cases, largest difference {largest:.2%} (goal {GOAL:.0%}); presets {presets:.2%}")
    write_result("captured_peaks", {"goal": GOAL, "largest": largest, "largest_of_presets": presets, "rows": rows})
    return 0 if largest <= GOAL else 1


if __name__ == "__main__":
    raise SystemExit(main())
