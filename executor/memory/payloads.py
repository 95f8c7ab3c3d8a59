"""Tensors of chunks' lists, with or without memory."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

import torch

from executor.devices.backend import Backend
from executor.devices.dtypes import STORED_DTYPES
from executor.disks.folders import DiskFolders
from executor.disks.store import DiskStore
from executor.memory.slices import OTHERS_OF, GpuPayload, Steady
from pstar_sim.core.layout import Layout
from pstar_sim.core.plan import Plan
from pstar_sim.core.slabs import Pool, host_room, pool_peak_bytes, pool_rooms, pooled_payloads
from pstar_sim.core.step import OTHERS, Place
from pstar_sim.errors import DoesNotFit, PlanError

STATE_DTYPES = {4: torch.float32, 2: torch.bfloat16}  # bytes per element -> dtype


def dtype_of(layout: Layout, chunk: int, list_name: str) -> torch.dtype:
    if list_name in ("param", "grad") or (list_name == "grad32" and layout.sum_width(chunk) < 4):
        return STORED_DTYPES[layout.chunks[chunk].dtype]
    row = next((each for each in layout.states_of(chunk).lists if each.name == list_name), None)
    if row is not None and row.per_block:
        return torch.uint8  # codes and scales (slots.py)
    width = 4 if row is None else row.per_element or 4
    if width < 4 and layout.optimizer.masters == "none":  # the parameter itself, and moments that follow it
        return STORED_DTYPES[layout.chunks[chunk].dtype]
    return STATE_DTYPES[width]


def numel_of(layout: Layout, chunk: int, list_name: str) -> int:
    return layout.payload_bytes(chunk, list_name) // dtype_of(layout, chunk, list_name).itemsize


class GpuPayloads:
    """A storage per (chunk, list), on several ranks a pair (`slices.py`). Any thread may take and give.

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
        """Flat [numel], with or without memory, on several ranks this rank's slice, where it is now."""
        if self.sliced and list_name in OTHERS_OF:
            return self._pair(chunk, list_name).own
        key = (chunk, list_name)
        payload = self._flat.get(key)
        if payload is None:
            dtype = dtype_of(self.layout, chunk, list_name)
            payload = self._flat[key] = self.backend.gpu_payload(numel_of(self.layout, chunk, list_name), dtype)
        return payload

    def whole(self, chunk: int, list_name: str) -> torch.Tensor:
        """The list "param" or "grad" with all ranks' slices, flat, rank 0's first."""
        return self._pair(chunk, list_name).whole if self.sliced else self.at(chunk, list_name)

    def parts(self, chunk: int, list_name: str) -> Sequence[torch.Tensor]:
        """Flat, the list's own elements: of the other ranks' slices, those before and behind this rank's."""
        return self._pair(chunk, OTHERS[list_name]).others if list_name in OTHERS else (self.at(chunk, list_name),)

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
        """The chunk's own slices stay in place: a plan may copy a slice beside a gather."""
        return self._moving[chunk] if self.sliced else contextlib.nullcontext()

    def _note_transient(self, change: int) -> None:
        with self._lock:
            self._transient_bytes += change
            self.peak_transient_bytes = max(self.peak_transient_bytes, self._transient_bytes)

    def take(self, chunk: int, list_name: str) -> None:
        """Raises OutOfMemory or torch.OutOfMemoryError, with nothing changed."""
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
        self.backend.recount(self._flat.values())

    def give_all(self) -> None:
        for payload in self._flat.values():
            self.backend.give(payload)
        for pair in list(self._pairs.values()):
            pair.give()


class HostSlabs:
    """Carved from power-of-two slabs. Any thread may take and give.

    [Note: holes of the pool] Payloads of several sizes leave holes. Once more pages were written than payloads ever
    take, unpinned ones of holes go back to the system.
    """

    def __init__(self, plan: Plan, backend: Backend) -> None:
        self.plan = plan
        self.backend = backend
        self.room = host_room(plan)
        self.slabs: list[torch.Tensor] = []
        self._payloads: dict[tuple[int, str], torch.Tensor] = {}
        self._pooled = pooled_payloads(plan)
        largest = max((plan.layout.payload_bytes(*key) for key in self._pooled), default=0)
        self._pool_rooms = pool_rooms(plan)
        self._pool = Pool(self._pool_rooms.values(), largest)
        self._peak_bytes = pool_peak_bytes(plan)
        self._written_bytes = 0  # of the pool, at most: pages that have memory
        self._rooms: list[torch.Tensor] = []
        self._in_pool: dict[tuple[int, str], tuple[int, int]] = {}  # payload -> (room, first byte)
        self._lock = threading.Lock()
        self._read_by: list[Any] = []  # events behind copies to the gpu out of what was given back
        self._given_back: deque[tuple[int, int, int]] = deque()  # of what was lent, in any thread

    def allocate(self) -> None:
        """See `Arena.allocate_slabs`."""
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
        self._rooms = [self.first_bytes(key, size) for key, size in self._pool_rooms.items()]

    def at(self, chunk: int, list_name: str) -> torch.Tensor:
        """Flat [numel]; off the plan perhaps beside the slabs."""
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
        """[Note: the pool] in core/slabs.py; others keep their memory."""
        key = (chunk, list_name)
        if key in self._pooled:
            size = self.plan.layout.payload_bytes(chunk, list_name)
            with self._lock:
                self._wait_for_copies()
                room, first = self._in_pool[key] = self._take(size)
                memory = self._rooms[room][first : first + size]
                self._payloads[key] = memory.view(dtype_of(self.plan.layout, chunk, list_name))

    def _take(self, size_bytes: int) -> tuple[int, int]:
        """[Note: holes of the pool]"""
        held_bytes = self._pool.held_bytes
        room, first = self._pool.take(size_bytes)
        if room == len(self._rooms):
            self._rooms.append(self.backend.host_slab(self._pool.more_bytes))
        written_bytes = self._written_bytes + self._pool.held_bytes - held_bytes
        self._written_bytes = min(written_bytes, sum(self._pool.ends))
        if self._written_bytes > self._peak_bytes:
            for hole, start, size in self._pool.free:
                self.backend.empty_pages(self._rooms[hole][start : min(start + size, self._pool.ends[hole])])
            self._written_bytes = self._pool.held_bytes
        return room, first

    def lend(self, size_bytes: int) -> torch.Tensor | None:
        """uint8 [size_bytes] of the pool until its last view is gone; None without room."""
        with self._lock:
            self._wait_for_copies()
            if self._pool.held_bytes + size_bytes > self._peak_bytes or not self._pool.has(size_bytes):
                return None
            room, first = self._take(size_bytes)
            slab = self._rooms[room]
        memory = (ctypes.c_ubyte * size_bytes).from_address(slab.data_ptr() + first)
        back = weakref.finalize(
            memory, lambda *given: self._given_back.append(given[:3]), room, first, size_bytes, slab
        )
        back.atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)

    def give(self, chunk: int, list_name: str) -> None:
        key = (chunk, list_name)
        with self._lock:
            if key in self._in_pool:
                del self._payloads[key]
                streams = self.backend.streams
                if streams is not None and streams.queue not in streams.host_queues:
                    self._read_by.append(streams.record(streams.queue))
                self._pool.give(*self._in_pool.pop(key), self.plan.layout.payload_bytes(chunk, list_name))

    def _wait_for_copies(self) -> None:
        """They may still read what was given back to the pool."""
        while self._given_back:
            self._pool.give(*self._given_back.popleft())
        for event in self._read_by:
            assert self.backend.streams is not None
            self.backend.streams.synchronize(event)
        self._read_by.clear()

    def first_bytes(self, key: tuple[int, str], size_bytes: int) -> torch.Tensor:
        """First bytes of a room that is no list's (`core.slabs.stash_key`)."""
        slab, offset = self.room.where[key]
        return self.slabs[slab][offset : offset + size_bytes]

    def give_all(self) -> None:
        self._payloads.clear()
        self._rooms.clear()
        self.slabs.clear()


class DiskPayloads:
    """Payloads on disks, in slots of files made once.

    folders: None where the plan keeps nothing on disks, else PlanError.

    [Note: windows] A step reads or writes a whole list; other code wants views of single tensors. `at` gives it a
    window: the whole list, read into the pool. One whose checksum has changed is written when it leaves, for another or
    before a step. Nobody uses more than `WINDOWS` at once.
    """

    WINDOWS = 3

    def __init__(self, plan: Plan, folders: DiskFolders | None, slabs: HostSlabs) -> None:
        self.plan = plan
        self.folders = folders
        self._slabs = slabs
        rows = sorted((r.chunk, r.list) for r in plan.initial if r.place is Place.NVME and r.chunk >= 0)
        self._sizes = {row: plan.layout.payload_bytes(*row) for row in rows}
        if rows and folders is None:
            raise PlanError(f"the plan by {plan.policy} keeps lists on disks, and the run has no folder for them")
        self._store: DiskStore[tuple[int, str]] | None = None
        self._windows: OrderedDict[tuple[int, str], torch.Tensor] = OrderedDict()
        self._lock = threading.RLock()

    @property
    def moved_bytes(self) -> dict[str, int]:
        return {} if self._store is None else self._store.moved_bytes

    def allocate(self) -> None:
        """Raises DiskError where a folder has no room."""
        if self._sizes and self.folders is not None:
            self._store = DiskStore(self.folders, self._sizes, lambda key: f"{key[1]} of chunk {key[0]}")

    def _open(self) -> DiskStore[tuple[int, str]]:
        assert self._store is not None, "a list moved to disks, and the plan has none there"
        return self._store

    def at(self, chunk: int, list_name: str) -> torch.Tensor:
        """[Note: windows]"""
        key = (chunk, list_name)
        with self._lock:
            if key not in self._windows:
                size = self.plan.layout.payload_bytes(chunk, list_name)
                while (memory := self._slabs.lend(size)) is None and len(self._windows) >= self.WINDOWS:
                    self._leave(next(iter(self._windows)))
                memory = self._slabs.backend.host_slab(size) if memory is None else memory
                window = memory.view(dtype_of(self.plan.layout, chunk, list_name))
                self._open().read(key, window)
                self._windows[key] = window
            self._windows.move_to_end(key)
            return self._windows[key]

    def _leave(self, key: tuple[int, str]) -> None:
        if not self._open().holds(key, self._windows[key]):
            self._open().write(key, self._windows[key])
        del self._windows[key]  # written, or the window stays

    def close_windows(self) -> None:
        with self._lock:
            while self._windows:
                self._leave(next(iter(self._windows)))

    def read(self, chunk: int, list_name: str, target: torch.Tensor) -> None:
        self.close_windows()
        self._open().read((chunk, list_name), target)

    def write(self, chunk: int, list_name: str, source: torch.Tensor) -> None:
        self.close_windows()
        self._open().write((chunk, list_name), source)

    def take(self, chunk: int, list_name: str) -> None:
        """Does nothing, like `give`: the room is there for good."""

    give = take

    def give_all(self) -> None:
        self._windows.clear()
        if self._store is not None:
            self._store.close()
            self._store = None
