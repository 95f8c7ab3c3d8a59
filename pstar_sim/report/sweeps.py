"""Pictures of capacity questions, of `Sweep.to_frame()`: largest models, time along an axis, maps of two."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from pstar_sim.arguments import parse_bytes
from pstar_sim.core.figures import BINDS_WORDS
from pstar_sim.errors import PstarError
from pstar_sim.planner.sweep import COLUMNS
from pstar_sim.report.legends import ink, shared_legend
from pstar_sim.report.palette import BINDS, BLUE, WINE, policy_colours
from pstar_sim.units import GB

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

    from pstar_sim.planner.limits import Limit, Limits

__all__ = ["plot_limits", "plot_map", "plot_regimes", "plot_times"]

MARKERS = "os^vDP*X<>"
NOTHING = "#EEEEEE"


def plot_limits(limits: Sequence[Limits], ax: Axes | None = None) -> Any:
    """A bar per machine and policy, with billions of parameters. Returns the axes.

    Raises PstarError for no limits, and limits of batches.
    """
    if not limits or any(one.what != "layers" for one in limits):
        kinds = [one.what for one in limits]
        raise PstarError(f"limits = answers about {kinds}: give at least one answer, all of max_model")
    ax = _axes(ax, (9.0, 1.0 + 0.27 * sum(len(one.rows) + 1 for one in limits)))
    policies = list(dict.fromkeys(row.policy for one in limits for row in one.rows))
    thick = 0.8 / len(policies)
    widest = max((row.params or 0) / 1e9 for one in limits for row in one.rows)
    for n, (policy, colour) in enumerate(zip(policies, policy_colours(policies))):
        for at, one in enumerate(limits):
            row = next((row for row in one.rows if row.policy == policy), None)
            if row is None:
                continue
            y = at + (n - (len(policies) - 1) / 2) * thick
            _bar(ax, y, row, thick, widest, colour, machine=one.machine.name, legend=at == 0)
    ax.set_yticks(range(len(limits)), [_with_memory(one) for one in limits], fontsize=9)
    ax.invert_yaxis()
    ax.set_xlim(0, widest * 1.1)
    ax.set_xlabel("largest model [billion parameters]", fontsize=9)
    ax.legend(fontsize=8, frameon=False, loc="lower right")
    _plain(ax)
    ax.tick_params(axis="y", length=0)
    return ax


def _with_memory(limits: Limits) -> str:
    """Equal GPUs may have different hosts."""
    m = limits.machine
    each = "" if m.data_parallel_size == 1 else " per GPU"
    return f"{m.name}\n{m.gpu_budget_bytes / GB:.0f} GB of GPU and\n{m.host_budget_bytes / GB:.0f} GB of RAM{each}"


def _bar(
    ax: Any, y: float, row: Limit, thick: float, widest: float, colour: str, *, machine: str, legend: bool
) -> None:
    billions = (row.params or 0) / 1e9
    label = row.policy if legend else None
    ax.barh(y, billions, thick * 0.92, color=colour, label=label, gid=f"{machine} {row.policy}")
    text = f"{billions:.1f} B" if row.params else "none"
    ax.text(billions + 0.01 * widest, y, text, va="center", fontsize=7.5)


def plot_times(frame: pandas.DataFrame, x: str, ax: Axes | None = None, *, bound: bool = True) -> Any:
    """Seconds per iteration, a line per policy where it fits, the bound dashed. Returns the axes.

    Sizes as texts ("48GB") are in GB. Raises PstarError for an axis not in the frame, or another that varies.
    """
    frame = _over(frame, [x])
    ax = _axes(ax, (8.0, 4.2))
    policies = dict.fromkeys(frame["policy"])
    for n, (policy, colour) in enumerate(zip(policies, policy_colours(policies))):
        mine = frame[(frame["policy"] == policy) & frame["iteration_s"].notna()].sort_values("at")
        marker = MARKERS[n % len(MARKERS)]
        size = max(4.0, 11.0 - 1.8 * n)  # shows the markers of equally fast policies
        style: dict[str, Any] = {"ms": size, "lw": 1.4, "color": colour}
        ax.plot(mine["at"], mine["iteration_s"], marker + "-", label=policy, **style)
    if bound and frame["lower_bound_s"].notna().any():
        line = frame.dropna(subset="lower_bound_s").groupby("at")["lower_bound_s"].min()
        ax.plot(line.index, line.to_numpy(), "--", lw=1.1, color=ink(ax), label="lower bound")
    ax.set_xlabel(_axis_name(x, list(frame[x])), fontsize=9)
    ax.set_ylabel("seconds per iteration", fontsize=9)
    ax.set_ylim(0, None)
    shared_legend(ax, dict(zip(*ax.get_legend_handles_labels()[::-1])), "times", list)
    _plain(ax)
    return ax


def plot_regimes(frame: pandas.DataFrame, x: str, y: str, ax: Axes | None = None) -> Any:
    """`bound_by` for one policy, as coloured fields, "no" where it does not fit. Returns the axes.

    Raises PstarError as `plot_times`, and for several policies.
    """
    table = _table(frame, x, y, "bound_by")
    cells: list[list[Any]] = table.to_numpy(object).tolist()
    ax = _axes(ax, (1.6 + 0.95 * table.shape[1], 1.2 + 0.5 * table.shape[0]))
    for row in range(table.shape[0]):
        for column in range(table.shape[1]):
            value = cells[row][column]
            known = isinstance(value, str)  # not known: it does not fit
            name = fill(BINDS_WORDS.get(value, value), 10) if known else "no"
            _field(ax, column, row, BINDS.get(value, NOTHING) if known else NOTHING)
            ax.text(column, row, name, ha="center", va="center", fontsize=9, color=words_colour(value))
    _label(ax, table, x, y)
    return ax


def plot_map(
    table: pandas.DataFrame, x: str, y: str, ax: Axes | None = None, *, unit: str = "", most: float | None = None
) -> Any:
    """Rows are `y`, columns `x`; blue above 0, orange below, darker farther away. Returns the axes.

    most: the darkest field (default: the farthest from 0), for comparable tables.
    """
    from matplotlib import colormaps

    ax = _axes(ax, (1.6 + 0.95 * table.shape[1], 1.2 + 0.5 * table.shape[0]))
    numbers: list[list[float]] = table.to_numpy(float).tolist()
    top = float(most if most is not None else np.nanmax(np.abs(numbers))) or 1.0
    for row in range(table.shape[0]):
        for column in range(table.shape[1]):
            value = numbers[row][column]
            share = 0.0 if np.isnan(value) else min(1.0, abs(value / top))
            shades = colormaps["Oranges" if round(value, 1) < 0 else "Blues"]
            low = 0.2 if round(value, 1) < 0 else 0.05  # a small loss is not the white of 0
            _field(ax, column, row, NOTHING if np.isnan(value) else shades(low + (0.8 - low) * share))
            text = "no" if np.isnan(value) else f"{round(value, 1) + 0.0:.1f}{unit}"  # no "-0.0"
            ax.text(column, row, text, ha="center", va="center", fontsize=8, color="white" if share > 0.8 else "black")
    _label(ax, table, x, y)
    return ax


def _table(frame: pandas.DataFrame, x: str, y: str, value: str) -> pandas.DataFrame:
    frame = _over(frame, [x, y])
    if frame["policy"].nunique() != 1:
        raise PstarError(f"a map shows one policy, not {', '.join(frame['policy'].unique())}; choose one")
    table = frame.pivot(index=y, columns=x, values=value)
    return table.reindex(index=list(dict.fromkeys(frame[y])), columns=list(dict.fromkeys(frame[x])))


def _over(frame: pandas.DataFrame, axes: Sequence[str]) -> pandas.DataFrame:
    for name in (*axes, "policy", "iteration_s"):
        if name not in frame:
            raise PstarError(f"the frame has no column {name!r}, only {', '.join(map(str, frame.columns))}")
    if frame.duplicated([*axes, "policy"]).any():
        axes_of_frame = [name for name in frame if name not in (*COLUMNS, *axes, "policy")]
        others = [str(name) for name in axes_of_frame if frame[name].nunique() > 1]
        raise PstarError(
            f"the frame varies in {', '.join(others)} beside {' and '.join(axes)}; choose one value of {others[0]}"
        )
    return frame.assign(at=[_number(value) for value in frame[axes[0]]])


def _number(value: object) -> float:
    if not isinstance(value, str):
        return float(value)  # type: ignore[arg-type]
    return parse_bytes(value.removesuffix("/s")) / GB


def _axis_name(x: str, values: Sequence[object]) -> str:
    name = x.removeprefix("set.").replace(".", " ").replace("_", "-").replace("gpu", "GPU")
    texts = [value for value in values if isinstance(value, str)]
    unit = (" [GB/s]" if texts[0].endswith("/s") else " [GB]") if texts else ""
    return name + unit


def _label(ax: Axes, table: pandas.DataFrame, x: str, y: str) -> None:

    def words(values: Sequence[object]) -> list[str]:
        return [f"{_number(v):g}" if isinstance(v, str) else str(v) for v in values]

    ax.set_xticks(range(table.shape[1]), words(list(table.columns)), fontsize=8.5)
    ax.set_yticks(range(table.shape[0]), words(list(table.index)), fontsize=8.5)
    ax.set_xlim(-0.5, table.shape[1] - 0.5)
    ax.set_ylim(table.shape[0] - 0.5, -0.5)
    ax.set_xlabel(_axis_name(x, list(table.columns)), fontsize=9)
    ax.set_ylabel(_axis_name(y, list(table.index)), fontsize=9)
    ax.tick_params(length=0)
    for side in ("top", "right", "left", "bottom"):
        ax.spines[side].set_visible(False)


def words_colour(binds: Any) -> str:
    """With a contrast of at least 4.5 to the field."""
    return "white" if BINDS.get(binds, NOTHING) in (BLUE, WINE) else "black"


def _field(ax: Axes, column: int, row: int, colour: Any) -> None:
    from matplotlib.patches import Rectangle

    ax.add_patch(Rectangle((column - 0.48, row - 0.47), 0.96, 0.94, facecolor=colour, edgecolor="none"))


def _axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    if ax is not None:
        return ax
    from matplotlib import pyplot

    made: Axes = pyplot.subplots(figsize=size, layout="constrained")[1]
    return made


def _plain(ax: Axes) -> None:
    ax.tick_params(labelsize=8)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
