"""Layers dropped at random: captured and recorded iterations show every layer, and training drops them as plain torch
does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import executor
from executor.capture import capture_module
from executor.recording.record import record
from pstar_sim.errors import PlanError

DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: [torch.rand([]) for _ in range(4)],
    "random": lambda: [random.uniform(0, 1) for _ in range(4)],
    "numpy": lambda: [numpy.random.random() for _ in range(4)],
    "an array of torch's": lambda: torch.rand(4),
    "an array that is filled": lambda: torch.empty(4).uniform_(),
    "an array of numpy's": lambda: numpy.random.uniform(0, 1, size=4),
}
DROPS: dict[str, Callable[[Any], bool]] = {
    "2 in 5": lambda drawn: drawn < 0.4,
    "9 in 10": lambda drawn: drawn < 0.9,
    "9 in 10, and runs below": lambda drawn: drawn >= 0.1,
}
each = pytest.mark.parametrize("name", DRAWS)
GPU_BYTES = 30_000  # five layers have 4,224 B each, with gradients and states 16,896 B


class Dropping(nn.Module):
    """A first layer, and four of which a forward leaves some out."""

    def __init__(self, draw: Callable[[], Any], drops: Callable[[Any], bool]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.draw, self.drops = draw, drops
        self.first = nn.Linear(32, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer, drawn in zip(self.layers, self.draw()):
            if not (self.training and self.drops(drawn)):
                x = x + torch.tanh(layer(x))
        return (x**2).mean()


def seed() -> None:
    random.seed(3)
    numpy.random.seed(3)
    torch.manual_seed(3)


@each
@pytest.mark.parametrize("share", DROPS)
def test_every_layer_is_in_the_trace(kit: Any, name: str, share: str) -> None:
    module, x = Dropping(DRAWS[name], DROPS[share]), torch.randn(4, 32)
    seed()
    expected = [float(drawn) for drawn in DRAWS[name]()]
    seed()
    captured = capture_module(module, x)
    recorded = record(module, [x], kit.small_machine(GPU_BYTES), name="dropping", timed=1)
    assert [float(drawn) for drawn in DRAWS[name]()] == expected  # drawn by nobody before
    for w in (captured, recorded):
        assert {t for gradients in w.gradients for t in gradients} == set(range(10))
    assert [m.name for m in recorded.moments] == [m.name for m in captured.moments]


def train(model: nn.Module, optimizer: Any) -> tuple[list[float], set[int]]:
    """Returns the losses of eight iterations, and the numbers of layers that ran in one of them."""
    seed()
    losses, ran = [], []
    count = [layer.register_forward_hook(lambda *_: ran.append(len(losses))) for layer in model.layers]  # type: ignore
    for row in torch.randn(8, 4, 32, generator=torch.Generator().manual_seed(1)):
        loss = model(row)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    for handle in count:
        handle.remove()
    return losses, {ran.count(number) for number in range(8)}


@pytest.mark.parametrize(
    ("name", "share"),
    [
        pytest.param(name, share, marks=[pytest.mark.whole] * ((number + turn) % 2))
        for number, name in enumerate(DRAWS)
        for turn, share in enumerate(list(DROPS)[:2])
    ],
)
def test_training_is_plain_torch_to_the_bit(name: str, share: str) -> None:
    """A layer that an iteration drops gets no update; an evaluation drops none. Shares by turns without --whole."""
    plain, other = (Dropping(DRAWS[name], DROPS[share]) for _ in range(2))
    expected, ran = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True))
    assert len(ran) > 1  # layers were dropped
    adam = torch.optim.AdamW(other.parameters(), lr=1e-2, fused=True)
    model, optimizer = executor.offload(other, adam, torch.randn(4, 32), gpu_memory=GPU_BYTES)
    losses, _ = train(model, optimizer)
    assert losses == expected
    assert 0 < optimizer.session.deviations <= 8
    row = torch.ones(4, 32)
    with torch.no_grad():
        assert torch.equal(model.eval()(row), plain.eval()(row))
    optimizer.session.close(restore=False)


class Choosing(Dropping):
    """Draws the layers themselves, which no trace answers."""

    def __init__(self) -> None:
        super().__init__(list, bool)
        self.dropped = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number in sorted(random.sample(range(4), 4 - self.dropped)):
            x = x + torch.tanh(self.layers[number](x))
        return (x**2).mean()


def offloaded(dropped: int) -> tuple[nn.Module, Any]:
    """Returns a model that is offloaded with this number of layers dropped, and then trains with two of four."""
    model = Choosing()
    model.dropped = dropped
    random.seed(0)  # the trace has layers 0, 1 and 3
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    model, optimizer = executor.offload(model, adam, torch.randn(4, 32), gpu_memory=GPU_BYTES)
    model.dropped = 2
    return model, optimizer


def test_layers_that_the_trace_leaves_out_are_named_before_training(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = offloaded(1)
    (said,) = [record.message for record in caplog.records]
    assert said.startswith("layers.2 got no gradient in the iteration that the plan was made from")
    assert said.endswith("(a layerdrop of 0 while the plan is made)")
    with pytest.raises(PlanError, match=r"'layers\..* never does.*a layerdrop of 0 while the plan is made"):
        train(model, optimizer)
    optimizer.session.close(restore=False)


def test_a_plan_made_without_layers_left_out_trains_with_them(caplog: pytest.LogCaptureFixture) -> None:
    """What the warning advises, does."""
    plain = Choosing()
    expected, ran = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True))
    model, optimizer = offloaded(0)
    assert not caplog.records and ran == {2}
    assert train(model, optimizer)[0] == expected
    (said,) = [record.message for record in caplog.records if "no new plan" in record.message]
    assert said == (
        "no new plan after 3 iterations off plan: its iteration leaves out layers that the present plan trains, and "
        "would lose their states"
    )
    optimizer.session.close(restore=False)
