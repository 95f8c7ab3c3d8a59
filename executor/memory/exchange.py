"""Gathers slices from the other ranks, and sums gradients over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from executor.devices.updates import norm_of
from executor.memory.arena import Arena
from executor.memory.chunk_state import ChunkState
from executor.memory.gradients import ChunkGradients
from executor.memory.slots import Slots
from executor.memory.values import ParameterValues
from pstar_sim.core.step import OTHERS, Place, Queue
from pstar_sim.errors import PlanError

GPU = Place.GPU


class SliceWire(Protocol):
    """The collectives that payloads need (`distributed.collectives`)."""

    def gather(self, flat: torch.Tensor) -> object: ...

    def reduce_scatter(self, flat: torch.Tensor) -> object: ...

    def exchange(self, row: torch.Tensor) -> torch.Tensor: ...


class Exchange:
    """wire: None on one rank.

    Attributes:
        summed_norms: tensor -> norm of (this rank's part of) its gradient's latest sum.
    """

    def __init__(
        self,
        arena: Arena,
        slots: Slots,
        chunks: Sequence[ChunkState],
        values: ParameterValues,
        gradients: ChunkGradients,
        wire: SliceWire | None,
    ) -> None:
        self.arena = arena
        self.slots = slots
        self.chunks = chunks
        self.values = values
        self.gradients = gradients
        self.wire = wire
        self.summed_norms: dict[int, torch.Tensor] = {}

    def gather(self, chunk: int, list_name: str) -> None:
        """Slices of a gradient's sum, where nothing is sliced."""
        state, wire = self.chunks[chunk], self._to_others(chunk)
        issue = self.arena.backend.issue
        if list_name not in OTHERS:
            flat = self.arena.at(GPU, chunk, list_name)
            issue(lambda: wire.gather(flat))
            self._note_norms(state.where(GPU, list_name), list_name)
            return
        self._require_own(chunk)
        with self.arena.payloads.steady(chunk):
            whole = self.arena.payloads.whole(chunk, "param")
            issue(lambda: wire.gather(whole))
        self.arena.categories.rewritten(GPU, chunk, list_name)
        state.whole = True
        self.values.changed(chunk)

    def put_together(self, chunk: int, slices: torch.Tensor) -> None:
        """slices: [ranks, bytes of a slice] on the host; this rank's own is not read."""
        state, backend, size = self.chunks[chunk], self.arena.backend, self.arena.layout.slice_numel(chunk)
        self._require_own(chunk)
        with self.arena.payloads.steady(chunk):
            whole = self.arena.payloads.whole(chunk, "param")
            for rank, row in enumerate(slices):
                if rank != self.arena.rank:
                    backend.copy(whole[rank * size : (rank + 1) * size], row.view(whole.dtype), Queue.H2D)
            backend.fence(Queue.H2D)
        self.arena.categories.rewritten(GPU, chunk, "remote")
        state.whole = True
        self.values.changed(chunk)

    def _require_own(self, chunk: int) -> None:
        state = self.chunks[chunk]
        if GPU not in state.current or state.where(GPU, "param"):
            raise PlanError(f"gather of chunk {chunk}: this rank's own slice on the gpu does not hold parameters")

    def reduce_scatter(self, chunk: int, list_name: str) -> None:
        """The sum over all ranks replaces this rank's slice of the gradient; others are undefined afterwards."""
        state, wire = self.chunks[chunk], self._to_others(chunk)
        own = OTHERS.get(list_name, list_name)
        mine = state.where(GPU, own)
        if not mine:
            raise PlanError(f"reduce-scatter of {list_name} of chunk {chunk}: there is no gradient on the gpu")
        issue, flat = self.arena.backend.issue, self.arena.payloads.whole(chunk, own)
        if not self.arena.sliced:
            issue(lambda: wire.reduce_scatter(flat))
            return
        if own == "param":
            state.whole = False
            self.values.changed(chunk)
        with self.arena.payloads.steady(chunk):
            issue(lambda: wire.reduce_scatter(flat))
            self._note_norms(mine, own)
            if own == "grad" and self.arena.has(GPU, chunk, "grad32"):
                self.gradients.add_on_gpu(chunk)

    def _note_norms(self, tensors: Iterable[int], list_name: str) -> None:
        slots = {tensor: self.slots.at(GPU, tensor, list_name) for tensor in tensors}

        def note() -> None:
            for tensor, flat in slots.items():
                self.summed_norms[tensor] = norm_of(flat, torch.float32)

        self.arena.backend.issue(note)

    def joined(self, tensor: int, part: torch.Tensor, field: str = "param") -> torch.Tensor:
        """A field of a whole tensor, flat, on the host. Every rank calls it."""
        if not self.arena.sliced:
            return part.to("cpu", copy=True)
        sizes = self.slots.parts_of_ranks(tensor, field)
        mine = torch.zeros(max(sizes), dtype=part.dtype, device=part.device)
        mine[: part.numel()].copy_(part)
        rows = self._to_others(self.slots.chunk_of(tensor)).exchange(mine)
        return torch.cat([row[:size] for row, size in zip(rows, sizes)]).cpu()

    def _to_others(self, chunk: int) -> SliceWire:
        if self.wire is None:
            raise PlanError(f"chunk {chunk} has to be exchanged with other ranks, and this run has only one rank")
        return self.wire
