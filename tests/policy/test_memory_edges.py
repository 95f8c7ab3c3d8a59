"""FIFO tokens by hand: which frees a take waits for, in which iteration."""

from __future__ import annotations

import pytest

from pstar_sim.core.step import Ref
from pstar_sim.policy.passes.memory_edges import ByteMove, QueueSlot, fifo_edges

TAKE, FREE = 0, 1
SLOTS = {TAKE: QueueSlot("h2d", 0), FREE: QueueSlot("compute", 0)}
LENGTHS = {"h2d": 1, "compute": 1}


def one(free_bytes: int, *, take_first: bool, taken_in: int = 0, freed_in: int = 0) -> dict[int, list[Ref]]:
    """10 bytes taken by step 0 and freed by step 1, in this order or the other one."""
    window = [ByteMove(TAKE, taken_in, 10), ByteMove(FREE, freed_in, -10)]
    return fifo_edges(window if take_first else window[::-1], free_bytes, SLOTS, LENGTHS)


def test_free_bytes_are_used_up_first() -> None:
    """10 free bytes serve this iteration; what it takes was freed in the previous one. 20: in the one before that.
    With 30 it would be three iterations back, which needs no edge."""
    assert one(10, take_first=True) == {TAKE: [Ref(FREE, 1)]}
    assert one(20, take_first=True) == {TAKE: [Ref(FREE, 2)]}
    assert one(30, take_first=True) == {}


def test_without_free_bytes_it_waits_for_this_iteration() -> None:
    assert one(0, take_first=False) == {TAKE: [Ref(FREE, 0)]}


def test_what_runs_early_or_late_counts_from_its_own_iteration() -> None:
    """The take belongs to the next iteration (a fetch ahead), or the free to the previous one (a late Adam)."""
    assert one(0, take_first=False, taken_in=1) == {TAKE: [Ref(FREE, 1)]}
    assert one(0, take_first=False, freed_in=-1) == {TAKE: [Ref(FREE, 1)]}
    assert one(10, take_first=True, freed_in=-1) == {TAKE: [Ref(FREE, 2)]}


def test_a_part_that_was_free_and_a_part_that_is_freed() -> None:
    """Compute frees 5 and 5, h2d takes 6 and 4; 3 bytes are free. Bytes taken: 0-5 and 6-9. The first 3 of them were
    freed last in the previous window (bytes 7-9, step 3), the next 3 are bytes 0-2 of step 2; of one queue only the
    latest is named. The second take gets bytes 3-6: the end of step 2 and the beginning of step 3."""
    slots = {0: QueueSlot("h2d", 0), 1: QueueSlot("h2d", 1), 2: QueueSlot("compute", 0), 3: QueueSlot("compute", 1)}
    lengths = {"h2d": 2, "compute": 2}
    window = [ByteMove(2, 0, -5), ByteMove(0, 0, 6), ByteMove(3, 0, -5), ByteMove(1, 0, 4)]
    assert fifo_edges(window, 3, slots, lengths) == {0: [Ref(2, 0)], 1: [Ref(3, 0)]}


def test_every_queue_that_frees_is_named() -> None:
    """The same with the second free on the d2h queue: now both are waited for."""
    slots = {0: QueueSlot("h2d", 0), 1: QueueSlot("h2d", 1), 2: QueueSlot("compute", 0), 3: QueueSlot("d2h", 0)}
    lengths = {"h2d": 2, "compute": 1, "d2h": 1}
    window = [ByteMove(2, 0, -5), ByteMove(0, 0, 6), ByteMove(3, 0, -5), ByteMove(1, 0, 4)]
    edges = fifo_edges(window, 3, slots, lengths)
    assert {step: set(refs) for step, refs in edges.items()} == {
        0: {Ref(2, 0), Ref(3, 1)},
        1: {Ref(2, 0), Ref(3, 0)},
    }


def test_nothing_taken_needs_no_edge() -> None:
    assert fifo_edges([], 0, {}, {}) == {}


def test_a_window_that_does_not_keep_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="step 0 takes bytes before step 1 has freed them"):
        one(0, take_first=True)
    with pytest.raises(ValueError, match="step 0 takes bytes before step 1 has freed them"):
        one(9, take_first=True)


def test_a_window_that_does_not_repeat_is_refused() -> None:
    with pytest.raises(ValueError, match="takes 10 bytes and frees 9"):
        fifo_edges([ByteMove(TAKE, 0, 10), ByteMove(FREE, 0, -9)], 10, SLOTS, LENGTHS)
    with pytest.raises(ValueError, match="3 bytes too many"):
        one(-3, take_first=False)
    with pytest.raises(ValueError, match="step 0 would wait for step 1 of a later iteration"):
        one(0, take_first=False, freed_in=1)
