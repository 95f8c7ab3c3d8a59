"""What the coordinates of a point (points.py) mean for the steps: who stays, how far ahead copies go, who is updated
when. The steps themselves are program.py's."""

from __future__ import annotations

from collections.abc import Sequence

from pstar_sim.errors import PstarError
from pstar_sim.policy.residency import ChunkUses, Gap, belady

__all__ = ["adam_key", "adam_waits_for_backward", "fetch_floors", "keep_set"]


def keep_set(eviction: str, gaps: Sequence[Gap], sizes: Sequence[int], room: Sequence[int]) -> set[Gap]:
    """Gaps between two uses over which their chunk stays on the GPU; arguments as `belady`."""
    if eviction != "belady":
        raise PstarError(f"eviction {eviction!r} is not known")
    return belady(gaps, sizes, room)


def fetch_floors(prefetch: str | int, uses: Sequence[int]) -> list[int | None]:
    """For each fetch of an iteration, in the order of the positions `uses` they serve: the position that has to have
    ended before it may start, or None where nothing but room holds it back."""
    if prefetch != "edf":
        raise PstarError(f"prefetch {prefetch!r} is not known")
    return [None] * len(uses)


def adam_key(adam: str, uses: ChunkUses, chunk: int) -> tuple[float, ...]:
    """Order among the updates that are ready, smallest first."""
    if adam not in ("edf", "after-backward"):
        raise PstarError(f"adam {adam!r} is not known")
    return (1.0, float(uses.first_use(chunk)))


def adam_waits_for_backward(adam: str) -> bool:
    """Whether every CPU Adam waits for the end of the last moment, as it would behind a barrier."""
    return adam == "after-backward"
