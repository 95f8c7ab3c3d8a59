"""requires_grad switched around an evaluation and back: peft's `disable_adapter()`, in which DPO and GRPO compute the
logits of the reference, and the same by hand."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from later import Later
from torch import nn

import executor
from pstar_sim.core.plan import Settings
from pstar_sim.errors import ContractError
from pstar_sim.workload.workload import Workload, repeat_micro_batch

peft = Later("peft")


def adapted(kit: Any) -> tuple[nn.Module, Callable[[torch.Generator], Any]]:
    """A small GPT-2 with LoRA on its blocks; the second adapter is there and never trained."""
    model, draw = kit.build("gpt2")
    with warnings.catch_warnings():  # peft's, about itself and about transformers
        warnings.simplefilter("ignore")
        made = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["c_attn", "c_proj"]))
        made.add_adapter("other", peft.LoraConfig(r=2, target_modules=["c_attn"]))
    for name, parameter in made.named_parameters():  # a fresh adapter's output is 0
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return made, draw


def scores(model: nn.Module, batch: Any) -> torch.Tensor:
    """Log-probability of each sequence."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    return torch.gather(logits.log_softmax(-1), 2, batch["input_ids"][:, 1:, None]).sum((1, 2))


@contextlib.contextmanager
def other_adapter(model: Any) -> Iterator[None]:
    model.set_adapter("other")
    try:
        yield
    finally:
        model.set_adapter("default")


def of_reference(model: Any, batch: Any, *, grad: bool, within: Callable[..., Any]) -> torch.Tensor:
    with within(model), contextlib.nullcontext() if grad else torch.no_grad():
        found = scores(model, batch)
    assert not found.requires_grad
    return found


def preference(ours: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """DPO's loss of the first sequence over the second."""
    margin = ours - reference
    return -nn.functional.logsigmoid(0.1 * (margin[0] - margin[1]))


CAPTURED: list[Workload] = []
"""One micro-batch of `adapted` under `preference`."""


def disabled(model: Any) -> Any:
    return model.disable_adapter()


@pytest.mark.parametrize(
    ("policy", "order", "micro_batches", "grad", "within"),
    [
        ("tide", "reference first", 1, False, disabled),
        ("tide", "reference first", 2, True, disabled),
        ("tide", "policy first", 1, False, disabled),
        ("zero_offload", "policy first", 2, True, disabled),
        ("tide", "after step", 2, True, disabled),
        ("tide", "policy first", 1, False, other_adapter),
    ],
)
def test_disable_adapter(
    kit: Any, policy: str, order: str, micro_batches: int, grad: bool, within: Callable[..., Any]
) -> None:
    """Two iterations of DPO (or of GRPO, whose reference comes between two) equal plain peft to the bit."""
    model, draw = adapted(kit)
    twin = copy.deepcopy(model)
    batch = draw(torch.Generator().manual_seed(9))
    if not CAPTURED:
        CAPTURED.append(
            executor.capture_module(
                model, batch, name="lora", loss=lambda m, b: preference(scores(m, b), torch.zeros(2))
            )
        )
    w = repeat_micro_batch(CAPTURED[0], micro_batches)
    plan = kit.tight_plan(policy, w, Settings(clip=False))
    model, optimizer = executor.prepare(model, plan, executor.AdamW(lr=1e-2, weight_decay=0.1), replan_after=0)
    plain = torch.optim.AdamW([p for p in twin.parameters() if p.requires_grad], 1e-2, weight_decay=0.1, fused=True)
    batches = kit.batches(draw)
    for _ in range(2):
        drawn = [next(batches) for _ in range(micro_batches)]
        seen: list[list[torch.Tensor]] = []
        for net, updates in ((model, optimizer), (twin, plain)):
            values: list[torch.Tensor] = []
            before = [of_reference(net, one, grad=grad, within=within) for one in drawn if order == "after step"]
            for number, one in enumerate(drawn):
                if order == "policy first":
                    ours = scores(net, one)
                    reference = of_reference(net, one, grad=grad, within=within)
                elif order == "after step":
                    ours, reference = scores(net, one), before[number]
                else:
                    reference = of_reference(net, one, grad=grad, within=within)
                    ours = scores(net, one)
                loss = preference(ours, reference) / micro_batches
                loss.backward()
                values += [reference, loss.detach()]
            updates.step()
            updates.zero_grad()
            seen.append(values)
        assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    values = model.state_dict()
    assert all(torch.equal(values[name], p) for name, p in twin.state_dict().items())
    if order == "after step":
        assert optimizer.session.deviations == 0, optimizer.session.deviation_log
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in twin.parameters()]
    optimizer.session.close(restore=False)


class TestByHand:
    @pytest.fixture
    def run(self, start: Callable[..., Any]) -> Any:
        return start("mlp", "tide", clip=0.5)

    def train(self, kit: Any, run: Any) -> None:
        kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=1, micro_batches=1)
        values = run.model.state_dict()
        assert all(kit.distance(values[n], p.detach()) <= 1e-6 for n, p in run.reference.model.named_parameters())

    @pytest.mark.parametrize("grad", [False, True])
    def test_everything_off_and_on_again(self, kit: Any, run: Any, grad: bool) -> None:
        self.train(kit, run)
        batch = next(run.batches)
        run.model.requires_grad_(False)
        with torch.set_grad_enabled(grad):
            found = kit.loss_of(run.model, batch)
        run.model.requires_grad_(True)
        assert not found.requires_grad
        assert kit.distance(found, kit.loss_of(run.reference.model, batch).detach()) <= 1e-6
        self.train(kit, run)
        assert run.session.deviations == 0

    def test_training_with_a_part_off(self, kit: Any, run: Any) -> None:
        """What the plan was not made for is refused before anything changes, and goes on once it is put back."""
        self.train(kit, run)
        run.model.layers[2].requires_grad_(False)
        with pytest.raises(
            ContractError, match=r"requires_grad of 'layers\.2\.weight' \(2 parameters\) is not what it"
        ):
            kit.loss_of(run.model, next(run.batches))
        run.model.layers[2].requires_grad_(True)
        self.train(kit, run)

    def test_a_backward_while_it_is_off(self, kit: Any, run: Any) -> None:
        batch = next(run.batches)
        loss = kit.loss_of(run.model, batch)
        run.model.layers[2].requires_grad_(False)
        with pytest.raises(ContractError, match="a backward while requires_grad"):
            loss.backward()
        run.model.layers[2].requires_grad_(True)
        run.optimizer.zero_grad()
        self.train(kit, run)

    def test_a_backward_from_what_was_an_evaluation(self, kit: Any, run: Any) -> None:
        batch = next(run.batches)
        batch["x"].requires_grad_()
        run.model.requires_grad_(False)
        loss = kit.loss_of(run.model, batch)
        run.model.requires_grad_(True)
        with pytest.raises(ContractError, match="that was an evaluation"):
            loss.backward()
        self.train(kit, run)
