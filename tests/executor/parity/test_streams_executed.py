"""Streamed chunks on the virtual accelerator: every second chunk's states visit it, and training is AdamW's."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pstar_sim.core.step import Kind

RELATIVE = 1e-6
STEPS = 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("update", "micro_batches", "clip"),
    [("eager", 1, None), ("step", 1, 0.5), ("eager", 3, None), ("step", 3, 0.5), ("step", 3, None)],
)
def test_equals_plain_adamw_while_states_come_and_go(
    kit: Any,
    start: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    update: str,
    micro_batches: int,
    clip: float | None,
) -> None:
    def every_second(order: Sequence[int], *_: object) -> tuple[list[int], list[int]]:
        return [], list(order[::2])

    monkeypatch.setattr(importlib.import_module("pstar_sim.policy.family.search"), "interleave", every_second)
    monkeypatch.setattr(importlib.import_module("pstar_sim.policy.optimal"), "_others", lambda *_: [])
    run = start("gpt2", "optimal", update=update, micro_batches=micro_batches, clip=clip)
    assert run.plan.modes.count("stream") > 2
    visits = {s.list for s in run.plan.steps if s.kind is Kind.FETCH and s.list != "param"}
    assert visits >= {"param32", "momentum", "variance"}
    mine, theirs = kit.train_both(
        run.model, run.reference, run.optimizer, run.batches, steps=STEPS, micro_batches=micro_batches
    )
    assert mine == pytest.approx(theirs, rel=RELATIVE, abs=0)
    assert run.session.deviations == 0
    values = run.model.state_dict()
    for name, parameter in run.reference.model.named_parameters():
        assert kit.distance(values[name], parameter.detach()) <= RELATIVE, name
