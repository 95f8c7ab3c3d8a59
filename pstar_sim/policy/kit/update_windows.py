"""For each chunk j, those whose whole update lies inside its window, J_j = {i: f_i <= f_j, b_i >= b_j} (f first reads,
b last gradients), in N log N.

In most models the sets are nested: sorted by first read, each is a run from the front; others are summed by levels, as
in a merge sort.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


class Inside:
    """The sets J_j.

    final: None behind a barrier: only first reads count.
    """

    def __init__(self, first: ArrayLike, final: ArrayLike | None = None) -> None:
        begin = np.asarray(first)
        end = np.zeros_like(begin) if final is None else np.asarray(final)
        self._order = np.lexsort((-end, begin))
        begin, end = begin[self._order], end[self._order]
        self._nested = bool(np.all(end[1:] <= end[:-1]))
        # A chunk lies inside the windows of all chunks with equal reads and gradients; the last of these has all of
        # them.
        count = len(begin)
        new = np.ones(count, dtype=bool)
        new[1:] = (begin[1:] != begin[:-1]) | (end[1:] != end[:-1])
        last_of = np.append(np.flatnonzero(new)[1:], count) - 1 if count else np.zeros(0, dtype=np.intp)
        self._last = last_of[np.cumsum(new) - 1] if count else last_of
        self._rank = np.unique(end, return_inverse=True)[1]

    def sums(self, values: ArrayLike) -> Array:
        """For each chunk j, of J_j."""
        mine = np.asarray(values, dtype=float)[self._order]
        return self._back(np.cumsum(mine) if self._nested else self._by_levels(mine, np.add, 0.0))

    def least(self, values: ArrayLike) -> Array:
        """For each chunk j, of J_j."""
        mine = np.asarray(values, dtype=float)[self._order]
        least = np.minimum.accumulate(mine) if self._nested else self._by_levels(mine, np.minimum, np.inf)
        return self._back(least)

    def _back(self, found: Array) -> Array:
        out = np.empty_like(found)
        out[self._order] = found[self._last]
        return out

    def _by_levels(self, values: Array, join: np.ufunc, nothing: float) -> Array:
        """With those before it that end no earlier: each level joins left halves of blocks to right ones, which double
        from level to level."""
        count = len(values)
        length = 1 << max(0, (count - 1).bit_length())
        rank = np.full(length, -1, dtype=np.int64)
        padded = np.full(length, nothing)
        rank[:count], padded[:count] = self._rank, values
        out = padded.copy()
        half = 1
        while half < length:
            ranks, mine = rank.reshape(-1, 2 * half), padded.reshape(-1, 2 * half)
            place = np.argsort(ranks[:, :half], axis=1, kind="stable")
            left = np.take_along_axis(ranks[:, :half], place, axis=1)
            held = np.take_along_axis(mine[:, :half], place, axis=1)
            # For each row, the join of its last 0, 1, 2 ... entries.
            tail = np.full((len(held), half + 1), nothing)
            tail[:, :half] = join.accumulate(held[:, ::-1], axis=1)[:, ::-1]
            block = np.arange(len(held))[:, None]
            apart = block * (count + 2)  # keeps the rows in order when they are searched together
            begin = np.searchsorted((left + apart).ravel(), (ranks[:, half:] + apart).ravel())
            begin = begin.reshape(-1, half) - block * half
            joined = out.reshape(-1, 2 * half)
            joined[:, half:] = join(joined[:, half:], np.take_along_axis(tail, np.clip(begin, 0, half), axis=1))
            half *= 2
        return out[:count]
