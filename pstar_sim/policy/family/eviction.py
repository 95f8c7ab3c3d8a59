"""Which chunks stay on the GPU between two uses, by the coordinate `eviction` (kit/points.py).

LRU and FIFO are for comparison with Belady's rule (residency.py): they know nothing of the future. Like a cache, idle
chunks stay until room is short, and the rule names the one that leaves, to be fetched again at the end of its gap.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from pstar_sim.policy.family.residency import UseGap, belady


def keep_set(
    eviction: str, gaps: Sequence[UseGap], sizes: Sequence[int], room: Sequence[int], first: Sequence[int]
) -> set[UseGap]:
    """The gaps over which chunks stay.

    eviction: "belady", "lru" or "fifo".
    gaps, sizes, room: as for `belady`.
    first: chunk -> first use.
    """
    if eviction == "lru":
        return lru(gaps, sizes, room)
    if eviction == "fifo":
        return fifo(gaps, sizes, room, first)
    return belady(gaps, sizes, room)


def lru(gaps: Sequence[UseGap], sizes: Sequence[int], room: Sequence[int]) -> set[UseGap]:
    """The oldest last use leaves, of several, the lowest index."""
    return _sweep_along(gaps, sizes, room, None)


def fifo(gaps: Sequence[UseGap], sizes: Sequence[int], room: Sequence[int], first: Sequence[int]) -> set[UseGap]:
    """The chunk leaves that has been on the GPU longest without a break."""
    return _sweep_along(gaps, sizes, room, first)


def _sweep_along(
    gaps: Sequence[UseGap], sizes: Sequence[int], room: Sequence[int], first: Sequence[int] | None
) -> set[UseGap]:
    """A cache along the iteration, in further laps if chunks may stay over the border, so that the lap that counts
    begins as it ends.

    first: an idle chunk's age counts from this arrival, None: from its last use.
    """
    length = len(room)
    over_border = {gap.chunk for gap in gaps if gap.end >= length}
    laps = 2 if over_border else 1
    opening, closing = _unrolled(gaps, length, laps)
    chunks = {gap.chunk for gap in gaps}
    arrived: dict[int, int] = {}
    idle = _Idle(sizes)
    kept: list[set[UseGap]] = [set() for _ in range(laps + 1)]
    for t in range((laps + 1) * length):
        if first is not None and t % length == 0:
            arrived.update((c, t + first[c]) for c in chunks if t == 0 or c not in over_border)
        for lap, gap in closing.get(t, ()):
            if idle.take(lap, gap):
                kept[lap].add(gap)
            else:
                arrived[gap.chunk] = t
        for lap, gap in opening.get(t, ()):
            idle.add(lap, gap, since=lap * length + gap.start if first is None else arrived[gap.chunk])
        idle.shrink(room[t % length])
    return _that_fit(kept[laps - 1], sizes, room)


class _Idle:
    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._held_bytes = 0
        self._entries: set[tuple[int, UseGap]] = set()
        self._oldest: list[tuple[int, int, int, UseGap]] = []  # (since, chunk, lap, gap), taken chunks included

    def add(self, lap: int, gap: UseGap, *, since: int) -> None:
        """since: where the chunk's age begins."""
        self._entries.add((lap, gap))
        self._held_bytes += self._sizes[gap.chunk]
        heapq.heappush(self._oldest, (since, gap.chunk, lap, gap))

    def take(self, lap: int, gap: UseGap) -> bool:
        """Whether it was idle."""
        if (lap, gap) not in self._entries:
            return False
        self._entries.discard((lap, gap))
        self._held_bytes -= self._sizes[gap.chunk]
        return True

    def shrink(self, room_bytes: int) -> None:
        """The oldest first."""
        while self._held_bytes > room_bytes and self._oldest:
            _, _, lap, gap = heapq.heappop(self._oldest)
            self.take(lap, gap)


_Entries = dict[int, list[tuple[int, UseGap]]]


def _unrolled(gaps: Sequence[UseGap], length: int, laps: int) -> tuple[_Entries, _Entries]:
    """Point -> (lap, gap) that open there, and that close there."""
    opening: _Entries = {}
    closing: _Entries = {}
    for lap in range(laps + 1):
        for gap in sorted(gaps):
            opening.setdefault(lap * length + gap.start + 1, []).append((lap, gap))
            closing.setdefault(lap * length + gap.end, []).append((lap, gap))
    return opening, closing


def _that_fit(kept: set[UseGap], sizes: Sequence[int], room: Sequence[int]) -> set[UseGap]:
    """A single iteration may hold too much over its border: the oldest gaps go."""
    length = len(room)
    left = list(room)
    for gap in kept:
        for t in range(gap.start + 1, gap.end):
            left[t % length] -= sizes[gap.chunk]
    out = set(kept)
    for t in (t for t in range(length) if left[t] < 0):
        covering = [gap for gap in sorted(out) if any(n % length == t for n in range(gap.start + 1, gap.end))]
        while left[t] < 0 and covering:
            gap = covering.pop(0)
            out.discard(gap)
            for n in range(gap.start + 1, gap.end):
                left[n % length] += sizes[gap.chunk]
    return out
