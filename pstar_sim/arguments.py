"""Arguments of the public functions: one clear error for a value of the wrong kind, where it is given.

Each function returns the value it was given, numbers as Python's own, and raises PstarError naming the argument, the
value and what would do. Knows no workload and no machine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import TypeVar

from pstar_sim.errors import PstarError
from pstar_sim.units import parse_bytes

__all__ = [
    "choice",
    "file_path",
    "flag",
    "function",
    "instance",
    "names",
    "number",
    "real",
    "size_bytes",
    "text",
    "whole",
]

T = TypeVar("T")
_LARGEST = 1e18


def refused(name: str, value: object, want: str, error: type[PstarError] = PstarError) -> PstarError:
    shown = repr(value)
    return error(f"{name} = {shown if len(shown) <= 60 else shown[:57] + '...'}: it must be {want}")


def spelled(name: str, known: Iterable[str]) -> str:
    """The known name that is written so but for upper and lower case; the name itself if there is none, or two."""
    names_ = list(known)
    alike = [other for other in names_ if other.lower() == name.lower()]
    return alike[0] if len(alike) == 1 and name not in names_ else name


def whole(name: str, value: object, *, least: int = 1, error: type[PstarError] = PstarError) -> int:
    """As a plain int, which numpy's are not."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise refused(name, value, f"a whole number of at least {least}", error)
    return int(value)


def number(
    name: str, value: object, *, above: float = 0.0, also: bool = False, error: type[PstarError] = PstarError
) -> float:
    """A finite number above `above` (also: or equal to it), neither so large nor so small that sums and quotients of
    such numbers could overflow."""
    want = f"a finite number {'of at least' if also else 'above'} {above:g}"
    found = real(value)
    if not (found >= above if also else found > above):
        raise refused(name, value, want, error)
    if not (found == 0 or 1 / _LARGEST <= abs(found) <= _LARGEST):
        raise refused(name, value, f"{want}, from {1 / _LARGEST:g} to {_LARGEST:g}", error)
    return found


def real(value: object) -> float:
    """NaN for what is no number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # a whole number of more than 300 digits
        return math.inf


def flag(name: str, value: object, *, error: type[PstarError] = PstarError) -> bool:
    if not isinstance(value, bool):
        raise refused(name, value, "True or False", error)
    return value


def text(name: str, value: object, want: str, *, error: type[PstarError] = PstarError) -> str:
    if not isinstance(value, str) or not value:
        raise refused(name, value, want, error)
    return value


def choice(name: str, value: object, known: Collection[str], *, error: type[PstarError] = PstarError) -> str:
    if not isinstance(value, str) or value not in known:
        raise refused(name, value, f"one of {', '.join(known)}", error)
    return value


def size_bytes(name: str, value: object, *, error: type[PstarError] = PstarError) -> int:
    """Bytes of a whole number of them, or of a text such as "128MiB"."""
    if isinstance(value, str):
        try:
            return parse_bytes(value)
        except PstarError as wrong:
            raise error(f"{name} = {value!r}: {wrong}") from None
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise refused(name, value, "a number of bytes above 0, or a size such as '128MiB'", error)
    return int(value)


def file_path(
    name: str, value: object, *, want: str = "the path of a file", error: type[PstarError] = PstarError
) -> Path:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value) or isinstance(os.fspath(value), bytes):
        raise refused(name, value, want, error)
    return Path(value)


def names(name: str, value: object, want: str) -> list[object]:
    """The elements of a list; a single text stands for a list of it."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, Iterable) or isinstance(value, Mapping):
        raise refused(name, value, want)
    return list(value)


def function(name: str, value: object) -> None:
    """A function; None for an optional one is the caller's to leave out."""
    if not callable(value):
        raise refused(name, value, "a function")


def instance(name: str, value: object, kind: type[T], want: str, *, error: type[PstarError] = PstarError) -> T:
    if not isinstance(value, kind):
        raise refused(name, value, want, error)
    return value


def sequence_of(name: str, value: object, kind: type[T], want: str) -> Sequence[T]:
    """A list or tuple whose elements are all of one kind, at least one of them."""
    rows = list(value) if isinstance(value, (list, tuple)) else []
    if not rows or not all(isinstance(row, kind) for row in rows):
        raise refused(name, value, want)
    return rows
