"""An ablation from first line to last: a floating bar of seconds per change, and the bytes that each line copies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pstar_sim.arguments import instance, refused
from pstar_sim.errors import PstarError
from pstar_sim.planner.ablate import Ablation, Line
from pstar_sim.report.legends import ink
from pstar_sim.report.palette import BLUE, GREEN, GREY, SKY, VERMILION
from pstar_sim.report.paper import USUAL, Look, broken_at, csv_text, figure_legend, laid_out
from pstar_sim.report.tables import heading
from pstar_sim.units import GB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WHOLE, BETTER, WORSE, UP, DOWN = GREY, GREEN, VERMILION, BLUE, SKY
NOTHING_S = 0.005  # a change that rounds to 0.00 s
NAMES = 0.33  # share of a narrow figure that names have
LEGIBLE = 0.004  # a change below this share of the picture's width is a mark, not a bar


def plot_waterfall(ablation: Ablation, ax: Axes | Iterable[Axes] | None = None) -> Any:
    """Draw the ladder on one axes (seconds) or two (seconds, gigabytes). Returns the axes.

    ax: None makes a figure with both.

    Raises PstarError for another number of axes.
    """
    instance("ablation", ablation, Ablation, "an Ablation, what ps.ablate answers")
    if ax is None:
        figure = waterfall_figure(ablation, pyplot=True)
        return figure.axes
    axes: list[Any] = list(ax) if isinstance(ax, Iterable) else [ax]
    if not all(hasattr(one, "plot") for one in axes):
        raise refused("ax", ax, "an Axes, or a list of one or two")
    if len(axes) not in (1, 2):
        raise PstarError(f"a waterfall needs one axes or two, not {len(axes)}")
    _seconds(ablation, axes[0])
    if len(axes) == 2:
        _bytes(ablation, axes[1])
        if not axes[0].get_shared_y_axes().joined(*axes):  # axes of the caller's, whose rows are the same all the same
            axes[1].set_yticks(axes[0].get_yticks(), [""] * len(axes[0].get_yticks()))
            axes[1].set_ylim(axes[0].get_ylim())
    return ax


def waterfall_figure(ablation: Ablation, *, pyplot: bool = False, look: Look = USUAL) -> Figure:
    """Without pyplot; a narrow figure has seconds alone.

    Raises PstarError for a size without room.
    """
    size = look.size(11.0, 1.5 + 0.36 * (len(ablation.lines) + 1))
    if pyplot:
        from matplotlib import pyplot as plt

        figure = plt.figure(figsize=size, layout="constrained")
    else:
        from matplotlib.figure import Figure

        figure = Figure(figsize=size, layout="constrained")
    points = figure.get_figwidth() * 72
    room = 0.97 * points
    if look.scale == 1:
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
        plot_waterfall(ablation, [left, right])
        if look.legend is not None:
            own = right.get_legend()
            own.remove()
            words = [text.get_text() for text in own.get_texts()]
            room = figure_legend(figure, dict(zip(words, own.legend_handles)), look, place="below")
    else:
        left = figure.subplots()
        plot_waterfall(ablation, left)
        left.set_yticks(*_folded(left, points * NAMES, 8.5 * look.scale))
        left.texts[-1].set_text(broken_at(left.texts[-1].get_text(), points * NAMES, 8 * look.scale))
    title = heading(ablation).splitlines()[0] + f"; {ablation.machine.name}"
    figure.suptitle(broken_at(title, room, 10 * look.scale), fontsize=10, x=0.01, ha="left")
    return laid_out(figure, look)


def _folded(ax: Axes, points: float, size: float) -> tuple[list[float], list[str]]:
    return list(ax.get_yticks()), [broken_at(label.get_text(), points, size) for label in ax.get_yticklabels()]


def waterfall_csv(ablation: Ablation) -> str:
    names = ("change", "policy", "fits", "iteration_s", "gained_s", "gap", "h2d_bytes", "d2h_bytes")
    rows = [["" if (value := getattr(line, name)) is None else value for name in names] for line in ablation.lines]
    return csv_text([names, *rows])


def _seconds(ablation: Ablation, ax: Axes) -> None:
    lines = ablation.lines
    fitting = [n for n, line in enumerate(lines) if line.fits]
    widest = max(lines[n].iteration_s or 0.0 for n in fitting)
    thick = 0.72
    before = 0.0
    for n, line in enumerate(lines):
        if not line.fits or line.iteration_s is None:
            ax.text(before + 0.01 * widest, n, "does not fit", va="center", fontsize=8, color=WORSE)
            continue
        now = line.iteration_s
        if line.gained_s is None:
            ax.barh(n, now, thick, color=WHOLE, gid=f"line {n}")
            ax.text(now + 0.01 * widest, n, f"{now:.2f} s", va="center", fontsize=8)
        else:
            low, high = min(now, before), max(now, before)
            colour = WHOLE if abs(line.gained_s) < NOTHING_S else BETTER if now <= before else WORSE
            ax.plot([before, before], [n - 1 + thick / 2, n - thick / 2], color="#666666", lw=0.7)
            ax.barh(n, high - low, thick, left=low, color=colour, gid=f"line {n}")
            if high - low < LEGIBLE * widest:
                ax.plot([now, now], [n - thick / 2, n + thick / 2], color=colour, lw=1.5)
            ax.text(high + 0.01 * widest, n, _change(line), va="center", fontsize=8)
        before = now
    ax.plot([before, before], [len(lines) - 1 + thick / 2, len(lines) - thick / 2], color="#666666", lw=0.7)
    ax.barh(len(lines), before, thick, color=WHOLE, gid="last")
    last = lines[fitting[-1]]
    ends = f"{before:.2f} s"
    if last.gap is not None:
        bound_s = before / (1 + last.gap)
        ax.axvline(bound_s, color=ink(ax), ls=(0, (4, 3)), lw=1.0, zorder=0)
        ends += f", {last.gap * 100:.1f} % above the lower bound (dashed)"
    paper = {"facecolor": ax.get_facecolor(), "edgecolor": "none", "pad": 1.0}
    ax.text(before + 0.01 * widest, len(lines), ends, va="center", fontsize=8, bbox=paper)
    names = [f"{line.change}" for line in lines]
    names[0] = f"{lines[0].policy} ({names[0]})"
    ax.set_yticks(range(len(lines) + 1), [*names, ablation.policy], fontsize=8.5)
    ax.set_ylim(len(lines) + 0.6, -0.6)
    ax.set_xlim(0, widest * 1.12)
    ax.set_xlabel("seconds per iteration", fontsize=9)
    ax.tick_params(axis="x", labelsize=8)
    ax.tick_params(axis="y", length=0)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _change(line: Line) -> str:
    gained = line.gained_s or 0.0
    return "0" if abs(gained) < NOTHING_S else f"{-gained:+.2f} s"


def _bytes(ablation: Ablation, ax: Axes) -> None:
    lines = ablation.lines
    fitting = [n for n, line in enumerate(lines) if line.fits]
    rows = [*fitting, len(lines)]
    shown = [*(lines[n] for n in fitting), lines[fitting[-1]]]
    ax.barh([n - 0.18 for n in rows], [(x.h2d_bytes or 0) / GB for x in shown], 0.36, color=UP, label="to the GPU")
    ax.barh([n + 0.18 for n in rows], [(x.d2h_bytes or 0) / GB for x in shown], 0.36, color=DOWN, label="to the host")
    ax.set_xlabel("GB per iteration" + (" and GPU" if ablation.machine.data_parallel_size > 1 else ""), fontsize=9)
    ax.tick_params(axis="x", labelsize=8)
    ax.tick_params(axis="y", length=0)
    ax.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0.0, 1.09), ncols=2, handlelength=1.2,
              columnspacing=1.0, borderaxespad=0.0)  # fmt: skip
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
