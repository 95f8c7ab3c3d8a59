"""Times at which steps happened on the device, for logs written when they were issued: events at each begin and end
become seconds between iterations, once complete, so no thread waits."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pstar_sim.core.step import Kind, Queue

if TYPE_CHECKING:
    from executor.devices.backend import StreamBackend
    from executor.memory.byte_log import ByteChange
    from executor.queues.interface import Progress
    from executor.queues.logs import IterationLog, StepLog

KEPT_ITERATIONS = 20
_SETTLED = 2  # iterations after which events are almost surely complete


class DeviceTimes:
    """By (position, iteration)."""

    def __init__(self, backend: StreamBackend) -> None:
        self._backend = backend
        self._progress: Progress | None = None
        self._open: dict[tuple[int, int], list[Any]] = {}  # [begin, end] events
        self._seconds: dict[tuple[int, int], tuple[float, float]] = {}

    def begin(self, progress: Progress) -> None:
        self._progress = progress

    def note_begin(self, i: int, iteration: int, event: Any) -> None:
        self._open[i, iteration] = [event, None]

    def note_end(self, i: int, iteration: int, event: Any) -> None:
        row = self._open.get((i, iteration))
        if row is not None:
            row[1] = event

    def resolve(self, iteration: int) -> None:
        """Old events become seconds, and those too old are dropped."""
        old = [key for key in list(self._open) if key[1] <= iteration - _SETTLED]
        for key in old:
            if self._open[key][1] is None:
                del self._open[key]  # the iteration left the plan in the middle of this moment
        self._take([key for key in old if key in self._open], wait=False)
        for key in [key for key in self._seconds if key[1] < iteration - KEPT_ITERATIONS]:
            del self._seconds[key]

    def resolve_all(self, *, wait: bool) -> None:
        """Turn the events of every ended step into seconds."""
        self._take([key for key, row in list(self._open.items()) if row[1] is not None], wait=wait)

    def _take(self, keys: Sequence[tuple[int, int]], *, wait: bool) -> None:
        backend = self._backend
        for key in keys:
            begin, end = self._open[key]
            # Both events: those of a moment may lie on two streams of the user's, and only complete events have a time.
            if wait:
                backend.synchronize(begin)
                backend.synchronize(end)
            elif not (backend.query(begin) and backend.query(end)):
                continue
            self._seconds[key] = (backend.time_of(begin), backend.time_of(end))
            del self._open[key]

    def apply(
        self, steps: Sequence[StepLog], iterations: Sequence[IterationLog], changes: Sequence[ByteChange]
    ) -> tuple[list[StepLog], list[IterationLog], list[ByteChange]]:
        """A device step is ready when its stream has done the one before. A moment that begins later names the queue it
        waited for."""
        assert self._progress is not None
        position = self._progress.compiled.position
        moved: dict[tuple[int, int], StepLog] = {}
        for row in steps:
            key = position[row.step.id], row.iteration
            found = self._seconds.get(key)
            moved[key] = row if found is None else row.at(*found)
        last: dict[Queue, float] = {}
        for key in sorted(moved, key=lambda key: (moved[key].start_s, moved[key].end_s)):
            row = moved[key]
            if key not in self._seconds:
                continue
            queue = row.step.queue
            ready_s = min(last.get(queue, row.start_s), row.start_s)
            last[queue] = max(last.get(queue, row.end_s), row.end_s)
            cause = row.cause
            if queue is Queue.COMPUTE and not cause and row.start_s > ready_s:
                cause = self._cause(key, moved, ready_s)
            moved[key] = row.after_wait(ready_s, cause)
        ends: dict[int, float] = {}
        for (_, iteration), row in moved.items():
            if row.step.queue is Queue.COMPUTE:
                ends[iteration] = max(ends.get(iteration, row.end_s), row.end_s)
        return (
            list(moved.values()),
            [replace(row, end_s=ends.get(row.number, row.end_s)) for row in iterations],
            self._move_changes(steps, moved, position, changes),
        )

    def _cause(self, key: tuple[int, int], moved: dict[tuple[int, int], StepLog], ready_s: float) -> str:
        assert self._progress is not None
        i, iteration = key
        before = [moved[j, iteration - back] for j, back in self._progress.after[i] if (j, iteration - back) in moved]
        late = max((row for row in before if row.end_s > ready_s), key=lambda row: row.end_s, default=None)
        return "" if late is None else late.step.queue.value

    def _move_changes(
        self,
        steps: Sequence[StepLog],
        moved: dict[tuple[int, int], StepLog],
        position: Mapping[int, int],
        changes: Sequence[ByteChange],
    ) -> list[ByteChange]:
        by_chunk: dict[int, list[StepLog]] = {}
        by_moment: dict[int, list[StepLog]] = {}
        for row in steps:
            if row.step.kind is Kind.COMPUTE and row.step.moment is not None:
                by_moment.setdefault(row.step.moment, []).append(row)
            elif row.step.chunk is not None:
                by_chunk.setdefault(row.step.chunk, []).append(row)
        starts = {chunk: sorted(rows, key=lambda row: row.start_s) for chunk, rows in by_chunk.items()}

        def time_of(change: ByteChange) -> float:
            if change.chunk < 0:
                word, moment = change.mark
                if not by_moment.get(moment):
                    return change.time_s
                begins = word == "in" and not change.at_end
                row = min(
                    by_moment[moment], key=lambda row: abs((row.start_s if begins else row.end_s) - change.time_s)
                )
                happened = moved[position[row.step.id], row.iteration]
                return happened.start_s if begins else happened.end_s
            rows = starts.get(change.chunk, [])
            at = bisect.bisect_right([row.start_s for row in rows], change.time_s) - 1
            for row in rows[max(0, at - 2) : at + 1][::-1]:
                if row.start_s <= change.time_s <= row.end_s:
                    happened = moved[position[row.step.id], row.iteration]
                    return happened.end_s if change.at_end else happened.start_s
            return change.time_s

        return sorted((change.at(time_of(change)) for change in changes), key=lambda row: row.time_s)
