"""Timelines as Plotly figures, as plain values.

[Note: colours of the theme] THEMES has those that begin with "@", and ON_DARK; a page's script, and `themed`, replace
them.

[Note: joined] A chart draws no more than a screen can show, and a note says what was joined. With more corners than
MOST_CORNERS, a point is its stretch's highest instant. Neighbouring bars shorter than 1/RESOLUTION of the iteration
share one that lists them, as long as the resolution and as high as its share of work: its area is the work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Kind, Queue
from pstar_sim.core.timeline import Span, Timeline
from pstar_sim.planner.explain import WAITS as WAITS_FOR
from pstar_sim.report.byte_curves import Curves, axis_unit, byte_curves, phase_bands, steady_start_s
from pstar_sim.report.palette import CATEGORIES, CATEGORY_NAMES, ON_DARK, PHASES, QUEUE_NAMES, STEPS, VERMILION
from pstar_sim.report.palette import WAITS as WAIT_COLOURS
from pstar_sim.report.residence import CONTENTS, Residence
from pstar_sim.report.step_names import block_name, chunk_words
from pstar_sim.units import format_bytes, format_s

MOST_CORNERS = 1200
THINNEST = 0.005  # share of the height that is seen
RESOLUTION = 200  # a lane on a narrow screen has that many pixels
TICKS = 12  # layers named beside the chunks
LANE, LEAST = 0.78, 0.08  # height of a bar in its lane; least share of that height, which is still seen

Figure = dict[str, Any]

THEMES = {
    "light": {"@ink": "#1a1a1a", "@paper": "#ffffff", "@grid": "#dcdcdc", "@line": "#000000", "@faint": "#eeeeee"},
    "dark": {"@ink": "#e8e8e8", "@paper": "#16181c", "@grid": "#3a3d44", "@line": "#ffffff", "@faint": "#24272d",
             **{colour: there for colour, (there, _) in ON_DARK.items()}},
}  # fmt: skip
LINE_STYLES = ("solid", "dashed", "dotted")
WAITS = "compute waits"
LANES = (QUEUE_NAMES[Queue.COMPUTE], WAITS, *list(QUEUE_NAMES.values())[1:])
CONTENT_COLOURS = ("@faint", CATEGORIES["param"], CATEGORIES["grad"], CATEGORIES["states"])


@dataclass(frozen=True, kw_only=True)
class Chart:
    """The keys "data" and "layout" of Plotly, colours as in [Note: colours of the theme].

    legend: name -> colour.
    lines: legend's name -> one of LINE_STYLES.
    notes: on joined elements.
    """

    figure: Figure
    legend: Mapping[str, str]
    lines: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def themed(value: Any, theme: str = "light") -> Any:
    if isinstance(value, dict):
        return {key: themed(one, theme) for key, one in value.items()}
    if isinstance(value, list):
        return [themed(one, theme) for one in value]
    return THEMES[theme].get(value, value) if isinstance(value, str) else value


def layout(*, height: int, **more: Any) -> Figure:
    shared: Figure = {
        "height": height,
        "margin": {"l": 64, "r": 12, "t": 12, "b": 46},
        "paper_bgcolor": "@paper",
        "plot_bgcolor": "@paper",
        "font": {"size": 13, "color": "@ink", "family": "system-ui, sans-serif"},
        "hoverlabel": {"bgcolor": "@paper", "bordercolor": "@ink", "font": {"color": "@ink", "size": 13}},
        "showlegend": False,
        "dragmode": "zoom",
    }
    return {**shared, **more}


def axis(title: str, **more: Any) -> Figure:
    """Without a line at zero."""
    return {
        "title": {"text": title, "standoff": 8},
        "gridcolor": "@grid",
        "linecolor": "@grid",
        "zeroline": False,
        **more,
    }


# The tide.


def tide_chart(
    timeline: Timeline, *, x: str, right: float, top_bytes: float, over: tuple[str, Timeline] | None = None
) -> Chart:
    """Bytes on the GPU, against x = "time" or "moment".

    right: end of x.
    top_bytes: capacity on y.
    over: another plan or run, as lines.

    Raises PstarError without samples.
    """
    curves, note = _thinned(byte_curves(timeline, x=x))
    capacity = timeline.budget_bytes.get("gpu") or int(curves.total.max())
    xs = _numbers(curves.edges)
    scale, unit = axis_unit(top_bytes)
    data: list[Figure] = []
    legend: dict[str, str] = {}
    floor = np.zeros(len(curves.edges) - 1)
    for category, values in curves.values.items():
        if category == "non-model" or not values.any():
            continue
        floor = floor + values
        name, colour = CATEGORY_NAMES.get(category, category), CATEGORIES.get(category, "#999999")
        data.append({**_area(xs, floor, values, name, colour, scale, unit), "fill": "tonexty" if data else "tozeroy"})
        legend[name] = colour
    line = capacity - curves.tide  # a line along dense teeth would look like an area of its own
    data.append({**_line(xs, line, "@line", 0.0 if len(xs) > 400 else 1.0, scale),
                 "customdata": _scaled(curves.tide, scale),
                 "hovertemplate": f"the tide: %{{customdata:.4g}} {unit}<extra></extra>"})  # fmt: skip
    top = {"x": [xs[0], xs[-1]], "y": [capacity / scale] * 2, "mode": "lines", "type": "scatter"}
    tide = CATEGORIES["non-model"]
    data.append({**top, "fill": "tonexty", "fillcolor": tide, "line": {"width": 0}, "hoverinfo": "skip"})
    data.append({**top, "line": {"color": "@line", "width": 1.5, "dash": "dash"}, "hovertemplate":
                 f"capacity: {format_bytes(capacity)}<extra></extra>"})  # fmt: skip
    legend |= {CATEGORY_NAMES["non-model"]: tide, "capacity (dashed)": "@line"}
    lines = {"capacity (dashed)": "dashed"}
    there = {band.name for band in phase_bands(timeline, x=x) if band.end - band.start > right / RESOLUTION}
    legend |= {name: colour for name, colour in PHASES.items() if name in there}
    notes = [note] if note else []
    most = int(curves.total.max())
    if most < THINNEST * top_bytes:
        notes.append(f"At most {format_bytes(most)} of {format_bytes(capacity)} are taken, too little to be seen here")
    if over is not None:
        title, other = over
        more, said = _lines_of(title, other, x, capacity, scale, unit)
        data += more
        model, tide_line = f"{title} model data (line)", f"{title} tide line (dotted)"
        legend |= {model: "@ink", tide_line: VERMILION}
        lines |= {model: "solid", tide_line: "dotted"}
        notes += [f"{title}: {said}"] if said else []
    name = "time in the iteration [s]" if x == "time" else "moment"
    shown = layout(
        height=330,
        xaxis=axis(name, range=[0, right]),
        yaxis=axis(f"GPU memory [{unit}]", range=[0, top_bytes / scale * 1.1], fixedrange=True),
        hovermode="x unified",
        **_phases(timeline, x, top_bytes / scale, right),
    )
    return Chart(figure={"data": data, "layout": shown}, legend=legend, lines=lines, notes=tuple(notes))


def _lines_of(title: str, other: Timeline, x: str, capacity: int, scale: int, unit: str) -> tuple[list[Figure], str]:
    """capacity: of the areas, from which a tide without a budget hangs."""
    curves, note = _thinned(byte_curves(other, x=x))
    capacity = other.budget_bytes.get("gpu") or capacity
    xs = _numbers(curves.edges)
    model = _line(xs, curves.model_data, "@ink", 2.0, scale)
    model["hovertemplate"] = f"{title} model data: %{{y:.4g}} {unit}<extra></extra>"
    if not curves.tide.any():  # a run always counts payloads; its tide may not be sampled
        return [model], note
    tide = {**_line(xs, capacity - curves.tide, VERMILION, 2.0, scale), "customdata": _scaled(curves.tide, scale),
            "hovertemplate": f"{title} tide: %{{customdata:.4g}} {unit}<extra></extra>"}  # fmt: skip
    tide["line"]["dash"] = "dot"
    return [model, tide], note


def _area(xs: list[float], top: Any, values: Any, name: str, colour: str, scale: int, unit: str) -> Figure:
    return {
        **_line(xs, top, colour, 0.0, scale),
        "name": name,
        "customdata": _scaled(values, scale),
        "fillcolor": colour,
        "hovertemplate": f"{name}: %{{customdata:.4g}} {unit}<extra></extra>",
    }


def _line(xs: list[float], values: Any, colour: str, width: float, scale: int) -> Figure:
    line = {"color": colour, "width": width, "shape": "hv"}
    return {"type": "scatter", "mode": "lines", "x": xs, "y": _scaled(values, scale), "line": line}


def _scaled(values: Any, scale: int) -> list[float]:
    return _numbers(np.append(values, values[-1]) / scale)


def _numbers(values: Any) -> list[float]:
    return [float(f"{v:.6g}") for v in np.asarray(values, np.float64).tolist()]


def _thinned(curves: Curves) -> tuple[Curves, str]:
    count = len(curves.edges) - 1
    if count <= MOST_CORNERS:
        return curves, ""
    bounds = np.linspace(0, count, MOST_CORNERS + 1).astype(np.int64)
    total = curves.total
    at = np.array([low + int(np.argmax(total[low:high])) for low, high in pairwise(bounds)])
    values = {category: column[at] for category, column in curves.values.items()}
    said = f"{count} changes are drawn as {MOST_CORNERS} points, each the instant of its stretch with the most bytes"
    return Curves(place=curves.place, edges=curves.edges[bounds], values=values), said


def _phases(timeline: Timeline, x: str, top: float, right: float) -> Figure:
    """Names above the capacity, with their share of the width: a narrow screen leaves out small ones."""
    bands = phase_bands(timeline, x=x)
    shapes, names = [], []
    for band in bands:
        colour = PHASES.get(band.name, "#CCCCCC")
        shapes.append({"type": "rect", "x0": band.start, "x1": band.end, "y0": top * 1.02, "y1": top * 1.09,
                       "fillcolor": colour, "line": {"width": 0}, "layer": "above"})  # fmt: skip
        share = (band.end - band.start) / right if right > 0 else 0.0
        text = band.name.split(" ")[0]
        if share > 0.07:
            ink = "#ffffff" if band.name == "ADAM" else "#000000"
            names.append({"x": (band.start + band.end) / 2, "y": top * 1.055, "text": text, "showarrow": False,
                          "name": f"{share:.3f}",
                          "font": {"size": 11, "color": ink}})  # fmt: skip
    return {"shapes": shapes, "annotations": names}


# The queues.


@dataclass(slots=True)
class _Bar:
    """busy_s: by (name, colour)."""

    start_s: float
    end_s: float
    busy_s: dict[tuple[str, str], float]
    counts: dict[str, int]
    bytes: int
    text: str

    def add(self, other: _Bar) -> None:
        self.end_s = max(self.end_s, other.end_s)
        for style, busy_s in other.busy_s.items():
            self.busy_s[style] = self.busy_s.get(style, 0.0) + busy_s
        for name, count in other.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        self.bytes += other.bytes

    def words(self) -> str:
        count = sum(self.counts.values())
        busy_s = sum(self.busy_s.values())
        size = f", {format_bytes(self.bytes)}" if self.bytes else ""
        if count == 1:
            return f"{self.text}: {format_s(busy_s)}{size}"
        what = ", ".join(f"{n} x {name}" for name, n in self.counts.items())
        return f"{what}: {format_s(busy_s)} of {format_s(self.end_s - self.start_s)}{size}"


def lanes_chart(timeline: Timeline, *, right_s: float, plan: Plan | None = None) -> Chart:
    """Every queue's work, and what compute waits for.

    Raises PstarError without compute spans.
    """
    rows = _rows(timeline, chunk_words(plan))
    lanes = [lane for lane in LANES if lane in rows]
    shortest = timeline.iteration_s / RESOLUTION
    steps = sum(len(bars) for bars in rows.values())
    joined = {lane: _joined(rows[lane], shortest) for lane in lanes}
    for mine in joined.values():
        _lengthen(mine, shortest, timeline.iteration_s)
    bars = [(lane, bar) for lane in lanes for bar in joined[lane]]
    data = _bar_traces(bars)
    colours = {trace["name"]: trace["marker"]["color"] for trace in data}
    order = [*PHASES, *(name for name, _, _ in STEPS.values()), *colours]
    legend = {name: colours[name] for name in dict.fromkeys(order) if name in colours}
    notes = []
    if len(bars) < steps:
        notes.append(
            f"{steps} steps and waits are drawn as {len(bars)} bars: neighbours within {format_s(shortest)} share a "
            "bar, in the colour of the step that takes most of it; point at a bar to see its steps"
        )
    if any(_share(bar) < 1 for _, bar in bars):
        notes.append("The height of a bar is the share of its length in which the queue works")
    shown = layout(
        barmode="overlay",
        xaxis=axis("time in the iteration [s]", range=[0, right_s]),
        hovermode="closest",
        **_rows_of(lanes),
    )
    return Chart(figure={"data": data, "layout": shown}, legend=legend, notes=tuple(notes))


def _rows_of(lanes: Sequence[str]) -> Figure:
    yaxis = {"categoryorder": "array", "categoryarray": list(lanes[::-1]), "automargin": True, "fixedrange": True,
             "range": [-0.6, len(lanes) - 0.4]}  # fmt: skip
    return {"height": 70 + 30 * len(lanes), "yaxis": yaxis}


def same_lanes(charts: Sequence[Chart]) -> list[Chart]:
    """Each chart gets the lanes of all, for rows side by side."""
    there = {lane for chart in charts for lane in chart.figure["layout"]["yaxis"]["categoryarray"]}
    rows = _rows_of([lane for lane in LANES if lane in there])
    figures = [{**chart.figure, "layout": {**chart.figure["layout"], **rows}} for chart in charts]
    return [replace(chart, figure=figure) for chart, figure in zip(charts, figures)]


def _rows(timeline: Timeline, names: Mapping[int, str]) -> dict[str, list[_Bar]]:
    origin = steady_start_s(timeline)
    rows: dict[str, list[_Bar]] = {}
    for span in sorted(timeline.spans, key=lambda s: (s.start_s, s.end_s)):
        start_s, end_s = _within(span.start_s - origin, span.end_s - origin, timeline)
        if end_s > start_s and (span.kind is Kind.COMPUTE or span.kind in STEPS):  # else bookkeeping, of a few us
            name, colour = _style(timeline, span)
            bar = _bar(start_s, end_s, name, colour, span.bytes, f"{name}{_about(span, names)}")
            rows.setdefault(QUEUE_NAMES[span.queue], []).append(bar)
        start_s, end_s = _within(span.ready_s - origin, span.start_s - origin, timeline)
        if span.queue is Queue.COMPUTE and span.cause and end_s > start_s:
            name = f"waits {WAITS_FOR.get(span.cause, span.cause)}"
            bar = _bar(start_s, end_s, name, WAIT_COLOURS.get(span.cause, "#999999"), 0, name)
            rows.setdefault(WAITS, []).append(bar)
    return rows


def _bar_traces(bars: Sequence[tuple[str, _Bar]]) -> list[Figure]:
    data: list[Figure] = []
    for (name, colour), group in groupby(sorted(bars, key=lambda b: _most(b[1])), key=lambda b: _most(b[1])):
        mine = list(group)
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": [lane for lane, _ in mine],
                "base": _numbers([bar.start_s for _, bar in mine]),
                "x": _numbers([bar.end_s - bar.start_s for _, bar in mine]),
                "customdata": [bar.words() for _, bar in mine],
                "hovertemplate": "%{base:.4g} s: %{customdata}<extra></extra>",
                "marker": {"color": colour, "line": {"width": 0}},
                "width": _heights(mine),
            }
        )
    return data


def _heights(bars: Sequence[tuple[str, _Bar]]) -> float | list[float]:
    shares = [_share(bar) for _, bar in bars]
    return LANE if min(shares) == 1 else [round(LANE * max(share, LEAST), 3) for share in shares]


def _share(bar: _Bar) -> float:
    return min(1.0, round(sum(bar.busy_s.values()) / (bar.end_s - bar.start_s), 3))


def _within(start_s: float, end_s: float, timeline: Timeline) -> tuple[float, float]:
    return max(start_s, 0.0), min(end_s, timeline.iteration_s)


def _bar(start_s: float, end_s: float, name: str, colour: str, size: int, text: str) -> _Bar:
    return _Bar(start_s, end_s, {(name, colour): end_s - start_s}, {name: 1}, size, text)


def _most(bar: _Bar) -> tuple[str, str]:
    return max(bar.busy_s, key=lambda style: bar.busy_s[style])


def _joined(bars: Sequence[_Bar], shortest_s: float) -> list[_Bar]:
    drawn: list[_Bar] = []
    for bar in bars:
        if drawn and bar.end_s - drawn[-1].start_s <= shortest_s:
            drawn[-1].add(bar)
        else:
            drawn.append(bar)
    return drawn


def _lengthen(bars: Sequence[_Bar], shortest_s: float, end_s: float) -> None:
    for bar, next_s in zip(bars, [*(later.start_s for later in bars[1:]), end_s]):
        bar.end_s = max(bar.end_s, min(bar.start_s + shortest_s, next_s))


def _style(timeline: Timeline, span: Span) -> tuple[str, str]:
    if span.kind is not Kind.COMPUTE:
        return STEPS[span.kind][:2]
    phase = timeline.phases[span.moment] if timeline.phases and span.moment is not None else "compute"
    return phase, PHASES.get(phase, "#CCCCCC")


def _about(span: Span, names: Mapping[int, str]) -> str:
    if span.kind is Kind.COMPUTE and span.moment is not None:
        return f", moment {span.moment}"
    return "" if span.chunk is None else f" of {names.get(span.step, f'chunk {span.chunk}')}"


# The chunks.


def residence_chart(found: Residence, *, right_s: float, layers: Sequence[str]) -> Chart:
    """A row per chunk, or per few."""
    ends = [*found.first_chunks[1:], found.chunks]
    codes = range(len(CONTENTS))
    steps = [[edge / len(CONTENTS), CONTENT_COLOURS[c]] for c in codes for edge in (c, c + 1)]
    contents: list[list[int]] = found.contents.tolist()
    heat: Figure = {
        "type": "heatmap",
        "x": _numbers(found.edges_s),
        "y": [*found.first_chunks, found.chunks],
        "z": contents,
        "zmin": -0.5,
        "zmax": len(CONTENTS) - 0.5,
        "colorscale": steps,
        "showscale": False,
        "meta": {"words": list(CONTENTS), "rows": [layers[chunk] for chunk in found.first_chunks]},
        "hovertemplate": "%{x:.4g} s, chunk %{y:.0f}, %{text}<extra></extra>",
    }
    per_row = max(b - a for a, b in zip(found.first_chunks, ends))
    bin_s = float(found.edges_s[1] - found.edges_s[0])
    note = f"A column is {format_s(bin_s)}; a chunk that was there for a part of it is shown"
    if per_row > 1:
        note = f"{found.chunks} chunks in rows of {per_row}, each in the colour of most of the bytes there. {note}"
    shown = layout(
        height=340,
        xaxis=axis("time in the iteration [s]", range=[0, right_s]),
        yaxis=axis("chunk", range=[found.chunks, 0], fixedrange=True, automargin=True, **_ticks(layers)),
        hovermode="closest",
    )
    legend = {name: CONTENT_COLOURS[c] for c, name in enumerate(CONTENTS) if (found.contents == c).any()}
    return Chart(figure={"data": [heat], "layout": shown}, legend=legend, notes=(note,))


def _ticks(layers: Sequence[str]) -> Figure:
    chunks = range(0, len(layers), max(1, -(-len(layers) // TICKS)))
    return {
        "tickvals": [chunk + 0.5 for chunk in chunks],
        "ticktext": [f"{block_name(layers[chunk])}  {chunk}" for chunk in chunks],
    }
