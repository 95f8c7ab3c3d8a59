"""One meaning of batch: that of all GPUs together, on the command line, in Python, in a sweep and in every answer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import pstar_sim as ps
from pstar_sim.cli import main
from pstar_sim.errors import PstarError
from pstar_sim.planner.batch_shares import share_out
from pstar_sim.workload.trace import save_trace

SEQ = 128


@pytest.mark.parametrize(("machine", "ranks"), [("h100-80", 1), ("h100-80x4", 4), ("a100-80x8", 8)])
def test_command_line_and_python_mean_the_same_batch(
    machine: str, ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """16 sequences of 128 tokens are 2,048 tokens per iteration, whoever asks and however many GPUs there are."""
    batch = ["--model", "1B", "--batch", "16", "--seq", str(SEQ), "--machine", machine, "--policy", "zero_offload"]
    tokens = {}
    assert main(["compare", *batch, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    tokens["compare"] = row["tokens_per_s"] * row["iteration_s"]
    assert main(["fits", *batch, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    tokens["fits"] = row["tokens_per_s"] * row["iteration_s"]
    assert main(["plan", *batch, "-o", str(tmp_path / "plan.json")]) == 0
    tokens["plan"] = ps.load_plan(tmp_path / "plan.json").workload.tokens * ranks
    workload = ps.preset("1B", batch=16, seq=SEQ)
    answer = ps.compare(workload, machine, policies="zero_offload")
    row = answer.best().row
    tokens["ps.compare"] = row.tokens_per_s * row.iteration_s
    fit = ps.fits(workload, machine, policies=["zero_offload"]).rows[0]
    assert fit.tokens_per_s is not None and fit.iteration_s is not None
    tokens["ps.fits"] = fit.tokens_per_s * fit.iteration_s
    grid = {"machine": machine, "model": "1B", "batch": 16, "seq": SEQ, "policy": "zero_offload"}
    point = ps.sweep(grid, jobs=1).rows[0]
    tokens["ps.sweep"] = float(str(point["tokens_per_s"])) * float(str(point["iteration_s"]))
    assert tokens == pytest.approx(dict.fromkeys(tokens, 16 * SEQ))
    assert answer.batch == 16 and answer.workload.batch == 16 // ranks
    each = f" ({16 // ranks} per GPU)" if ranks > 1 else ""
    assert f"batch 16{each}, sequence 128" in repr(answer)


def test_limits_and_prices_count_all_gpus() -> None:
    """What max_batch finds is a batch that compare takes; the offers of cheapest make up the batch asked for."""
    node = ps.machine("v100-32x8", gpu_memory="4GB")
    most = ps.max_batch(node, lambda batch: ps.preset("1B", batch=batch, seq=SEQ), policies=["tide"])["tide"].value
    assert most > 0 and most % 8 == 0
    fits = ps.compare(ps.preset("1B", batch=most, seq=SEQ), node, policies="tide")
    assert fits.best().plan.workload.batch == most // 8
    assert not ps.compare(ps.preset("1B", batch=most + 8, seq=SEQ), node, policies="tide", near=False).rows[0].fits
    priced = ps.machine("a100-80x8", overrides={"price": 20})
    offer = ps.cheapest("1B", tokens=1e6, batch=32, seq=SEQ, machines=[priced]).rows[0]
    assert offer.batch is not None and offer.micro_batches is not None
    assert offer.batch * offer.micro_batches == 32


def test_a_list_is_what_each_rank_does() -> None:
    node = ps.machine("h100-80x4")
    one = ps.preset("1B", batch=4, seq=SEQ)
    listed = ps.compare([one] * 4, node, policies="zero_offload")
    whole = ps.compare(ps.preset("1B", batch=16, seq=SEQ), node, policies="zero_offload")
    assert listed.batch == whole.batch == 16
    assert listed.best().row.tokens_per_s == whole.best().row.tokens_per_s
    with pytest.raises(PstarError, match="3 workloads for the 4 ranks of h100-80x4"):
        ps.compare([one] * 3, node)


def test_a_trace_alone_is_refused_on_several_gpus(tmp_path: Path) -> None:
    """A captured workload cannot be cut: nobody takes its batch for that of each GPU in silence."""
    file = tmp_path / "t.parquet"
    w = ps.preset("tiny-gpt2", batch=8, seq=8)
    save_trace(replace(w, source="capture"), file)
    traced = ps.load_trace(file)
    with pytest.raises(PstarError, match=r"batch 8, which is that of all 4 GPUs .* \[workload\] \* 4"):
        ps.compare(traced, ps.machine("h100-80x4"))
    assert ps.compare([traced] * 4, ps.machine("h100-80x4"), policies="all_on_gpu").batch == 32
    assert ps.compare(traced, ps.machine("h100-80"), policies="all_on_gpu").batch == 8


def test_a_batch_that_cannot_be_shared_is_said_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    said = "batch 6 cannot be shared evenly by the 4 ranks of h100-80x4; give 4 or 8"
    with pytest.raises(PstarError, match=said):
        ps.compare(ps.preset("1B", batch=6, seq=SEQ), "h100-80x4")
    assert main(["compare", "--model", "1B", "--batch", "6", "--seq", "128", "--machine", "h100-80x4"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("machine", ["v100-32", "h100-80", "h100-80x4"])
def test_a_preset_gets_the_dtype_that_the_command_line_picks(machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    """fp16 where the GPU has no bf16; what is named is kept."""
    argv = ["compare", "--model", "1B", "--batch", "4", "--seq", "128", "--machine", machine, "--policy", "tide"]
    assert main([*argv, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    workload = ps.preset("1B", batch=4, seq=SEQ)
    planned = ps.compare(workload, machine, policies="tide").best()
    assert planned.row.iteration_s == row["iteration_s"]
    assert planned.plan.workload.dtype == ("fp16" if machine == "v100-32" else "bf16")
    planned.plan.check(workload)
    with pytest.raises(PstarError, match="made for batch"):
        planned.plan.check(ps.preset("1B", batch=8, seq=SEQ))
    named = share_out(ps.preset("1B", batch=4, seq=SEQ, dtype="bf16"), ps.machine(machine)).workload
    assert named.dtype == "bf16"


def test_a_gpu_without_a_16_bit_type_gets_fp32() -> None:
    m = ps.machine("virtual", gpu_memory="2GB")
    gpu = replace(m.gpu, flops_per_s={"fp32": 1e12})
    m = replace(m, ranks=(replace(m.ranks[0], gpu=gpu),))
    got = share_out(ps.preset("tiny-gpt2", batch=2, seq=8), m).workload
    assert {t.dtype for t in got.tensors} == {got.dtype} == {"fp32"}
    assert got.tensors[0].bytes == 4 * got.tensors[0].numel
