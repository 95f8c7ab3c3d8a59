"""What belongs to one iteration goes with it as a whole."""

from __future__ import annotations

import gc
import weakref

from executor.memory.update import Update
from executor.session.iteration import Iteration


def test_the_next_iteration_begins_with_nothing() -> None:
    first = Iteration(number=-1).next(0, None)
    first.arrived.add(3)
    first.outstanding.add(4)
    first.missed.add(5)
    first.early.add(6)
    first.backwards, first.passed_over = 2, True
    second = first.next(1, None)
    assert (second.number, second.backwards, second.passed_over, second.update) == (1, 0, False, None)
    assert not second.arrived | second.outstanding | second.missed | second.early and not second.norms
    assert first.arrived == {3}  # steps that run into the next forward still ask for theirs


def test_updates_are_found_by_the_iteration_they_belong_to() -> None:
    updates = [Update(hyper=[]) for _ in range(3)]
    now = Iteration(number=-1)
    for number, update in enumerate(updates):
        now = now.next(number, update)
    assert [now.update_of(n) for n in (2, 1, 0)] == updates[::-1]
    assert now.update_of(3) is None and now.of(7) is None
    now = now.next(5, None)  # two were given up
    assert now.of(2) is not None and now.update_of(5) is None and now.of(4) is None


def test_iterations_before_the_last_two_are_let_go() -> None:
    now = Iteration(number=-1).next(0, Update(hyper=[]))
    old = weakref.ref(now.update)
    for number in (1, 2):
        now = now.next(number, None)
    assert now.update_of(0) is old() is not None
    now = now.next(3, None)
    gc.collect()
    assert now.of(0) is None and now.of(1) is not None and old() is None
