"""`pstar trace --from-snapshot` and `pstar diff` at the command line."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from snapshots import AUTOGRAD, FORWARD, Recorder, train

from pstar_sim.cli import main
from pstar_sim.core.run_file import RunTimelines
from pstar_sim.core.timeline import load_timeline
from pstar_sim.planner.compare import compare, play_plan
from pstar_sim.testing import chain_workload, round_machine
from pstar_sim.workload.trace import load_trace, save_trace

LAYER = 1 << 18  # parameters: 512 kB in 16 bits


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    recorder = Recorder()
    train(recorder, 3)
    return recorder.save(tmp_path / "mine.pickle")


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    compare(chain_workload(4, LAYER, tide_bytes=1 << 20), round_machine(), policies=["tide"]).best().save(path)
    return path


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main([str(a) for a in arguments]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_a_snapshot_alone(tmp_path: Path, snapshot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--from-snapshot", str(snapshot), "-o", str(tmp_path / "tide.png")]) == 0
    text = capsys.readouterr().out
    assert "optimizer states" in text
    assert "me/train.py:44 step > adamw.py _init_group" in text
    assert "was in no block: cached, or in pieces" in text
    assert (tmp_path / "tide.png").stat().st_size > 10_000


def test_the_tide_as_a_timeline(tmp_path: Path, snapshot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tide.json"
    answer = said(capsys, "trace", "--from-snapshot", snapshot, "-o", path, "--json")
    (row,) = answer["snapshots"]
    assert row["steps"] == 2
    assert not row["moments_marked"]
    timeline = load_timeline(path)
    assert timeline.peak_bytes == {"gpu": row["peak_bytes"]}


def test_two_runs_on_one_page(tmp_path: Path, snapshot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder()
    train(recorder, 3, batch=16384)
    other = recorder.save(tmp_path / "larger.pickle")
    flags = ["--from-snapshot", str(snapshot), "--from-snapshot", str(other), "-o", str(tmp_path / "both.svg")]
    assert main(["trace", *flags]) == 0
    page = (tmp_path / "both.svg").read_text()
    assert "mine: " in page
    assert "larger: " in page
    capsys.readouterr()
    answer = said(capsys, "diff", other, snapshot, "--json")
    # Of each batch three are alive at the peak: 3 x (16,384 - 8,192).
    assert answer["kinds"]["non-model"]["difference"] == 24576
    assert answer["difference_bytes"] == 24576


def test_the_tide_by_moment_makes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Five moments; activations of 4 and 8 kB come in the two forwards and go in the two backwards."""
    job = chain_workload(2, LAYER)
    save_trace(job, tmp_path / "job.parquet")
    recorder = Recorder()
    for _ in range(2):
        kept = []
        for size, moment in zip((4096, 8192), job.moments):
            recorder.mark(moment.name, "START")
            recorder.mark(moment.name, "END")
            kept.append(recorder.alloc(size, FORWARD))
        for moment in job.moments[2:4]:
            recorder.mark(moment.name, "START")
            recorder.mark(moment.name, "END")
            recorder.free(recorder.alloc(512, AUTOGRAD), AUTOGRAD)
            recorder.free(kept.pop(), AUTOGRAD)
        recorder.mark("Optimizer.step#AdamW.step", "START")
        recorder.mark("step", "START")
        recorder.mark("step", "END")
        recorder.mark("Optimizer.step#AdamW.step", "END")
    snapshot = recorder.save(tmp_path / "marked.pickle")
    path = tmp_path / "measured.parquet"
    answer = said(
        capsys, "trace", "--from-snapshot", snapshot, "--like", tmp_path / "job.parquet", "-o", path, "--json"
    )
    assert answer["snapshots"][0]["moments_marked"]
    measured = load_trace(path)
    assert [(m.start_bytes, m.peak_bytes, m.end_bytes) for m in measured.moments] == [
        (0, 4096, 4096),
        (4096, 12288, 12288),
        (12288, 12800, 4096),
        (4096, 4608, 0),
        (0, 0, 0),
    ]
    assert measured.tensors == job.tensors


def test_a_snapshot_beside_a_plan(
    tmp_path: Path, snapshot: Path, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = said(capsys, "diff", snapshot, plan, "--json", "--plot", tmp_path / "both.png")
    first, second = answer["first"], answer["second"]
    assert answer["command"].startswith("pstar diff ") and {"verdict", "reason", "advice", "notes"} <= answer.keys()
    assert first["name"] == "plan.json"
    assert first["peak_bytes"] == sum(first["kinds"].values())
    assert answer["difference_bytes"] == second["peak_bytes"] - first["peak_bytes"]
    assert answer["difference_bytes"] == sum(row["difference"] for row in answer["kinds"].values())
    assert (tmp_path / "both.png").exists()
    assert main(["diff", str(snapshot), str(plan)]) == 0
    text = capsys.readouterr().out
    assert "planned for" in text
    assert "- me/train.py:40 step > linear.py forward" in text


def test_a_run_beside_its_plan(tmp_path: Path, plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that takes twice as long and holds the same."""
    from dataclasses import replace

    from pstar_sim.core.plan import load_plan

    timeline = play_plan(load_plan(plan))
    measured = replace(timeline, source="measured", iteration_s=2 * timeline.iteration_s)
    RunTimelines(predicted=timeline, measured=measured).save(tmp_path / "run.json")
    answer = said(capsys, "diff", tmp_path / "run.json", plan, "--json")
    assert answer["difference_bytes"] == 0
    (iteration,) = [row for row in answer["figures"] if row["name"] == "iteration"]
    assert iteration["measured"] == 2 * iteration["predicted"]
    assert main(["diff", str(tmp_path / "run.json"), str(plan)]) == 0
    assert "equal" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["trace", "--from-snapshot", "{snapshot}", "-o", "{folder}/t.parquet"],
            "needs one --from-snapshot and --like",
        ),
        (
            ["trace", "--from-snapshot", "{snapshot}", "--like", "{folder}/j.parquet", "-o", "{folder}/t.parquet"],
            "no marks with the names of the moments",
        ),
        (["trace", "hf:gpt2", "--from-snapshot", "{snapshot}", "-o", "{folder}/t.png"], "not both"),
        (["trace", "--like", "x", "-o", "{folder}/t.png"], "go with --from-snapshot"),
        (["trace", "-o", "{folder}/t.parquet"], "required: MODEL, --batch, --seq"),
        (
            ["trace", "--from-snapshot", "{snapshot}", "--cuda", "3", "-o", "{folder}/t.png"],
            "has no device 3; it has 0",
        ),
        (["trace", "--from-snapshot", "{snapshot}", "-o", "{folder}/t.xyz"], "is not a kind of picture"),
        (["diff", "{snapshot}", "{folder}/none.json"], "none.json: cannot be read"),
        (["diff", "{folder}/none.pickle", "{plan}"], "none.pickle: cannot be read"),
        (["diff", "{plan}", "{plan}"], "is not a timeline"),
        (["diff", "{folder}/harm.pickle", "{plan}"], "asks for a class or a call"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path,
    snapshot: Path,
    plan: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    save_trace(chain_workload(2, LAYER), tmp_path / "j.parquet")
    (tmp_path / "harm.pickle").write_bytes(pickle.dumps({"segments": print}))
    words = [a.format(snapshot=snapshot, plan=plan, folder=tmp_path) for a in arguments]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("pstar: ")
    assert error.count("\n") == 1
