"""A rank that dies, fails or leaves ends the others in seconds, and they say which and why. Real processes
(rank_trouble.py); nothing here waits for a collective's timeout, which is ten minutes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BOUND_S = 300.0  # on a machine however busy; rank 1 may live longer, and a collective's timeout is 600
CASES: dict[str, tuple[int, str, str]] = {
    # name: ranks, what rank 1 says itself, what the others say
    "killed inside": (3, "", "died: it ended without a word"),
    "exception": (2, 'KeyError: "a bug in the user\'s loop"', 'failed: KeyError: "a bug in the user\'s loop"'),
    "nan": (2, "ModelError: the loss is nan at step 2", "failed: ModelError: the loss is nan at step 2"),
    "adam dies": (2, "OSError: the disk of the adam thread is on fire", "failed: OSError: the disk of the adam thread"),
    "evaluates inside": (
        2,
        "PlanError: rank 1 cannot continue: begin:<root>",
        "failed: PlanError: rank 1 cannot continue",
    ),
    "no count": (2, "gives 'two' for a micro-batch; let it give a number", "failed: ModelError: prepare(count=...)"),
    "no memory": (
        2,
        "or less (this one has",
        "failed: PlanError: rank 1 ran out of memory in iteration 2, moment",
    ),
    "no memory of torch's": (
        2,
        "PlanError: rank 1 ran out of memory in iteration 2, moment",
        "failed: PlanError: rank 1 ran out of memory in iteration 2, moment",
    ),
    "ends early": (2, "", "has ended its run after 2 iterations"),
    "evaluates on": (2, "", "has ended its run after 2 iterations"),
}
ON_STREAMS = ("stands still", "killed inside, on streams")
COUNTS = {"negative count": "-2", "nan count": "nan", "infinite count": "inf"}
SELDOM = ("nan", "no memory of torch's", "evaluates on", "negative count", "infinite count")
"""Cases that end as another one does, and run with --whole alone."""


def named(names: Iterable[str]) -> list[Any]:
    """Returns rows of cases."""
    return [pytest.param(name, marks=[pytest.mark.whole] * (name in SELDOM)) for name in names]


@pytest.fixture(scope="module")
def folder(python: str, whole: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("trouble")
    cases: list[dict[str, Any]] = [{"name": name, "ranks": row[0]} for name, row in CASES.items()]
    cases += [{"name": "another P", "ranks": 2}, {"name": "another lr", "ranks": 2}]
    cases += [{"name": name, "ranks": 2} for name in ("reads alone", "read apart", "waits elsewhere", *COUNTS)]
    cases += [{"name": name, "ranks": 2, "streams": True} for name in ON_STREAMS]
    cases = [case for case in cases if whole or case["name"] not in SELDOM]
    (place / "cases.json").write_text(json.dumps(cases))
    done = subprocess.run(
        [python, "-W", "ignore", str(Path(__file__).parents[1] / "rank_trouble.py"), str(place), "500"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return place


@pytest.mark.parametrize("name", named(CASES))
def test_the_others_end_soon_and_name_it(folder: Path, name: str) -> None:
    ranks, own, others = CASES[name]
    ends = json.loads((folder / f"{name}.json").read_text())["ends"]
    for rank in range(ranks):
        code, after_s = ends[str(rank)]
        said = (folder / f"{name}.{rank}.txt").read_text()
        if rank == 1:
            assert own in said
            continue
        assert code == 1
        assert after_s < BOUND_S
        last = next(line for line in reversed(said.splitlines()) if "RankLost" in line)
        assert "RankLost: rank 1 (process" in last
        assert others in last


def test_reading_alone_ends_on_every_rank(folder: Path) -> None:
    """Rank 0 reads all parameters while rank 1 trains on; both read one, but not the same."""
    reads = "a parameter or a state that it reads"
    for name, other in (("reads alone", "the next iteration"), ("read apart", reads)):
        ends = json.loads((folder / f"{name}.json").read_text())["ends"]
        said = [(folder / f"{name}.{rank}.txt").read_text() for rank in range(2)]
        assert [ends[str(rank)][0] for rank in range(2)] == [1, 1]
        for text in said:
            assert f"the ranks come to different things: rank 0 to {reads}, rank 1 to {other}; let every rank" in text


def test_a_rank_that_waits_elsewhere_is_waited_for_so_long(folder: Path) -> None:
    """Rank 0 evaluates while rank 1 waits for it in a barrier of the loop's own, and so serves nobody: timeout_s."""
    ends = json.loads((folder / "waits elsewhere.json").read_text())["ends"]
    assert all(code == 1 and after_s < BOUND_S for code, after_s in ends.values())
    said = (folder / "waits elsewhere.0.txt").read_text()
    assert re.search(r"RankLost: the other ranks have not come to an exchange for \d+ s \(timeout_s=3\)", said)
    assert "or waits in an exchange of the loop's own (barrier, all_reduce) that this rank comes to later" in said


@pytest.mark.parametrize("name", named(COUNTS))
def test_a_count_that_is_none_is_named_on_every_rank(folder: Path, name: str) -> None:
    ends = json.loads((folder / f"{name}.json").read_text())["ends"]
    for rank in range(2):
        code, after_s = ends[str(rank)]
        last = (folder / f"{name}.{rank}.txt").read_text().splitlines()
        says = f"prepare(count=...) gives {COUNTS[name]} on rank 1 for a micro-batch (ranks 0 to 1: 2, {COUNTS[name]})"
        assert any("ModelError: " + says in line for line in last)
        assert (code, after_s < BOUND_S) == (1, True)


def test_a_plan_for_another_number_of_processes(folder: Path) -> None:
    for rank in range(2):
        said = (folder / f"another P.{rank}.txt").read_text()
        assert (
            "the plan is for 3 GPUs (virtual) and this job has 2 processes; start 3: torchrun --nproc-per-node 3"
            in said
        )


def test_ranks_with_different_settings(folder: Path) -> None:
    for rank in range(2):
        said = (folder / f"another lr.{rank}.txt").read_text()
        assert "PlanError: AdamW of rank 1 is not that of rank 0; give every rank the same" in said


def said_by_rank_0(folder: Path, name: str) -> str:
    """It ends with status 1, long before rank 1 wakes up or a collective's limit (600 s)."""
    code, after_s = json.loads((folder / f"{name}.json").read_text())["ends"]["0"]
    said = (folder / f"{name}.0.txt").read_text()
    assert code == 1, said[-2000:]
    assert after_s < BOUND_S
    return said


def test_a_rank_that_dies_on_streams_ends_the_others(folder: Path) -> None:
    """Killed inside an iteration, with collectives in flight on every rank's stream: the others name it and end."""
    said = said_by_rank_0(folder, "killed inside, on streams")
    last = next(line for line in reversed(said.splitlines()) if "RankLost" in line)
    assert "RankLost: rank 1 (process" in last
    assert "died: it ended without a word" in last


def test_a_rank_that_lives_and_stands_still(folder: Path) -> None:
    """On streams. It is waited for so long as `timeout_s` says (3 s), and what the wait was for is said."""
    said = said_by_rank_0(folder, "stands still")
    assert re.search(
        r"RankLost: the other ranks have not come to an exchange for \d+ s \(timeout_s=3\); this is rank 0", said
    )
