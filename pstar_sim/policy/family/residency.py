"""The gaps between uses of a chunk, and those over which it stays: Belady's rule, with a capacity in bytes that changes
with time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import numpy as np
from msgspec import Struct

from pstar_sim.policy.kit.blocks import Stretch


class UseGap(Struct, frozen=True, order=True):
    """A chunk is used at `start` and next at `end`, in the next iteration if that is past the iteration's length: only
    a clean chunk can stay over it."""

    start: int
    end: int
    chunk: int


def gaps_of(chunk: int, uses: Iterable[Stretch]) -> list[UseGap]:
    """Gaps between successive uses (ascending) that are not neighbours."""
    return [UseGap(end, begin, chunk) for (_, end), (begin, _) in pairwise(uses) if begin > end + 1]


def held_over(gaps: Iterable[UseGap], sizes: Sequence[int], count: int) -> list[int]:
    """Bytes that stay over `gaps` at each of `count` positions."""
    change = [0] * (count + 1)
    for gap in gaps:
        end, size = gap.end, sizes[gap.chunk]
        change[gap.start + 1] += size
        if end > count:  # the gap continues at the beginning of the iteration
            change[count] -= size
            change[0] += size
        change[end if end <= count else end - count] -= size
    return list(accumulate(change[:count]))


def belady(gaps: Sequence[UseGap], sizes: Sequence[int], room: Sequence[int]) -> set[UseGap]:
    """The gaps to keep: when open ones hold too much, the farthest end is given up.

    room: for kept gaps at each point, beside what the points need.

    With equal sizes no other choice keeps more gaps: the farthest end takes room for longest. With a few larger chunks
    it is a heuristic, so given-up gaps are offered the remaining room, the shortest first. A gap past the iteration's
    end continues at its beginning.
    """
    gone = _given_up(gaps, sizes, room)
    return _offered_again(gaps, sizes, room, gone)


def _given_up(gaps: Sequence[UseGap], sizes: Sequence[int], room: Sequence[int]) -> list[UseGap]:
    length = len(room)
    opening: dict[int, list[UseGap]] = {}
    for gap in gaps:
        opening.setdefault(gap.start + 1, []).append(gap)
    held = 0
    open_gaps: list[tuple[int, int, UseGap]] = []  # farthest end first
    closing = [0] * (2 * length + 1)
    gone: list[UseGap] = []
    # Gaps over the border also hold their bytes from the beginning of the iteration to their ends.
    wrapped = [0] * (length + 1)  # by end: bytes that gaps over the border hold until that point
    for gap in gaps:
        if gap.end > length:
            held += sizes[gap.chunk]
            wrapped[gap.end - length] += sizes[gap.chunk]
    for t in range(length):
        held -= closing[t] + wrapped[t]
        for gap in opening.get(t, ()):
            held += sizes[gap.chunk]
            heapq.heappush(open_gaps, (-gap.end, gap.chunk, gap))
            closing[gap.end] += sizes[gap.chunk]
        while held > room[t] and open_gaps:
            _, _, gap = heapq.heappop(open_gaps)
            if gap.end <= t:  # all gaps on the heap have ended: nothing left to give up
                break
            held -= sizes[gap.chunk]
            closing[gap.end] -= sizes[gap.chunk]
            gone.append(gap)
            if gap.end - length > t:
                held -= sizes[gap.chunk]
                wrapped[gap.end - length] -= sizes[gap.chunk]
    return gone


def _offered_again(
    gaps: Sequence[UseGap], sizes: Sequence[int], room: Sequence[int], given_up: Sequence[UseGap]
) -> set[UseGap]:
    length = len(room)
    dropped, gone = list(given_up), set(given_up)
    kept = [gap for gap in gaps if gap not in gone]
    free = np.array(room, dtype=np.int64) - held_over(kept, sizes, length)
    left = np.concatenate((free, free))  # twice in a row, because gaps may pass the end

    def book(gap: UseGap, size: int) -> None:
        """Both copies of a point are kept equal."""
        low, high = gap.start + 1, gap.end
        left[low:high] -= size
        left[low + length : min(high + length, 2 * length)] -= size
        left[max(0, low - length) : max(0, high - length)] -= size

    # Remove gaps over the border that do not fit at the beginning, where they were not on the heap yet.
    for gap in sorted((gap for gap in kept if gap.end > length), key=lambda g: -g.end):
        span = left[gap.start + 1 : gap.end]
        if span.size and span[span.argmin()] < 0:
            book(gap, -sizes[gap.chunk])
            gone.add(gap)
            dropped.append(gap)
    for gap in sorted(dropped, key=lambda g: (g.end - g.start, g)):
        span = left[gap.start + 1 : gap.end]
        if span.size and span[span.argmin()] >= sizes[gap.chunk]:
            book(gap, sizes[gap.chunk])
            gone.discard(gap)
    return {gap for gap in gaps if gap not in gone}
