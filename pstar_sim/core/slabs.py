"""The address of each host payload, in power-of-two pieces of host memory that are pinned once.

The pinned allocator rounds every request up to a power of two (1.78 times the request in a measured run), so payloads
are carved from a few slabs of such sizes.

[Note: the pool] What only passes through the host to or from disks shares rooms: as many as are needed while steps run
in the plan's order, of the size with which their slabs take the least. The executor adds rooms where another order
needs them; none needs more of the host at a time than predicted (`host_as_predicted` in passes/edges.py).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from pstar_sim.core.effects import frees, takes
from pstar_sim.core.plan import Plan, Resident
from pstar_sim.core.step import EFFECTS, Place

ALIGN_BYTES = 256
PAGE_BYTES = 4096
LARGEST_SLAB_BYTES = 1 << 30


_Held = list[tuple[int, int]]
"""Contents of one slab: (byte offset, payload's number)."""


@dataclass(frozen=True)
class HostRoom:
    """where: (chunk, list) -> (slab, byte offset)."""

    where: dict[tuple[int, str], tuple[int, int]]
    slab_bytes: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        return sum(self.slab_bytes)


def pack_slabs(sizes: Iterable[tuple[tuple[int, str], int]], *, largest_bytes: int = LARGEST_SLAB_BYTES) -> HostRoom:
    """sizes: (key, bytes). First fit, largest first, 256-byte aligned; a room of the pool has its own slab.

    A slab is at least as large as the largest payload. The last shrink to their contents.
    """
    sizes = list(sizes)
    rooms = [(key, size) for key, size in sizes if size and is_room(key)]
    packed = _least([(key, size) for key, size in sizes if not is_room(key)], largest_bytes)
    where = {key: (number, 0) for number, (key, _) in enumerate(rooms, start=len(packed.slab_bytes))}
    return HostRoom(packed.where | where, (*packed.slab_bytes, *(_power_of_two(size) for _, size in rooms)))


def _least(sizes: Iterable[tuple[tuple[int, str], int]], largest_bytes: int) -> HostRoom:
    """A payload above half of a slab wastes the rest: larger slabs are tried too, e.g. 2 GiB hold 3 of 600 MiB."""
    rows = sorted(((-(-size // ALIGN_BYTES) * ALIGN_BYTES, key) for key, size in sizes if size), reverse=True)
    if not rows:
        return HostRoom({}, ())
    where, slab_bytes = _places(tuple(size for size, _ in rows), largest_bytes)
    return HostRoom({key: place for (_, key), place in zip(rows, where)}, slab_bytes)


@lru_cache(maxsize=64)
def _places(sizes: tuple[int, ...], largest_bytes: int) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
    in_all = sum(sizes)
    slab = max(_power_of_two(sizes[0]), min(largest_bytes, _power_of_two(in_all)))
    larger = (slab << more for more in range(1, 3) if slab << more <= min(4 * largest_bytes, _power_of_two(in_all)))
    return min((_packed(sizes, size) for size in (slab, *larger)), key=lambda packed: sum(packed[1]))


def _packed(sizes: Sequence[int], slab: int) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
    used: list[int] = []
    where: list[tuple[int, int]] = []
    held: list[_Held] = []  # per slab, ascending
    first_open = 0  # slabs before this one have no room for any payload
    last = size_before = 0  # slab and size of the previous payload: an equally large payload fits no earlier slab
    for number, size in enumerate(sizes):
        for i in range(last if size == size_before else first_open, len(used)):
            if used[i] + size <= slab:
                break
        else:
            used.append(0)
            held.append([])
            i = len(used) - 1
        where.append((i, used[i]))
        held[i].append((used[i], number))
        used[i] += size
        last, size_before = i, size
        while first_open < len(used) and slab - used[first_open] < sizes[-1]:
            first_open += 1
    return where, _shrink(used, held, where)


def _shrink(used: list[int], held: list[_Held], where: list[tuple[int, int]]) -> tuple[int, ...]:
    """A slab just over half full is split if a payload boundary allows."""
    sizes = [_power_of_two(size) for size in used]
    for slab in range(len(used)):
        # e.g. 5 units in a slab of 8: one of 4 and one of 1 hold the same payloads with less left over
        starts = held[slab]
        while True:
            half = sizes[slab] // 2
            cut = max((offset for offset, _ in starts if offset <= half), default=0)
            tail = used[slab] - cut
            if cut == 0 or _power_of_two(cut) + _power_of_two(tail) >= sizes[slab]:
                break
            new = len(sizes)
            starts = [(offset - cut, number) for offset, number in starts if offset >= cut]
            for offset, number in starts:
                where[number] = (new, offset)
            sizes[slab], used[slab] = _power_of_two(cut), cut
            sizes.append(_power_of_two(tail))
            used.append(tail)
            slab = new
    return tuple(sizes)


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def stash_key(block: str) -> tuple[int, str]:
    return -1, f"stash of {block}"


_Moves = list[tuple[Resident, bool]]  # taken (True) or freed on the host, in the plan's order


def _host_moves(plan: Plan) -> _Moves:
    moves: _Moves = []
    for step in plan.steps:
        effect = EFFECTS[step.kind]
        for touch, touched, comes in ((effect.takes, takes, True), (effect.frees, frees, False)):
            if touch is None or step.chunk is None or (touch.place or step.place) is not Place.HOST:
                continue
            if (row := touched(step)) is not None:
                moves.append((row.resident, comes))
    return moves


def _passing(moves: _Moves) -> set[tuple[int, str]]:
    return {(r.chunk, r.list) for r, comes in moves if comes}


def _at_cut(plan: Plan) -> set[tuple[int, str]]:
    return {(r.chunk, r.list) for r in plan.initial if r.chunk >= 0 and r.place is Place.HOST}


def pooled_payloads(plan: Plan) -> set[tuple[int, str]]:
    """(chunk, list) that take rooms from the pool."""
    return _passing(_host_moves(plan)) - _at_cut(plan) if plan.nvme_budget_bytes else set()


class Pool:
    """[Note: the pool]

    more_bytes: of an added room, at least.
    ends: last byte ever taken of each room.
    """

    def __init__(self, room_bytes: Iterable[int], more_bytes: int) -> None:
        self.more_bytes = _in_pages(more_bytes)
        self._free = [(room, 0, size) for room, size in enumerate(room_bytes)]  # (room, first byte, bytes), ascending
        self.ends = [0] * len(self._free)
        self.held_bytes = 0

    @property
    def free(self) -> list[tuple[int, int, int]]:
        """(room, first byte, bytes)."""
        return list(self._free)

    def has(self, size_bytes: int) -> bool:
        return self._place(_in_pages(size_bytes)) is not None

    def _place(self, size: int) -> int | None:
        return next((i for i, (_, _, left) in enumerate(self._free) if left >= size), None)

    def take(self, size_bytes: int) -> tuple[int, int]:
        """(room, first byte) of the first place with room, else of a new room."""
        size = _in_pages(size_bytes)
        at = self._place(size)
        if at is None:
            at = len(self._free)
            self._free.append((len(self.ends), 0, max(size, self.more_bytes)))
            self.ends.append(0)
        room, first, left = self._free.pop(at)
        if left > size:
            insort(self._free, (room, first + size, left - size))
        self.ends[room] = max(self.ends[room], first + size)
        self.held_bytes += size
        return room, first

    def give(self, room: int, first: int, size_bytes: int) -> None:
        end = first + _in_pages(size_bytes)
        self.held_bytes -= _in_pages(size_bytes)
        beside = [row for row in self._free if row[0] == room and (row[1] == end or row[1] + row[2] == first)]
        for row in beside:
            self._free.remove(row)
        start = min([first, *(row[1] for row in beside)])
        insort(self._free, (room, start, max([end, *(row[1] + row[2] for row in beside)]) - start))


def _in_pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def pool_rooms(plan: Plan) -> dict[tuple[int, str], int]:
    """Key -> bytes."""
    return _rooms(_pool_moves(plan, _host_moves(plan)))


def _rooms(moves: Sequence[tuple[Resident, int, bool]]) -> dict[tuple[int, str], int]:
    room_bytes = _power_of_two(max((size for _, size, _ in moves), default=1))
    ends = least = _ends(moves, room_bytes)
    while len(ends) > 1 and room_bytes < LARGEST_SLAB_BYTES:
        room_bytes *= 2
        ends = _ends(moves, room_bytes)
        least = min(least, ends, key=lambda rooms: (sum(map(_power_of_two, rooms)), sum(rooms)))
    return {pool_key(number): size for number, size in enumerate(least)}


def pool_peak_bytes(plan: Plan) -> int:
    """The most at a time in the plan's order, in whole pages."""
    moves = _pool_moves(plan, _host_moves(plan))
    changes = (_in_pages(size) if comes else -_in_pages(size) for _, size, comes in moves)
    return max(accumulate(changes), default=0)


def _pool_moves(plan: Plan, host_moves: _Moves) -> list[tuple[Resident, int, bool]]:
    pooled = _passing(host_moves) - _at_cut(plan) if plan.nvme_budget_bytes else set()
    moves: list[tuple[Resident, int, bool]] = []
    held: set[Resident] = set()
    for row, comes in host_moves if pooled else ():
        if comes is (row in held) or (comes and (row.chunk, row.list) not in pooled):
            continue
        (held.add if comes else held.discard)(row)
        moves.append((row, plan.layout.payload_bytes(row.chunk, row.list), comes))
    return moves


def _ends(moves: Iterable[tuple[Resident, int, bool]], room_bytes: int) -> list[int]:
    pool, held = Pool((), room_bytes), dict[Resident, tuple[int, int]]()
    for row, size, comes in moves:
        if comes:
            held[row] = pool.take(size)
        else:
            pool.give(*held.pop(row), size)
    return pool.ends


def pool_key(number: int) -> tuple[int, str]:
    return -2 - number, "passing"


def is_room(key: tuple[int, str]) -> bool:
    return key[0] <= pool_key(0)[0]


def host_payloads(plan: Plan) -> dict[tuple[int, str], int]:
    """(chunk, list) -> bytes with an address of its own, with room for stashes (`stash_key`) and the pool's rooms."""
    host_moves = _host_moves(plan)
    moves, own = _pool_moves(plan, host_moves), _at_cut(plan) | _passing(host_moves)
    sizes = {stash_key(block): size for block, size in plan.workload.stash_room} | _rooms(moves)
    for chunk, list_name in sorted(own.difference((row.chunk, row.list) for row, _, _ in moves)):
        sizes[chunk, list_name] = plan.layout.payload_bytes(chunk, list_name)
    return sizes


def host_room(plan: Plan) -> HostRoom:
    """Payloads that do not pass to or from disks have addresses of their own, so every order finds room."""
    return pack_slabs(host_payloads(plan).items())
