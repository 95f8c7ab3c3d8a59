"""Figures of a machine's parts. A figure is declared once, at its attribute: its key in a TOML file, range and meaning
there, and path for `--set`. Types of the files' tables, reading, writing, overrides, checks and pages of the
documentation follow.

class Host:
    memory_bytes: Annotated[int, Figure("memory_gb", Gigabytes, "DRAM", path="memory")]

Attributes are in SI units; a key's ending is the unit in a file: gb is 1e9 bytes, gb_per_s 1e9 bytes per second, tflops
1e12 flops per second, us 1e-6 s.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Annotated, Any, Literal

from msgspec import NODEFAULT, defstruct

from pstar_sim.arguments import flag, number, whole
from pstar_sim.errors import CatalogError
from pstar_sim.quantities import COUNT, FLAG, FLOPS, MONEY, PARAMS, RATE, SECONDS, SIZE, Quantity
from pstar_sim.schema.fields import Checked, Table, Text, between, says, split
from pstar_sim.units import GB, TB

Gigabytes = Annotated[float, between(0.001, 1e5)]
Rate = Annotated[float, between(0.01, 2e4)]
LinkRate = Annotated[float, between(0.001, 2e3)]
Tflops = Annotated[float, between(1e-4, 1e5)]
Share = Annotated[float, between(0.01, 1)]
AdamRate = Annotated[float, between(1e-3, 1e3)]
Latency = Annotated[float, between(0, 1e5)]
Known = Literal["measured", "fitted", "datasheet", "assumed"]

_UNITS: tuple[tuple[str, Quantity, float], ...] = (
    ("gb_per_s", RATE, GB), ("gparams_per_s", PARAMS, 1e9), ("gparams_core", PARAMS, 1e9), ("tflops", FLOPS, 1e12),
    ("gb", SIZE, GB), ("tb", SIZE, TB), ("us", SECONDS, 1e-6), ("usd_per_hour", MONEY, 1),
)  # fmt: skip
"""Ending of a key -> how its value is written in an override, and the SI value of 1 in a file."""


class Origin(Table, frozen=True, kw_only=True):
    """Where the figures of a table come from."""

    source: Annotated[Text, says("where the figures come from; a user's file is its own source")]
    checked: Annotated[Checked, says("date when the figure was looked up; of a user's file, when it was last written")]


@dataclass(frozen=True)
class Key:
    """A key of a part's table in a TOML file.

    kind: with its range.
    says: meaning there; "" in the calibrated table only.
    default: None if it may be left out.
    known: of a shipped figure, unless its entry says otherwise.
    """

    name: str
    kind: Any
    says: str = ""
    default: Any = NODEFAULT
    known: Known = "assumed"
    attribute: str = ""

    def field(self, meaning: str, *, name: str, optional: bool = False) -> tuple[Any, ...]:
        """For `defstruct`."""
        default = None if optional else self.default
        kind: Any = Annotated[self.kind | None if default is None else self.kind, says(meaning)]
        return (name, kind) if default is NODEFAULT else (name, kind, default)


@dataclass(frozen=True)
class Figure(Key):
    """Its value is a figure of the part.

    path: of an override, behind the part's name; "" if it cannot be set.
    calibrated: meaning in the calibrated table, "" for a figure not there.
    calibrated_name: where that key differs.
    share: key of the share that the part reaches.
    item: key in a mapping attribute.
    written: table of a measured part's file.
    worst: of several values, None: the longest time, or the least of others.
    whole: a whole number.
    """

    path: str = ""
    calibrated: str = ""
    calibrated_name: str = ""
    share: str = ""
    item: str = ""
    written: Literal["both", "entry", "calibrated"] = "both"
    worst: Callable[[Sequence[Any]], Any] | None = None
    whole: bool = False

    @cached_property
    def unit(self) -> tuple[Quantity, float]:
        """As written in an override, and the SI value of 1 in a file."""
        units = (row[1:] for row in _UNITS if self.name == row[0] or self.name.endswith(f"_{row[0]}"))
        return next(units, (FLAG if self.kind is bool else COUNT, 1))

    @cached_property
    def range(self) -> tuple[float, float]:
        """In SI units."""
        limits: tuple[Any, Any] = next(((m.ge, m.le) for m in split(self.kind)[2] if m.ge is not None), (0, 1))
        low, high = (float(f"{limit * self.unit[1]:.12g}") for limit in limits)
        return low, high

    @property
    def calibrated_key(self) -> str:
        return self.calibrated_name or self.name

    def get(self, part: object) -> Any:
        """None where the part has no such figure."""
        value = getattr(part, self.attribute)
        return value.get(self.item) if self.item else value

    def put(self, part: Any, value: float) -> Any:
        figure: Any = round(value) if self.whole else bool(value) if self.kind is bool else value
        if self.item:
            figure = {**getattr(part, self.attribute), self.item: figure}
        return replace(part, **{self.attribute: figure})

    def from_file(self, value: Any) -> Any:
        """In SI units."""
        scale = self.unit[1]
        if scale == 1:
            return value
        return round(value * scale) if self.whole else value * scale

    def of(self, part: object) -> Any:
        """As in a file; None where the part has none."""
        value, scale = self.get(part), self.unit[1]
        if value is None or scale == 1:
            return value
        return value / scale if scale > 1 else value * round(1 / scale)


@dataclass(frozen=True)
class Points(Figure):
    """A measured curve, in the calibrated table only.

    best: key of its rate,
    exact: which is one of the curve's, not its best or less.
    units: SI values of 1 in the file.
    """

    best: str = ""
    exact: bool = False
    units: tuple[float, float] = (1, 1)

    def from_file(self, value: Any) -> Any:
        return tuple((size * self.units[0], rate * self.units[1]) for size, rate in value or ())

    def of(self, part: object) -> Any:
        return [[size / self.units[0], rate / self.units[1]] for size, rate in self.get(part) or ()] or None


@cache
def keys_of(part: type) -> tuple[Key, ...]:
    """Declared by the attributes of a part, in order."""
    found: list[Key] = []
    for name, hint in typing.get_type_hints(part, include_extras=True).items():
        for note in getattr(hint, "__metadata__", ()):
            if isinstance(note, Figure):
                found.append(replace(note, attribute=name, whole=split(hint)[0] is int))
            elif isinstance(note, Key):
                found.append(replace(note, attribute=name))
    return tuple(found)


@cache
def figures_of(part: type) -> tuple[Figure, ...]:
    return tuple(key for key in keys_of(part) if isinstance(key, Figure))


def calibrated_figures(part: type) -> list[Figure]:
    """Rates, curves, and figures that stand nowhere else."""

    def place(figure: Figure) -> int:
        return 1 if isinstance(figure, Points) else 2 if figure.written == "calibrated" else 0

    return sorted((figure for figure in figures_of(part) if figure.calibrated), key=place)


def table_of(part: type, what: str, calibrated: str = "", *, known: Known | None = None) -> type[Table]:
    """known: only figures known so."""
    keys = [key for key in keys_of(part) if key.says and known in (None, key.known)]
    fields = [key.field(key.says, name=key.name) for key in keys]
    if calibrated:
        figures = calibrated_figures(part)
        effective = [f.field(f.calibrated, name=f.calibrated_key, optional=True) for f in figures]
        below: Any = Annotated[
            _table(f"Calibrated{part.__name__}", effective, calibrated) | None,
            says("effective values; they are used as they are"),
        ]
        fields.append(("calibrated", below, None))
    return _table(f"{part.__name__}Entry", fields, what)


def _table(name: str, fields: list[tuple[Any, ...]], what: str) -> type[Table]:
    doc = {"__doc__": what}
    table = defstruct(name, fields, bases=(Origin,), namespace=doc, frozen=True, kw_only=True)
    return typing.cast("type[Table]", table)


def check_figures(where: str, part: object) -> None:
    """Raise CatalogError unless figures are numbers, positive unless the range begins at 0. Missing ones pass."""
    kind: type = type(part)
    for check, name in _checks(kind):
        value = getattr(part, name)
        if value is not None or getattr(kind, name, ...) is not None:
            check(f"{where}: {name}", value, error=CatalogError)


@cache
def _checks(part: type) -> tuple[tuple[Callable[..., object], str], ...]:
    def natural(name: str, value: object, *, error: type[CatalogError]) -> float:
        return number(name, value, also=True, error=error)

    kinds = {bool: flag, int: whole}
    figures = [f for f in figures_of(part) if not f.item and split(f.kind)[0] in (bool, int, float)]
    return tuple(
        (kinds.get(split(f.kind)[0], natural if f.range[0] == 0 else number), f.attribute)  # type: ignore[misc]
        for f in figures
    )


def worst_of(parts: Sequence[Any]) -> dict[str, Any]:
    """By attribute, None where a part has none, without mappings and curves."""
    found: dict[str, Any] = {}
    kind: type = type(parts[0])
    for figure in figures_of(kind):
        if figure.item or isinstance(figure, Points):
            continue
        values = [figure.get(part) for part in parts]
        worst = figure.worst or (max if figure.unit[0] is SECONDS else min)
        found[figure.attribute] = None if None in values else worst(values)
    return found
