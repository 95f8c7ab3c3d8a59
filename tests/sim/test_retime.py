"""A plan re-timed on the seconds of a run: nothing is left of a difference that the steps' own seconds explain."""

from __future__ import annotations

import bisect
import functools
import random
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest
from drawn import TIME_TO_SHRINK, chances, jobs, planned, seeds
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Kind, Queue
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import PlanError
from pstar_sim.policy.registry import built_in
from pstar_sim.sim.play import play
from pstar_sim.sim.retime import retime
from pstar_sim.testing import random_jitter

pytestmark = TIME_TO_SHRINK


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Of every policy but the one that searches, on one or two ranks; half of the machines have measured slow-downs."""
    job, chance = draw(jobs(ranks=(1, 1, 2))), draw(chances())
    slow = {"compute_while_adam": 1.5, "adam_while_h2d": 1.2} if chance.random() < 0.5 else {}
    policy = chance.choice([f for name, f in built_in().items() if name != "optimal"])
    plan = planned(policy, job._replace(machine=replace(job.machine, slowdowns=slow)))
    assume(plan is not None)
    assert plan is not None
    return plan


def periods_s(timeline: Timeline) -> list[float]:
    ends = [0.0] * timeline.iterations
    for span in timeline.spans:
        if span.queue is Queue.COMPUTE:
            ends[span.iteration] = max(ends[span.iteration], span.end_s)
    return [b - a for a, b in pairwise(ends)]


@settings(max_examples=12)
@given(plans(), seeds())
def test_a_run_that_keeps_the_rules_is_explained_whole(plan: Plan, shake: random.Random) -> None:
    """A "run" by other seconds than predicted, on queues that slow each other down: simulated again on the seconds that
    its steps took, the plan takes as long as the run did."""
    run = play(plan, jitter=functools.cache(random_jitter(shake, plan)), max_iterations=5)
    assert retime(plan, run) == pytest.approx(statistics.median(periods_s(run)), rel=1e-9)


@settings(max_examples=4)
@given(plans())
def test_what_the_queues_lose_between_steps_is_left(plan: Plan) -> None:
    """A run in which every step begins late, by half a second for each moment before it: no step took longer, so the
    re-timed plan is as fast as predicted, and the run is slower by half a second per moment."""
    predicted = play(plan, max_iterations=4)
    ended = sorted(span.end_s for span in predicted.spans if span.kind is Kind.COMPUTE)
    spans = []
    for span in predicted.spans:
        late_s = 0.5 * bisect.bisect_right(ended, span.start_s)
        spans.append(replace(span, start_s=span.start_s + late_s, end_s=span.end_s + late_s))
    run = replace(predicted, spans=tuple(spans))
    lasting = sum(s.kind is Kind.COMPUTE and s.iteration == 0 and s.end_s > s.start_s for s in predicted.spans)
    assert statistics.median(periods_s(run)) >= predicted.iteration_s + 0.5 * (lasting - 1)
    assert retime(plan, run) == pytest.approx(statistics.median(periods_s(predicted)), rel=1e-9)


@settings(max_examples=4)
@given(plans())
def test_a_run_that_lacks_a_step_is_refused(plan: Plan) -> None:
    run = play(plan)
    missing = run.spans[-1]
    with pytest.raises(PlanError, match=f"step {missing.step} of iteration {missing.iteration} was not measured"):
        retime(plan, replace(run, spans=run.spans[:-1]))
