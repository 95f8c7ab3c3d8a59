"""Whether a job fits at all: the tightest block's needs with nothing pinned, and what has to live on the host."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest

from pstar_sim.errors import DoesNotFit
from pstar_sim.policy.kit.blocks import Block
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.room import describe_moment
from pstar_sim.policy.kit.schedule import TRIPS, Modes
from pstar_sim.policy.passes import gradient_rows
from pstar_sim.units import format_bytes, format_count

# Chunks for whose states the host has room at a time on their way from and to disks: one is updated while others are
# read and written, or (IN_FLIGHT_BESIDE) while one is read and another is written.
IN_FLIGHT, IN_FLIGHT_BESIDE = 2, 3


def check_gpu(job: Job) -> None:
    """Raise DoesNotFit for a block that needs too much with nothing pinned."""
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
    """Always there, with these pinned.

    never: (chunk, list) pairs that are never there.
    """
    absent = sum(job.layout.payload_bytes(c, name) for c, name in never)
    return job.stash_bytes + sum(job.permanent[c] for c in job.moving if c not in pinned) - absent


def host_room(job: Job) -> int:
    """Room of the host for lists of chunks with gradients, beside what is always there."""
    others = held_on_host(job, frozenset(job.candidates))
    return job.machine.host_budget_bytes - others - _passing_bytes(job, job.candidates)


def needed_on_host(job: Job, modes: Modes) -> int:
    """What is neither pinned nor on disks, and one passing gradient."""
    # If no sum spills and no sum waits for the barrier, the sums of streamed chunks are never on the host.
    never = frozenset[int]() if modes.spilt or job.barrier is not None else modes.summed & modes.streamed
    never |= modes.waiting
    needed = held_on_host(job, modes.pinned, ((c, "grad32") for c in never))
    needed -= needed_on_disks(job, modes)
    needed += trips_bytes(job, modes)
    return needed + _passing_bytes(job, (c for c in job.candidates if c not in modes.pinned))


def needed_on_disks(job: Job, modes: Modes) -> int:
    return sum(modes.bytes_on_disks(job, c) for c in modes.on_disks)


def trips_bytes(job: Job, modes: Modes) -> int:
    """Room of lists on their ways: [Note: trips]."""
    working = (job.sizes[c] for c in modes.wholly_on_disks)
    sums = (job.layout.payload_bytes(c, "grad32") for c in modes.sums_on_disks)
    return TRIPS * (2 * max(working, default=0) + max(sums, default=0))


def in_flight(job: Job) -> int:
    disks = job.machine.nvme
    return IN_FLIGHT if disks is None or not disks.gain else IN_FLIGHT_BESIDE


def disk_room(job: Job, modes: Modes) -> int:
    """Room on the host for states from and to disks, of at most `in_flight` chunks."""
    largest = nlargest(in_flight(job), (modes.bytes_on_disks(job, c) for c in modes.on_disks))
    return min(sum(largest), job.machine.host_budget_bytes - needed_on_host(job, modes))


def check_host(job: Job, modes: Modes) -> None:
    """Raise DoesNotFit unless the host has room for what is neither pinned nor on disks and what passes, and disks for
    theirs."""
    pinned, states = modes.pinned, [modes.bytes_on_disks(job, c) for c in modes.on_disks]
    needed = needed_on_host(job, modes) + max(states, default=0)
    budget = job.machine.host_budget_bytes
    if sum(states) > job.machine.nvme_budget_bytes:
        raise DoesNotFit(
            policy=job.name,
            place="nvme",
            needed_bytes=sum(states),
            available_bytes=job.machine.nvme_budget_bytes,
            what=f"lists of {len(states)} chunks for which the host has no room",
        )
    if needed > budget:
        raise DoesNotFit(
            policy=job.name,
            place="host",
            needed_bytes=needed,
            available_bytes=budget,
            what=f"working list and optimizer states of all chunks but {len(pinned)} pinned ones"
            + (f", without the lists of {len(states)} on disks" if states else "")
            + (", accumulated gradients" if job.several else "")
            + (", offloaded activations" if job.workload.stashes else ""),
        )


def _passing_bytes(job: Job, chunks: Iterable[int]) -> int:
    if not job.several or job.sums_on_gpu:
        return 0
    return max((job.layout.payload_bytes(c, "grad") for c in chunks), default=0)
