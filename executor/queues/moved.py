"""Bytes over the link, by iteration."""

from __future__ import annotations

import threading
from collections.abc import Mapping


class Moved:
    """[Note: whose bytes] A plan's copy belongs to its step's iteration, whenever it runs: fetches run ahead,
    writebacks on into the next. One on demand belongs to the running iteration, an evaluation's to the next. So an
    iteration on plan has the plan's bytes, and all add up to the backend's."""

    def __init__(self, already: Mapping[str, int]) -> None:
        """already: before the first iteration, by direction."""
        self._known = dict(already)
        self._bytes: dict[int, dict[str, int]] = {}
        self._ended: dict[int, int] = {}  # iteration -> copies of the plan that have ended
        self._lock = threading.Lock()

    def step(self, iteration: int, direction: str, size_bytes: int) -> None:
        """A copy of the plan has ended."""
        with self._lock:
            self._add(iteration, direction, size_bytes)
            self._ended[iteration] = self._ended.get(iteration, 0) + 1

    def others(self, iteration: int, copied_bytes: Mapping[str, int]) -> None:
        """All other bytes copied by now belong to it; no copy may be running."""
        with self._lock:
            for direction, total in copied_bytes.items():
                self._add(iteration, direction, total - self._known[direction])

    def _add(self, iteration: int, direction: str, size_bytes: int) -> None:
        self._known[direction] += size_bytes
        row = self._bytes.setdefault(iteration, {"h2d": 0, "d2h": 0})
        row[direction] += size_bytes

    def of(self, iteration: int) -> Mapping[str, int]:
        with self._lock:
            return dict(self._bytes.get(iteration, {"h2d": 0, "d2h": 0}))

    def ends_in(self, iteration: int) -> int:
        return self._ended.get(iteration, 0)

    def forget(self, before: int) -> None:
        with self._lock:
            for iteration in [k for k in self._bytes if k < before]:
                del self._bytes[iteration]
                self._ended.pop(iteration, None)
