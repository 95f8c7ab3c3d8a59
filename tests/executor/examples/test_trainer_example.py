"""transformers.Trainer over a prepared model: the example runs, equals a plain Trainer, and says what it cannot do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import executor
from executor.hf import connect
from pstar_sim.errors import CheckpointError, ContractError

transformers: Any
example: Any


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Not where tests are collected: every worker of pytest-xdist collects, and one runs these tests."""
    global transformers, example
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from executor.examples import trainer as example


def histories(trainer: Any, key: str) -> list[float]:
    return [row[key] for row in trainer.state.log_history if key in row]


@pytest.mark.slow
def test_the_example_is_a_plain_trainer(kit: Any, tmp_path: Path) -> None:
    """Losses, norms, rates and parameters of four steps of two micro-batches, with an evaluation and a checkpoint."""
    steps = 4
    ours = example.train(str(tmp_path / "ours"), steps=steps)
    session = example.session_of(ours)
    try:
        model = example.make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        plain = transformers.Trainer(
            model=model,
            args=example.make_arguments(str(tmp_path / "plain"), steps),
            train_dataset=example.make_rows(),
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)),
        )
        plain.train()
        assert len(histories(plain, "loss")) == steps
        for key in ("loss", "grad_norm", "learning_rate"):
            assert histories(ours, key) == pytest.approx(histories(plain, key), rel=1e-5), key
        assert max(histories(ours, "grad_norm")) > example.MAX_GRAD_NORM  # so something was clipped
        named = dict(ours.model.named_parameters())
        for name, p in model.named_parameters():
            assert kit.distance(named[name].detach(), p.detach()) <= 1e-5, name
        assert session.deviations == 0, list(session.deviation_log)
        status = session.status()
        assert status.iterations == steps and status.links["h2d"].moved_bytes > 0

        # What a Trainer does besides: evaluate, save what transformers loads, save the optimizer.
        rows = example.make_rows(4)
        assert ours.evaluate(rows)["eval_loss"] == pytest.approx(plain.evaluate(rows)["eval_loss"], rel=1e-5)
        ours.save_model(str(tmp_path / "saved"))
        again = transformers.GPT2LMHeadModel.from_pretrained(str(tmp_path / "saved"))
        for name, p in again.named_parameters():
            assert torch.equal(p.detach(), named[name].detach().clone()), name
        state = ours.optimizer.state_dict()["state"]
        assert len(state) == len(plain.optimizer.state_dict()["state"])
    finally:
        session.close()


@pytest.mark.slow
def test_a_resumed_trainer_is_the_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps with dropout, a checkpoint after the first; a new model and Trainer go on from there."""
    make = example.make_model

    def with_dropout() -> Any:
        model = make()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.1
        return model

    monkeypatch.setattr(example, "make_model", with_dropout)
    runs = []
    for resume in (None, str(tmp_path / "checkpoint-1")):
        trainer = example.train(str(tmp_path), steps=3, save_every=0 if resume else 1, resume=resume)
        session = example.session_of(trainer)
        try:
            values = {name: value.clone() for name, value in trainer.model.state_dict().items()}
            runs.append((histories(trainer, "loss"), histories(trainer, "learning_rate"), values, states_of(session)))
            assert session.deviations == 0
        finally:
            session.close(restore=False)
    (losses, rates, values, states), (again_losses, again_rates, again_values, again_states) = runs
    assert len(losses) == 3 and again_losses == losses and again_rates == rates
    assert all(torch.equal(again_values[name], value) for name, value in values.items())
    for number, row in states.items():
        assert all(torch.equal(again_states[number][key], value) for key, value in row.items())

    assert (tmp_path / "checkpoint-1" / "pstar" / "pstar.json").is_file()
    (tmp_path / "checkpoint-1" / "pstar" / "pstar.json").unlink()
    with pytest.raises(CheckpointError, match="has no whole folder 'pstar'"):
        example.train(str(tmp_path), steps=3, resume=str(tmp_path / "checkpoint-1"))


def states_of(session: Any) -> dict[int, dict[str, torch.Tensor]]:
    return session.optimizer().state_dict()["state"]


@pytest.fixture
def prepared(start: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """A Trainer of a small prepared model (clipped at 0.5, two micro-batches), with arguments of one's own."""

    def make(run: Any = None, **arguments: Any) -> Any:
        run = run or start("gpt2", "tide", micro_batches=2, clip=0.5)
        rows = [{k: v[0] for k, v in next(run.batches).items()} for _ in range(8)]
        wanted = {
            "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "max_steps": 1,
            "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True,
        }  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of arguments that are refused below
            args = transformers.TrainingArguments(output_dir=str(tmp_path), **{**wanted, **arguments})
        schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1.0)
        return transformers.Trainer(
            model=run.model, args=args, train_dataset=rows, optimizers=(run.optimizer, schedule)
        )

    return make


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_grad_norm": 1.0}, r"max_grad_norm=1.0\) and AdamW\(max_grad_norm=0.5\)"),
        ({"max_grad_norm": 0.0}, "give both the same"),
        ({"gradient_accumulation_steps": 1}, "made for 2 micro-batches"),
        ({"per_device_train_batch_size": 4}, "made for batches of 2"),
        ({"bf16": True}, r"TrainingArguments\(bf16=True\).*own dtype"),
        ({"gradient_checkpointing": True}, "checkpointing"),
        ({"load_best_model_at_end": True}, "cannot be loaded"),
    ],
)
def test_connect_names_the_argument_that_does_not_fit_the_plan(
    prepared: Callable[..., Any], arguments: dict[str, Any], words: str
) -> None:
    best = arguments.pop("load_best_model_at_end", False)  # its other conditions are not the matter here
    trainer = prepared(**arguments)
    trainer.args.load_best_model_at_end = best
    with pytest.raises(ContractError, match=words):
        connect(trainer)


def test_a_trainer_that_is_not_connected_stops_before_it_clips_nothing(
    start: Callable[..., Any], prepared: Callable[..., Any]
) -> None:
    run = start("gpt2", "tide", micro_batches=2, clip=0.5)
    before = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    with pytest.raises(ContractError, match="max_grad_norm"):
        prepared(run).train()
    for name, p in run.model.named_parameters():
        assert torch.equal(p.detach().clone(), before[name]), name


def test_connect_wants_what_prepare_returned(prepared: Callable[..., Any], start: Callable[..., Any]) -> None:
    trainer = prepared()
    trainer.model = torch.nn.Linear(1, 1)
    with pytest.raises(ContractError, match="not the one its optimizer was prepared with"):
        connect(trainer)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    with pytest.raises(ContractError, match="optimizer is SGD"):
        connect(trainer)


def test_without_clipping_the_trainer_logs_no_norm(start: Callable[..., Any], prepared: Callable[..., Any]) -> None:
    run = start("gpt2", "tide", micro_batches=2)
    trainer = connect(prepared(run, max_grad_norm=0.0, logging_steps=1))
    trainer.train()
    assert len(histories(trainer, "loss")) == 1 and not histories(trainer, "grad_norm")
    assert run.session.deviations == 0


def test_to_where_the_model_is_changes_nothing(start: Callable[..., Any]) -> None:
    run = start("mlp", "tide")
    assert run.model.to("cpu") is run.model and run.model.float() is run.model
    for move in (
        run.model.half,
        run.model.share_memory,
        lambda: run.model.to_empty(device="cpu"),
        lambda: run.model.to(memory_format=torch.channels_last),
        lambda: run.model.to("meta"),
    ):
        with pytest.raises(ContractError, match="cannot move"):
            move()
    assert isinstance(run.optimizer, executor.OffloadedOptimizer)
