"""Optimizer states that go to torch.optim.AdamW and come back: whoever goes on, goes on bit-identically."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import executor
from executor.capture import capture_module
from pstar_sim.core.plan import Settings
from pstar_sim.errors import ContractError, PlanError

SHAPE = {"lr": 1e-2, "weight_decay": 0.1}


def train_plain(kit: Any, model: torch.nn.Module, optimizer: Any, rows: list[Any], after: Any = None) -> None:
    for row in rows:
        kit.loss_of(model, row).backward()
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after.step()


def same_values(mine: dict[str, torch.Tensor], theirs: torch.nn.Module) -> bool:
    return all(torch.equal(mine[name], value) for name, value in theirs.state_dict().items())


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)


@pytest.mark.parametrize("fused", [None, True, False])
def test_plain_adamw_goes_on_from_ours_to_the_bit(kit: Any, start: Callable[..., Any], fused: bool | None) -> None:
    """Whatever it was made with: torch's AdamW takes the kernel from the groups that it loads."""
    run = start("mlp", "tide")
    scheduler = schedule(run.optimizer)
    rows = [next(run.batches) for _ in range(6)]
    train_plain(kit, run.model, run.optimizer, rows[:3], scheduler)
    twin, _ = kit.build("mlp", seed=5)
    twin.load_state_dict(run.model.state_dict())
    plain = torch.optim.AdamW(twin.parameters(), **SHAPE, fused=fused)
    after = schedule(plain)
    after.load_state_dict(scheduler.state_dict())
    plain.load_state_dict(run.optimizer.state_dict())
    groups = run.optimizer.param_groups[0]
    assert groups.keys() == plain.param_groups[0].keys()
    assert groups["initial_lr"] == plain.param_groups[0]["initial_lr"] == SHAPE["lr"]
    assert groups["lr"] == plain.param_groups[0]["lr"] < SHAPE["lr"]
    train_plain(kit, run.model, run.optimizer, rows[3:], scheduler)
    train_plain(kit, twin, plain, rows[3:], after)
    assert same_values(run.model.state_dict(), twin)


@pytest.mark.parametrize("fused", [None, True])
def test_ours_goes_on_from_plain_adamw_and_back(kit: Any, start: Callable[..., Any], fused: bool | None) -> None:
    """Of states made by another kernel the updates from here on are the fused ones, and are called so."""
    run = start("mlp", "tide")
    rows = [next(run.batches) for _ in range(9)]
    twin = copy.deepcopy(run.reference.model)
    plain = torch.optim.AdamW(twin.parameters(), **SHAPE, fused=fused)
    train_plain(kit, twin, plain, rows[:3])
    run.session.close(restore=False)
    model = copy.deepcopy(twin)
    model, optimizer = executor.prepare(model, run.plan, executor.AdamW(lr=1.0))
    given = plain.state_dict()
    optimizer.load_state_dict(given)
    given["param_groups"][0]["lr"] = 7.0  # what was loaded is a copy
    assert optimizer.param_groups[0]["lr"] == SHAPE["lr"] and optimizer.param_groups[0]["fused"] is True
    plain.param_groups[0]["lr"] = SHAPE["lr"]
    plain.load_state_dict(optimizer.state_dict())
    train_plain(kit, model, optimizer, rows[3:6])
    train_plain(kit, twin, plain, rows[3:6])
    assert same_values(model.state_dict(), twin)
    optimizer.session.close(restore=False)


def test_groups_that_name_a_kernel_of_their_own(kit: Any) -> None:
    """Updates here are fused whatever a group says; the groups say so too. What cannot be done is refused."""
    model, draw = kit.build("mlp")
    with pytest.raises(PlanError, match="differentiable=True is not supported"):
        executor.AdamW([{"params": model.parameters(), "differentiable": True}]).groups(model)
    spec = executor.AdamW([{"params": model.parameters(), "fused": False, "foreach": True}], **SHAPE)
    w = capture_module(model, draw(torch.Generator().manual_seed(9)), name="mlp")
    plan = kit.tight_plan("tide", w, Settings(update="step", clip=False))
    model, optimizer = executor.prepare(model, plan, spec)
    assert (optimizer.param_groups[0]["fused"], optimizer.param_groups[0]["foreach"]) == (True, None)
    optimizer.param_groups[0]["amsgrad"] = True
    row = draw(torch.Generator().manual_seed(9))
    kit.loss_of(model, row).backward()
    with pytest.raises(ContractError, match="amsgrad=True, which is not supported"):
        optimizer.step()
    optimizer.session.close(restore=False)


def test_a_state_that_is_not_adamws_is_refused_before_anything_changes(kit: Any, start: Callable[..., Any]) -> None:
    run = start("mlp", "tide")
    kit.train_alone(run.model, run.optimizer, run.batches, 1)
    before = run.optimizer.state_dict()
    twin = run.reference.model
    sgd = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    kit.train_alone(twin, sgd, run.batches, 1)
    amsgrad = torch.optim.AdamW(twin.parameters(), amsgrad=True)
    foreign = copy.deepcopy(before)
    foreign["state"][99] = foreign["state"].pop(0)
    for given, message in (
        (sgd.state_dict(), "has no betas; give the state of the plan.s optimizer, adamw"),
        (amsgrad.state_dict(), "group 0 has amsgrad=True, which is not supported"),
        (foreign, "a row 99, but no group has that parameter"),
    ):
        with pytest.raises(ContractError, match=message):
            run.optimizer.load_state_dict(given)
    after = run.optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    assert all(
        torch.equal(value, after["state"][number][key])
        for number, row in before["state"].items()
        for key, value in row.items()
    )


def test_hooks_of_the_optimizer_are_called(kit: Any, start: Callable[..., Any]) -> None:
    run = start("mlp", "tide")
    kit.train_alone(run.model, run.optimizer, run.batches, 1)
    called: list[str] = []
    run.optimizer.register_state_dict_pre_hook(lambda optimizer: called.append("before saving"))
    run.optimizer.register_state_dict_post_hook(lambda optimizer, state: {**state, "mine": 1})
    run.optimizer.register_load_state_dict_pre_hook(lambda optimizer, state: called.append(f"got {state['mine']}"))
    run.optimizer.register_load_state_dict_post_hook(lambda optimizer: called.append("after loading"))
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    assert called == ["before saving", "got 1", "after loading"]
    assert not run.optimizer.state  # states live in chunks, not here


class Summed(torch.nn.Linear):
    def get_extra_state(self) -> float:
        return float(self.weight.detach().norm())

    def set_extra_state(self, state: float) -> None: ...


def test_extra_state_of_a_module_reads_its_parameters(kit: Any) -> None:
    model, draw = kit.build("mlp")
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = Summed
    before = {name: value.clone() if torch.is_tensor(value) else value for name, value in model.state_dict().items()}
    plan = kit.tight_plan("tide", kit.workload_of(model, draw(torch.Generator().manual_seed(9))), Settings(clip=False))
    _, optimizer = executor.prepare(model, plan, executor.AdamW(lr=1e-2), watchdog_s=5.0)
    now = model.state_dict()
    optimizer.session.close(restore=False)
    assert list(now) == list(before)
    assert all(torch.equal(torch.as_tensor(now[name]), torch.as_tensor(value)) for name, value in before.items())
