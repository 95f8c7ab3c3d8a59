"""Update windows without a table of all pairs: what each sums up equals what the definition says."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pstar_sim.policy.kit.update_windows import Inside

# (first read, last gradient, value); few different moments, so that many are equal
CHUNKS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=12)


def test_of_a_stack_of_layers_each_window_has_the_layers_before_it() -> None:
    """Layer 0 is read first and its gradient comes last: it lies inside every window."""
    inside = Inside([0, 1, 2], [5, 4, 3])
    assert inside.sums([1, 10, 100]).tolist() == [1, 11, 111]
    assert inside.least([3, 2, 4]).tolist() == [3, 2, 2]


def test_a_chunk_whose_gradient_comes_early_lies_inside_its_own_window_alone() -> None:
    """Chunk 1 is read second, and its last gradient (2) comes before that of chunk 2 (4), in whose window it is not."""
    inside = Inside([0, 1, 2], [5, 2, 4])
    assert inside.sums([1, 10, 100]).tolist() == [1, 11, 101]
    assert Inside([0, 1, 2]).sums([1, 10, 100]).tolist() == [1, 11, 111]


@settings(max_examples=60, deadline=None)
@given(CHUNKS, st.booleans())
def test_the_sets_are_those_of_the_definition(chunks: list[tuple[int, int, int]], barrier: bool) -> None:
    first, final, value = (np.array(column) for column in zip(*chunks))
    pairs = first[None, :] <= first[:, None]
    if not barrier:
        pairs &= final[None, :] >= final[:, None]
    inside = Inside(first, None if barrier else final)
    assert inside.sums(value).tolist() == (pairs @ value).tolist()
    assert inside.least(value).tolist() == np.where(pairs, value[None, :], 99).min(axis=1).tolist()
