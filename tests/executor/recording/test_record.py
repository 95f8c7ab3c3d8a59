"""A recorded warm-up has the moments, uses and bytes of a capture, and seconds besides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from thinned import half
from torch import nn

import executor
from executor.devices.backend import VirtualLink
from executor.recording.record import record
from pstar_sim.core.step import Queue
from pstar_sim.errors import DoesNotFit, ModelError, PlanError
from pstar_sim.workload.workload import Phase

# Llama builds its mask another way on real tensors than on fake ones.
TOLERANCE = {"llama": 0.02}


@pytest.mark.parametrize(
    ("model", "checkpointing", "micro_batches"), half(["mlp", "gpt2", "llama", "bert"], [False, True], [1, 2])
)
def test_same_numbering_and_bytes_as_a_capture(kit: Any, model: str, checkpointing: bool, micro_batches: int) -> None:
    module, draw = kit.build(model, checkpointing=checkpointing)
    batches = [draw(torch.Generator().manual_seed(k)) for k in range(micro_batches)]
    captured = kit.workload_of(module, batches[0], micro_batches=micro_batches, name=model)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    machine = kit.small_machine(captured.peak_non_model_bytes + sum(t.bytes for t in captured.tensors) // 2)
    recorded = record(module, batches, machine, name=model, loss=kit.loss_of, timed=2)

    assert [m.name for m in recorded.moments] == [m.name for m in captured.moments]
    assert [m.phase for m in recorded.moments] == [m.phase for m in captured.moments]
    assert [m.micro_batch for m in recorded.moments] == [m.micro_batch for m in captured.moments]
    assert set(recorded.uses) == set(captured.uses)
    assert recorded.fingerprint == captured.fingerprint
    assert recorded.batch == captured.batch
    assert recorded.sequence == next(iter(batches[0].values())).shape[1]
    assert recorded.checkpointing == checkpointing
    tolerance = TOLERANCE.get(model, 0.0)
    for mine, theirs in zip(recorded.moments, captured.moments):
        # The loss divided by the number of micro-batches is a scalar more than a capture sees, twice at most.
        assert mine.peak_bytes <= theirs.peak_bytes * (1 + tolerance) + 8, mine.name
        assert mine.peak_bytes >= theirs.peak_bytes * (1 - tolerance), mine.name
    assert recorded.peak_non_model_bytes == pytest.approx(captured.peak_non_model_bytes, rel=tolerance, abs=8)
    assert recorded.flops == captured.flops

    assert recorded.source == "recorded"
    assert recorded.recorded_on == machine.name
    assert all(m.duration_s is not None and m.duration_s >= 0 for m in recorded.moments)
    assert sum(m.duration_s or 0 for m in recorded.moments if m.phase is Phase.BWD) > 0
    after = module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(type(p) is nn.Parameter and p.grad is None for p in module.parameters())


def test_buffers_and_random_numbers_are_left_alone(kit: Any) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.norm = nn.BatchNorm1d(8)
            self.drop = nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.drop(self.norm(self.linear(x))) ** 2).mean()

    module, x = Noisy(), torch.randn(4, 8)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    record(module, [{"x": x}], kit.small_machine(10**7), name="noisy", loss=kit.loss_of, timed=1)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_stalls_are_left_out(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up of a model that does not fit takes longer than its moments say: fetching is not their work, nor are
    copies of gradients to the host. On a clock of its own a copy over the link takes a second and a look at the clock a
    microsecond."""
    module, draw = kit.build("mlp")
    batch = draw(torch.Generator())
    now_s, carry = [0.0], VirtualLink.carry

    def carry_for_a_second(link: VirtualLink, target: Any, source: Any, direction: Queue, width: int) -> None:
        carry(link, target, source, direction, width)
        now_s[0] += 1.0

    def clock() -> float:
        now_s[0] += 1e-6
        return now_s[0]

    monkeypatch.setattr(VirtualLink, "carry", carry_for_a_second)
    fetches = []
    for gpu_bytes in (10**8, 60_000):
        w = record(module, [batch], kit.small_machine(gpu_bytes), name="mlp", loss=kit.loss_of, timed=1, clock=clock)
        fetches.append(int(now_s[0]) - sum(fetches))
        assert 0 < sum(m.duration_s or 0 for m in w.moments) < 0.1
    assert 0 < fetches[0] < fetches[1]


def test_without_timing(kit: Any) -> None:
    module, draw = kit.build("mlp")
    w = record(module, [draw(torch.Generator())], kit.small_machine(10**8), name="mlp", loss=kit.loss_of, timed=0)
    assert w.recorded_on is None
    assert all(m.duration_s is None for m in w.moments)


def test_what_is_too_large(kit: Any) -> None:
    module, draw = kit.build("mlp")
    before = [p.clone() for p in module.parameters()]
    with pytest.raises(DoesNotFit, match="what one module reads at once"):
        record(module, [draw(torch.Generator())], kit.small_machine(9_000), name="mlp", loss=kit.loss_of)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters()))
    with pytest.raises(PlanError, match="batches is empty"):
        record(module, [], kit.small_machine(10**8), name="mlp")


def test_groups_and_clipping_are_recorded(kit: Any) -> None:
    module, draw = kit.build("mlp")
    weights = [p for n, p in module.named_parameters() if n.endswith("weight")]
    biases = [p for n, p in module.named_parameters() if n.endswith("bias")]
    spec = executor.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], max_grad_norm=1.0)
    w = record(
        module,
        [draw(torch.Generator())],
        kit.small_machine(10**8),
        name="mlp",
        optimizer=spec,
        loss=kit.loss_of,
        timed=1,
    )
    assert {t.group for t in w.tensors if t.name.endswith("weight")} == {0}
    assert {t.group for t in w.tensors if t.name.endswith("bias")} == {1}


def test_a_loss_with_a_backward_of_its_own_is_refused_by_name(kit: Any) -> None:
    """As in a capture; a recorded iteration would have more forwards and backwards than micro-batches."""

    def penalised(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        x = batch.clone().requires_grad_()
        out = model(x).square().mean()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return out + slope.square().sum()

    for loss in (penalised, lambda model, batch: penalised(model, batch).detach() + model(batch).mean()):
        with pytest.raises(ModelError, match=r"net: the loss runs a backward of its own \(torch.autograd.grad"):
            record(nn.Linear(4, 2), [torch.ones(2, 4)] * 2, kit.small_machine(10**7), name="net", loss=loss)
