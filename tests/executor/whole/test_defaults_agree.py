"""What is not named agrees: clipping of a comparison and of AdamW, and the groups of a capture, a plan and AdamW."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import executor
import pstar_sim as ps
from executor.capture import capture_module
from pstar_sim.core.plan import Plan
from pstar_sim.errors import PlanError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layers(x)).square().sum()  # type: ignore[no-any-return]


def net() -> Net:
    torch.manual_seed(0)
    return Net()


BATCH = torch.arange(32.0).reshape(4, 8) / 8


def plan_of(model: nn.Module, **settings: object) -> Plan:
    traced = capture_module(model, (BATCH,))
    return ps.compare(traced, "virtual", policies="tide", barrier_cost=False, **settings).best().plan  # type: ignore[arg-type]


def trained(model: nn.Module, plan: Plan, spec: executor.AdamW) -> dict[str, torch.Tensor]:
    model, optimizer = executor.prepare(model, plan, spec)
    try:
        for _ in range(2):
            model(BATCH).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()
    finally:
        optimizer.session.close()


def plain(norm: float | None, groups: list[dict[str, object]] | None = None) -> dict[str, torch.Tensor]:
    model = net()
    params = [{**g, "params": [dict(model.named_parameters())[n] for n in g["params"]]} for g in groups or ()]  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW(params or list(model.parameters()), lr=0.1, fused=True)
    for _ in range(2):
        model(BATCH).backward()
        if norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("settings", "norm"), [({}, 1.0), ({"clip": False}, None)])
def test_adamw_clips_as_the_plan_says(settings: dict[str, bool], norm: float | None) -> None:
    """Nobody names a norm: a plan made with clipping clips at 1.0, one made without does not."""
    model = net()
    found = trained(model, plan_of(model, **settings), executor.AdamW(lr=0.1))
    assert same(found, plain(norm))
    assert not same(plain(1.0), plain(None))


def test_a_norm_that_is_named_counts() -> None:
    model = net()
    assert same(trained(model, plan_of(model), executor.AdamW(lr=0.1, max_grad_norm=0.25)), plain(0.25))


@pytest.mark.parametrize(
    ("settings", "norm", "said"),
    [
        ({}, None, "made with clipping, AdamW has max_grad_norm=None; leave max_grad_norm out .* plan with clip=False"),
        (
            {"clip": False},
            1.0,
            "made without clipping, AdamW has max_grad_norm=1.0; leave max_grad_norm out .* clip=True",
        ),
    ],
)
def test_a_contradiction_is_one_only_where_both_are_named(
    settings: dict[str, bool], norm: float | None, said: str
) -> None:
    model = net()
    plan = plan_of(model, **settings)
    with pytest.raises(PlanError, match=said):
        executor.prepare(model, plan, executor.AdamW(lr=0.1, max_grad_norm=norm))


@pytest.mark.parametrize("norm", [0, -1.0, float("nan"), True, "much"])
def test_a_norm_that_is_none(norm: object) -> None:
    with pytest.raises(PlanError, match="max_grad_norm="):
        executor.AdamW(max_grad_norm=norm)  # type: ignore[arg-type]


GROUPS: list[dict[str, object]] = [
    {"params": ["layers.0.weight", "layers.2.weight"], "lr": 0.05, "weight_decay": 0.5},
    {"params": ["layers.0.bias", "layers.2.bias", "norm.weight", "norm.bias"], "weight_decay": 0.0},
]


@pytest.mark.parametrize("as_spec", [True, False])
def test_groups_are_named_once_for_capture_and_optimizer(as_spec: bool) -> None:
    """Decay for matrices alone, as everybody has it: the capture is given the groups, or the AdamW that has them."""
    model = net()
    named = dict(model.named_parameters())
    groups = [{**g, "params": [named[n] for n in g["params"]]} for g in GROUPS]  # type: ignore[attr-defined]
    spec = executor.AdamW(groups, lr=0.1)
    traced = capture_module(model, (BATCH,), groups=spec if as_spec else groups)
    assert traced.model == "Net" and {t.name: t.group for t in traced.tensors if t.group == 0}.keys() == {
        "layers.0.weight",
        "layers.2.weight",
    }
    plan = ps.compare(traced, "virtual", policies="tide", barrier_cost=False).best().plan
    assert same(trained(model, plan, spec), plain(1.0, GROUPS))


def test_a_parameter_in_no_group_is_said_when_it_is_captured() -> None:
    model = net()
    with pytest.raises(PlanError, match=r"parameter 'norm.weight' is trainable but in no group"):
        capture_module(model, (BATCH,), groups=list(model.layers.parameters()))
