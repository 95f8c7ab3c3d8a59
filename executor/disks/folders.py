"""Folders of disks: one run at a time in each, and nothing of a killed run left there.

The files of a run are for that run alone: a checkpoint holds what is to last. A folder holds a lock and a file per rank
and plan (`pstar-rank0.lock`, `pstar-rank0.0.slots`). The system gives up the lock of a process that ends, however it
ends. So a lock that nobody holds says that the files beside it are remains of a killed run, which the next run removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pstar_sim.errors import DiskError

__all__ = ["DiskFolders", "file_system"]

DIRECT = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"})
"""File systems on which O_DIRECT passes the page cache. Others (tmpfs, overlay) accept the flag and ignore it."""
_PATIENCE_S = 2.0  # a run that ends may hold its locks a little longer


@dataclass(frozen=True, kw_only=True)
class DiskFolders:
    """The folders in which one rank of a run may write, until `close` or the end of the process.

    folders: absolute.
    threads: for each folder.
    notes: folders whose transfers go through the page cache, in words.

    Raises DiskError for a folder that is missing or not writable, is given twice, or in which another run writes.
    """

    folders: Sequence[Path]
    rank: int = 0
    ranks: int = 1
    threads: int = 4
    notes: tuple[str, ...] = field(init=False)
    _files: list[int] = field(default_factory=list, init=False)  # count of files made so far

    def __post_init__(self) -> None:
        folders = tuple(Path(folder).expanduser().absolute() for folder in self.folders)
        object.__setattr__(self, "folders", folders)
        if not folders or len({folder.resolve() for folder in folders}) < len(folders):
            raise DiskError(f"disks {', '.join(map(str, folders)) or 'none'}: give one or more folders, each once")
        locks: list[tuple[Path, int]] = []
        try:
            for folder in folders:
                locks.append(_locked(folder, self.rank))
                _remove_remains(folder, self.rank, self.ranks)
        except BaseException:
            _release(locks, os.getpid())
            raise
        kinds = {folder: file_system(folder) for folder in folders}
        notes = tuple(f"{folder} is on {kind}" for folder, kind in kinds.items() if kind not in DIRECT)
        object.__setattr__(self, "notes", notes)
        object.__setattr__(self, "_close", weakref.finalize(self, _release, locks, os.getpid()))

    def new_file(self, folder: Path) -> Path:
        """Returns the name of a file that does not exist yet."""
        self._files.append(len(self._files))
        return folder / f"pstar-rank{self.rank}.{self._files[-1]}.slots"

    def close(self) -> None:
        """Remove the run's files, and let other runs use the folders."""
        self._close()  # type: ignore[attr-defined]


def _locked(folder: Path, rank: int) -> tuple[Path, int]:
    """Returns the lock of a rank, and its open descriptor."""
    path = folder / f"pstar-rank{rank}.lock"
    give_up_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise DiskError(
                f"disks folder {folder} cannot be used ({error.strerror}); give a folder that exists and can be written"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):  # else another run has removed it meanwhile
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()}".encode())
                return path, descriptor
        except OSError as error:
            if time.monotonic() > give_up_s:
                who = os.pread(descriptor, 100, 0).decode(errors="replace")
                os.close(descriptor)
                raise DiskError(
                    f"disks folder {folder} is in use by another run ({who or error.strerror}); give another folder, "
                    "or wait until that run has ended"
                ) from error
        os.close(descriptor)
        time.sleep(0.02)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _remove_remains(folder: Path, rank: int, ranks: int) -> None:
    """Remove the files of killed runs: those of this rank, whose lock is held, and by the first rank also those of
    ranks that this run does not have and whose lock nobody holds."""
    _remove_files(folder, rank)
    for path in folder.glob("pstar-rank*.lock") if rank == 0 else ():
        other = path.name.removeprefix("pstar-rank").removesuffix(".lock")
        if not other.isdigit() or int(other) < ranks:
            continue
        descriptor = os.open(path, os.O_RDWR)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_files(folder, int(other))
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _remove_files(folder: Path, rank: int) -> None:
    for path in folder.glob(f"pstar-rank{rank}.*.slots"):
        path.unlink(missing_ok=True)


def _release(locks: Sequence[tuple[Path, int]], process: int) -> None:
    """Also called at the end of the process, and of processes forked from it, which do nothing."""
    if os.getpid() != process:
        return
    for path, descriptor in locks:
        rank = int(path.stem.removeprefix("pstar-rank"))
        with contextlib.suppress(OSError):  # the folder may be gone
            _remove_files(path.parent, rank)
            path.unlink(missing_ok=True)
        os.close(descriptor)


def file_system(folder: Path) -> str:
    """Returns the type of the file system under a folder ("ext4", "tmpfs"); "" where the system does not say."""
    try:
        rows = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    under: tuple[int, str] = (0, "")
    real = folder.resolve()
    for row in rows:
        mount, _, about = row.partition(" - ")
        point = Path(mount.split()[4].encode().decode("unicode_escape"))
        if real.is_relative_to(point):
            under = max(under, (len(point.parts), about.split()[0]), key=lambda pair: pair[0])
    return under[1]
