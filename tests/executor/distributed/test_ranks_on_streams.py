"""Several processes whose accelerators have asynchronous streams, collectives on one of their own, all with random
delays: they train as one process does on the joined batch, and a rank that dies ends the others. The processes are
started once for all cases of a module fixture (rank_worker.py, rank_trouble.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SMALL = "bucket=2000,reuse=2000,prefetch=1000,subgroup=3000"
ACCUMULATED = {"clip": 0.05, "micro_batches": 2}
SHORT: list[dict[str, Any]] = [
    {"name": "tide-clip", "ranks": 2, "policy": "tide", "clip": 0.05},
    {"name": "offload-accumulated", "ranks": 2, "policy": f"zero3_offload:{SMALL}", **ACCUMULATED},
]
POLICIES = (
    "tide",
    "optimal",
    "zero_offload",
    "patrickstar",
    "all_on_gpu",
    "zero3_resident",
    f"zero3_offload:{SMALL}",
)
SETTINGS: dict[str, dict[str, Any]] = {"accumulated": ACCUMULATED, "eager": {"eager": True}}
OTHERS: list[dict[str, Any]] = [
    {"name": "gpt2", "ranks": 2, "policy": "tide", "model": "gpt2", "checkpointing": True, "clip": 0.05},
    {"name": "gpt2-offload", "ranks": 2, "policy": "tide", "model": "gpt2", "offload": [1], **ACCUMULATED},
    {"name": "unequal", "ranks": 2, "policy": "tide", "sequences": [2, 1], "clip": 0.05, "evaluate": True},
]


def long_cases(whole: bool) -> list[dict[str, Any]]:
    """Every policy on two and on four ranks, in both settings; without --whole two ranks in one setting and four in the
    other, by turns."""
    every = [
        {"name": f"{policy.split(':')[0]}-{ranks}-{setting}", "ranks": ranks, "policy": policy, **SETTINGS[setting]}
        for ranks in (2, 4)
        for number, policy in enumerate(POLICIES)
        for setting in SETTINGS
        if whole or (setting == "eager") == ((number + ranks // 2) % 2 == 0)
    ]
    return every + OTHERS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "long_case" in metafunc.fixturenames:
        cases = long_cases(bool(metafunc.config.getoption("--whole")))
        metafunc.parametrize("long_case", cases, ids=[case["name"] for case in cases])


def trained(folder: Path, cases: list[dict[str, Any]], processes: int, limit_s: int) -> dict[str, list[dict[str, Any]]]:
    """Case -> what each of its ranks wrote."""
    (folder / "cases.json").write_text(json.dumps([{**case, "streams": True} for case in cases]))
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).parents[1] / "rank_worker.py"), str(processes), str(folder),
         str(limit_s)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=limit_s + 20,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    return {
        case["name"]: [json.loads(path.read_text()) for path in sorted(folder.glob(f"{case['name']}.[0-9].json"))]
        for case in cases
    }


def check(case: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    assert [row.get("error") for row in rows] == [None] * case["ranks"]
    for key in ("parameters", "exp_avg", "exp_avg_sq"):
        assert rows[0][key] <= 1e-6, key
    for row in rows:
        assert row["deviations"] == []
        assert row["evaluations"] == [0.0] * len(row["evaluations"])
        assert {"gather", "reduce_scatter"} <= set(row["kinds"])


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return trained(tmp_path_factory.mktemp("streams"), SHORT, 2, 60)


@pytest.fixture(scope="module")
def long(whole: bool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return trained(tmp_path_factory.mktemp("streams"), long_cases(whole), 4, 300)


@pytest.mark.parametrize("case", SHORT, ids=lambda case: case["name"])
def test_two_processes_train_as_one(short: dict[str, list[dict[str, Any]]], case: dict[str, Any]) -> None:
    check(case, short[case["name"]])


def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    """Killed inside an iteration, with collectives in flight on every rank's stream: the others name it and end, long
    before a collective's limit (600 s)."""
    after_s, said = end_of_rank_0(tmp_path, "killed inside")
    assert after_s < 30.0
    last = next(line for line in reversed(said.splitlines()) if "RankLost" in line)
    assert "RankLost: rank 1 (process" in last
    assert "died: it ended without a word" in last


def end_of_rank_0(tmp_path: Path, name: str) -> tuple[float, str]:
    """(seconds after rank 1's trouble, what it said) of a run of two ranks on streams."""
    (tmp_path / "cases.json").write_text(json.dumps([{"name": name, "ranks": 2, "streams": True}]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).parents[1] / "rank_trouble.py"), str(tmp_path), "60"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    ends = json.loads((tmp_path / f"{name}.json").read_text())["ends"]
    said = (tmp_path / f"{name}.0.txt").read_text()
    code, after_s = ends["0"]
    assert code == 1, said[-2000:]
    return after_s, said


@pytest.mark.slow
def test_a_rank_that_lives_and_stands_still(tmp_path: Path) -> None:
    """It is waited for so long as `timeout_s` says (3 s), and what the wait was for is said."""
    name = "stands still"
    after_s, said = end_of_rank_0(tmp_path, name)
    assert after_s < 18.0  # it sleeps for 20
    assert "RankLost: an exchange with the other ranks has not come for 3 s (timeout_s=3); this is rank 0" in said


@pytest.mark.slow
def test_every_policy_on_two_and_four(long: dict[str, list[dict[str, Any]]], long_case: dict[str, Any]) -> None:
    """Thinned (long_cases) but for --whole."""
    check(long_case, long[long_case["name"]])
