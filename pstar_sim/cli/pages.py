"""report, page, app: pages for a browser."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pstar_sim.cli.bars import bar
from pstar_sim.cli.declare import command
from pstar_sim.cli.flag_values import new_page, port
from pstar_sim.cli.flags import Quiet, output
from pstar_sim.cli.output import check_apart, tell
from pstar_sim.cli.planning import named
from pstar_sim.errors import PstarError
from pstar_sim.units import format_bytes

if TYPE_CHECKING:
    from pstar_sim.core.timeline import Timeline
    from pstar_sim.planner.asked import OnPart
    from pstar_sim.report.web.plan_report import Subject

commands = typer.Typer()


@command(
    commands,
    "pstar report plan.json -o report.html\nexample: pstar report tide.json zero_offload.json -o report.html\n"
    "example: pstar report plan.json run.json -o report.html",
)
def report(
    *,
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PLAN",
            help="plan files, shown side by side; after a plan also the file that its `pstar run --timeline` wrote",
        ),
    ],
    path: Annotated[str, output("the page to write (.html)", parser=new_page)],
    quiet: Quiet = False,
) -> int:
    """Write plans as one page that works offline: memory over time, queues, chunks, figures, proof and explanation;
    several plans, or a run and its prediction, side by side."""
    from pstar_sim.files import write_atomically
    from pstar_sim.report.web.document import plotly_script
    from pstar_sim.report.web.plan_report import Made, plan_report
    from pstar_sim.version import __version__

    check_apart(paths, [path])
    plotly_script()  # raises now, not after the plans were examined
    with bar("reading", quiet=quiet) as on_part:
        subjects = _subjects(paths, on_part)
    words = ["pstar", "report", *(Path(one).name for one in paths), "-o", Path(path).name]
    today = datetime.now().astimezone().date().isoformat()
    text = plan_report(subjects, Made(version=__version__, date=today, command=shlex.join(words)))
    write_atomically(Path(path), text)
    shown = " beside ".join(subject.title for subject in subjects)
    tell(f"{path}: {shown}; {format_bytes(len(text.encode()))}, opens without a network")
    return 0


@command(commands, "pstar page results.parquet -o whatif.html")
def page(
    *,
    results: Annotated[list[str], typer.Argument(metavar="RESULTS", help="files that `pstar sweep` wrote (.parquet)")],
    path: Annotated[str, output("the page to write (.html)", parser=new_page)],
    prices: Annotated[
        str | None, typer.Option(metavar="FILE", help="prices of your own: [MACHINE] usd_per_hour = ...")
    ] = None,
) -> int:
    """Write sweeps as one page that works offline: choose machine, model, batch and policy, and read the largest model,
    seconds, dollars per million tokens and what binds, each with its error."""
    from pstar_sim.files import write_atomically
    from pstar_sim.planner.sweep import load_results
    from pstar_sim.report.web.whatif import distinct_points, whatif_page

    check_apart(results, [path])
    axes: dict[str, None] = {}
    points: list[dict[str, object]] = []
    for file in results:
        its_axes, its_points = load_results(file)
        axes |= dict.fromkeys(its_axes)
        points += its_points
    text = whatif_page(points, list(axes), prices=prices)
    write_atomically(Path(path), text)
    count = len(distinct_points(points, list(axes)))
    tell(f"{path}: {count} points; {format_bytes(len(text.encode()))}, opens without a network")
    return 0


@command(commands, "pstar app")
def app(
    *,
    at: Annotated[int, typer.Option("--port", parser=port, metavar="N", help="port on this machine")] = 8501,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="open no browser; only say the address")] = False,
) -> int:
    """Answer what-if questions in a browser on this machine: the planner behind sliders. Ends with Ctrl-C."""
    from importlib.util import find_spec

    if find_spec("streamlit") is None:
        raise PstarError("the app needs streamlit, which is not installed: pip install -e '.[app]' in the checkout")
    _check_free(at)
    import os
    import sys

    from pstar_sim.report import web

    script = Path(web.__file__).with_name("app.py")
    flags = {
        "server.address": "127.0.0.1",
        "server.port": str(at),
        "server.headless": str(no_browser).lower(),
        "server.fileWatcherType": "none",
        "server.showEmailPrompt": "false",
        "browser.gatherUsageStats": "false",
        "client.toolbarMode": "minimal",
        "client.showErrorLinks": "false",
        "global.developmentMode": "false",
        "logger.level": "error",
    }
    words = [sys.executable, "-m", "streamlit", "run", str(script), *(f"--{k}={v}" for k, v in flags.items())]
    tell(f"http://127.0.0.1:{at}")
    sys.stdout.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # where Streamlit speaks of itself
    os.execv(sys.executable, words)  # this process: a signal that ends it leaves no server behind


def _check_free(at: int) -> None:
    import socket

    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("127.0.0.1", at))
        except OSError as error:
            raise PstarError(
                f"argument --port: {at} cannot be used ({error.strerror}); give another port of this machine"
            ) from None


def _subjects(paths: Sequence[str], on_part: OnPart) -> list[Subject]:
    from pstar_sim.core.plan import load_plan
    from pstar_sim.core.run_file import load_timelines
    from pstar_sim.planner.stated import examine
    from pstar_sim.report.web.plan_report import Subject

    found: list[Subject] = []
    for path in paths:
        if not _is_plan(path):
            if not found or found[-1].measured:
                raise PstarError(f"{path}: is a run; give the file of its plan as the argument before this file")
            found += _run_of(found.pop(), load_timelines(path), path)
            continue
        plan = load_plan(path)
        with named(path):
            seen = examine(plan, on_part=on_part)
        digest = sha256(Path(path).read_bytes()).hexdigest()
        found.append(Subject(title=plan.policy, plan=plan, timeline=seen.timeline, examined=seen, digest=digest))
    return with_distinct_titles(found, paths)


def _is_plan(path: str) -> bool:
    """An unreadable file counts as a plan, whose reader reports the error."""
    from pstar_sim.core import run_file, timeline
    from pstar_sim.core.timeline import read_values
    from pstar_sim.errors import TraceError

    try:
        return read_values(path).get("format") not in (run_file.FORMAT, timeline.FORMAT)
    except TraceError:
        return True


def _run_of(planned: Subject, timelines: dict[str, Timeline], path: str) -> list[Subject]:
    from dataclasses import replace

    from pstar_sim.errors import TraceError
    from pstar_sim.report.residence import check_of_plan

    if "measured" not in timelines:
        raise TraceError(f"{path}: holds a predicted timeline and no measured one; `pstar run --timeline` writes both")
    for timeline in timelines.values():
        try:
            check_of_plan(planned.plan, timeline)
        except PstarError as error:
            raise TraceError(f"{path}: {error}") from None
    predicted = timelines.get("predicted", planned.timeline)
    first = replace(planned, title=f"{planned.title}, predicted", timeline=predicted)
    return [first, replace(planned, title=f"{planned.title}, measured", timeline=timelines["measured"], examined=None)]


def with_distinct_titles(subjects: Sequence[Subject], paths: Sequence[str]) -> list[Subject]:
    """Equal titles get the names of their files, or numbers."""
    from dataclasses import replace

    titles = [subject.title for subject in subjects]
    ways = [[Path(path).stem for path in paths], list(paths), [str(n) for n in range(1, len(paths) + 1)]]
    while len(set(titles)) < len(titles):
        titles = [f"{subject.title} ({name})" for subject, name in zip(subjects, ways.pop(0))]
    return [replace(subject, title=title) for subject, title in zip(subjects, titles)]
