"""States on disks pass through the host for their update.

[Note: turns on disks] A chunk's states are read ahead of its update and written behind it, in turns of fixed order,
with room on the host for a few (`Schedule.disk_room_bytes`). A turn's reads wait for the one before's and until earlier
turns have freed their room, so the host never holds more in any order of the steps, and no turn waits for a later one.

The update that the next forward needs first goes first, once it has gradients; those of streamed chunks, for which
compute waits, come by position before all others. CPU Adam takes a turn's chunk by the turn's deadline, which may be
long before its use: else disks stand still.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import Enum
from heapq import heappop, heappush
from itertools import accumulate, pairwise

from pstar_sim.core.draft import FREE
from pstar_sim.core.step import Kind, Queue
from pstar_sim.policy.kit.room import queue_of_writes
from pstar_sim.policy.kit.schedule import TRIPS, Schedule
from pstar_sim.policy.passes.draft_rows import After, DraftRows


def turns(schedule: Schedule) -> list[int]:
    """Chunks in the order of their turns: [Note: turns on disks]."""
    job, updates = schedule.job, schedule.updates
    ends_s = [0.0, *accumulate(position.seconds for position in schedule.positions)]
    first = schedule.at[-1] + 1 if schedule.updates_wait else 0  # positions before any update on the CPU
    later: list[tuple[float, int]] = []  # (seconds at which the gradient is there, chunk), ascending
    for c in schedule.modes.on_disks:
        position = updates.get(c, max(first, schedule.at[job.block_of[job.uses.last_gradient(c)]] + 1))
        later.append((ends_s[position], c))
    later.sort(reverse=True)
    order: list[int] = []
    ready: list[tuple[bool, int, int]] = []  # the most urgent first
    now_s = 0.0
    while later or ready:
        now_s = now_s if ready else max(now_s, later[-1][0])
        while later and later[-1][0] <= now_s:
            _, c = later.pop()
            heappush(ready, (c not in updates, updates.get(c, job.uses.first_use(c)), c))
        order.append(heappop(ready)[-1])
        now_s += _seconds(schedule, order[-1])
    return order


def _deadlines(schedule: Schedule, order: Sequence[int]) -> dict[int, float]:
    """Chunk -> moment of the next iteration, by whose start its update leaves the turns behind it their seconds before
    first uses; for one that is due before the iteration begins, minus the seconds.

    order: of turns.
    """
    job = schedule.job
    start_s = [0.0, *accumulate(job.cost.moments_s)]
    latest_s = start_s[-1]
    due: dict[int, float] = {}
    for c in reversed(order):
        latest_s = min(latest_s, start_s[job.uses.first_use(c)])
        due[c] = float(bisect_left(start_s, latest_s)) if latest_s >= 0 else latest_s
        latest_s -= _seconds(schedule, c)
    return due


def _seconds(schedule: Schedule, chunk: int) -> float:
    job, written = schedule.job, [name for name in schedule.lists_on_disks(chunk) if name != "grad32"]
    assert job.machine.nvme is not None
    each_s = [
        sum(job.charges.of(kind, chunk, name).seconds for name in lists)
        for kind, lists in ((Kind.NVME_READ, _read(schedule, chunk)), (Kind.NVME_WRITE, written))
    ]
    return job.machine.nvme.least_s(*each_s)


def _read(schedule: Schedule, chunk: int) -> Sequence[str]:
    """Not a working list that came up for the update, or whose contents the update does not read."""
    unread = chunk in schedule.updates or schedule.all_in_grad32(chunk)
    return [name for name in schedule.lists_on_disks(chunk) if name != "param" or not unread]


def _ended_before(sizes: Sequence[int], room_bytes: int) -> list[int]:
    """For each turn, the last that has to end before it has room, negative in the iteration before."""
    count = len(sizes)
    befores: list[int] = []
    before, held = -count - 1, 0
    for n in range(-count, count):
        held += sizes[n]
        while held > room_bytes or n - before > count:
            before += 1
            held -= sizes[before]
        befores.append(before)
    return befores[count:]


class Way(Enum):
    """Of trips: working lists to the GPU, last gradients to disks, sums both ways."""

    UP = "up"
    DOWN = "down"
    SUM = "sum"


class DiskRows:
    """Writes the rows of the turns, for the pass that updates."""

    def __init__(self, rows: DraftRows) -> None:
        self._rows = rows
        self._writes = queue_of_writes(rows.schedule.job.machine)
        self._order = turns(rows.schedule)
        self._due = _deadlines(rows.schedule, self._order) if self._order else {}
        self._turn_of = {c: n for n, c in enumerate(self._order)}
        schedule = rows.schedule
        self._sizes = [schedule.modes.bytes_on_disks(schedule.job, c) for c in self._order]
        self._befores = _ended_before(self._sizes, schedule.disk_room_bytes)
        self._reads: defaultdict[int, dict[str, int]] = defaultdict(dict)  # chunk -> list -> row
        self._ends: defaultdict[int, list[int]] = defaultdict(list)  # chunk -> rows

    @property
    def held_bytes(self) -> int:
        """The most that the host holds of chunks that take turns."""
        held = (sum(self._sizes[k] for k in range(before + 1, n + 1)) for n, before in enumerate(self._befores))
        return max(held, default=0)

    def adam_key(self, chunk: int) -> tuple[float, ...] | None:
        """By deadlines, of a chunk that takes turns: other updates would let the disks stand still."""
        due = self._due.get(chunk)
        return None if due is None or self._rows.schedule.adam == "fifo" else (1.0, due)

    def read(self, chunk: int) -> Mapping[str, int]:
        """List -> row that brings it to the host, or gives it room there."""
        rows, schedule = self._rows, self._rows.schedule
        moment, read = schedule.job.uses.last_gradient(chunk), _read(schedule, chunk)
        for name in schedule.lists_on_disks(chunk):
            key = (1.0, float(self._turn_of[chunk]), float(len(self._reads[chunk])))
            after = rows.host_left(chunk, name)
            if name in read:
                row = rows.add(Queue.NVME, Kind.NVME_READ, chunk, name, moment, after=after, key=key)
            elif chunk in schedule.updates:
                continue
            else:
                row = rows.add(Queue.NVME, Kind.ALLOC, chunk, name, moment, charge=FREE, after=after, key=key)
            self._reads[chunk][name] = row
        return self._reads[chunk]

    def write(self, chunk: int, name: str, updated: int) -> None:
        """Leaves the host behind the row that has updated it; a sum ends there."""
        if name not in self._rows.schedule.lists_on_disks(chunk):
            return
        rows, moment = self._rows, self._rows.schedule.job.uses.last_gradient(chunk)
        key, after = (0.0, float(self._turn_of[chunk]), float(len(self._ends[chunk]))), ((updated, 0),)
        if name == "grad32":
            freed = rows.add(self._writes, Kind.FREE, chunk, name, moment, charge=FREE, after=after, key=key)
        else:
            written = rows.add(self._writes, Kind.NVME_WRITE, chunk, name, moment, after=after, key=key)
            freed = rows.add(self._writes, Kind.FREE, chunk, name, moment, charge=FREE, behind=written)
        self._ends[chunk].append(freed)
        rows.host_left_by[chunk, name] = freed

    def close(self) -> None:
        """Let each turn wait for the turns before."""
        rows, order, befores = self._rows, self._order, self._befores
        for n, (ended, before) in enumerate(pairwise([befores[-1] - len(order), *befores]) if order else ()):
            after = [(row, int(n == 0)) for row in self._reads[order[n - 1]].values()] if len(order) > 1 else []
            for turn in range(ended + 1, before + 1):
                after += [(row, int(turn < 0)) for row in self._ends[order[turn]]]
            for row in self._reads[order[n]].values():
                rows.wait(row, *after)


class DiskTrips:
    """[Note: trips] A working list on disks passes the host for each visit, and its gradient on its way there; a sum
    comes for each add. Each of these ways has room for TRIPS, in the order of positions: a trip waits until an earlier
    one has left, so the host never holds more in any order of the steps, and no trip waits for a later one.
    """

    def __init__(self, rows: DraftRows) -> None:
        self._rows = rows
        self._writes = queue_of_writes(rows.schedule.job.machine)
        # way -> of each trip, the row that begins it and the row by which it has left
        self._ways: dict[Way, list[tuple[int, int]]] = {way: [] for way in Way}
        self._first: dict[tuple[int, str], int] = {}  # (chunk, list) -> row that brings it to the host first
        self._lists = rows.schedule.on_disks

    def read(self, c: int, n: int) -> After:
        """What the fetch for position n waits for."""
        rows = self._rows
        if not self._has(c, "param"):
            return ()
        after = rows.host_left(c, "param")
        read = rows.add(Queue.NVME, Kind.NVME_READ, c, moment=rows.moment_of(n), after=after, key=(-1.0, float(n)))
        self._first.setdefault((c, "param"), read)
        return ((read, 0),)

    def fetched(self, c: int, row: int, read: After) -> None:
        if read:
            self._leave(Way.UP, (c, "param"), read[0][0], row)

    def before_gradient(self, c: int) -> After:
        return self._rows.host_left(c, "param") if self._has(c, "param") else ()

    def send(self, c: int, down: int, added: int | None) -> None:
        """A last gradient goes on, or leaves behind its add."""
        if self._has(c, "param"):
            self._first.setdefault((c, "param"), down)
            self._leave(Way.DOWN, (c, "param"), down, self._sent(c, "param", down) if added is None else added)

    def bring_sum(self, c: int, moment: int) -> After:
        rows, after = self._rows, self._rows.host_left(c, "grad32")
        if not after:
            return ()
        key = (-1.0, float(len(rows.end_of)))
        return ((rows.add(Queue.NVME, Kind.NVME_READ, c, "grad32", moment, after=after, key=key), 0),)

    def send_sum(self, c: int, added: int, brought: After) -> int:
        if not self._has(c, "grad32"):
            return added
        begins = brought[0][0] if brought else self._first.setdefault((c, "grad32"), added)
        return self._leave(Way.SUM, (c, "grad32"), begins, self._sent(c, "grad32", added))

    def updated(self, c: int, down: int) -> None:
        if self._has(c, "param"):
            self._first.setdefault((c, "param"), down)

    def _has(self, c: int, name: str) -> bool:
        return (c, name) in self._lists

    def _sent(self, c: int, name: str, row: int) -> int:
        rows, key = self._rows, (-0.5, self._rows.next_number())
        return rows.add(self._writes, Kind.NVME_WRITE, c, name, rows.rows[row].moment, after=((row, 0),), key=key)

    def _leave(self, way: Way, payload: tuple[int, str], begins: int, last: int) -> int:
        rows, (c, name) = self._rows, payload
        row = rows.rows[last]
        left = rows.host_left_by[payload] = rows.add(
            row.queue, Kind.FREE, c, name, row.moment, charge=FREE, behind=last
        )
        self._ways[way].append((begins, left))
        return left

    def close(self) -> None:
        """Behind all rows of the update."""
        rows = self._rows
        for ways in self._ways.values():
            for n, (begins, _) in enumerate(ways):
                if n >= TRIPS:
                    rows.wait(begins, (ways[n - TRIPS][1], 0))
                elif len(ways) >= TRIPS:
                    rows.wait(begins, (ways[n - TRIPS][1], 1))
        for payload, row in self._first.items():
            rows.wait(row, (rows.host_left_by[payload], 1))
