"""A slot in preallocated files for each payload on disks.

[Note: pieces] Pieces of 4 MiB are spread over the folders in turn and moved by a few threads each: one does not reach a
disk's rate. `os.preadv` and `os.pwritev` let other Python threads run. Every piece begins at a multiple of 4,096 bytes,
as O_DIRECT wants it; where that passes the page cache (`folders.DIRECT`), what is no whole page goes through a thread's
aligned buffer.

[Note: nothing lost on disks] Every transfer's length is checked, and every piece has a checksum of the memory written,
verified of the memory read: XXH3 of 64 bits (saving/tensor_files.py says why), in memory, as files are for one run.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
import xxhash

from executor.disks.folders import DIRECT, DiskFolders, file_system
from pstar_sim.core.workspace import BUFFERS_BYTES, PIECE_BYTES
from pstar_sim.errors import DiskError
from pstar_sim.units import format_bytes

Key = TypeVar("Key", bound=Hashable)
ALIGN_BYTES = 4096
_OTHER_THREADS = 3  # that move single pieces: two queues', and the user's


class _Piece(NamedTuple):
    """Bytes [start, stop) of a payload, at `offset` of file `file`."""

    start: int
    stop: int
    file: int
    offset: int


class _File:
    def __init__(self, folders: DiskFolders, folder: Path, size_bytes: int) -> None:
        self.direct = file_system(folder) in DIRECT
        free = shutil.disk_usage(folder).free
        short = (
            f"disks folder {folder} has no room: the plan puts {format_bytes(size_bytes)} there, "
            f"{format_bytes(free)} are free; make room, or give more folders"
        )
        if size_bytes > free:
            raise DiskError(short)
        try:
            self.own = folders.new_file(folder)
        except OSError as error:
            raise DiskError(f"{error.filename} cannot be made ({error.strerror}); give another folder") from error
        try:
            os.posix_fallocate(self.own.descriptor, 0, max(size_bytes, 1))
            if self.direct:
                fcntl.fcntl(self.own.descriptor, fcntl.F_SETFL, os.O_DIRECT)
        except OSError as error:
            self.own.remove()
            if error.errno == errno.ENOSPC:
                raise DiskError(short) from error
            limit = "raise the limit on files (ulimit -f), or " if error.errno == errno.EFBIG else ""
            raise DiskError(
                f"disks folder {folder}: a file of {format_bytes(size_bytes)} cannot be made ({error.strerror}); "
                f"{limit}give more folders, or others"
            ) from error


class DiskStore(Generic[Key]):
    """One plan's payloads. One thread reads while another writes others.

    sizes: key -> bytes, zeros until written.
    named: key -> words for messages.

    moved_bytes: by direction ("nvme_read", "nvme_write").

    Raises DiskError where a folder has no room.
    """

    def __init__(self, folders: DiskFolders, sizes: Mapping[Key, int], named: Callable[[Key], str]) -> None:
        self.folders = folders
        self.named = named
        self.moved_bytes = {"nvme_read": 0, "nvme_write": 0}
        self._pieces: dict[Key, list[_Piece]] = {}
        self._sums: dict[Key, list[int] | None] = dict.fromkeys(sizes)  # without payloads whose write failed
        self._files: list[_File] = []
        self._buffers = threading.local()
        threads = folders.threads * len(folders.folders) + _OTHER_THREADS
        self._buffer_bytes = max(ALIGN_BYTES, BUFFERS_BYTES // threads // ALIGN_BYTES * ALIGN_BYTES)
        ends = [0] * len(folders.folders)
        for key, size in sizes.items():
            pieces = self._pieces[key] = []
            for start in range(0, size, PIECE_BYTES):
                file, stop = min(range(len(ends)), key=ends.__getitem__), min(start + PIECE_BYTES, size)
                pieces.append(_Piece(start, stop, file, ends[file]))
                ends[file] += _aligned(stop - start)
        try:
            for folder, end in zip(folders.folders, ends):
                self._files.append(_File(folders, folder, end))
        except BaseException:
            self.close()
            raise
        self._threads = ThreadPoolExecutor(folders.threads * len(ends), thread_name_prefix="executor-disk")

    def close(self) -> None:
        if hasattr(self, "_threads"):
            self._threads.shutdown()
        for file in self._files:
            file.own.remove()
        self._files.clear()

    def write(self, key: Key, source: torch.Tensor) -> None:
        """source: contiguous, on the host. Raises DiskError; the payload is then lost."""
        memory = _bytes_of(source)
        self._sums.pop(key, None)
        self._sums[key] = self._each(key, lambda piece: self._write(key, piece, memory[piece.start : piece.stop]))
        self.moved_bytes["nvme_write"] += len(memory)

    def read(self, key: Key, target: torch.Tensor) -> None:
        """target: contiguous, on the host. Raises DiskError where bytes are not those written, or the last write
        failed."""
        if key not in self._sums:
            raise DiskError(f"{self.named(key)} is lost: its write to disks failed; continue from the last checkpoint")
        memory, sums = _bytes_of(target), self._sums[key]
        if sums is None:
            target.zero_()
            return
        found = self._each(key, lambda piece: self._read(key, piece, memory[piece.start : piece.stop]))
        self.moved_bytes["nvme_read"] += len(memory)
        for piece, was, is_now in zip(self._pieces[key], sums, found):
            if was != is_now:
                raise DiskError(
                    f"{self._words(key, piece)} is not what was written there (checksum {is_now:016x} instead of "
                    f"{was:016x}): the disk, or another program, has changed it; continue from the last checkpoint, "
                    "with another folder"
                )

    def holds(self, key: Key, source: torch.Tensor) -> bool:
        """By checksums."""
        if key not in self._sums:
            return False
        memory, sums = _bytes_of(source), self._sums[key]
        if sums is None:
            return not source.detach().view(torch.uint8).any()  # -0.0 equals zero and has other bytes
        return sums == [xxhash.xxh3_64_intdigest(memory[piece.start : piece.stop]) for piece in self._pieces[key]]

    def _each(self, key: Key, move: Callable[[_Piece], int]) -> list[int]:
        """No piece moves any more when this ends or raises."""
        pieces = self._pieces[key]
        if len(pieces) == 1:
            return [move(pieces[0])]
        moves: list[Future[int]] = []
        try:
            moves.extend(self._threads.submit(move, piece) for piece in pieces)
            return [one.result() for one in moves]
        finally:
            for one in moves:
                one.cancel()
            wait(moves)

    def _write(self, key: Key, piece: _Piece, memory: memoryview) -> int:
        file, checksum = self._file(key, piece), xxhash.xxh3_64_intdigest(memory)
        for start, part, given in self._turns(file, memory):
            if given is not part:
                given[: len(part)] = part
            self._whole(os.pwritev, "written", key, piece, start, given)
        return checksum

    def _read(self, key: Key, piece: _Piece, memory: memoryview) -> int:
        for start, part, given in self._turns(self._file(key, piece), memory):
            self._whole(os.preadv, "read", key, piece, start, given)
            if given is not part:
                part[:] = given[: len(part)]
        return xxhash.xxh3_64_intdigest(memory)

    def _turns(self, file: _File, memory: memoryview) -> Iterator[tuple[int, memoryview, memoryview]]:
        """(start, part of the memory, what moves)."""
        passes = not file.direct or np.frombuffer(memory, np.uint8).ctypes.data % ALIGN_BYTES == 0
        whole = len(memory) - len(memory) % (ALIGN_BYTES if file.direct else 1) if passes else 0
        if whole:
            yield 0, (first := memory[:whole]), first
        for start in range(whole, len(memory), self._buffer_bytes):
            part = memory[start : start + self._buffer_bytes]
            yield start, part, self._buffer()[: _aligned(len(part))]

    def _whole(
        self, move: Callable[..., int], word: str, key: Key, piece: _Piece, start: int, memory: memoryview
    ) -> None:
        """The system may move less than asked."""
        at, file = piece.offset + start, self._files[piece.file]
        while memory:
            try:
                count = move(file.own.descriptor, [memory], at)
                if count <= 0 or (file.direct and count % ALIGN_BYTES):
                    raise OSError(errno.EIO, f"{count} of {len(memory)} bytes moved")
            except OSError as error:
                raise DiskError(
                    f"{self._words(key, piece)} cannot be {word} ({error.strerror}); "
                    + ("make room in the folder" if error.errno == errno.ENOSPC else "give another folder")
                    + ", and continue from the last checkpoint"
                ) from error
            memory, at = memory[count:], at + count

    def _file(self, key: Key, piece: _Piece) -> _File:
        file = self._files[piece.file]
        if os.fstat(file.own.descriptor).st_nlink == 0:
            raise DiskError(
                f"{self._words(key, piece)} is gone: somebody has removed {file.own.path}; continue from the last "
                "checkpoint"
            )
        return file

    def _words(self, key: Key, piece: _Piece) -> str:
        return f"disks folder {self._files[piece.file].own.path.parent}: {self.named(key)}"

    def _buffer(self) -> memoryview:
        """This thread's, page-aligned."""
        if not hasattr(self._buffers, "memory"):
            self._buffers.memory = memoryview(mmap.mmap(-1, self._buffer_bytes))
        memory: memoryview = self._buffers.memory
        return memory


def _aligned(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]
