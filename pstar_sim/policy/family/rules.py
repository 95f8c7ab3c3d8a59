"""What the coordinates of a point (points.py) mean for the steps: who stays, how far ahead copies go, who is updated
when. The steps themselves are program.py's."""

from __future__ import annotations

from collections.abc import Sequence

from pstar_sim.policy.family.eviction import fifo, lru
from pstar_sim.policy.family.residency import Gap, belady
from pstar_sim.policy.kit.facts import Facts

__all__ = ["adam_key", "adam_waits_for_backward", "fetch_floors", "keep_set"]


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


def fetch_floors(prefetch: str | int, served: Sequence[int], count: int) -> list[int | None]:
    """For each chunk that is fetched in an iteration, in the order of the positions `served`: the position that has to
    have ended before its copy may start, or None where nothing but room holds it back.

    "none" waits for the position before the one served, so that copies and computing alternate. A number k allows the
    next k chunks: the copy waits for the position before that of the k-th chunk before it, so 0 is "none". Negative
    positions are those of the previous iteration, -1 its last; count: positions of an iteration.
    """
    if prefetch == "edf":
        return [None] * len(served)
    ahead = 0 if prefetch == "none" else int(prefetch)
    floors: list[int | None] = []
    for i in range(len(served)):
        laps, j = divmod(i - ahead, len(served))
        floor = laps * count + served[j] - 1
        floors.append(floor if floor >= -count else None)
    return floors


def adam_key(adam: str, uses: Facts, chunk: int) -> tuple[float, ...]:
    """Order among the updates that are ready, smallest first."""
    if adam == "fifo":
        return (1.0, float(uses.last_gradient(chunk)), float(uses.first_use(chunk)))
    return (1.0, float(uses.first_use(chunk)))


def adam_waits_for_backward(adam: str) -> bool:
    """Whether every CPU Adam waits for the end of the last moment, as it would behind a barrier."""
    return adam == "after-backward"
