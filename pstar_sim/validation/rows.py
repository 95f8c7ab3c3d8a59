"""Rows: the published measurements as values. Knows the file's columns, not what they are used for."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from pstar_sim.errors import CatalogError

__all__ = ["PublishedRow", "number", "published_rows", "read_rows"]

COLUMNS = (
    "system",
    "hardware",
    "gpus",
    "params",
    "layers_hidden_heads",
    "seq_len",
    "batch",
    "metric",
    "value",
    "source",
)
_SUFFIX = {"": 1.0, "B": 1e9, "T": 1e12}
_VALUE = re.compile(r"^(\d+(?:\.\d+)?(?:e\d+)?)(?:-(\d+(?:\.\d+)?))?([BT]?)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRow:
    """One published figure, as written.

    line: line of the file, 1 = the first after the header.

    value: in the unit that the metric's name ends with; the middle where a range is published.
    """

    line: int
    system: str
    hardware: str
    gpus: int
    params: str
    shape: str
    sequence: str
    batch: str
    metric: str
    value: float
    source: str

    @property
    def run(self) -> tuple[str, ...]:
        """What one execution of one program produced: rows that agree in everything but the metric."""
        return (
            self.system,
            self.hardware,
            str(self.gpus),
            self.params,
            self.shape,
            self.sequence,
            self.batch,
            self.source,
        )


def number(text: str) -> float:
    """A published figure: plain, with B (1e9) or T (1e12), or a range, which counts as its middle. Raises
    ValueError."""
    match = _VALUE.match(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a figure such as 12.5, 18B or 25680-26756")
    low, high, suffix = match.groups()
    middle = float(low) if high is None else (float(low) + float(high)) / 2
    return middle * _SUFFIX[suffix]


def read_rows(file: str, text: str) -> tuple[PublishedRow, ...]:
    """The rows of a measurements file. Raises CatalogError naming the line and what is wrong with it."""
    table = csv.DictReader(io.StringIO(text))
    if tuple(table.fieldnames or ()) != COLUMNS:
        raise CatalogError(
            f"{file}: columns are {', '.join(table.fieldnames or ())}; they must be {', '.join(COLUMNS)}"
        )
    rows: list[PublishedRow] = []
    for line, raw in enumerate(table, 1):
        try:
            value, gpus = number(raw["value"]), int(raw["gpus"])
        except ValueError as error:
            raise CatalogError(f"{file}, row {line}: {error}") from error
        rows.append(
            PublishedRow(
                line=line,
                system=raw["system"],
                hardware=raw["hardware"],
                gpus=gpus,
                params=raw["params"],
                shape=raw["layers_hidden_heads"],
                sequence=raw["seq_len"],
                batch=raw["batch"],
                metric=raw["metric"],
                value=value,
                source=raw["source"],
            )
        )
    return tuple(rows)


@cache
def published_rows() -> tuple[PublishedRow, ...]:
    """The rows shipped with the project."""
    text = (files("pstar_sim.validation") / "data" / "measurements.csv").read_text(encoding="utf-8")
    return read_rows("measurements.csv", text)
