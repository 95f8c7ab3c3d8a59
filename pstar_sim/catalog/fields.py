"""Strict reading of catalog entries: every field has a kind and a sensible range, and nothing else is accepted.

An error names the file, the entry, the field, the value and what would do. Knows TOML tables, not what they are for.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from itertools import pairwise
from pathlib import Path

from pstar_sim.catalog.curves import Curve
from pstar_sim.errors import CatalogError
from pstar_sim.python310 import TOMLDecodeError, toml_loads

__all__ = [
    "Choice",
    "Date",
    "Entry",
    "Field",
    "Flag",
    "Number",
    "Points",
    "Table",
    "Tables",
    "Text",
    "Texts",
    "one_of",
    "parse_toml",
    "read_toml",
]


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number in [low, high]; whole: an integer."""

    low: float
    high: float
    whole: bool = False
    required: bool = True

    @property
    def want(self) -> str:
        return f"a {'whole ' if self.whole else ''}number from {self.low:g} to {self.high:g}"

    def takes(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else (int, float)):
            return False
        return math.isfinite(value) and self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Text:
    required: bool = True
    want: str = "a text that is not empty"

    def takes(self, value: object) -> bool:
        return isinstance(value, str) and bool(value.strip())


@dataclass(frozen=True, slots=True)
class Choice:
    of: tuple[str, ...]
    required: bool = True

    @property
    def want(self) -> str:
        return f"one of {', '.join(self.of)}"

    def takes(self, value: object) -> bool:
        return value in self.of


@dataclass(frozen=True, slots=True)
class Texts:
    required: bool = True
    want: str = "a list of texts"

    def takes(self, value: object) -> bool:
        return isinstance(value, list) and all(isinstance(v, str) and v for v in value)


@dataclass(frozen=True, slots=True)
class Points:
    """A measured curve: [size, rate] pairs of finite positive numbers, sizes ascending. size, rate: what they are."""

    size: str
    rate: str
    required: bool = False

    @property
    def want(self) -> str:
        return f"a list of [{self.size}, {self.rate}] pairs of positive numbers, sizes ascending"

    def takes(self, value: object) -> bool:
        if not isinstance(value, list) or not value:
            return False
        for pair in value:
            if not isinstance(pair, list) or len(pair) != 2:
                return False
            if any(isinstance(v, bool) or not isinstance(v, (int, float)) or not 0 < v < 1e15 for v in pair):
                return False
        return all(a[0] < b[0] for a, b in pairwise(value))


@dataclass(frozen=True, slots=True)
class Flag:
    required: bool = True
    want: str = "true or false"

    def takes(self, value: object) -> bool:
        return isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Date:
    required: bool = True
    want: str = "a date from 2015 on, without quotes, such as 2026-11-21"

    def takes(self, value: object) -> bool:
        return isinstance(value, date) and not isinstance(value, datetime) and value.year >= 2015


@dataclass(frozen=True, slots=True)
class Table:
    """A sub-table with fields of its own."""

    fields: Mapping[str, Field]
    required: bool = False
    want: str = "a table"

    def takes(self, value: object) -> bool:
        return isinstance(value, dict)


@dataclass(frozen=True, slots=True)
class Tables:
    """A list of sub-tables ([[ENTRY.field]]), each with the same fields."""

    fields: Mapping[str, Field]
    required: bool = False
    want: str = "a list of tables"

    def takes(self, value: object) -> bool:
        return isinstance(value, list) and bool(value)


Field = Number | Text | Choice | Texts | Points | Flag | Date | Table | Tables


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry whose fields have been checked. file: where it was written, for messages."""

    file: str
    name: str
    values: Mapping[str, object]

    @classmethod
    def read(cls, file: str, name: str, raw: object, fields: Mapping[str, Field]) -> Entry:
        """Raises CatalogError for a missing, unknown or absurd field."""
        if not isinstance(raw, dict):
            raise CatalogError(f"{file}: {name} = {raw!r}; must be a table: [{name}] and its fields below it")
        for field, value in raw.items():
            if field not in fields:
                near = difflib.get_close_matches(field, fields, n=1)
                hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(fields)}"
                raise CatalogError(f"{file}: [{name}] {field} = {value!r} is not a known field; {hint}")
        values: dict[str, object] = {}
        for field, kind in fields.items():
            if field not in raw:
                if kind.required:
                    raise CatalogError(f"{file}: [{name}] {field} is missing; it must be {kind.want}")
                continue
            value = raw[field]
            if not kind.takes(value):
                raise CatalogError(f"{file}: [{name}] {field} = {value!r}; must be {kind.want}")
            if isinstance(kind, Table):
                value = cls.read(file, f"{name}.{field}", value, kind.fields)
            elif isinstance(kind, Tables):
                assert isinstance(value, list)
                value = [cls.read(file, f"{name}.{field}[{i}]", row, kind.fields) for i, row in enumerate(value)]
            values[field] = value
        return cls(file=file, name=name, values=values)

    def has(self, field: str) -> bool:
        return field in self.values

    def number(self, field: str) -> float:
        value = self.values[field]
        assert isinstance(value, (int, float))
        return float(value)

    def whole(self, field: str, default: int = 0) -> int:
        value = self.values.get(field, default)
        assert isinstance(value, int)
        return value

    def text(self, field: str, default: str = "") -> str:
        value = self.values.get(field, default)
        assert isinstance(value, str)
        return value

    def texts(self, field: str) -> tuple[str, ...]:
        value = self.values.get(field, [])
        assert isinstance(value, list)
        return tuple(value)

    def curve(self, field: str, size_unit: float, rate_unit: float) -> Curve:
        """A curve in base units; () where it is not given."""
        value = self.values.get(field, [])
        assert isinstance(value, list)
        return tuple((float(size) * size_unit, float(rate) * rate_unit) for size, rate in value)

    def flag(self, field: str, default: bool = False) -> bool:
        value = self.values.get(field, default)
        assert isinstance(value, bool)
        return value

    def table(self, field: str) -> Entry | None:
        value = self.values.get(field)
        assert value is None or isinstance(value, Entry)
        return value

    def tables(self, field: str) -> tuple[Entry, ...]:
        value = self.values.get(field, [])
        assert isinstance(value, list)
        return tuple(value)

    def refuse(self, field: str, want: str) -> CatalogError:
        """The error for a value that is in range but contradicts another field."""
        return CatalogError(f"{self.file}: [{self.name}] {field} = {self.values.get(field)!r}; must be {want}")

    def at_most(self, field: str, other: str, *, strictly: bool = False) -> None:
        """Raises CatalogError unless `field` <= `other` (or < where strictly)."""
        a, b = self.number(field), self.number(other)
        if a > b or (strictly and a == b):
            raise self.refuse(field, f"{'less than' if strictly else 'at most'} {other} = {self.values[other]!r}")


def parse_toml(file: str, text: str) -> dict[str, object]:
    """Raises CatalogError for a text that is not TOML."""
    try:
        return toml_loads(text)
    except TOMLDecodeError as error:
        raise CatalogError(f"{file}: not a TOML file: {error}") from None


def read_toml(path: Path) -> dict[str, object]:
    """Raises CatalogError for a file that cannot be read or is not TOML."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise CatalogError(f"{path}: not a text file in UTF-8") from None
    except OSError as error:
        raise CatalogError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_toml(str(path), text)


def one_of(what: str, entry: Entry, field: str, known: Sequence[str]) -> str:
    """The value of a field that names an entry of another table. Raises CatalogError if there is none of that name."""
    name = entry.text(field)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = near[0] if near else ", ".join(known)
        raise entry.refuse(field, f"the name of a {what}, such as {hint}")
    return name
