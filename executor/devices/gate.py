"""Gate: gpu memory that is given back while work that uses it may still be in flight.

With streams a step is *issued* long before it *happens*, but an allocator decides at issue which memory it hands out
next: memory given back returns to it once the event of its last use is complete.

[Note: no deadlock] A take may wait for an event, and the wait always ends: the event's work was issued before and waits
only for earlier events, so none depends on the waiting thread or a lock that it holds. When nothing is pending, the
bytes held are those of the arena's ledger, which has allowed the take.

[Note: who waits] A thread of a side queue waits on the host. The thread that issues compute must not stop: it makes its
stream wait for the oldest event and takes the block at once ("early"). The allocator may give that block to any later
take, whose stream then waits too, or back to the driver, and is told the event before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from executor.devices.torch_private import storage_key
from pstar_sim.core.step import Queue
from pstar_sim.errors import OutOfMemory


class Streams(Protocol):
    """The part of StreamBackend that the gate needs."""

    def record(self, queue: Queue) -> Any: ...

    def wait_event(self, queue: Queue, event: Any) -> None: ...

    def synchronize(self, event: Any) -> None: ...

    def query(self, event: Any) -> bool: ...


@dataclass(frozen=True)
class _Pending:
    payload: torch.Tensor
    size_bytes: int
    event: Any


class Gate:
    """before_early(event): called before memory is taken away early.
    pending_bytes: given back, not yet free.
    host_waits: takes that waited on the host.
    stream_waits: takes that made their stream wait instead.
    """

    def __init__(
        self,
        streams: Streams,
        *,
        grow: Callable[[torch.Tensor], None],
        shrink: Callable[[torch.Tensor], None],
        before_early: Callable[[Any], object] = lambda event: None,
    ) -> None:
        self._streams = streams
        self._grow = grow
        self._shrink = shrink
        self._before_early = before_early
        self._lock = threading.Lock()
        self._held: dict[int, int] = {}
        self._pending: dict[int, _Pending] = {}  # oldest first
        self._early: list[Any] = []
        self._room_bytes: int | None = None
        self.held_bytes = 0
        self.pending_bytes = 0
        self.host_waits = 0
        self.stream_waits = 0

    def take(self, payload: torch.Tensor, queue: Queue) -> None:
        """Memory for work that `queue` issues from now on. Raises OutOfMemory where there is none even when all given
        back is free."""
        key, size = _key(payload), payload.numel() * payload.element_size()
        while True:
            with self._lock:
                self._collect()
                kept = self._pending.pop(key, None)
                if kept is not None:  # the payload still has its memory
                    self.pending_bytes -= size
                    self._hold(key, size)
                    self._streams.wait_event(queue, kept.event)
                    return
                oldest = self._oldest_in_the_way(size)
                if oldest is None:
                    try:
                        self._grow(payload)
                    except OutOfMemory:
                        oldest = next(iter(self._pending.values()), None)  # the device has less memory than was assumed
                        if oldest is None:
                            raise
                    else:
                        self._hold(key, size)
                        for event in self._early:
                            self._streams.wait_event(queue, event)
                        return
            self._wait(queue, oldest)

    def give(self, payload: torch.Tensor, queue: Queue) -> None:
        """Once all work issued to `queue` by now has happened. Nothing without memory."""
        key = _key(payload)
        with self._lock:
            size = self._held.pop(key, None)
            if size is None:
                return
            self.held_bytes -= size
            self._pending[key] = _Pending(payload, size, self._streams.record(queue))
            self.pending_bytes += size

    def room(self, payload_bytes: int, queue: Queue) -> None:
        """Limit payloads to so many bytes; the caller will use the rest."""
        while True:
            with self._lock:
                self._room_bytes = payload_bytes
                self._collect()
                oldest = self._oldest_in_the_way(0)
                if oldest is None:
                    return
            self._wait(queue, oldest)

    def flush(self) -> None:
        while True:
            with self._lock:
                self._collect()
                oldest = next(iter(self._pending.values()), None)
            if oldest is None:
                return
            self._streams.synchronize(oldest.event)

    def abandon(self) -> None:
        """Free all that was given back, without its events, once the streams are gone."""
        with self._lock:
            for key in list(self._pending):
                self._free(key)
            self._early.clear()

    def _hold(self, key: int, size: int) -> None:
        self._held[key] = size
        self.held_bytes += size

    def _oldest_in_the_way(self, size: int) -> _Pending | None:
        if self._room_bytes is None or self.held_bytes + self.pending_bytes + size <= self._room_bytes:
            return None
        return next(iter(self._pending.values()), None)

    def _wait(self, queue: Queue, oldest: _Pending) -> None:
        """[Note: who waits]. After `room` the stream waits here: operators take their memory without the gate. A side
        queue that did not sleep here would spin."""
        if queue is not Queue.COMPUTE:
            self.host_waits += 1
            self._streams.synchronize(oldest.event)
            return
        self._streams.wait_event(queue, oldest.event)
        self.stream_waits += 1
        with self._lock:
            key = _key(oldest.payload)
            if self._pending.get(key) is oldest:
                self._before_early(oldest.event)
                self._free(key)
                self._early.append(oldest.event)

    def _collect(self) -> None:
        for key in [key for key, row in self._pending.items() if self._streams.query(row.event)]:
            self._free(key)
        if self._early:
            self._early = [event for event in self._early if not self._streams.query(event)]

    def _free(self, key: int) -> None:
        row = self._pending.pop(key)
        self.pending_bytes -= row.size_bytes
        self._shrink(row.payload)


def _key(payload: torch.Tensor) -> int:
    return storage_key(payload)
