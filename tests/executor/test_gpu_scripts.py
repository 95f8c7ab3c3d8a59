"""The scripts for a machine with a GPU: what they do without one, what they keep, and how they go on from it."""

from __future__ import annotations

import _thread
import importlib
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device: these would run for minutes")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A module of benchmarks/ by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@NO_CUDA
@pytest.mark.parametrize(
    ("word", "script", "argv"),
    [
        ("gpu-test", "gpu_test", []),
        ("gpu-steady", "gpu_test", ["--slow"]),
        ("gpu-record", "gpu_record", []),
        ("gpu-peers", "peers", ["--device", "cuda"]),
    ],
)
def test_without_a_device_there_is_one_line_and_a_status_of_its_own(
    load: Callable[[str], Any], word: str, script: str, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert load(script).main(argv) == load("preflight").NO_DEVICE == 3
    assert capsys.readouterr().out == f"{word}: skipped: no CUDA device (torch {torch.__version__} finds none)\n"


def test_a_missing_package_has_another_status(
    load: Callable[[str], Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    preflight = load("preflight")
    monkeypatch.setitem(preflight.NEEDED_FOR, "no_such_package", "a test")
    assert preflight.cannot_run("gpu-x", ("no_such_package",), device=False) == preflight.NO_PACKAGE == 4
    assert capsys.readouterr().out.startswith("gpu-x: skipped: no_such_package cannot be imported by ")


class TestKeep:
    def test_what_was_carried_along_stays_importable(
        self, load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTHONPATH", "/carried/wheels")
        assert load("_keep").python_path(ROOT).split(os.pathsep) == [str(ROOT), "/carried/wheels"]
        monkeypatch.delenv("PYTHONPATH")
        assert load("_keep").python_path(ROOT) == str(ROOT)

    def test_a_process_that_hangs_says_where_and_ends(
        self, load: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """It hangs in C code that keeps the interpreter to itself: no handler of Python's own could run."""
        keep = load("_keep").Keep(tmp_path / "out", "some")
        code = "import ctypes\nprint('begun')\ndef hangs():\n    ctypes.PyDLL(None).sleep(60)\nhangs()"
        status, over = keep.run([sys.executable, "-c", code], limit_s=2.0, cwd=tmp_path)
        assert over and status < 0
        said = keep.log.read_text(encoding="utf-8")
        assert said.startswith("begun\n") and "in hangs" in said
        assert capsys.readouterr().out == said

    def test_what_a_process_started_ends_with_it(self, load: Callable[[str], Any], tmp_path: Path) -> None:
        """A grandchild that holds the pipe open for a minute."""
        keep = load("_keep").Keep(tmp_path, "some")
        code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
        status, over = keep.run([sys.executable, "-c", code], limit_s=1.0, cwd=tmp_path)
        assert over or status == 0

    def test_a_log_has_room_for_the_way_back(
        self, load: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = load("_keep")
        monkeypatch.setattr(module, "FILE_BYTES", 1000)
        keep = module.Keep(tmp_path, "some")
        for _ in range(100):
            keep.note("x" * 29)
        text = keep.log.read_text(encoding="utf-8")
        assert len(text) <= 1000 and text.startswith("x" * 29) and text.endswith("(the log is full)\n")


STORY = """
import ctypes, os, signal, warnings

def test_a_passes():
    warnings.warn("torch says so once")

def test_b_fails():
    assert 1 + 1 == 3

def test_c_hangs():
    ctypes.PyDLL(None).sleep(60)

def test_d_dies():
    os.kill(os.getpid(), signal.SIGKILL)

def test_first_of_all():
    assert os.environ["PYTHONPATH"].endswith("/carried/wheels")
"""


@pytest.mark.slow
def test_tests_that_hang_or_die_leave_a_trace_and_the_others_run(
    load: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every outcome is kept, a warning is none, and a second run has nothing left to do; one row taken away, that test
    runs again, and no other."""
    gpu_test = load("gpu_test")
    monkeypatch.setenv("PYTHONPATH", "/carried/wheels")
    monkeypatch.setattr(gpu_test, "FIRST", ("test_first_of_all",))
    story, out = tmp_path / "test_story.py", tmp_path / "out"
    story.write_text(STORY, encoding="utf-8")
    argv = ["--marked", "not gpu", "--without-device", "--test-limit-s", "2", "--out", str(out), str(story)]
    assert gpu_test.main(argv) == 1
    partial = out / "gpu_test.partial.jsonl"
    rows = gpu_test.read(partial)
    found = {name.split("::")[-1]: row for name, row in gpu_test.results(rows).items()}
    assert {name: row["outcome"] for name, row in found.items()} == {
        "test_first_of_all": "passed", "test_a_passes": "passed", "test_b_fails": "failed", "test_c_hangs": "hung",
        "test_d_dies": "died",
    }  # fmt: skip
    assert next(iter(found)) == "test_first_of_all"
    assert "assert (1 + 1) == 3" in found["test_b_fails"]["text"]
    log = (out / "gpu_test.log").read_text(encoding="utf-8")
    assert "in test_c_hangs" in log and "warned 1 times: UserWarning: torch says so once" in log
    written = json.loads((out / "gpu_test.json").read_text(encoding="utf-8"))
    assert written["counts"] == {"passed": 2, "failed": 1, "hung": 1, "died": 1} and written["tests_left"] == 0
    assert len(list(out.iterdir())) <= 8

    kept = [line for line in partial.read_text(encoding="utf-8").splitlines() if "test_a_passes" not in line]
    partial.write_text("\n".join(kept) + "\n", encoding="utf-8")
    assert gpu_test.main(argv) == 1
    again = gpu_test.read(partial)[len(kept) :]
    assert [row["started"].split("::")[-1] for row in again if "started" in row] == ["test_a_passes"]
    capfd.readouterr()


def test_no_time_left(load: Callable[[str], Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The first test uses the minutes up; the second is left for the next run."""
    story = tmp_path / "test_story.py"
    story.write_text("import time\ndef test_a():\n    time.sleep(1.5)\ndef test_b():\n    pass\n", encoding="utf-8")
    gpu_test = load("gpu_test")
    argv = ["--marked", "not gpu", "--without-device", "--out", str(tmp_path / "out"), str(story)]
    assert gpu_test.main(["--minutes", "0.02", *argv]) == 0
    assert "1 passed; 1 left" in capfd.readouterr().out
    assert gpu_test.main(argv) == 0
    assert "2 passed; 0 left" in capfd.readouterr().out


def test_waits_of_training_are_told_from_those_of_queues(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait counts in the training thread, and in a thread that Python does not know, as autograd's are; once the
    patch is undone none does."""

    class Event:
        def synchronize(self) -> None:
            pass

    ended = threading.Event()

    def unknown() -> None:
        Event().synchronize()
        ended.set()

    waits = kit.waits_of_training(monkeypatch, [(Event, "Event")])
    queue = threading.Thread(target=Event().synchronize)
    queue.start()
    queue.join()
    assert waits == []
    Event().synchronize()
    _thread.start_new_thread(unknown, ())
    assert ended.wait(10)
    assert waits == ["Event", "Event, in backward's own thread"]
    monkeypatch.undo()
    Event().synchronize()
    assert len(waits) == 2
