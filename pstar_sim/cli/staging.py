"""`--parallel` of plan, compare and fits, and check and plot for a set of plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pstar_sim.cli.bars import bar
from pstar_sim.cli.exit_status import NO
from pstar_sim.cli.flags import MachineFlags, OptionalWorkloadFlags, SettingFlags
from pstar_sim.cli.output import Header, note, say, say_answer, tell, yes_or_no
from pstar_sim.errors import PlanError, PstarError

if TYPE_CHECKING:
    from pstar_sim.catalog.machine import Machine
    from pstar_sim.cli.likes import Likes
    from pstar_sim.core.plan_set import PlanSet
    from pstar_sim.planner.stages_compared import StagesComparison, StagesRow
    from pstar_sim.policy.registry import Policy
    from pstar_sim.workload.parallelism import Parallelism

Parallel = Annotated[
    str | None,
    typer.Option(
        "--parallel",
        metavar="TEXT",
        help="spread a preset over tensor ranks, parts of sequences and stages, such as tp=2,sp,pp=4, cp=2 or "
        "pp=2,schedule=interleaved,v=2; auto: the ways that can be the fastest, all: every one; both choose what to "
        "recompute unless --checkpointing or --recompute says",
    ),
]


def refuse_beside(parallel: str, **flags: object) -> None:
    """Refuse a flag unknown to questions about parallelism.

    parallel: the asking flag.
    """
    given = [f"--{name.replace('_', '-')}" for name, value in flags.items() if value]
    if given:
        raise PstarError(f"{parallel} does not go with {', '.join(given)}; leave one of them out")


def _asked(
    job: OptionalWorkloadFlags,
    machine: Machine,
    setting: SettingFlags,
    parallel: str | Parallelism,
    policies: Sequence[str | Policy],
    *,
    quiet: bool,
) -> StagesComparison:
    from pstar_sim.cli.inputs import job_of, settings_of
    from pstar_sim.planner.stages_compared import compare_stages
    from pstar_sim.planner.stages_degrees import ways_of

    settings, one = settings_of(setting), job_of(job, parallel=str(parallel))
    ways, left_out = ways_of(one, machine, parallel)
    with bar("starting", quiet=quiet) as on_part:
        return compare_stages(
            one, machine, policies, ways, left_out=left_out, every=parallel == "all", settings=settings, on_part=on_part
        )


def compare_spread(
    job: OptionalWorkloadFlags,
    on: MachineFlags,
    setting: SettingFlags,
    parallel: str,
    policies: Sequence[str] | None,
    *,
    json: bool,
) -> int:
    from pstar_sim.cli.inputs import machine_of
    from pstar_sim.policy.registry import STAGED

    return _say(_asked(job, machine_of(on), setting, parallel, policies or STAGED, quiet=json), json=json)


def spread_like(
    job: OptionalWorkloadFlags,
    on: MachineFlags,
    setting: SettingFlags,
    likes: Likes,
    policies: Sequence[str] | None,
    *,
    json: bool,
    **flags: object,
) -> int | None:
    """For a configuration with degrees beside data parallelism, by its policy and those named; None without one.

    flags: unknown to such an answer.
    """
    from pstar_sim.cli.inputs import machine_of
    from pstar_sim.cli.likes import decided
    from pstar_sim.frameworks.follows import Follows, as_run, stands_for

    if likes.spread is None:
        return None
    label, c = likes.spread
    assert c.parallelism is not None
    refuse_beside(f"--like {label} ({c.parallelism})", **flags)
    machine = machine_of(on)
    job, setting = likes.fill(job, setting, machine)
    notes = [*c.notes, *decided(c, machine, job, setting)]
    own = stands_for(c, c.data_on(machine) * c.parallelism.context)
    for words in (f"predicted as {own}, {c.parallelism}", *notes):
        note(f"{label}: {words}")
    follows = Follows(replace(c, policy=own), label)
    asked: list[str | Policy] = [follows, *(name for name in policies or () if name != own)]
    return _say(_asked(job, as_run(machine, c), setting, c.parallelism, asked, quiet=json), json=json)


def _say(found: StagesComparison, *, json: bool) -> int:
    from pstar_sim.report.stages import stages_text

    if json:
        say_answer(_header(found), rows=[asdict(row) for row in found.rows])
        for words in (*found.left_out, *(f"{way}, the least that any plan of it takes" for way in found.slower)):
            note(f"not planned: {words}")
    else:
        say(stages_text(found))
    return _fits(found)


def _header(found: StagesComparison) -> Header:
    reason = "; ".join(row.reason for row in found.rows if row.reason) or "; ".join(found.left_out)
    if found.best is not None:
        row = found.rows[0]
        reason = f"{row.policy} with {row.parallel} is the fastest: {found.best.iteration_s:.6g} s per iteration"
    return Header(
        model=found.job.model,
        machine=found.machine.name,
        verdict=yes_or_no(found.best is not None),
        reason=reason,
        advice=[found.flags] if found.flags else [],
        notes=(*found.notes, *found.left_out),
    )


def _fits(found: StagesComparison) -> int:
    if found.best is not None:
        return 0
    what = "fits" if found.rows else "can be planned for"
    note(f"no parallelism {what} {found.job.model} on {found.machine.name}; the answer on stdout says why")
    return NO


def plan_spread(
    job: OptionalWorkloadFlags,
    on: MachineFlags,
    setting: SettingFlags,
    parallel: str,
    policy: str,
    path: str,
    *,
    json: bool,
) -> int:
    from pstar_sim.cli.inputs import machine_of
    from pstar_sim.core.set_file import save_set
    from pstar_sim.policy.registry import STAGED
    from pstar_sim.report.stages import stages_text
    from pstar_sim.units import format_bytes, format_s

    found = _asked(job, machine_of(on), setting, parallel, STAGED if policy == "auto" else [policy], quiet=json)
    if found.best is None:
        if json:
            say_answer(_header(found), fits=False, rows=[asdict(row) for row in found.rows])
        else:
            say(stages_text(found))
        return _fits(found)
    for words in found.notes:
        note(f"note: {words}")
    best, row = found.best, found.rows[0]
    save_set(best.plans, Path(path))
    if json:
        say_answer(_header(found), plan=path, rows=[asdict(row)])
        return 0
    peak, how = max(row.peak_gpu_bytes), f" recomputing {row.recompute}" if row.recompute else ""
    tell(
        f"{path}: {row.policy}, {row.parallel}{how}, {format_s(best.iteration_s)} per iteration, a bubble of "
        f"{best.bubble:.0%}; peaks at {format_bytes(peak)} of the GPU, of "
        f"{best.plans.names[row.peak_gpu_bytes.index(peak)]}; "
        f"{sum(len(plan.steps) for plan in best.plans.plans)} steps in {best.plans.count}{_split(row)}"
    )
    return 0


def _split(row: StagesRow) -> str:
    from pstar_sim.report.stages import split_words

    return f"; {split_words(row.split, row.gain_of_split)}" if row.split else ""


def check_set(path: str, plans: PlanSet, *, json: bool) -> int:
    from pstar_sim.planner.stages import examine_set
    from pstar_sim.units import format_count
    from pstar_sim.workload.parallelism import CUTS

    reports, seconds = examine_set(plans)
    cut = plans.parallelism.cut
    unchecked = [f"cut={cut}, by which the planner chose each stage's layers"] if cut != CUTS[0] else []
    unchecked += [f"whether the shares of layers, {plans.split}, are the fastest"] if plans.shares else []
    stated = " as stated" if all("iteration_s" in plan.predictions for plan in plans.plans) else ""
    if json:
        stages = [{"steps": report.steps, "peak_bytes": report.peak_bytes} for report in reports]
        said = {"policy": plans.plans[0].policy, "parallel": str(plans.parallelism), "iteration_s": seconds}
        said |= {"not_checked": unchecked}
        first = plans.plans[0]
        header = Header(model=first.workload.model, machine=first.machine.name.partition(" stage ")[0], verdict="yes")
        say_answer(header, plan=path, ok=True, **said, stages=stages)
        return 0
    first = plans.plans[0]
    meetings = format_count(len(plans.meetings), "meeting")
    lines = [f"{path}: {first.policy} for {first.workload.model} on {plans.count} ({plans.parallelism})"]
    for n, report in enumerate(reports):
        what, *peaks = report.describe().splitlines()[: 1 + len(report.peak_bytes)]
        lines += [f"{plans.names[n]}: {what}", *(f"  {peak}" for peak in peaks)]
    lines.append(f"{meetings}, in no circle; simulated together{stated}: {seconds:.6g} s per iteration")
    lines += [f"not checked: {what}" for what in unchecked]
    tell("\n".join(lines))
    return 0


def explain_set(path: str, plans: PlanSet, *, json: bool) -> int:
    from pstar_sim.core.checker.meetings import prove_set
    from pstar_sim.planner.stages import PlannedStages
    from pstar_sim.report.stages import explain_stages
    from pstar_sim.sim.play import play_stages

    try:
        prove_set(plans)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    text = explain_stages(PlannedStages(plans=plans, timelines=play_stages(plans)))
    if json:
        first = plans.plans[0]
        header = Header(model=first.workload.model, machine=first.machine.name.partition(" stage ")[0])
        say_answer(header, plan=path, rows=[{"about": str(plans.parallelism), "said": text.splitlines()}])
    else:
        say(text)
    return 0
