"""Visit: a chunk on the GPU for a run of moments. Policies of every family decide visits."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Visit"]


class Visit(NamedTuple):
    """The working list of `chunk` is on the GPU from moment `first` to moment `last`, both included. On several ranks
    the slices of all ranks are."""

    chunk: int
    first: int
    last: int
