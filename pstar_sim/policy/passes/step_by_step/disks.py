"""Copies of lists to the disks and back."""

from __future__ import annotations

from collections.abc import Iterable

from pstar_sim.core.step import Kind, Place, Queue
from pstar_sim.policy.kit.room import queue_of_writes
from pstar_sim.policy.passes.builder import Builder


def read_in(b: Builder, c: int, list_name: str, m: int, after: Iterable[int]) -> int:
    """Read a list from the disks to the host."""
    return b.add(Queue.NVME, Kind.NVME_READ, chunk=c, list_name=list_name, moment=m, after=after)


def write_out(b: Builder, c: int, list_name: str, m: int, after: Iterable[int]) -> int:
    """Writes a list from the host to disks; returns the step that frees it on the host."""
    written = b.add(queue_of_writes(b.machine), Kind.NVME_WRITE, chunk=c, list_name=list_name, moment=m, after=after)
    return b.free(queue_of_writes(b.machine), c, list_name, Place.HOST, m, [written])
