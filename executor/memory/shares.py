"""Moves gradients tensor by tensor, off the plan, whose steps move lists.

A tensor's share goes to the host, where it waits for the update; a gradient in two lists for a while is marked
(`ChunkState.adding`).
"""

from __future__ import annotations

import torch

from executor.memory.contents import Contents
from pstar_sim.core.step import Place, Queue
from pstar_sim.workload.optimizers import MASTER_LIST

GPU, HOST = Place.GPU, Place.HOST


class Shares:
    """kept: tensor -> gradient, in memory of its own, where no list of its chunk could take it."""

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self.kept: dict[int, torch.Tensor] = {}

    def waits_in(self, chunk: int) -> str | None:
        """The list on the host that takes gradients of the chunk until the update."""
        has = self.contents.arena.has
        if has(HOST, chunk, "grad32"):
            return "grad32"
        if has(HOST, chunk, "grad"):
            return "grad"
        # In place: the master copy can restore the parameters.
        return "param" if has(HOST, chunk, "param") and has(HOST, chunk, MASTER_LIST) else None

    def accept(self, tensor: int, gradient: torch.Tensor) -> None:
        """Add a gradient (any shape): to the chunk's sum on the gpu if it is there, else on the host."""
        contents, flat = self.contents, gradient.reshape(-1)
        chunk = contents.slots.chunk_of(tensor)
        if contents.arena.has(GPU, chunk, "grad32"):
            mine = contents.chunks[chunk].where(GPU, "grad32")
            contents.gradients.put(chunk, mine, tensor, contents.slots.at(GPU, tensor, "grad32"), flat)
        else:
            self.to_host(tensor, flat)

    def to_host(self, tensor: int, gradient: torch.Tensor) -> None:
        """Add a flat gradient to its list on the host."""
        contents = self.contents
        chunk = contents.slots.chunk_of(tensor)
        list_name = self.waits_in(chunk)
        if list_name is None:
            kept, arrived = self.kept.get(tensor), self._arrived(gradient)
            self.kept[tensor] = arrived if kept is None else kept + arrived
            return
        mine = contents.chunks[chunk].where(HOST, list_name)
        target = contents.slots.at(HOST, tensor, list_name)
        if tensor in mine:
            contents.gradients.put(chunk, mine, tensor, target, self._arrived(gradient))
        else:
            mine.add(tensor)
            contents.arena.backend.copy(target, gradient, Queue.D2H)

    def _arrived(self, gradient: torch.Tensor) -> torch.Tensor:
        arrived = torch.empty(gradient.shape, dtype=gradient.dtype)
        self.contents.arena.backend.copy(arrived, gradient, Queue.D2H)
        return arrived

    def leave_gpu(self, chunk: int, list_name: str, *, restored: bool) -> None:
        """Every gradient in the list goes to the host.

        restored: slots of a working list get their parameters back from the master copy; else the gpu's copy is no
            longer current.
        """
        contents = self.contents
        state = contents.chunks[chunk]
        mine = state.where(GPU, list_name)
        if not mine:
            return
        if list_name == "param" and not restored:
            state.current.discard(GPU)
        for tensor in sorted(mine):
            state.adding = True
            self.to_host(tensor, contents.slots.at(GPU, tensor, list_name))
            if list_name == "param" and restored:
                contents.values.restore(GPU, tensor)
            mine.discard(tensor)
            state.adding = False
        if list_name == "param":
            contents.values.changed(chunk)

    def kept_to_host(self, chunk: int) -> None:
        """Into a list on the host that has memory by now."""
        state = self.contents.chunks[chunk]
        for slot in self.contents.layout.chunks[chunk].slots:
            if slot.tensor in self.kept:
                state.adding = True
                self.to_host(slot.tensor, self.kept.pop(slot.tensor))
                state.adding = False

    def kept_to_param(self, tensor: int, place: Place) -> None:
        """Copies a kept gradient over its parameter, which the update that follows writes anew."""
        contents = self.contents
        mine = contents.chunks[contents.slots.chunk_of(tensor)].where(place, "param")
        target = contents.slots.at(place, tensor, "param")
        mine.add(tensor)
        if place is GPU:
            contents.arena.backend.copy(target, self.kept[tensor], Queue.H2D)
        else:
            target.copy_(self.kept[tensor])
        del self.kept[tensor]

    def forget(self) -> None:
        self.contents.gradients.forget()
        self.kept.clear()
