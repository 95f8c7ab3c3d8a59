"""The disk under a folder: rates of writes that reach the disk and of reads past the page cache."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["disk_rates"]

_BLOCK = 4 << 20
_FORGOTTEN = 0.1  # largest share of a file's pages that may stay in memory


def disk_rates(
    folder: Path,
    size_bytes: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    cached: Callable[[int, int], float] | None = None,
) -> tuple[float, float, int] | str:
    """Returns (read bytes/s, write bytes/s, bytes of the disk), or the reason for none. The file is removed.

    Writing ends with fsync. Where the system keeps the file in its page cache (memory as a disk, a sandbox), the rate
    of reads would be memory's and is refused.

    cached(handle, bytes): the share of the file still in memory; by default from mincore.
    """
    cached = cached or cached_share
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
        if cached(handle, blocks * _BLOCK) > _FORGOTTEN:
            return "disk: reading is not measurable here: the system keeps a file in memory that it was told to forget"
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


def cached_share(handle: int, size_bytes: int) -> float:
    """By mincore; 1.0 where the system cannot say."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = -(-size_bytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    with mmap.mmap(handle, size_bytes, prot=mmap.PROT_READ | mmap.PROT_WRITE) as view:
        held = (ctypes.c_char * size_bytes).from_buffer(view)
        try:
            failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(held)), ctypes.c_size_t(size_bytes), found)
        finally:
            del held
    return 1.0 if failed else sum(page & 1 for page in found) / pages


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
