"""Parameters' values move into chunks, of which parameters become views."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from executor.contract import ChunkParameter, adopt, disown
from executor.devices.packed import pack, point_at, unpacked
from executor.memory.arena import PLACES, Arena
from executor.memory.contents import Contents
from executor.session.reader import Reader
from executor.session.state import PlanBytes
from pstar_sim.core.effects import OTHERS
from pstar_sim.core.layout import Chunk, Slot
from pstar_sim.core.step import Place
from pstar_sim.workload.optimizers import MASTER_LIST


def load_parameters(
    reader: Reader, others: Collection[int] = (), fill: Callable[[Arena, Contents], None] | None = None
) -> None:
    """Moves values into chunks, one chunk at a time, before the queues start, and makes the parameters views of them.
    Takes the memory of all payloads resident between two iterations.

    others: tensors with values from elsewhere.
    fill: writes these into every list with memory.
    """
    run, parameters = reader.state.run, reader.parameters
    plan, arena, contents = run.plan, run.arena, run.contents
    present = sorted(plan.initial)
    for resident in present:
        if resident.chunk >= 0:  # chunk -1 stands for buffers of modules, whose memory is not the arena's
            arena.take(resident.place, resident.chunk, resident.list)
            if resident.list in OTHERS:  # the other ranks' slices are not a list of their own, but the rest of a list
                arena.payloads.whole(resident.chunk, OTHERS[resident.list]).zero_()
            elif resident.place is not Place.NVME:  # there a list that was never written is zero
                arena.at(resident.place, resident.chunk, resident.list).zero_()
    for chunk in plan.layout.chunks:
        for slot, views in views_of(arena, chunk, parameters):
            parameter = parameters[slot.tensor]
            if slot.tensor not in others:
                _put_everywhere(contents, chunk.index, slot.tensor, pack(parameter))
            with torch._C.DisableTorchFunctionSubclass():  # the parameter may be parked
                point_at(parameter, views)
            adopt(parameter, reader, slot.tensor)
    if fill is not None:
        fill(arena, contents)
    for chunk in plan.layout.chunks:
        for place in PLACES:
            if arena.has(place, chunk.index, "param"):
                contents.chunks[chunk.index].current.add(place)
        contents.chunks[chunk.index].whole = arena.sliced and arena.has(Place.GPU, chunk.index, "remote")


def _put_everywhere(contents: Contents, chunk: int, tensor: int, value: torch.Tensor) -> None:
    for place in PLACES:
        for list_name in ("param", MASTER_LIST):
            if contents.arena.has(place, chunk, list_name):
                contents.slots.put(place, tensor, list_name, value)


def unload_parameters(reader: Reader, home: torch.device, others: Collection[int] = ()) -> None:
    """Undo `load_parameters`, also half done, on one rank before the first step. Parameters are plain again, on `home`,
    with their former values; those of `others` stay."""
    run = reader.state.run
    for tensor, chunk in run.timetable.chunk_of.items():
        parameter = reader.parameters[tensor]
        if not isinstance(parameter, ChunkParameter):
            continue  # this parameter is still plain
        if tensor in others:
            continue
        value = _loaded_value(run, chunk, tensor).to(home, copy=True)
        disown(parameter)
        reader.give_back(tensor, value)


def _loaded_value(run: PlanBytes, chunk: int, tensor: int) -> torch.Tensor:
    for list_name in ("param", MASTER_LIST):
        if any(run.arena.has(place, chunk, list_name) for place in PLACES):
            return run.contents.slots.source(tensor, list_name).to(run.arena.dtype(chunk, "param"))
    raise AssertionError(f"tensor {tensor} has moved into chunk {chunk}, of which no list has memory")


def views_of(arena: Arena, chunk: Chunk, parameters: Sequence[nn.Parameter]) -> list[tuple[Slot, list[torch.Tensor]]]:
    """Each tensor's part of its chunk's working list on the gpu, as `unpacked`. A chunk gets memory for this moment:
    torch makes views only of storages that have some."""
    payload = arena.payloads.whole(chunk.index, "param")
    absent = not arena.has(Place.GPU, chunk.index, "remote" if arena.sliced else "param")
    if absent:
        arena.backend.take(payload)
    slots = [(s, payload[s.offset : s.offset + s.numel]) for s in chunk.slots]
    views = [(s, unpacked(parameters[s.tensor], flat)) for s, flat in slots]
    if absent:
        arena.backend.give(payload)
    return views
