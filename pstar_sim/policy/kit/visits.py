"""Visit: a chunk on the GPU for a run of moments. Policies of every family decide visits."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Visit"]


class Visit(NamedTuple):
    """From moment `first` to moment `last`, both included, the working list is on the GPU; on several ranks the slices
    of all."""

    chunk: int
    first: int
    last: int
