"""Measured and predicted figures, as a table and JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pstar_sim.terminal import table_text
from pstar_sim.units import format_bytes, format_s

_FORMS: Mapping[str, Callable[[float], str]] = {
    "B": format_bytes,
    "s": format_s,
    "/s": lambda rate: f"{rate:,.0f} /s",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """In its base unit ("B", "s" or "/s")."""

    name: str
    unit: str
    predicted: float
    measured: float

    @property
    def difference(self) -> float:
        """(measured - predicted) / predicted, 0 where both are 0, infinite where the prediction is."""
        if self.predicted == self.measured:
            return 0.0
        return (self.measured - self.predicted) / self.predicted if self.predicted else float("inf")

    def words(self) -> tuple[str, str, str, str]:
        form = _FORMS[self.unit]
        return self.name, form(self.predicted), form(self.measured), self._difference(form)

    def _difference(self, form: Callable[[float], str]) -> str:
        """In percent, or in its unit above twice the prediction: beside a small floor percentages say nothing."""
        if self.predicted == self.measured:
            return "equal"
        if self.difference > 1:
            return f"+{form(self.measured - self.predicted)}"
        return f"{self.difference:+.1%}" if abs(self.difference) >= 5e-4 else "< 0.1%"


def figures(predicted: Mapping[str, float], measured: Mapping[str, float]) -> list[Figure]:
    """Of keys that both have, ending in "_s" or "_bytes"."""
    rows = []
    for key, value in predicted.items():
        if key in measured:
            name, _, unit = key.rpartition("_")
            rows.append(Figure(name.replace("_", " "), "B" if unit == "bytes" else "s", value, measured[key]))
    return rows


def figures_text(rows: Sequence[Figure], *, width: int) -> str:
    return table_text(("", "predicted", "measured", "difference"), [row.words() for row in rows], width=width)


def losses_text(columns: Mapping[str, Sequence[float]], *, width: int, first: int = 0, most: int | None = None) -> str:
    """A column per run, and the largest relative difference to the first.

    most: rows: the first and last of more steps.
    """
    heads = ["step", *columns, *(["relative difference"] if len(columns) > 1 else [])]
    rows = list(enumerate(zip(*columns.values()), start=first))
    if most is not None and len(rows) > most:
        rows = rows[: most // 2] + rows[len(rows) - (most - most // 2) :]
    table = []
    for step, losses in rows:
        cells = [str(step), *(f"{loss:.6f}" for loss in losses)]
        if len(losses) > 1:
            worst = max(abs(loss - losses[0]) for loss in losses[1:])
            cells.append(f"{worst / abs(losses[0]):.1e}" if losses[0] else f"{worst:.1e}")
        table.append(cells)
    return table_text(heads, table, width=width)
