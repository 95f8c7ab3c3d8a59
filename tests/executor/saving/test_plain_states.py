"""States in a file of torch's own: what `optimizer.state_dict()` says, for a plain AdamW to load, from the chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import executor
from executor.capture import capture_module
from executor.saving.plain_states import write_plain_states
from pstar_sim.core.plan import Settings
from pstar_sim.errors import CheckpointError


def assert_the_same(path: Path, optimizer: Any) -> None:
    """The file is the state dict, without master copies and loss scale."""
    stored, state = torch.load(path, weights_only=True), optimizer.state_dict()
    assert stored.keys() == {"state", "param_groups"}
    assert stored["param_groups"] == state["param_groups"]
    assert stored["state"].keys() == state["state"].keys()
    for number, row in stored["state"].items():
        assert row.keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in row.items():
            assert value.dtype == torch.float32 and torch.equal(value, state["state"][number][key]), (number, key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_the_state_dict(start: Callable[..., Any], kit: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    run = start("gpt2", "tide", dtype=dtype)  # tied
    write_plain_states(run.optimizer, tmp_path / "none")
    assert torch.load(tmp_path / "none", weights_only=True)["state"] == {}
    for _ in range(2):
        kit.train_alone(run.model, run.optimizer, run.batches, 1)
    write_plain_states(run.optimizer, tmp_path / "optimizer.pt")
    assert_the_same(tmp_path / "optimizer.pt", run.optimizer)
    kit.train_alone(run.model, run.optimizer, run.batches, 1)


def test_groups_and_frozen_parameters(kit: Any, tmp_path: Path) -> None:
    """The states are those of the groups' order; a frozen parameter, as LoRA's base, has none."""

    def groups_of(model: nn.Module) -> list[dict[str, Any]]:
        named = dict(model.named_parameters())
        named.pop("layers.2.weight").requires_grad_(False)
        parts = ([p for p in named.values() if p.ndim == 1], [p for p in named.values() if p.ndim == 2])
        return [{"params": part, "weight_decay": decay} for part, decay in zip(parts, (0.0, 0.1))]

    model, draw = kit.build("mlp")
    twin, _ = kit.build("mlp")
    spec = executor.AdamW(groups_of(model), lr=1e-2)
    rows = [draw(torch.Generator().manual_seed(seed)) for seed in range(4)]
    w = capture_module(model, rows[0], batch=2, sequence=1, groups=spec)
    plan = kit.tight_plan("tide", w, Settings(clip=False, update="step"))
    model, optimizer = executor.prepare(model, plan, spec)
    for row in rows[:2]:
        kit.train_alone(model, optimizer, iter([row]), 1)
    write_plain_states(optimizer, tmp_path / "optimizer.pt")
    assert_the_same(tmp_path / "optimizer.pt", optimizer)
    plain = torch.optim.AdamW(groups_of(twin), lr=3.0)
    twin.load_state_dict(model.state_dict())
    plain.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    for row in rows[2:]:
        kit.train_alone(model, optimizer, iter([row]), 1)
        kit.train_alone(twin, plain, iter([row]), 1)
    assert all(torch.equal(value, twin.state_dict()[name]) for name, value in model.state_dict().items())
    optimizer.session.close()


def test_no_state_is_copied_whole(start: Callable[..., Any], kit: Any, tmp_path: Path, monkeypatch: Any) -> None:
    run = start("gpt2", "tide")
    kit.train_alone(run.model, run.optimizer, run.batches, 1)
    monkeypatch.setattr(run.session.reader, "state_value", lambda *_: pytest.fail("a copy"))
    write_plain_states(run.optimizer, tmp_path / "optimizer.pt")


def test_a_disk_that_is_full_is_said(start: Callable[..., Any], kit: Any, tmp_path: Path, monkeypatch: Any) -> None:
    run = start("mlp", "tide")
    kit.train_alone(run.model, run.optimizer, run.batches, 1)
    with pytest.raises(CheckpointError, match=r"nowhere/optimizer\.pt cannot be written"):
        write_plain_states(run.optimizer, tmp_path / "nowhere" / "optimizer.pt")

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("executor.saving.tensor_files.os.write", full)
    with pytest.raises(CheckpointError, match=r"cannot be saved in .*/optimizer\.pt: No space left on device"):
        write_plain_states(run.optimizer, tmp_path / "optimizer.pt")
