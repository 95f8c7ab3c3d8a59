"""Clock: the ops that run while `choose` advances a draft, and their ends, at shared rates (rules.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pstar_sim.core.choose_columns import COMPUTE, D2H, H2D, NET, QUEUES, Columns
from pstar_sim.core.rules import Rates

_Kept = tuple[float, float, bool, list[int], list[tuple[float, float, float, float]]]


class Clock:
    """Speeds are computed once per instant, after all that starts or ends in it.

    now: seconds since the cut.
    running: queue -> op; -1 if none runs.
    """

    __slots__ = (
        "_changed", "_columns", "_demand", "_left", "_rates", "_rates_of", "_settled_s", "_sharing", "_slow", "_speed",
        "_until", "now", "running",
    )  # fmt: skip

    def __init__(self, columns: Columns, rates: Rates) -> None:
        queues = columns.queues
        self._columns, self._rates = columns, rates
        self._slow = rates.compute_while_net if queues > NET else 1.0
        self.now = self._settled_s = 0.0
        self.running = [-1] * queues
        self._until = [math.inf] * queues  # seconds at which the op ends
        self._sharing = [columns.shared and q in columns.on_dram for q in range(queues)]
        self._changed = False  # whether a step that shares something has started or ended at this instant
        # For queues that share something: nominal seconds still to do since `_settled_s`, speed from then on, and bytes
        # of DRAM per second that the op wants, -1 without one.
        self._rates_of: dict[tuple[float, ...], list[tuple[int, float]]] = {}
        self._left, self._speed, self._demand = [0.0] * queues, [1.0] * queues, [-1.0] * queues

    def occupy(self, q: int, op: int, seconds: float) -> None:
        self.running[q] = op
        if self._sharing[q]:
            self._changed = True
            self._left[q], self._speed[q] = seconds, 0.0  # speed 0 until now
            self._demand[q] = self._columns.demand[op % self._columns.count]
        else:
            beside = q == COMPUTE and self._slow > 1 and self.running[NET] >= 0
            self._until[q] = self.now + (seconds * self._slow if beside else seconds)
            if q == NET:
                self._stretch(self._slow)

    def vacate(self, q: int) -> None:
        self.running[q] = -1
        self._until[q] = math.inf
        if q == NET:
            self._stretch(1 / self._slow)
        if self._sharing[q]:
            self._changed = True
            self._demand[q] = -1.0

    def _stretch(self, by: float) -> None:
        """[Note: compute beside collectives]"""
        if self._slow > 1 and self.running[COMPUTE] >= 0:
            self._until[COMPUTE] = self.now + (self._until[COMPUTE] - self.now) * by

    def advance(self) -> int:
        """Returns the queue of the next end; -1 if nothing runs."""
        if self._changed:
            self._retime()
        until = self._until
        self.now = now = min(until)
        return until.index(now) if now != math.inf else -1

    def _retime(self) -> None:
        self._changed = False
        now, left, speed, together = self.now, self._left, self._speed, tuple(self._demand)
        elapsed, self._settled_s = now - self._settled_s, now
        rates = self._rates_of.get(together)
        if rates is None:
            rates = self._rates_of[together] = self._rates_together(together)
        for q, rate in rates:
            left[q] = rest = left[q] - elapsed * speed[q]
            speed[q] = rate
            self._until[q] = now + max(0.0, rest) / rate

    def _rates_together(self, together: Sequence[float]) -> list[tuple[int, float]]:
        sharing = [q for q, demand in enumerate(together) if demand >= 0.0]
        copies = [q in (H2D, D2H) for q in sharing]
        demands = [demand for demand in together if demand >= 0.0]
        return [*zip(sharing, self._rates.speeds([QUEUES[q] for q in sharing], demands, copies, ())[0])]

    def pass_over(self, entries: Sequence[int]) -> bool:
        """Whether the steps of these entries end in that order."""
        seconds_of, queue_of, count = self._columns.seconds, self._columns.queue_of, self._columns.count
        for entry in entries:
            op = entry // 2
            i = op % count
            if seconds_of[i] <= 0.0:
                continue
            q = queue_of[i]
            if not entry % 2:
                self.occupy(q, op, seconds_of[i])
            elif self.advance() == q:
                self.vacate(q)
            else:
                return False
        return True

    def kept(self) -> _Kept:
        """For `set_back`."""
        rates = [*zip(self._until, self._left, self._speed, self._demand)]
        return self.now, self._settled_s, self._changed, self.running[:], rates

    def set_back(self, kept: _Kept) -> None:
        self.now, self._settled_s, self._changed, self.running[:], rates = kept
        self._until[:], self._left[:], self._speed[:], self._demand[:] = zip(*rates)
