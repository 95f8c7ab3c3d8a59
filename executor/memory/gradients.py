"""Where gradients are ([Note: where a gradient is] in chunk_state.py), and how they are added."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from executor.devices.updates import add, norm_of
from executor.memory.arena import Arena
from executor.memory.chunk_state import ChunkState
from executor.memory.slices import OTHERS_OF
from executor.memory.slots import Slots
from executor.memory.values import ParameterValues
from pstar_sim.core.step import Kind, Place
from pstar_sim.errors import PlanError
from pstar_sim.workload.optimizers import MASTER_LIST, MASTERS

GPU, HOST, NVME = Place.GPU, Place.HOST, Place.NVME
NORM_BLOCK = 1 << 20  # elements of two gradients that are added for their norm
GRADIENT_LISTS = ("param", "grad", "grad32")
BESIDE = frozenset({(GPU, "grad"), (GPU, "param")})  # two gradients that no list has room to add, until the update


class ChunkGradients:
    """norm_dtype: dtype of norms; None: the gradient's."""

    def __init__(self, arena: Arena, slots: Slots, chunks: Sequence[ChunkState], values: ParameterValues) -> None:
        self.arena = arena
        self.slots = slots
        self.chunks = chunks
        self.values = values
        # As torch takes it; the masters' dtype where they are wider than a gradient.
        pure = arena.layout.optimizer.masters == MASTERS[1] and not arena.sliced
        self.norm_dtype = None if pure else torch.float32
        self._norms: dict[int, torch.Tensor] = {}  # of gradients on disks
        self._slots: dict[tuple[int, str], torch.Tensor] = {}  # slots on the gpu that receive gradients
        chunk_of = arena.layout.chunk_of
        # Tensors of each chunk that get a gradient.
        self._most = Counter(chunk_of[t] for t in set().union(*arena.plan.workload.gradients))
        moved = {s.chunk for s in arena.plan.steps if s.kind not in (Kind.COMPUTE, Kind.GPU_UPDATE)}
        self._lenders = frozenset(
            c.index
            for c in arena.layout.chunks
            if arena.backend.streams is None
            and c.index not in moved
            and arena.dtype(c.index, "param") == arena.dtype(c.index, MASTER_LIST)
        )

    def accept(self, tensor: int, gradient: torch.Tensor, list_name: str) -> torch.Tensor:
        """Move a final gradient into its chunk on the gpu, added to one there. Returns the slot."""
        chunk, arena = self.slots.chunk_of(tensor), self.arena
        if not arena.has(GPU, chunk, list_name):
            raise PlanError(
                f"the gradient of tensor {tensor} goes to {list_name} of chunk {chunk}, which is not on the gpu"
            )
        mine = self.chunks[chunk].where(GPU, list_name)
        if self.arena.sliced:
            if not self.arena.has(GPU, chunk, OTHERS_OF[list_name]):
                raise PlanError(
                    f"the gradient of tensor {tensor} goes to all of chunk {chunk}, which is not on the gpu"
                )
            target = self.slots.whole(tensor, list_name)
            self.put(chunk, mine, tensor, target, gradient.reshape(-1))
        else:
            target = self._slot(tensor, self._lend(chunk, tensor) if list_name == "param" else list_name)
            same = gradient.shape == target.shape
            self.put(chunk, mine, tensor, target, gradient if same else gradient.reshape(target.shape))
        if list_name == "param":
            self.values.changed(chunk, (tensor,))
            if len(mine) == self._most[chunk]:
                arena.categories.overwritten(chunk)
        elif list_name == "grad32":
            self.chunks[chunk].ahead.add("grad32")
        return target

    def _lend(self, chunk: int, tensor: int) -> str:
        """[Note: gradients in the master copy]"""
        state = self.chunks[chunk]
        if tensor not in state.lent:
            keeps_value = GPU in state.current and tensor not in state.where(GPU, "param")
            if chunk not in self._lenders or not keeps_value or not self.arena.has(GPU, chunk, MASTER_LIST):
                return "param"
            self.arena.unsettled[chunk] = weakref.WeakMethod(self.settle)
            state.lent.add(tensor)
        return MASTER_LIST

    def settle(self, chunk: int) -> None:
        """Exchange lent slots, so that both lists on the gpu hold what is recorded."""
        state = self.chunks[chunk]
        before, state.adding = state.adding, True
        with torch.no_grad():
            for tensor in sorted(state.lent):
                value, lent = self._slot(tensor, "param"), self._slot(tensor, MASTER_LIST)
                gradient = lent.clone() if tensor in state.where(GPU, "param") else None
                lent.copy_(value)
                state.lent.discard(tensor)
                if gradient is not None:
                    value.copy_(gradient)
        state.adding = before
        self.arena.unsettled.pop(chunk, None)

    def _slot(self, tensor: int, list_name: str) -> torch.Tensor:
        found = self._slots.get((tensor, list_name))
        if found is None:
            shape, part = self.arena.plan.workload.tensors[tensor].shape, self.slots.parts[tensor]
            flat = self.arena.unsettled_at(GPU, self.slots.chunk_of(tensor), list_name)
            found = self._slots[tensor, list_name] = flat[part.offset : part.offset + part.numel].view(shape)
        return found

    def put(self, chunk: int, mine: set[int], tensor: int, target: torch.Tensor, gradient: torch.Tensor) -> None:
        """The first overwrites the slot.

        mine: tensors with a gradient in its list.
        """
        if tensor in mine:
            state = self.chunks[chunk]
            before, state.adding = state.adding, True
            add(target, gradient)
            state.adding = before
        else:
            mine.add(tensor)
            target.copy_(gradient)

    def norm(self, tensor: int) -> torch.Tensor:
        """Raises PlanError if the tensor has no gradient, or one in two parts."""
        chunk = self.slots.chunk_of(tensor)
        state = self.chunks[chunk]
        parts = {where for where, mine in list(state.gradients.items()) if tensor in mine}
        # A sum on its way to the gpu is read on the host: the reader is not ordered after the copying queue.
        if (GPU, "grad32") in parts and "grad32" not in state.ahead and self.arena.has(HOST, chunk, "grad32"):
            parts = parts - {(GPU, "grad32")} | {(HOST, "grad32")}
        if parts == BESIDE and not self.arena.has(GPU, chunk, "grad32"):
            return self._norm_of_both(tensor)
        if len(parts) > 1:
            raise PlanError(f"the norm of tensor {tensor}'s gradient is asked for before its parts {parts} are added")
        for place, list_name in parts:
            if place is NVME and tensor in self._norms:
                return self._norms[tensor]
            lent = tensor in state.lent and (place, list_name) == (GPU, "param")
            slot = self._slot(tensor, MASTER_LIST).view(-1) if lent else self.slots.at(place, tensor, list_name)
            return norm_of(slot, self.norm_dtype)
        raise PlanError(f"tensor {tensor} has no gradient")

    def _norm_of_both(self, tensor: int) -> torch.Tensor:
        lists = [self.slots.at(GPU, tensor, name) for name in ("grad", "param")]
        blocks = zip(*(torch.split(each, NORM_BLOCK) for each in lists))
        norms = [torch.linalg.vector_norm(first.to(torch.float32).add_(last)) for first, last in blocks]
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm

    def note_norms(self, chunk: int, list_name: str) -> None:
        """Of gradients about to go from host to disks, where norms are not taken as they arrive."""
        plan = self.arena.plan
        clips = plan.settings.clip and plan.workload.micro_batches > 1
        for tensor in self.chunks[chunk].where(HOST, list_name) if clips else ():
            self._norms[tensor] = norm_of(self.slots.at(HOST, tensor, list_name), self.norm_dtype)

    def fold_on_gpu(self) -> None:
        """Join gradients on the gpu that are in two lists."""
        for chunk, state in enumerate(self.chunks):
            if sum(bool(mine) for (place, _), mine in state.gradients.items() if place is GPU) > 1:
                self.fold(chunk, GPU)

    def fold(self, chunk: int, place: Place) -> str | None:
        """The list with all gradients of the chunk, after folding the last into grad32; "param" if the gpu has no
        grad32: "grad" then has more of them (`beside`)."""
        state = self.chunks[chunk]
        mine = {name: state.where(place, name) for name in GRADIENT_LISTS}
        filled = [name for name in GRADIENT_LISTS if mine[name]]
        if len(filled) < 2:
            return filled[0] if filled else None
        if place is GPU and not self.arena.has(GPU, chunk, "grad32"):
            return self._lay_beside(chunk, mine)
        state.adding = True
        if place is GPU:
            state.ahead.add("grad32")
        self._add_up(chunk, place, mine, (0, self.arena.layout.slice_numel(chunk)))
        state.current.discard(place)  # slots of the working list keep spent gradients
        mine["grad"].clear()
        mine["param"].clear()
        state.adding = False
        return "grad32"

    def _lay_beside(self, chunk: int, mine: Mapping[str, set[int]]) -> str:
        state = self.chunks[chunk]
        state.adding = True
        for name, other in (("param", "grad"), ("grad", "param")):
            for tensor in mine[other] - mine[name]:
                self.slots.at(GPU, tensor, name).zero_()
            mine[name].update(mine[other])
        state.current.discard(GPU)
        state.adding = False
        return "param"

    def beside(self, chunk: int) -> torch.Tensor | None:
        """The gradients to add to those in "param", by the update on the gpu."""
        if not self.chunks[chunk].where(GPU, "grad"):
            return None
        return self.arena.at(GPU, chunk, "grad")

    def fold_part(self, chunk: int, elements: tuple[int, int]) -> tuple[str | None, set[int]]:
        """`fold` for some elements on the host, with the tensors that have a gradient; those that count as on the gpu
        are on the host as far as these elements go.

        elements: (first, behind the last).
        """
        state = self.chunks[chunk]
        mine = {name: state.where(GPU, name) | state.where(HOST, name) for name in GRADIENT_LISTS}
        filled = [name for name in GRADIENT_LISTS if mine[name]]
        if len(filled) < 2:
            return (filled[0], mine[filled[0]]) if filled else (None, set())
        self._add_up(chunk, HOST, mine, elements)
        return "grad32", mine["grad32"]

    def _add_up(self, chunk: int, place: Place, mine: Mapping[str, set[int]], elements: tuple[int, int]) -> None:
        sums, total, (first, end) = mine["grad32"], self.arena.at(place, chunk, "grad32"), elements
        for name in ("grad", "param"):
            for tensor in mine[name]:
                slot = self.slots.parts[tensor]
                a, b = max(slot.offset, first), min(slot.offset + slot.numel, end)
                if a < b:
                    put = add if tensor in sums else torch.Tensor.copy_
                    put(total[a:b], self.arena.at(place, chunk, name)[a:b])
            sums.update(mine[name])

    def add_on_host(self, chunk: int, list_name: str | None) -> None:
        """list_name: grad, or param in place."""
        state = self.chunks[chunk]
        source = list_name if list_name is not None and list_name != "grad32" else "grad"
        arrived, there = state.where(HOST, source), state.where(HOST, "grad32")
        whole = self.arena.at(HOST, chunk, "grad32")
        state.adding = True
        if not there:
            whole.zero_()
        if len(arrived) == len(self.arena.layout.chunks[chunk].slots) and not there:
            whole.copy_(self.arena.at(HOST, chunk, source))
        else:
            for tensor in arrived:
                add(self.slots.at(HOST, tensor, "grad32"), self.slots.at(HOST, tensor, source))
        if source == "param":
            # The slots keep a spent gradient: this copy must not be read until Adam rewrites it.
            state.current.discard(HOST)
        there.update(arrived)
        arrived.clear()
        state.adding = False

    def add_on_gpu(self, chunk: int) -> None:
        state = self.chunks[chunk]
        arrived, sums = state.where(GPU, "grad"), state.where(GPU, "grad32")
        pairs = [
            (self.slots.at(GPU, tensor, "grad32"), self.slots.at(GPU, tensor, "grad"), tensor in sums)
            for tensor in arrived
        ]

        def add_each() -> None:
            for target, gradient, has_some in pairs:
                if has_some:
                    add(target, gradient)
                else:
                    target.copy_(gradient)

        state.adding = True
        state.ahead.add("grad32")
        self.arena.backend.issue(add_each)
        sums.update(arrived)
        arrived.clear()
        state.adding = False

    def forget(self) -> None:
        """Overwritten values are restored from the master copy."""
        for chunk in self.arena.layout.chunks:
            state = self.chunks[chunk.index]
            for (place, list_name), mine in state.gradients.items():
                if not mine:
                    continue
                if list_name == "param" and self.arena.has(place, chunk.index, "param"):
                    for tensor in mine:
                        self.values.restore(place, tensor)
                mine.clear()
            state.adding = False
            state.ahead.discard("grad32")
            if self.arena.has(HOST, chunk.index, "param") and HOST not in state.current and not chunk.frozen:
                for slot in chunk.slots:  # spent gradients that were added to grad32
                    self.values.restore(HOST, slot.tensor)
                state.current.add(HOST)
            self.values.changed(chunk.index)
