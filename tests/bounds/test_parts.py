"""Bounds of jobs whose large chunks may be updated in parts."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from bounded import hold, random_job

from pstar_sim.bounds import bound_facts
from pstar_sim.core.layout import Layout
from pstar_sim.errors import CannotPlan, DoesNotFit
from pstar_sim.policy.passes.parts import in_parts
from pstar_sim.policy.registry import find_policy

FOUR = 4


def in_fours(layout: Layout) -> Mapping[int, int]:
    return {c.index: FOUR for c in layout.chunks if not (c.small or c.frozen) and layout.slice_numel(c.index) >= 512}


def test_no_plan_in_parts_is_below_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Job 271 is one of two in 231 where bounds that ignore parts exceed a plan's seconds (2.17 s, the plan 2.01 s)."""
    broken, held = [], 0
    for number in (271, *range(1, 16)):
        rng = random.Random(f"b {number}")
        w, machine, settings = random_job(rng)
        policy = find_policy(rng.choice(("tide", "optimal", "static_partition", "l2l")))
        try:
            plan = policy(w, machine, settings)
        except (DoesNotFit, CannotPlan):
            continue
        parted = in_parts(plan, in_fours(plan.layout))
        if parted is plan:
            continue
        with monkeypatch.context() as patch:
            patch.setattr(bound_facts, "parts_of", in_fours)
            assert not hold(parted).wrong, number
        held += 1
        if number == 271:
            broken = list(hold(parted).wrong)
    assert held >= 8
    assert broken
