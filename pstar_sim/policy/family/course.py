"""Course: modes laid out along the compute queue: the chunk that each position (a block of moments, or the update of a
streamed chunk) needs, the room left, and the chunks that stay on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from pstar_sim.policy.family.eviction import keep_set
from pstar_sim.policy.family.residency import UseGap, gaps_of, held_over
from pstar_sim.policy.kit.blocks import Position, Stretch, merged
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.schedule import Modes, Schedule
from pstar_sim.policy.passes import collective_rows, gradient_rows, update_rows
from pstar_sim.policy.passes.feasibility import disk_room

# For how many of its own copies a gradient is expected to stay on the GPU after it is final. See [Note: what the
# constants buy] in search.py.
LINGER_COPIES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Knobs:
    """Besides the modes; none changes the numbers that a plan computes.

    linger: gradients on their way down have room, which pays unless memory is very tight.
    lead_chunks: room, in chunks, that early fetches leave for urgent ones.
    down: order of copies to the host: "edf": as the next forward needs the chunks, "fifo": as they become ready.
    stay: largest share of the positions over which streamed parameters may stay between two iterations.
    states_first: states go down before parameters that stay, which are given up later.
    waits: `Modes.waiting`, where two gradients may.
    ahead: chunks fetched ahead at most, None: as the point's `prefetch`.
    host_states: of `Modes`, as `apart` proposed it.
    """

    linger: bool = True
    lead_chunks: int = 2
    down: str = "edf"
    stay: float = 1.0
    states_first: bool = False
    waits: bool = True
    ahead: int | None = None
    host_states: frozenset[str] = frozenset()


class Course:
    """positions, at, updates, sums, stays, room: as in `Schedule`.
    touched: chunk that is not resident -> stretches of positions that need it.
    kept: gaps over which a chunk stays.
    needed_whole: chunk -> stretches of positions that need all ranks' slices, residents included.
    kept_whole: gaps between, over which the others' slices stay.
    least_room_bytes: at the tightest position, before any is kept.
    """

    def __init__(self, job: Job, modes: Modes, knobs: Knobs, blocks: Sequence[Sequence[Stretch]] | None = None) -> None:
        """blocks: chunk -> blocks with it on the GPU (all its slices), None: it stays where there is room."""
        self.job = job
        self.modes = modes
        self.knobs = knobs
        self._blocks = blocks
        self._in_place = modes.pinned | modes.summed  # chunks that add their gradients where they arrive
        self.resident_bytes = job.small_bytes + sum(job.permanent[c] for c in modes.pinned)
        self.moving = [c for c in job.moving if c not in modes.pinned and job.touched[c]]
        self.positions, self.at, self.updates = self._lay_out()
        self.touched, self.needed_whole = self._needs()
        self.sums = {c: self._sum_stretches(c) for c in sorted(modes.summed)}
        self.room = self._needed_room()
        self._add_dropped_lists()
        self._take(self._leaving() if knobs.linger else [0] * len(self.room))
        self.least_room_bytes = min(self.room)
        if self.sums:
            self._keep_sums()
        self.kept = self._keep() if blocks is None else set()
        self.stays = frozenset(c for c in self.moving if self._stays(c))
        self.kept_whole = self._keep_whole() if blocks is None else set()

    def schedule(self) -> Schedule:
        job, point, knobs = self.job, self.job.point, self.knobs
        return Schedule(
            job=job,
            modes=self.modes,
            positions=self.positions,
            at=self.at,
            updates=self.updates,
            visits={c: _joined(c, self.touched[c], self.kept) for c in self.moving},
            whole={c: _joined(c, stretches, self.kept_whole) for c, stretches in self.needed_whole.items()},
            sums=self.sums,
            stays=self.stays,
            room=self.room,
            resident_bytes=self.resident_bytes,
            lead_bytes=knobs.lead_chunks * job.layout.chunk_bytes,
            prefetch=knobs.ahead or point.prefetch,
            adam=point.adam,
            down=knobs.down,
            states_first=knobs.states_first,
            disk_room_bytes=disk_room(job, self.modes),
        )

    def _needs(self) -> tuple[dict[int, list[Stretch]], dict[int, list[Stretch]]]:
        job = self.job
        touched: dict[int, list[Stretch]] = {}
        whole: dict[int, list[Stretch]] = {}
        if job.ranks > 1:
            for c, (first_block, last_block) in job.small_visits.items():
                whole[c] = [Stretch(self.at[first_block], self.at[last_block])]
            for c in self.modes.pinned:
                whole[c] = self._stretches(job.touched_stretches[c])
        for c in self.moving:
            mine = self._stretches((self._blocks or job.touched_stretches)[c])
            if job.ranks > 1:
                whole[c] = list(mine)
            if c in self.updates:
                update = self.updates[c]
                # Until its update the chunk's gradient lies in the working list. Behind a barrier this time is a gap
                # like any other.
                gap = job.barrier is not None and c not in self.modes.waiting
                mine.append(Stretch(update if gap else mine[-1].last + 1, update))
            touched[c] = merged(mine)
        return touched, whole

    def _stretches(self, blocks: Sequence[Stretch]) -> list[Stretch]:
        return [Stretch(self.at[first], self.at[last]) for first, last in blocks]

    def _needed_room(self) -> list[int]:
        job = self.job
        free = job.machine.gpu_budget_bytes - self.resident_bytes
        room = [free - position.tide_bytes for position in self.positions]
        for block, lists in enumerate(job.gradient_lists):
            if lists:
                room[self.at[block]] -= gradient_rows.room(job, block, self._in_place)
        for c, n in self.updates.items():
            room[n] -= update_rows.room(job, c, self.modes)
        need = [0] * (len(room) + 1)
        for c, mine in self.touched.items():
            for first, last in mine:
                need[first] += job.sizes[c]
                need[last + 1] -= job.sizes[c]
        others = collective_rows.room(job, self.needed_whole, len(room))
        sums = gradient_rows.held(job, self.modes, self.sums, self.at, len(room))
        return [left - own - other - held for left, own, other, held in zip(room, accumulate(need), others, sums)]

    def _add_dropped_lists(self) -> None:
        job, pinned = self.job, self.modes.pinned
        if not job.drops_pinned_lists:
            return
        behind = update_rows.resident_updates(job, pinned, self.at, self.updates)
        for c, (last, update) in update_rows.dropped_lists(job, pinned, self.at, behind).items():
            for n in range(last + 1, update + 1):
                self.room[n] += job.sizes[c]

    def _sum_stretches(self, c: int) -> list[Stretch]:
        """Where the chunk's sum is needed on the GPU: not between the last gradient and an update behind the
        barrier."""
        job, update = self.job, self.updates.get(c)
        needed = [Stretch(self.at[job.block_of[a]], self.at[job.block_of[b]]) for _, a, b in job.uses.spans[c]]
        if c not in self.modes.spilt:
            needed = [Stretch(needed[0].first, needed[-1].last)]
        if update is not None and job.barrier is not None and c not in self.modes.waiting:
            needed.append(Stretch(update, update))
        elif update is not None:
            needed[-1] = Stretch(needed[-1].first, update)
        return merged(needed)

    def _keep(self) -> set[UseGap]:
        job, knobs = self.job, self.knobs
        gaps = [gap for c in self.moving for gap in gaps_of(c, self.touched[c]) if not self._is_dead(gap)]
        for c in self.moving:
            border = self.border(c)
            short = border.end - border.start <= knobs.stay * len(self.positions)
            if not job.uses.updated(c) or (c in self.updates and short):
                gaps.append(border)
        room = [left - arriving for left, arriving in zip(self.room, self._arriving())]
        first = [self.touched[c][0].first if c in self.touched else 0 for c in range(len(job.sizes))]
        kept = keep_set(job.point.eviction, gaps, job.sizes, room, first)
        self.room = [left - held for left, held in zip(self.room, held_over(kept, job.sizes, len(self.room)))]
        return kept

    def _is_dead(self, gap: UseGap) -> bool:
        """Nothing reads the working list: the gradient is in grad32, and the update behind the barrier writes it
        anew."""
        job, c = self.job, gap.chunk
        waits = job.barrier is not None and gap.end == self.updates.get(c)
        return waits and job.all_in_grad32(c, self.modes.summed)

    def _keep_sums(self) -> None:
        """From the last gradient to an update behind the barrier, where there is room, before any working list, because
        a sum that leaves is copied both ways."""
        job = self.job
        gaps = [
            UseGap(stretches[-2].last, stretches[-1].first, c)
            for c, stretches in self.sums.items()
            if len(stretches) > 1 and stretches[-1].first == self.updates.get(c)
        ]
        sizes = [job.layout.payload_bytes(c, "grad32") if c in self.sums else 0 for c in range(len(job.sizes))]
        first = [self.sums[c][0].first if c in self.sums else 0 for c in range(len(sizes))]
        kept = keep_set(job.point.eviction, gaps, sizes, self.room, first)
        self.sums = {c: _joined(c, stretches, kept) for c, stretches in self.sums.items()}
        self.room = [left - held for left, held in zip(self.room, held_over(kept, sizes, len(self.room)))]

    def _keep_whole(self) -> set[UseGap]:
        """Where this rank's slices and the gathers ahead leave room."""
        job = self.job
        if not self.needed_whole:
            return set()
        gaps = [gap for c, stretches in self.needed_whole.items() for gap in gaps_of(c, stretches)]
        ahead = (self.knobs.lead_chunks + 1) * max(job.whole_bytes(c) for c in self.needed_whole)
        first = [self.needed_whole[c][0][0] if c in self.needed_whole else 0 for c in range(len(job.sizes))]
        kept = keep_set(job.point.eviction, gaps, job.remote, [max(0, room - ahead) for room in self.room], first)
        self.room = [r - held for r, held in zip(self.room, held_over(kept, job.remote, len(self.room)))]
        return kept

    def border(self, chunk: int) -> UseGap:
        mine = self.touched[chunk]
        return UseGap(mine[-1].last, mine[0].first + len(self.positions), chunk)

    def _stays(self, chunk: int) -> bool:
        if self.job.uses.updated(chunk) and chunk not in self.updates:
            return False  # its gradient leaves, and its parameters come back
        border = self.border(chunk)
        return border in self.kept or border.end == border.start + 1

    def _lay_out(self) -> tuple[list[Position], list[int], dict[int, int]]:
        job = self.job
        behind: dict[int, list[int]] = {}  # block -> streamed chunks that are updated after the block
        for c in sorted(self.modes.streamed, key=lambda c: (job.uses.first_use(c), c)):
            last = job.update_block[c] if job.barrier is None else len(job.blocks) - 1
            behind.setdefault(last, []).append(c)
        positions: list[Position] = []
        at: list[int] = []
        updates: dict[int, int] = {}
        for n, (position, adds_s) in enumerate(zip(job.block_positions, gradient_rows.adds_s(job, self.modes))):
            at.append(len(positions))
            tide = position.tide_bytes
            positions.append(Position(n, -1, tide, position.seconds + adds_s) if adds_s else position)
            for c in behind.get(n, ()):
                tide_between = min(tide, job.block_positions[(n + 1) % len(job.blocks)].tide_bytes)
                updates[c] = len(positions)
                positions.append(Position(-1, c, tide_between, job.cost.gpu_adam_s(c)))
        return positions, at, updates

    def _take(self, rows: Iterable[int]) -> None:
        for n, size in enumerate(rows):
            self.room[n] -= min(size, max(0, self.room[n]))

    def _leaving(self) -> list[int]:
        """Still on their way down: a gradient counts for LINGER_COPIES of its copies, states until theirs have
        ended."""
        job, positions = self.job, self.positions
        rows = [0] * len(positions)

        def book(size: int, n: int, seconds: float) -> None:
            while seconds > 0 and n < len(positions):
                rows[n] += size
                seconds -= positions[n].seconds
                n += 1

        for c in job.candidates:
            if c in self.modes.pinned:
                continue
            if job.ranks > 1:  # all ranks' slices of the gradient, until it is summed
                for _, _, last in job.uses.spans[c]:
                    book(job.remote[c], self.at[job.block_of[last]] + 1, job.gather_s[c])
            for last, size, down_s in job.leaving(c, streamed=c in self.updates, summed=c in self.modes.summed):
                book(size, self.at[job.block_of[last]] + 1, LINGER_COPIES * down_s)
            if c in self.modes.spilt:
                size, down_s = job.down[c, "grad32"]
                for _, _, last in job.uses.spans[c][:-1]:
                    book(size, self.at[job.block_of[last]] + 1, LINGER_COPIES * down_s)
            if c in self.updates:
                passed_s, down_s = 0.0, job.down[c, "param"][1]
                for name in job.layout.states_of(c).names:
                    size, seconds = job.down[c, name]
                    passed_s += seconds
                    book(size, self.updates[c] + 1, passed_s)
                book(job.sizes[c], self.updates[c] + 1, passed_s + down_s)
        return rows

    def _arriving(self) -> list[int]:
        """Left by kept chunks for states of streamed ones on their way up. An update counts for at least its copies'
        seconds, as they follow one another."""
        job = self.job
        rows = [0] * len(self.positions)
        copies = {
            c: [job.up[c, name] for name in reversed(job.visiting(c, held=c in self.modes.summed))]
            for c in self.updates
        }
        lasts_s = [position.seconds for position in self.positions]
        for c, update in self.updates.items():
            lasts_s[update] = max(lasts_s[update], sum(seconds for _, seconds in copies[c]))
        for c, update in self.updates.items():
            ahead_s = 0.0
            for size, seconds in copies[c]:
                ahead_s += seconds
                left_s, n = ahead_s, update - 1
                while left_s > 0 and n >= 0:
                    rows[n] += size
                    left_s -= lasts_s[n]
                    n -= 1
        return rows


def _joined(chunk: int, stretches: Sequence[Stretch], kept: set[UseGap]) -> list[Stretch]:
    out: list[Stretch] = []
    for stretch in stretches:
        if out and UseGap(out[-1].last, stretch.first, chunk) in kept:
            out[-1] = Stretch(out[-1].first, stretch.last)
        else:
            out.append(stretch)
    return out
