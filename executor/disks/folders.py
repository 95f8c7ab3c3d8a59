"""Folders of disks: one run at a time in each, and nothing of a killed run left there.

A folder holds a lock and a file per rank and plan (`pstar-rank0.lock`, `pstar-rank0.0.slots`). A lock that nobody holds
says that a killed run left the files beside it, which the next run removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pstar_sim.errors import DiskError

DIRECT = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"})
"""File systems on which O_DIRECT passes the page cache. Others (tmpfs, overlay) accept the flag and ignore it."""
_THREADS = 4
_PATIENCE_S = 2.0  # a run that ends may hold its locks a little longer


@dataclass(frozen=True, kw_only=True)
class DiskFolders:
    """The folders in which one rank may write, until `close` or the process ends.

    folders: absolute.
    threads: per folder.
    notes: words for folders whose transfers go through the page cache.

    Raises DiskError for a folder that cannot be used, or is in use.
    """

    folders: Sequence[Path]
    rank: int = 0
    ranks: int = 1
    threads: int = _THREADS
    notes: tuple[str, ...] = field(init=False)
    _slots: list[OwnFile] = field(default_factory=list, init=False)  # files made so far

    def __post_init__(self) -> None:
        folders = tuple(Path(folder).expanduser().absolute() for folder in self.folders)
        object.__setattr__(self, "folders", folders)
        if not folders or len({folder.resolve() for folder in folders}) < len(folders):
            raise DiskError(f"disks {', '.join(map(str, folders)) or 'none'}: give one or more folders, each once")
        locks: list[OwnFile] = []
        try:
            for folder in folders:
                locks.append(_locked(folder, self.rank))
                _remove_remains(folder, self.rank, self.ranks)
        except BaseException:
            _release(self._slots, locks)
            raise
        kinds = {folder: file_system(folder) for folder in folders}
        notes = tuple(f"{folder} is on {kind}" for folder, kind in kinds.items() if kind not in DIRECT)
        object.__setattr__(self, "notes", notes)
        object.__setattr__(self, "_close", weakref.finalize(self, _release, self._slots, locks))

    def new_file(self, folder: Path) -> OwnFile:
        """`close` removes the file. Raises OSError."""
        path = folder / f"pstar-rank{self.rank}.{len(self._slots)}.slots"
        self._slots.append(OwnFile(path, os.O_CREAT | os.O_EXCL, 0o600))
        return self._slots[-1]

    def close(self) -> None:
        """Remove the files, then release the folders."""
        self._close()  # type: ignore[attr-defined]


class OwnFile:
    """Forked processes do not keep its descriptor, and so no lock."""

    def __init__(self, path: Path, flags: int, mode: int = 0) -> None:
        self.path, self.descriptor = path, os.open(path, os.O_RDWR | flags, mode)
        _own_files.add(self)

    def is_at_path(self) -> bool:
        """The path may lead to another run's file."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), self.path.stat())
        except FileNotFoundError:
            return False

    def remove(self) -> None:
        """Does nothing where the file is closed."""
        if self.descriptor >= 0:
            with contextlib.suppress(OSError):  # the folder may be gone
                if self.is_at_path():
                    self.path.unlink()
        self.close()

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


_own_files: weakref.WeakSet[OwnFile] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for file in list(_own_files):
        file.close()


os.register_at_fork(after_in_child=_leave_to_parent)


def _locked(folder: Path, rank: int) -> OwnFile:
    path = folder / f"pstar-rank{rank}.lock"
    give_up_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            file = OwnFile(path, os.O_CREAT, 0o666)
        except OSError as error:
            raise DiskError(
                f"disks folder {folder} cannot be used ({error.strerror}); give a folder that exists and can be written"
            ) from error
        try:
            fcntl.flock(file.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.is_at_path():  # else another run has removed it meanwhile
                os.ftruncate(file.descriptor, 0)
                os.write(file.descriptor, f"process {os.getpid()}".encode())
                return file
        except BlockingIOError as error:
            if time.monotonic() > give_up_s:
                who = os.pread(file.descriptor, 100, 0).decode(errors="replace")
                file.close()
                raise DiskError(
                    f"disks folder {folder} is in use by another run ({who or error.strerror}); give another folder, "
                    "or wait until that run has ended"
                ) from error
        except OSError as error:
            file.remove()
            raise DiskError(
                f"disks folder {folder} cannot be used (no lock there: {error.strerror}); give another folder"
            ) from error
        file.close()
        time.sleep(0.02)


def _remove_remains(folder: Path, rank: int, ranks: int) -> None:
    """Of this rank, whose lock is held, and by the first rank those of ranks that this run lacks and whose lock nobody
    holds. Raises DiskError."""
    try:
        _remove_files(folder, rank)
        for path in folder.glob("pstar-rank*.lock") if rank == 0 else ():
            other = path.name.removeprefix("pstar-rank").removesuffix(".lock")
            if other.isdigit() and int(other) >= ranks:
                with contextlib.suppress(FileNotFoundError):  # its run has ended meanwhile
                    _remove_rank(OwnFile(path, 0), int(other))
    except OSError as error:
        raise DiskError(
            f"disks folder {folder} has files of a run that was killed, which cannot be removed "
            f"({error.filename or folder}: {error.strerror}); remove them, or give another folder"
        ) from error


def _remove_rank(lock: OwnFile, rank: int) -> None:
    try:
        fcntl.flock(lock.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if lock.is_at_path():
            _remove_files(lock.path.parent, rank)
            lock.remove()
    except BlockingIOError:
        pass  # in use
    finally:
        lock.close()


def _remove_files(folder: Path, rank: int) -> None:
    for path in folder.glob(f"pstar-rank{rank}.*.slots"):
        path.unlink(missing_ok=True)


def _release(slots: Sequence[OwnFile], locks: Sequence[OwnFile]) -> None:
    """Also at the end of the process."""
    for file in (*slots, *locks):
        file.remove()


def file_system(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Type ("ext4", "tmpfs"); "" where the system does not say.

    mounts: a later row is above earlier ones at its point.
    """
    try:
        rows = mounts.read_bytes().splitlines()
    except OSError:
        return ""
    under: tuple[int, str] = (0, "")
    real = folder.resolve()
    for row in rows:
        mount, _, about = row.partition(b" - ")
        name = re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), mount.split()[4])
        point = Path(os.fsdecode(name))
        if real.is_relative_to(point) and len(point.parts) >= under[0]:
            under = (len(point.parts), os.fsdecode(about.split()[0]))
    return under[1]
