"""What `-o FILE` and `save` write over: regular files alone, through links, with their permissions; and nothing else,
which is said before any work is done."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

import pstar_sim as ps
from pstar_sim.catalog.writing import save_machine
from pstar_sim.cli import main
from pstar_sim.errors import PstarError
from pstar_sim.files import replaced_atomically, write_atomically
from pstar_sim.workload.trace import save_trace

SMALL = ["--model", "1B", "--batch", "1", "--seq", "128", "--machine", "v100-32"]
COMMANDS = (
    ["plan", *SMALL, "-o"],
    ["plot", "tide", *SMALL, "-o"],
    ["export", "no-plan.json", "--timeline", "-o"],
    ["sweep", "no-grid.toml", "-o"],
    ["ablate", *SMALL, "-o"],
    ["trace", "gpt2", "--batch", "1", "--seq", "8", "-o"],
    ["calibrate", "-o"],
    ["run", "no-plan.json", "--model", "gpt2", "--timeline"],
    ["run", "no-plan.json", "--model", "gpt2", "--perfetto"],
    ["run", "no-plan.json", "--model", "gpt2", "--plot"],
    ["run", "no-plan.json", "--model", "gpt2", "--record"],
)


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.mkdir()


def _socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)  # bind() takes no path that is longer than 107 bytes


def _device(path: Path) -> None:
    path.symlink_to("/dev/null")


def _circle(path: Path) -> None:
    path.symlink_to(path.name)


def _stream(path: Path) -> None:
    path.symlink_to("/dev/stdout")


ODD = [
    (_pipe, "is a pipe"),
    (_folder, "is a folder"),
    (_socket, "is a socket"),
    (_device, "leads to /dev/null, which is a device"),
    (_circle, "links lead in a circle"),
    (_stream, "is an open stream of a process"),
]


@pytest.mark.parametrize(("make", "said"), ODD)
def test_what_is_no_regular_file_is_refused_before_any_work(
    make: Callable[[Path], None],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of every command: the plans and grids named do not exist, and nobody gets as far as to miss them."""
    monkeypatch.chdir(tmp_path)
    make(Path("odd"))
    before = Path("odd").lstat()
    for argv in COMMANDS:
        assert main([*argv, "odd"]) == 2, argv
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1 and "no-" not in err, (argv, err)
    after = Path("odd").lstat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert [p.name for p in tmp_path.iterdir()] == ["odd"]


@pytest.mark.parametrize(("make", "said"), ODD)
def test_saving_what_is_no_regular_file(make: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    make(tmp_path / "odd")
    workload = ps.preset("tiny-gpt2", batch=1, seq=8)
    planned = ps.compare(workload, "virtual", policies="tide", barrier_cost=False).best()
    saves: list[Callable[[Path], object]] = [
        planned.save,
        planned.plan.save,
        planned.timeline.save,
        lambda path: save_trace(workload, path),
        lambda path: save_machine(ps.machine("v100-32"), path),
    ]
    for save in saves:
        with pytest.raises(PstarError, match=said):
            save(tmp_path / "odd")
    assert [p.name for p in tmp_path.iterdir()] == ["odd"]


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    """Two links in a row, the second relative, to a file that is not there yet; then to the one that is."""
    (tmp_path / "there").mkdir()
    (tmp_path / "first").symlink_to(tmp_path / "there" / "second")
    (tmp_path / "there" / "second").symlink_to("../real")
    for text in ("new", "newer"):
        write_atomically(tmp_path / "first", text)
        assert (tmp_path / "real").read_text() == text
        assert (tmp_path / "first").is_symlink() and (tmp_path / "there" / "second").is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first", "real", "there"]


def test_a_file_keeps_its_permissions(tmp_path: Path) -> None:
    file = tmp_path / "private"
    file.write_text("old")
    file.chmod(0o640)
    write_atomically(file, "new")
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == ("new", 0o640)


def test_what_is_raised_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("old")
    link.symlink_to(file)
    with pytest.raises(KeyError), replaced_atomically(link) as temporary:
        temporary.write_text("half")
        raise KeyError
    assert file.read_text() == "old" and sorted(p.name for p in tmp_path.iterdir()) == ["file", "link"]
