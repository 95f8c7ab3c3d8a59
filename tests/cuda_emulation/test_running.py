"""Where the emulated tests run, and what is said where they do not; needs no device, emulated or not."""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

HERE = Path(__file__).parent
CI = HERE.parents[1] / ".ci" / "run"
PASSED = "===== 7 passed in 1.00s ====="
EMULATED = "===== 3 passed in 2.00s ====="


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module


@pytest.mark.parametrize(
    ("machine", "free_bytes", "words"),
    [
        ("aarch64", 10**12, "is for x86-64 Linux, this is Linux aarch64"),
        ("x86_64", 7 * 10**9, "needs 8 GB on the disk, 7.0 GB are free"),
        ("x86_64", 9 * 10**9, None),
    ],
)
def test_where_the_environment_cannot_be_made(
    load: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    machine: str,
    free_bytes: int,
    words: str | None,
) -> None:
    environment = load("environment")
    monkeypatch.setattr(environment.platform, "system", lambda: "Linux")
    monkeypatch.setattr(environment.platform, "machine", lambda: machine)
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free_bytes))
    reason = environment.reason_against(tmp_path / "venv")
    assert reason is None if words is None else words in reason


def test_a_package_index_that_refuses(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    environment = load("environment")
    words = "WARNING: slow\nERROR: No matching distribution found for torch==2.14.1\n"
    refused = SimpleNamespace(returncode=1, stderr=words)
    monkeypatch.setattr(environment, "reason_against", lambda folder: None)
    monkeypatch.setattr(environment.venv, "create", lambda folder, **options: folder.mkdir())
    monkeypatch.setattr(environment.subprocess, "run", lambda *command, **options: refused)
    assert environment.main(tmp_path / "venv") == environment.CANNOT_BE_MADE
    assert capsys.readouterr().out == "NOT RUN: pip: No matching distribution found for torch==2.14.1\n"
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(("passed", "said"), [(160, None), (159, "159 tests passed on the emulated device")])
def test_fewer_passed_tests_than_committed_fail(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, passed: int, said: str | None
) -> None:
    suite = load("suite")
    reporter = SimpleNamespace(stats={"passed": [None] * passed, "skipped": [None] * 9})
    session = SimpleNamespace(
        exitstatus=0, config=SimpleNamespace(pluginmanager=SimpleNamespace(getplugin=lambda name: reporter))
    )
    monkeypatch.setenv(suite.COUNTED, "160")
    suite.pytest_sessionfinish(session, 0)
    assert session.exitstatus == (said is not None)
    text = suite.missing_passes(reporter)
    assert text is None if said is None else text.startswith(said)
    monkeypatch.delenv(suite.COUNTED)  # a part of the tests
    assert suite.missing_passes(reporter) is None


class TestContinuousIntegration:
    @staticmethod
    def run(folder: Path, **targets: tuple[str, int]) -> tuple[int, list[str]]:
        """With a `make` that prints for each target what it is told to."""
        cases = "".join(f"*{name}) echo '{text}'; exit {status};;\n" for name, (text, status) in targets.items())
        make = folder / "make"
        make.write_text(f'#!/bin/sh\ncase "$*" in\n{cases.replace("_", "-")}esac\n')
        make.chmod(0o755)
        environment = {"PATH": f"{folder}:/usr/bin:/bin"}
        done = subprocess.run([CI], env=environment, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout.splitlines()

    def test_both_run(self, tmp_path: Path) -> None:
        status, lines = self.run(tmp_path, test=(PASSED, 0), gpu_environment=("", 0), gpu_emulated=(EMULATED, 0))
        assert (status, lines) == (0, [PASSED, EMULATED])

    def test_the_environment_cannot_be_made(self, tmp_path: Path) -> None:
        said = "NOT RUN: the environment needs 8 GB on the disk, 7.0 GB are free"
        status, lines = self.run(tmp_path, test=(PASSED, 0), gpu_environment=(said, 2))
        assert (status, lines[-2:]) == (0, [said, PASSED])

    @pytest.mark.parametrize("failing", [["test"], ["gpu_environment", "gpu_emulated"], ["gpu_emulated"]])
    def test_anything_else_fails(self, tmp_path: Path, failing: list[str]) -> None:
        """The environment is what `make gpu-emulated` makes first."""
        targets = {"test": (PASSED, 0), "gpu_environment": ("", 0), "gpu_emulated": (EMULATED, 0)}
        status, _ = self.run(tmp_path, **{**targets, **dict.fromkeys(failing, ("broken", 2))})
        assert status == 2
