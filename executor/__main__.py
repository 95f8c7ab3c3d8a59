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
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from executor.checks import check_processes
from executor.models import named_failures
from executor.prepare import prepare
from executor.ranks import Ranks
from executor.run import Job, check_hardware
from executor.training import StepReport, train, train_step
from pstar_sim.core.plan import Plan, load_plan
from pstar_sim.errors import PstarError
from pstar_sim.units import format_bytes, format_s, parse_bytes_per_s

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
        check_processes(plan, dist.get_world_size() if dist.is_initialized() else 1)
        _run(args, plan)
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
        description="Train a real model by a plan of N ranks; flags as of `pstar run`.",
    )
    parser.add_argument("plan", metavar="PLAN", help="a plan file, made for a machine of N GPUs")
    parser.add_argument("--model", required=True, help="the model the plan was made for, as for `pstar trace`")
    parser.add_argument("--data", metavar="text:FOLDER", help="text to train on (default: Python's standard library)")
    parser.add_argument("--weights", metavar="FOLDER", help="safetensors to begin with (default: by the seed)")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="iterations (default: 10)")
    parser.add_argument("--device", choices=("virtual",), default="virtual", help="what runs it (default: virtual)")
    parser.add_argument("--bandwidth", metavar="RATE", help="of each rank's virtual link (default: the plan's)")
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate (default: 3e-4)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data (default: 0)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    return parser


def _run(args: argparse.Namespace, plan: Plan) -> None:
    job = Job.of_plan(plan, args.model, data=args.data, lr=args.lr, seed=args.seed, weights=args.weights)
    rate = parse_bytes_per_s(args.bandwidth) if args.bandwidth is not None else None
    link = plan.machine.link
    built = job.build(empty=job.weights is not None)
    batches = job.batches(built)
    model, optimizer = prepare(
        built.module,
        plan,
        job._adamw(plan),
        bandwidth=(rate or link.h2d_bytes_per_s, rate or link.d2h_bytes_per_s),
        weights=job.weights,
    )
    session = optimizer.session
    ranks, micro_batches = session.ranks, plan.workload.micro_batches
    mine = _own(batches, ranks, session.planned_batch, plan)
    try:
        with named_failures(job.model, model):
            reports = train(model, optimizer, mine, steps=args.steps, micro_batches=micro_batches)
        session.drain()
        drawn = iter([next(mine) for _ in range(2 * micro_batches)])
        measured = session.measure_iteration(lambda: train_step(model, optimizer, drawn, micro_batches))
        losses = _joined(reports, ranks, session.planned_batch)
        here = [float(measured.peak_gpu_bytes)]
        peaks = [int(row[0]) for row in ([here] if ranks is None else ranks.meet(here))]
        if ranks is None or ranks.rank == 0:
            _say(args, plan, reports, losses, peaks, measured.moved_bytes, session.arena.peak_transient_bytes)
    finally:
        session.close(restore=False)


def _own(batches: Iterator[Any], ranks: Ranks | None, sequences: int, plan: Plan) -> Iterator[Any]:
    """This rank's part of the data: of every P batches in a row the one of its number, and of it so many sequences."""
    if ranks is None:
        return batches
    whole = plan.workload.batch
    own = islice(batches, ranks.rank, None, ranks.count)
    return own if sequences == whole else (_first(batch, sequences, whole) for batch in own)


def _first(batch: Any, sequences: int, of: int) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[:sequences].clone() if batch.dim() and batch.shape[0] == of else batch
    if isinstance(batch, dict):
        return {key: _first(value, sequences, of) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(_first(value, sequences, of) for value in batch)
    return batch


def _joined(reports: Sequence[StepReport], ranks: Ranks | None, sequences: int) -> list[float]:
    """The loss of each step over the batches of all ranks."""
    losses = [report.loss for report in reports]
    if ranks is None:
        return losses
    rows = ranks.meet([float(sequences), *losses])
    total = sum(row[0] for row in rows)
    return [sum(row[0] * row[1 + i] for row in rows) / total for i in range(len(losses))]


def _say(
    args: argparse.Namespace,
    plan: Plan,
    reports: Sequence[StepReport],
    losses: Sequence[float],
    peaks: Sequence[int],
    moved: dict[str, int],
    transient_bytes: int,
) -> None:
    w, ranks = plan.workload, plan.machine.ranks
    times = [report.time_s for report in reports]
    step_s = statistics.median(times[1:] or times)
    shares = [rank.batch_share for rank in ranks]
    tokens = w.tokens * sum(shares) / max(shares)
    proved = plan.check().peak_bytes["gpu"]
    predicted = plan.predictions.get("iteration_s")
    wanted = plan.moved_bytes
    if args.json:
        figures = {
            "policy": plan.policy, "model": w.model, "ranks": len(ranks), "steps": len(losses), "losses": list(losses),
            "step_s": times, "tokens_per_s": tokens / step_s, "peak_gpu_bytes": list(peaks),
            "peak_gpu_bytes_at_most": proved, "transient_bytes": transient_bytes, "moved_bytes": moved,
            "predicted_moved_bytes": {lane: wanted[lane] for lane in moved}, "predicted_iteration_s": predicted,
        }  # fmt: skip
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    first = len(losses) - 5 if len(losses) > 6 else 0
    shown = [(i, x) for i, x in enumerate(losses) if i == 0 or i >= first]
    lines = [f"{plan.policy}: {w.model} on {len(ranks)} ranks, {len(losses)} steps of {int(tokens)} tokens", ""]
    lines += [f"{'step':>6}  {'loss':>9}  {'seconds':>8}  {'tokens/s':>9}"]
    lines += [f"{i:>6}  {x:>9.4f}  {times[i]:>8.3f}  {tokens / times[i]:>9,.0f}" for i, x in shown]
    rows = [
        ("iteration", "-" if predicted is None else format_s(predicted), format_s(step_s)),
        ("GPU peak of a rank", f"<= {format_bytes(proved)}", format_bytes(max(peaks))),
        ("to the GPU", format_bytes(wanted["h2d"]), format_bytes(moved["h2d"])),
        ("to the host", format_bytes(wanted["d2h"]), format_bytes(moved["d2h"])),
    ]
    lines += ["", f"{'':<20}{'predicted':>14}  {'measured':>12}"]
    lines += [f"{name:<20}{plan_says:>14}  {here:>12}" for name, plan_says, here in rows]
    lines += [
        "",
        "iteration: median of the steps after the first; predicted for the machine of the plan, not for this one",
        f"slices that change place hold {format_bytes(transient_bytes)} more for the time of a copy",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
