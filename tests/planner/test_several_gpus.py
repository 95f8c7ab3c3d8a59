"""Several GPUs in the catalog, in compare and on the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from pstar_sim.catalog.loader import load_machine, machine_names
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.writing import machine_toml
from pstar_sim.cli import main
from pstar_sim.core.plan import Settings, load_plan
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import CatalogError
from pstar_sim.planner.batch_shares import UNMODELLED, unmodelled_notes
from pstar_sim.planner.compare import compare
from pstar_sim.planner.machine_notes import added_gpus_notes
from pstar_sim.workload.presets import preset
from pstar_sim.workload.workload import Workload, with_optimizer

GB = 10**9
MIXED = """
machine = "mixed"

[machines.mixed]
host = "node-a100-1tb"
peer_link = "nvlink2"
network = "ib-edr-x4"
nodes = 2

[[machines.mixed.ranks]]
gpu = "a100-40"
gpus = 2
link = "pcie4-x16"
batch = 2

[[machines.mixed.ranks]]
gpu = "v100-32"
link = "pcie3-x16"
batch = 1
"""


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    file = tmp_path / "mixed.toml"
    file.write_text(MIXED)
    return file


def test_a_file_of_different_gpus(mixed: Path) -> None:
    """Two nodes of two A100 and a V100; of five sequences an A100 takes two, so 2/10 of both nodes' batch."""
    m = load_machine(mixed)
    assert (len(m.ranks), m.nodes, m.local_ranks) == (6, 2, 3)
    assert [r.gpu.name for r in m.ranks] == ["a100-40", "a100-40", "v100-32"] * 2
    assert [r.batch_share for r in m.ranks[:3]] == pytest.approx([0.2, 0.2, 0.1])
    assert m.gpu.name == "a100-40 + v100-32"
    assert m.gpu_budget_bytes == load_machine("v100-32").gpu_budget_bytes, "the V100's"
    assert set(m.gpu.flops_per_s) == {"fp32", "fp16"}, "the V100 has no bf16"
    assert m.link.h2d_bytes_per_s == 15.75 * GB * 0.78
    shape, shapes = m.gpu.products, [r.gpu.products for r in m.ranks]
    assert shape is not None, "policies reckon by the formula that times the ranks"
    assert (shape.sms, shape.flash) == (80, min(s.flash for s in shapes if s is not None))
    assert shape.bytes_per_s == min(s.bytes_per_s for s in shapes if s is not None)
    with pytest.raises(CatalogError, match="has ranks that differ"):
        machine_toml(m, checked=date(2026, 11, 21))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('host = "node', 'gpu = "a100-40"\nhost = "node', "gpu = 'a100-40'; must be left out where ranks are listed"),
        ("batch = 2", "batch = 0", "batch = 0; must be a number from 1"),
        ('link = "pcie4-x16"', 'link = "nvlink2"', 'must be a link that connects = "host-gpu"'),
        ('network = "ib-edr-x4"', 'network = "nvlink2"', 'must be a link that connects = "node-node"'),
        ('network = "ib-edr-x4"\n', "", "nodes = 2, and no network joins nodes of it"),
        ("nodes = 2", "gpus_per_root = 2", "gpus_per_root = 2; must be a number that divides the 3 GPUs"),
        ("nodes = 2", "root_gb_per_s = 2", "root_gb_per_s = 2; must be given together with gpus_per_root"),
        ("nodes = 2", 'disks = "floppy"', "disks = 'floppy'; must be the name of a set of disks"),
    ],
)
def test_a_file_that_is_wrong(mixed: Path, old: str, new: str, says: str) -> None:
    assert old in MIXED
    mixed.write_text(MIXED.replace(old, new, 1))
    with pytest.raises(CatalogError) as error:
        load_machine(mixed)
    assert says in str(error.value)


def test_nodes_of_the_catalog_are_written_and_read_again(tmp_path: Path) -> None:
    for name in machine_names():
        m = load_machine(name)
        if len(m.ranks) == 1:
            continue
        if m.network is not None:
            m = load_machine(name, nodes=2)
        file = tmp_path / "my.toml"
        file.write_text(machine_toml(replace(m, price_usd_per_hour=10.0), checked=date(2026, 11, 21)))
        again = load_machine(file)
        assert (len(again.ranks), again.nodes, again.local_ranks) == (len(m.ranks), m.nodes, m.local_ranks)
        assert [r.root for r in again.ranks] == [r.root for r in m.ranks]
        assert again.host_budget_bytes == m.host_budget_bytes
        assert again.nvme_budget_bytes == m.nvme_budget_bytes
        assert again.price_usd_per_hour == pytest.approx(10.0)
        assert again.gpu.measured == m.gpu.measured
        assert again.gpu.launch_s == (None if m.gpu.launch_s is None else pytest.approx(m.gpu.launch_s))
        for mine, its in ((m.peer, again.peer), (m.network, again.network)):
            assert (mine is None) == (its is None)
            if mine is not None and its is not None:
                assert its.bytes_per_s == pytest.approx(mine.bytes_per_s)


def test_the_price_is_that_of_all_nodes(tmp_path: Path) -> None:
    file = tmp_path / "priced.toml"
    file.write_text("[machines.a100-80x8]\nprice_usd_per_hour = 20\n")
    assert load_machine("a100-80x8", user_file=file, nodes=3).price_usd_per_hour == 60


SMALL = ["--model", "1B", "--seq", "256", "--policy", "patrickstar", "--policy", "zero_offload"]


def test_compare_on_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["compare", *SMALL, "--batch", "16", "--machine", "v100-32x8"]
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert "batch 16 (2 per GPU)" in said
    assert "8 GPUs, each with 33.08 GB of GPU and 29.00 GB of host memory" in said
    assert UNMODELLED.split(" are ")[0] in said
    asked = compare(preset("1B", batch=16, seq=256), load_machine("a100-80x8"), policies=["patrickstar"], near=False)
    assert UNMODELLED.split(":")[0] in asked._repr_html_()
    assert main([*argv, "--json"]) == 0
    printed = capsys.readouterr()
    assert f"note: {UNMODELLED}" in printed.err
    rows = json.loads(printed.out)["rows"]
    assert all(row["fits"] and 0 < row["lower_bound_s"] <= row["iteration_s"] for row in rows)
    assert "sliced over 8 GPUs" in said
    # All ranks' tokens: 16 sequences of 256.
    assert rows[0]["tokens_per_s"] == pytest.approx(16 * 256 / rows[0]["iteration_s"])


@pytest.mark.parametrize("command", ["compare", "fits"])
def test_more_gpus_than_a_host_is_meant_for_are_said(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [command, "--model", "tiny-gpt2", "--seq", "32", "--batch", "16", "--policy", "zero3_resident", "--machine"]
    said = (
        "note: 8 GPUs on the host of one: no NVLink or the like, 48 cores and 540.09 GB for all; a node as it is built:"
    )
    assert main([*argv, "h100-80", "--gpus", "8"]) == 0
    assert f"{said} h100-80x8" in " ".join(capsys.readouterr().out.split())
    assert main([*argv, "h100-80x8"]) == 0
    assert "on the host of" not in capsys.readouterr().out


def test_gpus_added_to_a_node_keep_its_link() -> None:
    assert added_gpus_notes(load_machine("h100-80x4", gpus=8)) == [
        "8 GPUs on the host of 4: nvlink4, 92 cores and 1.081 TB for all; a node as it is built: h100-80x8"
    ]
    assert added_gpus_notes(load_machine("h100-80x8", gpus=2)) == []


def test_more_nodes_share_more_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *SMALL, "--batch", "16", "--machine", "a100-80x8", "--nodes", "2"]) == 0
    assert "batch 16 (1 per GPU)" in capsys.readouterr().out


def test_a_plan_for_different_gpus(mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    argv = ["plan", "--model", "1B", "--seq", "256", "--machine", str(mixed), "-o", str(file)]
    assert main([*argv, "--batch", "20", "--policy", "patrickstar", "--dtype", "fp16"]) == 0
    plan = load_plan(file)
    assert len(plan.machine.ranks) == plan.layout.ranks == 6
    plan.check(machine=load_machine(mixed))
    assert main(["explain", str(file)]) == 0
    assert "on each of 6 GPUs" in capsys.readouterr().out
    assert main([*argv, "--batch", "12", "--policy", "patrickstar"]) == 2
    assert "cannot be shared 2:2:1:2:2:1 among the 6 ranks of mixed; give 10 or 20" in capsys.readouterr().err


def _notes(machine: Machine, workload: Workload, waits: dict[str, float]) -> tuple[str, ...]:
    timeline = Timeline(source="simulated", iterations=2, iteration_s=10.0, spans=(), samples=(), stall_s=waits)
    return unmodelled_notes(workload, machine, {"some": timeline}, short_of_gpu=False)


def test_where_what_is_not_modelled_may_win() -> None:
    w = preset("1B", batch=1, seq=128)
    node, nodes = load_machine("a100-80x8"), load_machine("a100-80x8", nodes=4)
    assert unmodelled_notes(w, load_machine("a100-80"), {}, short_of_gpu=True) == ()
    assert _notes(node, w, {"net": 2.0}) == (UNMODELLED,), "a fifth of the iteration is not much"
    assert "tensor parallelism over nvlink3" in _notes(node, w, {"net": 1.0, "h2d": 3.0})[1]
    assert "pipeline parallelism between the nodes" in _notes(nodes, w, {"net": 4.0})[1]
    assert "pipeline parallelism may be faster" in _notes(replace(node, peer=None), w, {"net": 4.0})[1]
    said = unmodelled_notes(w, node, {}, short_of_gpu=True)
    assert "each layer would have to be split" in said[1]
    assert unmodelled_notes(w, node, {}, short_of_gpu=False) == (UNMODELLED,)
    whole = unmodelled_notes(with_optimizer(w, "muon"), node, {}, short_of_gpu=False)
    assert "muon updates whole tensors, which slices of several GPUs cut" in whole[1]


def test_gpus_are_not_to_blame_where_a_policy_lacks_host_memory_alone() -> None:
    machine = load_machine("rtx3090-64gb", gpus=2, host_memory="16GB")
    found = compare(preset("4B", batch=2, seq=128), machine, policies=["all_on_gpu", "tide"], near=False)
    assert [row.short_of for row in found.rows] == ["gpu", "host"]
    assert found.notes == (UNMODELLED, *added_gpus_notes(machine))


def test_what_does_not_fit_is_answered_for_as_many_gpus() -> None:
    """What is suggested has eight GPUs too, and the batch of all of them."""
    workload = preset("8B", batch=256, seq=1024, dtype="fp16", kernels="fused", loss="fused")
    row = compare(workload, load_machine("v100-32x8"), policies=["zero_offload"], barrier_cost=False).rows[0]
    assert not row.fits
    assert row.reason is not None
    assert "fits with --batch 128 --micro-batches 2, or on a100-40x8" in row.reason


@pytest.mark.parametrize(
    ("flags", "nodes", "ranks"), [(["--gpus", "2"], 1, 2), (["--nodes", "2"], 2, 2), (["--gpus=3", "--nodes=2"], 2, 6)]
)
def test_the_virtual_accelerator_as_several(
    flags: list[str], nodes: int, ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `torchrun -m executor` needs: a plan for as many ranks as there will be processes."""
    file = tmp_path / "plan.json"
    job = ["plan", "--model", "tiny-gpt2", "--batch", "6", "--seq", "32", "--dtype", "fp32", "--policy", "tide"]
    assert main([*job, "--machine", "virtual", *flags, "-o", str(file)]) == 0
    plan = load_plan(file)
    plan.check()
    machine = plan.machine
    assert (machine.nodes, len(machine.ranks)) == (nodes, ranks)
    assert [rank.batch_share for rank in machine.ranks] == pytest.approx([1 / ranks] * ranks)


def test_gpus_is_one_figure_with_one_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_machine("a100-80x8", gpus=2) == load_machine("a100-80x8", overrides={"gpus": 2})
    with pytest.raises(CatalogError, match="gpus = 3 and gpus = 2 are the same figure; give it once"):
        load_machine("virtual", gpus=2, overrides=["gpus=3"])
    for wrong in ("0", "1.5", "99"):
        assert (
            main(["compare", "--model", "1B", "--batch", "8", "--seq", "8", "--machine", "h200", "--gpus", wrong]) == 2
        )
        assert "gpus" in capsys.readouterr().err


def test_a_setting_that_several_gpus_lack_is_no_lack_of_gpu_memory() -> None:
    workload = preset("1B", batch=4, seq=64, dtype="bf16", micro_batches=2)
    found = compare(workload, load_machine("polaris-a100-40x4"), policies="l2l", settings=Settings(loop="step"))
    assert "runs on one GPU, not on 4" in str(found.rows[0].reason)
    assert not any("no policy fits the GPUs" in note for note in found.notes)
