"""Copied: bytes that crossed the link, counted where they are copied."""

from __future__ import annotations

import threading

from pstar_sim.core.step import Queue


class Copied:
    """Any thread may count and read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = {Queue.H2D: 0, Queue.D2H: 0}

    def count(self, direction: Queue, size_bytes: int) -> None:
        with self._lock:
            self._bytes[direction] += size_bytes

    @property
    def by_direction(self) -> dict[str, int]:
        with self._lock:
            return {queue.value: size for queue, size in self._bytes.items()}
