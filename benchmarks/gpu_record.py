"""`make gpu-record`: what this machine's GPU really does, beside what was predicted.

Calibration first (a machine file); then for GPT-2 XL, a Llama-7B shape and a ViT the tide of plain training, moment by
moment, with torch's own memory snapshot; then plans at caps of 8, 16 and 24 GB and without one, run by the executor:
bytes of every moment, the worst one named, bytes over the link by the profiler, reserved bytes, host memory, seconds.
Every stage has a process of its own and is kept as it is done: a run that was cut off or used up its --minutes goes on
where it stopped. Figures: benchmarks/results/gpu_record.json; machine file, traces and snapshots: traces/measured/.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contenders.process import Failed
from contenders.stages import Stages
from preflight import cannot_run, report, slug

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
MEASURED = ROOT / "traces" / "measured"
MODELS: Mapping[str, Mapping[str, Any]] = {
    "gpt2-xl": {"batch": 4, "sequence": 1024, "checkpointing": True},
    "llama-7b": {"batch": 2, "sequence": 1024, "checkpointing": True},
    "vit-b-16": {"batch": 32, "sequence": 197, "checkpointing": False},
}
CAPS_GB = (8, 16, 24, None)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="of this run; 0 for no limit")
    parser.add_argument("--fresh", action="store_true", help="forget the stages that a run before this one did")
    parser.add_argument("--policy", default="tide", help="that makes the plans")
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated")
    args = parser.parse_args(argv)
    args.models = args.models.split(",")
    for name in args.models:
        if name not in MODELS:
            parser.error(f"--models: {name!r} is not known; choose from {', '.join(MODELS)}")
    return args


def in_process(job: Mapping[str, Any], left_s: float) -> dict[str, Any]:
    """Run one stage's job. Raises Failed where it failed or had no time to finish."""
    with tempfile.TemporaryDirectory() as folder:
        job_file, result_file = Path(folder) / "job.json", Path(folder) / "result.json"
        job_file.write_text(json.dumps(job), encoding="utf-8")
        paths = os.pathsep.join((str(ROOT), str(ROOT / "benchmarks")))
        command = [sys.executable, "-m", "recording.worker", str(job_file), str(result_file)]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": paths},
                timeout=max(left_s, 1.0),
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"{job['stage']}: no answer within {left_s:.0f} s", lasting=False) from None
        if not result_file.exists():
            raise Failed(f"{job['stage']}: the process ended with status {done.returncode}")
        result: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
    if "failed" in result:
        raise Failed(str(result["failed"]))
    return result


def jobs(args: argparse.Namespace, gpu: str) -> list[tuple[str, dict[str, Any]]]:
    """(what it is, job) of every stage after the calibration, in order."""
    machine = str(MEASURED / f"{slug(gpu)}.toml")
    found: list[tuple[str, dict[str, Any]]] = []
    for model in args.models:
        shape = {"model": model, **MODELS[model]}
        name = slug(f"{model} {gpu}")
        found.append(
            (f"{model}: the tide", {"stage": "tide", **shape, "folder": str(MEASURED), "slug": name, "gpu": gpu})
        )
    for model in args.models:
        for cap in CAPS_GB:
            size = None if cap is None else cap * 10**9
            what = f"{model}: a plan of {args.policy}, {'no cap' if cap is None else f'{cap} GB'}"
            job = {"stage": "planned", "model": model, **MODELS[model], "policy": args.policy, "machine": machine}
            found.append((what, {**job, "gpu_memory_bytes": size}))
    return found


def line(what: str, result: Mapping[str, Any]) -> str:
    """One stage for people."""
    if "failed" in result:
        return f"{what}: failed: {result['failed']}"
    parts = []
    if "worst" in result:
        worst = result["worst"]
        parts.append(
            f"worst moment {worst['moment']} ({worst['name']}): predicted {worst['predicted_bytes'] / 1e9:.3f} GB, "
            f"measured {worst['measured_bytes'] / 1e9:.3f} GB"
        )
    if "peak_reserved_bytes" in result:
        peak = result["peak_reserved_bytes"]
        parts.append(f"reserved {peak['measured'] / 1e9:.2f} GB of the plan's {peak['plan'] / 1e9:.2f} GB")
    if "iteration_s" in result:
        seconds = result["iteration_s"]
        said = "-" if seconds["predicted"] is None else f"{seconds['predicted']:.2f} s"
        parts.append(f"iteration {seconds['measured']:.2f} s, predicted {said}")
        moved = result["moved_bytes"]
        parts += [
            f"{way} {moved['profiler'][way] / 1e9:.2f} GB, plan {moved['plan'][way] / 1e9:.2f} GB"
            for way in ("h2d", "d2h")
        ]
    return f"{what}: " + "; ".join(parts or ["done"])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if (status := cannot_run("gpu-record", ("numpy", "scipy", "transformers"))) is not None:
        return status
    print(report())
    import torch

    gpu = torch.cuda.get_device_name(0)
    MEASURED.mkdir(exist_ok=True)
    partial = RESULTS / "gpu_record.partial.jsonl"
    if args.fresh:
        partial.unlink(missing_ok=True)
    stages = Stages(partial, minutes=args.minutes or None, expected_s=60.0)
    found: dict[str, Any] = {}
    calibration = {"stage": "machine", "path": str(MEASURED / f"{slug(gpu)}.toml")}
    for what, job in [("calibration", calibration), *jobs(args, gpu)]:
        key = json.dumps(job, sort_keys=True)
        result = stages.run(key, what, lambda left_s, job=job: in_process(job, left_s))
        if result is None:
            continue
        found[what] = result
        print(line(what, result))
        if what == "calibration" and "failed" in result:
            print("gpu-record: no plans without a calibration")
            break
    from _results import write_result

    content = {"gpu": gpu, "torch_cuda": torch.version.cuda, "stages": found, "stages_left": stages.left_out}
    print(f"written: {write_result('gpu_record', content).relative_to(ROOT)}")
    if stages.left_out:
        print(f"{stages.left_out} stages had no time left; run the same command again and it goes on")
    else:
        stages.forget()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
