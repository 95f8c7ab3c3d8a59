"""What the payloads hold, and what each kind of step does to them: the executor's half of a step.

`Contents` is the ledger of meaning beside the arena's ledger of bytes: which copy of a chunk's working list is current,
and where each gradient of the iteration is. Every action checks before it touches anything: a fetch of a working list
that a gradient has overwritten raises PlanError, it is never computed with. It knows no order and no queue.

[Note: where a gradient is] A gradient that left autograd is in exactly one of the lists of its chunk: in place in
"param", in "grad" (on its way out) or in "grad32" (accumulated), on the gpu or on the host; `gradients` holds the
tensor indices by (place, list). A slot of a working list whose tensor is not named there holds the parameter's value.
The working list always equals cast(param32), so a value that a gradient overwrote can be had from there.

[Note: between two lines] Ctrl-C may come between any two lines here, and `zero_grad()` goes on from the ledger as it
stands then (`off_plan/mending.py`). So a slot is named in `gradients`, or a copy ceases to be current, before it is
written over, and a copy becomes current after it is written. Three changes cannot be ordered so and are marked while
they last: an addition to a gradient (`adding`), the update (`updating`), and a list that has memory and no content yet
(`hollow`).

On several ranks all of this is about this rank's slice (`slices.py`); `whole` says that the other slices of the working
list are on the gpu too and current. A tensor index in `gradients` then stands for this rank's part of its gradient,
which may be empty.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from executor.adam import BLOCK, GPU_BLOCK, Hyper, Scratch, adamw, clip_coefficient, runs_of, total_norm
from executor.devices.backend import StreamBackend
from executor.distributed.collectives import Wire
from executor.memory.arena import Arena
from executor.memory.slices import part_of
from pstar_sim.core.effects import OTHERS
from pstar_sim.core.layout import Chunk
from pstar_sim.core.step import Kind, Place, Queue, Step
from pstar_sim.errors import PlanError

__all__ = ["ChunkState", "Contents", "Update"]

GPU, HOST = Place.GPU, Place.HOST


@dataclass
class ChunkState:
    """current: places whose copy of the working list holds the current values. ahead: state lists that were updated on
    the gpu while the host holds the older ones. whole: the gpu has the other ranks' slices of the working list as well.
    gradients: see [Note: where a gradient is]. adding, updating, hollow: see [Note: between two lines]."""

    current: set[Place] = field(default_factory=set)
    ahead: set[str] = field(default_factory=set)
    whole: bool = False
    adding: bool = False
    updating: bool = False
    hollow: set[tuple[Place, str]] = field(default_factory=set)
    gradients: dict[tuple[Place, str], set[int]] = field(default_factory=dict)

    def where(self, place: Place, list_name: str) -> set[int]:
        return self.gradients.setdefault((place, list_name), set())

    def with_gradient(self) -> set[int]:
        return set().union(*self.gradients.values())


@dataclass
class Update:
    """What the Adam steps of one iteration need, fixed at `optimizer.step()` (with eager updates: when it begins).

    max_grad_norm: None without clipping. norms: of each gradient, taken where it arrived (one micro-batch only).
    unscale: what gradients are multiplied with to undo loss scaling. skip: a gradient overflowed, so that Adam steps
    leave values, states and step counts as they are and drop the gradients.
    unused: tensors that no rank had a gradient of, where it was taken for zero; they are left as they are.
    agree: makes of the norm of what this rank holds that of all ranks; None where this rank holds everything.
    streams: the accelerator where work is issued ahead, else None. Then a coefficient that a host queue's thread worked
    out is a number on the host, and whoever takes one that is on the gpu to the host waits for the event behind it.
    """

    hyper: list[Hyper]
    max_grad_norm: float | None = None
    norms: dict[int, torch.Tensor] = field(default_factory=dict)
    norm: torch.Tensor | None = None
    unscale: float = 1.0
    skip: bool = False
    unused: frozenset[int] = frozenset()
    agree: Callable[[torch.Tensor], torch.Tensor] | None = None
    streams: StreamBackend | None = None
    _coefficient: torch.Tensor | None = None
    _ready: Any = None  # event behind it
    _on_host: torch.Tensor | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def coefficient(self, norms: Callable[[], Iterable[torch.Tensor]]) -> torch.Tensor | None:
        """What every gradient is multiplied with, None without clipping and scaling. norms: called by the first that
        asks."""
        if self.max_grad_norm is None and self.unscale == 1.0:
            return None
        with self._lock:
            if self._coefficient is None and self.max_grad_norm is None:
                self._coefficient = torch.tensor(self.unscale, dtype=torch.float32)
            elif self._coefficient is None:
                assert self.max_grad_norm is not None
                self.norm = total_norm(norms()) * self.unscale
                if self.agree is not None:
                    self.norm = self.agree(self.norm)
                self._coefficient = clip_coefficient(self.norm, self.max_grad_norm) * self.unscale
                self._settle()
            return self._coefficient

    def _settle(self) -> None:
        """The coefficient is issued, in this thread: see the class."""
        if self.streams is None:
            return
        assert self.norm is not None and self._coefficient is not None
        if self.streams.queue in self.streams.host_queues:
            self.norm, self._coefficient = self.norm.cpu(), self._coefficient.cpu()
        else:
            self._ready = self.streams.record(self.streams.queue)

    def coefficient_on(self, device: torch.device, norms: Callable[[], Iterable[torch.Tensor]]) -> torch.Tensor | None:
        """The same for an update on that device. A scalar on the host goes along with a kernel; one on the gpu comes to
        the host once, for the thread that updates there."""
        scale = self.coefficient(norms)
        if scale is None or scale.device == device or scale.device.type == "cpu":
            return scale
        with self._lock:
            if self._on_host is None:
                if self.streams is not None and self._ready is not None:
                    self.streams.synchronize(self._ready)
                self._on_host = scale.cpu()
            return self._on_host

    def skip_all(self) -> None:
        """No update in this iteration: a gradient is not finite."""
        self.skip = True
        self.norm = torch.tensor(torch.inf, dtype=torch.float32)


class Contents:
    """Payload contents of one plan's chunks. steps_taken: updates each tensor has had, by tensor index.

    wire: to the other ranks, None on one. summed_norms: tensor -> norm of (this rank's part of) the sum of its gradient
    over the ranks, of the last time it was summed.

    changed(chunk): called whenever the gpu working list of a chunk becomes, or ceases to be, readable.
    """

    def __init__(self, arena: Arena, changed: Callable[[int], None], wire: Wire | None = None) -> None:
        self.arena = arena
        self.wire = wire
        self.sliced = arena.sliced
        self.summed_norms: dict[int, torch.Tensor] = {}
        self.layout = arena.layout
        self.chunks = [ChunkState() for _ in self.layout.chunks]
        self.steps_taken: dict[int, int] = {s.tensor: 0 for c in self.layout.chunks for s in c.slots}
        self.accumulates = arena.plan.workload.micro_batches > 1
        self._slot = {s.tensor: (c.index, s.offset, s.numel) for c in self.layout.chunks for s in c.slots}
        self.parts = {
            s.tensor: part_of(self.layout, c.index, s.offset, s.numel, arena.rank)
            for c in self.layout.chunks
            for s in c.slots
        }
        self.changed = changed
        self._copy = arena.backend.copy
        longest = max((self.layout.slice_numel(c.index) for c in self.layout.chunks), default=1)
        on_host = arena.backend.device.type == "cpu"
        self._scratch = {HOST: Scratch(), GPU: Scratch(BLOCK if on_host else min(GPU_BLOCK, longest))}

    # -- addresses ----------------------------------------------------------------------------------------------------

    def slot(self, place: Place, tensor: int, list_name: str) -> torch.Tensor:
        """Flat view of one tensor's part of a list of its chunk; on several ranks of what this rank's slice has of it,
        which may be nothing."""
        chunk, part = self._slot[tensor][0], self.parts[tensor]
        return self.arena.at(place, chunk, list_name)[part.offset : part.offset + part.numel]

    def whole_slot(self, tensor: int, list_name: str) -> torch.Tensor:
        """Flat view of all of one tensor in "param" or "grad" on the gpu, where the other ranks' slices are there."""
        chunk, offset, numel = self._slot[tensor]
        return self.arena.whole(chunk, list_name)[offset : offset + numel]

    def put(self, place: Place, tensor: int, list_name: str, value: torch.Tensor, first: int = 0) -> None:
        """Write values (any shape) into a list from element `first` of the tensor on: this rank's part of them, and all
        where all of the list is here."""
        part, flat = self.parts[tensor], value.reshape(-1)
        begin, end = max(first, part.skip), min(first + flat.numel(), part.skip + part.numel)
        if begin < end:
            self.slot(place, tensor, list_name)[begin - part.skip : end - part.skip].copy_(
                flat[begin - first : end - first]
            )
        chunk = self._slot[tensor][0]
        if self.sliced and place is GPU and list_name == "param" and self.arena.has(GPU, chunk, "remote"):
            self.whole_slot(tensor, list_name)[first : first + flat.numel()].copy_(flat)

    def joined(self, tensor: int, part: torch.Tensor) -> torch.Tensor:
        """A flat copy, in host memory, of all of a tensor from this rank's part of it. On several ranks every one has
        to ask for it."""
        if not self.sliced:
            return part.to("cpu", copy=True)
        chunk, offset, numel = self._slot[tensor]
        sizes = [part_of(self.layout, chunk, offset, numel, r).numel for r in range(self.layout.ranks)]
        longest = max(sizes)
        mine = torch.zeros(longest, dtype=part.dtype, device=part.device)
        mine[: part.numel()].copy_(part)
        rows = self._to_others(chunk).exchange(mine)
        return torch.cat([row[:size] for row, size in zip(rows, sizes)]).cpu()

    def fold_on_gpu(self) -> None:
        """Gradients on the gpu that are in two lists come to be in one."""
        for row in self.layout.chunks:
            if sum(bool(mine) for (place, _), mine in self.chunks[row.index].gradients.items() if place is GPU) > 1:
                self.gather_gradients(row, GPU)

    def holds(self, chunk: int) -> bool:
        """The gpu holds the current values of the chunk, all of them."""
        state = self.chunks[chunk]
        return self.arena.has(GPU, chunk, "param") and GPU in state.current and (state.whole or not self.sliced)

    def readable(self, tensor: int) -> bool:
        """The gpu holds the parameter's current value."""
        chunk = self._slot[tensor][0]
        state = self.chunks[chunk]
        if self.sliced and not state.whole:
            return False
        return GPU in state.current and tensor not in state.gradients.get((GPU, "param"), ())

    def chunk_of(self, tensor: int) -> int:
        return self._slot[tensor][0]

    # -- gradients ----------------------------------------------------------------------------------------------------

    def accept(self, tensor: int, gradient: torch.Tensor, list_name: str) -> None:
        """Move a gradient that just became final into `list_name` of its chunk on the gpu; adds to one that is
        there."""
        chunk = self._slot[tensor][0]
        if not self.arena.has(GPU, chunk, list_name):
            raise PlanError(
                f"the gradient of tensor {tensor} goes to {list_name} of chunk {chunk}, which is not on the gpu"
            )
        state = self.chunks[chunk]
        mine = state.where(GPU, list_name)
        if self.sliced:
            if not self.arena.has(GPU, chunk, "remote" if list_name == "param" else "grad_remote"):
                raise PlanError(
                    f"the gradient of tensor {tensor} goes to all of chunk {chunk}, which is not on the gpu"
                )
            target = self.whole_slot(tensor, list_name)
        else:
            target = self.slot(GPU, tensor, list_name)
        self.put_gradient(chunk, mine, tensor, target, gradient.reshape(-1))
        if list_name == "param":
            self.changed(chunk)

    def put_gradient(
        self, chunk: int, mine: set[int], tensor: int, target: torch.Tensor, gradient: torch.Tensor
    ) -> None:
        """Add to the gradient in the slot, or write the first over what is there; mine: of the slot's list."""
        if tensor in mine:
            state = self.chunks[chunk]
            before, state.adding = state.adding, True
            target.add_(gradient)
            state.adding = before
        else:
            mine.add(tensor)
            target.copy_(gradient)

    def gradient_norm(self, tensor: int) -> torch.Tensor:
        """Norm of the gradient of a tensor wherever it is, in fp32. Raises PlanError if it has none or is in two
        parts.

        A sum on its way to the gpu for an update there is read on the host, which has it still: the queue that copies
        it is ordered by nothing against whoever asks."""
        chunk = self._slot[tensor][0]
        parts = {where for where, mine in list(self.chunks[chunk].gradients.items()) if tensor in mine}
        if (GPU, "grad32") in parts and self.arena.has(HOST, chunk, "grad32"):
            parts = parts - {(GPU, "grad32")} | {(HOST, "grad32")}
        if len(parts) > 1:
            raise PlanError(f"the norm of tensor {tensor}'s gradient is asked for before its parts {parts} are added")
        for place, list_name in parts:
            norm: torch.Tensor = torch.linalg.vector_norm(self.slot(place, tensor, list_name), dtype=torch.float32)
            return norm
        raise PlanError(f"tensor {tensor} has no gradient")

    def forget_gradients(self) -> None:
        """Drop every gradient: values that were overwritten come back from the master copy, grad lists become zero."""
        for chunk in self.layout.chunks:
            state = self.chunks[chunk.index]
            for (place, list_name), mine in state.gradients.items():
                if not mine:
                    continue
                if list_name == "param" and self.arena.has(place, chunk.index, "param"):
                    for tensor in mine:
                        self.restore(place, tensor)
                mine.clear()
            state.adding = False
            if self.arena.has(HOST, chunk.index, "param") and HOST not in state.current and not chunk.frozen:
                for slot in chunk.slots:  # spent gradients that were added to grad32
                    self.restore(HOST, slot.tensor)
                state.current.add(HOST)
            self.changed(chunk.index)

    def restore(self, place: Place, tensor: int) -> None:
        """Rewrite the slot of a working list from the master copy, which may be at the other place."""
        chunk = self._slot[tensor][0]
        source = place if self.arena.has(place, chunk, "param32") else (HOST if place is GPU else GPU)
        value, target = self.slot(source, tensor, "param32"), self.slot(place, tensor, "param")
        if source is place:
            target.copy_(value)
        else:
            self._copy(target, value, Queue.H2D if place is GPU else Queue.D2H)

    def rewrite(self, place: Place, chunk: int) -> None:
        """The working list at the place becomes what the master copy says, which may be at the other place. Raises
        PlanError if there is none."""
        arena, state = self.arena, self.chunks[chunk]
        other = HOST if place is GPU else GPU
        target = arena.at(place, chunk, "param")
        if arena.has(place, chunk, "param32"):
            target.copy_(arena.at(place, chunk, "param32"))
        elif arena.has(other, chunk, "param32"):
            self._copy(target, arena.at(other, chunk, "param32"), Queue.H2D if place is GPU else Queue.D2H)
        else:
            raise PlanError(f"the parameters of chunk {chunk} are lost: neither place holds them")
        state.current.add(place)
        self.changed(chunk)

    def free_hollow(self, chunk: int) -> None:
        """After an interruption: lists that have memory and no content yet give it back."""
        state = self.chunks[chunk]
        for place, name in list(state.hollow):
            if name == "param":
                state.current.discard(place)
            if self.arena.has(place, chunk, name):
                self.arena.free(place, chunk, name)
            state.hollow.discard((place, name))
        self.changed(chunk)

    # -- steps --------------------------------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Take what the step takes at its start."""
        kind, arena = step.kind, self.arena
        if kind is Kind.FETCH:
            self._take_if_absent(GPU, step)
        elif kind is Kind.WRITEBACK:
            self._take_if_absent(HOST, step)
        elif kind is Kind.GATHER and step.list in OTHERS:
            self._take_if_absent(GPU, step)
        elif kind is Kind.ALLOC:
            assert step.place is not None and step.chunk is not None and step.list is not None
            arena.take(step.place, step.chunk, step.list)
        elif kind is Kind.CPU_ADD:
            assert step.chunk is not None
            if not arena.has(HOST, step.chunk, "grad32"):
                arena.take(HOST, step.chunk, "grad32")

    def _take_if_absent(self, place: Place, step: Step) -> None:
        assert step.chunk is not None and step.list is not None
        if not self.arena.has(place, step.chunk, step.list):
            self.arena.take(place, step.chunk, step.list)

    def work(self, step: Step, update: Update | None, norms: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Do what the step is for. update: of the step's iteration (Adam steps need it). norms: see
        `Update.coefficient`."""
        kind = step.kind
        assert step.chunk is not None
        if kind is Kind.FETCH:
            self.fetch(step.chunk, self._list(step), in_fp32=self._in_fp32(step))
        elif kind is Kind.WRITEBACK:
            self.write_back(step.chunk, self._list(step), in_fp32=self._in_fp32(step))
        elif kind is Kind.ALLOC:
            assert step.place is not None
            name = self._list(step)
            payload = self.arena.at(step.place, step.chunk, name)
            if name in OTHERS:
                payload = self.arena.whole(step.chunk, OTHERS[name])
            if step.place is GPU:
                with self.arena.steady(step.chunk):
                    self.arena.backend.zero(payload)
            else:
                payload.zero_()
        elif kind is Kind.GATHER:
            self.gather(step.chunk, self._list(step))
        elif kind is Kind.REDUCE_SCATTER:
            self.reduce_scatter(step.chunk, self._list(step))
        elif kind is Kind.CPU_ADD:
            self.cpu_add(step.chunk, step.list)
        elif kind in (Kind.CPU_ADAM, Kind.GPU_ADAM):
            if update is None:
                raise PlanError(f"step {step.id}: {kind.value} of chunk {step.chunk} came before optimizer.step()")
            place = HOST if kind is Kind.CPU_ADAM else GPU
            self.adam(step.chunk, place, update, norms)

    def finish(self, step: Step) -> None:
        """Free what the step frees at its end."""
        kind = step.kind
        assert step.chunk is not None
        if kind is Kind.DROP:
            self.release(GPU, step.chunk, self._list(step))
        elif kind is Kind.FREE:
            assert step.place is not None
            self.release(step.place, step.chunk, self._list(step))
        elif kind is Kind.REDUCE_SCATTER and step.list in OTHERS:
            self.arena.free(GPU, step.chunk, self._list(step))
        elif kind is Kind.CPU_ADD and step.list != "param" and self.arena.has(HOST, step.chunk, "grad"):
            self.release(HOST, step.chunk, "grad")

    def _list(self, step: Step) -> str:
        if step.list is None:
            raise PlanError(f"step {step.id}: a {step.kind.value} step needs list=")
        return step.list

    def _in_fp32(self, step: Step) -> bool:
        """Whether the plan has a 2-byte list cross the link as fp32, as the system does whose schedule it is."""
        assert step.chunk is not None
        return step.bytes != self.layout.payload_bytes(step.chunk, self._list(step))

    def fetch(self, chunk: int, list_name: str, *, in_fp32: bool = False) -> None:
        """gpu content = host content. in_fp32: of parameters, which are cast from their fp32 list behind the link."""
        arena, state = self.arena, self.chunks[chunk]
        if not arena.has(HOST, chunk, list_name):
            raise PlanError(f"fetch of {list_name} of chunk {chunk}: the host does not hold it")
        waiting = state.where(HOST, "param") if list_name == "param" else set()
        parked = bool(waiting)  # gradients go back up for their update on the gpu; nobody can read what comes
        if list_name == "param":
            if not parked and HOST not in state.current:
                raise PlanError(f"fetch of chunk {chunk}: the host's copy does not hold current parameters")
            if state.where(GPU, "param"):
                raise PlanError(f"fetch of chunk {chunk} would overwrite gradients on the gpu")
        elif state.where(GPU, list_name):
            raise PlanError(f"fetch of {list_name} of chunk {chunk} would overwrite gradients on the gpu")
        with arena.steady(chunk):
            if in_fp32:
                masters = list_name == "param" and not parked and arena.has(HOST, chunk, "param32")
                source = arena.host(chunk, "param32" if masters else list_name)
                arena.backend.copy_in_fp32(arena.gpu(chunk, list_name), source, Queue.H2D)
            else:
                self._copy(arena.gpu(chunk, list_name), arena.host(chunk, list_name), Queue.H2D)
            arena.backend.fence(Queue.H2D)
        if list_name == "param":
            state.whole = False  # as far as anybody knows
        if list_name == "param" and not parked:
            state.current.add(GPU)
            self.changed(chunk)
        elif state.where(HOST, list_name):
            state.where(GPU, list_name).update(state.where(HOST, list_name))
            if list_name == "param":
                state.current.discard(HOST)  # its slots keep the gradients that went up
            state.where(HOST, list_name).clear()

    def write_back(self, chunk: int, list_name: str, *, in_fp32: bool = False) -> None:
        """host content = gpu content; gradients in it belong to the host from now on."""
        arena, state = self.arena, self.chunks[chunk]
        if not arena.has(GPU, chunk, list_name):
            raise PlanError(f"write-back of {list_name} of chunk {chunk}: the gpu does not hold it")
        leaving, there = state.where(GPU, list_name), state.where(HOST, list_name)
        if there:
            raise PlanError(f"write-back of {list_name} of chunk {chunk} would overwrite gradients on the host")
        if list_name == "param" and leaving:
            state.current.discard(HOST)
        with arena.steady(chunk):
            copy = arena.backend.copy_in_fp32 if in_fp32 else self._copy
            copy(arena.host(chunk, list_name), arena.gpu(chunk, list_name), Queue.D2H)
            arena.backend.fence(Queue.D2H)
        there.update(leaving)
        if list_name == "param":
            if GPU in state.current:
                state.current.add(HOST)
            if leaving:
                # The gpu's copy still holds the gradients in place; it is dead, and no longer counted as current.
                state.current.discard(GPU)
                self.changed(chunk)
        state.ahead.discard(list_name)
        leaving.clear()

    def gather(self, chunk: int, list_name: str) -> None:
        """The slices of the other ranks come: of the parameters ("remote"), or (nothing is sliced) of a gradient's
        sum."""
        state, wire = self.chunks[chunk], self._to_others(chunk)
        issue = self.arena.backend.issue
        if list_name not in OTHERS:
            flat = self.arena.gpu(chunk, list_name)
            issue(lambda: wire.gather(flat))
            self._note_norms(state.where(GPU, list_name), list_name)
            return
        self._require_own(chunk)
        with self.arena.steady(chunk):
            whole = self.arena.whole(chunk, "param")
            issue(lambda: wire.gather(whole))
        state.whole = True
        self.changed(chunk)

    def put_together(self, chunk: int, slices: torch.Tensor) -> None:
        """The parameters of the other ranks come, from host memory. slices: [ranks, bytes of a slice], this rank's too,
        which is not read."""
        state, backend, size = self.chunks[chunk], self.arena.backend, self.layout.slice_numel(chunk)
        self._require_own(chunk)
        with self.arena.steady(chunk):
            whole = self.arena.whole(chunk, "param")
            for rank, row in enumerate(slices):
                if rank != self.arena.rank:
                    backend.copy(whole[rank * size : (rank + 1) * size], row.view(whole.dtype), Queue.H2D)
            backend.fence(Queue.H2D)
        state.whole = True
        self.changed(chunk)

    def _require_own(self, chunk: int) -> None:
        state = self.chunks[chunk]
        if GPU not in state.current or state.where(GPU, "param"):
            raise PlanError(f"gather of chunk {chunk}: this rank's own slice on the gpu does not hold parameters")

    def reduce_scatter(self, chunk: int, list_name: str) -> None:
        """This rank's slice of the gradient becomes the sum over all ranks; the other slices are of no use then."""
        state, wire = self.chunks[chunk], self._to_others(chunk)
        own = OTHERS.get(list_name, list_name)
        mine = state.where(GPU, own)
        if not mine:
            raise PlanError(f"reduce-scatter of {list_name} of chunk {chunk}: there is no gradient on the gpu")
        issue, flat = self.arena.backend.issue, self.arena.whole(chunk, own)
        if not self.sliced:
            issue(lambda: wire.reduce_scatter(flat))
            return
        if own == "param":
            state.whole = False
            self.changed(chunk)
        with self.arena.steady(chunk):
            issue(lambda: wire.reduce_scatter(flat))
            self._note_norms(mine, own)
            if own == "grad" and self.arena.has(GPU, chunk, "grad32"):
                self._add_on_gpu(chunk)

    def _note_norms(self, tensors: Iterable[int], list_name: str) -> None:
        """Norms of sums that are on the gpu, in the order of this thread's queue."""
        slots = {tensor: self.slot(GPU, tensor, list_name) for tensor in tensors}

        def note() -> None:
            for tensor, flat in slots.items():
                self.summed_norms[tensor] = torch.linalg.vector_norm(flat, dtype=torch.float32)

        self.arena.backend.issue(note)

    def _add_on_gpu(self, chunk: int) -> None:
        """grad32 += grad, both on the gpu."""
        state = self.chunks[chunk]
        arrived, sums = state.where(GPU, "grad"), state.where(GPU, "grad32")
        pairs = [
            (self.slot(GPU, tensor, "grad32"), self.slot(GPU, tensor, "grad"), tensor in sums) for tensor in arrived
        ]

        def add() -> None:
            for target, gradient, has_some in pairs:
                if has_some:
                    target.add_(gradient)
                else:
                    target.copy_(gradient)

        state.adding = True
        self.arena.backend.issue(add)
        sums.update(arrived)
        arrived.clear()
        state.adding = False

    def _to_others(self, chunk: int) -> Wire:
        if self.wire is None:
            raise PlanError(f"chunk {chunk} has to be exchanged with other ranks, and this run has only one")
        return self.wire

    def cpu_add(self, chunk: int, list_name: str | None) -> None:
        """grad32 (host) += the gradients of `list_name` on the host (grad, or param in place)."""
        state = self.chunks[chunk]
        source = list_name if list_name is not None and list_name != "grad32" else "grad"
        arrived, there = state.where(HOST, source), state.where(HOST, "grad32")
        whole = self.arena.host(chunk, "grad32")
        state.adding = True
        if not there:
            whole.zero_()
        if len(arrived) == len(self.layout.chunks[chunk].slots) and not there:
            whole.copy_(self.arena.host(chunk, source))
        else:
            for tensor in arrived:
                self.slot(HOST, tensor, "grad32").add_(self.slot(HOST, tensor, source))
        if source == "param":
            # The slots keep a spent gradient: nobody may read this copy until Adam rewrites it.
            state.current.discard(HOST)
        there.update(arrived)
        arrived.clear()
        state.adding = False

    def adam(self, chunk: int, place: Place, update: Update, norms: Callable[[], Iterable[torch.Tensor]]) -> None:
        """One AdamW update of every parameter of the chunk that has a gradient; the working list there becomes
        current."""
        if self.wire is not None and not update.skip:
            update.coefficient(norms)  # the first one folds gradients of all chunks: before any other touches them
        with self.arena.steady(chunk):
            self._adam(chunk, place, update, norms)

    def _adam(self, chunk: int, place: Place, update: Update, norms: Callable[[], Iterable[torch.Tensor]]) -> None:
        arena, state, row = self.arena, self.chunks[chunk], self.layout.chunks[chunk]
        for list_name in ("param", *self.layout.state_lists):
            if not arena.has(place, chunk, list_name):
                raise PlanError(f"Adam of chunk {chunk} on the {place.value}: {list_name} is not there")
        elsewhere = {key: mine for key, mine in state.gradients.items() if mine and key[0] is not place}
        if elsewhere:
            where = ", ".join(f"{name} on the {spot.value}" for spot, name in elsewhere)
            raise PlanError(f"Adam of chunk {chunk} on the {place.value}: gradients are still in {where}")
        if update.skip:
            state.current.discard(place)  # a gradient may lie in it
            for mine in state.gradients.values():
                mine.clear()
        source = None if update.skip else self.gather_gradients(row, place)
        if source is not None and update.unused:
            state.current.discard(place)  # a gradient of zero may lie in it
            state.where(place, source).difference_update(update.unused)
            if not state.where(place, source):
                source = None
        if source is not None:
            master = arena.at(place, chunk, "param32")
            scale = update.coefficient_on(master.device, norms)
            mine = state.where(place, source)
            parts = [(s.tensor, self.parts[s.tensor]) for s in row.slots]
            runs = runs_of((p.offset, p.numel, self.steps_taken[t] if t in mine else None) for t, p in parts if p.numel)
            state.updating = True
            adamw(
                runs,
                param=master,
                grad=arena.at(place, chunk, source),
                momentum=arena.at(place, chunk, "momentum"),
                variance=arena.at(place, chunk, "variance"),
                hyper=update.hyper[row.group],
                scale=scale,
                scratch=self._scratch[place],
            )
            for tensor in mine:
                self.steps_taken[tensor] += 1
            state.current = set()
            mine.clear()
            arena.at(place, chunk, "param").copy_(arena.at(place, chunk, "param32"))
            state.current = {place}
            state.whole = False
            if place is GPU:
                state.ahead = set(self.layout.state_lists)
            state.updating = False
        elif place not in state.current:
            self.rewrite(place, chunk)
        self.changed(chunk)

    def gather_gradients(self, row: Chunk, place: Place) -> str | None:
        """The one list that holds all gradients of the chunk at the place after folding the last one into grad32, or
        None without any gradient."""
        state = self.chunks[row.index]
        filled = [name for name in ("param", "grad", "grad32") if state.where(place, name)]
        if not filled:
            return None
        if len(filled) == 1:
            return filled[0]
        sums = state.where(place, "grad32")
        state.adding = True
        for name in ("grad", "param"):
            for tensor in state.where(place, name):
                target = self.slot(place, tensor, "grad32")
                if tensor in sums:
                    target.add_(self.slot(place, tensor, name))
                else:
                    target.copy_(self.slot(place, tensor, name))
            sums.update(state.where(place, name))
            if name == "param":
                state.current.discard(place)  # its slots keep spent gradients
            state.where(place, name).clear()
        state.adding = False
        return "grad32"

    def release(self, place: Place, chunk: int, list_name: str) -> None:
        """Give the payload's memory back. Raises PlanError if the only copy of something would go."""
        state = self.chunks[chunk]
        if state.where(place, list_name):
            raise PlanError(f"{list_name} of chunk {chunk} would be freed on the {place.value} with gradients in it")
        if list_name == "remote":
            state.whole = False
            self.changed(chunk)
        elif list_name == "param":
            frozen = self.layout.chunks[chunk].frozen
            if place in state.current and state.current == {place} and frozen:
                raise PlanError(f"frozen chunk {chunk} would lose its only copy on the {place.value}")
            state.current.discard(place)
            self.changed(chunk)
        self.arena.free(place, chunk, list_name)
