"""Numbers with a unit, as users write them: "48GB", "25GB/s", "150T", "10us", "14d", or yes and no."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pstar_sim.units import BYTES_OF, format_bytes

_WRITTEN = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*([a-z]*(?:\s*/\s*s)?)", re.IGNORECASE)


@dataclass(frozen=True)
class Quantity:
    """what: for messages.
    example: a value as users write it.
    units: in lower case -> SI value.
    words: instead of a number.
    endings: without meaning, after a unit.
    likely: suggested for a number without a unit.
    shown: text of an SI figure.
    """

    what: str
    example: str
    units: Mapping[str, float]
    words: Mapping[str, float] = field(default_factory=dict)
    endings: tuple[str, ...] = ()
    likely: str = ""
    shown: Callable[[float], str] = "{:g}".format

    def parse(self, text: str) -> float:
        """SI; -1 for any negative value. Raises ValueError for anything else."""
        if text.lower() in self.words:
            return self.words[text.lower()]
        if text.startswith("-") and self.units:
            return -1.0
        match = _WRITTEN.fullmatch(text)
        if match is None:
            raise ValueError(text)
        unit = "".join(match[2].lower().split())
        for ending in self.endings:
            unit = unit.removesuffix(ending)
        if unit not in self.units:
            raise ValueError(text)
        return float(match[1]) * self.units[unit]


_BYTES = {unit: float(size) for unit, size in BYTES_OF.items()}
_FLOPS = {"": 1, "g": 1e9, "t": 1e12, "p": 1e15}
_PARAMS = {"": 1, "m": 1e6, "g": 1e9, "b": 1e9}
_SECONDS = {"": 1, "s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_TIMES = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
SIZE = Quantity("size", "48GB", _BYTES, likely="GB", shown=format_bytes)
RATE = Quantity("rate", "25GB/s", _BYTES, endings=("/s",), likely="GB/s", shown=lambda rate: f"{format_bytes(rate)}/s")
FLOPS = Quantity("number of flops per second", "150T", _FLOPS, endings=("/s", "flops", "flop"), likely="T")
PARAMS = Quantity("number of parameters per second", "2G", _PARAMS, endings=("/s", "params"), likely="G")
NUMBER = Quantity("number", "300e9", _PARAMS | {"k": 1e3, "t": 1e12})
LENGTH = Quantity("length", "3.3in", {"": 1, "in": 1, "cm": 1 / 2.54, "mm": 1 / 25.4})
TIME = Quantity("time", "14d", _TIMES)
SECONDS = Quantity("duration", "10us", _SECONDS, likely="us", shown=lambda time: f"{time:g} s")
MONEY = Quantity("price in USD per hour", "3.5", {"": 1})
COUNT = Quantity("count", "8", {"": 1})
FACTOR = Quantity("factor", "0.5", {"": 1})
FLAG = Quantity("yes or no", "true or false", {}, words={"true": 1, "on": 1, "false": 0, "off": 0})
