"""A configuration's keys: one table to read and write it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from enum import Enum, auto
from typing import Annotated, Any

from pstar_sim.errors import PstarError
from pstar_sim.schema.fields import least
from pstar_sim.schema.reading import Fault, brief, convert, nearest

AUTO = "auto"
"""The value with which a file leaves a key to the script that reads it."""
PARALLELISM = "such parallelism is not modelled"
"""Why keys of context and expert parallelism are not modelled."""
SLIP = 0.9
"""Likeness of a mistyped key to the one that is meant, where not all keys are known."""
Count = Annotated[int, least(1)]
"""Type of a value that counts something."""

Names = str | list[str]
"""Type of a value that names modules, between commas or in a list."""


class KeyEffect(Enum):
    """USED: a prediction depends on it.
    NONE: without effect on memory and time.
    NOT_MODELLED: perhaps with effect, which is not predicted.
    """

    USED = auto()
    NONE = auto()
    NOT_MODELLED = auto()


@dataclass(frozen=True, kw_only=True)
class Key:
    """path: dotted; ".*" at the end: every key below.
    name: of a used key's value.
    kind: None for any type.
    default: the framework's, where a key that is not modelled has no effect.
    also: paths of the same meaning.
    """

    path: str
    effect: KeyEffect
    name: str = ""
    kind: Any = None
    default: object = None
    why: str = ""
    also: tuple[str, ...] = ()


def used(path: str, name: str, kind: Any, default: object = None, *, also: tuple[str, ...] = ()) -> Key:
    """also: read as this key, but not written."""
    return Key(path=path, effect=KeyEffect.USED, name=name, kind=kind, default=default, also=also)


def ignored(*paths: str) -> tuple[Key, ...]:
    return tuple(Key(path=path, effect=KeyEffect.NONE) for path in paths)


def unmodelled(path: str, why: str, off: object = False, *, also: tuple[str, ...] = ()) -> Key:
    """Perhaps with effect.

    off: without effect.
    also: read as this.
    """
    return Key(path=path, effect=KeyEffect.NOT_MODELLED, default=off, why=why, also=also)


@dataclass(frozen=True, kw_only=True)
class KeyReading:
    """values: used key -> value, AUTO if left to the script, the framework's default if missing.
    named: used keys in the file.
    notes: per key that is not modelled.
    """

    file: str
    values: Mapping[str, Any]
    named: frozenset[str]
    without_effect: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def known(self, name: str) -> Any:
        """None where the file leaves the key to the script."""
        value = self.values[name]
        return None if value == AUTO else value

    def unsaid(self, facts: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
        """facts: fact -> used keys that say it."""
        return tuple(fact for fact, names in facts.items() if self.named.isdisjoint(names))

    def usual(self, name: str, usual: Any) -> Any:
        """`usual` where it is missing or left to the script."""
        value = self.known(name)
        return usual if value is None else value


def read_keys(keys: Sequence[Key], content: object, file: str, what: str, *, alike: float = 0.0) -> KeyReading:
    """A key that is not known is a note, because a later version may have it; one that is nearly another is a mistake.

    Raises PstarError, naming file and key, for a content that is not a table, such a mistake (with the nearest key),
    and a value of another type.

    alike: least likeness to a known key with which an unknown one is a mistake, for frameworks with many keys.
    """
    if not isinstance(content, dict):
        raise PstarError(f"{file}: is not {what}: it holds {brief(content)} where a table of keys is expected")
    table = {path: key for key in keys for path in (key.path, *key.also)}
    values = {key.name: key.default for key in keys if key.effect is KeyEffect.USED}
    named: set[str] = set()
    without: list[str] = []
    left: dict[str, list[str]] = {}  # keys by the reason why they are not modelled
    for path, value in _leaves(content, table, file, what, alike):
        key = table.get(path) or table.get(_star(path, table)) or _unknown(path, what)
        if key.effect is KeyEffect.NONE:
            without.append(path)
        elif key.effect is KeyEffect.NOT_MODELLED:
            if not _off(key, value):
                left.setdefault(key.why, []).append(f"{path} = {brief(value)}")
        else:
            values[key.name] = _value(key, value, file)
            named.add(key.name)
    notes = tuple(f"not modelled: {', '.join(keys)}: {why}" for why, keys in left.items())
    return KeyReading(file=file, values=values, named=frozenset(named), without_effect=tuple(without), notes=notes)


def _unknown(path: str, what: str) -> Key:
    return unmodelled(path, f"not a known key of {what}, and taken to change nothing", off=None)


def _off(key: Key, value: object) -> bool:
    alike = isinstance(value, bool) is isinstance(key.default, bool)
    return value is None or value == AUTO or (alike and value == key.default)


def _leaves(
    content: Mapping[str, Any], table: Mapping[str, Key], file: str, what: str, alike: float, above: str = ""
) -> Iterator[tuple[str, Any]]:
    """A table is read by key if the known ones have keys below it."""
    for name, value in content.items():
        path = f"{above}{name}"
        star = _star(path, table)
        if path not in table and star and isinstance(value, dict):
            yield from _leaves(value, table, file, what, alike, f"{path}.")
        elif path in table or star:
            yield path, value
        elif any(known.startswith(f"{path}.") for known in table):
            if isinstance(value, dict):
                yield from _leaves(value, table, file, what, alike, f"{path}.")
            elif value is not None and value != AUTO:
                raise PstarError(f"{file}: {path} = {brief(value)}; it must be a table of keys")
        else:
            near = _near(str(name), table, above)
            if near and SequenceMatcher(None, path, near).ratio() >= alike:
                raise PstarError(f"{file}: {path} is not a known key of {what}; did you mean {near}?")
            yield path, value


def _near(name: str, table: Mapping[str, Key], above: str) -> str:
    beside = {one.removeprefix(above).partition(".")[0] for one in table if one.startswith(above)}
    near = nearest(name, sorted(beside - {"*"}))
    if near:
        return f"{above}{near}"
    return next((path.removesuffix(".*") for path in table if path.removesuffix(".*").split(".")[-1] == name), "")


def _star(path: str, table: Mapping[str, Key]) -> str:
    parts = path.split(".")
    stars = (".".join(parts[:n]) + ".*" for n in range(len(parts), 0, -1))
    return next((star for star in stars if star in table), "")


def _value(key: Key, value: object, file: str) -> object:
    if value == AUTO:
        return AUTO
    if value is None:
        return key.default
    if key.kind is None:
        return value
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e18:
        try:
            return convert(key.kind, int(value))
        except Fault:
            pass
    try:
        return convert(key.kind, value)
    except Fault as fault:
        raise PstarError(f"{file}: {key.path} = {brief(value)}; it {fault.want}") from None


def nested(keys: Sequence[Key], values: Mapping[str, object]) -> dict[str, Any]:
    """Tables with these values (used key -> value), in the order of `keys`, without None."""
    content: dict[str, Any] = {}
    for key in keys:
        if key.effect is not KeyEffect.USED or values.get(key.name) is None:
            continue
        *tables, last = key.path.split(".")
        inner = content
        for name in tables:
            inner = inner.setdefault(name, {})
        inner[last] = values[key.name]
    return content
