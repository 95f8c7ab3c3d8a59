"""Backends: the engine's interface to an accelerator, and the virtual accelerator.

[Note: glibc and eviction] glibc gives big blocks back to the system at every eviction, and fresh pages cost more than
kept ones (16-47 ms for 32 MiB beside 2.5 ms). `keep_freed_pages` tells malloc to keep them, with one arena for all
queues' threads. Holes between kept blocks may fit no later block (500 MB beside payloads of 84 MB), so under a plan
with lists on disks `map_large_blocks` gives each large block pages of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from executor.devices.copied import Copied
from executor.devices.gate import Gate
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Queue
from pstar_sim.errors import OutOfMemory

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8  # options of mallopt
_LARGE_BYTES = 1 << 17
_MAPPED = 2  # bit of the size before a block that has pages of its own


class Backend(Protocol):
    """Every method but `copied_bytes` may be called from any queue's thread."""

    name: str
    device: torch.device

    @property
    def streams(self) -> StreamBackend | None:
        """The accelerator to which work is issued ahead of time; None where a call does its work at once."""
        ...

    def begin(self, plan: Plan) -> None: ...

    def host_slab(self, size_bytes: int) -> torch.Tensor:
        """Returns uint8 [size_bytes] of host memory for copies, pinned where that exists."""
        ...

    def empty_pages(self, memory: torch.Tensor) -> None:
        """Of a slab; pinned ones keep their memory. Contents are undefined afterwards."""
        ...

    def gpu_payload(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor [numel] on a storage without memory."""
        ...

    def take(self, payload: torch.Tensor) -> None:
        """Give the payload's storage its memory; contents are undefined. Raises OutOfMemory (or
        torch.OutOfMemoryError), with the payload unchanged."""
        ...

    def available_gpu_bytes(self) -> int | None:
        """What this process could hold, with what it holds; None without a limit."""
        ...

    def give(self, payload: torch.Tensor) -> None:
        """Views stay valid tensors but must not be read."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor, direction: Queue) -> None:
        """Copy across the link (`Queue.H2D` or `Queue.D2H`), casting if the dtypes differ; counts the target's bytes.

        On return the copy has happened or, in the thread of a stream backend's queue, is issued on its stream."""
        ...

    def copy_in_fp32(self, target: torch.Tensor, source: torch.Tensor, direction: Queue) -> None:
        """Like `copy`, cast on the far side: every element crosses as fp32, and the gpu has room for fp32 values."""
        ...

    def zero(self, payload: torch.Tensor) -> None:
        """Done on return or issued, as in `copy`."""
        ...

    def issue(self, work: Callable[[], object]) -> None:
        """Do `work`, torch operations, in the order of this thread's queue, as in `copy`. It looks up host memory when
        it is issued."""
        ...

    def fence(self, queue: Queue) -> None:
        """Return when this thread's work for `queue` has happened; at once in threads of a stream backend's queues,
        whose edges are events."""
        ...

    def room(self, payload_bytes: int) -> None:
        """Limit payloads on the gpu to the budget less the tide, before non-model data are allocated."""
        ...

    def touch(self) -> None:
        """The compute queue has issued work in this thread (autograd's own perhaps), before the moment's end."""
        ...

    def enter_thread(self, queue: Queue | None = None) -> None:
        """The calling thread will execute steps."""
        ...

    def give_back(self) -> int:
        """Give free memory kept for payloads to operators. Returns its bytes. May stop the device."""
        ...

    def give_host_back(self) -> None:
        """Give unused host slabs back."""
        ...

    def close(self) -> None:
        """End all work of the session, and give memory and threads back."""
        ...

    @property
    def copied_bytes(self) -> dict[str, int]:
        """Returns the bytes copied, by direction ("h2d", "d2h")."""
        ...

    def recount(self, payloads: Iterable[torch.Tensor]) -> None:
        """After an interruption inside `take` or `give`."""
        ...

    @property
    def exchanges(self) -> int:
        """Times that memory went back to the driver while plans ran."""
        ...

    def idle_bytes(self) -> int: ...

    def undisturbed(self) -> contextlib.AbstractContextManager[object] | None:
        """Returns a context in which refused memory may suffice ([Note: refused beside a pool] in cuda_blocks.py), or
        None."""
        ...


class StreamBackend(Backend, Protocol):
    """An accelerator to which work is issued ahead of time, on a stream per device queue; the compute queue's is the
    current stream of the calling thread.

    host_queues: those whose steps have happened when they end.
    """

    host_queues: frozenset[Queue]
    gate: Gate

    @property
    def queue(self) -> Queue: ...

    def record(self, queue: Queue) -> Any:
        """Returns an event that completes when all work issued to the queue's stream is done."""
        ...

    def wait_event(self, queue: Queue, event: Any) -> None:
        """Work issued to the queue's stream from now on happens after `event`."""
        ...

    def synchronize(self, event: Any) -> None:
        """Waits for the event, and raises the error that ended the stream."""
        ...

    def query(self, event: Any) -> bool: ...

    def time_of(self, event: Any) -> float:
        """Seconds of `time.perf_counter` at which the event completed."""
        ...


class VirtualLink:
    """Copies that last as long as on a link."""

    def __init__(
        self,
        rates: Mapping[Queue, float | None],
        *,
        latency_s: float,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self.copied = Copied()
        self._rates = rates
        self._latency_s = latency_s
        self._clock = clock
        self._sleep = sleep

    @property
    def bytes_per_s(self) -> dict[str, float | None]:
        """By direction ("h2d", "d2h"); None: as fast as memory."""
        return {queue.value: rate for queue, rate in self._rates.items()}

    def count(self, target: torch.Tensor, direction: Queue, width: int) -> None:
        """width: bytes of an element on the link."""
        self.copied.count(direction, target.numel() * width)

    def carry(self, target: torch.Tensor, source: torch.Tensor, direction: Queue, width: int) -> None:
        start_s = self._clock()
        target.copy_(source)
        rate = self._rates[direction]
        if rate is not None:
            left_s = self._latency_s + target.numel() * width / rate - (self._clock() - start_s)
            if left_s > 0:
                self._sleep(left_s)


class VirtualBackend:
    """An accelerator in host memory.

    h2d_bytes_per_s, d2h_bytes_per_s: rates of the link to the gpu and to the host; None: as fast as memory copies.
    gpu_bytes: memory of the accelerator (None: as the plan says); may change while a plan runs. Payloads beyond it are
        refused with OutOfMemory, and the session counts all other live memory (`guard.py`).
    adam_threads: torch threads of the queue that updates on the host.
    """

    name = "virtual"
    exchanges = 0

    def __init__(
        self,
        *,
        h2d_bytes_per_s: float | None = None,
        d2h_bytes_per_s: float | None = None,
        latency_s: float = 0.0,
        gpu_bytes: int | None = None,
        adam_threads: int = 1,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.device = torch.device("cpu")
        self._adam_threads = adam_threads
        rates = {Queue.H2D: h2d_bytes_per_s, Queue.D2H: d2h_bytes_per_s}
        self.link = VirtualLink(rates, latency_s=latency_s, clock=clock, sleep=sleep)
        self._lock = threading.Lock()
        self.gpu_bytes = gpu_bytes
        self.payload_bytes = 0  # bytes of storages that have memory
        self.count_other: Callable[[], int] = lambda: 0  # all other bytes alive; the session's guard counts them

    @property
    def streams(self) -> StreamBackend | None:
        return None

    def begin(self, plan: Plan) -> None:
        return None

    def idle_bytes(self) -> int:
        return 0

    def undisturbed(self) -> None:
        return None

    def host_slab(self, size_bytes: int) -> torch.Tensor:
        """Zeros; a page takes memory when it is written."""
        return torch.frombuffer(mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)

    def empty_pages(self, memory: torch.Tensor) -> None:
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel()), mmap.MADV_DONTNEED
        )

    def gpu_payload(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        payload = torch.empty(numel, dtype=dtype)
        payload.untyped_storage().resize_(0)
        return payload

    def take(self, payload: torch.Tensor) -> None:
        size = payload.numel() * payload.element_size()
        storage = payload.untyped_storage()
        with self._lock:
            more, other_bytes = size - storage.nbytes(), self.count_other()
            if self.gpu_bytes is not None and self.payload_bytes + other_bytes + more > self.gpu_bytes:
                raise OutOfMemory(
                    what="a chunk",
                    asked_bytes=more,
                    payload_bytes=self.payload_bytes,
                    other_bytes=other_bytes,
                    limit_bytes=self.gpu_bytes,
                )
            self.payload_bytes += more
        storage.resize_(size)

    def give(self, payload: torch.Tensor) -> None:
        storage = payload.untyped_storage()
        with self._lock:
            self.payload_bytes -= storage.nbytes()
        storage.resize_(0)

    def recount(self, payloads: Iterable[torch.Tensor]) -> None:
        with self._lock:
            self.payload_bytes = sum(payload.untyped_storage().nbytes() for payload in payloads)

    def available_gpu_bytes(self) -> int | None:
        return self.gpu_bytes

    def over_bytes(self) -> int:
        """Bytes alive beyond `gpu_bytes`; 0 or less while all fit."""
        with self._lock:
            return 0 if self.gpu_bytes is None else self.payload_bytes + self.count_other() - self.gpu_bytes

    def copy(self, target: torch.Tensor, source: torch.Tensor, direction: Queue) -> None:
        self.link.count(target, direction, target.element_size())
        self.link.carry(target, source, direction, target.element_size())

    def copy_in_fp32(self, target: torch.Tensor, source: torch.Tensor, direction: Queue) -> None:
        self.link.count(target, direction, 4)
        self.link.carry(target, source, direction, 4)

    def zero(self, payload: torch.Tensor) -> None:
        payload.zero_()

    def issue(self, work: Callable[[], object]) -> None:
        work()

    def fence(self, queue: Queue) -> None:
        return None

    def room(self, payload_bytes: int) -> None:
        return None

    def touch(self) -> None:
        return None

    def give_back(self) -> int:
        return 0  # this backend keeps nothing

    def give_host_back(self) -> None:
        return None

    def close(self) -> None:
        return None

    def enter_thread(self, queue: Queue | None = None) -> None:
        torch.set_num_threads(self._adam_threads if queue is Queue.ADAM else 1)

    @property
    def copied_bytes(self) -> dict[str, int]:
        return self.link.copied.by_direction


def keep_freed_pages() -> bool:
    """[Note: glibc and eviction]. Returns False, with nothing changed, without glibc."""
    return _set_malloc({_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1, _ARENA_MAX: 1})


def map_large_blocks() -> bool:
    """[Note: glibc and eviction]. Returns as `keep_freed_pages`."""
    return _set_malloc({_MMAP_MAX: 2**16, _MMAP_THRESHOLD: _LARGE_BYTES, _TRIM_THRESHOLD: _LARGE_BYTES, _ARENA_MAX: 1})


def claim_holes() -> Callable[[], None]:
    """After `map_large_blocks`: malloc still fills large holes first, and keeps their pages. They are taken, unwritten.
    Returns what gives them back."""
    claimed: list[int] = []
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        size = 1 << 30
        while size >= _LARGE_BYTES:
            at = libc.malloc(ctypes.c_size_t(size))
            if at and not ctypes.c_size_t.from_address(at - ctypes.sizeof(ctypes.c_size_t)).value & _MAPPED:
                claimed.append(at)
                continue
            libc.free(at)
            size //= 2

    def give_back() -> None:
        while claimed:
            libc.free(claimed.pop())

    return give_back


def _set_malloc(options: Mapping[int, int]) -> bool:
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return all(mallopt(option, value) for option, value in options.items())


def give_freed_pages_back() -> None:
    """Those that malloc kept."""
    with contextlib.suppress(OSError, AttributeError):  # a C library that keeps no pages
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def available_host_bytes() -> int:
    """What this process can still take: MemAvailable, or the cgroup's limit."""
    found: list[int] = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists():
        text = limit.read_text().strip()
        if text.isdigit():
            found.append(max(0, int(text) - int(used.read_text()) + _reclaimable_bytes()))
    if not found:
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(found)


def _reclaimable_bytes() -> int:
    """Page cache counts as used by the cgroup but is given up on demand."""
    stat = Path("/sys/fs/cgroup/memory.stat")
    if stat.exists():
        for line in stat.read_text().splitlines():
            if line.startswith("inactive_file "):
                return int(line.split()[1])
    return 0
