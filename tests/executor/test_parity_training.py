"""Losses, parameters and moments equal plain AdamW's, at a budget where chunks have to leave the gpu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pstar_sim.core.step import Kind, Place, Queue

STEPS = 20
RELATIVE = 1e-6
TOLD_APART = (True, "step")  # checkpointing, update: what is run of each transformer where time is short


def steps_of(model: str, checkpointing: bool, update: str, micro_batches: int) -> int:
    """Twenty; where four micro-batches a step make twenty of them, five for most of the transformers."""
    whole = model == "mlp" or (model == "gpt2" and checkpointing == (update == "step"))
    return STEPS if micro_batches == 1 or whole else STEPS // micro_batches


def case(model: str, checkpointing: bool, update: str, micro_batches: int) -> Any:
    row = (model, checkpointing, update, micro_batches)
    long = steps_of(*row) * micro_batches > STEPS and model != "mlp"
    slow = long or (model in ("llama", "bert") and (checkpointing, update) != TOLD_APART)
    return pytest.param(*row, marks=[pytest.mark.slow] if slow else [])


CASES = [
    case(model, checkpointing, update, micro_batches)
    for model in ("gpt2", "llama", "bert", "mlp")
    for checkpointing in (False, True)
    for update in ("step", "eager")
    for micro_batches in (1, 4)
]


def assert_equal_training(kit: Any, run: Any, micro_batches: int, *, steps: int = STEPS) -> None:
    mine, theirs = kit.train_both(
        run.model, run.reference, run.optimizer, run.batches, steps=steps, micro_batches=micro_batches
    )
    assert mine == pytest.approx(theirs, rel=RELATIVE, abs=0)
    assert run.session.deviations == 0
    assert run.session.iteration == steps
    state = run.optimizer.state_dict()["state"]
    values = run.model.state_dict()
    plain = run.reference.optimizer.state_dict()["state"]
    for number, (name, parameter) in enumerate(run.reference.model.named_parameters()):
        assert kit.distance(values[name], parameter.detach()) <= RELATIVE, name
        for key in ("exp_avg", "exp_avg_sq"):
            assert kit.distance(state[number][key], plain[number][key]) <= RELATIVE, (name, key)
        assert int(state[number]["step"]) == int(plain[number]["step"])


@pytest.mark.parametrize(("model", "checkpointing", "update", "micro_batches"), CASES)
@pytest.mark.parametrize("policy", ["static_partition", "patrickstar", "tide"])
def test_equals_plain_adamw_while_chunks_are_evicted(
    kit: Any, start: Callable[..., Any], policy: str, model: str, checkpointing: bool, update: str, micro_batches: int
) -> None:
    clip = 0.5 if update == "step" else None
    run = start(model, policy, checkpointing=checkpointing, update=update, micro_batches=micro_batches, clip=clip)
    dropped = [s for s in run.plan.steps if s.kind in (Kind.DROP, Kind.FREE) and s.place is not Place.HOST]
    assert dropped, "the budget must force chunks off the gpu"
    assert_equal_training(kit, run, micro_batches, steps=steps_of(model, checkpointing, update, micro_batches))
    gone = [
        row
        for row in run.session.arena.log.changes
        if row.place is Place.GPU and row.list == "param" and row.change < 0
    ]
    assert gone, "no working list left the gpu during the run"


@pytest.mark.parametrize(("model", "checkpointing", "update", "micro_batches"), CASES)
def test_zero_offload_sends_every_gradient_to_the_host(
    kit: Any, start: Callable[..., Any], model: str, checkpointing: bool, update: str, micro_batches: int
) -> None:
    clip = 0.5 if update == "step" else None
    run = start(
        model, "zero_offload", checkpointing=checkpointing, update=update, micro_batches=micro_batches, clip=clip
    )
    assert_equal_training(kit, run, micro_batches, steps=steps_of(model, checkpointing, update, micro_batches))
    w = run.plan.workload
    everything = sum(
        run.plan.layout.payload_bytes(c.index, "grad")
        for c in run.plan.layout.chunks
        if run.plan.modes[c.index] == "cpu"
    )
    assert {t for row in w.gradients for t in row} <= {s.tensor for c in run.plan.layout.chunks for s in c.slots}
    assert "pin" not in run.plan.modes
    assert run.plan.moved_bytes["d2h"] == everything * micro_batches
    last = run.session.iteration - 1
    copied = sum(
        r.copied_bytes for r in run.session.steps.span_log if r.iteration == last and r.step.queue is Queue.D2H
    )
    assert copied == everything * micro_batches


@pytest.mark.parametrize("policy", ["all_on_gpu", "zero_offload", "static_partition", "patrickstar", "tide"])
@pytest.mark.parametrize(("micro_batches", "clip"), [(1, None), (1, 0.5), (3, 0.5)])
def test_bf16_equals_adamw_over_fp32_master_weights(
    kit: Any, start: Callable[..., Any], policy: str, micro_batches: int, clip: float | None
) -> None:
    run = start("gpt2", policy, dtype=torch.bfloat16, micro_batches=micro_batches, clip=clip)
    mine, theirs = kit.train_both(
        run.model, run.reference, run.optimizer, run.batches, steps=8, micro_batches=micro_batches
    )
    assert run.session.deviations == 0
    assert mine == pytest.approx(theirs, rel=RELATIVE, abs=0)
    state = run.optimizer.state_dict()["state"]
    for number, name in enumerate(run.reference.master):
        master = state[number]["param32"]
        assert kit.distance(master, run.reference.master[name].detach()) <= RELATIVE, name
        # the working copy is the master's cast, to the bit
        assert torch.equal(run.model.state_dict()[name], master.to(torch.bfloat16)), name
