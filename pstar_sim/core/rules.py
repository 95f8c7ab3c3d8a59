"""The rules by which queues run at the same time: shared rates, and when a run is steady.

[Note: shared rates] A copy or a CPU Adam alone progresses at speed 1 (nominal seconds per second). On a half-duplex
link, concurrent h2d and d2h get half each; reads and writes of disks together, `Rates.disks`. If steps together want
more bytes per second than host DRAM has, all slow down by the same factor: DRAM bandwidth / sum of demands. A demand is
DRAM bytes over nominal seconds, at the speed on the link. On a calibrated machine steps also slow each other by
measured factors (`Machine.slowdowns`), to 1 / their product. A step busy for a part `duty` of its time (a copy over a
throttled link) counts by that part, and is slowed only if its busy part outgrows the rest. Both rules describe one
shortage, so the lower speed holds.

[Note: compute beside collectives] Compute takes `Rates.compute_while_net` times as long while a collective runs, by the
framework (`Framework.net_loss`); on a calibrated machine this is one of the factors above.

[Note: when an iteration is steady] Iteration k is steady when the time between a step's end in k-1 and its end in k is
the same for every step (to 1e-9 of the period). The compute steps alone would hide a CPU Adam that falls behind a
little each iteration. A plan that never becomes steady (such a backlog, or jitter) gets its slowest queue's pace over
the later half of the run. While a schedule is chosen, steps may still change places: two successive windows have to
contain every step once and take equally long (`agree`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pstar_sim.core.program import Program
from pstar_sim.core.step import DISK_QUEUES

TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class StepCosts:
    """seconds: nominal, of the step alone.
    duty: share of them, 0 to 1, that keeps shared resources busy.
    """

    seconds: Sequence[float]
    dram_bytes: Sequence[float]
    duty: Sequence[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """dram_bytes_per_s: of the rank's part of host DRAM.
    duplex: whether the link copies both ways at full speed at once.
    slowdowns: "A_while_B" -> factor on queue A's step while one of queue B runs.
    compute_while_net: where none is measured: [Note: compute beside collectives].
    disks: speeds of a read and a write that run together.
    """

    dram_bytes_per_s: float
    duplex: bool = True
    slowdowns: Mapping[str, float] = field(default_factory=dict)
    compute_while_net: float = 1.0
    disks: tuple[float, float] | None = None

    def may_be_short(self, queue_of: Sequence[int], costs: StepCosts, *, jitter: bool = False) -> bool:
        """Else shared rates need not be computed.

        jitter: steps may take other seconds than given.
        """
        if not self.duplex or self.slowdowns:
            return True
        most = [0.0] * (1 + max(queue_of, default=0))
        for q, size, seconds in zip(queue_of, costs.dram_bytes, costs.seconds):
            if size and seconds > 0:
                if jitter:
                    return True
                most[q] = max(most[q], size / seconds)
        return sum(most) > self.dram_bytes_per_s

    def shares(self, seconds: float, dram_bytes: float) -> bool:
        return seconds > 0 and bool(dram_bytes or self.slowdowns)

    def share_of_dram(self, wanted_bytes_per_s: float) -> float:
        """Factor on steps that together want these bytes per second."""
        return min(1.0, self.dram_bytes_per_s / wanted_bytes_per_s) if wanted_bytes_per_s > 0 else 1.0

    def speeds(
        self, queues: Sequence[str], demands: Sequence[float], copies: Sequence[bool], duty: Sequence[float]
    ) -> tuple[list[float], float]:
        """Speed of each step that shares something, and its share of DRAM.

        demands: DRAM bytes per second. copies: crosses the link.
        """
        beside = self.disks if self.disks is not None and all(queue in queues for queue in DISK_QUEUES) else None
        if self.duplex and not self.slowdowns and beside is None:  # all steps are alike
            share = self.share_of_dram(sum(demands))
            return [share] * len(demands), share
        halved = 0.5 if sum(copies) > 1 and not self.duplex else 1.0
        on_link = [halved if copy else 1.0 for copy in copies]
        for queue, speed in zip(DISK_QUEUES, beside or ()):
            on_link[queues.index(queue)] = speed
        share = self.share_of_dram(sum(demand * speed for demand, speed in zip(demands, on_link)))
        if not self.slowdowns:
            return [share * speed for speed in on_link], share
        return [min(share, self._beside(n, queues, duty)) * speed for n, speed in enumerate(on_link)], share

    def _beside(self, n: int, queues: Sequence[str], duty: Sequence[float]) -> float:
        factor = 1.0
        for p, other in enumerate(queues):
            if p != n:
                alone = self.slowdowns.get(f"{queues[n]}_while_{other}", 1.0)
                factor *= 1 + (alone - 1) * duty[p]
        return 1 / max(1.0, factor * duty[n])


def is_steady(ended: NDArray[np.float64], before: NDArray[np.float64]) -> bool:
    """[Note: when an iteration is steady]"""
    shift = ended - before
    return bool(shift.max() - shift.min() <= TOLERANCE * shift.max())


def agree(period_s: float, before_s: float, tolerance: float) -> bool:
    """Whether two successive windows of a schedule take equally long."""
    return abs(period_s - before_s) <= tolerance * period_s


def pace_s(program: Program, ended: NDArray[np.float64], *, steady: bool) -> float:
    """Seconds per iteration.

    ended: seconds, a row per iteration (at least two), a column per step.
    steady: whether the last iteration is.
    """
    k = len(ended) - 1
    if steady:
        last = program.order[program.compute][-1]
        return float(ended[k, last] - ended[k - 1, last])
    half = max(1, k // 2)
    return max(float(ended[k, row[-1]] - ended[k - half, row[-1]]) / half for row in program.order)
