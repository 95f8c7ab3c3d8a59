"""What tide and static_partition share: chunks come ahead of time, gradients leave at once, CPU Adam runs in deadline
order. The two differ in one thing only, the non-model bytes each moment is reckoned to hold.

Chunks that are used first are pinned, as many as a closed form and then an event loop find best. Of the others
Belady's rule keeps what it can between two uses. The event loop fetches the chunk with the earliest deadline among
those whose update is done, reserves its memory then, and sends gradients down and updates chunks in the order in which
the next forward needs them. Its result fixes the order on each queue, and its schedule the memory edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Kind, Place, Queue, Ref
from pstar_sim.errors import DoesNotFit
from pstar_sim.policy.emit import Builder, cut_tide, describe_moment, memory_edges
from pstar_sim.policy.event_loop import Op, Outcome, Program, run
from pstar_sim.policy.pins import PinFacts, iteration_bounds, most_pins
from pstar_sim.policy.residency import Gap, belady, blocks_of, gaps_of
from pstar_sim.units import format_bytes, format_s
from pstar_sim.workload.workload import Workload

__all__ = ["Asynchronous"]

LEAD_CHUNKS = 2  # room that fetches ahead leave to urgent ones
AS_GOOD = 2e-4  # relative difference of two predicted times that is not worth a byte
CLOSE_TO_BOUND = 2e-3  # so close to the closed form no other number of pins is tried
LINGER_COPIES = 2  # how many copies long a gradient is expected to stay after it is final


def _fastest(attempts: Sequence[_Attempt]) -> _Attempt:
    """The attempt with the shortest iteration; among those as good as that, the one that copies and pins least."""
    shortest = min(a.outcome.iteration_s for a in attempts)
    good = [a for a in attempts if a.outcome.iteration_s <= shortest * (1 + AS_GOOD)]
    return min(good, key=lambda a: (a.fetched_bytes, a.pins))


@dataclass(slots=True)
class _What:
    """What an op is, for the plan: its step, or (block) the moments it stands for."""

    kind: Kind
    chunk: int = -1
    list_name: str = "param"
    moment: int = -1
    block: int = -1


@dataclass(slots=True)
class _Attempt:
    """A program for one number of pins, and what the event loop made of it. linger: room is left for gradients on their
    way down (`_lingering`), which pays unless memory is very tight."""

    pins: int
    linger: bool
    program: Program
    what: list[_What]
    kept: set[Gap]
    outcome: Outcome
    fetched_bytes: int


class Asynchronous:
    """One policy at work: facts once, an `_Attempt` for each number of pins, the best one as a plan.

    follow_tide: each moment holds its own non-model bytes; else the highest of any moment, in every moment.
    """

    def __init__(
        self, name: str, workload: Workload, machine: Machine, settings: Settings, *, follow_tide: bool
    ) -> None:
        self.name = name
        self.follow_tide = follow_tide
        self.workload = workload
        self.machine = machine
        self.settings = settings
        self.builder = b = Builder(name, workload, machine, settings)
        self.uses = uses = b.uses
        self.cost = b.cost
        self.several = workload.micro_batches > 1
        self.barrier = settings.barrier(workload.dtype)
        self.add_last = self.several and settings.clip  # the norm is that of the accumulated gradient
        peak = max(uses.tide)
        self.tide = uses.tide if follow_tide else (peak,) * len(uses.tide)
        chunks = [c.index for c in b.layout.chunks]
        self.small = frozenset(c for c in chunks if b.layout.chunks[c].small)
        self.moving = [c for c in chunks if c not in self.small]
        self.sizes = [b.payload(c) for c in chunks]
        # In the order in which they would be pinned.
        self.candidates = sorted((c for c in self.moving if uses.updated(c)), key=lambda c: (uses.first_use(c), c))
        self.small_bytes = sum(b.permanent_bytes(c) for c in self.small)
        seconds = b.cost.moments_s
        # A gradient list opens and closes, and an eager GPU Adam follows, at the edge of a block.
        cuts: set[int] = set()
        for c in chunks:
            spans = uses.spans[c] if c not in self.small else uses.spans[c][-1:]
            for n, (_, first, last) in enumerate(spans):
                if n < len(spans) - 1:
                    cuts.add(first)
                if c not in self.small or self.barrier is None:
                    cuts.add(last + 1)
        self.blocks = blocks_of(uses, seconds, self.tide, self.small, frozenset(cuts))
        self.block_of = [n for n, block in enumerate(self.blocks) for _ in range(block.first, block.last + 1)]
        self.touched = [
            sorted({self.block_of[m] for m in uses.touched[c]}) if c not in self.small else [] for c in chunks
        ]
        # Block -> (chunk, bytes) of the gradient lists that are open in it.
        self.gradient_lists: list[list[tuple[int, int]]] = [[] for _ in self.blocks]
        for c in self.moving:
            for _, first, last in uses.spans[c][:-1]:
                for n in range(self.block_of[first], self.block_of[last] + 1):
                    self.gradient_lists[n].append((c, b.payload(c, "grad")))

    # Which numbers of pins to try.

    def plan(self) -> Plan:
        self._check_gpu()
        best, most, bound_s = self._scan()
        rival = self._rival() if self.follow_tide else None
        if rival is not None and not self.several:
            # [Note: one micro-batch] Every gap between forward and backward contains the peak, so low tide has no room
            # for anything that the peak has not. What is pinned is decided at the peak in both policies; both then copy
            # the same.
            attempts = [self._attempt(rival.pins, linger=rival.linger)]
            return self._emit(attempts[0], attempts, most, bound_s)
        attempts = self._search(best, most, bound_s)
        allowed = attempts
        if rival is not None:
            # [Note: no more bytes than static] Low tide gives room for more pins, each worth a little time and many
            # copies. With several micro-batches tide spends it on copies first: it moves no more bytes to the GPU
            # than the static partition would, and is the fastest of what is left.
            for p in range(rival.pins, min(most, rival.pins + 2) + 1):
                if p not in {a.pins for a in attempts}:
                    attempts.append(self._attempt(p))
                if next(a for a in attempts if a.pins == p).fetched_bytes > rival.fetched_bytes:
                    break
            allowed = [a for a in attempts if a.fetched_bytes <= rival.fetched_bytes] or attempts
        chosen = _fastest(allowed)
        return self._emit(chosen, attempts, most, bound_s)

    def _search(self, best: int, most: int, bound_s: float) -> list[_Attempt]:
        """Attempts: the closed form's number of pins, none, all; its neighbours if the event loop stays behind the
        closed form. Raises DoesNotFit if the host has no room for what is not pinned."""
        attempts: dict[int, _Attempt] = {}
        error: DoesNotFit | None = None

        def attempt(p: int) -> None:
            nonlocal error
            if not 0 <= p <= most or p in attempts:
                return
            try:
                self._check_host(p)
            except DoesNotFit as reason:
                error = error or reason
                return
            attempts[p] = self._attempt(p)

        attempt(best)
        if most == len(self.candidates):
            attempt(most)
        attempt(0)
        if not attempts or min(a.outcome.iteration_s for a in attempts.values()) > bound_s * (1 + CLOSE_TO_BOUND):
            for step in (1, 2, 3, 4):
                attempt(best - step)
                attempt(best + step)
        if not attempts:
            attempt(most)
        if not attempts:
            assert error is not None
            raise error
        found = list(attempts.values())
        if not self.several:  # no gradient list waits for room; only fetches do
            found.append(self._attempt(_fastest(found).pins, linger=False))
        return found

    def _rival(self) -> _Attempt | None:
        """What static_partition would choose here; None if it does not fit."""
        other = Asynchronous("static_partition", self.workload, self.machine, self.settings, follow_tide=False)
        try:
            other._check_gpu()
            return _fastest(other._search(*other._scan()))
        except DoesNotFit:
            return None

    def _scan(self) -> tuple[int, int, float]:
        """(best number of pins by the closed form, the most that fit, the closed form's seconds at the best)."""
        budget = self.machine.gpu_budget_bytes
        room = [
            budget - self.small_bytes - block.tide_bytes - self._gradients(n) for n, block in enumerate(self.blocks)
        ]
        position = {c: n for n, c in enumerate(self.candidates)}
        need = [tuple(position[c] for c in block.chunks if c in position) for block in self.blocks]
        fixed = [sum(self.sizes[c] for c in block.chunks if c not in position) for block in self.blocks]
        most = most_pins(
            [self.sizes[c] for c in self.candidates],
            [self.builder.permanent_bytes(c) for c in self.candidates],
            need,
            [left - beside for left, beside in zip(room, fixed)],
        )
        bounds = iteration_bounds(self._pin_facts(min(room)), most)
        best = int(bounds.argmin())
        return best, most, float(bounds[best])

    def _pin_facts(self, room_bytes: int) -> PinFacts:
        uses, cost, order = self.uses, self.cost, self.candidates
        adds = self.workload.micro_batches - (0 if self.add_last else 1) if self.several else 0
        return PinFacts(
            first=[uses.first_use(c) for c in order],
            final=[uses.last_gradient(c) for c in order],
            working_bytes=[self.sizes[c] for c in order],
            pinned_bytes=[self.builder.permanent_bytes(c) for c in order],
            adam_s=[cost.cpu_adam_s(c) for c in order],
            gpu_adam_s=[cost.gpu_adam_s(c) for c in order],
            add_s=[cost.cpu_add_s(c) * adds for c in order],
            down_s=[cost.transfer_s(self.sizes[c], "d2h") for c in order],
            up_s=[cost.transfer_s(self.sizes[c], "h2d") for c in order],
            moments_s=cost.moments_s,
            barrier=self.barrier is not None,
            room_bytes=room_bytes,
            gaps=2 * self.workload.micro_batches - 1,
        )

    # Room.

    def _gradients(self, n: int, pinned: frozenset[int] = frozenset()) -> int:
        """Bytes of the gradient lists that block n needs, of chunks that are not pinned."""
        return sum(size for c, size in self.gradient_lists[n] if c not in pinned)

    def _check_gpu(self) -> None:
        """Raise DoesNotFit if the worst block needs more than the budget with nothing pinned."""
        budget = self.machine.gpu_budget_bytes
        worst, short = 0, -budget
        for n, block in enumerate(self.blocks):
            own = sum(self.sizes[c] for c in block.chunks) + self._gradients(n)
            over = self.small_bytes + own + block.tide_bytes - budget
            if over > short:
                worst, short = n, over
        if short <= 0:
            return
        block = self.blocks[worst]
        moment = max(range(block.first, block.last + 1), key=lambda m: self.tide[m])
        own = sum(self.sizes[c] for c in block.chunks)
        parts = [
            describe_moment(self.workload, moment)
            if self.follow_tide
            else f"the tide's peak, {format_bytes(max(self.tide))}, at every moment"
        ]
        if block.chunks:
            number = f"{len(block.chunks)} chunk{'s' if len(block.chunks) > 1 else ''}"
            parts.append(f"{number} used in moment {moment}, {format_bytes(own)}")
        if self._gradients(worst):
            parts.append(f"gradient lists, {format_bytes(self._gradients(worst))}")
        if self.small_bytes:
            parts.append(f"small parameters and their states, {format_bytes(self.small_bytes)}")
        raise DoesNotFit(
            policy=self.name, place="gpu", needed_bytes=budget + short, available_bytes=budget, what="; ".join(parts)
        )

    def _host_bytes(self, pins: int) -> tuple[int, int]:
        """(held for ever, needed to move) on the host."""
        pinned = set(self.candidates[:pins])
        held = sum(self.builder.permanent_bytes(c) for c in self.moving if c not in pinned)
        passing = 0
        if self.several:
            passing = max((self.builder.payload(c, "grad") for c in self.candidates if c not in pinned), default=0)
        return held, passing

    def _check_host(self, pins: int) -> None:
        held, passing = self._host_bytes(pins)
        budget = self.machine.host_budget_bytes
        if held + passing > budget:
            raise DoesNotFit(
                policy=self.name,
                place="host",
                needed_bytes=held + passing,
                available_bytes=budget,
                what=f"working list and optimizer states of all chunks but {pins} pinned ones"
                + (", accumulated gradients" if self.several else ""),
            )

    # One attempt: which ops there are for p pinned chunks, and how they play.

    def _attempt(self, pins: int, *, linger: bool = True) -> _Attempt:
        program, what, kept, fetched = self._program(frozenset(self.candidates[:pins]), linger)
        outcome = run(program)
        if outcome.stuck is not None:
            op, place, wanted, free = outcome.stuck
            raise AssertionError(f"{self.name}: {what[op]} wants {wanted} bytes of the {place}, {free} are free")
        return _Attempt(pins, linger, program, what, kept, outcome, fetched)

    def _program(self, pinned: frozenset[int], linger: bool) -> tuple[Program, list[_What], set[Gap], int]:
        b, uses, cost, blocks = self.builder, self.uses, self.cost, self.blocks
        count = len(blocks)
        permanent = self.small_bytes + sum(b.permanent_bytes(c) for c in pinned)
        free = self.machine.gpu_budget_bytes - permanent
        moving = [c for c in self.moving if c not in pinned and self.touched[c]]
        room = []
        for n, block in enumerate(blocks):
            own = sum(self.sizes[c] for c in block.chunks if c not in pinned)
            room.append(free - block.tide_bytes - own - self._gradients(n, pinned))
        for n, size in enumerate(self._lingering(pinned) if linger else ()):
            room[n] -= min(size, max(0, room[n]))
        gaps = [gap for c in moving for gap in gaps_of(c, self.touched[c])]
        for c in moving:  # a clean chunk may also stay over the border
            if not uses.updated(c):
                gaps.append(Gap(self.touched[c][-1], self.touched[c][0] + count, c))
        kept = belady(gaps, self.sizes, room)
        for gap in kept:
            for n in range(gap.start + 1, gap.end):
                room[n % count] -= self.sizes[gap.chunk]

        ops: list[Op] = []
        what: list[_What] = []

        def add(op: Op, meaning: _What) -> int:
            ops.append(op)
            what.append(meaning)
            return len(ops) - 1

        # First pass: everything with an index; `after` is filled in as far as the order below allows it.
        opens: list[list[tuple[int, int]]] = [[] for _ in blocks]  # block -> (chunk, number of the gradient list)
        closes: list[list[tuple[int, int]]] = [[] for _ in blocks]
        leaves: list[list[int]] = [[] for _ in blocks]  # last use of an updated chunk
        dropped: list[list[int]] = [[] for _ in blocks]
        eager: list[list[int]] = [[] for _ in blocks]
        fetches: list[list[int]] = [[] for _ in blocks]
        initial_gpu = 0
        for c in moving:
            mine = self.touched[c]
            if uses.updated(c):
                leaves[mine[-1]].append(c)
                fetches[mine[0]].append(c)
                for number, (_, first, last) in enumerate(uses.spans[c][:-1]):
                    opens[self.block_of[first]].append((c, number))
                    closes[self.block_of[last]].append((c, number))
            else:
                border = Gap(mine[-1], mine[0] + count, c)
                if border in kept or border.end == border.start + 1:
                    initial_gpu += self.sizes[c]
                else:
                    dropped[mine[-1]].append(c)
                    fetches[mine[0]].append(c)
            for gap in gaps_of(c, mine):
                if gap not in kept:
                    dropped[gap.start].append(c)
                    fetches[gap.end].append(c)
        on_gpu = sorted((c for c in (*self.small, *pinned) if uses.updated(c)), key=lambda c: (uses.first_use(c), c))
        if self.barrier is None:
            for c in on_gpu:
                eager[self.block_of[uses.last_gradient(c)]].append(c)

        latest_drop: dict[int, int] = {}  # chunk -> op that last freed it on the gpu, in this iteration
        first_fetch: list[tuple[int, int]] = []
        gradient_free: dict[int, int] = {}
        latest_add: dict[int, int] = {}
        adams: list[tuple[int, int]] = []  # chunk, op of its drop
        last_adds: list[int] = []
        sequence = 0
        end_of: list[int] = []
        for n, block in enumerate(blocks):
            after: tuple[tuple[int, int], ...]
            waits: list[tuple[int, int]] = []
            for c in fetches[n]:
                size = self.sizes[c]
                after = ((latest_drop[c], 0),) if c in latest_drop else ()
                op = add(
                    Op(
                        Queue.H2D,
                        cost.transfer_s(size, "h2d"),
                        gpu_take=size,
                        after=after,
                        key=(float(n), float(c)),
                        use=n,
                    ),
                    _What(Kind.FETCH, c, moment=block.first),
                )
                if not after:
                    first_fetch.append((c, op))
                waits.append((op, 0))
            for c, number in opens[n]:
                size = b.payload(c, "grad")
                after = ((gradient_free[c], 0),) if number else ()
                add(
                    Op(Queue.COMPUTE, gpu_take=size, after=after),
                    _What(Kind.ALLOC, c, "grad", self._span(c, number)[0]),
                )
            rise = max(0, block.tide_bytes - blocks[n - 1].tide_bytes)
            fall = max(0, block.tide_bytes - blocks[(n + 1) % count].tide_bytes)
            here = add(
                Op(Queue.COMPUTE, block.seconds, gpu_take=rise, gpu_free=fall, after=tuple(waits), position=n),
                _What(Kind.COMPUTE, block=n, moment=block.first),
            )
            end_of.append(here)
            for c in dropped[n]:
                latest_drop[c] = add(Op(Queue.COMPUTE, gpu_free=self.sizes[c]), _What(Kind.DROP, c, moment=block.last))
            for c in eager[n]:
                add(Op(Queue.COMPUTE, cost.gpu_adam_s(c)), _What(Kind.GPU_ADAM, c))
            for c, number in closes[n]:
                size = b.payload(c, "grad")
                moment = self._span(c, number)[1]
                after = ((here, 0),) if number == 0 else ((here, 0), (latest_add[c], 0))
                sequence += 1
                down = add(
                    Op(
                        Queue.D2H,
                        cost.transfer_s(size, "d2h"),
                        host_take=size,
                        after=after,
                        key=(0.0, float(sequence)),
                        then=len(ops) + 1,
                    ),
                    _What(Kind.WRITEBACK, c, "grad", moment),
                )
                gradient_free[c] = add(Op(Queue.D2H, gpu_free=size), _What(Kind.FREE, c, "grad", moment))
                latest_add[c] = add(
                    Op(
                        Queue.ADAM,
                        cost.cpu_add_s(c),
                        host_free=size,
                        after=((gradient_free[c], 0),),
                        key=(0.0, float(sequence)),
                    ),
                    _What(Kind.CPU_ADD, c, "grad", moment),
                )
            for c in leaves[n]:
                size = self.sizes[c]
                moment = uses.last_gradient(c)
                down = add(
                    Op(
                        Queue.D2H,
                        cost.transfer_s(size, "d2h"),
                        after=((here, 0),),
                        key=(1.0, float(uses.first_use(c))),
                        then=len(ops) + 1,
                    ),
                    _What(Kind.WRITEBACK, c, "param", moment),
                )
                latest_drop[c] = add(Op(Queue.D2H, gpu_free=size), _What(Kind.DROP, c, moment=moment))
                if self.add_last:
                    sequence += 1
                    # Also behind the chunk's earlier gradients: one of them may still be on its way down.
                    after = ((down, 0), (latest_add[c], 0)) if c in latest_add else ((down, 0),)
                    latest_add[c] = add(
                        Op(Queue.ADAM, cost.cpu_add_s(c), after=after, key=(0.0, float(sequence))),
                        _What(Kind.CPU_ADD, c, "param", moment),
                    )
                    last_adds.append(latest_add[c])
                adams.append((c, down))
        for number, c in enumerate(on_gpu if self.barrier is not None else ()):
            after = tuple((op, 0) for op in last_adds) if number == 0 else ()
            add(Op(Queue.COMPUTE, cost.gpu_adam_s(c), after=after), _What(Kind.GPU_ADAM, c))
        adam_of: dict[int, int] = {}
        for c, down in adams:
            after = ((down, 0),) + (((latest_add[c], 0),) if c in latest_add else ())
            if self.barrier is not None:
                after += ((end_of[-1], 0),)
            if self.add_last:
                after += tuple((op, 0) for op in last_adds if op != latest_add[c])
            adam_of[c] = add(
                Op(Queue.ADAM, cost.cpu_adam_s(c), after=after, key=(1.0, float(uses.first_use(c)))),
                _What(Kind.CPU_ADAM, c),
            )
        for c, op in first_fetch:  # the first fetch of an iteration: what the previous one left behind
            ops[op].after = ((latest_drop[c], 1),) + (((adam_of[c], 1),) if c in adam_of else ())
        fetched = sum(op.gpu_take for op in ops if op.queue is Queue.H2D)
        tide_peaks = [block.tide_bytes for block in blocks]
        held, _ = self._host_bytes(len(pinned))
        program = Program(
            ops=tuple(ops),
            gpu_free_bytes=free - initial_gpu - cut_tide(tide_peaks),
            host_free_bytes=self.machine.host_budget_bytes - held,
            room=room,
            lead_bytes=LEAD_CHUNKS * self.builder.layout.chunk_bytes,
        )
        return program, what, kept, fetched

    def _lingering(self, pinned: frozenset[int]) -> list[int]:
        """Bytes at each block that gradients on their way down are expected to take still: LINGER_COPIES copies long.
        Kept chunks and fetches ahead leave this room, so that the next gradient does not wait for the last one."""
        blocks = self.blocks
        rows = [0] * len(blocks)
        for c in self.candidates:
            if c in pinned:
                continue
            for _, _, last in self.uses.spans[c]:
                left_s = LINGER_COPIES * self.cost.transfer_s(self.sizes[c], "d2h")
                n = self.block_of[last] + 1
                while left_s > 0 and n < len(blocks):
                    rows[n] += self.sizes[c]
                    left_s -= blocks[n].seconds
                    n += 1
        return rows

    def _span(self, chunk: int, number: int) -> tuple[int, int]:
        _, first, last = self.uses.spans[chunk][number]
        return first, last

    # The plan.

    def _emit(self, chosen: _Attempt, attempts: Sequence[_Attempt], most: int, bound_s: float) -> Plan:
        b, uses = self.builder, self.uses
        pinned = frozenset(self.candidates[: chosen.pins])
        count = len(self.blocks)
        for c in (*self.small, *pinned):
            b.reside_on_gpu(c)
        for c in self.moving:
            if c in pinned:
                continue
            b.reside_on_host(c)
            mine = self.touched[c]
            if mine and not uses.updated(c):
                border = Gap(mine[-1], mine[0] + count, c)
                if border in chosen.kept or border.end == border.start + 1:
                    b.resident(c, Place.GPU, "param")
        # The order of one iteration: what the window shows of it early, in it, and late.
        started = [(i, k) for i, k, done in chosen.outcome.window if not done]
        order = [i for early in (1, 0, -1) for i, k in started if k == early]
        ops, what = chosen.program.ops, chosen.what
        ends: list[tuple[int, int]] = [(0, 0)] * len(ops)
        total = 0
        for i in order:
            block = self.blocks[what[i].block] if what[i].block >= 0 else None
            length = block.last - block.first + 1 if block is not None else 1
            ends[i] = (total, total + length - 1)
            total += length
        for i in order:
            self._step(i, ops[i], what[i], ends)
        edges = memory_edges(b.steps, ops, ends, chosen.outcome)
        self._choices(chosen, attempts, most, bound_s)
        return b.plan(memory=edges)

    def _step(self, i: int, op: Op, meaning: _What, ends: Sequence[tuple[int, int]]) -> None:
        b, c = self.builder, meaning.chunk
        after = [Ref(ends[j][1], back) for j, back in op.after]
        match meaning.kind:
            case Kind.COMPUTE:
                block = self.blocks[meaning.block]
                for m in range(block.first, block.last + 1):
                    b.compute(m, after if m == block.first else ())
            case Kind.FETCH:
                b.fetch(c, meaning.moment, after)
            case Kind.WRITEBACK:
                b.writeback(c, meaning.list_name, meaning.moment, after)
            case Kind.DROP:
                b.drop(op.queue, c, meaning.moment, after)
            case Kind.ALLOC:
                b.alloc(op.queue, c, meaning.list_name, Place.GPU, meaning.moment, after)
            case Kind.FREE:
                b.free(op.queue, c, meaning.list_name, Place.GPU, meaning.moment, after)
            case Kind.CPU_ADD:
                b.cpu_add(c, meaning.list_name, meaning.moment, after)
            case Kind.CPU_ADAM:
                b.cpu_adam(c, after)
            case Kind.GPU_ADAM:
                b.gpu_adam(c, after)
            case kind:
                raise AssertionError(kind)

    def _choices(self, chosen: _Attempt, attempts: Sequence[_Attempt], most: int, bound_s: float) -> None:
        b = self.builder
        b.predictions["policy_iteration_s"] = chosen.outcome.iteration_s
        b.choices["capacity"] = (
            "GPU budget less the non-model bytes of each moment"
            if self.follow_tide
            else f"GPU budget less the highest non-model bytes of any moment ({format_bytes(max(self.tide))})"
        )
        b.choices["pins"] = f"{chosen.pins} of {len(self.candidates)} chunks ({most} would fit)"
        tried: dict[int, float] = {}
        for a in attempts:
            tried[a.pins] = min(a.outcome.iteration_s, tried.get(a.pins, a.outcome.iteration_s))
        b.choices["pins_tried"] = {p: format_s(seconds) for p, seconds in sorted(tried.items())}
        pinned = set(self.candidates[: chosen.pins])
        gaps = [gap for c in self.moving if c not in pinned for gap in gaps_of(c, self.touched[c])]
        peak = max(range(len(self.blocks)), key=lambda n: self.blocks[n].tide_bytes)
        over = sum(gap.start < peak < gap.end for gap in gaps)
        b.choices["kept_gaps"] = len(chosen.kept)
        if self.follow_tide:
            b.choices["gaps_over_the_peak"] = f"{over} of {len(gaps)}" + (
                ", so low tide cannot keep what high tide cannot" if gaps and over == len(gaps) else ""
            )
        b.choices["closed_form_s"] = bound_s
