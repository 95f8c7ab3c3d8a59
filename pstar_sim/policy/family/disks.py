"""Which states live on disks: as few as the host has no room for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heappushpop, nlargest
from itertools import accumulate, pairwise
from statistics import median

from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.schedule import TRIPS, Modes
from pstar_sim.policy.passes.feasibility import IN_FLIGHT, in_flight, needed_on_host

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
            if (beside := _beside_states(job, modes, order, passing_chunks)) is not None:
                return beside
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


def _beside_states(job: Job, modes: Modes, order: Sequence[int], passing_chunks: int) -> Modes | None:
    """As few sums or working lists as payloads allow, then as few of the others: first those whose bytes take less of
    the disks' time. None where all leave too little room, with one passing chunk those with the least need."""
    modes = replace(modes, on_disks=frozenset(order))
    turns = {c: job.states_bytes(c) for c in order}
    short_bytes = needed_on_host(job, modes) - job.machine.host_budget_bytes
    disk_bytes = job.machine.nvme_budget_bytes - sum(turns.values())
    trips_bytes, least = 0, (short_bytes + sum(nlargest(passing_chunks, turns.values())), modes)
    for ways, name, sizes in _tiers(job, modes, order):
        rest = [nlargest(passing_chunks, (turns[c] for c in order if c not in sizes))]
        for c in reversed(sizes):
            rest.append(nlargest(passing_chunks, [*rest[-1], turns[c]]))  # largest turns of the last so many chunks
        passing, largest, fewest = list[int](), 0, (least[0], 0)
        for count, (c, size) in enumerate(sizes.items(), start=1):
            turns[c] += size
            passing = nlargest(passing_chunks, [*passing, turns[c]])
            largest = max(largest, size)
            short_bytes -= size
            disk_bytes -= size
            if disk_bytes < 0:
                break
            room_bytes = ways * TRIPS * largest + sum(nlargest(passing_chunks, passing + rest[-1 - count]))
            fewest = min(fewest, (short_bytes + trips_bytes + room_bytes, count))
            if fewest[0] <= 0:
                break
        if fewest[1]:
            least = fewest[0], replace(modes, **{name: frozenset([*sizes][: fewest[1]])})
        if disk_bytes < 0 or least[0] <= 0:
            break
        trips_bytes += ways * TRIPS * largest
        modes = replace(modes, **{name: frozenset(sizes)})
    return least[1] if least[0] <= 0 or passing_chunks == 1 else None


def _tiers(job: Job, modes: Modes, order: Sequence[int]) -> Iterator[tuple[int, str, dict[int, int]]]:
    """(ways through the host, field of `Modes`, chunk -> bytes)."""
    working = 2, "wholly_on_disks", {c: job.sizes[c] for c in order}
    sums = [c for c in order if c not in modes.spilt and not (c in modes.summed and c in modes.streamed)]
    if not job.several or not sums:
        yield working
        return
    tier = 1, "sums_on_disks", {c: job.layout.payload_bytes(c, "grad32") for c in sums}
    yield from (tier, working) if _sums_s(job) <= _working_s(job) else (working, tier)


def disks_s(job: Job, modes: Modes) -> float:
    """Seconds of the disks for what lives there."""
    seconds = disk_s(job) * sum(map(job.states_bytes, modes.on_disks))
    if modes.sums_on_disks:
        seconds += _sums_s(job) * sum(job.layout.payload_bytes(c, "grad32") for c in modes.sums_on_disks)
    if modes.wholly_on_disks:
        seconds += _working_s(job) * sum(job.sizes[c] for c in modes.wholly_on_disks)
    return seconds


def beside_states_s(job: Job) -> float:
    """As `disk_s`, of the lists that go there behind the states."""
    if job.machine.nvme is None or not job.candidates:
        return 0.0
    return min(_working_s(job), _sums_s(job)) if job.several else _working_s(job)


def _sums_s(job: Job) -> float:
    times = 1 if job.sums_on_gpu else job.workload.micro_batches - (not job.add_last)
    return times * disk_s(job)


def _working_s(job: Job) -> float:
    """With a gradient in its place."""
    assert job.machine.nvme is not None
    usual = job.candidates[len(job.candidates) // 2]
    visits = sum(after > n + 1 for n, after in pairwise((-2, *job.touched[usual])))
    gradients = int(not (job.add_last or job.sums_on_gpu))
    read_s, write_s = 1 / job.machine.nvme.read_bytes_per_s, 1 / job.machine.nvme.write_bytes_per_s
    each_s = (visits + gradients) * read_s, (1 + gradients) * write_s
    return job.machine.nvme.least_s(*each_s) * job.machine.local_ranks
