"""A light event loop: queues, dependencies, bytes and nominal seconds, played until the iteration repeats.

Policies use it to find the order of steps on each queue and the schedule their memory edges are made from. It decides
only what a policy may decide; the simulator then times the plan.
The compute queue always runs in program order; the others take, among the steps that are ready, the one with the
smallest key.

[Note: fetching ahead] A fetch (or a gather, on the net queue) for the use at compute position u may start when, at
every position from the running one up to u, the room that is not needed otherwise (`Program.room`) still holds it, plus
a lead unless it is the earliest of its queue not yet started: memory is reserved when a copy starts, never before it is
ready, and the last slots stay for urgent ones. Without `room` (a program of somebody's own), a step may take bytes
before earlier ones of the program only if these could still run one after the other in what is left (the banker's
rule).

[Note: what copies and CPU Adam share] Running together they slow each other down where host DRAM or a half-duplex link
is short, by the rule of the simulator: all that touch DRAM (the disks, too) get the same share of what they would take
alone. Collectives go over other wires.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pstar_sim.core.step import Queue

__all__ = ["Op", "Outcome", "Program", "run"]

COMPUTE, H2D, D2H, ADAM, NET, NVME = range(6)
_INDEX = {
    Queue.COMPUTE: COMPUTE,
    Queue.H2D: H2D,
    Queue.D2H: D2H,
    Queue.ADAM: ADAM,
    Queue.NET: NET,
    Queue.NVME: NVME,
}


@dataclass(slots=True)
class Op:
    """One step (or, on the compute queue, one block of moments) as the loop sees it.

    takes at its start and frees at its end, in bytes. after: (op, back) it waits for. key: order among ready ops of its
    queue, smallest first (None: program order). then: an op of the same queue that follows at once (a drop behind its
    write-back; it is started by nothing else and has no `after` of its own). use: compute position a fetch serves.
    position: compute position, on ops that are a moment or a block of them. dram_bytes: what crosses host DRAM.
    """

    queue: Queue
    seconds: float = 0.0
    gpu_take: int = 0
    gpu_free: int = 0
    host_take: int = 0
    host_free: int = 0
    after: tuple[tuple[int, int], ...] = ()
    key: tuple[float, ...] | None = None
    then: int | None = None
    use: int | None = None
    position: int | None = None
    dram_bytes: int = 0


@dataclass(slots=True)
class Program:
    """Ops of one iteration. free bytes: of each place when nothing of the iteration has begun (at the cut). room: per
    compute position, bytes that fetches ahead of their use may take; lead_bytes: see [Note: fetching ahead].
    dram_bytes_per_s, duplex: see [Note: what copies and CPU Adam share]."""

    ops: tuple[Op, ...]
    gpu_free_bytes: int
    host_free_bytes: int
    room: Sequence[int] | None = None
    lead_bytes: int = 0
    dram_bytes_per_s: float = math.inf
    duplex: bool = True


@dataclass(slots=True)
class Outcome:
    """iteration_s: predicted period. window: (op, iteration relative to the window, ended?) in the order it happened
    ([Note: windows] in memory_edges.py); gpu_free, host_free: bytes free when it opens. closed: the window repeats.
    stuck: None, or (op, place, bytes wanted, bytes free) of the step that can never start.
    """

    iteration_s: float
    window: list[tuple[int, int, bool]]
    gpu_free_bytes: int
    host_free_bytes: int
    closed: bool
    stuck: tuple[int, str, int, int] | None = None
    periods_s: list[float] = field(default_factory=list)


def run(program: Program, *, most: int = 6, tolerance: float = 1e-6, limit_s: float = math.inf) -> Outcome:
    """Play the program from the cut until its window repeats and its period does, within the relative tolerance; `most`
    windows at most. A program is
    given up, its outcome without a window, once a window takes more than limit_s and no less than the one before: the
    first one, which waits for nothing of an iteration before it, is the shortest as a rule."""
    return _Loop(program).run(most, tolerance, limit_s)


class _Loop:
    def __init__(self, program: Program) -> None:
        self.program = program
        ops = program.ops
        self.ops = ops
        count = len(ops)
        self.followers: list[list[tuple[int, int]]] = [[] for _ in ops]
        self.base_waits = [0] * count
        self.first_waits = [0] * count  # of the first iteration, whose predecessor is taken as done
        for i, op in enumerate(ops):
            for j, back in op.after:
                self.followers[j].append((i, back))
                self.base_waits[i] += 1
                self.first_waits[i] += back == 0
        chained = {op.then for op in ops if op.then is not None}
        self.queue_of = [_INDEX[op.queue] for op in ops]
        self.compute = [i for i, op in enumerate(ops) if self.queue_of[i] == COMPUTE]
        self.independent = [i not in chained for i in range(count)]
        self.queues = max(self.queue_of, default=ADAM) + 1 if max(self.queue_of, default=0) > ADAM else 4
        self.others = (D2H, ADAM, *range(NET, self.queues))
        self.on_dram = (H2D, D2H, ADAM, NVME) if self.queues > NVME else (H2D, D2H, ADAM)
        self.lengths = [0] * self.queues
        for i in range(count):
            if self.independent[i]:
                self.lengths[self.queue_of[i]] += 1
        self.keys = [op.key if op.key is not None else (float(i),) for i, op in enumerate(ops)]
        self.positions = sum(op.position is not None for op in ops)
        self.upcoming = [0] * len(self.compute)  # bytes the compute queue takes up to its next moment
        need = 0
        for n in range(len(self.compute) - 1, -1, -1):
            op = ops[self.compute[n]]
            need = op.gpu_take + (0 if op.position is not None else need)
            self.upcoming[n] = need
        self.shared = self._rates_may_be_short()
        # Queues whose ops take bytes ahead of their use, and these in the order of use.
        on_net = any(op.use is not None for op, q in zip(ops, self.queue_of) if q == NET)
        self.reserving = (H2D, NET) if on_net else (H2D,)
        self.others = tuple(q for q in self.others if q not in self.reserving)
        self.fetch_order = [
            sorted(
                (i for i, op in enumerate(ops) if op.use is not None and self.queue_of[i] == q),
                key=lambda i: (ops[i].use, self.keys[i]),
            )
            for q in range(self.queues)
        ]

    def _rates_may_be_short(self) -> bool:
        if not self.program.duplex:
            return True
        most = [0.0] * self.queues
        for q, op in zip(self.queue_of, self.ops):
            if op.seconds > 0.0 and op.dram_bytes:
                most[q] = max(most[q], op.dram_bytes / op.seconds)
        return sum(most) > self.program.dram_bytes_per_s

    def run(self, most: int, tolerance: float, limit_s: float) -> Outcome:
        program, ops = self.program, self.ops
        keys, queue_of, followers, independent = self.keys, self.queue_of, self.followers, self.independent
        count = len(ops)
        gpu_free, host_free = program.gpu_free_bytes, program.host_free_bytes
        log: list[tuple[int, int, bool]] = []
        marks: list[tuple[float, int, int, int]] = []  # time, length of the log, gpu_free, host_free
        waits: list[list[int]] = []
        started: list[bytearray] = []
        ended: list[bytearray] = []
        queues, others, on_dram = self.queues, self.others, self.on_dram
        ready: list[list[tuple[int, tuple[float, ...], int]]] = [[] for _ in range(queues)]
        unstarted: list[list[int]] = []  # per iteration, per queue
        current = [0] * queues  # iteration each queue is at
        busy: list[tuple[int, int] | None] = [None] * queues
        until = [0.0] * queues
        shared, duplex, dram = self.shared, program.duplex, program.dram_bytes_per_s
        left = [0.0] * queues  # where rates are shared: nominal seconds still to do, since `settled_s`
        speed = [1.0] * queues
        settled_s = 0.0
        compute = self.compute
        length = len(compute)
        at = 0  # index of the next compute op in its iteration
        lap = 0
        position = 0  # compute position running or next, unrolled
        ahead = program.room is not None
        slack: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        base: NDArray[np.int64] = np.asarray(program.room if ahead else (), dtype=np.int64)
        reserving = self.reserving
        urgent = [(0, 0)] * queues  # per queue: index into fetch_order of the earliest not started, its iteration
        refused: list[tuple[int, int, int] | None] = [None] * queues  # (op, iteration, position) without room ahead
        now = 0.0

        def open_iteration() -> None:
            nonlocal slack
            k = len(waits)
            row = list(self.first_waits if k == 0 else self.base_waits)
            if k > 0:  # steps of the previous iteration that have ended already
                previous = ended[k - 1]
                for j in range(count):
                    if previous[j]:
                        for i, back in followers[j]:
                            if back == 1:
                                row[i] -= 1
            waits.append(row)
            started.append(bytearray(count))
            ended.append(bytearray(count))
            unstarted.append(list(self.lengths))
            if ahead:
                slack = np.concatenate((slack, base))
            for i in range(count):
                if row[i] == 0 and independent[i] and queue_of[i] != COMPUTE:
                    heapq.heappush(ready[queue_of[i]], (k, keys[i], i))

        def finish(i: int, k: int) -> None:
            nonlocal gpu_free, host_free
            op = ops[i]
            gpu_free += op.gpu_free
            host_free += op.host_free
            ended[k][i] = 1
            log.append((i, k, True))
            for j, back in followers[i]:
                if k + back < len(waits):
                    row = waits[k + back]
                    row[j] -= 1
                    if row[j] == 0 and independent[j] and queue_of[j] != COMPUTE:
                        heapq.heappush(ready[queue_of[j]], (k + back, keys[j], j))
            if op.then is not None:
                begin(op.then, k)
                finish(op.then, k)

        def begin(i: int, k: int) -> None:
            nonlocal gpu_free, host_free
            op = ops[i]
            gpu_free -= op.gpu_take
            host_free -= op.host_take
            started[k][i] = 1
            log.append((i, k, False))

        def retime() -> None:
            """New ends for the steps that run now, after one of them has joined or left."""
            nonlocal settled_s
            elapsed, settled_s = now - settled_s, now
            link = 0.5 if not duplex and busy[H2D] is not None and busy[D2H] is not None else 1.0
            wanted = 0.0
            for q in on_dram:
                running = busy[q]
                if running is not None:
                    left[q] -= elapsed * speed[q]
                    speed[q] = link if q in (H2D, D2H) else 1.0
                    op = ops[running[0]]
                    wanted += op.dram_bytes / op.seconds * speed[q]
            share = min(1.0, dram / wanted) if wanted > 0 else 1.0
            for q in on_dram:
                if busy[q] is not None:
                    speed[q] *= share
                    until[q] = now + max(0.0, left[q]) / speed[q]

        def occupy(q: int, i: int, k: int) -> None:
            busy[q] = (i, k)
            until[q] = now + ops[i].seconds
            if shared and q in on_dram:
                left[q] = ops[i].seconds
                speed[q] = 0.0  # until now
                retime()

        open_iteration()
        open_iteration()
        marks.append((0.0, 0, gpu_free, host_free))
        while True:
            moved = False
            # The compute queue: everything that can go at this instant.
            while busy[COMPUTE] is None:
                i = compute[at]
                op = ops[i]
                if waits[lap][i] or op.gpu_take > gpu_free or op.host_take > host_free:
                    break
                if not ahead and op.gpu_take and not self._safe(i, lap, gpu_free, started, ended):
                    break
                if at == 0 and lap > 0:
                    marks.append((now, len(log), gpu_free, host_free))
                    if (abandoned := _too_long(marks, limit_s)) is not None:
                        return abandoned
                    outcome = self._repeats(marks, log, tolerance, lap >= most)
                    if outcome is not None:
                        return outcome
                begin(i, lap)
                moved = True
                if op.seconds > 0.0:
                    occupy(COMPUTE, i, lap)
                else:
                    finish(i, lap)
                    if op.position is not None:
                        position += 1
                at += 1
                if at == length:
                    at, lap = 0, lap + 1
                    if lap + 1 >= len(waits):
                        open_iteration()
            for q in others:
                while busy[q] is None and ready[q]:
                    k, _, i = ready[q][0]
                    op = ops[i]
                    if k > current[q] or op.host_take > host_free or op.gpu_take > gpu_free:
                        break
                    if op.gpu_take and not ahead and not self._safe(i, k, gpu_free, started, ended):
                        break
                    heapq.heappop(ready[q])
                    unstarted[k][q] -= 1
                    while current[q] < len(unstarted) and unstarted[current[q]][q] == 0:
                        current[q] += 1
                    begin(i, k)
                    moved = True
                    if op.seconds > 0.0:
                        occupy(q, i, k)
                    else:
                        finish(i, k)
            for q in reserving:
                fetch_order = self.fetch_order[q]
                while busy[q] is None and ready[q]:
                    k, _, i = ready[q][0]
                    op = ops[i]
                    if k > current[q]:
                        break
                    size = op.gpu_take
                    low = high = 0
                    if ahead and op.use is not None:
                        upcoming = self.upcoming[at] if busy[COMPUTE] is None else 0
                        if size + upcoming > gpu_free:
                            break
                        low, high = position, k * self.positions + op.use
                        if refused[q] == (i, k, position):
                            break
                        if high > low:
                            n, lap_of = urgent[q]
                            while started[lap_of][fetch_order[n]]:
                                n += 1
                                if n == len(fetch_order):
                                    n, lap_of = 0, lap_of + 1
                            urgent[q] = (n, lap_of)
                            wanted = size
                            if (lap_of, fetch_order[n]) != (k, i):
                                wanted += program.lead_bytes
                            if int(slack[low:high].min()) < wanted:
                                refused[q] = (i, k, position)
                                break
                    elif size > gpu_free or not (ahead or self._safe(i, k, gpu_free, started, ended)):
                        break
                    heapq.heappop(ready[q])
                    unstarted[k][q] -= 1
                    while current[q] < len(unstarted) and unstarted[current[q]][q] == 0:
                        current[q] += 1
                    if high > low:
                        slack[low:high] -= size
                    refused[q] = None
                    begin(i, k)
                    moved = True
                    if op.seconds > 0.0:
                        occupy(q, i, k)
                    else:
                        finish(i, k)
            if moved:
                continue  # zero-second steps may have made room or set others free
            # Advance to the next end.
            nearest = -1
            for q in range(queues):
                if busy[q] is not None and (nearest < 0 or until[q] < until[nearest]):
                    nearest = q
            if nearest < 0:
                return self._stuck(waits, lap, compute[at], gpu_free, host_free, ready)
            now = until[nearest]
            running = busy[nearest]
            assert running is not None
            busy[nearest] = None
            if shared and nearest in on_dram:
                retime()
            finish(*running)
            if nearest == COMPUTE and ops[running[0]].position is not None:
                position += 1

    def _safe(self, i: int, k: int, gpu_free: int, started: Sequence[bytearray], ended: Sequence[bytearray]) -> bool:
        """The banker's rule: could all earlier steps of the program still run one by one if op i of iteration k took
        its bytes now?"""
        left = gpu_free - self.ops[i].gpu_take
        for lap in range(max(0, k - 1), k + 1):
            on, off = started[lap], ended[lap]
            first = off.find(0)  # what has ended counts for nothing
            for j in range(len(off) if first < 0 else first, len(self.ops) if lap < k else i):
                if off[j]:
                    continue
                op = self.ops[j]
                if not on[j]:
                    left -= op.gpu_take
                    if left < 0:
                        return False
                left += op.gpu_free
        return True

    def _repeats(
        self,
        marks: list[tuple[float, int, int, int]],
        log: list[tuple[int, int, bool]],
        tolerance: float,
        give_up: bool,
    ) -> Outcome | None:
        """The outcome if the window that just ended is as long as the one before and contains every step once."""
        lap = len(marks) - 2
        (begin_s, low, gpu_free, host_free), (end_s, high, _, _) = marks[-2], marks[-1]
        period = end_s - begin_s
        periods = [b[0] - a[0] for a, b in pairwise(marks)]
        if not give_up and (len(periods) < 2 or abs(period - periods[-2]) > tolerance * period):
            return None
        window = [(i, k - lap, done) for i, k, done in log[low:high]]
        closed = len(window) == 2 * len(self.ops) == len({(i, done) for i, _, done in window})
        if not closed:
            if not give_up:
                return None
            # [Note: a window that does not repeat] One iteration by itself is always a legal schedule of a cyclic
            # plan, begun at the cut: what other iterations held beside it only made it wait longer.
            window = []
            while len(window) < 2 * len(self.ops):
                lap -= 1
                window = [(i, 0, done) for i, k, done in log if k == lap]
            gpu_free, host_free = self.program.gpu_free_bytes, self.program.host_free_bytes
        return Outcome(
            iteration_s=period,
            window=window,
            gpu_free_bytes=gpu_free,
            host_free_bytes=host_free,
            closed=closed,
            periods_s=periods,
        )

    def _stuck(
        self,
        waits: Sequence[Sequence[int]],
        lap: int,
        at: int,
        gpu_free: int,
        host_free: int,
        ready: Sequence[Sequence[tuple[int, tuple[float, ...], int]]],
    ) -> Outcome:
        """Nothing runs and nothing can start: name the step that wants more bytes than there are."""
        candidates = [at] if not waits[lap][at] else []
        candidates += [queue[0][2] for queue in ready if queue]
        for i in candidates:
            op = self.ops[i]
            if op.host_take > host_free:
                return Outcome(0.0, [], gpu_free, host_free, False, (i, "host", op.host_take, host_free))
        for i in candidates:
            return Outcome(0.0, [], gpu_free, host_free, False, (i, "gpu", self.ops[i].gpu_take, gpu_free))
        raise ValueError("the program's steps wait for each other in a circle")


def _too_long(marks: Sequence[tuple[float, int, int, int]], limit_s: float) -> Outcome | None:
    """An outcome without a window if the last window took more than limit_s and no less than the one before."""
    periods = [b[0] - a[0] for a, b in pairwise(marks)]
    if periods[-1] <= limit_s or (len(periods) > 1 and periods[-1] < periods[-2]):
        return None
    return Outcome(periods[-1], [], marks[-1][2], marks[-1][3], False, periods_s=periods)
