"""A load that did not end: some values are the checkpoint's, others are not, and every act says so until it is loaded
again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.memory.slots import Slots
from executor.saving import restoring
from pstar_sim.errors import CheckpointError, ContractError

ACTS: dict[str, Callable[[Any, Any], object]] = {
    "a forward": lambda kit, run: kit.loss_of(run.model, next(run.batches)),
    "a part's forward": lambda kit, run: run.model.layers[2](torch.zeros(1, 48)),
    "an evaluation": lambda kit, run: torch.no_grad()(kit.loss_of)(run.model, next(run.batches)),
    "step": lambda kit, run: run.optimizer.step(),
    "zero_grad": lambda kit, run: run.optimizer.zero_grad(),
    "state_dict": lambda kit, run: run.model.state_dict(),
    "optimizer.state_dict": lambda kit, run: run.optimizer.state_dict(),
    "reading a parameter": lambda kit, run: run.model.layers[0].weight.detach().norm(),
    "session.step": lambda kit, run: run.session.step([next(run.batches)]),
    "save": lambda kit, run: run.optimizer.save("nowhere"),
}


def values(run: Any) -> dict[str, torch.Tensor]:
    found = {name: torch.as_tensor(value).clone() for name, value in run.model.state_dict().items()}
    for number, row in run.optimizer.state_dict()["state"].items():
        found |= {f"{number}/{key}": torch.as_tensor(value).clone() for key, value in row.items()}
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def stopped_after(monkeypatch: pytest.MonkeyPatch, count: int, error: BaseException) -> None:
    """The write of value number `count` raises the error."""
    put, calls = Slots.put, []

    def stops(self: Slots, *args: Any) -> None:
        calls.append(args)
        if len(calls) == count:
            raise error
        put(self, *args)

    monkeypatch.setattr(Slots, "put", stops)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(5, "I/O error")], ids=["Ctrl-C", "disk"])
@pytest.mark.parametrize("count", [1, 8, 30])
def test_everything_is_refused_until_it_is_loaded_again(
    start: Callable[..., Any],
    kit: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    error: BaseException,
    dtype: torch.dtype,
) -> None:
    run = start("mlp", "tide", dtype=dtype)
    kit.train_alone(run.model, run.optimizer, run.batches, 1)
    run.optimizer.save(tmp_path / "c")
    saved = values(run)
    later = [next(run.batches) for _ in range(2)]
    curve = [kit.train_alone(run.model, run.optimizer, iter([row]), 1) for row in later]
    after = values(run)
    for _ in range(2):  # a second load may be stopped, too
        stopped_after(monkeypatch, count, error)
        with pytest.raises((KeyboardInterrupt, CheckpointError)) as stopped:
            run.optimizer.load(tmp_path / "c")
        assert stopped.value is error or str(stopped.value).endswith("was loaded in part: [Errno 5] I/O error")
        monkeypatch.undo()
        for name, act in ACTS.items():
            with pytest.raises(ContractError, match=r"optimizer\.load has begun and did not end: .*; call optimizer"):
                act(kit, run)
                pytest.fail(name)
        assert "values not shown" in repr(run.model.layers[0].weight)
        with pytest.raises(ContractError, match="did not end"):
            run.optimizer.load_state_dict({"state": {}, "param_groups": [{"params": list(range(12))}]})
    run.optimizer.load(tmp_path / "c")
    assert same(values(run), saved)
    assert [kit.train_alone(run.model, run.optimizer, iter([row]), 1) for row in later] == curve
    assert same(values(run), after)


@pytest.mark.parametrize("line", ["_fill", "_fill_states"])
def test_the_whole_load_counts(
    start: Callable[..., Any], kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    run = start("mlp", "tide")
    run.optimizer.save(tmp_path / "c")

    def stops(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(restoring, line, stops)
    with pytest.raises(KeyboardInterrupt):
        run.optimizer.load(tmp_path / "c")
    with pytest.raises(ContractError, match="did not end"):
        kit.train_alone(run.model, run.optimizer, run.batches, 1)


def test_a_state_dict_is_loaded_whole_too(
    start: Callable[..., Any], kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("mlp", "tide")
    kit.train_alone(run.model, run.optimizer, run.batches, 1)
    run.optimizer.save(tmp_path / "c")
    state, saved = run.optimizer.state_dict(), values(run)
    for again in (lambda: run.optimizer.load_state_dict(state), lambda: run.optimizer.load(tmp_path / "c")):
        stopped_after(monkeypatch, 8, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            run.optimizer.load_state_dict(state)
        monkeypatch.undo()
        with pytest.raises(ContractError, match=r"optimizer\.load_state_dict has begun and did not end"):
            run.model.state_dict()
        again()
        assert same(values(run), saved)
    kit.train_alone(run.model, run.optimizer, run.batches, 1)


def test_the_session_closes_without_the_mixture(
    start: Callable[..., Any],
    kit: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = start("mlp", "tide")
    run.optimizer.save(tmp_path / "c")
    stopped_after(monkeypatch, 8, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run.optimizer.load(tmp_path / "c")
    with caplog.at_level(logging.WARNING, logger="executor"):
        run.session.close()
    assert "left without values: the run ended with optimizer.load has begun and did not end" in caplog.text
