"""A plan re-timed on the seconds of a run: nothing is left of a difference that the steps' own seconds explain."""

from __future__ import annotations

import bisect
import functools
import random
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest

from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Kind, Queue
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import CannotPlan, DoesNotFit, PlanError
from pstar_sim.policy.registry import built_in
from pstar_sim.sim.play import play
from pstar_sim.sim.retime import retime
from pstar_sim.testing import random_jitter, random_machine, random_ranks, random_settings, random_workload


def random_plan(rng: random.Random) -> Plan:
    while True:
        workload = random_workload(rng)
        machine = random_ranks(rng, random_machine(rng, workload), rng.choice((1, 1, 2)))
        slow = {"compute_while_adam": 1.5, "adam_while_h2d": 1.2} if rng.random() < 0.5 else {}
        policy = rng.choice([f for name, f in built_in().items() if name != "optimal"])
        try:
            return policy(workload, replace(machine, slowdowns=slow), random_settings(rng))
        except (DoesNotFit, CannotPlan):
            continue


def periods_s(timeline: Timeline) -> list[float]:
    ends = [0.0] * timeline.iterations
    for span in timeline.spans:
        if span.queue is Queue.COMPUTE:
            ends[span.iteration] = max(ends[span.iteration], span.end_s)
    return [b - a for a, b in pairwise(ends)]


@pytest.mark.parametrize("seed", range(12))
def test_a_run_that_keeps_the_rules_is_explained_whole(seed: int) -> None:
    """A "run" by other seconds than predicted, on queues that slow each other down: simulated again on the seconds that
    its steps took, the plan takes as long as the run did."""
    rng = random.Random(f"retime {seed}")
    plan = random_plan(rng)
    run = play(plan, jitter=functools.cache(random_jitter(rng, plan)), max_iterations=5)
    assert retime(plan, run) == pytest.approx(statistics.median(periods_s(run)), rel=1e-9)


def test_what_the_queues_lose_between_steps_is_left() -> None:
    """A run in which every step begins late, by half a second for each moment before it: no step took longer, so the
    re-timed plan is as fast as predicted, and the run is slower by half a second per moment."""
    plan = random_plan(random.Random("gaps"))
    predicted = play(plan, max_iterations=4)
    ended = sorted(span.end_s for span in predicted.spans if span.kind is Kind.COMPUTE)
    spans = []
    for span in predicted.spans:
        late_s = 0.5 * bisect.bisect_right(ended, span.start_s)
        spans.append(replace(span, start_s=span.start_s + late_s, end_s=span.end_s + late_s))
    run = replace(predicted, spans=tuple(spans))
    moments = len(plan.workload.moments)
    assert statistics.median(periods_s(run)) >= predicted.iteration_s + 0.5 * (moments - 1)
    assert retime(plan, run) == pytest.approx(statistics.median(periods_s(predicted)), rel=1e-9)


def test_a_run_that_lacks_a_step_is_refused() -> None:
    plan = random_plan(random.Random("lacking"))
    run = play(plan)
    missing = run.spans[-1]
    with pytest.raises(PlanError, match=f"step {missing.step} of iteration {missing.iteration} was not measured"):
        retime(plan, replace(run, spans=run.spans[:-1]))
