"""The simulator against the frozen simulator of the first edition, on random plans: seconds, bytes, peaks, causes,
spans. `python benchmarks/oracle.py` does the same for a thousand plans."""

from __future__ import annotations

from itertools import islice

import pytest

pytest.importorskip("simpy", reason="needs simpy, which cannot be imported")

import comparison


@pytest.mark.parametrize("part", range(4))
def test_random_plans_take_the_same_time_and_bytes(part: int) -> None:
    for number, plan in islice(comparison.plans(f"oracle {part}"), 6):
        for jitter in (None, comparison.jitter_of(number, plan)):
            assert not comparison.compare(plan, jitter), number


def test_random_plans_with_updates_in_parts_take_the_same_time_and_bytes() -> None:
    compared = 0
    for number, plan in islice(comparison.plans("parts"), 24):
        parted = comparison.parted(number, plan)
        if parted is plan:
            continue
        compared += 1
        for jitter in (None, comparison.jitter_of(number, parted)):
            assert not comparison.compare(parted, jitter), number
    assert compared >= 8


def test_a_circle_of_waits_is_refused_with_the_same_words() -> None:
    for number, plan in islice(comparison.plans("deadlock"), 5):
        assert not comparison.both_refuse(comparison.deadlocked(plan)), number
