"""The bound for all three modes at once: a small linear program with pinned and streamed parameters as two reals.

[Note: the joint bound] Of E trainable parameters with a gradient, x have their states on the gpu for ever ("pinned"),
y have them there for their update only ("streamed": Adam on the gpu, states up before it and down after it), the rest
has CPU Adam. Nothing says that a chunk is all of one kind: one with some of its state lists resident counts as part of
each. s = x + y. A list that is on the gpu throughout takes its bytes at every moment; one that is ever dropped crosses
the link both ways each iteration. Notation as in [Note: the bound] of pinned.py (w: bytes of the working list a
parameter, v: of the states). What any legal schedule keeps:

- room: v x <= room_t - K_t at every moment t.
- compute: all moments + s * traffic / HBM. adam: (E - s) / R, and accumulation on the host (below).
- windows, eager and behind a barrier: those of pinned.py with s in place of x.
- the border: during the last moments every gradient is final and no parameter is read any more. Of what is updated on
  the gpu, w bytes a parameter (the gradient, or the new values) are on the gpu then, `kept` in all, or have gone down
  before and come up after. Frozen chunks are kept (`frozen_kept`) or come up again. kept + frozen_kept + v x <= room.
- the compute queue does all steps of an iteration, its updates too, before the first moment of the next. So whatever
  is read from a moment m (before any gradient is final) on, and all states of what is updated on the gpu, is there at m
  or comes up later: T >= seconds before m + (bytes read from m on + v s - room_m) / rate. Behind a barrier the updates
  come between two iterations: what they need and is not there at the end of the last moment comes up before the next
  one begins, and what then is too much for that one's room has gone down: T >= all moments + (v s + w s - room) / rate;
  without a barrier the latter holds from the first final gradient on.
- border windows: of the chunks J_j what is not kept goes down and comes up between the end of b_j and the next f_j:
  T >= span_j + (bytes(J_j) - kept) / rate.
- barrier, streamed: when the last moment ends at most room - v x bytes of chunks are on the gpu; of the chunks first
  read up to moment f_j all other parameters, and the states of those streamed, come up before the next f_j.
- h2d: (E - s) w + (w s - kept) + frozen not kept + what each turn cannot keep + v y + gradients.
- d2h: gradients + (w s - kept) + v y.
- gradients of U > 1 micro-batches: of each parameter they either add up on the gpu (a list of 4 bytes; with U = 2 the
  first may wait in a list of w bytes), held from one backward pass to the next or sent down and up in between, and then
  go down once (4 bytes) if Adam is the CPU's; or each goes down (w bytes) and all but two (of CPU Adam with clipping:
  all) are added on the host; Adam on the gpu then needs the sum up (4 bytes). How much of each is free.
- stashes: as in pinned.py, on h2d, d2h, link and dram. Those whose way up begins behind a moment come up behind it too,
  beside what is read from there on (the compute queue row).
- link, dram: as in pinned.py, of these bytes. A copy's latency counts, by bytes, as in the largest list it could be of.

The least T over all of these is a linear program, but for one thing: a window whose chunks may all be updated on the
gpu (params(J_j) <= s) bounds nothing. Without the windows the least T is convex in s; the windows' term only falls with
s. So the best s is where the two meet, and which windows hold there is found by halving (`_best_windows`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pstar_sim.bounds.facts import NAMES, Bound, BoundFacts
from pstar_sim.bounds.linear import Program
from pstar_sim.core.layout import Layout
from pstar_sim.cost import CostModel
from pstar_sim.workload.workload import Workload

__all__ = ["joint_bound", "rate_with_latency"]

Array = NDArray[np.float64]
Terms = list[tuple[int, float]]


def rate_with_latency(rate: float, latency_s: float, largest_bytes: float) -> float:
    """Bytes per second that no row of copies of at most `largest_bytes` each exceeds."""
    return 1 / (1 / rate + latency_s / largest_bytes) if largest_bytes > 0 else rate


@dataclass
class _Family:
    """Windows with one slope: T >= value - slope * `on` ("s" or "kept"), for those that end after s."""

    name: str
    on: str
    slope: float
    ends: Array
    values: Array
    best: Array = field(init=False)

    def __post_init__(self) -> None:
        order = np.argsort(self.ends, kind="stable")
        self.ends, self.values = self.ends[order], self.values[order]
        self.best = np.maximum.accumulate(self.values[::-1])[::-1]

    def value(self, s: float) -> float | None:
        """The largest value of the windows that end after s."""
        k = int(np.searchsorted(self.ends, s, side="right"))
        return float(self.best[k]) if k < len(self.best) else None


def joint_bound(
    workload: Workload, layout: Layout, facts: BoundFacts, cost: CostModel, *, barrier: bool, clip: bool, x_limit: float
) -> Bound:
    """[Note: the joint bound]. x_limit: at most so many pinned parameters. Raises linear.Unsolved if HiGHS fails."""
    return _Joint(workload, layout, facts, cost, barrier, clip, x_limit).bound()


@dataclass(frozen=True, kw_only=True)
class _Solved:
    """proved: what the dual solution proves, in parts of the scale. terms: seconds by name, of each name the largest.
    pinned, streamed: x and y of the note, in parameters."""

    proved: float
    terms: Mapping[str, float]
    pinned: float
    streamed: float

    @property
    def on_gpu(self) -> float:
        """s = x + y."""
        return self.pinned + self.streamed


class _Joint:
    def __init__(
        self,
        workload: Workload,
        layout: Layout,
        facts: BoundFacts,
        cost: CostModel,
        barrier: bool,
        clip: bool,
        x_limit: float,
    ) -> None:
        self.facts, self.cost, self.clip = facts, cost, clip
        self.u = workload.micro_batches if facts.job.every_batch else 1
        self.v = float(workload.optimizer.states_bytes_per_param)
        self.total = float(facts.params.sum())
        self.bytes = float(facts.bytes.sum())
        self.frozen = facts.frozen_bytes
        self.w, self.most_w = float(facts.least_w), float(facts.most_w)
        link = cost.link
        width = max([self.most_w, 4.0, *(float(each) for _, each in layout.state_bytes)])
        largest = max((c.numel for c in layout.chunks), default=0) * width
        self.up = rate_with_latency(link.h2d_bytes_per_s, link.latency_s, largest)
        self.down = rate_with_latency(link.d2h_bytes_per_s, link.latency_s, largest)
        self.per_param_s = facts.traffic / cost.adam_bytes_per_s
        self.add_bytes = 8.0 + self.w
        beside = facts.room - facts.read_bytes
        fits = float(beside.min()) / self.v if self.v else np.inf
        self.x_max = float(np.clip(min(fits, x_limit), 0.0, self.total))
        self.late_room = max(0.0, float(facts.room[facts.late :].min())) if facts.late < facts.moments else np.inf
        self.end_room = max(0.0, float(facts.room[-1]))
        until = int(facts.final.min()) + 1 if len(facts.final) else 0
        needed = facts.read_from()
        waits = facts.clock[:until] + (needed - facts.room)[:until] / self.up + facts.stash_up_from_s[:until]
        self.turn_s = float(waits.max()) if until else 0.0
        self.turns = [(size, room, at) for size, room, at in facts.turns() if size > 0]
        self.families = self._families(barrier) if self.total else []
        self.barrier_spans = self._barrier_spans() if barrier and self.total else None
        ends = [f.ends[np.isfinite(f.ends)] for f in self.families]
        self.ends: Array = np.unique(np.concatenate([[0.0], *ends]))
        self.scale = max(
            float(facts.clock[-1]),
            self.total * self.per_param_s * 1e-3,
            (self.bytes + self.frozen) / self.up * 1e-3,
            1e-12,
        )

    # -- windows --

    def _families(self, barrier: bool) -> list[_Family]:
        facts, w = self.facts, self.most_w
        found: list[_Family] = []
        everything = np.ones(len(facts.params), dtype=bool)
        groups = [everything, ~facts.small] if facts.small.any() and not facts.small.all() else [everything]
        rows: dict[tuple[str, str, float], list[tuple[Array, Array]]] = {}
        for members in groups:
            first, final = facts.first[members], facts.final[members]
            params, size = facts.params[members], facts.bytes[members]
            down, up, adam = facts.down_s[members], facts.up_s[members], facts.adam_s[members]
            nested = (first[None, :] <= first[:, None]) & (final[None, :] >= final[:, None])
            spans = np.maximum(0.0, facts.clock[final + 1] - facts.clock[first])
            inside_p, inside_b = nested @ params, nested @ size
            least = {k: np.where(nested, row[None, :], np.inf).min(axis=1) for k, row in
                     (("down", down), ("up", up), ("adam", adam))}  # fmt: skip
            a, h, d = self.per_param_s, w / self.up, w / self.down
            for key, values in (
                (("adam", "s", a), spans + inside_p * a + least["down"] + least["up"]),
                (("h2d", "s", h), spans + inside_b / self.up + least["down"] + least["adam"]),
                (("d2h", "s", d), spans + inside_b / self.down + least["adam"] + least["up"]),
            ):
                rows.setdefault(key, []).append((inside_p, values))
            endless = np.full(len(spans), np.inf)
            rows.setdefault(("h2d", "kept", 1 / self.up), []).append((endless, spans + inside_b / self.up))
            rows.setdefault(("d2h", "kept", 1 / self.down), []).append((endless, spans + inside_b / self.down))
            if barrier:
                inside = first[None, :] <= first[:, None]
                to_end = facts.clock[-1] - facts.clock[first]
                after_p, after_b = inside @ params, inside @ size
                least_up = np.where(inside, up[None, :], np.inf).min(axis=1)
                least_adam = np.where(inside, adam[None, :], np.inf).min(axis=1)
                rows.setdefault(("barrier", "s", a), []).append((after_p, to_end + after_p * a + least_up))
                rows.setdefault(("barrier", "s", h), []).append((after_p, to_end + after_b / self.up + least_adam))
        for (name, on, slope), parts in rows.items():
            ends = np.concatenate([p for p, _ in parts])
            found.append(_Family(name, on, slope, ends, np.concatenate([v for _, v in parts])))
        return found

    def _barrier_spans(self) -> tuple[Array, Array, Array]:
        """Of each chunk j: seconds from f_j to the end of the iteration; bytes and parameters first read up to f_j."""
        facts = self.facts
        inside = facts.first[None, :] <= facts.first[:, None]
        return facts.clock[-1] - facts.clock[facts.first], inside @ facts.bytes, inside @ facts.params

    # -- the program --

    def _solve(self, k: int) -> _Solved:
        """With s >= ends[k] and the windows that end after ends[k]."""
        return _JointProgram(self, float(self.ends[k])).solve()

    def _best_windows(self) -> _Solved:
        """The best s lies in one [ends[k], ends[k + 1]]. With the windows of k and s >= ends[k]: a solution beyond
        ends[k + 1] says it lies further up; one stopped by s >= ends[k] that it lies further down, or here."""
        best = self._solve(0)
        low = 0
        k = high = int(np.searchsorted(self.ends, best.on_gpu * (1 + 1e-9), side="right")) - 1
        while low < high:
            k = min(max(k, low + 1), high)
            found = self._solve(k)
            s = found.on_gpu
            if found.proved < best.proved:
                best = found
            stopped = s <= self.ends[k] * (1 + 1e-9)
            if stopped:
                high = k - 1
                k -= 1
            elif k < high and s > self.ends[k + 1] * (1 + 1e-9):
                low = k
                k = (low + high + 1) // 2
            else:
                break
        return best

    def bound(self) -> Bound:
        found = self._best_windows()
        seconds = found.proved * self.scale
        ordered = {name: found.terms[name] for name in NAMES if name in found.terms}
        top = max(ordered.values())
        binding = next(name for name, value in ordered.items() if value >= top * (1 - 1e-6))
        return Bound(
            method="joint LP",
            seconds=max(seconds, float(self.facts.clock[-1])),
            binding=binding,
            terms=ordered,
            pinned_params=int(found.pinned),
            max_pinned_params=int(self.x_max),
            streamed_params=int(found.streamed),
        )


@dataclass(frozen=True, kw_only=True)
class _Sums:
    """Gradients of several micro-batches, cpu + cpu_sum + gpu_sum + gpu = 1, by who updates and where they add up.
    Variables: of those that add up on the gpu the part that Adam on the CPU updates, and that on the gpu; and what is
    sent down and up between two backward passes, from that before micro-batch 1 on. bytes_each: of a held sum."""

    cpu: int
    gpu: int
    spilt: range
    bytes_each: float


@dataclass(frozen=True, kw_only=True)
class _Amount:
    """A constant and what comes on top of it, of the variables."""

    constant: float
    terms: Terms


class _JointProgram:
    """The program for one choice of windows: those that end after s_min, and s >= s_min. Each method is a kind of rows
    of [Note: the joint bound]. Parameters are counted in parts of all (`unit`), bytes in parts of `size`, seconds in
    parts of the job's scale."""

    def __init__(self, job: _Joint, s_min: float) -> None:
        self.job, self.s_min = job, s_min
        self.unit = max(job.total, 1.0)
        self.size = max(job.bytes + job.frozen, 1.0)
        p = self.program = Program()
        self.t = p.variable(0.0, cost=1.0)
        self.x = p.variable(job.x_max / self.unit)
        self.y = p.variable(job.total / self.unit)
        self.kept = p.variable(min(job.bytes, job.late_room) / self.size)
        self.frozen_kept = p.variable(min(job.frozen, job.late_room) / self.size)
        self.terms: list[tuple[str, _Amount]] = []
        self._parts_and_border()
        self.sums = self._sums() if job.u > 1 and job.total else None
        self.again = self._turns()
        self.shift = self._shift()
        adds = self._adds()
        self._compute_and_adam(adds)
        self._windows()
        if job.total:
            self._turn_of_the_queue()
        if job.barrier_spans is not None:
            self._barrier(*job.barrier_spans)
        self._bytes(adds)

    def _s(self, factor: float) -> Terms:
        """factor * s."""
        return [(self.x, factor), (self.y, factor)]

    def _term(self, name: str, constant: float, terms: Terms) -> None:
        """T >= constant + terms, in seconds."""
        scale = self.job.scale
        self.terms.append((name, _Amount(constant=constant, terms=terms)))
        self.program.at_most([*((c, f / scale) for c, f in terms), (self.t, -1.0)], -constant / scale)

    # -- what fits --

    def _parts_and_border(self) -> None:
        """x and y are parts of all; what is kept over the border is of s, and has room."""
        p, job, unit, size = self.program, self.job, self.unit, self.size
        p.at_most(self._s(1.0), job.total / unit)
        if self.s_min:
            p.at_most(self._s(-1.0), -min(self.s_min, job.total) / unit)
        p.at_most([(self.kept, size), *self._s(-job.most_w * unit)], 0.0)
        if np.isfinite(job.late_room):
            row = [(self.kept, 1.0), (self.frozen_kept, 1.0), (self.x, job.v * unit / size)]
            p.at_most(row, job.late_room / size)

    def _sums(self) -> _Sums:
        """Gradients of several micro-batches, and the room that sums have from one backward pass to the next."""
        p, job, facts, unit = self.program, self.job, self.job.facts, self.unit
        all_of_it = job.total / unit
        cpu, gpu = p.variable(all_of_it), p.variable(all_of_it)
        p.at_most([(cpu, 1.0), *self._s(1.0)], all_of_it)
        p.at_most([(gpu, 1.0), *self._s(-1.0)], 0.0)
        if job.u == 2:
            p.at_most([(gpu, -1.0), *self._s(1.0)], 0.0)
        bytes_each = 4.0 if job.u > 2 else min(job.w, 4.0)
        sums = _Sums(cpu=cpu, gpu=gpu, spilt=p.variables(job.u - 1, all_of_it), bytes_each=bytes_each)
        for batch, spill in enumerate(sums.spilt, start=1):
            low, high = facts.between(batch)
            if low < high:
                room = max(0.0, float((facts.room - facts.read_bytes)[low:high].min()))
                row = [(cpu, bytes_each), (gpu, bytes_each), (spill, -bytes_each), (self.x, job.v)]
                p.at_most([(c, f * unit / self.size) for c, f in row], room / self.size)
        return sums

    def _turns(self) -> list[int]:
        """Per turn: the bytes that it cannot keep beside states and sums."""
        p, job, unit, size = self.program, self.job, self.unit, self.size
        again: list[int] = []
        for turn_bytes, room, at in job.turns:
            h = p.variable((turn_bytes + abs(room) + (job.v + 8) * unit) / size)
            again.append(h)
            row = [(self.x, job.v * unit), (h, -size)]
            if self.sums is not None:
                each = self.sums.bytes_each * unit
                for batch, spill in enumerate(self.sums.spilt, start=1):
                    low, high = job.facts.between(batch)
                    if low <= at < high:
                        row += [(self.sums.cpu, each), (self.sums.gpu, each), (spill, -each)]
            p.at_most([(c, f / size) for c, f in row], (room - turn_bytes) / size)
        return again

    def _shift(self) -> int:
        """Parameters updated on the gpu that do not stay there over the border."""
        p, job, size = self.program, self.job, self.size
        shift = p.variable(job.bytes / size)
        p.at_most([*self._s(job.w * self.unit / size), (self.kept, -1.0), (shift, -1.0)], 0.0)
        return shift

    # -- seconds --

    def _adds(self) -> _Amount:
        """Parameters added on the host, each time counted."""
        job, unit, sums = self.job, self.unit, self.sums
        if sums is None:
            return _Amount(constant=0.0, terms=[])
        each = job.u if job.clip else job.u - 2
        own = [*self._s(-each * unit), (sums.cpu, -each * unit)]
        return _Amount(constant=each * job.total, terms=[*own, *((c, (job.u - 2) * f) for c, f in self._on_gpu(sums))])

    def _on_gpu(self, sums: _Sums) -> Terms:
        """Parameters updated on the gpu whose gradients are added on the host."""
        return [*self._s(self.unit), (sums.gpu, -self.unit)]

    def _compute_and_adam(self, adds: _Amount) -> None:
        job, facts, cost, unit = self.job, self.job.facts, self.job.cost, self.unit
        self._term("compute", float(facts.clock[-1]), self._s(facts.traffic / cost.gpu.hbm_bytes_per_s * unit))
        if job.total:
            a = job.per_param_s
            add_s = job.add_bytes / cost.adam_bytes_per_s
            cpu = [*self._s(-a * unit), *((c, f * add_s) for c, f in adds.terms)]
            self._term("adam", job.total * a + adds.constant * add_s, cpu)

    def _windows(self) -> None:
        for family in self.job.families if self.job.total else ():
            value = family.value(self.s_min)
            if value is not None:
                kept = [(self.kept, -family.slope * self.size)]
                self._term(family.name, value, self._s(-family.slope * self.unit) if family.on == "s" else kept)

    def _turn_of_the_queue(self) -> None:
        """The compute queue does an iteration's updates before the first moment of the next one."""
        job, facts, unit = self.job, self.job.facts, self.unit
        self._term("h2d", job.turn_s, self._s(job.v * unit / job.up))
        every = (job.v + job.w) * unit
        after_s = float(facts.clock[int(facts.final.min()) + 1])
        first_room = max(0.0, float(facts.room[0]))
        self._term("d2h", after_s - first_room / job.down, self._s(every / job.down))

    def _barrier(self, spans: Array, after_b: Array, after_p: Array) -> None:
        """Arguments: see `_Joint._barrier_spans`."""
        job, facts, unit = self.job, self.job.facts, self.unit
        every = (job.v + job.w) * unit
        for rate, room in ((job.up, job.end_room), (job.down, max(0.0, float(facts.room[0])))):
            self._term("barrier", float(facts.clock[-1]) - room / rate, self._s(every / rate))
        pinned = job.v * unit / job.up
        self._term("barrier", float((spans + (after_b - job.end_room) / job.up).max()), [(self.x, pinned)])
        others = after_b - job.end_room - job.v * (job.total - after_p)
        self._term("barrier", float((spans + others / job.up).max()), self._s(pinned))

    def _bytes(self, adds: _Amount) -> None:
        """h2d, d2h, where they share it the link, and host DRAM."""
        job, facts, cost = self.job, self.job.facts, self.job.cost
        up, down = self._up(), self._down()
        up_s = up.constant / job.up + facts.stash_up_s
        down_s = down.constant / job.down + facts.stash_down_s
        self._term("h2d", up_s, [(c, f / job.up) for c, f in up.terms])
        self._term("d2h", down_s, [(c, f / job.down) for c, f in down.terms])
        if not cost.link.duplex:
            both = [*((c, f / job.up) for c, f in up.terms), *((c, f / job.down) for c, f in down.terms)]
            self._term("link", up_s + down_s, both)
        dram = cost.machine.host.dram_bytes_per_s
        traffic = up.constant + down.constant + job.total * facts.traffic + adds.constant * job.add_bytes
        traffic += 2 * facts.stash_bytes
        updates = self._s(-facts.traffic * self.unit)
        moved = [*up.terms, *down.terms, *updates, *((c, f * job.add_bytes) for c, f in adds.terms)]
        self._term("dram", traffic / dram, [(c, f / dram) for c, f in moved])

    def _up(self) -> _Amount:
        """Bytes that come up."""
        job, unit, size = self.job, self.unit, self.size
        terms = [*self._s(-job.most_w * unit), (self.shift, size), (self.frozen_kept, -size), (self.y, job.v * unit)]
        terms += [(h, size) for h in self.again]
        if self.sums is not None:
            terms += [(spill, self.sums.bytes_each * unit) for spill in self.sums.spilt]
            terms += [(c, 4 * f) for c, f in self._on_gpu(self.sums)]
        return _Amount(constant=job.bytes + job.frozen, terms=terms)

    def _down(self) -> _Amount:
        """Bytes that go down."""
        job, unit, u = self.job, self.unit, self.job.u
        terms = [*self._s(-job.most_w * unit * u), (self.shift, self.size), (self.y, job.v * unit)]
        if self.sums is not None:
            terms += [(self.sums.cpu, (4.0 - job.most_w * u) * unit)]
            terms += [(spill, self.sums.bytes_each * unit) for spill in self.sums.spilt]
            terms += [(c, (u - 2) * job.w * f) for c, f in self._on_gpu(self.sums)]
        return _Amount(constant=job.bytes * u, terms=terms)

    # -- the answer --

    def solve(self) -> _Solved:
        """Raises linear.Unsolved if HiGHS fails."""
        p = self.program
        p.upper[self.t] = max(
            (row.constant + sum(max(f * p.lower[c], f * p.upper[c]) for c, f in row.terms)) / self.job.scale
            for _, row in self.terms
        )
        found = p.solve()
        terms: dict[str, float] = {}
        for name, row in self.terms:
            seconds = row.constant + sum(f * float(found.at[c]) for c, f in row.terms)
            terms[name] = max(terms.get(name, 0.0), seconds)
        x, y = float(found.at[self.x]) * self.unit, float(found.at[self.y]) * self.unit
        return _Solved(proved=found.proved, terms=terms, pinned=x, streamed=y)
