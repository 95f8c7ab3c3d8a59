"""Mutated files: the handling of a plan, a trace or a machine file that was changed after it was written.

Each mutated file goes through the command line, in this process. It is either refused, with one line and status 2 (a
machine file: with a line that names it for each thing that is wrong, at most MOST_WRONG), or accepted. An accepted plan
is run (`pstar run`, and the executor by itself) and has to train like plain PyTorch; an accepted trace or machine has
to give such a plan. A plan with the same steps and other stated figures ("stated") is refused, or `pstar check` names
the changed figures as not checked; a change without effect is accepted. Any other result is a miss: an exception of
another kind, another line, a run longer than the limit, a wrong result.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _interleavings import drawn_queues

from executor import prepare
from executor.run import TrainingJob
from executor.training import train
from pstar_sim.cli import main
from pstar_sim.core.plan import Plan, load_plan
from pstar_sim.errors import PstarError

__all__ = ["FILES", "Bench", "Miss", "Report", "run_mutations"]

FILES = ("plan", "trace", "machine", "stated")
LIMIT_S = 60.0  # seconds for one file, on a machine that other programs use too
MOST_WRONG = 24  # lines about one machine file
STEPS = 2
NET = "py:reliability_net:net"
DATA = "text:corpus"
TOLERANCE = 1e-5
MEMORY_BYTES = 4 * 2**30  # bytes beyond the process's first ones: a mutated size must not take the machine down

MODEL = '''"""A net of a few layers and its batches, for mutated plans."""
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(256, 224)
        self.layers = nn.ModuleList(nn.Linear(224, 224) for _ in range(4))
        self.head = nn.Linear(224, 256)

    def forward(self, input_ids, labels):
        x = self.emb(input_ids)
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def net(batch, sequence):
    ids = torch.zeros(batch, sequence, dtype=torch.long)
    return Net(), {"input_ids": ids, "labels": ids}
'''
GPU_MEMORY = "0.001GB"  # less than the net, so that chunks move


class TooLong(BaseException):
    """A file took longer than the limit. Not an Exception, so that no handler on the way catches it."""


@dataclass(frozen=True)
class Miss:
    """A mutated file that was neither refused properly nor right.

    seed: makes the same file again.
    """

    file: str
    seed: int
    mutation: str
    what: str

    def __str__(self) -> str:
        return f"{self.file} {self.seed} ({self.mutation}): {self.what}"


@dataclass
class Report:
    """Results of mutations.

    outcomes: (file, outcome) -> number of files.
    misses: all misses.
    """

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    misses: list[Miss] = field(default_factory=list)
    seconds: float = 0.0


# --- mutations -------------------------------------------------------------------------------------------------------

NUMBERS = (0, -1, 1, 2, 3, 7, 64, 255, 2**31, 2**63, 10**30, 0.5, -0.0, 1e300, 1e-300)
ODD = (None, True, "", "x", [], {}, [1], {"a": 1}, "\u0000", "9" * 50, -5, 1e999)


def changed_number(rng: random.Random, value: float) -> Any:
    """Returns another number, near or far."""
    near = [value + 1, value - 1, value * 2, value // 2 if isinstance(value, int) else value / 3, -value]
    return rng.choice([*near, *rng.sample(NUMBERS, 3)])


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of every place in nested lists and objects."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from places(item, (*path, i))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def mutate_values(values: Any, rng: random.Random, within: tuple[Any, ...] = ()) -> str:
    """Change one value below `within`, in place. Returns the change in words."""
    found = [(*within, *path) for path in places(at(values, within))]
    path = rng.choice(found)
    parent, key, value = at(values, path[:-1]), path[-1], at(values, path)
    where = ".".join(map(str, path))
    kind = rng.choice(("number", "number", "number", "remove", "odd", "swap", "twice"))
    if kind == "number" and isinstance(value, (int, float)) and not isinstance(value, bool):
        parent[key] = changed_number(rng, value)
        return f"{where}: {value} -> {parent[key]}"
    if kind == "remove":
        del parent[key]
        return f"{where} removed"
    if kind == "odd":
        parent[key] = rng.choice(ODD)
        return f"{where}: {str(value)[:30]} -> {parent[key]!r}"
    if kind == "twice" and isinstance(parent, list):
        parent.insert(key, value)
        return f"{where} twice"
    if isinstance(parent, list) and len(parent) > 1:
        other = rng.randrange(len(parent))
        parent[key], parent[other] = parent[other], parent[key]
        return f"{where} swapped with {other}"
    if isinstance(value, bool):
        parent[key] = not value
        return f"{where}: {value} -> {not value}"
    if isinstance(value, str) and value:
        i = rng.randrange(len(value))
        parent[key] = value[:i] + chr(rng.randrange(33, 127)) + value[i + 1 :]
        return f"{where}: {value!r} -> {parent[key]!r}"
    if isinstance(value, (int, float)):
        parent[key] = changed_number(rng, value)
        return f"{where}: {value} -> {parent[key]}"
    del parent[key]
    return f"{where} removed"


def mutate_bytes(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Flip bits, cut, or move a piece. Returns the bytes and the change in words."""
    kind = rng.choice(("flip", "flip", "flip", "cut", "zero", "move", "insert"))
    if not data:
        return b"\0", "one byte"
    i = rng.randrange(len(data))
    if kind == "flip":
        flipped = bytearray(data)
        count = rng.choice((1, 1, 1, 2, 8))
        for _ in range(count):
            flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(flipped), f"{count} bits flipped"
    if kind == "cut":
        return data[:i], f"cut at byte {i} of {len(data)}"
    n = rng.randrange(1, 200)
    if kind == "zero":
        return data[:i] + b"\0" * len(data[i : i + n]) + data[i + n :], f"{n} zero bytes at {i}"
    if kind == "insert":
        return data[:i] + rng.randbytes(n) + data[i:], f"{n} random bytes at {i}"
    j = rng.randrange(len(data))
    return data[:i] + data[j : j + n] + data[i + n :], f"{n} bytes at {i} from {j}"


def mutate_steps(values: Any, rng: random.Random) -> str:
    """Change the program of a plan: edges, order, steps, or their chunks, lists and moments. Returns the change in
    words."""
    steps: list[str] = values["steps"]
    i = rng.randrange(len(steps))
    kind = rng.choice(("edge", "edge", "edge", "add edge", "swap", "near swap", "remove", "twice", "token", "token"))
    if kind in ("swap", "near swap") and len(steps) > 1:
        j = rng.randrange(len(steps)) if kind == "swap" else (i + 1) % len(steps)
        steps[i], steps[j] = steps[j], steps[i]
        return f"steps {i} and {j} swapped"
    if kind == "remove":
        return f"step {steps.pop(i)!r} removed"
    if kind == "twice":
        steps.insert(i, steps[i])
        return f"step {steps[i]!r} twice"
    if kind == "add edge":
        other = steps[rng.randrange(len(steps))].split()[0].split("=")[-1]
        before = steps[i]
        back = rng.choice(("", "@-1"))
        steps[i] = f"{before},{other}{back}" if "after=" in before else f"{before} after={other}{back}"
        return f"{before!r} -> {steps[i]!r}"
    if kind == "edge":
        with_edges = [n for n, text in enumerate(steps) if "after=" in text]
        if with_edges:
            i = rng.choice(with_edges)
            before = steps[i]
            head, _, tail = before.partition("after=")
            edges = tail.split()[0].split(",")
            edges.pop(rng.randrange(len(edges)))
            rest = " ".join(tail.split()[1:])
            steps[i] = " ".join((head + (f"after={','.join(edges)}" if edges else "") + " " + rest).split())
            return f"{before!r} -> {steps[i]!r}"
    before = steps[i]
    tokens = before.split()
    n = rng.randrange(len(tokens))
    other = rng.choice(steps).split()
    name = tokens[n].split("=")[0]
    same = [t for t in other if t.split("=")[0] == name and "=" in t]
    digits = [m for m, c in enumerate(tokens[n]) if c.isdigit()]
    if same and rng.random() < 0.5:
        tokens[n] = same[0]
    elif digits and rng.random() < 0.8:
        m = rng.choice(digits)
        tokens[n] = tokens[n][:m] + str(rng.randrange(10)) + tokens[n][m + 1 :]
    elif rng.random() < 0.5:
        tokens.pop(n)
    else:
        tokens[n] = rng.choice(other)
    steps[i] = " ".join(tokens)
    return f"{before!r} -> {steps[i]!r}"


def mutate_plan(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    kind = rng.choice(("bytes", "steps", "steps", "steps", "values", "values", "meta"))
    if kind == "bytes":
        return mutate_bytes(data, rng)
    values = json.loads(data)
    if kind == "steps":
        said = [mutate_steps(values, rng) for _ in range(rng.choice((1, 1, 1, 2)))]
        return json.dumps(values).encode(), "; ".join(said)
    top = rng.choice(("workload", "layout", "machine", "initial", "modes", "buffers", "predictions", "choices"))
    if kind == "values" and at(values, (top,)):
        return _dump(values, mutate_values(values, rng, (top,)))
    key = rng.choice(list(values))
    if isinstance(values[key], (int, float)):
        before, values[key] = values[key], changed_number(rng, values[key])
        return _dump(values, f"{key}: {before} -> {values[key]}")
    return _dump(values, mutate_values(values, rng))


RIGHT, REFUSED = "right", "refused"
NOT_COMPUTED = ("barrier_cost_s", "policy_iteration_s")


def mutate_stated(data: bytes, rng: random.Random) -> tuple[bytes, str, str]:
    """Change a figure that a plan states beside its steps. Returns the file, the change in words, and the required
    result: RIGHT, REFUSED, or a word with which a line on unchecked figures has to begin (or the file is refused)."""
    values = json.loads(data)
    change = rng.choice((_figure, _figure, _word, _budget, _memory, _rate, _moments, _moments, _tide, _use, _mode))
    change = rng.choice((change, change, change, change, _lost, _harmless))
    said, wanted = change(values, rng)
    return json.dumps(values).encode(), said, wanted


def _figure(values: Any, rng: random.Random) -> tuple[str, str]:
    figures = values["predictions"]
    name = rng.choice(list(figures))
    before = figures[name]
    figures[name] = rng.choice([before * by for by in (0.5, 0.9999, 1.0001, 2, 100, -1)] if before else [1.0, -1.0])
    return f"{name}: {before} -> {figures[name]}", name if name in NOT_COMPUTED else REFUSED


def _word(values: Any, rng: random.Random) -> tuple[str, str]:
    name = rng.choice(list(values["choices"]))
    values["choices"][name] = rng.choice(("all of them", 7, ["x"], {"bound": "joint LP"}))
    return f"choices.{name} -> {values['choices'][name]!r}", REFUSED if name in ("confidence", "certificate") else name


def _budget(values: Any, rng: random.Random) -> tuple[str, str]:
    name, by = rng.choice(("gpu_budget_bytes", "host_budget_bytes")), rng.choice((2, 10, 100))
    values[name] *= by
    return f"{name} times {by}", REFUSED


def _memory(values: Any, rng: random.Random) -> tuple[str, str]:
    by = rng.choice((2, 4, 10))
    if rng.random() < 0.5:
        values["machine"]["host"]["memory_bytes"] //= by
        return f"the host has 1/{by} of its memory", REFUSED
    for rank in values["machine"]["ranks"]:
        rank["gpu"]["usable_bytes"] //= by
    return f"the gpu has 1/{by} of its memory", REFUSED


def _rate(values: Any, rng: random.Random) -> tuple[str, str]:
    rank, host = values["machine"]["ranks"][0], values["machine"]["host"]
    part, name = rng.choice(
        ((rank["link"], "h2d_bytes_per_s"), (rank["link"], "d2h_bytes_per_s"), (host, "adam_params_per_s"))
    )
    part[name] *= rng.choice((0.1, 0.5, 2, 10))
    return f"{name} -> {part[name]}", "the machine"


def _moments(values: Any, rng: random.Random) -> tuple[str, str]:
    """Change order and phases of moments, while uses, stashes and steps stay."""
    moments = values["workload"]["moments"]
    count = len(moments["name"])
    kind = rng.choice(("shuffle", "turn", "phase", "micro_batch"))
    if kind in ("phase", "micro_batch"):
        i = rng.randrange(count - 1)
        known = {"FWD", "BWD", "ADAM"} if kind == "phase" else {-1, 0, 1, 2}
        moments[kind][i] = rng.choice(sorted(known - {moments[kind][i]}))
        return f"{kind} of moment {i} -> {moments[kind][i]}", REFUSED
    order = list(range(count - 1))
    if kind == "shuffle":
        rng.shuffle(order)
    else:  # a forward moment for a backward one
        i = rng.choice([n for n in order if moments["phase"][n] == "FWD"])
        j = rng.choice([n for n in order if moments["phase"][n] == "BWD"])
        order[i], order[j] = order[j], order[i]
    for name, column in moments.items():
        moments[name] = [column[n] for n in order] + column[-1:]
    return f"moments: {kind}", REFUSED


def _tide(values: Any, rng: random.Random) -> tuple[str, str]:
    moments = values["workload"]["moments"]
    name = rng.choice(("peak_bytes", "flops", "bytes_read"))
    i = rng.randrange(len(moments[name]))
    moments[name][i] = int(moments[name][i] * rng.choice((0.1, 0.9, 1.1, 10))) + 1
    return f"moment {i}: {name} -> {moments[name][i]}", "the workload"


def _use(values: Any, rng: random.Random) -> tuple[str, str]:
    uses, w = values["workload"]["uses"], values["workload"]
    i = rng.randrange(len(uses["moment"]))
    name, count = rng.choice((("moment", len(w["moments"]["name"])), ("tensor", len(w["tensors"]["name"]))))
    uses[name][i] = rng.choice((-1, -count, count, count + 5, 2**40))
    return f"use {i}: {name} -> {uses[name][i]}", REFUSED


def _mode(values: Any, rng: random.Random) -> tuple[str, str]:
    modes = values["modes"]
    i = rng.randrange(len(modes))
    before, modes[i] = modes[i], rng.choice([mode for mode in ("cpu", "pin", "stream") if mode != modes[i]])
    return f"mode of chunk {i}: {before} -> {modes[i]}", REFUSED


def _lost(values: Any, rng: random.Random) -> tuple[str, str]:
    chunk = rng.randrange(len(values["modes"]))
    values["initial"] = [row for row in values["initial"] if row[:2] != [chunk, "param"]]
    return f"no parameters of chunk {chunk} at the cut", REFUSED


def _harmless(values: Any, rng: random.Random) -> tuple[str, str]:
    kind = rng.choice(("no figures", "uses reversed", "a note", "queue by queue"))
    uses = values["workload"]["uses"]
    if kind == "no figures":
        values["predictions"] = {}
    elif kind == "uses reversed":
        values["workload"]["uses"] = {name: column[::-1] for name, column in uses.items()}
    elif kind == "a note":
        values["workload"]["notes"] += " read on a Sunday"
    else:
        values["steps"].sort(key=lambda line: line.split()[1])
    return kind, RIGHT


def _dump(values: Any, said: str) -> tuple[bytes, str]:
    return json.dumps(values).encode(), said


def mutate_machine(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    if rng.random() < 0.25:
        return mutate_bytes(data, rng)
    lines = data.decode().splitlines()
    i = rng.choice([n for n, line in enumerate(lines) if line])
    before = lines[i]
    kind = rng.choice(("number", "number", "number", "remove", "twice", "swap", "word"))
    if kind == "number" and "=" in before:
        key, _, value = before.partition("=")
        with contextlib.suppress(ValueError):
            number = float(value)
            lines[i] = f"{key}= {rng.choice([changed_number(rng, number), 'inf', 'nan', -number, '1e400'])}"
            return "\n".join(lines).encode(), f"{before!r} -> {lines[i]!r}"
    if kind == "remove":
        lines.pop(i)
    elif kind == "twice":
        lines.insert(i, before)
    elif kind == "swap":
        j = rng.randrange(len(lines))
        lines[i], lines[j] = lines[j], lines[i]
    elif before:
        n = rng.randrange(len(before))
        lines[i] = before[:n] + chr(rng.randrange(33, 127)) + before[n + 1 :]
    after = lines[i] if i < len(lines) else ""
    return "\n".join(lines).encode(), f"{kind} in line {i}: {before!r} -> {after!r}"


def mutate_trace(data: bytes, rng: random.Random, rows: list[dict[str, Any]]) -> tuple[bytes, str]:
    """Change a trace. Half of the files get a digest that fits, as from a faulty writer."""
    if rng.random() < 0.4:
        return mutate_bytes(data, rng)
    import pyarrow as pa
    import pyarrow.parquet as pq

    from pstar_sim.workload import trace as files

    row = json.loads(json.dumps(rows[0]))
    said = mutate_values(row, rng, rng.choice(((), ("moments",), ("tensors",), ("uses",), ("optimizer",))))
    with contextlib.suppress(Exception):  # rows that cannot be digested keep their old digest
        row["digest"] = files._digest(row)
    for schema in (files._schema(), None):  # None: values of another type, so the schema follows from the values
        target = io.BytesIO()
        with contextlib.suppress(pa.ArrowException, OverflowError, TypeError, ValueError):
            table = pa.Table.from_pylist([row], schema=schema)
            pq.write_table(table.replace_schema_metadata(files._schema().metadata), target)
            return target.getvalue(), said
    return mutate_bytes(data, rng)


# --- trying one file -------------------------------------------------------------------------------------------------


class Wrong(Exception):
    """A miss; the text describes it."""


@dataclass
class Bench:
    """Files to mutate, and the results of plain PyTorch. Made once in an empty folder, which becomes the current
    one."""

    folder: Path
    policies: tuple[str, ...] = ("tide", "static_partition", "zero_offload", "patrickstar", "tide:streams=on")
    plans: list[bytes] = field(default_factory=list)
    trace: bytes = b""
    rows: list[dict[str, Any]] = field(default_factory=list)
    machine: bytes = b""
    plain: dict[Any, tuple[list[float], dict[str, torch.Tensor]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        import executor.measuring.rates
        from pstar_sim.catalog.loader import load_machine
        from pstar_sim.catalog.writing import save_machine
        from pstar_sim.workload import trace as files

        os.chdir(self.folder)
        sys.path.insert(0, str(self.folder))
        Path("reliability_net.py").write_text(MODEL)
        Path("corpus").mkdir()
        Path("corpus/text.txt").write_text(MODEL * 4)
        save_machine(load_machine("virtual", gpu_memory=GPU_MEMORY), Path("machine.toml"))
        self.machine = Path("machine.toml").read_bytes()
        # Rates of this machine are not under test here, and measuring them takes a second per run.
        executor.measuring.rates.measure_virtual_machine = lambda base, **rates: base
        self.cli("trace", NET, "--batch", "2", "--seq", "8", "--dtype", "fp32", "-o", "net.parquet")
        self.trace = Path("net.parquet").read_bytes()
        self.rows = files._read_rows(Path("net.parquet"))
        for i, policy in enumerate(self.policies):
            # One in two with several micro-batches, one in two without clipping.
            more = ["--micro-batches", "2"] if i % 2 else []
            more += [] if i % 3 else ["--no-clip", "--update", "eager"]
            if policy in ("zero_offload", "patrickstar"):
                more += ["--gpu-memory", "0.0025GB"]
            self.plan_of("net.parquet", "machine.toml", policy, more)
            self.plans.append(Path("made.json").read_bytes())

    def plan_of(self, trace: str, machine: str, policy: str, more: list[str] | None = None) -> None:
        self.cli("plan", "--trace", trace, "--machine", machine, "--policy", policy, "-o", "made.json", *(more or []))

    def cli(self, *argv: str) -> str:
        """Returns the stdout of a command. Raises PstarError with the text of a refusal, Wrong for a refusal that has
        another form."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = main(argv)
            except SystemExit as left:
                status = int(left.code or 0)
        lines = [line for line in err.getvalue().splitlines() if line.strip()]
        if status in (2, 3):  # refused; or the answer is no, as for a trace that no policy can plan
            of_file = all(line.startswith("pstar: mutated.toml: ") for line in lines) and len(lines) <= MOST_WRONG
            if not lines or not (of_file or len(lines) == 1) or not lines[0].startswith("pstar: "):
                raise Wrong(f"refused with {len(lines)} lines: {lines[:3]}")
            if len(lines[0]) > 2000:
                raise Wrong(f"refused with a line of {len(lines[0])} characters")
            raise PstarError(lines[0])
        if status:
            raise Wrong(f"status {status}: {lines[:3]}")
        if any("Warning" in line or "Traceback" in line for line in lines):
            raise Wrong(f"warned: {lines[:3]}")
        return out.getvalue()

    def try_plan(self, name: str) -> str:
        """Returns the result for a plan file: "refused" or "right". Raises Wrong."""
        try:
            self.cli("check", name)
        except PstarError:
            return "refused"
        plan = load_plan(name)
        try:
            said = json.loads(self.cli("run", name, "--model", NET, "--data", DATA, "--steps", str(STEPS), "--json"))
        except PstarError:
            self.refused_by_executor(plan)
            return "refused by the run"
        expected, values = self.plain_run(plan)
        self.compare("pstar run", said["losses"], expected)
        losses, mine = self.own_run(plan)
        self.compare("losses", losses, expected)
        for key, value in values.items():
            worst = float((mine[key] - value).abs().max())
            if not worst <= TOLERANCE * max(1.0, float(value.abs().max())):
                raise Wrong(f"parameter {key} is off by {worst:.3g} after {STEPS} steps")
        return "right"

    def try_stated(self, name: str, wanted: str) -> str:
        """Returns the result for a plan file with other figures: "refused", "named" or "right". Raises Wrong."""
        try:
            answer = json.loads(self.cli("check", name, "--json"))
        except PstarError as error:
            if wanted == RIGHT:
                raise Wrong(f"refused, though it means the same: {error}") from error
            return REFUSED
        if wanted in (RIGHT, REFUSED):
            if wanted == REFUSED:
                raise Wrong("believed")
            return RIGHT
        named = {word for line in answer["not_checked"] for word in line.split(":")[0].split(", ")}
        if not any(word.startswith(wanted) for word in named):
            raise Wrong(f"believed, and {wanted} is not named among what was not checked: {sorted(named)}")
        return "named"

    def compare(self, what: str, mine: list[float], theirs: list[float]) -> None:
        near = [abs(a - b) <= TOLERANCE * max(1.0, abs(b)) for a, b in zip(mine, theirs)]
        if len(mine) != len(theirs) or not all(near):
            raise Wrong(f"{what}: {mine}, plain PyTorch {theirs}")

    def refused_by_executor(self, plan: Plan) -> None:
        """Check a plan that `pstar run` refused: the executor by itself may run it, but not wrongly."""
        try:
            losses, _ = self.own_run(plan)
        except PstarError as error:
            if "\n" in str(error):
                raise Wrong(f"refused with several lines: {error}") from error
            return
        self.compare("losses", losses, self.plain_run(plan)[0])

    def job(self, plan: Plan) -> TrainingJob:
        return TrainingJob.of_plan(plan, NET, data=DATA, lr=3e-4, seed=0)

    def plain_run(self, plan: Plan) -> tuple[list[float], dict[str, torch.Tensor]]:
        w = plan.workload
        key = (w.batch, w.sequence, w.micro_batches, w.checkpointing, w.dtype, plan.settings.clip)
        if key not in self.plain:
            job = self.job(plan)
            built = job.build()
            parameters = list(built.module.parameters())
            optimizer = torch.optim.AdamW(parameters, lr=job.lr, fused=True)
            if plan.settings.clip:
                optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(parameters, 1.0) and None)
            torch.set_num_threads(1)
            reports = train(built.module, optimizer, job.batches(built), steps=STEPS, micro_batches=w.micro_batches)
            values = {name: p.detach().clone() for name, p in built.module.named_parameters()}
            self.plain[key] = [r.loss for r in reports], values
        return self.plain[key]

    def own_run(self, plan: Plan) -> tuple[list[float], dict[str, torch.Tensor]]:
        job = self.job(plan)
        built = job.build()
        queues = drawn_queues(len(plan.steps))  # one order of events; `pstar run` has threads
        model, optimizer = prepare(built.module, plan, job._optimizer(plan), queues=queues)
        try:
            reports = train(
                model, optimizer, job.batches(built), steps=STEPS, micro_batches=plan.workload.micro_batches
            )
            return [r.loss for r in reports], dict(model.state_dict())
        finally:
            optimizer.session.close(restore=False)

    def one(self, file: str, seed: int) -> tuple[str, str]:
        """Returns (outcome, mutation). Raises Wrong, TooLong, or any error of the code under test."""
        rng = random.Random(f"{file} {seed}")
        if file == "plan":
            data, self.said = mutate_plan(rng.choice(self.plans), rng)
            Path("mutated.json").write_bytes(data)
            return self.try_plan("mutated.json"), self.said
        if file == "stated":
            data, self.said, wanted = mutate_stated(rng.choice(self.plans), rng)
            Path("mutated.json").write_bytes(data)
            return self.try_stated("mutated.json", wanted), self.said
        if file == "trace":
            data, self.said = mutate_trace(self.trace, rng, self.rows)
            Path("mutated.parquet").write_bytes(data)
            files = ("mutated.parquet", "machine.toml")
        else:
            data, self.said = mutate_machine(self.machine, rng)
            Path("mutated.toml").write_bytes(data)
            files = ("net.parquet", "mutated.toml")
        try:
            self.plan_of(*files, rng.choice(("tide", "static_partition")))
        except PstarError:
            return "refused", self.said
        outcome = self.try_plan("made.json")
        if outcome == "refused":
            raise Wrong("a plan that `pstar plan` made is refused by `pstar check`")
        return outcome, self.said


@contextlib.contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    faulthandler.dump_traceback_later(3 * limit_s, exit=True)  # for code in which even the signal is not handled
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def memory_limit(more_bytes: int) -> Iterator[None]:
    """Inside this context, the address space of this process may grow by `more_bytes` only."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def run_mutations(
    bench: Bench,
    count: int,
    *,
    first_seed: int = 0,
    files: tuple[str, ...] = FILES,
    on_miss: Callable[[Miss], None] = lambda miss: None,
) -> Report:
    """Try `count` mutated files, the kinds in turn."""
    report = Report()
    begun_s = time.perf_counter()
    with memory_limit(MEMORY_BYTES):
        for n in range(count):
            file, seed = files[n % len(files)], first_seed + n // len(files)
            bench.said = ""
            try:
                with time_limit(LIMIT_S):
                    outcome, _ = bench.one(file, seed)
            except TooLong:
                outcome, what = "miss", f"still running after {LIMIT_S:g} s"
            except Wrong as wrong:
                outcome, what = "miss", str(wrong)
            except Exception as error:
                at_ = traceback.extract_tb(error.__traceback__)[-1]
                outcome = "miss"
                what = f"{type(error).__name__}: {error} ({Path(at_.filename).name}:{at_.lineno} {at_.name})"
            report.outcomes[file, outcome] += 1
            if outcome == "miss":
                miss = Miss(file, seed, bench.said, " ".join(what.split())[:600])
                report.misses.append(miss)
                on_miss(miss)
    report.seconds = time.perf_counter() - begun_s
    return report
