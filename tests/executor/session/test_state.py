"""What the parts of a session share: the place of the run, and the plan that it follows."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from executor.session.state import RunState
from pstar_sim.errors import PlanError


def test_the_moment_of_a_run_is_the_cursors_on_plan_and_the_plans_counterpart_off_plan() -> None:
    state = RunState(None, replan_after=3)
    assert state.moment == -1
    state.cursor.moment, state.moment_off_plan = 4, 7
    assert state.moment == 4
    state.cursor.off_plan = True
    assert state.moment == 7


def test_a_deviation_is_counted_and_kept_in_words() -> None:
    state = RunState(None, replan_after=3)
    state.iteration = 5
    state.note_deviation("a forward came twice")
    state.note("new plan, by policy tide")
    assert state.deviations == 1
    assert list(state.deviation_log) == ["iteration 5: a forward came twice", "iteration 5: new plan, by policy tide"]


def test_a_new_plan_replaces_one_value_and_the_former_plans_parts_are_free_at_once(
    kit: Any, start: Callable[..., Any]
) -> None:
    """Without a collection of garbage: scratch memory of the former plan may be on the accelerator."""
    run = start("mlp", "tide")
    kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=1, micro_batches=1)
    session = run.session
    plan_run = session.state.run
    former = {
        name: weakref.ref(part) for name, part in vars(plan_run).items() if name in ("contents", "demand", "steps")
    }
    gc.collect()
    gc.disable()
    try:
        session.renew(session.plan)
        assert session.state.run is not plan_run
        assert {name: ref() for name, ref in former.items()} == dict.fromkeys(former)
    finally:
        gc.enable()
    mine, theirs = kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=2, micro_batches=1)
    assert mine == theirs and session.deviations == 0


def test_a_text_of_a_parameter_that_is_asked_for_while_a_plan_is_replaced(
    kit: Any, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A debugger prints a parameter after an interruption; standing still for it mends it under another plan."""
    run = start("mlp", "tide")
    kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=1, micro_batches=1)
    session, parameter = run.session, next(run.model.parameters())
    text = repr(parameter)
    reader = session.state.run.reads.reader
    current_value = reader.current_value

    def renewed_first(tensor: int) -> torch.Tensor:
        monkeypatch.undo()
        session.renew(session.plan)
        return current_value(tensor)

    monkeypatch.setattr(reader, "current_value", renewed_first)
    assert repr(parameter) == text


def test_a_measurement_whose_first_iteration_makes_another_plan_is_refused(kit: Any, start: Callable[..., Any]) -> None:
    run = start("mlp", "tide")

    def step() -> None:
        kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=1, micro_batches=1)

    def renewed() -> None:
        step()
        run.session.renew(run.session.plan)

    with pytest.raises(PlanError, match="the first iteration has made another plan; measure again"):
        run.session.measure_iteration(renewed)
    mine, theirs = kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=2, micro_batches=1)
    assert mine == theirs
    assert run.session.measure_iteration(step).on_plan
