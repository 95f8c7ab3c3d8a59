"""Plans of small jobs, step by step, as they were when somebody last looked at them (update.py writes them anew)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from pstar_sim.core.plan import steps_from_text

HERE = Path(__file__).parent
spec = importlib.util.spec_from_file_location("golden_plans", HERE / "plans.py")
assert spec is not None and spec.loader is not None
plans = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plans)


@pytest.mark.parametrize("name", plans.JOBS)
def test_the_plan_is_the_one_that_was_kept(name: str) -> None:
    kept = (HERE / f"{name}.txt").read_text(encoding="utf-8")
    assert plans.text(name) == kept, "if this is meant: python tests/golden/update.py, and look at the difference"


@pytest.mark.parametrize("name", plans.JOBS)
def test_it_is_correct_and_its_text_is_the_whole_plan(name: str) -> None:
    plan = plans.plan(name)
    plan.check()
    kept = (HERE / f"{name}.txt").read_text(encoding="utf-8")
    assert steps_from_text(kept) == plan.steps


def test_every_kept_plan_is_looked_at() -> None:
    assert {path.stem for path in HERE.glob("*.txt")} == set(plans.JOBS)
