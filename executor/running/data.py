"""Real text as bytes, cut into sequences.

A byte is a token (0..255), so models with a vocabulary of at least 256 read any folder, by default the Python standard
library.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pstar_sim.errors import ModelError

_SUFFIXES = (".py", ".txt", ".md", ".rst", ".json", ".html", ".csv", ".c", ".h", ".tex")
_READ_AT_MOST_BYTES = 8_000_000


@dataclass(frozen=True)
class ByteText:
    """bytes: uint8 [n]."""

    folder: Path
    bytes: torch.Tensor

    @classmethod
    def read(cls, folder: Path) -> ByteText:
        """The folder's text files by name, up to 8 MB. Raises ModelError without folder or text."""
        if not folder.is_dir():
            raise ModelError(
                f"text folder {str(folder)!r} is not a folder; give --data text:FOLDER a folder with text files"
            )
        parts: list[bytes] = []
        size = 0
        for file in _texts(folder):
            content = file.read_bytes()
            parts.append(content)
            size += len(content)
            if size >= _READ_AT_MOST_BYTES:
                break
        if size < 2:
            raise ModelError(
                f"text folder {str(folder)!r} holds no text; give a folder with files {', '.join(_SUFFIXES)}"
            )
        return cls(folder, torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8))

    @property
    def digest(self) -> str:
        return hashlib.blake2b(bytes(self.bytes.numpy()), digest_size=8).hexdigest()

    def windows(self, *, batch: int, sequence: int, seed: int, skip: int = 0) -> Iterator[torch.Tensor]:
        """Endless int64 [batch, sequence], drawn with the seed.

        skip: sequences drawn before.
        """
        if len(self.bytes) <= sequence:
            raise ModelError(
                f"text in {str(self.folder)!r} is {len(self.bytes)} bytes, shorter than one sequence of {sequence}; "
                "give a folder with more text"
            )
        draw = torch.Generator().manual_seed(seed)
        span = torch.arange(sequence)
        torch.randint(0, len(self.bytes) - sequence, (skip, 1), generator=draw)
        while True:
            starts = torch.randint(0, len(self.bytes) - sequence, (batch, 1), generator=draw)
            yield self.bytes[starts + span].long()


def _texts(folder: Path) -> Iterator[Path]:
    try:
        entries = sorted(folder.iterdir(), key=lambda entry: entry.name)
    except PermissionError:
        return
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink():
            yield from _texts(entry)
        elif entry.suffix in _SUFFIXES and entry.is_file():
            yield entry


def open_data(spec: str | None) -> ByteText:
    """spec: "text:FOLDER"; None: the standard library's source."""
    if spec is None:
        return ByteText.read(Path(sysconfig.get_paths()["stdlib"]))
    kind, colon, where = spec.partition(":")
    if kind != "text" or not colon or not where:
        raise ModelError(f"--data {spec!r} is not known; write text:FOLDER, a folder of text files")
    return ByteText.read(Path(where).expanduser())


def batches_like(example: Any, text: ByteText, *, vocabulary: int | None, seed: int, skip: int = 0) -> Iterator[Any]:
    """Endless, shaped as `example`: a dict with integer "input_ids" [batch, sequence] gets text (and labels, if it has
    them), anything else is repeated.

    skip: sequences drawn before.
    """
    if not isinstance(example, Mapping) or "input_ids" not in example:
        while True:
            yield example
    if vocabulary is not None and vocabulary < 256:
        raise ModelError(
            f"the model's vocabulary is {vocabulary}; byte-level text needs at least 256 tokens; train another model"
        )
    rows, columns = example["input_ids"].shape
    for tokens in text.windows(batch=rows, sequence=columns, seed=seed, skip=skip):
        made = {**example, "input_ids": tokens}
        if "labels" in example and example["labels"].shape == tokens.shape:
            made["labels"] = tokens
        yield made
