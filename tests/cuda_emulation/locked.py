"""A lock between processes that make the same thing."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Waits until no other process is in here with the same path. The file stays, empty."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
