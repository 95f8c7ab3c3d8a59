"""Whale's balance: its gain over equal shares as predicted for mixed GPUs, and as measured on two processes of unequal
speed. The processes train one model with equal shares and with the shares of `whale`, in turns in one run.

Both processes are throttled, so that other load on the machine does not count: each block takes PACE_S per sequence in
forward and twice that in backward, on the second process longer by a factor. Each process measures its speed on an
equal share in plain PyTorch. These speeds are the machine's; `whale` chooses the shares for it, and both plans are
executed (`executor.prepare`, gloo). At the end the parameters and both moments are compared with plain PyTorch on the
joint batches.

Prints the predicted and the measured gain and the differences, and writes results/whale.json. Fails where a result
differs from the joint batch's by more than TOLERANCE.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch's optimizers import it at their first use; imported here once, before the fork
import torch.distributed as dist
import transformers
from _results import RESULTS, write_result
from torch import nn

import executor
import pstar_sim as ps
from executor.capture import capture_module
from pstar_sim.catalog.machine import Fabric, Machine
from pstar_sim.core.plan import Plan
from pstar_sim.workload.workload import Workload

SEQUENCES, TOKENS, LAYERS = 24, 32, 4
PACE_S = 0.006
FACTORS = (1.48, 2.5)  # a P100 beside a V100 in fp32, a V100 beside an A100 in 16 bit
JOB = {"name": "bert-large", "batch": 128, "seq": 128}
CASES = (
    ("v100-16+p100-16", "fp32", True),
    ("v100-16x2+p100-16x2", "fp32", True),
    ("v100-16+p100-16", "fp16", True),
    ("v100-16+p100-16", "fp16", False),  # the V100 has no room for more than its share by speed
    ("a100-80x2+v100-32x2", "fp32", True),
    ("a100-80x2+v100-32x2", "fp16", True),
)
"""Machine, dtype, checkpointing of a prediction."""
LR, EPS = 1e-3, 1e-3  # an eps at which rounding in a gradient that is all but zero makes no step of lr
TOLERANCE = 1e-5
LINK_BYTES_PER_S = 1e9  # about the rate of gloo on one machine


def build() -> nn.Module:
    """Returns a small GPT whose loss is a mean over its sequences."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=LAYERS, n_head=4, n_embd=96, vocab_size=512, n_positions=TOKENS, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """Returns the joint batch of a step."""
    ids = torch.randint(0, 512, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def part(batch: dict[str, torch.Tensor], shares: Sequence[int], rank: int) -> dict[str, torch.Tensor]:
    first = sum(shares[:rank])
    return {name: value[first : first + shares[rank]].clone() for name, value in batch.items()}


def job(sequences: int) -> Workload:
    """Returns the workload of a process with this number of sequences."""
    with torch.device("meta"):
        model = build()
    ids = torch.zeros(sequences, TOKENS, dtype=torch.long, device="meta")
    return capture_module(model, {"input_ids": ids, "labels": ids}, name="small GPT", batch=sequences)


def throttle(model: nn.Module, pace_s: float, sequences: int) -> None:
    """Make each block of the model take at least `pace_s` per sequence in forward, and twice that in backward."""
    until = [0.0]

    def begin(block_s: float) -> Callable[..., None]:
        def note(*_: Any) -> None:
            until[0] = time.perf_counter() + block_s

        return note

    def end(*_: Any) -> None:
        time.sleep(max(0.0, until[0] - time.perf_counter()))

    for block in model.transformer.h:  # type: ignore[union-attr]
        block.register_forward_pre_hook(begin(pace_s * sequences))
        block.register_forward_hook(end)
        block.register_full_backward_pre_hook(begin(2 * pace_s * sequences))
        block.register_full_backward_hook(end)


def machine_of(flops_per_s: Sequence[float]) -> Machine:
    """Returns a machine of two GPUs with these rates, and room for everything."""
    one = ps.machine("virtual")
    peer = Fabric(name="gloo", bytes_per_s=LINK_BYTES_PER_S, latency_s=1e-4, measured=False, source="a guess")
    rank = one.ranks[0]
    gpus = [
        replace(rank.gpu, name=name, flops_per_s={"fp32": rate}, measured=True, source="measured in plain PyTorch")
        for name, rate in zip(("process 0", "process 1"), flops_per_s)
    ]
    ranks = tuple(replace(rank, gpu=gpu, batch_share=0.5) for gpu in gpus)
    return replace(one, name="two processes", ranks=ranks, peer=peer)


def seconds_of_share(sequences: int, pace_s: float) -> float:
    """Returns the median seconds of forward and backward of these sequences in plain PyTorch, in this process."""
    model, taken = build(), []
    throttle(model, pace_s, sequences)
    for step in range(6):
        begin = time.perf_counter()
        model(**part(batch_of(step), [sequences], 0)).loss.backward()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])


class Trained:
    """A model under a plan, on this rank, and the seconds of its steps."""

    def __init__(self, plan: Plan, rank: int, pace_s: float) -> None:
        spec = executor.AdamW(lr=LR, eps=EPS, weight_decay=0.1, max_grad_norm=1.0)
        self.rank, self.model = rank, build()
        self.shares = [round(r.batch_share * SEQUENCES) for r in plan.machine.ranks]
        throttle(self.model, pace_s, self.shares[rank])
        self.model, self.optimizer = executor.prepare(self.model, plan, spec)
        self.seconds: list[float] = []

    def step(self, number: int) -> None:
        dist.barrier()
        begin = time.perf_counter()
        self.model(**part(batch_of(number), self.shares, self.rank)).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - begin)

    def difference(self, reference: dict[str, torch.Tensor], states: dict[int, Any]) -> float:
        """Returns the largest difference to the reference's parameters and moments, each relative to its largest
        element."""
        values = {name: p.clone() for name, p in self.model.state_dict().items()}
        own = self.optimizer.state_dict()["state"]
        self.optimizer.session.close(restore=False)
        pairs = [(values[name], value) for name, value in reference.items()]
        pairs += [(own[i][key], states[i][key]) for i in states for key in ("exp_avg", "exp_avg_sq")]
        return max(float((a - b).abs().max()) / max(float(b.abs().max()), LR) for a, b in pairs)


def plain(steps: int) -> tuple[dict[str, torch.Tensor], dict[int, Any]]:
    """Returns parameters and states of plain PyTorch on the joint batches."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.1, fused=True)
    for step in range(steps):
        model(**batch_of(step)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return copy.deepcopy(parameters), optimizer.state_dict()["state"]


def chosen(seconds: Sequence[float]) -> tuple[dict[str, Plan], dict[str, float]]:
    """Returns the plans for equal shares and for whale's shares, and their predicted seconds."""
    even = SEQUENCES // 2
    flops = sum(m.flops for m in job(even).moments)
    machine = machine_of([flops / each for each in seconds])
    found = ps.compare([job(even)] * 2, machine, policies=["all_on_gpu", "whale"], cut=job)
    names = {"equal": "all_on_gpu", "whale": "whale"}
    return (
        {name: found[policy].plan for name, policy in names.items()},
        {name: found[policy].timeline.iteration_s for name, policy in names.items()},
    )


def work(rank: int, steps: int, pace_s: float, folder: Path) -> None:
    """Train on one process; the first process writes the figures.

    pace_s: this process's.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    dist.barrier()
    rows: list[Any] = [None, None]
    dist.all_gather_object(rows, seconds_of_share(SEQUENCES // 2, pace_s))
    plans, predicted = chosen(rows)
    runs = {name: Trained(plan, rank, pace_s) for name, plan in plans.items()}
    for number in range(steps):
        for run in runs.values():
            run.step(number)
    reference = plain(steps)
    differences = {name: run.difference(*reference) for name, run in runs.items()}
    if rank == 0:
        measured = {name: statistics.median(run.seconds[1:]) for name, run in runs.items()}
        found = {
            "off_plan": sum(len(run.optimizer.session.deviation_log) for run in runs.values()),
            "seconds_of_an_equal_share": rows,
            "shares": {name: run.shares for name, run in runs.items()},
            "predicted_s": predicted,
            "measured_s": measured,
            "predicted_gain": predicted["equal"] / predicted["whale"],
            "measured_gain": measured["equal"] / measured["whale"],
            "difference_to_the_joint_batch": differences,
        }
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def predicted() -> list[dict[str, object]]:
    """Returns a row per case: shares, seconds, and their gain over equal shares."""
    rows: list[dict[str, object]] = []
    for name, dtype, checkpointing in CASES:
        w = ps.preset(**JOB, dtype=dtype, checkpointing=checkpointing)  # type: ignore[arg-type]
        found = ps.compare(w, name, policies=["all_on_gpu", "whale"], near=False, barrier_cost=False)
        even_s, whale_s = (found[policy].timeline.iteration_s for policy in ("all_on_gpu", "whale"))
        shares: dict[str, list[int]] = {}
        for rank in found["whale"].plan.machine.ranks:
            shares.setdefault(rank.gpu.name, []).append(round(rank.batch_share * JOB["batch"]))  # type: ignore[operator]
        row = {"machine": name, "dtype": dtype, "checkpointing": checkpointing, "shares": shares}
        rows.append({**row, "equal_s": even_s, "whale_s": whale_s, "gain": even_s / whale_s})
        print(f"{name}, {dtype}: {shares}: equal {even_s:.3f} s, whale {whale_s:.3f} s, gain {even_s / whale_s:.2f}")
    return rows


def measured(factor: float, steps: int) -> dict[str, Any] | None:
    """Returns the figures of two processes, the second slower by the factor; None if one of them failed."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        children = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                work(rank, steps, PACE_S * (factor if rank else 1), folder)
                os._exit(0)
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        if any(statuses):
            return None
        found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    print(f"second process {factor} times as slow: whale's shares {found['shares']['whale']} of {SEQUENCES} sequences")
    for what in ("predicted", "measured"):
        equal, whale = (found[f"{what}_s"][name] for name in ("equal", "whale"))
        print(f"{what}: equal {equal:.3f} s, whale {whale:.3f} s, gain {found[f'{what}_gain']:.2f}")
    return {"factor": factor, **found, "worst": max(found["difference_to_the_joint_batch"].values())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--factor", type=float, nargs="+", default=FACTORS, help="how much slower the second one is")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    args = parser.parse_args()
    runs = [measured(factor, args.steps) for factor in args.factor]  # forks, so it comes before threads
    rows = predicted()
    done = [run for run in runs if run is not None]
    if len(done) < len(runs):
        print("a process failed", file=sys.stderr)
        return 1
    worst = max(run["worst"] for run in done)
    print(f"largest difference to the joint batch: {worst:.1e}")
    write_result("whale", {"sequences": SEQUENCES, "job": JOB, "predicted": rows, "measured": done}, folder=args.folder)
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
