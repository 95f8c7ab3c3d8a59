"""A chunk on the GPU for a run of moments, in policies of every family."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Visit"]


class Visit(NamedTuple):
    """From moment `first` to `last`, both included, on several ranks with all slices."""

    chunk: int
    first: int
    last: int
