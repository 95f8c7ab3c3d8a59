"""Course: one choice of modes laid out along the compute queue. Who is needed where, what room is left, who stays.

A position is a block of moments or the update of a streamed chunk. Knows no queue and no clock but the seconds a
position takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from pstar_sim.policy.family.ground import SUMS_TAKE, Ground
from pstar_sim.policy.family.residency import Gap, gaps_of
from pstar_sim.policy.family.rules import keep_set

__all__ = ["Course", "Knobs", "Modes", "Position"]

LINGER_COPIES = 2  # how many copies long a gradient is expected to stay after it is final


@dataclass(frozen=True, slots=True)
class Modes:
    """Chunks whose states stay on the GPU, and chunks whose states come for one update. All others by CPU Adam."""

    pinned: frozenset[int]
    streamed: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Knobs:
    """What a search may turn besides the modes; none changes what a plan means.

    linger: room is left for gradients on their way down, which pays unless memory is very tight. lead_chunks: room that
    fetches ahead leave to urgent ones. spare_chunks: room that kept chunks leave to copies. down: order of the copies
    to the host, "edf" (as the next forward needs them) or "fifo". stay: streamed parameters may stay over the border
    where that is no longer than this share of the iteration. states_first: states, which take room, go down before
    any parameters that stay; these are then given up later.
    """

    linger: bool = True
    lead_chunks: int = 2
    spare_chunks: int = 0
    down: str = "edf"
    stay: float = 0.25
    states_first: bool = False


class Position(NamedTuple):
    """One place on the compute queue: block >= 0, the block of moments it is; chunk >= 0, the streamed chunk it
    updates. tide_bytes: non-model bytes."""

    block: int
    chunk: int
    tide_bytes: int
    seconds: float


class Course:
    """positions: in order. at: block -> its position. updates: streamed chunk -> position of its update. touched: chunk
    that is not resident -> positions that need its working list. stays: (unresident) chunks whose working list is on
    the GPU at the cut. room: bytes at each position that nobody is known to need. kept: gaps a chunk stays over.
    On several ranks, visits: chunk -> (first, last position) of each run of positions that need it whole, resident
    chunks included. kept_whole: gaps between these over which the others' slices stay.
    """

    def __init__(self, ground: Ground, modes: Modes, knobs: Knobs) -> None:
        self.ground = g = ground
        self.modes = modes
        self.knobs = knobs
        uses = g.uses
        self.resident_bytes = g.small_bytes + sum(g.permanent[c] for c in modes.pinned)
        self.moving = [c for c in g.moving if c not in modes.pinned and g.touched[c]]
        self.positions, self.at, self.updates = self._lay_out()
        self.touched: dict[int, list[int]] = {}
        self.visits: dict[int, list[tuple[int, int]]] = {}
        if g.ranks > 1:
            for c, (first_block, last_block) in g.small_visits.items():
                self.visits[c] = [(self.at[first_block], self.at[last_block])]
            for c in modes.pinned:
                self.visits[c] = _runs([self.at[n] for n in g.touched[c]])
        for c in self.moving:
            mine = [self.at[g.touched[c][0]]]
            for before, n in pairwise(g.touched[c]):  # an update between two neighbours is no gap
                mine += range(mine[-1] + 1, self.at[n] + 1) if n == before + 1 else [self.at[n]]
            if g.ranks > 1:
                self.visits[c] = _runs(mine)
            if c in self.updates:
                update = self.updates[c]
                # Its gradient lies in the working list until then; behind a barrier a gap like others.
                mine += [update] if g.barrier is not None else range(mine[-1] + 1, update + 1)
            self.touched[c] = mine
        free = g.machine.gpu_budget_bytes - self.resident_bytes
        self.room: list[int] = []
        for position in self.positions:
            beside = (
                g.visiting_bytes(position.chunk) if position.chunk >= 0 else g.gradients(position.block, modes.pinned)
            )
            self.room.append(free - position.tide_bytes - beside)
        for c, mine in self.touched.items():
            for n in mine:
                self.room[n] -= g.sizes[c]
        for c, runs in self.visits.items():
            for n in (n for begin, end in runs for n in range(begin, end + 1) if c not in g.small):
                self.room[n] -= g.remote[c]
        self._take(self._leaving() if knobs.linger else [0] * len(self.room))
        self.least_room_bytes = min(self.room)
        reserved = self._arriving()
        spare = knobs.spare_chunks * g.builder.layout.chunk_bytes
        gaps = [gap for c in self.moving for gap in gaps_of(c, self.touched[c])]
        for c in self.moving:
            border = self.border(c)
            short = knobs.stay > 0 and border.end - border.start <= max(3, knobs.stay * len(self.positions))
            if not uses.updated(c) or (c in self.updates and short):
                gaps.append(border)
        room = [r - a - spare for r, a in zip(self.room, reserved)]
        first = [self.touched[c][0] if c in self.touched else 0 for c in range(len(g.sizes))]
        self.kept = keep_set(g.point.eviction, gaps, g.sizes, room, first)
        self.room = [r - held for r, held in zip(self.room, _held(self.kept, g.sizes, len(self.room)))]
        self.stays = frozenset(c for c in self.moving if self._stays(c))
        self.kept_whole = self._keep_whole()

    def _keep_whole(self) -> set[Gap]:
        """The others' slices stay where their own ones left room, but for some that gathers ahead will want."""
        g = self.ground
        if not self.visits:
            return set()
        gaps = [
            Gap(end, begin, c)
            for c, runs in self.visits.items()
            for (_, end), (begin, _) in pairwise(runs)
            if begin > end + 1
        ]
        ahead = (self.knobs.lead_chunks + 1) * max(g.whole_bytes(c) for c in self.visits)
        first = [self.visits[c][0][0] if c in self.visits else 0 for c in range(len(g.sizes))]
        kept = keep_set(g.point.eviction, gaps, g.remote, [max(0, room - ahead) for room in self.room], first)
        self.room = [r - held for r, held in zip(self.room, _held(kept, g.remote, len(self.room)))]
        return kept

    def border(self, chunk: int) -> Gap:
        """From the last use of a chunk to its first one of the next iteration."""
        mine = self.touched[chunk]
        return Gap(mine[-1], mine[0] + len(self.positions), chunk)

    def _stays(self, chunk: int) -> bool:
        if self.ground.uses.updated(chunk) and chunk not in self.updates:
            return False  # its gradient has to leave, and parameters to come back
        border = self.border(chunk)
        return border in self.kept or border.end == border.start + 1

    def _lay_out(self) -> tuple[list[Position], list[int], dict[int, int]]:
        g = self.ground
        behind: dict[int, list[int]] = {}  # block -> streamed chunks updated after it
        for c in sorted(self.modes.streamed, key=lambda c: (g.uses.first_use(c), c)):
            last = g.update_block[c] if g.barrier is None else len(g.blocks) - 1
            behind.setdefault(last, []).append(c)
        positions: list[Position] = []
        at: list[int] = []
        updates: dict[int, int] = {}
        for n, block in enumerate(g.blocks):
            at.append(len(positions))
            positions.append(Position(n, -1, block.tide_bytes, block.seconds))
            for c in behind.get(n, ()):
                tide = min(block.tide_bytes, g.blocks[(n + 1) % len(g.blocks)].tide_bytes)
                updates[c] = len(positions)
                positions.append(Position(-1, c, tide, g.cost.gpu_adam_s(c)))
        return positions, at, updates

    def _take(self, rows: Iterable[int]) -> None:
        for n, size in enumerate(rows):
            self.room[n] -= min(size, max(0, self.room[n]))

    def _leaving(self) -> list[int]:
        """Bytes at each position that are expected to be on their way down still: a gradient for LINGER_COPIES copies,
        states until their own copies have ended."""
        g, positions = self.ground, self.positions
        rows = [0] * len(positions)

        def book(size: int, n: int, seconds: float) -> None:
            while seconds > 0 and n < len(positions):
                rows[n] += size
                seconds -= positions[n].seconds
                n += 1

        for c in g.candidates:
            if c in self.modes.pinned:
                continue
            _, down_s = g.down[c, "param"]
            spans = g.uses.spans[c]
            if g.ranks > 1:  # whole until it is summed
                sum_s = SUMS_TAKE * g.cost.collective_s(g.whole_bytes(c))
                for _, _, last in spans:
                    book(g.remote[c], self.at[g.block_of[last]] + 1, sum_s)
            for _, _, last in spans[:-1] if c in self.updates else spans:
                book(g.sizes[c], self.at[g.block_of[last]] + 1, LINGER_COPIES * down_s)
            if c in self.updates:
                passed_s = 0.0
                for name in g.builder.layout.state_lists:
                    size, seconds = g.down[c, name]
                    passed_s += seconds
                    book(size, self.updates[c] + 1, passed_s)
                book(g.sizes[c], self.updates[c] + 1, passed_s + down_s)
        return rows

    def _arriving(self) -> list[int]:
        """Bytes at each position that kept chunks leave to the states of streamed chunks on their way up."""
        g, positions = self.ground, self.positions
        rows = [0] * len(positions)
        for c, update in self.updates.items():
            ahead_s = 0.0
            for name in reversed(g.visiting_lists):
                size, seconds = g.up[c, name]
                ahead_s += seconds
                left_s, n = ahead_s, update - 1
                while left_s > 0 and n >= 0:
                    rows[n] += size
                    left_s -= positions[n].seconds
                    n -= 1
        return rows


def _held(gaps: Iterable[Gap], sizes: Sequence[int], count: int) -> list[int]:
    """Bytes at each of `count` positions of the chunks that stay over these gaps."""
    change = [0] * (count + 1)
    for begin, end, chunk in gaps:
        change[begin + 1] += sizes[chunk]
        if end > count:  # and goes on at the beginning
            change[count] -= sizes[chunk]
            change[0] += sizes[chunk]
        change[end if end <= count else end - count] -= sizes[chunk]
    return list(accumulate(change[:count]))


def _runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    """(first, last) of each run of neighbours among ascending positions."""
    out: list[tuple[int, int]] = []
    for n in positions:
        if out and n <= out[-1][1] + 1:
            out[-1] = (out[-1][0], n)
        else:
            out.append((n, n))
    return out
