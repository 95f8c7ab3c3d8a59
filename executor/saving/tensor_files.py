"""The safetensors format, a piece at a time: neither side holds a whole tensor.

The reader copies with `pread` into one buffer; nothing is mapped, so no page counts as the process's memory. The
writer's rows make elements on request.

[Note: checksums] XXH3 of 64 bits, by xxhash: on one core faster than memory is copied, where zlib's CRC32 is about as
slow as a disk. It is of a whole file, taken as it is written.

Format: https://huggingface.co/docs/safetensors; every byte belongs to exactly one tensor.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from pstar_sim.core.workspace import PIECE_BYTES
from pstar_sim.errors import WeightsError

LONGEST_HEADER_BYTES = 100 << 20

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def piece_buffer(size_bytes: int = PIECE_BYTES) -> torch.Tensor:
    """Returns uint8 [size_bytes] on the host."""
    return torch.empty(size_bytes, dtype=torch.uint8)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Of a contiguous uint8 tensor on the host, whose storage cannot be resized from then on."""
    return memoryview(tensor.numpy())  # type: ignore[arg-type]


@dataclass(frozen=True)
class StoredFile:
    """xxh3_64: of the file as written, in hexadecimal, "" for none ([Note: checksums])."""

    bytes: int
    xxh3_64: str


def stored_file(path: Path, buffer: torch.Tensor) -> StoredFile:
    """As it is now, read through `buffer` (uint8). Raises OSError."""
    checksum, size, view = xxhash.xxh3_64(), 0, bytes_of(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(view):
            checksum.update(view[:count])
            size += count
    return StoredFile(size, checksum.hexdigest())


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Bytes [start, stop).

    dtype: None where torch does not know it (`code`).
    """

    code: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class TensorFile:
    """Raises WeightsError for a file that is missing, truncated, too long, or of another format."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self.size_bytes = os.fstat(file.fileno()).st_size
                header, self.metadata, first = self._read_header(file)
        except OSError as error:
            raise WeightsError(f"{self.path} cannot be read: {error.strerror or error}") from error
        self.entries = {name: self._entry(name, row, first) for name, row in header.items()}
        self._check_bytes(first)

    def _read_header(self, file: Any) -> tuple[dict[str, Any], dict[str, str], int]:
        word = file.read(8)
        if len(word) < 8:
            raise WeightsError(
                f"{self.path} is {self.size_bytes} bytes, too short for a safetensors file; copy it again"
            )
        (length,) = struct.unpack("<Q", word)
        if length > LONGEST_HEADER_BYTES or length > self.size_bytes - 8:
            raise WeightsError(
                f"{self.path} is not a whole safetensors file: its header claims {length} bytes, the file has "
                f"{self.size_bytes}; copy it again, or convert it (model.save_pretrained writes safetensors)"
            )
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise WeightsError(f"{self.path} is corrupt: its header is not JSON ({error}); copy it again") from error
        if not isinstance(header, dict):
            raise WeightsError(f"{self.path} is corrupt: its header is not a table of tensors; copy it again")
        metadata = header.pop("__metadata__", None)
        return header, dict(metadata) if isinstance(metadata, dict) else {}, 8 + length

    def _entry(self, name: str, row: Any, first: int) -> StoredTensor:
        try:
            code, shape, (start, stop) = row["dtype"], tuple(row["shape"]), row["data_offsets"]
            sound = (
                isinstance(code, str)
                and all(type(n) is int and n >= 0 for n in shape)
                and type(start) is int
                and type(stop) is int
            )
        except (TypeError, KeyError, ValueError):
            sound = False
        if not sound:
            raise WeightsError(f"{self.path} is corrupt: its header does not describe tensor {name!r}; copy it again")
        entry = StoredTensor(code, _DTYPES.get(code), shape, first + start, first + stop)
        if entry.dtype is not None and entry.stop - entry.start != entry.numel * entry.dtype.itemsize:
            raise WeightsError(
                f"{self.path} is corrupt: tensor {name!r} of shape {list(shape)} in {code} has "
                f"{entry.stop - entry.start} bytes; copy it again"
            )
        return entry

    def _check_bytes(self, first: int) -> None:
        reached = first
        for name, entry in sorted(self.entries.items(), key=lambda item: (item[1].start, item[1].stop)):
            if entry.start != reached or entry.stop < entry.start:
                raise WeightsError(
                    f"{self.path} is corrupt: tensor {name!r} begins at byte {entry.start}, the tensor before it ends "
                    f"at {reached}; copy it again"
                )
            reached = entry.stop
        if reached != self.size_bytes:
            what = "truncated" if reached > self.size_bytes else "not sound"
            raise WeightsError(
                f"{self.path} is {what}: its tensors end at byte {reached}, the file has {self.size_bytes}; copy it "
                "again"
            )

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """A descriptor for `pieces`; the page cache is left at the end."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise WeightsError(f"{self.path} cannot be read: {error.strerror or error}") from error
        try:
            yield descriptor
        finally:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def pieces(
        self, descriptor: int, name: str, buffer: torch.Tensor, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Elements [start, stop), flat, as (first element, tensor in the file's dtype), each a view of `buffer`
        (uint8), valid until the next. Raises WeightsError where the bytes end early."""
        entry = self.entries[name]
        if entry.dtype is None:
            raise WeightsError(self._unread(name))
        width = entry.dtype.itemsize
        most = buffer.numel() // width
        last = entry.numel if stop is None else stop
        for first in range(start, last, most):
            count = min(most, last - first)
            piece = buffer[: count * width]
            self._read(descriptor, bytes_of(piece), entry.start + first * width)
            yield first, piece.view(entry.dtype)

    def _read(self, descriptor: int, into: memoryview, offset: int) -> None:
        while into:
            try:
                count = os.preadv(descriptor, [into], offset)
            except OSError as error:
                raise WeightsError(f"{self.path} cannot be read: {error.strerror or error}") from error
            if count == 0:
                raise WeightsError(f"{self.path} ends at byte {offset}: it changed while it was read; copy it again")
            into, offset = into[count:], offset + count

    def _unread(self, name: str) -> str:
        known = f"it reads {', '.join(_DTYPES)}"
        return f"{self.path}: tensor {name!r} is in {self.entries[name].code}, which this version cannot read; {known}"

    def read(self, name: str) -> torch.Tensor:
        """For small tensors, in memory of their own."""
        entry = self.entries[name]
        size = entry.stop - entry.start
        if entry.dtype is None:
            raise WeightsError(self._unread(name))
        if not size:
            return torch.empty(entry.shape, dtype=entry.dtype)
        raw = piece_buffer(size)
        with self.opened() as descriptor:
            self._read(descriptor, bytes_of(raw), entry.start)
        return raw.view(entry.dtype).reshape(entry.shape)


@dataclass(frozen=True)
class TensorToStore:
    """pieces: called once, when written; yields the elements in order, flat, in tensors of any number, dtype and
    device, as short as possible.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[torch.Tensor]]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensor_file(
    path: Path, rows: Sequence[TensorToStore], buffer: torch.Tensor, metadata: Mapping[str, str] | None = None
) -> StoredFile:
    """Writes the rows to a new file, flushed to the disk.

    Elements go through `buffer` (uint8): after `Tensor.numpy()` on a chunk, its storage could not be evicted. Raises
    OSError (disk full, ...), AssertionError if a row gives another number of elements than its shape."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    reached = 0
    for row in rows:
        header[row.name] = {
            "dtype": _CODES[row.dtype],
            "shape": list(row.shape),
            "data_offsets": [reached, reached + row.size_bytes],
        }
        reached += row.size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with _NewFile(path) as file:
        file.write(memoryview(struct.pack("<Q", len(text)) + text))
        for row in rows:
            left = math.prod(row.shape)
            for tensor in row.pieces():
                left -= tensor.numel()
                write_elements(file.write, tensor, row.dtype, buffer)
            assert left == 0, f"{row.name}: {left} elements of {row.shape} did not come"
        return file.flushed()


def write_text_file(path: Path, text: str) -> StoredFile:
    """Raises OSError."""
    with _NewFile(path) as file:
        file.write(memoryview(text.encode()))
        return file.flushed()


class _NewFile:
    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._checksum = xxhash.xxh3_64()
        self._size_bytes = 0

    def __enter__(self) -> _NewFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def write(self, content: memoryview) -> None:
        self._checksum.update(content)
        self._size_bytes += len(content)
        write_whole(self._descriptor, content)

    def flushed(self) -> StoredFile:
        """Its pages leave the page cache: they are not read again."""
        os.fsync(self._descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return StoredFile(self._size_bytes, self._checksum.hexdigest())


def write_whole(descriptor: int, content: memoryview) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def write_elements(
    write: Callable[[memoryview], object], tensor: torch.Tensor, dtype: torch.dtype, buffer: torch.Tensor
) -> None:
    """Calls `write` with the elements in this dtype, piece by piece, in `buffer` (uint8)."""
    flat = tensor.detach().reshape(-1)
    most = buffer.numel() // dtype.itemsize
    for start in range(0, flat.numel(), most):
        part = flat[start : start + most]
        piece = buffer[: part.numel() * dtype.itemsize]
        piece.view(dtype).copy_(part)
        write(bytes_of(piece))
