"""The disk under a folder: write to the platter and read back past the page cache."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["disk_rates"]

_BLOCK = 4 << 20


def disk_rates(
    folder: Path, size_bytes: int, *, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float, int] | str:
    """(read bytes/s, write bytes/s, bytes of the disk), or why there is none. The file is gone afterwards.

    Writing ends with fsync. Before reading, the page cache is asked to forget the file; where it cannot be asked, the
    answer would be memory's and is refused.
    """
    if not hasattr(os, "posix_fadvise"):
        return "disk: this system cannot be told to forget a file it has cached"
    usage = shutil.disk_usage(folder)
    if usage.free < 4 * size_bytes:
        return f"disk: {usage.free / 1e9:.1f} GB free under {folder}, {4 * size_bytes / 1e9:.1f} GB wanted"
    blocks = size_bytes // _BLOCK
    data = os.urandom(_BLOCK)
    handle, name = tempfile.mkstemp(dir=folder, prefix=".calibrate-")
    try:
        start_s = clock()
        for _ in range(blocks):
            _write_all(handle, data)
        os.fsync(handle)
        write_s = clock() - start_s
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(handle, 0, os.SEEK_SET)
        start_s = clock()
        left = blocks * _BLOCK
        while left > 0:
            left -= len(os.read(handle, _BLOCK)) or left
        read_s = clock() - start_s
    except OSError as error:
        return f"disk: {error.strerror or error}"
    finally:
        os.close(handle)
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
    return blocks * _BLOCK / read_s, blocks * _BLOCK / write_s, usage.total


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
