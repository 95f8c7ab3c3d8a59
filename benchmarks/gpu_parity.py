"""`make gpu-parity`: training by a plan beside plain AdamW on the same card, and the difference of the two.

GPT-2 and a small Llama shape with grouped-query attention, fp32 and bf16, four micro-batches; every policy at the
smallest budget for which it has a plan, with the update in the step and eager. Every stage (a model in a dtype) has a
process of its own and its result is kept: a later run continues from the folder --out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _keep import Keep, results_folder
from _results import RESULTS, write_result
from contenders.stages import Stages
from gpu_record import in_process
from preflight import cannot_run, report

ROOT = Path(__file__).resolve().parents[1]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--minutes", type=float, default=3.0, help="of this run; 0 for no limit")
    add("--fresh", action="store_true", help="forget the stages that a run before this one did")
    add("--again", action="store_true", help="run what failed again")
    add("--out", type=results_folder, help=f"folder of what is found (default: {RESULTS.relative_to(ROOT)})")
    add("--device", choices=("cuda", "virtual"), default="cuda", help="virtual: to try this script")
    add("--models", default="gpt2,qwen2.5-0.5b", help="as for `pstar trace`, comma-separated")
    add("--dtypes", default="fp32,bf16")
    add("--policies", default="tide,patrickstar,optimal,zero_offload")
    add("--updates", default="step,eager")
    add("--batch", type=int, default=1, help="sequences of a micro-batch")
    add("--sequence", type=int, default=128)
    add("--micro-batches", type=int, default=4)
    add("--steps", type=int, default=3)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    on_card = args.device == "cuda"
    if (status := cannot_run("gpu-parity", ("numpy", "scipy", "transformers"), device=on_card)) is not None:
        return status
    keep = Keep(args.out or RESULTS, "gpu_parity")
    if args.fresh:
        keep.partial.unlink(missing_ok=True)
    keep.say(report())
    stages = Stages(
        keep.partial, minutes=args.minutes or None, expected_s=20.0 if on_card else 0.0, say=keep.say, again=args.again
    )
    found: dict[str, Any] = {}
    bad = 0
    for model in args.models.split(","):
        for dtype in args.dtypes.split(","):
            job = {
                "stage": "parity", "model": model, "dtype": dtype, "batch": args.batch, "sequence": args.sequence,
                "micro_batches": args.micro_batches, "steps": args.steps, "policies": args.policies.split(","),
                "updates": args.updates.split(","), "device": "cuda" if on_card else "cpu",
            }  # fmt: skip
            what = f"{model}, {dtype}"
            key = json.dumps(job, sort_keys=True)
            result = stages.run(key, what, lambda left_s, job=job: in_process(keep, job, left_s))
            if result is None:
                continue
            found[what] = result
            if "failed" in result:
                keep.say(f"{what}: failed: {result['failed']}")
                bad += 1
            for how, row in result.get("runs", {}).items():
                if "no_plan" in row:
                    keep.say(f"{what}, {how}: no plan: {row['no_plan']}")
                    continue
                bad += not row["equal"]
                keep.say(
                    f"{what}, {how}: {'equal' if row['equal'] else 'NOT EQUAL'} within {result['bounds']}: losses "
                    f"{row['losses']:.1e} apart, updates {row['update']:.1e} (most in {row['worst']})"
                )
    content = {"device": args.device, "stages": found, "stages_left": stages.left_out}
    keep.say(f"written: {write_result('gpu_parity', content, folder=args.out)}")
    if stages.left_out:
        keep.say(f"{stages.left_out} stages had no time left; run the same command again and it goes on")
    elif args.out is None:
        stages.forget()
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
