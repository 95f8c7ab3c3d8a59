"""Columns of a draft: what `choose` reads, one entry per row, unchanged while it advances.

Steps are plain numbers. Op i of iteration k has three numbers: k * count + i where it runs; k * count + rank (its place
among the sorted keys) where it is ready; and in the log twice the first number, plus 1 for its end. An op is a row and
its parts ([Note: what follows at once] in choose.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from pstar_sim.core.draft import Draft, DraftRow
from pstar_sim.core.rules import StepCosts
from pstar_sim.core.step import Queue

COMPUTE, H2D, D2H, ADAM, NET, NVME, NVME_WRITE, SEND, RECEIVE = range(9)
_INDEX = {
    Queue.COMPUTE: COMPUTE,
    Queue.H2D: H2D,
    Queue.D2H: D2H,
    Queue.ADAM: ADAM,
    Queue.NET: NET,
    Queue.NVME: NVME,
    Queue.NVME_WRITE: NVME_WRITE,
    Queue.SEND: SEND,
    Queue.RECEIVE: RECEIVE,
}
QUEUES = tuple(_INDEX)


class Columns:
    """parts: op -> rows that follow it at once.
    compute: ops of the compute queue, in order.
    positions: ops of the compute queue that are positions.
    lengths: queue -> its ops that start when they are ready, in any order.
    on_dram: queues whose steps use host DRAM.
    shared: whether queues may together want more than host DRAM, or the link, has.
    demand: op -> bytes of host DRAM per second.
    by_rank: these ops, by key.
    rank: op -> its place in `by_rank`, or -1.
    banked: op -> whether it takes bytes that earlier steps may need (banker's rule).
    gate: row behind the others that ends with `Draft.gate`, or -1.
    followers: op -> rows that wait for it in the same iteration.
    successors: op -> rows that wait for it in the next.
    base_waits: row -> ops for which it waits,
    first_waits: in the first iteration.
    upcoming: at each place of `compute`, bytes taken up to the next position.
    rest_s: the same, nominal seconds to the iteration's end.
    reserving: queues that take bytes ahead of use.
    fetch_order: queue -> its ops that serve a position, by position.
    """

    __slots__ = (
        "at_once", "banked", "base_waits", "by_rank", "compute", "count", "demand", "fetch_order", "first_waits",
        "followers", "gate", "gpu_free", "gpu_take", "host_free", "host_take", "is_part", "is_position", "lengths",
        "no_bytes", "on_dram", "ops", "others", "parts", "positions", "queue_of", "queues", "rank", "reserving",
        "rest_s", "seconds", "shared", "successors", "upcoming", "use",
    )  # fmt: skip

    def __init__(self, draft: Draft) -> None:
        assert not draft.rates.slowdowns
        rows = draft.rows
        self.gate = len(rows) if draft.gate else -1
        self.count = len(rows) + bool(draft.gate)
        dram_bytes = self._read(rows)
        # Within two iterations, which may overlap, the host could run short.
        scarce = draft.room is None and 2 * sum(self.host_take) > draft.host_free_bytes
        op_of = self._join(rows)
        self.banked, self.no_bytes = [False] * self.count, self.is_part
        if draft.room is None:
            self._bank(scarce)
        self._link(draft, op_of)
        self._sort(rows, [i for i, op in enumerate(op_of) if i == op])
        self._look_ahead()
        self.on_dram = tuple(q for q in (H2D, D2H, ADAM, NVME, NVME_WRITE) if q < self.queues)
        self.shared = draft.rates.may_be_short(self.queue_of, StepCosts(self.seconds, dram_bytes, ()))
        self.shared = self.shared or NVME_WRITE in self.queue_of
        self.demand = [
            size / seconds if size and seconds > 0.0 else 0.0 for size, seconds in zip(dram_bytes, self.seconds)
        ]

    def _read(self, rows: Sequence[DraftRow]) -> list[int]:
        charges = [row.charge for row in rows]
        self.use = [row.use for row in rows]
        self.queue_of = [_INDEX[row.queue] for row in rows]
        self.is_position = [row.is_position for row in rows]
        self.seconds = [charge.seconds for charge in charges]
        self.gpu_take, self.gpu_free = [c.gpu_take for c in charges], [c.gpu_free for c in charges]
        self.host_take, self.host_free = [c.host_take for c in charges], [c.host_free for c in charges]
        return [charge.dram_bytes for charge in charges]

    def _join(self, rows: Sequence[DraftRow]) -> list[int]:
        """Per row, its op. Raises ValueError for a row that cannot be a part."""
        self.parts: dict[int, list[int]] = {}
        op_of = list(range(len(rows)))
        self.is_part = bytearray(len(rows)) + bytes([1]) * (self.count - len(rows))
        for i, row in enumerate(rows):
            if row.behind is not None:
                if not 0 <= row.behind < i or rows[row.behind].queue is not row.queue or row.after:
                    raise ValueError(
                        f"row {i}: behind={row.behind}; it must be an earlier row of the same queue, and the row must "
                        "wait for no other row"
                    )
                op = op_of[i] = op_of[row.behind]
                self.is_part[i] = 1
                self.parts.setdefault(op, []).append(i)
                self.gpu_free[op] += self.gpu_free[i]
                self.host_free[op] += self.host_free[i]
        return op_of

    def _bank(self, scarce: bool) -> None:
        self.banked = [bool(gpu or (scarce and host)) for gpu, host in zip(self.gpu_take, self.host_take)]
        self.no_bytes = bytearray(self.is_part)  # whether an op has no bytes on the GPU, or a host that may run short
        for i in range(len(self.gpu_take)):
            if not (self.gpu_take[i] or self.gpu_free[i] or (scarce and (self.host_take[i] or self.host_free[i]))):
                self.no_bytes[i] = 1

    def _link(self, draft: Draft, op_of: Sequence[int]) -> None:
        rows = draft.rows
        self.followers: list[list[int]] = [[] for _ in rows]  # in the same iteration
        self.successors: dict[int, list[int]] = {}  # in the next iteration
        self.base_waits = [len(row.after) for row in rows]
        self.first_waits = list(self.base_waits)  # in the first iteration, whose predecessor counts as done
        followers = self.followers
        for i, row in enumerate(rows):
            for j, back in row.after:
                if back:
                    self.successors.setdefault(op_of[j], []).append(i)
                    self.first_waits[i] -= 1
                else:
                    followers[op_of[j]].append(i)
        if draft.gate:
            followers.append([i for i, row in enumerate(rows) if row.gated])
            for j in draft.gate:
                followers[op_of[j]].append(self.gate)
            for waits in (self.base_waits, self.first_waits):
                waits.append(len(draft.gate))
                for i in followers[self.gate]:
                    waits[i] += 1

    def _sort(self, rows: Sequence[DraftRow], ops: Sequence[int]) -> None:
        queue_of = self.queue_of
        self.ops = len(ops)
        self.compute = [i for i in ops if queue_of[i] == COMPUTE]
        free = [i for i in ops if queue_of[i] != COMPUTE]
        self.queues = max(ADAM, *queue_of) + 1
        self.lengths = [0] * self.queues
        for i in free:
            self.lengths[queue_of[i]] += 1
        keys = {i: key if (key := rows[i].key) is not None else (float(i),) for i in free}
        self.by_rank = sorted(free, key=keys.__getitem__)
        self.rank = [-1] * self.count
        for rank, i in enumerate(self.by_rank):
            self.rank[i] = rank
        self.at_once = [i for i in free if not self.base_waits[i]]
        self.positions = sum(self.is_position)
        served = [i for i in free if self.use[i] is not None]
        self.reserving = (H2D, NET) if any(queue_of[i] == NET for i in served) else (H2D,)
        self.others = tuple(q for q in (D2H, ADAM, *range(NET, self.queues)) if q not in self.reserving)
        served.sort(key=lambda i: (self.use[i], self.rank[i]))
        self.fetch_order = [[i for i in served if queue_of[i] == q] for q in range(self.queues)]

    def _look_ahead(self) -> None:
        self.upcoming = [0] * len(self.compute)
        self.rest_s = [0.0] * len(self.compute)
        need, rest_s = 0, 0.0
        for n in range(len(self.compute) - 1, -1, -1):
            i = self.compute[n]
            need = self.gpu_take[i] + (0 if self.is_position[i] else need)
            rest_s += self.seconds[i]
            self.upcoming[n], self.rest_s[n] = need, rest_s
