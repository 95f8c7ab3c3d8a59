"""The capacity commands: fits, max-model, max-batch, cheapest, sensitivity, sweep."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pstar_sim.cli.bars import bar
from pstar_sim.cli.declare import command
from pstar_sim.cli.exit_status import NO
from pstar_sim.cli.flag_values import Counts, count, counts, duration_s, machine_names, model_names, positive, share
from pstar_sim.cli.flags import (
    JobFlags,
    JsonList,
    LikedWorkloadFlags,
    LoadingFlag,
    MachineFlags,
    MicroBatches,
    Preset,
    Quiet,
    SettingFlags,
    WorkloadFlags,
    output,
    policies,
)
from pstar_sim.cli.likes import Like, read_likes
from pstar_sim.cli.output import Header, note, say, say_answer, tell, yes_or_no
from pstar_sim.cli.staging import Parallel, compare_spread, refuse_beside, spread_like
from pstar_sim.errors import PstarError

if TYPE_CHECKING:
    from pstar_sim.frameworks.prediction import ConfigurationPrediction
    from pstar_sim.planner.fits import Fits
    from pstar_sim.planner.limits import Limits

commands = typer.Typer()


@dataclass(frozen=True, kw_only=True)
class AskedFlags:
    """One job, one machine, and the answer's form."""

    policy: Annotated[list[str] | None, policies("ask about", "all policies")] = None
    loading: LoadingFlag = None
    json: JsonList = False


@command(commands, "pstar fits --model 12B --batch 8 --seq 1024 --machine rtx4090-128gb")
def fits(
    *,
    job: LikedWorkloadFlags,
    on: MachineFlags,
    setting: SettingFlags,
    like: Like = None,
    asked: AskedFlags,
    why: Annotated[bool, typer.Option("--why", help="also say what needs the room, policy by policy")] = False,
    phases: Annotated[
        bool, typer.Option("--phases", help="also say what the host needs while loading, saving and resuming")
    ] = False,
    parallel: Parallel = None,
) -> int:
    """Say whether a job fits a machine, by policy: with how much room to spare, or what is short and what would do."""
    from pstar_sim.cli.inputs import machine_of, settings_of, workloads_of
    from pstar_sim.planner.fits import fits as ask
    from pstar_sim.report.capacity_tables import fits_said, fits_text

    if parallel is not None:
        refuse_beside(f"--parallel {parallel}", like=like, loading=asked.loading, why=why, phases=phases)
        return compare_spread(job, on, setting, parallel, asked.policy, json=asked.json)
    machine = machine_of(on)
    likes = read_likes(like)
    named, loading = asked.policy, asked.loading
    if likes is not None:
        beside = {"loading": loading, "why": why, "phases": phases}
        if (status := spread_like(job, on, setting, likes, named, json=asked.json, **beside)) is not None:
            return status
        job, setting = likes.fill(job, setting, machine)
        likes, loading = likes.loaded(loading)
    workloads = workloads_of(job, machine)
    predictions: tuple[ConfigurationPrediction, ...] = ()
    if likes is not None:
        with bar("configurations", quiet=asked.json):
            predictions = likes.predict(workloads, machine, job, setting)
    answer: Fits | None = None  # configurations alone, if no policy is named beside them
    if named or not predictions:
        near = True if why or named else False if asked.json else None
        with bar("starting", quiet=asked.json) as on_part:
            given = partial(ask, policies=named, settings=settings_of(setting), loading=loading, on_part=on_part)
            answer = given(workloads, machine, near=near)
            if near is False and not answer.any:  # JSON says of each row what would make it fit
                answer = given(workloads, machine, near=True)
    rows = [*(p.as_fit() for p in predictions), *(answer or ())]
    if asked.json:
        said = [{**p.as_fit().to_json(), **workloads[0].said, "like": p.to_json()} for p in predictions]
        found = any(row.fits for row in rows)
        header = Header(model=workloads[0].model, machine=machine.name, verdict=yes_or_no(found))
        others: dict[str, object] = {}
        if answer is not None:
            reason, advice, notes = fits_said(answer)
            header = replace(header, reason=reason, advice=advice, notes=notes)
            best = [row.policy for row in answer.fastest]
            others = {"recommended": best[:1], "as_fast": best[1:], "parts": [asdict(part) for part in answer.parts]}
            others["streaming"] = answer.hiding and answer.hiding.to_json()
        say_answer(header, **others, rows=[*said, *(answer.to_json() if answer else ())])
    else:
        if predictions:
            from pstar_sim.report.configurations import predictions_text

            say(predictions_text(predictions) + "\n")
        say(
            fits_text(answer, why=why)
            if answer
            else "policies of pstar-sim beside these: --policy optimal, or others\n"
        )
        if phases:
            from pstar_sim.report.phases import phases_text

            say("\n" + phases_text(rows, machine.host))
    if not any(row.fits for row in rows):
        what = "no policy fits" if answer and len(answer.rows) > 1 else f"{rows[-1].policy} does not fit"
        note(f"{what} {workloads[0].model} on {machine.name}; the answer on stdout says why")
        return NO
    return 0


@command(commands, "pstar max-model --machine v100-32 --batch 8 --seq 1024 --like 12B")
def max_model(
    *,
    like: Annotated[
        str,
        typer.Option(
            metavar="NAME", autocompletion=model_names, help="the family: this preset with more or fewer layers"
        ),
    ] = "12B",
    hidden: Annotated[int | None, typer.Option(parser=positive, metavar="H", help="another hidden size for it")] = None,
    heads: Annotated[
        int | None, typer.Option(parser=positive, metavar="N", help="another number of heads for it")
    ] = None,
    batch: Annotated[
        int, typer.Option(parser=positive, metavar="B", help="sequences per micro-batch, of all GPUs together")
    ],
    micro_batches: MicroBatches = 1,
    job: JobFlags,
    on: MachineFlags,
    setting: SettingFlags,
    asked: AskedFlags,
    parallel: Parallel = None,
) -> int:
    """Find the largest model a machine can train, by policy: of the catalog, and of a family by its depth."""
    from pstar_sim.cli.captured import has_preset
    from pstar_sim.cli.inputs import axes_of, machine_of, needed_sequence, settings_of
    from pstar_sim.planner.limits import max_model as ask

    if not has_preset(like):
        raise PstarError(
            f"--like {like}: no preset is written for it, whose layers could be fewer or more; ask fits or max-batch "
            f"with --model {like}, or change the layers in its config.json"
        )
    machine = machine_of(on)
    with bar("starting", quiet=asked.json) as on_policy:
        answer = ask(
            machine,
            batch=batch,
            seq=needed_sequence(like, job.seq),
            like=like,
            hidden=hidden,
            heads=heads,
            policies=asked.policy,
            settings=settings_of(setting),
            micro_batches=micro_batches,
            loading=asked.loading,
            parallel=parallel,
            on_policy=on_policy,
            **axes_of(job),
        )
    return _say_limits(answer, asked, smallest=f"one layer like {like}", machine=str(on.machine), model=like)


def _say_limits(answer: Limits, asked: AskedFlags, *, smallest: str, machine: str, model: str) -> int:
    from pstar_sim.report.capacity_tables import limits_said, limits_text

    if asked.json:
        reason, notes = limits_said(answer)
        yes = yes_or_no(any(row.value for row in answer.rows))
        header = Header(model=model, machine=machine, verdict=yes, reason=reason, notes=notes)
        say_answer(header, rows=answer.to_json())
    else:
        say(limits_text(answer))
    if not any(row.value for row in answer.rows):
        note(f"not even {smallest} fits {machine}; the answer on stdout says why")
        return NO
    return 0


@command(commands, "pstar max-batch --model 8B --seq 1024 --machine rtx4090")
def max_batch(
    *,
    model: Preset,
    micro_batches: MicroBatches = 1,
    job: JobFlags,
    on: MachineFlags,
    setting: SettingFlags,
    asked: AskedFlags,
) -> int:
    """Find the largest batch with which a machine can train a model, by policy."""
    from pstar_sim.cli.captured import kind_of
    from pstar_sim.cli.inputs import axes_of, machine_of, needed_sequence, settings_of
    from pstar_sim.planner.jobs import Job
    from pstar_sim.planner.limits import max_batch as ask
    from pstar_sim.workload.presets import default_dtype, preset
    from pstar_sim.workload.workload import Workload

    machine = machine_of(on)
    axes, kind = axes_of(job), kind_of(model, job)
    seq = needed_sequence(model, job.seq)

    def write(batch: int) -> Workload | tuple[Workload, ...]:
        if kind is not Job:
            return kind(model=model, batch=batch, seq=seq, micro_batches=micro_batches, **axes).of(machine)
        dtype = job.dtype or default_dtype(machine, job.autocast)
        return preset(model, batch=batch, seq=seq, micro_batches=micro_batches, **(axes | {"dtype": dtype}))

    with bar("starting", quiet=asked.json) as on_policy:
        answer = ask(
            machine,
            write,
            policies=asked.policy,
            settings=settings_of(setting),
            loading=asked.loading,
            on_policy=on_policy,
        )
    return _say_limits(answer, asked, smallest=f"one sequence of {model}", machine=machine.name, model=model)


@command(commands, "pstar cheapest --model 8B --tokens 3e9 --deadline 14d --batch 64 --seq 1024")
def cheapest(
    *,
    model: Preset,
    tokens: Annotated[float, typer.Option(parser=count, metavar="N", help="tokens in all, such as 300e9")],
    deadline: Annotated[
        float | None,
        typer.Option(parser=duration_s, metavar="TIME", help="such as 14d, 36h or 2w (default: none)"),
    ] = None,
    batch: Annotated[
        int,
        typer.Option(
            parser=positive, metavar="B", help="sequences per iteration, of all GPUs and micro-batches together"
        ),
    ],
    job: JobFlags,
    machine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="M,...",
            autocompletion=machine_names,
            help="only these machines (default: every machine with a price)",
        ),
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="another figure of every --machine")
    ] = None,
    gpus: Annotated[
        Counts | None,
        typer.Option(parser=counts, metavar="N,...", help="GPUs per node of every --machine; 1,2,4: a row each"),
    ] = None,
    prices: Annotated[
        str | None, typer.Option(metavar="FILE", help="prices of your own: [MACHINE] usd_per_hour = ...")
    ] = None,
    nodes: Annotated[
        Counts | None,
        typer.Option(
            parser=counts,
            metavar="N,...",
            help="most nodes to try, for the fewest that make the deadline (default: 64); 1,2,4: a row each",
        ),
    ] = None,
    setting: SettingFlags,
    policy: Annotated[list[str] | None, policies("use", "optimal")] = None,
    loading: LoadingFlag = None,
    parallel: Parallel = None,
    json: JsonList = False,
) -> int:
    """Find the cheapest machine that trains a model on a number of tokens by a deadline."""
    from pstar_sim.catalog.loader import load_machine
    from pstar_sim.cli.captured import kind_of
    from pstar_sim.cli.inputs import axes_of, needed_sequence, settings_of
    from pstar_sim.planner.cheapest import MOST_NODES
    from pstar_sim.planner.cheapest import cheapest as ask
    from pstar_sim.report.capacity_tables import cheapest_said, cheapest_text

    if (changes or gpus) and not machine:
        flag = "--set" if changes else "--gpus"
        raise PstarError(f"{flag} changes named machines only: give --machine too")
    of_node = (None,) if gpus is None else gpus.values
    names = [name.strip() for given in machine or () for name in given.split(",")]
    machines = [load_machine(name, gpus=n, overrides=changes or ()) for name in names for n in of_node]
    most = nodes.values[0] if nodes is not None and len(nodes.values) == 1 else None
    with bar("starting", quiet=json) as on_part:
        answer = ask(
            model,
            tokens=tokens,
            batch=batch,
            seq=needed_sequence(model, job.seq),
            deadline_s=deadline,
            machines=machines or None,
            policies=policy,
            settings=settings_of(setting),
            loading=loading,
            prices=prices,
            most_nodes=most or MOST_NODES,
            nodes=None if nodes is None or most is not None else nodes.values,
            parallel=parallel,
            kind=kind_of(model, job, parallel=parallel),
            on_part=on_part,
            **axes_of(job),
        )
    if json:
        reason, notes = cheapest_said(answer)
        verdict = yes_or_no(answer.best is not None)
        say_answer(Header(model=model, verdict=verdict, reason=reason, notes=notes), rows=answer.to_json())
    else:
        say(cheapest_text(answer))
    if answer.best is None:
        what = f"none in time for {model}" if answer.too_late else f"no machine trains {model}"
        note(f"{what}; the answer on stdout says why")
        return NO
    return 0


@command(commands, "pstar sensitivity --model 12B --batch 8 --seq 1024 --machine v100-32")
def sensitivity(
    *,
    job: WorkloadFlags,
    on: MachineFlags,
    setting: SettingFlags,
    policy: Annotated[list[str] | None, policies("ask about", "three of them")] = None,
    loading: LoadingFlag = None,
    by: Annotated[
        float,
        typer.Option(
            parser=share,
            metavar="SHARE",
            show_default=False,
            help="share by which each part is enlarged, such as 10% or 100% (default: 10%)",
        ),
    ] = 0.1,
    json: JsonList = False,
) -> int:
    """Say what a tenth more GPU memory, RAM, link, DRAM, cores or network is worth, in time and in model size."""
    from pstar_sim.cli.inputs import machine_of, settings_of, workloads_of
    from pstar_sim.planner.sensitivity import sensitivity as ask
    from pstar_sim.report.capacity_tables import sensitivity_text

    machine = machine_of(on)
    named: dict[str, Any] = {"loading": loading} | ({} if policy is None else {"policies": policy})
    with bar("starting", quiet=json) as on_part:
        answer = ask(
            workloads_of(job, machine), machine, settings=settings_of(setting), by=by, on_part=on_part, **named
        )
    if json:
        header = Header(
            model=answer.workload.model,
            machine=machine.name,
            verdict=yes_or_no(answer.now.policy is not None),
            reason="; ".join(answer.short),
        )
        say_answer(header, rows=answer.to_json())
    else:
        say(sensitivity_text(answer))
    if answer.now.policy is None:
        note(f"no policy fits {answer.workload.model} on {machine.name} as it is")
        return NO
    return 0


@command(commands, "pstar sweep grid.toml -o results.parquet")
def sweep(
    *,
    grid: Annotated[
        str,
        typer.Argument(
            metavar="GRID",
            help="a .toml file of axes: a list of values varies, a single value does not; or whatif, the grid that is "
            "shipped for `pstar page`",
        ),
    ],
    path: Annotated[str, output("the results to write (.parquet)")],
    nodes: Annotated[
        Counts | None,
        typer.Option(parser=counts, metavar="N,...", help="also an axis: numbers of nodes, such as 1,2,4"),
    ] = None,
    gpus: Annotated[
        Counts | None, typer.Option(parser=counts, metavar="N,...", help="also an axis: GPUs per node, such as 1,2,4,8")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(parser=positive, metavar="N", help="processes (default: one per core)")
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(metavar="B", help="a backend of joblib (default: loky, processes on this machine)"),
    ] = None,
    cache: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="where points are kept (default: FILE.points)")
    ] = None,
    quiet: Quiet = False,
    json: Annotated[bool, typer.Option("--json", help="a JSON object with all points as its rows")] = False,
) -> int:
    """Plan and simulate every point of a grid; continue where an interrupted sweep stopped."""
    from pstar_sim.planner.grid import load_grid
    from pstar_sim.planner.sweep import sweep as ask

    given = (("nodes", nodes), ("gpus", gpus))
    asked = load_grid(grid, {name: list(one.values) for name, one in given if one is not None})
    done = [0, 0]

    with bar("points", quiet=quiet, alike=True) as on_part:

        def on_progress(points: int, cached: int, total: int) -> None:
            done[:] = points, total
            on_part(f"points, {cached} known already" if cached else "points", points, total)

        try:
            answer = ask(asked, path, jobs=jobs or -1, backend=backend, cache=cache, on_progress=on_progress)
        except KeyboardInterrupt:
            note(f"{done[0]} of {done[1]} points are kept; the same command continues from there")
            raise
    fitting = sum(row["fits"] is True for row in answer.rows)
    refused = sum(row["fits"] is None for row in answer.rows)
    senseless = f", {refused} make no sense (see reason)" if refused else ""
    said = f"{path}: {len(answer.rows)} points, {fitting} fit{senseless}; {answer.cached} were known already"
    if json:
        say_answer(Header(verdict=yes_or_no(fitting > 0), reason=said), rows=answer.to_json())
    else:
        tell(said)
    return 0
