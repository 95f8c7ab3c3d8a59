"""Memory that torch reserves under plans, on the emulated device (tests/cuda_emulation) without arithmetic.

    .venv-cuda/bin/python tests/cuda_emulation/emulated.py python benchmarks/gpu_memory.py

Ten models at real sizes, each with three caps: the smallest that has a plan (to 100 MB), 1.1 and 1.5 times as much.
Each run has a process of its own. Figures: gpu_memory.json. The status is 1 where a run ends that has a plan, makes
more than one exchange per step (torch's own retries included) and more than the committed run (rounded up), or reserves
more than 105 % of its budget, 64 MiB beyond it, and 64 MiB beyond what the committed run reserved. "maps" are calls of
cuMemMap, for 20 MiB each.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from _keep import Keep, results_folder
from _results import RESULTS, write_result
from contenders.stages import Stages
from gpu_record import in_process
from preflight import NO_DEVICE

MIB = 1 << 20
SHARES = (1.0, 1.1, 1.5)
LONG_SHARE = 1.1  # of runs of LONG models, in which memory could grow with steps
LONG = ("up to", "experts")  # batches that differ in length, experts
STEPS = 3
LIMIT_S = 1500.0
EXCHANGES = 1.0  # per step, or as many as the committed run made
GOAL_BYTES = 64 * MIB  # beyond the budget, where 5 % of it are fewer; else beyond what the committed run reserved
DEVICE = {
    "EMULATED_CUDA_NAME": "NVIDIA A100-SXM4-40GB",
    "EMULATED_CUDA_MEMORY_BYTES": "40e9",
    "EMULATED_CUDA_ARITHMETIC": "0",
}
HEADS = (
    "model",
    "cap GB",
    "budget GB",
    "reserved",
    "beyond MiB",
    "exchanges",
    "retries",
    "cudaMalloc",
    "maps",
    "off plan",
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--minutes", type=float, default=0.0, help="of this run; 0 for no limit")
    add("--fresh", action="store_true", help="forget the runs of an interrupted table")
    add("--again", action="store_true", help="run what failed again")
    add("--out", type=results_folder, help="folder of the result (default: benchmarks/results)")
    add("--models", default="", help="comma-separated: those whose names contain one of these (default: all)")
    add("--steps", type=int, default=200, help="of one run of each model in which memory could grow")
    add("--policy", default="tide", help="that makes the plans")
    return parser.parse_args(argv)


def cells(name: str, row: Mapping[str, Any]) -> list[str]:
    """Returns one run as a row of the table."""
    if "budget_bytes" not in row:
        return [name, *["-"] * (len(HEADS) - 2), row.get("no_plan") or row.get("failed", "")]
    steady = [row.get(f"{what}_per_step") for what in ("exchanges", "retries", "cudaMalloc", "cuMemMap")]
    return [
        name,
        f"{row['cap_bytes'] / 1e9:.1f}",
        f"{row['budget_bytes'] / 1e9:.2f}",
        f"{100 * row['reserved_peak_bytes'] / row['budget_bytes']:.1f} %",
        f"{(row['reserved_peak_bytes'] - row['budget_bytes']) / 2**20:.0f}",
        *("-" if figure is None else f"{figure:.1f}" for figure in steady),
        row.get("died") or f"{row['deviations']} of {row['iterations']}",
    ]


def committed() -> dict[str, Mapping[str, Any]]:
    """Returns name -> run, of the committed result."""
    runs: dict[str, Mapping[str, Any]] = json.loads((RESULTS / "gpu_memory.json").read_text(encoding="utf-8"))["runs"]
    return runs


def beyond(row: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Returns what of a run is beyond its bound.

    before: the committed run; empty if there is none.
    """
    if "budget_bytes" not in row:
        return [row.get("no_plan") or row["failed"]]
    if "died" in row:
        return [row["died"]]
    faults = []
    if not within(row) and row["reserved_peak_bytes"] > before.get("reserved_peak_bytes", 0) + GOAL_BYTES:
        faults.append(f"{row['reserved_peak_bytes']} bytes reserved, with a budget of {row['budget_bytes']}")
    made, most = exchanges(row), max(EXCHANGES, math.ceil(exchanges(before)))
    if made > most:
        faults.append(f"{made:g} exchanges per step, at most {most:g} were to be")
    return faults


def exchanges(row: Mapping[str, Any]) -> float:
    """Returns the times per step that free memory went back to the driver: the plan's exchanges and torch's retries."""
    return float(row.get("exchanges_per_step", 0) + row.get("retries_per_step", 0))


def within(row: Mapping[str, Any]) -> bool:
    """Returns whether the run reserved at most 105 % of its budget or GOAL_BYTES beyond it."""
    budget_bytes = row.get("budget_bytes", 0)
    return row.get("reserved_peak_bytes", 0) <= max(budget_bytes * 105 // 100, budget_bytes + GOAL_BYTES)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in rows))]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[-1]]) for row in rows]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if "EMULATED_CUDA_OPERATORS" not in os.environ:
        print("gpu-memory: skipped: no emulated device; start it by tests/cuda_emulation/emulated.py")
        return NO_DEVICE
    os.environ.update(DEVICE)
    from recording.reserved import MODELS

    keep = Keep(args.out or RESULTS, "gpu_memory")
    if args.fresh:
        keep.partial.unlink(missing_ok=True)
    stages = Stages(keep.partial, minutes=args.minutes or None, expected_s=20.0, say=keep.say, again=args.again)
    words = args.models.split(",")
    runs: dict[str, Any] = {}
    for model in (name for name in MODELS if any(word in name for word in words)):
        for share in SHARES:
            name = f"{model}, {share:g}"
            steps = args.steps if share == LONG_SHARE and any(word in model for word in LONG) else STEPS
            job = {"stage": "reserved", "model": model, "share": share, "policy": args.policy, "steps": steps}
            row = stages.run(name, name, lambda left_s, job=job: in_process(keep, job, min(left_s, LIMIT_S)))
            if row is not None:
                runs[name] = row
    smallest: dict[str, int] = {}
    for name, row in runs.items():  # from the smallest cap on
        if "died" not in row and "cap_bytes" in row:
            smallest.setdefault(name.rpartition(", ")[0], row["cap_bytes"])
    before = committed()
    faults = [f"{name}: {fault}" for name, row in runs.items() for fault in beyond(row, before.get(name, {}))]
    lines = table([HEADS, *(cells(name, row) for name, row in runs.items())])
    for line in [
        *lines,
        *(f"smallest cap that runs: {name}: {cap / 1e9:.1f} GB" for name, cap in smallest.items()),
        *faults,
    ]:
        keep.say(line)
    above = [name for name, row in runs.items() if not within(row)]
    keep.say(f"{len(above)} of {len(runs)} above 105 % and 64 MiB: {'; '.join(above)}")
    content = {
        "policy": args.policy,
        "runs": runs,
        "smallest_cap_bytes": smallest,
        "faults": faults,
        "above_goal": above,
        "long_steps": args.steps,
    }
    keep.say(f"written: {write_result('gpu_memory', content, folder=args.out)}")
    if not stages.left_out:
        keep.partial.unlink(missing_ok=True)
    return int(bool(faults) or stages.left_out > 0)


if __name__ == "__main__":
    raise SystemExit(main())
