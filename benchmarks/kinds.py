"""`optimal` against every other policy, and against the bound over all shares, on machines whose GPUs differ.

Jobs are drawn at random (SEED): pairs of GPUs, two to eight of them, with several models, batches, micro-batches and
kernels, eager or behind a barrier. `whale` is asked with each schedule. Prints a row per job, median and largest gap,
and every case in which another policy is faster than `optimal` (if there is one: exit status 1). Where the gap to the
joint bound is above CERTIFIED, the fluid bound counts.

Writes results/optimal_mixed.json: each row as soon as it is known. With another number of --jobs, nothing is written.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from random import Random
from typing import Any

from optimal import Row, Table, table

import pstar_sim as ps

SEED, JOBS, CERTIFIED = 39, 48, 0.01
GPUS = ("v100-32", "a100-40", "a100-80", "h100-80", "p100-16", "rtx3090-64gb", "rtx5090-128gb")
MODELS = ("1B", "2B", "4B", "gpt2-xl", "llama-3.2-1b", "qwen2.5-1.5b", "8B")
EQUAL = ("all_on_gpu", "zero3_resident", "tide", "patrickstar", "stronghold")  # with equal shares
WHALE = ("all_on_gpu", "zero3_resident", "zero_offload", "tide")
POLICIES = (
    "optimal",
    "whale",
    *(f"whale:schedule={schedule}" for schedule in WHALE[1:]),
    "whale:speed=seconds",
    *EQUAL,
)
WORSE = 1e-3  # relative difference that counts as "another policy is faster"


@dataclass(frozen=True)
class Job:
    machine: str
    model: str
    batch: int
    micro_batches: int
    kernels: str | None
    eager: bool

    def measured(self) -> Row:
        name = f"{self.machine} {'eager' if self.eager else 'barrier'} {self.kernels or 'usual'}"
        row = Row(name, self.model, self.batch, self.micro_batches)
        begin_s = time.process_time()
        answer = self.compared(list(POLICIES), certify=False)
        row.cpu_s = time.process_time() - begin_s
        row.seconds = {r.policy: r.iteration_s for r in answer.rows if r.iteration_s is not None}
        own = next(r for r in answer.rows if r.policy == "optimal")
        if own.gap is None or own.certificate is None:
            return row
        row.bound_s, row.binding = own.lower_bound_s, str(own.certificate["binding"])
        row.modes = str(answer["optimal"].plan.choices.get("balance", ""))
        if own.gap > CERTIFIED:
            (finer,) = self.compared(["optimal"], certify=True).rows
            assert finer.lower_bound_s is not None and finer.certificate is not None
            row.bound_s, row.binding = finer.lower_bound_s, str(finer.certificate["binding"])
        return row

    def compared(self, policies: list[str], *, certify: bool) -> Any:
        kernels = {} if self.kernels is None else {"kernels": self.kernels}
        w = ps.preset(self.model, batch=self.batch, seq=1024, micro_batches=self.micro_batches, **kernels)
        setting: dict[str, Any] = {"update": "eager", "clip": False} if self.eager else {}
        return ps.compare(
            w, self.machine, policies=policies, near=False, barrier_cost=False, certify=certify, **setting
        )


def drawn(count: int) -> list[Job]:
    random, found = Random(SEED), []
    while len(found) < count:
        first, second = random.sample(GPUS, 2)
        one, two = random.choice(((1, 1), (1, 1), (2, 2), (1, 3), (3, 1), (4, 4), (2, 6)))
        gpus = one + two
        micro_batches = random.choice((1, 1, 1, 2, 4, 8))
        batch = gpus * random.choice((1, 2, 4, 8) if micro_batches == 1 else (1, 2, 4))
        kernels = random.choice((None, None, "eager", "fused", "compiled"))
        machine = f"{first}x{one}+{second}x{two}"
        found.append(Job(machine, random.choice(MODELS), batch, micro_batches, kernels, random.random() < 0.5))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args(argv)
    jobs = drawn(args.jobs)
    wanted = Table("optimal_mixed", "mixed GPUs, eager and barrier, gap to the fluid bound over all shares", jobs)  # type: ignore[arg-type]
    rows: list[Row] = []
    with ProcessPoolExecutor(args.processes) as pool:
        for done in as_completed([pool.submit(job.measured) for job in jobs]):
            row = done.result()
            rows.append(row)
            print(
                f"{row.words}: {row.seconds.get('optimal')} s, bound {row.bound_s}, gap {row.gap}, {row.modes}",
                flush=True,
            )
            if args.jobs == JOBS:
                wanted.write(rows)
    table(rows)
    summary = wanted.summary(rows)
    for name, value in summary.items():
        print(f"{name.replace('_', ' ')}: {value}")
    return 1 if summary["beaten"] else 0


if __name__ == "__main__":
    sys.exit(main())
