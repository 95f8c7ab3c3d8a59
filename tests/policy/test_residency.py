"""Uses of chunks, blocks of moments, gaps and the keep set: all worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from pstar_sim.bounds.bound_facts import BoundFacts
from pstar_sim.catalog.loader import load_machine
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Settings
from pstar_sim.cost import CostModel
from pstar_sim.policy import Builder
from pstar_sim.policy.family.residency import UseGap, belady, gaps_of
from pstar_sim.policy.kit.blocks import Block, Stretch, blocks_of
from pstar_sim.policy.kit.facts import Facts, facts_of
from pstar_sim.testing import chain_workload
from pstar_sim.units import MIB


def uses_of(layers: int, layers_a_chunk: int = 1, **more: object) -> Facts:
    w = chain_workload(layers, MIB, **more)  # type: ignore[arg-type]
    return Facts(w, build_layout(w, chunk_bytes=layers_a_chunk * 2 * MIB))


def test_uses_of_a_chain() -> None:
    """Moments: F0 F1 B1 B0 step."""
    uses = uses_of(2)
    assert uses.touched == ((0, 3), (1, 2))
    assert uses.spans == (((0, 3, 3),), ((0, 2, 2),))
    assert [uses.first_use(c) for c in (0, 1)] == [0, 1]
    assert [uses.last_gradient(c) for c in (0, 1)] == [3, 2]
    assert uses.by_moment == ((0,), (1,), (1,), (0,), ())


def test_each_micro_batch_has_a_span_of_its_own() -> None:
    """F0 F1 B1 B0, F0 F1 B1 B0, step; one chunk of both layers gets gradients in B1 and B0 of each."""
    uses = uses_of(2, layers_a_chunk=2, micro_batches=2)
    assert uses.touched == (tuple(range(8)),)
    assert uses.spans == (((0, 2, 3), (1, 6, 7)),)
    assert uses_of(2, micro_batches=2).touched == ((0, 3, 4, 7), (1, 2, 5, 6))


def test_recomputation_is_a_use() -> None:
    """F0 F1 R1 B1 R0 B0 step."""
    assert uses_of(2, checkpointing=True).touched == ((0, 4, 5), (1, 2, 3))


def test_a_tide_that_ends_higher_than_it_begins_is_raised_throughout() -> None:
    assert uses_of(1, tide_bytes=[1, 4, 3]).tide == (3, 6, 5)
    assert uses_of(1, tide_bytes=[3, 4, 1]).tide == (3, 4, 1)


def test_neighbours_that_need_the_same_are_one_block() -> None:
    """F1 and B1 need chunk 1; the block has the higher tide of the two. The step stays alone."""
    blocks = blocks_of(uses_of(2), [1, 1, 2, 2, 0], [5, 6, 7, 4, 4], frozenset(), frozenset())
    assert blocks == [
        Block(0, 0, (0,), 5, 1),
        Block(1, 2, (1,), 7, 3),
        Block(3, 3, (0,), 4, 2),
        Block(4, 4, (), 4, 0),
    ]


def test_a_cut_keeps_moments_apart_and_residents_do_not_count() -> None:
    uses = uses_of(2)
    cut = blocks_of(uses, [1, 1, 2, 2, 0], [0] * 5, frozenset(), frozenset({2}))
    assert [(b.first, b.last) for b in cut] == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)]
    without = blocks_of(uses, [1, 1, 2, 2, 0], [0] * 5, frozenset({0, 1}), frozenset())
    assert [(b.first, b.last, b.chunks) for b in without] == [(0, 3, ()), (4, 4, ())]


def test_a_moment_that_needs_nothing_joins_only_where_nothing_is_lost() -> None:
    def blocks(needs: list[tuple[int, ...]], seconds: list[float], tide: list[int]) -> list[tuple[int, int]]:
        uses = cast(Facts, SimpleNamespace(by_moment=needs))
        return [(b.first, b.last) for b in blocks_of(uses, seconds, tide, frozenset(), frozenset())]

    assert blocks([(0,), (), (1,), ()], [1, 0, 1, 0], [5, 5, 5, 0]) == [(0, 1), (2, 2), (3, 3)]  # it takes no time
    assert blocks([(0,), (), (1,), ()], [1, 0, 1, 0], [5, 6, 5, 0]) == [(0, 0), (1, 1), (2, 2), (3, 3)]  # higher tide
    assert blocks([(0,), (), (1,), ()], [1, 1, 1, 0], [5, 5, 5, 0]) == [(0, 0), (1, 1), (2, 2), (3, 3)]  # it lasts
    assert blocks([(0,), (), (0,), ()], [1, 1, 1, 0], [5, 5, 5, 0]) == [(0, 2), (3, 3)]  # between two of a kind


def test_gaps_are_between_uses_that_are_not_neighbours() -> None:
    uses = [Stretch(0, 1), Stretch(4, 4), Stretch(5, 5), Stretch(9, 9)]
    assert gaps_of(3, uses) == [UseGap(1, 4, 3), UseGap(5, 9, 3)]
    assert gaps_of(3, [Stretch(7, 8)]) == []


A, B, C = UseGap(0, 6, 0), UseGap(1, 4, 1), UseGap(2, 5, 2)


def test_the_farthest_end_is_given_up() -> None:
    """A is away over moments 1-5, B over 2-3, C over 3-4: in moment 3 there are three for room of two."""
    assert belady([A, B, C], [1, 1, 1], [3] * 7) == {A, B, C}
    assert belady([A, B, C], [1, 1, 1], [2] * 7) == {B, C}
    # With room of one, B and C meet in moment 3 and C, which ends later, goes too.
    assert belady([A, B, C], [1, 1, 1], [1] * 7) == {B}
    assert belady([A, B, C], [1, 1, 1], [0] * 7) == set()


def test_the_capacity_of_each_moment_counts() -> None:
    """Only moment 5 is narrow, and only A is away then; or only moment 2, where A and B are."""
    assert belady([A, B, C], [1, 1, 1], [3, 3, 3, 3, 3, 0, 3]) == {B, C}
    assert belady([A, B, C], [1, 1, 1], [3, 3, 1, 3, 3, 3, 3]) == {B, C}


def test_bytes_are_counted_and_room_left_over_is_offered_again() -> None:
    """A (1 byte, ends last) goes first, B (3 bytes) does not fit either; then there is room for A after all."""
    assert belady([A, B], [1, 3], [2] * 7) == {A}
    assert belady([A, B], [1, 3], [3] * 7) == {B}
    assert belady([A, B], [1, 3], [4] * 7) == {A, B}


def test_a_gap_over_the_border_needs_room_at_both_ends() -> None:
    """Moments 0-5; away over moment 5 and moment 0 of the next iteration."""
    over = UseGap(4, 7, 0)
    assert belady([over], [1], [1, 0, 0, 0, 0, 1]) == {over}
    assert belady([over], [1], [0, 1, 1, 1, 1, 1]) == set()
    assert belady([over], [1], [1, 1, 1, 1, 1, 0]) == set()


def test_facts_of_a_job_are_worked_out_once_for_policies_and_bounds() -> None:
    """The same value, which says of each moment what it reads."""
    w, machine = chain_workload(2, MIB, micro_batches=2), load_machine("t4")
    layout = build_layout(w, chunk_bytes=2 * MIB)
    facts = facts_of(w, layout)
    assert facts_of(w, layout) is facts is Builder("any", w, machine, Settings(), layout=layout).uses
    assert BoundFacts(w, machine, layout, CostModel(w, machine, layout)).seen[0][2] is facts.reads[0]
    for m, read in enumerate(facts.read_in):
        assert all(m in facts.reads[c] for c in read)
