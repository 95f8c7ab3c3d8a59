"""Host memory over a job's life: loading, first step, saving and resuming, worked out by hand from the parameters N."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pstar_sim.catalog.loader import load_machine
from pstar_sim.cli import main
from pstar_sim.core.plan import Settings
from pstar_sim.frameworks.load import load_configuration
from pstar_sim.frameworks.prediction import predict
from pstar_sim.planner.fits import fits
from pstar_sim.workload.presets import preset

SETTINGS = Settings(update="step", clip=True)
N = preset("tiny-gpt2", batch=1).params
SLICE = -(-N // 8)
FSDP = "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: {version}\n"
ONCE = "  fsdp_cpu_ram_efficient_loading: true\n"
ON_HOST = "  fsdp_offload_params: true\n"


def phases(folder: Path, text: str, *, nodes: int = 1) -> dict[str, int | None]:
    """Host bytes of a node of eight, by phase."""
    file = folder / ("ds.json" if text.startswith("{") else "fsdp.yaml")
    file.write_text(text)
    job = preset("tiny-gpt2", batch=8 * nodes, seq=32, dtype="bf16")
    machine = load_machine("a100-80x8", nodes=nodes)
    prediction = predict(load_configuration(str(file)), job, machine, SETTINGS, label=file.name)
    by_name = {phase.name: phase.host_bytes for phase in prediction.as_fit().phases}
    assert list(by_name) == ["loading", "first step", "saving", "resuming"]
    most = max(by_name["loading"] or 0, by_name["first step"] or 0)
    assert most == prediction.host.host_bytes * 8, "what decides the verdict, counted once"
    return by_name


def test_fsdp_gathers_a_full_state_dict_on_one_process(tmp_path: Path) -> None:
    """Weights and moments one after the other, so 8 bytes per parameter; FSDP 1 does so by default."""
    one = phases(tmp_path, FSDP.format(version=1) + ONCE)
    assert one["loading"] == 8 * -(-4 * N // 8)
    assert (one["first step"], one["saving"], one["resuming"]) == (0, 8 * N, 8 * N)
    each = phases(tmp_path, FSDP.format(version=1))
    assert (each["loading"], each["saving"], each["resuming"]) == (8 * 4 * N, 8 * N, 8 * 4 * N)
    two = phases(tmp_path, FSDP.format(version=2) + "  fsdp_state_dict_type: FULL_STATE_DICT\n")
    assert two["saving"] == 8 * N


def test_fsdp_copies_the_slices_of_a_sharded_state_dict_from_the_gpu(tmp_path: Path) -> None:
    """8 bytes per parameter over 16 GPUs, of which a node has eight. What is on the host is written from there."""
    sharded = phases(tmp_path, FSDP.format(version=2), nodes=2)
    assert sharded["saving"] == 8 * -(-8 * N // 16)
    offloaded = phases(tmp_path, FSDP.format(version=2) + ON_HOST)
    assert offloaded["saving"] == offloaded["first step"] != 0


def test_torchtitan_writes_and_reads_tensor_by_tensor(tmp_path: Path) -> None:
    file = tmp_path / "titan.toml"
    file.write_text("[training]\nlocal_batch_size = 1\n")
    job, machine = preset("tiny-gpt2", batch=8, seq=32, dtype="bf16"), load_machine("a100-80x8")
    prediction = predict(load_configuration(str(file)), job, machine, SETTINGS, label=file.name)
    assert [phase.host_bytes for phase in prediction.as_fit().phases[1:3]] == [0, 0]


def deepspeed(stage: int, **zero: object) -> str:
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu", "pin_memory": False}, **zero}
    return json.dumps({"bf16": {"enabled": True}, "zero_optimization": zero})


def test_deepspeed_gathers_16_bit_weights_and_reads_its_own_states(tmp_path: Path) -> None:
    """With stage 3 a rank reads 12 bytes of each of its parameters beside the live ones; before it each rank reads the
    model's file first, 2 bytes of every parameter."""
    three = phases(tmp_path, deepspeed(3, stage3_gather_16bit_weights_on_model_save=True))
    steps = three["first step"]
    assert steps and three["loading"] == 8 * -(-2 * N // 8)
    assert (three["saving"], three["resuming"]) == (steps + 2 * N, steps + 8 * 12 * SLICE)
    assert phases(tmp_path, deepspeed(3))["saving"] == steps
    two = phases(tmp_path, deepspeed(2))
    assert two["loading"] == 8 * 2 * N and two["first step"] is not None
    assert (two["saving"], two["resuming"]) == (two["first step"], two["first step"] + 8 * 2 * N)
    on_gpu = phases(tmp_path, deepspeed(2, offload_optimizer={"device": "none"}))
    assert (on_gpu["first step"], on_gpu["saving"]) == (0, 8 * 4 * SLICE)


def test_states_on_disks_and_scripts_of_their_own_are_not_counted(tmp_path: Path) -> None:
    disks = phases(tmp_path, deepspeed(3, offload_optimizer={"device": "nvme", "nvme_path": "/x"}))
    script = phases(tmp_path, "distributed_type: MULTI_GPU\nmixed_precision: bf16\n")
    assert (disks["saving"], disks["resuming"]) == (script["saving"], script["resuming"]) == (None, None)


def test_the_executor_writes_and_reads_without_a_second_copy() -> None:
    machine = load_machine("rtx4090")
    (row,) = fits(preset("tiny-gpt2", batch=1, seq=32), machine, policies=["zero_offload"], times=False).rows
    loading, first, saving, resuming = (phase.host_bytes or 0 for phase in row.phases)
    assert loading == first + 2 * N == resuming == row.host_needed_bytes and saving == first


@pytest.mark.parametrize("flag", [[], ["--phases"]])
def test_what_the_host_lacks_later_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: list[str]) -> None:
    """Moments of 6.74 B parameters are 53.9 GB on one process; of 48 GB 16 are kept for the system."""
    file = tmp_path / "fsdp.yaml"
    file.write_text(FSDP.format(version=1) + ONCE)
    job = ["--model", "llama-2-7b", "--batch", "8", "--seq", "512", "--policy", "zero3_resident"]
    on = ["--machine", "a100-80x8", "--host-memory", "48GB"]
    assert main(["fits", "--like", str(file), *job, *on, *flag]) == 0
    said = " ".join(capsys.readouterr().out.split())
    short = "saving needs 53.9 GB of host memory of a node, of 32.0 GB: the optimizer's moments, whole on one process"
    assert f"fsdp.yaml: {short}; fsdp_state_dict_type: SHARDED_STATE_DICT needs less." in said
    assert ("host memory of a node by phase" in said) is bool(flag)
    if flag:
        assert "fsdp.yaml 27.0 GB 0 B no: 53.9 GB no: 53.9 GB" in said


def test_what_cannot_be_pinned_is_a_no_of_each_phase_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(deepspeed(2, offload_optimizer={"device": "cpu", "pin_memory": True}))
    job = ["fits", "--like", str(file), "--model", "gpt2", "--batch", "1", "--seq", "64", "--policy", "zero_offload"]
    assert main([*job, "--machine", "rtx4090-wsl2", "--phases"]) == 0
    table = capsys.readouterr().out.partition("host memory of a node by phase")[2]
    row = next(line for line in table.splitlines() if line.startswith("ds.json "))
    assert row.count("no: ") == 3 and "to be pinned, and this system pins 800 MB" in table


def test_what_comes_beside_the_steps_of_several_policies_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["fits", "--model", "gpt2", "--batch", "1", "--seq", "64", "--machine", "rtx4090", "--phases"]
    policies = ["all_on_gpu", "zero_offload", "zero3_offload"]
    assert main([*job, *(word for policy in policies for word in ("--policy", policy))]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if "loading:" in line] == ["all, loading: the weights, whole"]
    assert [line for line in said if "resuming:" in line] == ["all_on_gpu, zero_offload, resuming: the weights, whole"]
