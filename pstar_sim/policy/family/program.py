"""A program for one course: the steps of an iteration with what they wait for, played once by the event loop.

The event loop fetches what has the earliest deadline among what is ready, reserves its memory then, and sends gradients
down and updates chunks in the order in which the next forward needs them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from pstar_sim.core.choose import Window, choose
from pstar_sim.core.draft import Charge, Draft, Row
from pstar_sim.core.rules import Rates
from pstar_sim.core.step import Kind, Queue
from pstar_sim.policy.family.course import Course, Knobs, Modes
from pstar_sim.policy.family.ground import Ground
from pstar_sim.policy.family.residency import Gap, gaps_of
from pstar_sim.policy.family.rules import adam_key, adam_waits_for_backward, fetch_floors
from pstar_sim.policy.kit.room import cut_tide
from pstar_sim.policy.passes.stashes import StashMoves

__all__ = ["Attempt", "attempt", "play"]


@dataclass(slots=True)
class Attempt:
    """A program for one course, and what the event loop made of it."""

    course: Course
    draft: Draft
    window: Window
    fetched_bytes: int

    @property
    def modes(self) -> Modes:
        return self.course.modes

    @property
    def knobs(self) -> Knobs:
        return self.course.knobs

    @property
    def pins(self) -> int:
        return len(self.course.modes.pinned)

    @property
    def iteration_s(self) -> float:
        return self.window.iteration_s


def burden_of(made: Attempt) -> tuple[int, int]:
    """For `ties.least_of`; what goes down is what comes up, but for what the GPU updates."""
    return made.fetched_bytes, made.pins


def attempt(ground: Ground, modes: Modes, knobs: Knobs | None = None) -> Attempt:
    """The program for these modes, and how it plays. Its outcome is stuck where a step never finds room."""
    return play(Course(ground, modes, knobs or Knobs()))


def play(course: Course, *, limit_s: float = math.inf, tolerance: float = 1e-6) -> Attempt:
    """As `attempt`, of a course that is laid out already. limit_s, tolerance: see `choose`."""
    draft = _Weaver(course).weave()
    fetched = sum(row.charge.gpu_take for row in draft.rows if row.queue is Queue.H2D)
    return Attempt(course, draft, choose(draft, limit_s=limit_s, tolerance=tolerance), fetched)


_After = tuple[tuple[int, int], ...]
_Rows = defaultdict[int, list[int]]  # position -> chunks
_Pairs = defaultdict[int, list[tuple[int, int]]]  # position -> (chunk, number of the micro-batch)


class _Weaver:
    """Rows and their edges, in an order in which they could run one after the other."""

    def __init__(self, course: Course) -> None:
        self.course = course
        self.g = course.ground
        self.rows: list[Row] = []
        self.end_of: list[int] = []  # position -> its op
        self.passed: list[int] = []  # position -> last op of the compute queue before the next position's
        self.last_computed = -1  # op of the compute queue
        self.behind_border: list[tuple[int, int]] = []  # (fetch, position of the previous iteration it waits for)
        self.last_drop: dict[tuple[int, str], int] = {}  # (chunk, list) -> op that last freed it on the GPU
        self.first_fetch: list[tuple[int, str, int]] = []  # ops that take what the previous iteration left behind
        self.first_drop: dict[int, int] = {}
        self.gathered: set[int] = set()  # chunks whose first visit of the iteration has begun
        self.first_gather: list[tuple[int, int, bool]] = []  # chunk, gather, whether nothing was fetched for it
        self.others_gone: dict[int, int] = {}  # chunk -> op that last gave up the others' slices
        self.reduced: dict[int, int] = {}  # chunk -> sum of its last gradient over the ranks
        self.gpu_adam_of: dict[int, int] = {}
        self.gradient_free: dict[int, int] = {}
        self.last_add: dict[int, int] = {}
        self.last_adds: list[int] = []  # of last gradients, where the norm needs them
        self.pins_done = 0  # resident chunks updated behind the barrier
        self.down: dict[int, int] = {}  # chunk by CPU Adam -> write-back of its last gradient
        self.told: dict[int, int] = {}  # streamed chunk -> write-back of its updated parameters
        self.sequence = 0
        self.stashes = StashMoves(course.ground.workload)
        self._sort()

    def _add(
        self,
        queue: Queue,
        kind: Kind,
        chunk: int = -1,
        list_name: str = "param",
        moment: int = -1,
        *,
        charge: Charge | None = None,
        after: _After = (),
        key: tuple[float, ...] | None = None,
        then: int | None = None,
        use: int | None = None,
        position: int | None = None,
        block: int = -1,
        stash: int = -1,
    ) -> int:
        """One row, its place among all. charge: of what is not about a list of a chunk."""
        here = len(self.rows)
        if charge is None:
            charge = self.g.charges.of(kind, chunk, list_name)
        self.rows.append(
            Row(queue, kind, chunk, list_name, moment, charge, after, key, then, use, position, block, stash)
        )
        if queue is Queue.COMPUTE:
            self.last_computed = here
        return here

    def _sort(self) -> None:
        """What happens at each position."""
        course, g = self.course, self.g
        uses, at = g.uses, course.at
        self.fetches: _Rows = defaultdict(list)  # working lists that come for it
        self.dropped: _Rows = defaultdict(list)  # clean ones that go after it
        self.leaves: _Rows = defaultdict(list)  # last use of one that is updated on the CPU
        self.parked: _Rows = defaultdict(list)  # final gradients of streams that wait on the host
        self.emptied: set[int] = set()  # streams whose working list is taken anew for the update
        self.opens: _Pairs = defaultdict(list)  # gradient lists
        self.closes: _Pairs = defaultdict(list)
        self.final: _Rows = defaultdict(list)  # last gradient of a stream, which stays
        self.pins: _Rows = defaultdict(list)  # GPU Adam of a resident chunk
        self.overwrites: _Rows = defaultdict(list)  # first final gradient into parameters that stay
        for c in course.moving:
            mine = course.touched[c]
            if c not in course.stays:
                self.fetches[mine[0]].append(c)
                if not uses.updated(c):
                    self.dropped[mine[-1]].append(c)
            gaps = gaps_of(c, mine)
            if uses.updated(c):
                for number, (_, first, last) in enumerate(uses.spans[c][:-1]):
                    self.opens[at[g.block_of[first]]].append((c, number))
                    self.closes[at[g.block_of[last]]].append((c, number))
                if c not in course.updates:
                    self.leaves[mine[-1]].append(c)
                else:
                    away = [gap for gap in gaps if gap.end == course.updates[c] and gap not in course.kept]
                    if away:
                        self.parked[away[0].start].append(c)
                        if g.add_last:  # all of the gradient is in grad32: nothing but room is needed
                            self.emptied.add(c)
                        else:
                            self.fetches[course.updates[c]].append(c)
                        gaps.remove(away[0])
                    elif g.add_last:
                        self.final[at[g.block_of[uses.last_gradient(c)]]].append(c)
                    self.overwrites[at[g.block_of[uses.spans[c][-1][1]]]].append(c)
            for gap in gaps:
                if gap not in course.kept:
                    self.dropped[gap.start].append(c)
                    self.fetches[gap.end].append(c)
        self.gathers: _Rows = defaultdict(list)  # chunks made whole for it
        self.others_dropped: _Rows = defaultdict(list)
        self.reduces: _Rows = defaultdict(list)
        for c, runs in course.visits.items():
            for n, (begin, end) in enumerate(runs):
                if n == 0 or (begin > runs[n - 1][1] + 1 and Gap(runs[n - 1][1], begin, c) not in course.kept_whole):
                    self.gathers[begin].append(c)
                if n == len(runs) - 1 and uses.updated(c):
                    self.reduces[end].append(c)
                elif n == len(runs) - 1 or Gap(end, runs[n + 1][0], c) not in course.kept_whole:
                    self.others_dropped[end].append(c)
            if uses.updated(c) and (c in course.modes.pinned or c in g.small):
                for number, (_, first, last) in enumerate(uses.spans[c][:-1]):
                    self.opens[at[g.block_of[first]]].append((c, number))
                    self.closes[at[g.block_of[last]]].append((c, number))
        self.on_gpu = sorted(
            (c for c in (*g.small, *course.modes.pinned) if uses.updated(c)), key=lambda c: (uses.first_use(c), c)
        )
        if g.barrier is None:
            for c in self.on_gpu:
                self.pins[at[g.update_block[c]]].append(c)

    def weave(self) -> Draft:
        course, g = self.course, self.g
        count = len(course.positions)
        served = sorted(
            {(n, c) for rows in (self.fetches, self.gathers) for n, row in rows.items() for c in row}
            | {(n, c) for c, n in course.updates.items()}
        )
        floors = fetch_floors(g.point.prefetch, [n for n, _ in served], count)
        self.floor_of = dict(zip(served, floors))
        streamed = 0
        for n, position in enumerate(course.positions):
            fetched = {c: self._fetch(c, n) for c in self.fetches.get(n, ())}
            arriving = [*fetched.values(), *(self._gather(c, n, fetched.get(c)) for c in self.gathers.get(n, ()))]
            if position.chunk >= 0:
                self._update(n, position.chunk, arriving)
                if g.barrier is not None and len(course.updates) > 1:
                    streamed += 1
                    share = streamed / (len(course.updates) - 1)
                    self._pins_behind_barrier(min(len(self.on_gpu), round(share * len(self.on_gpu))))
            else:
                self._moments(n, arriving)
            self.passed.append(self.last_computed)
        self._adam()
        for op, floor in self.behind_border:
            self.rows[op].after += ((self.passed[floor + count], 1),)
        for c, op, alone in self.first_gather:
            after: _After = ((self.others_gone[c], 1),)
            if alone and c in self.gpu_adam_of:
                after += ((self.gpu_adam_of[c], 1),)
            self.rows[op].after += after
        for c, name, op in self.first_fetch:
            self.rows[op].after += ((self.last_drop[c, name], 1), *self._updated_before(c))
        blocks = [block.tide_bytes for block in g.blocks]
        free = g.machine.gpu_budget_bytes - course.resident_bytes - sum(g.sizes[c] for c in course.stays)
        free += sum(g.remote[c] for c in g.small_visits)  # reckoned with throughout, absent at the cut
        held, _ = g.host_bytes(course.modes.pinned)
        return Draft(
            rows=self.rows,
            gpu_free_bytes=free - cut_tide(blocks),
            host_free_bytes=g.machine.host_budget_bytes - held,
            room=course.room,
            lead_bytes=course.knobs.lead_chunks * g.builder.layout.chunk_bytes,
            rates=Rates(
                dram_bytes_per_s=g.machine.host.dram_bytes_per_s / g.machine.local_ranks, duplex=g.machine.link.duplex
            ),
        )

    def _fetch(self, c: int, n: int, list_name: str = "param", after: _After = ()) -> int:
        """A list comes to the GPU for position n."""
        key = (c, list_name)
        after += self._floor(c, n)
        if key in self.last_drop:
            after = ((self.last_drop[key], 0), *after)
        op = self._add(
            Queue.H2D, Kind.FETCH, c, list_name, self._moment_of(n), after=after, key=(float(n), float(c)), use=n
        )
        self._floor_behind(c, n, op)
        if key not in self.last_drop:
            self.first_fetch.append((c, list_name, op))
        return op

    def _floor(self, c: int, n: int) -> _After:
        """What a copy for position n has to wait for lest it go too far ahead."""
        floor = self.floor_of[n, c]
        return ((self.passed[floor], 0),) if floor is not None and floor >= 0 else ()

    def _floor_behind(self, c: int, n: int, op: int) -> None:
        """The same where it is a position of the previous iteration."""
        floor = self.floor_of[n, c]
        if floor is not None and floor < 0:
            self.behind_border.append((op, floor))

    def _gather(self, c: int, n: int, fetched: int | None) -> int:
        """The other ranks' slices come for position n, behind this rank's own one."""
        after: _After = (*(((fetched, 0),) if fetched is not None else ()), *self._floor(c, n))
        if c in self.others_gone:
            after += ((self.others_gone[c], 0),)
        op = self._add(
            Queue.NET, Kind.GATHER, c, "remote", self._moment_of(n), after=after, key=(float(n), float(c)), use=n
        )
        self._floor_behind(c, n, op)
        if c not in self.gathered:
            self.gathered.add(c)
            self.first_gather.append((c, op, fetched is None))
        return op

    def _reduce(self, c: int, list_name: str, moment: int, n: int, after: _After) -> int:
        """A gradient that is complete is summed over the ranks; the others' slices of it are gone then."""
        return self._add(Queue.NET, Kind.REDUCE_SCATTER, c, list_name, moment, after=after, key=(float(n), -1.0))

    def _moment_of(self, n: int) -> int:
        position = self.course.positions[n]
        if position.block >= 0:
            return self.g.blocks[position.block].first
        return self.g.uses.last_gradient(position.chunk)

    def _moments(self, n: int, arriving: list[int]) -> None:
        """The moments of a block, and what follows them."""
        g, course = self.g, self.course
        position = course.positions[n]
        last = position.block == len(g.blocks) - 1
        block = g.blocks[position.block]
        for c, number in self.opens.get(n, ()):
            after: _After = ((self.gradient_free[c], 0),) if number else ()
            for name in ("grad", "grad_remote") if g.ranks > 1 else ("grad",):
                self._add(Queue.COMPUTE, Kind.ALLOC, c, name, g.span(c, number)[0], after=after)
        waits = [(op, 0) for op in arriving]
        if g.workload.stashes:
            waits += [(op, 0) for op in self.stashes.waits(block.first)]
        if last:  # the step: gradients of all ranks are there
            waits += [(op, 0) for op in self.reduced.values()]
        here = self._add(
            Queue.COMPUTE,
            Kind.COMPUTE,
            moment=block.first,
            charge=g.block_charges[position.block],
            after=tuple(waits),
            position=n,
            block=position.block,
        )
        self.end_of.append(here)
        if g.workload.stashes:
            self._move_stashes(block.last, here)
        for c in self.others_dropped.get(n, ()):
            self.others_gone[c] = self._add(Queue.COMPUTE, Kind.DROP, c, "remote", block.last)
        self._drop_clean(n)
        for c in self.reduces.get(n, ()):
            moment = g.uses.last_gradient(c)
            self.reduced[c] = self.others_gone[c] = self._reduce(c, "remote", moment, n, ((here, 0),))
        for c in self.pins.get(n, ()):
            self._update_resident(c)
        for c, number in self.closes.get(n, ()):
            done = here
            if g.ranks > 1:
                done = self._reduce(c, "grad_remote", g.span(c, number)[1], n, ((here, 0),))
            if c in course.modes.pinned or c in g.small:
                self.rows[done].then = len(self.rows)  # the sum is added where it is
                self.gradient_free[c] = self._add(Queue.NET, Kind.FREE, c, "grad", g.span(c, number)[1])
                continue
            after = ((done, 0),) if number == 0 else ((done, 0), (self.last_add[c], 0))
            self._send_gradient(c, g.span(c, number)[1], after)
        for c in self.leaves.get(n, ()):
            self.down[c] = self._send_last(c, self.reduced.get(c, here))
        for c in self.parked.get(n, ()):
            self._send_last(c, self.reduced.get(c, here))
        for c in self.final.get(n, ()):
            self._send_last(c, self.reduced.get(c, here), drop=False)
        if last and g.barrier is not None and len(course.updates) < 2:
            self._pins_behind_barrier(len(self.on_gpu))

    def _move_stashes(self, moment: int, here: int) -> None:
        """The copies of stashes that begin behind a moment. The next but one block's forward pass waits for one on its
        way out, so it goes first; one on its way in has its deadline like a fetch."""
        g, moves = self.g, self.stashes
        for n in moves.made.get(moment, ()):
            moves.out_of[n] = self._copy_stash(n, Queue.D2H, Kind.STASH_OUT, (-1.0, float(n)), ((here, 0),))
        for n in moves.back.get(moment, ()):
            use = self.course.at[g.block_of[g.workload.stashes[n].needed]]
            moves.in_of[n] = self._copy_stash(n, Queue.H2D, Kind.STASH_IN, (float(use), -1.0), ((here, 0),))

    def _copy_stash(self, n: int, queue: Queue, kind: Kind, key: tuple[float, ...], after: _After) -> int:
        return self._add(queue, kind, charge=self.g.charges.of_stash(kind, n), after=after, key=key, stash=n)

    def _drop_clean(self, n: int) -> None:
        """Copies that are the host's, too, are given up. One of a streamed chunk that has stayed over the border may
        still be on its way down from there: it goes behind that, and the compute queue does not wait for it."""
        stays, updates = self.course.stays, self.course.updates
        for c in self.dropped.get(n, ()):
            moment = self.g.blocks[self.course.positions[n].block].last
            if (c, "param") not in self.last_drop and c in stays and c in updates:
                op = self._add(
                    Queue.D2H, Kind.DROP, c, moment=moment, after=((self.end_of[n], 0),), key=(-2.0, float(n))
                )
                self.first_drop[c] = op
            else:
                op = self._add(Queue.COMPUTE, Kind.DROP, c, moment=moment)
            self.last_drop[c, "param"] = op

    def _pins_behind_barrier(self, until: int) -> None:
        """Adam of the resident chunks, of the first `until` of them in all. Those of streamed chunks, whose states are
        a queue on the link, go between them: the copies down begin at once, and the link finds room."""
        for c in self.on_gpu[self.pins_done : until]:
            self._update_resident(c, () if self.pins_done else tuple((op, 0) for op in self.last_adds))
            self.pins_done += 1

    def _update_resident(self, c: int, after: _After = ()) -> None:
        """GPU Adam of a chunk whose states are always there."""
        if c in self.reduced:
            after += ((self.reduced[c], 0),)
        self.gpu_adam_of[c] = self._add(Queue.COMPUTE, Kind.GPU_ADAM, c, after=after)

    def _send_gradient(self, c: int, moment: int, after: _After) -> None:
        """The gradient of a micro-batch but the last goes down in a list of its own and is added there."""
        self.sequence += 1
        key = (0.0, float(self.sequence))
        self._add(Queue.D2H, Kind.WRITEBACK, c, "grad", moment, after=after, key=key, then=len(self.rows) + 1)
        self.gradient_free[c] = self._add(Queue.D2H, Kind.FREE, c, "grad", moment)
        self.last_add[c] = self._add(
            Queue.ADAM, Kind.CPU_ADD, c, "grad", moment, after=((self.gradient_free[c], 0),), key=key
        )

    def _down_key(self, c: int) -> tuple[float, ...]:
        self.sequence += 1
        return (1.0, float(self.g.uses.first_use(c) if self.course.knobs.down == "edf" else self.sequence))

    def _writeback(self, c: int, list_name: str, moment: int, after: _After, key: tuple[float, ...], drop: bool) -> int:
        """A list goes down and, with `drop`, is given up on the GPU."""
        down = self._add(
            Queue.D2H,
            Kind.WRITEBACK,
            c,
            list_name,
            moment,
            after=after,
            key=key,
            then=len(self.rows) + 1 if drop else None,
        )
        if drop:
            op = self._add(Queue.D2H, Kind.DROP, c, list_name, moment)
            self.last_drop[c, list_name] = op
        return down

    def _send_last(self, c: int, here: int, *, drop: bool = True) -> int:
        """The last gradient goes down in the working list that it has overwritten; with several micro-batches and
        clipping it is added there."""
        g = self.g
        moment = g.uses.last_gradient(c)
        down = self._writeback(c, "param", moment, ((here, 0),), self._down_key(c), drop)
        if g.add_last:
            self.sequence += 1
            # Also behind the chunk's earlier gradients: one of them may still be on its way down.
            after: _After = ((down, 0), (self.last_add[c], 0)) if c in self.last_add else ((down, 0),)
            self.last_add[c] = self._add(
                Queue.ADAM, Kind.CPU_ADD, c, "param", moment, after=after, key=(0.0, float(self.sequence))
            )
            self.last_adds.append(self.last_add[c])
        return down

    def _update(self, n: int, c: int, arriving: list[int]) -> None:
        """The states of a streamed chunk come, GPU Adam runs, all goes down."""
        g, course = self.g, self.course
        moment = g.uses.last_gradient(c)
        added: _After = ((self.last_add[c], 0),) if c in self.last_add else ()
        for name in g.visiting_lists:
            arriving.append(self._fetch(c, n, name, added if name == "grad32" else ()))
        if c in self.emptied:
            gone: _After = ((self.last_drop[c, "param"], 0),)
            self._add(Queue.COMPUTE, Kind.ALLOC, c, "param", moment, after=gone)
        waits = [(op, 0) for op in arriving] + [(op, 0) for op in self.last_adds]
        if c in self.reduced:
            waits.append((self.reduced[c], 0))
        here = self.gpu_adam_of[c] = self._add(
            Queue.COMPUTE, Kind.GPU_ADAM, c, moment=moment, after=tuple(waits), position=n
        )
        self.end_of.append(here)
        if g.several:
            self.last_drop[c, "grad32"] = self._add(Queue.COMPUTE, Kind.DROP, c, "grad32", moment)
        key = self._down_key(c)
        for number, name in enumerate(g.builder.layout.state_lists):
            self._writeback(c, name, moment, ((here, 0),), (*key, 1.0 + number), drop=True)
        stays = c in course.stays
        late = stays and course.knobs.states_first
        order = (2.0, float(g.uses.first_use(c))) if late else (*key, 0.0)
        self.told[c] = self._writeback(c, "param", moment, ((here, 0),), order, drop=not stays)

    def _updated_before(self, c: int) -> _After:
        return ((self.adam_of[c], 1),) if c in self.adam_of else ()

    def _adam(self) -> None:
        """CPU Adam, and what waits for the previous iteration."""
        g = self.g
        behind_backward = g.barrier is not None or adam_waits_for_backward(g.point.adam)
        last_block = self.end_of[self.course.at[-1]]
        self.adam_of: dict[int, int] = {}
        for c, down in self.down.items():
            after: _After = ((down, 0),) + (((self.last_add[c], 0),) if c in self.last_add else ())
            if behind_backward:
                after += ((last_block, 0),)
            if g.add_last:
                after += tuple((op, 0) for op in self.last_adds if op != self.last_add[c])
            self.adam_of[c] = self._add(
                Queue.ADAM, Kind.CPU_ADAM, c, after=after, key=adam_key(g.point.adam, g.uses, c)
            )
        for n, row in self.overwrites.items():
            for c in row:
                if c in self.course.stays:  # the copy down of its parameters reads what is given up or overwritten
                    self.rows[self.first_drop.get(c, self.end_of[n])].after += ((self.told[c], 1),)
