"""`optimal` against every other policy and against its lower bound: 4 machines x 6 GPT models x batch 4, 8, 16.

Sequence 1024, checkpointing, bf16 (also where the card would have to emulate it), eager updates, no clipping; one GPU.
The machines are those of machines/, whose constants stay as they are when the catalog changes, so that tables of two
commits are comparable.
Prints a row a configuration, median and largest gap, and every case in which another policy is faster than `optimal`
(there must be none: exit 1). --barrier: update=step with clipping. --shapes: models with large vocabularies instead.
--accumulation: 7 to 12B models with several micro-batches. --small: batch 1 and 2 of these and the GPT models.
--ranks: 4 to 18B models on nodes of eight GPUs, batch per GPU. --alone: no other policy is planned.
--certify: gaps to the fluid bound (seconds a configuration) instead of the joint one. Writes results/optimal.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from _results import write_result

import pstar_sim as ps
from pstar_sim.bounds.bounds import lower_bound
from pstar_sim.core.plan import Settings
from pstar_sim.errors import DoesNotFit, PstarError
from pstar_sim.policy.kit.ties import AS_FAST
from pstar_sim.policy.registry import built_in
from pstar_sim.sim.play import play
from pstar_sim.workload.workload import repeat_micro_batch

FROZEN = Path(__file__).with_name("machines")
MACHINES = ("v100-32", "a100-80", "rtx4090", "h100-80")
NODES = ("v100-32x8", "a100-80x8", "h100-80x8")
MODELS = ("1B", "4B", "8B", "12B", "15B", "18B")
SHAPES = ("llama-3-8b", "qwen2.5-7b", "qwen2.5-32b")
ACCUMULATED = ("8B", "12B", "llama-3-8b", "qwen2.5-7b")
BATCHES = ("4", "8", "16")
SMALL, SMALL_BATCHES = tuple(dict.fromkeys((*MODELS, *ACCUMULATED))), ("1", "2")
ACCUMULATIONS = ("1x8", "2x4", "4x4", "1x32")  # sequences of a micro-batch x micro-batches
SEQUENCE = 1024
WORSE = AS_FAST  # relative difference that counts as "another policy is faster"


@dataclass
class Row:
    """One configuration. seconds: simulated, by policy that fits. bound_s: of `optimal`'s own chunk size.
    micro_batches: of `batch` sequences each."""

    machine: str
    model: str
    batch: int
    micro_batches: int
    seconds: dict[str, float] = field(default_factory=dict)
    bound_s: float | None = None
    binding: str = ""
    cpu_s: float = 0.0
    modes: str = ""

    @property
    def gap(self) -> float | None:
        if self.bound_s is None or "optimal" not in self.seconds:
            return None
        return self.seconds["optimal"] / self.bound_s - 1

    @property
    def faster(self) -> dict[str, float]:
        """Policies that are faster than optimal, or fit where it does not."""
        own = self.seconds.get("optimal", float("inf"))
        return {name: s for name, s in self.seconds.items() if s < own * (1 - WORSE)}


def configuration(job: tuple[str, str, str, bool, bool, bool]) -> Row:
    machine_name, model, batches, barrier, certify, alone = job
    sequences, _, times = batches.partition("x")
    batch, micro_batches = int(sequences), int(times or 1)
    machine = ps.machine(FROZEN / f"{machine_name}.toml")
    workload = ps.preset(model, batch=batch, seq=SEQUENCE, dtype="bf16", checkpointing=True)
    workload = repeat_micro_batch(workload, micro_batches)
    settings = Settings(update="step", clip=True) if barrier else Settings(update="eager", clip=False)
    row = Row(machine_name, model, batch, micro_batches)
    for name, policy in built_in().items():
        if alone and name != "optimal":
            continue
        begin_s = time.process_time()
        try:
            plan = policy(workload, machine, settings)
        except DoesNotFit:
            continue
        except PstarError as error:
            print(f"{machine_name} {model} {batch}: {name} does not apply: {error}", file=sys.stderr)
            continue
        took_s = time.process_time() - begin_s
        row.seconds[name] = play(plan).iteration_s
        if name == "optimal":
            row.cpu_s = took_s
            row.modes = str(plan.choices.get("modes", plan.choices.get("schedule", "")))
            if certify:
                from pstar_sim.bounds.fluid import fluid_bound

                bound = fluid_bound(workload, machine, settings, plan.layout)
            else:
                bound = lower_bound(workload, machine, settings, plan.layout)
            row.bound_s, row.binding = bound.seconds, bound.binding
    return row


def table(rows: Sequence[Row]) -> None:
    names = [name for name in built_in() if name != "optimal" and any(name in row.seconds for row in rows)]
    print(
        f"{'machine':8} {'model':11} {'batch':>5} {'times':>5} {'bound':>8} {'by':8} {'optimal':>8} {'gap':>7}  "
        + "  ".join(names)
    )
    for row in rows:
        cells = [f"{row.seconds[n]:{len(n)}.3f}" if n in row.seconds else " " * (len(n) - 1) + "-" for n in names]
        own = f"{row.seconds['optimal']:8.3f}" if "optimal" in row.seconds else "       -"
        bound = f"{row.bound_s:8.3f}" if row.bound_s is not None else "       -"
        gap = f"{row.gap:7.2%}" if row.gap is not None else "      -"
        print(
            f"{row.machine:8} {row.model:11} {row.batch:5} {row.micro_batches:5} {bound} {row.binding:8} {own} {gap}  "
            + "  ".join(cells)
        )


def summary(rows: Sequence[Row]) -> Mapping[str, object]:
    gaps = sorted(row.gap for row in rows if row.gap is not None)
    worst = max((row for row in rows if row.gap is not None), key=lambda row: row.gap or 0.0, default=None)
    return {
        "configurations": len(rows),
        "fit": len(gaps),
        "median_gap": round(statistics.median(gaps), 6) if gaps else None,
        "mean_gap": round(statistics.fmean(gaps), 6) if gaps else None,
        "max_gap": round(gaps[-1], 6) if gaps else None,
        "max_gap_at": f"{worst.machine} {worst.model} batch {worst.batch} x {worst.micro_batches}" if worst else None,
        "beaten": [f"{row.machine} {row.model} batch {row.batch} by {name}" for row in rows for name in row.faster],
        "largest_cpu_s": round(max(row.cpu_s for row in rows), 2),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--barrier", action="store_true", help="update=step with clipping")
    parser.add_argument("--shapes", action="store_true", help=f"{', '.join(SHAPES)} instead of the GPT models")
    parser.add_argument("--accumulation", action="store_true", help=f"{', '.join(ACCUMULATED)} with micro-batches")
    parser.add_argument("--small", action="store_true", help="batch 1 and 2")
    parser.add_argument("--ranks", action="store_true", help=f"nodes of eight GPUs: {', '.join(NODES)}")
    parser.add_argument("--alone", action="store_true", help="plan no other policy")
    parser.add_argument("--certify", action="store_true", help="the fluid bound instead of the joint one")
    parser.add_argument("--machines", nargs="+", help="of machines/")
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--batches", nargs="+", metavar="B[xU]", help="sequences of a micro-batch x micro-batches")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    usual = SHAPES if options.shapes else ACCUMULATED if options.accumulation else MODELS
    usual = SMALL if options.small else MODELS[1:] if options.ranks and usual == MODELS else usual
    every = ACCUMULATIONS if options.accumulation else SMALL_BATCHES if options.small else BATCHES
    jobs = [
        (machine, model, batches, options.barrier, options.certify, options.alone)
        for machine in options.machines or (NODES if options.ranks else MACHINES)
        for model in options.models or usual
        for batches in options.batches or every
    ]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(options.processes) as pool:
        rows = list(pool.map(configuration, jobs))
    table(rows)
    found = summary(rows)
    for name, value in found.items():
        print(f"{name.replace('_', ' ')}: {value}")
    setting = "barrier" if options.barrier else "eager"
    which = (
        "shapes"
        if options.shapes
        else "accumulating"
        if options.accumulation
        else "small batches of"
        if options.small
        else "gpt"
    )
    where = ", eight GPUs" if options.ranks else ""
    bound = "fluid" if options.certify else "joint LP"
    name = "optimal" + "".join(
        f"_{word}"
        for word, on in (
            ("ranks", options.ranks),
            ("accumulation", options.accumulation),
            ("small", options.small),
            ("barrier", options.barrier),
            ("shapes", options.shapes),
            ("certified", options.certify),
        )
        if on
    )
    whole = options.machines is None and options.models is None and options.batches is None
    whole &= options.accumulation or options.ranks or options.small or not options.alone
    if whole:
        path = write_result(
            name,
            {
                "what": f"{which} models{where}, {setting}, gap to the {bound} bound",
                "summary": found,
                "rows": [
                    {
                        "machine": r.machine,
                        "model": r.model,
                        "batch": r.batch,
                        "micro_batches": r.micro_batches,
                        "bound_s": r.bound_s,
                        "binding": r.binding,
                        "gap": r.gap,
                        "seconds": r.seconds,
                        "modes": r.modes,
                        "cpu_s": r.cpu_s,
                    }
                    for r in rows
                ],
            },
        )
        print(f"written to {path}")
    return 1 if found["beaten"] else 0


if __name__ == "__main__":
    sys.exit(main())
