"""The bound of parity on a device (bounds.py), shown without one: other rounding stays within it, a wrong update does
not."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pstar_sim.core.plan import Settings
from pstar_sim.core.step import Kind
from pstar_sim.policy.registry import find_policy

STEPS = 3


@functools.lru_cache
def plan_with_both(kit: Any, name: str) -> Any:
    """Chunks updated here and chunks updated there."""
    model, draw = kit.build(name)
    w = kit.workload_of(model, draw(torch.Generator().manual_seed(9)), name=name)
    params = sum(t.bytes for t in w.tensors if t.tied_to is None)
    machine = kit.small_machine(w.peak_non_model_bytes + 2 * params)
    return find_policy("tide:pins=1")(w, machine, Settings(clip=True))


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_the_twin_updates_each_parameter_where_the_plan_does(
    kit: Any, start: Callable[..., Any], bounds: Any, name: str
) -> None:
    plan = plan_with_both(kit, name)
    assert {Kind.GPU_UPDATE, Kind.CPU_UPDATE} <= {step.kind for step in plan.steps}
    run = start(name, "tide", plan=plan, clip=0.5)
    run.reference = bounds.placed(kit, plan, run.reference.model, 1e-2, 0.1, 0.5)
    names = {n for n, _ in run.reference.model.named_parameters()}
    there = bounds.updated_on_gpu(plan)
    assert set(run.reference.host) == names - there
    assert names & there and names - there
    mine, theirs = bounds.train(kit, run, steps=STEPS)
    assert mine == pytest.approx(theirs, rel=bounds.LOSS, abs=0)
    assert bounds.tight(run.reference) > 0.9


def forget_decay(optimizer: Any, named: Any, step: int) -> None:
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0


def one_per_cent_more(optimizer: Any, named: Any, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 1.01e-2


def leave_one_out(optimizer: Any, named: Any, step: int) -> None:
    if step == 1:
        next(iter(named.values())).grad = None


def read_too_early(optimizer: Any, named: Any, step: int) -> None:
    """A copy that had not arrived: one row of one gradient is what it was before."""
    if step == 1:
        gradient = next(iter(named.values())).grad
        gradient[gradient.abs().sum(1).argmax()] = 0.0


def nothing(optimizer: Any, named: Any, step: int) -> None:
    return None


@pytest.mark.parametrize(
    ("name", "wrong", "within"),
    [
        ("mlp", nothing, True),
        ("gpt2", nothing, True),
        ("mlp", forget_decay, False),
        ("mlp", one_per_cent_more, False),
        ("gpt2", leave_one_out, False),
        ("mlp", read_too_early, False),
    ],
)
def test_other_rounding_is_within_the_bound_and_a_wrong_update_is_not(
    kit: Any, bounds: Any, name: str, wrong: Callable[[Any, Any, int], None], within: bool
) -> None:
    """Two plain loops. In the second, each gradient is off by up to half of NOISE, at random, as by other kernels."""
    model, draw = kit.build(name)
    other = copy.deepcopy(model)
    plan = plan_with_both(kit, name)
    reference = bounds.placed(kit, plan, model, 1e-2, 0.1, None)
    adam = torch.optim.AdamW(other.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    generator, batches = torch.Generator().manual_seed(5), kit.batches(draw)
    named: dict[str, nn.Parameter] = dict(other.named_parameters())
    apart = []
    for step in range(STEPS):
        batch = next(batches)
        for each in (model, other):
            kit.loss_of(each, batch).backward()
        for p in named.values():
            if p.grad is not None:
                noise = 2 * torch.rand(p.grad.shape, generator=generator) - 1
                p.grad += 0.5 * bounds.NOISE * float(p.grad.abs().max()) * noise * (p.grad != 0)
        wrong(adam, named, step)
        reference.step()
        adam.step()
        adam.zero_grad()
        apart.append(bounds.beyond(reference, other.state_dict()))
        reference.take_over(other.state_dict(), adam.state_dict()["state"])
    assert any(apart) != within, apart
