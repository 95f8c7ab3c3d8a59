"""Scripts of two processes, as `accelerate launch` starts them: a Trainer and a loop, each beside
DistributedDataParallel in the same processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).parents[1] / "scripts_of_ranks.py"


Said = tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def folder(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the two processes of one `accelerate launch`, which is torchrun with Accelerate's variables, wrote."""
    pytest.importorskip("accelerate")
    place = tmp_path_factory.mktemp("scripts")
    flags = ("--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--main_process_port", "0",
             "--mixed_precision", "no", "--dynamo_backend", "no")  # fmt: skip
    own = {"PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *sys.path])}
    done = subprocess.run(
        [python, "-W", "ignore", "-m", "accelerate.commands.launch", *flags, str(SCRIPT), str(place)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **own},
        cwd=place,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return place


def said_by_both(folder: Path, part: str) -> Said:
    first, second = (json.loads((folder / f"{part}.{rank}.json").read_text()) for rank in range(2))
    return first, second


def test_a_loop(folder: Path) -> None:
    """Other rows on each rank, dropout; chunks in slices."""
    first, second = said_by_both(folder, "loop")
    for said in (first, second):
        assert said["losses"] == pytest.approx(said["plain"], rel=1e-6) and len(said["losses"]) == 3
        assert said["apart"] < 1e-6 and said["ranks"] == 2
        assert said["moved"] > 0 and not said["deviations"]
        assert set(said["others"].values()) == {0.0} and len(said["others"]) >= 2  # other optimizers: to the bit
        assert said["cut"].startswith("adafactor updates whole tensors, which the slices of 2 ranks cut")
        assert said["renewed"].startswith("session.renew on several ranks: each rank holds slices")
    assert first["losses"] != second["losses"]


def test_a_trainer(folder: Path) -> None:
    """Losses, norms, evaluation, saving, resume; then `pstar launch` of a script, of which the first process speaks."""
    first, second = said_by_both(folder, "trainer")
    for said in (first, second):
        for key, value in said["plain"].items():
            assert said["mine"][key] == pytest.approx(value, rel=1e-5), key
        assert said["apart"] < 1e-6 and said["resumed_apart"] == 0 and said["launched"] == 0
        assert said["plainly_apart"] < 1e-6  # a plain Trainer resumed the plan's checkpoint
        assert "call session.close() on all ranks" in said["refused"] and said["written"]
    assert len(first["mine"]["loss"]) == 3 and (folder / "saved" / "model.safetensors").is_file()
    assert "bf16, 2 x batch 2 per step" in first["told"] and "all on plan" in first["told"]
    assert not second["told"]
