"""A chunk on the GPU for a run of moments, in policies of every family."""

from __future__ import annotations

from typing import NamedTuple


class Visit(NamedTuple):
    """The working list of `chunk` is on the GPU from moment `first` to `last`, both included; on several ranks with the
    slices of all ranks."""

    chunk: int
    first: int
    last: int
