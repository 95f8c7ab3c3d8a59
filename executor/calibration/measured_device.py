"""Measured devices: the virtual accelerator and CUDA, with copies through an executor `Backend`, as in a run."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from executor.devices.backend import VirtualBackend, keep_freed_pages
from executor.devices.copied import Copied
from executor.devices.headroom import measure_room
from pstar_sim.core.step import Queue
from pstar_sim.dtypes import DTYPES, MASTER, WORKING
from pstar_sim.errors import PlanError


class Copies(Protocol):
    def host_slab(self, size_bytes: int) -> torch.Tensor: ...

    def gpu_payload(self, numel: int, dtype: torch.dtype) -> torch.Tensor: ...

    def take(self, payload: torch.Tensor) -> None: ...

    def give(self, payload: torch.Tensor) -> None: ...

    def copy(self, target: torch.Tensor, source: torch.Tensor, direction: Queue) -> None: ...

    def fence(self, queue: Queue) -> None: ...

    def enter_thread(self) -> None: ...

    @property
    def copied_bytes(self) -> dict[str, int]: ...


class Device(Protocol):
    """kind: "virtual" or "cuda".
    dtypes: in which it multiplies.
    multiprocessors: number, and (rows, columns) of each one's tile.
    """

    kind: str
    title: str
    device: torch.device
    count: int
    dtypes: tuple[str, ...]
    backend: Copies
    adam_threads: int
    multiprocessors: tuple[int, tuple[int, int]]

    def timed(self, action: Callable[[], object], queue: Queue = Queue.COMPUTE) -> float:
        """Returns the action's seconds."""
        ...

    def finish(self, queue: Queue) -> None:
        """Return when all work on the queue has happened."""
        ...

    def pageable(self, size_bytes: int) -> torch.Tensor | None:
        """None where the device has no pinned memory."""
        ...

    def memory(self) -> tuple[int, int] | None:
        """(bytes, those that no plan may use: `devices/headroom.py`), None without memory of its own."""
        ...

    def using(self) -> AbstractContextManager[None]:
        """Compute runs as in training (threads)."""
        ...

    def work_clock(self) -> Callable[[], float]:
        """For a thread's work while others work."""
        ...

    def taken_by_others(self) -> float:
        """Share of the time in `timed` that other programs had, 0 to 1."""
        ...


class VirtualDevice:
    """Copies are memory copies, compute runs on one thread, Adam on another.

    [Note: CPU seconds] Seconds are the working thread's CPU seconds; wall time would include other programs.
    """

    kind = "virtual"
    dtypes: tuple[str, ...] = (MASTER, WORKING)
    count = 1
    adam_threads = 1
    multiprocessors = 1, (1, 1)

    def __init__(
        self,
        *,
        backend: Copies | None = None,
        clock: Callable[[], float] = time.thread_time,
        wall_clock: Callable[[], float] = time.perf_counter,
        cores: int = 2,
    ) -> None:
        self.title = f"virtual accelerator on {platform.machine()}"
        self.device = torch.device("cpu")
        self.backend: Copies = backend or VirtualBackend()
        self._clock, self._wall_clock = clock, wall_clock
        self._cores = cores
        self._taken = [0.0, 0.0]  # sums of CPU and wall seconds
        keep_freed_pages()

    def timed(self, action: Callable[[], object], queue: Queue = Queue.COMPUTE) -> float:
        wall_s, start_s = self._wall_clock(), self._clock()
        action()
        self.finish(queue)
        took_s = self._clock() - start_s
        self._taken[0] += took_s
        self._taken[1] += self._wall_clock() - wall_s
        return took_s

    def finish(self, queue: Queue) -> None:
        self.backend.fence(queue)

    def pageable(self, size_bytes: int) -> torch.Tensor | None:
        return None

    def memory(self) -> tuple[int, int] | None:
        return None

    @contextmanager
    def using(self) -> Iterator[None]:
        with torch_threads(1):
            yield

    def work_clock(self) -> Callable[[], float]:
        return self._clock if self._cores > 1 else self._wall_clock  # two threads on one core slow each other down

    def taken_by_others(self) -> float:
        cpu_s, wall_s = self._taken
        return max(0.0, 1 - cpu_s / wall_s) if wall_s > 0 else 0.0


class CudaCopies:
    """Over the real link: pinned slabs, a persistent stream per direction, non-blocking, counted.

    For calibration alone: `fence` blocks the host, and nothing else orders copies."""

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = {
            queue: torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for queue in (Queue.H2D, Queue.D2H)
        }
        self._copied = Copied()

    def stream(self, queue: Queue) -> torch.cuda.Stream:
        return self._streams.get(queue) or torch.cuda.current_stream(self.device)

    def host_slab(self, size_bytes: int) -> torch.Tensor:
        slab = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        return slab.zero_()  # touches every page before anything is timed

    def gpu_payload(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        payload = torch.empty(numel, dtype=dtype, device=self.device)
        payload.untyped_storage().resize_(0)
        return payload

    def take(self, payload: torch.Tensor) -> None:
        payload.untyped_storage().resize_(payload.numel() * payload.element_size())

    def give(self, payload: torch.Tensor) -> None:
        payload.untyped_storage().resize_(0)

    def available_gpu_bytes(self) -> int | None:
        free, _ = torch.cuda.mem_get_info(self.device)
        return int(free) + torch.cuda.memory_reserved(self.device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, direction: Queue) -> None:
        with torch.cuda.stream(self._streams[direction]):
            target.copy_(source, non_blocking=True)
        self._copied.count(direction, target.numel() * target.element_size())

    def fence(self, queue: Queue) -> None:
        self.stream(queue).synchronize()

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.device)

    @property
    def copied_bytes(self) -> dict[str, int]:
        return self._copied.by_direction


_TILE = (128, 256)  # of large products of 16-bit tensors, as in generations.toml


class CudaDevice:
    """fp32 products use torch's precision setting (no TF32 unless allowed)."""

    kind = "cuda"

    def __init__(self, index: int = 0) -> None:
        if not torch.cuda.is_available():
            raise PlanError("device 'cuda' is not there: torch finds no CUDA device; use --device virtual")
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        self.title = torch.cuda.get_device_name(self.device)
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        self.count = names.count(self.title)
        self.dtypes: tuple[str, ...] = tuple(d for d in DTYPES if d != WORKING or torch.cuda.is_bf16_supported())
        self.adam_threads = torch.get_num_threads()
        self.multiprocessors = torch.cuda.get_device_properties(self.device).multi_processor_count, _TILE
        self._cuda = CudaCopies(self.device)
        self.backend: Copies = self._cuda

    def timed(self, action: Callable[[], object], queue: Queue = Queue.COMPUTE) -> float:
        """Seconds between events around the action on the queue's stream."""
        stream = self._cuda.stream(queue)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record(stream)
        action()
        end.record(stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def finish(self, queue: Queue) -> None:
        self.backend.fence(queue)

    def pageable(self, size_bytes: int) -> torch.Tensor | None:
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def memory(self) -> tuple[int, int] | None:
        # The context is part of the second figure and stays in the first, as in a cap on the card.
        return int(torch.cuda.mem_get_info(self.device)[1]), measure_room(self.device).kept_bytes

    @contextmanager
    def using(self) -> Iterator[None]:
        torch.cuda.synchronize(self.device)
        yield
        torch.cuda.synchronize(self.device)

    def work_clock(self) -> Callable[[], float]:
        return time.perf_counter

    def taken_by_others(self) -> float:
        return 0.0


def open_device(name: str, *, cores: int = 2) -> Device:
    """The name "auto" is CUDA where there is a device, else virtual. Raises PlanError for a missing device.

    cores: those that the process may use.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "virtual"
    if name == "cuda":
        return CudaDevice()
    if name == "virtual":
        return VirtualDevice(cores=cores)
    raise PlanError(f"device {name!r} is not known; use auto, virtual or cuda")


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
