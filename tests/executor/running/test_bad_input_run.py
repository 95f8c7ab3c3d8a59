"""Bad input to `pstar trace` and `pstar run`: one line and a status, nothing half-written, on a model of a few
layers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import executor
from pstar_sim.cli import main
from pstar_sim.core.plan import load_plan
from pstar_sim.errors import PlanError

MODELS = """
import time
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.emb = nn.Embedding(256, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 256)

    def forward(self, input_ids, labels):
        x = self.emb(input_ids)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Loss:
    def __init__(self, value, weight):
        self.value, self.weight = value, weight

    @property
    def loss(self):
        return self.value + self.weight.sum()


class Outside(Net):
    def forward(self, input_ids, labels):
        return Loss(super().forward(input_ids, labels), self.layers[0].weight)


class Reads(Net):
    def forward(self, input_ids, labels):
        scale = 2.0 if self.emb(input_ids).sum().item() > 0 else 1.0
        return scale * super().forward(input_ids, labels)


class Nan(Net):
    def forward(self, input_ids, labels):
        return super().forward(input_ids, labels) * float("nan")


class Broken(Net):
    def forward(self, input_ids, labels):
        return self.head(self.emb(input_ids).flatten(1)).sum()


class Slow(Net):
    calls = 0

    def forward(self, input_ids, labels):
        self.calls += 1
        if self.calls == 4:
            open("started", "w").close()
            time.sleep(800)
        return super().forward(input_ids, labels)


def example(batch, sequence):
    ids = torch.zeros(batch, sequence, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def net(batch, sequence): return Net(), example(batch, sequence)
def wide(batch, sequence): return Net(96), example(batch, sequence)
def outside(batch, sequence): return Outside(), example(batch, sequence)
def reads(batch, sequence): return Reads(), example(batch, sequence)
def nan(batch, sequence): return Nan(), example(batch, sequence)
def broken(batch, sequence): return Broken(), example(batch, sequence)
def slow(batch, sequence): return Slow(), example(batch, sequence)
def short(batch): return Net(), example(batch, 8)
def long(batch): return Net(), example(batch, 4096)
def fails(batch): raise RuntimeError("no weights\\nat all")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, and a plan of `net` for a virtual accelerator that has little room to spare."""
    where = tmp_path_factory.mktemp("bad-run")
    (where / "pstar_bad_models.py").write_text(MODELS)
    before = Path.cwd()
    os.chdir(where)
    try:
        model = ["py:pstar_bad_models:net", "--batch", "2", "--seq", "16", "--dtype", "fp32"]
        assert main(["trace", *model, "-o", "trace.parquet"]) == 0
        machine = ["--machine", "virtual", "--gpu-memory", "0.0006GB"]
        assert main(["plan", "--trace", "trace.parquet", *machine, "--policy", "tide", "-o", "plan.json"]) == 0
    finally:
        os.chdir(before)
    return where


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("executor.measuring.rates.measure_virtual_machine", lambda base, **rates: base)


def complaint(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 2) -> str:
    files = sorted(p.name for p in Path.cwd().glob("[!_]*"))
    assert main(argv) == status
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line]
    assert out == "" and len(lines) == 1 and lines[0].startswith("pstar: ") and "Traceback" not in err
    assert sorted(p.name for p in Path.cwd().glob("[!_]*")) == files
    return err


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("outside", "'layers.0.weight' is read outside every module call"),
        ("reads", "module '<root>' (Reads) cannot run on fake tensors: aten._local_scalar_dense.default"),
        ("broken", "module 'head' (Linear) cannot run on fake tensors"),
        ("fails", "fails() raised RuntimeError: no weights at all"),
        ("nothing", "has no callable 'nothing'; name a function of it"),
    ],
)
def test_a_model_that_cannot_be_traced(model: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["trace", f"py:pstar_bad_models:{model}", "--batch", "2", "--seq", "16", "-o", "new.parquet"]
    assert says in complaint(capsys, *argv, status=3 if model == "long" else 2)  # it does not fit


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("wide", "parameter 'emb.weight': the plan was made for shape (256, 64), the model has (256, 96)"),
        ("outside", "'layers.0.weight' was read outside every module call"),
        ("nan", "the loss is nan at step 0; lower the learning rate"),
        ("broken", "module 'head' (Linear) raised RuntimeError"),
        ("fails", "fails() raised RuntimeError: no weights at all"),
        ("long", "make a plan for this shape"),
    ],
)
def test_a_model_that_cannot_be_run(model: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["run", "plan.json", "--model", f"py:pstar_bad_models:{model}", "--steps", "2", "--timeline", "new.json"]
    assert says in complaint(capsys, *argv, status=3 if model == "long" else 2)  # it does not fit


def test_a_batch_that_fits_but_differs_runs_and_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "plan.json", "--model", "py:pstar_bad_models:short", "--steps", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert err == "" and len(answer["losses"]) == 2
    assert any("another shape than planned" in deviation for deviation in answer["deviations"])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ["--timeline", "same.json", "--perfetto", "same.json"],
            "--timeline and --perfetto would both write same.json",
        ),
        (["--record", "same.parquet", "--plot", "same.toml"], "--record and --plot would both write same.toml"),
        (["--bandwidth", "0GB/s"], "'0GB/s' is not a rate; write a positive number and a unit, such as 2GB/s"),
        (["--lr", "nan"], "--lr: must be at least 0 and finite, not nan"),
        (["--lr", "-1"], "--lr: must be at least 0 and finite, not -1"),
        (["--save", "/proc/none/of/this"], "--save /proc/none/of/this: /proc cannot be written to"),
        (["--gpu-memory", "24GB"], "gpu_memory=24000000000 is more than the"),
    ],
)
def test_flags_that_cannot_be_meant(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in complaint(capsys, "run", "plan.json", "--model", "py:pstar_bad_models:net", "--quiet", *flags)


def test_steps_are_counted_from_the_first_one_of_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps, then two more behind --resume, whose rows are 2 and 3; weights beside --resume are not read."""
    job = ["run", "plan.json", "--model", "py:pstar_bad_models:net", "--quiet", "--save", str(tmp_path / "kept")]
    assert main([*job, "--steps", "2"]) == 0
    capsys.readouterr()
    beside = ["--resume", str(tmp_path / "kept"), "--weights", str(tmp_path / "kept")]
    assert main([*job, "--steps", "4", *beside]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if re.match(r"\s+\d ", line)] == ["2", "3"]
    assert f"{tmp_path / 'kept'} was not read: the weights are the checkpoint's" in " ".join(out.split())  # it may fold


def test_a_plan_edited_by_hand_is_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    plan = json.loads(Path("plan.json").read_text())
    plan["gpu_budget_bytes"] //= 2
    Path("edited.json").write_text(json.dumps(plan))
    said = complaint(capsys, "run", "edited.json", "--model", "py:pstar_bad_models:net")
    assert "edited.json: gpu may hold" in said


def test_a_plan_of_several_gpus_says_how_it_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, plan = tmp_path / "two.toml", tmp_path / "two.json"
    file.write_text('[machines.two]\ngpu = "virtual"\ngpus = 2\nlink = "virtual"\nhost = "virtual"\n', encoding="utf-8")
    argv = ["plan", "--model", "gpt2", "--batch", "2", "--seq", "64", "--dtype", "bf16", "--gpu-memory", "4GB"]
    assert main([*argv, "--machine", str(file), "--policy", "zero_offload", "-o", str(plan)]) == 0
    capsys.readouterr()
    said = complaint(capsys, "run", str(plan), "--model", "py:pstar_bad_models:net")
    assert "for 2 GPUs (two) and this is a single process; start 2: torchrun --nproc-per-node 2 -m executor" in said
    assert f"{plan} --model py:pstar_bad_models:net" in said
    four = tmp_path / "four.json"
    file.write_text(file.read_text(encoding="utf-8").replace("gpus = 2", "gpus = 4"), encoding="utf-8")
    argv += ["--machine", str(file), "--policy", "zero3_resident:replicas=2", "-o", str(four)]
    argv[argv.index("--batch") + 1] = "4"
    assert main(argv) == 0
    capsys.readouterr()
    said = complaint(capsys, "run", str(four), "--model", "py:pstar_bad_models:net")
    assert "slices parameters over 2 of its 4 GPUs (replicas), which FSDP does: pstar export --fsdp2" in said


def test_host_memory_too_small_is_found_before_anything_is_allocated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # executor.prepare is the function; the module of that name is behind it.
    monkeypatch.setattr(sys.modules["executor.prepare"], "available_host_bytes", lambda: 1000)
    monkeypatch.setattr("executor.memory.arena.Arena.allocate_slabs", lambda self: pytest.fail("allocated"))
    said = complaint(capsys, "run", "plan.json", "--model", "py:pstar_bad_models:net", status=3)
    assert "host needs" in said and "but has 1 kB" in said and "short by" in said


def test_a_plan_of_another_dtype_is_not_prepared() -> None:
    sys.path.insert(0, str(Path.cwd()))
    try:
        import pstar_bad_models  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    model: nn.Module = pstar_bad_models.Net().to(torch.bfloat16)
    with pytest.raises(PlanError, match="made for fp32, the model is in bf16; convert the model first"):
        executor.prepare(model, load_plan("plan.json"), executor.AdamW(lr=1e-3, max_grad_norm=1.0))
    assert all(type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.slow
@pytest.mark.timeout(900)  # it measures the machine first, on which everything else may run
def test_ctrl_c_in_the_middle_of_a_run(tmp_path: Path, python: str) -> None:
    argv = [python, "-m", "pstar_sim", "run", "plan.json", "--model", "py:pstar_bad_models:slow"]
    argv += ["--steps", "100000", "--timeline", str(tmp_path / "timeline.json")]
    # A shell that starts a job in the background has it ignore SIGINT; a child of ours must not inherit that.
    running = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "ZYGOTE_END": "whole"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        started = Path("started")
        for _ in range(6000):
            if started.exists() or running.poll() is not None:
                break
            time.sleep(0.1)
        assert started.exists() and running.poll() is None
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=200)
    finally:
        running.kill()
        running.communicate()
    assert running.returncode == 130
    *steps, said = err.splitlines()
    assert out == "" and said == "pstar: interrupted" and all(line.startswith("step ") for line in steps)
    assert list(tmp_path.iterdir()) == []
