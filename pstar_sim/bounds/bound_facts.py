"""The result type of a bound, and the facts of a job that only bounds need."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pstar_sim.bounds.rank_facts import NetFacts
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import Layout
from pstar_sim.core.step import Part
from pstar_sim.cost import CostModel
from pstar_sim.policy.kit.facts import facts_of
from pstar_sim.policy.passes.parts import parts_of
from pstar_sim.workload.workload import Phase, Workload

Array = NDArray[np.float64]

NAMES = ("compute", "adam", "barrier", "h2d", "d2h", "link", "dram", "net")


@dataclass(frozen=True, kw_only=True)
class Bound:
    """seconds: no schedule is faster.
    binding: largest term ("compute", "adam", "barrier", "h2d", "d2h", "link", "dram", "net", "stashes" or "nvme"); of
        equal terms, the first of these.
    terms: name -> seconds, at the best numbers of parameters.
    pinned_params: parameters whose states stay on the gpu.
    max_pinned_params: whose states would have room there.
    streamed_params: parameters whose states come to the gpu for the update.
    method: "closed form", "joint LP" or "fluid LP".
    notes: on programs not solved.
    """

    seconds: float
    binding: str
    terms: Mapping[str, float]
    pinned_params: int
    max_pinned_params: int
    streamed_params: int = 0
    method: str = "closed form"
    notes: tuple[str, ...] = ()


def sums_are_whole(layout: Layout, micro_batches: int, *, clip: bool) -> bool:
    """With clipping the norm is taken of the host's sums, and the checker asks for complete ones on one rank (two
    gradients need no sum)."""
    return clip and micro_batches > 2 and layout.ranks == 1


def rate_with_latency(rate: float, latency_s: float, largest_bytes: float) -> float:
    """Bytes per second that copies of at most `largest_bytes` cannot exceed."""
    return 1 / (1 / rate + latency_s / largest_bytes) if largest_bytes > 0 else rate


class Turn(NamedTuple):
    """bytes: of chunks read up to the cut and again before the next, of all ranks' slices.
    others: other ranks' slices among them.
    room: bytes beside the tide in the moment before the cut.
    """

    bytes: float
    others: float
    room: float
    moment: int


class BoundFacts:
    """The quantities of the notes in pinned.py, joint.py and rank_facts.py.

    job: the facts that policies use too.

    Other attributes are arrays per chunk that gets gradients (`job.trained`) or per moment.
    """

    def __init__(self, workload: Workload, machine: Machine, layout: Layout, cost: CostModel) -> None:
        self.machine, self.cost = machine, cost
        self.job = job = facts_of(workload, layout)
        self.dram_bytes_per_s = machine.host.dram_bytes_per_s / machine.local_ranks
        w, reads = workload, job.reads
        self.moments = len(w.moments)
        self.room: Array = machine.gpu_budget_bytes - np.array([m.peak_bytes for m in w.moments], dtype=float)
        self.clock: Array = np.concatenate(([0.0], np.cumsum(cost.moments_s)))
        self.phases = [m.phase for m in w.moments]
        # An iteration turns between two micro-batches. If they run side by side, it turns once.
        self.micro_batch = [m.micro_batch if w.order.one_by_one else 0 for m in w.moments]
        self.read_bytes: Array = np.array(job.read_bytes, dtype=float)
        self.spans = _gradient_spans(w)
        self.net = net = NetFacts(job, cost, self._rooms_of_sums())
        ends = [moments[-1] for moments in reads if moments]
        self.late = (
            max([-1, *ends, *(job.last_gradient(c) for c in range(len(reads)))]) + 1
        )  # no chunk is read and no gradient arrives from here on
        bare = {c: layout.own_params[c] * job.width(c) for c, row in enumerate(reads) if row}
        self.frozen_bytes = float(sum(bare[c] for c in job.only_read))
        # For the turns, every chunk that is read: bytes of this rank's slice, bytes of the others' slices, moments of
        # its reads, and the last moment at which a read counts.
        self.seen = [(size, net.others[c], reads[c], job.last_gradient(c)) for c, size in bare.items()]
        self._trained(layout)
        self._stashes(w)

    def _least(self, of_chunks: Sequence[float]) -> float:
        return min((figure / params for figure, params in zip(of_chunks, self.params) if params), default=0.0)

    def _trained(self, layout: Layout) -> None:
        job, cost = self.job, self.cost
        chunks = [layout.chunks[c] for c in job.trained]
        width = [job.width(c) for c in job.trained]
        self.params: Array = np.array([cost.params[c] for c in job.trained], dtype=float)
        # Bytes and seconds of a parameter's states and update: the least of any chunk, so that bounds hold for chunks
        # with unlike states.
        self.states = self._least([layout.unpadded_states_bytes(c) for c in job.trained])
        self.traffic = self._least([layout.updates_bytes[c] for c in job.trained])
        self.cpu_update_s = self._least([cost.cpu_adam_s(c) for c in job.trained])
        self.gpu_update_s = self._least([cost.gpu_adam_s(c) for c in job.trained])
        self.bytes: Array = self.params * np.array(width, dtype=float)
        self.first = np.array([job.reads[c][0] for c in job.trained], dtype=int)
        self.final = np.array([job.last_gradient(c) for c in job.trained], dtype=int)
        self.small = np.array([chunk.small for chunk in chunks], dtype=bool)
        payload = [layout.payload_bytes(c, "param") for c in job.trained]
        self.down_s: Array = np.array([cost.transfer_s(size, "d2h") for size in payload], dtype=float)
        self.up_s: Array = np.array([cost.transfer_s(size, "h2d") for size in payload], dtype=float)
        self.adam_s: Array = np.array([cost.cpu_adam_s(c) for c in job.trained], dtype=float)
        self._parts(layout, payload)
        self.least_w, self.most_w = min(width, default=0), max(width, default=0)
        self._adds()

    def _parts(self, layout: Layout, payload: Sequence[int]) -> None:
        cost, parts = self.cost, parts_of(layout)
        count = [parts.get(c, 1) for c in self.job.trained]
        share = [
            min(layout.part_bytes(c, Part(k, n), size) for k in range(n)) / size if n > 1 else 1.0
            for c, n, size in zip(self.job.trained, count, payload)
        ]
        least = [int(size * part) for size, part in zip(payload, share)]
        self.part_down_s: Array = np.array([cost.transfer_s(size, "d2h") for size in least], dtype=float)
        self.part_up_s: Array = np.array([cost.transfer_s(size, "h2d") for size in least], dtype=float)
        self.part_adam_s: Array = self.adam_s * np.array(share, dtype=float)

    def _adds(self) -> None:
        """Seconds per parameter of adds on the GPU: over all micro-batches, and all but the last."""
        job, cost = self.job, self.cost
        last = job.workload.micro_batches - 1
        before_s = dict.fromkeys(job.trained, 0.0)
        for (c, batch), at in cost.gpu_adds.moments_s.items():
            if batch < last and c in before_s:
                before_s[c] += sum(at.values())
        params = {c: max(1, cost.params[c]) for c in job.trained}
        self.gpu_add_s = min((cost.gpu_adds.chunks_s[c] / params[c] for c in job.trained), default=0.0)
        self.gpu_add_before_s = min((s / params[c] for c, s in before_s.items()), default=0.0)

    def _stashes(self, w: Workload) -> None:
        cost = self.cost
        self.stash_bytes = float(sum(s.bytes for s in w.stashes))
        self.stash_down_s = sum(cost.transfer_s(s.bytes, "d2h") for s in w.stashes)
        self.stash_up_s = sum(cost.transfer_s(s.bytes, "h2d") for s in w.stashes)
        behind = np.zeros(self.moments + 1)
        for stash in w.stashes:
            behind[0] += cost.transfer_s(stash.bytes, "h2d")
            behind[stash.back + 1] -= cost.transfer_s(stash.bytes, "h2d")
        self.stash_up_from_s: Array = np.maximum(0.0, np.cumsum(behind)[:-1])

    def barrier_s(self, *, clip: bool) -> float:
        """Least seconds from the iteration's start to its barrier.

        clip: all chunks' gradients are summed over the ranks before.
        """
        end_s = float(self.clock[-1])
        if not (clip and len(self.final)):
            return end_s
        order = np.argsort(-self.final, kind="stable")  # sums of gradients that arrive late follow one another
        last_s = self.clock[self.final[order] + 1] + np.cumsum(self.net.reduce_s[order])
        return max(end_s, float(last_s.max()))

    def between(self, batch: int) -> tuple[int, int]:
        """[low, high): from the last gradient of the micro-batch before to the first of `batch`."""
        return self.spans[batch - 1][1] + 1, self.spans[batch][0]

    def most_pinned(self) -> float:
        """x_max of [Note: the bound] in pinned.py, at most all parameters that get gradients."""
        total = float(self.params.sum())
        if not total:
            return 0.0
        beside = (self.room - self.read_bytes) / self.states if self.states else np.full(self.moments, np.inf)
        alone = self.room / (self.states + self.least_w)
        return float(np.clip(min(beside.min(), alone.min()), 0.0, total))

    def _rooms_of_sums(self) -> list[float]:
        """Between each micro-batch and the next, beside what moments read."""
        return [self.room_between(batch) for batch in range(1, len(self.spans))] if self.job.every_batch else []

    def room_between(self, batch: int) -> float:
        """Least bytes beside what moments read, from the last gradient of the micro-batch before `batch` to the first
        of `batch`; inf if they run side by side."""
        low, high = self.between(batch)
        return max(0.0, float((self.room - self.read_bytes)[low:high].min())) if low < high else inf

    def turns(self) -> list[Turn]:
        """One cut per turn, any of which give a valid bound. Three are tried: the turns, and the moment with the
        largest S_k + tide near each turn or in the two passes beside it."""
        begin, bwd = self._begins()
        last = len(bwd) - 1
        # (turn, first and last moment in which to cut), last turn first
        regions: list[tuple[int, int, int]] = []
        for u in range(last, -1, -1):
            regions.append((bwd[u] - 1, begin[u], begin[u + 1] - 1))
            if u:
                regions.append((begin[u] - 1, bwd[u - 1], bwd[u] - 1))
        near = max(1, len(self.phases) // (20 * (last + 1)))
        choices = [
            self._cut(regions),
            self._cut([(t, max(low, t - near), min(high, t + near)) for t, low, high in regions]),
            self._cut([(t, t, t) for t, _, _ in regions]),
        ]
        return max(choices, key=lambda turns: sum(max(0.0, turn.bytes - turn.room) for turn in turns))

    def turns_between(self) -> list[Turn]:
        """Between two backward passes sums take room: cuts are the first and last moment of each forward."""
        begin, bwd = self._begins()
        moments = [m for u in range(len(bwd)) for m in ((begin[u], bwd[u] - 1) if u else (bwd[u] - 1,))]
        return self._cut([(m, m, m) for m in reversed(moments)])

    def _begins(self) -> tuple[list[int], list[int]]:
        last = max(self.micro_batch)
        begin = [*(self.micro_batch.index(u) for u in range(last + 1)), self.moments]
        bwd = [
            next((m for m in range(begin[u], begin[u + 1]) if self.phases[m] is not Phase.FWD), begin[u + 1])
            for u in range(last + 1)
        ]
        return begin, bwd

    def _cut(self, regions: list[tuple[int, int, int]]) -> list[Turn]:
        """The last region's cut comes first, because the reads between two cuts decide S_k; of equally good cuts the
        latest."""
        turns: list[Turn] = []
        end = self.moments - 1
        for _, low, high in regions:
            high = min(high, end - 1)
            if not 0 <= low <= high:
                continue
            own, others = self._read_again(end, low, high)
            size = own + others
            n = high - low - int(np.argmax((size - self.room[low : high + 1])[::-1]))
            end = low + n
            turns.append(Turn(float(size[n]), float(others[n]), float(self.room[end]), end))
        return turns

    @cached_property
    def read_from(self) -> tuple[Array, Array]:
        """(own, others): bytes of the chunks read at each moment or later, but after their last gradient."""
        lasts = []
        for own, others, moments, final in self.seen:
            before = [m for m in moments if final < 0 or m <= final]
            if before:
                lasts.append((0, before[-1] + 1, own, others))
        return self._between_moments(lasts, self.moments)

    def _read_again(self, end: int, low: int, high: int) -> tuple[Array, Array]:
        """(own, others): for each m from low to high, bytes of chunks first read by m and again in (m, end], but after
        their last gradient."""
        spans = []
        for own, others, moments, final in self.seen:
            until = end if final < 0 else min(end, final)
            count = bisect_right(moments, until)
            if count and moments[0] <= high and moments[count - 1] > max(moments[0], low):
                spans.append((max(moments[0], low) - low, min(moments[count - 1], high + 1) - low, own, others))
        return self._between_moments(spans, high - low + 1)

    def _between_moments(self, spans: list[tuple[int, int, int, int]], count: int) -> tuple[Array, Array]:
        """(own, others) at each moment: sums over the spans with begin <= moment < end."""
        changes_own, changes_others = ([0.0] * (count + 1) for _ in range(2))
        for begin, end, own, others in spans:
            changes_own[begin] += own
            changes_own[end] -= own
            changes_others[begin] += others
            changes_others[end] -= others
        own_bytes, others_bytes = np.cumsum((changes_own, changes_others), axis=1)[:, :-1]
        return own_bytes, others_bytes


def _gradient_spans(w: Workload) -> dict[int, tuple[int, int]]:
    spans: dict[int, tuple[int, int]] = {}
    for m, tensors in enumerate(w.gradients):
        if tensors:
            u = w.moments[m].micro_batch
            spans[u] = (spans.get(u, (m, m))[0], m)
    return spans
