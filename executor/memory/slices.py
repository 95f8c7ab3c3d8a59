"""A rank's part of a chunk, and a gpu payload that is this slice or the whole.

[Note: several ranks] of pstar_sim/core/step.py: rank r of P has elements [r * S, (r + 1) * S). Modules read whole
parameters, and whole gradients arrive, so parameters are views of a storage of P * S elements, with memory only while
the others' slices are here (OTHERS in core/step.py); otherwise the own slice lives in its own.

[Note: what a slice moves through] When the others' slices get memory, the own slice is copied into the whole storage
and its own memory given back; when they are freed, the reverse. During the copy both exist: one slice more than the
plan counts, never two, because one payload changes form at a time. A plan that drops "param" before "remote" likewise
keeps its slice of the whole storage until the second drop. `GpuPayloads.peak_transient_bytes` measures these bytes.

[Note: slices on streams] No edge of a plan orders a gather and a write-back of the same chunk: both read the own slice,
wherever it is. Issued ahead, the write-back may read memory that the slice has left or not reached. So all work on own
slices of a chunk is issued under its `Steady`, and runs in the order of issue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from executor.devices.backend import Backend
from pstar_sim.core.layout import Layout
from pstar_sim.core.step import OTHERS, Queue

OTHERS_OF = {own: others for others, own in OTHERS.items()}
"""List -> the list of the other ranks' slices of it."""


@dataclass(frozen=True, slots=True)
class SlicePart:
    """Elements [offset, offset + numel) of the slice are [skip, skip + numel) of the tensor; none where numel is 0."""

    offset: int
    numel: int
    skip: int


def part_of(layout: Layout, chunk: int, offset: int, numel: int, rank: int) -> SlicePart:
    size = layout.slice_numel(chunk)
    begin = rank * size if layout.ranks > 1 else 0
    first, last = max(offset, begin), min(offset + numel, begin + size)
    if last <= first:
        return SlicePart(0, 0, 0)
    return SlicePart(first - begin, last - first, first - offset)


class Steady:
    """A reentrant lock per chunk, inside which its own slices stay in place, and work runs in the order of issue:
    [Note: slices on streams]."""

    def __init__(self, backend: Backend) -> None:
        self._lock = threading.RLock()
        self._streams = backend.streams
        self._last: dict[Queue, Any] = {}  # queue -> event behind the work that it issued here last

    def __enter__(self) -> None:
        self._lock.acquire()
        streams = self._streams
        if streams is None or not self._last:
            return
        try:
            mine = streams.queue
            for queue, event in list(self._last.items()):
                if streams.query(event):
                    del self._last[queue]
                elif mine in streams.host_queues:
                    streams.synchronize(event)
                elif queue is not mine:
                    streams.wait_event(mine, event)
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            if self._streams is not None and self._streams.queue not in self._streams.host_queues:
                self._last[self._streams.queue] = self._streams.record(self._streams.queue)
        finally:
            self._lock.release()


class GpuPayload:
    """whole: flat [ranks * slice], with memory only between `take_others` and `free_others`. extra(change): called when
    the bytes beside the taken memory change by `change` ([Note: what a slice moves through]).
    """

    def __init__(
        self,
        backend: Backend,
        slice_numel: int,
        ranks: int,
        rank: int,
        dtype: torch.dtype,
        steady: Steady,
        one_at_a_time: threading.Lock,
        extra: Callable[[int], None],
    ) -> None:
        self._backend = backend
        self._extra = extra
        self._steady = steady
        self._turn = one_at_a_time
        self._bytes = slice_numel * dtype.itemsize
        self.whole = backend.gpu_payload(slice_numel * ranks, dtype)
        self._begin, self._end = rank * slice_numel, (rank + 1) * slice_numel
        self._alone = backend.gpu_payload(slice_numel, dtype)
        self._has_own = False
        self._has_others = False

    @property
    def _inside(self) -> torch.Tensor:
        return self.whole[self._begin : self._end]

    @property
    def own(self) -> torch.Tensor:
        """Flat [slice], in the storage where it is now."""
        return self._inside if self._has_others else self._alone

    @property
    def others(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.whole[: self._begin], self.whole[self._end :]

    def take_own(self) -> None:
        with self._steady:
            if self._has_others:
                self._extra(-self._bytes)
            else:
                self._backend.take(self._alone)
            self._has_own = True

    def free_own(self) -> None:
        with self._steady:
            if self._has_others:
                self._extra(self._bytes)  # until the others' slices are freed
            else:
                self._backend.give(self._alone)
            self._has_own = False

    def take_others(self) -> None:
        with self._steady, self._turn:
            self._backend.take(self.whole)
            self._extra(self._bytes)
            if self._has_own:
                self._move(self._inside, self._alone)
                self._backend.give(self._alone)
                self._extra(-self._bytes)
            self._has_others = True

    def free_others(self) -> None:
        with self._steady, self._turn:
            if self._has_own:
                self._backend.take(self._alone)
                self._extra(self._bytes)
                self._move(self._alone, self._inside)
            self._backend.give(self.whole)
            self._extra(-self._bytes)
            self._has_others = False

    def _move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._backend.issue(lambda: target.copy_(source))

    def give(self) -> None:
        with self._steady:
            self._backend.give(self._alone)
            self._backend.give(self.whole)
            self._has_own = self._has_others = False
