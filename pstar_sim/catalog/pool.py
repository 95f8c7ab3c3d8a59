"""The one memory that a unified machine's GPUs and host share, each byte with one of them."""

from __future__ import annotations

from dataclasses import replace

from pstar_sim.catalog.machine import Machine
from pstar_sim.errors import CatalogError
from pstar_sim.units import format_bytes


def share_pool(machine: Machine, pool_bytes: int, *, gpu_given: bool, host_given: bool) -> Machine:
    """gpu_given, host_given: by hand; the other place has the rest.

    Raises CatalogError for shares larger than the pool, or that leave nothing.
    """
    gpus = machine.ranks[: machine.local_ranks]
    taken = sum(rank.gpu.usable_bytes for rank in gpus)
    left = pool_bytes - (machine.host.memory_bytes if host_given and not gpu_given else taken)
    if gpu_given and host_given:
        if machine.host.memory_bytes > left:
            raise CatalogError(
                f"{machine.name} has one memory of {format_bytes(pool_bytes)} for GPU and host; {format_bytes(taken)} "
                f"for the GPU and {format_bytes(machine.host.memory_bytes)} for the host are more than that; give less"
            )
        return machine
    if host_given:
        each = left // len(gpus)
        context = max(rank.gpu.context_bytes for rank in gpus)
        if each <= context:
            raise _nothing_left(machine, pool_bytes, "the GPU", "the host")
        ranks = tuple(replace(r, gpu=replace(r.gpu, usable_bytes=min(each, r.gpu.memory_bytes))) for r in machine.ranks)
        return replace(machine, ranks=ranks)
    if not gpu_given and left >= machine.host.memory_bytes:
        return machine
    if left <= machine.host.reserved_bytes:
        raise _nothing_left(machine, pool_bytes, "the host", "the GPU")
    return replace(machine, host=replace(machine.host, memory_bytes=left))


def _nothing_left(machine: Machine, pool_bytes: int, whom: str, other: str) -> CatalogError:
    return CatalogError(
        f"{machine.name} has one memory of {format_bytes(pool_bytes)} for GPU and host; that leaves nothing for "
        f"{whom}: give {other} less"
    )
