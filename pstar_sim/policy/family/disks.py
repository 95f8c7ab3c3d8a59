"""Which states live on disks: as few as the host has no room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import heappushpop, nlargest
from itertools import accumulate
from statistics import median

from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.schedule import Modes
from pstar_sim.policy.passes.feasibility import IN_FLIGHT, in_flight, needed_on_host, trips_bytes

LARGE = 2  # chunks so many times as large as the median chunk come last, because the host needs room for several


def disk_s(job: Job, *, in_turns: bool = False) -> float:
    """Seconds per byte read and written in an iteration, 0 without disks."""
    if (disks := job.machine.nvme) is None:
        return 0.0
    each_s = 1 / disks.read_bytes_per_s, 1 / disks.write_bytes_per_s
    return (sum(each_s) if in_turns else disks.least_s(*each_s)) * job.machine.local_ranks


def with_disks(job: Job, modes: Modes) -> Modes:
    """The states of as few chunks go to the machine's disks as payloads allow: those used last, with the longest time
    between last gradient and next use. Modes stay where the host has room without disks, or there are none. Where disks
    have too little room, or the host has none even so, they are those with the least need: `check_host` refuses them. A
    third chunk is on its way, so that reads and writes go on together, where that is faster than turns.
    """
    budget_bytes, disk_bytes = job.machine.host_budget_bytes, job.machine.nvme_budget_bytes
    needed_bytes = needed_on_host(job, modes)
    sizes = {c: job.states_bytes(c) for c in reversed(job.candidates) if c not in modes.pinned}
    if needed_bytes <= budget_bytes or not disk_bytes or not sizes:
        return modes
    usual_bytes = median(sizes.values())
    order = sorted(sizes, key=lambda c: sizes[c] > LARGE * usual_bytes)
    states_bytes = [sizes[c] for c in order]
    moved_bytes = [0, *accumulate(states_bytes)]
    moved = len(order)
    for passing_chunks in range(IN_FLIGHT, 0, -1):
        count = _fewest(states_bytes, needed_bytes - budget_bytes, passing_chunks)
        if count is None:
            if (wholly := _wholly(job, replace(modes, on_disks=frozenset(order)), order, passing_chunks)) is not None:
                return wholly
            continue
        moved = count
        if moved_bytes[count] <= disk_bytes:
            break
    if in_flight(job) > IN_FLIGHT:
        more = _fewest(states_bytes, needed_bytes - budget_bytes, in_flight(job))
        turns_s = moved_bytes[moved] * disk_s(job, in_turns=True)
        if more is not None and moved_bytes[more] <= disk_bytes and moved_bytes[more] * disk_s(job) < turns_s:
            moved = more
    return replace(modes, on_disks=frozenset(order[:moved]))


def _fewest(states_bytes: Sequence[int], short_bytes: int, passing_chunks: int) -> int | None:
    """So many of the first chunks leave the room that is short, and that of the largest on their way."""
    moved_bytes, passing = 0, [0] * passing_chunks  # a heap of the largest
    for count, size in enumerate(states_bytes, start=1):
        moved_bytes += size
        heappushpop(passing, size)
        if short_bytes - moved_bytes + sum(passing) <= 0:
            return count
    return None


def _wholly(job: Job, modes: Modes, order: Sequence[int], passing_chunks: int) -> Modes | None:
    """As few of these chunks as payloads allow, on the disks with all lists; where that gives too little room, None, or
    with one passing chunk those with the least need. None where several micro-batches add up gradients on the host."""
    if job.several:
        return None
    order = [c for c in order if c not in modes.streamed]
    states_bytes = [job.states_bytes(c) for c in modes.on_disks if c in modes.streamed]
    rest: list[list[int]] = [nlargest(passing_chunks, states_bytes)]  # largest states of the last so many chunks
    for c in reversed(order):
        rest.append(nlargest(passing_chunks, [*rest[-1], job.states_bytes(c)]))
    needed_bytes, disk_bytes = needed_on_host(job, modes), sum(map(job.states_bytes, modes.on_disks))
    passing, largest, least = list[int](), 0, (needed_bytes + sum(rest[-1]), 0)
    for count, c in enumerate(order, start=1):
        passing = nlargest(passing_chunks, [*passing, job.states_bytes(c) + job.sizes[c]])
        largest = max(largest, job.sizes[c])
        needed_bytes -= job.sizes[c]
        disk_bytes += job.sizes[c]
        if disk_bytes > job.machine.nvme_budget_bytes:
            break
        room_bytes = trips_bytes([largest]) + sum(nlargest(passing_chunks, passing + rest[-1 - count]))
        least = min(least, (needed_bytes + room_bytes, count))
        if least[0] <= job.machine.host_budget_bytes:
            break
    fits = least[0] <= job.machine.host_budget_bytes
    return replace(modes, wholly_on_disks=frozenset(order[: least[1]])) if fits or passing_chunks == 1 else None
