"""Slots in files: every byte comes back, and what goes wrong is said."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.disks.folders import DiskFolders, file_system
from executor.disks.store import DiskStore
from pstar_sim.core.workspace import PIECE_BYTES
from pstar_sim.errors import DiskError

SIZES = {"large": 2 * PIECE_BYTES + 5000, "small": 12, "page": 4096}


@pytest.fixture
def opened() -> Iterator[Callable[..., DiskStore[str]]]:
    """opened(*folders): a store with SIZES there. All are closed at the end, and leave nothing."""
    made: list[tuple[DiskStore[str], DiskFolders]] = []
    threads, descriptors = {*threading.enumerate()}, len([*Path("/proc/self/fd").iterdir()])

    def begin(*given: Path, sizes: dict[str, int] = SIZES) -> DiskStore[str]:
        folders = DiskFolders(folders=given)
        made.append((DiskStore(folders, sizes, lambda key: f"list {key}"), folders))
        return made[0][0]

    yield begin
    for store, folders in made:
        store.close()
        folders.close()
        assert not [path for folder in folders.folders for path in folder.glob("pstar-rank*")]
    assert not {*threading.enumerate()} - threads
    assert len([*Path("/proc/self/fd").iterdir()]) == descriptors


def drawn(size: int, skip: int = 0) -> torch.Tensor:
    """Bytes in memory that begins `skip` bytes behind an aligned address, or nearly so."""
    return torch.randint(0, 256, (size + skip,), dtype=torch.uint8)[skip:]


@pytest.mark.parametrize("where", ["disk", "two", "memory"])
def test_every_byte_comes_back(opened: Callable[..., DiskStore[str]], tmp_path: Path, where: str) -> None:
    (tmp_path / "b").mkdir()
    shared = Path(tempfile.mkdtemp(dir="/dev/shm"))
    folders = {"disk": [tmp_path], "two": [tmp_path, tmp_path / "b"], "memory": [shared]}[where]
    store = opened(*folders)
    written = {key: drawn(size, skip) for skip, (key, size) in enumerate(SIZES.items())}
    for key in ("small", "large"):
        store.write(key, written[key])
    back = {key: drawn(size, 3) for key, size in SIZES.items()}
    for key in SIZES:
        store.read(key, back[key])
    assert torch.equal(back["large"], written["large"]) and torch.equal(back["small"], written["small"])
    assert not back["page"].any()  # never written
    assert store.moved_bytes == dict.fromkeys(("nvme_read", "nvme_write"), SIZES["large"] + SIZES["small"])
    held = [sum(path.stat().st_size for path in folder.glob("*.slots")) for folder in folders]
    assert sum(held) == 2 * PIECE_BYTES + 8192 + 4096 + 4096
    assert where != "two" or min(held) >= PIECE_BYTES
    assert where != "memory" or store.folders.notes == (f"{shared} is on tmpfs",)
    shutil.rmtree(shared)


def test_a_changed_byte_is_found(opened: Callable[..., DiskStore[str]], tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.write("large", drawn(SIZES["large"]))
    (path,) = tmp_path.glob("*.slots")
    with path.open("r+b") as file:
        file.seek(PIECE_BYTES + 100)
        byte = file.read(1)[0]
        file.seek(PIECE_BYTES + 100)
        file.write(bytes([byte ^ 1]))
        os.fsync(file.fileno())
    with pytest.raises(DiskError, match=rf"folder {tmp_path}: list large is not what was written .* last checkpoint"):
        store.read("large", drawn(SIZES["large"]))


@pytest.mark.parametrize(
    ("moves", "said"),
    [
        (lambda fd, memory, at: 0, "list small cannot be written (0 of"),
        (OSError(errno.ENOSPC, "No space left on device"), "(No space left on device); make room in the folder, and"),
        (OSError(errno.EIO, "Input/output error"), "(Input/output error); give another folder, and continue from the"),
    ],
)
def test_a_failed_transfer_names_folder_and_list(
    opened: Callable[..., DiskStore[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: Any, said: str
) -> None:
    def fail(fd: int, memory: Any, at: int) -> int:
        if isinstance(moves, OSError):
            raise moves
        count: int = moves(fd, memory, at)
        return count

    store = opened(tmp_path)
    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(DiskError) as error:
        store.write("small", drawn(12))
    assert str(tmp_path) in str(error.value) and said in str(error.value)


def test_a_short_write_is_continued(
    opened: Callable[..., DiskStore[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, plain = opened(tmp_path), os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, memory, at: plain(fd, [memory[0][:8192]], at))
    written, back = drawn(SIZES["large"]), drawn(SIZES["large"])
    store.write("large", written)
    store.read("large", back)
    assert torch.equal(written, back)


def test_a_payload_whose_write_failed_is_lost_until_it_is_written(
    opened: Callable[..., DiskStore[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other pieces come to rest before the error does: their memory is the caller's again."""
    store, plain, begun, ended = opened(tmp_path), os.pwritev, threading.Event(), threading.Event()

    def fail(fd: int, memory: Any, at: int) -> int:
        if at == 0:
            begun.wait(10)
            raise OSError(errno.EIO, "Input/output error")
        begun.set()
        ended.wait(0.3)  # longer than an error takes
        ended.set()
        return plain(fd, memory, at)

    first, second = drawn(SIZES["large"]), drawn(SIZES["large"])
    store.write("large", first)
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwritev", fail)
        with pytest.raises(DiskError, match="Input/output error"):
            store.write("large", second)
    assert ended.is_set()
    with pytest.raises(DiskError, match="list large is lost: its write to disks failed; continue from the last check"):
        store.read("large", first)
    assert not store.holds("large", second)
    store.write("large", second)
    store.read("large", first)
    assert torch.equal(first, second)


def test_a_minus_zero_is_not_what_was_never_written(opened: Callable[..., DiskStore[str]], tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert store.holds("small", torch.zeros(3)) and not store.holds("small", torch.tensor([0.0, -0.0, 0.0]))


def test_a_removed_file_is_found(opened: Callable[..., DiskStore[str]], tmp_path: Path) -> None:
    store = opened(tmp_path)
    next(tmp_path.glob("*.slots")).unlink()
    with pytest.raises(DiskError, match=r"list small is gone: somebody has removed .*slots; continue from the last"):
        store.write("small", drawn(12))


def test_folders_that_cannot_be_used(tmp_path: Path, opened: Callable[..., DiskStore[str]]) -> None:
    with pytest.raises(DiskError, match=r"missing cannot be used \(No such file or directory\); give a folder that"):
        DiskFolders(folders=[tmp_path / "missing"])
    with pytest.raises(DiskError, match="give one or more folders, each once"):
        DiskFolders(folders=[tmp_path, tmp_path])
    opened(tmp_path, sizes={})
    with pytest.raises(DiskError, match=rf"{tmp_path} is in use by another run \(process {os.getpid()}\); give ano"):
        DiskFolders(folders=[tmp_path])


def test_a_folder_without_room_is_refused_before_the_run(tmp_path: Path) -> None:
    """More than the file system has."""
    folders = DiskFolders(folders=[tmp_path])
    needed = shutil.disk_usage(tmp_path).free + 10**9
    with pytest.raises(DiskError, match=r"has no room: the plan puts .* there, .* are free; make room, or give more"):
        DiskStore(folders, {"all": needed}, str)
    folders.close()


def test_a_limit_on_files_is_not_called_a_lack_of_room(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    folders = DiskFolders(folders=[tmp_path])
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(DiskError) as error:
            DiskStore(folders, {"all": 500 * 4096}, str)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        folders.close()
    assert str(error.value) == (
        f"disks folder {tmp_path}: a file of 2.048 MB cannot be made (File too large); raise the limit on files "
        "(ulimit -f), or give more folders, or others"
    )
    assert list(tmp_path.iterdir()) == []


def test_remains_of_a_killed_run_are_removed(tmp_path: Path, opened: Callable[..., DiskStore[str]]) -> None:
    child = os.fork()
    if child == 0:
        held = [DiskFolders(folders=[tmp_path], rank=rank, ranks=2) for rank in (0, 1)]
        for folders in held:
            folders.new_file(tmp_path)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    remains = ["pstar-rank0.0.slots", "pstar-rank0.lock", "pstar-rank1.0.slots", "pstar-rank1.lock"]
    assert sorted(path.name for path in tmp_path.glob("*")) == remains
    (tmp_path / "mine.txt").touch()
    folders = DiskFolders(folders=[tmp_path])
    assert sorted(path.name for path in tmp_path.glob("*")) == ["mine.txt", "pstar-rank0.lock"]
    folders.close()
    assert [path.name for path in tmp_path.glob("*")] == ["mine.txt"]


@pytest.mark.parametrize("how", ["ended", "lock removed"])
def test_the_end_of_a_run_leaves_the_files_of_the_next(
    opened: Callable[..., DiskStore[str]], tmp_path: Path, how: str
) -> None:
    first = DiskFolders(folders=[tmp_path])
    former = DiskStore(first, SIZES, str)
    if how == "ended":
        first.close()
    else:
        (tmp_path / "pstar-rank0.lock").unlink()
    store, written, back = opened(tmp_path), drawn(12), drawn(12)
    store.write("small", written)
    first.close()
    former.close()
    store.read("small", back)
    assert torch.equal(written, back) and (tmp_path / "pstar-rank0.lock").exists()


def test_a_process_forked_from_a_killed_run_keeps_no_lock(tmp_path: Path) -> None:
    """As workers of a DataLoader may outlive a run that got SIGKILL."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        _held = DiskFolders(folders=[tmp_path])
        if os.fork() == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    try:
        DiskFolders(folders=[tmp_path]).close()
    finally:
        os.close(write)
        os.close(read)


def test_what_hinders_the_start_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as without:
        without.setattr(fcntl, "flock", refuse)
        with pytest.raises(DiskError, match=r"cannot be used \(no lock there: No locks available\); give another fol"):
            DiskFolders(folders=[tmp_path])
    assert not [*tmp_path.iterdir()]
    (tmp_path / "pstar-rank5.lock").symlink_to("gone")  # as a lock that is removed while the folder is read
    DiskFolders(folders=[tmp_path]).close()
    (tmp_path / "pstar-rank0.7.slots").mkdir()
    with pytest.raises(DiskError, match=rf"cannot be removed \({tmp_path}/pstar-rank0.7.slots: Is a dir.* remove them"):
        DiskFolders(folders=[tmp_path])


def test_the_file_system_is_known_by_name(tmp_path: Path) -> None:
    (folder := tmp_path / "é b").mkdir()
    point, mounts = str(folder).replace(" ", r"\040"), tmp_path / "mounts"
    kinds = [("ext4", "/"), ("xfs", point), ("tmpfs", point)]  # the last on a point counts
    mounts.write_text("".join(f"1 0 8:1 / {at} rw - {kind} a rw\n" for kind, at in kinds), encoding="utf-8")
    assert file_system(folder, mounts) == "tmpfs" and file_system(tmp_path, mounts) == "ext4"
    assert file_system(Path("/dev/shm")) == "tmpfs" and file_system(Path("/proc/self")) == "proc"
