"""Step time of the executor over that of plain PyTorch, with everything resident, no throttling, and one thread.

GPT-2 124M in fp32 under the plan of `all_on_gpu` beside `torch.optim.AdamW(fused=True)`, step by step in turns, so that
the load of the machine affects both; a row for each sequence of SEQUENCES, two sequences a batch. The figure is the
ratio of the medians of the process's CPU seconds; the goal is at most 1.05 from 128 tokens on.
"""

from __future__ import annotations

import itertools
import statistics
import time

import torch
from _help import only_help
from _results import write_result

from executor import AdamW, prepare
from executor.run import TrainingJob
from executor.training import train_step
from pstar_sim.catalog.loader import load_machine
from pstar_sim.core.plan import Settings
from pstar_sim.policy.registry import find_policy

PAIRS = 9
WARM_UP = 2
SEQUENCES = (64, 128, 256)
GOAL, GOAL_SEQUENCE = 1.05, 128


def measured(sequence: int) -> dict[str, float]:
    job = TrainingJob(model="gpt2", batch=2, sequence=sequence, dtype="fp32", checkpointing=False, lr=1e-4, clip=False)
    machine = load_machine("virtual", gpu_memory="6GB")
    workload = job.record(machine)
    plan = find_policy("all_on_gpu")(workload, machine, Settings(update="step", clip=False))
    ours, theirs = job.build(), job.build()
    model, optimizer = prepare(ours.module, plan, AdamW(lr=1e-4))
    plain = torch.optim.AdamW(theirs.module.parameters(), lr=1e-4, fused=True)
    torch.set_num_threads(1)
    batches = itertools.tee(job.batches(ours))
    taken: tuple[list[float], list[float]] = ([], [])
    losses: tuple[list[float], list[float]] = ([], [])
    for _ in range(WARM_UP + PAIRS):
        for which, (module, chosen) in enumerate(((model, optimizer), (theirs.module, plain))):
            start_s = time.process_time()
            losses[which].append(train_step(module, chosen, batches[which], 1))
            taken[which].append(time.process_time() - start_s)
    optimizer.session.close(restore=False)
    executor_s, plain_s = (statistics.median(times[WARM_UP:]) for times in taken)
    ratio = executor_s / plain_s
    print(
        f"2 x {sequence}: executor {executor_s:.3f} s, plain PyTorch {plain_s:.3f} s of CPU a step (medians of {PAIRS},"
        f" in turns): {ratio:.3f}; losses equal: {losses[0] == losses[1]}",
        flush=True,
    )
    return {"sequence": sequence, "executor_s": executor_s, "plain_s": plain_s, "ratio": ratio}


def main() -> None:
    rows = [measured(sequence) for sequence in SEQUENCES]
    met = all(row["ratio"] <= GOAL for row in rows if row["sequence"] >= GOAL_SEQUENCE)
    print(f"goal at most {GOAL} from {GOAL_SEQUENCE} tokens on: {'met' if met else 'missed'}")
    write_result("overhead", {"rows": rows, "pairs": PAIRS})


if __name__ == "__main__":
    only_help(__doc__)
    main()
