"""Causes found by training many architectures of transformers beside plain PyTorch, each in a small module that has
it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import executor
from executor.capture import capture_module
from executor.recording.record import record
from pstar_sim.core.plan import Settings
from pstar_sim.errors import ModelError

GROUPED_PRODUCT = pytest.mark.skipif(
    not hasattr(torch, "_grouped_mm"), reason="this torch has no product of all experts (_grouped_mm)"
)


class Converting(nn.Module):
    """A router that its block converts to `dtype` in every forward (Switch Transformers, NLLB-MoE)."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))
        self.router = nn.Linear(40, 4)
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.router = self.router.to(self.dtype)
        for i, layer in enumerate(self.layers):
            weight = self.router(x.to(self.dtype)).float().softmax(-1)[:, i : i + 1]
            x = torch.tanh(layer(x)) * weight + x
        return (x**2).mean()


class Grouped(nn.Module):
    """Experts of all tokens in one product of torch, as transformers runs Mixtral and its like."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(40, 40)
        self.up = nn.Parameter(torch.randn(4, 40, 24) / 6)
        self.down = nn.Parameter(torch.randn(4, 24, 40) / 6)
        self.after = nn.Linear(40, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.before(x))
        ends = torch.tensor([2, 3, 3, 6], dtype=torch.int32)
        hidden = torch.relu(torch._grouped_mm(x, self.up, offs=ends))
        return (self.after(torch._grouped_mm(hidden, self.down, offs=ends) + x) ** 2).mean()


class Normed(nn.Module):
    """BatchNorm over the middle of three dimensions, transposed there and back (PatchTST)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(6, 5, 8)
        for layer, norm in zip(self.layers, self.norms):
            x = torch.tanh(layer(norm(x.transpose(1, 2)).transpose(1, 2))) + x
            x = nn.functional.layer_norm(x.transpose(1, 2), (5,)).transpose(1, 2)
        return (x**2).mean()


@pytest.fixture
def trained(kit: Any) -> Iterator[Callable[..., Any]]:
    """trained(model): the model under a tight plan beside its plain twin, three steps of two micro-batches compared."""
    sessions: list[Any] = []

    def make(model: nn.Module) -> Any:
        twin = copy.deepcopy(model)
        w = kit.workload_of(model, {"x": torch.randn(6, 40)}, micro_batches=2)
        plan = kit.tight_plan("tide", w, Settings(update="step", clip=True))
        spec = executor.AdamW(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
        model, optimizer = executor.prepare(model, plan, spec, watchdog_s=10.0)
        sessions.append(optimizer.session)
        run = kit.Run(model, optimizer, kit.Reference(twin, 1e-2, 0.1, 0.5), plan, iter([]))
        draws = iter(lambda: {"x": torch.randn(6, 40)}, None)
        mine, theirs = kit.train_both(model, run.reference, optimizer, draws, steps=3, micro_batches=2)
        assert mine == pytest.approx(theirs, rel=1e-6)
        assert run.session.deviations == 0, list(run.session.deviation_log)
        values = model.state_dict()
        for name, parameter in twin.named_parameters():
            assert kit.distance(values[name], parameter.detach()) <= 1e-6, name
        return run

    yield make
    for session in sessions:
        session.close(restore=False)


def measured_equals_plan(run: Any) -> None:
    def iteration() -> None:
        for _ in range(2):
            x = torch.ones(6, 40)
            loss = run.model(x) / 2
            loss.backward()
            del loss, x
        run.optimizer.step()
        run.optimizer.zero_grad()

    measured = run.session.measure_iteration(iteration)
    assert measured.on_plan
    assert measured.moved_bytes == {queue: run.plan.moved_bytes[queue] for queue in ("h2d", "d2h")}


def test_a_forward_that_converts_what_is_converted_already(trained: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    measured_equals_plan(trained(Converting(torch.float32)))


def test_a_forward_that_converts_a_module_is_refused() -> None:
    model = Converting(torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ModelError, match=r"module 'router' \(Linear\) converts its own parameters in a forward"):
        capture_module(model, {"x": torch.randn(6, 40)}, name="converting")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.router.to(torch.bfloat16).weight.dtype == torch.bfloat16  # it can be converted as before


@GROUPED_PRODUCT
def test_grouped_products_in_fp32(trained: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    measured_equals_plan(trained(Grouped()))


@GROUPED_PRODUCT
@pytest.mark.parametrize("frozen", [False, True])
def test_grouped_products_in_bf16_are_plain_torch_to_the_bit(frozen: bool) -> None:
    """Trained experts, and frozen ones that stream beside trained layers."""
    torch.manual_seed(0)
    plain = nn.ModuleList(Grouped() for _ in range(4)).bfloat16()
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(not frozen or name.endswith(("before.weight", "after.weight")))
    mine = copy.deepcopy(plain)

    class Chain(nn.Module):
        def __init__(self, layers: nn.ModuleList) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([layer(x) for layer in self.layers]).float().sum()

    models = Chain(plain), Chain(mine)
    made = [
        torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=1e-2, fused=True) for each in models
    ]
    weights = sum(p.numel() * 2 for p in plain.parameters())
    _, optimizer = executor.offload(
        models[1], made[1], (torch.zeros(6, 40, dtype=torch.bfloat16),), masters="none", policy="tide",
        gpu_memory=f"{weights * (3 if frozen else 5) // 4000}KB",
    )  # fmt: skip
    draw = torch.Generator().manual_seed(5)
    losses: tuple[list[float], list[float]] = ([], [])
    for _ in range(3):
        x = torch.randn(6, 40, generator=draw).bfloat16()
        for model, each, found in zip(models, (made[0], optimizer), losses):
            loss = model(x)
            loss.backward()
            found.append(loss.item())
            del loss
            each.step()
            each.zero_grad()
    assert losses[0] == losses[1]
    assert optimizer.session.plan.moved_bytes["h2d"] > 0 and optimizer.session.deviations == 0
    optimizer.session.close()
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), mine.parameters()))


def bart() -> nn.Module:
    """It makes itself masks of ones, and then does without."""
    import transformers

    sides = {f"{side}_{what}": 2 if what == "attention_heads" else 1 if what == "layers" else 64
             for side in ("encoder", "decoder") for what in ("layers", "attention_heads", "ffn_dim")}  # fmt: skip
    config = transformers.BartConfig(d_model=32, vocab_size=96, max_position_embeddings=32, dropout=0.0, **sides)
    config.use_cache = False
    return transformers.BartForConditionalGeneration(config).train()


def words(**more: Any) -> dict[str, torch.Tensor]:
    ids = torch.arange(3, 35).reshape(2, 16)
    return {"input_ids": ids, "labels": ids.clone(), **more}


@pytest.mark.parametrize("make", [pytest.param(Grouped, marks=GROUPED_PRODUCT), Normed, bart])
def test_captures_have_the_bytes_of_a_real_run(kit: Any, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, batch = make(), words() if make is bart else {"x": torch.randn(6, 40)}
    captured = capture_module(model, batch, name="odd")
    recorded = record(model, [batch], kit.small_machine(10**8), name="odd", timed=0)
    assert [(m.name, m.flops) for m in captured.moments] == [(m.name, m.flops) for m in recorded.moments]
    for mine, theirs in zip(captured.moments, recorded.moments):  # a recording divides the loss: a scalar, twice
        assert mine.peak_bytes <= theirs.peak_bytes <= mine.peak_bytes + 8, mine.name
    assert set(captured.uses) == set(recorded.uses)


@pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5, reason="before 5.0, BART reads the mask of a batch"
)
def test_a_mask_that_comes_with_the_batch_is_counted() -> None:
    """Its values are another batch's next time."""
    model = bart()
    without, with_mask = (
        capture_module(model, words(**more), name="bart").peak_non_model_bytes
        for more in ({}, {"attention_mask": torch.ones(2, 16, dtype=torch.int64)})
    )
    assert with_mask > without + 2 * 16 * 8


def test_ones_that_are_written_are_unknown() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ones = torch.ones(3, 8)
            assert bool((ones.to(torch.bool)[:, 2:].sum() == 18).all())
            ones[1, 1:2] = 0.0
            return (self.layer(x) * ones).sum() if bool(ones.all()) else self.layer(x).sum()

    with pytest.raises(ModelError, match="its result depends on the values of tensors"):
        capture_module(Writing(), {"x": torch.randn(3, 8)}, name="writing")


def test_bytes_are_counted_before_the_queues_go_on(kit: Any, start: Callable[..., Any]) -> None:
    """Threads that begin the next iteration add to the log, and drop its oldest rows."""
    run = start("mlp", "tide")
    use = run.session.use_queues
    threads = run.session.queues

    def go_on(queues: Any) -> None:
        use(queues)
        if queues is threads:
            run.session.steps.span_log.clear()

    run.session.use_queues = go_on
    measured = run.session.measure_iteration(lambda: kit.train_alone(run.model, run.optimizer, run.batches, 1))
    assert measured.moved_bytes == {queue: run.plan.moved_bytes[queue] for queue in ("h2d", "d2h")}
    assert measured.moved_bytes["h2d"] > 0
