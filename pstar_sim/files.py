"""Atomic writing of files of every kind.

[Note: what is written over] A regular file is replaced and keeps its permissions; a missing file is made. For a
symbolic link, the file to which the link leads is replaced. Folders, devices, pipes and sockets are refused,
/dev/stdout among them: a file that is replaced as a whole cannot be sent through them.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pstar_sim.errors import PstarError

_LINKS = 40  # links in a row: as many as Linux follows


def write_atomically(path: Path, text: str, *, error: type[PstarError] = PstarError) -> None:
    """Raises `error` as `replaced_atomically` does."""
    with replaced_atomically(path, error=error) as temporary:
        temporary.write_text(text, encoding="utf-8")


def check_writable(path: Path, *, error: type[PstarError] = PstarError) -> Path:
    """What writing would replace or make, before work is done for it. Raises `error`, naming `path`, if it cannot be
    written."""
    try:
        target = _target(path, error)
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as reason:
        raise _refusal(path, reason, error) from None
    return target


@contextlib.contextmanager
def replaced_atomically(path: Path, *, error: type[PstarError] = PstarError) -> Iterator[Path]:
    """A new file beside `path`, which replaces it at the end, and is removed on an error.

    Raises `error`, naming `path`, where it cannot be written ([Note: what is written over]): no folder, no permission,
    or a full disk.
    """
    temporary: Path | None = None
    try:
        target = _target(path, error)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
        os.close(handle)
        temporary = Path(name)
        yield temporary
        temporary.chmod(_mode(target))  # mkstemp makes files that only their owner can read
        temporary.replace(target)
        temporary = None
    except OSError as reason:
        raise _refusal(path, reason, error) from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _refusal(path: Path, reason: OSError, error: type[PstarError]) -> PstarError:
    return error(f"{path}: cannot be written: {reason.strerror or reason}; choose another place")


def _target(path: Path, error: type[PstarError]) -> Path:
    target = path
    for _ in range(_LINKS):
        if not target.is_symlink():
            break
        target = target.parent / target.readlink()
        if target.is_relative_to("/proc"):  # /dev/stdout and its like must not be replaced, whatever they lead to
            raise error(f"{path} is an open stream of a process; name a file")
    else:
        raise error(f"{path}: its symbolic links lead in a circle; name a file")
    it = f"{path}" if target == path else f"{path} leads to {target}, which"
    if target.is_dir():
        raise error(f"{it} is a folder; name a file")
    if not target.parent.is_dir():
        raise error(f"{path}: there is no folder {str(target.parent)!r}; make it first")
    if target.exists():
        kind = target.stat().st_mode
        if not stat.S_ISREG(kind):
            what = next((word for is_kind, word in _KINDS if is_kind(kind)), "no regular file")
            raise error(f"{it} is {what}; name a file")
        if not os.access(target, os.W_OK):
            raise error(f"{it} is read-only; choose another place")
    return target


_KINDS = (
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


def _mode(target: Path) -> int:
    try:
        return stat.S_IMODE(target.stat().st_mode)
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask
