"""Checkpoints of several ranks: each writes its slices, and any number of ranks goes on from them; the processes are
those of checkpoint_worker.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def results(python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Policy -> what both ranks wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [python, "-W", "ignore", str(Path(__file__).parents[1] / "checkpoint_worker.py"), str(folder), "840"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=850,
    )
    found = {
        policy: [json.loads(path.read_text()) for path in sorted(folder.glob(f"{policy}.?.json"))]
        for policy in ("tide", "zero3_resident", "all_on_gpu")
    }
    assert done.returncode == 0 and all(len(rows) == 2 for rows in found.values()), done.stderr[-4000:]
    return found


@pytest.mark.parametrize("policy", ["tide", "zero3_resident", "all_on_gpu"])
def test_any_number_of_ranks_goes_on(results: dict[str, list[dict[str, Any]]], policy: str) -> None:
    rows = results[policy]
    for row in rows:
        assert row.get("error") is None
        assert row["restored"] and row["goes on"] and row["to two"]
        assert row["extra"] == {"rank": 0}
        assert "is not a whole checkpoint" in row["damaged"]
        assert {"model.safetensors", "optimizer-rank0.safetensors", "optimizer-rank1.safetensors"} <= set(row["files"])
        assert policy != "tide" or (row["on disks"] and row["plain"])
    assert rows[0]["to one"]


@pytest.mark.parametrize("policy", ["tide", "zero3_resident", "all_on_gpu"])
def test_a_flipped_bit_of_one_rank_is_found_on_every_rank(
    results: dict[str, list[dict[str, Any]]], policy: str
) -> None:
    """The ranks share the reading of the checksums."""
    rows = results[policy]
    assert sorted("rank 0" in row["flipped"] or "rank 1" in row["flipped"] for row in rows) == [False, True]
    assert any("optimizer-rank1.safetensors has the checksum" in row["flipped"] for row in rows)
    assert all(row["after the flip"] for row in rows)
