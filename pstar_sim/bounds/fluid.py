"""The fluid bound: a linear program over time that every legal schedule satisfies, finer than the joint one.

[Note: the fluid program] Time is cut at the starts of some moments (`points`; the last point is the end of the last
moment, and the interval after it runs to the first moment of the next iteration). An interval lasts its moments' own
seconds and a stall. Everything is a flow of bytes in an interval or a stock of bytes at a point, averaged over the
iterations of a steady schedule; chunks are divisible, and each is pinned, streamed or updated on the CPU in parts p, q
and 1 - p - q. What happens inside an interval is free in it: a gradient that becomes final in it may leave in all of
it, a chunk first read in it need only be there at its end. So every cut is valid, and the finer, the tighter. Rows:

- each copy direction, CPU Adam, host DRAM: work in an interval <= its seconds. Streamed Adam makes the interval longer.
- memory at each point: tide, chunks read there, chunks kept between two reads, states resident or visiting, gradients
  that wait, parameters that came early, what stays of chunks updated on the gpu, gradient sums <= budget.
- the life of a chunk updated on the CPU: gradient waits -> on the host -> updated on the host -> waits on the gpu ->
  read; of states: come -> update -> go. Stocks are cyclic; those of one life add up to the chunks' bytes at the cut.
- stashes: each goes down between the moment that makes it and the one behind which it is not counted, and comes up
  between the one from which it is counted again and the one that needs it, in its own seconds of the link each way.
- identity: stocks do not know whose bytes they are. Sorted by first read, of the chunks up to j all that happens
  between last gradient and first read happens from the end of the earliest of their last gradients to the next first
  read of j: the flows in that window are at least these chunks' bytes. Gaps between two reads are classes in which each
  opens before any closes, so the longest are given up first.
- totals over the iteration with each chunk's own seconds (latency, padding).
- the compute queue does an iteration's updates before the first moment of the next ([Note: the cut] of core/plan.py).
- barrier: updates only after the end of the last moment.

A gradient of several micro-batches goes down each time, or adds up on the gpu (as in [Note: the joint bound]). What
counts is what the dual solution proves (linear.py), or the joint bound (joint.py) where that is larger.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Set
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pstar_sim.bounds.bounds import lower_bound
from pstar_sim.bounds.facts import Bound
from pstar_sim.bounds.joint import rate_with_latency
from pstar_sim.bounds.linear import Program, Solution, Unsolved
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import Layout
from pstar_sim.core.plan import Settings
from pstar_sim.cost import CostModel, cost_of
from pstar_sim.policy.kit.facts import facts_of
from pstar_sim.workload.workload import Workload

__all__ = ["fluid_bound"]

Array = NDArray[np.float64]
Terms = list[tuple[int, float]]

MOST_POINTS = 600
TIME_LIMIT_S = 60.0
FAR = 20.0  # a schedule that many times longer than the joint bound is not looked at: it does not beat the bound


def fluid_bound(
    workload: Workload,
    machine: Machine,
    settings: Settings,
    layout: Layout,
    *,
    cost: CostModel | None = None,
    most_points: int = MOST_POINTS,
    time_limit_s: float = TIME_LIMIT_S,
) -> Bound:
    """The larger of joint bound and [Note: the fluid program]; `method` says which program was solved. If HiGHS does
    not solve it, the joint bound, and `notes` say so. Raises PlanError for a machine of several gpus."""
    cost = cost or cost_of(workload, machine, layout)
    joint = lower_bound(workload, machine, settings, layout, cost=cost)
    try:
        fluid = _Fluid(workload, machine, settings, layout, cost, most_points, joint.seconds)
        found = fluid.program.solve(method="highs-ipm", time_limit_s=time_limit_s)
    except Unsolved as error:
        note = f"the fluid linear program did not solve ({error}); the bound is the joint LP"
        return replace(joint, notes=(*joint.notes, note))
    seconds = min(fluid.own_s + found.proved, FAR * joint.seconds)
    if seconds <= joint.seconds:
        return replace(joint, method="fluid LP")
    terms = {**joint.terms, **fluid.busy(found)}
    binding = joint.binding if fluid.barrier and joint.binding == "barrier" else fluid.binding(found, terms)
    return replace(
        joint,
        seconds=seconds,
        binding=binding,
        terms=terms,
        pinned_params=fluid.share(found, fluid.p),
        streamed_params=fluid.share(found, fluid.q),
        method="fluid LP",
    )


class _Fluid:
    """Builds the program. Bytes are counted in units of `unit`, seconds as they are."""

    def __init__(
        self,
        workload: Workload,
        machine: Machine,
        settings: Settings,
        layout: Layout,
        cost: CostModel,
        most_points: int,
        joint_s: float,
    ) -> None:
        self.workload, self.layout, self.cost = workload, layout, cost
        self.barrier = settings.barrier(workload.dtype) is not None
        self.clip = settings.clip
        self.program = Program()
        self._lives()
        self._sizes(machine)
        self._speeds(machine)
        self._points(most_points)
        self.far_s = FAR * joint_s
        self.own_s = float(self.clock[-1])  # without any stall; the program finds the stalls
        self._flows()
        self._updated_on_cpu()
        self._updated_on_gpu()
        self._reads()
        self._stashes()
        if self.batches > 1:
            self._sums()
        self._rates()
        self._memory()
        self._totals()

    # -- what is given --

    def _lives(self) -> None:
        """Chunks in the order of their first reads, and when each is read and gets its gradients. The program's own:
        it goes by that order, and leaves out gradients that not every micro-batch gives."""
        w, layout = self.workload, self.layout
        self.job = job = facts_of(w, layout)
        self.mine = sorted(job.trained, key=lambda c: (job.reads[c][0], c))
        self.others = list(job.only_read)
        self.batches = w.micro_batches if job.every_batch else 1
        self.arrivals = {c: {batch: last for batch, _, last in job.spans[c]} for c in self.mine}
        self.final = {c: job.last_gradient(c) for c in self.mine}
        self.read_at = {c: job.reads_until_final(c) or job.reads[c][:1] for c in (*self.mine, *self.others)}
        self.first = {c: job.reads[c][0] for c in self.mine}

    def _sizes(self, machine: Machine) -> None:
        """Bytes in units, and the rooms at points. The program's own: it counts in units."""
        w, layout, cost = self.workload, self.layout, self.cost
        payload = {c: float(layout.payload_bytes(c, "param")) for c in (*self.mine, *self.others)}
        self.largest = max(payload.values(), default=1.0)
        self.unit = max(1.0, self.largest)
        self.payload = {c: b / self.unit for c, b in payload.items()}
        self.size = {c: cost.params[c] * self.job.width(c) / self.unit for c in self.mine}
        each = w.optimizer.states_bytes_per_param / self.unit
        self.states = {c: cost.params[c] * each for c in self.mine}  # without padding, as `size`
        self.states_room = {c: layout.states_bytes(c) / self.unit for c in self.mine}
        self.room: Array = (machine.gpu_budget_bytes - np.array([m.peak_bytes for m in w.moments], float)) / self.unit
        at_end = min(w.moments[-1].peak_bytes, w.moments[0].peak_bytes)
        self.end_room = (machine.gpu_budget_bytes - at_end) / self.unit

    def _speeds(self, machine: Machine) -> None:
        """Units per second of what moves them, and seconds per unit of CPU Adam."""
        w, cost, link = self.workload, self.cost, self.cost.link
        self.clock: Array = np.concatenate(([0.0], np.cumsum(cost.moments_s)))
        largest_state = max([self.layout.chunks[c].numel * 4.0 for c in self.mine], default=self.largest)
        self.dram = machine.host.dram_bytes_per_s / self.unit
        self.duplex = link.duplex

        def rate(each: float, size: float) -> float:
            return rate_with_latency(each, link.latency_s, size) / self.unit

        self.up, self.up_states = rate(link.h2d_bytes_per_s, self.largest), rate(link.h2d_bytes_per_s, largest_state)
        self.down, self.down_states = (
            rate(link.d2h_bytes_per_s, self.largest),
            rate(link.d2h_bytes_per_s, largest_state),
        )
        widths = [self.size[c] / cost.params[c] for c in self.mine if cost.params[c]]
        least, most = min(widths, default=1.0), max(widths, default=1.0)
        self.adam_s = w.optimizer.dram_bytes_per_param / cost.adam_bytes_per_s / most  # seconds a unit, at least
        self.adam_traffic = w.optimizer.dram_bytes_per_param / self.unit / most
        self.width = least * self.unit  # of the working list, bytes a parameter, at least

    def _points(self, most: int) -> None:
        """points: moments at whose start time is cut, one for each run of moments that read the same chunks: that with
        the highest tide. Of too many every n-th is kept, and that with the highest tide of all."""
        w, sets = self.workload, self.job.read_in
        points, begin = [0], 0
        for m in range(1, len(sets) + 1):
            if m == len(sets) or sets[m] != sets[begin]:
                points.append(max(range(begin, m), key=lambda i: w.moments[i].peak_bytes))
                begin = m
        points = sorted(set(points))
        if len(points) > most:
            top = max(points, key=lambda i: w.moments[i].peak_bytes)
            step = -(-len(points) // most)
            points = sorted({0, top, *points[::step]})
        self.points = points
        self.count = len(points)  # number of intervals but for the last; also the index of the end
        edges = [*(float(self.clock[m]) for m in points), float(self.clock[-1])]
        self.seconds = [*(b - a for a, b in pairwise(edges)), 0.0]
        self.intervals = range(self.count + 1)

    def interval_of_end(self, moment: int) -> int:
        """The interval in which the moment ends."""
        return bisect_right(self.points, moment) - 1

    def point_from(self, moment: int) -> int:
        """The first point at or after the moment's start (the end, if none)."""
        return bisect_left(self.points, moment)

    def inside(self, after: int, before: int) -> range:
        """Points strictly after moment `after` and before moment `before`."""
        return range(bisect_right(self.points, after), bisect_left(self.points, before))

    # -- the program --

    def _flows(self) -> None:
        p = self.program
        n = len(self.intervals)
        total = sum(self.size.values())
        states = sum(self.states.values())
        self.stalled = [p.variable(0.0), *p.variables(n, self.far_s)]  # seconds of stall before each point, and in all
        for k in self.intervals:
            p.at_most([(self.stalled[k], 1.0), (self.stalled[k + 1], -1.0)], 0.0)
        p.cost[self.stalled[-1]] = 1.0
        self.p = {c: p.variable(1.0) for c in self.mine}
        self.q = {c: p.variable(1.0 if self.states[c] else 0.0) for c in self.mine}
        for c in self.mine:
            p.at_most([(self.p[c], 1.0), (self.q[c], 1.0)], 1.0)
        self.gradients_down = self._cumulative(total)
        self.adam = self._cumulative(total)
        self.params_up = self._cumulative(total)
        self.streamed_adam = self._cumulative(states)
        bulk = sum(self.payload[c] * len(moments) for c, moments in self.read_at.items())
        self.again = p.variables(n, bulk)
        self.states_up, self.states_down = p.variables(n, states), p.variables(n, states)
        self.leave, self.back = p.variables(n, total), p.variables(n, total)
        self.early_down: list[int] = []
        self.sums_down: dict[int, Terms] = {k: [] for k in self.intervals}
        self.sums_up: dict[int, Terms] = {k: [] for k in self.intervals}
        self.adds: list[int] = []
        self.held: dict[int, Terms] = {k: [] for k in range(self.count + 1)}  # memory at a point
        self.constant = np.zeros(self.count + 1)

    def _cumulative(self, upper: float) -> list[int]:
        """Amount before each point, from 0 at the first, and at last in all."""
        p = self.program
        row = [p.variable(0.0), *p.variables(len(self.intervals), upper)]
        for a, b in pairwise(row):
            p.at_most([(a, 1.0), (b, -1.0)], 0.0)
        return row

    def _in(self, cumulative: list[int], k: int, factor: float = 1.0) -> Terms:
        return [(cumulative[k + 1], factor), (cumulative[k], -factor)]

    def _cpu(self, c: int, factor: float) -> tuple[float, Terms]:
        """factor * (1 - p - q) as (constant, terms)."""
        return factor, [(self.p[c], -factor), (self.q[c], -factor)]

    def _stock(self, upper: float, flows: list[tuple[float, Terms]]) -> range:
        """A cyclic stock at each point: the next is this one and the interval's flow."""
        p = self.program
        stock = p.variables(self.count + 1, upper)
        for k, (constant, terms) in zip(self.intervals, flows):
            after = stock[(k + 1) % (self.count + 1)]
            p.equal([(after, 1.0), (stock[k], -1.0), *((v, -f) for v, f in terms)], constant)
        return stock

    def _updated_on_cpu(self) -> None:
        p = self.program
        total = sum(self.size.values())
        final: dict[int, list[int]] = {k: [] for k in self.intervals}
        needed: dict[int, list[int]] = {k: [] for k in self.intervals}
        for c in self.mine:
            final[self.interval_of_end(self.final[c])].append(c)
            needed[(self.point_from(self.first[c]) - 1) % (self.count + 1)].append(c)

        def amount(chunks: list[int], sign: float) -> tuple[float, Terms]:
            parts = [self._cpu(c, sign * self.size[c]) for c in chunks]
            return sum(constant for constant, _ in parts), [t for _, terms in parts for t in terms]

        def flow(chunks: list[int], sign: float, k: int, cumulative: list[int], factor: float) -> tuple[float, Terms]:
            constant, terms = amount(chunks, sign)
            return constant, terms + self._in(cumulative, k, factor)

        ks = list(self.intervals)
        waiting = self._stock(total, [flow(final[k], 1.0, k, self.gradients_down, -1.0) for k in ks])
        on_host = self._stock(
            total, [(0.0, self._in(self.gradients_down, k) + self._in(self.adam, k, -1.0)) for k in ks]
        )
        updated = self._stock(total, [(0.0, self._in(self.adam, k) + self._in(self.params_up, k, -1.0)) for k in ks])
        early = self._stock(total, [flow(needed[k], -1.0, k, self.params_up, 1.0) for k in ks])
        outside = [c for c in self.mine if self.first[c] > self.points[0]]
        constant, terms = amount(outside, -1.0)
        p.equal([*((stock[0], 1.0) for stock in (waiting, on_host, updated, early)), *terms], -constant)
        for k in ks:
            self.held[k] += [(waiting[k], 1.0), (early[k], 1.0)]
        self._windows()

    def _windows(self) -> None:
        """Identity: prefix sums in order of first read. Barrier: updates only from the end on."""
        p = self.program
        last = self.count + 1
        earliest = len(self.workload.moments)
        cpu: Terms = []
        cpu_all = 0.0
        streamed: Terms = []
        on_gpu: Terms = []
        before_cpu = before_streamed = before_gpu = -1
        gpu_s = 1 / self.cost.gpu.hbm_bytes_per_s * self.workload.optimizer.dram_bytes_per_param
        for c in self.mine:
            earliest = min(earliest, self.final[c])
            constant, terms = self._cpu(c, self.size[c])
            cpu_all += constant
            cpu += terms
            streamed.append((self.q[c], self.states[c]))
            on_gpu += [(self.p[c], gpu_s * self.cost.params[c]), (self.q[c], gpu_s * self.cost.params[c])]
            # sums so far as variables, so that rows stay short
            now = p.variable(cpu_all)
            p.equal(
                [(now, 1.0), *((v, -f) for v, f in cpu), *([(before_cpu, -1.0)] if before_cpu >= 0 else [])], constant
            )
            now_streamed = p.variable(sum(self.states.values()))
            p.equal(
                [
                    (now_streamed, 1.0),
                    *((v, -f) for v, f in streamed),
                    *([(before_streamed, -1.0)] if before_streamed >= 0 else []),
                ],
                0.0,
            )
            now_gpu = p.variable(self.far_s)
            p.at_most([(now_gpu, -1.0), *on_gpu, *([(before_gpu, 1.0)] if before_gpu >= 0 else [])], 0.0)
            before_cpu, before_streamed, before_gpu = now, now_streamed, now_gpu
            cpu, streamed, on_gpu = [], [], []
            begin, end = self.interval_of_end(earliest), self.point_from(self.first[c])
            after = self.count if self.barrier else begin

            def within(cumulative: list[int], need: int, start: int, end: int = end) -> None:
                if end <= start:  # in [start, last) and [0, end) of the next iteration
                    row = [(cumulative[last], -1.0), (cumulative[start], 1.0), (cumulative[end], -1.0), (need, 1.0)]
                    p.at_most(row, 0.0)

            within(self.gradients_down, now, begin)
            within(self.adam, now, after)
            within(self.params_up, now, after)
            # GPU Adam is on the compute queue, whose steps of an iteration all precede the next one's ([Note: the cut])
            within(self.streamed_adam, now_streamed, after, 0)
            within(self.stalled, now_gpu, after, 0)
        if before_cpu >= 0:
            for cumulative in (self.gradients_down, self.adam, self.params_up):
                p.equal([(cumulative[last], 1.0), (before_cpu, -1.0)], 0.0)
            p.equal([(self.streamed_adam[last], 1.0), (before_streamed, -1.0)], 0.0)
            p.at_most([(before_gpu, 1.0), (self.stalled[last], -1.0)], 0.0)

    def _updated_on_gpu(self) -> None:
        p = self.program
        states = sum(self.states.values())
        come = [(0.0, [(self.states_up[k], 1.0), *self._in(self.streamed_adam, k, -1.0)]) for k in self.intervals]
        go = [(0.0, [*self._in(self.streamed_adam, k), (self.states_down[k], -1.0)]) for k in self.intervals]
        coming, going = self._stock(states, come), self._stock(states, go)
        resident = p.variable(sum(self.states_room.values()))
        p.equal([(resident, 1.0), *((self.p[c], -self.states_room[c]) for c in self.mine)], 0.0)
        if self.mine and states:
            per_unit = self.workload.optimizer.dram_bytes_per_param / self.cost.gpu.hbm_bytes_per_s
            least = min(self.cost.params[c] / self.states[c] for c in self.mine if self.states[c])
            for k in self.intervals:
                p.at_most([*self._in(self.streamed_adam, k, per_unit * least), *self._in(self.stalled, k, -1.0)], 0.0)
        # over the border: gradient or parameters stay, or leave and come back
        members: dict[int, list[int]] = {k: [] for k in range(self.count + 1)}
        for c in self.mine:
            for k in (*range(self.interval_of_end(self.final[c]) + 1, self.count + 1), *self.inside(-1, self.first[c])):
                members[k].append(c)
        total = sum(self.size.values())
        there = dict(enumerate(p.variables(self.count + 1, total)))
        self._present(there, members, self.size, self.p, self.q)
        absent = self._stock(total, [(0.0, [(self.leave[k], 1.0), (self.back[k], -1.0)]) for k in self.intervals])
        for k in range(self.count + 1):
            p.at_most([(absent[k], 1.0), (there[k], -1.0)], 0.0)
            self.held[k] += [(there[k], 1.0), (absent[k], -1.0), (resident, 1.0), (coming[k], 1.0), (going[k], 1.0)]

    def _present(
        self,
        there: Mapping[int, int],
        members: Mapping[int, Collection[int]],
        size: Mapping[int, float],
        *parts: Mapping[int, int],
    ) -> None:
        """there: point -> variable of the bytes there, of points that follow one another: of each chunk that is a
        member at the point its size, times the sum of its parts."""
        before: Set[int] = set()
        for k, variable in there.items():
            now = set(members.get(k, ()))
            row = [(variable, 1.0), *([(there[k - 1], -1.0)] if k - 1 in there else [])]
            for chunks, sign in ((now - before, -1.0), (before - now, 1.0)):
                row += [(part[c], sign * size[c]) for c in sorted(chunks) for part in parts]
            self.program.equal(row, 0.0)
            before = now

    def _reads(self) -> None:
        """Chunks between two reads: there, or given up and copied again."""
        p, w = self.program, self.workload
        classes: dict[tuple[object, ...], dict[int, float]] = {}
        for c, moments in self.read_at.items():
            for a, b in pairwise(moments):
                x, y = w.moments[a], w.moments[b]
                key = (x.micro_batch, x.phase, y.micro_batch, y.phase)
                for k in self.inside(a, b):
                    row = classes.setdefault(key, {})
                    row[k] = row.get(k, 0.0) + self.payload[c]
            if c not in self.final:  # not updated: the gap to the next iteration is one like the others
                row = classes.setdefault(("border",), {})
                for k in (*range(bisect_right(self.points, moments[-1]), self.count + 1), *self.inside(-1, moments[0])):
                    row[k] = row.get(k, 0.0) + self.payload[c]
        parts: dict[int, Terms] = {k: [] for k in self.intervals}
        for row in classes.values():
            gone = {k: p.variable(size) for k, size in row.items()}
            for k, size in row.items():
                self.constant[k] += size
                self.held[k].append((gone[k], -1.0))
                flow = p.variable(size)
                parts[k].append((flow, 1.0))
                after = (k + 1) % (self.count + 1)
                p.at_most([(gone[k], 1.0), (flow, -1.0), *([(gone[after], -1.0)] if after in gone else [])], 0.0)
        for k in self.intervals:
            p.equal([(self.again[k], 1.0), *((v, -f) for v, f in parts[k])], 0.0)
        for k, m in enumerate(self.points):
            self.constant[k] += sum(self.payload[c] for c in self.payload if c in self.job.read_in[m])

    def _sums(self) -> None:
        """Several micro-batches: each gradient goes down, or they add up on the gpu."""
        p, u = self.program, self.batches
        self.cpu_sum = {c: p.variable(1.0) for c in self.mine}
        self.gpu_sum = {c: p.variable(1.0) for c in self.mine}
        for c in self.mine:
            p.at_most([(self.cpu_sum[c], 1.0), (self.p[c], 1.0), (self.q[c], 1.0)], 1.0)
            p.at_most([(self.gpu_sum[c], 1.0), (self.p[c], -1.0), (self.q[c], -1.0)], 0.0)
            if u == 2:
                p.at_most([(self.gpu_sum[c], -1.0), (self.p[c], 1.0), (self.q[c], 1.0)], 0.0)
        self._down_each_time()
        held = {c: self.cost.params[c] * (4.0 if u > 2 else min(self.width, 4.0)) / self.unit for c in self.mine}
        for batch in range(u - 1):
            self._added_on_gpu(batch, held)
        self._added_on_host()

    def _down_each_time(self) -> None:
        """Gradients of all micro-batches but the last wait for the link."""
        total, before_last = sum(self.size.values()), self.batches - 1
        released: dict[int, tuple[float, Terms]] = {k: (0.0, []) for k in self.intervals}
        for c in self.mine:
            for batch, m in self.arrivals[c].items():
                if batch < before_last:
                    k = self.interval_of_end(m)
                    constant, terms = released[k]
                    more, own = self._cpu(c, self.size[c])
                    released[k] = (constant + more, [*terms, *own, (self.cpu_sum[c], -self.size[c])])
        self.early_down = self._cumulative(total * before_last)
        flows = [(released[k][0], released[k][1] + self._in(self.early_down, k, -1.0)) for k in self.intervals]
        waiting = self._stock(total * before_last, flows)
        for k in range(self.count + 1):
            self.held[k].append((waiting[k], 1.0))

    def _added_on_gpu(self, batch: int, held: Mapping[int, float]) -> None:
        """Sums are on the gpu from the backward pass of `batch` to the next one, or go down and up in between. held:
        bytes of each chunk's sum."""
        p = self.program
        members: dict[int, list[int]] = {}
        for c in self.mine:
            for k in self.inside(self.arrivals[c][batch], self.arrivals[c][batch + 1]):
                members.setdefault(k, []).append(c)
        if not members:
            return
        low, high = min(members), max(members)
        most = sum(held.values())
        spilt = {k: p.variable(most) for k in range(low, high + 1)}
        there = {k: p.variable(most) for k in range(low, high + 1)}
        self._present(there, members, held, self.cpu_sum, self.gpu_sum)
        for k in there:
            p.at_most([(spilt[k], 1.0), (there[k], -1.0)], 0.0)
            self.held[k] += [(there[k], 1.0), (spilt[k], -1.0)]
        for k in range(low - 1, high + 1):
            down, up = p.variable(most), p.variable(most)
            row = [(down, 1.0), (up, -1.0)]
            row += [(spilt[k + 1], -1.0)] if k + 1 in spilt else []
            row += [(spilt[k], 1.0)] if k in spilt else []
            p.equal(row, 0.0)
            self.sums_down[k % (self.count + 1)].append((down, 1.0))
            self.sums_up[k % (self.count + 1)].append((up, 1.0))

    def _added_on_host(self) -> None:
        """What Adam on the gpu needs of sums made on the host, and the adding: at any time."""
        p, u, n = self.program, self.batches, len(self.intervals)
        total = sum(self.size.values())
        extra_down, extra_up = p.variables(n, total * u), p.variables(n, 4 * total)
        self.adds = list(p.variables(n, self.far_s))
        down_row: Terms = [(v, -1.0) for v in extra_down]
        up_row: Terms = [(v, -1.0) for v in extra_up]
        add_row: Terms = [(v, -1.0) for v in self.adds]
        add_all = 0.0
        each = u if self.clip else u - 2
        for c in self.mine:
            add_s = self.cost.cpu_add_s(c)
            add_all += each * add_s
            add_row += [(self.p[c], -each * add_s), (self.q[c], -each * add_s), (self.cpu_sum[c], -each * add_s)]
            for v, sign in ((self.p[c], 1.0), (self.q[c], 1.0), (self.gpu_sum[c], -1.0)):
                if u > 2:
                    down_row.append((v, sign * (u - 2) * self.size[c]))
                    up_row.append((v, sign * 4 * self.cost.params[c] / self.unit))
                    add_row.append((v, sign * (u - 2) * add_s))
        p.at_most(down_row, 0.0)
        p.at_most(up_row, 0.0)
        p.at_most(add_row, -add_all)
        for k in self.intervals:
            self.sums_down[k].append((extra_down[k], 1.0))
            self.sums_up[k].append((extra_up[k], 1.0))

    def _stashes(self) -> None:
        """Each stash's seconds on the link, spread over the intervals in which it may move. The bytes that go with them
        are what the tide counts."""
        p, cost = self.program, self.cost
        self.stash_up: dict[int, Terms] = {k: [] for k in self.intervals}
        self.stash_down: dict[int, Terms] = {k: [] for k in self.intervals}
        self.stash_traffic: dict[int, Terms] = {k: [] for k in self.intervals}
        self.stash_up_s = self.stash_down_s = 0.0
        for stash in self.workload.stashes:
            down_s, up_s = cost.transfer_s(stash.bytes, "d2h"), cost.transfer_s(stash.bytes, "h2d")
            self.stash_down_s, self.stash_up_s = self.stash_down_s + down_s, self.stash_up_s + up_s
            for seconds, after, before, ways in (
                (down_s, stash.made, stash.gone, self.stash_down),
                (up_s, stash.back, stash.needed, self.stash_up),
            ):
                parts = {
                    k: p.variable(1.0) for k in range(self.interval_of_end(after), bisect_left(self.points, before))
                }
                p.equal([(part, 1.0) for part in parts.values()], 1.0)
                for k, part in parts.items():
                    ways[k].append((part, seconds))
                    self.stash_traffic[k].append((part, stash.bytes / self.unit))

    def _ways(self, k: int) -> tuple[Terms, Terms]:
        """Seconds of link work up and down in an interval."""
        up = self._in(self.params_up, k, 1 / self.up)
        up += [(self.again[k], 1 / self.up), (self.back[k], 1 / self.up)]
        up += [(self.states_up[k], 1 / self.up_states), *((v, f / self.up_states) for v, f in self.sums_up[k])]
        down = [*self._in(self.gradients_down, k, 1 / self.down), (self.leave[k], 1 / self.down)]
        down += [
            (self.states_down[k], 1 / self.down_states),
            *((v, f / self.down_states) for v, f in self.sums_down[k]),
        ]
        if self.early_down:
            down += self._in(self.early_down, k, 1 / self.down)
        return up, down

    def _rates(self) -> None:
        p = self.program
        add_traffic = self.cost.adam_bytes_per_s / self.unit  # an add runs at the memory rate of Adam
        for k in self.intervals:
            up, down = self._ways(k)
            last = self._in(self.stalled, k, -1.0)
            own = self.seconds[k]
            stash_up, stash_down = self.stash_up[k], self.stash_down[k]
            if self.duplex:
                p.at_most([*up, *stash_up, *last], own)
                p.at_most([*down, *stash_down, *last], own)
            else:
                p.at_most([*up, *stash_up, *down, *stash_down, *last], own)
            adds: Terms = [(self.adds[k], 1.0)] if self.adds else []
            p.at_most([*self._in(self.adam, k, self.adam_s), *adds, *last], own)
            moved = [
                *((v, f * (self.up_states if v in self._wide(k) else self.up)) for v, f in up),
                *((v, f * (self.down_states if v in self._wide(k) else self.down)) for v, f in down),
                *self._in(self.adam, k, self.adam_traffic),
                *((v, f * add_traffic) for v, f in adds),
                *self.stash_traffic[k],
            ]
            p.at_most([*((v, f / self.dram) for v, f in moved), *last], own)

    def _wide(self, k: int) -> set[int]:
        sums = {v for v, _ in (*self.sums_up[k], *self.sums_down[k])}
        return {self.states_up[k], self.states_down[k], *sums}

    def _memory(self) -> None:
        for k in range(self.count + 1):
            room = float(self.room[self.points[k]]) if k < self.count else self.end_room
            self.program.at_most(self.held[k], room - float(self.constant[k]))

    def _totals(self) -> None:
        """Each chunk's own seconds over the whole iteration."""
        p, cost, layout = self.program, self.cost, self.layout
        last = (self.stalled[-1], -1.0)
        own = float(self.clock[-1])
        up_all, down_all, adam_all = self.stash_up_s, self.stash_down_s, 0.0
        up: Terms = []
        down: Terms = []
        adam: Terms = [(v, 1.0) for v in self.adds]
        for c in self.mine:
            up_s = cost.transfer_s(layout.payload_bytes(c, "param"), "h2d")
            down_s = cost.transfer_s(layout.payload_bytes(c, "param"), "d2h")
            adam_s = cost.cpu_adam_s(c)
            states_up = sum(cost.transfer_s(layout.payload_bytes(c, name), "h2d") for name in layout.state_lists)
            states_down = sum(cost.transfer_s(layout.payload_bytes(c, name), "d2h") for name in layout.state_lists)
            up_all, down_all, adam_all = up_all + up_s, down_all + down_s, adam_all + adam_s
            up += [(self.p[c], -up_s), (self.q[c], states_up - up_s)]
            down += [(self.p[c], -down_s), (self.q[c], states_down - down_s)]
            adam += [(self.p[c], -adam_s), (self.q[c], -adam_s)]
        for k in self.intervals:
            up += [(self.again[k], 1 / self.up), (self.back[k], 1 / self.up)]
            up += [(v, f / self.up_states) for v, f in self.sums_up[k]]
            down += [(self.leave[k], 1 / self.down), *((v, f / self.down_states) for v, f in self.sums_down[k])]
            if self.early_down:
                down += self._in(self.early_down, k, 1 / self.down)
        if self.duplex:
            p.at_most([*up, last], own - up_all)
            p.at_most([*down, last], own - down_all)
        else:
            p.at_most([*up, *down, last], own - up_all - down_all)
        p.at_most([*adam, last], own - adam_all)

    # -- the answer --

    def share(self, found: Solution, part: dict[int, int]) -> int:
        """Parameters of the chunks' parts."""
        return int(sum(float(found.at[v]) * self.cost.params[c] for c, v in part.items()))

    def busy(self, found: Solution) -> dict[str, float]:
        """Seconds of work over the iteration, by resource."""

        def sum_of(terms: Terms) -> float:
            return sum(f * float(found.at[v]) for v, f in terms)

        ways = [self._ways(k) for k in self.intervals]
        up, down = sum(sum_of(a) for a, _ in ways), sum(sum_of(b) for _, b in ways)
        adam = self.adam_s * float(found.at[self.adam[-1]]) + sum(float(found.at[v]) for v in self.adds)
        params = self.share(found, self.p) + self.share(found, self.q)
        traffic = self.workload.optimizer.dram_bytes_per_param
        compute = float(self.clock[-1]) + params * traffic / self.cost.gpu.hbm_bytes_per_s
        moved = up * self.up + down * self.down + self.adam_traffic * float(found.at[self.adam[-1]])
        moved += 2 * sum(s.bytes for s in self.workload.stashes) / self.unit
        up, down = up + self.stash_up_s, down + self.stash_down_s
        work = {"compute": compute, "adam": adam, "h2d": up, "d2h": down, "dram": moved / self.dram}
        if not self.duplex:
            work["link"] = up + down
        return work

    def binding(self, found: Solution, terms: dict[str, float]) -> str:
        """The resource with the most work."""
        work = self.busy(found)
        top = max(work.values())
        return next(name for name in terms if work.get(name, 0.0) >= top * (1 - 1e-4))
