"""The tide picture: what fills the GPU at every instant.

[Note: reading a tide picture] Model data stands on the floor; non-model data hangs from the capacity, down to the tide
line. A policy that ignores the tide never uses the room between the capacity at its peak (dotted) and the tide line
(hatched).

A measured timeline lies over the first prediction as lines (tide and model data), its phases as a second strip. By
moment one timeline lies over another, without hatching; by time each is below the other.

[Note: one axis of time] Timelines drawn together share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pstar_sim.arguments import choice, instance, names, refused
from pstar_sim.core.step import Place
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import PstarError
from pstar_sim.planner.compare import Comparison, Planned
from pstar_sim.report.byte_curves import Curves, axis_unit, byte_curves, phase_bands
from pstar_sim.report.legends import TITLE_POINTS, Handles, broken, ink, shared_legend, size_points
from pstar_sim.report.palette import CATEGORIES as COLOURS
from pstar_sim.report.palette import CATEGORY_NAMES as NAMES
from pstar_sim.report.palette import PHASES as PHASE_COLOURS
from pstar_sim.report.paper import USUAL, Look, broken_at, figure_legend, laid_out
from pstar_sim.units import format_bytes, format_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

__all__ = ["plot_tide", "spread", "tide_figure"]

_WASTE = "free, but out of reach of a static partition"
STRIP_POINTS, LETTER_POINTS = 12, 7.0  # height of a strip of phases; width of one of its letters


def plot_tide(
    timelines: Timeline | Planned | Comparison | Sequence[Timeline | Planned],
    ax: Axes | Iterable[Axes] | None = None,
    x: str = "time",
    *,
    measured: Timeline | None = None,
    place: str = "gpu",
) -> Any:
    """Draw one timeline, or several with the same axes. Returns the axes (an array of them for several).

    timelines: of a comparison up to three plans are drawn: the slowest, the median and the fastest.
    x: "time" (seconds) or "moment".
    measured: a recorded timeline, drawn as lines over the first timeline.
    ax: one per timeline; None makes a figure.
    place: "gpu", "host" or "nvme".

    Raises PstarError for an unknown x, no bytes to draw, and a wrong number of axes.
    """
    many = _timelines(timelines)
    choice("x", x, ("time", "moment"))
    choice("place", place, [p.value for p in Place])
    if measured is not None:
        instance("measured", measured, Timeline, "a Timeline")
    axes = _axes_for(ax, len(many))
    handles = _plot(many, axes, x, place, measured)
    for upper in axes[:-1] if ax is None else ():
        upper.set_xlabel("")
    shared_legend(axes[-1], handles, "tide", _in_order)
    return axes[0] if isinstance(timelines, Timeline | Planned) else np.array(axes, dtype=object)


def _plot(
    many: Sequence[Timeline],
    axes: Sequence[Any],
    x: str,
    place: str,
    measured: Timeline | None,
    *,
    hatch: bool = True,
) -> Handles:
    """All in one range; returns the legend's entries.

    hatch: what a static partition cannot reach.
    """
    top = max(_capacity(t, place) for t in many)
    unit, name = axis_unit(top)
    handles: Handles = {}
    right = 0.0
    strips: list[tuple[Timeline, Any, _Strip, bool]] = []  # the last: whether it is of a run over its prediction
    for i, (timeline, one) in enumerate(zip(many, axes)):
        over = measured if i == 0 else None
        strip = _Strip.on(one, top / unit, 1 if over is None or x == "moment" else 2)
        _draw(timeline, one, x, place, unit, handles, hatch=hatch and over is None)
        if over is not None:
            _overlay(timeline, over, one, x, place, unit, handles)
        strips += [(timeline, one, strip, False)]
        strips += [(over, one, strip, True)] if over is not None and x == "time" else []
        one.set_ylim(0, strip.end)
        right = max(right, one.get_xlim()[1])
        if one.get_subplotspec() is None or one.get_subplotspec().is_first_col():
            one.set_ylabel(f"{place.upper()} memory [{name}]")
    for one in axes:
        one.set_xlim(one.get_xlim()[0], right)
    named: Handles = {}
    unnamed: Handles = {}
    for timeline, one, strip, over_prediction in strips:
        _phases(timeline, one, x, strip, named, unnamed, measured=over_prediction)
    handles.update({name: drawn for name, drawn in unnamed.items() if name not in named})
    return handles


@dataclass(frozen=True)
class _Strip:
    """start: of the first name, in units of y."""

    start: float
    height: float
    end: float

    @classmethod
    def on(cls, ax: Axes, capacity: float, strips: int) -> _Strip:
        points = size_points(ax)[1]
        share = min(0.3, (STRIP_POINTS + 2) * strips / points)  # of the axes
        whole = capacity / (1 - share - 2 / points)
        gap = 2 / points * whole
        return cls(start=capacity + gap, height=STRIP_POINTS / points * whole, end=whole + gap)


def _axes_for(ax: Axes | Iterable[Axes] | None, count: int) -> list[Any]:
    if ax is None:
        from matplotlib import pyplot

        size = (11.0, 1.0 + 2.9 * count)
        _, made = pyplot.subplots(count, 1, sharex=True, sharey=True, figsize=size, layout="constrained", squeeze=False)
        return list(made[:, 0])
    axes = [ax] if hasattr(ax, "plot") else list(names("ax", ax, "an Axes, or a list with one Axes per timeline"))
    if not all(hasattr(one, "plot") for one in axes):
        raise refused("ax", ax, "an Axes, or a list with one Axes per timeline")
    if len(axes) != count:
        raise PstarError(f"plot_tide got {count} timelines and {len(axes)} axes; give one axes per timeline")
    return axes


def _timelines(given: object) -> list[Timeline]:
    rows = [given] if isinstance(given, Timeline | Planned) else given
    if isinstance(rows, Comparison):
        rows = spread(rows)
    if not isinstance(rows, Sequence) or not rows or not all(isinstance(row, Timeline | Planned) for row in rows):
        want = "a Timeline, a plan of a comparison, a list of these, or a Comparison in which a policy fits"
        raise refused("timelines", given, want)
    return [row.timeline if isinstance(row, Planned) else row for row in rows]


def spread(comparison: Comparison) -> list[Planned]:
    """Returns the slowest, the median and the fastest."""
    fitting = [comparison[row.policy] for row in comparison.rows if row.fits]
    if not fitting:
        return []
    best = comparison.best().policy  # of equally fast plans, the one to take
    fitting.sort(key=lambda planned: (-round(planned.row.iteration_s or 0.0, 9), planned.policy == best))
    count = len(fitting)
    return [fitting[n] for n in sorted({0, count // 2, count - 1})]


def tide_figure(
    timelines: Sequence[Timeline],
    *,
    xs: Sequence[str] = ("time", "moment"),
    measured: Timeline | None = None,
    measured_as: str = "",
    title: str = "",
    look: Look = USUAL,
) -> Figure:
    """Without pyplot: a row per timeline, a column per x of `xs` (rows where narrow).

    measured: a run of the first: by moment over it, by time in a row, on one axis, without `xs`.
    measured_as: its title (default: the iteration's seconds).

    Raises PstarError for a size without room.
    """
    if measured is not None:
        draw = partial(_measured_figure, timelines[0], measured, measured_as, title, look)
    else:
        draw = partial(_planned_figure, timelines, xs, title, look)
    figure = draw(())
    return figure if look == USUAL else draw([ax.get_position() for ax in figure.axes])


def _planned_figure(
    timelines: Sequence[Timeline], xs: Sequence[str], title: str, look: Look, places: Sequence[Bbox]
) -> Figure:
    columns = len(xs) if look.scale == 1 else 1
    count = len(timelines)
    rows = count * len(xs) // columns
    size = look.size(11.0 if columns == 1 else 14.0, look.scale * (1.6 + 2.4 * rows))
    figure, cells = _subplots(size, rows, columns, places, sharey=True)
    handles: Handles = {}
    for n, x in enumerate(xs):
        axes = list(cells[:, n]) if columns > 1 else list(cells[n * count : (n + 1) * count, 0])
        handles |= _plot(timelines, axes, x, "gpu", None)
        for one in axes[:-1]:
            one.set_xlabel("")
            one.tick_params(labelbottom=False)
        for one in axes if n and columns > 1 else ():
            one.set_title("", loc="left")
    return _finished(figure, handles, title, look)


def _measured_figure(
    predicted: Timeline, measured: Timeline, measured_as: str, title: str, look: Look, places: Sequence[Bbox]
) -> Figure:
    figure, cells = _subplots(look.size(11.0, 9.4 * look.scale), 3, 1, places)
    over, *apart = cells[:, 0]
    run = replace(measured, budget_bytes=measured.budget_bytes or predicted.budget_bytes, label="measured")
    handles = _plot([predicted], [over], "moment", "gpu", measured)
    handles |= _plot([predicted.labelled("predicted"), run], apart, "time", "gpu", None, hatch=False)
    apart[0].set_xlabel("")
    if measured_as:
        apart[1].set_title(measured_as, fontsize=10.5, loc="left")
    return _finished(figure, handles, title, look)


def _subplots(
    size: tuple[float, float], rows: int, columns: int, places: Sequence[Bbox], *, sharey: bool = False
) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    cells = figure.subplots(rows, columns, sharey=sharey, squeeze=False)
    for ax, place in zip(figure.axes, places):
        ax.set_position(place)
        ax.set_in_layout(True)
    return figure, cells


def _finished(figure: Figure, handles: Handles, title: str, look: Look) -> Figure:
    points = figure_legend(figure, {name: handles[name] for name in _in_order(handles)}, look, place="below")
    if title:
        lines = broken_at(title, points, 12 * look.scale)
        figure.suptitle(lines, fontsize=12, x=0.01, ha="left")
    return laid_out(figure, look)


def _capacity(timeline: Timeline, place: str) -> int:
    known = timeline.budget_bytes.get(place) or timeline.peak_bytes.get(place)
    return known if known else int(byte_curves(timeline, place=place).total.max())


def _polyline(
    curves: Curves, values: np.ndarray[Any, Any], unit: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return np.repeat(curves.edges, 2)[1:-1], np.repeat(values, 2) / unit


def _draw(timeline: Timeline, ax: Axes, x: str, place: str, unit: int, handles: Handles, *, hatch: bool) -> None:
    curves = byte_curves(timeline, x=x, place=place)
    capacity = _capacity(timeline, place)
    floor = np.zeros(len(curves.edges) - 1, np.int64)
    for category, values in curves.values.items():
        if category == "non-model" or not values.any():
            continue
        xs, low = _polyline(curves, floor, unit)
        _, high = _polyline(curves, floor + values, unit)
        colour = COLOURS.get(category, COLOURS["buffer"])
        handles[NAMES.get(category, category)] = ax.fill_between(xs, low, high, color=colour, linewidth=0)
        floor = floor + values
    line = capacity - curves.tide
    ends = [curves.edges[0], curves.edges[-1]]  # a line that went on would suggest that the iteration does
    xs, tide_line = _polyline(curves, line, unit)
    if curves.tide.any():  # on the host and on disks nothing hangs from the capacity
        handles[NAMES["non-model"]] = ax.fill_between(
            xs, tide_line, capacity / unit, color=COLOURS["non-model"], linewidth=0, alpha=0.85
        )
    constant = int(line.min())
    # Only above the model data: the room that a static partition leaves empty at low tide.
    reachable = np.maximum(floor, constant)
    _, low = _polyline(curves, reachable, unit)
    _, high = _polyline(curves, np.maximum(line, reachable), unit)
    if hatch and (line > constant).any():
        handles[_WASTE] = ax.fill_between(
            xs, low, high, facecolor="none", edgecolor="#555555", hatch="////", linewidth=0, zorder=1.5
        )
        (handles["capacity of a static partition"],) = ax.plot(
            ends, [constant / unit] * 2, color=ink(ax), linestyle=":", linewidth=1.2, zorder=3
        )
    if len(curves.edges) <= 400 and curves.tide.any():  # a line along dense teeth would look like an area of its own
        ax.plot(xs, tide_line, color="#1F5F8B", linewidth=0.9, zorder=3)
    (handles["capacity (the plan's budget)"],) = ax.plot(
        ends, [capacity / unit] * 2, color=ink(ax), linestyle="--", linewidth=1.4, zorder=4
    )
    ax.set_xlim(curves.edges[0], curves.edges[-1])
    ax.set_xlabel("time in the iteration [s]" if x == "time" else "moment")
    moved = timeline.moved_bytes.get("h2d")
    copies = f", {format_bytes(moved)} copied to the GPU" if moved else ""
    says = f"{timeline.label or timeline.source}: {format_s(timeline.iteration_s)} per iteration"
    whole = says + copies
    says = whole if len(whole) * TITLE_POINTS < size_points(ax)[0] else says
    ax.set_title(broken(says, ax), fontsize=10.5, loc="left")
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _phases(
    timeline: Timeline, ax: Axes, x: str, strip: _Strip, named: Handles, unnamed: Handles, *, measured: bool
) -> None:
    """Phases with room have names; a measured strip lies above its prediction's.

    named, unnamed: get those drawn.
    """
    bands = phase_bands(timeline, x=x)
    if not bands:
        return
    left, right = ax.get_xlim()
    low = strip.start + (strip.height * 1.15 if measured else 0.0)
    width = size_points(ax)[0]
    for band in bands:
        colour = PHASE_COLOURS.get(band.name, "#CCCCCC")
        drawn = ax.fill_between([band.start, band.end], low, low + strip.height, color=colour, linewidth=0, zorder=2)
        room = (band.end - band.start) / (right - left) * width
        short = band.name.split(" ")[0]
        labels = [f"{short} measured"] if measured else [band.name, short]
        label = next((text for text in labels if len(text) * LETTER_POINTS < room), "")
        if room >= 1:  # else nothing is seen
            (named if label else unnamed)[band.name] = drawn
        if label:
            words = "white" if band.name == "ADAM" else "black"
            at = (band.start + band.end) / 2, low + strip.height / 2
            ax.text(*at, label, ha="center", va="center_baseline", fontsize=8, color=words, zorder=5, clip_on=True)


def _overlay(
    predicted: Timeline, measured: Timeline, ax: Axes, x: str, place: str, unit: int, handles: Handles
) -> None:
    curves = byte_curves(measured, x=x, place=place)
    capacity = _capacity(predicted, place)
    xs, model = _polyline(curves, curves.model_data, unit)
    _, line = _polyline(curves, capacity - curves.tide, unit)
    (handles["measured model data"],) = ax.plot(xs, model, color=ink(ax), linewidth=1.3, zorder=6)
    (handles["measured tide line"],) = ax.plot(xs, line, color="#D55E00", linewidth=1.3, linestyle="--", zorder=6)
    left, right = ax.get_xlim()
    ax.set_xlim(left, max(right, float(curves.edges[-1])))
    name = predicted.label or "plan"
    said = f"{name}: predicted (areas), measured (lines)"  # by moment, nothing in the picture depends on seconds
    if x == "time":
        predicted_s, measured_s = format_s(predicted.iteration_s), format_s(measured.iteration_s)
        said = f"{name}: {predicted_s} per iteration predicted, {measured_s} measured"
    ax.set_title(broken(said, ax), fontsize=10.5, loc="left")


def _in_order(handles: Handles) -> list[str]:
    order = [NAMES[c] for c in ("non-model", "buffer", "grad", "param", "states")]
    order += [_WASTE, "capacity of a static partition", "capacity (the plan's budget)"]
    return [n for n in order if n in handles] + [n for n in handles if n not in order]
