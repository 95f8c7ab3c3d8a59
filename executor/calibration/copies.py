"""The executor's own copies by size, each way, pinned and pageable.

A fetch is timed as the engine does it; sources rotate through a host slab too large for a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import torch

from executor.calibration.bench import Bench
from executor.calibration.measured_device import Device
from pstar_sim.core.step import Queue

KIB, MIB = 1 << 10, 1 << 20
_SIZES = (64 * KIB, 512 * KIB, 2 * MIB, 8 * MIB, 32 * MIB, 128 * MIB)
_PAGEABLE_BYTES = 64 * MIB


class Copier:
    """host: a slab, of which each copy uses the next part."""

    def __init__(self, device: Device, host: torch.Tensor, size_bytes: int) -> None:
        self._backend = device.backend
        self._size = size_bytes
        self._host = host
        self._parts = max(1, host.numel() // size_bytes)
        self._at = count()
        self._payloads = [self._backend.gpu_payload(size_bytes, torch.uint8) for _ in range(2)]
        self._full = self._backend.gpu_payload(size_bytes, torch.uint8)
        self._backend.take(self._full)
        self._full.fill_(1)

    def _part(self) -> torch.Tensor:
        at = next(self._at) % self._parts * self._size
        return self._host[at : at + self._size]

    def fetch(self) -> None:
        payload = self._payloads[0]
        self._backend.take(payload)
        self._backend.copy(payload, self._part(), Queue.H2D)
        self._backend.fence(Queue.H2D)
        self._backend.give(payload)

    def write_back(self) -> None:
        self._backend.copy(self._part(), self._full, Queue.D2H)
        self._backend.fence(Queue.D2H)

    def close(self) -> None:
        self._backend.give(self._full)

    def action(self, queue: Queue) -> Callable[[], None]:
        return self.fetch if queue is Queue.H2D else self.write_back


def copy_rates(device: Device, bench: Bench, queue: Queue) -> tuple[tuple[float, float], ...]:
    """((bytes, bytes/s), ...), ascending, for one direction alone."""
    host = device.backend.host_slab(bench.effort.memory_bytes // 2)
    sizes = [size for size in _SIZES if size <= host.numel() // 2]
    copiers = {size: Copier(device, host, size) for size in sizes}
    with device.using():
        seconds = bench.medians(
            {size: copier.action(queue) for size, copier in copiers.items()}, lambda a: device.timed(a, queue)
        )
    for copier in copiers.values():
        copier.close()
    return tuple((float(size), size / s) for size, s in seconds.items())


def pageable_rate(device: Device, bench: Bench) -> float | None:
    """Bytes/s from and to unpinned host memory, in the slower direction; None where the device has no pinned memory."""
    host = device.pageable(_PAGEABLE_BYTES)
    if host is None:
        return None
    copier = Copier(device, host, _PAGEABLE_BYTES)
    with device.using():
        rates = [
            _PAGEABLE_BYTES / bench.medians({0: copier.action(queue)}, lambda a, q=queue: device.timed(a, q))[0]  # type: ignore[misc]
            for queue in (Queue.H2D, Queue.D2H)
        ]
    copier.close()
    return min(rates)
