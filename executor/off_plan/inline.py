"""Steps in no plan, performed at once while the queues stand still: queued, they and the plan's would wait for each
other. What no step expresses is a named operation of contents (`rewrite`, `put_together`, `shares.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from executor.distributed.ranks import Ranks
from executor.memory.update import Update
from executor.session.state import PlanBytes
from pstar_sim.core import effects
from pstar_sim.core.plan import Resident
from pstar_sim.core.step import Kind, Place, Queue, Step
from pstar_sim.errors import PlanError, PstarError

GPU, HOST, NVME = Place.GPU, Place.HOST, Place.NVME
NO_ID = -1
_COPIES = {
    GPU: (Queue.H2D, Kind.FETCH),
    HOST: (Queue.D2H, Kind.WRITEBACK),
    NVME: (Queue.NVME, Kind.NVME_WRITE),
}
"""Place -> queue and kind of the step that copies a list there."""
_UPDATES = {GPU: (Queue.COMPUTE, Kind.GPU_UPDATE), HOST: (Queue.ADAM, Kind.CPU_UPDATE)}
"""Place -> queue and kind of the step that updates there."""


class Inline:
    def __init__(self, run: PlanBytes, ranks: Ranks | None) -> None:
        self.layout = run.plan.layout
        self.arena = run.arena
        self.contents = run.contents
        self.ranks = ranks

    # -- steps --------------------------------------------------------------------------------------------------------

    def alloc(self, place: Place, chunk: int, list_name: str) -> Step:
        return self._step(Queue.COMPUTE, Kind.ALLOC, chunk, list_name, place)

    def copy(self, place: Place, chunk: int, list_name: str) -> Step:
        """The step that copies a list to the place: to the host from disks where the gpu does not have it."""
        if place is HOST and not self._on_gpu(chunk, list_name):
            return self._step(Queue.NVME, Kind.NVME_READ, chunk, list_name)
        return self._step(*_COPIES[place], chunk, list_name)

    def _on_gpu(self, chunk: int, list_name: str) -> bool:
        state = self.contents.chunks[chunk]
        current = not state.where(NVME, list_name) and (list_name != "param" or GPU in state.current)
        return not self.arena.has(NVME, chunk, list_name) or (current and self.arena.has(GPU, chunk, list_name))

    def drop(self, place: Place, chunk: int, list_name: str) -> Step:
        if place is GPU:
            return self._step(Queue.COMPUTE, Kind.DROP, chunk, list_name)
        return self._step(Queue.COMPUTE, Kind.FREE, chunk, list_name, place)

    def gather(self, chunk: int) -> Step:
        return self._step(Queue.NET, Kind.GATHER, chunk, "remote")

    def adam(self, place: Place, chunk: int) -> Step:
        return self._step(*_UPDATES[place], chunk, "param")

    def _step(self, queue: Queue, kind: Kind, chunk: int, list_name: str, place: Place | None = None) -> Step:
        size = self.layout.payload_bytes(chunk, list_name)
        return Step(id=NO_ID, queue=queue, kind=kind, bytes=size, chunk=chunk, list=list_name, place=place)

    # -- performing ---------------------------------------------------------------------------------------------------

    def perform(
        self,
        step: Step,
        update: Update | None = None,
        norms: Callable[[], Iterable[torch.Tensor]] = tuple,
    ) -> None:
        """Raises OutOfMemory, with nothing changed, if the accelerator refuses.

        update, norms: for Adam.
        """
        contents, chunk = self.contents, step.chunk
        assert chunk is not None
        state = contents.chunks[chunk]
        taken = effects.takes(step)
        new = self._take(chunk, None if taken is None else taken[0], lambda: contents.begin(step))
        moves = step.kind is Kind.WRITEBACK and bool(state.where(GPU, step.list or ""))
        if moves:
            state.adding = True  # gradients are in two lists for a while
        try:
            with torch.no_grad():
                contents.work(step, update, norms)
        except Exception:  # not for an interruption: mending repairs half-done work
            if moves:
                state.adding = False
            raise
        state.hollow -= new
        if moves:
            state.adding = False
        contents.finish(step)

    def _take(self, chunk: int, taken: Resident | None, take: Callable[[], object]) -> set[tuple[Place, str]]:
        """Hollow until the caller has filled it: [Note: between two lines] in memory/chunk_state.py; nothing for a list
        with memory."""
        new = {(taken.place, taken.list)} if taken is not None and not self.arena.has_resident(taken) else set()
        hollow = self.contents.chunks[chunk].hollow
        hollow |= new
        try:
            take()
        except PstarError:
            hollow -= new
            raise
        return new

    def _fill(self, row: Resident, fill: Callable[[], object]) -> None:
        new: set[tuple[Place, str]] = set()
        if not self.arena.has_resident(row):
            new = self._take(row.chunk, row, lambda: self.arena.take(row.place, row.chunk, row.list))
        with torch.no_grad():
            fill()
        self.contents.chunks[row.chunk].hollow -= new

    # -- bringing a list ----------------------------------------------------------------------------------------------

    def bring(self, place: Place, chunk: int, list_name: str) -> None:
        """Gives the list memory and current content at the place. Raises PlanError if no place has that."""
        if list_name == "remote":
            self.join(chunk)
        elif list_name in ("grad", "grad32"):
            self.perform(self.alloc(place, chunk, list_name))
        elif list_name == "param":
            state = self.contents.chunks[chunk]
            sources = {p for p in state.current if p is not place and not state.where(p, "param")}
            if not self._may_pass(chunk):
                sources.discard(NVME)
            if place is not HOST and sources and HOST not in sources and NVME in (place, *sources):
                self._bring_by_host(place, chunk)
            elif sources:
                self.perform(self.copy(place, chunk, "param"))
            else:
                self._fill(Resident(chunk, "param", place), lambda: self.contents.values.rewrite(place, chunk))
        elif self.arena.elsewhere(place, chunk, list_name) is not None:
            self.perform(self.copy(place, chunk, list_name))
        else:
            raise PlanError(f"{list_name} of chunk {chunk} is lost: neither place holds it")

    def _may_pass(self, chunk: int) -> bool:
        """Whether the host, without gradients of the chunk, has room for its working list on the way from disks."""
        if self.contents.chunks[chunk].where(HOST, "param"):
            return False
        return self.arena.has(HOST, chunk, "param") or self.arena.room_bytes(HOST) >= self.layout.payload_bytes(
            chunk, "param"
        )

    def _bring_by_host(self, place: Place, chunk: int) -> None:
        """Between gpu and disks: no step does it at once."""
        passes = not self.arena.has(HOST, chunk, "param")
        self.bring(HOST, chunk, "param")
        self.perform(self.copy(place, chunk, "param"))
        if passes:
            self.perform(self.drop(HOST, chunk, "param"))

    def join(self, chunk: int) -> None:
        """Gathers the other ranks' slices: [Note: evaluations that differ] in distributed/ranks.py."""
        slices = None if self.ranks is None else self.ranks.slices_of(chunk)
        if slices is None:
            self.perform(self.gather(chunk))
        else:
            self._fill(Resident(chunk, "remote", GPU), lambda: self.contents.exchange.put_together(chunk, slices))
