"""Bytes and seconds in and out of words. GB = 1e9, GiB = 2**30; converted only here."""

from __future__ import annotations

import re

from pstar_sim.errors import PstarError

__all__ = ["GB", "GIB", "KIB", "MB", "MIB", "format_bytes", "format_s", "parse_bytes", "parse_bytes_per_s"]

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12

_SCALE = {"": 1, "b": 1, "kb": KB, "mb": MB, "gb": GB, "tb": TB, "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([kmgt]?i?b)?\s*", re.IGNORECASE)


BARE = 10**4
"""A number below it that has no unit is not meant as bytes."""


def parse_bytes(text: str, *, bare: int = BARE) -> int:
    """Bytes of "8GB", "512 MiB" or "1e9". Raises PstarError for anything else, zero and negative sizes, and for a
    number below `bare` without a unit."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise PstarError(f"{text!r} is not a size; write a positive number and a unit, such as 8GB or 512MiB")
    size = float(match[1]) * _SCALE[(match[2] or "").lower()]
    if size > 10**18:
        raise PstarError(f"{text!r} is more than a million TB; write a size such as 8GB or 512MiB")
    if round(size) <= 0:
        raise PstarError(f"a size must be positive, not {text!r}")
    if not match[2] and size < bare:
        raise PstarError(f"{text!r} has no unit; write {text.strip()}GB or {text.strip()}MiB")
    return round(size)


def parse_bytes_per_s(text: str) -> float:
    """Bytes per second of "2GB/s" (the "/s" may be left out). Raises PstarError as `parse_bytes` does."""
    size = re.sub(r"\s*/\s*s\s*$", "", text)
    try:
        return float(parse_bytes(size))
    except PstarError as error:
        if "has no unit" in str(error):
            raise PstarError(f"{text!r} has no unit; write {size.strip()}GB/s or {size.strip()}MB/s") from None
        raise PstarError(f"{text!r} is not a rate; write a positive number and a unit, such as 2GB/s") from None


def format_bytes(size_bytes: float) -> str:
    """A size for people, in decimal units: "12.3 GB"."""
    for unit, scale in (("TB", TB), ("GB", GB), ("MB", MB), ("kB", KB)):
        if abs(size_bytes) >= scale:
            return f"{size_bytes / scale:.4g} {unit}" if unit != "GB" else f"{size_bytes / scale:.2f} GB"
    return f"{size_bytes:.0f} B"


def format_s(time_s: float) -> str:
    """A duration for people: "1.234 s", "12.3 ms", "45 us"."""
    if time_s >= 1:
        return f"{time_s:.3f} s"
    if time_s >= 1e-3:
        return f"{time_s * 1e3:.1f} ms"
    return f"{time_s * 1e6:.0f} us"
