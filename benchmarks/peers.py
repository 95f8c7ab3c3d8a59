"""Ours beside plain PyTorch, DeepSpeed ZeRO-2 and ZeRO-3 offload and FSDP2 CPU offload: one model, one global batch.

    python benchmarks/peers.py                   on this CPU; DeepSpeed in .venv-peers, which is made for it
    python benchmarks/peers.py --device cuda     on a CUDA card, with what this interpreter can import

Every contender has a process of its own (contenders/), settings that are committed beside its code, the same weights,
the same batches, the same threads on the same cores. First each is tried at every micro-batch that divides the global
batch and keeps its best. Then, on a CPU, all are alive at once and are asked for a step each in turn; on a card they
run one after the other, because host memory holds one at a time. Last, the largest model within a cap on host memory,
by really training deeper and deeper ones. What is done is kept as it is done (JSON lines): a run that was cut off, or
used up its --minutes, goes on where it stopped.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _keep import Keep
from _results import RESULTS, write_result
from contenders.groups import groups_of, merged, ratios
from contenders.memory import NOT_MEASURABLE
from contenders.process import Failed, Process, processes
from contenders.room import bytes_per_param, largest_by_trial
from contenders.rounds import interleave
from contenders.stages import OutOfTime, Stages
from contenders.task import CONTENDERS, Task, settings_of
from preflight import cannot_run, report, slug

ROOT = Path(__file__).resolve().parents[1]
DEFAULTS = {
    "cpu": {
        "model": "gpt2", "batch": 4, "sequence": 128, "dtype": "fp32", "checkpointing": False, "steps": 11,
        "warm_up": 2, "micro": (1, 2, 4), "largest": "6GB", "gpu_memory": None, "minutes": None,
        "contenders": ("ours", "ours_eager", "plain", "zero2", "zero3", "fsdp2"),
    },
    "cuda": {
        "model": "llama-7b", "batch": 16, "sequence": 1024, "dtype": "bf16", "checkpointing": True, "steps": 3,
        "warm_up": 2, "micro": (4, 8, 16), "largest": "64GB", "gpu_memory": "24GB", "minutes": 8.0,
        "contenders": ("ours", "ours_eager", "plain", "zero2", "zero3", "zero3_twinflow", "fsdp2"),
    },
}  # fmt: skip
NEEDS = {"zero": ("deepspeed",), "ours": ("numpy", "scipy")}
BUILD_S, STEP_S = 900.0, 300.0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--contenders", help=f"comma-separated, of {','.join(CONTENDERS)}")
    add("--model", help="as for `pstar trace`")
    add("--batch", type=int, help="sequences of one optimizer step")
    add("--micro", help="micro-batches to try, comma-separated")
    add("--clip", choices=("no", "yes", "both"), default="both", help="by the global norm")
    add("--sequence", type=int)
    add("--dtype", choices=("fp32", "bf16"))
    add("--steps", type=int, help="timed steps")
    add("--warm-up", type=int, help="steps before them")
    add(
        "--threads",
        type=int,
        help="of every contender, on as many cores (default: 1 on a CPU, as `prepare` has it; all on CUDA)",
    )
    add("--largest", help="host memory for the largest-model search, such as 4GB; 0 for no search")
    add("--gpu-memory", help="what may be reserved of the card, such as 24GB; 0 for all of it")
    add("--machine", help="machine file for our plans on CUDA; default: what gpu-record measured, or the catalog's")
    add("--minutes", type=float, help="of this run; stages that have no time are left for the next; 0 for no limit")
    add("--venv", type=Path, default=ROOT / ".venv-peers", help="where DeepSpeed is installed for --device cpu")
    add("--fresh", action="store_true", help="forget the stages of a run that was cut off")
    add("--again", action="store_true", help="run what failed again")
    add("--out", type=Path, help="folder of what is found (default: benchmarks/results)")
    add("--name", help="of the result (default peers, or peers_cuda)")
    args = parser.parse_args(argv)
    defaults: Mapping[str, Any] = DEFAULTS[args.device]
    for name, value in defaults.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    try:
        from pstar_sim.errors import PstarError
        from pstar_sim.units import parse_bytes

        if isinstance(args.contenders, str):
            args.contenders = tuple(args.contenders.split(","))
        if isinstance(args.micro, str):
            args.micro = tuple(int(size) for size in args.micro.split(","))
        for name in ("largest", "gpu_memory"):
            text = getattr(args, name)
            setattr(args, name, None if text in (None, "0") else parse_bytes(text))
    except (PstarError, ValueError) as error:
        parser.error(str(error))
    for name in args.contenders:
        if name not in CONTENDERS:
            parser.error(f"--contenders: {name!r} is not known; choose from {', '.join(CONTENDERS)}")
    for name in ("batch", "sequence", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: must be at least 1")
    if any(size < 1 or args.batch % size for size in args.micro):
        parser.error(f"--micro {','.join(map(str, args.micro))}: every one has to divide --batch {args.batch}")
    cores = len(os.sched_getaffinity(0))
    if args.threads is None:
        args.threads = 1 if args.device == "cpu" else cores
    if not 1 <= args.threads <= cores:
        parser.error(f"--threads {args.threads}: this process may use {cores} cores")
    args.minutes = args.minutes or None
    args.name = args.name or ("peers" if args.device == "cpu" else "peers_cuda")
    return args


def what_is_missing(names: Sequence[str], device: str) -> dict[str, str]:
    """Contender -> why it is skipped, for those whose packages this interpreter has not."""
    found = {}
    for name in names:
        needed = NEEDS.get(CONTENDERS[name][0], ()) if device == "cuda" else ()
        if gone := [package for package in needed if importlib.util.find_spec(package) is None]:
            found[name] = f"{', '.join(gone)} cannot be imported by {sys.executable}"
        elif name == "zero3_twinflow" and device == "cpu":
            found[name] = "Twin-Flow splits the update between CPU and GPU; there is no GPU"
    if importlib.util.find_spec("transformers") is None:
        found |= dict.fromkeys(names, f"transformers cannot be imported by {sys.executable}")
    return found


class Run:
    """One run of the script: its arguments, who takes part, and where results are kept."""

    def __init__(self, args: argparse.Namespace, logs: Path) -> None:
        self.args, self.logs = args, logs
        self.skipped = what_is_missing(args.contenders, args.device)
        self.skipped |= self._too_large()
        self.names = [name for name in args.contenders if name not in self.skipped]
        self.interpreters = dict.fromkeys(self.names, sys.executable)
        self.environments: dict[str, dict[str, str]] = {
            name: dict(settings_of(name).get("environment", {})) for name in self.names
        }
        self._use_venv()
        self.keep = Keep(args.out or RESULTS, args.name)
        if args.fresh:
            self.keep.partial.unlink(missing_ok=True)
        self.stages = Stages(
            self.keep.partial,
            minutes=args.minutes,
            expected_s=150.0 if args.device == "cuda" else 0.0,
            say=self.keep.say,
            again=args.again,
        )

    def _too_large(self) -> dict[str, str]:
        """Contenders whose model data alone is more than the cap on the card, by arithmetic."""
        cap = self.args.gpu_memory
        if self.args.device != "cuda" or cap is None or importlib.util.find_spec("transformers") is None:
            return {}
        from executor.models import build

        module = build(self.args.model, batch=1, sequence=8, dtype=self.args.dtype, device="meta").module
        params = sum(p.numel() for p in module.parameters())
        found = {}
        for name in self.args.contenders:
            each = (bytes_per_param(self.task(name)) or {"gpu": 0})["gpu"]
            if each * params > cap:
                found[name] = (
                    f"{each} bytes a parameter on the GPU x {params / 1e9:.2f} G = {each * params / 1e9:.0f} GB, the "
                    f"cap is {cap / 1e9:.0f} GB"
                )
        return found

    def _use_venv(self) -> None:
        zeros = [name for name in self.names if CONTENDERS[name][0] == "zero"]
        if self.args.device != "cpu" or not zeros:
            return
        from contenders.venv import VenvError, environment_of, make_venv

        try:
            interpreter = make_venv(self.args.venv, ROOT / "constraints.txt", print)
        except VenvError as error:
            for name in zeros:
                self.skipped[name] = str(error)
                self.names.remove(name)
            return
        for name in zeros:
            self.interpreters[name] = interpreter
            self.environments[name] |= environment_of(self.args.venv.absolute())

    def task(self, name: str, **changes: Any) -> Task:
        a = self.args
        task = Task(
            contender=name, model=a.model, global_batch=a.batch, micro_batch=a.micro[0], sequence=a.sequence,
            dtype=a.dtype, checkpointing=a.checkpointing, clip=False, device=a.device, threads=a.threads,
            gpu_cap_bytes=a.gpu_memory, machine=a.machine,
        )  # fmt: skip
        return task.changed(**changes)

    def start(self, task: Task, most_host_bytes: int | None = None) -> Process:
        return Process(
            task,
            interpreter=self.interpreters[task.contender],
            log=self.log_of(task),
            environment=self.environments[task.contender],
            most_host_bytes=most_host_bytes,
        )

    def alone(self, task: Task, *, warm_up: int, steps: int, left_s: float, most_host_bytes: int | None = None) -> Any:
        """One contender in a process of its own. Raises Failed."""
        with processes([self.start(task, most_host_bytes)]) as made:
            found = interleave(
                made, warm_up=warm_up, steps=steps, build_s=min(BUILD_S, left_s), step_s=min(STEP_S, left_s)
            )[task.contender]
        if "failed" in found:
            self.note(task)
            raise Failed(found["failed"], lasting="no answer within" not in found["failed"])
        return found

    def log_of(self, task: Task) -> Path:
        return self.logs / f"{task.contender}-{task.micro_batch}-{task.clip}.log"

    def note(self, task: Task) -> None:
        """What a contender that failed printed, its traceback or its stacks, is kept."""
        if self.log_of(task).exists():
            self.keep.note(
                f"-- {task.key}\n{self.log_of(task).read_text(encoding='utf-8', errors='replace')[-20_000:]}"
            )

    # -- the three questions ------------------------------------------------------------------------------------------

    def best_micro_batches(self) -> dict[str, dict[str, Any]]:
        """Contender -> {"micro_batch": its fastest, "tried": {micro-batch: seconds, or why not}}."""
        found: dict[str, dict[str, Any]] = {}
        for name in self.names:
            if len(self.args.micro) == 1:  # nothing to choose
                found[name] = {"micro_batch": self.args.micro[0], "tried": {}, "need_bytes": 0}
                continue
            tried: dict[int, Any] = {}
            need: dict[int, int] = {}
            for size in self.args.micro:
                task = self.task(name, micro_batch=size)
                result = self.stages.run(
                    "search " + task.key,
                    f"{CONTENDERS[name][2]}: micro-batch {size}",
                    lambda left_s, task=task: self.alone(task, warm_up=1, steps=2, left_s=left_s),
                )
                if result is not None:
                    tried[size] = result.get("failed", result.get("median_s"))
                    if memory := result.get("memory"):
                        peak = most_host_bytes(result)
                        need[size] = 0 if peak is None else peak + memory["baseline_bytes"]
            seconds = {size: s for size, s in tried.items() if isinstance(s, float)}
            if seconds:
                size = min(seconds, key=lambda size: seconds[size])
                found[name] = {"micro_batch": size, "tried": tried, "need_bytes": need[size]}
            elif len(tried) == len(self.args.micro):
                self.skipped[name] = f"no micro-batch ran: {tried[self.args.micro[0]]}"
        return found

    def timed(self, best: Mapping[str, Mapping[str, Any]], clip: bool) -> list[dict[str, Any]]:
        """Groups of contenders that were alive at once, each contender -> what interleave() says of it, at its best
        micro-batch. On a card every group is one contender."""
        if self.args.clip == ("no" if clip else "yes"):
            return []
        names = [n for n in best if not (clip and n == "ours_eager")]
        warm_up, steps = self.args.warm_up, self.args.steps
        word = "clipped" if clip else "not clipped"
        if self.args.device == "cpu":
            groups = groups_of(names, {n: best[n]["need_bytes"] for n in names}, int(0.85 * available_bytes()))
        else:
            groups = [[name] for name in names]
        found = []
        for group in groups:
            tasks = [self.task(n, micro_batch=best[n]["micro_batch"], clip=clip) for n in group]

            def together(left_s: float, tasks: list[Task] = tasks) -> dict[str, Any]:
                build_s, step_s = min(BUILD_S, left_s), min(STEP_S, left_s)
                before = os.getloadavg()
                with processes([self.start(task) for task in tasks]) as made:
                    results = interleave(made, warm_up=warm_up, steps=steps, build_s=build_s, step_s=step_s)
                for task in tasks:
                    if "failed" in results[task.contender]:
                        self.note(task)
                if len(tasks) == 1 and (why := results[tasks[0].contender].get("failed")):
                    raise Failed(why, lasting="no answer within" not in why)
                return {"contenders": results, "loadavg": [before, os.getloadavg()]}

            key = "timed " + json.dumps([t.to_json() for t in tasks] + [warm_up, steps], sort_keys=True)
            result = self.stages.run(key, f"{', '.join(CONTENDERS[n][2] for n in group)}: {word}", together)
            if result is not None:
                found.append({"contenders": dict.fromkeys(group, result)} if "failed" in result else result)
        return found

    def largest(self, best: Mapping[str, Mapping[str, Any]], timed: Mapping[str, Any]) -> dict[str, Any]:
        """Contender -> the deepest model of this width that trains within the cap on host memory, by trial."""
        cap = self.args.largest
        if cap is None:
            return {}
        found: dict[str, Any] = {}
        with tempfile.TemporaryDirectory() as folder:
            shapes = Shapes(self.args.model, Path(folder))
            for name in best:
                known = timed.get(name, {}).get("memory")
                if known is None or name == "ours_eager":
                    continue
                if known["host_peak_bytes"] is None:
                    self.skipped[f"{name}, largest"] = f"host memory is {NOT_MEASURABLE}"
                    continue
                task = self.task(name, micro_batch=best[name]["micro_batch"])
                try:
                    found[name] = self._largest(task, shapes, known, cap)
                except OutOfTime:
                    break
        return found

    def _largest(self, task: Task, shapes: Shapes, known: Mapping[str, Any], cap: int) -> dict[str, Any]:
        """Every trial is a stage. Raises OutOfTime."""

        def trial(layers: int) -> int | None:
            changes: dict[str, Any] = {"model": shapes.spec(layers)}
            if task.contender == "ours" and task.device == "cuda":
                changes["host_cap_bytes"] = cap

            def work(left_s: float) -> dict[str, Any]:
                ran = self.alone(
                    task.changed(**changes),
                    warm_up=0,
                    steps=2,
                    left_s=left_s,
                    most_host_bytes=known["baseline_bytes"] + int(1.3 * cap) + (1 << 30),
                )
                if (peak := most_host_bytes(ran)) is None:
                    raise Failed(f"host memory is {NOT_MEASURABLE}")
                return {"peak": peak}

            what = f"{CONTENDERS[task.contender][2]}: {layers} layers, {shapes.params(layers) / 1e6:,.0f} M parameters"
            result = self.stages.run(f"largest {cap} {layers} {task.key}", what, work)
            if result is None:
                raise OutOfTime
            return result.get("peak")

        measured = known["host_peak_bytes"] / known["params"]
        layers, fails, tried = largest_by_trial(
            trial,
            cap_bytes=cap,
            small_layers=shapes.layers,
            small_bytes=known["host_peak_bytes"],
            layer_bytes=measured * shapes.layer_params,
        )
        each = bytes_per_param(task) or {
            place: known["predicted"][f"{place}_bytes_per_param"] for place in ("gpu", "host")
        }
        each_bytes = each["host"] + (each["gpu"] if task.device == "cpu" else 0)
        return {
            "layers": layers,
            "params": shapes.params(layers) if layers else None,
            "did_not_fit_layers": fails,
            "tried": tried,
            "cap_bytes": cap,
            "arithmetic": {"bytes_per_param": each, "params": int(cap / each_bytes) if each_bytes else None},
        }


class Shapes:
    """The model with another number of layers, as configuration files of transformers in `folder`."""

    def __init__(self, model: str, folder: Path) -> None:
        from executor.models import build

        small = build(model, batch=1, sequence=8, device="meta").module
        self._config, self._folder = small.config, folder
        self._key = "n_layer" if hasattr(self._config, "n_layer") else "num_hidden_layers"
        self.layers = int(getattr(self._config, self._key))
        self._params = self._count(small)
        self.layer_params = self._count(build(self.spec(self.layers + 1), batch=1, sequence=8, device="meta").module)
        self.layer_params -= self._params

    @staticmethod
    def _count(module: Any) -> int:
        return sum(p.numel() for p in module.parameters())

    def params(self, layers: int) -> int:
        return self._params + (layers - self.layers) * self.layer_params

    def spec(self, layers: int) -> str:
        values = {**self._config.to_dict(), self._key: layers, "architectures": [None]}
        values.pop("architectures")
        values.pop("layer_types", None)
        folder = self._folder / str(layers)
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(values, default=str), encoding="utf-8")
        return f"hf:{folder}"


def available_bytes() -> int:
    """Host memory that is free, or could be."""
    from executor.devices.backend import available_host_bytes

    return available_host_bytes() or 8 << 30


def most_host_bytes(found: Mapping[str, Any]) -> int | None:
    """Peak of host memory, the start included; None where it is not measurable."""
    start, steady = found["start"]["start_peak_bytes"], found["memory"]["host_peak_bytes"]
    return None if start is None or steady is None else max(start, steady)


def per_param(memory: Mapping[str, Any]) -> float | None:
    """Bytes of the host's peak for each parameter."""
    return None if memory["host_peak_bytes"] is None else memory["host_peak_bytes"] / memory["params"]


def host_columns(row: Mapping[str, Any]) -> tuple[str, str]:
    from pstar_sim.units import format_bytes

    if row["host_peak_bytes"] is None:
        return NOT_MEASURABLE, "-"
    return format_bytes(row["host_peak_bytes"]), f"{row['host_bytes_per_param']:.1f}"


def losses_apart(timed: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Largest relative difference of a contender's losses to the reference's: plain PyTorch's, or else ours'."""
    reference = next((n for n in ("plain", "ours", "ours_eager") if "losses" in timed.get(n, {})), None)
    if reference is None:
        return {}
    base = timed[reference]["losses"]
    return {
        name: max(abs(a - b) / abs(b) for a, b in zip(found["losses"], base))
        for name, found in timed.items()
        if found.get("losses")
    }


def rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row a contender and clipping, for the table and the README."""
    made = []
    for clip in (False, True):
        timed = results["clipped" if clip else "unclipped"]
        apart = losses_apart(timed)
        for name, (_, _, title) in CONTENDERS.items():
            found = timed.get(name)
            if found is None or "failed" in found:
                continue
            memory = found["memory"]
            made.append(
                {
                    "contender": title,
                    "clip": clip,
                    "micro_batch": results["micro_batches"][name]["micro_batch"],
                    "tokens_per_s": found["tokens_per_s"],
                    "median_s": found["median_s"],
                    "host_peak_bytes": memory["host_peak_bytes"],
                    "host_bytes_per_param": per_param(memory),
                    "gpu_allocated_bytes": memory["gpu_allocated_bytes"],
                    "gpu_reserved_bytes": memory["gpu_reserved_bytes"],
                    "loss_apart": apart.get(name),
                    "largest_params": results["largest"].get(name, {}).get("params"),
                }
            )
    return made


COLUMNS = (
    "contender", "clip", "micro", "step", "tokens/s", "GPU alloc.", "GPU reserved", "host peak", "B/param",
    "loss apart", "largest",
)  # fmt: skip


def show(results: Mapping[str, Any]) -> None:
    """The table, what was skipped or failed, the ratios and what they had to be."""
    from pstar_sim.units import format_bytes, format_s

    lines = []
    for r in results["rows"]:
        gpu = [format_bytes(b) if b is not None else "n/a" for b in (r["gpu_allocated_bytes"], r["gpu_reserved_bytes"])]
        lines.append(
            (
                r["contender"], "yes" if r["clip"] else "no", str(r["micro_batch"]), format_s(r["median_s"]),
                f"{r['tokens_per_s']:,.0f}", *gpu, *host_columns(r),
                f"{r['loss_apart']:.1e}" if r["loss_apart"] is not None else "-",
                f"{r['largest_params'] / 1e6:,.0f} M" if r["largest_params"] else "-",
            )
        )  # fmt: skip
    job = results["job"]
    title = (
        f"{job['model']}, {job['dtype']}, {job['batch']} x {job['sequence']} tokens a step, {job['threads']} threads "
    )
    print_table(title + f"each, {results['device']}", lines)
    for name, why in results["skipped"].items():
        print(f"skipped: {CONTENDERS[name][2] if name in CONTENDERS else name}: {why}")
    for clip in ("unclipped", "clipped"):
        for name, found in results[clip].items():
            if "failed" in found:
                print(f"failed: {CONTENDERS[name][2]}, {clip}: {found['failed']}")
        for pair, ratio in results["ratios"][clip].items():
            print(f"{clip}: step of {pair} = {ratio['medians']:.3f} (round by round {ratio['rounds']:.3f})")
    for line in results["verdict"]:
        print(line)


def print_table(title: str, lines: Sequence[Sequence[str]]) -> None:
    """By rich, or where that cannot be imported with tabs."""
    if importlib.util.find_spec("rich") is None:
        print(title)
        for line in (COLUMNS, *lines):
            print("\t".join(line))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "contender" else "right")
    for line in lines:
        table.add_row(*line)
    Console(width=max(150, Console().width)).print(table)


def verdict(results: Mapping[str, Any]) -> list[str]:
    """What was to be shown, and whether it was."""
    lines = []
    cuda = results["job"]["device"] == "cuda"
    for clip in ("unclipped", "clipped"):
        of = results["ratios"][clip]
        if not cuda and "ours / plain" in of:
            ratio = of["ours / plain"]["medians"]
            lines.append(
                f"{clip}: ours over plain PyTorch {ratio:.3f}, goal at most 1.10: {'met' if ratio <= 1.1 else 'missed'}"
            )
        mine = "ours_eager" if cuda and any(pair.startswith("ours_eager") for pair in of) else "ours"
        for peer in ("zero2", "zero3", "zero3_twinflow", "fsdp2"):
            if f"{mine} / {peer}" in of:
                faster = 1 / of[f"{mine} / {peer}"]["medians"]
                goal = 2.0 if cuda and peer == "zero3" else 1.0
                lines.append(
                    f"{clip}: {CONTENDERS[mine][2]} is {faster:.2f} times as fast as {CONTENDERS[peer][2]}, goal "
                    f"{goal:g}: {'met' if faster >= goal else 'missed'}"
                )
        if cuda:
            lines += [line for n in ("ours", "ours_eager") for line in as_planned(clip, results[clip].get(n, {}))]
    sizes = {n: f["params"] for n, f in results["largest"].items() if f.get("params")}
    for peer, goal in (("zero3", 1.6), ("fsdp2", 1.3)):
        if cuda and "ours" in sizes and peer in sizes:
            times = sizes["ours"] / sizes[peer]
            word = "met" if times >= goal else "missed"
            lines.append(f"largest model {times:.2f} times that of {CONTENDERS[peer][2]}, goal {goal}: {word}")
    return lines


def as_planned(clip: str, found: Mapping[str, Any]) -> list[str]:
    """Seconds of an iteration within 10 % of the simulator's, reserved bytes within 3 % of the plan's budget."""
    memory = found.get("memory")
    if memory is None:
        return []
    predicted_s, budget = memory["predicted"]["iteration_s"], memory["plan"]["gpu_budget_bytes"]
    lines = []
    if predicted_s is not None:
        off = found["median_s"] / predicted_s - 1
        lines.append(
            f"{clip}: iteration {off:+.1%} of the prediction, goal 10 %: {'met' if abs(off) <= 0.1 else 'missed'}"
        )
    off = memory["gpu_reserved_bytes"] / budget - 1
    lines.append(
        f"{clip}: reserved {off:+.1%} of the plan's budget, goal 3 %: {'met' if abs(off) <= 0.03 else 'missed'}"
    )
    return lines


def arithmetic(run: Run, timed: Mapping[str, Any], best: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Bytes a parameter of model data in each place: by the note in room.py (ours: by the plan), and as measured."""
    found: dict[str, Any] = {}
    for name, result in timed.items():
        memory = result.get("memory")
        if memory is None:
            continue
        by_hand = bytes_per_param(run.task(name, micro_batch=best[name]["micro_batch"]))
        found[name] = {"arithmetic": by_hand, "host_peak_measured": per_param(memory)}
        if memory["gpu_reserved_bytes"] is not None:
            found[name]["gpu_reserved_measured"] = memory["gpu_reserved_bytes"] / memory["params"]
        if "predicted" in memory:
            found[name] |= {"predicted": memory["predicted"], "measured": memory["measured"]}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.device == "cuda":
        if (status := cannot_run("gpu-peers", ("numpy",))) is not None:
            return status
        print(report())
    if args.device == "cuda" and args.machine is None:
        measured = ROOT / "traces" / "measured" / f"{slug(device_name('cuda'))}.toml"
        args.machine = str(measured) if measured.exists() else None  # of `make gpu-record`
    with tempfile.TemporaryDirectory() as logs:
        run = Run(args, Path(logs))
        for name, why in run.skipped.items():
            print(f"skipped: {CONTENDERS[name][2]}: {why}")
        best = run.best_micro_batches()
        timed = {word: run.timed(best, clip=word == "clipped") for word in ("unclipped", "clipped")}
        groups = {word: [group["contenders"] for group in found] for word, found in timed.items()}
        unclipped, clipped = merged(groups["unclipped"]), merged(groups["clipped"])
        largest = run.largest(best, unclipped or clipped)
        results: dict[str, Any] = {
            "device": device_name(args.device),
            "job": {
                "model": args.model, "dtype": args.dtype, "batch": args.batch, "sequence": args.sequence,
                "checkpointing": args.checkpointing, "device": args.device, "threads": args.threads,
                "cores": sorted(os.sched_getaffinity(0))[: args.threads], "gpu_memory_bytes": args.gpu_memory,
                "steps": args.steps, "warm_up": args.warm_up,
            },
            "settings": {name: settings_of(name) for name in run.names},
            "skipped": run.skipped,
            "micro_batches": best,
            "unclipped": unclipped,
            "clipped": clipped,
            "groups": {word: [list(group) for group in found] for word, found in groups.items()},
            "ratios": {
                word: ratios(found if args.device == "cpu" else [merged(found)]) for word, found in groups.items()
            },
            "losses_apart": {"unclipped": losses_apart(unclipped), "clipped": losses_apart(clipped)},
            "bytes_per_param": arithmetic(run, unclipped or clipped, best),
            "largest": largest,
            "loadavg": {word: [group.get("loadavg") for group in found] for word, found in timed.items()},
            "stages_left": run.stages.left_out,
        }  # fmt: skip
        results["rows"] = rows(results)
        results["verdict"] = verdict(results)
        show(results)
        run.keep.say(f"written: {write_result(args.name, results, folder=args.out)}")
        if run.stages.left_out:
            run.keep.say(f"{run.stages.left_out} stages had no time left; run the same command again and it goes on")
        elif args.out is None:
            run.stages.forget()
    return 0


def device_name(device: str) -> str:
    if device == "cpu":
        return "CPU, the accelerator is virtual (host memory)"
    import torch

    return torch.cuda.get_device_name(0)


if __name__ == "__main__":
    raise SystemExit(main())
