"""Every change of bytes of one arena, in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from pstar_sim.core.effects import NON_MODEL, category_of
from pstar_sim.core.ledger import Ledger
from pstar_sim.core.step import Place


class ByteChange(NamedTuple):
    """`place` holds `change` more bytes of `category`.

    chunk, list: -1 and "" for a change that a moment makes.
    mark: the compute queue's last mark in the log (`ByteLog.mark`).
    at_end: when its step or moment ends, not when it begins or at the mark.
    """

    time_s: float
    place: Place
    category: str
    change: int
    chunk: int
    list: str
    mark: tuple[str, int]
    at_end: bool = False

    def at(self, time_s: float) -> ByteChange:
        return self._replace(time_s=time_s)


class ByteLog:
    """lock: the ledger's, held by the caller of `note`.

    Attributes:
        changes: oldest first.
        marks: (number of changes, word, moment) of each while a measurement runs, else None.
    """

    def __init__(self, ledger: Ledger, lock: threading.Lock, clock: Callable[[], float]) -> None:
        self.changes: list[ByteChange] = []
        self.marks: list[tuple[int, str, int]] | None = None
        self._ledger = ledger
        self._lock = lock
        self._clock = clock
        self._mark = ("", -1)
        self._turned: dict[tuple[Place, int, str], str] = {}  # payload -> its category, where that is not its list's

    def note(self, place: Place, change: int, chunk: int, list_name: str) -> None:
        """change: > 0 where the payload got memory."""
        turned = self._turned.pop((place, chunk, list_name), None)
        category = category_of(list_name) if turned is None or change > 0 else turned
        self._append(self._clock(), place, category, change, chunk, list_name, self._mark, change < 0)

    def note_tide(self, change: int) -> None:
        self._append(self._clock(), Place.GPU, NON_MODEL, change, -1, "", self._mark, False)

    def category(self, place: Place, chunk: int, list_name: str) -> str:
        """[Note: categories] in core/ledger.py."""
        return self._turned.get((place, chunk, list_name)) or category_of(list_name)

    def note_turn(
        self, place: Place, category: str, size: int, chunk: int, list_name: str, *, by_moment: bool = False
    ) -> None:
        """A payload with memory holds data of `category` from now on.

        by_moment: changed by a moment, not by a step of the chunk.
        """
        before = self.category(place, chunk, list_name)
        if before == category:
            return
        time_s, about = self._clock(), (-1, "") if by_moment else (chunk, list_name)
        for turned, change in ((before, -size), (category, size)):
            self._append(time_s, place, turned, change, *about, self._mark, True)
        self._turned[place, chunk, list_name] = category

    def _append(self, *row: object) -> None:
        self.changes.append(tuple.__new__(ByteChange, row))  # past a constructor in Python

    def gpu_peak_bytes(self, start_s: float, end_s: float) -> int:
        """The most held at once in [start_s, end_s], buffers and non-model data included."""
        with self._lock:
            log, count = self.changes, len(self.changes)
            held = self._ledger.held_bytes(Place.GPU) + self._ledger.tide_bytes
        peak = 0
        for i in range(count - 1, -1, -1):  # backwards from now: the bytes before each change
            change = log[i]
            if change.time_s <= end_s:
                peak = max(peak, held)
            if change.time_s < start_s:
                return peak
            if change.place is Place.GPU:
                held -= change.change
        return max(peak, held)

    def keep_marks(self, marks: list[tuple[int, str, int]]) -> tuple[int, int]:
        """Also append marks to `marks`. Returns (length of the log, bytes on the gpu)."""
        with self._lock:
            self.marks = marks
            return len(self.changes), self._ledger.held_bytes(Place.GPU)

    def mark(self, word: str, moment: int) -> None:
        """("in", m): during moment m; ("after", m): between m and the next."""
        self._mark = (word, moment)
        if self.marks is not None:
            self.marks.append((len(self.changes), word, moment))

    def trim(self, before_s: float) -> None:
        """Replace the changes before `before_s` by their sum."""
        with self._lock:
            kept = [change for change in self.changes if change.time_s >= before_s]
            sums: dict[tuple[Place, str], int] = {}
            for change in self.changes[: len(self.changes) - len(kept)]:
                sums[change.place, change.category] = sums.get((change.place, change.category), 0) + change.change
            base = [
                ByteChange(0.0, place, category, size, -1, "", ("", -1)) for (place, category), size in sums.items()
            ]
            self.changes = base + kept
