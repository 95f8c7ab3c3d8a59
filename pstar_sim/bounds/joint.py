"""The bound for all three modes at once: a small linear program with pinned and streamed parameters as two real
numbers.

[Note: the joint bound] Of E trainable parameters with a gradient, the states of x stay on the gpu ("pinned"), those of
y come up for the update there and go down after it ("streamed"), and all others have CPU Adam. s = x + y. A chunk with
some of its state lists resident counts as part of several kinds: a list that is always on the gpu takes its bytes at
every moment, one that is ever dropped crosses the link in both directions each iteration. Notation as in [Note: the
bound] of pinned.py (w: bytes of the working list per parameter, v: bytes of the states per parameter). Every legal
schedule satisfies:

- room: v x <= room_t - K_t at every moment t.
- compute: all moments + s * traffic / HBM, and adds on the gpu (below). adam: (E - s) / R, and accumulation on the host
  (below).
- windows, eager and behind a barrier: those of pinned.py with s in place of x. With several micro-batches the host also
  adds the last gradients in these windows (with clipping only in the eager windows), unless they add up on the gpu.
- the border: during the last moments every gradient is final and no parameter is read any more. A parameter that is
  updated on the gpu then has w bytes: its gradient, or its new value. These bytes are on the gpu (`kept` bytes in
  total), or they went down before and come up after. Frozen chunks are kept (`frozen_kept`) or come up again. kept +
  frozen_kept + v x <= room.
- the compute queue does all steps of an iteration, including its updates, before the first moment of the next
  iteration. Let m be a moment before any gradient is final. Everything read from m on, and all states of the parameters
  updated on the gpu, is on the gpu at m or comes up later: T >= seconds before m + (bytes read from m on + v s -
  room_m) / rate. If m lies between the backward passes of the last two micro-batches, the same holds for the sums of
  gradients (4 bytes) that add up on the gpu or that Adam on the gpu needs, and the gpu's adds of the earlier
  micro-batches come before m. Behind a barrier the updates come between two iterations. The bytes that they need and
  that are not on the gpu at the end of the last moment come up before the next iteration begins: T >= all moments + (v
  s + gradients - room) / rate. Gradients are w bytes per parameter; with several micro-batches a sum of 4 (or two lists
  of w); and if the host made the sum, 4 for the sum and w for the last gradient, unless the host has added this one
  too. The excess over the room of the first moment has gone down: T >= all moments + (v s + w s - room) / rate. Without
  a barrier this holds from the first final gradient on.
- border windows: the bytes of the chunks J_j that are not kept go down and come up between the end of b_j and the next
  f_j: T >= span_j + (bytes(J_j) - kept) / rate.
- barrier, streamed: when the last moment ends, at most room - v x bytes of chunks are on the gpu. Of the chunks first
  read up to moment f_j, all other parameters come up before the next f_j. So do the states (and wider gradients, as
  above) of the streamed parameters among them.
- h2d: (E - s) w + (w s - kept) + frozen bytes not kept + bytes that turns cannot keep + v y + gradients.
- d2h: gradients + (w s - kept) + v y.
- gradients of U > 1 micro-batches: for any share of the parameters, the bound chooses one of two ways. On the gpu: the
  gradients add up in a list of 4 bytes (with U = 2 the first gradient may wait in a list of w bytes). The list is held
  from one backward pass to the next, or sent down and up in between. If Adam runs on the CPU, the list then goes down
  once (4 bytes). On the host: each gradient goes down (w bytes). For CPU Adam all gradients are added there, some of
  them inside the update ([Note: adds in updates] of cost.py): U adds, or 1 if U = 2 and nothing is clipped. For Adam on
  the gpu all but the last are added there, and the sum comes up for Adam (4 bytes). The last but one need not be added:
  it waits for the update, on the gpu (w bytes beside the held sums) or on the host (w bytes down and up). If gradients
  add up on the gpu, the gpu adds all but the first, unless U = 2 and the first waits. In a layer-major iteration no row
  asks for room for a held sum.
  The turns are cut where most bytes are read again, or between two backward passes, where held sums count. The larger
  bound holds.
- stashes: as in pinned.py, on h2d, d2h, link and dram. A stash whose way up begins after a moment also comes up after
  that moment, in addition to the bytes that are read from there on (the row of the compute queue).
- link, dram: as in pinned.py, of these bytes. The latency of a copy counts per byte, as in the largest list of any
  copy.

Windows whose chunks may all be updated on the gpu (params(J_j) <= s) bound nothing. Without windows T is convex in s,
and their term only falls with s, so the best s lies where the two meet; `_best_windows` finds it by halving.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pstar_sim.bounds.bound_facts import (
    NAMES,
    Array,
    Bound,
    BoundFacts,
    Turn,
    rate_with_latency,
    sums_are_whole,
)
from pstar_sim.bounds.linear import Expression, LinearProgram
from pstar_sim.bounds.windows import barrier_windows, update_windows
from pstar_sim.core.layout import Layout
from pstar_sim.cost import CostModel
from pstar_sim.policy.kit.update_windows import Inside
from pstar_sim.workload.workload import Workload


def joint_bound(
    workload: Workload, layout: Layout, facts: BoundFacts, cost: CostModel, *, barrier: bool, clip: bool, x_limit: float
) -> Bound:
    """[Note: the joint bound]

    x_limit: the most pinned.

    Raises linear.Unsolved if HiGHS fails.
    """
    choices = [facts.turns(), facts.turns_between()] if workload.micro_batches > 1 else [facts.turns()]
    jobs = [_JointFacts(workload, layout, facts, cost, barrier, clip, x_limit, turns) for turns in choices]
    found, job = max(((_best_windows(job), job) for job in jobs), key=lambda both: both[0].proved_s)
    ordered = {name: found.terms[name] for name in NAMES if name in found.terms}
    top = max(ordered.values())
    return Bound(
        method="joint LP",
        seconds=max(found.proved_s, float(facts.clock[-1])),
        binding=next(name for name, value in ordered.items() if value >= top * (1 - 1e-6)),
        terms=ordered,
        pinned_params=int(found.pinned),
        max_pinned_params=int(job.x_max),
        streamed_params=int(found.streamed),
    )


@dataclass(frozen=True, kw_only=True)
class _Solved:
    """proved_s: by the dual solution.
    terms: name -> its largest seconds.
    pinned, streamed: x and y of the note, in parameters.
    """

    proved_s: float
    terms: Mapping[str, float]
    pinned: float
    streamed: float

    @property
    def on_gpu(self) -> float:
        """s of [Note: the joint bound]."""
        return self.pinned + self.streamed


def _best_windows(job: _JointFacts) -> _Solved:
    """Solved with the windows of k and s >= ends[k]: an s beyond ends[k + 1] means further up, one stopped by ends[k]
    here or further down."""
    ends = job.ends
    best = _JointProgram(job, float(ends[0])).solve()
    low = 0
    k = high = int(np.searchsorted(ends, best.on_gpu * (1 + 1e-9), side="right")) - 1
    while low < high:
        k = min(max(k, low + 1), high)
        found = _JointProgram(job, float(ends[k])).solve()
        s = found.on_gpu
        if found.proved_s < best.proved_s:
            best = found
        stopped = s <= ends[k] * (1 + 1e-9)
        if stopped:
            high = k - 1
            k -= 1
        elif k < high and s > ends[k + 1] * (1 + 1e-9):
            low = k
            k = (low + high + 1) // 2
        else:
            break
    return best


# -- what is given --


@dataclass
class _Family:
    """T >= value - slope * `on`, for windows that end after s.

    on: variable that shrinks the window: "s", "s, sums" or "kept".
    slope: seconds per unit of it.
    ends, values: of each window, its s and seconds, by s.
    """

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
        """None if no window ends after s."""
        k = int(np.searchsorted(self.ends, s, side="right"))
        return float(self.best[k]) if k < len(self.best) else None


class _JointFacts:
    """u: micro-batches if each gives every gradient, otherwise 1.
    w, most_w: of the working list per parameter.
    sum_w: of a sum per parameter; the note counts 4, and 2 for sums in 16 bits.
    total, bytes: parameters with a gradient (E), and their bytes.
    up, down: bytes per second of the link.
    gpu_add_s: of all adds of a parameter, at least.
    late_room: least from the moment on after which nothing is read.
    ends: all s at which a window ends.
    """

    def __init__(
        self,
        workload: Workload,
        layout: Layout,
        facts: BoundFacts,
        cost: CostModel,
        barrier: bool,
        clip: bool,
        x_limit: float,
        turns: Sequence[Turn],
    ) -> None:
        self.facts, self.cost, self.barrier, self.clip = facts, cost, barrier, clip
        self.u = workload.micro_batches if facts.job.every_batch else 1
        self.v = facts.states
        self.w, self.most_w = float(facts.least_w), float(facts.most_w)
        self.total = float(facts.params.sum())
        self.bytes = float(facts.bytes.sum())
        self.frozen = facts.frozen_bytes
        link = cost.link
        sizes = [layout.payload_bytes(c, name) for c in facts.job.trained for name in layout.states_of(c).names]
        lists = [layout.slice_numel(c.index) * max(self.most_w, 4.0) for c in layout.chunks]
        largest = max([0.0, *lists, *sizes])
        self.up = rate_with_latency(link.h2d_bytes_per_s, link.latency_s, largest)
        self.down = rate_with_latency(link.d2h_bytes_per_s, link.latency_s, largest)
        self.per_param_s = facts.cpu_update_s
        self.sum_w = float(min((layout.sum_width(c) for c in facts.job.trained), default=4))
        self.add_bytes = 2 * self.sum_w + self.w
        self.add_s = self.add_bytes / cost.adam_bytes_per_s
        self.whole_sums = sums_are_whole(layout, self.u, clip=clip)
        self.gpu_add_s = facts.gpu_add_s if self.u > 2 else 0.0
        beside = facts.room - facts.read_bytes
        fits = float(beside.min()) / self.v if self.v else np.inf
        self.x_max = float(np.clip(min(fits, x_limit), 0.0, self.total))
        self.late_room = max(0.0, float(facts.room[facts.late :].min())) if facts.late < facts.moments else np.inf
        self.end_room = max(0.0, float(facts.room[-1]))
        self.turns = [turn for turn in turns if turn.bytes > 0]
        self.families = self._families() if self.total else []
        ends = [f.ends[np.isfinite(f.ends)] for f in self.families]
        self.ends: Array = np.unique(np.concatenate([[0.0], *ends]))
        self.scale = max(
            float(facts.clock[-1]),
            self.total * self.per_param_s * 1e-3,
            (self.bytes + self.frozen) / self.up * 1e-3,
            1e-12,
        )

    def _families(self) -> list[_Family]:
        facts = self.facts
        gpu_s = facts.gpu_update_s
        slopes = {"adam": self.per_param_s, "h2d": self.most_w / self.up, "d2h": self.most_w / self.down}
        rows: dict[tuple[str, str, float], list[tuple[Array, Array]]] = {}  # ends and values
        for windows in (*update_windows(facts), *(barrier_windows(facts, clip=self.clip) if self.barrier else ())):
            seconds = windows.seconds(adam_s=self.per_param_s, up=self.up, down=self.down)
            for resource, values in seconds.items():
                name = "barrier" if windows.behind_barrier else resource
                rows.setdefault((name, "s", slopes[resource]), []).append((windows.params, values))
            # The last gradient is also added in the window; with clipping, before the barrier.
            if self.u > 1 and not (self.clip and windows.behind_barrier):
                name = "barrier" if windows.behind_barrier else "adam"
                each_s = self.per_param_s + self.add_s
                values = windows.seconds(adam_s=each_s, up=self.up, down=self.down)["adam"]
                rows.setdefault((name, "s, sums", each_s), []).append((windows.params, values))
            endless = np.full(len(windows.span_s), np.inf)
            if facts.net.updates_s:  # for chunks updated anywhere, and for chunks updated on the gpu
                on_gpu_s = windows.gpu_s(gpu_s) - self.total * gpu_s
                name = "barrier" if windows.behind_barrier else "net"
                rows.setdefault((name, "s", 0.0), []).append((endless, windows.span_s + windows.net_s))
                rows.setdefault((name, "s", -gpu_s), []).append((endless, on_gpu_s))
            if not windows.behind_barrier:  # the border windows
                for name, rate in (("h2d", self.up), ("d2h", self.down)):
                    values = windows.span_s + windows.bytes / rate
                    rows.setdefault((name, "kept", 1 / rate), []).append((endless, values))
        return [
            _Family(name, on, slope, *(np.concatenate(column) for column in zip(*parts)))
            for (name, on, slope), parts in rows.items()
        ]


# -- the program --


class _JointProgram:
    """For windows that end after s_min, with s >= s_min. Each method adds a kind of rows of [Note: the joint bound],
    which the solver counts as shares of totals, or of the job's scale."""

    def __init__(self, job: _JointFacts, s_min: float) -> None:
        self.job, self.s_min = job, s_min
        self.all_params = max(job.total, 1.0)
        self.all_bytes = max(job.bytes + job.frozen, 1.0)
        lp = self.lp = LinearProgram()
        self.terms: list[tuple[str, Expression]] = []  # T >= each of these, in seconds

        # T as a share of the scale; `solve` takes its upper bound from the terms.
        self.t = lp.variable(most=0.0)
        # Parameters whose states stay on the gpu, and whose states are there for the update only.
        self.x = self._params(job.x_max)
        self.y = self._params(job.total)
        self.s = self.x + self.y
        # Bytes on the gpu over the border: of parameters updated there, of frozen chunks, and of the other ranks'
        # slices of frozen chunks.
        self.kept = self._bytes(min(job.bytes, job.late_room))
        self.frozen_kept = self._bytes(min(job.frozen, job.late_room))
        self.others_kept = self._bytes(min(job.facts.net.frozen_bytes, job.late_room))
        # With several micro-batches, parameters whose sums are on the gpu, with Adam on the CPU and with Adam on the
        # gpu; and parameters whose sums go down and up before micro-batch 1, 2, ...
        several = job.u > 1 and job.total > 0
        self.cpu_sum, self.gpu_sum = (self._params(job.total) if several else Expression.zero(1) for _ in range(2))
        self.spilt = self._params(job.total, count=job.u - 1 if several else 0)
        # parameters of Adam on the gpu whose sum is on the host and whose last gradient but one is never added there:
        # it waits for the update, on the gpu or on the host
        waits = several and job.u > 2 and not job.whole_sums
        self.waits, self.waits_on_host = (self._params(job.total if waits else 0.0) for _ in range(2))
        # parameters of Adam on the gpu whose last gradient is added on the host, too: the sum alone comes up
        self.whole = self._params(job.total if several else 0.0)
        # Between each micro-batch and the next, bytes of others' slices of sums that wait for the next, and the seconds
        # of collectives that these save.
        count = job.u - 1 if several and job.facts.net.most_saved_s else 0
        self.later = self._bytes(job.facts.net.most_sums, count=count)
        self.saved_s = lp.variables(count, most=job.facts.net.most_saved_s / job.scale) * job.scale
        self.sum_bytes = job.sum_w if job.u > 2 else min(job.w, job.sum_w)  # bytes of a held sum, per parameter
        # Bytes that each turn cannot keep, of this rank's slices and of the others' slices.
        most = [turn.bytes + abs(turn.room) + (job.v + 8) * self.all_params for turn in job.turns]
        self.again = lp.variables(len(most), most=np.array(most) / self.all_bytes) * self.all_bytes
        others = np.array([turn.others for turn in job.turns if turn.others]) / self.all_bytes
        self.gathered = lp.variables(len(others), most=others) * self.all_bytes
        # Bytes updated on the gpu that go down and come up over the border.
        self.gone = self._bytes(job.bytes)
        self._add_rows(several=several)

    def _add_rows(self, *, several: bool) -> None:
        lp, job, s_min = self.lp, self.job, self.s_min
        lp.add(self.s <= job.total, unit=self.all_params)
        if s_min:
            lp.add(self.s >= min(s_min, job.total), unit=self.all_params)
        self._border()
        if several:
            self._sums()
        self._turns()
        lp.add(job.w * (self.s - self.whole) <= self.kept + self.gone, unit=self.all_bytes)
        compute_s = self._compute_and_adam()
        if job.total:
            self._windows()
            self._compute_queue()
            if job.barrier:
                self._barrier()
        self._copies()
        if job.facts.net.byte_s or job.facts.net.updates_s:
            self._collectives(compute_s)

    def _params(self, most: float, *, count: int = 1) -> Expression:
        return self.lp.variables(count, most=most / self.all_params) * self.all_params

    def _bytes(self, most: float, *, count: int = 1) -> Expression:
        return self.lp.variables(count, most=most / self.all_bytes) * self.all_bytes

    # -- what fits --

    def _border(self) -> None:
        """w bytes of each parameter updated on the gpu stay, or go down and up."""
        lp, job = self.lp, self.job
        lp.add(self.kept <= job.most_w * self.s)
        if np.isfinite(job.late_room):
            frozen = self.frozen_kept + self.others_kept
            lp.add(self.kept + frozen + job.v * self.x <= job.late_room, unit=self.all_bytes)

    def _sums(self) -> None:
        """Held sums need room between backward passes."""
        lp, job, facts = self.lp, self.job, self.job.facts
        lp.add(self.cpu_sum + self.s <= job.total, unit=self.all_params)
        lp.add(self.gpu_sum + self.whole <= self.s, unit=self.all_params)
        lp.add(self.spilt <= self.cpu_sum + self.gpu_sum, unit=self.all_params)
        if job.u == 2 or job.whole_sums:
            lp.add(self.s <= self.gpu_sum + self.whole, unit=self.all_params)
        if len(self.later):
            each, padding = facts.net.own
            lp.add(self.later <= (self.cpu_sum + self.gpu_sum) * each + padding, unit=self.all_bytes)
        lp.add(self.waits <= self.s - self.gpu_sum - self.whole, unit=self.all_params)
        lp.add(self.waits_on_host <= self.waits, unit=self.all_params)
        for batch in range(1, job.u):
            if np.isfinite(room := facts.room_between(batch)):
                lp.add(self._held_sums(batch) + job.v * self.x <= room, unit=self.all_bytes)

    def _held_sums(self, batch: int) -> Expression:
        sums = (self.cpu_sum + self.gpu_sum - self.spilt[batch - 1]) * self.sum_bytes
        if len(self.later):
            sums += self.later[batch - 1]
        return sums + (self.waits - self.waits_on_host) * self.job.w if batch == self.job.u - 1 else sums

    def _turns(self) -> None:
        """What is read before a turn and again behind it stays beside states and sums, or comes up again."""
        job = self.job
        others = 0
        for number, turn in enumerate(job.turns):
            held = job.v * self.x
            for batch in range(1, len(self.spilt) + 1):
                low, high = job.facts.between(batch)
                if low <= turn.moment < high:
                    held += self._held_sums(batch)
            again = self.again[number]
            if turn.others:
                again += self.gathered[others]
                others += 1
            self.lp.add(turn.bytes + held - turn.room <= again, unit=self.all_bytes)

    # -- seconds --

    def _added(self) -> Expression:
        """Per addition: all for CPU Adam, all but two for Adam on the gpu, unless the host makes the whole sum."""
        job = self.job
        if job.u == 1:
            return Expression.zero(1)
        each = job.u if job.clip or job.u > 2 else 1
        whole = self.whole if job.u > 2 else Expression.zero(1)
        return each * (job.total - self.s - self.cpu_sum) + self._own_lists() + whole

    def _own_lists(self) -> Expression:
        """For Adam on the gpu with adds on the host, per list: all micro-batches but the last, and without the last but
        one if that waits."""
        return (self.job.u - 1) * (self.s - self.gpu_sum) - self.waits

    def _compute_and_adam(self) -> Expression:
        job = self.job
        adds_s = (self.cpu_sum + self.gpu_sum) * job.gpu_add_s + self.later.sum() * job.facts.net.add_s
        compute_s = float(job.facts.clock[-1]) + self.s * job.facts.gpu_update_s + adds_s
        self.terms.append(("compute", compute_s))
        if job.total:
            adds_s = self._added() * job.add_s
            self.terms.append(("adam", (job.total - self.s) * job.per_param_s + adds_s))
        return compute_s

    def _windows(self) -> None:
        inside = {"s": self.s, "kept": self.kept}
        if len(self.spilt):  # in parameters: an add counts as its share of an add and Adam
            inside["s, sums"] = self.s + self.cpu_sum * (self.job.add_s / (self.job.add_s + self.job.per_param_s))
        for family in self.job.families:
            value = family.value(self.s_min)
            if value is not None:
                self.terms.append((family.name, value - family.slope * inside[family.on]))

    def _compute_queue(self) -> None:
        """Updates come before the next iteration. All states, and everything read from a moment on (before any gradient
        is final), are on the gpu then or come up later."""
        job, facts = self.job, self.job.facts
        until = int(facts.final.min()) + 1
        own, _ = facts.read_from
        needed_s = (own - facts.room)[:until] / job.up + facts.stash_up_from_s[:until]
        turn_s = float((facts.clock[:until] + needed_s).max())
        self.terms.append(("h2d", turn_s + job.v * self.s / job.up))
        if len(self.spilt):
            self._last_turn(until)
        # The excess over the room of the first moment has gone down since the first final gradient.
        first_room = max(0.0, float(facts.room[0]))
        too_much = (job.v + job.w) * self.s - first_room
        self.terms.append(("d2h", float(facts.clock[until]) + too_much / job.down))

    def _last_turn(self, until: int) -> None:
        """Between the backward passes of the last two micro-batches, sums that add up on the gpu, or that Adam there
        needs, also take room or come up later, and all adds but the last's are done.

        until: the first moment after a final gradient.
        """
        job, facts = self.job, self.job.facts
        low, high = facts.between(job.u - 1)
        high = min(high, until)
        if low >= high:
            return
        own, _ = facts.read_from
        needed_s = (own - facts.room)[low:high] / job.up + facts.stash_up_from_s[low:high]
        turn_s = float((facts.clock[low:high] + needed_s).max())
        on_gpu = self.cpu_sum + self.gpu_sum
        sums = self.sum_bytes * on_gpu + job.sum_w * (self.s - self.gpu_sum)
        added_s = on_gpu * (facts.gpu_add_before_s if job.u > 2 else 0.0)
        self.terms.append(("h2d", turn_s + added_s + (job.v * self.s + sums) / job.up))

    def _barrier(self) -> None:
        job, facts = self.job, self.job.facts
        compute_s = float(facts.clock[-1])
        needed = job.v * self.s + self._gradients(job.w)
        self.terms.append(("barrier", compute_s + (needed - job.end_room) / job.up))
        new = (job.v + job.w) * self.s - max(0.0, float(facts.room[0]))
        self.terms.append(("barrier", compute_s + new / job.down))
        # For the chunks first read up to f_j: seconds from f_j to the end of the iteration, bytes and parameters. The
        # bytes that are not on the gpu at the end, beside pinned states, come up before the next f_j, and so do
        # streamed states.
        inside = Inside(facts.first)
        span_s = compute_s - facts.clock[facts.first]
        size, params = inside.sums(facts.bytes), inside.sums(facts.params)
        comes_s = float((span_s + (size - job.end_room) / job.up).max())
        self.terms.append(("barrier", comes_s + job.v * self.x / job.up))
        others_s = float((span_s + (size - job.end_room - job.v * (job.total - params)) / job.up).max())
        self.terms.append(("barrier", others_s + job.v * self.s / job.up))
        if len(self.spilt):
            wider = self._gradients(job.most_w) - job.most_w * self.s
            others_s = float(
                (span_s + (size - job.end_room - (job.v + job.sum_w) * (job.total - params)) / job.up).max()
            )
            self.terms.append(("barrier", others_s + (job.v * self.s + wider) / job.up))

    def _gradients(self, width: float) -> Expression:
        if not len(self.spilt):
            return width * self.s
        sum_w = self.job.sum_w
        return sum_w * self.gpu_sum + (sum_w + width) * (self.s - self.gpu_sum) - width * self.whole

    def _copies(self) -> None:
        job, facts, cost = self.job, self.job.facts, self.job.cost
        up, down = self._up(), self._down()
        up_s, down_s = up / job.up + facts.stash_up_s, down / job.down + facts.stash_down_s
        self.terms += [("h2d", up_s), ("d2h", down_s)]
        if not cost.link.duplex:
            self.terms.append(("link", up_s + down_s))
        moved = up + down + (job.total - self.s) * facts.traffic + self._added() * job.add_bytes + 2 * facts.stash_bytes
        self.terms.append(("dram", moved / facts.dram_bytes_per_s))

    def _up(self) -> Expression:
        """Updated on the CPU, not kept over the border or at turns, streamed states, sums sent down, and those made on
        the host for Adam on the gpu."""
        job = self.job
        up = job.bytes - job.most_w * self.s + self.gone + (job.frozen - self.frozen_kept)
        up += self.again.sum() + job.v * self.y
        if len(self.spilt):
            up += self.sum_bytes * self.spilt.sum() + job.sum_w * (self.s - self.gpu_sum) + job.w * self.waits_on_host
        return up

    def _down(self) -> Expression:
        """Gradients (each or as a sum), not kept over the border, streamed states, sums that come up again, and
        gradients added on the host for Adam on the gpu."""
        job, u = self.job, self.job.u
        down = u * (job.bytes - job.most_w * self.s) + self.gone + job.v * self.y
        if len(self.spilt):
            down += (job.sum_w - u * job.most_w) * self.cpu_sum
            down += self.sum_bytes * self.spilt.sum() + job.w * (self._own_lists() + self.waits_on_host + self.whole)
        return down

    def _collectives(self, compute_s: Expression) -> None:
        """One after the other; compute loses a part of them ([Note: the bound of several ranks]). With clipping no
        update comes before the last sum."""
        job, facts, net = self.job, self.job.facts, self.job.facts.net
        again = self.gathered.sum() + net.frozen_bytes - self.others_kept
        self.lp.add(self.saved_s <= self.later * net.saves + net.saved_s, unit=job.scale)
        net_s = net.each_time_s - self.saved_s.sum() + again * net.byte_s
        self.terms += [("net", net_s), ("net", compute_s + net.lost * net_s)]
        if job.barrier:
            self.terms.append(("barrier", facts.barrier_s(clip=job.clip) + self.s * facts.gpu_update_s))

    # -- the answer --

    def solve(self) -> _Solved:
        """Raises linear.Unsolved if HiGHS fails."""
        lp, scale = self.lp, self.job.scale
        lp.limit(self.t, max(float(lp.most_of(seconds)[0]) for _, seconds in self.terms) / scale)
        iteration_s = self.t * scale
        for _, seconds in self.terms:
            lp.add(seconds <= iteration_s, unit=scale)
        lp.minimise(self.t)
        found = lp.solve()
        terms: dict[str, float] = {}
        for name, seconds in self.terms:
            terms[name] = max(terms.get(name, 0.0), float(found.of(seconds)[0]))
        x, y = float(found.of(self.x)[0]), float(found.of(self.y)[0])
        return _Solved(proved_s=found.proved * scale, terms=terms, pinned=x, streamed=y)
