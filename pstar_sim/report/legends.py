"""Legends: pictures of one kind that share a figure share one legend, beside the axes that were drawn last."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Handles", "shared_legend"]

Handles = dict[str, Any]
"""Name in a legend -> the drawn element with this name."""


def shared_legend(ax: Axes, handles: Mapping[str, Any], kind: str, in_order: Callable[[Handles], list[str]]) -> None:
    """Draw the legend of a picture, right of its axes. The legend of an earlier picture of this kind in the figure is
    merged into it.

    in_order: puts the names into their order in the legend.
    """
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
