"""Stochastic rounding of pure bf16: right in the mean, and the same bits wherever a chunk is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from plain_loop import train
from torch import nn

import executor
from executor.devices.rounding import ROUND_BLOCK, round_stochastically
from pstar_sim.errors import PlanError

WIDTH = 48


def rounded(value: torch.Tensor, update: int = 0, tensor: int = 0, offset: int = 0) -> torch.Tensor:
    target = torch.empty(value.shape, dtype=torch.bfloat16)
    round_stochastically(target, value, update=update, tensor=tensor, offset=offset)
    return target


def test_the_mean_is_the_value_and_each_result_a_neighbour() -> None:
    """A quarter of the way from 1 to 1 + 1/128, its neighbour in bf16: a quarter of the results is the upper one."""
    value = torch.full((1 << 16,), 1 + 1 / 512)
    for update, tensor in ((0, 0), (1, 0), (0, 1), (700, 31)):
        found = rounded(value, update, tensor).float()
        assert set(found.tolist()) == {1.0, 1 + 1 / 128}
        upper = (found > 1).float()
        # the standard deviation of a share of 65,536 draws is 0.0017
        assert abs(float(upper.mean()) - 0.25) < 0.008
        together = float((upper[1:] * upper[:-1]).mean())  # neighbours are independent: 1/16
        assert abs(together - 0.0625) < 0.008
    first, second = (rounded(value, update) for update in (0, 1))
    assert abs(float(((first > 1) & (second > 1)).float().mean()) - 0.0625) < 0.008


def test_values_of_bf16_and_what_is_not_finite_stay() -> None:
    exact = torch.tensor([0.0, -0.0, 1.5, -3.0, 2.0**-126, float("inf"), -float("inf"), float("nan")])
    found = rounded(exact)
    assert torch.equal(found[:-1], exact[:-1].bfloat16()) and bool(found[-1].isnan())
    assert bool((rounded(torch.tensor([-1 - 1 / 512] * 64)) <= -1).all())


def test_bits_follow_the_element_and_not_the_piece() -> None:
    value = torch.randn(ROUND_BLOCK + 1000, generator=torch.Generator().manual_seed(1))
    whole = rounded(value, 3, 5)
    cut = torch.cat([rounded(value[:700], 3, 5), rounded(value[700:], 3, 5, 700)])
    assert torch.equal(whole, cut)


def net() -> nn.Sequential:
    torch.manual_seed(3)
    layers = (layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    return nn.Sequential(*layers).bfloat16()


def batches() -> Iterator[torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    while True:
        yield torch.randn(4, WIDTH, generator=draw).bfloat16()


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(batch).float() ** 2).mean()
    return loss


class Plain:
    """torch's fused AdamW in fp32, whose moments are kept in bf16 and whose parameters are rounded stochastically."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.wide = [nn.Parameter(p.detach().float()) for p in self.parameters]
        self.own = torch.optim.AdamW(self.wide, lr=1e-3, fused=True)
        self.steps = 0

    def step(self) -> None:
        for p, wide in zip(self.parameters, self.wide):
            wide.data.copy_(p.detach())
            assert p.grad is not None
            wide.grad = p.grad.float()
        self.own.step()
        for tensor, (p, wide) in enumerate(zip(self.parameters, self.wide)):
            round_stochastically(p.data.view(-1), wide.data.view(-1), update=self.steps, tensor=tensor, offset=0)
            for key in ("exp_avg", "exp_avg_sq"):
                moment = self.own.state[wide][key]
                moment.copy_(moment.bfloat16())
        self.steps += 1

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None


@pytest.mark.parametrize(
    ("policy", "memory", "micro_batches"),
    [("tide", "34KB", 1), ("optimal", "34KB", 4), ("zero_offload", "90KB", 4), ("all_on_gpu", "1MB", 1)],
)
def test_every_plan_has_the_bits_of_the_plain_loop(policy: str, memory: str, micro_batches: int) -> None:
    reference, model = net(), net()
    losses = train(reference, Plain(reference), batches(), 10, micro_batches, loss_of=loss_of)
    _, optimizer = executor.offload(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        torch.zeros(4, WIDTH, dtype=torch.bfloat16),
        gpu_memory=memory,
        micro_batches=micro_batches,
        masters="none",
        rounding="stochastic",
        policy=policy,
        loss=loss_of,
    )
    assert train(model, optimizer, batches(), 10, micro_batches, loss_of=loss_of) == losses
    optimizer.session.close()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters()))


def test_small_updates_are_kept() -> None:
    """An update of 2^-12 of the value is lost by rounding to nearest, in bf16, and 64 of them are 1/64 of the value."""
    ends = {}
    for rounding in ("nearest", "stochastic"):
        model = nn.Linear(64, 64, bias=False).bfloat16()
        nn.init.ones_(model.weight)
        _, optimizer = executor.offload(
            model, torch.optim.SGD(model.parameters(), lr=2.0**-12), torch.ones(1, 64, dtype=torch.bfloat16),
            gpu_memory="1MB", masters="none", rounding=rounding, loss=lambda m, x: m(x).sum(), policy="all_on_gpu",
        )  # fmt: skip
        for _ in range(64):
            model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.session.close()
        ends[rounding] = float(model.weight.detach().float().mean())
    assert ends["nearest"] == 1 and ends["stochastic"] == pytest.approx(1 - 1 / 64, abs=5e-4)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"rounding": "stochastic"}, "is for parameters without fp32 masters; leave it out, or train in bf16 with"),
        ({"rounding": "up"}, "rounding = 'up': it must be one of nearest, stochastic"),
    ],
)
def test_what_has_no_such_rounding_is_refused(more: dict[str, Any], words: str) -> None:
    model = net()
    with pytest.raises(PlanError, match=words):
        executor.offload(
            model, torch.optim.AdamW(model.parameters()), torch.zeros(4, WIDTH, dtype=torch.bfloat16),
            gpu_memory="90KB", loss=loss_of, **more,
        )  # fmt: skip
