"""Chunk layout: which parameter lives where in which chunk.

STUB SIGNATURES, to be completed by the owner of core/.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pstar_sim.workload.workload import Workload

__all__ = ["Chunk", "Layout", "Slot", "build_layout"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Tensor (index in the workload) occupies elements [offset, offset + numel) of its chunk."""

    tensor: int
    offset: int
    numel: int


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A run of consecutive parameters of one dtype, one optimizer group, all frozen or all trainable.

    numel: elements of the payload (waste included). small: holds tensors too small to be worth moving; stays resident.
    """

    index: int
    dtype: str
    numel: int
    slots: tuple[Slot, ...]
    frozen: bool = False
    small: bool = False
    group: int = 0

    def payload_bytes(self, list_name: str) -> int:
        """Bytes of one of its lists: "param" and "grad" in the working dtype, every other list 4 bytes an element
        (state lists per OptimizerSpec: see Layout.payload_bytes)."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All chunks of a model, in order of first use; small chunks first."""

    chunk_bytes: int
    chunks: tuple[Chunk, ...]
    state_bytes: tuple[tuple[str, int], ...]

    @cached_property
    def chunk_of(self) -> dict[int, int]:
        """Tensor index -> chunk index."""
        return {slot.tensor: c.index for c in self.chunks for slot in c.slots}

    @cached_property
    def waste(self) -> float:
        """Share of payload elements that hold no parameter."""
        used = sum(s.numel for c in self.chunks for s in c.slots)
        total = sum(c.numel for c in self.chunks)
        return 1 - used / total

    def payload_bytes(self, chunk: int, list_name: str) -> int:
        raise NotImplementedError


def build_layout(workload: Workload, *, chunk_bytes: int | None = None) -> Layout:
    """Search the chunk size for least waste (or take `chunk_bytes` of the param list) and pack."""
    raise NotImplementedError
