"""Size, style and legend of a figure as readers want them, and its numbers.

Below NARROW, words shrink to LEAST and pictures form one column: a paper's is 3.3 inches wide.
"""

from __future__ import annotations

import csv
import io
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pstar_sim.arguments import refused
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import PstarError
from pstar_sim.report.byte_curves import CATEGORIES, byte_curves
from pstar_sim.terminal import unbroken_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NARROW, LEAST = 6.0, 0.7
LEGEND_POINTS = 9.5  # of words beside a swatch
SWATCH = 5.0  # width of a swatch with its gaps, in sizes of the words

PAPER = "#1e2129"  # of a dark page of the documentation
STYLES: Mapping[str, Any] = {
    "light": {},
    "dark": ["dark_background", {f"{part}.facecolor": PAPER for part in ("figure", "axes", "savefig")}],
}
"""Name -> styles of matplotlib; matplotlib's own names stand for themselves."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """width, height: inches, None: the picture's.
    legend: "below", "right" or "none", None: the picture's place.
    """

    width: float | None = None
    height: float | None = None
    legend: str | None = None

    @property
    def scale(self) -> float:
        """Of words."""
        return 1.0 if self.width is None else min(1.0, max(LEAST, self.width / NARROW))

    def size(self, width: float, height: float) -> tuple[float, float]:
        """Inches.

        width, height: the picture's own.
        """
        return self.width or width, self.height or height


USUAL = Look()


@contextmanager
def styled(name: str) -> Iterator[None]:
    """Raises PstarError for a name neither of STYLES nor matplotlib's, and no file."""
    from matplotlib import style

    is_file = Path(name).suffix == ".mplstyle" and Path(name).is_file()
    if name not in STYLES and name not in style.available and not is_file:
        raise refused("style", name, f"one of {', '.join([*STYLES, *sorted(style.available)])}, or a .mplstyle file")
    with style.context(STYLES.get(name, name)):
        yield


def broken_at(text: str, points: float, size: float) -> str:
    """Lines of at most so many points, as a terminal's.

    size: of letters.
    """
    lines = [""]
    for word in unbroken_words(text):
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and _width(longer, size) > points:
            lines.append(word)
        else:
            lines[-1] = longer
    return "\n".join(lines)


def _width(text: str, size: float) -> float:
    from matplotlib.textpath import TextPath

    outline = TextPath((0, 0), text, size=size)
    # The outermost points of a letter's curves lie on it.
    return float(np.ptp(outline.vertices[outline.codes != TextPath.CLOSEPOLY, 0]))


def figure_legend(figure: Figure, handles: Mapping[str, Any], look: Look, *, place: str, most: int = 3) -> float:
    """Beside the axes; returns the points left for a title above.

    place: if the look has none.
    most: columns of a wide figure.
    """
    width = 0.97 * 72 * float(figure.get_figwidth())
    place = look.legend or place
    if place == "none" or not handles:
        return width
    points = LEGEND_POINTS * look.scale
    columns, names = most, list(handles)
    if look.scale < 1:
        columns = 2
        room = figure.get_figwidth() * 72 / columns - SWATCH * points
        names = [broken_at(name, room, points) for name in names]
    below = place == "below"
    if below and look != USUAL and look.scale == 1:
        widths = [_width(name, points) + SWATCH * points for name in names]
        columns = next((n for n in range(columns, 1, -1) if _columns_width(widths, n) <= width), 1)
    figure.legend(
        list(handles.values()), names, loc="outside lower left" if below else "outside right upper",
        ncols=columns if below else 1, frameon=False, fontsize=points,
    )  # fmt: skip
    if below:
        return width
    return width - SWATCH * points - max(_width(line, points) for name in names for line in name.split("\n"))


def _columns_width(widths: Sequence[float], columns: int) -> float:
    return sum(float(max(part)) for part in np.array_split(widths, columns) if len(part))


def laid_out(figure: Figure, look: Look) -> Figure:
    """All words inside its edges. Raises PstarError for a size without room."""
    from matplotlib.text import Text

    if look == USUAL:
        return figure
    if look.scale < 1:
        ticks = [
            (axis, float(axis.get_major_ticks()[0].label1.get_fontsize()))
            for ax in figure.axes
            for axis in (ax.xaxis, ax.yaxis)
        ]
        legends = [*figure.legends, *(legend for ax in figure.axes if (legend := ax.get_legend()) is not None)]
        sized = {id(text) for legend in legends for text in legend.get_texts()}
        for text in figure.findobj(Text):
            if id(text) not in sized:
                text.set_fontsize(float(text.get_fontsize()) * look.scale)
        for axis, points in ticks:
            axis.set_tick_params(labelsize=points * look.scale)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="constrained_layout not applied")
        try:
            figure.draw_without_rendering()
        except UserWarning:
            width, height = figure.get_size_inches()
            raise PstarError(
                f"a picture of {width:.3g} x {height:.3g} inches has no room beside its words; make it higher or "
                "wider, or leave its height or the legend out"
            ) from None
    return figure


def tide_csv(timelines: Sequence[Timeline], xs: Sequence[str]) -> str:
    """Bytes on the GPU, a row per stretch without changes."""
    drawn = [(timeline, x, byte_curves(timeline, x=x)) for timeline in timelines for x in xs]
    categories = tuple(dict.fromkeys((*CATEGORIES, *itertools.chain(*(curves.values for _, _, curves in drawn)))))
    rows: list[Sequence[object]] = [
        ("timeline", "source", "x", "from", "to", *(f"{_column(c)}_bytes" for c in categories), "capacity_bytes")
    ]
    for timeline, x, curves in drawn:
        edges = curves.edges.tolist()
        none = [0] * (len(edges) - 1)
        columns = [curves.values[c].tolist() if c in curves.values else none for c in categories]
        for begin, end, *sizes in zip(edges, edges[1:], *columns, strict=False):
            name = "time_s" if x == "time" else x
            capacity = timeline.budget_bytes.get("gpu", "")
            rows.append((timeline.label, timeline.source, name, begin, end, *sizes, capacity))
    return csv_text(rows)


def csv_text(rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _column(category: str) -> str:
    return category.replace("-", "_")
