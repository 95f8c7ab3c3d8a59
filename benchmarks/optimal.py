"""`optimal` against every other policy and against its lower bound: 4 machines x 6 GPT models x batch 4, 8, 16.

Sequence 1024, checkpointing, bf16 (also where the card would have to emulate it), eager updates, no clipping; one GPU.
The machines are those of machines/, whose constants stay as they are when the catalog changes, so that tables of two
commits are comparable. Prints a row per configuration, median and largest gap, and every case in which another policy
is faster than `optimal` (if there is one: exit status 1).

--barrier: update=step with clipping. --shapes: models with large vocabularies instead. --accumulation: 7 to 12B models
with several micro-batches. --small: batch 1 and 2 of these and the GPT models. --ranks: 4 to 18B models on nodes of
eight GPUs, batch per GPU. --alone: no other policy is planned. --certify: gaps to the fluid bound (seconds per
configuration) instead of the joint one; with --accumulation and --small always, at fewer points, and at all points
where the gap is large.

Writes results/optimal.json, or the table's own file: each row as soon as it is known, in a random order, so that an
interrupted table is a fair sample. --missing measures the rows that the file lacks; its rows are kept if nothing that
plans depend on has changed since.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from _results import PLANNED, RESULTS, ROOT, changes_since, write_result

import pstar_sim as ps
from pstar_sim.bounds.bounds import lower_bound
from pstar_sim.bounds.fluid import MOST_POINTS, fluid_bound
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
# Points of the fluid program in the tables of accumulation and small batches. With MOST_POINTS the bound is up to 9 %
# higher and takes 5 to 20 s instead of 1 to 6 s, with twice as many points up to 1 % higher. So more points are taken
# where the gap is larger than this: gap -> points.
FEWER_POINTS, MORE_POINTS = 150, {0.02: MOST_POINTS, 0.08: 2 * MOST_POINTS}
WORSE = AS_FAST  # relative difference that counts as "another policy is faster"


@dataclass
class Row:
    """One configuration.

    seconds: simulated seconds by policy that fits and whose plan the user's loop can follow.
    bound_s: bound of `optimal`'s own chunk size.
    micro_batches: number of micro-batches of `batch` sequences each.
    """

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
    def key(self) -> tuple[object, ...]:
        return self.machine, self.model, self.batch, self.micro_batches

    @property
    def words(self) -> str:
        return f"{self.machine} {self.model} batch {self.batch} x {self.micro_batches}"

    @property
    def gap(self) -> float | None:
        if self.bound_s is None or "optimal" not in self.seconds:
            return None
        return self.seconds["optimal"] / self.bound_s - 1

    @property
    def faster(self) -> dict[str, float]:
        """Policies that are faster than optimal, or that fit where optimal does not."""
        own = self.seconds.get("optimal", float("inf"))
        return {name: s for name, s in self.seconds.items() if s < own * (1 - WORSE)}


@dataclass(frozen=True)
class Configuration:
    """A configuration to plan.

    batches: "B" or "BxU", sequences of a micro-batch and micro-batches.
    points: points of the fluid program; 0: the joint bound. Where the gap is large, the program is also solved with
        MORE_POINTS, and the largest bound counts.
    alone: whether no other policy is planned.
    """

    machine: str
    model: str
    batches: str
    barrier: bool
    points: int
    alone: bool

    @property
    def row(self) -> Row:
        """The row, without its figures."""
        sequences, _, times = self.batches.partition("x")
        return Row(self.machine, self.model, int(sequences), int(times or 1))

    def measured(self) -> Row:
        row = self.row
        machine = ps.machine(FROZEN / f"{self.machine}.toml")
        workload = ps.preset(self.model, batch=row.batch, seq=SEQUENCE, dtype="bf16", checkpointing=True)
        workload = repeat_micro_batch(workload, row.micro_batches)
        settings = Settings(update="step", clip=True) if self.barrier else Settings(update="eager", clip=False)
        for name, policy in built_in().items():
            if self.alone and name != "optimal":
                continue
            begin_s = time.process_time()
            try:
                plan = policy(workload, machine, settings)
            except DoesNotFit:
                continue
            except PstarError as error:
                print(f"{row.words}: {name} does not apply: {error}", file=sys.stderr)
                continue
            took_s = time.process_time() - begin_s
            if plan.workload.relayed != workload.relayed:
                continue  # the user's loop cannot follow a layer-major plan; the bound is that of the loop's order
            row.seconds[name] = play(plan).iteration_s
            if name == "optimal":
                row.cpu_s = took_s
                row.modes = str(plan.choices.get("modes", plan.choices.get("schedule", "")))
                job = (workload, machine, settings, plan.layout)
                bound = fluid_bound(*job, most_points=self.points) if self.points else lower_bound(*job)
                for gap, points in MORE_POINTS.items() if 0 < self.points < MOST_POINTS else ():
                    if row.seconds[name] > bound.seconds * (1 + gap):
                        bound = max(bound, fluid_bound(*job, most_points=points), key=lambda b: b.seconds)
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


@dataclass(frozen=True)
class Table:
    """Configurations whose rows are in one file.

    name: name of the file.
    what: the configurations, in words.
    """

    name: str
    what: str
    configurations: Sequence[Configuration]

    def kept(self) -> dict[tuple[object, ...], Row]:
        """Returns the rows of the file if nothing that plans depend on has changed since; otherwise none."""
        path = RESULTS / f"{self.name}.json"
        if not path.exists():
            return {}
        held = json.loads(path.read_text(encoding="utf-8"))
        stamp = held["taken_at"]
        if stamp is None or stamp["dirty"] or changes_since(ROOT, stamp["commit"], PLANNED):
            print("plans may have changed since the rows in the file were measured: it begins anew", flush=True)
            return {}
        rows = [_row(values) for values in held["rows"]]
        return {row.key: row for row in rows}

    def write(self, rows: Sequence[Row]) -> Path:
        return write_result(
            self.name,
            {"what": self.what, "summary": self.summary(rows), "rows": [{**asdict(r), "gap": r.gap} for r in rows]},
        )

    def summary(self, rows: Sequence[Row]) -> Mapping[str, object]:
        fitting = sorted((row for row in rows if row.gap is not None), key=lambda row: -(row.gap or 0.0))
        gaps = [row.gap or 0.0 for row in fitting]
        return {
            "configurations": len(rows),
            "of": len(self.configurations),
            "fit": len(gaps),
            "median_gap": round(statistics.median(gaps), 6) if gaps else None,
            "mean_gap": round(statistics.fmean(gaps), 6) if gaps else None,
            "max_gap": round(gaps[0], 6) if gaps else None,
            "max_gap_at": fitting[0].words if fitting else None,
            "largest": [f"{row.words}: {row.gap:.1%}, {row.binding}" for row in fitting[:8]],
            "beaten": [f"{row.words} by {name}" for row in rows for name in row.faster],
            "largest_cpu_s": round(max((row.cpu_s for row in rows), default=0.0), 2),
        }


def _row(values: Mapping[str, Any]) -> Row:
    return Row(**{name: value for name, value in values.items() if name != "gap"})


def table_of(options: argparse.Namespace) -> Table:
    """Returns the table for these options."""
    usual = SHAPES if options.shapes else ACCUMULATED if options.accumulation else MODELS
    usual = SMALL if options.small else MODELS[1:] if options.ranks and usual == MODELS else usual
    batches = ACCUMULATIONS if options.accumulation else SMALL_BATCHES if options.small else BATCHES
    points = MOST_POINTS if options.certify else FEWER_POINTS if options.accumulation or options.small else 0
    configurations = [
        Configuration(machine, model, batch, options.barrier, points, options.alone)
        for machine, model, batch in product(NODES if options.ranks else MACHINES, usual, batches)
    ]
    words = {"ranks": options.ranks, "accumulation": options.accumulation, "small": options.small,
             "barrier": options.barrier, "shapes": options.shapes, "certified": options.certify}  # fmt: skip
    which = (
        "shapes" if options.shapes
        else "accumulating" if options.accumulation
        else "small batches of" if options.small
        else "gpt"
    )  # fmt: skip
    where = ", eight GPUs" if options.ranks else ""
    setting, bound = "barrier" if options.barrier else "eager", "fluid" if points else "joint LP"
    return Table(
        name="_".join(["optimal", *(word for word, on in words.items() if on)]),
        what=f"{which} models{where}, {setting}, gap to the {bound} bound",
        configurations=configurations,
    )


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
    parser.add_argument("--missing", action="store_true", help="rows that the file lacks")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    wanted = table_of(options)
    asked = [
        one for one in wanted.configurations
        if one.machine in (options.machines or [one.machine])
        and one.model in (options.models or [one.model])
        and one.batches in (options.batches or [one.batches])
    ]  # fmt: skip
    whole = len(asked) == len(wanted.configurations)
    # a table of one GPU in which no other policy was planned does not show that `optimal` is never slower
    whole &= options.accumulation or options.ranks or options.small or not options.alone
    keep = whole or options.missing
    rows = wanted.kept() if options.missing else {}
    todo = [one for one in asked if one.row.key not in rows]
    random.Random(0).shuffle(todo)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    order = [one.row.key for one in wanted.configurations]
    with ProcessPoolExecutor(options.processes) as pool:
        for done in as_completed([pool.submit(one.measured) for one in todo]):
            row = done.result()
            rows[row.key] = row
            print(f"{row.words}: {row.seconds.get('optimal')} s, bound {row.bound_s}", flush=True)
            if keep:
                wanted.write([rows[key] for key in order if key in rows])
    there = [rows[key] for key in order if key in rows]
    table(there)
    found = wanted.summary(there)
    for name, value in found.items():
        print(f"{name.replace('_', ' ')}: {value}")
    if keep:
        print(f"in {RESULTS / wanted.name}.json: {len(there)} of {len(order)} rows")
    return 1 if found["beaten"] else 0


if __name__ == "__main__":
    sys.exit(main())
