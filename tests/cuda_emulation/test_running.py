"""Where the emulated tests run, and what is said where they do not; needs no device, emulated or not."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
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


@pytest.fixture
def environment(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a machine that can have one; `commands` is what pip was called with, `status` what it ends with."""
    module = load("environment")

    def run(command: list[Any], **options: Any) -> None:
        module.commands.append([str(part) for part in command])
        if module.status:
            raise subprocess.CalledProcessError(module.status, command)

    monkeypatch.setattr(module, "reason_against", lambda folder: None)
    monkeypatch.setattr(module, "require_compiler", lambda: None)
    monkeypatch.setattr(module.venv, "create", lambda folder, **options: folder.mkdir())
    monkeypatch.setattr(
        module, "subprocess", SimpleNamespace(run=run, CalledProcessError=subprocess.CalledProcessError)
    )
    monkeypatch.setattr(module, "commands", [], raising=False)
    monkeypatch.setattr(module, "status", 0, raising=False)
    return module


class TestMakingTheEnvironment:
    @pytest.mark.parametrize(("version", "wanted"), [(None, "torch===2.14.1"), ("2.13.0", "torch===2.13.0")])
    def test_the_version_of_torch(self, environment: Any, tmp_path: Path, version: str | None, wanted: str) -> None:
        folder = tmp_path / "venv"
        assert environment.main(folder, version) == 0
        (command,) = environment.commands
        requirements = Path(command[command.index("-r") + 1]).read_text().split()
        assert [text for text in requirements if text.startswith("torch=")] == [wanted]
        assert (folder / ".installed").exists()

    def test_a_package_index_that_refuses_is_a_failure(
        self, environment: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder, environment.status = tmp_path / "venv", 1
        assert environment.main(folder) == 1
        said = capsys.readouterr()
        assert (said.out, said.err) == ("", f"pip could not install {folder}, status 1\n")
        assert not folder.exists()

    def test_a_missing_compiler_is_a_failure(
        self, load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        environment = load("environment")
        monkeypatch.setattr(environment, "reason_against", lambda folder: None)
        monkeypatch.setattr(environment.shutil, "which", lambda tool: None if tool == "g++" else tool)
        with pytest.raises(SystemExit, match=r"needs a compiler, g\+\+ is missing"):
            environment.main(tmp_path / "venv")

    @pytest.mark.parametrize(("status", "kept"), [(1, True), (0, False)])
    def test_a_former_one_stays_until_pip_has_succeeded(
        self, environment: Any, tmp_path: Path, status: int, kept: bool
    ) -> None:
        folder = tmp_path / "venv"
        folder.mkdir()
        for name in (".installed", "former"):
            (folder / name).touch()
        environment.status = status
        assert environment.main(folder) == status
        assert (folder / "former").exists() is kept
        assert (folder / ".installed").exists()
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["venv"]

    @pytest.mark.parametrize("status", [1, 0])
    def test_one_that_was_cut_off_is_no_former_one(self, environment: Any, tmp_path: Path, status: int) -> None:
        """A process was killed after it had put a former one aside."""
        for name, content in (("venv", "half"), ("venv-former", ".installed")):
            (tmp_path / name).mkdir()
            (tmp_path / name / content).touch()
        environment.status = status
        assert environment.main(tmp_path / "venv") == status
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["venv"]
        assert (tmp_path / "venv" / ".installed").exists() and not (tmp_path / "venv" / "half").exists()

    def test_two_at_once_make_one(self, environment: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """The second waits, and finds it made."""
        folder, locked, asked = tmp_path / "venv", environment.locked, threading.Event()

        def ask(path: Path) -> Any:
            asked.set()
            return locked(path)

        monkeypatch.setattr(environment, "locked", ask)
        second = threading.Thread(target=environment.main, args=[folder])
        with locked(tmp_path / "venv.lock"):
            second.start()
            assert asked.wait(30)
            folder.mkdir()
            (folder / ".installed").touch()
        second.join(30)
        assert environment.commands == []


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


@pytest.mark.parametrize(
    ("arguments", "marked", "least"),
    [([], "gpu and not slow", "260"), (["--slow"], "gpu and slow", "1"), (["--slow", "-x"], "gpu and slow", None)],
)
def test_tests_marked_slow_run_apart(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, arguments: list[str], marked: str, least: str | None
) -> None:
    suite, root, calls = load("suite"), HERE.parents[1], []
    monkeypatch.setitem(sys.modules, "build", SimpleNamespace(ensure_built=lambda: None, HERE=HERE))
    emulated = SimpleNamespace(environment=lambda outer: {**outer, "PYTHONPATH": ""}, ROOT=root)
    monkeypatch.setitem(sys.modules, "emulated", emulated)
    monkeypatch.setattr(suite.os, "execvpe", lambda file, command, inner: calls.append((command, inner)))
    monkeypatch.chdir(root)
    suite.main(arguments)
    ((command, inner),) = calls
    assert command[command.index("-m", 2) + 1] == marked and "--slow" not in command
    assert inner.get(suite.COUNTED) == least


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
