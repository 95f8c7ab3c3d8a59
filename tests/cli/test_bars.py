"""Progress bars: on a terminal only, and gone at the end."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
from rich.progress import Progress

import pstar_sim as ps
from pstar_sim.cli import bars, main
from pstar_sim.cli.bars import bar
from pstar_sim.errors import PstarError
from pstar_sim.planner.cheapest import cheapest
from pstar_sim.planner.compare import compare
from pstar_sim.planner.fits import fits
from pstar_sim.planner.limits import max_model
from pstar_sim.planner.sensitivity import sensitivity
from pstar_sim.planner.stated import examine
from pstar_sim.planner.variants import choose
from pstar_sim.planner.ways import candidates

JOB = ["--model", "1B", "--batch", "1", "--seq", "128"]
GRID = """
model = "tiny-gpt2"
batch = [1, 2]
seq = 8
machine = "t4"
policy = "tide"
"""


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("quiet", "shown"), [(False, True), (True, False)])
def test_a_bar_is_shown_on_a_terminal_unless_quiet(quiet: bool, shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    out = _Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setenv("TERM", "xterm")
    with bar("starting", quiet=quiet) as on_part:
        on_part("GPU memory", 1, 4)
    assert ("GPU memory" in out.getvalue()) == shown


def test_a_file_gets_lines_of_long_parts_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with bar("starting", quiet=False) as on_part:
        on_part("GPU memory", 1, 4)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(bars, "LINE_EVERY_S", 0.01)
    said, threads = "", {*threading.enumerate()}
    with bar("starting", quiet=False) as on_part:
        on_part("GPU memory", 1, 4)
        while "GPU memory" not in said:
            said += capsys.readouterr().err
    assert re.fullmatch(r"(pstar: (starting|GPU memory, 1 of 4 done), after [\d.]+ [mu]?s\n)+", said)
    with bar("starting", quiet=True):
        assert not {*threading.enumerate()} - threads


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bars") / "plan.json"
    assert main(["plan", *JOB, "--machine", "v100-32", "--policy", "tide", "-o", str(path)]) == 0
    return path


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["compare", *JOB, "--machine", "v100-32", "--policy", "tide"], "tide"),
        (["compare", *JOB, "--machine", "v100-32", "--policy", "tide", "--certify"], "lower bound"),
        (["fits", *JOB, "--machine", "v100-32", "--policy", "tide"], "tide"),
        (["cheapest", *JOB, "--tokens", "1e9", "--machine", "a100-80", "--policy", "tide"], "a100-80"),
        (
            ["max-batch", "--model", "tiny-gpt2", "--seq", "8", "--machine", "t4", "--policy", "all_on_gpu"],
            "all_on_gpu",
        ),
        (["ablate", *JOB, "--machine", "v100-32", "--policy", "tide"], "planning"),
        (["check", "PLAN"], "proving"),
        (["sweep", "grid.toml", "-o", "swept.parquet", "--backend", "sequential"], "points"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_progress_is_on_the_terminal_and_not_in_the_pipe(
    argv: list[str],
    said: str,
    plan_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a real terminal, of which only stderr is one; then in a pipe. Stdout is the same either way. Each part is
    drawn, however short it is: a tenth of a second may go by otherwise."""
    update = Progress.update

    def drawn(shown: Progress, *given: Any, **fields: Any) -> None:
        update(shown, *given, **fields)
        shown.refresh()

    monkeypatch.setattr(Progress, "update", drawn)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "xterm")
    (tmp_path / "grid.toml").write_text(GRID)
    argv = [str(plan_file) if word == "PLAN" else word for word in argv]
    with a_terminal() as (stderr, sent), monkeypatch.context() as here:
        here.setattr(sys, "stderr", stderr)
        assert main(argv) == 0
        stderr.close()
        shown = sent()
    out = capsys.readouterr().out
    assert said in shown and goes_away(shown)
    for kept in tmp_path.glob("swept*"):
        shutil.rmtree(kept) if kept.is_dir() else kept.unlink()
    assert main(argv) == 0
    assert capsys.readouterr() == (out, "")


def test_progress_of_a_process_of_its_own(python: str, tmp_path: Path) -> None:
    """Nothing stays on the terminal when the process has ended, either."""
    argv = [python, "-m", "pstar_sim", "compare", *JOB, "--machine", "v100-32", "--policy", "tide"]
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)}
    with a_terminal() as (stderr, sent):
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, cwd=tmp_path, timeout=120,
            env=environment,
        )  # fmt: skip
        stderr.close()
        shown = sent()
    assert done.returncode == 0 and "tide" in shown and goes_away(shown)
    piped = subprocess.run(argv, capture_output=True, cwd=tmp_path, timeout=120, env=environment)
    assert (piped.returncode, piped.stderr) == (0, b"") and piped.stdout == done.stdout


def goes_away(shown: str) -> bool:
    """There is a bar, none of it cut; behind its last line feed that line is erased."""
    return "━" in shown and "…" not in shown and "\x1b[2K" in shown.rpartition("\n")[2]


@contextlib.contextmanager
def a_terminal() -> Iterator[tuple[TextIO, Callable[[], str]]]:
    """A terminal of 80 columns, and what it was sent: to be asked for when all that write to it have closed it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    parts: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # EIO: nobody has the other end any more
            while part := os.read(ours, 65536):
                parts.append(part)

    reader = threading.Thread(target=read)
    reader.start()

    def sent() -> str:
        reader.join(60)
        return b"".join(parts).decode()

    with os.fdopen(theirs, "w", encoding="utf-8") as stream:
        yield stream, sent
    reader.join(60)
    os.close(ours)


def test_long_questions_tell_how_far_they_are() -> None:
    told: list[tuple[str, int, int]] = []

    def tell(what: str, behind: int, count: int) -> None:
        told.append((what, behind, count))

    m = ps.machine("v100-16", gpu_memory="4GB", host_memory="12GB")
    w = ps.preset("gpt2", batch=2, seq=64, dtype="fp16")
    max_model(m, batch=2, seq=64, like="gpt2", policies=["zero_offload", "tide"], catalog=False, on_policy=tell)
    assert told == [("zero_offload", 0, 2), ("tide", 1, 2)]
    told.clear()
    sensitivity(w, m, policies=["tide"], parts=["link", "GPU speed"], largest=False, on_part=tell)
    assert told == [("as it is", 0, 3), ("link", 1, 3), ("GPU speed", 2, 3)]
    told.clear()
    small = ps.machine("v100-16", gpu_memory="2GB")
    compare(w, small, policies=["all_on_gpu", "tide"], on_part=tell)
    assert told == [("lower bound", 0, 2), ("all_on_gpu", 0, 2), ("tide", 1, 2), ("what would do for all_on_gpu", 2, 2)]
    told.clear()
    fits(w, m, policies=["tide", "zero_offload"], on_part=tell)
    assert told == [("tide", 0, 2), ("zero_offload", 1, 2)]
    told.clear()
    cheapest("gpt2", tokens=1e9, batch=2, seq=64, machines=["a100-40", "a100-80"], policies=["tide"], on_part=tell)
    assert told == [("a100-40", 0, 2), ("a100-80", 1, 2)]
    told.clear()
    examine(compare(w, m, policies=["tide"]).best().plan, on_part=tell)
    assert told == [("proving", 0, 3), ("simulating", 1, 3), ("lower bound", 2, 3)]
    with pytest.raises(PstarError, match="on_part"):
        compare(w, m, policies=["tide"], on_part="loud")  # type: ignore[arg-type]
    told.clear()
    ways = candidates([w], 4)
    choose(ways, m, ps.Settings(), policy="tide", on_way=tell)
    assert told[0] == ("planning by tide", 0, len(ways))
    assert [behind for _, behind, _ in told] == sorted(behind for _, behind, _ in told)
