"""`optimal` against its certified bound on jobs of four kinds, drawn at random (SEED), JOBS of each.

- mixed: pairs of GPUs that differ, two to eight of them, against `whale` and policies with equal shares; the bound is
  over all shares
- experts: a few large models of routed experts, on one GPU and on eight, one to eight micro-batches
- sums16: several micro-batches whose gradients add up in 16 bits
- layer-major: several micro-batches for a loop of `session.step`, which takes any order

No two jobs are alike; each has eager updates or a barrier. Prints a row per job, median and largest gap, and every case
in which another policy is faster than `optimal` (if there is one: exit status 1). Where the gap to the joint bound is
above CERTIFIED, the fluid bound counts if the program is solved in time.

Writes results/optimal_KIND.json: each row as soon as it is known, about in the order drawn, so that an interrupted
table is a fair sample. With another number of --jobs, nothing is written.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from random import Random
from typing import Any

from optimal import Row, Table, table

import pstar_sim as ps

SEED, JOBS, CERTIFIED = 39, 40, 0.01
SEQUENCE = 1024
GPUS = ("v100-32", "a100-40", "a100-80", "h100-80", "p100-16", "rtx3090-64gb", "rtx5090-128gb")
MODELS = ("1B", "2B", "4B", "gpt2-xl", "llama-3.2-1b", "qwen2.5-1.5b", "8B")
MIXED = ("optimal", "whale", "whale:schedule=tide", "whale:speed=seconds", "zero3_resident", "tide")


@dataclass(frozen=True, kw_only=True)
class Job:
    """host: host memory, if it is not the machine's own.
    settings: fields of `Settings`.
    policies: to compare; `optimal` is one of them.
    """

    machine: str
    model: str
    batch: int
    micro_batches: int
    kernels: str | None = None
    eager: bool
    host: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    policies: Sequence[str] = ("optimal",)

    def measured(self) -> Row:
        words = (self.machine, self.host, "eager" if self.eager else "barrier", self.kernels or "usual")
        row = Row(" ".join(filter(None, words)), self.model, self.batch, self.micro_batches)
        begin_s = time.process_time()
        answer = self.compared(self.policies)
        row.cpu_s = time.process_time() - begin_s
        row.seconds = {r.policy: r.iteration_s for r in answer.rows if r.iteration_s is not None}
        own = next(r for r in answer.rows if r.policy == "optimal")
        if own.gap is None or own.certificate is None:
            return row
        plan = answer["optimal"].plan
        row.bound_s, row.binding = own.lower_bound_s, str(own.certificate["binding"])
        row.modes = str(plan.choices.get("balance") or plan.choices.get("modes") or plan.choices.get("schedule", ""))
        if own.gap > CERTIFIED:
            made = {} if plan.machine.mixed else {"optimal": (plan, answer["optimal"].timeline)}
            (finer,) = self.compared(["optimal"], certify=True, made=made).rows
            assert finer.lower_bound_s is not None and finer.certificate is not None
            row.bound_s, row.binding = finer.lower_bound_s, str(finer.certificate["binding"])
        return row

    def compared(self, policies: Sequence[str], **how: Any) -> Any:
        kernels = {} if self.kernels is None else {"kernels": self.kernels}
        w = ps.preset(self.model, batch=self.batch, seq=SEQUENCE, micro_batches=self.micro_batches, **kernels)
        setting: dict[str, Any] = {"update": "eager", "clip": False} if self.eager else {}
        machine = ps.machine(self.machine, **({} if self.host is None else {"host_memory": self.host}))
        return ps.compare(w, machine, policies=policies, near=False, **setting, **self.settings, **how)


def mixed(random: Random) -> Job:
    first, second = random.sample(GPUS, 2)
    one, two = random.choice(((1, 1), (1, 1), (2, 2), (1, 3), (3, 1), (4, 4), (2, 6)))
    gpus = one + two
    micro_batches = random.choice((1, 1, 1, 2, 4, 8))
    batch = gpus * random.choice((1, 2, 4, 8) if micro_batches == 1 else (1, 2, 4))
    kernels = random.choice((None, None, "eager", "fused", "compiled"))
    return Job(
        machine=f"{first}x{one}+{second}x{two}",
        model=random.choice(MODELS),
        batch=batch,
        micro_batches=micro_batches,
        kernels=kernels,
        eager=random.random() < 0.5,
        policies=MIXED,
    )


def experts(random: Random) -> Job:
    machine, gpus, host = random.choice(
        (
            ("h100-80", 1, "1TB"),
            ("a100-80", 1, "1TB"),
            ("rtx4090", 1, "1TB"),
            ("h100-80x8", 8, None),
            ("a100-80x8", 8, None),
        )
    )
    return Job(
        machine=machine,
        host=host,
        model=random.choice(("qwen3-30b-a3b", "gpt-oss-20b", "mixtral-8x7b")),
        batch=gpus * random.choice((1, 2, 4, 8)),
        micro_batches=random.choice((1, 1, 2, 4, 8)),
        eager=random.random() < 0.5,
    )


def accumulating(random: Random, oldest: str, **settings: Any) -> Job:
    host = random.choice(("256GB", "512GB"))
    return Job(
        machine=random.choice((oldest, "a100-80", "rtx4090", "h100-80")),
        host=host,
        model=random.choice(("1B", "2B", "4B", "8B", "llama-3.2-1b", "llama-3-8b", "qwen2.5-7b")),
        batch=random.choice((1, 2, 4)),
        micro_batches=random.choice((2, 4, 8)),
        eager=random.random() < 0.5,
        settings=settings,
    )


def sums16(random: Random) -> Job:
    return accumulating(random, "a100-40", sums="16-bit")


def layer_major(random: Random) -> Job:
    return accumulating(random, "v100-32", loop="step")


KINDS: Mapping[str, tuple[Callable[[Random], Job], str]] = {
    "mixed": (mixed, "mixed GPUs, bound over all shares"),
    "experts": (experts, "routed experts"),
    "sums16": (sums16, "sums of gradients in 16 bits"),
    "layer_major": (layer_major, "micro-batches in any order"),
}


def table_of(kind: str, count: int) -> Table:
    draw, what = KINDS[kind]
    random, jobs = Random(SEED), list[Job]()
    while len(jobs) < count:
        job = draw(random)
        jobs += [job] * (job not in jobs)
    return Table(f"optimal_{kind}", f"{what}, eager and barrier, gap to the fluid bound", jobs)  # type: ignore[arg-type]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args(argv)
    tables = {kind: table_of(kind, args.jobs) for kind in args.kinds}
    rows: dict[str, list[Row]] = {kind: [] for kind in tables}
    with ProcessPoolExecutor(args.processes) as pool:
        asked = {
            pool.submit(job.measured): kind
            for at in zip(*([(kind, job) for job in wanted.configurations] for kind, wanted in tables.items()))
            for kind, job in at
        }
        for done in as_completed(asked):
            kind, row = asked[done], done.result()
            rows[kind].append(row)
            took = f"gap {row.gap}, {row.cpu_s:.1f} s of CPU"
            print(f"{kind}: {row.words}: {row.seconds.get('optimal')} s, bound {row.bound_s}, {took}", flush=True)
            if args.jobs == JOBS:
                tables[kind].write(rows[kind])
    beaten = False
    for kind, wanted in tables.items():
        table(rows[kind])
        summary = wanted.summary(rows[kind])
        beaten |= bool(summary["beaten"])
        for name, value in summary.items():
            print(f"{name.replace('_', ' ')}: {value}")
    return 1 if beaten else 0


if __name__ == "__main__":
    sys.exit(main())
