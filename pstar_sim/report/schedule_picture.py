"""The schedule picture: every queue's work over an iteration.

[Note: reading a schedule picture] A row per queue and a bar per step, with its chunk's number, or with its plan of a
part: 3 (2/8). Compute's bars are numbered moments, in their phase's grey; a gap is a wait. Steps that run on into the
next iteration are cut off at the right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pstar_sim.arguments import instance, refused
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Kind, Part, Queue
from pstar_sim.core.timeline import Span, Timeline
from pstar_sim.planner.compare import Planned
from pstar_sim.report.byte_curves import steady_start_s
from pstar_sim.report.legends import Handles, broken, dark, shared_legend
from pstar_sim.report.palette import ON_DARK, PHASES, QUEUE_NAMES, STEPS
from pstar_sim.units import format_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUMBERS = ("numbers: chunks", "numbers on compute: moments")


def plot_schedule(timeline: Timeline | Planned, ax: Axes | None = None, *, plan: Plan | None = None) -> Any:
    """Draw the queues of one timeline over time. Returns the axes.

    ax: None makes a figure.
    plan: knows the parts of steps; a plan of a comparison brings its own.

    Raises PstarError for other values, and for a timeline without compute spans.
    """
    from matplotlib.lines import Line2D

    if isinstance(timeline, Planned):
        plan = timeline.plan
        timeline = timeline.timeline
    instance("timeline", timeline, Timeline, "a Timeline or a plan of a comparison")
    if plan is not None:
        instance("plan", plan, Plan, "a Plan")
    if ax is not None and not hasattr(ax, "broken_barh"):
        raise refused("ax", ax, "an Axes")
    shown = _steady_spans(timeline)
    rows = [queue for queue in QUEUE_NAMES if any(span.queue is queue for span, _, _ in shown)]
    if ax is None:
        from matplotlib import pyplot

        _, ax = pyplot.subplots(figsize=(11.0, 0.9 + 0.5 * len(rows)), layout="constrained")
    ax.set_xlim(0, timeline.iteration_s)
    parts = {step.id: step.part for step in plan.steps if step.part is not None} if plan is not None else {}
    bars, numbered = _draw_bars(ax, timeline, shown, rows, parts)
    ax.set_yticks(range(len(rows)), [QUEUE_NAMES[queue] for queue in rows])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("time in the iteration [s]")
    label = timeline.label or timeline.source
    ax.set_title(broken(f"{label}: {format_s(timeline.iteration_s)} per iteration", ax), fontsize=10, loc="left")
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    shared_legend(ax, {**bars, **{words: Line2D([], [], linestyle="") for words in numbered}}, "schedule", _in_order)
    return ax


def _draw_bars(
    ax: Any,
    timeline: Timeline,
    shown: list[tuple[Span, float, float]],
    rows: list[Queue],
    parts: Mapping[int, Part],
) -> tuple[dict[str, Any], set[str]]:
    found: dict[str, Any] = {}
    numbered: set[str] = set()
    paper, on_dark = ax.get_facecolor(), dark(ax)
    for span, start_s, end_s in shown:
        row = rows.index(span.queue)
        name, colour, ink = _style(timeline, span)
        if on_dark:
            colour, ink = ON_DARK.get(colour, (colour, ink))
        share = (end_s - start_s) / timeline.iteration_s
        edge = paper if share > 0.01 else colour  # an edge like the paper would hide a thin bar
        bar = ax.barh(row, end_s - start_s, left=start_s, height=0.78, color=colour, edgecolor=edge, linewidth=0.5)
        found.setdefault(name, bar)
        number = span.moment if span.kind is Kind.COMPUTE else span.chunk
        labels = [] if number is None else [str(number)]
        if (part := parts.get(span.step)) is not None:
            labels.insert(0, f"{number} ({part.number + 1}/{part.of})")
        label = next((text for text in labels if share > 0.012 * len(text)), None)
        if label is not None:
            numbered.add(NUMBERS[span.kind is Kind.COMPUTE])
            ax.text((start_s + end_s) / 2, row, label, ha="center", va="center_baseline", fontsize=7, color=ink)
    return found, numbered


def _in_order(handles: Handles) -> list[str]:
    order = [*PHASES, *(name for name, _, _ in STEPS.values()), *NUMBERS]
    return sorted(handles, key=lambda n: order.index(n) if n in order else len(order))


def _steady_spans(timeline: Timeline) -> list[tuple[Span, float, float]]:
    origin = steady_start_s(timeline)
    found = []
    for span in timeline.spans:
        start_s, end_s = max(span.start_s - origin, 0.0), min(span.end_s - origin, timeline.iteration_s)
        if end_s > start_s and (span.kind is Kind.COMPUTE or span.kind in STEPS):  # else bookkeeping, of a few us
            found.append((span, start_s, end_s))
    return found


def _style(timeline: Timeline, span: Span) -> tuple[str, str, str]:
    if span.kind is not Kind.COMPUTE:
        return STEPS[span.kind]
    phase = timeline.phases[span.moment] if timeline.phases and span.moment is not None else "compute"
    return phase, PHASES.get(phase, "#CCCCCC"), "white" if phase == "ADAM" else "black"
