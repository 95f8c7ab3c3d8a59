"""Whether a job fits at all: what its tightest block needs with nothing pinned, and what has to live on the host."""

from __future__ import annotations

from collections.abc import Iterable

from pstar_sim.errors import DoesNotFit
from pstar_sim.policy.kit.blocks import Block
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.room import describe_moment
from pstar_sim.policy.kit.schedule import Modes
from pstar_sim.policy.passes import gradient_rows
from pstar_sim.units import format_bytes, format_count

__all__ = ["check_gpu", "check_host", "held_on_host", "host_room"]


def check_gpu(job: Job) -> None:
    """Raise DoesNotFit if the worst block needs too much with nothing pinned."""
    needs = [
        job.small_bytes + _own_bytes(job, block) + gradient_rows.room(job, n) + block.tide_bytes
        for n, block in enumerate(job.blocks)
    ]
    budget = job.machine.gpu_budget_bytes
    needed = max(needs)
    if needed > budget:
        what = "; ".join(_parts(job, needs.index(needed)))
        raise DoesNotFit(policy=job.name, place="gpu", needed_bytes=needed, available_bytes=budget, what=what)


def _own_bytes(job: Job, block: Block) -> int:
    return sum(job.whole_bytes(c) for c in block.chunks)


def _parts(job: Job, worst: int) -> list[str]:
    block, lists = job.blocks[worst], gradient_rows.room(job, worst)
    moment = max(range(block.first, block.last + 1), key=lambda m: job.tide[m])
    highest = f"the tide's peak, {format_bytes(max(job.tide))}, at every moment"
    parts = [describe_moment(job.workload, moment) if job.follow_tide else highest]
    if block.chunks:
        number = format_count(len(block.chunks), "chunk")
        parts.append(f"{number} used in moment {moment}, {format_bytes(_own_bytes(job, block))}")
    if lists:
        parts.append(f"gradient lists, {format_bytes(lists)}")
    if job.small_bytes:
        parts.append(f"small parameters and their states, {format_bytes(job.small_bytes)}")
    return parts


def held_on_host(job: Job, pinned: frozenset[int], never: Iterable[tuple[int, str]] = ()) -> int:
    """Bytes that the host always holds with these chunks pinned.

    never: (chunk, list) pairs that are never there.
    """
    absent = sum(job.layout.payload_bytes(c, name) for c, name in never)
    return job.stash_bytes + sum(job.permanent[c] for c in job.moving if c not in pinned) - absent


def host_room(job: Job) -> int:
    """Bytes of the host for the lists of chunks that get gradients, beside everything that is always there."""
    others = held_on_host(job, frozenset(job.candidates))
    return job.machine.host_budget_bytes - others - _passing_bytes(job, job.candidates)


def check_host(job: Job, modes: Modes) -> None:
    """Raise DoesNotFit unless the host has room for what is not pinned and for one gradient that passes."""
    pinned = modes.pinned
    # If no sum spills and no sum waits for the barrier, the sums of streamed chunks are never on the host.
    never = frozenset[int]() if modes.spilt or job.barrier is not None else modes.summed & modes.streamed
    needed = held_on_host(job, pinned, ((c, "grad32") for c in never))
    needed += _passing_bytes(job, (c for c in job.candidates if c not in pinned))
    budget = job.machine.host_budget_bytes
    if needed > budget:
        raise DoesNotFit(
            policy=job.name,
            place="host",
            needed_bytes=needed,
            available_bytes=budget,
            what=f"working list and optimizer states of all chunks but {len(pinned)} pinned ones"
            + (", accumulated gradients" if job.several else "")
            + (", offloaded activations" if job.workload.stashes else ""),
        )


def _passing_bytes(job: Job, chunks: Iterable[int]) -> int:
    """Of one gradient that passes."""
    if not job.several or job.sums_on_gpu:
        return 0
    return max((job.layout.payload_bytes(c, "grad") for c in chunks), default=0)
