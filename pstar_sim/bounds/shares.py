"""Shares of a batch over ranks that differ: the bound over all shares, and one job that stands for the jobs of all
ranks.

[Note: the bound over shares] A micro-batch of B sequences is divided over the ranks, at least one sequence each, in the
same way in every micro-batch. Ranks of one kind have the same GPU and link. Let m_k be the largest share of any of the
n_k ranks of kind k: sum n_k m_k >= B. All ranks run one plan, so an iteration lasts at least as long as the bound of a
rank of each kind with m_k sequences, with the room that the fullest rank leaves (bounds.py). This is the bound at m.

With more sequences every moment of a rank lasts at least as long and leaves at most as much room, so every row of every
bound at m holds at m' >= m too. So the bound at the lowest corner of a box of shares (low_k <= m_k <= high_k) holds for
all shares in the box, and branch and bound over boxes finds the least. The fluid program is solved for the corners
alone that are shares of the batch, at most MOST_FLUID times; elsewhere the joint bound holds.

Tiles of a matrix product that are partly filled can make a moment with more tokens a little shorter. So the bound is
over all shares only if the tiles of each GPU divide the sequence (`may_differ`).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from pstar_sim.bounds.bound_facts import Bound
from pstar_sim.bounds.bounds import lower_bound
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import Layout, build_layout
from pstar_sim.core.plan import Settings
from pstar_sim.cost import CostModel, slowest_of
from pstar_sim.errors import PstarError
from pstar_sim.policy.kit.facts import facts_of
from pstar_sim.workload.presets import can_vary, variant
from pstar_sim.workload.workload import Moment, Workload

NEAR = 1e-3  # the search ends if no bound that is left is lower than the least by this relative distance
MOST_FLUID = 4


def may_differ(workload: Workload, machine: Machine) -> bool:
    """[Note: the bound over shares]"""
    tiles = [rank.gpu.products.tile[0] for rank in machine.ranks if rank.gpu.products is not None]
    return machine.mixed and all(workload.sequence % tile == 0 for tile in tiles)


def any_job(workload: Workload, machine: Machine) -> Callable[[int], Workload] | None:
    """Sequences per micro-batch -> a rank's job; None for a job written for its shares alone, or GPUs that are
    alike."""
    if not may_differ(workload, machine) or not can_vary(workload) or workload.activations or workload.relayed:
        return None
    known: dict[int, Workload] = {}

    def of(sequences: int) -> Workload:
        if sequences not in known:
            known[sequences] = variant(workload, batch=sequences)
        return known[sequences]

    return of


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """most: of any rank of each kind, as `Machine.kinds`.
    shares: of each rank; their sum is the batch.
    """

    most: tuple[int, ...]
    shares: tuple[int, ...]
    bound: Bound


@dataclass(order=True)
class _Box:
    """seconds: no plan with these shares is faster. Corners bounded finally come first among equals.
    stage: `seconds` is of 0 the box around it and computing alone, 1 the joint bound, 2 the last bound.
    """

    seconds: float
    stage: int
    low: tuple[int, ...]
    high: tuple[int, ...]
    bound: Bound | None = field(default=None, compare=False)


class AnyShares:
    """batch: of all ranks together.
    job_of: sequences -> a rank's job.
    fluid: of jobs rank by rank; None: the joint bound is the last.
    """

    def __init__(
        self,
        batch: int,
        machine: Machine,
        settings: Settings,
        layout: Layout,
        job_of: Callable[[int], Workload],
        fluid: Callable[[Workload, Sequence[Workload]], Bound] | None = None,
    ) -> None:
        self.batch, self.machine, self.settings, self.layout = batch, machine, settings, layout
        self._job_of, self._fluid, self._left = job_of, fluid, MOST_FLUID
        counts = Counter(machine.kinds)
        self._kinds, self._counts = tuple(counts), tuple(counts.values())
        self._costs: dict[tuple[int, int], CostModel] = {}
        self._found: list[Leaf] = []
        self._boxes = self._search()
        self.least_s = 0.0  # no plan is faster, whatever the shares

    def leaves(self) -> Iterator[Leaf]:
        """In the order of their bounds, nearly: see NEAR."""
        n = 0
        while n < len(self._found) or self._next():
            yield self._found[n]
            n += 1

    def bound(self) -> Bound | None:
        """Of any shares; None if no shares have room."""
        first = next(self.leaves(), None)
        return None if first is None else replace(first.bound, seconds=self.least_s)

    def computing_s(self) -> float:
        """Of any shares."""
        return self._least_computing(*self._corners()).seconds

    def _corners(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (1,) * len(self._counts), tuple(map(self._most, range(len(self._counts))))

    def _next(self) -> bool:
        leaf = next(self._boxes, None)
        if leaf is not None:
            self._found.append(leaf)
        return leaf is not None

    def _search(self) -> Iterator[Leaf]:
        low, high = self._corners()
        if sum(self._counts) > self.batch:
            return
        first = self._finished(self._least_computing(low, high))
        root = self._bounded(_Box(0.0, 0, low, high))
        boxes, given = [root, first], {first.low}
        heapq.heapify(boxes)
        begun = False
        while boxes and boxes[0].seconds < math.inf:
            box = heapq.heappop(boxes)
            if not begun and box.seconds * (1 + NEAR) >= first.seconds:
                self.least_s, begun = min(box.seconds, first.seconds), True
                yield self._leaf(first)
            if self._reaches(box.low):
                if box.stage < 2:
                    if box.low not in given:
                        given.add(box.low)
                        heapq.heappush(boxes, self._finished(box))
                elif not begun:
                    self.least_s, begun = box.seconds, True
                    yield self._leaf(box)
                elif box.low != first.low:
                    yield self._leaf(box)
            elif box.stage == 0 and box.seconds > self._computing_s(box.low):
                heapq.heappush(boxes, self._bounded(box))
            else:
                for part in self._halves(box):
                    heapq.heappush(boxes, part)

    def _most(self, kind: int) -> int:
        """That may be needed, if all others have one sequence."""
        count = self._counts[kind]
        return max(1, -(-(self.batch - sum(self._counts) + count) // count))

    def _reaches(self, most: Sequence[int]) -> bool:
        return sum(n * m for n, m in zip(self._counts, most)) >= self.batch

    def _halves(self, box: _Box) -> list[_Box]:
        """Along the kind whose computing differs most, without too few shares."""
        ends = [(self._clock_s(k, h) - self._clock_s(k, m), k) for k, (m, h) in enumerate(zip(box.low, box.high))]
        k = max((spread, k) for spread, k in ends if box.low[k] < box.high[k])[1]
        middle = (box.low[k] + box.high[k]) // 2
        parts = [
            (box.low, (*box.high[:k], middle, *box.high[k + 1 :])),
            ((*box.low[:k], middle + 1, *box.low[k + 1 :]), box.high),
        ]
        return [self._box(low, high, box.seconds) for low, high in parts if self._reaches(high)]

    def _box(self, low: tuple[int, ...], high: tuple[int, ...], seconds: float) -> _Box:
        all_of = sum(n * h for n, h in zip(self._counts, high))
        least = (-(-(self.batch - all_of + n * h) // n) for n, h in zip(self._counts, high))
        low = tuple(map(max, low, least))
        return _Box(max(seconds, self._computing_s(low)), 0, low, high)

    def _least_computing(self, low: tuple[int, ...], high: tuple[int, ...]) -> _Box:
        boxes = [self._box(low, high, 0.0)]
        while not self._reaches(boxes[0].low):
            for part in self._halves(heapq.heappop(boxes)):
                heapq.heappush(boxes, part)
        return boxes[0]

    def _clock_s(self, kind: int, sequences: int) -> float:
        return sum(self._cost(kind, sequences).moments_s)

    def _cost(self, kind: int, sequences: int) -> CostModel:
        key = self._kinds[kind], sequences
        if key not in self._costs:
            self._costs[key] = CostModel(self._job_of(sequences), self.machine, self.layout, rank=key[0])
        return self._costs[key]

    def _computing_s(self, most: Sequence[int]) -> float:
        return max(self._clock_s(k, m) for k, m in enumerate(most))

    def _jobs(self, most: Sequence[int]) -> tuple[Workload, ...]:
        of_kind = {kind: self._job_of(m) for kind, m in zip(self._kinds, most)}
        return tuple(of_kind[kind] for kind in self.machine.kinds)

    def _bounded(self, box: _Box) -> _Box:
        ranked = self._jobs(box.low)
        hardest = tightest(ranked, self.machine)
        bound = None
        seconds = math.inf
        if self._has_room(hardest):
            costs = [self._cost(k, m) for k, m in enumerate(box.low)]
            bound = lower_bound(hardest, self.machine, self.settings, self.layout, ranked=ranked, costs=costs)
            seconds = max(box.seconds, bound.seconds)
        return _Box(seconds, 1, box.low, box.high, bound)

    def _finished(self, box: _Box) -> _Box:
        box = box if box.stage else self._bounded(box)
        bound = box.bound
        if self._fluid is not None and self._left and bound is not None:
            self._left -= 1
            ranked = self._jobs(box.low)
            bound = self._fluid(tightest(ranked, self.machine), ranked)
        seconds = box.seconds if bound is None else max(box.seconds, bound.seconds)
        return _Box(seconds, 2, box.low, box.high, bound)

    def _has_room(self, hardest: Workload) -> bool:
        read = facts_of(hardest, self.layout).read_bytes
        budget = self.machine.gpu_budget_bytes
        return all(m.peak_bytes + size <= budget for m, size in zip(hardest.moments, read))

    def _leaf(self, box: _Box) -> Leaf:
        assert box.bound is not None
        return Leaf(most=box.low, shares=self._shared(box.low), bound=replace(box.bound, seconds=box.seconds))

    def _shared(self, most: Sequence[int]) -> tuple[int, ...]:
        """Sequences too many are taken from the first that computes longest."""
        of_kind = dict(zip(self._kinds, range(len(most))))
        shares = [most[of_kind[kind]] for kind in self.machine.kinds]
        for _ in range(sum(shares) - self.batch):
            able = (r for r, n in enumerate(shares) if n > 1)
            slowest = max(able, key=lambda r: self._clock_s(of_kind[self.machine.kinds[r]], shares[r]))
            shares[slowest] -= 1
        return tuple(shares)


def tightest(workloads: Sequence[Workload], machine: Machine) -> Workload:
    """A workload that stands for all ranks': moment by moment it leaves as little room on `machine.gpu` (the weakest of
    each figure) as the fullest rank has, and lasts as long as on the slowest GPU.

    Raises PstarError unless there is one per rank, all of one model and shape of iteration.
    """
    _check_one_job(workloads, machine)
    first = workloads[0]
    weakest_bytes = machine.gpu.budget_bytes
    # Per kind of rank: memory of its GPU beyond the weakest, its job, and its own moments' seconds.
    kinds: dict[tuple[int, int], tuple[int, Workload, tuple[float, ...]]] = {}
    layout = build_layout(first)
    for r, (rank, w) in enumerate(zip(machine.ranks, workloads)):
        if (id(rank.gpu), id(w)) not in kinds:
            more = rank.gpu.budget_bytes - weakest_bytes
            kinds[id(rank.gpu), id(w)] = more, w, CostModel(w, machine, layout, rank=r).moments_s
    if len(kinds) == 1:
        return first
    _, slowest, seconds = max(kinds.values(), key=lambda kind: sum(kind[-1]))
    alike = len({id(rank.gpu) for rank in machine.ranks}) == 1
    moments: list[Moment] = []
    for i, m in enumerate(slowest.moments):
        rows = [(more, w.moments[i]) for more, w, _ in kinds.values()]
        moments.append(
            replace(
                m,
                start_bytes=max(0, *(row.start_bytes - more for more, row in rows)),
                peak_bytes=max(0, *(row.peak_bytes - more for more, row in rows)),
                end_bytes=max(0, *(row.end_bytes - more for more, row in rows)),
                duration_s=m.duration_s if alike else seconds[i],
            )
        )
    recorded_on = slowest.recorded_on if alike else slowest_of(machine)
    batch = max(w.batch for w in workloads)
    return replace(first, moments=tuple(moments), batch=batch, recorded_on=recorded_on)


def _check_one_job(workloads: Sequence[Workload], machine: Machine) -> None:
    if len(workloads) != machine.world_size:
        raise PstarError(
            f"{len(workloads)} workloads for the {machine.world_size} ranks of {machine.name}; give one per rank"
        )
    first = workloads[0]
    for r, w in enumerate(workloads):
        if (w.fingerprint, w.uses, len(w.moments), w.optimizer) != (
            first.fingerprint,
            first.uses,
            len(first.moments),
            first.optimizer,
        ):
            raise PstarError(
                f"rank {r} of {machine.name} is given another model, another order of its layers or another number of "
                "micro-batches than rank 0; ranks may differ in their sequences only"
            )
        if w.stashes != first.stashes:
            raise PstarError(
                f"rank {r} of {machine.name} would move other bytes of activations to the host than rank 0, and all "
                "ranks run one plan; give each rank the same share, or keep or recompute activations"
            )
