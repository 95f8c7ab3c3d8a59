"""Where parameters can be read, and how a working list is restored."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from executor.memory.arena import PLACES, TOWARDS, Arena
from executor.memory.chunk_state import ChunkState
from executor.memory.slots import Slots
from pstar_sim.core.step import Place
from pstar_sim.errors import PlanError
from pstar_sim.workload.optimizers import MASTER_LIST

GPU = Place.GPU


class ParameterValues:
    """changed: called when tensors (None: all) of the gpu's working list become, or cease to be, readable."""

    def __init__(self, arena: Arena, slots: Slots, chunks: Sequence[ChunkState], changed: Callable[..., None]) -> None:
        self.arena = arena
        self.slots = slots
        self.chunks = chunks
        self.changed = changed

    def holds(self, chunk: int) -> bool:
        return self.readable(chunk) and self.arena.has(GPU, chunk, "param")

    def readable(self, chunk: int) -> bool:
        """Whether the gpu's working list is current, but for `overwritten`."""
        state = self.chunks[chunk]
        return GPU in state.current and (state.whole or not self.arena.sliced)

    def overwritten(self, chunk: int) -> Collection[int]:
        """Tensors whose slot on the gpu holds a gradient."""
        return self.chunks[chunk].gradients.get((GPU, "param"), ())

    def source(self, chunk: int, tensors: Collection[int]) -> tuple[Place, str]:
        """(place, list) of these tensors' current values: the working list, or the master copy. Raises PlanError if
        none has them."""
        state = self.chunks[chunk]
        for place in PLACES:
            if place in state.current and state.where(place, "param").isdisjoint(tensors):
                return place, "param"
        for place in PLACES:
            if self.arena.has(place, chunk, MASTER_LIST):
                return place, MASTER_LIST
        names = [self.arena.plan.workload.tensors[t].name for t in tensors]
        raise PlanError(f"no place holds the current value of {', '.join(map(repr, names))}")

    def restore(self, place: Place, tensor: int) -> None:
        """Rewrites one slot from the master copy at any place."""
        chunk, at = self.slots.chunk_of(tensor), self.slots.at
        self._cast(place, chunk, lambda where, list_name: at(where, tensor, list_name))

    def rewrite(self, place: Place, chunk: int) -> None:
        """Rewrites the whole working list. Raises PlanError without a master copy."""
        self._cast(place, chunk, lambda where, list_name: self.arena.at(where, chunk, list_name))
        self.chunks[chunk].current.add(place)
        self.changed(chunk)

    def _cast(self, place: Place, chunk: int, at: Callable[[Place, str], torch.Tensor]) -> None:
        arena = self.arena
        source = place if arena.has(place, chunk, MASTER_LIST) else arena.elsewhere(place, chunk, MASTER_LIST)
        if source is None:
            raise PlanError(f"the parameters of chunk {chunk} are lost: no place holds them")
        target, value = at(place, "param"), at(source, MASTER_LIST)
        if source is place or GPU not in (source, place):
            target.copy_(value)
        else:
            arena.backend.copy(target, value, TOWARDS[place])
        arena.categories.rewritten(place, chunk, "param")
