"""`make gpu-record`, `make gpu-7b`: measurements of this machine's GPU, beside the predictions.

Calibration comes first (a machine file). Then, for each model (smallest first), the tide of plain training is measured,
moment by moment. Then plans at each cap are run by the executor: bytes of every moment with the worst one named, bytes
over the link by the profiler, reserved bytes, exchanges, host memory, seconds. Every stage has a process of its own and
its result is kept: a later run continues from the folder --out where an interrupted run, or one whose --minutes were
over, stopped. Figures: gpu_record.json (gpu_7b.json); beside it the machine file and traces (without --out:
traces/measured/).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _keep import Keep, python_path, results_folder
from _results import RESULTS, write_result
from contenders.process import Failed
from contenders.stages import Stages
from preflight import cannot_run, report, slug

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "traces" / "measured"
# Smallest first, because the first models are sure to be measured.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "tiny-gpt2": {"batch": 2, "sequence": 32, "checkpointing": False, "dtype": "fp32"},
    "vit-b-16": {"batch": 32, "sequence": 197, "checkpointing": False, "dtype": "bf16"},
    "gpt2-xl": {"batch": 4, "sequence": 1024, "checkpointing": True, "dtype": "bf16"},
    "llama-7b": {"batch": 2, "sequence": 1024, "checkpointing": True, "dtype": "bf16"},
}
STAGES = ("machine", "tide", "planned")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--minutes", type=float, default=8.0, help="of this run; 0 for no limit")
    add("--fresh", action="store_true", help="forget the stages that a run before this one did")
    add("--again", action="store_true", help="run what failed again")
    add(
        "--out",
        type=results_folder,
        help="folder of all that is found (default: benchmarks/results and traces/measured)",
    )
    add("--name", default="gpu_record", help="of the file of figures: what another name has stays")
    add("--models", default="vit-b-16,gpt2-xl,llama-7b", help=f"comma-separated, of {','.join(MODELS)}")
    add("--policies", default="tide", help="that make the plans, comma-separated")
    add("--caps", default="8GB,16GB,24GB,none", help="of the card's memory, comma-separated")
    add("--stages", default=",".join(STAGES), help="comma-separated; without machine: --machine, or an earlier run's")
    add("--machine", help="machine file or name for the plans (default: the one that is measured)")
    add("--snapshot", action="store_true", help="keep torch's memory snapshot of each tide, if it is small enough")
    add("--device", choices=("cuda", "virtual"), default="cuda", help="virtual: plans only, to try this script")
    args = parser.parse_args(argv)
    from pstar_sim.arguments import parse_bytes
    from pstar_sim.errors import PstarError

    for name, known in (("models", MODELS), ("stages", STAGES)):
        given = getattr(args, name).split(",")
        for word in given:
            if word not in known:
                parser.error(f"--{name}: {word!r} is not known; choose from {', '.join(known)}")
        setattr(args, name, sorted(given, key=list(known).index))
    args.policies = args.policies.split(",")
    try:
        args.caps = [None if word == "none" else parse_bytes(word) for word in args.caps.split(",")]
    except PstarError as error:
        parser.error(f"--caps: {error}")
    if args.device == "virtual":
        args.stages = ["planned"]
        args.machine = args.machine or "virtual"
    return args


def in_process(keep: Keep, job: Mapping[str, Any], left_s: float) -> dict[str, Any]:
    """Run one stage's job. Returns its result. Raises Failed where it failed or had no time to finish."""
    with tempfile.TemporaryDirectory() as folder:
        job_file, result_file = Path(folder) / "job.json", Path(folder) / "result.json"
        job_file.write_text(json.dumps(job), encoding="utf-8")
        status, over = keep.run(
            [sys.executable, "-m", "recording.worker", str(job_file), str(result_file)],
            limit_s=left_s,
            cwd=ROOT,
            environment={"PYTHONPATH": python_path(ROOT, ROOT / "benchmarks")},
        )
        if not result_file.exists():
            if over:
                raise Failed(f"{job['stage']}: no answer within {left_s:.0f} s", lasting=False)
            raise Failed(f"{job['stage']}: the process ended with status {status}")
        result: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
    if "failed" in result:
        raise Failed(str(result["failed"]))
    return result


def jobs(args: argparse.Namespace, gpu: str, folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Returns (description, job) of every stage, in order."""
    machine = args.machine or str(folder / f"{slug(gpu)}.toml")
    found: list[tuple[str, dict[str, Any]]] = []
    if "machine" in args.stages and args.machine is None:
        found.append(("calibration", {"stage": "machine", "path": machine}))
    for model in args.models:
        shape = {"model": model, **MODELS[model]}
        if "tide" in args.stages:
            files = {"folder": str(folder), "slug": slug(f"{model} {gpu}"), "gpu": gpu, "snapshot": args.snapshot}
            found.append((f"{model}: the tide", {"stage": "tide", **shape, **files}))
        for cap in args.caps if "planned" in args.stages else ():
            for policy in args.policies:
                what = f"{model}: a plan of {policy}, {'no cap' if cap is None else f'{cap / 1e9:g} GB'}"
                job = {"stage": "planned", **shape, "policy": policy, "machine": machine, "gpu_memory_bytes": cap}
                found.append((what, {**job, "device": args.device}))
    return found


def line(what: str, result: Mapping[str, Any]) -> str:
    """Returns one stage in words."""
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
        for way in ("h2d", "d2h"):
            measured = "" if moved["profiler"] is None else f"{moved['profiler'][way] / 1e9:.2f} GB, "
            parts.append(f"{way} {measured}plan {moved['plan'][way] / 1e9:.2f} GB")
        if result["exchanges_per_step"] is not None:
            parts.append(f"{result['exchanges_per_step']:g} exchanges per step")
    return f"{what}: " + "; ".join(parts or ["done"])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    on_card = args.device == "cuda"
    if (status := cannot_run("gpu-record", ("numpy", "scipy", "transformers"), device=on_card)) is not None:
        return status
    keep = Keep(args.out or RESULTS, "gpu_record")
    folder = args.out or MEASURED
    folder.mkdir(parents=True, exist_ok=True)
    keep.say(report())
    import torch

    gpu = torch.cuda.get_device_name(0) if on_card else "virtual"
    if args.fresh:
        keep.partial.unlink(missing_ok=True)
    stages = Stages(
        keep.partial, minutes=args.minutes or None, expected_s=60.0 if on_card else 0.0, say=keep.say, again=args.again
    )
    found: dict[str, Any] = {}
    for what, job in jobs(args, gpu, folder.resolve()):
        # Folders do not identify a stage: a later run may have others.
        named = {k: Path(str(v)).name if k in ("path", "machine") else v for k, v in job.items() if k != "folder"}
        key = json.dumps(named, sort_keys=True)
        result = stages.run(key, what, lambda left_s, job=job: in_process(keep, job, left_s))
        if result is None:
            continue
        found[what] = result
        keep.say(line(what, result))
        if what == "calibration" and "failed" in result:
            keep.say("gpu-record: no plans without a calibration")
            break
    content = {"gpu": gpu, "torch_cuda": torch.version.cuda, "stages": found, "stages_left": stages.left_out}
    keep.say(f"written: {write_result(args.name, content, folder=args.out)}")
    if stages.left_out:
        keep.say(f"{stages.left_out} stages had no time left; run the same command again and it goes on")
    elif args.out is None:
        stages.forget()
    return int(any("failed" in result for result in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
