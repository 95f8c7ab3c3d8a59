"""A compiled run by a plan beside a compiled plain run whose graphs end at the same modules: equal to the bit."""

from __future__ import annotations

import contextlib
import copy
import logging
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import nn
from torch.nn import functional

import executor
from executor.devices.torch26 import compiler_watches
from executor.moments import compiled

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of torch's compiler

WIDTH, STEPS = 32, 3


class Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, *inner: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for width in inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    """A compiler that knows no graph of another test, and one thread, as the virtual accelerator computes. Its kernels
    are scalar, which g++ builds in half the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    with torch._inductor.config.patch({"cpp.vec_isa_ok": False}):
        yield
    torch._dynamo.reset()
    torch.set_num_threads(threads)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def compile_layers(model: nn.Module, backend: str) -> None:
    for layer in model.layers:
        layer.compile(backend=backend)


def cut_at_modules(model: nn.Module) -> None:
    """Hooks that do nothing and that the compiler does not trace, where a plan has its own."""
    hook = torch._dynamo.disable(lambda *_: None)
    for module in model.modules():
        module.register_forward_pre_hook(hook)
        module.register_forward_hook(hook)


def train(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Losses of a few steps."""
    draw = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        loss = model(torch.randn(8, WIDTH, generator=draw))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def offloaded(model: nn.Module, backend: str) -> list[torch.Tensor]:
    """Losses and parameters of a run by a plan whose blocks are compiled afterwards."""
    _, optimizer = executor.offload(model, adamw(model), (torch.zeros(8, WIDTH),), gpu_memory="400KB", policy="tide")
    compile_layers(model, backend)
    losses = train(model, optimizer)
    assert optimizer.session.deviations == 0
    optimizer.session.close()
    return [*losses, *model.parameters()]


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param("inductor", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")),
    ],
)
def test_a_compiled_run_is_the_compiled_plain_run_with_its_hooks(backend: str) -> None:
    """The first iteration is counted operator by operator and runs as written, so the plain run's does too."""
    torch.manual_seed(0)
    model = Stack(WIDTH)
    twin = copy.deepcopy(model)
    mine = offloaded(model, backend)
    torch._dynamo.reset()
    cut_at_modules(twin)
    compile_layers(twin, backend)
    stances = iter(["force_eager", *["default"] * (STEPS - 1)])

    def begin(*_: Any) -> None:
        torch.compiler.set_stance(next(stances))

    twin.register_forward_pre_hook(begin)
    theirs = [*train(twin, adamw(twin)), *twin.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_shapes_beyond_torchs_limit_run_as_written(caplog: pytest.LogCaptureFixture) -> None:
    """nn.Linear.forward is compiled by itself, up to 8 times; these blocks have more shapes. (torch 2.6 compiles no
    forward of torch.nn by itself.)"""
    torch.manual_seed(0)
    model = Stack(*range(16, 112, 16))
    twin = copy.deepcopy(model)
    compiler = logging.getLogger("torch._dynamo.convert_frame")
    compiler.addHandler(caplog.handler)
    try:
        mine = offloaded(model, "aot_eager")
    finally:
        compiler.removeHandler(caplog.handler)
    if compiler_watches() is not None:
        assert any("_limit (8)" in record.getMessage() for record in caplog.records)
    theirs = [*train(twin, adamw(twin)), *twin.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.timeout(120)
def test_a_pause_that_a_collection_of_garbage_ends_while_another_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session's finalizer may run inside the lock, in the same thread."""
    end_first = compiled.pause_compiler()
    plain = compiled.outside_compiled_code

    def collecting() -> contextlib.AbstractContextManager[None]:
        monkeypatch.setattr(compiled, "outside_compiled_code", plain)
        end_first()
        return plain()

    monkeypatch.setattr(compiled, "outside_compiled_code", collecting)
    end_second = compiled.pause_compiler()
    assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    end_second()
    assert torch._dynamo.eval_frame._stance.stance == "default"
