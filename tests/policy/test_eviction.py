"""LRU and FIFO on sequences worked out by hand, against Belady's rule on the same ones."""

from __future__ import annotations

import random
from itertools import pairwise

from drawn import chances
from hypothesis import given, settings

from pstar_sim.policy.family.eviction import fifo, keep_set, lru
from pstar_sim.policy.family.residency import UseGap, belady
from pstar_sim.policy.passes.floors import fetch_floors

ONE = [1, 1, 1, 1]


def test_lru_gives_up_the_chunk_that_belady_keeps() -> None:
    """Chunk 0 is used at 0 and 3, chunk 1 at 1 and 5; at 2 there is room for one. The older use is chunk 0's, the
    farther next one chunk 1's."""
    zero, one = UseGap(0, 3, 0), UseGap(1, 5, 1)
    room = [9, 9, 1, 9, 9, 9]
    assert belady([zero, one], ONE, room) == {zero}
    assert lru([zero, one], ONE, room) == {one}
    assert fifo([zero, one], ONE, room, [0, 1]) == {one}


def test_fifo_gives_up_what_came_first_however_lately_it_was_used() -> None:
    """Chunk 0 comes at 0 and is used at 3 and 7, chunk 1 comes at 1 and is used at 6. At 4 there is room for one."""
    early, late, other = UseGap(0, 3, 0), UseGap(3, 7, 0), UseGap(1, 6, 1)
    room = [9, 9, 9, 9, 1, 9, 9, 9]
    assert fifo([early, late, other], ONE, room, [0, 1]) == {early, other}
    assert lru([early, late, other], ONE, room) == {early, late}


def test_what_was_given_up_comes_anew() -> None:
    """At 2 nothing may stay: chunk 0 comes again at 3, after chunk 1, which came at 1 and was given up too, at 4."""
    a, b = UseGap(0, 3, 0), UseGap(1, 4, 1)
    again_a, again_b = UseGap(3, 7, 0), UseGap(4, 8, 1)
    room = [9, 9, 0, 9, 9, 1, 9, 9, 9]
    assert fifo([a, b, again_a, again_b], ONE, room, [0, 1]) == {again_b}  # chunk 0 came at 3, chunk 1 at 4


def test_bytes_count_not_chunks() -> None:
    """Room for 4 bytes: the oldest is given up although it is small, then the next, until the rest fits."""
    gaps = [UseGap(0, 6, 0), UseGap(1, 6, 1), UseGap(2, 6, 2)]
    assert lru(gaps, [1, 3, 4], [9, 9, 9, 4, 9, 9, 9]) == {gaps[2]}
    assert lru(gaps, [1, 3, 1], [9, 9, 9, 4, 9, 9, 9]) == {gaps[1], gaps[2]}


def test_over_the_border_they_are_played_until_iterations_repeat() -> None:
    """Chunk 0 (never updated) is used at 3 and at 1 of the next iteration, chunk 1 at 0 and 2. At 1 there is room for
    one beside what is needed: in a steady iteration chunk 0 was used last before it."""
    border, inner = UseGap(3, 4 + 1, 0), UseGap(0, 2, 1)
    room = [1, 1, 9, 9]
    assert lru([border, inner], ONE, room) == {border, inner}  # never idle at the same time
    border = UseGap(2, 4 + 3, 0)
    inner = UseGap(0, 2, 1)
    assert lru([border, inner], ONE, [9, 1, 9, 9]) == {inner}  # at 1, chunk 0 was used the longest ago


@settings(max_examples=60)
@given(chances())
def test_what_they_keep_fits_and_belady_keeps_no_less(rng: random.Random) -> None:
    """Random sequences of equal chunks, some of them kept over the border too."""
    length, chunks = rng.randint(4, 14), rng.randint(1, 6)
    uses = [sorted(rng.sample(range(length), rng.randint(1, min(4, length)))) for _ in range(chunks)]
    gaps = [UseGap(a, b, c) for c, row in enumerate(uses) for a, b in pairwise(row) if b > a + 1]
    borders = [UseGap(row[-1], row[0] + length, c) for c, row in enumerate(uses) if rng.random() < 0.5]
    gaps += [g for g in borders if g.end > g.start + 1]
    room = [rng.randint(0, chunks) for _ in range(length)]
    first = [row[0] for row in uses]
    for rule in ("lru", "fifo", "belady"):
        kept = keep_set(rule, gaps, [1] * chunks, room, first)
        assert kept <= set(gaps)
        for t in range(length):
            held = sum((t - g.start - 1) % length < g.end - g.start - 1 for g in kept)
            assert held <= room[t], (rule, t)
        if rule != "belady" and not any(g.end >= length for g in gaps):
            assert len(kept) <= len(belady(gaps, [1] * chunks, room))


def test_copies_on_demand_wait_for_the_position_before() -> None:
    """Fetches for positions 0, 2, 2 and 5 of 6."""
    assert fetch_floors("none", [0, 2, 2, 5], 6) == [-1, 1, 1, 4]


def test_copies_k_chunks_ahead_wait_for_the_chunk_k_before() -> None:
    """One ahead: until the chunk before is due. Of the first, that is the last of the iteration before (position 5 - 1,
    that is -2). What reaches back more than a whole iteration holds nothing back."""
    assert fetch_floors(1, [0, 2, 2, 5], 6) == [-2, -1, 1, 1]
    assert fetch_floors(2, [0, 2, 2, 5], 6) == [-5, -2, -1, 1]
    assert fetch_floors(5, [0, 2, 2, 5], 6) == [None, None, -5, -5]


def test_copies_by_deadline_wait_for_room_only() -> None:
    assert fetch_floors("edf", [0, 2, 2, 5], 6) == [None] * 4
