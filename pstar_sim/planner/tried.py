"""Tried: what came of each way to run a job that was looked at, in a few words."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["tried_text"]

MOST_NAMED = 4


def tried_text(tried: Mapping[str, str], chosen: str = "") -> str:
    """The ways that were planned, with their seconds, and how many were not and why. tried: way -> its seconds, or why
    it "does not fit" or was "not planned". chosen: the way that is not named again."""
    short = [how for how in tried.values() if how.startswith("does not fit")]
    skipped = [how for how in tried.values() if how.startswith("not planned")]
    planned = {what: how for what, how in tried.items() if how not in short and how not in skipped}
    others = [f"{what}: {how}" for what, how in planned.items() if what != chosen]
    parts = others[:MOST_NAMED]
    if len(others) > MOST_NAMED:
        parts.append(f"{len(others) - MOST_NAMED} more planned")
    if skipped:
        parts.append(f"{len(skipped)} promise too little")
    if short:
        parts.append(f"{len(short)} do not fit")
    return "; ".join(parts)
