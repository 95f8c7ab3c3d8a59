"""Streamed chunks on the virtual accelerator: every second chunk's states visit it, and training is AdamW's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Kind, Place
from pstar_sim.policy import find_policy
from pstar_sim.workload.workload import with_optimizer

RELATIVE = 1e-6
STEPS = 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("update", "micro_batches", "clip"),
    [("eager", 1, None), ("step", 1, 0.5), ("eager", 3, None), ("step", 3, 0.5), ("step", 3, None)],
)
@pytest.mark.usefixtures("streaming")
def test_equals_plain_adamw_while_states_come_and_go(
    kit: Any,
    start: Callable[..., Any],
    update: str,
    micro_batches: int,
    clip: float | None,
) -> None:
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


@pytest.mark.parametrize(("update", "clip"), [("eager", None), ("step", 0.5), ("step", None)])
@pytest.mark.usefixtures("streaming")
def test_the_first_of_two_gradients_waits_for_the_update(
    kit: Any, start: Callable[..., Any], update: str, clip: float | None
) -> None:
    """In bf16 it takes half the bytes of a sum, which no list on the GPU has: the update, and the norm, add both. An
    iteration off the plan finds it, too."""
    run = start("mlp", "optimal", update=update, micro_batches=2, clip=clip, dtype=torch.bfloat16, replan_after=0)
    waiting = {s.chunk for s in run.plan.steps if (s.kind, s.list, s.place) == (Kind.ALLOC, "grad", Place.GPU)}
    streamed = {c for c, mode in enumerate(run.plan.modes) if mode == "stream"}
    assert streamed & waiting and not any(s.kind is Kind.CPU_ADD and s.chunk in streamed for s in run.plan.steps)
    for off_plan in (False, True, False):
        mine, theirs = kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=2, micro_batches=2)
        assert mine == pytest.approx(theirs, rel=RELATIVE, abs=0)
        if off_plan:
            for _ in range(2):
                kit.loss_of(run.model, next(run.batches))  # a forward alone: the rest of the iteration is off the plan
    assert run.session.deviations


@pytest.mark.parametrize("clip", [0.5, None])
@pytest.mark.usefixtures("streaming")
def test_without_masters_a_waiting_gradient_is_added_in_fp32(
    kit: Any, start: Callable[..., Any], clip: float | None
) -> None:
    """All lists are in bf16, but not a sum: values are those of sums on the host, to the bit."""
    model, draw = kit.build("mlp")
    example = {k: v.bfloat16() for k, v in draw(torch.Generator().manual_seed(9)).items()}
    w = kit.workload_of(model.to(torch.bfloat16), example, micro_batches=2, name="mlp")
    w = with_optimizer(w, masters="none")
    values, waiting = [], []
    for policy in ("optimal", "tide"):
        plan = kit.tight_plan(policy, w, Settings(clip=clip is not None))
        run = start("mlp", policy, micro_batches=2, clip=clip, dtype=torch.bfloat16, plan=plan)
        for _ in range(STEPS):
            kit.train_alone(run.model, run.optimizer, run.batches, 2)
        values.append(run.model.state_dict())
        waiting.append({s.chunk for s in plan.steps if (s.kind, s.list, s.place) == (Kind.ALLOC, "grad", Place.GPU)})
        waiting[-1] -= {c for c, mode in enumerate(plan.modes) if mode != "stream"}
    assert waiting[0] and not waiting[1]
    assert all(torch.equal(value, values[1][name]) for name, value in values[0].items())


@pytest.mark.parametrize(("update", "micro_batches", "clip"), [("eager", 1, None), ("step", 3, 0.5)])
@pytest.mark.usefixtures("streaming")
def test_parameters_that_never_leave_have_no_list_on_the_host(
    kit: Any,
    start: Callable[..., Any],
    update: str,
    micro_batches: int,
    clip: float | None,
) -> None:
    """Every second chunk is streamed and stays on the GPU. Evaluation between the iterations and an iteration off the
    plan find the values all the same."""
    model, draw = kit.build("mlp")
    w = kit.workload_of(model, draw(torch.Generator().manual_seed(9)), micro_batches=micro_batches, name="mlp")
    where = kit.small_machine(w.peak_non_model_bytes + 6 * sum(t.bytes for t in w.tensors))
    plan: Plan = find_policy("tide:streams=on,sums=on")(w, where, Settings(update=update, clip=clip is not None))
    plan.check()
    on_host = {r.chunk for r in plan.initial if r.list == "param" and r.place is Place.HOST}
    assert {c for c, mode in enumerate(plan.modes) if mode == "stream"} - on_host
    run = start("mlp", "tide", update=update, micro_batches=micro_batches, clip=clip, plan=plan, replan_after=0)
    for off_plan in (False, True, False):
        mine, theirs = kit.train_both(
            run.model, run.reference, run.optimizer, run.batches, steps=2, micro_batches=micro_batches
        )
        assert mine == pytest.approx(theirs, rel=RELATIVE, abs=0)
        values = run.model.state_dict()
        for name, parameter in run.reference.model.named_parameters():
            assert kit.distance(values[name], parameter.detach()) <= RELATIVE, name
        if off_plan:
            for _ in range(micro_batches):
                batch = next(run.batches)
                kit.loss_of(run.model, batch)  # a forward without a backward: the rest of the iteration is off the plan
    assert run.session.deviations
