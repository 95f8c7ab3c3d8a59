"""Values: where parameters can be read, and how a working list is restored from the master copy."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from executor.memory.arena import Arena
from executor.memory.chunk_state import ChunkState
from executor.memory.slots import Slots
from pstar_sim.core.step import Place, Queue
from pstar_sim.errors import PlanError

__all__ = ["Changed", "ParameterValues"]

GPU, HOST = Place.GPU, Place.HOST


class Changed(Protocol):
    """Type of `ParameterValues.changed`."""

    def __call__(self, chunk: int, tensors: Sequence[int] | None = None) -> None: ...


class ParameterValues:
    """The places where parameter values are current.

    changed(chunk, tensors): called whenever these tensors of the gpu's working list of a chunk (None: all of them)
        become, or cease to be, readable.
    """

    def __init__(self, arena: Arena, slots: Slots, chunks: Sequence[ChunkState], changed: Changed) -> None:
        self.arena = arena
        self.slots = slots
        self.chunks = chunks
        self.changed = changed

    def holds(self, chunk: int) -> bool:
        """Returns whether the gpu holds all current values of the chunk."""
        return self.readable(chunk) and self.arena.has(GPU, chunk, "param")

    def readable(self, chunk: int) -> bool:
        """Returns whether the gpu's working list holds current values, except for the tensors in `overwritten`."""
        state = self.chunks[chunk]
        return GPU in state.current and (state.whole or not self.arena.sliced)

    def overwritten(self, chunk: int) -> Collection[int]:
        """Returns the tensors of the chunk whose slot on the gpu holds a gradient in place of the value."""
        return self.chunks[chunk].gradients.get((GPU, "param"), ())

    def restore(self, place: Place, tensor: int) -> None:
        """Rewrite the slot of a working list from the master copy, which may be at the other place."""
        chunk = self.slots.chunk_of(tensor)
        source = place if self.arena.has(place, chunk, "param32") else (HOST if place is GPU else GPU)
        value, target = self.slots.at(source, tensor, "param32"), self.slots.at(place, tensor, "param")
        if source is place:
            target.copy_(value)
        else:
            self.arena.backend.copy(target, value, Queue.H2D if place is GPU else Queue.D2H)
        self.arena.categories.rewritten(place, chunk, "param")

    def rewrite(self, place: Place, chunk: int) -> None:
        """Rewrite the working list at the place from the master copy, which may be at the other place. Raises PlanError
        if there is no master copy."""
        arena, state = self.arena, self.chunks[chunk]
        other = HOST if place is GPU else GPU
        target = arena.at(place, chunk, "param")
        if arena.has(place, chunk, "param32"):
            target.copy_(arena.at(place, chunk, "param32"))
        elif arena.has(other, chunk, "param32"):
            self.arena.backend.copy(target, arena.at(other, chunk, "param32"), Queue.H2D if place is GPU else Queue.D2H)
        else:
            raise PlanError(f"the parameters of chunk {chunk} are lost: neither place holds them")
        arena.categories.rewritten(place, chunk, "param")
        state.current.add(place)
        self.changed(chunk)
