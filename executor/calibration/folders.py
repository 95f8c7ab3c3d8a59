"""Folders of disks: rates of `disks.store` by size and threads."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from executor.disks.folders import DiskFolders
from executor.disks.store import ALIGN_BYTES, DiskStore
from pstar_sim.errors import DiskError

THREADS = (1, DiskFolders.threads, 8)
SIZES = (4 << 20, 32 << 20)
_LISTS = 4  # of each size
_LONGEST_S = 1.5  # of one direction of a point


@dataclass(frozen=True)
class DiskPoint:
    """threads: for each folder."""

    threads: int
    size_bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float


@dataclass(frozen=True)
class FolderRates:
    """`usual` is for the executor's threads, the last of `points` has the largest size.

    together: bytes/s of simultaneous reads and writes, with the executor's threads.
    """

    points: tuple[DiskPoint, ...]
    usual: DiskPoint
    together: tuple[float, float]
    latency_s: float

    @property
    def figures(self) -> dict[str, Any]:
        """Of `Nvme`."""
        return {
            "read_bytes_per_s": self.usual.read_bytes_per_s,
            "write_bytes_per_s": self.usual.write_bytes_per_s,
            "read_beside_bytes_per_s": self.together[0],
            "write_beside_bytes_per_s": self.together[1],
            "latency_s": self.latency_s,
        }


def folder_rates(
    folders: Sequence[str | Path],
    *,
    threads: Sequence[int] = THREADS,
    clock: Callable[[], float] = time.perf_counter,
) -> FolderRates:
    """At most 20 seconds and 0.3 GB. Raises DiskError for unusable folders, and where transfers go through the page
    cache, whose rate is memory's.

    threads: per folder, the executor's among them.
    """
    points: list[DiskPoint] = []
    for count in threads:
        opened = DiskFolders(folders=[Path(folder) for folder in folders], threads=count)
        try:
            if opened.notes:
                raise DiskError(
                    f"{opened.notes[0]}, where transfers go through memory, so that no rate of a disk can be measured; "
                    "give a folder on ext4, xfs, btrfs or f2fs"
                )
            sizes = {(size, number): size for size in (*SIZES, ALIGN_BYTES) for number in range(_LISTS)}
            store = DiskStore(opened, sizes, lambda key: f"list {key[1]} of {key[0]} bytes")
            try:
                points += [_point(store, count, size, clock) for size in SIZES]
                if count == DiskFolders.threads:
                    usual, together = points[-1], _together(store, clock)
                    _rate(store.write, ALIGN_BYTES, clock)
                    latency_s = ALIGN_BYTES / _rate(store.read, ALIGN_BYTES, clock)
            finally:
                store.close()
        finally:
            opened.close()
    return FolderRates(tuple(points), usual, together, latency_s)


Move = Callable[[tuple[int, int], torch.Tensor], None]


def _point(store: DiskStore[tuple[int, int]], threads: int, size: int, clock: Callable[[], float]) -> DiskPoint:
    _rate(store.write, size, clock)  # a file system may write a slot more slowly the first time
    write = _rate(store.write, size, clock)
    return DiskPoint(threads, size, _rate(store.read, size, clock), write)


def _rate(move: Move, size: int, clock: Callable[[], float]) -> float:
    memory = torch.randint(0, 256, (size,), dtype=torch.uint8)
    seconds: list[float] = []
    for number in range(_LISTS):
        if sum(seconds) < _LONGEST_S or not seconds:
            begun_s = clock()
            move((size, number), memory)
            seconds.append(clock() - begun_s)
    return size / max(statistics.median(seconds), 1e-9)


def _together(store: DiskStore[tuple[int, int]], clock: Callable[[], float]) -> tuple[float, float]:
    """Bytes/s of reads of half of the lists while others are written, until both have done half of the lists."""
    size, half = SIZES[-1], _LISTS // 2
    halves = {"read": range(half, _LISTS), "write": range(half)}
    seconds: dict[str, list[float]] = {name: [] for name in halves}

    def move(name: str, call: Move) -> None:
        memory = torch.randint(0, 256, (size,), dtype=torch.uint8)
        both_begin.wait()
        for number in itertools.cycle(halves[name]):
            begun_s = clock()
            try:
                call((size, number), memory)
            except BaseException:
                failed.set()
                raise
            seconds[name].append(clock() - begun_s)
            if failed.is_set() or min(map(len, seconds.values())) >= half:
                return

    both_begin, failed = threading.Barrier(2), threading.Event()
    with ThreadPoolExecutor(2) as threads:
        for one in [threads.submit(move, name, getattr(store, name)) for name in halves]:
            one.result()
    read, write = (size / max(statistics.median(each), 1e-9) for each in seconds.values())
    return read, write
