"""Arrivals: who has to be on the gpu off the plan, brought when it is read."""

from __future__ import annotations

from collections.abc import Iterable

from executor.off_plan.in_use import InUse
from executor.off_plan.inline import Inline
from executor.off_plan.room import Room
from executor.session.hosting import BytesHost
from pstar_sim.core.step import Place

__all__ = ["Arrivals"]

GPU = Place.GPU


class Arrivals:
    def __init__(self, host: BytesHost, inline: Inline, in_use: InUse, room: Room) -> None:
        self.host = host
        self.inline = inline
        self.in_use = in_use
        self.room = room

    def held(self, chunk: int) -> bool:
        """The working list may be read on the gpu."""
        contents = self.host.contents
        return contents.values.holds(chunk) and not contents.chunks[chunk].where(GPU, "param")

    def ensure(self, chunks: Iterable[int], *, required: bool = True) -> None:
        """Make the working lists of `chunks` readable on the gpu; those not `required` only if there is room. Raises
        DoesNotFit if there is none."""
        host = self.host
        wanted = set(chunks)
        for chunk in sorted(wanted):
            if self.held(chunk):
                continue
            if not host.arena.has(GPU, chunk, "param"):
                size = host.plan.layout.payload_bytes(chunk, "param")
                self.room.make(size, needed=wanted, strict=required)
                if not required and host.arena.room_on_gpu() < size:
                    continue
            if GPU not in host.contents.chunks[chunk].current:
                self.inline.bring(GPU, chunk, "param", needed=wanted)
            if host.arena.sliced:
                self._gather(chunk, wanted)
        self.in_use.add(wanted)

    def _gather(self, chunk: int, wanted: set[int]) -> None:
        """The other ranks' slices come."""
        if not self.host.arena.has(GPU, chunk, "remote"):
            self.room.make(self.host.plan.layout.payload_bytes(chunk, "remote"), needed=wanted)
        self.inline.bring(GPU, chunk, "remote", needed=wanted)
