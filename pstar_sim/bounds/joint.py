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

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pstar_sim.bounds.facts import NAMES, Bound, BoundFacts
from pstar_sim.bounds.linear import Program, Solution
from pstar_sim.core.layout import Layout
from pstar_sim.cost import CostModel
from pstar_sim.workload.workload import Workload

__all__ = ["joint_bound", "rate_with_latency"]

Array = NDArray[np.float64]


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
        self.u = workload.micro_batches if facts.every_batch else 1
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

    def _solve(self, k: int) -> tuple[Solution, dict[str, float], float, float]:
        """With s >= ends[k] and the windows that end after ends[k]: solution, terms by name, x, y."""
        facts, cost, u = self.facts, self.cost, self.u
        s_min = float(self.ends[k])
        total, scale = self.total, self.scale
        unit = max(total, 1.0)  # parameters are counted in parts of all
        size = max(self.bytes + self.frozen, 1.0)  # bytes too
        p = Program()
        t = p.variable(0.0, cost=1.0)
        x = p.variable(self.x_max / unit)
        y = p.variable(total / unit)
        kept = p.variable(min(self.bytes, self.late_room) / size)
        frozen_kept = p.variable(min(self.frozen, self.late_room) / size)
        p.at_most([(x, 1.0), (y, 1.0)], total / unit)
        if s_min:
            p.at_most([(x, -1.0), (y, -1.0)], -min(s_min, total) / unit)
        p.at_most([(kept, size), (x, -self.most_w * unit), (y, -self.most_w * unit)], 0.0)
        if np.isfinite(self.late_room):
            p.at_most([(kept, 1.0), (frozen_kept, 1.0), (x, self.v * unit / size)], self.late_room / size)

        # gradients: cpu + cpu_sum + gpu_sum + gpu = 1, by who updates and where they add up
        held_w = 4.0 if u > 2 else min(self.w, 4.0)
        cpu_sum = gpu_sum = None
        spilt: list[int] = []
        if u > 1 and total:
            cpu_sum, gpu_sum = p.variable(total / unit), p.variable(total / unit)
            p.at_most([(cpu_sum, 1.0), (x, 1.0), (y, 1.0)], total / unit)
            p.at_most([(gpu_sum, 1.0), (x, -1.0), (y, -1.0)], 0.0)
            if u == 2:
                p.at_most([(gpu_sum, -1.0), (x, 1.0), (y, 1.0)], 0.0)
            spilt = list(p.variables(u - 1, total / unit))

            for batch, spill in enumerate(spilt, start=1):
                low, high = facts.between(batch)
                if low < high:
                    room = max(0.0, float((facts.room - facts.read_bytes)[low:high].min()))
                    row = [(cpu_sum, held_w), (gpu_sum, held_w), (spill, -held_w), (x, self.v)]
                    p.at_most([(c, f * unit / size) for c, f in row], room / size)

        again: list[int] = []
        for turn_bytes, room, at in self.turns:
            h = p.variable((turn_bytes + abs(room) + (self.v + 8) * unit) / size)
            again.append(h)
            row = [(x, self.v * unit), (h, -size)]
            for batch, spill in enumerate(spilt, start=1):
                low, high = facts.between(batch)
                if low <= at < high and cpu_sum is not None and gpu_sum is not None:
                    row += [(cpu_sum, held_w * unit), (gpu_sum, held_w * unit), (spill, -held_w * unit)]
            p.at_most([(c, f / size) for c, f in row], (room - turn_bytes) / size)

        # bytes each way as (constant, terms)
        states = self.v * unit
        shift = p.variable(self.bytes / size)  # parameters updated on the gpu that do not stay there over the border
        p.at_most([(x, self.w * unit / size), (y, self.w * unit / size), (kept, -1.0), (shift, -1.0)], 0.0)
        h2d_const = self.bytes + self.frozen
        h2d = [(x, -self.most_w * unit), (y, -self.most_w * unit), (shift, size), (frozen_kept, -size), (y, states)]
        h2d += [(h, size) for h in again]
        d2h_const = self.bytes * u
        d2h = [(x, -self.most_w * unit * u), (y, -self.most_w * unit * u), (shift, size), (y, states)]
        adds_const, adds = 0.0, list[tuple[int, float]]()
        if cpu_sum is not None and gpu_sum is not None:
            d2h += [(cpu_sum, (4.0 - self.most_w * u) * unit)]
            spills = [(spill, held_w * unit) for spill in spilt]
            h2d, d2h = h2d + spills, d2h + spills
            each = u if self.clip else u - 2
            adds_const, adds = each * total, [(x, -each * unit), (y, -each * unit), (cpu_sum, -each * unit)]
            on_gpu = ((x, unit), (y, unit), (gpu_sum, -unit))
            h2d += [(c, 4 * f) for c, f in on_gpu]
            d2h += [(c, (u - 2) * self.w * f) for c, f in on_gpu]
            adds += [(c, (u - 2) * f) for c, f in on_gpu]
        add_bytes = 8.0 + self.w

        rows: list[tuple[str, float, list[tuple[int, float]]]] = []

        def term(name: str, const: float, terms: list[tuple[int, float]]) -> None:
            rows.append((name, const, terms))
            p.at_most([*((c, f / scale) for c, f in terms), (t, -1.0)], -const / scale)

        gpu_s = facts.traffic / cost.gpu.hbm_bytes_per_s * unit
        term("compute", float(facts.clock[-1]), [(x, gpu_s), (y, gpu_s)])
        if total:
            a = self.per_param_s
            add_s = add_bytes / cost.adam_bytes_per_s
            cpu = [(x, -a * unit), (y, -a * unit), *((c, f * add_s) for c, f in adds)]
            term("adam", total * a + adds_const * add_s, cpu)
            for family in self.families:
                value = family.value(s_min)
                if value is not None:
                    on = [(x, -family.slope * unit), (y, -family.slope * unit)] if family.on == "s" else [
                        (kept, -family.slope * size)]  # fmt: skip
                    term(family.name, value, on)
        if total:
            term("h2d", self.turn_s, [(x, self.v * unit / self.up), (y, self.v * unit / self.up)])
            every = (self.v + self.w) * unit
            after_s = float(facts.clock[int(facts.final.min()) + 1])
            first_room = max(0.0, float(facts.room[0]))
            term("d2h", after_s - first_room / self.down, [(x, every / self.down), (y, every / self.down)])
        if self.barrier_spans is not None:
            every = (self.v + self.w) * unit
            for rate, room in ((self.up, self.end_room), (self.down, max(0.0, float(facts.room[0])))):
                term("barrier", float(facts.clock[-1]) - room / rate, [(x, every / rate), (y, every / rate)])
            spans, after_b, after_p = self.barrier_spans
            pinned = self.v * unit / self.up
            term("barrier", float((spans + (after_b - self.end_room) / self.up).max()), [(x, pinned)])
            others = after_b - self.end_room - self.v * (total - after_p)
            term("barrier", float((spans + others / self.up).max()), [(x, pinned), (y, pinned)])
        h2d_s = h2d_const / self.up + facts.stash_up_s
        d2h_s = d2h_const / self.down + facts.stash_down_s
        term("h2d", h2d_s, [(c, f / self.up) for c, f in h2d])
        term("d2h", d2h_s, [(c, f / self.down) for c, f in d2h])
        if not cost.link.duplex:
            both = [*((c, f / self.up) for c, f in h2d), *((c, f / self.down) for c, f in d2h)]
            term("link", h2d_s + d2h_s, both)
        dram = cost.machine.host.dram_bytes_per_s
        traffic = h2d_const + d2h_const + total * facts.traffic + adds_const * add_bytes + 2 * facts.stash_bytes
        moved = [
            *h2d,
            *d2h,
            (x, -facts.traffic * unit),
            (y, -facts.traffic * unit),
            *((c, f * add_bytes) for c, f in adds),
        ]
        term("dram", traffic / dram, [(c, f / dram) for c, f in moved])

        p.upper[t] = max(
            (const + sum(max(f * p.lower[c], f * p.upper[c]) for c, f in terms)) / scale for _, const, terms in rows
        )
        found = p.solve()
        terms: dict[str, float] = {}
        for name, const, parts in rows:
            seconds = const + sum(f * float(found.at[c]) for c, f in parts)
            terms[name] = max(terms.get(name, 0.0), seconds)
        return found, terms, float(found.at[x]) * unit, float(found.at[y]) * unit

    def _best_windows(self) -> tuple[Solution, dict[str, float], float, float]:
        """The best s lies in one [ends[k], ends[k + 1]]. With the windows of k and s >= ends[k]: a solution beyond
        ends[k + 1] says it lies further up; one stopped by s >= ends[k] that it lies further down, or here."""
        best = self._solve(0)
        low = 0
        k = high = int(np.searchsorted(self.ends, (best[2] + best[3]) * (1 + 1e-9), side="right")) - 1
        while low < high:
            k = min(max(k, low + 1), high)
            found = self._solve(k)
            s = found[2] + found[3]
            if found[0].proved < best[0].proved:
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
        found, terms, x, y = self._best_windows()
        seconds = found.proved * self.scale
        ordered = {name: terms[name] for name in NAMES if name in terms}
        top = max(ordered.values())
        binding = next(name for name, value in ordered.items() if value >= top * (1 - 1e-6))
        return Bound(
            method="joint LP",
            seconds=max(seconds, float(self.facts.clock[-1])),
            binding=binding,
            terms=ordered,
            pinned_params=int(x),
            max_pinned_params=int(self.x_max),
            streamed_params=int(y),
        )
