"""A job without a terminal: a row per step, checkpoints that are kept, and its end by SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from small_model import MODEL

import executor
from executor.models import forward_loss
from executor.run import MAX_GRAD_NORM, Keeping, TrainingJob
from executor.running.keeping import newest_checkpoint
from executor.running.step_log import StepLog, open_sink
from executor.running.stopping import stop_on_sigterm
from pstar_sim.cli import main
from pstar_sim.cli.torchrun import main as of_ranks
from pstar_sim.core.plan import load_plan
from pstar_sim.core.step import Queue
from pstar_sim.errors import CheckpointError, PstarError, Stopped

NAME = "py:pstar_watched:net"
KEYS = [
    "step", "unix_s", "loss", "learning_rate", "grad_norm", "time_s", "tokens_per_s", "waits_s", "adam_share",
    "h2d_bytes", "d2h_bytes", "gpu_bytes", "gpu_peak_bytes", "gpu_budget_bytes", "host_bytes", "host_budget_bytes",
    "exchanges", "on_plan", "deviations",
]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and plans for it that move chunks."""
    where = tmp_path_factory.mktemp("watched")
    (where / "pstar_watched.py").write_text(MODEL)
    sys.path.insert(0, str(where))
    before = Path.cwd()
    os.chdir(where)
    try:
        for name, more in (("plan", []), ("two", ["--micro-batches", "2"])):
            flags = ["--batch", "2", "--seq", "32", "--dtype", "fp32", *more]
            assert main(["trace", NAME, *flags, "-o", f"{name}.parquet"]) == 0
            plan = ["plan", "--trace", f"{name}.parquet", "--machine", "virtual", "--gpu-memory", "450kB"]
            assert main([*plan, "--policy", "tide", "-o", f"{name}.json"]) == 0
    finally:
        os.chdir(before)
        sys.path.remove(str(where))
    return where


@pytest.fixture(autouse=True)
def _here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(made))
    monkeypatch.setattr("executor.measuring.rates.measure_virtual_machine", lambda base, **rates: base)


def job_of(plan: Path) -> TrainingJob:
    return TrainingJob.of_plan(load_plan(plan), NAME, data=None, lr=3e-4, seed=0)


def rows_of(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.mark.parametrize("name", ["plan", "two"])
def test_a_row_per_step_has_the_figures_of_plain_training(made: Path, name: str) -> None:
    plan = load_plan(made / f"{name}.json")
    job_of(made / f"{name}.json").run(plan, steps=3, logs=["log.jsonl"])
    rows = rows_of("log.jsonl")
    assert [list(row) for row in rows] == [KEYS] * 3
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert {row["learning_rate"] for row in rows} == {3e-4}
    assert all(row["h2d_bytes"] == plan.moved_bytes["h2d"] for row in rows[1:])
    assert all(0 < row["gpu_peak_bytes"] <= row["gpu_budget_bytes"] for row in rows)
    # The same job in plain PyTorch.
    job = job_of(made / f"{name}.json")
    built = job.build()
    batches, parameters = job.batches(built), list(built.module.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, fused=True)
    for row in rows:
        losses = []
        for _ in range(plan.workload.micro_batches):
            loss = forward_loss(built.module, next(batches)) / plan.workload.micro_batches
            loss.backward()
            losses.append(float(loss.detach()))
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM))
        optimizer.step()
        optimizer.zero_grad()
        assert row["loss"] == pytest.approx(sum(losses), rel=1e-5)
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_waits_have_their_causes(made: Path, kit: Any) -> None:
    """No copy to the gpu ends before compute waits for it, and 10 ms more."""
    plan, job = load_plan(made / "plan.json"), job_of(made / "plan.json")
    built, backend = job.build(), executor.VirtualBackend()
    carry = backend.link.carry

    def carry_late(target: torch.Tensor, source: torch.Tensor, direction: Queue, width: int) -> None:
        if threading.current_thread().name == "executor-h2d":
            assert kit.stands_still(optimizer.session.queues, but=Queue.H2D)
            time.sleep(0.01)
        carry(target, source, direction, width)

    backend.link.carry = carry_late  # type: ignore[method-assign]
    model, optimizer = executor.prepare(built.module, plan, executor.AdamW(), backend=backend)
    with StepLog(optimizer, "log.jsonl") as log:
        for step, batch in zip(range(3), job.batches(built)):
            loss = forward_loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log.write(step=step, loss=float(loss.detach()), time_s=1.0)
    optimizer.session.drain()
    optimizer.session.close(restore=False)
    for row in rows_of("log.jsonl")[1:]:
        assert set(row["waits_s"]) <= {"h2d", "d2h", "adam", "barrier"}
        assert row["waits_s"]["h2d"] >= 0.01


def test_a_job_that_goes_on_adds_its_rows(made: Path) -> None:
    plan, job = load_plan(made / "plan.json"), job_of(made / "plan.json")
    job.run(plan, steps=2, keeping=Keeping(save="kept"), logs=["log.jsonl"])
    job.run(plan, steps=4, keeping=Keeping(save="kept", resume="kept"), logs=["log.jsonl"])
    assert [row["step"] for row in rows_of("log.jsonl")] == [0, 1, 2, 3]
    job.run(plan, steps=1, logs=["log.jsonl"])
    assert [row["step"] for row in rows_of("log.jsonl")] == [0]


def test_the_newest_checkpoints_are_kept(made: Path) -> None:
    plan, job = load_plan(made / "plan.json"), job_of(made / "plan.json")
    straight = [r.loss for r in job.run(plan, steps=7).reports]
    job.run(plan, steps=5, keeping=Keeping(save="kept", every=1, newest=2))
    assert sorted(p.name for p in Path("kept").iterdir()) == ["step-00000004", "step-00000005"]
    assert newest_checkpoint("kept") == Path("kept/step-00000005")
    Path("kept/.step-00000003.removing").mkdir()  # what a kill in the middle of a removal leaves
    again = job.run(plan, steps=7, keeping=Keeping(save="kept", every=1, newest=2, resume="kept"))
    assert [r.loss for r in again.reports] == straight[5:]
    assert sorted(p.name for p in Path("kept").iterdir()) == ["step-00000006", "step-00000007"]


@pytest.mark.parametrize(
    ("first", "then", "why"),
    [
        ({"newest": 2}, {"newest": 2}, "the folder holds a checkpoint, of iteration 1, that would be lost"),
        ({"newest": 2}, {"resume": "kept"}, "in folders of their own; add --keep N"),
        ({}, {"newest": 2, "resume": "kept"}, "itself; leave --keep out"),
    ],
)
def test_no_checkpoint_is_lost_by_another_way_to_keep(
    made: Path, first: Mapping[str, Any], then: Mapping[str, Any], why: str
) -> None:
    plan, job = load_plan(made / "plan.json"), job_of(made / "plan.json")
    job.run(plan, steps=1, keeping=Keeping(save="kept", **first))
    with pytest.raises(CheckpointError, match=why):
        job.run(plan, steps=2, keeping=Keeping(save="kept", **then))


def test_sigterm_saves_and_ends_with_its_status(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, job = load_plan(made / "plan.json"), job_of(made / "plan.json")
    straight = [r.loss for r in job.run(plan, steps=4).reports]

    def terminate(report: Any, status: Any) -> None:
        if report.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match="stopped by SIGTERM after step 1; continue with --resume kept"):
        job.run(plan, steps=4, keeping=Keeping(save="kept"), on_step=terminate)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    rest = job.run(plan, steps=4, keeping=Keeping(save="kept", resume="kept"))
    assert [r.loss for r in rest.reports] == straight[2:]


@pytest.mark.parametrize("of", ["one", "ranks"])
def test_the_status_of_a_command_that_was_stopped(
    made: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    def terminate(log: StepLog, loss: float) -> float:
        os.kill(os.getpid(), signal.SIGTERM)
        return loss

    monkeypatch.setattr(StepLog, "_loss", terminate)
    argv = [str(made / "plan.json"), "--model", NAME, "--quiet", "--save", "kept", "--log", "log.jsonl"]
    assert (main(["run", *argv]) if of == "one" else of_ranks(argv)) == 143
    error = capsys.readouterr().err
    assert error.startswith("pstar: stopped by SIGTERM after step 0; continue with --resume kept")
    assert error.count("\n") == 1
    assert (Path("kept") / "pstar.json").is_file()


def test_without_a_folder_sigterm_ends_a_run_as_ever() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_sigterm(listens=False):
        assert signal.getsignal(signal.SIGTERM) is before


def test_the_same_keys_with_one_process_and_with_many(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [str(made / "plan.json"), "--model", NAME, "--steps", "2", "--json"]
    keys = []
    for command in (lambda: main(["run", *argv]), lambda: of_ranks(argv)):
        capsys.readouterr()
        assert command() == 0
        keys.append(list(json.loads(capsys.readouterr().out)))
    assert keys[0] == keys[1]
    assert keys[0][:4] == ["command", "version", "model", "machine"]
    assert {"losses", "step_s", "figures", "peak_gpu_bytes", "steps", "ranks"} <= {*keys[0]}


class Writer:
    """Stands for the writers of both tools."""

    def __init__(self, folder: str) -> None:
        self.folder, self.seen, self.closed = folder, dict[tuple[str, int], float](), False

    def add_scalar(self, name: str, value: float, global_step: int, walltime: float) -> None:
        assert walltime == ROW["unix_s"]
        self.seen[name, global_step] = value

    def log(self, row: Mapping[str, float], step: int) -> None:
        self.seen |= {(name, step): value for name, value in row.items()}

    def close(self) -> None:
        self.closed = True

    finish = close


ROW = {
    "step": 3,
    "unix_s": 1.8e9,
    "loss": 0.5,
    "grad_norm": None,
    "on_plan": True,
    "waits_s": {"h2d": 0.25},
    "exchanges": 2,
}


def test_rows_go_to_the_tools_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Writer] = []

    def write(folder: str = "", project: str = "") -> Writer:
        made.append(Writer(folder or project))
        return made[-1]

    board, weights = types.ModuleType("torch.utils.tensorboard"), types.ModuleType("wandb")
    board.SummaryWriter, weights.init = write, write  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "wandb", weights)
    for target in ("tensorboard:runs/one", "wandb:mine"):
        sink = open_sink(target)
        sink.write(ROW)
        sink.close()
    assert [one.folder for one in made] == ["runs/one", "mine"]
    for one in made:
        assert one.closed
        assert one.seen == {("loss", 3): 0.5, ("on_plan", 3): 1.0, ("waits_s/h2d", 3): 0.25, ("exchanges", 3): 2.0}


@pytest.mark.parametrize("target", ["tensorboard:runs", "wandb:mine"])
def test_a_tool_that_is_not_installed_is_named_before_the_run(
    made: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    package = target.partition(":")[0]
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(PstarError, match=f"pip install {package}"):
        open_sink(target)
    folder = ModuleSpec(package, None, is_package=True)  # of logs, in the current one
    for found in (None, folder):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, found=found: found)
        assert main(["run", str(made / "plan.json"), "--model", NAME, "--log", target]) == 2
        error = capsys.readouterr().err
        assert f"argument --log: {target} needs {package}, which is not installed: pip install {package}" in error


def test_a_project_that_cannot_be_opened_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(project: str) -> None:
        raise RuntimeError("No API key configured")

    weights = types.ModuleType("wandb")
    monkeypatch.setitem(sys.modules, "wandb", weights)
    with pytest.raises(PstarError, match="pip install wandb"):
        open_sink("wandb:mine")
    weights.init = refuse  # type: ignore[attr-defined]
    with pytest.raises(PstarError, match=r"^wandb:mine: No API key configured \(or WANDB_MODE=offline\)$"):
        open_sink("wandb:mine")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--log", "no/log.jsonl"], "argument --log: no/log.jsonl: there is no folder 'no'; make it first"),
        (["--log", "a", "--timeline", "a"], "--timeline and --log would both write a; give each a file of its own"),
        (["--log", "wandb:"], "argument --log: 'wandb:' names no project"),
        (["--keep", "2"], "--keep 2 needs a folder: add --save FOLDER"),
    ],
)
def test_mistakes_are_one_line(made: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert main(["run", str(made / "plan.json"), "--model", NAME, *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
