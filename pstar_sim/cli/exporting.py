"""The command export: writes a plan for other tools."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pstar_sim.cli.declare import command
from pstar_sim.cli.flag_values import new_file
from pstar_sim.cli.flags import PlanFile
from pstar_sim.cli.output import Header, check_apart, save_perfetto, say, say_answer, tell
from pstar_sim.cli.planning import checked_plan, measured_of, named
from pstar_sim.errors import PstarError
from pstar_sim.files import replaced_atomically, write_atomically
from pstar_sim.units import format_bytes

if TYPE_CHECKING:
    from pstar_sim.core.plan import Plan
    from pstar_sim.core.plan_set import PlanSet

commands = typer.Typer()


def _file(what: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(parser=new_file, metavar="FILE", help=what)
    return option


@dataclass(frozen=True, kw_only=True)
class _Targets:
    SECTION = "what is written"

    perfetto: Annotated[
        bool, typer.Option("--perfetto", help="Chrome trace JSON: a lane per queue, counters of memory")
    ] = False
    timeline: Annotated[bool, typer.Option("--timeline", help="instead: our own timeline JSON")] = False
    memory_viz: Annotated[
        str | None,
        _file(
            "a memory snapshot for pytorch.org/memory_viz: payloads with the names of their layers, the tide by moment"
        ),
    ] = None
    deepspeed: Annotated[str | None, _file("a DeepSpeed configuration (JSON) that is nearest to the plan")] = None
    accelerate: Annotated[str | None, _file("accelerate's configuration with FSDP 2 (YAML)")] = None
    fsdp2: Annotated[str | None, _file("a Python function that applies FSDP 2 to a model")] = None
    torchtitan: Annotated[str | None, _file("a torchtitan configuration (TOML, as its versions up to 0.2 read)")] = None
    megatron: Annotated[str | None, _file("Megatron-LM's flags, one per line")] = None

    def __post_init__(self) -> None:
        if self.perfetto and self.timeline:
            raise typer.BadParameter("argument --timeline: not allowed with argument --perfetto; give one of them")
        form = next((name for name in ("perfetto", "timeline") if getattr(self, name)), None)
        target = next(iter(self.written), None)
        if form is not None and target is not None:
            raise typer.BadParameter(f"argument --{target}: not allowed with argument --{form}; give one of them")
        if form is None and target is None:
            known = " ".join(f"--{f.name.replace('_', '-')}" for f in fields(self))
            raise typer.BadParameter(f"one of the arguments {known} is required")

    @property
    def written(self) -> dict[str, str]:
        """Flag -> file, for the given flags that name their files."""
        viz = {} if self.memory_viz is None else {"memory-viz": self.memory_viz}
        return viz | self.files

    @property
    def files(self) -> dict[str, str]:
        """Flag -> file, for the given flags of frameworks."""
        return {name: path for name in _FRAMEWORKS if (path := getattr(self, name)) is not None}


_FRAMEWORKS = {
    "deepspeed": "DeepSpeed",
    "accelerate": "accelerate",
    "fsdp2": "FSDP2",
    "torchtitan": "torchtitan",
    "megatron": "Megatron-LM",
}
"""Flag -> target (frameworks/targets.py)."""


@command(
    commands,
    "pstar export plan.json --perfetto -o trace.json   (open it at ui.perfetto.dev)\n"
    "example: pstar export plan.json --deepspeed ds_config.json",
)
def export(
    *,
    plan: PlanFile,
    targets: _Targets,
    measured: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="with --perfetto: the timeline that `pstar run --timeline` kept, beside the prediction",
        ),
    ] = None,
    path: Annotated[
        str | None,
        typer.Option(
            "-o", "--output", parser=new_file, metavar="FILE", help="with --perfetto and --timeline: file to write"
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="what is predicted for the configurations as a list of JSON objects")
    ] = False,
) -> int:
    """Write a plan for other tools: its simulated timeline, or the nearest configuration of a framework, with the parts
    that the framework cannot express and the prediction for that configuration under the framework's own policy."""
    if measured is not None and not targets.perfetto:
        raise PstarError("--measured goes with --perfetto; `pstar run --timeline` keeps both timelines itself")
    from pstar_sim.core.plan_set import PlanSet
    from pstar_sim.core.set_file import read_plans

    check_apart([plan, *([measured] if measured else [])], [*targets.written.values(), *([path] if path else [])])
    if isinstance(stages := read_plans(Path(plan)), PlanSet):
        return _write_degrees(plan, stages, targets, as_json=json)
    loaded, _ = checked_plan(plan)
    if targets.written and path is not None:
        raise PstarError("-o goes with --perfetto and --timeline; the other flags name their files themselves")
    if targets.memory_viz is not None:
        _write_memory_viz(loaded, targets.memory_viz, quiet=json)
    if targets.files:
        return _write_configurations(loaded, targets.files, as_json=json)
    if targets.written:
        return 0
    if path is None:
        raise PstarError("the following arguments are required: -o/--output (see `pstar export --help`)")
    from pstar_sim.planner.compare import play_plan

    beside = [] if measured is None else [measured_of(measured)]
    timeline = play_plan(loaded)
    if targets.timeline:
        timeline.save(path)
    else:
        save_perfetto([timeline, *beside], loaded, Path(path))
    tell(f"{path}: {len(timeline.spans)} spans of {timeline.iterations} iterations")
    return 0


def _write_degrees(plan: str, plans: PlanSet, targets: _Targets, *, as_json: bool) -> int:
    from pstar_sim.core.checker.meetings import prove_set
    from pstar_sim.frameworks.express import express_set
    from pstar_sim.frameworks.targets import TARGETS
    from pstar_sim.terminal import terminal_width, wrap

    able = {flag: degrees for flag, name in _FRAMEWORKS.items() if (degrees := TARGETS[name].degrees) is not None}
    other = [f"--{flag}" for flag in targets.written if flag not in able]
    if other or not targets.files:
        raise PstarError(
            f"{plan}: has the plans of stages ({plans.parallelism}), which {(*other, 'a timeline')[0]} cannot say; "
            f"{' and '.join(f'--{flag}' for flag in able)} can"
        )
    with named(plan):
        prove_set(plans)
    first = plans.plans[0]
    answers = []
    for flag, file in targets.files.items():
        target = TARGETS[_FRAMEWORKS[flag]]
        expressed = express_set(plans, target.express, able[flag])
        write_atomically(Path(file), target.write(expressed.configuration))
        answers.append({"file": file, "says": list(expressed.says), "cannot_express": list(expressed.cannot)})
        if not as_json:
            texts = [f"{file}: {target.name}: {'; '.join(expressed.says)}."]
            texts += [f"cannot express: {what}." for what in expressed.cannot]
            texts.append(f"Predict it: pstar fits --like {file} --model {first.workload.model} --machine ...")
            say("\n".join(line for text in texts for line in wrap(text, terminal_width())) + "\n")
    if as_json:
        say_answer(Header(), rows=answers)
    return 0


def _write_memory_viz(plan: Plan, path: str, *, quiet: bool) -> None:
    from pstar_sim.planner.compare import play_plan
    from pstar_sim.report.memory_viz import to_memory_viz

    data = to_memory_viz(plan, play_plan(plan))
    with replaced_atomically(Path(path)) as temporary:
        temporary.write_bytes(data)
    if not quiet:
        tell(f"{path}: {format_bytes(len(data))}; open it at pytorch.org/memory_viz (device 0: GPU, 1: host, 2: disks)")


def _write_configurations(plan: Plan, files: dict[str, str], *, as_json: bool) -> int:
    from pstar_sim.frameworks.express import job_left
    from pstar_sim.frameworks.prediction import predict
    from pstar_sim.frameworks.targets import TARGETS
    from pstar_sim.report.configurations import export_text

    answers: list[dict[str, object]] = []
    for flag, file in files.items():
        target = TARGETS[_FRAMEWORKS[flag]]
        expressed = target.express(plan)
        write_atomically(Path(file), target.write(expressed.configuration))
        workload, settings = job_left(plan, expressed.configuration)
        workloads = (workload,) * plan.machine.world_size
        prediction = predict(expressed.configuration, workloads, plan.machine, settings, label=Path(file).name)
        if as_json:
            said = {"file": file, "says": list(expressed.says), "cannot_express": list(expressed.cannot)}
            answers.append({**said, **prediction.to_json()})
        else:
            say(("\n" if answers else "") + export_text(file, expressed, prediction))
            answers.append({})
    if as_json:
        say_answer(Header(), rows=answers)
    return 0
