"""A policy's option as text, by its type."""

from __future__ import annotations

import types
import typing
from typing import Any, Literal

import msgspec

from pstar_sim.schema.fields import split, want

_SWITCH = {"on": True, "off": False}


def from_text(kind: Any, text: str) -> object:
    """On or off, a choice's word, a number (a whole one also as 1e9); a union's first type that accepts it. Raises
    ValueError for any other text."""
    for arm in _arms(kind):
        try:
            value: object = msgspec.convert(_plain(split(arm)[0], text), arm)
        except (ValueError, msgspec.ValidationError):
            continue
        return value
    raise ValueError(text)


def _plain(base: Any, text: str) -> object:
    if base is bool:
        if text not in _SWITCH:
            raise ValueError(text)
        return _SWITCH[text]
    if base is float:
        return float(text)
    if base is int:
        number = float(text)
        if not number.is_integer() or abs(number) >= 1e18:  # also refuses NaN
            raise ValueError(text)
        return int(number)
    return text


def allowed(kind: Any) -> str:
    """Such as "none | edf | a whole number of at least 1"."""
    return " | ".join(
        " | ".join(words_of(arm)) if split(arm)[0] in (bool, Literal) else want(arm) for arm in _arms(kind)
    )


def words_of(kind: Any) -> tuple[str, ...]:
    """For a hint at a misspelt word."""
    found: tuple[str, ...] = ()
    for arm in _arms(kind):
        base, words, _ = split(arm)
        found += tuple(_SWITCH) if base is bool else words if base is Literal else ()
    return found


def _arms(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
