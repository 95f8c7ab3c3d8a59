"""`OffloadStrategy` in a Lightning Trainer: what a fit is made of beside its steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from later import Later

from pstar_sim.core.step import Place
from pstar_sim.errors import ContractError, DoesNotFit, ModelError

lightning, _ = Later("lightning"), Later("torchmetrics")
callbacks, plugins = Later("lightning.pytorch.callbacks"), Later("lightning.pytorch.plugins")
modules, strategies = Later("tests.executor.lightning_modules"), Later("executor.lightning")

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own: few workers, no logger
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

ROWS = torch.randn(18, 32, generator=torch.Generator().manual_seed(1))  # the last batch is shorter


def loader() -> Any:
    return torch.utils.data.DataLoader(ROWS, batch_size=4)  # type: ignore[arg-type]


@pytest.fixture
def fitted(tmp_path: Path) -> Callable[..., Any]:
    def fit(
        module: Any,
        *,
        offloaded: bool = True,
        path: str | None = None,
        where: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Any:
        wanted = {
            "accelerator": "cpu", "max_epochs": 2, "logger": False, "enable_progress_bar": False,
            "enable_model_summary": False, "enable_checkpointing": False, "gradient_clip_val": 0.5,
            "default_root_dir": str(tmp_path),
        }  # fmt: skip
        strategy = strategies.OffloadStrategy("25KB", policy="tide", **where or {}) if offloaded else "auto"
        trainer = lightning.Trainer(**{**wanted, **more}, strategy=strategy)
        trainer.fit(module, loader(), loader(), ckpt_path=path)
        return trainer

    return fit


def test_epochs_schedule_validation_and_a_shorter_batch_are_the_plain_fits(fitted: Callable[..., Any]) -> None:
    mine, plain = modules.Net(), modules.Net()
    trainer = fitted(mine)
    fitted(plain, offloaded=False)
    assert mine.losses == pytest.approx(plain.losses, rel=1e-5) and len(mine.losses) == 10
    assert mine.validated == pytest.approx(plain.validated, rel=1e-5) and len(plain.validated) == 12  # 2: the check
    assert trainer.strategy.session.status().links["h2d"].moved_bytes > 0
    trainer.validate(mine, loader(), verbose=False)
    assert mine.validated[12:] == pytest.approx(plain.validated[7:], rel=1e-5)
    trainer.fit_loop.epoch_progress.reset()
    trainer.fit(mine, loader(), loader())  # again, from the weights that are there
    assert mine.validated[17:19] == mine.validated[7:9] and len(mine.losses) > 10


def test_a_fit_keeps_states_on_disks(kit: Any, fitted: Callable[..., Any], tmp_path: Path) -> None:
    mine, beside = modules.Net(), modules.Net()
    (tmp_path / "disk").mkdir()
    disks = [tmp_path / "disk"]
    with pytest.raises(DoesNotFit, match="that a run with disks takes beside") as refusal:
        fitted(modules.Net(), where={"machine": kit.small_machine(10**9, 80_000), "disks": disks})
    machine = kit.small_machine(10**9, refusal.value.needed_bytes)
    trainer = fitted(mine, where={"machine": machine, "disks": disks})
    fitted(beside)
    assert any(row.place is Place.NVME for row in trainer.strategy.session.plan.initial)
    assert mine.losses == beside.losses and len(mine.losses) == 10


def test_a_fit_goes_on_from_its_own_checkpoint(fitted: Callable[..., Any], tmp_path: Path) -> None:
    """Masters and states: in bf16 the steps after the checkpoint are those of the run that was not interrupted."""
    whole, first, again = modules.Net(), modules.Net(), modules.Net()
    kept = str(tmp_path / "kept.ckpt")
    ended = fitted(whole, precision="bf16-mixed")
    fitted(first, precision="bf16-mixed", max_epochs=1).save_checkpoint(kept)
    resumed = fitted(again, precision="bf16-mixed", path=kept)
    assert first.losses + again.losses == whole.losses
    for p, q in zip(
        ended.strategy.offloaded.state_dict()["state"].values(),
        resumed.strategy.offloaded.state_dict()["state"].values(),
    ):
        assert set(p) == {"step", "exp_avg", "exp_avg_sq", "param32"} and all(torch.equal(p[k], q[k]) for k in p)


def test_metrics_of_the_training_and_a_test_of_the_best_checkpoint_are_the_plain_ones(
    fitted: Callable[..., Any], tmp_path: Path
) -> None:
    """Metrics stand still during the capture. Loading the best weights after the fit ends the run."""
    found = []
    for offloaded in (True, False):
        best = callbacks.ModelCheckpoint(tmp_path / str(offloaded), monitor="wanted", mode="max")
        module = modules.Measures()
        trainer = fitted(module, offloaded=offloaded, callbacks=[best], enable_checkpointing=True)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        (tested,) = trainer.test(module, loader(), ckpt_path="best", verbose=False)
        trainer.save_checkpoint(tmp_path / "after.ckpt")
        found.append([*module.losses, *metrics.values(), *tested.values()])
        assert set(metrics) > {"mean", "first", "second_epoch", "wanted"}
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize(
    ("word", "explicit", "dtype"),
    [
        ("bf16-mixed", False, "bf16"),
        ("16-mixed", False, "bf16"),
        ("16-mixed", True, "fp16"),
        ("16-true", False, "fp16"),
    ],
)
def test_a_precision_is_the_plans_dtype(word: Any, explicit: bool, dtype: str, fitted: Callable[..., Any]) -> None:
    """On a CPU Lightning takes bf16-mixed in the place of 16-mixed, unless its plugin for 16-mixed is given. Then its
    GradScaler is gone, and the session scales the loss."""

    def precision() -> dict[str, Any]:
        return {"plugins": [plugins.MixedPrecision(word, "cpu")]} if explicit else {"precision": word}

    mine, plain = modules.Net(), modules.Net()
    session = fitted(mine, max_epochs=1, **precision()).strategy.session
    assert session.plan.workload.dtype == dtype
    assert session.loss_scale == (None if dtype == "bf16" else 65536.0)
    if word != "16-true":  # fp16 without masters and without a scale: the plain losses are not numbers
        fitted(plain, max_epochs=1, offloaded=False, **precision())
        assert mine.losses == pytest.approx(plain.losses, rel=2e-3)  # bf16 has 8 bits; one layer's rounding


def test_a_step_that_reads_numbers_is_refused_with_what_to_do(fitted: Callable[..., Any]) -> None:
    with pytest.raises(ModelError, match=r"_local_scalar_dense.*gives self\.log the tensor itself"):
        fitted(modules.ReadsANumber())


@pytest.mark.parametrize(
    ("module", "arguments", "words"),
    [
        ("ClipsItself", {"gradient_clip_val": None}, r"clip_gradients\(gradient_clip_val=0.1, .*give the Trainer"),
        ("Net", {"gradient_clip_algorithm": "value"}, "clipped by their norm"),
        ("Net", {"devices": 2}, "one device; give devices=1 in place of 2"),
        ("Net", {"callbacks": ["StochasticWeightAveraging", 0.1]}, "callback StochasticWeightAveraging writes"),
        ("Net", {"callbacks": ["GradientAccumulationScheduler", {1: 2}]}, r"Scheduler\(\{1: 2, 0: 1\}\) changes"),
    ],
)
def test_what_a_plan_does_not_do_is_refused(
    module: str, arguments: dict[str, Any], words: str, fitted: Callable[..., Any]
) -> None:
    if "callbacks" in arguments:
        callback, argument = arguments["callbacks"]
        arguments = {"callbacks": [getattr(callbacks, callback)(argument)]}
    with pytest.raises(ContractError, match=words):
        fitted(getattr(modules, module)(), **arguments)
