"""Several processes whose accelerators have asynchronous streams, collectives on one of their own, all with random
delays: they train as one process does on the joined batch, and a rank that dies ends the others. The processes are
started once for all cases of a module fixture (rank_worker.py, rank_trouble.py)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = "bucket=2000,reuse=2000,prefetch=1000,subgroup=3000"
ACCUMULATED = {"clip": 0.05, "micro_batches": 2}
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
BOUND_S = 300.0  # on a machine however busy; rank_trouble.py has rank 1 live longer
ON_FOUR = ("tide-4-accumulated", "zero_offload-4-eager")
OTHERS: list[dict[str, Any]] = [
    {"name": "tide-clip", "ranks": 2, "policy": "tide", "clip": 0.05},
    {"name": "gpt2", "ranks": 2, "policy": "tide", "model": "gpt2", "checkpointing": True, "clip": 0.05},
    {"name": "gpt2-offload", "ranks": 2, "policy": "tide", "model": "gpt2", "offload": [1], **ACCUMULATED},
    {"name": "unequal", "ranks": 2, "policy": "tide", "sequences": [2, 1], "clip": 0.05, "evaluate": True},
]


def cases_of(whole: bool) -> list[dict[str, Any]]:
    """Every policy on two and on four ranks, in both settings; without --whole on two ranks, in one or the other
    setting by turns, and ON_FOUR: a case of four takes as long as four of two."""
    every = [
        {"name": f"{policy.split(':')[0]}-{ranks}-{setting}", "ranks": ranks, "policy": policy, **SETTINGS[setting]}
        for ranks in (2, 4)
        for policy in POLICIES
        for setting in SETTINGS
    ]
    alternate = {f"{p.split(':')[0]}-2-{(*SETTINGS, *SETTINGS)[n % 2 + 1]}" for n, p in enumerate(POLICIES)}
    return [case for case in every if whole or case["name"] in {*ON_FOUR, *alternate}] + OTHERS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = cases_of(bool(metafunc.config.getoption("--whole")))
        metafunc.parametrize("case", cases, ids=[case["name"] for case in cases])


@pytest.fixture(scope="module")
def results(whole: bool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Case -> what each of its ranks wrote."""
    folder, cases = tmp_path_factory.mktemp("streams"), cases_of(whole)
    (folder / "cases.json").write_text(json.dumps([{**case, "streams": True} for case in cases]))
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).parents[1] / "rank_worker.py"), "4", str(folder), "840"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=850,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    return {
        case["name"]: [json.loads(path.read_text()) for path in sorted(folder.glob(f"{case['name']}.[0-9].json"))]
        for case in cases
    }


def test_several_processes_train_as_one(results: dict[str, list[dict[str, Any]]], case: dict[str, Any]) -> None:
    """Thinned (cases_of) but for --whole."""
    rows = results[case["name"]]
    assert [row.get("error") for row in rows] == [None] * case["ranks"]
    for key in ("parameters", "exp_avg", "exp_avg_sq"):
        assert rows[0][key] <= 1e-6, key
    for row in rows:
        assert row["deviations"] == []
        assert row["evaluations"] == [0.0] * len(row["evaluations"])
        assert {"gather", "reduce_scatter"} <= set(row["kinds"])


@pytest.fixture(scope="module")
def trouble(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two ranks on streams the second is killed, or stands still; the folder of what came of it."""
    folder = tmp_path_factory.mktemp("trouble")
    cases = [{"name": name, "ranks": 2, "streams": True} for name in ("stands still", "killed inside")]
    (folder / "cases.json").write_text(json.dumps(cases))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).parents[1] / "rank_trouble.py"), str(folder), "500"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=850,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def said_by_rank_0(folder: Path, name: str) -> str:
    """It ends with status 1, long before rank 1 wakes up or a collective's limit (600 s)."""
    code, after_s = json.loads((folder / f"{name}.json").read_text())["ends"]["0"]
    said = (folder / f"{name}.0.txt").read_text()
    assert code == 1, said[-2000:]
    assert after_s < BOUND_S
    return said


def test_a_rank_that_dies_ends_the_others(trouble: Path) -> None:
    """Killed inside an iteration, with collectives in flight on every rank's stream: the others name it and end."""
    said = said_by_rank_0(trouble, "killed inside")
    last = next(line for line in reversed(said.splitlines()) if "RankLost" in line)
    assert "RankLost: rank 1 (process" in last
    assert "died: it ended without a word" in last


def test_a_rank_that_lives_and_stands_still(trouble: Path) -> None:
    """It is waited for so long as `timeout_s` says (3 s), and what the wait was for is said."""
    said = said_by_rank_0(trouble, "stands still")
    assert re.search(
        r"RankLost: the other ranks have not come to an exchange for \d+ s \(timeout_s=3\); this is rank 0", said
    )
