"""A folder is written beside its place, then renamed: after a SIGKILL a reader finds the old content or the new. Linux
exchanges two folders in one system call; elsewhere there are two renames, between which `find` returns the older."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def temporary(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.saving")


def _previous(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.previous")


def begin(folder: Path) -> Path:
    """An empty folder to write to. Raises OSError."""
    written = temporary(folder)
    if written.exists():
        shutil.rmtree(written)
    written.mkdir(parents=True)
    return written


def abandon(folder: Path) -> None:
    shutil.rmtree(temporary(folder), ignore_errors=True)


def find(folder: Path, is_whole: Callable[[Path], bool]) -> Path:
    """Itself, or the one beside it if a write was killed between two renames."""
    previous = _previous(folder)
    return previous if not folder.exists() and is_whole(previous) else folder


def finish(folder: Path, replaces: Collection[str], swap: Callable[[Path, Path], bool] | None = None) -> None:
    """The files have to be on the disk already.

    replaces: names in the old folder; others are carried over (as hard links where possible).

    Raises OSError; the old one is then still there.
    """
    written, previous = temporary(folder), _previous(folder)
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        if entry.name not in replaces and not (written / entry.name).exists():
            _carry(entry, written / entry.name)
    sync(written)
    if not folder.exists():
        written.rename(folder)
    elif (swap or exchange)(written, folder):
        sync(folder.parent)
        shutil.rmtree(written)
    else:
        if previous.exists():
            shutil.rmtree(previous)
        folder.rename(previous)
        written.rename(folder)
    sync(folder.parent)
    if previous.exists():
        shutil.rmtree(previous)


def _carry(source: Path, target: Path) -> None:
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True, copy_function=_link)
    else:
        _link(source, target)


def _link(source: str | Path, target: str | Path) -> object:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a disk without hard links
        shutil.copy2(source, target, follow_symlinks=False)
    return target


def exchange(one: Path, other: Path) -> bool:
    """Atomic, False if the system or the file system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


def sync(folder: Path) -> None:
    """Where folders can be opened for that."""
    with contextlib.suppress(PermissionError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
