"""`torchrun --nproc-per-node N -m executor PLAN --model MODEL`: train a model by name on several ranks.

What `pstar run` does in one process, of which it takes the flags; the first rank prints, the others are quiet. What was
predicted is what the plan file says (nothing is simulated here).
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from executor.checks import check_processes
from executor.run import Job, Keeping, RunResult, check_hardware
from pstar_sim.core.plan import Plan, load_plan
from pstar_sim.errors import PstarError
from pstar_sim.units import format_bytes, format_s, parse_bytes, parse_bytes_per_s

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 after an error, which is one line on stderr."""
    args = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    started = False
    try:
        plan = load_plan(args.plan)
        check_hardware(plan, args.device)
        if dist.is_torchelastic_launched() and not dist.is_initialized():
            dist.init_process_group("gloo" if args.device == "virtual" else "cpu:gloo,cuda:nccl")
            started = True
        processes, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        device = args.device
        if device == "cuda" and processes > 1:
            device = f"cuda:{rank % torch.cuda.device_count()}"
            torch.cuda.set_device(device)
        check_processes(plan, processes, file=args.plan, model=args.model)
        keeping = Keeping(save=args.save, every=args.save_every, resume=args.resume)
        keeping.check(args.steps)
        job = Job.of_plan(plan, args.model, data=args.data, lr=args.lr, seed=args.seed, weights=args.weights)
        rate = parse_bytes_per_s(args.bandwidth) if args.bandwidth is not None else None
        link = plan.machine.link
        bandwidth = (rate or link.h2d_bytes_per_s, rate or link.d2h_bytes_per_s)
        result = job.run(
            plan,
            steps=args.steps,
            device=device,
            bandwidth=bandwidth if args.device == "virtual" else None,
            gpu_memory=parse_bytes(args.gpu_memory) if args.gpu_memory is not None else None,
            keeping=keeping,
        )
        if rank == 0:
            _say(plan, result, as_json=args.json)
    except PstarError as error:
        sys.stderr.write(f"pstar: {error}\n")
        return 2
    finally:
        if started:
            dist.destroy_process_group()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N -m executor",
        description="Train a real model by a plan of N ranks. `pstar run` has these flags and more.",
    )
    add = parser.add_argument
    add("plan", metavar="PLAN", help="a plan file, made for a machine of N GPUs")
    add("--model", required=True, help="the model the plan was made for, as for `pstar trace`")
    add("--data", metavar="text:FOLDER", help="text to train on (default: the Python standard library's source)")
    add("--weights", metavar="FOLDER", help="safetensors to begin with (default: by the seed; with --resume its own)")
    add("--steps", type=int, default=10, metavar="N", help="iterations in all, those before --resume included")
    add("--save", metavar="FOLDER", help="write a checkpoint there at the end")
    add("--save-every", type=int, metavar="N", help="and after every N iterations (with --save)")
    add("--resume", metavar="FOLDER", help="go on from that checkpoint, of any number of ranks")
    add("--device", default="virtual", help="virtual, or cuda (each rank takes the GPU of its number)")
    add("--bandwidth", metavar="RATE", help="of each rank's virtual link, such as 2GB/s (default: the plan's)")
    add("--gpu-memory", metavar="SIZE", help="what each rank may use of its GPU, such as 24GB (default: all it has)")
    add("--lr", type=float, default=3e-4, help="learning rate (default: 3e-4)")
    add("--seed", type=int, default=0, help="seed of weights and data (default: 0)")
    add("--json", action="store_true", help="one JSON object instead of the table")
    return parser


def _say(plan: Plan, result: RunResult, *, as_json: bool) -> None:
    """What the run did, beside what the plan says of it."""
    w, shares = plan.workload, [rank.batch_share for rank in plan.machine.ranks]
    times = [report.time_s for report in result.reports]
    step_s = statistics.median(times[1:] or times)
    tokens = w.tokens * sum(shares) / max(shares)
    shared = result.shared
    losses = [report.loss for report in result.reports] if shared is None else shared.losses
    here = result.measured
    predicted_s = plan.predictions.get("iteration_s")
    at_most = plan.check().peak_bytes["gpu"]
    wanted = plan.moved_bytes
    moved = {**(here.moved_bytes if here is not None else {}), **({"net": shared.sent_bytes} if shared else {})}
    peaks = list(shared.peak_gpu_bytes) if shared is not None else [here.peak_gpu_bytes] if here is not None else []
    transient = 0 if shared is None else shared.transient_bytes
    first = result.reports[0].step
    if as_json:
        figures = {
            "policy": plan.policy, "model": w.model, "ranks": len(shares), "first_step": first, "losses": list(losses),
            "step_s": times, "tokens_per_s": tokens / step_s, "peak_gpu_bytes": peaks,
            "peak_gpu_bytes_at_most": at_most, "transient_bytes": transient, "moved_bytes": moved,
            "predicted_moved_bytes": {lane: wanted.get(lane, 0) for lane in moved},
            "predicted_iteration_s": predicted_s, "notes": list(result.notes), "deviations": list(result.deviations),
        }  # fmt: skip
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    from_ = len(losses) - 5 if len(losses) > 6 else 0
    lines = [
        f"{plan.policy}: {w.model} on {len(shares)} ranks, {len(losses)} steps of {int(tokens)} tokens",
        "",
        f"{'step':>6}  {'loss':>9}  {'seconds':>8}  {'tokens/s':>9}",
    ]
    lines += [
        f"{first + i:>6}  {loss:>9.4f}  {times[i]:>8.3f}  {tokens / times[i]:>9,.0f}"
        for i, loss in enumerate(losses)
        if i == 0 or i >= from_
    ]
    rows = [("iteration", "-" if predicted_s is None else format_s(predicted_s), format_s(step_s))]
    if peaks:
        rows.append(("GPU peak of a rank", f"<= {format_bytes(at_most)}", format_bytes(max(peaks))))
    for lane, name in (("h2d", "to the GPU"), ("d2h", "to the host"), ("net", "to other ranks")):
        if lane in moved:
            rows.append((name, format_bytes(wanted.get(lane, 0)), format_bytes(moved[lane])))
    lines += ["", f"{'':<20}{'predicted':>14}  {'measured':>12}"]
    lines += [f"{name:<20}{plan_says:>14}  {found:>12}" for name, plan_says, found in rows]
    lines += [
        "",
        *result.notes,
        "iteration: median of the steps after the first; predicted for the machine of the plan, not for this one",
        f"a slice that changes place holds {format_bytes(transient)} more for the time of a copy",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
