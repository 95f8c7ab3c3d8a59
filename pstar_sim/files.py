"""Files written whole or not at all: what every kind of file here is written through. Knows no format."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pstar_sim.errors import PstarError

__all__ = ["replaced_atomically", "write_atomically"]


def write_atomically(path: Path, text: str, *, error: type[PstarError] = PstarError) -> None:
    """The file is the old one or the new one, never half of it. Raises `error` as `replaced_atomically` does."""
    with replaced_atomically(path, error=error) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replaced_atomically(path: Path, *, error: type[PstarError] = PstarError) -> Iterator[Path]:
    """A file beside `path` to write to, which takes its place at the end, or is gone if something was raised.

    Raises `error`, naming `path`, where it cannot be written: its folder is missing or closed to us, the disk is
    full.
    """
    temporary: Path | None = None
    try:
        if path.is_dir():
            raise error(f"{path}: cannot be written: it is a folder; name a file")
        if not path.parent.is_dir():
            raise error(f"{path}: cannot be written: there is no folder {str(path.parent)!r}; make it first")
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        os.close(handle)
        temporary = Path(name)
        yield temporary
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)  # mkstemp makes files private; these are as public as any other
        temporary.replace(path)
        temporary = None
    except OSError as reason:
        raise error(f"{path}: cannot be written: {reason.strerror or reason}; choose another place") from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
