"""The net of net.py: plans and timelines of about 400 jobs are what they were when net.json was written (update.py)."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from pstar_sim.core.step import Ref

spec = importlib.util.spec_from_file_location("golden_net", Path(__file__).with_name("net.py"))
assert spec is not None and spec.loader is not None
net = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = net  # dataclasses look their module up
spec.loader.exec_module(net)

JOBS = net.jobs()
KEPT = net.load()


@pytest.mark.parametrize("name", JOBS)
def test_plan_and_timeline_are_those_that_were_kept(name: str) -> None:
    found = net.differences(KEPT[name], net.record(JOBS[name]()))
    assert not found, "if this is meant: python tests/golden/update.py, and say why, plan by plan"


def test_the_net_holds_all_jobs_and_enough_plans() -> None:
    assert set(KEPT) == set(JOBS)
    assert sum("plan" in kept for kept in KEPT.values()) >= 300
    for policy in net.POLICIES:
        assert sum(name.startswith(f"{policy},") and "plan" in kept for name, kept in KEPT.items()) >= 10, policy


def test_a_difference_is_seen() -> None:
    """One wait less, one place traded, a period that is longer by 1e-8: each is found; another numbering is not."""
    job = JOBS["tide, 1 ranks, 1 micro-batches, clip"]()
    plan = net.find_policy(job.policy)(job.workload, job.machine, job.settings)
    steps = plan.steps
    assert net.plan_hash(plan) == KEPT["tide, 1 ranks, 1 micro-batches, clip"]["plan"]
    waiting = next(i for i, s in enumerate(steps) if len(s.after) > 1)
    less = structs.replace(steps[waiting], after=steps[waiting].after[1:])
    assert net.plan_hash(replace(plan, steps=(*steps[:waiting], less, *steps[waiting + 1 :]))) != net.plan_hash(plan)
    renumbered = tuple(
        structs.replace(s, id=s.id + 7, after=tuple(Ref(ref.id + 7, ref.back) for ref in s.after)) for s in steps
    )
    assert net.plan_hash(replace(plan, steps=renumbered)) == net.plan_hash(plan)
    by_queue = tuple(sorted(steps, key=lambda s: s.queue.value))
    assert net.plan_hash(replace(plan, steps=by_queue)) == net.plan_hash(plan)
    kept = KEPT["tide, 1 ranks, 1 micro-batches, clip"]
    timeline = kept["timeline"]
    for factor, seen in ((1 + 1e-8, True), (1 + 1e-11, False)):
        now = {**kept, "timeline": {**timeline, "iteration_s": timeline["iteration_s"] * factor}}
        assert bool(net.differences(kept, now)) is seen
