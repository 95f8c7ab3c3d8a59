"""pstar export --deepspeed and --like: the same prediction wherever it is asked, contradictions refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pstar_sim.cli import main
from pstar_sim.cli.exit_status import NO
from pstar_sim.core.plan_file import FORMAT

JOB = ["--model", "1B", "--seq", "128", "--machine", "v100-32", "--policy", "zero_offload"]
OFFLOAD = {
    "train_micro_batch_size_per_gpu": 2,
    "fp16": {"enabled": True},
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}


@pytest.fixture
def ds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(OFFLOAD))
    return path


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["rows"]


def test_fits_and_compare_give_the_same_prediction(ds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit, ours = answer(capsys, "fits", "--like", "ds.json", *JOB)
    row, beside = answer(capsys, "compare", "--like", "ds.json", *JOB)
    assert fit["like"] == row["like"] and next(iter(fit["like"]))  # host memory first
    assert list(fit["like"])[2] == "host_needed_bytes"
    assert fit["policy"] == row["policy"] == "ds.json" and ours["policy"] == beside["policy"] == "zero_offload"
    assert fit["iteration_s"] == row["iteration_s"] and fit["host_needed_bytes"] == row["peak_host_bytes"]
    assert fit["gpu_needed_bytes"] == row["peak_gpu_bytes"]
    # the same policy of ours, without the framework's buffers: the same seconds
    assert row["iteration_s"] == pytest.approx(beside["iteration_s"], rel=1e-6)
    assert main(["fits", "--like", "ds.json", *JOB]) == 0
    assert "host memory per GPU: 4.45 GB of fp32 masters (pinned)" in " ".join(capsys.readouterr().out.split())


def test_fits_plans_no_policy_beside_a_configuration_unless_one_is_named(
    ds: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A search for a plan that nobody asked for takes most of the time of the answer."""
    alone = JOB[: JOB.index("--policy")]
    (row,) = answer(capsys, "fits", "--like", "ds.json", *alone)
    fit, ours = answer(capsys, "fits", "--like", "ds.json", *JOB)
    assert row == fit and ours["policy"] == "zero_offload"
    assert main(["fits", "--like", "ds.json", *alone]) == 0
    assert "policies of pstar-sim beside these: --policy optimal" in capsys.readouterr().out
    assert main(["fits", "--like", "ds.json", *alone, "--gpu-memory", "3GB"]) == NO
    assert "pstar: ds.json does not fit 1B on v100-32" in capsys.readouterr().err


def test_weights_while_they_are_loaded_are_in_both_tables(ds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing offloaded: the host is needed for loading alone."""
    ds.write_text(json.dumps({**OFFLOAD, "zero_optimization": {"stage": 0}}))
    row, _ = answer(capsys, "compare", "--like", "ds.json", *JOB)
    assert row["like"]["host_needed_bytes"] == row["peak_host_bytes"] == row["like"]["host_startup_bytes"] > 10**9


def test_checkpoints_on_the_host_are_predicted_by_both(ds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSpeed's cpu_checkpointing: block inputs are host memory, which the GPU does not have to hold."""
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    checkpoints = {"activation_checkpointing": {"cpu_checkpointing": True}}
    ds.write_text(json.dumps({**OFFLOAD, "zero_optimization": zero}))
    ds.with_name("host.json").write_text(json.dumps({**OFFLOAD, "zero_optimization": zero, **checkpoints}))
    both = ["--like", "ds.json", "--like", "host.json", *JOB, "--checkpointing"]
    kept, moved, _ = answer(capsys, "fits", *both)
    rows = {row["policy"]: row for row in answer(capsys, "compare", *both)}
    assert rows["host.json"]["like"] == moved["like"] and rows["ds.json"]["like"] == kept["like"]
    assert rows["host.json"]["peak_host_bytes"] == moved["host_needed_bytes"]
    stash_bytes = moved["host_needed_bytes"] - kept["host_needed_bytes"]
    assert 0 < stash_bytes <= 24 * 2 * 128 * 2048 * 2  # inputs of 24 blocks: 2 sequences, 128 tokens, 2048 wide, fp16
    assert moved["gpu_needed_bytes"] < kept["gpu_needed_bytes"]


def test_an_assumption_about_recomputation_is_said(ds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, said in (([], True), (["--no-checkpointing"], False), (["--checkpointing"], False)):
        assert main(["fits", "--like", "ds.json", *JOB, *flags]) == 0
        told = " ".join(capsys.readouterr().out.split())
        assert ("ds.json: activations are taken as recomputed, which no file says; --no-checkpointing" in told) == said


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--batch", "4"], "--batch 4, but ds.json says 2 sequences on all GPUs together"),
        (["--dtype", "fp32"], "--dtype fp32, but ds.json says fp16"),
        (["--clip"], "--clip, but ds.json says no clipping"),
        (
            ["--like", "plan.json"],
            "plan.json: is a plan of pstar, not a framework's configuration; `pstar explain plan",
        ),
        (["--like", "fsdp2.py"], "FSDP2 code is written (pstar export) and not read: give"),
        (["--like", "ds.json"], "the same file is given twice"),
        (["--like", "other.json"], "ds.json says 2 sequences on all GPUs together, but other.json says 4"),
        (["--micro-batches", "2", "--like", "alone.json"], "--micro-batches 2, but alone.json says 1 micro-batch;"),
        (
            ["--like", "sum.json"],
            "sum.json: train_batch_size = 7 sequences per iteration, but 2 sequences per GPU x 1 micro-batch x 1 GPU",
        ),
    ],
)
def test_a_contradiction_is_one_line(ds: Path, argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    ds.with_name("other.json").write_text(json.dumps({**OFFLOAD, "train_micro_batch_size_per_gpu": 4}))
    ds.with_name("alone.json").write_text(json.dumps({"train_batch_size": 2, "fp16": {"enabled": True}}))
    ds.with_name("sum.json").write_text(
        json.dumps({**OFFLOAD, "train_batch_size": 7, "gradient_accumulation_steps": 1})
    )
    ds.with_name("plan.json").write_text(json.dumps({"format": FORMAT, "version": 1}))
    assert main(["fits", "--like", "ds.json", *JOB, *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and said in err


def test_a_plan_is_exported_and_the_file_read_again(ds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--model", "1B", "--batch", "1", "--seq", "128", "--machine", "v100-32", "--gpu-memory", "6GB"]
    assert main([*plan, "--policy", "tide", "-o", "plan.json"]) == 0
    capsys.readouterr()
    (said,) = answer(capsys, "export", "plan.json", "--deepspeed", "out.json")
    assert said["policy"].startswith("zero3_offload:subgroup=")
    assert any("order of copies and updates of tide" in line for line in said["cannot_express"])
    assert "ZeRO stage 3, optimizer on the host, parameters on the host" in said["says"]
    (fit, _) = answer(
        capsys, "fits", "--like", "out.json", "--model", "1B", "--seq", "128", "--machine", "v100-32", "--gpu-memory",
        "6GB", "--policy", "zero_offload",
    )  # fmt: skip
    assert {k: v for k, v in fit["like"].items() if k != "configuration"} == {
        k: said[k] for k in fit["like"] if k != "configuration"
    }
    files = {"--accelerate": "a.yaml", "--fsdp2": "b.py", "--torchtitan": "c.toml", "--megatron": "d.txt"}
    answers = answer(capsys, "export", "plan.json", *(word for pair in files.items() for word in pair))
    assert [one["file"] for one in answers] == [*files.values()] == [p.name for p in sorted(ds.parent.glob("[a-d].*"))]
    # Megatron keeps 2 bytes of parameters and 4 of gradients on the GPU: more than 6 GB less the driver's
    assert [one["fits"] for one in answers] == [True, True, True, False]
    assert all(one["cannot_express"] for one in answers) and "gradients" in str(answers[-1]["reason"])
    assert main(["export", "plan.json", "--deepspeed", "out.json", "--timeline"]) == 2
    assert "argument --deepspeed: not allowed with argument --timeline" in capsys.readouterr().err


def test_a_flag_decides_about_dropout_where_megatrons_has_none(ds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Masks take memory; a rate that the file has is not overridden."""
    flags = "--micro-batch-size 2 --seq-length 64 --bf16"
    job = ["fits", "--model", "tiny-gpt2", "--machine", "h100-80"]
    needs = []
    for said, argv in (("", []), ("", ["--dropout", "0"]), ("--hidden-dropout 0 --attention-dropout 0", [])):
        ds.with_name("m.sh").write_text(f"{flags} {said}")
        (row,) = answer(capsys, *job, "--like", "m.sh", *argv)
        noted = [note for note in row["like"]["configuration"]["notes"] if "no --hidden-dropout" in note]
        assert len(noted) == (not said)
        needs.append(row["like"]["gpu_needed_bytes"])
    assert needs[0] > needs[1] == needs[2]
    assert main([*job, "--like", "m.sh", "--dropout", "0.1"]) == 2
    assert "--dropout 0.1, but m.sh says 0;" in capsys.readouterr().err


M_SH, T_TOML = "--micro-batch-size 2 --seq-length 64 --bf16", "[training]\nlocal_batch_size = 2\nseq_len = 64\n"
LEFT_OUT = {
    "m.sh": (M_SH, f"{M_SH} --clip-grad 1 --optimizer adam --recompute-granularity selective"),
    "t.toml": (
        T_TOML,
        f'{T_TOML}max_norm = 1\nmixed_precision_param = "bfloat16"\n[activation_checkpoint]\nmode = "full"',
    ),
}


@pytest.mark.parametrize(
    ("file", "flag"),
    [
        *(("m.sh", flag) for flag in ("--no-clip", "--optimizer sgd-momentum", "--checkpointing")),
        *(("t.toml", flag) for flag in ("--no-clip", "--no-checkpointing", "--dtype fp32")),
    ],
)
def test_a_flag_decides_about_what_a_file_leaves_to_its_framework(
    ds: Path, file: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default in whose place it stands is named; what the file itself says is not overridden."""
    left_out, said = LEFT_OUT[file]
    job = ["fits", "--model", "tiny-gpt2", "--machine", "h100-80", "--like", file, *flag.split()]
    ds.with_name(file).write_text(left_out)
    (row,) = answer(capsys, *job)
    decided = [note for note in row["like"]["configuration"]["notes"] if " in place of " in note]
    assert flag in [note.partition(" in place of ")[0] for note in decided]
    ds.with_name(file).write_text(said)
    assert main(job) == 2
    assert f"{flag}, but {file} says " in capsys.readouterr().err


def test_a_flag_decides_about_sums_of_fp16_where_megatrons_has_none(
    ds: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ["fits", "--model", "tiny-gpt2", "--machine", "h100-80", "--micro-batches", "2", "--like", "f.sh"]
    script, needs = ds.with_name("f.sh"), {}
    script.write_text("--micro-batch-size 2 --seq-length 64 --fp16")
    for flags in ([], ["--sums", "16-bit"], ["--sums", "32-bit"]):
        (row,) = answer(capsys, *job, *flags)
        needs[tuple(flags)] = row["gpu_needed_bytes"]
    assert needs[()] == needs["--sums", "16-bit"] < needs["--sums", "32-bit"]
    assert "--sums 32-bit in place of Megatron-LM's default, 16-bit" in row["like"]["configuration"]["notes"]
    script.write_text("--micro-batch-size 2 --seq-length 64 --fp16 --accumulate-allreduce-grads-in-fp32")
    assert main([*job, "--sums", "16-bit"]) == 2
    assert "--sums 16-bit, but f.sh says 32-bit" in capsys.readouterr().err


def test_a_trace_has_its_own_kernels_whatever_the_script_says(ds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = Path(__file__).parents[2] / "traces" / "gpt2.parquet"
    ds.with_name("m.sh").write_text("--micro-batch-size 4 --seq-length 1024 --bf16 --hidden-dropout 0.2")
    (row,) = answer(capsys, "fits", "--trace", str(trace), "--machine", "h100-80", "--like", "m.sh")
    assert "kernels and dropout are those of the trace, whatever the file says" in row["like"]["configuration"]["notes"]


def test_a_file_that_the_machine_cannot_run_is_named(ds: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}
    ds.write_text(json.dumps({**OFFLOAD, "zero_optimization": zero}))
    assert main(["fits", "--like", "ds.json", *JOB]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "ds.json: machine 'v100-32' has no disks" in err


@pytest.mark.parametrize(
    ("counts", "flags", "said"),
    [
        (
            "num_processes: 16\nnum_machines: 2",
            "",
            "num_processes = 16 on num_machines = 2, but h100-80x8 has 8 GPUs in 1 node; give --nodes 2",
        ),
        ("num_machines: 2", "", "num_machines = 2, but h100-80x8 has 8 GPUs in 1 node; give --nodes 2"),
        ("num_processes: 8\nnum_machines: 2", "", "in 1 node; give --nodes 2 --gpus 4"),
        ("num_processes: 4", "", "num_processes = 4, but h100-80x8 has 8 GPUs in 1 node; give --gpus 4"),
        ("num_processes: 16\nnum_machines: 1", "--nodes=2", "has 16 GPUs in 2 nodes; give --nodes 1 --gpus 16"),
        ("num_processes: 9\nnum_machines: 2", "", "every machine must have the same number of processes"),
        ("num_processes: 16\nnum_machines: 2", "--nodes=2", ""),
    ],
)
def test_processes_and_machines_of_a_file_are_those_of_the_machine(
    counts: str, flags: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hsdp.yaml"
    path.write_text(f"distributed_type: FSDP\nfsdp_config: {{fsdp_sharding_strategy: HYBRID_SHARD}}\n{counts}\n")
    job = ["fits", "--model", "gpt2", "--batch", "16", "--seq", "64", "--machine", "h100-80x8", "--like", str(path)]
    assert main([*job, *flags.split()]) == (2 if said else 0)
    out, err = capsys.readouterr()
    assert said in err and "without effect" not in out


def test_where_no_preset_runs_under_autocast_the_weights_are_narrow_and_the_answer_says_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.yaml"
    path.write_text("distributed_type: 'NO'\nmixed_precision: bf16\n")
    job = ["fits", "--model", "gpt2", "--batch", "2", "--seq", "64", "--machine", "a100-80", "--lora", "r=8"]
    assert main([*job, "--like", str(path)]) == 0
    assert "predicted with weights in bf16: autocast over fp32 weights takes more memory" in capsys.readouterr().out
    assert main([*job, "--like", str(path), "--autocast", "bf16"]) == 2
    assert "not for adapters" in capsys.readouterr().err


def test_mixed_precision_without_sharding_is_autocast_over_fp32_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """accelerate's, and so the HF Trainer's. A script that loads 16-bit weights says so by --dtype."""
    path = tmp_path / "one.yaml"
    path.write_text("distributed_type: 'NO'\nmixed_precision: bf16\n")
    job = ["fits", "--like", str(path), "--model", "gpt2", "--batch", "2", "--seq", "64", "--machine", "a100-80"]
    cast, narrow, flag = (answer(capsys, *job, *more)[0] for more in ([], ["--dtype", "bf16"], ["--autocast", "bf16"]))
    assert "bf16 autocast" in cast["notes"] and "autocast" not in narrow["notes"]
    assert cast["gpu_needed_bytes"] == flag["gpu_needed_bytes"] > narrow["gpu_needed_bytes"]
    assert main([*job, "--autocast", "fp16"]) != 0
    assert "--autocast fp16, but one.yaml says bf16" in capsys.readouterr().err
    assert main(["trace", "gpt2", "--batch", "2", "--seq", "64", "-o", str(tmp_path / "t.parquet")]) == 0
    capsys.readouterr()
    traced = answer(capsys, "fits", "--like", str(path), "--trace", str(tmp_path / "t.parquet"), "--machine", "a100-80")
    assert traced[0]["fits"]
