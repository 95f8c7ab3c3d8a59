"""A field's possible values, declared there, and words for them: in errors and on pages of formats.

class Host(Table, frozen=True, kw_only=True):
    memory_gb: Annotated[float, between(0.001, 1e5), says("DRAM")]

A bound, choice or `Rule` is checked when the field is read; `want` puts it into words.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from enum import Enum
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal

from msgspec import NODEFAULT, Meta, Struct, UnsetType, structs


class Table(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of TOML (or a JSON object), with its own fields and no others."""


@dataclass(frozen=True)
class Rule:
    """want: the condition in words."""

    test: Callable[[Any], bool]
    want: str


def says(meaning: str) -> Meta:
    """For the field's page."""
    return Meta(description=meaning)


def between(low: float, high: float) -> Meta:
    """Both included. NaN is outside."""
    return Meta(ge=low, le=high)


def least(low: float) -> Meta:
    return Meta(ge=low)


def filled() -> Meta:
    return Meta(min_length=1)


def choice(words: Iterable[str]) -> Meta:
    known = tuple(words)
    return Meta(extra={"rule": Rule(known.__contains__, f"one of {', '.join(known)}")})


def _recent(day: date) -> bool:
    return day.year >= 2015


def _ascending(points: tuple[tuple[float, float], ...]) -> bool:
    return bool(points) and all(a[0] < b[0] for a, b in pairwise(points))


Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""A whole number from 0, of at most 64 bits."""
Text = Annotated[str, Meta(pattern=r"\S")]
"""A text that is not empty."""
Checked = Annotated[
    date, Meta(extra={"rule": Rule(_recent, "a date from 2015 on, without quotes, such as 2026-11-21")})
]
"""The day on which somebody looked a figure up."""
Positive = Annotated[float, Meta(gt=0, lt=1e15)]
"""A number above 0."""
Curve = tuple[tuple[Positive, Positive], ...]
"""A measured curve: [size, rate] pairs, sizes ascending."""


def curve(size: str, rate: str) -> Meta:
    """size, rate: meaning and unit of a pair's numbers."""
    words = f"a list of [{size}, {rate}] pairs of positive numbers, sizes ascending"
    return Meta(extra={"rule": Rule(_ascending, words)})


@dataclass(frozen=True)
class Field:
    name: str
    kind: Any
    required: bool
    default: object = None


@cache
def fields_of(table: type[Struct]) -> dict[str, Field]:
    """As declared; the base's last."""
    base = getattr(table.__base__, "__struct_fields__", ())
    hints = typing.get_type_hints(table, include_extras=True)
    found = {}
    for f in sorted(structs.fields(table), key=lambda f: f.name in base):
        default = f.default if f.default is not NODEFAULT else f.default_factory
        default = default() if callable(default) and f.default is NODEFAULT and default is not NODEFAULT else default
        found[f.encode_name] = Field(f.encode_name, hints[f.name], f.required, default)
    return found


def split(kind: Any) -> tuple[Any, tuple[Any, ...], tuple[Meta, ...]]:
    """(base type, arguments, declared bounds and words), also of "X or nothing"."""
    metas: tuple[Meta, ...] = ()
    while True:
        if typing.get_origin(kind) is Annotated:
            kind, *more = typing.get_args(kind)
            metas += tuple(m for m in more if isinstance(m, Meta))
            continue
        if typing.get_origin(kind) in (typing.Union, types.UnionType):
            arms = [arm for arm in typing.get_args(kind) if arm not in (type(None), UnsetType)]
            if len(arms) == 1:
                kind = arms[0]
                continue
        return typing.get_origin(kind) or kind, typing.get_args(kind), metas


def is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Struct)


def meaning(kind: Any) -> str:
    """What `says` gave."""
    return next((m.description for m in split(kind)[2] if m.description), "")


def rule_of(kind: Any) -> Rule | None:
    rules = (m.extra.get("rule") for m in split(kind)[2] if m.extra)
    return next((r for r in rules if isinstance(r, Rule)), None)


def want(kind: Any, table: str = "an object") -> str:
    """The values that it accepts.

    table: word for one.
    """
    rule = rule_of(kind)
    if rule is not None:
        return rule.want
    base, args, metas = split(kind)
    if base in (typing.Union, types.UnionType):
        return " | ".join(want(arm, table) for arm in args)
    if is_table(base) or base in (dict, Mapping):
        return str(getattr(base, "words", table))
    if isinstance(base, type) and issubclass(base, Enum):
        return _one_of(member.value for member in base)
    in_words = _WANT.get(base)
    return str(base) if in_words is None else in_words(args, metas, table)


def _one_of(values: Iterable[object]) -> str:
    return f"one of {', '.join(map(str, values))}"


def _list(args: tuple[object, ...], metas: Sequence[Meta], table: str) -> str:
    if table != "a table" or not args:
        return "a list"
    some = ", one at least" if any(m.min_length for m in metas) else ""
    return f"a list of {_entries(args)}{some}"


_WANT: dict[object, Callable[[tuple[Any, ...], Sequence[Meta], str], str]] = {
    Literal: lambda args, metas, table: _one_of(args),
    list: _list,
    tuple: _list,
    int: lambda args, metas, table: _number("a whole number", int, metas),
    float: lambda args, metas, table: _number("a number", float, metas),
    str: lambda args, metas, table: "a text that is not empty" if any(m.pattern for m in metas) else "a text",
    bool: lambda args, metas, table: "true or false",
}
"""Type -> function that says in words what it accepts, from (arguments of the type, notes, word for a table)."""


def _entries(args: tuple[object, ...]) -> str:
    """Such as "texts", "tables", "numbers", or "2 whole numbers" of a tuple of fixed length."""
    base = split(args[0])[0]
    words = "tables" if is_table(base) else {int: "whole numbers", float: "numbers"}.get(base, "texts")
    return words if len(args) == 1 or args[-1] is Ellipsis else f"{len(args)} {words}"


def _number(words: str, base: type, metas: Sequence[Meta]) -> str:
    above, below = (next((getattr(m, key) for m in metas if getattr(m, key) is not None), None) for key in ("gt", "lt"))
    if above is not None:
        return f"{words} above {above:g}" + (f" and below {below:g}" if below is not None else "")
    low = next((m.ge for m in metas if m.ge is not None), None)
    high = next((m.le for m in metas if m.le is not None), None)
    if low is None or low <= -(2**63):
        return f"{words} of at most 64 bits" if base is int else "a finite number"
    if high is None or high == 2**63 - 1:
        return f"{words} of at least {low:g}" + (" (64 bits)" if high else "")
    return f"{words} from {low:g} to {high:g}"
