"""Chunk payloads as torch tensors: which has memory in which place, under the plan's budgets.

Each (chunk, list) has one gpu storage, which grows and shrinks in place: every view stays valid, also those that
autograd saved (on several ranks: `slices.py`). Host payloads are carved from power-of-two slabs allocated once, before
anything moves: pinning inside a hook can deadlock.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

import torch

from executor.devices.backend import Backend
from executor.devices.updates import scratch_bytes
from executor.disks.folders import DiskFolders
from executor.memory.byte_log import ByteLog
from executor.memory.categories import Categories
from executor.memory.payloads import DiskPayloads, GpuPayloads, HostSlabs, dtype_of
from pstar_sim.core.ledger import Ledger
from pstar_sim.core.plan import Plan, Resident
from pstar_sim.core.slabs import HostRoom
from pstar_sim.core.step import Place, Queue
from pstar_sim.core.workspace import WORKSPACE
from pstar_sim.errors import DoesNotFit, OutOfMemory
from pstar_sim.units import format_bytes
from pstar_sim.workload.optimizers import MASTER_LIST

PLACES = (Place.HOST, Place.GPU, Place.NVME)
"""Places of payloads, in the order in which a value is looked for."""
TOWARDS = {Place.GPU: Queue.H2D, Place.HOST: Queue.D2H, Place.NVME: Queue.D2H}
"""Place -> queue whose copies across the link end there."""


class Arena:
    """Takes and frees may come from any thread.

    Attributes:
        unsettled: chunk -> what puts its gradients on the gpu into their list ([Note: gradients in the master copy]),
            held weakly, because what ends a dropped session holds the arena.
    """

    def __init__(
        self,
        plan: Plan,
        backend: Backend,
        *,
        rank: int = 0,
        disks: DiskFolders | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.sliced = plan.layout.ranks > 1
        self.layout = plan.layout
        self.backend = backend
        self.slabs = HostSlabs(plan, backend)
        self.payloads = GpuPayloads(plan.layout, backend, rank)
        self.disks = DiskPayloads(plan, disks, self.slabs)
        self._stores: dict[Place, GpuPayloads | HostSlabs | DiskPayloads] = {
            Place.GPU: self.payloads,
            Place.HOST: self.slabs,
            Place.NVME: self.disks,
        }
        self._ledger = Ledger(plan)
        self._lock = threading.Lock()
        self.log = ByteLog(self._ledger, self._lock, clock)
        self.categories = Categories(plan, self._ledger, self._lock, self.log)
        self._buffer_bytes = self._ledger.used_bytes(Place.GPU)  # buffers of modules: no payloads, on the gpu for good
        self.unsettled: dict[int, weakref.WeakMethod[Callable[[int], None]]] = {}

    def allocate_slabs(self) -> None:
        """All host memory and room on disks at once. Raises DoesNotFit or DiskError, with nothing taken."""
        self.backend.begin(self.plan)
        self.disks.allocate()
        try:
            self.slabs.allocate()
        except DoesNotFit:
            self.disks.give_all()
            raise

    # -- addresses ----------------------------------------------------------------------------------------------------

    def dtype(self, chunk: int, list_name: str) -> torch.dtype:
        return dtype_of(self.layout, chunk, list_name)

    def at(self, place: Place, chunk: int, list_name: str) -> torch.Tensor:
        """Returns the payload, flat [numel], with or without memory."""
        self._settle(place, chunk, list_name)
        return self.unsettled_at(place, chunk, list_name)

    def unsettled_at(self, place: Place, chunk: int, list_name: str) -> torch.Tensor:
        """As `at`, without `unsettled`."""
        return self._stores[place].at(chunk, list_name)

    def _settle(self, place: Place, chunk: int, list_name: str) -> None:
        if chunk in self.unsettled and place is Place.GPU and list_name in ("param", MASTER_LIST):
            settle = self.unsettled[chunk]()
            if settle is not None:
                settle(chunk)

    # -- bytes --------------------------------------------------------------------------------------------------------

    @property
    def gpu_budget_bytes(self) -> int:
        """The plan's gpu budget; less once memory ran out."""
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

    def has_resident(self, resident: Resident) -> bool:
        return self._ledger.holds(resident.chunk, resident.list, resident.place)

    def elsewhere(self, place: Place, chunk: int, list_name: str) -> Place | None:
        return next((p for p in PLACES if p is not place and self.has(p, chunk, list_name)), None)

    @property
    def present(self) -> frozenset[Resident]:
        with self._lock:
            return self._ledger.residents

    def payload_bytes(self, place: Place) -> int:
        """Payloads and buffers at the place now."""
        return self._ledger.used_bytes(place)

    def room_bytes(self, place: Place) -> int:
        return self._ledger.room_bytes(place)

    def take(self, place: Place, chunk: int, list_name: str) -> None:
        """Raises PlanError if it has memory already or the place would exceed its budget, OutOfMemory (nothing changed)
        if the accelerator refuses."""
        ledger = self._ledger
        if place is Place.HOST:
            self.disks.close_windows()
        with self._lock:
            size = ledger.claim(chunk, list_name, place)
        store = self._stores[place]
        try:
            try:
                store.take(chunk, list_name)
            except (OutOfMemory, torch.OutOfMemoryError):
                self.flush()  # memory that was given back may still be on its way to being free
                store.take(chunk, list_name)
        except (OutOfMemory, torch.OutOfMemoryError) as error:
            with self._lock:
                ledger.withdraw(chunk, list_name, place)
            raise self._refused(error, f"{list_name} of chunk {chunk}", size) from error
        with self._lock:
            self.log.note(place, size, chunk, list_name)
            ledger.hold(chunk, list_name, place)

    def flush(self) -> None:
        """Wait until all given back on the gpu is free."""
        if self.backend.streams is not None:
            self.backend.streams.gate.flush()

    def _refused(self, error: OutOfMemory | torch.OutOfMemoryError, what: str, size: int) -> OutOfMemory:
        if isinstance(error, OutOfMemory):
            payload, other, limit = error.payload_bytes, error.other_bytes, error.limit_bytes
        else:
            payload, other, limit = (
                self.payload_bytes(Place.GPU),
                self.tide_bytes,
                None,
            )  # the fragmented bytes are not known
        return OutOfMemory(what=what, asked_bytes=size, payload_bytes=payload, other_bytes=other, limit_bytes=limit)

    def free(self, place: Place, chunk: int, list_name: str) -> None:
        """Raises PlanError if the payload has no memory."""
        self._settle(place, chunk, list_name)
        with self._lock:
            self._ledger.begin_release(chunk, list_name, place)
        self._stores[place].give(chunk, list_name)
        with self._lock:
            self.log.note(place, -self._ledger.end_release(chunk, list_name, place), chunk, list_name)

    def mend(self) -> None:
        """After an interruption inside `take` or `free` the payload in question has no memory."""
        for resident in self._ledger.unfinished:
            self._stores[resident.place].give(resident.chunk, resident.list)
        with self._lock:
            self._ledger.mend()
        self.payloads.recount()

    def tide(self, word: str, moment: int, size_bytes: int) -> None:
        self.log.mark(word, moment)
        self.set_tide(size_bytes)

    def set_tide(self, size_bytes: int) -> None:
        """Non-model bytes for which the gpu leaves room. Raises PlanError without enough room."""
        if size_bytes == self._ledger.tide_bytes:  # only the compute queue changes it
            return
        with self._lock:
            change = self._ledger.set_tide(size_bytes)
            self.log.note_tide(change)
        self.backend.room(self._ledger.budget_bytes[0] - self._buffer_bytes - size_bytes)

    def empty(self) -> None:
        """The arena cannot be used afterwards."""
        self.payloads.give_all()
        with self._lock:
            self._ledger.clear()
            self.slabs.give_all()
        self.disks.give_all()


def check_gpu_memory(plan: Plan, backend: Backend, worst_bytes: int) -> None:
    """Raise DoesNotFit for less memory than the plan can hold at once, with scratch of updates on the gpu.

    worst_bytes: the most in any legal interleaving, the plan's budget where not known.
    """
    available = backend.available_gpu_bytes()
    if backend.device.type != "cpu":  # else the accelerator's memory is host memory
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
    """Raise DoesNotFit if host memory cannot hold the plan.

    gpu_is_host: the virtual accelerator's memory is too.
    model_bytes: loaded parameters, freed while they move into chunks.
    processes: ranks on this host, with the same needs.
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
    beside = sum(size for name, _, size in plan.buffers if name == WORKSPACE)
    needed = (beside + max(room.total_bytes, room.total_bytes + on_gpu - model_bytes)) * processes
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
