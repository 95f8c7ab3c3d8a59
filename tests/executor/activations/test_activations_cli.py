"""From the command line: trace the variants, let the planner choose for each block, run what it chose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pstar_sim.cli import main
from pstar_sim.core.plan import load_plan
from pstar_sim.workload.trace import load_variants

CONFIG = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 6, "n_head": 2, "n_embd": 32,
    "vocab_size": 256, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("executor.measuring.rates.measure_virtual_machine", lambda base, **rates: base)
    Path("config.json").write_text(json.dumps(CONFIG))


@pytest.mark.slow
def test_trace_plan_and_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Two sequences of 64 tokens leave 6 x 1.0 MB behind where all is kept; with 3.3 MB for everything some of it is
    recomputed or goes to the host (whose link is fast), and the run moves the very bytes that were planned."""
    model = "hf:config.json"
    shape = ["--batch", "2", "--seq", "64", "--dtype", "fp32"]
    assert main(["trace", model, *shape, "--variants", "-o", "t.parquet"]) == 0
    assert "4 variants" in capsys.readouterr().out
    assert [(w.batch, w.checkpointing) for w in load_variants("t.parquet")] == [
        (2, False),
        (2, True),
        (1, False),
        (1, True),
    ]
    fast = ["--set", "link.h2d=100GB/s", "--set", "link.d2h=100GB/s"]
    machine = ["--machine", "virtual", "--gpu-memory", "3.3MB", *fast]
    planned = ["plan", "--trace", "t.parquet", "--global-batch", "2", *machine, "--chunk", "1MiB", "--policy", "tide"]
    assert main([*planned, "-o", "p.json"]) == 0
    capsys.readouterr()
    plan = load_plan("p.json")
    choices = [how for _, how in plan.workload.activations]
    assert len(choices) == 6 and "offload" in choices, plan.choices["variants_tried"]
    assert main(["run", "p.json", "--model", model, "--steps", "2", "--bandwidth", "100GB/s", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["deviations"] == [] and len(answer["losses"]) == 2
    figures = {row["name"]: (row["predicted"], row["measured"]) for row in answer["figures"]}
    for name in ("h2d", "d2h"):
        assert figures[name][0] == figures[name][1] == plan.moved_bytes[name]
    # The arena's payloads and what is alive beside them, against the simulation.
    assert figures["GPU peak"][1] <= figures["GPU peak"][0] * 1.001


def test_variants_are_of_one_micro_batch(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["trace", "hf:config.json", "--batch", "2", "--seq", "8", "--variants", "-o", "t.parquet"]
    for more in (["--micro-batches", "2"], ["--checkpointing"]):
        assert main([*shape, *more]) != 0
        assert "--variants traces one micro-batch" in capsys.readouterr().err


FACTORY = """
import torch
from torch import nn

class Mean(nn.Linear):
    def forward(self, x):
        return super().forward(x).mean()

def fixed():
    return Mean(8, 8), torch.randn(4, 8)

def asked(batch):
    return Mean(8, 8), torch.randn(batch, 8)
"""


def test_a_factory_with_a_batch_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """It is traced with that batch, which a line says; its variants would all be the same."""
    Path("own_batch.py").write_text(FACTORY)
    flags = ["--seq", "8", "-o", "t.parquet"]
    assert main(["trace", "py:own_batch:fixed", "--batch", "2", *flags]) == 0
    said = "py:own_batch:fixed takes no `batch`: its own batch is traced, with batch 4, not --batch 2"
    assert said in capsys.readouterr().err and load_variants("t.parquet")[0].batch == 4
    assert main(["trace", "py:own_batch:fixed", "--batch", "4", *flags]) == 0
    assert not capsys.readouterr().err
    assert main(["trace", "py:own_batch:fixed", "--batch", "2", "--variants", *flags]) == 2
    assert "its batch is 4" in capsys.readouterr().err
    assert main(["trace", "py:own_batch:asked", "--batch", "2", "--variants", *flags]) == 0
    assert [w.batch for w in load_variants("t.parquet")] == [2, 1]
