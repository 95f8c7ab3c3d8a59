"""The form of a layout in a file: its chunks in order, each slot as [tensor, offset, elements]."""

from __future__ import annotations

from typing import Annotated

from pstar_sim.core.layout import Chunk, Layout, Slot
from pstar_sim.dtypes import STORAGE
from pstar_sim.errors import PlanError
from pstar_sim.schema.fields import Natural, Table, choice, says
from pstar_sim.workload.workload import Workload

_SlotForm = tuple[Natural, Natural, Natural]


class ChunkForm(Table, frozen=True, kw_only=True):
    """One chunk. Its index is its place in the list."""

    dtype: Annotated[str, choice(STORAGE), says("of all its parameters")]
    numel: Annotated[Natural, says("elements of the payload, padding included")]
    frozen: Annotated[bool, says("whether its parameters are frozen")]
    small: Annotated[bool, says("holds tensors too small to be worth moving; stays on the GPU")]
    group: Annotated[Natural, says("optimizer parameter group")]
    spread: Annotated[Natural, says("ranks that have other tensors in place of these, such as experts")] = 1
    slots: Annotated[tuple[_SlotForm, ...], says("[tensor, first element, elements] of each parameter")]


class LayoutForm(Table, frozen=True, kw_only=True):
    """The chunk and the position of each parameter."""

    chunk_bytes: Annotated[Natural, says("bytes of the working list of a chunk of the uniform size")]
    ranks: Annotated[Natural, says("number of equal slices that each list is cut into, one per rank")] = 1
    state_bytes: Annotated[
        tuple[tuple[str, Natural], ...], says("[list, bytes per parameter] of the optimizer's states")
    ]
    sum_bytes: Annotated[Natural, says("bytes per parameter of a sum of gradients in a chunk of 2-byte parameters")] = 4
    chunks: Annotated[tuple[ChunkForm, ...], says("all chunks in order of first use, small ones first")]


def layout_of(form: LayoutForm, workload: Workload) -> Layout:
    """The reverse of `Layout.to_dict`. Raises PlanError for a layout of other states."""
    optimizer, tensors = workload.optimizer, workload.tensors
    if form.state_bytes != optimizer.state_bytes:
        raise PlanError("field 'layout.state_bytes' differs from 'workload.optimizer.state_bytes'")

    def kind(chunk: ChunkForm) -> int:
        tensor = tensors[chunk.slots[0][0]] if chunk.slots and chunk.slots[0][0] < len(tensors) else None
        return 0 if chunk.frozen or tensor is None else optimizer.kind_of(tensor.name, tensor.shape)

    def shape(tensor: int) -> tuple[int, ...]:
        return tensors[tensor].shape if tensor < len(tensors) else ()

    return Layout(
        chunk_bytes=form.chunk_bytes,
        chunks=tuple(
            Chunk(
                index=index,
                dtype=chunk.dtype,
                numel=chunk.numel,
                frozen=chunk.frozen,
                small=chunk.small,
                group=chunk.group,
                slots=tuple(Slot(tensor=t, offset=o, numel=n, shape=shape(t)) for t, o, n in chunk.slots),
                kind=kind(chunk),
                spread=chunk.spread,
            )
            for index, chunk in enumerate(form.chunks)
        ),
        optimizer=optimizer,
        ranks=form.ranks,
        sum_bytes=form.sum_bytes,
    )
