"""VirtualStreams: an accelerator in host memory whose copies happen later, in a thread per copy queue and for
collectives, in the order of issue.

So a wrong edge gives wrong data.

Compute happens as it is issued, in the user's thread; `delays` simulates how far an accelerator is behind.
"""

from __future__ import annotations

import queue as queues
import threading
import time
from collections.abc import Callable

import torch

from executor.devices.backend import StreamBackend, VirtualBackend
from executor.devices.gate import Gate
from pstar_sim.core.step import DISK_QUEUES, Queue
from pstar_sim.errors import PlanError

_STREAMS = (Queue.H2D, Queue.D2H, Queue.NET)


class VirtualEvent:
    """failure: the error that ended the stream before this point."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.time_s = 0.0
        self._done = threading.Event()

    def complete(self, time_s: float, failure: BaseException | None) -> None:
        self.time_s, self.failure = time_s, failure
        self._done.set()

    def query(self) -> bool:
        if self.failure is not None:
            raise self.failure
        return self._done.is_set()

    def wait(self) -> None:
        self._done.wait()
        if self.failure is not None:
            raise self.failure


class _Stream:
    """After an error it only completes events, with that error."""

    def __init__(self, name: str, delay: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._issued: queues.SimpleQueue[Callable[[], object] | VirtualEvent | None] = queues.SimpleQueue()
        self._delay = delay
        self._sleep = sleep
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"stream-{name}", daemon=True)
        self._thread.start()

    def issue(self, work: Callable[[], object] | VirtualEvent) -> None:
        self._issued.put(work)

    def end(self) -> None:
        self._issued.put(None)

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        while (work := self._issued.get()) is not None:
            try:
                if self._failure is None:
                    seconds = self._delay()
                    if seconds > 0:
                        self._sleep(seconds)
                    if not isinstance(work, VirtualEvent):
                        work()
            except BaseException as error:  # each wait for an event of this stream raises it again
                self._failure = error
            if isinstance(work, VirtualEvent):
                work.complete(time.perf_counter(), self._failure)
            del work  # releases its tensors while nothing is issued


class VirtualStreams(VirtualBackend):
    """As VirtualBackend, and:

    delays(queue): called before each piece of work; returns the seconds that the stream waits (for compute: the delay
        of its events).
    poison: whether memory that is taken holds NaN, so that a read before the copy shows.
    """

    name = "virtual streams"
    host_queues = frozenset({Queue.ADAM, *DISK_QUEUES})

    def __init__(
        self,
        *,
        h2d_bytes_per_s: float | None = None,
        d2h_bytes_per_s: float | None = None,
        latency_s: float = 0.0,
        gpu_bytes: int | None = None,
        adam_threads: int = 1,
        delays: Callable[[Queue], float] | None = None,
        poison: bool = True,
    ) -> None:
        super().__init__(
            h2d_bytes_per_s=h2d_bytes_per_s,
            d2h_bytes_per_s=d2h_bytes_per_s,
            latency_s=latency_s,
            gpu_bytes=gpu_bytes,
            adam_threads=adam_threads,
        )
        self._delays = delays
        self._poison = poison
        self._thread = threading.local()
        self._streams: dict[Queue, _Stream] = {}
        self.gate = Gate(self, grow=self._grow, shrink=super().give)

    @property
    def streams(self) -> StreamBackend:
        return self

    # -- memory -------------------------------------------------------------------------------------------------------

    def _grow(self, payload: torch.Tensor) -> None:
        super().take(payload)
        if self._poison and payload.is_floating_point():
            payload.fill_(float("nan"))

    def take(self, payload: torch.Tensor) -> None:
        self.gate.take(payload, self.queue)

    def give(self, payload: torch.Tensor) -> None:
        self.gate.give(payload, self.queue)

    def room(self, payload_bytes: int) -> None:
        self.gate.room(payload_bytes, self.queue)

    # -- work ---------------------------------------------------------------------------------------------------------

    def copy(self, target: torch.Tensor, source: torch.Tensor, direction: Queue) -> None:
        self._issue_copy(target, source, direction, target.element_size())

    def copy_in_fp32(self, target: torch.Tensor, source: torch.Tensor, direction: Queue) -> None:
        self._issue_copy(target, source, direction, 4)

    def _issue_copy(self, target: torch.Tensor, source: torch.Tensor, direction: Queue, width: int) -> None:
        self.link.count(target, direction, width)
        if self.queue is not direction:
            self.link.carry(target, source, direction, width)
            return

        def work() -> None:
            _require_memory(target, source, direction)
            self.link.carry(target, source, direction, width)

        self._stream(direction).issue(work)

    def zero(self, payload: torch.Tensor) -> None:
        queue = self.queue

        def work() -> None:
            _require_memory(payload, payload, queue)
            payload.zero_()

        self.issue(work)

    def issue(self, work: Callable[[], object]) -> None:
        queue = self.queue
        if queue in _STREAMS:
            self._stream(queue).issue(work)
        else:
            work()

    def enter_thread(self, queue: Queue | None = None) -> None:
        super().enter_thread(queue)
        if queue is not None:
            self._thread.queue = queue

    @property
    def queue(self) -> Queue:
        found: Queue = getattr(self._thread, "queue", Queue.COMPUTE)
        return found

    def _stream(self, queue: Queue) -> _Stream:
        with self._lock:
            stream = self._streams.get(queue)
            if stream is None:
                delays = self._delays
                delay = (lambda: 0.0) if delays is None else (lambda: delays(queue))
                stream = self._streams[queue] = _Stream(queue.value, delay, time.sleep)
            return stream

    # -- events -------------------------------------------------------------------------------------------------------

    def record(self, queue: Queue) -> VirtualEvent:
        event = VirtualEvent()
        if queue not in _STREAMS and (queue is not Queue.COMPUTE or self._delays is None):
            event.complete(time.perf_counter(), None)
        else:
            self._stream(queue).issue(event)
        return event

    def wait_event(self, queue: Queue, event: VirtualEvent) -> None:
        if queue not in _STREAMS:
            event.wait()
        elif not event.query():
            self._stream(queue).issue(event.wait)

    def synchronize(self, event: VirtualEvent) -> None:
        event.wait()

    def query(self, event: VirtualEvent) -> bool:
        return event.query()

    def time_of(self, event: VirtualEvent) -> float:
        return event.time_s

    def close(self) -> None:
        with self._lock:
            streams = list(self._streams.values())
            self._streams.clear()
        for stream in streams:
            stream.end()
        for stream in streams:
            stream.join()
        self.gate.abandon()


def _require_memory(target: torch.Tensor, source: torch.Tensor, queue: Queue) -> None:
    for tensor in (target, source):
        need = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        if tensor.untyped_storage().nbytes() < need:
            raise PlanError(f"the {queue.value} stream uses memory that was given back while the work was in flight")
