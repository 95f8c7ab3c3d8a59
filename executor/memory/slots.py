"""Where each tensor is in the lists of its chunk.

[Note: fields] A list of 8-bit states has a byte per element, and behind them an fp32 scale per block; one of row and
column factors has those of its first tensor, its second, and so on. What it keeps of a tensor are its fields:
"momentum" (the codes) and "momentum.scale", "variance.row" and "variance.column". Other lists have one, of their own
name.
"""

from __future__ import annotations

from math import prod

import torch

from executor.devices.updates import Span
from executor.memory.arena import PLACES, Arena
from executor.memory.payloads import dtype_of
from executor.memory.slices import SlicePart, part_of
from pstar_sim.core.layout import Layout
from pstar_sim.core.step import Place
from pstar_sim.workload.optimizers import StateList, States

GPU = Place.GPU
SCALE, ROW, COLUMN = ".scale", ".row", ".column"


def list_of(field: str) -> str:
    return field.partition(".")[0]


def _fields(row: StateList) -> tuple[str, ...]:
    if row.per_block:
        return row.name, row.name + SCALE
    return (row.name + ROW, row.name + COLUMN) if row.per_row else (row.name,)


def fields_of(states: States) -> tuple[str, ...]:
    return tuple(field for row in states.lists for field in _fields(row))


class Slots:
    """parts: tensor -> its part in this rank's slice."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.layout = arena.layout
        self._slot = {s.tensor: (c.index, s.offset, s.numel) for c in self.layout.chunks for s in c.slots}
        self.parts = {
            s.tensor: part_of(self.layout, c.index, s.offset, s.numel, arena.rank)
            for c in self.layout.chunks
            for s in c.slots
        }
        self._factors = _factors(self.layout)

    def chunk_of(self, tensor: int) -> int:
        return self._slot[tensor][0]

    def part(self, tensor: int, field: str) -> SlicePart:
        """In this rank's slice."""
        return self._part(tensor, field, self.parts[tensor])

    def _part(self, tensor: int, field: str, part: SlicePart) -> SlicePart:
        if field.endswith((ROW, COLUMN)):
            return self._factors[tensor, field]
        if not field.endswith(SCALE):
            return part
        block = self.layout.states_of(self.chunk_of(tensor)).block
        return SlicePart(part.offset // block, -(-part.numel // block), part.skip // block)

    def shape(self, tensor: int, field: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        shape = self.arena.plan.workload.tensors[tensor].shape
        if field.endswith(SCALE):
            return (-(-prod(shape) // self.layout.states_of(self.chunk_of(tensor)).block),)
        if field.endswith(ROW):
            return shape[:-1]
        return (*shape[:-2], shape[-1]) if field.endswith(COLUMN) else shape

    def dtype(self, chunk: int, field: str) -> torch.dtype:
        return torch.float32 if field.endswith(SCALE) else dtype_of(self.layout, chunk, list_of(field))

    def flat(self, place: Place, chunk: int, field: str) -> torch.Tensor:
        """Of all tensors of the chunk, both fields of factors."""
        payload, codes = self.arena.at(place, chunk, list_of(field)), self.layout.slice_numel(chunk)
        if payload.dtype is not torch.uint8:
            return payload
        return payload[codes:].view(torch.float32) if field.endswith(SCALE) else payload[:codes]

    def span(self, chunk: int, field: str) -> Span:
        """From elements of the slice to those of `flat`, of factors for whole tensors."""
        if field.endswith((ROW, COLUMN)):
            parts = {s.offset: self._factors[s.tensor, field] for s in self.layout.chunks[chunk].slots}
            return lambda start, stop: (parts[start].offset, parts[start].offset + parts[start].numel)
        block = self.layout.states_of(chunk).block if field.endswith(SCALE) else 1
        return lambda start, stop: (start // block, -(-stop // block))

    def at(self, place: Place, tensor: int, field: str) -> torch.Tensor:
        """A flat view of the tensor's part of a field: the elements in this rank's slice, possibly none."""
        part = self.part(tensor, field)
        return self.flat(place, self._slot[tensor][0], field)[part.offset : part.offset + part.numel]

    def source(self, tensor: int, field: str) -> torch.Tensor:
        """In the first place that has the list: the host where both do."""
        chunk = self._slot[tensor][0]
        return self.at(next(p for p in PLACES if self.arena.has(p, chunk, list_of(field))), tensor, field)

    def whole(self, tensor: int, list_name: str) -> torch.Tensor:
        """A flat view of a whole tensor in "param" or "grad" on the gpu, with the others' slices present."""
        chunk, offset, numel = self._slot[tensor]
        return self.arena.payloads.whole(chunk, list_name)[offset : offset + numel]

    def put(self, place: Place, tensor: int, field: str, value: torch.Tensor, first: int = 0) -> None:
        """Values (any shape) from element `first` on: all where the whole list is present, else those in this rank's
        slice."""
        part, flat = self.part(tensor, field), value.reshape(-1)
        begin, end = max(first, part.skip), min(first + flat.numel(), part.skip + part.numel)
        if begin < end:
            self.at(place, tensor, field)[begin - part.skip : end - part.skip].copy_(flat[begin - first : end - first])
        chunk = self._slot[tensor][0]
        if self.arena.sliced and place is GPU and field == "param" and self.arena.has(GPU, chunk, "remote"):
            self.whole(tensor, field)[first : first + flat.numel()].copy_(flat)

    def parts_of_ranks(self, tensor: int, field: str) -> list[int]:
        chunk, offset, numel = self._slot[tensor]
        parts = (part_of(self.layout, chunk, offset, numel, rank) for rank in range(self.layout.ranks))
        return [self._part(tensor, field, part).numel for part in parts]


def _factors(layout: Layout) -> dict[tuple[int, str], SlicePart]:
    parts: dict[tuple[int, str], SlicePart] = {}
    for chunk in layout.chunks:
        rows = [] if chunk.frozen else [row for row in layout.states_of(chunk.index).lists if row.per_row]
        for row in rows:
            offset = 0
            for slot in chunk.slots:
                shape = slot.shape
                for field, numel in ((ROW, prod(shape[:-1])), (COLUMN, prod(shape[:-2]) * shape[-1])):
                    parts[slot.tensor, row.name + field] = SlicePart(offset, numel, 0)
                    offset += numel
    return parts
