"""A plan and an optimizer that do not belong together are refused with one line, before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import executor
from executor.devices import rules
from pstar_sim.core.plan import Settings
from pstar_sim.core.step import Place
from pstar_sim.errors import PlanError
from pstar_sim.workload.workload import with_optimizer


@pytest.fixture
def refused(kit: Any) -> Callable[..., None]:
    def check(optimizer: str, message: str, *, own: Mapping[str, Any] | None = None, **spec: Any) -> None:
        model, draw = kit.build("mlp")
        w = with_optimizer(kit.workload_of(model, draw(torch.Generator().manual_seed(9))), optimizer)
        w = replace(w, optimizer=replace(w.optimizer, **(own or {})))
        plan = kit.tight_plan("tide", w, Settings(update="step", clip=False))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(PlanError, match=message) as caught:
            executor.prepare(model, plan, executor.AdamW(**spec))
        assert "\n" not in str(caught.value)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert all(type(p) is nn.Parameter for p in model.parameters())

    return check


def test_an_optimizer_the_executor_does_not_know(refused: Callable[..., None]) -> None:
    message = "optimizer 'ademamix', which the executor does not know; it runs adamw, adamw-bf16-states, adam,"
    refused("adamw", message, own={"name": "ademamix"})


def test_an_optimizer_of_a_package_that_is_not_there(
    refused: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    refused("adamw-8bit", "optimizer 'adamw-8bit', which bitsandbytes computes; install it")


def test_states_of_another_width(refused: Callable[..., None]) -> None:
    refused(
        "adamw-bf16-states", r"AdamW\(state_dtype=torch.float32\) was given; give AdamW\(state_dtype=torch.bfloat16\)"
    )
    refused(
        "adamw", r"AdamW\(state_dtype=torch.bfloat16\) was given.*or make the plan with --optimizer adamw-bf16-states",
        state_dtype=torch.bfloat16,
    )  # fmt: skip


def test_states_that_do_not_fit_the_name(refused: Callable[..., None]) -> None:
    odd = (("param32", 4), ("momentum", 4), ("variance", 2))
    refused("adamw", r"has states of .*2.* bytes; the executor keeps .*4.*4.*4.* bytes",
            own={"state_bytes": odd})  # fmt: skip


def test_a_state_dtype_that_is_not_known() -> None:
    with pytest.raises(PlanError, match=r"state_dtype=torch.float16 is not known; use torch.float32 or torch.bfloat16"):
        executor.AdamW(state_dtype=torch.float16)


def test_bf16_states_take_half_the_room(kit: Any) -> None:
    """8 instead of 12 bytes per parameter, on the host and in the arena."""
    model, draw = kit.build("mlp")
    plain = kit.workload_of(model, draw(torch.Generator().manual_seed(9)))
    sizes = {}
    for name in ("adamw", "adamw-bf16-states"):
        plan = kit.tight_plan("zero_offload", with_optimizer(plain, name), Settings(update="step", clip=False))
        spec = executor.AdamW(state_dtype=torch.bfloat16 if "bf16" in name else torch.float32)
        _, optimizer = executor.prepare(kit.build("mlp")[0], plan, spec)
        arena = optimizer.session.arena
        numel = sum(c.numel for c in plan.layout.chunks)
        held = sum(
            arena.at(Place.HOST, r.chunk, r.list).nbytes
            for r in arena.present
            if r.list in ("param32", "momentum", "variance")
        )
        sizes[name] = held / numel
        optimizer.session.close(restore=False)
    assert sizes == {"adamw": 12, "adamw-bf16-states": 8}


def test_parameters_may_come_as_a_generator(kit: Any) -> None:
    """`AdamW(model.parameters())` is read by the recording and by prepare."""
    model, draw = kit.build("mlp")
    spec = executor.AdamW(model.parameters())
    batch = draw(torch.Generator().manual_seed(9))
    w = executor.record(model, [batch], kit.small_machine(10**9), name="mlp", optimizer=spec, timed=0)
    plan = kit.tight_plan("tide", w, Settings(update="step", clip=False))
    _, optimizer = executor.prepare(model, plan, spec)
    assert len(optimizer.param_groups[0]["params"]) == 12
    optimizer.session.close(restore=False)
