"""Arguments of the public functions: a wrong value gets one clear error.

Each function returns the value (a number as Python's own type), or raises PstarError with argument, value and what
would do.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import TypeVar

from pstar_sim.errors import PstarError
from pstar_sim.quantities import SIZE
from pstar_sim.words import letters

T = TypeVar("T")
_LARGEST = 1e18

MOST = 10**9
"""The largest count that is accepted: a larger count is a mistake, and is refused before anything of that length is
made."""
BARE = 10**4
"""The smallest number that may stand for bytes without a unit."""


def refused(name: str, value: object, want: str, error: type[PstarError] = PstarError) -> PstarError:
    try:
        shown = repr(value)
    except ValueError:  # Python refuses to print a number with thousands of digits
        shown = "a number of thousands of digits"
    return error(f"{name} = {shown if len(shown) <= 60 else shown[:57] + '...'}: it must be {want}")


def spelled(name: str, known: Iterable[str]) -> str:
    """Equal to `name` but for case, spaces and signs, or `name` itself if none or several are."""
    names_ = list(known)
    alike = [other for other in names_ if letters(other) == letters(name)]
    return alike[0] if len(alike) == 1 and name not in names_ else name


def whole(name: str, value: object, *, least: int = 1, most: int = MOST, error: type[PstarError] = PstarError) -> int:
    """`value` may be a numpy integer."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise refused(name, value, f"a whole number of at least {least}", error)
    found = int(value)
    if found > most:
        raise refused(name, value, f"a whole number of at most {most}", error)
    return found


def number(
    name: str, value: object, *, above: float = 0.0, also: bool = False, error: type[PstarError] = PstarError
) -> float:
    """Finite, and not so large that sums or quotients overflow.

    also: `above` itself is allowed.
    """
    want = f"a finite number {'of at least' if also else 'above'} {above:g}"
    found = real(value)
    if not (found >= above if also else found > above):
        raise refused(name, value, want, error)
    if not (found == 0 or 1 / _LARGEST <= abs(found) <= _LARGEST):
        raise refused(name, value, f"{want}, from {1 / _LARGEST:g} to {_LARGEST:g}", error)
    return found


def real(value: object) -> float:
    """NaN for a value that is not a number."""
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


def parse_bytes(text: str) -> int:
    """Reads "8GB", "512 MiB" or "1e9". Raises PstarError for other texts, sizes of 0 or less, and numbers below `BARE`
    without a unit."""
    written = text.strip()
    try:
        size = SIZE.parse(written)
    except ValueError:
        size = -1.0
    if size < 0:
        raise PstarError(f"{text!r} is not a size; write a positive number and a unit, such as 8GB or 512MiB")
    if size > 10**18:
        raise PstarError(f"{text!r} is more than a million TB; write a size such as 8GB or 512MiB")
    if round(size) <= 0:
        raise PstarError(f"a size must be positive, not {text!r}")
    if size < BARE and not written[-1].isalpha():
        raise PstarError(f"{text!r} has no unit; write {written}GB or {written}MiB")
    return round(size)


def parse_bytes_per_s(text: str) -> float:
    """Reads "2GB/s", or without "/s". Raises as `parse_bytes`."""
    size = re.sub(r"\s*/\s*s\s*$", "", text)
    try:
        return float(parse_bytes(size))
    except PstarError as error:
        if "has no unit" in str(error):
            raise PstarError(f"{text!r} has no unit; write {size.strip()}GB/s or {size.strip()}MB/s") from None
        raise PstarError(f"{text!r} is not a rate; write a positive number and a unit, such as 2GB/s") from None


def size_bytes(name: str, value: object, *, error: type[PstarError] = PstarError) -> int:
    """A whole number, or a text such as "128MiB"."""
    if isinstance(value, str):
        try:
            return parse_bytes(value)
        except PstarError as wrong:
            raise error(f"{name} = {value!r}: {wrong}") from None
    if isinstance(value, bool) or not isinstance(value, Integral) or not 0 < int(value) <= _LARGEST:
        want = f"a number of bytes above 0 and up to {_LARGEST:g}, or a size such as '128MiB'"
        raise refused(name, value, want, error)
    return int(value)


def file_path(
    name: str, value: object, *, want: str = "the path of a file", error: type[PstarError] = PstarError
) -> Path:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value) or isinstance(os.fspath(value), bytes):
        raise refused(name, value, want, error)
    return Path(value)


def names(name: str, value: object, want: str) -> list[object]:
    """A single text counts as a list of one."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, Iterable) or isinstance(value, Mapping):
        raise refused(name, value, want)
    return list(value)


def function(name: str, value: object) -> None:
    """The caller handles None."""
    if not callable(value):
        raise refused(name, value, "a function")


def instance(name: str, value: object, kind: type[T], want: str, *, error: type[PstarError] = PstarError) -> T:
    if not isinstance(value, kind):
        raise refused(name, value, want, error)
    return value
