"""Tried: what came of each way to run a job that was looked at, in a few words."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["BOUND", "NOT_TRIED", "tried_text"]

MOST_NAMED = 4
NOT_TRIED = "not tried"
"""How what came of a way begins that might have been the best, by its bound, and was not planned."""
BOUND = "its bound is"
"""What its bound follows there, at the end."""


def tried_text(tried: Mapping[str, str], chosen: str = "") -> str:
    """The ways that were planned, with their seconds, and how many were not and why. tried: way -> its seconds, or why
    it "does not fit", was "not planned" because it cannot be better, or NOT_TRIED. chosen: the way that is not named
    again."""
    short = [how for how in tried.values() if how.startswith("does not fit")]
    skipped = [how for how in tried.values() if how.startswith("not planned")]
    capped = [how for how in tried.values() if how.startswith(NOT_TRIED)]
    planned = {what: how for what, how in tried.items() if how not in {*short, *skipped, *capped}}
    others = [f"{what}: {how}" for what, how in planned.items() if what != chosen]
    parts = others[:MOST_NAMED]
    if len(others) > MOST_NAMED:
        parts.append(f"{len(others) - MOST_NAMED} more planned")
    if skipped:
        parts.append(f"{len(skipped)} promise too little")
    if capped:
        parts.append(_capped_text(capped))
    if short:
        parts.append(f"{len(short)} do not fit")
    return "; ".join(parts)


def _capped_text(capped: list[str]) -> str:
    """They are in the order of their bounds. "3 not tried (optimal plans at most 5 ways; their bounds are 1.1 s to
    2.0 s)"."""
    why, _, first = capped[0].removeprefix(f"{NOT_TRIED}: ").rpartition(f" {BOUND} ")
    last = capped[-1].rpartition(f" {BOUND} ")[2]
    bounds = f"its bound is {first}" if len(capped) == 1 else f"their bounds are {first} to {last}"
    return f"{len(capped)} {NOT_TRIED} ({why} {bounds})"
