"""Facts of a job for the fluid program. Bytes are counted in units of the largest working list (`unit` bytes), times in
seconds.

[Note: alike micro-batches] Rows of the fluid program name the first micro-batch (first reads, first gradients) and the
last three (gradients that wait, sums that may come up, last gradients). All in between have the same rows. These are
linear, so the means of a schedule's quantities satisfy them too, and one micro-batch of means stands for all: its
intervals count `times` in every sum over the iteration. A stock carries over to the next micro-batch. Let X be the mean
of a stock at the first points of the alike micro-batches, `entered` the stock at the first of these points, and `left`
the stock at the point behind the last alike micro-batch. Then the mean of the stock at the points behind the alike
micro-batches is X + (left - entered) / times. And entered <= times * X, because no stock is negative.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pstar_sim.bounds.bound_facts import Array, rate_with_latency
from pstar_sim.bounds.linear import Index
from pstar_sim.bounds.rank_facts import NetFacts
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import Layout
from pstar_sim.cost import CostModel
from pstar_sim.errors import TraceError
from pstar_sim.policy.kit.facts import facts_of
from pstar_sim.workload.workload import Workload, repeat_micro_batch, single_micro_batch

SHOWN = 5
"""Number of micro-batches with points of their own, if one micro-batch stands for all that are alike: the first, that
one, and the last three."""


@dataclass(frozen=True, kw_only=True)
class Period:
    """times: micro-batches for which one stands, with itself."""

    first: int
    last: int
    times: int


def shortened(workload: Workload, layout: Layout, most_points: int) -> tuple[Workload, int]:
    """Returns the workload with one micro-batch for all that are alike, and for how many its second stands; itself and
    1 if each run of moments can have a point, or none can stand for others (few, different or side by side, stashes).
    """
    if workload.micro_batches <= SHOWN or not workload.order.one_by_one or workload.stashes:
        return workload, 1
    reads = facts_of(workload, layout).read_in
    if 1 + sum(a != b for a, b in pairwise(reads)) <= most_points:
        return workload, 1
    try:
        short = repeat_micro_batch(single_micro_batch(workload), SHOWN)
    except TraceError:
        return workload, 1
    return short, workload.micro_batches - SHOWN + 1


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Unread between two reads, of all chunks of a class, at each point, kept or not; and others' slices of them."""

    points: Index
    units: Array
    others: Array


class FluidFacts:
    """chunks: with gradients, by first read, as all arrays per chunk.
    points: moments at whose starts time is cut.
    end: index of the point at the end of the last moment.
    intervals: one begins at each point; the last runs to the first moment of the next iteration.
    period: the micro-batch that stands for several, None without one.
    times: per interval, its number in an iteration.
    shown: micro-batches with points of their own.
    """

    def __init__(
        self,
        workload: Workload,
        machine: Machine,
        layout: Layout,
        cost: CostModel,
        *,
        dram_bytes_per_s: float,
        most_points: int,
        times: int = 1,
        sums_first: bool = False,
    ) -> None:
        """sums_first: no update begins before all ranks' sums."""
        self.workload, self.layout, self.cost = workload, layout, cost
        self.job = job = facts_of(workload, layout)
        self.chunks = sorted(job.trained, key=lambda c: (job.reads[c][0], c))
        self.shown = workload.micro_batches if job.every_batch else 1
        self.batches = self.shown + times - 1
        self.net = NetFacts(job, cost, [0.0] * (self.batches - 1))
        self.split = sums_first and self.net.each_time_s > 0
        self._points(most_points, times)
        self._sizes(machine)
        self._lives()
        self._speeds(dram_bytes_per_s)
        self._collectives()

    def _points(self, most: int, times: int) -> None:
        """One for each run of moments that read the same chunks, at the highest tide; above `most`, one of every n:
        that with the most bytes of tide and chunks read. Each micro-batch begins with a point."""
        w, sets = self.workload, self.job.read_in
        batch = [m.micro_batch for m in w.moments]
        self.edges = edges = [batch.index(number) for number in range(1, self.shown)]
        points, begin = [0, *edges], 0
        for m in range(1, len(sets) + 1):
            if m == len(sets) or sets[m] != sets[begin]:
                points.append(max(range(begin, m), key=lambda i: w.moments[i].peak_bytes))
                begin = m
        points = sorted(set(points))
        if len(points) > most:
            stride = -(-len(points) // most)
            groups = [points[n : n + stride] for n in range(0, len(points), stride)]
            points = sorted({0, *edges, *(max(group, key=self._needed_bytes) for group in groups)})
        self.points = points
        self.end = len(points)
        self.barrier_at = self.end + self.split
        self.intervals = self.barrier_at + 1
        self.following: Index = (np.arange(self.intervals) + 1) % self.intervals
        clock = np.concatenate(([0.0], np.cumsum(self.cost.moments_s)))
        rest = np.zeros(self.intervals - self.end)
        self.seconds: Array = np.concatenate((np.diff(clock[[*points, -1]]), rest))  # per interval
        self.times: Array = np.ones(self.intervals)
        self.period: Period | None = None
        if times > 1:
            first, behind = (points.index(m) for m in edges[:2])
            self.times[first:behind] = times
            self.period = Period(first=first, last=behind - 1, times=times)
        self.compute_s = float(self.times @ self.seconds)  # seconds of the iteration without any stall

    def _needed_bytes(self, moment: int) -> int:
        read = sum(self.layout.payload_bytes(c, "param") for c in self.job.read_in[moment])
        return self.workload.moments[moment].peak_bytes + read

    def _sizes(self, machine: Machine) -> None:
        w, layout, cost, job = self.workload, self.layout, self.cost, self.job
        lists = {c: float(layout.payload_bytes(c, "param")) for c in (*self.chunks, *job.only_read)}
        self.largest_bytes = max(lists.values(), default=1.0)
        self.unit = max(1.0, self.largest_bytes)
        self.payload = {c: size / self.unit for c, size in lists.items()}
        self.params: Array = np.array([cost.params[c] for c in self.chunks], dtype=float)
        self.size: Array = self.params * np.array([job.width(c) for c in self.chunks], dtype=float) / self.unit
        # Unpadded, as `size`.
        self.states: Array = np.array([layout.unpadded_states_bytes(c) for c in self.chunks], dtype=float) / self.unit
        widths = [layout.sum_width(c) for c in self.chunks]
        self.sums: Array = self.params * np.array(widths, dtype=float) / self.unit  # of gradients, unpadded too
        self.states_room: Array = np.array([layout.states_bytes(c) for c in self.chunks], dtype=float) / self.unit
        tide = [w.moments[m].peak_bytes for m in self.points]
        at_end = [min(w.moments[-1].peak_bytes, w.moments[0].peak_bytes)] * (self.intervals - self.end)
        self.room: Array = (machine.gpu_budget_bytes - np.array([*tide, *at_end], dtype=float)) / self.unit

    def _lives(self) -> None:
        job, chunks = self.job, self.chunks
        self.first = [job.reads[c][0] for c in chunks]
        self.final = [job.last_gradient(c) for c in chunks]
        self.arrivals = [{batch: last for batch, _, last in job.spans[c]} for c in chunks]
        # The interval in which the last gradient arrives, and the first point at or after the first read.
        self.final_in: Index = np.array([self.interval_of_end(m) for m in self.final], dtype=np.intp)
        self.first_at: Index = np.array([self.point_from(m) for m in self.first], dtype=np.intp)
        self.read_at = {c: job.reads_until_final(c) or job.reads[c][:1] for c in (*chunks, *job.only_read)}
        self.read: Array = np.zeros(self.intervals)  # units that the moment of each point reads
        for k, m in enumerate(self.points):
            whole = (size * self.layout.slices_of(c) for c, size in self.payload.items() if c in job.read_in[m])
            self.read[k] = sum(whole)  # a moment reads all slices

    def _speeds(self, dram_bytes_per_s: float) -> None:
        cost, link, layout = self.cost, self.cost.link, self.layout
        self.duplex = link.duplex
        states = [layout.payload_bytes(c, name) for c in self.chunks for name in layout.states_of(c).names]
        sums = [layout.slice_numel(c) * 4.0 for c in self.chunks]
        largest_state = max([*sums, *states], default=self.largest_bytes)
        self.up, self.up_states, self.down, self.down_states = (
            rate_with_latency(rate, link.latency_s, size) / self.unit
            for rate in (link.h2d_bytes_per_s, link.d2h_bytes_per_s)
            for size in (self.largest_bytes, largest_state)
        )
        self.dram = dram_bytes_per_s / self.unit
        widths = (self.size / np.maximum(self.params, 1.0))[self.params > 0]
        least = float(min(widths, default=1.0))
        sizes = [(c, size) for c, size in zip(self.chunks, self.size) if size]
        self.adam_s = min((cost.cpu_adam_s(c) / size for c, size in sizes), default=0.0)  # least seconds per unit
        traffic = [layout.updates_bytes[c] / self.unit / size for c, size in sizes]
        self.adam_traffic = min(traffic, default=0.0)  # least units of DRAM traffic per unit
        self.add_traffic = cost.adam_bytes_per_s / self.unit  # an add on the host runs at the memory rate of Adam
        self.gpu_adam_s: Array = np.array([cost.gpu_adam_s(c) for c in self.chunks], dtype=float)
        self.least_width = least * self.unit  # least bytes per parameter of a working list
        # ((interval, index of the chunk in `chunks`), seconds) of adds on the gpu, if gradients add up there.
        position = {c: n for n, c in enumerate(self.chunks)}
        self.gpu_adds = [
            ((self.interval_of_end(m), position[c]), seconds)
            for (c, _), at in cost.gpu_adds.moments_s.items()
            if c in position
            for m, seconds in at.items()
        ]

    def _collectives(self) -> None:
        """others, beside: units of others' slices, of each chunk and least per own unit.
        begins: point at the begin of each micro-batch but the first.
        """
        net, order = self.net, [self.job.trained.index(c) for c in self.chunks]
        self.others = {c: size / self.unit for c, size in net.others.items()}
        self.sum_s, self.gather_s = net.reduce_s[order], net.gather_s[order]
        some = self.size > 0
        others = np.array([self.others[c] for c in self.chunks], dtype=float)
        self.sum_unit_s, self.gather_unit_s, self.beside = (
            float((figures[some] / self.size[some]).min()) if some.any() else 0.0
            for figures in (self.sum_s, self.gather_s, others)
        )
        units = float(self.size.sum())
        self.net_own_s = float((self.sum_s + self.gather_s).sum()) - units * (self.sum_unit_s + self.gather_unit_s)
        self.begins = [self.points.index(m) for m in self.edges]

    def interval_of_end(self, moment: int) -> int:
        return bisect_right(self.points, moment) - 1

    def point_from(self, moment: int) -> int:
        """First point at or after the moment's start."""
        return bisect_left(self.points, moment)

    def inside(self, after: int, before: int) -> range:
        """Points strictly between the moments."""
        return range(bisect_right(self.points, after), bisect_left(self.points, before))

    def copy_s(self, direction: str, *, states: bool) -> Array:
        """Per chunk, of its states one after the other, or its working list."""
        layout = self.layout
        rows = [(c, layout.states_of(c).names if states else ("param",)) for c in self.chunks]
        sizes = [[layout.payload_bytes(c, name) for name in lists] for c, lists in rows]
        return np.array([sum(self.cost.transfer_s(size, direction) for size in row) for row in sizes], dtype=float)

    def over_the_border(self) -> list[list[int]]:
        """Per chunk, the points from last gradient to next first read."""
        return [
            [*range(final_in + 1, self.intervals), *self.inside(-1, first)]
            for final_in, first in zip(self.final_in, self.first)
        ]

    def gaps(self) -> list[Gap]:
        """A class per pair of phases and micro-batches between which chunks are read again: each gap opens before any
        closes. A chunk never updated also has a gap to the next iteration. With alike micro-batches, all gaps from one
        micro-batch to the next form one class: either one gap begins where the other has ended, or the rows of both are
        added up."""
        w = self.workload
        classes: dict[tuple[object, ...], dict[int, Array]] = {}

        def lies(key: tuple[object, ...], points: Iterable[int], c: int) -> None:
            at, units = classes.setdefault(key, {}), np.array([self.payload[c], self.others[c]])
            for k in points:
                at[k] = at.get(k, 0.0) + units

        trained = set(self.chunks)
        for c, moments in self.read_at.items():
            for a, b in pairwise(moments):
                x, y = w.moments[a], w.moments[b]
                over = self.period is not None and x.micro_batch != y.micro_batch
                where = ("next",) if over else (x.micro_batch, y.micro_batch)
                lies((*where, x.phase, y.phase), self.inside(a, b), c)
            if c not in trained:
                behind = range(bisect_right(self.points, moments[-1]), self.intervals)
                lies(("border",), (*behind, *self.inside(-1, moments[0])), c)
        return [
            Gap(points=np.array(list(at), dtype=np.intp), units=units, others=others)
            for at in classes.values()
            if at
            for units, others in [np.array(list(at.values())).T]
        ]
