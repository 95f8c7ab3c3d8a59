"""`diff` and `pstar trace --from-snapshot`: what torch recorded, alone and beside plans."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pstar_sim.cli.declare import command
from pstar_sim.cli.flag_values import natural, new_file
from pstar_sim.cli.flags import JsonObject
from pstar_sim.cli.output import Header, check_apart, picture_kind, save_picture, say, say_answer, tell
from pstar_sim.errors import PstarError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pstar_sim.core.plan import Plan
    from pstar_sim.core.timeline import Timeline
    from pstar_sim.recorded.held import Held
    from pstar_sim.recorded.snapshot import DeviceHistory
    from pstar_sim.workload.workload import Workload

commands = typer.Typer()


def trace_snapshots(
    files: Sequence[str], like: str | None, path: str | None, *, device: int | None, as_json: bool
) -> int:
    """Says what snapshots hold at their peaks, and their tide: as pictures, a timeline, or moments of the trace
    `like`."""
    from pstar_sim.recorded.held import held_of_snapshot
    from pstar_sim.recorded.snapshot import load_snapshot
    from pstar_sim.report.recorded import held_text, notes_of
    from pstar_sim.terminal import terminal_width
    from pstar_sim.workload.trace import load_trace

    check_apart([*files, *([like] if like else [])], [path] if path else [])
    if path is not None:
        _check_kind(path, like, len(files))
    job = None if like is None else load_trace(like)
    snapshots = [load_snapshot(file) for file in files]
    shown = [held_of_snapshot(snapshot, device, job) for snapshot in snapshots]
    if path is not None:
        _write_tides([snapshot.device(device) for snapshot in snapshots], files, job, path)
    if as_json:
        said = [held.to_json() for held in shown]
        say_answer(Header(model=None if job is None else job.model), written=path, snapshots=said)
        return 0
    for held in shown:
        say(held_text(held, width=terminal_width()))
    written = [f"{path}: written"] if path is not None else []
    tell("\n".join([*(note for held in shown for note in notes_of(held)), *written]))
    return 0


def _check_kind(path: str, like: str | None, files: int) -> None:
    kind = Path(path).suffix.lower()
    if kind == ".parquet" and (like is None or files > 1):
        raise PstarError(
            f"-o {path}: the trace of a snapshot needs one --from-snapshot and --like TRACE, which has the parameters "
            "and moments; -o FILE.json keeps the tide alone, -o FILE.png draws it"
        )
    if kind == ".json" and files > 1:
        raise PstarError(f"-o {path}: a timeline is of one snapshot; draw several with -o FILE.png")
    if kind not in (".parquet", ".json"):
        picture_kind(Path(path))


def _write_tides(histories: Sequence[DeviceHistory], files: Sequence[str], job: Workload | None, path: str) -> None:
    from pstar_sim.recorded.kinds import kinds_of
    from pstar_sim.recorded.tide import tide_of, with_tide
    from pstar_sim.workload.trace import save_trace

    kind = Path(path).suffix.lower()
    if job is not None and kind == ".parquet":
        (history,) = histories
        save_trace(with_tide(job, history, kinds_of(history, job)), path)
        return
    timelines = [
        tide_of(history, kinds_of(history, job), job, label=Path(file).stem) for history, file in zip(histories, files)
    ]
    if kind == ".json":
        timelines[0].save(path)
    else:
        _save_tides(timelines, path)


def _save_tides(timelines: Sequence[Timeline], path: str) -> None:
    from pstar_sim.report.tide_picture import tide_figure

    save_picture(tide_figure(timelines, xs=("time",)), Path(path), dpi=150)


@command(
    commands,
    "pstar diff snapshot.pickle plan.json\nexample: pstar diff run.json plan.json\n"
    "example: pstar diff before.pickle after.pickle",
)
def diff(
    *,
    measured: Annotated[
        str,
        typer.Argument(
            metavar="MEASURED",
            help="a memory snapshot of torch (torch.cuda.memory._dump_snapshot), or the file of `pstar run --timeline`",
        ),
    ],
    against: Annotated[
        str, typer.Argument(metavar="PLAN", help="the plan file of the run, or, for a snapshot, another snapshot")
    ],
    device: Annotated[
        int | None,
        typer.Option(parser=natural, metavar="N", help="device of the snapshot (default: the one that held most)"),
    ] = None,
    plot: Annotated[
        str | None, typer.Option(parser=new_file, metavar="FILE", help="picture of both tides, on one axis of time")
    ] = None,
    json: JsonObject = False,
) -> int:
    """Set what was measured beside what was planned: bytes by kind at both peaks, with the calls in which the
    difference lies; for a run of `pstar run` also seconds, waits and bytes moved."""
    from pstar_sim.recorded.snapshot import is_snapshot

    check_apart([measured, against], [plot] if plot else [])
    if plot is not None:
        picture_kind(Path(plot))
    if is_snapshot(measured):
        return _diff_snapshot(measured, against, device, plot, as_json=json)
    if device is not None:
        raise PstarError("--device is for snapshots; a run's file is of one rank")
    return _diff_run(measured, against, plot, as_json=json)


def _diff_snapshot(measured: str, against: str, device: int | None, plot: str | None, *, as_json: bool) -> int:
    from pstar_sim.recorded.held import held_of_snapshot
    from pstar_sim.recorded.kinds import kinds_of
    from pstar_sim.recorded.snapshot import is_snapshot, load_snapshot
    from pstar_sim.recorded.tide import tide_of
    from pstar_sim.report.recorded import beside_as_json, beside_text, notes_of
    from pstar_sim.terminal import terminal_width

    job: Workload | None = None
    if is_snapshot(against):
        other = load_snapshot(against)
        base = held_of_snapshot(other, device)
        drawn = [tide_of(history := other.device(device), kinds_of(history), label=Path(against).stem)]
    else:
        plan, timeline, base = _planned(against)
        job, drawn = plan.workload, [timeline]
    snapshot = load_snapshot(measured)
    found = held_of_snapshot(snapshot, device, job)
    if plot is not None:
        history = snapshot.device(device)
        drawn.append(tide_of(history, kinds_of(history, job), job, label=Path(measured).stem))
        _save_tides(drawn, plot)
    if as_json:
        say_answer(Header(model=None if job is None else job.model), **beside_as_json(base, found))
        return 0
    say(beside_text(base, found, width=terminal_width()))
    tell("\n".join([*notes_of(base), *notes_of(found)]))
    return 0


def _planned(path: str) -> tuple[Plan, Timeline, Held]:
    from pstar_sim.cli.planning import checked_plan
    from pstar_sim.planner.compare import play_plan
    from pstar_sim.report.recorded import planned

    plan, _ = checked_plan(path)
    timeline = play_plan(plan)
    return plan, timeline, planned(plan, timeline, Path(path).name)


def _diff_run(measured: str, against: str, plot: str | None, *, as_json: bool) -> int:
    from pstar_sim.cli.planning import measured_of
    from pstar_sim.cli.run_report import figures_as_json
    from pstar_sim.core.run_file import load_timelines
    from pstar_sim.errors import TraceError
    from pstar_sim.recorded.held import held_of_timeline
    from pstar_sim.report.recorded import beside_as_json, beside_text, run_figures
    from pstar_sim.report.residence import check_of_plan
    from pstar_sim.report.run_figures import figures_text
    from pstar_sim.report.tide_picture import tide_figure
    from pstar_sim.terminal import terminal_width

    ran = measured_of(measured)
    plan, simulated, base = _planned(against)
    try:
        check_of_plan(plan, ran)
    except PstarError as error:
        raise TraceError(f"{measured}: {error}") from None
    predicted = load_timelines(measured).get("predicted", simulated)
    found = held_of_timeline(ran, Path(measured).name)
    rows = run_figures(predicted, ran)
    if plot is not None:
        save_picture(tide_figure([predicted], measured=ran, title=f"{measured} beside {against}"), Path(plot), dpi=150)
    if as_json:
        header = Header(model=plan.workload.model, machine=plan.machine.name)
        say_answer(header, **beside_as_json(base, found), figures=figures_as_json(rows))
        return 0
    say(figures_text(rows, width=terminal_width()))
    say("")
    say(beside_text(base, found, width=terminal_width()))
    return 0
