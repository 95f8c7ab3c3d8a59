"""A session begins whole or not at all, and it ends whatever happens while it ends."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import executor
from pstar_sim.core.plan import Plan, Settings


class Refusing(executor.VirtualBackend):
    """Refuses memory that `prepare` asks for. left: takes before the first that is refused."""

    left = 10**9

    def take(self, payload: torch.Tensor) -> None:
        self.left -= threading.current_thread() is threading.main_thread()
        if self.left < 0:
            raise MemoryError("the accelerator's memory is somebody else's by now")
        super().take(payload)


class Dying(executor.VirtualBackend):
    """dies: from when on (None: never) the next copy of a side queue raises."""

    dies: threading.Event | None = None

    def copy(self, *args: Any) -> None:
        if self.dies is not None and threading.current_thread() is not threading.main_thread():
            self.dies.wait(30)
            raise OSError("the link fell off")
        super().copy(*args)


def model_and_plan(kit: Any, dtype: torch.dtype) -> tuple[nn.Module, Plan]:
    model, draw = kit.build("mlp")
    model.to(dtype)
    batch = {name: value.to(dtype) for name, value in draw(torch.Generator().manual_seed(9)).items()}
    return model, kit.tight_plan("tide", kit.workload_of(model, batch), Settings(clip=True))


def is_plain(model: nn.Module) -> bool:
    """No parameter, hook or method of a prepared model is left."""
    modules = list(model.modules())
    return (
        all(type(p) is nn.Parameter for p in model.parameters())
        and not any(m._forward_pre_hooks or m._forward_hooks or m._state_dict_hooks for m in modules)
        and not any(name in m.__dict__ for m in modules for name in ("_apply", "__deepcopy__", "zero_grad"))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prepare_that_fails_at_any_take_leaves_the_model_as_it_was(kit: Any, dtype: torch.dtype) -> None:
    """Refused memory for its k-th chunk, for every k; the same model can be prepared and trained afterwards."""
    model, plan = model_and_plan(kit, dtype)
    before = copy.deepcopy(model.state_dict())
    refused = 0
    while True:
        backend = Refusing()
        backend.left = refused
        try:
            _, optimizer = executor.prepare(model, plan, executor.AdamW(max_grad_norm=0.5), backend=backend)
        except MemoryError:
            assert is_plain(model)
            assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
            refused += 1
            continue
        break
    assert refused > len(plan.layout.chunks)
    optimizer.session.close()


def test_one_that_fails_behind_the_values_does_too(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = model_and_plan(kit, torch.float32)
    before = copy.deepcopy(model.state_dict())

    def fails(session: executor.Session) -> None:
        raise MemoryError("no room for the tide")

    monkeypatch.setattr(executor.Session, "start", fails)
    with pytest.raises(MemoryError, match="no room for the tide"):
        executor.prepare(model, plan, executor.AdamW(max_grad_norm=0.5))
    assert is_plain(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_queue_that_dies_while_the_session_closes_is_told_once_it_is_closed(
    kit: Any, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Dying()
    run = start("mlp", "zero_offload", backend=backend)
    kit.train_alone(run.model, run.optimizer, run.batches, 1)
    kit.loss_of(run.model, next(run.batches)).backward()
    backend.dies = awaited = threading.Event()
    run.optimizer.step()
    queues = run.session.queues
    settle = queues.settle

    def settled(iteration: int) -> None:
        awaited.set()
        settle(iteration)

    monkeypatch.setattr(queues, "settle", settled)
    assert queues.failure is None and not awaited.is_set()
    with pytest.raises(OSError, match="the link fell off"):
        run.session.close()
    assert run.session.closed and is_plain(run.model) and not run.session.arena.present
    assert not [t for t in queues._crew.threads if t.is_alive()]
    run.session.close()
