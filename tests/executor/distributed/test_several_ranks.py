"""Two and four processes train as one process does on the joined batch: parameters and both moments, and a rank's bytes
are the plan's. The processes are started once for all cases (rank_worker.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = "bucket=2000,reuse=2000,prefetch=1000,subgroup=3000"
POLICIES = {
    "all_on_gpu": "all_on_gpu",
    "zero_offload": "zero_offload",
    "patrickstar": "patrickstar",
    "zero3_resident": "zero3_resident",
    "zero3_offload": f"zero3_offload:{SMALL}",
    "deep_optimizer_states": f"deep_optimizer_states:{SMALL}",
    "zero_infinity": "zero_infinity:params=nvme,states=nvme,bucket=2000,reuse=2000,subgroup=3000",
    "tide": "tide",
    "optimal": "optimal",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"clip": 0.05},
    "eager": {"eager": True},
    "accumulated": {"clip": 0.05, "micro_batches": 2},
}
CASES: list[dict[str, Any]] = [
    {"name": f"{policy}-2-{setting}", "ranks": 2, "policy": spec, **SETTINGS[setting]}
    for number, (policy, spec) in enumerate(POLICIES.items())
    for setting in ("accumulated", "eager" if number % 2 else "clip")
]
CASES += [  # the slowest by far: test_ranks_on_streams.py has tide and zero_offload on four
    {"name": "zero3_offload-4-accumulated", "ranks": 4, "policy": POLICIES["zero3_offload"], **SETTINGS["accumulated"]},
]
CASES += [
    {"name": "gpt2-tide-2", "ranks": 2, "policy": "tide", "model": "gpt2", "checkpointing": True, "clip": 0.05},
    {
        "name": "gpt2-offload-2",
        "ranks": 2,
        "policy": "tide",
        "model": "gpt2",
        "offload": [1],
        **SETTINGS["accumulated"],
    },
    {
        "name": "gpt2-zero3-4",
        "ranks": 4,
        "policy": "zero3_resident",
        "model": "gpt2",
        "checkpointing": True,
        "clip": 0.05,
    },
    {"name": "unequal", "ranks": 2, "policy": "tide", "sequences": [2, 1], "clip": 0.05, "evaluate": True},
    {"name": "whale", "ranks": 2, "policy": "whale", "sequences": [2, 1], **SETTINGS["accumulated"]},
    {"name": "stronghold", "ranks": 2, "policy": "stronghold:window=1", "eager": True, "micro_batches": 2},
    {"name": "karma", "ranks": 2, "policy": "karma", "model": "gpt2", "offload": [1], **SETTINGS["accumulated"]},
    *(  # sums of gradients on the GPU beside states on the host
        {
            "name": f"sums-{'spilt-' if spill else ''}{setting}",
            "ranks": ranks,
            "spill": spill,
            **SETTINGS[setting],
            "micro_batches": 3,
        }
        for ranks, spill, setting in ((3, False, "eager"), (2, True, "clip"))
    ),
    *(  # each rank updates its slices in parts
        {"name": f"parts-{setting}", "ranks": ranks, "policy": "tide", "parts": 3, **SETTINGS[setting]}
        for ranks, setting in ((2, "eager"), (3, "accumulated"))
    ),
    {"name": "experts-sums", "ranks": 2, "spill": False, "model": "experts", "steps": 3, **SETTINGS["accumulated"]},
    {"name": "an empty batch", "ranks": 2, "policy": "tide", "sequences": [2, 0], "clip": 0.05},
    {"name": "evaluated", "ranks": 2, "policy": "zero3_resident", "evaluate": True},
    {"name": "experts", "ranks": 2, "policy": "tide", "model": "experts", "steps": 3, "clip": 0.05},
    {"name": "experts-whole", "ranks": 2, "policy": "zero_offload", "model": "experts", "steps": 3},
    {"name": "experts-3", "ranks": 3, "policy": "zero3_resident", "model": "experts", **SETTINGS["accumulated"]},
    {"name": "three", "ranks": 3, "policy": "all_on_gpu", "clip": 0.05},
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Case -> what each of its ranks wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "cases.json").write_text(json.dumps(CASES))
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).parents[1] / "rank_worker.py"), "4", str(folder), "840"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=850,
    )
    found = {
        case["name"]: [json.loads(path.read_text()) for path in sorted(folder.glob(f"{case['name']}.*.json"))]
        for case in CASES
    }
    assert run.returncode == 0, run.stderr[-4000:]
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_trains_as_one_process_on_the_joined_batch(
    results: dict[str, list[dict[str, Any]]], case: dict[str, Any]
) -> None:
    rows = results[case["name"]]
    assert [row.get("error") for row in rows] == [None] * case["ranks"]
    for key in ("parameters", "exp_avg", "exp_avg_sq"):
        assert rows[0][key] <= 1e-6, key
    for rank, row in enumerate(rows):
        assert row["evaluations"] == [0.0] * len(row["evaluations"])
        if case.get("model") == "experts":  # each rank leaves some out; an expert with more rows has a higher tide
            assert all("does not come on this rank" in reason for reason in row["deviations"])
            assert len(row["deviations"]) >= 2
            continue
        assert row["deviations"] == []
        assert row.get("renamed", []) == []
        smaller = "sequences" in case and case["sequences"][rank] < max(case["sequences"])
        assert row["peak"][0] < row["peak"][1] if smaller else row["peak"][0] == row["peak"][1]
        assert row["host"][0] == row["host"][1]
        # [Note: what a slice moves through]: one slice, and none where nothing is sliced
        assert row["transient"][0] == (row["transient"][1] if row["layout_ranks"] > 1 else 0)
        assert {"gather", "reduce_scatter"} <= set(row["kinds"])
