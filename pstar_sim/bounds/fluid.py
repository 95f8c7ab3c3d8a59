"""The fluid bound: a linear program over time that every legal schedule satisfies, finer than the joint program.

[Note: the fluid program] Time is cut at the starts of some moments (`points`). The last point is the end of the last
moment, and the interval after it runs to the first moment of the next iteration. An interval lasts the seconds of its
moments and a stall. Every quantity is a flow of bytes in an interval or a stock of bytes at a point, averaged over the
iterations of a steady schedule. Chunks are divisible: the parts p, q and 1 - p - q of a chunk are pinned, streamed and
updated on the CPU. The order inside an interval is free: a gradient that becomes final in an interval may leave at any
time of the interval, and a chunk first read in an interval is needed only at the interval's end. So every choice of
points is valid. Rows:

- each copy direction, CPU Adam, host DRAM: work in an interval <= the interval's seconds. Streamed Adam makes the
  interval longer.
- memory at each point, at most the budget: the sum of the tide, chunks read there, chunks kept between two reads,
  states resident or visiting, gradients that wait, parameters that came early, parts that stay of chunks updated on the
  gpu, and gradient sums.
- adds on the gpu make their intervals longer, if gradients add up there (and U > 2).
- the life of a chunk updated on the CPU: gradient waits -> on the host -> updated on the host -> waits on the gpu ->
  read. The life of states: come -> update -> go. The stocks of one life add up to the chunks' bytes at the cut.
- stashes: a stash goes down between the moment that makes it and the moment after which it is not counted, and comes up
  between the moment from which it is counted again and the moment that needs it.
- identity: stocks do not know whose bytes they are. Of the chunks up to j, by first read, the copies and updates
  between last gradient and first read lie in one window, from the earliest of their last gradients to the next first
  read of j. The flows there are at least these chunks' bytes. Gaps between two reads form classes, in which every gap
  opens before any closes, so the longest are given up first.
- totals over the iteration, with each chunk's own seconds (latency, padding).
- the compute queue does an iteration's updates before the first moment of the next ([Note: the cut] of core/plan.py).
- barrier: updates only after the end of the last moment.

With several micro-batches, a gradient goes down each time, or adds up on the gpu (as in [Note: the joint bound]). The
host may make the whole sum for Adam on the gpu; of two gradients, the first may wait there for the update. A
gradient that goes down waits on the gpu from the moment in which it arrives until its copy. A sum on the gpu takes 4
bytes per parameter from one backward pass to the next. After the last gradient it takes them until the update or, for
CPU Adam, until it has gone down. A sum on the host comes up for Adam on the gpu only after its last gradient but two,
and then it stays. The host adds a chunk's gradients between the first gradient and the chunk's next first read. The
host adds the last gradient after that gradient's moment, without clipping inside the update. Both give windows as in
"identity".

One micro-batch stands for all but the first and the last three ([Note: alike micro-batches] of fluid_facts.py), so the
program does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pstar_sim.bounds.bound_facts import Array, Bound, sums_are_whole
from pstar_sim.bounds.bounds import DISKS, STASHES, lower_bound
from pstar_sim.bounds.fluid_facts import FluidFacts, shortened
from pstar_sim.bounds.linear import Expression, Index, LinearProgram, Solution, Unsolved
from pstar_sim.bounds.rank_facts import costs_of_ranks
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import Layout
from pstar_sim.core.plan import Settings
from pstar_sim.workload.workload import Workload

# benchmarks/search_constants.md says what each of these constants buys.
MOST_POINTS = 600  # points of an iteration in the program; fewer points give a lower bound sooner
MANY_CHUNKS = 300  # with more, there are fewer points, so that a program is solved in seconds
FAR = 20.0  # longest stall, as a multiple of the joint bound: every variable needs a small upper bound
MOST_STEPS = 200  # of the solver; programs take 40 to 130, and the joint bound replaces one that takes more


def fluid_bound(
    workload: Workload,
    machine: Machine,
    settings: Settings,
    layout: Layout,
    *,
    ranked: Sequence[Workload] | None = None,
    most_points: int = MOST_POINTS,
) -> Bound:
    """The larger of the joint bound and that of [Note: the fluid program], of any kind of rank; `notes` say if HiGHS
    fails.

    ranked: as for `lower_bound`.
    """
    joint = lower_bound(workload, machine, settings, layout, ranked=ranked)
    most_points = most_points * MANY_CHUNKS // max(MANY_CHUNKS, len(layout.chunks))
    short, times = shortened(workload, layout, most_points) if ranked is None else (workload, 1)
    costs = costs_of_ranks(short, machine, layout, ranked)
    # Ranks that differ may be at different parts of an iteration, so one rank may use more than its part of DRAM.
    dram = machine.host.dram_bytes_per_s / (machine.local_ranks if len(costs) == 1 else 1)
    best = joint if joint.binding in (STASHES, DISKS) else replace(joint, method="fluid LP")
    for cost in costs:
        try:
            facts = FluidFacts(
                short,
                machine,
                layout,
                cost,
                dram_bytes_per_s=dram,
                most_points=most_points,
                times=times,
                sums_first=settings.clip,
            )
            fluid = _FluidProgram(facts, settings, far_s=FAR * joint.seconds)
            found = fluid.lp.solve(method="ipx", most_steps=MOST_STEPS)
        except Unsolved as error:
            note = f"the fluid linear program did not solve ({error}); the bound is the {joint.method}"
            return replace(joint, notes=(*joint.notes, note))
        seconds = min(facts.compute_s + found.proved, FAR * joint.seconds)
        if seconds > best.seconds:
            best = fluid.bound(joint, found, seconds)
    return best


@dataclass(frozen=True, kw_only=True)
class _Flow:
    """upto: amount up to each point, last the whole: these sums keep rows about long windows short.
    within: amount in each interval.
    """

    upto: Expression
    within: Expression


class _FluidProgram:
    """[Note: the fluid program]. Each method adds a family of rows, with chunks, lists and sums in units
    (`facts.unit`)."""

    def __init__(self, facts: FluidFacts, settings: Settings, *, far_s: float) -> None:
        self.facts, self.far_s = facts, far_s
        self.barrier = settings.barrier(facts.workload.compute_dtype) is not None
        self.clip = settings.clip
        lp = self.lp = LinearProgram()
        n = facts.intervals
        self.all_units, all_states = float(facts.size.sum()), float(facts.states.sum())

        # Per chunk: the pinned part and the streamed part. The CPU updates the rest.
        self.p = lp.variables(len(facts.chunks), most=1.0)
        self.q = lp.variables(len(facts.chunks), most=np.where(facts.states > 0, 1.0, 0.0))
        self.on_cpu = 1 - self.p - self.q
        lp.add(self.p + self.q <= 1.0)

        # Per interval: seconds of stall; units of gradients that go down; units that CPU Adam updates; units of
        # parameters that come up; units of states whose Adam runs on the gpu.
        self.stall = self._flow(far_s)
        self.gradients_down = self._flow(self.all_units)
        self.adam = self._flow(self.all_units)
        self.params_up = self._flow(self.all_units)
        self.streamed_adam = self._flow(all_states)
        # Per interval: units of states that come up, and that go down; units of chunks updated on the gpu that leave
        # over the border, and that come back; units of chunks given up between two reads that come up again.
        self.states_up, self.states_down = lp.variables(n, most=all_states), lp.variables(n, most=all_states)
        self.leave, self.back = lp.variables(n, most=self.all_units), lp.variables(n, most=self.all_units)
        read = sum(facts.payload[c] * len(moments) for c, moments in facts.read_at.items())
        self.again = lp.variables(n, most=read)
        # The families of rows add to these: units held at each point, units of gradient sums on the link, seconds of
        # adds on the host and on the gpu.
        self.held = Expression.zero(n) + facts.read
        self.sums_down = self.sums_up = self.adds = self.early_down = self.gpu_adds = Expression.zero(n)
        # Per chunk: the part of Adam on the gpu whose last gradient is added on the host, too.
        self.whole = Expression.zero(len(facts.chunks))
        # Per interval: units of others' slices gathered again; seconds of collectives, and of the stall those that they
        # leave to updates and adds on the gpu.
        self.gathered, self.spare = Expression.zero(n), self.stall
        self.net: _Flow | None = None
        self.gpu_s = Expression.zero(1)  # of updates and adds there

        lp.minimise(self.stall.upto[-1])
        self._between_reads()
        if facts.net.each_time_s:
            self._collectives()
        if facts.batches > 1:
            self._sums()
        self._updated_on_cpu()
        self._identity()
        self._updated_on_gpu()
        self._over_the_border()
        self._stashes()
        self._rates()
        self._totals()
        lp.add(self.held <= facts.room)

    def _flow(self, most: float) -> _Flow:
        upto = self.lp.variables(self.facts.intervals + 1, most=[0.0, *[most] * self.facts.intervals])
        within = (upto[1:] - upto[:-1]) / self.facts.times
        self.lp.add(within >= 0.0)
        return _Flow(upto=upto, within=within)

    def _stock(self, most: float, change: Expression) -> Expression:
        stock = self.lp.variables(self.facts.intervals, most=most)
        self.lp.add(self._next(stock, most) == stock + change)
        return stock

    def _next(self, stock: Expression, most: float) -> Expression:
        """At the point after each interval.

        most: bound at the first point of the alike micro-batches.
        """
        period = self.facts.period
        if period is None:
            return stock[self.facts.following]
        entered = self._entered(stock, most)
        return self._behind(self._before(stock[self.facts.following], entered), stock, stock, entered)

    def _entered(self, stock: Expression, most: float) -> Expression:
        """[Note: alike micro-batches]"""
        period = self.facts.period
        assert period is not None
        entered = self.lp.variable(most=most)
        self.lp.add(entered <= period.times * stock[period.first])
        return entered

    def _before(self, following: Expression, entered: Expression) -> Expression:
        period, n = self.facts.period, self.facts.intervals
        assert period is not None
        before = period.first - 1
        return following * np.where(np.arange(n) == before, 0.0, 1.0) + entered.gathered([before], n)

    def _behind(self, following: Expression, stock: Expression, left: Expression, entered: Expression) -> Expression:
        """`following` with the mean of [Note: alike micro-batches] at their last interval.

        stock: at their first point.
        left: behind their last.
        """
        period, n = self.facts.period, self.facts.intervals
        assert period is not None
        mean = stock[period.first] + (left[period.last + 1] - entered) / period.times
        return following * np.where(np.arange(n) == period.last, 0.0, 1.0) + mean.gathered([period.last], n)

    def _in_all(self, within: Expression) -> Expression:
        return (within * self.facts.times).sum()

    def _running(self, of: Expression, most: Array | float) -> Expression:
        """Row r sums all rows up to r, which keeps rows that use these short."""
        running = self.lp.variables(len(of), most=most)
        self.lp.add(running[:1] == of[:1])
        self.lp.add(running[1:] == running[:-1] + of[1:])
        return running

    def _there(self, points: Index, of_chunk: Sequence[Sequence[int]], units: Expression, most: float) -> Expression:
        there = np.zeros((len(points) + 1, len(of_chunk)), dtype=int)  # a row of zeros before the first point
        for c, at in enumerate(of_chunk):
            there[np.asarray(at, dtype=np.intp) - points[0] + 1, c] = 1
        comes = np.diff(there, axis=0)  # 1 where a chunk comes, -1 where it goes
        point, chunk = np.nonzero(comes)
        return self._running((units[chunk] * comes[point, chunk]).gathered(point, len(points)), most)

    # -- the life of a chunk --

    def _updated_on_cpu(self) -> None:
        lp, facts, n = self.lp, self.facts, self.facts.intervals
        units = self.on_cpu * facts.size
        final = units.gathered(facts.final_in, n)
        needed = units.gathered((facts.first_at - 1) % n, n)
        waiting = self._stock(self.all_units, final - self.gradients_down.within)
        on_host = self._stock(self.all_units, self.gradients_down.within - self.adam.within)
        updated = self._stock(self.all_units, self.adam.within - self.params_up.within)
        early = self._stock(self.all_units, self.params_up.within - needed)
        # Stocks are cyclic. The stocks of one life add up to the chunks' units at the cut.
        unread = np.array(facts.first, dtype=int) > facts.points[0]
        lp.add((waiting + on_host + updated + early)[0] == units[unread].sum())
        self.held += waiting + early

    def _identity(self) -> None:
        """On the gpu the chunks are updated by the end of the iteration."""
        lp, facts = self.lp, self.facts
        if not facts.chunks:
            return
        cpu = self._running(self.on_cpu * facts.size, np.cumsum(facts.size))
        streamed = self._running(self.q * facts.states, float(facts.states.sum()))
        gpu_s = self._running((self.p + self.q) * facts.gpu_adam_s, self.far_s)
        begin, update, border = self._final(), self._update(), np.zeros(len(facts.chunks), dtype=np.intp)
        self._window(self.gradients_down, cpu, begin, facts.first_at)
        self._window(self.adam, cpu, update, facts.first_at)
        self._window(self.params_up, cpu, update, facts.first_at)
        # The compute queue does an iteration's updates before the first moment of the next iteration ([Note: the cut]).
        self._window(self.streamed_adam, streamed, update, border)
        self._window(self.spare, gpu_s, update, border)
        # totals over the iteration
        for flow in (self.gradients_down, self.adam, self.params_up):
            lp.add(flow.upto[-1] == cpu[-1])
        lp.add(self.streamed_adam.upto[-1] == streamed[-1])
        self.gpu_s = gpu_s[-1] + self._in_all(self.gpu_adds)

    def _final(self) -> Index:
        """For the chunks up to j in the order of first reads, the interval of the earliest of their last gradients."""
        return np.minimum.accumulate(self.facts.final_in)

    def _update(self) -> Index:
        """For the chunks up to j, the first interval in which one may be updated."""
        begin = self._final()
        return np.full_like(begin, self.facts.barrier_at) if self.barrier else begin

    def _window(self, flow: _Flow, need: Expression, begin: Index, end: Index) -> None:
        """need <= flow from `begin` to the iteration's end and up to `end` of the next."""
        j = end <= begin
        self.lp.add(need[j] <= flow.upto[-1] - flow.upto[begin[j]] + flow.upto[end[j]])

    def _updated_on_gpu(self) -> None:
        """States come -> update -> go, or are resident. Streamed Adam and adds make the interval longer."""
        lp, facts = self.lp, self.facts
        states = float(facts.states.sum())
        coming = self._stock(states, self.states_up - self.streamed_adam.within)
        going = self._stock(states, self.streamed_adam.within - self.states_down)
        resident = lp.variable(most=float(facts.states_room.sum()))
        lp.add(resident == (self.p * facts.states_room).sum())
        self.held += resident + coming + going

    def _over_the_border(self) -> None:
        """Chunks updated on the gpu stay until their next first read, or leave and come back."""
        facts, points = self.facts, np.arange(self.facts.intervals)
        units = (self.p + self.q - self.whole) * facts.size
        there = self._there(points, facts.over_the_border(), units, self.all_units)
        absent = self._stock(self.all_units, self.leave - self.back)
        self.lp.add(absent <= there)
        if self.barrier:  # what is absent when the last moment ends is a gradient, which the update needs
            self.lp.add(absent[facts.barrier_at] <= self.back[facts.barrier_at])
        self.held += there - absent

    def _between_reads(self) -> None:
        """Chunks stay or are copied again, the longest gaps of a class first."""
        again = Expression.zero(self.facts.intervals)
        for gap in self.facts.gaps():
            again += self._given_up(gap.points, gap.units)
            if gap.others.any():
                self.gathered += self._given_up(gap.points, gap.others)
        self.lp.add(self.again == again)

    def _given_up(self, points: Index, units: Array) -> Expression:
        """Units that come again, by interval."""
        lp, facts, n = self.lp, self.facts, self.facts.intervals
        lies = np.asarray(np.bincount(points, units, minlength=n), dtype=float)
        given_up = lp.variables(len(points), most=units).gathered(points, n)  # units at each point
        again = lp.variables(len(points), most=units).gathered(points, n)
        following = given_up[facts.following]
        if facts.period is not None and lies[facts.period.first]:
            following = self._next(given_up, float(lies[facts.period.first]))
        lp.add((given_up - following)[points] <= again[points])
        self.held += -given_up + lies
        return again

    # -- collectives --

    def _collectives(self) -> None:
        """[Note: the bound of several ranks]"""
        lp, facts, net, n = self.lp, self.facts, self.facts.net, self.facts.intervals
        size = Expression.zero(len(facts.chunks)) + facts.size
        all_of = np.cumsum(facts.size)
        sums, gathers = self._flow(self.all_units), self._flow(self.all_units)
        needed = size.gathered((facts.first_at - 1) % n, n)
        waiting = self._stock(self.all_units, size.gathered(facts.final_in, n) - sums.within)
        early = self._stock(self.all_units, gathers.within - needed)
        self.held += (waiting + early) * facts.beside
        self._window(gathers, Expression.zero(len(all_of)) + all_of, self._update(), facts.first_at)
        lp.add(sums.upto[-1] == self.all_units)
        lp.add(gathers.upto[-1] == self.all_units)
        first = min(facts.interval_of_end(min(arrivals.values())) for arrivals in facts.arrivals)
        before = self._flow(self.far_s)  # seconds of sums of all micro-batches but the last
        if facts.split:
            begin = self._final()
            lp.add(sums.upto[facts.barrier_at] - sums.upto[begin] >= all_of)
            lp.add(before.upto[facts.barrier_at] - before.upto[first] == before.upto[-1])
        else:
            self._window(sums, Expression.zero(len(all_of)) + all_of, self._final(), facts.first_at)
        lp.add(before.upto[-1] == self._sums_before())
        again = self._flow(self.far_s)
        lp.add(self.gathered * (net.byte_s * facts.unit) <= again.within)
        upto, within = (
            a * facts.sum_unit_s + b * facts.gather_unit_s + c + d
            for a, b, c, d in zip(*((flow.upto, flow.within) for flow in (sums, gathers, before, again)))
        )
        self.net = _Flow(upto=upto, within=within)
        self.spare = _Flow(upto=self.stall.upto - upto * net.lost, within=self.stall.within - within * net.lost)
        lp.add(within <= facts.seconds + self.stall.within)

    def _sums_before(self) -> Expression:
        """Seconds, but for whole sums that wait on the gpu for the next micro-batch."""
        lp, facts, net = self.lp, self.facts, self.facts.net
        seconds = Expression.zero(1)
        for k in facts.begins if net.most_saved_s else ():
            waits = lp.variable(most=net.most_sums / facts.unit)
            saved_s = lp.variable(most=net.most_saved_s)
            lp.add(saved_s <= waits * (net.saves * facts.unit) + net.saved_s)
            if facts.workload.order.one_by_one:
                self.held += waits.gathered([k], facts.intervals)
            seconds += (net.most_saved_s - saved_s) * float(facts.times[k])
        return seconds

    # -- sums of several micro-batches --

    def _sums(self) -> None:
        lp, facts, batches = self.lp, self.facts, self.facts.batches
        on_gpu = self.p + self.q
        # Per chunk: the parts whose sums are on the gpu, with Adam on the CPU and with Adam on the gpu.
        self.cpu_sum = lp.variables(len(facts.chunks), most=1.0)
        self.gpu_sum = lp.variables(len(facts.chunks), most=1.0)
        lp.add(self.cpu_sum + on_gpu <= 1.0)
        self.whole = lp.variables(len(facts.chunks), most=1.0)
        lp.add(self.gpu_sum + self.whole <= on_gpu)
        whole_sums = sums_are_whole(facts.layout, batches, clip=self.clip)
        # of each chunk: the part of Adam on the gpu whose first of two gradients waits on the host for the update
        self.late = lp.variables(len(facts.chunks), most=1.0 if batches == 2 else 0.0)
        if batches == 2 or whole_sums:
            lp.add(on_gpu == self.gpu_sum + self.whole + self.late)
        # of each chunk: the part of Adam on the gpu whose sum is on the host and whose last gradient but one is never
        # added there: it waits for the update, on the gpu or on the host
        most = 1.0 if batches > 2 and not whole_sums else 0.0
        self.waits = lp.variables(len(facts.chunks), most=most)
        self.waits_on_host = lp.variables(len(facts.chunks), most=most)
        lp.add(self.waits <= on_gpu - self.gpu_sum - self.whole)
        lp.add(self.waits_on_host <= self.waits)
        self._down_each_time()
        for batch in range(facts.shown - 1):
            self._added_on_gpu(batch)
        if batches > 2 and facts.gpu_adds:  # with two micro-batches, the first gradient may wait in a list of its own
            interval, chunk = np.array([where for where, _ in facts.gpu_adds], dtype=np.intp).T
            add_s = np.array([seconds for _, seconds in facts.gpu_adds], dtype=float)
            self.gpu_adds = ((self.cpu_sum + self.gpu_sum)[chunk] * add_s).gathered(interval, facts.intervals)
        self._added_on_host(on_gpu - self.gpu_sum)
        self._until_the_update()

    def _down_each_time(self) -> None:
        """Gradients that do not add up on the gpu wait for the link: for CPU Adam all but the last; for Adam on the
        gpu, all but the last two, and the last where the host makes the whole sum (where it waits is not counted)."""
        facts, n, before_last = self.facts, self.facts.intervals, self.facts.shown - 1
        arrives = [
            (facts.interval_of_end(m), c, batch == before_last - 1)
            for c, arrivals in enumerate(facts.arrivals)
            for batch, m in arrivals.items()
            if batch < before_last
        ]
        interval, chunk, may_wait = np.array(arrives, dtype=np.intp).reshape(-1, 3).T
        units = (1.0 - self.cpu_sum - self.gpu_sum)[chunk] - (self.waits - self.waits_on_host)[chunk] * may_wait.astype(
            float
        )
        most = self.all_units * (facts.batches - 1)
        self.early_down = self._flow(most).within
        self.held += self._stock(most, (units * facts.size[chunk]).gathered(interval, n) - self.early_down)
        last_down = self._flow(self.all_units)
        need = self._running(self.whole * facts.size, self.all_units)
        self._window(last_down, need, self._final(), 0 * facts.first_at)
        self.early_down += last_down.within

    def _added_on_gpu(self, batch: int) -> None:
        """Sums stay from the backward of `batch` to the next, or go down and up."""
        lp, facts, n = self.lp, self.facts, self.facts.intervals
        of_chunk = [facts.inside(arrivals[batch], arrivals[batch + 1]) for arrivals in facts.arrivals]
        if not any(of_chunk):
            return
        points = np.arange(min(at[0] for at in of_chunk if at), max(at[-1] for at in of_chunk if at) + 1)
        size = (
            facts.sums if facts.batches > 2 else np.minimum(facts.sums, facts.params * facts.least_width / facts.unit)
        )
        most = float(size.sum())
        if batch == facts.shown - 2:
            self._waiting(points, of_chunk)
        there = self._there(points, of_chunk, (self.cpu_sum + self.gpu_sum) * size, most)
        spilt = lp.variables(len(points), most=most)
        lp.add(spilt <= there)
        self.held += (there - spilt).gathered(points, n)
        # Per interval, from the interval before the first point on.
        intervals = np.append(points[0] - 1, points)
        down, up = lp.variables(len(intervals), most=most), lp.variables(len(intervals), most=most)
        stock = spilt.gathered(points, n)
        following = stock[facts.following]
        if facts.period is not None and batch == 0:  # sums at the begin of the alike micro-batches
            self.spilt, self.spilt_entered = stock, self._entered(stock, most)
            lp.add(self.spilt_entered <= there.gathered(points, n)[facts.period.first])
            following = self._before(following, self.spilt_entered)
        elif facts.period is not None and batch == 1:  # sums at their end
            following = self._behind(following, self.spilt, stock, self.spilt_entered)
        lp.add(down - up == (following - stock)[intervals])
        self.sums_down += down.gathered(intervals % n, n)
        self.sums_up += up.gathered(intervals % n, n)

    def _waiting(self, points: Index, of_chunk: Sequence[Sequence[int]]) -> None:
        """Last gradients but one that are never added on the host stay at the `points`, or go down and come up after
        their moments.

        of_chunk: points where each waits.
        """
        facts = self.facts
        waits = (self.waits - self.waits_on_host) * facts.size
        self.held += self._there(points, of_chunk, waits, self.all_units).gathered(points, facts.intervals)
        came = [facts.interval_of_end(arrivals[facts.shown - 2]) for arrivals in facts.arrivals]
        up = self._flow(self.all_units)
        back = self._running(self.waits_on_host * facts.size, self.all_units)
        self._window(up, back, np.minimum.accumulate(came), 0 * facts.first_at)
        self.sums_up += up.within

    def _added_on_host(self, summed_on_host: Expression) -> None:
        """The host adds between the first gradient that comes down and the next first read. For CPU Adam the last is
        added after its arrival, inside the update if nothing is clipped. A sum for Adam on the gpu comes up after the
        last gradient but two and stays until the update; of two gradients, after the first, as it is if it waits for
        the update.

        summed_on_host: share of each chunk for Adam on the gpu.
        """
        facts, batches = self.facts, self.facts.batches
        add_s = np.array([facts.cost.cpu_add_s(c) for c in facts.chunks], dtype=float)
        each_time = self.on_cpu - self.cpu_sum
        lists = summed_on_host * (batches - 1) - self.waits - self.late + (self.whole if batches > 2 else 0.0)
        added = each_time * (batches if self.clip or batches > 2 else 1) + lists
        adds = self._flow(self.far_s)
        first = np.array([facts.interval_of_end(arrivals[0]) for arrivals in facts.arrivals], dtype=np.intp)
        self._window(adds, self._running(added * add_s, self.far_s), np.minimum.accumulate(first), facts.first_at)
        last = self._final() if self.clip else self._update()
        self._window(adds, self._running(each_time * add_s, self.far_s), last, facts.first_at)
        self.lp.add((added * add_s).sum() <= adds.upto[-1])
        self.adds = adds.within
        before = max(0, facts.shown - 3)
        added_in = np.array([facts.interval_of_end(arrivals[before]) for arrivals in facts.arrivals], dtype=np.intp)
        sums = (summed_on_host - self.late) * facts.sums + self.late * facts.size
        up = self._flow(4 * self.all_units)
        self._window(up, self._running(sums, 4 * self.all_units), np.minimum.accumulate(added_in), 0 * facts.first_at)
        self.held += self._stock(4 * self.all_units, up.within - self._used(sums))
        self.sums_up += up.within

    def _used(self, units: Expression) -> Expression:
        used, most = self._flow(4 * self.all_units), 4 * self.all_units
        self._window(used, self._running(units, most), self._update(), 0 * self.facts.first_at)
        self.lp.add(used.upto[-1] == units.sum())
        return used.within

    def _until_the_update(self) -> None:
        """A sum is wider than what other rows count after the last gradient. For CPU Adam all goes down; for Adam on
        the gpu it stays until the update, or goes down and up."""
        lp, facts, n = self.lp, self.facts, self.facts.intervals
        wider, most = np.maximum(0.0, facts.sums - facts.size), 4 * self.all_units
        units = self.cpu_sum * wider
        down = self._flow(most)
        self._window(down, self._running(units, most), self._final(), facts.first_at)
        self.held += self._stock(most, units.gathered(facts.final_in, n) - down.within)
        units = self.gpu_sum * wider
        there = self._stock(most, units.gathered(facts.final_in, n) - self._used(units))
        leave, back = lp.variables(n, most=most), lp.variables(n, most=most)
        absent = self._stock(most, leave - back)
        lp.add(absent <= there)
        self.held += there - absent
        self.sums_down += down.within + leave
        self.sums_up += back

    # -- stashes, seconds --

    def _stashes(self) -> None:
        """A stash's seconds lie in the intervals in which it may move."""
        facts, cost, stashes = self.facts, self.facts.cost, self.facts.workload.stashes
        down_s = np.array([cost.transfer_s(stash.bytes, "d2h") for stash in stashes], dtype=float)
        up_s = np.array([cost.transfer_s(stash.bytes, "h2d") for stash in stashes], dtype=float)
        units = np.array([stash.bytes for stash in stashes], dtype=float) / facts.unit
        self.stash_down_s, self.stash_up_s = float(down_s.sum()), float(up_s.sum())
        down, down_units = self._spread(down_s, units, [(stash.made, stash.gone) for stash in stashes])
        up, up_units = self._spread(up_s, units, [(stash.back, stash.needed) for stash in stashes])
        self.stash_down, self.stash_up, self.stash_traffic = down, up, down_units + up_units

    def _spread(
        self, seconds: Array, units: Array, between: Sequence[tuple[int, int]]
    ) -> tuple[Expression, Expression]:
        """Per interval, of copies that may move between the ends of two moments."""
        facts, n = self.facts, self.facts.intervals
        may = [
            (copy, k)
            for copy, (after, before) in enumerate(between)
            for k in range(facts.interval_of_end(after), facts.point_from(before))
        ]
        copy, interval = np.array(may, dtype=np.intp).reshape(-1, 2).T
        part = self.lp.variables(len(may), most=1.0)
        self.lp.add(part.gathered(copy, len(between)) == 1.0)
        return (part * seconds[copy]).gathered(interval, n), (part * units[copy]).gathered(interval, n)

    def _link_s(self) -> tuple[Expression, Expression]:
        facts = self.facts
        up = (self.params_up.within + self.again + self.back) / facts.up
        down = (self.gradients_down.within + self.early_down + self.leave) / facts.down
        up += (self.states_up + self.sums_up) / facts.up_states
        down += (self.states_down + self.sums_down) / facts.down_states
        return up, down

    def _rates(self) -> None:
        lp, facts = self.lp, self.facts
        seconds = facts.seconds + self.stall.within
        up, down = self._link_s()
        if facts.duplex:
            lp.add(up + self.stash_up <= seconds)
            lp.add(down + self.stash_down <= seconds)
        else:
            lp.add(up + self.stash_up + down + self.stash_down <= seconds)
        lp.add(self.adam.within * facts.adam_s + self.adds <= seconds)
        busy, some = self.gpu_adds, facts.states > 0
        if some.any():
            busy += self.streamed_adam.within * float((facts.gpu_adam_s[some] / facts.states[some]).min())
        if len(busy.row) or self.net:
            lp.add(busy <= self.spare.within)
        moved = self.params_up.within + self.again + self.back + self.states_up + self.sums_up
        moved += self.gradients_down.within + self.early_down + self.leave + self.states_down + self.sums_down
        moved += self.adam.within * facts.adam_traffic + self.adds * facts.add_traffic + self.stash_traffic
        lp.add(moved / facts.dram <= seconds)

    def _totals(self) -> None:
        """Each direction, and CPU Adam with its adds, takes at most the iteration, chunks with their own seconds
        (latency, padding)."""
        lp, facts, cost = self.lp, self.facts, self.facts.cost
        seconds = facts.compute_s + self.stall.upto[-1]
        up_s, states_up_s = (facts.copy_s("h2d", states=states) for states in (False, True))
        down_s, states_down_s = (facts.copy_s("d2h", states=states) for states in (False, True))
        adam_s = np.array([cost.cpu_adam_s(c) for c in facts.chunks], dtype=float)
        up = (self.on_cpu * up_s + self.q * states_up_s).sum() + self.stash_up_s
        up += self._in_all((self.again + self.back) / facts.up + self.sums_up / facts.up_states)
        down = (self.on_cpu * down_s + self.q * states_down_s).sum() + self.stash_down_s
        down += self._in_all((self.leave + self.early_down) / facts.down + self.sums_down / facts.down_states)
        if facts.duplex:
            lp.add(up <= seconds)
            lp.add(down <= seconds)
        else:
            lp.add(up + down <= seconds)
        lp.add((self.on_cpu * adam_s).sum() + self._in_all(self.adds) <= seconds)
        lp.add(self.gpu_s + facts.net_own_s * facts.net.lost <= self.spare.upto[-1])
        if self.net:
            lp.add(self.net.upto[-1] + facts.net_own_s <= seconds)

    # -- the answer --

    def bound(self, joint: Bound, found: Solution, seconds: float) -> Bound:
        """With this program's terms beside the joint one's."""
        terms = {**joint.terms, **self.busy(found)}
        binding = joint.binding if self.barrier and joint.binding == "barrier" else self.binding(found, terms)
        return replace(
            joint,
            seconds=seconds,
            binding=binding,
            terms=terms,
            pinned_params=int(self.params(found, self.p)),
            streamed_params=int(self.params(found, self.q)),
            method="fluid LP",
        )

    def params(self, found: Solution, parts: Expression) -> float:
        """In these parts of the chunks."""
        return float(found.of(parts) @ self.facts.params)

    def busy(self, found: Solution) -> dict[str, float]:
        """Seconds of work over the iteration."""
        facts = self.facts
        up, down = (float(found.of(self._in_all(seconds))[0]) for seconds in self._link_s())
        updated = float(found.of(self.adam.upto)[-1])
        moved = up * facts.up + down * facts.down + facts.adam_traffic * updated
        moved += 2 * sum(stash.bytes for stash in facts.workload.stashes) / facts.unit
        up, down = up + self.stash_up_s, down + self.stash_down_s
        work = {
            "compute": facts.compute_s
            + float(found.of(self.p + self.q) @ facts.gpu_adam_s)
            + float(found.of(self._in_all(self.gpu_adds))[0]),
            "adam": facts.adam_s * updated + float(found.of(self._in_all(self.adds))[0]),
            "h2d": up,
            "d2h": down,
            "dram": moved / facts.dram,
        }
        if not facts.duplex:
            work["link"] = up + down
        return work

    def binding(self, found: Solution, terms: Mapping[str, float]) -> str:
        work = self.busy(found)
        top = max(work.values())
        return next(name for name in terms if work.get(name, 0.0) >= top * (1 - 1e-4))
