"""The tide picture: what fills the GPU at every instant of an iteration.

[Note: reading a tide picture] Model data (optimizer states, param16, gradients, buffers) stands on the floor;
non-model data hangs from the capacity line, so its lower edge is the capacity that is left for chunks: the tide line.
White between the two is free. A policy that does not look at the tide plans with one constant capacity, that of the
tide's peak: everything between this constant (dotted) and the tide line is room it can never use (hatched).

A measured timeline is laid over the first prediction as lines: the tide line and the model data that were measured, the
measured phases as a second strip. The hatching is left out then, and the time axis ends where the longer one ends.

Draws on the axes it is given, opens no window, calls no `show`. Knows matplotlib and `curves`; knows no policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pstar_sim.arguments import choice, instance, names, refused
from pstar_sim.core.step import Place
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import PstarError
from pstar_sim.planner.compare import Comparison, Planned
from pstar_sim.report.byte_curves import Curves, byte_curves, phase_bands
from pstar_sim.report.palette import CATEGORIES as COLOURS
from pstar_sim.report.palette import PHASES as PHASE_COLOURS
from pstar_sim.units import GB, KB, MB, format_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["NAMES", "plot_tide", "tide_figure"]

NAMES = {
    "states": "optimizer states",
    "param": "parameters (param16)",
    "grad": "gradients",
    "buffer": "buffers",
    "non-model": "non-model (the tide)",
    "free": "free",
}
_WASTE = "free, but out of reach of a static partition"


def plot_tide(
    timelines: Timeline | Planned | Comparison | Sequence[Timeline | Planned],
    ax: Axes | Iterable[Axes] | None = None,
    x: str = "time",
    *,
    measured: Timeline | None = None,
    place: str = "gpu",
) -> Any:
    """Draw one timeline, or several side by side with one y axis. Returns the axes (an array of them for several).

    timelines: a timeline or a plan of a comparison, a list of them, or a comparison, of which every plan is drawn.
    x: "time" (seconds) or "moment".
    measured: a recorded timeline drawn as lines over the first one.
    ax: where to draw; as many axes as timelines; None makes a figure.

    Raises PstarError for an unknown x, for a timeline without bytes to draw, and for a wrong number of axes.
    """
    many = _timelines(timelines)
    choice("x", x, ("time", "moment"))
    choice("place", place, [p.value for p in Place])
    if measured is not None:
        instance("measured", measured, Timeline, "a Timeline")
    axes = _axes_for(ax, len(many))
    top = max(_capacity(t, place) for t in many)
    unit, name = next((u for u in ((GB, "GB"), (MB, "MB"), (KB, "kB")) if top >= u[0]), (1, "B"))
    handles: dict[str, Any] = {}
    for i, (timeline, one) in enumerate(zip(many, axes)):
        over = measured if i == 0 else None
        _draw(timeline, one, x, place, unit, handles, hatch=over is None)
        if over is not None:
            _overlay(timeline, over, one, x, place, unit, handles)
        one.set_ylim(0, top / unit * (1.09 if measured is None else 1.15))
        if i == 0:
            one.set_ylabel(f"{place.upper()} memory [{name}]")
    _legend(axes[-1], handles)
    return axes[0] if isinstance(timelines, Timeline | Planned) else np.array(axes, dtype=object)


def _axes_for(ax: Axes | Iterable[Axes] | None, count: int) -> list[Any]:
    """Where to draw `count` timelines; None makes a figure. Raises PstarError for another number of axes."""
    if ax is None:
        from matplotlib import pyplot

        width = max(9.0, 2.8 + 4.2 * count)
        _, made = pyplot.subplots(1, count, sharey=True, figsize=(width, 4.6), layout="constrained", squeeze=False)
        return list(made[0])
    axes = [ax] if hasattr(ax, "plot") else list(names("ax", ax, "an Axes, or a list with one Axes per timeline"))
    if not all(hasattr(one, "plot") for one in axes):
        raise refused("ax", ax, "an Axes, or a list with one Axes per timeline")
    if len(axes) != count:
        raise PstarError(f"plot_tide got {count} timelines and {len(axes)} axes; give one axes per timeline")
    return axes


def _timelines(given: object) -> list[Timeline]:
    """The timelines to draw. Raises PstarError for an empty list, and for a value without a timeline."""
    rows = [given] if isinstance(given, Timeline | Planned) else given
    if isinstance(rows, Comparison):
        rows = [rows[row.policy] for row in rows.rows if row.fits]
    if not isinstance(rows, Sequence) or not rows or not all(isinstance(row, Timeline | Planned) for row in rows):
        want = "a Timeline, a plan of a comparison, a list of these, or a Comparison in which a policy fits"
        raise refused("timelines", given, want)
    return [row.timeline if isinstance(row, Planned) else row for row in rows]


def tide_figure(
    timelines: Sequence[Timeline],
    *,
    xs: Sequence[str] = ("time", "moment"),
    measured: Timeline | None = None,
    title: str = "",
) -> Figure:
    """A whole figure without pyplot: a row for every x of `xs`, a column for every timeline. Save with
    `.savefig(file)`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 + max(6.6, 4.4 * len(timelines)), 0.6 + 3.9 * len(xs)), layout="constrained")
    rows = figure.subplots(len(xs), len(timelines), sharey=True, squeeze=False)
    for number, (row, x) in enumerate(zip(rows, xs)):
        plot_tide(timelines, ax=list(row), x=x, measured=measured)
        if number > 0:
            for one in row:
                one.set_title("", loc="left")
            legend = row[-1].get_legend()
            if legend is not None:
                legend.remove()
    if title:
        figure.suptitle(title, fontsize=11, x=0.02, ha="left")
    return figure


def _capacity(timeline: Timeline, place: str) -> int:
    """The plan's budget; where the timeline carries none, its peak."""
    known = timeline.budget_bytes.get(place) or timeline.peak_bytes.get(place)
    return known if known else int(byte_curves(timeline, place=place).total.max())


def _polyline(
    curves: Curves, values: np.ndarray[Any, Any], unit: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The curve, constant between its edges, as a polyline: x and y (in units of `unit` bytes) of its corners."""
    return np.repeat(curves.edges, 2)[1:-1], np.repeat(values, 2) / unit


def _draw(timeline: Timeline, ax: Axes, x: str, place: str, unit: int, handles: dict[str, Any], *, hatch: bool) -> None:
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
    xs, tide_line = _polyline(curves, line, unit)
    handles[NAMES["non-model"]] = ax.fill_between(
        xs, tide_line, capacity / unit, color=COLOURS["non-model"], linewidth=0, alpha=0.85
    )
    constant = int(line.min())
    # Only where no model data stands: what static leaves empty at low tide.
    reachable = np.maximum(floor, constant)
    _, low = _polyline(curves, reachable, unit)
    _, high = _polyline(curves, np.maximum(line, reachable), unit)
    if hatch and (line > constant).any():
        handles[_WASTE] = ax.fill_between(
            xs, low, high, facecolor="none", edgecolor="#555555", hatch="////", linewidth=0, zorder=1.5
        )
        handles["capacity of a static partition"] = ax.axhline(
            constant / unit, color="black", linestyle=":", linewidth=1.2, zorder=3
        )
    fine = len(curves.edges) > 400  # a line as wide as a moment would hide the teeth it follows
    ax.plot(xs, tide_line, color="#1F5F8B", linewidth=0.25 if fine else 0.9, zorder=3)
    handles["capacity (the plan's budget)"] = ax.axhline(
        capacity / unit, color="black", linestyle="--", linewidth=1.4, zorder=4
    )
    _phases(timeline, ax, x, capacity / unit)
    ax.set_xlim(curves.edges[0], curves.edges[-1])
    ax.set_xlabel("time in the iteration [s]" if x == "time" else "moment")
    ax.set_title(
        f"{timeline.label or timeline.source}: {format_s(timeline.iteration_s)} per iteration", fontsize=10, loc="left"
    )
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _phases(timeline: Timeline, ax: Axes, x: str, capacity: float, *, above: float = 0.0, shade: bool = True) -> None:
    """A strip above the capacity line (by `above` of it), named, and faint shading under it."""
    bands = phase_bands(timeline, x=x)
    if not bands:
        return
    whole = bands[-1].end - bands[0].start
    low, high = capacity * (1.02 + above), capacity * (1.075 + above)
    for band in bands:
        colour = PHASE_COLOURS.get(band.name, "#CCCCCC")
        ax.fill_between([band.start, band.end], low, high, color=colour, linewidth=0, zorder=2)
        if shade and band.name != "FWD":
            ax.axvspan(band.start, band.end, color="#000000", alpha=0.05, linewidth=0, zorder=0)
        share = (band.end - band.start) / whole if whole > 0 else 0
        label = band.name if share > 0.25 else band.name.split(" ")[0]
        if not shade:
            label += " measured"
        if share > (0.06 if shade else 0.2):
            ink = "white" if band.name == "ADAM" else "black"
            middle = (band.start + band.end) / 2
            ax.text(middle, (low + high) / 2, label, ha="center", va="center", fontsize=7, color=ink, zorder=5)


def _overlay(
    predicted: Timeline, measured: Timeline, ax: Axes, x: str, place: str, unit: int, handles: dict[str, Any]
) -> None:
    curves = byte_curves(measured, x=x, place=place)
    capacity = _capacity(predicted, place)
    xs, model = _polyline(curves, curves.model_data, unit)
    _, line = _polyline(curves, capacity - curves.tide, unit)
    (handles["measured model data"],) = ax.plot(xs, model, color="black", linewidth=1.3, zorder=6)
    (handles["measured tide line"],) = ax.plot(xs, line, color="#D55E00", linewidth=1.3, linestyle="--", zorder=6)
    left, right = ax.get_xlim()
    ax.set_xlim(left, max(right, float(curves.edges[-1])))
    ax.set_title(
        f"{predicted.label or 'plan'}: {format_s(predicted.iteration_s)} per iteration predicted, "
        f"{format_s(measured.iteration_s)} measured",
        fontsize=10,
        loc="left",
    )
    if x == "time":
        _phases(measured, ax, x, capacity / unit, above=0.062, shade=False)


def _legend(ax: Axes, handles: dict[str, Any]) -> None:
    order = [NAMES[c] for c in ("non-model", "buffer", "grad", "param", "states")]
    order += [_WASTE, "capacity of a static partition", "capacity (the plan's budget)"]
    names = [n for n in order if n in handles] + [n for n in handles if n not in order]
    figure = ax.get_figure(root=True)
    if figure is not None and figure.get_layout_engine() is None:
        figure.set_layout_engine("constrained")  # makes room for the legend beside the axes
    ax.legend(
        [handles[n] for n in names],
        names,
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        borderaxespad=0.0,
        frameon=False,
        fontsize=8,
    )
