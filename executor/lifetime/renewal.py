"""Renewal: a session continues under another plan of the same model.

Values leave the former plan's chunks before its memory is given back, and that before the new plan's is taken. Between
them they are on disks, if any: the host has room for either plan alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from executor.devices.backend import available_host_bytes
from executor.disks.store import DiskStore
from executor.lifetime.loading import load_parameters
from executor.memory.arena import PLACES, Arena, check_host_memory
from executor.memory.contents import Contents
from executor.memory.slots import fields_of, list_of
from executor.moments.unseen import unseen
from executor.queues.interface import Queues
from executor.session.reader import Reader
from executor.session.state import PlanBytes
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Place
from pstar_sim.core.workspace import PIECE_BYTES
from pstar_sim.errors import DiskError, DoesNotFit, Interrupted, PlanError, PstarError
from pstar_sim.workload.optimizers import MASTER_LIST

_Key = tuple[int, str, int]  # tensor, field ("param": its value), first element


def renew(
    reader: Reader, plan: Plan, install: Callable[[Plan, Arena, Queues], None], start: Callable[[], None]
) -> None:
    """Between two iterations, on one rank: values and states move into another plan's chunks.

    Raises PlanError if it lacks states of a parameter trained now, DoesNotFit or DiskError without room (the former
    plan stays), Interrupted.
    """
    state, run = reader.state, reader.state.run
    backend, queues, arena_before = run.backend, run.queues, run.arena
    assert not state.cursor.inside
    trained = {t for tensors in run.plan.workload.gradients for t in tensors}
    if any(plan.modes[plan.layout.chunk_of[t]] == "frozen" for t in trained):
        raise PlanError("its iteration leaves out layers that the present plan trains, and would lose their states")
    folders = arena_before.disks.folders
    arena = Arena(plan, backend, disks=folders)
    _check_room(run, arena)
    with unseen(), torch.no_grad():
        reader.standstill.drain()
        try:
            between = _Between(run)
        except BaseException:
            if not state.held:
                queues.resume()
            raise
        state.held = state.renewing = True
        steps_taken = run.contents.steps_taken
        try:
            queues.stop()
            reader.set_open(False)
            arena_before.empty()
            backend.give_host_back()
            refusal: PstarError | None = None
            try:
                arena.allocate_slabs()
            except (DiskError, DoesNotFit) as error:
                refusal, plan, arena = error, run.plan, Arena(run.plan, backend, disks=folders)
                arena.allocate_slabs()
            install(plan, arena, queues.renew())
            del run, arena_before
            load_parameters(reader, state.run.timetable.chunk_of, between.put)
        except BaseException as error:
            ended = between.end(reader, error)
            if state.run.arena is not arena:
                arena.empty()
            if isinstance(error, PstarError):
                raise ended from error
            raise
        finally:
            between.close()
        state.run.contents.steps_taken.update(steps_taken)
    del queues
    state.held = False
    start()
    state.renewing = False
    if refusal is not None:
        raise refusal


def _check_room(run: PlanBytes, arena: Arena) -> None:
    """Raises DoesNotFit."""
    layout, on_host, leaving = run.plan.layout, run.backend.device.type == "cpu", 0
    moving = sum(layout.payload_bytes(c.index, "param") + layout.states_bytes(c.index) for c in layout.chunks)
    if run.arena.disks.folders is not None:
        moving, leaving = 0, run.arena.slabs.room.total_bytes  # pinned
        if on_host:
            leaving = sum(run.arena.payload_bytes(place) for place in (Place.HOST, Place.GPU))
    check_host_memory(
        arena.plan,
        arena.slabs.room,
        available_bytes=available_host_bytes() + leaving,
        gpu_is_host=on_host,
        model_bytes=-moving,
    )


class _Between:
    """Values and states meanwhile. Raises DiskError."""

    def __init__(self, run: PlanBytes) -> None:
        self._memory: dict[_Key, torch.Tensor] = {}
        self._store: DiskStore[_Key] | None = None
        self._rows = [
            (s.tensor, field)
            for c in run.plan.layout.chunks
            for field in ("param", *(() if c.frozen else fields_of(run.plan.layout.states_of(c.index))))
            for s in c.slots
            if field == "param" or any(run.arena.has(place, c.index, list_of(field)) for place in PLACES)
        ]
        if run.arena.disks.folders is not None:
            sizes = {
                (tensor, field, first): count * dtype.itemsize
                for tensor, field in self._rows
                for first, count, dtype in _pieces(run.contents, tensor, field)
            }
            names = [t.name for t in run.plan.workload.tensors]
            self._store = DiskStore(run.arena.disks.folders, sizes, lambda key: f"{key[1]} of {names[key[0]]!r}")
            self._buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8)
        try:
            self._keep(run)
        except BaseException:
            self.close()
            raise

    def _keep(self, run: PlanBytes) -> None:
        slots = run.contents.slots
        for tensor, field in self._rows:
            if field == "param":
                place, list_name = run.contents.values.source(slots.chunk_of(tensor), (tensor,))
                source = slots.at(place, tensor, list_name)
            else:
                source = slots.source(tensor, field)
            for first, count, dtype in _pieces(run.contents, tensor, field):
                part = source[first : first + count]
                if self._store is None:
                    self._memory[tensor, field, first] = part.to("cpu", dtype, copy=True)
                else:
                    piece = self._buffer[: count * dtype.itemsize].view(dtype)
                    self._store.write((tensor, field, first), piece.copy_(part))

    def put(self, arena: Arena, contents: Contents) -> None:
        for tensor, field in self._rows:
            lists = ("param", MASTER_LIST) if field == "param" else (field,)
            chunk = contents.slots.chunk_of(tensor)
            targets = [(p, name) for name in lists for p in PLACES if arena.has(p, chunk, list_of(name))]
            for first, count, dtype in _pieces(contents, tensor, field):
                if self._store is None:
                    piece = self._memory[tensor, field, first]
                else:
                    piece = self._buffer[: count * dtype.itemsize].view(dtype)
                    self._store.read((tensor, field, first), piece)
                for place, name in targets:
                    contents.slots.put(place, tensor, name, piece, first)

    def end(self, reader: Reader, error: BaseException) -> Interrupted:
        """Parameters keep values in memory, and without are parked."""
        lost = "optimizer states" if self._store is None else "some"
        ended = reader.standstill.interrupt(
            f"values moved between two plans, and {lost} are lost: {str(error) or type(error).__name__}; continue from "
            "the last checkpoint"
        )
        if self._store is None:
            values: dict[int, list[torch.Tensor]] = {}
            for (tensor, field, _), piece in self._memory.items():
                if field == "param":
                    values.setdefault(tensor, []).append(piece)
            reader.make_plain(lambda t: torch.cat(values[t]) if t in values else None)
        return ended

    def close(self) -> None:
        self._memory.clear()
        if self._store is not None:
            self._store.close()


def _pieces(contents: Contents, tensor: int, field: str) -> Iterator[tuple[int, int, torch.dtype]]:
    """(first element, count, dtype)."""
    slots = contents.slots
    dtype, numel = slots.dtype(slots.chunk_of(tensor), field), slots.part(tensor, field).numel
    most = PIECE_BYTES // dtype.itemsize
    for first in range(0, numel, most):
        yield first, min(most, numel - first), dtype
