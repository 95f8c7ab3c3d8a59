"""Pictures of one kind in a figure share a legend."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLE_POINTS = 5.3  # width of a letter of a title

Handles = dict[str, Any]
"""Name in a legend -> the drawn element with this name."""


def size_points(ax: Axes) -> tuple[float, float]:
    """As far as known before the layout."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    box = ax.get_position()
    width, height = figure.get_size_inches()
    return box.width * width * 72, box.height * height * 72


def broken(title: str, ax: Axes) -> str:
    """At the axes' width; policies' names break behind their parts."""
    letters = max(20, int(size_points(ax)[0] / TITLE_POINTS))
    lines = [""]
    for part in re.split(r"(?<=[ ,:])", title):
        if len(lines[-1]) + len(part.rstrip()) > letters and lines[-1]:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.strip() for line in lines)


def ink(ax: Axes) -> Any:
    """Light in a dark style."""
    return ax.xaxis.label.get_color()


def dark(ax: Axes) -> bool:
    """Paper may be transparent, words are not."""
    from matplotlib.colors import to_rgb

    return min(to_rgb(ink(ax))) > 0.5


def shared_legend(ax: Axes, handles: Mapping[str, Any], kind: str, in_order: Callable[[Handles], list[str]]) -> None:
    """Right of the axes, merged with an earlier one of this kind."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    if figure.get_layout_engine() is None:
        figure.set_layout_engine("constrained")  # makes room for the legend beside the axes
    shown = dict(handles)
    for other in figure.axes:
        earlier = other.get_legend()
        if earlier is not None and earlier.get_gid() == kind:
            texts = [text.get_text() for text in earlier.get_texts()]
            shown = {**dict(zip(texts, earlier.legend_handles)), **shown}
            earlier.remove()
    names = in_order(shown)
    made = ax.legend(
        [shown[n] for n in names], names, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0,
        frameon=False, fontsize=9,
    )  # fmt: skip
    made.set_gid(kind)
