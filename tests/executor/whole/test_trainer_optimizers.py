"""Optimizers by the names of a Trainer's `optim=`, and updates inside the backward: scripts as they are."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import executor
from pstar_sim.cli import main
from pstar_sim.core.step import Place
from pstar_sim.errors import ContractError, DoesNotFit, PlanError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

needs_bitsandbytes = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="no bitsandbytes")


def gpt() -> Any:
    """Matrices of the multilayer perceptrons have 4,096 elements, the least for states in 8 bits."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=160, n_positions=32, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., Any]:
    draw = torch.Generator().manual_seed(1)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(96, (16, 12), generator=draw)]

    def make(**arguments: Any) -> Any:
        wanted = {
            "output_dir": str(tmp_path), "per_device_train_batch_size": 2, "max_steps": 4, "use_cpu": True,
            "report_to": [], "disable_tqdm": True, "logging_steps": 1, "learning_rate": 1e-2, "weight_decay": 0.1,
            "save_strategy": "no",
        }  # fmt: skip
        args = transformers.TrainingArguments(**{**wanted, **arguments})
        return transformers.Trainer(model=gpt(), args=args, train_dataset=rows)

    return make


def losses_of(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


PLAIN: dict[str, Any] = {}
"""Optimizer of a plan -> the plain Trainer of its first name, trained: on a CPU, pages are no pages."""


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize(
    ("name", "planned"),
    [
        ("adafactor", "adafactor"),
        *(
            pytest.param(name, planned, marks=needs_bitsandbytes)
            for name, planned in {
                "adamw_bnb_8bit": "adamw-8bit",
                "adamw_8bit": "adamw-8bit",
                "paged_adamw_8bit": "adamw-8bit",
                "paged_adamw_32bit": "adamw-bnb",
                "lion_8bit": "lion-8bit",
                "lion_32bit": "lion-bnb",
                "paged_lion_8bit": "lion-8bit",
            }.items()
        ),
    ],
)
def test_a_trainer_is_the_plain_one_to_the_bit(
    trainer: Callable[..., Any], tmp_path: Path, name: str, planned: str, whole: bool
) -> None:
    """Clipped, and from its checkpoint under a plan the plain Trainer goes on: of each optimizer, under its first name;
    with --whole under every one."""
    first = whole or planned not in PLAIN
    if first:
        PLAIN[planned] = trainer(optim=name)
        PLAIN[planned].train()
    plain = PLAIN[planned]
    mine = executor.hf.offload(trainer(optim=name, save_strategy="steps", save_steps=2), "450KB", policy="tide")
    mine.train()
    assert mine.offload_session.plan.workload.optimizer.name == planned
    assert mine.offload_session.status().links["h2d"].moved_bytes > 0
    assert losses_of(mine) == losses_of(plain) and len(losses_of(plain)) == 4
    named = dict(mine.model.named_parameters())
    assert all(torch.equal(p.detach(), named[n].detach().clone()) for n, p in plain.model.named_parameters())
    if first:
        resumed = trainer(optim=name)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert losses_of(resumed) == losses_of(plain)


def test_a_trainer_of_a_model_in_bf16_has_no_masters_where_none_are_wanted(trainer: Callable[..., Any]) -> None:
    """As LLaMA-Factory trains with pure_bf16: the model is in bf16, and the Trainer casts nothing."""
    plain = trainer()
    plain.model.to(torch.bfloat16)
    plain.train()
    mine = trainer()  # it seeds torch's generator
    mine.model.to(torch.bfloat16)
    executor.hf.offload(mine, "220KB", policy="tide", masters="none").train()
    assert mine.offload_session.plan.workload.optimizer.masters == "none"
    assert mine.offload_session.status().links["h2d"].moved_bytes > 0
    assert losses_of(mine) == losses_of(plain) and len(losses_of(plain)) == 4
    named = dict(mine.model.named_parameters())
    assert all(torch.equal(p.detach(), named[n].detach().clone()) for n, p in plain.model.named_parameters())
    with pytest.raises(ContractError, match="masters = 'both': it must be one of fp32, none"):
        executor.hf.offload(trainer(), masters="both")


def test_a_trainer_keeps_states_on_disks(kit: Any, trainer: Callable[..., Any], tmp_path: Path) -> None:
    plain = trainer()
    plain.train()
    folder = tmp_path / "disk"
    folder.mkdir()
    about = {"policy": "tide", "disks": [folder]}
    mine = executor.hf.offload(trainer(), "450KB", machine=kit.small_machine(10**9, 300_000), **about)
    with pytest.raises(DoesNotFit, match="that a run with disks takes beside") as refusal:
        mine.train()
    machine = kit.small_machine(10**9, refusal.value.needed_bytes)
    mine = executor.hf.offload(trainer(), "450KB", machine=machine, **about)
    mine.train()
    assert any(row.place is Place.NVME for row in mine.offload_session.plan.initial)
    assert losses_of(mine) == losses_of(plain) and len(losses_of(plain)) == 4


ADAFACTOR = """
import sys, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=96, n_positions=32))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(96, (8, 12))]
args = TrainingArguments(output_dir=sys.argv[1], max_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to=[],
    save_strategy="no", logging_steps=1, disable_tqdm=True, optim="adafactor")
Trainer(model=model, args=args, train_dataset=rows).train()
"""


@pytest.mark.filterwarnings("ignore")
def test_a_script_with_adafactor_runs_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(ADAFACTOR)
    words = ("--gpu-memory", "290KB", "--policy", "tide", "--", str(tmp_path))
    assert main(["launch", str(tmp_path / "train.py"), *words]) == 0
    assert "2 steps, measured: the last on plan with the planned batch" in " ".join(capsys.readouterr().out.split())


# -- updates inside the backward --------------------------------------------------------------------------------------


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(48, 48), nn.Tanh())))


def batches() -> Iterator[torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    while True:
        yield torch.randn(4, 48, generator=draw)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(batch) ** 2).mean()
    return loss


def test_updates_in_the_backward_are_those_of_a_loop_that_has_them_in_hooks() -> None:
    """As LOMO and torch's "optimizer in backward" do it: an optimizer per parameter, whose hook steps it and drops the
    gradient. Under a plan one line is another, and the loop calls step() at the end."""
    reference, model = net(), net()
    plain, rows = [], batches()
    own = {p: torch.optim.SGD([p], lr=1e-1) for p in reference.parameters()}

    def update(p: torch.Tensor) -> None:
        own[p].step()  # type: ignore[index]
        own[p].zero_grad()  # type: ignore[index]

    for p in reference.parameters():
        p.register_post_accumulate_grad_hook(update)
    for _ in range(5):
        loss = loss_of(reference, next(rows))
        loss.backward()
        plain.append(float(loss.detach()))

    mine, rows = [], batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    _, offloaded = executor.offload(
        model, optimizer, torch.zeros(4, 48), gpu_memory="68KB", policy="tide", update="eager",
        loss=loss_of,
    )  # fmt: skip
    for _ in range(5):
        loss = loss_of(model, next(rows))
        loss.backward()
        offloaded.step()
        offloaded.zero_grad()
        mine.append(float(loss.detach()))
    session = offloaded.session
    assert session.plan.settings.update == "eager" and session.deviations == 0
    session.close()
    assert mine == plain
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters()))


def test_an_update_at_another_time_is_refused() -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(PlanError, match='update must be "step" or "eager", not \'late\''):
        executor.offload(model, torch.optim.SGD(model.parameters()), torch.zeros(4, 48), update="late")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
