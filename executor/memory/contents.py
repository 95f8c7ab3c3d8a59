"""The contents of payloads, and each step's effect on them.

Every action checks before it changes anything.

Here lists move; gradients are in `gradients.py`, updates in `update.py`, other ranks in `exchange.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from executor.memory.arena import TOWARDS, Arena
from executor.memory.chunk_state import ChunkState
from executor.memory.exchange import Exchange, SliceWire
from executor.memory.gradients import ChunkGradients
from executor.memory.slots import Slots
from executor.memory.update import Norms, Update, Updating
from executor.memory.values import ParameterValues
from pstar_sim.core.effects import frees, takes
from pstar_sim.core.step import EFFECTS, UPDATES, Kind, Place, Step
from pstar_sim.errors import PlanError
from pstar_sim.workload.optimizers import MASTER_LIST

GPU, HOST, NVME = Place.GPU, Place.HOST, Place.NVME
_UPDATED = {kind: place for kind in UPDATES if (place := EFFECTS[kind].reads) is not None}
"""Kind of Adam -> the place where it updates."""


class Contents:
    """The contents of one plan's chunks, with the facts in `ChunkState`.

    Attributes:
        steps_taken: tensor -> number of its updates.
    """

    def __init__(self, arena: Arena, changed: Callable[..., None], wire: SliceWire | None = None) -> None:
        self.arena = arena
        self.sliced = arena.sliced
        self.layout = arena.layout
        self.chunks = [ChunkState() for _ in self.layout.chunks]
        self.steps_taken: dict[int, int] = {s.tensor: 0 for c in self.layout.chunks for s in c.slots}
        self.slots = Slots(arena)
        self.values = ParameterValues(arena, self.slots, self.chunks, changed)
        self.gradients = ChunkGradients(arena, self.slots, self.chunks, self.values)
        self.exchange = Exchange(arena, self.slots, self.chunks, self.values, self.gradients, wire)
        self._updating = Updating(arena, self.slots, self.chunks, self.values, self.gradients, self.steps_taken)
        self._changed = changed
        self._copy = arena.backend.copy

    def begin(self, step: Step) -> None:
        taken = takes(step)
        if taken is not None and not (taken.lenient and self.arena.has_resident(taken.resident)):
            self.arena.take(taken.resident.place, taken.resident.chunk, taken.resident.list)

    def work(self, step: Step, update: Update | None, norms: Norms) -> None:
        """update: the iteration's, for Adam.
        norms: see `Update.coefficient`.
        """
        kind, chunk = step.kind, step.chunk
        assert chunk is not None
        elements = None if step.part is None else self.layout.part_range(chunk, step.part)
        if kind is Kind.FETCH:
            self.fetch(chunk, self._list(step), elements, in_fp32=self._in_fp32(step))
        elif kind is Kind.WRITEBACK:
            self.write_back(chunk, self._list(step), elements, in_fp32=self._in_fp32(step))
        elif kind is Kind.NVME_READ:
            self.read_in(chunk, self._list(step))
        elif kind is Kind.NVME_WRITE:
            self.write_out(chunk, self._list(step))
        elif kind is Kind.ALLOC:
            self._zero(step)
        elif kind is Kind.GATHER:
            self.exchange.gather(chunk, self._list(step))
        elif kind is Kind.REDUCE_SCATTER:
            self.exchange.reduce_scatter(chunk, self._list(step))
        elif kind is Kind.CPU_ADD:
            self.gradients.add_on_host(chunk, step.list)
        elif kind in UPDATES:
            if update is None:
                raise PlanError(f"step {step.id}: {kind.value} of chunk {chunk} came before optimizer.step()")
            self.adam(chunk, _UPDATED[kind], update, norms, elements)

    def _zero(self, step: Step) -> None:
        assert step.place is not None and step.chunk is not None
        name = self._list(step)
        if step.place is GPU:
            with self.arena.payloads.steady(step.chunk):
                for payload in self.arena.payloads.parts(step.chunk, name):
                    self.arena.backend.zero(payload)
        else:
            self.arena.at(step.place, step.chunk, name).zero_()

    def finish(self, step: Step) -> None:
        freed = frees(step)
        if freed is not None and (not freed.lenient or self.arena.has_resident(freed.resident)):
            self.release(freed.resident.place, freed.resident.chunk, freed.resident.list)

    def _list(self, step: Step) -> str:
        if step.list is None:
            raise PlanError(f"step {step.id}: a {step.kind.value} step needs list=")
        return step.list

    def _in_fp32(self, step: Step) -> bool:
        """Lists of 2 bytes per parameter cross in fp32 in some published systems; parts do not."""
        assert step.chunk is not None
        return step.part is None and step.bytes != self.layout.payload_bytes(step.chunk, self._list(step))

    def fetch(
        self, chunk: int, list_name: str, elements: tuple[int, int] | None = None, *, in_fp32: bool = False
    ) -> None:
        """Copies a list from the host to the gpu, or a part of an updated working list, which is current after the last
        part.

        elements: (first, behind the last), None: all.
        in_fp32: parameters cross in fp32 and are cast afterwards.
        """
        self._require_fetchable(chunk, list_name, elements)
        if elements is not None and not self._begin_part(chunk, list_name, elements):
            return
        first, end = elements or (0, self.layout.slice_numel(chunk))
        with self.arena.payloads.steady(chunk):
            self._copy_up(chunk, list_name, (first, end), in_fp32=in_fp32)
        if elements is not None:
            self.chunks[chunk].arrived = end
        if end == self.layout.slice_numel(chunk):
            self._now_on_gpu(chunk, list_name)

    def _require_fetchable(self, chunk: int, list_name: str, elements: tuple[int, int] | None) -> None:
        state = self.chunks[chunk]
        what = f"chunk {chunk}" if list_name == "param" else f"{list_name} of chunk {chunk}"
        if elements is not None:
            what = f"elements {elements[0]} to {elements[1]} of {what}"
        self._require(HOST, chunk, list_name, "fetch")
        stale = state.updated < elements[1] if elements is not None else not state.where(HOST, "param")
        if list_name == "param" and HOST not in state.current and stale:
            raise PlanError(f"fetch of {what}: the host's copy does not hold current parameters")
        if state.where(GPU, list_name):
            raise PlanError(f"fetch of {what} would overwrite gradients on the gpu")

    def _begin_part(self, chunk: int, list_name: str, elements: tuple[int, int]) -> bool:
        state, (first, end) = self.chunks[chunk], elements
        if first and GPU in state.current:
            return False  # an evaluation has brought the whole list meanwhile
        if first == 0:
            state.hollow.add((GPU, list_name))
            state.arrived = 0
        if first != state.arrived:
            raise PlanError(
                f"fetch of elements {first} to {end} of chunk {chunk}: {state.arrived} are on the gpu so far"
            )
        return True

    def _copy_up(self, chunk: int, list_name: str, elements: tuple[int, int], *, in_fp32: bool) -> None:
        source = list_name
        if in_fp32 and list_name == "param" and not self.chunks[chunk].where(HOST, "param"):
            source = MASTER_LIST if self.arena.has(HOST, chunk, MASTER_LIST) else list_name
        self._transfer(GPU, chunk, (list_name, HOST, source), elements, in_fp32=in_fp32)

    def _transfer(
        self,
        target: Place,
        chunk: int,
        lists: tuple[str, Place, str],
        elements: tuple[int, int],
        *,
        in_fp32: bool,
    ) -> None:
        arena, queue, (written, source, read), (first, end) = self.arena, TOWARDS[target], lists, elements
        copy = arena.backend.copy_in_fp32 if in_fp32 else self._copy
        to, of = arena.at(target, chunk, written), arena.at(source, chunk, read)
        if end - first < self.layout.slice_numel(chunk):
            to, of = to[first:end], of[first:end]
        copy(to, of, queue)
        arena.backend.fence(queue)

    def _now_on_gpu(self, chunk: int, list_name: str) -> None:
        """The gpu has the host's content; gradients belong there now, for their update."""
        state = self.chunks[chunk]
        waiting = state.where(HOST, list_name)
        self.arena.categories.copied(HOST, GPU, chunk, list_name)
        state.hollow.discard((GPU, list_name))
        if list_name == "param":
            state.whole = False  # as far as is known
        if waiting:
            state.where(GPU, list_name).update(waiting)
            if list_name == "param":
                state.current.discard(HOST)  # the slots of the host's list keep the gradients that were fetched
            waiting.clear()
        elif list_name == "param":
            state.current.add(GPU)
            self._changed(chunk)

    def write_back(
        self, chunk: int, list_name: str, elements: tuple[int, int] | None = None, *, in_fp32: bool = False
    ) -> None:
        """Copies a list from the gpu to the host, or a part of gradients, which belong to the host after the last part.

        elements: as for `fetch`.
        """
        arena, state = self.arena, self.chunks[chunk]
        self._require(GPU, chunk, list_name, "write-back")
        if state.where(HOST, list_name):
            raise PlanError(f"write-back of {list_name} of chunk {chunk} would overwrite gradients on the host")
        if list_name == "param" and state.where(GPU, "param"):
            state.current.discard(HOST)
        first, end = elements or (0, self.layout.slice_numel(chunk))
        with arena.payloads.steady(chunk):
            self._transfer(HOST, chunk, (list_name, GPU, list_name), (first, end), in_fp32=in_fp32)
        if end == self.layout.slice_numel(chunk):
            self._now_on_host(chunk, list_name)

    def _now_on_host(self, chunk: int, list_name: str) -> None:
        """The host has the gpu's content; gradients belong there now."""
        arena, state = self.arena, self.chunks[chunk]
        leaving, there = state.where(GPU, list_name), state.where(HOST, list_name)
        arena.categories.copied(GPU, HOST, chunk, list_name)
        there.update(leaving)
        if list_name == "param":
            if GPU in state.current:
                state.current.add(HOST)
            if leaving:
                # The gpu's copy still holds the gradients in place; it is unused and no longer counted as current.
                state.current.discard(GPU)
                self._changed(chunk)
        state.ahead.discard(list_name)
        leaving.clear()

    def read_in(self, chunk: int, list_name: str) -> None:
        state = self.chunks[chunk]
        self._require(NVME, chunk, list_name, "read")
        if state.where(HOST, list_name):
            raise PlanError(f"read of {list_name} of chunk {chunk} would overwrite gradients on the host")
        if list_name in state.unsaved:
            raise PlanError(f"read of {list_name} of chunk {chunk} would overwrite an update that is on the host alone")
        self.arena.disks.read(chunk, list_name, self.arena.at(HOST, chunk, list_name))
        self._same(NVME, HOST, chunk, list_name)

    def write_out(self, chunk: int, list_name: str) -> None:
        state = self.chunks[chunk]
        self._require(HOST, chunk, list_name, "write")
        if state.where(NVME, list_name):
            raise PlanError(f"write of {list_name} of chunk {chunk} would overwrite gradients on the disks")
        if list_name == "param":
            state.current.discard(NVME)
        self.gradients.note_norms(chunk, list_name)
        self.arena.disks.write(chunk, list_name, self.arena.at(HOST, chunk, list_name))
        self._same(HOST, NVME, chunk, list_name)
        state.unsaved.discard(list_name)

    def _require(self, place: Place, chunk: int, list_name: str, what: str) -> None:
        if not self.arena.has(place, chunk, list_name):
            raise PlanError(f"{what} of {list_name} of chunk {chunk}: the {place.value} does not hold it")

    def _same(self, source: Place, target: Place, chunk: int, list_name: str) -> None:
        """Copied between host and disks; gradients belong to the target now."""
        state = self.chunks[chunk]
        self.arena.categories.copied(source, target, chunk, list_name)
        leaving = state.where(source, list_name)
        state.where(target, list_name).update(leaving)
        if list_name == "param" and source in state.current:
            state.current.add(target)
            if leaving:
                state.current.discard(source)  # the slots there keep the gradients
            self._changed(chunk)
        leaving.clear()

    def adam(
        self, chunk: int, place: Place, update: Update, norms: Norms, elements: tuple[int, int] | None = None
    ) -> None:
        if self.exchange.wire is not None and not update.skip:
            update.coefficient(norms)  # folds the gradients of all chunks before any update
        with self.arena.payloads.steady(chunk):
            self._updating.adam(chunk, place, update, norms, elements)

    def end_parts(self) -> None:
        """For code that works on whole lists: ends updates in parts, and gives up lists of which only parts have come
        to the gpu. The queues must be paused and not continue the iteration."""
        for chunk, state in enumerate(self.chunks):
            update, end = state.update_in_parts, self.layout.slice_numel(chunk)
            if isinstance(update, Update):
                for list_name in ("param", "grad32"):
                    if state.where(GPU, list_name):
                        self.write_back(chunk, list_name, (state.updated, end))
                self.adam(chunk, HOST, update, tuple, (state.updated, end))
            if (GPU, "param") in state.hollow:
                self.free_hollow(chunk)

    def release(self, place: Place, chunk: int, list_name: str) -> None:
        """Raises PlanError if there is no other copy."""
        state = self.chunks[chunk]
        if state.where(place, list_name):
            raise PlanError(f"{list_name} of chunk {chunk} would be freed on the {place.value} with gradients in it")
        if list_name == "remote":
            state.whole = False
            self._changed(chunk)
        elif list_name == "param":
            frozen = self.layout.chunks[chunk].frozen
            if place in state.current and state.current == {place} and frozen:
                raise PlanError(f"frozen chunk {chunk} would lose its only copy on the {place.value}")
            state.current.discard(place)
            self._changed(chunk)
        if place is GPU:
            state.ahead.discard(list_name)
        if place is HOST and list_name in state.unsaved:
            raise PlanError(
                f"{list_name} of chunk {chunk} would be freed on the host before its update is on the disks"
            )
        self.arena.free(place, chunk, list_name)

    def free_hollow(self, chunk: int) -> None:
        state = self.chunks[chunk]
        for place, name in list(state.hollow):
            if name == "param":
                state.current.discard(place)
            if self.arena.has(place, chunk, name):
                self.arena.free(place, chunk, name)
            state.hollow.discard((place, name))
        self._changed(chunk)
