"""Parameters that are frozen, tied, unused or used twice, against plain AdamW."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from thinned import half
from torch import nn
from torch.utils.checkpoint import checkpoint

import executor
from pstar_sim.core.plan import Settings
from pstar_sim.core.step import Kind

POLICIES = ["tide", "static_partition", "patrickstar", "zero_offload", "all_on_gpu"]
WAYS = [(1, "step", 0.5), (3, "step", None), (1, "eager", None)]
"""Micro-batches, update, clip."""


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(5))


class Frozen(Base):
    """LoRA-like: three of five layers frozen, small trainable matrices beside them, a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(8, 40) / 6)
        self.up = nn.Parameter(torch.zeros(40, 8))
        self.register_buffer("seen", torch.zeros(()))
        for i in (0, 2, 4):
            self.layers[i].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + (x @ self.down.t()) @ self.up.t()
        self.seen += 1
        return (x**2).mean()


class Tied(Base):
    """The first and the last layer share their weight; the middle one is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[4].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in (0, 1, 2, 2, 3, 4):
            x = torch.tanh(self.layers[i](x)) + x
        return (x**2).mean()


class Unused(Base):
    """One layer nobody calls, one whose output does not reach the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(40, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in (0, 1, 3):
            x = torch.tanh(self.layers[i](x)) + x
        self.layers[2](x)
        return (x**2).mean()


class Functional(Base):
    """Parameters read by a module that does not own them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:4]:
            x = torch.tanh(layer(x)) + x
        return (x @ self.layers[1].weight @ self.layers[4].weight).pow(2).mean() + self.layers[0].bias.pow(2).sum()


class Reentrant(Base):
    """A shared layer under reentrant checkpointing: its gradient fires twice a backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        for i in (0, 1, 2, 1, 3, 4):
            x = checkpoint(self.layers[i], torch.tanh(x), use_reentrant=True) + x
        return (x**2).mean()


class InPlace(Base):
    """Linear + ReLU(inplace=True): what full backward hooks break."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.act(layer(x))
        return (x**2).mean()


class Uneven(nn.Module):
    """Tensors whose elements fill no vectors of a kernel."""

    def __init__(self) -> None:
        super().__init__()
        widths = (40, 37, 23, 61, 5, 40)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.gain
        return (x**2).mean()


MODELS = [Frozen, Tied, Unused, Functional, Reentrant, InPlace]


@pytest.fixture
def odd(kit: Any) -> Iterator[Callable[..., Any]]:
    sessions: list[Any] = []

    def make(cls: type[nn.Module], policy: str, *, micro_batches: int, update: str, clip: float | None) -> Any:
        torch.manual_seed(0)
        model = cls()
        twin = copy.deepcopy(model)
        w = kit.workload_of(model, {"x": torch.randn(3, 40)}, micro_batches=micro_batches, name=cls.__name__)
        plan = kit.tight_plan(policy, w, Settings(update=update, clip=clip is not None))
        spec = executor.AdamW(lr=1e-2, weight_decay=0.1, max_grad_norm=clip, eager=update == "eager")
        model, optimizer = executor.prepare(model, plan, spec, watchdog_s=5.0)
        sessions.append(optimizer.session)
        draws = iter(lambda: {"x": torch.randn(3, 40)}, None)
        return kit.Run(model, optimizer, kit.Reference(twin, 1e-2, 0.1, clip), plan, draws)

    yield make
    for session in sessions:
        session.close(restore=False)


@pytest.mark.parametrize(("way", "policy", "cls"), half(WAYS, POLICIES, MODELS))
def test_equals_plain_adamw(
    kit: Any, odd: Callable[..., Any], way: tuple[int, str, float | None], policy: str, cls: type[nn.Module]
) -> None:
    micro_batches, update, clip = way
    run = odd(cls, policy, micro_batches=micro_batches, update=update, clip=clip)
    mine, theirs = kit.train_both(
        run.model, run.reference, run.optimizer, run.batches, steps=3, micro_batches=micro_batches
    )
    assert mine == pytest.approx(theirs, rel=1e-6)
    assert run.session.deviations == 0, list(run.session.deviation_log)
    values = run.model.state_dict()
    for name, parameter in run.reference.model.named_parameters(remove_duplicate=False):
        assert kit.distance(values[name], parameter.detach()) <= 1e-6, name
    for name, buffer in run.reference.model.named_buffers():
        assert torch.equal(values[name], buffer)
    plain, state = run.reference.optimizer.state_dict()["state"], run.optimizer.state_dict()["state"]
    assert {n for n, row in plain.items() if row} == set(state)
    for number, row in state.items():
        assert int(row["step"]) == int(plain[number]["step"])


@pytest.mark.parametrize(("policy", "way"), list(zip(POLICIES, itertools.cycle(WAYS))))
def test_uneven_tensors_are_equal_to_the_bit(
    kit: Any, odd: Callable[..., Any], policy: str, way: tuple[int, str, float | None]
) -> None:
    """A chunk's tensors are updated together, each as if alone ([Note: where runs end])."""
    micro_batches, update, clip = way
    run = odd(Uneven, policy, micro_batches=micro_batches, update=update, clip=clip)
    mine, theirs = kit.train_both(
        run.model, run.reference, run.optimizer, run.batches, steps=3, micro_batches=micro_batches
    )
    assert mine == theirs
    values, plain = run.model.state_dict(), run.reference.model.state_dict()
    assert [name for name, value in plain.items() if not torch.equal(values[name], value)] == []


def test_frozen_chunks_are_never_written_back(odd: Callable[..., Any]) -> None:
    run = odd(Frozen, "tide", micro_batches=1, update="step", clip=None)
    frozen = {c.index for c in run.plan.layout.chunks if c.frozen}
    assert frozen
    assert not [
        s for s in run.plan.steps if s.chunk in frozen and s.kind in (Kind.WRITEBACK, Kind.CPU_UPDATE, Kind.GPU_UPDATE)
    ]


def test_a_parameter_unused_in_some_iterations_keeps_its_moments(kit: Any, odd: Callable[..., Any]) -> None:
    """Plain AdamW leaves out a parameter without a gradient: no decay, no step."""
    run = odd(Tied, "tide", micro_batches=1, update="step", clip=None)

    def partly(model: nn.Module) -> torch.Tensor:
        return (model.layers[1](torch.ones(2, 40)) ** 2).mean()

    for _ in range(2):
        partly(run.model).backward()
        partly(run.reference.model).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.reference.step()
        kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=1, micro_batches=1)
    assert run.session.deviations == 2
    plain, state = run.reference.optimizer.state_dict()["state"], run.optimizer.state_dict()["state"]
    assert {n: int(row["step"]) for n, row in state.items()} == {n: int(row["step"]) for n, row in plain.items()}
    assert len({int(row["step"]) for row in state.values()}) == 2
    for number, row in plain.items():
        assert kit.distance(state[number]["exp_avg"], row["exp_avg"]) <= 1e-6
