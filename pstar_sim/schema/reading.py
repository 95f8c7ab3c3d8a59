"""Values into declared types, by msgspec; where it refuses, `Fault`s are found from the top down."""

from __future__ import annotations

import difflib
import json
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from pstar_sim.errors import CatalogError
from pstar_sim.schema.fields import Rule, fields_of, is_table, rule_of, split, want

T = TypeVar("T")
Path = tuple[str | int, ...]
_PLAIN = (date, datetime)  # types that TOML has beside JSON's: TOML has dates, so a text is not a date


class Fault(Exception):
    """A value of the wrong type.

    path: keys and indices to it.
    value: `MISSING` without one.
    want: what would fit, in words.
    known: keys, where one is unknown.
    """

    def __init__(self, path: Path, value: object, want: str, known: tuple[str, ...] | None = None) -> None:
        super().__init__(path, value, want)
        self.path = path
        self.value = value
        self.want = want
        self.known = known

    def under(self, key: str | int) -> Fault:
        """One table or list further up."""
        return Fault((key, *self.path), self.value, self.want, self.known)

    def in_json(self) -> str:
        """Such as "field 'machine.host.cores' is 0; it must be ..."."""
        where = dotted(self.path)
        if self.value is REFUSED:
            return f"field {where!r}: {self.want}" if where else self.want
        if self.value is MISSING:
            return f"field {where!r} is missing"
        if self.known is not None:
            near = nearest(str(self.path[-1]), self.known)
            return f"field {where!r} is not known" + (f"; did you mean {near}?" if near else "")
        return f"field {where!r} is {brief(self.value)}; it {self.want}"

    def in_toml(self, file: str, name: str) -> str:
        """Such as "my.toml: [gpus.mine.calibrated] usable_gb = 0; must be ..."."""
        if not self.path:
            return f"{file}: {name} = {self.value!r}; must be a table: [{name}] and its fields below it"
        *above, field = self.path
        place = f"{file}: [{dotted((name, *above))}] {field}"
        if isinstance(field, int):
            place = f"{file}: {dotted((name, *self.path))}"
        if self.value is MISSING:
            return f"{place} is missing; it {self.want}"
        if self.known is not None:
            near = nearest(str(field), self.known)
            hint = f"did you mean {near}?" if near else f"it takes {', '.join(self.known)}"
            return f"{place} = {self.value!r} is not a known field; {hint}"
        return f"{place} = {self.value!r}; {self.want}"


MISSING = object()
REFUSED = object()


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word most like `word`, None if none is enough."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return near[0] if near else None


def dotted(path: Path) -> str:
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return text.removeprefix(".")


def brief(value: object) -> str:
    """As JSON, cut to 60 characters."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def convert(kind: type[T] | Any, value: object) -> T:
    """value: made of plain values. Raises the first Fault."""
    found, faults = _read(kind, value, "an object", whole=False)
    for fault in faults:
        raise fault
    return typing.cast(T, found)


def read_table(kind: type[T], file: str, name: str, raw: object) -> T:
    """Raises CatalogError with every fault: file, entry, field, value and what would do."""
    found, faults = _read(kind, raw, "a table", whole=True)
    wrong = Refusals()
    wrong.errors += [CatalogError(fault.in_toml(file, name)) for fault in faults]
    wrong.say()
    return typing.cast(T, found)


class Refusals:
    """All that is wrong with a file, for one error."""

    def __init__(self) -> None:
        self.errors: list[CatalogError] = []

    def of(self, make: Callable[[], T]) -> T:
        """What `make` returns, or nothing to be used, where it refuses: `say` raises then."""
        try:
            return make()
        except CatalogError as error:
            self.errors.append(error)
            return typing.cast(T, None)

    def say(self) -> None:
        """Raises what there is as one error, a line each."""
        lines = list(dict.fromkeys(str(error) for error in self.errors))
        if lines:
            raise CatalogError("\n".join(lines))


def _read(kind: Any, value: object, word: str, *, whole: bool) -> tuple[Any, Iterable[Fault]]:
    try:
        found = msgspec.convert(value, kind, builtin_types=_PLAIN)
    except msgspec.ValidationError as error:
        return None, _or_else(_faults(kind, value, (), word, whole), Fault((), REFUSED, str(error)))
    rule = rule_of(kind)
    if rule is not None and not rule.test(found):
        return None, [Fault((), value, f"must be {rule.want}")]
    return found, _against_rules(found, ())


def _or_else(faults: Iterator[Fault], only: Fault) -> Iterator[Fault]:
    first = next(faults, only)
    yield first
    yield from faults


def _faults(kind: Any, value: object, path: Path, word: str, whole: bool) -> Iterator[Fault]:
    """From the top down, none where msgspec accepts."""
    try:
        msgspec.convert(value, kind, builtin_types=_PLAIN)
        return
    except msgspec.ValidationError:
        pass
    base, args, _ = split(kind)
    within: Iterator[Fault] = iter(())
    if is_table(base) and isinstance(value, dict):
        within = _table_faults(base, value, path, word, whole)
    elif base in (list, tuple) and isinstance(value, list):
        within = _list_faults(base, args, value, path, word, whole)
    elif base in (dict, Mapping) and isinstance(value, dict) and not whole:
        within = _item_faults(((args[1], key, item) for key, item in value.items()), path, word, whole)
    yield from _or_else(within, Fault(path, value, f"must be {want(kind, word)}"))


def _list_faults(
    base: type, args: Sequence[Any], value: list[object], path: Path, word: str, whole: bool
) -> Iterator[Fault]:
    if whole and not is_table(split(args[0])[0]):
        return
    fixed = base is tuple and args[-1] is not Ellipsis
    if fixed and len(value) != len(args):
        yield Fault(path, value, f"has {len(value)} parts; it must have {len(args)}")
    kinds = args if fixed else [args[0]] * len(value)
    yield from _item_faults(zip(kinds, range(len(value)), value), path, word, whole)


def _item_faults(items: Iterable[tuple[Any, str | int, object]], path: Path, word: str, whole: bool) -> Iterator[Fault]:
    for kind, place, item in items:
        yield from _faults(kind, item, (*path, place), word, whole)


def _table_faults(table: type[Struct], value: dict[str, Any], path: Path, word: str, whole: bool) -> Iterator[Fault]:
    fields = fields_of(table)
    for key, item in value.items():
        if key not in fields:
            yield Fault((*path, key), item, "", tuple(fields))
    for key, field in fields.items():
        if key in value:
            yield from _faults(field.kind, value[key], (*path, key), word, whole)
        elif field.required:
            yield Fault((*path, key), MISSING, f"must be {want(field.kind, word)}")


@cache
def _ruled(table: type[Struct]) -> tuple[tuple[str, Rule | None], ...]:
    """None for a field of tables, whose fields may have rules."""

    def concerned(kind: Any) -> bool:
        base, args, _ = split(kind)
        return rule_of(kind) is not None or is_table(base) or (base is tuple and is_table(split(args[0])[0]))

    return tuple((f.name, rule_of(f.kind)) for f in fields_of(table).values() if concerned(f.kind))


def _against_rules(value: object, path: Path) -> Iterator[Fault]:
    if not isinstance(value, Struct):
        return
    for name, rule in _ruled(type(value)):
        held = getattr(value, name)
        if held is None:
            continue
        if rule is not None:
            if not rule.test(held):
                shown = [list(row) for row in held] if isinstance(held, tuple) else held
                yield Fault((*path, name), shown, f"must be {rule.want}")
            continue
        for i, row in enumerate(held) if isinstance(held, tuple) else [(None, held)]:
            yield from _against_rules(row, (*path, name) if i is None else (*path, name, i))
