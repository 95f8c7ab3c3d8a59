"""AdamW and Lion of bitsandbytes, under a plan that moves chunks, are the library's to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from later import Later
from plain_loop import train
from thinned import by_turns
from torch import nn

import executor
from executor.optimizer import OffloadedOptimizer
from executor.saving.plain_states import write_plain_states
from pstar_sim.core.step import Place
from pstar_sim.errors import CheckpointError, ContractError, DoesNotFit

optim = Later("bitsandbytes.optim")

WORDS, WIDTH = 60, 72
"""A matrix has 5,184 elements: 20 blocks of 256 and a part of one; the embedding 4,320; vectors less than 4,096."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw-8bit-all": lambda ps: optim.AdamW8bit(ps, lr=1e-2, weight_decay=0.1),
    "lion-8bit-all": lambda ps: optim.Lion8bit(ps, lr=1e-3, weight_decay=0.1),
    "adamw-bnb": lambda ps: optim.AdamW(ps, lr=1e-2),
    "lion-bnb": lambda ps: optim.Lion(ps, lr=1e-3, weight_decay=0.1),
}


@pytest.fixture(autouse=True)
def no_overrides() -> Iterator[None]:
    """bitsandbytes keeps overrides for the whole process, by id."""
    yield
    optim.GlobalOptimManager.get_instance().initialize()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x.float() ** 2).mean()


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(3)
    return Net().to(dtype)


def rows() -> Iterator[torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    while True:
        yield torch.randint(WORDS, (8,), generator=draw)


def offloaded(
    model: nn.Module,
    optimizer: Any,
    policy: str = "tide",
    micro: int = 1,
    memory: str = "150KB",
    **more: Any,
) -> OffloadedOptimizer:
    batch = (torch.zeros(8, dtype=torch.long),)
    return executor.offload(
        model, optimizer, batch, gpu_memory=memory, micro_batches=micro, masters="none", policy=policy, **more
    )[1]


def flat(state: dict[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in state.items() if not key.startswith("__")}
    return {**rest, **state.get("__bnb_optimizer_quant_state__", {})}


def check_states(optimizer: OffloadedOptimizer, plain: torch.optim.Optimizer) -> None:
    """Check that codes, scales, code tables and step counts are equal."""
    states = optimizer.state_dict()["state"]
    for n, row in plain.state_dict()["state"].items():
        assert flat(row).keys() == states[n].keys()
        for key, value in flat(row).items():
            assert torch.equal(torch.as_tensor(states[n][key]), torch.as_tensor(value)), (n, key)


@pytest.mark.parametrize(
    ("name", "policy", "micro", "dtype"),
    by_turns(
        [
            ("adamw-8bit-all", "tide", 4),
            ("adamw-8bit-all", "optimal", 1),
            ("adamw-8bit-all", "zero_offload", 4),
            ("lion-8bit-all", "tide", 1),
            ("lion-8bit-all", "optimal", 4),
            ("lion-8bit-all", "zero_offload", 1),
            ("adamw-bnb", "tide", 1),
            ("adamw-bnb", "optimal", 4),
            ("lion-bnb", "tide", 1),
            ("lion-bnb", "optimal", 4),
        ],
        [(torch.float32,), (torch.bfloat16,)],
    ),
)
def test_is_bitsandbytes_to_the_bit(name: str, policy: str, micro: int, dtype: torch.dtype, whole: bool) -> None:
    """In fp32 or in pure bf16, each optimizer in both; all 20 rows with --whole. Three steps, 20 with --whole: bits
    that differ later differ from some step on, and codes, scales and sums of every kind of step are there after
    three."""
    steps = 20 if whole else 3
    reference, model = net(dtype), net(dtype)
    plain, mine = (OPTIMIZERS[name](each.parameters()) for each in (reference, model))
    losses = train(reference, plain, rows(), steps, micro)
    size = 1 if dtype is torch.float32 else 2
    budget = {"zero_offload": 400_000, "optimal": 150_000, "tide": 150_000}[policy] // size
    optimizer = offloaded(model, mine, policy, micro, f"{budget}B")
    session = optimizer.session
    try:
        assert session.plan.workload.optimizer.name == name
        assert train(model, optimizer, rows(), steps, micro) == losses
        assert session.status().links["h2d"].moved_bytes > 0
        check_states(optimizer, plain)
    finally:
        session.close()
    assert all(torch.equal(own, theirs) for own, theirs in zip(model.parameters(), reference.parameters()))


@pytest.mark.parametrize("name", ["adamw-8bit-all", "lion-bnb"])
def test_states_on_disks_are_bitsandbytes_to_the_bit(kit: Any, name: str, tmp_path: Path) -> None:
    """Three steps of 4 micro-batches, with room on the host for a part of the states."""
    reference, model = net(), net()
    plain, mine = (OPTIMIZERS[name](each.parameters()) for each in (reference, model))
    losses = train(reference, plain, rows(), 3, 4)
    with pytest.raises(DoesNotFit) as refusal:
        offloaded(model, mine, micro=4, machine=kit.small_machine(10**9, 400_000), disks=[tmp_path])
    machine = kit.small_machine(10**9, refusal.value.needed_bytes + 170_000)
    optimizer = offloaded(model, mine, micro=4, machine=machine, disks=[tmp_path])
    on_disks = {row.list for row in optimizer.session.plan.initial if row.place is Place.NVME}
    try:
        assert "momentum" in on_disks
        assert train(model, optimizer, rows(), 3, 4) == losses
        check_states(optimizer, plain)
    finally:
        optimizer.session.close()
    assert all(torch.equal(own, theirs) for own, theirs in zip(model.parameters(), reference.parameters()))


@pytest.mark.parametrize("name", ["adamw-8bit-all", "lion-8bit-all", "adamw-bnb"])
def test_states_go_both_ways(name: str, tmp_path: Path) -> None:
    """Two plain steps, two under a plan, a checkpoint into another plan, two there, and two plain ones again."""
    reference, model = net(), net()
    plain, mine = (OPTIMIZERS[name](each.parameters()) for each in (reference, model))
    losses = train(reference, plain, rows(), 8)
    batches = rows()
    found = train(model, mine, batches, 2)
    optimizer = offloaded(model, mine)
    found += train(model, optimizer, batches, 2)
    folder = optimizer.save(tmp_path / "checkpoint")
    optimizer.session.close()
    other = net()
    optimizer = offloaded(other, OPTIMIZERS[name](other.parameters()), "zero_offload", memory="400KB")
    optimizer.load(folder)
    found += train(other, optimizer, batches, 2)
    states = copy.deepcopy(optimizer.state_dict())
    optimizer.session.close()
    last = OPTIMIZERS[name](other.parameters())
    last.load_state_dict(states)
    found += train(other, last, batches, 2)
    assert found == losses


def test_a_plain_file_of_states_is_loaded_by_bitsandbytes(tmp_path: Path) -> None:
    """As a Trainer's checkpoint has it."""
    reference, model = net(), net()
    plain, mine = (OPTIMIZERS["adamw-8bit-all"](each.parameters()) for each in (reference, model))
    losses = train(reference, plain, rows(), 4)
    batches = rows()
    optimizer = offloaded(model, mine)
    found = train(model, optimizer, batches, 2)
    write_plain_states(optimizer, tmp_path / "optimizer.pt")
    optimizer.session.close()
    last = OPTIMIZERS["adamw-8bit-all"](model.parameters())
    last.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    assert found + train(model, last, batches, 2) == losses


def test_an_embedding_that_keeps_32_bits_is_planned_so() -> None:
    """As in the Trainer of transformers, which overrides the bits of embeddings."""

    def optimizer_of(model: Net) -> Any:
        optimizer = optim.AdamW(model.parameters(), lr=1e-2, optim_bits=8)
        optim.GlobalOptimManager.get_instance().register_module_override(model.embedding, "weight", {"optim_bits": 32})
        return optimizer

    reference, model = net(), net()
    losses = train(reference, optimizer_of(reference), rows(), 3)
    optimizer = offloaded(model, optimizer_of(model))
    assert optimizer.session.plan.workload.optimizer.name == "adamw-8bit"
    assert train(model, optimizer, rows(), 3) == losses
    optimizer.session.close()


def test_clipping_is_that_of_the_plain_loop() -> None:
    reference, model = net(), net()
    plain, mine = (OPTIMIZERS["adamw-8bit-all"](each.parameters()) for each in (reference, model))
    batches = rows()
    for _ in range(3):
        reference(next(batches)).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 1e-3)
        plain.step()
        plain.zero_grad()
    batch = (torch.zeros(8, dtype=torch.long),)
    _, optimizer = executor.offload(model, mine, batch, gpu_memory="150KB", max_grad_norm=1e-3, policy="tide")
    train(model, optimizer, rows(), 3)
    optimizer.session.close()
    assert all(torch.equal(own, theirs) for own, theirs in zip(model.parameters(), reference.parameters()))


def test_what_no_plan_has_is_refused_by_name() -> None:
    model = net()
    with pytest.raises(ContractError, match="bitsandbytes' RMSprop; of bitsandbytes, a plan has the updates of AdamW"):
        offloaded(model, optim.RMSprop(model.parameters(), lr=1e-3))
    manager = optim.GlobalOptimManager.get_instance()
    manager.override_config(model.layers[2].weight, "optim_bits", 32)
    with pytest.raises(ContractError, match=r"states of 'layers\.2\.weight' have not the bits that plans have"):
        offloaded(model, optim.AdamW8bit(model.parameters()))


def test_a_checkpoint_of_states_in_32_bits_is_of_another_optimizer(tmp_path: Path) -> None:
    model = net()
    optimizer = offloaded(model, OPTIMIZERS["adamw-bnb"](model.parameters()))
    train(model, optimizer, rows(), 1)
    folder = optimizer.save(tmp_path / "checkpoint")
    foreign = copy.deepcopy(optimizer.state_dict())
    optimizer.session.close()
    optimizer = offloaded(model, OPTIMIZERS["adamw-8bit-all"](model.parameters()))
    try:
        with pytest.raises(CheckpointError, match="another optimizer: its states are momentum and variance, those of"):
            optimizer.load(folder)
        with pytest.raises(ContractError, match="the state of parameter 0 has no absmax1"):
            optimizer.load_state_dict(foreign)
    finally:
        optimizer.session.close()
