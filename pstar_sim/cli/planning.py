"""Commands that need no torch: compare, plan, check, explain, plot."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pstar_sim.cli import flag_values
from pstar_sim.cli.bars import bar
from pstar_sim.cli.declare import command
from pstar_sim.cli.exit_status import MISTAKE, NO
from pstar_sim.cli.flag_values import natural, one_of, policy_names, positive
from pstar_sim.cli.flags import (
    JsonList,
    JsonObject,
    LikedWorkloadFlags,
    LoadingFlag,
    MachineFlags,
    OptionalMachineFlags,
    OptionalWorkloadFlags,
    PictureFlags,
    PlanFile,
    SettingFlags,
    WorkloadFlags,
    certify,
    output,
    policies,
)
from pstar_sim.cli.likes import OURS, Like, Likes, read_likes
from pstar_sim.cli.output import (
    Header,
    check_looks,
    draw,
    note,
    say,
    say_answer,
    tell,
    write_table,
    yes_or_no,
)
from pstar_sim.cli.staging import (
    Parallel,
    check_set,
    compare_spread,
    explain_set,
    plan_spread,
    refuse_beside,
    spread_like,
)
from pstar_sim.cli.usage import CommandGroup
from pstar_sim.errors import DoesNotFit, FalseFigures, NothingFits, PlanError, PstarError

if TYPE_CHECKING:
    from pstar_sim.catalog.machine import Machine
    from pstar_sim.core.check_report import CheckReport
    from pstar_sim.core.plan import Plan, Settings
    from pstar_sim.core.timeline import Timeline
    from pstar_sim.frameworks.prediction import ConfigurationPrediction
    from pstar_sim.planner.compare import Comparison

commands = typer.Typer()

GlobalBatch = Annotated[
    int | None,
    typer.Option(
        parser=positive,
        metavar="B",
        help="sequences per iteration on all GPUs; micro-batches, and the activations that are kept, recomputed or "
        "offloaded, are chosen among the variants of --trace or of the preset",
    ),
]


@dataclass(frozen=True, kw_only=True)
class _PlanningQuestion:
    job: OptionalWorkloadFlags
    on: MachineFlags
    setting: SettingFlags
    global_batch: int | None
    loading: str | None
    certify: bool
    quiet: bool


@command(
    commands, "pstar compare --model 15B --batch 8 --seq 1024 --machine v100-32 --policy tide --policy patrickstar"
)
def compare(
    *,
    job: LikedWorkloadFlags,
    on: MachineFlags,
    setting: SettingFlags,
    global_batch: GlobalBatch = None,
    policy: Annotated[list[str] | None, policies("compare", "all policies")] = None,
    like: Like = None,
    loading: LoadingFlag = None,
    lp: Annotated[
        bool, certify("compare the policies with the tighter bound of a linear program, which takes seconds")
    ] = False,
    barrier_costs: Annotated[
        bool,
        typer.Option(
            "--barrier-costs",
            help="also say what the barrier costs each policy, which plans it again, without",
        ),
    ] = False,
    parallel: Parallel = None,
    json: JsonList = False,
) -> int:
    """Compare policies on a machine: what fits, how fast, what binds, and why the rest does not fit."""
    asked = _PlanningQuestion(
        job=job, on=on, setting=setting, global_batch=global_batch, loading=loading, certify=lp, quiet=json
    )
    flags = {"global_batch": global_batch, "loading": loading, "certify": lp, "barrier_costs": barrier_costs}
    if parallel is not None:
        refuse_beside(f"--parallel {parallel}", like=like, **flags)
        return compare_spread(job, on, setting, parallel, policy, json=json)
    likes = read_likes(like)
    predictions: tuple[ConfigurationPrediction, ...] = ()
    if likes is not None:
        if (status := spread_like(job, on, setting, likes, policy, json=json, **flags)) is not None:
            return status
        asked, policy, predictions = _beside(asked, likes, policy)
    result = _compared(asked, policy, likes=predictions, barrier_cost=barrier_costs)
    say_notes(result)
    if predictions and not json:
        from pstar_sim.report.configurations import predictions_text

        say(predictions_text(predictions) + "\n")
    if json:
        said = {p.label: p.to_json() for p in predictions}
        rows = [
            row if row["policy"] not in said else {**row, "like": said[str(row["policy"])]} for row in result.to_json()
        ]
        say_answer(_header(result), rows=rows)
        say_left_out(result)
    else:
        from pstar_sim.report.tables import comparison_text

        say(comparison_text(result))
    return _fits_or_says_why(result)


def _header(result: Comparison) -> Header:
    from pstar_sim.report.tables import reasons, shown
    from pstar_sim.units import format_s

    (best, *_), equals = shown(result)
    reason = "; ".join(reasons(result))
    if best.fits:
        also = f" ({', '.join(row.policy for row in equals)} as fast)" if equals else ""
        reason = f"{best.policy} is the fastest{also}: {format_s(best.iteration_s or 0.0)} per iteration"
    return Header(
        model=result.workload.model,
        machine=result.machine.name,
        verdict=yes_or_no(best.fits),
        reason=reason,
        advice=(f"--policy {best.policy}",) if best.fits else result.changes,
        notes=result.notes,
    )


def _beside(
    asked: _PlanningQuestion, likes: Likes, policies: Sequence[str] | None
) -> tuple[_PlanningQuestion, list[str], tuple[ConfigurationPrediction, ...]]:
    from pstar_sim.cli.inputs import machine_of, workloads_of

    if asked.global_batch is not None:
        raise PstarError(
            "--global-batch chooses how a batch is run, and a configuration (--like) says how; give --batch instead"
        )
    machine = machine_of(asked.on)
    job, setting = likes.fill(asked.job, asked.setting, machine)
    likes, loading = likes.loaded(asked.loading)
    with bar("configurations", quiet=asked.quiet):
        predictions = likes.predict(workloads_of(job, machine), machine, job, setting)
    return replace(asked, job=job, setting=setting, loading=loading), list(policies or OURS), predictions


def _fits_or_says_why(result: Comparison) -> int:
    if any(row.fits for row in result.rows):
        return 0
    what = "no policy fits" if len(result.rows) > 1 else f"{result.rows[0].policy} does not fit"
    note(f"{what} {result.workload.model} on {result.machine.name}; the answer on stdout says why")
    return NO


@command(commands, "pstar plan --trace gpt2.parquet --machine virtual --policy auto -o plan.json")
def plan(
    *,
    job: WorkloadFlags,
    on: MachineFlags,
    setting: SettingFlags,
    global_batch: GlobalBatch = None,
    policy: Annotated[
        str,
        typer.Option(
            parser=flag_values.policy,
            metavar="P",
            autocompletion=policy_names,
            help="policy, or auto: the fastest that fits",
        ),
    ] = "auto",
    loading: LoadingFlag = None,
    path: Annotated[str, output("the plan file to write")],
    lp: Annotated[
        bool,
        certify("give the plan the tighter bound of a linear program, and what its barrier costs, which takes seconds"),
    ] = False,
    parallel: Parallel = None,
    json: Annotated[bool, typer.Option("--json", help="the plan's line of the comparison as a JSON object")] = False,
) -> int:
    """Make a plan and write it to a file."""
    if parallel is not None:
        refuse_beside(f"--parallel {parallel}", global_batch=global_batch, loading=loading, certify=lp)
        return plan_spread(job, on, setting, parallel, policy, path, json=json)
    asked = _PlanningQuestion(
        job=job, on=on, setting=setting, global_batch=global_batch, loading=loading, certify=lp, quiet=json
    )
    result = _compared(asked, None if policy == "auto" else [policy], only_best=True, barrier_cost=lp)
    say_notes(result)
    if not any(row.fits for row in result.rows):
        from pstar_sim.report.tables import refusal_text

        if json:
            say_answer(_header(result), fits=False, rows=result.to_json())
        else:
            say(refusal_text(result))
        return _fits_or_says_why(result)
    best = result.best()
    best.save(path)
    say_left_out(result)
    from pstar_sim.planner.confidence import confidence, confidence_line

    if json:
        row_of_job = {**best.row.to_json(), **result.workload.said}
        sources_of = confidence(result.workload, result.machine)
        say_answer(_header(result), plan=path, confidence=sources_of, rows=[row_of_job])
        return 0
    from pstar_sim.report.tables import format_percent
    from pstar_sim.units import format_bytes, format_s

    row = best.row
    sources = confidence_line(confidence(result.workload, result.machine))
    peak = format_bytes(row.peak_gpu_bytes or 0)
    by_rank = row.peak_gpu_bytes_by_rank
    whose = "" if by_rank is None else f" of rank {by_rank.index(max(by_rank))}"
    tell(
        f"{path}: {row.policy}, {format_s(row.iteration_s or 0)} per iteration, "
        + (f"{format_percent(row.gap)} above the bound, " if row.gap is not None else "")
        + f"peaks at {peak} of the GPU{whose}; "
        f"{len(best.plan.steps)} steps; {sources}"
    )
    if result.workload.notes:
        tell(f"note: {result.workload.notes}")
    return 0


def say_notes(result: Comparison) -> None:
    """Problems in the computation of the bound, on stderr."""
    notes = {str(row.certificate["note"]) for row in result.rows if row.certificate and "note" in row.certificate}
    for one in sorted(notes):
        note(one)


def say_left_out(result: Comparison) -> None:
    """What is not modelled on several GPUs, on stderr, for answers without a place for it."""
    for one in result.notes:
        note(f"note: {one}")


def checked_plan(path: str) -> tuple[Plan, CheckReport]:
    """The plan and the checker's report: a run needs proved steps and bytes. Raises PlanError, naming the file."""
    from pstar_sim.core.plan import load_plan

    plan = load_plan(path)
    with named(path):
        return plan, plan.check()


@contextlib.contextmanager
def named(path: str) -> Iterator[None]:
    try:
        yield
    except FalseFigures as error:
        raise FalseFigures(tuple(f"{path}: {line}" for line in error.false)) from None
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


@command(commands, "pstar check plan.json")
def check(
    *,
    path: PlanFile,
    lp: Annotated[
        bool, certify("also solve the linear program of the tighter bound, and plan without the barrier, again")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="a JSON object instead of sentences")] = False,
) -> int:
    """Prove that a plan file is right: chunks resident when used, no place over its budget in any legal order, every
    parameter updated once."""
    from pstar_sim.core.plan_set import PlanSet
    from pstar_sim.core.set_file import read_plans
    from pstar_sim.planner.stated import examine
    from pstar_sim.units import format_count

    loaded = read_plans(Path(path))
    if isinstance(loaded, PlanSet):
        if lp:
            stages = format_count(len(loaded.plans), "stage")
            raise PstarError(f"{path}: has the plans of {stages}; leave out --certify, which is of one")
        with named(path):
            return check_set(path, loaded, json=json)
    of = f"{path}: {loaded.policy} for {loaded.workload.model} on {loaded.machine.name}"
    answer: dict[str, object] = {"plan": path, "policy": loaded.policy}
    header = Header(model=loaded.workload.model, machine=loaded.machine.name)
    try:
        with named(path), bar("proving", quiet=json) as on_part:
            found = examine(loaded, lp=lp, on_part=on_part)
    except FalseFigures as error:
        lines = [line.removeprefix(f"{path}: ") for line in error.false]
        if json:
            say_answer(replace(header, verdict="no", reason=error.false[0]), **answer, ok=False, false=lines)
        else:
            tell("\n".join([of, *(f"false: {line}" for line in lines)]))
        more = f"; and {len(lines) - 1} more of its figures are false" if len(lines) > 1 else ""
        note(f"{error.false[0]}{more}")
        return MISTAKE
    report = found.report
    if json:
        peaks: dict[str, object] = {f"peak_{place}_bytes": size for place, size in report.peak_bytes.items()}
        if len(report.gpus) > 1:
            by_rank = {r: gpu.bytes for gpu in report.gpus for r in gpu.ranks}
            peaks["peak_gpu_bytes_by_rank"] = [by_rank[r] for r in sorted(by_rank)]
        said = {"lower_bound": found.bound, "as_stated": report.figures, "not_checked": report.not_checked}
        say_answer(replace(header, verdict="yes"), **answer, ok=True, steps=report.steps, **peaks, **said)
    else:
        tell(f"{of}\n{report.describe()}")
        tell(found.bound)
    return 0


@command(commands, "pstar explain plan.json")
def explain(
    *,
    path: PlanFile,
    steps: Annotated[int, typer.Option(parser=natural, metavar="N", help="first steps to show")] = 12,
    json: JsonObject = False,
) -> int:
    """Say what a plan does: what lives where and why, what binds, what the tide gains, its first steps."""
    from pstar_sim.core.plan_set import PlanSet
    from pstar_sim.core.set_file import read_plans
    from pstar_sim.planner.explain import explanation, in_words
    from pstar_sim.planner.stated import examine

    loaded = read_plans(Path(path))
    if isinstance(loaded, PlanSet):
        return explain_set(path, loaded, json=json)
    with named(path), bar("proving", quiet=json) as on_part:
        found = examine(loaded, on_part=on_part)
    cost = loaded.predictions.get("barrier_cost_s")
    sections = explanation(loaded, found.timeline, barrier_cost_s=cost, first_steps=steps)
    if json:
        job, *others = sections.items()
        rows = [{"about": about, "said": [line.strip() for line in lines]} for about, lines in others]
        header = Header(model=loaded.workload.model, machine=loaded.machine.name, reason=" ".join(job[1]))
        figures = {"policy": loaded.policy, "predictions": dict(loaded.predictions), "lower_bound": found.bound}
        say_answer(header, plan=path, **figures, rows=rows)
    else:
        say(in_words(sections))
    return 0


plot = typer.Typer(
    cls=CommandGroup,
    subcommand_metavar="PICTURE ...",
    help="Draw pictures.",
    epilog="example: pstar plot tide --model 15B --batch 8 --seq 1024 --machine v100-32 -o tide.png",
)

AXES = Literal["time", "moment", "both"]


@command(
    plot,
    "pstar plot tide --model 15B --batch 8 --seq 1024 --machine v100-32 -o tide.png\n"
    "example: pstar plot tide plan.json --measured timeline.json -o tide.png",
)
def tide(
    *,
    plans: Annotated[
        list[str] | None, typer.Argument(metavar="PLAN", help="plan files to draw, instead of planning")
    ] = None,
    job: OptionalWorkloadFlags,
    on: OptionalMachineFlags,
    setting: SettingFlags,
    policy: Annotated[list[str] | None, policies("draw", "static_partition and tide")] = None,
    x: Annotated[AXES, typer.Option(parser=one_of(AXES), help="against what")] = "both",
    measured: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="the timeline that `pstar run --timeline` kept, drawn over the first policy"),
    ] = None,
    path: Annotated[str, output("picture to write")] = "tide.png",
    picture: PictureFlags,
) -> int:
    """Draw GPU memory over an iteration, stacked by what fills it: non-model data, parameters, gradients, optimizer
    states, free; policies below each other."""
    from pstar_sim.report.paper import tide_csv
    from pstar_sim.report.tide_picture import tide_figure

    check_looks(path, picture, plans or ())
    if not plans:
        timelines, title = _planned_timelines(job, on, setting, policy)
    elif job.trace is not None or job.model is not None:
        raise PstarError("draw plan files, or plan now with --trace or --model: not both")
    else:
        timelines, title = _timelines_of(plans)
    over = None if measured is None else measured_of(measured)
    xs = ("time", "moment") if x == "both" else (x,)
    draw(lambda look: tide_figure(timelines, xs=xs, measured=over, title=title, look=look), path, picture)
    tell(f"{path}: {', '.join(t.label for t in timelines)}")
    if picture.data is not None:
        write_table(picture.data, tide_csv([*timelines, *([over] if over else [])], xs))
    return 0


@command(plot, "pstar plot stages plan.json -o stages.png")
def stages(
    *,
    path: PlanFile,
    drawn: Annotated[str, output("picture to write")] = "stages.png",
    picture: PictureFlags,
) -> int:
    """Draw the queues of all stages of a pipeline over one iteration."""
    from pstar_sim.core.checker.meetings import prove_set
    from pstar_sim.core.plan_set import PlanSet
    from pstar_sim.core.set_file import read_plans
    from pstar_sim.report.stages import stages_csv, stages_figure
    from pstar_sim.sim.play import play_stages

    check_looks(drawn, picture, [path])
    plans = read_plans(Path(path))
    if not isinstance(plans, PlanSet):
        raise PstarError(f"{path}: is the plan of one stage; `pstar report` draws its queues")
    with named(path):
        prove_set(plans)
    timelines = play_stages(plans)
    draw(lambda look: stages_figure(plans, timelines, look=look), drawn, picture)
    tell(f"{drawn}: {plans.count}")
    if picture.data is not None:
        write_table(picture.data, stages_csv(plans, timelines))
    return 0


commands.add_typer(plot, name="plot")


def measured_of(path: str) -> Timeline:
    """Raises TraceError, naming the file, if it has none."""
    from pstar_sim.core.run_file import load_timelines
    from pstar_sim.errors import TraceError

    found = load_timelines(path)
    if "measured" not in found:
        raise TraceError(f"{path}: holds a predicted timeline and no measured one; `pstar run --timeline` writes both")
    return found["measured"]


def _compared(
    asked: _PlanningQuestion,
    policies: Sequence[str] | None,
    *,
    only_best: bool = False,
    likes: Sequence[ConfigurationPrediction] = (),
    barrier_cost: bool | None = None,
) -> Comparison:
    from pstar_sim.cli.inputs import cut_of, machine_of, settings_of, workloads_of
    from pstar_sim.planner.asked import asked_policies
    from pstar_sim.planner.balance import all_balance
    from pstar_sim.planner.compare import compare as ask

    machine, settings = machine_of(asked.on), settings_of(asked.setting)
    if asked.global_batch is not None:
        return _among_variants(
            asked, asked.global_batch, machine, settings, policies, only_best=only_best, barrier_cost=barrier_cost
        )
    workloads = workloads_of(asked.job, machine, nearly=all_balance(asked_policies(policies, machine), machine))
    made = {p.label: (p.plan, p.timeline) for p in likes if p.plan is not None and p.timeline is not None}
    with bar("starting", quiet=asked.quiet) as on_part:
        return ask(
            workloads,
            machine,
            policies=[*(p.as_policy() for p in likes), *policies] if likes and policies else policies,
            made=made,
            settings=settings,
            loading=asked.loading,
            near=True if policies else None,
            certify=asked.certify,
            only_best=only_best,
            barrier_cost=barrier_cost,
            cut=cut_of(asked.job, machine),
            on_part=on_part,
        )


def _among_variants(
    asked: _PlanningQuestion,
    global_batch: int,
    machine: Machine,
    settings: Settings,
    policies: Sequence[str] | None,
    *,
    only_best: bool,
    barrier_cost: bool | None,
) -> Comparison:
    from pstar_sim.cli.inputs import variants_of
    from pstar_sim.planner.compare import Comparison, unfit_row
    from pstar_sim.planner.compare import compare as ask
    from pstar_sim.planner.tried import tried_text
    from pstar_sim.planner.variants import choose
    from pstar_sim.policy.registry import policy_name

    policy = policies[0] if policies is not None and len(policies) == 1 else "optimal"
    with bar("writing the ways to run it", quiet=asked.quiet) as on_way:
        ways = variants_of(asked.job, global_batch, machine)
        try:
            chosen = choose(ways, machine, settings, policy=policy, loading=asked.loading, on_way=on_way)
        except DoesNotFit as error:
            note = f"global batch {global_batch}: none of {len(ways)} ways fits; the heading describes the first one"
            row = unfit_row(policy_name(policy), error)
            return Comparison(
                workload=ways[0].workload,
                machine=machine,
                settings=settings,
                batch=ways[0].batch * machine.data_parallel_size,
                rows=(row,),
                planned={},
                notes=(note,),
            )
        result = ask(
            (chosen.workload,) * machine.world_size,
            machine,
            policies=policies,
            settings=settings,
            loading=asked.loading,
            certify=asked.certify,
            only_best=only_best,
            barrier_cost=barrier_cost,
            made={policy_name(policy): (chosen.plan, chosen.timeline)},
            on_part=on_way,
        )
    planned = {
        name: replace(p, plan=replace(p.plan, choices={**p.plan.choices, **chosen.choices()}))
        for name, p in result.planned.items()
    }
    others = tried_text(dict(chosen.tried), chosen.words)
    notes = [
        f"global batch {global_batch}: {chosen.words}, fastest by {policy} of {len(chosen.tried)} ways"
        + f" ({others})" * bool(others)
    ]
    notes += [f"not considered: {what}" for what in chosen.left_out]
    return replace(result, planned=planned, notes=(*result.notes, *notes))


def _timelines_of(plans: Sequence[str]) -> tuple[list[Timeline], str]:
    from pstar_sim.planner.compare import play_plan
    from pstar_sim.report.tables import plan_words

    loaded = [checked_plan(path)[0] for path in plans]
    errors = [p.predictions.get("expected_error") for p in loaded]
    return [play_plan(p) for p in loaded], _with_error(plan_words(loaded[0]), errors)


def _with_error(title: str, errors: Sequence[float | None]) -> str:
    from pstar_sim.units import format_error

    known = [error for error in errors if error is not None]
    return f"{title}; predicted seconds {format_error(max(known) if len(known) == len(errors) else None)}"


def _planned_timelines(
    job: OptionalWorkloadFlags, on: OptionalMachineFlags, setting: SettingFlags, policies: Sequence[str] | None
) -> tuple[list[Timeline], str]:
    from pstar_sim.cli.inputs import machine_of, settings_of, workloads_of
    from pstar_sim.planner.compare import compare as ask
    from pstar_sim.report.tables import job_words

    machine = machine_of(on)
    names = policies or ["static_partition", "tide"]
    workloads = workloads_of(job, machine)
    with bar("starting", quiet=False) as on_part:
        result = ask(
            workloads, machine, policies=names, settings=settings_of(setting), barrier_cost=False, on_part=on_part
        )
    drawn = [result.planned[row.policy].timeline for row in result.rows if row.fits]
    missing = [str(row.reason) for row in result.rows if not row.fits]
    if not drawn:
        raise NothingFits("there is nothing to draw: " + "; ".join(missing))
    for reason in missing:
        note(f"not drawn: {reason}")
    w = result.workload
    batch = f"batch {result.batch}" + (f" x {w.micro_batches}" if w.micro_batches > 1 else "")
    return drawn, _with_error(job_words(w, machine, batch), [row.expected_error for row in result.rows if row.fits])
