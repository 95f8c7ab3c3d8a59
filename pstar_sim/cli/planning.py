"""Commands that need no torch: compare, plan, check, explain, plot, export and the listings."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pstar_sim.cli.status import NO
from pstar_sim.errors import DoesNotFit, FalseFigures, NothingFits, PlanError, PstarError
from pstar_sim.terminal import narrow_encoding, table_text, terminal_width, wrap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pstar_sim.catalog.machine import Machine
    from pstar_sim.core.check_report import CheckReport
    from pstar_sim.core.plan import Plan, Settings
    from pstar_sim.core.timeline import Timeline
    from pstar_sim.planner.compare import Comparison

__all__ = [
    "check",
    "checked_plan",
    "compare",
    "explain",
    "export",
    "machines",
    "measured_of",
    "models",
    "plan",
    "plot_tide",
    "policies",
    "save_perfetto",
    "save_picture",
]


def say(text: str) -> None:
    """Write text that is laid out already."""
    sys.stdout.write(narrow_encoding(text if text.endswith("\n") else text + "\n", sys.stdout.encoding))


def tell(text: str) -> None:
    """Write prose, folded to the terminal."""
    say("\n".join(wrap(text, terminal_width())))


def say_json(value: object) -> None:
    """Strict JSON: no NaN, no Infinity."""
    say(json.dumps(value, indent=2, allow_nan=False))


def compare(args: argparse.Namespace) -> int:
    result = _compared(args, args.policy)
    say_notes(result)
    if args.json:
        say_json(result.to_json())
        say_left_out(result)
    else:
        from pstar_sim.report.tables import comparison_text

        say(comparison_text(result))
    return _fits_or_says_why(result)


def _fits_or_says_why(result: Comparison) -> int:
    """The exit status; where no policy fits, a line on stderr that points to the answer on stdout."""
    if any(row.fits for row in result.rows):
        return 0
    what = "no policy fits" if len(result.rows) > 1 else f"{result.rows[0].policy} does not fit"
    sys.stderr.write(f"pstar: {what} {result.workload.model} on {result.machine.name}; the answer says why\n")
    return NO


def plan(args: argparse.Namespace) -> int:
    result = _compared(args, None if args.policy == "auto" else [args.policy], only_best=True)
    say_notes(result)
    if not any(row.fits for row in result.rows):
        from pstar_sim.report.tables import refusal_text

        if args.json:
            say_json({"fits": False, "policies": result.to_json()})
        else:
            say(refusal_text(result))
        return _fits_or_says_why(result)
    best = result.best()
    best.save(args.output)
    say_left_out(result)
    from pstar_sim.planner.confidence import confidence, confidence_line

    if args.json:
        say_json({**best.row.to_json(), "confidence": confidence(result.workload, result.machine)})
        return 0
    from pstar_sim.report.tables import format_percent
    from pstar_sim.units import format_bytes, format_s

    row = best.row
    sources = confidence_line(confidence(result.workload, result.machine))
    tell(
        f"{args.output}: {row.policy}, {format_s(row.iteration_s or 0)} an iteration, "
        + (f"{format_percent(row.gap)} above the bound, " if row.gap is not None else "")
        + f"peaks at {format_bytes(row.peak_gpu_bytes or 0)} of the GPU; "
        f"{len(best.plan.steps)} steps; {sources}"
    )
    return 0


def say_notes(result: Comparison) -> None:
    """What went wrong on the way to a bound, a line each, on stderr."""
    notes = {str(row.certificate["note"]) for row in result.rows if row.certificate and "note" in row.certificate}
    for note in sorted(notes):
        sys.stderr.write(f"pstar: {note}\n")


def say_left_out(result: Comparison) -> None:
    """What an answer for several GPUs leaves out, on stderr, where the answer itself has no place for it."""
    for note in result.notes:
        sys.stderr.write(f"pstar: note: {note}\n")


def checked_plan(path: str) -> tuple[Plan, CheckReport]:
    """A plan file and what the checker proved of it: its steps and bytes, which are what a run needs. Raises PlanError,
    naming the file, if it is unreadable or wrong."""
    from pstar_sim.core.plan import load_plan

    plan = load_plan(path)
    with _named(path):
        return plan, plan.check()


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    try:
        yield
    except FalseFigures as error:
        raise FalseFigures(tuple(f"{path}: {line}" for line in error.false)) from None
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


def check(args: argparse.Namespace) -> int:
    """Prove a plan and compute again what it states; each false figure is a line of the answer."""
    from pstar_sim.core.plan import load_plan
    from pstar_sim.planner.stated import examine

    loaded = load_plan(args.plan)
    of = f"{args.plan}: {loaded.policy} for {loaded.workload.model} on {loaded.machine.name}"
    answer: dict[str, object] = {"plan": args.plan, "ok": True, "policy": loaded.policy}
    try:
        with _named(args.plan):
            found = examine(loaded, lp=args.certify)
    except FalseFigures as error:
        lines = [line.removeprefix(f"{args.plan}: ") for line in error.false]
        if args.json:
            say_json({**answer, "ok": False, "false": lines})
        else:
            tell("\n".join([of, *(f"false: {line}" for line in lines)]))
        more = f"; and {len(lines) - 1} more of its figures are false" if len(lines) > 1 else ""
        sys.stderr.write(f"pstar: {error.false[0]}{more}\n")
        return 2
    report = found.report
    if args.json:
        peaks = {f"peak_{place}_bytes": size for place, size in report.peak_bytes.items()}
        said = {"lower_bound": found.bound, "as_stated": report.figures, "not_checked": report.not_checked}
        say_json({**answer, "steps": report.steps, **peaks, **said})
    else:
        tell(f"{of}\n{report.describe()}")
        tell(found.bound)
    return 0


def explain(args: argparse.Namespace) -> int:
    from pstar_sim.core.plan import load_plan
    from pstar_sim.planner.explain import explain as words
    from pstar_sim.planner.stated import examine

    loaded = load_plan(args.plan)
    with _named(args.plan):
        found = examine(loaded)
    cost = loaded.predictions.get("barrier_cost_s")
    say(words(loaded, found.timeline, barrier_cost_s=cost, first_steps=args.steps))
    return 0


def plot_help(args: argparse.Namespace) -> int:
    raise PstarError("say what to plot: `pstar plot tide ...`")


def plot_tide(args: argparse.Namespace) -> int:
    from pstar_sim.report.tide import tide_figure

    timelines, title = _timelines(args)
    measured = None
    if args.measured is not None:
        measured = measured_of(args.measured)
    xs = ("time", "moment") if args.x == "both" else (args.x,)
    figure = tide_figure(timelines, xs=xs, measured=measured, title=title)
    save_picture(figure, Path(args.output), dpi=150)
    tell(f"{args.output}: {', '.join(t.label for t in timelines)}")
    return 0


def save_picture(figure: Figure, path: Path, *, dpi: int) -> None:
    """Write a picture, whole or not at all; its kind is the file's ending, PNG where there is none.

    Raises PstarError for an ending that matplotlib does not know and for a file that cannot be written.
    """
    from pstar_sim.files import replaced_atomically

    kind = picture_kind(path)
    with replaced_atomically(path) as temporary:
        figure.savefig(temporary, dpi=dpi, format=kind)


def picture_kind(path: Path) -> str:
    """What `save_picture` will write there. Raises PstarError for an ending that matplotlib does not know."""
    from matplotlib.backend_bases import FigureCanvasBase

    kind = path.suffix.removeprefix(".") or "png"
    known = FigureCanvasBase.get_supported_filetypes()
    if kind.lower() not in known:
        raise PstarError(f"{path}: {kind!r} is not a kind of picture; it is one of {', '.join(sorted(known))}")
    return kind.lower()


def export(args: argparse.Namespace) -> int:
    from pstar_sim.planner.compare import play_plan

    loaded, _ = checked_plan(args.plan)
    if args.timeline and args.measured is not None:
        raise PstarError("--measured goes with --perfetto; `pstar run --timeline` keeps both timelines itself")
    measured = [measured_of(args.measured)] if args.measured is not None else []
    timeline = play_plan(loaded)
    if args.timeline:
        timeline.save(args.output)
    else:
        save_perfetto([timeline, *measured], loaded, Path(args.output))
    tell(f"{args.output}: {len(timeline.spans)} spans of {timeline.iterations} iterations")
    return 0


def measured_of(path: str) -> Timeline:
    """The measured timeline in a file. Raises TraceError, naming it, if it has none."""
    from pstar_sim.core.run_file import load_timelines
    from pstar_sim.errors import TraceError

    found = load_timelines(path)
    if "measured" not in found:
        raise TraceError(f"{path}: holds a predicted timeline and no measured one; `pstar run --timeline` writes both")
    return found["measured"]


def save_perfetto(timelines: Sequence[Timeline], plan: Plan, path: Path) -> None:
    """Write a trace for ui.perfetto.dev, whole or not at all."""
    from pstar_sim.files import write_atomically
    from pstar_sim.report.perfetto import to_perfetto

    text = json.dumps(to_perfetto(timelines, plan), allow_nan=False, separators=(",", ":"))
    write_atomically(path, text + "\n")


def machines(args: argparse.Namespace) -> int:
    from pstar_sim.report.listing import machines as listed

    return _listing(listed().to_json(), args.json)


def models(args: argparse.Namespace) -> int:
    from pstar_sim.report.listing import models as listed

    return _listing(listed().to_json(), args.json)


def policies(args: argparse.Namespace) -> int:
    from pstar_sim.report.listing import policies as listed

    rows = listed().to_json()
    alike: dict[tuple[str, str, str], dict[str, str]] = {}  # option, its values and meaning -> policy -> default
    for row in rows:
        options = row["options"] if args.json else row.pop("options")
        assert isinstance(options, list)
        for option in options:
            meaning = (option["option"], option["values"], option["what"])
            alike.setdefault(meaning, {})[str(row["policy"])] = option["default"]
    _listing(rows, args.json)
    if alike and not args.json:
        tell("\nOptions, as in --policy tide:capacity=peak,adam=fifo:\n")
        _listing([_option_row(*meaning, defaults) for meaning, defaults in alike.items()], False)
    return 0


def _option_row(key: str, values: str, what: str, defaults: dict[str, str]) -> dict[str, object]:
    """One line for an option that several policies offer; its default where all agree, else each one's."""
    shared = set(defaults.values())
    default = ", ".join(shared) if len(shared) == 1 else ", ".join(f"{v} ({p})" for p, v in defaults.items())
    return {"option": key, "values": values, "what": f"{what} ({', '.join(defaults)}; default {default})"}


def _listing(rows: Sequence[dict[str, object]], as_json: bool) -> int:
    if as_json:
        say_json(list(rows))
        return 0
    columns = list(rows[0]) if rows else []
    texts = [["" if row[c] is None else str(row[c]) for c in columns] for row in rows]
    say(table_text(columns, texts, width=terminal_width()))
    return 0


def _compared(args: argparse.Namespace, policies: Sequence[str] | None, *, only_best: bool = False) -> Comparison:
    from pstar_sim.cli.inputs import machine_of, settings_of, workloads_of
    from pstar_sim.planner.compare import compare as ask

    machine, settings = machine_of(args), settings_of(args)
    if args.global_batch is not None:
        return _among_variants(args, machine, settings, policies, only_best=only_best)
    return ask(
        workloads_of(args, machine),
        machine,
        policies=policies,
        settings=settings,
        certify=args.certify,
        only_best=only_best,
    )


def _among_variants(
    args: argparse.Namespace,
    machine: Machine,
    settings: Settings,
    policies: Sequence[str] | None,
    *,
    only_best: bool,
) -> Comparison:
    """The comparison on the variant that is fastest by the one policy asked for, or by `optimal`."""
    from dataclasses import replace

    from pstar_sim.cli.bars import bar
    from pstar_sim.cli.inputs import variants_of
    from pstar_sim.planner.compare import Comparison, unfit_row
    from pstar_sim.planner.compare import compare as ask
    from pstar_sim.planner.tried import tried_text
    from pstar_sim.planner.variants import choose
    from pstar_sim.policy.registry import policy_name

    policy = policies[0] if policies is not None and len(policies) == 1 else "optimal"
    with bar("writing the ways to run it", quiet=args.json) as on_way:
        ways = variants_of(args, machine)
        try:
            chosen = choose(ways, machine, settings, policy=policy, on_way=on_way)
        except DoesNotFit as error:
            note = f"global batch {args.global_batch}: none of {len(ways)} ways fits; the heading has one of them"
            row = unfit_row(policy_name(policy), error)
            return Comparison(
                workload=ways[0],
                machine=machine,
                settings=settings,
                batch=ways[0].batch * len(machine.ranks),
                rows=(row,),
                planned={},
                notes=(note,),
            )
        on_way("comparing policies", len(chosen.tried), len(chosen.tried))
        result = ask(
            (chosen.workload,) * len(machine.ranks),
            machine,
            policies=policies,
            settings=settings,
            certify=args.certify,
            only_best=only_best,
            made={policy_name(policy): (chosen.plan, chosen.timeline)},
        )
    planned = {
        name: replace(p, plan=replace(p.plan, choices={**p.plan.choices, **chosen.choices()}))
        for name, p in result.planned.items()
    }
    others = tried_text(dict(chosen.tried), chosen.words)
    notes = [
        f"global batch {args.global_batch}: {chosen.words}, fastest by {policy} of {len(chosen.tried)} ways"
        + f" ({others})" * bool(others)
    ]
    notes += [f"not considered: {what}" for what in chosen.left_out]
    return replace(result, planned=planned, notes=(*result.notes, *notes))


def _timelines(args: argparse.Namespace) -> tuple[list[Timeline], str]:
    """What to draw and its title: the plans named, or plans made now."""
    from pstar_sim.planner.compare import play_plan

    if args.plans:
        if args.trace is not None or args.model is not None:
            raise PstarError("draw plan files, or plan now with --trace or --model: not both")
        loaded = [checked_plan(path)[0] for path in args.plans]
        first = loaded[0]
        return [play_plan(p) for p in loaded], f"{first.workload.model} on {first.machine.name}"
    from pstar_sim.cli.inputs import machine_of, settings_of, workloads_of
    from pstar_sim.planner.compare import compare as ask

    machine = machine_of(args)
    names = args.policy or ["static_partition", "tide"]
    result = ask(workloads_of(args, machine), machine, policies=names, settings=settings_of(args), barrier_cost=False)
    drawn = [result.planned[row.policy].timeline for row in result.rows if row.fits]
    missing = [str(row.reason) for row in result.rows if not row.fits]
    if not drawn:
        raise NothingFits("there is nothing to draw: " + "; ".join(missing))
    for reason in missing:
        sys.stderr.write(f"pstar: not drawn: {reason}\n")
    w = result.workload
    batch = f"batch {result.batch}" + (f" x {w.micro_batches}" if w.micro_batches > 1 else "")
    return drawn, f"{w.model}, {batch}, sequence {w.sequence}, {w.dtype}, on {machine.name}"
