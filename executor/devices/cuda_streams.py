"""CudaStreams: queues as CUDA streams and events.

Copies run on persistent streams of high priority, between pinned slabs and chunk storages, without blocking the host.
The compute queue is the current stream of the calling thread, read anew at each call: autograd runs each backward
function on the stream of its forward, in a thread of its own, and users have streams of their own.

[Note: two clocks] CUDA gives milliseconds in single precision by the device's clock, which drifts against the host's.
So times count from a point taken in both clocks, anew every ten seconds, on a stream without other work, so that it
happens when issued; events well after it use it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from executor.devices.copied import Copied
from executor.devices.cuda_blocks import check_no_capture
from pstar_sim.core.step import DISK_QUEUES, Queue

_SIDE = (Queue.H2D, Queue.D2H, Queue.NET, Queue.ADAM)
_REBASE_S = 10.0
_HIGH = -1  # copies before kernels; CUDA uses the nearest priority that it has


class _Zero:
    def __init__(self, stream: Any) -> None:
        self.event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)
        self.time_s = time.perf_counter()

    def until(self, event: Any) -> float:
        return float(self.event.elapsed_time(event)) / 1e3


class CudaStreams:
    """The streams of one CUDA device. `backend.StreamBackend` describes the methods."""

    host_queues = frozenset({Queue.ADAM, *DISK_QUEUES})

    def __init__(self, device: torch.device, *, adam_threads: int) -> None:
        self.device = device
        self._adam_threads = adam_threads
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._copied = Copied()
        self._touched: list[Any] = []
        with torch.cuda.device(device):
            self._streams: dict[Queue, Any] = {
                queue: torch.cuda.Stream(device, priority=0 if queue is Queue.ADAM else _HIGH)  # type: ignore[no-untyped-call]
                for queue in _SIDE
            }
            self._idle: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._zero = _Zero(self._idle)
            self._zero.event.synchronize()  # the first use of an event takes longer
            self._zero = _Zero(self._idle)
            self._next_zero: _Zero | None = None

    # -- work ---------------------------------------------------------------------------------------------------------

    def copy(self, target: torch.Tensor, source: torch.Tensor, direction: Queue) -> None:
        self._copied.count(direction, target.numel() * target.element_size())
        target.copy_(source, non_blocking=True)
        self._off_plan(direction)

    def copy_in_fp32(self, target: torch.Tensor, source: torch.Tensor, direction: Queue) -> None:
        self._copied.count(direction, target.numel() * 4)
        if direction is Queue.H2D:
            target.copy_(source.to(self.device, torch.float32, non_blocking=True))
        else:  # cast on the host after the copy, so this thread waits for the copy
            target.copy_(source.float().cpu())
        self._off_plan(direction)

    def _off_plan(self, direction: Queue) -> None:
        """Wait, on the current stream, for a copy that another queue's thread issued."""
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
        return self._copied.by_direction

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
        # blocking: a thread that waits for the event sleeps, and leaves its core to CPU Adam
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
        """[Note: two clocks]"""
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
