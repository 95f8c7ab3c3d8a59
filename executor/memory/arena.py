"""Chunk payloads: who has memory where, as torch tensors, under the plan's budgets.

One gpu storage for each (chunk, list), grown and shrunk in place so that every view of it stays valid, also those
autograd saved (on several ranks: `slices.py`). Host payloads are carved from power-of-two slabs allocated once, before
anything moves (the pinned allocator rounds each request up to a power of two, and pinning inside a hook can deadlock).
The arena knows bytes and addresses; what the bytes mean is `contents.py`'s matter, when they move is the plan's.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from executor.adam import scratch_bytes
from executor.devices.backend import Backend
from executor.memory.slices import OTHERS_OF, GpuPayload, Steady
from pstar_sim.core.effects import OTHERS, category_of
from pstar_sim.core.ledger import Ledger
from pstar_sim.core.plan import Plan, Resident
from pstar_sim.core.slabs import HostRoom, host_room, pack_slabs
from pstar_sim.core.step import Place
from pstar_sim.errors import DoesNotFit, OutOfMemory
from pstar_sim.units import format_bytes

__all__ = ["DTYPES", "Arena", "ByteChange", "HostRoom", "check_gpu_memory", "check_host_memory", "pack_slabs"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STATE_DTYPES = {4: torch.float32, 2: torch.bfloat16}  # by bytes an element


@dataclass(frozen=True, slots=True)
class ByteChange:
    """`place` holds `change` more bytes of `category` from `time_s` on; payload: of which list of which chunk.

    mark: what the compute queue had last told the arena (`Arena.mark`).
    """

    time_s: float
    place: Place
    category: str
    change: int
    chunk: int
    list: str
    mark: tuple[str, int]


class Arena:
    """Payloads of one plan. All byte figures are ints; takes and frees may come from any thread.

    peak_gpu_payload_bytes: most payload (and buffer) bytes on the gpu at once. log: every change, oldest first.
    rank: whose slices these are. peak_transient_bytes: [Note: what a slice moves through]; 0 on one rank.
    """

    def __init__(
        self, plan: Plan, backend: Backend, *, rank: int = 0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.sliced = plan.layout.ranks > 1
        self.layout = plan.layout
        self.backend = backend
        self.room = host_room(plan)
        self._state_dtypes = {name: STATE_DTYPES[width] for name, width in plan.layout.state_bytes}
        self.log: list[ByteChange] = []
        self.marks: list[tuple[int, str, int]] | None = None  # (length of the log, word, moment), while measured
        self._ledger = Ledger(plan)
        self._clock = clock
        self._mark = ("", -1)
        self._lock = threading.Lock()
        self._gpu: dict[tuple[int, str], torch.Tensor] = {}
        self._pairs: dict[tuple[int, str], GpuPayload] = {}
        self._moving = [Steady(backend) for _ in self.layout.chunks] if self.sliced else []
        self._turn = threading.Lock()  # of payloads that change between slice and whole
        self._transient_bytes = 0
        self.peak_transient_bytes = 0
        self._host: dict[tuple[int, str], torch.Tensor] = {}
        self._slabs: list[torch.Tensor] = []
        self._buffer_bytes = self._ledger.used_bytes(Place.GPU)  # of modules: no payloads, there for good

    def allocate_slabs(self) -> None:
        """Take all host memory at once. `check_host_memory` comes before. Raises DoesNotFit where the system refuses
        some of it all the same; what was taken is given back."""
        self.backend.begin(self.plan)
        slabs: list[torch.Tensor] = []
        try:
            for size in self.room.slab_bytes:
                slabs.append(self.backend.host_slab(size))
        except (RuntimeError, MemoryError) as error:
            held = sum(slab.numel() for slab in slabs)
            raise DoesNotFit(
                policy=self.plan.policy,
                place="host",
                needed_bytes=self.room.total_bytes,
                available_bytes=held,
                what=f"{len(self.room.slab_bytes)} slabs, of which the system refused number {len(slabs) + 1} "
                f"({str(error).splitlines()[0]})",
            ) from error
        self._slabs = slabs

    # -- addresses ----------------------------------------------------------------------------------------------------

    def dtype(self, chunk: int, list_name: str) -> torch.dtype:
        if list_name in ("param", "grad"):
            return DTYPES[self.layout.chunks[chunk].dtype]
        return self._state_dtypes.get(list_name, torch.float32)

    def gpu(self, chunk: int, list_name: str) -> torch.Tensor:
        """Flat [numel] gpu payload (on several ranks: of this rank's slice, wherever that is now); a valid tensor
        object whether it has memory or not."""
        if self.sliced and list_name in OTHERS_OF:
            return self._pair(chunk, list_name).own
        key = (chunk, list_name)
        payload = self._gpu.get(key)
        if payload is None:
            payload = self.backend.gpu_payload(self.layout.slice_numel(chunk), self.dtype(chunk, list_name))
            self._gpu[key] = payload
        return payload

    def whole(self, chunk: int, list_name: str) -> torch.Tensor:
        """Flat gpu payload of "param" or "grad" with the slices of all ranks, rank 0's first."""
        return self._pair(chunk, list_name).whole if self.sliced else self.gpu(chunk, list_name)

    def _pair(self, chunk: int, list_name: str) -> GpuPayload:
        pair = self._pairs.get((chunk, list_name))
        if pair is None:
            layout = self.layout
            made = GpuPayload(
                self.backend,
                layout.slice_numel(chunk),
                layout.ranks,
                self.rank,
                self.dtype(chunk, list_name),
                self._moving[chunk],
                self._turn,
                self._note_transient,
            )
            pair = self._pairs.setdefault((chunk, list_name), made)
        return pair

    def steady(self, chunk: int) -> contextlib.AbstractContextManager[object]:
        """The chunk's own slices stay where they are inside: a plan may let a copy of one run beside a gather."""
        return self._moving[chunk] if self.sliced else contextlib.nullcontext()

    def _note_transient(self, change: int) -> None:
        with self._lock:
            self._transient_bytes += change
            self.peak_transient_bytes = max(self.peak_transient_bytes, self._transient_bytes)

    def host(self, chunk: int, list_name: str) -> torch.Tensor:
        """Flat [numel] host payload. One the plan has no room for (the engine left the plan) gets memory of its own."""
        key = (chunk, list_name)
        payload = self._host.get(key)
        if payload is None:
            dtype = self.dtype(chunk, list_name)
            size = self.layout.slice_numel(chunk) * dtype.itemsize
            if key in self.room.where:
                slab, offset = self.room.where[key]
                payload = self._slabs[slab][offset : offset + size].view(dtype)
            else:
                payload = self.backend.host_slab(size).view(dtype)
            self._host[key] = payload
        return payload

    def host_bytes(self, key: tuple[int, str], size_bytes: int) -> torch.Tensor:
        """The first bytes of a room on the host that is no list of a chunk (`core.slabs.stash_key`)."""
        slab, offset = self.room.where[key]
        return self._slabs[slab][offset : offset + size_bytes]

    def at(self, place: Place, chunk: int, list_name: str) -> torch.Tensor:
        return self.gpu(chunk, list_name) if place is Place.GPU else self.host(chunk, list_name)

    # -- bytes --------------------------------------------------------------------------------------------------------

    @property
    def gpu_budget_bytes(self) -> int:
        """The plan's; less once memory ran out."""
        return self._ledger.budget_bytes[0]

    @gpu_budget_bytes.setter
    def gpu_budget_bytes(self, size_bytes: int) -> None:
        self._ledger.budget_bytes[0] = size_bytes

    @property
    def peak_gpu_payload_bytes(self) -> int:
        return self._ledger.peak_bytes[0]

    @property
    def tide_bytes(self) -> int:
        return self._ledger.tide_bytes

    def has(self, place: Place, chunk: int, list_name: str) -> bool:
        return self._ledger.holds(chunk, list_name, place)

    @property
    def present(self) -> frozenset[Resident]:
        """Who has memory now."""
        with self._lock:
            return self._ledger.residents

    def payload_bytes(self, place: Place) -> int:
        """Bytes of payloads and buffers at the place now."""
        return self._ledger.used_bytes(place)

    def room_on_gpu(self) -> int:
        """Bytes the gpu could still take now."""
        return self._ledger.room_bytes(Place.GPU)

    def take(self, place: Place, chunk: int, list_name: str) -> None:
        """Give a payload its memory. Raises PlanError if it has it, or if the place would go over its budget;
        OutOfMemory if the accelerator refuses it (nothing has changed then)."""
        ledger = self._ledger
        with self._lock:
            size = ledger.claim(chunk, list_name, place)
        if place is Place.GPU:
            try:
                try:
                    self._take_on_gpu(chunk, list_name)
                except (OutOfMemory, torch.OutOfMemoryError):
                    self.flush()  # what was given back may only be on its way
                    self._take_on_gpu(chunk, list_name)
            except (OutOfMemory, torch.OutOfMemoryError) as error:
                with self._lock:
                    ledger.withdraw(chunk, list_name, place)
                raise self._refused(error, f"{list_name} of chunk {chunk}", size) from error
        with self._lock:
            self._note(place, category_of(list_name), size, chunk, list_name)
            ledger.hold(chunk, list_name, place)

    def flush(self) -> None:
        """Return when everything given back on the gpu is free: where work is issued ahead, it waits for its last
        use."""
        gate = getattr(self.backend, "gate", None)
        if gate is not None:
            gate.flush()

    def _take_on_gpu(self, chunk: int, list_name: str) -> None:
        if not self.sliced or (list_name not in OTHERS_OF and list_name not in OTHERS):
            self.backend.take(self.gpu(chunk, list_name))
        elif list_name in OTHERS:
            self._pair(chunk, OTHERS[list_name]).take_others()
        else:
            self._pair(chunk, list_name).take_own()

    def _refused(self, error: OutOfMemory | torch.OutOfMemoryError, what: str, size: int) -> OutOfMemory:
        if isinstance(error, OutOfMemory):
            payload, other, limit = error.payload_bytes, error.other_bytes, error.limit_bytes
        else:
            payload, other, limit = (
                self.payload_bytes(Place.GPU),
                self.tide_bytes,
                None,
            )  # what is fragmented is not known
        return OutOfMemory(what=what, asked_bytes=size, payload_bytes=payload, other_bytes=other, limit_bytes=limit)

    def free(self, place: Place, chunk: int, list_name: str) -> None:
        """Take a payload's memory away. Raises PlanError if it has none."""
        with self._lock:
            self._ledger.leave(chunk, list_name, place)
        if place is Place.GPU:
            self._give(chunk, list_name)
        with self._lock:
            self._note(place, category_of(list_name), -self._ledger.left(chunk, list_name, place), chunk, list_name)

    def _give(self, chunk: int, list_name: str) -> None:
        if not self.sliced or (list_name not in OTHERS_OF and list_name not in OTHERS):
            self.backend.give(self.gpu(chunk, list_name))
        elif list_name in OTHERS:
            self._pair(chunk, OTHERS[list_name]).free_others()
        else:
            self._pair(chunk, list_name).free_own()

    def mend(self) -> None:
        """While nothing moves, after an interruption inside `take` or `free`: the payload it was about has no memory,
        and the bytes are counted anew."""
        for resident in self._ledger.unfinished:
            if resident.place is Place.GPU:
                self._give(resident.chunk, resident.list)
        with self._lock:
            self._ledger.mend()
        recount = getattr(self.backend, "recount", None)
        if recount is not None:
            recount(self._gpu.values())

    def set_tide(self, size_bytes: int) -> None:
        """Non-model bytes the gpu has to leave room for from now on. Raises PlanError if it cannot."""
        with self._lock:
            change = self._ledger.set_tide(size_bytes)
            if change:
                self._note(Place.GPU, "non-model", change, -1, "")
        if change:
            self.backend.room(self.gpu_budget_bytes - self._buffer_bytes - size_bytes)

    def gpu_peak_bytes(self, start_s: float, end_s: float) -> int:
        """Most bytes of payloads, buffers and non-model data on the gpu at once in [start_s, end_s]."""
        with self._lock:
            log, count = self.log, len(self.log)
            held = self._ledger.held_bytes(Place.GPU) + self.tide_bytes
        peak = 0
        for i in range(count - 1, -1, -1):  # back from now: what was held before each change
            change = log[i]
            if change.time_s <= end_s:
                peak = max(peak, held)
            if change.time_s < start_s:
                return peak
            if change.place is Place.GPU:
                held -= change.change
        return max(peak, held)

    def keep_marks(self, marks: list[tuple[int, str, int]]) -> tuple[int, int]:
        """What the compute queue does from now on is kept in `marks`, too; (length of the log, bytes on the gpu)."""
        with self._lock:
            self.marks = marks
            return len(self.log), self._ledger.held_bytes(Place.GPU)

    def mark(self, word: str, moment: int) -> None:
        """What the compute queue does from now on: ("in", m) during moment m, ("after", m) between m and the next."""
        self._mark = (word, moment)
        if self.marks is not None:
            self.marks.append((len(self.log), word, moment))

    def recategorise(self, place: Place, chunk: int, source: str, target: str) -> None:
        """The working list of a chunk holds another kind of data now (a gradient in place)."""
        size = self.layout.payload_bytes(chunk, "param")
        with self._lock:
            self._note(place, source, -size, chunk, "param")
            self._note(place, target, size, chunk, "param")

    def trim(self, before_s: float) -> None:
        """Forget changes before `before_s`, but for their sum."""
        with self._lock:
            kept = [change for change in self.log if change.time_s >= before_s]
            sums: dict[tuple[Place, str], int] = {}
            for change in self.log[: len(self.log) - len(kept)]:
                sums[change.place, change.category] = sums.get((change.place, change.category), 0) + change.change
            base = [
                ByteChange(0.0, place, category, size, -1, "", ("", -1)) for (place, category), size in sums.items()
            ]
            self.log = base + kept

    def empty(self) -> None:
        """Give all memory back; the arena is of no further use."""
        with self._lock:
            for payload in self._gpu.values():
                self.backend.give(payload)
        for pair in list(self._pairs.values()):
            pair.give()
        with self._lock:
            self._ledger.clear()
            self._host.clear()
            self._slabs.clear()

    def _note(self, place: Place, category: str, change: int, chunk: int, list_name: str) -> None:
        self.log.append(ByteChange(self._clock(), place, category, change, chunk, list_name, self._mark))


def check_gpu_memory(plan: Plan, backend: Backend, worst_bytes: int) -> None:
    """Raise DoesNotFit before anything is allocated if the accelerator has less than the plan can hold at once, with
    what its updates there need besides (`adam.scratch_bytes`).

    worst_bytes: the most in any legal interleaving (the checker's), or the plan's budget where that is not known.
    """
    available = backend.available_gpu_bytes()
    if backend.device.type != "cpu":  # else it is the host's memory
        worst_bytes += scratch_bytes(plan)
    if available is not None and worst_bytes > available:
        raise DoesNotFit(
            policy=plan.policy,
            place="gpu",
            needed_bytes=worst_bytes,
            available_bytes=available,
            what=f"chunks and non-model data of a plan for {format_bytes(plan.gpu_budget_bytes)}; plan again with "
            f"--gpu-memory {available / 1e9:.3g}GB or less, or free memory on the accelerator",
        )


def check_host_memory(
    plan: Plan,
    room: HostRoom,
    *,
    available_bytes: int,
    gpu_is_host: bool,
    model_bytes: int,
    processes: int = 1,
) -> None:
    """Raise DoesNotFit before anything is allocated if host memory cannot hold the plan.

    available_bytes: what the process can still take. gpu_is_host: the virtual accelerator's memory comes from the same.
    model_bytes: of the loaded parameters, given back while they move into their chunks. processes: ranks on this host,
    which all take as much.
    """
    permanent = sum(
        plan.layout.payload_bytes(r.chunk, r.list) for r in plan.initial if r.place is Place.HOST and r.chunk >= 0
    )
    if permanent > plan.host_budget_bytes:
        raise DoesNotFit(
            policy=plan.policy,
            place="host",
            needed_bytes=permanent,
            available_bytes=plan.host_budget_bytes,
            what="chunks whose optimizer states live there, in the plan's host budget",
        )
    on_gpu = 0
    if gpu_is_host:
        every = sum(plan.layout.payload_bytes(c.index, "param") for c in plan.layout.chunks)
        every += sum(
            plan.layout.payload_bytes(r.chunk, r.list)
            for r in plan.initial
            if r.place is Place.GPU and r.chunk >= 0 and r.list != "param"
        )
        on_gpu = min(plan.gpu_budget_bytes, every + plan.workload.peak_non_model_bytes)
    needed = max(room.total_bytes, room.total_bytes + on_gpu - model_bytes) * processes
    if needed > available_bytes:
        also = " and the virtual accelerator's own memory" if gpu_is_host else ""
        also += f", for each of {processes} ranks on this host" if processes > 1 else ""
        raise DoesNotFit(
            policy=plan.policy,
            place="host",
            needed_bytes=needed,
            available_bytes=available_bytes,
            what=f"{format_bytes(room.total_bytes)} of host payloads in {len(room.slab_bytes)} slabs{also}",
        )
