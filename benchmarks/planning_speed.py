"""CPU seconds of planning, each case in a process of its own, beside an earlier checkout where one is given.

Groups of cases (sequence 1024, checkpointing and bf16 unless the case says otherwise; imports are not counted):

- one gpu: `optimal` with its certificate of GPT 18B on one GPU of four kinds, eager and behind the barrier
- accumulation: the same with 8 micro-batches of one sequence
- ranks: GPT 175B on 64 GPUs, eight nodes of eight
- global batch: `pstar plan --global-batch 16` of 4B, for a loop of the user's own and for session.step
- certify: `optimal` of 8B and 12B with 32 micro-batches and the bound of `--certify`
- layers: 10,000 layers with a chunk each, planned by `optimal`, with bound, simulation and proof
- check: `pstar check` of a plan of 78,000 steps
- fits: `ps.fits` of every policy, each model of the catalog on one kind of machine, which take turns
- like: `pstar fits --like` of a ZeRO-3 configuration alone
- compare, compare experts: `ps.compare` of every policy
- cheapest, max model, ways: those questions; ways are those of `pstar plan --global-batch 64`

Prints a row per case, writes results/planning_speed.json, fails above a limit. `--cases` takes groups or parts of a
case's name; the other rows of the file stay as they are. `--beside FOLDER` runs every case that the checkout in FOLDER
knows with that package too, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

from _results import RESULTS, ROOT, dependencies, taken_at, write_result

import pstar_sim as ps
from pstar_sim.catalog.loader import with_nodes
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.model_shapes import model_entry, model_names
from pstar_sim.cli import main as pstar
from pstar_sim.core.plan import Settings
from pstar_sim.errors import DoesNotFit
from pstar_sim.testing import chain_workload
from pstar_sim.units import MIB
from pstar_sim.workload.workload import Workload

MACHINES = ("v100-32", "a100-80", "rtx4090", "h100-80")
LARGE = (("a100-80x8", 8), ("h100-80x8", 8))
SETTINGS = {"eager": Settings(update="eager", clip=False), "barrier": Settings(update="step", clip=True)}
LIMITS_S = {
    "one gpu": 2.0, "accumulation": 4.0, "ranks": 4.0, "global batch": 6.0, "certify": 20.0, "layers": 30.0,
    "check": 8.0, "fits": 3.0, "like": 2.0, "compare": 5.0, "compare experts": 10.0, "cheapest": 20.0,
    "max model": 10.0, "ways": 8.0,
}  # fmt: skip
LAYERS, LAYER_PARAMS = 10_000, 2**20
MANY_STEPS = ("tide", "18B", "v100-32", 26)  # policy, model, machine, micro-batches of the plan that is checked


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case to time.

    prepare: called before the clock starts.
    run: the timed function; it takes the result of `prepare`, and returns figures of the answer.
    """

    group: str
    name: str
    prepare: Callable[[], Any]
    run: Callable[[Any], dict[str, object]]
    gpus: int = 1

    @property
    def limit_s(self) -> float:
        return LIMITS_S[self.group]


def cases() -> Iterator[Case]:
    for name, word, (batch, micro) in product(MACHINES, SETTINGS, ((4, 1), (8, 1), (16, 1), (1, 8))):
        if (name, batch) == ("rtx4090", 16):
            continue  # fits under no policy
        yield Case(
            group="one gpu" if micro == 1 else "accumulation",
            name=f"18B, {name}, {word}, {batch} x {micro}",
            prepare=partial(gpt, "18B", name, word, batch, micro),
            run=planned,
        )
    for (name, nodes), word in product(LARGE, SETTINGS):
        yield Case(
            group="ranks",
            name=f"175B, {nodes} x {name}, {word}, 4 x 1",
            prepare=partial(gpt, "175B", name, word, 4, nodes=nodes),
            run=planned,
            gpus=8 * nodes,
        )
    for loop, name in product(("own", "step"), ("v100-32", "rtx4090")):
        yield Case(
            group="global batch",
            name=f"4B, {name}, 16 sequences, loop {loop}",
            prepare=partial(global_batch, "4B", name, loop),
            run=among_ways,
        )
    for model, name in (("8B", "h100-80"), ("12B", "rtx4090")):
        yield Case(
            group="certify",
            name=f"{model}, {name}, eager, 1 x 32",
            prepare=partial(gpt, model, name, "eager", 1, 32),
            run=partial(planned, certify=True),
        )
    for word in SETTINGS:
        yield Case(
            group="layers",
            name=f"{LAYERS} layers, rtx4090, {word}",
            prepare=partial(thin, word),
            run=partial(planned, prove=True),
        )
    policy, model, name, micro = MANY_STEPS
    yield Case(group="check", name=f"{model}, {name}, barrier, 1 x {micro}, {policy}", prepare=many_steps, run=checked)
    yield from questions()


NODES = ("v100-32", "rtx3090-64gb", "rtx4090-128gb", "a100-80", "h100-80", "gh200", "mi300x", "v100-32x8", "a100-80x8",
         "h100-80x8", "rtx4090x8")  # fmt: skip
COMPARED = (
    ("llama-3.1-8b", "rtx4090-128gb", 1, 1, 4096, "own"), ("llama-3-70b", "h100-80x8", 1, 1, 2048, "own"),
    ("4B", "v100-32", 1, 8, 1024, "own"), ("1B", "rtx4090", 2, 8, 1024, "own"), ("1B", "rtx4090", 2, 8, 1024, "step"),
    ("qwen2.5-7b", "a100-80", 4, 1, 2048, "own"), ("gpt-oss-20b", "rtx4090", 1, 2, 1024, "own"),
    ("qwen3-30b-a3b", "h100-80", 2, 1, 1024, "own"), ("qwen3-30b-a3b", "h100-80x8", 1, 4, 1024, "own"),
)  # fmt: skip
"""Model, machine, sequences per GPU and micro-batch, micro-batches, sequence, loop."""


def questions() -> Iterator[Case]:
    """Yields the questions that people ask first, as they ask them: every policy, settings as they are."""
    for model, name in zip(model_names(), cycle(NODES)):
        prepare = partial(asked, model, name, 1, 1, min(1024, model_entry(model).max_seq or 1024))
        yield Case(group="fits", name=f"fits {model}, {name}", prepare=prepare, run=fitting)
    for model, name in (("llama-3.1-70b", "a100-80x8"), ("8B", "rtx4090-128gb"), ("gpt-oss-20b", "h100-80x8")):
        yield Case(group="like", name=f"like {model}, {name}", prepare=partial(zero3, model, name), run=beside_none)
    for model, name, batch, micro, seq, loop in COMPARED:
        yield Case(
            group="compare experts" if model_entry(model).experts else "compare",
            name=f"compare {model}, {name}, {batch} x {micro} of {seq}, loop {loop}",
            prepare=partial(asked, model, name, batch, micro, seq, loop),
            run=compared,
        )
    for model, days in (("8B", 14), ("llama-3.1-70b", None), ("qwen3-30b-a3b", 30)):
        offers = partial(ps.cheapest, model, tokens=3e9, batch=64, seq=1024, deadline_s=days and days * 86400.0)
        yield Case(group="cheapest", name=f"cheapest {model}", prepare=lambda: None, run=partial(answered, offers))
    for name, batch in (("v100-32", 8), ("rtx4090-128gb", 4), ("h100-80", 8), ("a100-80x8", 8)):
        largest = partial(ps.max_model, name, batch=batch, seq=1024)
        yield Case(group="max model", name=f"max model {name}", prepare=lambda: None, run=partial(answered, largest))
    for model, name in (("4B", "rtx4090"), ("4B", "a100-80"), ("1B", "v100-32")):
        prepare = partial(global_batch, model, name, "own", 64)
        yield Case(group="ways", name=f"64 sequences of {model}, {name}", prepare=prepare, run=among_ways)


def asked(model: str, name: str, batch: int, micro: int, seq: int, loop: str = "own") -> Job:
    """batch: sequences per GPU and micro-batch."""
    machine = ps.machine(name)
    w = ps.preset(model, batch=batch * machine.data_parallel_size, seq=seq, micro_batches=micro)
    return w, machine, Settings(loop=loop)


def fitting(job: Job) -> dict[str, object]:
    workload, machine, settings = job
    return {"fit": sum(row.fits for row in ps.fits(workload, machine, settings=settings, near=None))}


def compared(job: Job) -> dict[str, object]:
    workload, machine, settings = job
    answer = ps.compare(workload, machine, settings=settings, near=None)
    return {"fit": len(answer.planned), "iteration_s": answer.best().row.iteration_s}


def answered(ask: Callable[[], Any], _: object) -> dict[str, object]:
    return {"rows": len(ask())}


def zero3(model: str, name: str) -> list[str]:
    path = Path(tempfile.mkdtemp()) / "zero3.json"
    offload = {"device": "cpu", "pin_memory": True}
    zero = {"stage": 3, "offload_optimizer": offload, "offload_param": offload}
    batch = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    path.write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": True}, **batch}), encoding="utf-8")
    return ["fits", "--like", str(path), "--model", model, "--seq", "1024", "--machine", name]


def beside_none(words: list[str]) -> dict[str, object]:
    return {"fits": pstar(words) == 0}


Job = tuple[Workload, Machine, Settings]


def gpt(model: str, machine: str, word: str, batch: int, micro_batches: int = 1, *, nodes: int = 1) -> Job:
    """Returns the job of a GPT model.

    batch: sequences per GPU and micro-batch.
    """
    on = ps.machine(machine) if nodes == 1 else with_nodes(ps.machine(machine), nodes)
    whole = batch * len(on.ranks)
    w = ps.preset(model, batch=whole, seq=1024, dtype="bf16", checkpointing=True, micro_batches=micro_batches)
    return w, on, SETTINGS[word]


def thin(word: str) -> Job:
    w = chain_workload(LAYERS, LAYER_PARAMS, tide_bytes=8 * MIB, flops=10**11)
    return w, ps.machine("rtx4090"), replace(SETTINGS[word], chunk_bytes=2 * LAYER_PARAMS)


def planned(job: Job, *, policy: str = "optimal", certify: bool = False, prove: bool = False) -> dict[str, object]:
    workload, machine, settings = job
    found = ps.compare(
        workload, machine, policies=[policy], settings=settings, barrier_cost=False, near=False, certify=certify
    )
    row = found.rows[0]
    if not row.fits:
        raise LookupError(f"does not fit: {row.reason}")
    figures: dict[str, object] = {"iteration_s": row.iteration_s, "bound_s": row.lower_bound_s}
    if prove:
        figures["steps"] = found.best().plan.check().steps
    return figures


def global_batch(model: str, machine: str, loop: str, sequences: int = 16) -> list[str]:
    asked = ["plan", "--model", model, "--seq", "1024", "--machine", machine, "--global-batch", str(sequences)]
    return asked if loop == "own" else [*asked, "--loop", loop]  # an earlier version has no other loop


def among_ways(asked: list[str]) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        _pstar([*asked, "--policy", "optimal", "-o", str(path)])
        plan = json.loads(path.read_text(encoding="utf-8"))
    seconds, choices = plan["predictions"]["iteration_s"], plan["choices"]
    return {"iteration_s": seconds, "way": choices["variant"], "ways": len(choices["variants_tried"])}


def many_steps() -> tuple[Path, int]:
    """Returns a plan file, and its number of steps."""
    policy, model, name, micro = MANY_STEPS
    path = Path(tempfile.mkdtemp()) / "plan.json"
    workload, machine, settings = gpt(model, name, "barrier", 1, micro)
    found = ps.compare(workload, machine, policies=[policy], settings=settings, barrier_cost=False, near=False)
    found.best().save(path)
    return path, len(found.best().plan.steps)


def checked(file: tuple[Path, int]) -> dict[str, object]:
    path, steps = file
    _pstar(["check", str(path)])
    path.unlink()
    path.parent.rmdir()
    return {"steps": steps}


def _pstar(asked: list[str]) -> None:
    status = pstar(asked)
    if status:
        raise LookupError(f"pstar {asked[0]} ended with status {status}")


def work(case: Case) -> dict[str, object]:
    """Returns the measurements of one process: CPU seconds and the figures of the answer, or the reason why there are
    none."""
    warm = ps.preset("1B", batch=1, seq=1024, dtype="bf16")
    ps.compare(warm, ps.machine("v100-32"), policies=["optimal"], barrier_cost=False)
    _ = ps.fits, ps.cheapest, ps.max_model  # imports are not the planner's
    try:
        prepared = case.prepare()
        begin_s = time.process_time()
        figures = case.run(prepared)
    except (DoesNotFit, LookupError) as reason:
        return {"refused": str(reason)}
    return {"cpu_s": time.process_time() - begin_s, **figures}


def measured(case: Case, package: Path) -> dict[str, Any]:
    """Returns the measurements of the case in a process that imports the package of that checkout."""
    environment = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--worker", case.name],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        return {"refused": done.stderr.strip().splitlines()[-1]}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def row_of(case: Case, beside: Path | None, repeats: int) -> dict[str, Any]:
    """Returns the case's figures, CPU seconds by median, of this checkout and of `beside`."""
    runs: dict[str, list[dict[str, Any]]] = {"": [], "before": []}
    for _ in range(repeats):
        for key, package in (("", ROOT), ("before", beside)):
            if package is not None and not any("refused" in one for one in runs[key]):
                runs[key].append(measured(case, package))
    row: dict[str, Any] = {"group": case.group, "case": case.name, "gpus": case.gpus, "limit_s": case.limit_s}
    for key, found in runs.items():
        if found:
            answer = dict(found[0])
            if "cpu_s" in answer:
                answer["cpu_s"] = statistics.median(one["cpu_s"] for one in found)
            row.update(answer if not key else {key: answer})
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="of each case; the median is given")
    parser.add_argument("--cases", action="append", metavar="WORD", help="a group, or a part of a case's name")
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="an earlier checkout to run beside this one")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    known = list(cases())
    if args.worker is not None:
        answer = work(next(case for case in known if case.name == args.worker))
        print(f"\n{json.dumps(answer)}")
        return 0
    wanted = [c for c in known if not args.cases or any(w == c.group or w in c.name for w in args.cases)]
    path = RESULTS / "planning_speed.json"
    earlier = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    rows = {row["case"]: row for row in earlier if row.get("case") in {c.name for c in known}}
    over = 0
    print("| group | case | iteration | over bound | CPU before | CPU | limit |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for case in wanted:
        row = rows[case.name] = row_of(case, args.beside, args.repeats)
        if "refused" in row:
            over += 1
            print(f"| {case.group} | {case.name} | {row['refused']} |", flush=True)
            continue
        over += row["cpu_s"] > case.limit_s
        before = row.get("before", {})
        cells = [
            f"{row['iteration_s']:.3f} s" if row.get("iteration_s") else "",
            f"{row['iteration_s'] / row['bound_s'] - 1:.2%}" if row.get("bound_s") else "",
            f"{before['cpu_s']:.2f} s" if "cpu_s" in before else "",
            f"{row['cpu_s']:.2f} s",
            f"{case.limit_s:g} s",
        ]
        print(f"| {case.group} | {case.name} | {' | '.join(cells)} |", flush=True)
    ordered = [rows[case.name] for case in known if case.name in rows]
    stamp = None
    if len(ordered) > len(wanted):  # some rows are of an earlier run
        stamp = {**(taken_at(dependencies("planning_speed")) or {}), "at_or_before": True}
    said = write_result("planning_speed", {"rows": ordered}, stamp=stamp)
    print(f"\n{over} of {len(wanted)} cases over their limit; written to {said}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
