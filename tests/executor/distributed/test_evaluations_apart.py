"""Between two iterations the ranks may evaluate different modules, in another order, different numbers of batches, or
nothing: each gets bit by bit what one process gets, and training goes on as if nothing had been. Real processes
(rank_worker.py, apart.py), started once for all cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CASES: list[dict[str, Any]] = [
    {"name": "modules", "ranks": 2, "policy": "tide", "apart": "modules"},
    {"name": "modules on streams", "ranks": 2, "policy": "zero3_resident", "apart": "modules", "streams": True},
    {"name": "order", "ranks": 2, "policy": "zero3_offload:bucket=2000,reuse=2000,prefetch=1000", "apart": "order"},
    {"name": "numbers", "ranks": 3, "policy": "zero3_resident", "apart": "numbers"},
    {"name": "numbers on streams", "ranks": 3, "policy": "tide", "apart": "numbers", "streams": True},
    {"name": "alone", "ranks": 2, "policy": "optimal", "apart": "alone"},
    {"name": "saved meanwhile", "ranks": 2, "policy": "tide", "apart": "alone", "save": "here"},
    {"name": "experts", "ranks": 2, "policy": "tide", "apart": "numbers", "model": "experts"},
    {"name": "nothing is sliced", "ranks": 2, "policy": "all_on_gpu", "apart": "modules"},
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Case -> what each of its ranks wrote."""
    folder = tmp_path_factory.mktemp("apart")
    cases = [{**case, "save": str(folder / "kept")} if "save" in case else case for case in CASES]
    (folder / "cases.json").write_text(json.dumps([{**case, "clip": 0.05} for case in cases]))
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).parents[1] / "rank_worker.py"), "3", str(folder), "840"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return {
        case["name"]: [json.loads(path.read_text()) for path in sorted(folder.glob(f"{case['name']}.[0-9].json"))]
        for case in CASES
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_each_rank_gets_what_one_process_gets(results: dict[str, list[dict[str, Any]]], case: dict[str, Any]) -> None:
    rows = results[case["name"]]
    assert [row.get("error") for row in rows] == [None] * case["ranks"]
    for rank, row in enumerate(rows):
        rounds = 6 if "save" in case else 4  # before each of three steps and at the end; around a load
        each = {"modules": 2, "order": 6, "numbers": 2 * rank, "alone": 2 * (rank == 0)}[case["apart"]]
        assert row["equal"] == [True] * (rounds * each)
        assert row["unchanged"] and row["restored"]
        assert row["parameters"] <= 1e-6
        assert row["sliced"] == (case["policy"] != "all_on_gpu")
        if case.get("model") != "experts":
            assert row["deviations"] == []
