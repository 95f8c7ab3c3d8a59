"""Several processes, a CUDA device each, over NCCL: the numbers of one process on the joined batch. Needs two GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.device_count() < 2,
        reason=f"needs two CUDA devices; torch finds {torch.cuda.device_count()}",
    ),
]

EXECUTOR = Path(__file__).parents[1] / "executor"
RELATIVE = 2e-5  # the reference is the CPU's
CASES: list[dict[str, Any]] = [
    {"name": f"{policy}-{setting}", "ranks": 2, "policy": policy, "cuda": True, **options}
    for policy in ("tide", "zero_offload", "zero3_resident", "all_on_gpu")
    for setting, options in (
        ("clip", {"clip": 0.05}),
        ("accumulated", {"clip": 0.05, "micro_batches": 2}),
        ("eager", {"eager": True}),
    )
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "cases.json").write_text(json.dumps(CASES))
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXECUTOR / "rank_worker.py"), "2", str(folder), "200"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return {
        case["name"]: [json.loads(path.read_text()) for path in sorted(folder.glob(f"{case['name']}.*.json"))]
        for case in CASES
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_trains_as_one_process_on_the_joined_batch(
    results: dict[str, list[dict[str, Any]]], case: dict[str, Any]
) -> None:
    rows = results[case["name"]]
    assert [row.get("error") for row in rows] == [None, None]
    for key in ("parameters", "exp_avg", "exp_avg_sq"):
        assert rows[0][key] <= RELATIVE, key
    assert all(row["deviations"] == [] for row in rows)


def test_a_rank_that_is_killed_ends_the_other(tmp_path: Path) -> None:
    """Inside an iteration, with NCCL's collectives in flight: they are aborted, and the other says who it was."""
    name = "killed inside"
    (tmp_path / "cases.json").write_text(json.dumps([{"name": name, "ranks": 2, "cuda": True}]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXECUTOR / "rank_trouble.py"), str(tmp_path), "90"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    code, after_s = json.loads((tmp_path / f"{name}.json").read_text())["ends"]["0"]
    said = (tmp_path / f"{name}.0.txt").read_text()
    assert code != 0
    assert after_s < 60.0, said[-2000:]
    assert "RankLost: rank 1 (process" in said
