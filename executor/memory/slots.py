"""Slots: the position of each tensor in the lists of its chunk."""

from __future__ import annotations

import torch

from executor.memory.arena import PLACES, Arena
from executor.memory.slices import part_of
from pstar_sim.core.step import Place

__all__ = ["Slots"]

GPU = Place.GPU


class Slots:
    """The positions of tensors in the lists of their chunks.

    Attributes:
        parts: tensor -> its part in this rank's slice of its chunk.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.layout = arena.layout
        self._slot = {s.tensor: (c.index, s.offset, s.numel) for c in self.layout.chunks for s in c.slots}
        self.parts = {
            s.tensor: part_of(self.layout, c.index, s.offset, s.numel, arena.rank)
            for c in self.layout.chunks
            for s in c.slots
        }

    def chunk_of(self, tensor: int) -> int:
        return self._slot[tensor][0]

    def at(self, place: Place, tensor: int, list_name: str) -> torch.Tensor:
        """Returns a flat view of one tensor's part of a list of its chunk. On several ranks it has only the elements in
        this rank's slice, possibly none."""
        chunk, part = self._slot[tensor][0], self.parts[tensor]
        return self.arena.at(place, chunk, list_name)[part.offset : part.offset + part.numel]

    def source(self, tensor: int, list_name: str) -> torch.Tensor:
        """Returns the same view in the first place that has the list: the host where both have it."""
        chunk = self._slot[tensor][0]
        return self.at(next(p for p in PLACES if self.arena.has(p, chunk, list_name)), tensor, list_name)

    def whole(self, tensor: int, list_name: str) -> torch.Tensor:
        """Returns a flat view of a whole tensor in "param" or "grad" on the gpu, with the other ranks' slices
        present.
        """
        chunk, offset, numel = self._slot[tensor]
        return self.arena.payloads.whole(chunk, list_name)[offset : offset + numel]

    def put(self, place: Place, tensor: int, list_name: str, value: torch.Tensor, first: int = 0) -> None:
        """Write values (any shape) into a list, from element `first` of the tensor on: all values where the whole list
        is present, else those in this rank's slice."""
        part, flat = self.parts[tensor], value.reshape(-1)
        begin, end = max(first, part.skip), min(first + flat.numel(), part.skip + part.numel)
        if begin < end:
            self.at(place, tensor, list_name)[begin - part.skip : end - part.skip].copy_(
                flat[begin - first : end - first]
            )
        chunk = self._slot[tensor][0]
        if self.arena.sliced and place is GPU and list_name == "param" and self.arena.has(GPU, chunk, "remote"):
            self.whole(tensor, list_name)[first : first + flat.numel()].copy_(flat)

    def parts_of_ranks(self, tensor: int) -> list[int]:
        chunk, offset, numel = self._slot[tensor]
        return [part_of(self.layout, chunk, offset, numel, rank).numel for rank in range(self.layout.ranks)]
