"""One meaning of "fits": `fits`, `compare`, `max_batch`, `choose` and the commands count the same bytes of the host."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

import pstar_sim as ps
from pstar_sim.cli import main
from pstar_sim.planner.compare import plan_and_play
from pstar_sim.planner.memory_needs import need_of_plan
from pstar_sim.planner.variants import choose
from pstar_sim.policy.registry import find_policy
from pstar_sim.testing import MIB, chain_workload, round_machine
from pstar_sim.workload.loading import WHOLE

JOB = ["--model", "llama-2-7b", "--batch", "8", "--seq", "2048", "--policy", "zero3_resident"]
NODE = ["--machine", "rtx3090-64gb", "--gpus", "8"]
FSDP = """
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
fsdp_config: {{fsdp_version: 2, fsdp_cpu_ram_efficient_loading: {once}, fsdp_offload_params: false}}
"""


@functools.cache
def gpt2(batch: int) -> ps.Workload:
    return ps.preset("gpt2", batch=batch, seq=64)


POLICIES = ("all_on_gpu", "zero_offload", "static_partition", "tide", "patrickstar", "zero3_offload", "zero_infinity")


@pytest.mark.parametrize(
    ("policy", "loading"),
    [
        pytest.param(policy, loading, marks=[pytest.mark.whole] if (n + m) % 2 else [])
        for n, policy in enumerate(POLICIES)
        for m, loading in enumerate(("in-place", "whole"))
    ],
)
def test_every_question_gives_the_same_answer(policy: str, loading: str, whole: bool) -> None:
    """Around the sizes at which payloads, rounding and weights find room, one after the other; the largest batch where
    the answer turns. Every policy in one way of loading, in both and for more sizes with --whole."""
    fit_before: bool | None = None
    seen = set[bool]()
    for host in (2.2, 2.4, 3.6, 3.8, 4.0, 4.4, 6.0)[:: 1 if whole else 2]:
        m = ps.machine("virtual", gpu_memory="900MB", host_memory=f"{host}GB")
        (fit,) = ps.fits(gpt2(1), m, policies=[policy], loading=loading, near=False)
        row = ps.compare(gpt2(1), m, policies=[policy], loading=loading, barrier_cost=False, near=False).rows[0]
        assert (fit.fits, fit.iteration_s) == (row.fits, row.iteration_s), (host, fit.reason, row.reason)
        if fit.fits != fit_before:
            batch = ps.max_batch(m, gpt2, policies=[policy], loading=loading)
            assert (batch[policy].value >= 1) == fit.fits, host
        fit_before = fit.fits
        seen.add(fit.fits)
    assert seen == ({False} if policy == "all_on_gpu" else {True, False})


def test_a_plan_that_would_take_too_much_is_made_again_for_less() -> None:
    """Eight layers of 2**20 parameters: 14 MiB of payloads each on the host, unless the layer is pinned on the GPU. The
    weights are 16 MiB while they are loaded. tide leaves two layers on the host, which take 28 MiB, in slabs 32. 40 MiB
    have room for one of them, which takes 16 MiB in slabs."""
    w, tide = chain_workload(8, 2**20), find_policy("tide")
    m = round_machine(gpu_memory_bytes=100 * MIB, host_memory_bytes=40 * MIB)
    first, _ = plan_and_play(tide, w, m, ps.Settings())
    plan, _ = plan_and_play(tide, w, m, ps.Settings(), loading=WHOLE)
    assert [need_of_plan(one).host_bytes for one in (first, plan)] == [48 * MIB, 32 * MIB]
    assert [one.modes.count("pin") for one in (first, plan)] == [6, 7]
    assert plan.machine is m and plan.host_budget_bytes == m.host_budget_bytes
    plan.check()


def test_no_way_to_run_a_batch_is_recommended_that_fits_refuses() -> None:
    """Four layers have 64 MiB of payloads under zero_offload, and 8 MiB of weights while they are loaded."""
    w = chain_workload(4, 2**20)
    with pytest.raises(ps.DoesNotFit, match=r"8\.389 MB of weights while they are loaded"):
        choose([w], round_machine(host_memory_bytes=64 * MIB), ps.Settings(), policy="zero_offload")
    chosen = choose([w], round_machine(host_memory_bytes=72 * MIB), ps.Settings(), policy="zero_offload")
    assert need_of_plan(chosen.plan).host_bytes == 72 * MIB


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    status = main([*argv])
    return status, " ".join(capsys.readouterr().out.split())


def test_the_weights_of_a_job_without_offloading_pass_through_the_host(
    capsys: pytest.CaptureFixture[str], whole: bool
) -> None:
    """13.48 GB in bf16: an eighth of them per GPU if they are loaded once per node, all of them if every process loads
    them. Which of both decides, and the answer says so."""
    status, text = said(capsys, "fits", *JOB, *NODE)
    assert status == 0 and "of GPU memory and 1.7 GB of 7.9 GB of host memory per GPU." in text
    assert text.startswith("Yes, if the weights are loaded once per node: llama-2-7b fits on rtx3090-64gb under")
    assert "(--loading each:fp32): zero3_resident then lacks 19.04 GB of host memory per GPU." in text
    assert "weights are loaded once per node" in text
    status, text = said(capsys, "fits", *JOB, *NODE, "--loading", "each")
    assert status == 3 and text.startswith("No: ") and "No, if" not in text
    assert "Smallest change that makes it fit: --loading whole." in text
    assert "13.48 GB of it for weights while they are loaded whole by every process" in text
    status, text = said(capsys, "compare", *JOB, *NODE, "--loading", "each")
    assert status == 3 and "host needs 13.48 GB (13.48 GB of weights while they are loaded, whole by every" in text
    for answer in ("max-batch", "sensitivity") if whole else ():
        flags = [*JOB[:2], *JOB[4:], *NODE] if answer == "max-batch" else [*JOB, *NODE]
        assert said(capsys, answer, *flags, "--loading", "each")[0] == 3


@pytest.mark.parametrize(
    ("command", "once", "status"),
    [
        ("fits", "false", 3),
        ("compare", "true", 0),
        pytest.param("fits", "true", 0, marks=pytest.mark.whole),
        pytest.param("compare", "false", 3, marks=pytest.mark.whole),
    ],
)
def test_how_a_job_loads_is_what_its_file_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, once: str, status: int
) -> None:
    file = tmp_path / "fsdp.yaml"
    file.write_text(FSDP.format(once=once))
    assert main([command, "--like", str(file), *JOB, *NODE, "--json"]) == status
    like, ours = json.loads(capsys.readouterr().out)["rows"]
    assert like["fits"] is ours["fits"] is (status == 0)
    if status:
        assert like["reason"].endswith("; fits with fsdp_cpu_ram_efficient_loading: true")
        for row in (like, ours):
            assert "(26.95 GB of weights while they are loaded, whole by every process in fp32)" in row["reason"]
    assert main([command, "--like", str(file), *JOB, *NODE, "--json", "--loading", "in-place"]) == 0


@pytest.mark.parametrize(("stage", "loading"), [(2, "each"), (3, "whole")])
def test_how_deepspeed_loads(tmp_path: Path, stage: int, loading: str) -> None:
    from pstar_sim.frameworks.load import load_configuration

    content: dict[str, Any] = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    assert load_configuration(str(tmp_path / "ds.json")).loading == loading


def test_one_memory_has_room_for_the_weights_of_a_job_that_keeps_nothing_on_the_host() -> None:
    (row,) = ps.fits(ps.preset("1B", batch=1, seq=128), "gb10", policies=["all_on_gpu"], times=False)
    assert row.fits and row.host_needed_bytes == 0
    (row,) = ps.fits(ps.preset("1B", batch=1, seq=128), "a100-80", policies=["all_on_gpu"], times=False)
    assert row.host_needed_bytes == 2 * ps.preset("1B", batch=1, seq=128).params
