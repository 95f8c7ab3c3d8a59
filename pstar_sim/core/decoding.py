"""Values in and out of JSON files, by their types: shared by the files of plans and of timelines.

Rows of a dataclass are written by columns. What is read is held against the type hints; the first thing that does not
fit raises `Wrong`, which names the field and which the reader of a file turns into an error that names the file.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = [
    "Wrong",
    "as_dataclass",
    "brief",
    "decode",
    "from_columns",
    "parse_json",
    "to_columns",
]


class Wrong(Exception):
    """A field that is missing or of the wrong kind. Whoever reads the file turns it into an error that names the
    file."""


def parse_json(text: str) -> object:
    """The value that the text of a file stands for. Raises Wrong saying what is not JSON in it, and where."""
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_key_twice)
    except json.JSONDecodeError as error:
        raise Wrong(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise Wrong("its lists or objects are nested too deeply") from None
    except ValueError as error:  # Python refuses to read a number of thousands of digits
        raise Wrong(f"a number has too many digits: {error}") from None


def _no_constant(name: str) -> object:
    raise Wrong(f"{name} is not a number this file may contain")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise Wrong(f"field {next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return values


def to_columns(cls: type, rows: Iterable[Any]) -> dict[str, list[Any]]:
    """Rows of a dataclass by column; `from_columns` is the reverse."""
    table = list(rows)
    return {f.name: [getattr(row, f.name) for row in table] for f in dataclasses.fields(cls)}


def from_columns(cls: type, table: object, where: str) -> tuple[Any, ...]:
    """Rows of a dataclass from its columns. where: the name of the field, for messages. Raises Wrong."""
    if not isinstance(table, dict):
        raise Wrong(f"field {where!r} is {brief(table)}; it must be an object of columns")
    hints = typing.get_type_hints(cls)
    for name in table:
        if name not in hints:
            raise Wrong(f"field '{where}.{name}' is not known")
    columns: dict[str, tuple[Any, ...]] = {}
    for name, hint in hints.items():
        if name not in table:
            raise Wrong(f"field '{where}.{name}' is missing")
        columns[name] = decode(tuple[hint, ...], table[name], f"{where}.{name}")  # type: ignore[valid-type]
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise Wrong(f"the columns of {where!r} differ in length: {lengths}")
    names = list(columns)
    return tuple(cls(**dict(zip(names, row))) for row in zip(*columns.values()))


def decode(hint: Any, value: object, where: str) -> Any:
    """`value` as the type `hint` says (plain types, enums, dataclasses, X | None, tuples, Mapping[str, X]). where: the
    name of the field, for messages. Raises Wrong."""
    if hint in _PLAIN:
        test, want = _PLAIN[hint]
        if not test(value):
            raise Wrong(f"field {where!r} is {brief(value)}; it must be {want}")
        return float(value) if hint is float else value  # type: ignore[arg-type]
    if hint is object:
        return value
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        (inner,) = (a for a in args if a is not type(None))
        return decode(inner, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise Wrong(f"field {where!r} is {brief(value)}; it must be a list")
        if len(args) == 2 and args[1] is Ellipsis:
            inner = args[0]
            if inner in _PLAIN and inner is not float:
                test, want = _PLAIN[inner]
                for i, item in enumerate(value):
                    if not test(item):
                        raise Wrong(f"field '{where}[{i}]' is {brief(item)}; it must be {want}")
                return tuple(value)
            return tuple(decode(inner, item, f"{where}[{i}]") for i, item in enumerate(value))
        if len(value) != len(args):
            raise Wrong(f"field {where!r} has {len(value)} parts; it must have {len(args)}")
        return tuple(decode(a, item, f"{where}[{i}]") for i, (a, item) in enumerate(zip(args, value)))
    if origin in (Mapping, dict):
        if not isinstance(value, dict):
            raise Wrong(f"field {where!r} is {brief(value)}; it must be an object")
        return {name: decode(args[1], item, f"{where}.{name}") for name, item in value.items()}
    if isinstance(hint, type) and issubclass(hint, str):  # StrEnum
        try:
            return hint(value)
        except ValueError:
            known = ", ".join(member.value for member in hint)  # type: ignore[attr-defined]
            raise Wrong(f"field {where!r} is {brief(value)}; it must be one of {known}") from None
    return as_dataclass(hint, value, where)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_number(value: object) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


_PLAIN: dict[object, tuple[Callable[[object], bool], str]] = {
    int: (_is_int, "a whole number of at most 64 bits"),
    float: (_is_number, "a finite number"),
    str: (lambda v: isinstance(v, str), "a text"),
    bool: (lambda v: isinstance(v, bool), "true or false"),
}


def as_dataclass(cls: type, value: object, where: str, ready: frozenset[str] = frozenset()) -> object:
    """An object of JSON as a dataclass. ready: fields that are decoded already. Raises Wrong."""
    if not isinstance(value, dict):
        raise Wrong(f"field {where!r} is {brief(value)}; it must be an object")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for name in value:
        if name not in fields:
            raise Wrong(f"field '{where}.{name}' is not known")
    given: dict[str, object] = {}
    for name, f in fields.items():
        if name in value:
            given[name] = value[name] if name in ready else decode(hints[name], value[name], f"{where}.{name}")
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise Wrong(f"field '{where}.{name}' is missing")
    return cls(**given)


def brief(value: object) -> str:
    """A value in a message, cut to 60 characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
