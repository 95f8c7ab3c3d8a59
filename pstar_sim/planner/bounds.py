"""Closed-form lower bound on the seconds of one steady iteration, for any legal schedule of this setting.

Knows workload, machine, settings and layout; knows no plan. Update windows, room and bytes for chunks of unequal size,
several micro-batches, frozen parameters, a barrier and shared DRAM. What follows is the bound where no chunk is
streamed (`stream=False`); joint.py adds streaming to it, and fluid.py is the finer bound in time.

[Note: the bound] Let x be the trainable parameters whose optimizer states stay on the gpu ("pinned"; their Adam runs
there and their working list stays too), relaxed to a real number 0 <= x <= x_max. Every other trainable parameter that
gets a gradient has, each iteration, one copy down, one CPU Adam and one copy up. With E such parameters in all, w bytes
each in the working list, v bytes of states (plus 4 for the accumulated gradient when there are several micro-batches),
C the gpu budget, n_t the tide and K_t the payload bytes that moment t reads:

- x_max: at every moment v x + max(w x, K_t) <= C - n_t.
- compute: all moments, plus the gpu's Adam: sum c_t + x * traffic / HBM.
- adam: (E - x) / R. And the update windows: chunk j is first read in moment f_j, its gradient is final after b_j. The
  chunks J_j = {i: f_i <= f_j, b_i >= b_j} have all of copy down, Adam and copy up between the end of b_j and the next
  start of f_j, which is T - span_j long (span_j = compute from f_j to the end of b_j). If not all of J_j is pinned:
  T >= span_j + (params(J_j) - x) / R + the shortest copy down + the shortest copy up. (Before the first Adam of the
  window something has come down, after the last one something goes up.)
- d2h, h2d windows: the same with the copies as the serial resource: span_j + (bytes(J_j) - w x) / rate + the shortest
  Adam + the shortest copy the other way.
- barrier (when no Adam may start before the optimizer step): T >= span from f_j to the end of the iteration +
  (params(f_i <= f_j) - x) / R + the shortest copy up; and likewise with the copies up as the serial resource.
- d2h bytes: (E - x) w over the link's rate: each gradient comes down at least once.
- h2d bytes: each updated parameter comes up once: (E - x) w. And for moments m_1 < m_2 < ... (the turns of the
  iteration: FWD to BWD of every micro-batch, BWD to FWD between two): what is read in (m_k, m_k+1] and has been read by
  m_k is S_k bytes, of which at most C - n - (v + w) x unpinned ones are resident during m_k; the rest,
  S_k + v x - (C - n), has to be copied in after m_k. These are not copies of the first kind: those begin after the
  chunk's gradient is final and before its first read.
- stashes: whatever the plan, each goes down once and comes up once an iteration, on the same two queues, beside all of
  the above: none of it is a copy of a chunk, and the tide does not count a stash while it is away. So its seconds each
  way are added to d2h bytes, h2d bytes and link, its bytes twice to dram; not to windows, which it may lie outside of.
- link (half duplex): both kinds of bytes one after the other.
- dram: the copies' bytes and the CPU Adam's traffic over the host's DRAM bandwidth.

The bound is the least over x of the largest term; all terms are linear in x between the points where a window is
pinned entirely or a turn begins to overflow, so it is found exactly. What it leaves out (latencies except in "shortest
copy", padding, whole chunks, accumulation on the host, loss of overlap) only makes real schedules slower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import Layout
from pstar_sim.core.plan import Settings
from pstar_sim.cost import CostModel
from pstar_sim.errors import PlanError
from pstar_sim.planner.stash_bound import stash_bound_s
from pstar_sim.units import format_bytes
from pstar_sim.workload.workload import DTYPE_BYTES, Phase, Workload, activations_text

__all__ = ["NAMES", "Bound", "Facts", "bound_reason", "lower_bound", "relative_to"]

Array = NDArray[np.float64]
STASHES = "stashes"


@dataclass(frozen=True, kw_only=True)
class Bound:
    """seconds: no schedule of this setting is faster. binding: its largest term ("compute", "adam", "barrier", "h2d",
    "d2h", "link", "dram", "stashes"; a tie goes to the first of these). terms: every term at the best numbers of
    parameters whose states stay on the gpu (`pinned_params`) or visit it (`streamed_params`). max_pinned_params: how
    many would fit. method: "closed form" or "fluid LP". notes: what went wrong on the way, for people."""

    seconds: float
    binding: str
    terms: Mapping[str, float]
    pinned_params: int
    max_pinned_params: int
    streamed_params: int = 0
    method: str = "closed form"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Line:
    """A term value + slope * x that holds for x in [from_x, until_x)."""

    name: str
    value: float
    slope: float
    from_x: float = -np.inf
    until_x: float = np.inf


def lower_bound(
    workload: Workload,
    machine: Machine,
    settings: Settings,
    layout: Layout,
    *,
    max_pinned: int | None = None,
    stream: bool = True,
    cost: CostModel | None = None,
) -> Bound:
    """The bound for every legal schedule, [Note: the joint bound] of joint.py; stream=False: for schedules that stream
    no chunk, [Note: the bound]. max_pinned: at most so many parameters beside the small chunks' own have their states
    on the gpu for ever (0 with stream=False: "everything by CPU Adam"). A workload that does not fit at all still gets
    a bound, that of x = 0. Raises PlanError, with `bound_reason`, for a machine of several gpus."""
    reason = bound_reason(machine)
    if reason is not None:
        raise PlanError(reason)
    cost = cost or CostModel(workload, machine, layout)
    bound = _without_stashes(workload, machine, settings, layout, cost, max_pinned=max_pinned, stream=stream)
    if workload.stashes:
        seconds = stash_bound_s(workload, cost)
        terms = {**bound.terms, STASHES: seconds}
        bound = replace(bound, terms=terms)
        if seconds > bound.seconds:
            bound = replace(bound, seconds=seconds, binding=STASHES)
    return bound


def _without_stashes(
    workload: Workload,
    machine: Machine,
    settings: Settings,
    layout: Layout,
    cost: CostModel,
    *,
    max_pinned: int | None,
    stream: bool,
) -> Bound:
    """The bound of everything but the waits for stashes ([Note: the bound of stashes] in stash_bound.py)."""
    facts = Facts(workload, machine, layout, cost)
    barrier = settings.barrier(workload.dtype) is not None
    limit = np.inf if max_pinned is None else max_pinned + float(facts.params[facts.small].sum())
    if not stream:
        return _pinned_bound(facts, barrier, limit)
    from pstar_sim.planner.joint import joint_bound
    from pstar_sim.planner.linear import Unsolved

    try:
        return joint_bound(workload, layout, facts, cost, barrier=barrier, clip=settings.clip, x_limit=limit)
    except Unsolved as error:
        seconds = float(facts.clock[-1])
        note = f"the closed form's linear program did not solve ({error}); the bound is that of compute alone"
        return Bound(
            seconds=seconds, binding="compute", terms={"compute": seconds}, pinned_params=0, max_pinned_params=0,
            notes=(note,),
        )  # fmt: skip


def bound_reason(machine: Machine) -> str | None:
    """Why there is no bound for this machine; None where there is one."""
    count = len(machine.ranks)
    if count == 1:
        return None
    return f"{machine.name} has {count} GPUs; what collectives and shared parts cost at least is not in the bound"


def relative_to(workload: Workload, machine: Machine, settings: Settings, layout: Layout) -> str:
    """What a bound is about, in words: of another cost model, chunk size ... nothing is claimed."""
    w = workload
    barrier = settings.barrier(w.dtype)
    return ", ".join(
        (
            f"cost model of {machine.name} ({machine.confidence})",
            f"chunks of {format_bytes(layout.chunk_bytes)}",
            activations_text(w) if w.activations else f"checkpointing {'on' if w.checkpointing else 'off'}",
            f"{w.micro_batches} micro-batch{'es' if w.micro_batches > 1 else ''} of {w.batch}",
            f"Adam behind a barrier ({barrier})" if barrier else "Adam as gradients arrive",
            "modes cpu, pin and stream",
        )
    )


def _pinned_bound(facts: Facts, barrier: bool, limit: float) -> Bound:
    x_max = min(facts.most_pinned(), limit)
    lines = facts.lines(barrier, x_max)
    x, seconds = _least_maximum(lines, x_max)
    terms = {name: 0.0 for name in NAMES if any(line.name == name for line in lines)}
    for line in lines:
        if line.from_x <= x < line.until_x:
            terms[line.name] = max(terms[line.name], line.value + line.slope * x)
    binding = next(name for name in terms if terms[name] >= max(terms.values()) * (1 - 1e-9))
    return Bound(seconds=seconds, binding=binding, terms=terms, pinned_params=int(x), max_pinned_params=int(x_max))


NAMES = ("compute", "adam", "barrier", "h2d", "d2h", "link", "dram")


class Facts:
    """The quantities of the note as arrays: one entry a chunk that gets gradients, or one a moment."""

    def __init__(self, workload: Workload, machine: Machine, layout: Layout, cost: CostModel) -> None:
        self.machine, self.cost = machine, cost
        w, chunk_of = workload, layout.chunk_of
        count = len(layout.chunks)
        self.moments = len(w.moments)
        self.room: Array = machine.gpu_budget_bytes - np.array([m.peak_bytes for m in w.moments], dtype=float)
        self.clock: Array = np.concatenate(([0.0], np.cumsum(cost.moments_s)))
        self.phases = [m.phase for m in w.moments]
        self.micro_batch = [m.micro_batch for m in w.moments]
        reads: list[set[int]] = [set() for _ in range(count)]
        gradient = [-1] * count
        for m, tensors in enumerate(w.reads):
            for t in tensors:
                reads[chunk_of[t]].add(m)
        for m, tensors in enumerate(w.gradients):
            for t in tensors:
                gradient[chunk_of[t]] = max(gradient[chunk_of[t]], m)
        read_bytes = np.zeros(self.moments)
        for c, moments in enumerate(reads):
            for m in moments:
                read_bytes[m] += layout.payload_bytes(c, "param")
        self.read_bytes = read_bytes

        mine = [c for c in range(count) if gradient[c] >= 0 and reads[c] and not layout.chunks[c].frozen]
        width = [DTYPE_BYTES[layout.chunks[c].dtype] for c in range(count)]
        self.params: Array = np.array([cost.params[c] for c in mine], dtype=float)
        self.bytes: Array = np.array([cost.params[c] * width[c] for c in mine], dtype=float)
        self.first = np.array([min(reads[c]) for c in mine], dtype=int)
        self.final = np.array([gradient[c] for c in mine], dtype=int)
        self.small = np.array([layout.chunks[c].small for c in mine], dtype=bool)
        payload = [layout.payload_bytes(c, "param") for c in mine]
        self.down_s: Array = np.array([cost.transfer_s(size, "d2h") for size in payload], dtype=float)
        self.up_s: Array = np.array([cost.transfer_s(size, "h2d") for size in payload], dtype=float)
        self.adam_s: Array = np.array([cost.cpu_adam_s(c) for c in mine], dtype=float)
        self.least_w = min((width[c] for c in mine), default=0)
        self.most_w = max((width[c] for c in mine), default=0)
        self.states = w.optimizer.states_bytes_per_param + (4 if w.micro_batches > 1 else 0)
        self.traffic = w.optimizer.dram_bytes_per_param
        self._gradient_facts(workload, layout, mine)
        # Of all stashes together; and of those that come up once a moment has begun, by moment.
        self.stash_bytes = float(sum(s.bytes for s in workload.stashes))
        self.stash_down_s = sum(cost.transfer_s(s.bytes, "d2h") for s in workload.stashes)
        self.stash_up_s = sum(cost.transfer_s(s.bytes, "h2d") for s in workload.stashes)
        behind = np.zeros(self.moments + 1)
        for stash in workload.stashes:
            behind[0] += cost.transfer_s(stash.bytes, "h2d")
            behind[stash.back + 1] -= cost.transfer_s(stash.bytes, "h2d")
        self.stash_up_from_s: Array = np.maximum(0.0, np.cumsum(behind)[:-1])
        self.late = (
            max([-1, *(max(moments) for moments in reads if moments), *gradient]) + 1
        )  # nothing happens from here
        others = [c for c in range(count) if reads[c] and c not in set(mine)]
        self.frozen_bytes = float(sum(sum(s.numel for s in layout.chunks[c].slots) * width[c] for c in others))
        # every chunk that is read, as the turns see it: bytes, moments, and the last moment at which a read counts
        self.seen = [
            (sum(s.numel for s in layout.chunks[c].slots) * width[c], sorted(reads[c]), gradient[c])
            for c in range(count)
            if reads[c]
        ]

    def _gradient_facts(self, workload: Workload, layout: Layout, mine: list[int]) -> None:
        """every_batch: each chunk has a gradient in each micro-batch. spans: per micro-batch, first and last moment at
        which any gradient arrives."""
        arrivals: dict[int, set[int]] = {c: set() for c in mine}
        self.spans: dict[int, tuple[int, int]] = {}
        for m, tensors in enumerate(workload.gradients):
            if not tensors:
                continue
            u = self.micro_batch[m]
            self.spans[u] = (self.spans.get(u, (m, m))[0], m)
            for t in tensors:
                if layout.chunk_of[t] in arrivals:
                    arrivals[layout.chunk_of[t]].add(u)
        self.every_batch = all(len(batches) == workload.micro_batches for batches in arrivals.values())

    def between(self, batch: int) -> tuple[int, int]:
        """Moments [low, high) from the last gradient of the micro-batch before `batch` to the first of `batch`."""
        return self.spans[batch - 1][1] + 1, self.spans[batch][0]

    def most_pinned(self) -> float:
        """x_max, at least 0 and at most E."""
        total = float(self.params.sum())
        if not total:
            return 0.0
        beside = (self.room - self.read_bytes) / self.states if self.states else np.full(self.moments, np.inf)
        alone = self.room / (self.states + self.least_w)
        return float(np.clip(min(beside.min(), alone.min()), 0.0, total))

    def lines(self, barrier: bool, x_max: float) -> list[_Line]:
        """Every term of the note."""
        link, host = self.machine.link, self.machine.host
        lines = [_Line("compute", float(self.clock[-1]), self.traffic / self.machine.gpu.hbm_bytes_per_s)]
        total, total_bytes = float(self.params.sum()), float(self.bytes.sum())
        if total:
            per_param_s = self.traffic / self.cost.adam_bytes_per_s
            lines.append(_Line("adam", total * per_param_s, -per_param_s))
            everything = np.ones(len(self.params), dtype=bool)
            for members in (everything, ~self.small):
                if members.any() and (members is everything or self.small.any()):
                    lines += self._windows(members, per_param_s)
                    if barrier:
                        lines += self._barrier_windows(members, per_param_s)
        # bytes: sums of hinges max(0, S + v x - room), linear between the points where a hinge opens
        turns = [(size, room) for size, room, _ in self.turns()]
        grows = self.states + self.least_w - self.most_w
        opens = [(room - size) / grows if grows > 0 else np.inf if size <= room else -np.inf for size, room in turns]
        cuts = sorted({0.0, *(x for x in opens if 0 < x < x_max)})
        rate_h2d, rate_d2h, dram = link.h2d_bytes_per_s, link.d2h_bytes_per_s, host.dram_bytes_per_s
        pinned_w = float(self.most_w)
        lines.append(_Line("d2h", total_bytes / rate_d2h + self.stash_down_s, -pinned_w / rate_d2h))
        for k, begin in enumerate(cuts):
            end = cuts[k + 1] if k + 1 < len(cuts) else np.inf
            begin = -np.inf if k == 0 else begin
            value, slope = total_bytes, -pinned_w
            for (size, room), x in zip(turns, opens):
                if x <= begin or x <= 0:
                    value += size - room
                    slope += max(0, grows)
            lines.append(_Line("h2d", value / rate_h2d + self.stash_up_s, slope / rate_h2d, begin, end))
            if not link.duplex:
                both = value / rate_h2d + total_bytes / rate_d2h + self.stash_up_s + self.stash_down_s
                lines.append(_Line("link", both, slope / rate_h2d - pinned_w / rate_d2h, begin, end))
            traffic = value + total_bytes + total * self.traffic + 2 * self.stash_bytes
            lines.append(_Line("dram", traffic / dram, (slope - pinned_w - self.traffic) / dram, begin, end))
        return lines

    def _windows(self, members: NDArray[np.bool_], per_param_s: float) -> list[_Line]:
        """The nested update windows of the chunks `members`: Adam, copies down and copies up as the serial resource."""
        first, final = self.first[members], self.final[members]
        inside = (first[None, :] <= first[:, None]) & (final[None, :] >= final[:, None])  # [j, i]: i is in J_j
        span = np.maximum(0.0, self.clock[final + 1] - self.clock[first])
        return self._serial(members, inside, span, per_param_s, copies_down=True)

    def _barrier_windows(self, members: NDArray[np.bool_], per_param_s: float) -> list[_Line]:
        first = self.first[members]
        inside = first[None, :] <= first[:, None]
        span = self.clock[-1] - self.clock[first]
        return self._serial(members, inside, span, per_param_s, copies_down=False)

    def _serial(
        self,
        members: NDArray[np.bool_],
        inside: NDArray[np.bool_],
        span: Array,
        per_param_s: float,
        *,
        copies_down: bool,
    ) -> list[_Line]:
        """Lines for windows j with the chunks inside[j]. copies_down: the gradients come down inside the window too."""
        link = self.machine.link
        params = inside @ self.params[members]
        size = inside @ self.bytes[members]
        shortest = {
            name: np.where(inside, row[members][None, :], np.inf).min(axis=1)
            for name, row in (("down", self.down_s), ("up", self.up_s), ("adam", self.adam_s))
        }
        down_s = shortest["down"] if copies_down else np.zeros(len(span))
        name = "adam" if copies_down else "barrier"
        # all of a family have the same slope, and one ends where its window is pinned entirely: the largest among
        # those that end later stands for all, so one line for each different end
        families = [(name, span + params * per_param_s + down_s + shortest["up"], -per_param_s)]
        w = float(self.most_w)
        up = span + size / link.h2d_bytes_per_s + down_s + shortest["adam"]
        families.append(("h2d" if copies_down else "barrier", up, -w / link.h2d_bytes_per_s))
        if copies_down:
            down = span + size / link.d2h_bytes_per_s + shortest["adam"] + shortest["up"]
            families.append(("d2h", down, -w / link.d2h_bytes_per_s))
        order = np.argsort(params, kind="stable")
        lines: list[_Line] = []
        for label, value, slope in families:
            best = np.maximum.accumulate(value[order][::-1])[::-1]
            ends = params[order]
            keep = np.append(best[1:] < best[:-1], True)  # a line under a later-ending one says nothing
            lines += [_Line(label, float(v), slope, until_x=float(e)) for v, e in zip(best[keep], ends[keep])]
        return lines

    def turns(self) -> list[tuple[float, float, int]]:
        """(S_k, room, moment) for one cut per turn of the iteration. Any cuts give a valid bound; tried are the turns
        themselves, and the moments near them, or anywhere about, where S_k + tide is largest."""
        last = max(self.micro_batch)
        begin = [*(self.micro_batch.index(u) for u in range(last + 1)), self.moments]
        bwd = [
            next((m for m in range(begin[u], begin[u + 1]) if self.phases[m] is not Phase.FWD), begin[u + 1])
            for u in range(last + 1)
        ]
        # (turn, first and last moment about it), the last turn first
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
        return max(choices, key=lambda turns: sum(max(0.0, size - room) for size, room, _ in turns))

    def _cut(self, regions: list[tuple[int, int, int]]) -> list[tuple[float, float, int]]:
        """From the last turn back: what is read between a cut and the next one decides S_k; of equals the latest."""
        turns: list[tuple[float, float, int]] = []
        end = self.moments - 1
        for _, low, high in regions:
            high = min(high, end - 1)
            if not 0 <= low <= high:
                continue
            size = self._read_again(end)
            wanted = (size - self.room)[low : high + 1]
            m = high - int(np.argmax(wanted[::-1]))
            turns.append((float(size[m]), float(self.room[m]), m))
            end = m
        return turns

    def read_from(self) -> Array:
        """For each moment m: bytes of the chunks read at m or later (before they are final, where they are)."""
        steps = np.zeros(self.moments + 1)
        for size, moments, final in self.seen:
            before = [m for m in moments if final < 0 or m <= final]
            if before:
                steps[0] += size
                steps[before[-1] + 1] -= size
        return np.cumsum(steps)[:-1]

    def _read_again(self, end: int) -> Array:
        """For each moment m: bytes of the chunks read first at or before m and again in (m, end] (before they are
        final, where they have a gradient)."""
        steps = np.zeros(self.moments + 1)
        for size, moments, final in self.seen:
            until = end if final < 0 else min(end, final)
            again = [m for m in moments if m <= until]
            if again and again[-1] > moments[0]:
                steps[moments[0]] += size
                steps[again[-1]] -= size
        return np.cumsum(steps)[:-1]


def _least_maximum(lines: list[_Line], x_max: float) -> tuple[float, float]:
    """(x, value) with the least maximum of the lines over [0, x_max]; exact. Where lines end, the infimum counts."""
    edges = sorted({0.0, x_max, *(e for line in lines for e in (line.from_x, line.until_x) if 0 < e < x_max)})
    pieces = list(pairwise(edges)) if len(edges) > 1 else [(0.0, 0.0)]
    value = np.array([line.value for line in lines])
    slope = np.array([line.slope for line in lines])
    begin = np.array([line.from_x for line in lines])
    end = np.array([line.until_x for line in lines])
    best = (0.0, np.inf)
    if len(edges) > 1:  # at x_max itself the windows that end there are pinned
        at_end = (begin <= x_max) & (x_max < end)
        best = (x_max, float((value + slope * x_max)[at_end].max()))
    for low, high in pieces:
        live = (begin <= low) & (low < end)
        v, s = value[live], slope[live]
        at_low, at_high = v + s * low, v + s * high
        if np.minimum(at_low, at_high).max() < best[1]:
            x, found = _least_of_piece(v, s, low, high)
            if found < best[1]:
                best = (x, found)
    return best


def _least_of_piece(value: Array, slope: Array, low: float, high: float) -> tuple[float, float]:
    """Least maximum of lines that all hold on [low, high]: descend from one end along the highest line."""
    x = low
    while True:
        y = value + slope * x
        top = y.max()
        at_top = y >= top - 1e-12 * max(1.0, abs(top))
        steepest = slope[at_top].max()
        if steepest >= 0 or x >= high:
            return x, float(top)
        # go down the line that is highest just right of x until another one crosses it
        own = int(np.flatnonzero(at_top)[np.argmax(slope[at_top])])
        rising = slope > slope[own]
        if not rising.any():
            x = high
            continue
        cross = (value[own] - value[rising]) / (slope[rising] - slope[own])
        nearest = cross[cross > x + 1e-12 * max(1.0, abs(x))]
        x = min(high, float(nearest.min())) if nearest.size else high
