"""session.status(): figures of the last iteration, from what was logged anyway."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pstar_sim.core.step import Place


def test_before_the_first_iteration(start: Callable[..., Any]) -> None:
    run = start("mlp", "tide")
    run.session.drain()
    status = run.session.status()
    assert (status.iterations, status.on_plan, status.deviations) == (0, True, 0)
    assert status.iteration_s is None and status.tokens_per_s is None and status.links == {}
    assert 0 < status.gpu_bytes <= status.gpu_peak_bytes <= status.gpu_budget_bytes == run.plan.gpu_budget_bytes


@pytest.mark.parametrize("bandwidth", [None, (5e7, 1e8)])
def test_after_an_iteration_it_says_what_the_timeline_says(start: Callable[..., Any], kit: Any, bandwidth: Any) -> None:
    begun_s = time.monotonic()
    run = start("gpt2", "tide", micro_batches=2, bandwidth=bandwidth)
    for _ in range(3):
        kit.train_alone(run.model, run.optimizer, run.batches, 2)
    run.session.drain()
    took_s = time.monotonic() - begun_s
    status, timeline = run.session.status(), run.session.timeline()
    assert status.iterations == 3 and status.on_plan
    assert status.iteration_s == timeline.iteration_s
    assert status.tokens_per_s == pytest.approx(2 * kit.BATCH * kit.SEQUENCE / timeline.iteration_s)
    assert status.gpu_peak_bytes == timeline.peak_bytes["gpu"] <= status.gpu_budget_bytes
    assert 0 < status.host_bytes <= status.host_budget_bytes
    for direction, rate in zip(("h2d", "d2h"), bandwidth or (None, None)):
        use = status.links[direction]
        assert use.link_bytes_per_s == rate
        assert use.bytes_per_s == use.moved_bytes / timeline.iteration_s
        assert 0 < use.busy_share <= 1
        assert use.moved_bytes == run.plan.moved_bytes[direction]
        if rate is not None:  # what a link at full rate moves in that time, and no more
            assert 3 * use.moved_bytes <= rate * took_s
    assert dataclasses.is_dataclass(status) and status.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_reading_it_changes_nothing(start: Callable[..., Any], kit: Any) -> None:
    watched, alone = start("gpt2", "tide"), start("gpt2", "tide")
    for _ in range(3):
        mine = kit.train_alone(watched.model, watched.optimizer, watched.batches, 1)
        assert watched.session.status().iterations == watched.session.iteration
        assert mine == kit.train_alone(alone.model, alone.optimizer, alone.batches, 1)
    assert watched.session.deviations == 0


def test_bytes_of_every_single_iteration_are_the_plans(start: Callable[..., Any], kit: Any) -> None:
    """Copies run ahead of their iteration and on into the next; they count where they belong. An evaluation's count in
    the iteration that follows."""
    run = start("gpt2", "tide", micro_batches=2)
    planned = {direction: run.plan.moved_bytes[direction] for direction in ("h2d", "d2h")}
    seen: set[int] = set()
    for k in range(6):
        kit.train_alone(run.model, run.optimizer, run.batches, 2)
        links = run.session.status().links
        numbers = {use.iteration for use in links.values()}
        assert numbers in ({k}, {k - 1}) or k == 0
        if k:
            assert {direction: use.moved_bytes for direction, use in links.items()} == planned
        timeline = run.session.timeline()
        assert timeline.moved_bytes == planned
        seen |= numbers
    assert len(seen) > 1
    with torch.no_grad():
        kit.loss_of(run.model, next(run.batches))
    kit.train_alone(run.model, run.optimizer, run.batches, 2)
    run.session.drain()
    with_evaluation = run.session.status().links["h2d"]
    assert with_evaluation.iteration == 6 and with_evaluation.moved_bytes > planned["h2d"]


def test_off_plan_it_counts_the_deviation_and_its_bytes(start: Callable[..., Any], kit: Any) -> None:
    run = start("gpt2", "tide", micro_batches=2)
    kit.train_alone(run.model, run.optimizer, run.batches, 1)
    status = run.session.status()
    assert (status.iterations, status.on_plan, status.deviations) == (1, False, 1)
    assert "optimizer.step() came" in status.last_deviation
    assert status.links["h2d"].moved_bytes > 0


def test_a_thread_that_meets_a_renewal_reads_the_new_plans_parts(start: Callable[..., Any], kit: Any) -> None:
    """A progress thread has asked the state for its run when the loop's thread renews the plan, and takes the parts of
    the run only then."""
    run = start("mlp", "tide")
    kit.train_alone(run.model, run.optimizer, run.batches, 1)
    state = run.session.state
    former = state.run
    run.session.renew(run.plan)
    runs = iter([former])

    class Met(type(state)):  # type: ignore[misc]
        @property
        def run(self) -> Any:
            return next(runs, present)

    present = vars(state).pop("run")
    state.__class__ = Met
    status = run.session.status()
    assert (
        status.iterations == 1 and status.gpu_bytes == present.arena.payload_bytes(Place.GPU) + present.arena.tide_bytes
    )
    state.__class__ = Met.__base__
    state.run = present
