"""What runs beside the model (a teacher, an average of weights) counts from the first moment on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import executor
from executor.capture import capture_module
from executor.recording.record import record
from pstar_sim.errors import DoesNotFit

FP32 = 4
TEACHER = (32 * 256 + 256 + 256 * 4 + 4 + 7) * FP32  # two layers and a buffer


class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 256), nn.Linear(256, 4)
        self.register_buffer("seen", torch.zeros(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))  # type: ignore[no-any-return]


def distilling(teacher: nn.Module) -> Any:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        with torch.no_grad():
            wanted = teacher(x)
        return ((out - wanted) ** 2).mean()

    return loss


def student() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def test_its_bytes_by_hand(kit: Any) -> None:
    """8 rows. The teacher's parameters and buffers are there at every moment. Its own forward, in the moment after the
    model's, has a hidden layer of 256 beside the model's batch, hidden layer (before and after Tanh is one: the first
    is gone) and output."""
    x, teacher = torch.randn(8, 32), Teacher()
    alone = capture_module(student(), x, loss=lambda model, batch: model(batch).square().mean())
    captured = capture_module(student(), x, loss=distilling(teacher), name="student")
    machine = kit.small_machine(10**6)
    recorded = record(student(), [x], machine, loss=distilling(teacher), name="student", timed=0)
    for w in (captured, recorded):
        assert [m.name for m in w.moments] == [m.name for m in alone.moments]
        assert min(m.start_bytes for m in w.moments) == TEACHER
        (after,) = [m for m in w.moments if m.name == "end:<root>"]
        rows = 8 * (32 + 32 + 4) * FP32  # batch, hidden layer after Tanh, output
        assert after.peak_bytes == TEACHER + rows + 8 * (256 + 4) * FP32
        assert w.notes == "beside the model, on the GPU throughout: Teacher (37.93 kB)"
    assert [m.peak_bytes for m in recorded.moments] == [m.peak_bytes for m in captured.moments]
    assert not alone.notes


def test_what_does_not_fit_is_refused_before_the_first_step() -> None:
    model = student()
    adam = torch.optim.AdamW(model.parameters(), fused=True)
    with pytest.raises(DoesNotFit, match=r"beside the model, on the GPU throughout: Teacher \(37\.93 kB\)"):
        executor.offload(model, adam, torch.randn(8, 32), gpu_memory=TEACHER, loss=distilling(Teacher()))
    _, adam = executor.offload(model, adam, torch.randn(8, 32), gpu_memory=2 * TEACHER, loss=distilling(Teacher()))
    adam.session.close()
