"""Which states live on disks: as few as the host has no room for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heappushpop, nlargest
from itertools import accumulate, pairwise
from operator import itemgetter
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pstar_sim.policy.family.attempt import Attempt
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.schedule import TRIPS, Modes
from pstar_sim.policy.kit.ties import least_of
from pstar_sim.policy.passes.feasibility import IN_FLIGHT, held_on_host, in_flight, needed_on_disks, needed_on_host
from pstar_sim.workload.optimizers import MASTER_LIST

LARGE = 2  # chunks so many times as large as the median chunk come last, because the host needs room for several


def disk_s(job: Job, *, in_turns: bool = False) -> float:
    """Seconds per byte read and written in an iteration, 0 without disks."""
    if (disks := job.machine.nvme) is None:
        return 0.0
    each_s = 1 / disks.read_bytes_per_s, 1 / disks.write_bytes_per_s
    return (sum(each_s) if in_turns else disks.least_s(*each_s)) * job.machine.local_ranks


def with_disks(job: Job, modes: Modes, host_states: frozenset[str] = frozenset()) -> Modes:
    """The states of as few chunks go to the machine's disks as payloads allow: those used last, with the longest time
    between last gradient and next use. Modes stay where the host has room without disks, or there are none. Where disks
    have too little room, or the host has none even so, they are those with the least need: `check_host` refuses them. A
    third chunk is on its way, so that reads and writes go on together, where that is faster than turns.

    host_states: lists that stay on the host, where the others suffice and are fewer bytes.
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
    short_bytes, moved = needed_bytes - budget_bytes, len(order)
    for passing_chunks in range(IN_FLIGHT, 0, -1):
        count = _fewest(states_bytes, short_bytes, passing_chunks)
        if count is None:
            if (beside := _beside_states(job, modes, order, passing_chunks)) is not None:
                return beside
            continue
        moved = count
        if moved_bytes[count] <= disk_bytes:
            break
    moved = _for_both(job, states_bytes, short_bytes, moved)
    whole = replace(modes, on_disks=frozenset(order[:moved]))
    if not host_states:
        return whole
    some_bytes = [job.states_bytes(c, host_states) for c in order]
    counts = (_fewest(some_bytes, short_bytes, passing_chunks) for passing_chunks in range(IN_FLIGHT, 0, -1))
    if (count := next(filter(None, counts), None)) is None:
        return whole
    count = _for_both(job, some_bytes, short_bytes, count)
    if sum(some_bytes[:count]) >= min(moved_bytes[moved], disk_bytes):
        return whole
    some = frozenset(c for c, size in zip(order[:count], some_bytes) if size)
    return replace(modes, on_disks=some, host_states=host_states)


def apart(job: Job, modes: Modes) -> Iterator[Modes]:
    """As `with_disks` made them, but all states but masters stay on the host, or masters alone."""
    names = frozenset(name for c in modes.on_disks for name in job.states_of(c))
    bare = replace(modes, on_disks=frozenset(), wholly_on_disks=frozenset(), sums_on_disks=frozenset())
    for half in (names - {MASTER_LIST}, names & {MASTER_LIST}):
        if half and (some := with_disks(job, bare, half)).host_states:
            yield some


def fastest_apart(whole: Attempt, make: Callable[[Modes], Attempt]) -> Attempt:
    """Of `whole` and attempts with its modes `apart`."""
    others = [made for made in map(make, apart(whole.course.job, whole.modes)) if made.fits]
    return fastest_on_disks([whole, *others] if whole.fits else others or [whole])


def fastest_on_disks(tried: Sequence[Attempt]) -> Attempt:
    """They are followed unless every window repeats."""
    steady = len(tried) == 1 or all(a.window.repeats for a in tried)
    timed = [(a, a.iteration_s if steady else a.period_s()) for a in tried]
    return least_of(timed, seconds=itemgetter(1), burden=lambda a: (needed_on_disks(a[0].course.job, a[0].modes),))[0]


def _for_both(job: Job, sizes: Sequence[int], short_bytes: int, count: int) -> int:
    """So many more that reads go on beside writes, where that is faster than turns."""
    more = _fewest(sizes, short_bytes, in_flight(job))
    turns_s = sum(sizes[:count]) * disk_s(job, in_turns=True)
    if more is None or (more_bytes := sum(sizes[:more])) > job.machine.nvme_budget_bytes:
        return count
    return more if more_bytes * disk_s(job) < turns_s else count


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
            least = fewest[0], _with_lists(modes, name, [*sizes][: fewest[1]])
        if disk_bytes < 0 or least[0] <= 0:
            break
        trips_bytes += ways * TRIPS * largest
        modes = _with_lists(modes, name, sizes)
    return least[1] if least[0] <= 0 or passing_chunks == 1 else None


def _with_lists(modes: Modes, name: str, chunks: Iterable[int]) -> Modes:
    changes: dict[str, Any] = {name: frozenset(chunks)}
    return replace(modes, **changes)


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
    seconds = disk_s(job) * sum(job.states_bytes(c, modes.host_states) for c in modes.on_disks)
    if modes.sums_on_disks:
        seconds += _sums_s(job) * sum(job.layout.payload_bytes(c, "grad32") for c in modes.sums_on_disks)
    if modes.wholly_on_disks:
        seconds += _working_s(job) * sum(job.sizes[c] for c in modes.wholly_on_disks)
    return seconds


def least_disks_s(job: Job) -> NDArray[np.float64]:
    """Of `disks_s`, by number of pins."""
    pinned = np.cumsum([0, *(job.permanent[c] for c in job.candidates)])
    states = np.cumsum([0, *(job.states_bytes(c) for c in job.candidates)])
    short = held_on_host(job, frozenset()) - job.machine.host_budget_bytes - pinned
    seconds: NDArray[np.float64] = disk_s(job) * np.clip(short, 0, states[-1] - states)
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
