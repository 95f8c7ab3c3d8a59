"""Who stays on the GPU between two uses, by the coordinate `eviction` of a point (points.py)."""

from __future__ import annotations

from collections.abc import Sequence

from pstar_sim.policy.family.eviction import fifo, lru
from pstar_sim.policy.family.residency import Gap, belady

__all__ = ["keep_set"]


def keep_set(
    eviction: str, gaps: Sequence[Gap], sizes: Sequence[int], room: Sequence[int], first: Sequence[int]
) -> set[Gap]:
    """Gaps between two uses over which their chunk stays on the GPU; arguments as `belady`, first: chunk -> point of
    its first use."""
    if eviction == "lru":
        return lru(gaps, sizes, room)
    if eviction == "fifo":
        return fifo(gaps, sizes, room, first)
    return belady(gaps, sizes, room)
