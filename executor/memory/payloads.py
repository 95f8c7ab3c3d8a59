"""Payloads: the tensors of chunks' lists, on the gpu and on the host, with or without memory."""

from __future__ import annotations

import contextlib
import threading

import torch

from executor.devices.backend import Backend
from executor.devices.dtypes import TORCH_DTYPES
from executor.memory.slices import OTHERS_OF, GpuPayload, Steady
from pstar_sim.core.layout import Layout
from pstar_sim.core.plan import Plan
from pstar_sim.core.slabs import host_room
from pstar_sim.core.step import OTHERS
from pstar_sim.errors import DoesNotFit

__all__ = ["STATE_DTYPES", "GpuPayloads", "HostSlabs", "dtype_of", "numel_of"]

STATE_DTYPES = {4: torch.float32, 2: torch.bfloat16}  # bytes per element -> dtype


def dtype_of(layout: Layout, chunk: int, list_name: str) -> torch.dtype:
    if list_name in ("param", "grad") or (list_name == "grad32" and layout.sum_width(chunk) < 4):
        return TORCH_DTYPES[layout.chunks[chunk].dtype]
    row = next((each for each in layout.states_of(chunk).lists if each.name == list_name), None)
    if row is not None and row.per_block:
        return torch.uint8  # codes and scales (slots.py)
    width = 4 if row is None else row.per_element or 4
    if width < 4 and layout.optimizer.masters == "none":  # the parameter itself, and moments that follow it
        return TORCH_DTYPES[layout.chunks[chunk].dtype]
    return STATE_DTYPES[width]


def numel_of(layout: Layout, chunk: int, list_name: str) -> int:
    """Returns the elements of one rank's payload."""
    return layout.payload_bytes(chunk, list_name) // dtype_of(layout, chunk, list_name).itemsize


class GpuPayloads:
    """Payloads on the gpu: a storage per (chunk, list), or on several ranks a pair (`slices.py`). Takes and gives may
    come from any thread.

    Attributes:
        peak_transient_bytes: [Note: what a slice moves through] in slices.py; 0 on one rank.
    """

    def __init__(self, layout: Layout, backend: Backend, rank: int) -> None:
        self.layout = layout
        self.backend = backend
        self.rank = rank
        self.sliced = layout.ranks > 1
        self.peak_transient_bytes = 0
        self._transient_bytes = 0
        self._lock = threading.Lock()
        self._flat: dict[tuple[int, str], torch.Tensor] = {}
        self._pairs: dict[tuple[int, str], GpuPayload] = {}
        self._moving = [Steady(backend) for _ in layout.chunks] if self.sliced else []
        self._turn = threading.Lock()  # held while a payload changes between slice and whole

    def at(self, chunk: int, list_name: str) -> torch.Tensor:
        """Returns the payload as a flat tensor [numel], with or without memory. On several ranks it is this rank's
        slice, in the storage where that is now."""
        if self.sliced and list_name in OTHERS_OF:
            return self._pair(chunk, list_name).own
        key = (chunk, list_name)
        payload = self._flat.get(key)
        if payload is None:
            dtype = dtype_of(self.layout, chunk, list_name)
            payload = self._flat[key] = self.backend.gpu_payload(numel_of(self.layout, chunk, list_name), dtype)
        return payload

    def whole(self, chunk: int, list_name: str) -> torch.Tensor:
        """Returns the list "param" or "grad" with the slices of all ranks, flat, rank 0's slice first."""
        return self._pair(chunk, list_name).whole if self.sliced else self.at(chunk, list_name)

    def _pair(self, chunk: int, list_name: str) -> GpuPayload:
        pair = self._pairs.get((chunk, list_name))
        if pair is None:
            layout = self.layout
            made = GpuPayload(
                self.backend,
                layout.slice_numel(chunk),
                layout.ranks,
                self.rank,
                dtype_of(layout, chunk, list_name),
                self._moving[chunk],
                self._turn,
                self._note_transient,
            )
            pair = self._pairs.setdefault((chunk, list_name), made)
        return pair

    def steady(self, chunk: int) -> contextlib.AbstractContextManager[object]:
        """Returns a context in which the chunk's own slices stay where they are: a plan may let a copy of a slice run
        beside a gather."""
        return self._moving[chunk] if self.sliced else contextlib.nullcontext()

    def _note_transient(self, change: int) -> None:
        with self._lock:
            self._transient_bytes += change
            self.peak_transient_bytes = max(self.peak_transient_bytes, self._transient_bytes)

    def take(self, chunk: int, list_name: str) -> None:
        """Give the payload its memory. Raises OutOfMemory or torch.OutOfMemoryError, with nothing changed."""
        if not self.sliced or (list_name not in OTHERS_OF and list_name not in OTHERS):
            self.backend.take(self.at(chunk, list_name))
        elif list_name in OTHERS:
            self._pair(chunk, OTHERS[list_name]).take_others()
        else:
            self._pair(chunk, list_name).take_own()

    def give(self, chunk: int, list_name: str) -> None:
        if not self.sliced or (list_name not in OTHERS_OF and list_name not in OTHERS):
            self.backend.give(self.at(chunk, list_name))
        elif list_name in OTHERS:
            self._pair(chunk, OTHERS[list_name]).free_others()
        else:
            self._pair(chunk, list_name).free_own()

    def recount(self) -> None:
        """Count the bytes anew after an interruption inside `take` or `give`."""
        self.backend.recount(self._flat.values())

    def give_all(self) -> None:
        for payload in self._flat.values():
            self.backend.give(payload)
        for pair in list(self._pairs.values()):
            pair.give()


class HostSlabs:
    """Host payloads, carved from power-of-two slabs that are allocated once."""

    def __init__(self, plan: Plan, backend: Backend) -> None:
        self.plan = plan
        self.backend = backend
        self.room = host_room(plan)
        self.slabs: list[torch.Tensor] = []
        self._payloads: dict[tuple[int, str], torch.Tensor] = {}

    def allocate(self) -> None:
        """Allocate all slabs: see `Arena.allocate_slabs`."""
        slabs: list[torch.Tensor] = []
        try:
            for size in self.room.slab_bytes:
                slabs.append(self.backend.host_slab(size))
        except (RuntimeError, MemoryError) as error:
            held, refused = sum(slab.numel() for slab in slabs), len(slabs) + 1
            slabs.clear()  # the caller may keep the error, and with it these frames
            raise DoesNotFit(
                policy=self.plan.policy,
                place="host",
                needed_bytes=self.room.total_bytes,
                available_bytes=held,
                what=f"{len(self.room.slab_bytes)} slabs, of which the system refused number {refused} "
                f"({str(error).splitlines()[0]})",
            ) from error
        self.slabs = slabs

    def at(self, chunk: int, list_name: str) -> torch.Tensor:
        """Returns the payload as a flat tensor [numel]. Off the plan, a payload without room in the slabs gets memory
        of its own."""
        key = (chunk, list_name)
        payload = self._payloads.get(key)
        if payload is None:
            dtype = dtype_of(self.plan.layout, chunk, list_name)
            size = self.plan.layout.payload_bytes(chunk, list_name)
            if key in self.room.where:
                slab, offset = self.room.where[key]
                payload = self.slabs[slab][offset : offset + size].view(dtype)
            else:
                payload = self.backend.host_slab(size).view(dtype)
            self._payloads[key] = payload
        return payload

    def take(self, chunk: int, list_name: str) -> None:
        """Does nothing, like `give`: the memory is there for good."""

    give = take

    def first_bytes(self, key: tuple[int, str], size_bytes: int) -> torch.Tensor:
        """Returns the first bytes of a room that does not belong to a list of a chunk (`core.slabs.stash_key`)."""
        slab, offset = self.room.where[key]
        return self.slabs[slab][offset : offset + size_bytes]

    def give_all(self) -> None:
        self._payloads.clear()
        self.slabs.clear()
