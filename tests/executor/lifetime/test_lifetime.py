"""A session begins atomically, and it ends whatever happens while it ends."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import executor
import executor.lifetime.loading
import executor.saving.weights
import executor.session.following
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.errors import PlanError


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
            self.dies.wait(200)
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
        and not any(
            name in m.__dict__ for m in modules for name in ("_apply", "_call_impl", "__deepcopy__", "zero_grad")
        )
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


def test_a_prepare_with_weights_that_fails_gives_back_what_the_weights_lack(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters: their values are the model's own, also where the others come from a folder."""
    model, plan = model_and_plan(kit, torch.float32)
    adapter = "layers.0.weight"
    before = {name: value.clone() for name, value in model.state_dict().items()}
    save_file({name: value for name, value in before.items() if name != adapter}, tmp_path / "model.safetensors")
    monkeypatch.setattr(executor.saving.weights, "_is_adapter", lambda model, name: name == adapter)

    def start(session: Any) -> None:
        raise MemoryError("no thread can be started")

    with monkeypatch.context() as broken:
        broken.setattr(executor.Session, "start", start)
        with pytest.raises(MemoryError, match="no thread can be started"):
            executor.prepare(model, plan, executor.AdamW(), weights=tmp_path)
    assert is_plain(model)
    assert torch.equal(dict(model.named_parameters())[adapter], before[adapter])
    _, optimizer = executor.prepare(model, plan, executor.AdamW(), weights=tmp_path)
    optimizer.session.close()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_prepare_whose_values_cannot_come_back_ends_its_session_all_the_same(
    kit: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, plan = model_and_plan(kit, torch.float32)
    threads = torch.get_num_threads()

    def start(session: Any) -> None:
        raise MemoryError("no thread can be started")

    def lost(*_: Any) -> torch.Tensor:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(executor.Session, "start", start)
    monkeypatch.setattr(executor.lifetime.loading, "_loaded_value", lost)
    with pytest.raises(MemoryError, match="no thread can be started"):
        executor.prepare(model, plan, executor.AdamW(), threads=threads + 1)
    assert "left without values: RuntimeError: the device is gone" in caplog.text
    assert is_plain(model)
    assert torch.get_num_threads() == threads


def test_a_session_that_cannot_hook_the_model_leaves_it_as_it_was(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = model_and_plan(kit, torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def refuse(*_: Any) -> Any:
        raise MemoryError("no more hooks")

    with monkeypatch.context() as broken:
        broken.setattr(executor.driving.loop.Loop, "hook_gradients", refuse)
        with pytest.raises(MemoryError, match="no more hooks"):
            executor.prepare(model, plan, executor.AdamW())
    assert is_plain(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    executor.prepare(model, plan, executor.AdamW())[1].session.close()


def test_queues_that_were_stopped_are_refused_in_words(kit: Any) -> None:
    model, plan = model_and_plan(kit, torch.float32)
    queues = executor.ThreadQueues(watchdog_s=3)
    executor.prepare(model, plan, executor.AdamW(), queues=queues)[1].session.close()
    with pytest.raises(PlanError, match="the queues have been stopped with an earlier run; give new queues"):
        executor.prepare(model, plan, executor.AdamW(), queues=queues)
    assert is_plain(model)
    executor.prepare(model, plan, executor.AdamW(), queues=queues.renew())[1].session.close()


@pytest.mark.parametrize("fails", [False, True])
def test_a_channels_last_model_gets_its_memory_format_back(
    fails: bool, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After training and `close`, and after a prepare that fails behind the values. Results are plain torch's."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.LazyLinear(4))
    images = torch.randn(2, 3, 12, 12).to(memory_format=torch.channels_last)
    net(images)
    net.to(memory_format=torch.channels_last)
    twin, strides = copy.deepcopy(net), [p.stride() for p in net.parameters()]

    def loss(model: nn.Module) -> torch.Tensor:
        return model(images).square().mean()

    workload = executor.capture_module(net, (images,), loss=lambda model, batch: model(*batch).square().mean())
    plan = kit.tight_plan("tide", workload, Settings(clip=False))
    if fails:
        monkeypatch.setattr(executor.Session, "start", lambda session: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            executor.prepare(net, plan, executor.AdamW(lr=1e-2))
    else:
        _, optimizer = executor.prepare(net, plan, executor.AdamW(lr=1e-2))
        plain = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
        for _ in range(3):
            for model, steps in ((net, optimizer), (twin, plain)):
                loss(model).backward()
                steps.step()
                steps.zero_grad()
        optimizer.session.close()
    assert [p.stride() for p in net.parameters()] == strides and strides[0] != strides[-2]
    assert all(kit.distance(p.detach(), q.detach()) <= 1e-6 for p, q in zip(net.parameters(), twin.parameters()))
