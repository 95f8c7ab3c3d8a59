"""Dataclasses in JSON files: msgspec reads a derived Struct, of whose values the dataclass is made, so that its own
checks run.

Whole numbers have at most 64 bits, others are finite. A format may store rows by columns: `Annotated[Workload,
columns(tensors=Tensor)]`.
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any, ClassVar, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType, defstruct

from pstar_sim.errors import PstarError
from pstar_sim.schema.fields import is_table, split
from pstar_sim.schema.reading import REFUSED, Fault, convert

T = TypeVar("T")
_tuple: Any = tuple  # Any: mypy does not follow types that are made at run time
_union: Any = typing.Union
_dict: Any = dict
_annotated: Any = Annotated
_Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]


@dataclass(frozen=True)
class _ColumnFields:
    rows: tuple[tuple[str, type], ...]


def columns(**rows: type) -> object:
    """Fields held by columns: field -> dataclass of a row."""
    return _ColumnFields(tuple(rows.items()))


def to_columns(cls: type, rows: Iterable[Any]) -> dict[str, list[Any]]:
    """Empty tuples' columns are left out."""
    table = list(rows)
    columns = {f.name: [getattr(row, f.name) for row in table] for f in dataclasses.fields(cls)}
    spare = [f.name for f in dataclasses.fields(cls) if f.default == ()]
    return {name: column for name, column in columns.items() if name not in spare or any(column)}


def read_record(kind: type[T] | Any, values: object) -> T:
    """Raises Fault, also where a dataclass refuses."""
    found: T = made(kind, convert(file_kind(kind), values))
    return found


def made(kind: type[T] | Any, form: Any) -> T:
    """form: of `file_kind(kind)`. Raises Fault where a dataclass refuses."""
    maker = _maker(file_kind(kind))
    return typing.cast(T, form if maker is None else maker(form))


def file_kind(kind: Any) -> Any:
    """The type that stands for this one in a file."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _annotated_kind(*args)
    if origin in (typing.Union, types.UnionType):
        return _union[tuple(file_kind(arm) for arm in args)]
    if origin is tuple:
        return _tuple[tuple(arm if arm is Ellipsis else file_kind(arm) for arm in args)]
    if origin in (Mapping, dict):
        return _dict[str, file_kind(args[1])]
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _record(typing.cast(type, kind), None)
    return {int: _Whole, float: _Finite, object: Any}.get(kind, kind)


def _annotated_kind(base: Any, *notes: object) -> Any:
    """Notes that are bounds and words stay."""
    by_column = next((note for note in notes if isinstance(note, _ColumnFields)), None)
    words = [note for note in notes if isinstance(note, Meta)]
    bounded = any(m.ge is not None or m.gt is not None for m in words)
    kind = base if bounded else file_kind(base) if by_column is None else _record(base, by_column)
    return _annotated[(kind, *words)] if words else kind


_CLASS_OF: dict[type[Struct], type] = {}


def record_class(table: type[Struct]) -> type | None:
    """That it was derived from, or whose columns it holds."""
    return _CLASS_OF.get(table)


@cache
def _record(cls: type, by_column: _ColumnFields | None) -> type[Struct]:
    hints = typing.get_type_hints(cls, include_extras=True)
    for name, row in by_column.rows if by_column is not None else ():
        hints[name] = _column_table(row)
    fields: list[Any] = []
    for f in dataclasses.fields(typing.cast(Any, cls)):
        kind = file_kind(hints[f.name])
        needed = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        fields.append((f.name, kind) if needed else (f.name, _union[kind, UnsetType], UNSET))
    table = defstruct(cls.__name__, fields, frozen=True, kw_only=True, forbid_unknown_fields=True)
    _CLASS_OF[table] = cls
    return table


class _Column(Struct):
    """Base of the tables that hold rows by columns."""

    words: ClassVar[str] = "an object of columns"


@cache
def _column_table(cls: Any) -> type[Struct]:
    hints = typing.get_type_hints(cls, include_extras=True)
    fields: list[Any] = []
    for f in dataclasses.fields(cls):
        column = _tuple[file_kind(hints[f.name]), ...]
        fields.append((f.name, _union[column, UnsetType], UNSET) if f.default == () else (f.name, column))
    name = f"Columns of {cls.__name__}"
    table = defstruct(name, fields, bases=(_Column,), frozen=True, kw_only=True, forbid_unknown_fields=True)
    _CLASS_OF[table] = cls
    return table


_Maker = Callable[[Any], Any]


def _maker(kind: Any) -> _Maker | None:
    """msgspec's value -> this type's, None where both are the same."""
    base, args, _ = split(kind)
    if is_table(base):
        if base in _CLASS_OF:
            return _optional(_rows if issubclass(base, _Column) else _made)
    elif base is tuple and args and args[-1] is Ellipsis:
        if (inner := _maker(args[0])) is not None:
            return _optional(partial(_each, inner))
    elif base is dict:
        if (inner := _maker(args[1])) is not None:
            return _optional(partial(_each_value, inner))
    return None


def _each(make: _Maker, held: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_under(i, make, item) for i, item in enumerate(held))


def _each_value(make: _Maker, held: dict[str, Any]) -> dict[str, Any]:
    return {key: _under(key, make, item) for key, item in held.items()}


def _optional(make: _Maker) -> _Maker:
    return lambda held: None if held is None else make(held)


def _under(key: str | int, make: _Maker, held: object) -> Any:
    try:
        return make(held)
    except Fault as fault:
        raise fault.under(key) from None


@cache
def _makers(table: type[Struct]) -> tuple[tuple[str, _Maker | None], ...]:
    hints = typing.get_type_hints(table, include_extras=True)
    return tuple((name, _maker(hints[name])) for name in table.__struct_fields__)


def _made(held: Struct) -> Any:
    given = {}
    for name, make in _makers(type(held)):
        value = getattr(held, name)
        if value is not UNSET:
            given[name] = value if make is None else _under(name, make, value)
    try:
        return _CLASS_OF[type(held)](**given)
    except PstarError as error:
        raise Fault((), REFUSED, str(error)) from None


def _rows(held: Struct) -> tuple[Any, ...]:
    names = [name for name in held.__struct_fields__ if getattr(held, name) is not UNSET]
    table = [getattr(held, name) for name in names]
    if len({len(column) for column in table}) > 1:
        lengths = {name: len(column) for name, column in zip(names, table)}
        raise Fault((), REFUSED, f"its columns differ in length: {lengths}")
    cls = _CLASS_OF[type(held)]
    return tuple(cls(**dict(zip(names, row))) for row in zip(*table))
