"""A plan as a memory snapshot: torch's own viewer opens it, and it holds what the plan holds."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch.cuda._memory_viz as viewer

from pstar_sim.cli import main
from pstar_sim.core.plan import Plan, load_plan
from pstar_sim.planner.compare import compare, play_plan
from pstar_sim.recorded.held import held_of_snapshot, held_of_timeline
from pstar_sim.recorded.snapshot import load_snapshot
from pstar_sim.report.memory_viz import to_memory_viz
from pstar_sim.testing import chain_workload, round_machine
from pstar_sim.workload.workload import Workload

MIB = 1 << 20
TIDE = [2 * MIB, 4 * MIB, 3 * MIB, MIB, 0]


def plan_of(policy: str, job: Workload | None = None) -> Plan:
    job = job or chain_workload(2, MIB, tide_bytes=TIDE)
    return compare(job, round_machine(), policies=[policy], barrier_cost=False).best().plan


@pytest.mark.parametrize("policy", ["all_on_gpu", "zero_offload", "tide", "patrickstar", "optimal"])
def test_the_snapshot_holds_what_the_timeline_holds(tmp_path: Path, policy: str) -> None:
    plan = plan_of(policy)
    timeline = play_plan(plan)
    path = tmp_path / "viz.pickle"
    path.write_bytes(to_memory_viz(plan, timeline))
    snapshot = load_snapshot(path)
    for device, place in ((0, "gpu"), (1, "host")):
        planned = held_of_timeline(timeline, "plan", place=place)
        if planned.bytes:
            assert held_of_snapshot(snapshot, device).bytes == planned.bytes
    assert held_of_snapshot(snapshot, 0).kinds.get("non-model", 0) == held_of_timeline(timeline, "").kinds["non-model"]


def test_torchs_viewer_opens_it() -> None:
    root = pickle.loads(to_memory_viz(plan := plan_of("zero_offload"), play_plan(plan)))
    page = viewer.trace_plot(root)
    assert "<script" in page
    assert viewer.segsum(root)
    text = viewer.trace(root)
    assert "Device 0" in text
    assert "Device 1" in text


def test_blocks_have_the_names_of_their_layers() -> None:
    """The tide rises by 2 MiB in the first layer and by 2 more in the second; in the backward it falls."""
    plan = plan_of("all_on_gpu")
    root = pickle.loads(to_memory_viz(plan, play_plan(plan)))
    allocs = [row for row in root["device_traces"][0] if row["action"] == "alloc"]
    first = {frame["name"] for row in allocs if row["user_metadata"] == "param" for frame in row["frames"]}
    assert {tensor.name for tensor in plan.workload.tensors} <= first
    tide = [(row["frames"][0]["name"], row["size"]) for row in allocs if row["user_metadata"] == "non-model"]
    comes, stays = [("begin:layers.0", 2 * MIB), ("begin:layers.1", 2 * MIB)], ["begin:layers.1", "begin:layers.0"]
    assert tide == [*comes, *((name, MIB) for name in stays)]


def test_the_segments_are_whole(tmp_path: Path) -> None:
    plan = plan_of("tide")
    for segment in pickle.loads(to_memory_viz(plan, play_plan(plan)))["segments"]:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, path = tmp_path / "plan.json", tmp_path / "viz.pickle"
    compare(chain_workload(2, MIB), round_machine(), policies=["tide"], barrier_cost=False).best().save(plan)
    assert main(["export", str(plan), "--memory-viz", str(path)]) == 0
    assert "memory_viz" in capsys.readouterr().out
    assert path.read_bytes() == to_memory_viz(load_plan(plan), play_plan(load_plan(plan)))
    assert main(["export", str(plan), "--memory-viz", str(path), "--perfetto", "-o", str(tmp_path / "t.json")]) == 2
    assert "--memory-viz: not allowed with argument --perfetto" in capsys.readouterr().err
