"""Results of benchmarks: each says at which commit it was taken and on what it depends, the documents take their
figures from them, and `make results` finds those that have aged."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def loaded(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script that is in no package, as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location(f"of_{path.stem.strip('_')}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return loaded(ROOT / "benchmarks" / "_results.py", monkeypatch)


def matched(glob: str) -> bool:
    return any(path.is_file() for path in ROOT.glob(glob + "/*" if glob.endswith("**") else glob))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_result_says_when_it_was_taken_and_on_what_it_depends(path: Path, results: ModuleType) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", content["date"])
    for part in (content, *(value for value in content.values() if isinstance(value, dict) and "taken_at" in value)):
        assert re.fullmatch("[0-9a-f]{40}", part["taken_at"]["commit"])
        assert isinstance(part["taken_at"]["dirty"], bool)
    assert content["depends_on"] == results.dependencies(path.stem)
    assert not [glob for glob in content["depends_on"] if not matched(glob)]


def test_every_figure_of_the_documents_is_that_of_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    refresher = loaded(ROOT / ".ci" / "refresh_readme.py", monkeypatch)
    texts = refresher.documents()
    assert refresher.filled(texts) == texts, "run .ci/refresh_readme.py"
    table, phrase = "docs/results/policies.md", "benchmarks/validation.md"
    changed = texts | {
        table: texts[table].replace("| a100-80 | 1B | ", "| a100-80 | 1B | 9", 1),
        phrase: texts[phrase].replace("<!-- accuracy: -->", "<!-- accuracy: -->9"),
    }
    assert changed[table] != texts[table] and changed[phrase] != texts[phrase]
    assert refresher.filled(changed) == texts  # a figure written by hand does not stay
    with pytest.raises(SystemExit, match="must stand once, on one page"):
        refresher.filled(texts | {"README.md": texts[phrase]})
    shown = {name for text in texts.values() for name in re.findall(r"benchmarks/results/(\w+)\.json", text)}
    assert shown >= {path.stem for path in FILES} - {"simulate"}


def test_runs_on_disks_keep_to_their_plans() -> None:
    """Bits, bytes and host memory, of the commits at which they were measured."""
    memory, exact, checkpoint = (
        json.loads((ROOT / "benchmarks" / "results" / f"disks_{name}.json").read_text(encoding="utf-8"))
        for name in ("memory", "exact", "checkpoint")
    )
    row = checkpoint["row"]
    assert row["slots_bytes"] > 3e9 > 4 * row["host_budget_bytes"]
    assert row["equal"] == {"on disks": True, "without disks": True, "two processes": True} and row["left"] == []
    for at, phases in ((row, ("saving", "resuming")), *((each, ()) for each in memory["rows"])):
        assert 4 * at["host_budget_bytes"] <= at["model_data_bytes"] + 4
        for phase in ("loading", "training", *phases):
            assert 0 < at[f"{phase}_bytes"] <= at["planned_host_peak_bytes"], (at, phase)
    for job in exact["jobs"]:
        assert {each["on_disks"] for each in job["rows"]} == {"states", "states and parameters"}
        for each in job["rows"]:
            assert all(each["equal"].values()) and each["moved_bytes"] == each["planned_bytes"], each
            assert each["deviations"] == each["left"] == []


def test_both_tables_of_peers_come_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is not there until it was measured; a step of ZeRO-2 is 1 / 0.8 of ours."""
    refresher = loaded(ROOT / ".ci" / "refresh_readme.py", monkeypatch)
    monkeypatch.setattr(refresher, "RESULTS", tmp_path)

    def write(**tables: object) -> None:
        content = {"taken_at": {"commit": "1234567890", "dirty": False}, "tables": tables}
        (tmp_path / "peers.json").write_text(json.dumps(content))

    row = {"contender": "ZeRO", "leaves": "states", "clip": False, "micro_batch": 4, "tokens_per_s": 2000.0}
    row |= {"times": {"of": "ours", "step": 1.25}, "host_peak_bytes": 2 * 10**9, "host_bytes_per_param": 16.0}
    row |= dict.fromkeys(("gpu_reserved_bytes", "largest_params", "loss_apart"))
    ratios = {"unclipped": {"ours_half / zero2": {"medians": 0.8}}, "clipped": {}}
    write()
    assert refresher.peers_away() == refresher.peers_offloading() == ""
    write(**{"model data leave": {"rows": [row], "ratios": ratios}})
    assert refresher.peers_away().splitlines() == [
        "| contender | leaves the accelerator | clipped | micro-batch | step | tokens/s | host peak | per parameter |",
        "|---|---|---|---:|---:|---:|---:|---:|",
        "| ZeRO | states | no | 4 | 1.25 x ours | 2,000 | 2.00 GB | 16.0 B |",
    ]
    said = refresher.peers_offloading()
    assert said.endswith(
        "ZeRO-2's step takes 1.25 times that of ours with room for half (not clipped; "
        "[measured at 1234567](benchmarks/results/peers.json))."
    )
    text = "<!-- peers-away -->\n\n| an older table |\n\nmore"
    assert refresher.put(text, "peers-away", "") == "<!-- peers-away -->\n\nmore"


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path, name: str, text: str) -> str:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", name)
    return git(folder, "rev-parse", "HEAD")


@pytest.mark.skipif(shutil.which("git") is None, reason="lists commits")
def test_a_result_is_listed_from_the_commit_that_changes_what_it_depends_on(
    tmp_path: Path, results: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("GIT_")]:  # a hook of git's is told of its repository
        monkeypatch.delenv(name)
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q")
    first = commit(folder, "pkg/a.py", "1\n")

    def lines() -> list[str]:
        return [" ".join(line.split()) for line in results.list_changes(folder)]

    def keep(name: str, **content: Any) -> None:
        commit(
            folder, f"benchmarks/results/{name}.json", json.dumps({"depends_on": ["pkg/**", "other/*.py"], **content})
        )

    stamp = {"commit": first, "dirty": False}
    keep("one", taken_at=stamp)
    keep("parts", taken_at=stamp, left={"taken_at": {**stamp, "at_or_before": True}}, right={"taken_at": None})
    assert lines() == [
        "parts: right no commit is known",
        "0 of 3 results in 2 files are older than what they depend on",
        "1 unknown",
    ]
    commit(folder, "pkg/b.py", "1\n")
    commit(folder, "else.py", "1\n")
    commit(folder, "pkg/b.py", "2\n")
    (folder / "other").mkdir()
    second = commit(folder, "other/c.py", "1\n")
    (folder / "pkg" / "a.py").write_text("2\n")
    since = "since then 3 commits: pkg/**, other/*.py; changes that are not committed: pkg/**"
    assert lines()[:2] == [
        f"one measured at {first[:7]}; {since}",
        f"parts: left measured at or before {first[:7]}; {since}",
    ]
    assert results.taken_at(["other/*.py"], folder) == {"commit": second, "dirty": False}
    dirty = results.taken_at(["pkg/**"], folder)
    assert dirty == {"commit": second, "dirty": True}
    assert results.measured_at(dirty) == f"measured at {second[:7]} with changes"

    # What was taken back does not count; a new file makes a tree dirty.
    git(folder, "checkout", "-q", "--", "pkg")
    git(folder, "rm", "-q", "-r", "pkg/b.py", "other")
    git(folder, "commit", "-qm", "back")
    (folder / "pkg" / "new.py").write_text("1\n")
    assert results.taken_at(["pkg/**"], folder) == {"commit": git(folder, "rev-parse", "HEAD"), "dirty": True}
    (folder / "pkg" / "new.py").unlink()
    assert lines()[-2] == "0 of 3 results in 2 files are older than what they depend on"

    # Without the history, and without git at all.
    shallow, bare = tmp_path / "shallow", tmp_path / "bare"
    git(tmp_path, "clone", "-q", "--depth", "1", folder.as_uri(), str(shallow))
    assert [line.strip() for line in results.list_changes(shallow)][-1] == (
        "3 unknown; this clone is shallow: `git fetch --unshallow` brings its history"
    )
    assert f"{first[:7]} is not in this clone" in results.list_changes(shallow)[0]
    shutil.copytree(folder / "benchmarks", bare / "benchmarks")
    assert results.list_changes(bare) == [
        f"{bare} is not a git checkout: whether the 2 results are up to date is not known"
    ]


def test_writing_a_result_keeps_the_commit_and_the_dependencies(tmp_path: Path, results: ModuleType) -> None:
    path = results.write_result("optimal_barrier", {"rows": []}, folder=tmp_path)
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["taken_at"] == results.taken_at(content["depends_on"])
    assert {"benchmarks/optimal.py", "pstar_sim/policy/**"} <= set(content["depends_on"])
    assert {"pstar_sim/**", "executor/**"} == set(results.dependencies("something_new"))
