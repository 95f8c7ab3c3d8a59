"""What a run showed beside what was predicted: figures, their table, and the JSON of both. Knows results only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pstar_sim.units import format_bytes, format_s

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Figure", "figures", "figures_table", "losses_table"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity, predicted and measured, in the unit's base ("B" or "s")."""

    name: str
    unit: str
    predicted: float
    measured: float

    @property
    def difference(self) -> float:
        """(measured - predicted) / predicted; 0 where both are 0, infinite where only the prediction is."""
        if self.predicted == self.measured:
            return 0.0
        return (self.measured - self.predicted) / self.predicted if self.predicted else float("inf")

    def words(self) -> tuple[str, str, str, str]:
        form = format_bytes if self.unit == "B" else format_s
        difference = "equal" if self.predicted == self.measured else f"{self.difference:+.1%}"
        return self.name, form(self.predicted), form(self.measured), difference


def figures(predicted: Mapping[str, float], measured: Mapping[str, float]) -> list[Figure]:
    """Figures of the keys both have, in order: a key ends in "_s" (seconds) or "_bytes"."""
    rows = []
    for key, value in predicted.items():
        if key in measured:
            name, _, unit = key.rpartition("_")
            rows.append(Figure(name.replace("_", " "), "B" if unit == "bytes" else "s", value, measured[key]))
    return rows


def figures_table(rows: Sequence[Figure]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    table.add_column("")
    for name in ("predicted", "measured", "difference"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row.words())
    return table


def losses_table(columns: Mapping[str, Sequence[float]], *, first: int = 0, most: int | None = None) -> Table:
    """Losses a step, a column a run, and the largest relative difference to the first column on each row. first: the
    number of the first step. most: rows, where there are more steps: of the first and the last ones."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    table.add_column("step", justify="right")
    for name in columns:
        table.add_column(name, justify="right")
    if len(columns) > 1:
        table.add_column("relative\ndifference", justify="right")
    rows = list(enumerate(zip(*columns.values()), start=first))
    if most is not None and len(rows) > most:
        rows = rows[: most // 2] + rows[len(rows) - (most - most // 2) :]
    for step, losses in rows:
        cells = [str(step), *(f"{loss:.6f}" for loss in losses)]
        if len(losses) > 1:
            worst = max(abs(loss - losses[0]) for loss in losses[1:])
            cells.append(f"{worst / abs(losses[0]):.1e}" if losses[0] else f"{worst:.1e}")
        table.add_row(*cells)
    return table
