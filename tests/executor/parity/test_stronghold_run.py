"""stronghold in the user's own loop: the window's plans train as plain AdamW does, to the bit (under clipping to the
rounding of the norm, which is summed in another order)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pstar_sim.core.step import Kind, Place, Queue

STEPS = 3


@pytest.mark.parametrize(
    ("policy", "update", "micro_batches", "clip"),
    [
        ("stronghold:window=1", "eager", 1, None),
        ("stronghold:window=2", "eager", 2, None),
        ("stronghold:window=1", "step", 2, 0.5),
        ("stronghold", "step", 1, 0.5),
    ],
)
@pytest.mark.parametrize("model", ["mlp", "gpt2"])
def test_trains_as_plain_adamw(
    kit: Any,
    start: Callable[..., Any],
    model: str,
    policy: str,
    update: str,
    micro_batches: int,
    clip: float | None,
) -> None:
    run = start(model, policy, micro_batches=micro_batches, update=update, clip=clip, layers=3)
    mine, theirs = kit.train_both(
        run.model, run.reference, run.optimizer, run.batches, steps=STEPS, micro_batches=micro_batches
    )
    assert run.session.deviations == 0
    assert mine == (theirs if clip is None else pytest.approx(theirs, rel=1e-6, abs=0))
    values = run.model.state_dict()
    for name, parameter in run.reference.model.named_parameters():
        if clip is None:
            assert torch.equal(values[name], parameter.detach()), name
        else:
            assert kit.distance(values[name], parameter.detach()) <= 1e-6, name
    arena = run.session.arena.log.changes
    assert any(row.place is Place.GPU and row.list == "param" and row.change < 0 for row in arena)
    assert {s.kind for s in run.plan.steps if s.queue in (Queue.ADAM, Queue.COMPUTE)} >= {
        Kind.CPU_UPDATE,
        Kind.GPU_UPDATE,
    }
