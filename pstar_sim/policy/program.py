"""A program for one choice of pinned chunks: the steps of an iteration with what they wait for, played once.

Of the chunks that are not pinned the point's rule keeps what it can between two uses. The event loop fetches the chunk
with the earliest deadline among those whose update is done, reserves its memory then, and sends gradients down and
updates chunks in the order in which the next forward needs them.
"""

from __future__ import annotations

from dataclasses import dataclass

from pstar_sim.core.step import Kind, Queue
from pstar_sim.policy.emit import cut_tide
from pstar_sim.policy.event_loop import Op, Outcome, Program, run
from pstar_sim.policy.ground import Ground
from pstar_sim.policy.residency import Gap, gaps_of
from pstar_sim.policy.rules import adam_key, adam_waits_for_backward, fetch_floors, keep_set

__all__ = ["Attempt", "What", "attempt"]

LEAD_CHUNKS = 2  # room that fetches ahead leave to urgent ones
LINGER_COPIES = 2  # how many copies long a gradient is expected to stay after it is final


@dataclass(slots=True)
class What:
    """What an op is, for the plan: its step, or (block) the moments it stands for."""

    kind: Kind
    chunk: int = -1
    list_name: str = "param"
    moment: int = -1
    block: int = -1


@dataclass(slots=True)
class Attempt:
    """A program for one set of pins, and what the event loop made of it. linger: room is left for gradients on their
    way down (`_lingering`), which pays unless memory is very tight."""

    pinned: frozenset[int]
    linger: bool
    program: Program
    what: list[What]
    kept: set[Gap]
    outcome: Outcome
    fetched_bytes: int

    @property
    def pins(self) -> int:
        return len(self.pinned)


def attempt(ground: Ground, pinned: frozenset[int], *, linger: bool = True) -> Attempt:
    """The program for these pins, and how it plays."""
    program, what, kept, fetched = _program(ground, pinned, linger)
    outcome = run(program)
    if outcome.stuck is not None:
        op, place, wanted, free = outcome.stuck
        raise AssertionError(f"{ground.name}: {what[op]} wants {wanted} bytes of the {place}, {free} are free")
    return Attempt(pinned, linger, program, what, kept, outcome, fetched)


def _program(g: Ground, pinned: frozenset[int], linger: bool) -> tuple[Program, list[What], set[Gap], int]:
    b, uses, cost, blocks = g.builder, g.uses, g.cost, g.blocks
    count = len(blocks)
    permanent = g.small_bytes + sum(b.permanent_bytes(c) for c in pinned)
    free = g.machine.gpu_budget_bytes - permanent
    moving = [c for c in g.moving if c not in pinned and g.touched[c]]
    room = []
    for n, block in enumerate(blocks):
        own = sum(g.sizes[c] for c in block.chunks if c not in pinned)
        room.append(free - block.tide_bytes - own - g.gradients(n, pinned))
    for n, size in enumerate(_lingering(g, pinned) if linger else ()):
        room[n] -= min(size, max(0, room[n]))
    gaps = [gap for c in moving for gap in gaps_of(c, g.touched[c])]
    for c in moving:  # a clean chunk may also stay over the border
        if not uses.updated(c):
            gaps.append(g.leaves_at_border(c))
    kept = keep_set(g.point.eviction, gaps, g.sizes, room)
    for gap in kept:
        for n in range(gap.start + 1, gap.end):
            room[n % count] -= g.sizes[gap.chunk]

    ops: list[Op] = []
    what: list[What] = []

    def add(op: Op, meaning: What) -> int:
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
        mine = g.touched[c]
        if uses.updated(c):
            leaves[mine[-1]].append(c)
            fetches[mine[0]].append(c)
            for number, (_, first, last) in enumerate(uses.spans[c][:-1]):
                opens[g.block_of[first]].append((c, number))
                closes[g.block_of[last]].append((c, number))
        else:
            border = g.leaves_at_border(c)
            if border in kept or border.end == border.start + 1:
                initial_gpu += g.sizes[c]
            else:
                dropped[mine[-1]].append(c)
                fetches[mine[0]].append(c)
        for gap in gaps_of(c, mine):
            if gap not in kept:
                dropped[gap.start].append(c)
                fetches[gap.end].append(c)
    on_gpu = sorted((c for c in (*g.small, *pinned) if uses.updated(c)), key=lambda c: (uses.first_use(c), c))
    if g.barrier is None:
        for c in on_gpu:
            eager[g.block_of[uses.last_gradient(c)]].append(c)

    latest_drop: dict[int, int] = {}  # chunk -> op that last freed it on the gpu, in this iteration
    first_fetch: list[tuple[int, int]] = []
    gradient_free: dict[int, int] = {}
    latest_add: dict[int, int] = {}
    adams: list[tuple[int, int]] = []  # chunk, op of its drop
    last_adds: list[int] = []
    floors = iter(fetch_floors(g.point.prefetch, [n for n, row in enumerate(fetches) for _ in row]))
    sequence = 0
    end_of: list[int] = []
    for n, block in enumerate(blocks):
        after: tuple[tuple[int, int], ...]
        waits: list[tuple[int, int]] = []
        for c in fetches[n]:
            size = g.sizes[c]
            after = ((latest_drop[c], 0),) if c in latest_drop else ()
            floor = next(floors)
            behind = ((end_of[floor], 0),) if floor is not None else ()
            op = add(
                Op(
                    Queue.H2D,
                    cost.transfer_s(size, "h2d"),
                    gpu_take=size,
                    after=after + behind,
                    key=(float(n), float(c)),
                    use=n,
                ),
                What(Kind.FETCH, c, moment=block.first),
            )
            if not after:
                first_fetch.append((c, op))
            waits.append((op, 0))
        for c, number in opens[n]:
            size = b.payload(c, "grad")
            after = ((gradient_free[c], 0),) if number else ()
            add(
                Op(Queue.COMPUTE, gpu_take=size, after=after),
                What(Kind.ALLOC, c, "grad", g.span(c, number)[0]),
            )
        rise = max(0, block.tide_bytes - blocks[n - 1].tide_bytes)
        fall = max(0, block.tide_bytes - blocks[(n + 1) % count].tide_bytes)
        here = add(
            Op(Queue.COMPUTE, block.seconds, gpu_take=rise, gpu_free=fall, after=tuple(waits), position=n),
            What(Kind.COMPUTE, block=n, moment=block.first),
        )
        end_of.append(here)
        for c in dropped[n]:
            latest_drop[c] = add(Op(Queue.COMPUTE, gpu_free=g.sizes[c]), What(Kind.DROP, c, moment=block.last))
        for c in eager[n]:
            add(Op(Queue.COMPUTE, cost.gpu_adam_s(c)), What(Kind.GPU_ADAM, c))
        for c, number in closes[n]:
            size = b.payload(c, "grad")
            moment = g.span(c, number)[1]
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
                What(Kind.WRITEBACK, c, "grad", moment),
            )
            gradient_free[c] = add(Op(Queue.D2H, gpu_free=size), What(Kind.FREE, c, "grad", moment))
            latest_add[c] = add(
                Op(
                    Queue.ADAM,
                    cost.cpu_add_s(c),
                    host_free=size,
                    after=((gradient_free[c], 0),),
                    key=(0.0, float(sequence)),
                ),
                What(Kind.CPU_ADD, c, "grad", moment),
            )
        for c in leaves[n]:
            size = g.sizes[c]
            moment = uses.last_gradient(c)
            down = add(
                Op(
                    Queue.D2H,
                    cost.transfer_s(size, "d2h"),
                    after=((here, 0),),
                    key=(1.0, float(uses.first_use(c))),
                    then=len(ops) + 1,
                ),
                What(Kind.WRITEBACK, c, "param", moment),
            )
            latest_drop[c] = add(Op(Queue.D2H, gpu_free=size), What(Kind.DROP, c, moment=moment))
            if g.add_last:
                sequence += 1
                # Also behind the chunk's earlier gradients: one of them may still be on its way down.
                after = ((down, 0), (latest_add[c], 0)) if c in latest_add else ((down, 0),)
                latest_add[c] = add(
                    Op(Queue.ADAM, cost.cpu_add_s(c), after=after, key=(0.0, float(sequence))),
                    What(Kind.CPU_ADD, c, "param", moment),
                )
                last_adds.append(latest_add[c])
            adams.append((c, down))
    for number, c in enumerate(on_gpu if g.barrier is not None else ()):
        after = tuple((op, 0) for op in last_adds) if number == 0 else ()
        add(Op(Queue.COMPUTE, cost.gpu_adam_s(c), after=after), What(Kind.GPU_ADAM, c))
    adam_of: dict[int, int] = {}
    for c, down in adams:
        after = ((down, 0),) + (((latest_add[c], 0),) if c in latest_add else ())
        if g.barrier is not None or adam_waits_for_backward(g.point.adam):
            after += ((end_of[-1], 0),)
        if g.add_last:
            after += tuple((op, 0) for op in last_adds if op != latest_add[c])
        adam_of[c] = add(
            Op(Queue.ADAM, cost.cpu_adam_s(c), after=after, key=adam_key(g.point.adam, uses, c)),
            What(Kind.CPU_ADAM, c),
        )
    for c, op in first_fetch:  # the first fetch of an iteration: what the previous one left behind
        ops[op].after += ((latest_drop[c], 1),) + (((adam_of[c], 1),) if c in adam_of else ())
    fetched = sum(op.gpu_take for op in ops if op.queue is Queue.H2D)
    tide_peaks = [block.tide_bytes for block in blocks]
    held, _ = g.host_bytes(pinned)
    program = Program(
        ops=tuple(ops),
        gpu_free_bytes=free - initial_gpu - cut_tide(tide_peaks),
        host_free_bytes=g.machine.host_budget_bytes - held,
        room=room,
        lead_bytes=LEAD_CHUNKS * g.builder.layout.chunk_bytes,
    )
    return program, what, kept, fetched


def _lingering(g: Ground, pinned: frozenset[int]) -> list[int]:
    """Bytes at each block that gradients on their way down are expected to take still: LINGER_COPIES copies long.
    Kept chunks and fetches ahead leave this room, so that the next gradient does not wait for the last one."""
    blocks = g.blocks
    rows = [0] * len(blocks)
    for c in g.candidates:
        if c in pinned:
            continue
        for _, _, last in g.uses.spans[c]:
            left_s = LINGER_COPIES * g.cost.transfer_s(g.sizes[c], "d2h")
            n = g.block_of[last] + 1
            while left_s > 0 and n < len(blocks):
                rows[n] += g.sizes[c]
                left_s -= blocks[n].seconds
                n += 1
    return rows
