"""CudaBackend: the engine's queues as CUDA streams and events.

A thin mapping: what the streams are for, which edges they need and when memory is free again is decided above, by code
that also runs on `virtual_streams.py` (StreamQueues, Gate). Here are the calls.

Copies run on persistent streams of high priority, between pinned slabs and chunk storages, without blocking the host.
The compute queue is whatever stream is current in the thread that asks, asked anew each time: autograd runs each
backward function on the stream of its forward, in a thread of its own, and users have streams of theirs.

[Note: two clocks] Events know the milliseconds between two of them, in single precision and by the device's clock,
which drifts against the host's. So times are counted from a point taken in both clocks, and every ten seconds a new one
is taken, on a stream that never has anything to do, so that it happens when it is issued and nobody has to wait for it;
it counts for events that come well after it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from executor.devices.cuda_blocks import Blocks, check_allocator, check_no_capture, pool_shape
from executor.devices.gate import Gate
from executor.devices.room import FRAGMENT_BYTES, LEAST_BYTES, Room, measure_room, outside_bytes
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Queue
from pstar_sim.errors import DoesNotFit, PlanError
from pstar_sim.units import format_bytes

log = logging.getLogger("executor")

__all__ = ["CudaBackend", "cuda_device", "default_adam_threads"]

_SIDE = (Queue.H2D, Queue.D2H, Queue.NET, Queue.ADAM)
_REBASE_S = 10.0
_HIGH = -1  # copies before kernels; CUDA takes the nearest priority it has


def cuda_device(name: str) -> torch.device:
    """The device that "cuda" or "cuda:N" names. Raises PlanError for another word or a device that is not there."""
    word, colon, number = name.partition(":")
    if word != "cuda" or (colon and not (number.isascii() and number.isdigit())):
        raise PlanError(f"device {name!r} is not known; use 'virtual', 'cuda' or 'cuda:0'")
    if not torch.cuda.is_available():
        raise PlanError(f"device {name!r} is not there: torch {torch.__version__} finds no CUDA device; use 'virtual'")
    index = int(number) if colon else torch.cuda.current_device()
    count = torch.cuda.device_count()
    if index >= count:
        raise PlanError(f"device {name!r} is not there: there are {count} CUDA devices, 0 to {count - 1}")
    return torch.device("cuda", index)


def default_adam_threads() -> int:
    """Cores for CPU Adam: all of the process but one for the training thread and one for the threads that issue copies.
    More threads than cores cost Adam (OpenMP barriers) far more than the last core brings."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else (os.cpu_count() or 1)
    return max(1, cores - 2)


class _Zero:
    """A point in both clocks, taken on a stream that has nothing to do."""

    def __init__(self, stream: Any) -> None:
        self.event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)
        self.time_s = time.perf_counter()

    def until(self, event: Any) -> float:
        """Seconds from here to a later event."""
        return float(self.event.elapsed_time(event)) / 1e3


class CudaBackend:
    """One CUDA device.

    adam_threads: torch threads of the queue that updates on the host (None: `default_adam_threads()`). limit_bytes: of
    the card that this process may use, context included, so that a big card plays a small one: torch refuses what goes
    beyond it, also to operators. room_bytes: kept free for what no plan counts, unless more was measured (room.py).

    Raises PlanError for a limit larger than the card or with no room beside what is on it already, for an allocator
    with which budgets would not hold (`cuda_blocks.check_allocator`), and while a CUDA graph is captured.
    """

    name = "cuda"
    host_queues = frozenset({Queue.ADAM, Queue.NVME})

    def __init__(
        self,
        device: torch.device,
        *,
        adam_threads: int | None = None,
        limit_bytes: int | None = None,
        room_bytes: int = LEAST_BYTES,
    ) -> None:
        self.device = device
        self._adam_threads = default_adam_threads() if adam_threads is None else adam_threads
        check_allocator()
        check_no_capture("a run begins")
        with torch.cuda.device(device):
            total = int(torch.cuda.mem_get_info(device)[1])
            if limit_bytes is not None and limit_bytes > total:
                raise PlanError(
                    f"--gpu-memory {format_bytes(limit_bytes)} is more than {torch.cuda.get_device_name(device)} has "
                    f"({format_bytes(total)}), by {format_bytes(limit_bytes - total)}; give at most what it has"
                )
            self._streams: dict[Queue, Any] = {
                queue: torch.cuda.Stream(device, priority=0 if queue is Queue.ADAM else _HIGH)  # type: ignore[no-untyped-call]
                for queue in _SIDE
            }
            self._blocks = Blocks(device)
            self._idle: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._zero = _Zero(self._idle)
            self._zero.event.synchronize()  # its first use takes longer
            self._zero = _Zero(self._idle)
            self._next_zero: _Zero | None = None
            self.kept = measure_room(device, least_bytes=room_bytes)
        log.info("%s: %s", torch.cuda.get_device_name(device), self.kept)
        self._total_bytes = total
        self._limit_bytes = limit_bytes
        if limit_bytes is not None:
            self._cap(limit_bytes)
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._copied = {Queue.H2D: 0, Queue.D2H: 0}
        self._touched: list[Any] = []
        self._budget_bytes = 0
        self.gate = Gate(self, grow=self._blocks.grow, shrink=self._blocks.shrink)

    def _cap(self, limit_bytes: int) -> None:
        """torch's own limit is for what it reserves itself, workspaces and fragments included; what else is on the card
        (this process' context, other programs) comes off first."""
        kept = self.kept
        if limit_bytes <= kept.measured_bytes:
            raise PlanError(
                f"--gpu-memory {format_bytes(limit_bytes)} leaves nothing on "
                f"{torch.cuda.get_device_name(self.device)}: {kept}; give more, or free memory on the card"
            )
        torch.cuda.set_per_process_memory_fraction((limit_bytes - kept.outside_bytes) / self._total_bytes, self.device)

    # -- memory -------------------------------------------------------------------------------------------------------

    def give_back(self) -> int:
        """What payloads leave free goes back to the driver, for operators to have; how many bytes did."""
        check_no_capture("memory is given back")
        self.gate.flush()
        return self._blocks.give_back()

    def give_host_back(self) -> None:
        """Pinned memory that nobody holds goes back to the system. torch keeps it otherwise, also from plans that are
        over. What still copies from it keeps it. Stops the device."""
        torch.cuda.synchronize(self.device)
        empty = getattr(torch._C, "_host_emptyCache", None)
        if empty is None:
            log.info("torch %s keeps pinned memory until the process ends", torch.__version__)
        else:
            empty()

    @property
    def exchanges(self) -> int:
        """How often memory went back to the driver while plans ran ([Note: reserved bytes] in cuda_blocks.py)."""
        return self._blocks.exchanges

    @property
    def pool_bytes(self) -> int:
        """Reserved by the pool of equal blocks."""
        return self._blocks.pool_bytes

    @property
    def slack_bytes(self) -> int:
        """By how much more than the plan's budget may be reserved; see [Note: exchanges] in cuda_blocks.py."""
        return self._blocks.slack_bytes

    def begin(self, plan: Plan) -> None:
        self._budget_bytes = plan.gpu_budget_bytes
        available = self.available_gpu_bytes()
        assert available is not None
        self._blocks.expect(
            pool_shape(plan),
            plan.gpu_budget_bytes,
            beyond_bytes=max(0, available - FRAGMENT_BYTES - plan.gpu_budget_bytes),
        )

    def host_slab(self, size_bytes: int) -> torch.Tensor:
        try:
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:  # cudaHostAlloc's own; torch has no class for it
            raise DoesNotFit(
                policy="the run",
                place="host",
                needed_bytes=size_bytes,
                available_bytes=0,
                what=f"pinned memory that the driver would not give ({error})",
            ) from error

    def gpu_payload(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._blocks.payload(numel, dtype)

    def take(self, payload: torch.Tensor) -> None:
        self.gate.take(payload, self.queue)

    def give(self, payload: torch.Tensor) -> None:
        self.gate.give(payload, self.queue)

    def room(self, payload_bytes: int) -> None:
        self.gate.room(payload_bytes, self.queue)
        self._blocks.make_room(self._budget_bytes - payload_bytes)

    def available_gpu_bytes(self) -> int | None:
        """The card, or the limit, less what is on the card beside torch's memory now, and less workspaces."""
        return max(0, (self._limit_bytes or self._total_bytes) - self._room_now().measured_bytes)

    def plannable_gpu_bytes(self) -> int:
        """What a new plan should be made for: of `available_gpu_bytes`, fragments come off, and what is missing at the
        least that is kept."""
        return max(0, (self._limit_bytes or self._total_bytes) - self._room_now().kept_bytes)

    def _room_now(self) -> Room:
        return dataclasses.replace(self.kept, outside_bytes=outside_bytes(self.device))

    def idle_bytes(self) -> int:
        """Reserved by torch and used by nobody, beside the pool of payloads, which operators cannot have."""
        return self._blocks.idle_bytes()

    def undisturbed(self) -> contextlib.AbstractContextManager[object]:
        """See [Note: refused beside a pool] in cuda_blocks.py."""
        return self._blocks.undisturbed()

    # -- work ---------------------------------------------------------------------------------------------------------

    def copy(self, target: torch.Tensor, source: torch.Tensor, direction: Queue) -> None:
        with self._lock:
            self._copied[direction] += target.numel() * target.element_size()
        target.copy_(source, non_blocking=True)
        self._off_plan(direction)

    def copy_in_fp32(self, target: torch.Tensor, source: torch.Tensor, direction: Queue) -> None:
        with self._lock:
            self._copied[direction] += target.numel() * 4
        if direction is Queue.H2D:
            target.copy_(source.to(self.device, torch.float32, non_blocking=True))
        else:  # cast on the host once it is there, so this thread waits for it
            target.copy_(source.float().cpu())
        self._off_plan(direction)

    def _off_plan(self, direction: Queue) -> None:
        """Of a copy that was not issued by its queue: on the current stream, behind what was issued there, and waited
        for."""
        if self.queue is not direction:
            torch.cuda.current_stream(self.device).synchronize()

    def zero(self, payload: torch.Tensor) -> None:
        payload.zero_()

    def issue(self, work: Callable[[], object]) -> None:
        work()

    def fence(self, queue: Queue) -> None:
        return None

    def enter_thread(self, queue: Queue | None = None) -> None:
        torch.cuda.set_device(self.device)
        torch.set_num_threads(self._adam_threads if queue is Queue.ADAM else 1)
        if queue in self._streams:
            self._thread.queue = queue
            torch.cuda.set_stream(self._streams[queue])

    @property
    def copied_bytes(self) -> dict[str, int]:
        with self._lock:
            return {queue.value: size for queue, size in self._copied.items()}

    @property
    def queue(self) -> Queue:
        found: Queue = getattr(self._thread, "queue", Queue.COMPUTE)
        return found

    def _stream(self, queue: Queue) -> Any:
        if queue is Queue.COMPUTE:
            return torch.cuda.current_stream(self.device)
        return self._streams[queue]

    # -- events -------------------------------------------------------------------------------------------------------

    def record(self, queue: Queue) -> Any:
        stream = self._stream(queue)
        if queue is Queue.COMPUTE:
            check_no_capture("an iteration runs")
            with self._lock:
                touched, self._touched = self._touched, []
            for other in touched:
                if other != stream:
                    stream.wait_stream(other)
        # blocking: a thread that waits for it sleeps, and leaves its core to CPU Adam
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait_event(self, queue: Queue, event: Any) -> None:
        self._stream(queue).wait_event(event)

    def synchronize(self, event: Any) -> None:
        event.synchronize()

    def query(self, event: Any) -> bool:
        return bool(event.query())

    def time_of(self, event: Any) -> float:
        """See [Note: two clocks]."""
        with self._lock:
            after_s = self._zero.until(event)
            following = self._next_zero
            if after_s > 2 * _REBASE_S and following is not None and following.event.query():
                self._zero, self._next_zero = following, None
                after_s = self._zero.until(event)
            if after_s > _REBASE_S and self._next_zero is None:
                self._next_zero = _Zero(self._idle)
            return self._zero.time_s + after_s

    def touch(self) -> None:
        stream = torch.cuda.current_stream(self.device)
        with self._lock:
            if stream not in self._touched:
                self._touched.append(stream)

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self.gate.abandon()
        self._blocks.close()
        self.give_host_back()
        if self._limit_bytes is not None:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)
