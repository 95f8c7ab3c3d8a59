"""Ours beside plain PyTorch, DeepSpeed ZeRO-2 and ZeRO-3 offload and FSDP2 CPU offload: one model, one global batch.

    python benchmarks/peers.py                   on this CPU; DeepSpeed in .venv-peers, which is made for it
    python benchmarks/peers.py --device cuda     on a CUDA card, with the packages of this interpreter

Every contender has a process of its own (contenders/), settings that are committed beside its code, the same weights,
the same batches, the same threads on the same cores. First each is tried alone, at every micro-batch of --micro, and
keeps its best. Then, on a CPU, the contenders that fit the available memory (less --keep-free) are alive at once and
make one step each in turn. On a card they run one after the other, because host memory has room for one at a time. A
contender that does not fit alone is left out, with its figures. At the end the largest model within a cap on host
memory is found by training deeper and deeper models. Each result is kept at once (JSON lines), so that a later run
continues where an interrupted run, or one whose --minutes were over, stopped.

On a CPU there are two tables: ours with everything resident, beside peers that offload everything; and ours with room
for half and for none of the model data, beside peers that offload as much.
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

from _keep import Keep, results_folder, results_name
from _results import RESULTS, write_result
from contenders.groups import ON_A_CARD, TABLES, Table, merged, next_group, ratios, tables_of
from contenders.memory import NOT_MEASURABLE
from contenders.process import Failed, Process, processes
from contenders.room import bytes_per_param, largest_by_trial, least_host_bytes
from contenders.rounds import interleave
from contenders.stages import OutOfTime, Stages
from contenders.task import CONTENDERS, LEAVES, Task, settings_of
from preflight import cannot_run, report, slug

ROOT = Path(__file__).resolve().parents[1]
DEFAULTS = {
    "cpu": {
        "model": "gpt2", "batch": 4, "sequence": 128, "dtype": "fp32", "checkpointing": False, "steps": 11,
        "warm_up": 2, "micro": (1, 2, 4), "largest": "6GB", "gpu_memory": None, "minutes": None,
        "contenders": ("ours", "ours_eager", "ours_half", "ours_away", "plain", "zero2", "zero3", "fsdp2"),
    },
    "cuda": {
        "model": "llama-7b", "batch": 16, "sequence": 1024, "dtype": "bf16", "checkpointing": True, "steps": 3,
        "warm_up": 2, "micro": (4, 8, 16), "largest": "64GB", "gpu_memory": "24GB", "minutes": 8.0,
        "contenders": ("ours", "ours_eager", "plain", "zero2", "zero3", "zero3_twinflow", "fsdp2"),
    },
}  # fmt: skip
NEEDS = {"zero": ("deepspeed",), "ours": ("numpy", "scipy")}
BUILD_S, STEP_S = 900.0, 300.0
GROWTH = 1.1  # factor from the bytes that a contender held alone to the bytes that a group reserves for it
UNMEASURED = 2.0  # factor on the arithmetic where the kernel does not give a process's bytes: 1.5 is the most seen


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
    add("--keep-free", default="2GB", help="host memory that is left to others (default: 2GB)")
    add("--largest", help="host memory for the largest-model search, such as 4GB; 0 for no search")
    add("--gpu-memory", help="what may be reserved of the card, such as 24GB; 0 for all of it")
    add("--machine", help="machine file for our plans on CUDA; default: what gpu-record measured, or the catalog's")
    add("--minutes", type=float, help="of this run; stages that have no time are left for the next; 0 for no limit")
    add("--venv", type=Path, default=ROOT / ".venv-peers", help="where DeepSpeed is installed for --device cpu")
    add("--fresh", action="store_true", help="forget the stages of a run that was cut off")
    add("--again", action="store_true", help="run what failed again")
    add("--out", type=results_folder, help="folder of what is found (default: benchmarks/results)")
    add("--name", type=results_name, help="of the result in that folder (default: peers, or peers_cuda)")
    args = parser.parse_args(argv)
    defaults: Mapping[str, Any] = DEFAULTS[args.device]
    for name, value in defaults.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    try:
        from pstar_sim.arguments import parse_bytes
        from pstar_sim.errors import PstarError

        if isinstance(args.contenders, str):
            args.contenders = tuple(args.contenders.split(","))
        if isinstance(args.micro, str):
            args.micro = tuple(int(size) for size in args.micro.split(","))
        for name in ("largest", "gpu_memory", "keep_free"):
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
    """Returns contender -> reason to skip it, for contenders whose packages this interpreter lacks."""
    found = {}
    for name in names:
        needed = NEEDS.get(CONTENDERS[name][0], ()) if device == "cuda" else ()
        if gone := [package for package in needed if importlib.util.find_spec(package) is None]:
            found[name] = f"{', '.join(gone)} cannot be imported by {sys.executable}"
        elif name == "zero3_twinflow" and device == "cpu":
            found[name] = "Twin-Flow splits the update between CPU and GPU; there is no GPU"
        elif name in ("ours_half", "ours_away") and device == "cuda":
            found[name] = "its budgets are those of a virtual accelerator; on a card --gpu-memory is the budget of all"
    if importlib.util.find_spec("transformers") is None:
        found |= dict.fromkeys(names, f"transformers cannot be imported by {sys.executable}")
    return found


class Run:
    """One run of the script: its arguments, its contenders, and where results are kept."""

    def __init__(self, args: argparse.Namespace, logs: Path) -> None:
        self.args, self.logs = args, logs
        self.keep = Keep(args.out or RESULTS, args.name)  # first, because it ends the program where nothing can be kept
        self.params: dict[str, int] = {}
        self.skipped = what_is_missing(args.contenders, args.device)
        self.skipped |= self._too_large()
        self.names = [name for name in args.contenders if name not in self.skipped]
        self.interpreters = dict.fromkeys(self.names, sys.executable)
        self.environments: dict[str, dict[str, str]] = {
            name: dict(settings_of(name).get("environment", {})) for name in self.names
        }
        self._use_venv()
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
        """Returns contenders whose model data alone exceeds the cap on the card, by arithmetic, with the reason."""
        cap = self.args.gpu_memory
        if self.args.device != "cuda" or cap is None or importlib.util.find_spec("transformers") is None:
            return {}
        params = self.params_of(self.args.model)
        found = {}
        for name in self.args.contenders:
            each = (bytes_per_param(self.task(name)) or {"gpu": 0})["gpu"]
            if each * params > cap:
                found[name] = (
                    f"{each} bytes per parameter on the GPU x {params / 1e9:.2f} G = {each * params / 1e9:.0f} GB, the "
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
        """Run one contender in a process of its own, which is killed if it holds more than `most_host_bytes` (None:
        than the memory available now). Returns its results. Raises Failed."""
        if most_host_bytes is None:
            most_host_bytes = max(1, self.room_bytes())
        with processes([self.start(task, most_host_bytes)]) as made:
            found = interleave(
                made, warm_up=warm_up, steps=steps, build_s=min(BUILD_S, left_s), step_s=min(STEP_S, left_s)
            )[task.contender]
        if "failed" in found:
            self.note(task)
            raise Failed(found["failed"], lasting="no answer within" not in found["failed"])
        return found

    # -- memory -------------------------------------------------------------------------------------------------------

    def params_of(self, model: str) -> int:
        if model not in self.params:
            from executor.models import build

            module = build(model, batch=1, sequence=8, dtype=self.args.dtype, device="meta").module
            self.params[model] = sum(p.numel() for p in module.parameters())
        return self.params[model]

    def room_bytes(self) -> int:
        """Returns the bytes of host memory that contenders may take now."""
        return available_bytes() - self.args.keep_free

    def too_little(self, need_bytes: int, how: str) -> str | None:
        """Returns why a contender with these needs is not started now; None if it can be."""
        from pstar_sim.units import format_bytes

        available, kept = available_bytes(), self.args.keep_free
        if need_bytes <= available - kept:
            return None
        return (
            f"it needs {format_bytes(need_bytes)} of host memory ({how}); {format_bytes(available)} are available, "
            f"{format_bytes(kept)} of them stay free (--keep-free)"
        )

    def try_alone(self, task: Task, what: str) -> dict[str, Any] | None:
        """Returns the results of a step or two of a contender alone. Each task runs once. Returns None, and the
        contender is skipped, where there is no time or, by arithmetic, no memory for it."""
        steps = 1 if len(self.args.micro) == 1 else 2
        key = f"alone {steps} {task.key}"
        least_bytes = least_host_bytes(task, self.params_of(task.model))
        if key not in self.stages and (why := self.too_little(least_bytes, "the least, by arithmetic")):
            self.skipped[task.contender] = why
            return None
        return self.stages.run(key, what, lambda left_s: self.alone(task, warm_up=1, steps=steps, left_s=left_s))

    def needs(self, best: Mapping[str, Mapping[str, Any]], names: Sequence[str], clip: bool) -> dict[str, int]:
        """Returns contender -> host memory that it needs in a group, from the bytes that it held alone. Contenders that
        could not run are skipped."""
        found = {}
        for name in names:
            task = self.task(name, micro_batch=best[name]["micro_batch"], clip=clip)
            result = self.try_alone(task, f"{CONTENDERS[name][2]}: its memory, alone")
            if result is None:
                continue
            if "failed" in result:
                self.skipped[name] = result["failed"]
                continue
            peak = most_host_bytes(result)
            if peak is None:
                found[name] = int(UNMEASURED * least_host_bytes(task, self.params_of(task.model)))
            else:
                found[name] = int(GROWTH * (peak + result["memory"]["baseline_bytes"]))
        return found

    def log_of(self, task: Task) -> Path:
        return self.logs / f"{task.contender}-{task.micro_batch}-{task.clip}.log"

    def note(self, task: Task) -> None:
        """Keep the output of a contender that failed: its traceback or its stacks."""
        if self.log_of(task).exists():
            self.keep.note(
                f"-- {task.key}\n{self.log_of(task).read_text(encoding='utf-8', errors='replace')[-20_000:]}"
            )

    # -- the three measurements ---------------------------------------------------------------------------------------

    def best_micro_batches(self) -> dict[str, dict[str, Any]]:
        """Returns contender -> {"micro_batch": its fastest, "tried": {micro-batch: seconds, or the reason why not}}."""
        found: dict[str, dict[str, Any]] = {}
        for name in self.names:
            if len(self.args.micro) == 1:  # nothing to choose
                found[name] = {"micro_batch": self.args.micro[0], "tried": {}}
                continue
            tried: dict[int, Any] = {}
            for size in self.args.micro:
                result = self.try_alone(
                    self.task(name, micro_batch=size), f"{CONTENDERS[name][2]}: micro-batch {size}, alone"
                )
                if result is not None:
                    tried[size] = result.get("failed", result.get("median_s"))
            seconds = {size: s for size, s in tried.items() if isinstance(s, float)}
            if seconds:
                found[name] = {"micro_batch": min(seconds, key=lambda size: seconds[size]), "tried": tried}
                self.skipped.pop(name, None)  # another micro-batch did not fit
            elif len(tried) == len(self.args.micro):
                self.skipped[name] = f"no micro-batch ran: {tried[self.args.micro[0]]}"
        return found

    def timed(self, best: Mapping[str, Mapping[str, Any]], table: Table, clip: bool) -> list[dict[str, Any]]:
        """Returns the groups of the table's contenders that were alive at once: {"contenders": each -> its result of
        interleave() at its best micro-batch, "need_bytes", "available_bytes": at the group's start}. On a card every
        group has one contender."""
        if self.args.clip == ("no" if clip else "yes"):
            return []
        names = [n for n in table.contenders if n in best and not (clip and n == "ours_eager")]
        if self.args.device == "cuda":
            groups = [self.one(best, name, clip) for name in names]
            return [group for group in groups if group is not None]
        need = self.needs(best, names, clip)
        pending = [name for name in names if name in need]
        references = [name for name in table.references if name in need]
        found = []
        while pending:
            group = self.together(best, pending, references, need, clip)
            if group is None:
                break
            found.append(group)
            pending = [name for name in pending if name not in group["contenders"]]
        return found

    def together(
        self,
        best: Mapping[str, Mapping[str, Any]],
        pending: Sequence[str],
        references: Sequence[str],
        need: Mapping[str, int],
        clip: bool,
    ) -> dict[str, Any] | None:
        """Returns the result of the next group of `pending` that fits the available memory at its start. Returns None
        where no contender fits (they are skipped) or there is no time."""
        tasks = {n: self.task(n, micro_batch=best[n]["micro_batch"], clip=clip) for n in (*references, *pending)}
        warm_up, steps = self.args.warm_up, self.args.steps
        # The members of the group depend on the present memory, so the key names the possible members.
        key = "together " + json.dumps([t.to_json() for t in tasks.values()] + [warm_up, steps], sort_keys=True)
        room = self.room_bytes()
        group = next_group(pending, references, need, room)
        if not group and key not in self.stages:
            for name in pending:
                self.skipped[name] = self.too_little(need[name], "by what it held alone") or "memory was short"
            return None
        slack = room - sum(need[name] for name in group)

        def work(left_s: float) -> dict[str, Any]:
            build_s, step_s = min(BUILD_S, left_s), min(STEP_S, left_s)
            before = os.getloadavg()
            with processes([self.start(tasks[name], need[name] + slack) for name in group]) as made:
                results = interleave(made, warm_up=warm_up, steps=steps, build_s=build_s, step_s=step_s)
            for name in group:
                if "failed" in results[name]:
                    self.note(tasks[name])
            return {
                "contenders": results, "need_bytes": {name: need[name] for name in group},
                "available_bytes": room + self.args.keep_free, "loadavg": [before, os.getloadavg()],
            }  # fmt: skip

        from pstar_sim.units import format_bytes

        what = (
            f"{', '.join(CONTENDERS[n][2] for n in group)}: {'clipped' if clip else 'not clipped'}, "
            f"{format_bytes(sum(need[n] for n in group))} of the {format_bytes(room)} that are available"
        )
        return self.stages.run(key, what, work)

    def one(self, best: Mapping[str, Mapping[str, Any]], name: str, clip: bool) -> dict[str, Any] | None:
        """Returns the result of a group of one contender, on a card."""
        task = self.task(name, micro_batch=best[name]["micro_batch"], clip=clip)
        warm_up, steps = self.args.warm_up, self.args.steps
        key = "timed " + json.dumps([task.to_json(), warm_up, steps], sort_keys=True)
        least_bytes = least_host_bytes(task, self.params_of(task.model))
        if key not in self.stages and (why := self.too_little(least_bytes, "the least, by arithmetic")):
            self.skipped[name] = why
            return None

        def work(left_s: float) -> dict[str, Any]:
            before = os.getloadavg()
            ran = self.alone(task, warm_up=warm_up, steps=steps, left_s=left_s)
            return {"contenders": {name: ran}, "loadavg": [before, os.getloadavg()]}

        result = self.stages.run(key, f"{CONTENDERS[name][2]}: {'clipped' if clip else 'not clipped'}", work)
        return result if result is None or "failed" not in result else {"contenders": {name: result}}

    def largest(self, best: Mapping[str, Mapping[str, Any]], timed: Mapping[str, Any]) -> dict[str, Any]:
        """Returns contender -> the deepest model of this width that trains within the cap on host memory, by trial."""
        cap = self.args.largest
        if cap is None:
            return {}
        if why := self.too_little(most_of_a_trial(cap), "the most that a trial may take before it is ended"):
            self.skipped["largest model"] = why
            return {}
        found: dict[str, Any] = {}
        with tempfile.TemporaryDirectory() as folder:
            shapes = Shapes(self.args.model, Path(folder))
            for name in best:
                known = timed.get(name, {}).get("memory")
                if known is None or name in ("ours_eager", "ours_half", "ours_away"):
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
        """Find the largest model of one contender; every trial is a stage. Raises OutOfTime."""

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
                    most_host_bytes=most_of_a_trial(cap),
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
    """The model with other numbers of layers, as configuration files of transformers in `folder`."""

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
    """Returns the bytes of host memory that are free or can be freed."""
    from executor.devices.backend import available_host_bytes

    return available_host_bytes() or 8 << 30


def most_of_a_trial(cap_bytes: int) -> int:
    """Returns the bytes of host memory at which a trial of the largest-model search is ended, well above the cap."""
    return int(1.3 * cap_bytes) + (1500 << 20)


def most_host_bytes(found: Mapping[str, Any]) -> int | None:
    """Returns the peak of host memory, including the start; None where it is not measurable."""
    start, steady = found["start"]["start_peak_bytes"], found["memory"]["host_peak_bytes"]
    return None if start is None or steady is None else max(start, steady)


def per_param(memory: Mapping[str, Any]) -> float | None:
    """Returns the bytes of the host's peak per parameter."""
    return None if memory["host_peak_bytes"] is None else memory["host_peak_bytes"] / memory["params"]


def host_columns(row: Mapping[str, Any]) -> tuple[str, str]:
    from pstar_sim.units import format_bytes

    if row["host_peak_bytes"] is None:
        return NOT_MEASURABLE, "-"
    return format_bytes(row["host_peak_bytes"]), f"{row['host_bytes_per_param']:.1f}"


def losses_apart(timed: Mapping[str, Mapping[str, Any]], others: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Returns the largest relative difference of each contender's losses to the reference's: plain PyTorch's, or else
    one of ours.

    others: contenders that ran the same steps and may include the reference.
    """
    known = {**others, **timed}
    references = ("plain", "ours", "ours_eager", "ours_half", "ours_away")
    reference = next((name for name in references if "losses" in known.get(name, {})), None)
    if reference is None:
        return {}
    base = known[reference]["losses"]
    return {
        name: max(abs(a - b) / abs(b) for a, b in zip(found["losses"], base))
        for name, found in timed.items()
        if found.get("losses")
    }


def what_leaves(name: str, memory: Mapping[str, Any]) -> str:
    """Returns the model data that a contender keeps on the host, in words; for ours by its plan, between two
    iterations."""
    if (by_plan := memory.get("predicted")) is None:
        return LEAVES[name]
    on_gpu, on_host = by_plan["gpu_bytes_per_param"], by_plan["host_bytes_per_param"]
    share = on_host / (on_gpu + on_host)
    return "nothing" if share < 0.005 else "everything" if share > 0.995 else f"{100 * share:.0f} %"


def rows(table: Table, compared: Mapping[str, Any], best: Mapping[str, Any], largest: Mapping[str, Any]) -> list[Any]:
    """Returns one row per contender and clipping, for the table and the README.

    compared: results of this table.
    """
    made = []
    for clip in (False, True):
        word = "clipped" if clip else "unclipped"
        timed, apart = compared[word], compared["losses_apart"][word]
        for name in table.contenders:
            found = timed.get(name)
            if found is None or "failed" in found:
                continue
            memory, other = found["memory"], table.counterpart(name)
            ratio = compared["ratios"][word].get(f"{other} / {name}")
            made.append(
                {
                    "contender": CONTENDERS[name][2],
                    "clip": clip,
                    "leaves": what_leaves(name, memory),
                    "micro_batch": best[name]["micro_batch"],
                    "tokens_per_s": found["tokens_per_s"],
                    "median_s": found["median_s"],
                    "times": {"of": CONTENDERS[other][2], "step": 1 / ratio["medians"]} if ratio else None,
                    "host_peak_bytes": memory["host_peak_bytes"],
                    "host_bytes_per_param": per_param(memory),
                    "gpu_allocated_bytes": memory["gpu_allocated_bytes"],
                    "gpu_reserved_bytes": memory["gpu_reserved_bytes"],
                    "loss_apart": apart.get(name),
                    "largest_params": largest.get(name, {}).get("params"),
                }
            )
    return made


COLUMNS = (
    "contender", "leaves", "clip", "micro", "step", "over", "tokens/s", "GPU alloc.", "GPU reserved", "host peak",
    "B/param", "loss apart", "largest",
)  # fmt: skip


def times_said(times: Mapping[str, Any] | None) -> str:
    """Returns, in words, the step divided by the step of our contender to which it is compared."""
    return "-" if times is None else f"{times['step']:.2f} x {times['of']}"


def show(results: Mapping[str, Any]) -> None:
    """Print the tables, the skipped and failed contenders, the ratios and their goals."""
    from pstar_sim.units import format_bytes, format_s

    job = results["job"]
    title = (
        f"{job['model']}, {job['dtype']}, {job['batch']} x {job['sequence']} tokens per step, {job['threads']} threads "
        f"each, {results['device']}"
    )
    for name, compared in results["tables"].items():
        lines = []
        for r in compared["rows"]:
            gpu = [
                format_bytes(b) if b is not None else "n/a" for b in (r["gpu_allocated_bytes"], r["gpu_reserved_bytes"])
            ]
            lines.append(
                (
                    r["contender"], r["leaves"], "yes" if r["clip"] else "no", str(r["micro_batch"]),
                    format_s(r["median_s"]), times_said(r["times"]), f"{r['tokens_per_s']:,.0f}", *gpu,
                    *host_columns(r), f"{r['loss_apart']:.1e}" if r["loss_apart"] is not None else "-",
                    f"{r['largest_params'] / 1e6:,.0f} M" if r["largest_params"] else "-",
                )
            )  # fmt: skip
        if lines:
            print_table(f"{name}: {title}", lines)
    for name, why in results["skipped"].items():
        print(f"skipped: {CONTENDERS[name][2] if name in CONTENDERS else name}: {why}")
    for table, compared in results["tables"].items():
        for clip in ("unclipped", "clipped"):
            for name, found in compared[clip].items():
                if "failed" in found:
                    print(f"failed: {CONTENDERS[name][2]}, {table}, {clip}: {found['failed']}")
            for pair, ratio in compared["ratios"][clip].items():
                print(
                    f"{table}, {clip}: step of {pair} = {ratio['medians']:.3f} (round by round {ratio['rounds']:.3f})"
                )
    for line in results["verdict"]:
        print(line)


def print_table(title: str, lines: Sequence[Sequence[str]]) -> None:
    """Print a table by rich, or with tabs where rich cannot be imported."""
    if importlib.util.find_spec("rich") is None:
        print(title)
        for line in (COLUMNS, *lines):
            print("\t".join(line))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("contender", "leaves") else "right")
    for line in lines:
        table.add_row(*line)
    Console(width=max(200, Console().width)).print(table)


def verdict(results: Mapping[str, Any]) -> list[str]:
    """Returns a line per goal: the goal, and whether it was met."""
    lines = []
    cuda = results["job"]["device"] == "cuda"
    for table in ON_A_CARD if cuda else TABLES:
        compared = results["tables"].get(table.name)
        for clip in ("unclipped", "clipped") if compared else ():
            of = compared["ratios"][clip]
            if not cuda and "ours / plain" in of:
                ratio = of["ours / plain"]["medians"]
                word = "met" if ratio <= 1.1 else "missed"
                lines.append(f"{table.name}, {clip}: ours over plain PyTorch {ratio:.3f}, goal at most 1.10: {word}")
            eager = cuda and any(pair.startswith("ours_eager") for pair in of)
            for peer in ("zero2", "zero3", "zero3_twinflow", "fsdp2"):
                mine = "ours_eager" if eager else table.counterpart(peer)
                if f"{mine} / {peer}" in of:
                    faster = 1 / of[f"{mine} / {peer}"]["medians"]
                    goal = 2.0 if cuda and peer == "zero3" else 1.0
                    lines.append(
                        f"{table.name}, {clip}: {CONTENDERS[mine][2]} is {faster:.2f} times as fast as "
                        f"{CONTENDERS[peer][2]}, goal {goal:g}: {'met' if faster >= goal else 'missed'}"
                    )
            if cuda:
                for name in ("ours", "ours_eager"):
                    lines += [f"{table.name}, {line}" for line in as_planned(clip, compared[clip].get(name, {}))]
    sizes = {n: f["params"] for n, f in results["largest"].items() if f.get("params")}
    for peer, goal in (("zero3", 1.6), ("fsdp2", 1.3)):
        if cuda and "ours" in sizes and peer in sizes:
            times = sizes["ours"] / sizes[peer]
            word = "met" if times >= goal else "missed"
            lines.append(f"largest model {times:.2f} times that of {CONTENDERS[peer][2]}, goal {goal}: {word}")
    return lines


def as_planned(clip: str, found: Mapping[str, Any]) -> list[str]:
    """Returns lines on two goals: seconds of an iteration within 10 % of the simulator's, reserved bytes within 3 % of
    the plan's budget."""
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
    """Returns the bytes per parameter of model data in each place: by the note in room.py (ours: by the plan), and as
    measured."""
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
        args.machine = measured_machine(device_name("cuda"), [args.out] if args.out else [])
    with tempfile.TemporaryDirectory() as logs:
        run = Run(args, Path(logs))
        for name, why in run.skipped.items():
            print(f"skipped: {CONTENDERS[name][2]}: {why}")
        best = run.best_micro_batches()
        tables: list[tuple[Table, dict[str, Any]]] = []
        for table in tables_of(run.names, args.device):
            tables.append((table, compared_in(table, run, best, plain=tables[0][1] if tables else {})))
        all_of_them = merged([compared[word] for _, compared in tables for word in ("unclipped", "clipped")])
        largest = run.largest(best, all_of_them)
        for table, compared in tables:
            compared["rows"] = rows(table, compared, best, largest)
        results: dict[str, Any] = {
            "device": device_name(args.device),
            "job": {
                "model": args.model, "dtype": args.dtype, "batch": args.batch, "sequence": args.sequence,
                "checkpointing": args.checkpointing, "device": args.device, "threads": args.threads,
                "cores": sorted(os.sched_getaffinity(0))[: args.threads], "gpu_memory_bytes": args.gpu_memory,
                "steps": args.steps, "warm_up": args.warm_up, "keep_free_bytes": args.keep_free,
            },
            "settings": {name: settings_of(name) for name in run.names},
            "skipped": run.skipped,
            "micro_batches": best,
            "tables": {table.name: compared for table, compared in tables},
            "bytes_per_param": arithmetic(run, all_of_them, best),
            "largest": largest,
            "stages_left": run.stages.left_out,
        }  # fmt: skip
        results["verdict"] = verdict(results)
        show(results)
        run.keep.say(f"written: {write_result(args.name, results, folder=args.out)}")
        if run.stages.left_out:
            run.keep.say(f"{run.stages.left_out} stages had no time left; run the same command again and it goes on")
        elif args.out is None:
            run.stages.forget()
    return 0


def compared_in(
    table: Table, run: Run, best: Mapping[str, Mapping[str, Any]], plain: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the results of the contenders of one table, beside each other, without and with clipping.

    plain: the table that has plain PyTorch's losses, where that is another table.
    """
    found: dict[str, Any] = {"ratios": {}, "losses_apart": {}, "groups": {}}
    for word in ("unclipped", "clipped"):
        timed = run.timed(best, table, clip=word == "clipped")
        groups = [group["contenders"] for group in timed]
        found[word] = merged(groups)
        found["ratios"][word] = ratios(groups if run.args.device == "cpu" else [merged(groups)])
        found["losses_apart"][word] = losses_apart(found[word], plain.get(word, {}))
        found["groups"][word] = [
            {**group, "contenders": list(group["contenders"])} for group in timed
        ]  # members of the groups, their memory, and the machine's load
    return found


def measured_machine(gpu: str, folders: Sequence[Path]) -> str | None:
    """Returns the machine file of `make gpu-record`, from one of these folders or from its place without --out; None if
    there is none."""
    files = (folder / f"{slug(gpu)}.toml" for folder in (*folders, ROOT / "traces" / "measured"))
    return next((str(file.resolve()) for file in files if file.exists()), None)


def device_name(device: str) -> str:
    if device == "cpu":
        return "CPU, the accelerator is virtual (host memory)"
    import torch

    return torch.cuda.get_device_name(0)


if __name__ == "__main__":
    raise SystemExit(main())
