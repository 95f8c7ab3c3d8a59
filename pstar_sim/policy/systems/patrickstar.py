"""patrickstar: the schedule of PatrickStar (Fang et al., 2021) as published, from its code.

What is reproduced. The capacity for chunks follows the tide: budget - max(non-model of this moment, of the next) -
one working-list chunk in forward and backward (its reserve of k * 2 * CS bytes, k = 1 on one GPU). Chunks move on
demand, on the critical path, nothing overlaps anything: the time of an iteration is the sum of computing, copying and
updating. Room is made by Belady's rule, looking at the recorded moments of use (one round further when the list is
exhausted). A payload exists in one place: fetching frees the host copy, evicting writes back, clean chunks too. After
each moment, chunks beyond budget - non-model of the next one are evicted (this check leaves the reserve out, as its
code does). Adam runs after the backward pass in chunk order. The states of the first chunks live on the GPU if there
is margin space, (budget - peak non-model - all working lists) / states of a chunk * 0.8, of which the counter rule
takes ceil - 1 chunks. Elsewhere Adam runs on the CPU: where the working list is on the GPU, the gradient goes down in
2 bytes a parameter and the parameters come up in 4 (through a GPU buffer of one fp32 chunk, which is held
throughout); otherwise directly.

On P ranks. Chunks form groups of P, one of which each rank owns; here a group is one unit of P * CS elements of which
each rank holds its 1/P, which is the same bytes in the same places. To use a tensor of a group that is not there, the
own chunk is brought to the GPU and all P are gathered, synchronously. A group's remote chunks are dropped when all its
tensors are HOLD_AFTER_FWD (so a group within one checkpoint segment is gathered a third time), and the gradients are
reduce-scattered, synchronously, when all are HOLD_AFTER_BWD. k = P: the reserve is a group; margin space leaves out the
own chunks and one group's remote ones. With msc=on ("memory saving communication") chunks are broadcast by their owner
and reduced to it one by one: the unit is one chunk and k = 1. Here each rank still holds 1/P of it, and it is timed as
the gather of P slices, which is at most as long as a broadcast.

What is not. Its states on the GPU may be evicted in forward and backward; here chunks with states on the GPU stay.
Small chunks stay too, as in every policy here. The ADAM-phase limit (16 * CS) bears on nothing then. It has no
gradient accumulation: with several micro-batches gradients are sent down and added by this project's scheme,
synchronously. Of its quirks on several GPUs the reserve of k * k in backward (k is multiplied twice) is left out, and
remote chunks that have to make room are dropped where it may write them back. Its broken out-of-memory fallback has no
counterpart.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from math import ceil
from statistics import median_low

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import Layout, build_layout
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Place, Queue, Ref
from pstar_sim.errors import CannotPlan, DoesNotFit
from pstar_sim.policy.kit.capabilities import Capabilities
from pstar_sim.policy.kit.options import Option, switch
from pstar_sim.policy.kit.room import describe_moment
from pstar_sim.policy.passes.builder import Builder
from pstar_sim.units import format_bytes
from pstar_sim.workload.workload import Phase, Workload

__all__ = ["CAPABILITIES", "MARGIN_RATIO", "OPTIONS", "patrickstar"]

CAPABILITIES = Capabilities(one_at_a_time=True)
MARGIN_RATIO = 0.8
MOST_ITERATIONS = 8  # until the chunks on the GPU at the cut repeat


OPTIONS = {
    "msc": Option(
        switch(), "communicate chunk by chunk (memory saving): one chunk of room instead of one a rank", False
    )
}


def patrickstar(workload: Workload, machine: Machine, settings: Settings, *, msc: bool = False) -> Plan:
    """PatrickStar's steady iteration. msc: its memory saving communication (on several ranks).

    Raises DoesNotFit where a moment's chunks, its non-model data and the reserve exceed the GPU, or parameters and
    states the host; CannotPlan for more ranks than chunks.
    """
    run = _Run(workload, machine, settings, frozenset(), msc)
    start = frozenset(run.resident)
    seen = [start]
    for _ in range(MOST_ITERATIONS):
        run = _Run(workload, machine, settings, seen[-1], msc)
        run.play()
        end = frozenset(run.resident)
        if end == seen[-1]:
            break
        seen.append(end)
    else:  # it goes round in a circle of several iterations: close it after one
        run = _Run(workload, machine, settings, seen[-1], msc)
        run.play()
        run.restore(seen[-1])
    return run.plan(rounds=len(seen))


def _layout(workload: Workload, settings: Settings, ranks: int, msc: bool) -> Layout:
    """On several ranks the unit is a group of as many chunks (msc: a chunk). Raises CannotPlan where there are not that
    many."""
    if ranks == 1:
        return build_layout(workload, chunk_bytes=settings.chunk_bytes)
    single = build_layout(workload, chunk_bytes=settings.chunk_bytes)
    count = sum(not c.small for c in single.chunks)
    if count < ranks:
        raise CannotPlan(
            f"patrickstar: {ranks} ranks but {count} chunk{'s' if count != 1 else ''} of "
            f"{format_bytes(single.chunk_bytes)}; each rank owns whole chunks, so take smaller ones (chunk_bytes, "
            "--chunk) or fewer ranks"
        )
    return build_layout(workload, chunk_bytes=single.chunk_bytes * (1 if msc else ranks), ranks=ranks)


class _Run:
    """One iteration from a given set of chunks on the GPU, one action after the other."""

    def __init__(
        self, workload: Workload, machine: Machine, settings: Settings, resident: frozenset[int], msc: bool
    ) -> None:
        self.workload, self.machine, self.settings = workload, machine, settings
        layout = _layout(workload, settings, len(machine.ranks), msc)
        self.unit = "group" if len(machine.ranks) > 1 and not msc else "chunk"
        self.b = b = Builder("patrickstar", workload, machine, settings, layout=layout)
        self.uses = uses = b.uses
        self.several = workload.micro_batches > 1
        chunks = b.layout.chunks
        self.sizes = [b.layout.payload_bytes(c.index, "param") for c in chunks]
        self.others = [b.layout.payload_bytes(c.index, "remote") if b.ranks > 1 else 0 for c in chunks]
        self.reserve = b.layout.chunk_bytes
        movable = [c.index for c in chunks if not c.small]
        updated = [c for c in movable if uses.updated(c)]
        budget = machine.gpu_budget_bytes
        worst = max(range(len(uses.tide)), key=lambda m: uses.tide[m])
        small = sum(b.uses.home_bytes(c.index) + self.others[c.index] for c in chunks if c.small)
        buffer = max((b.layout.slice_numel(c) * 4 for c in updated), default=0)
        margin = budget - buffer - uses.tide[worst] - small - sum(self.sizes[c] for c in movable)
        margin -= max((self.others[c] for c in movable), default=0)
        states = [b.uses.home_bytes(c) - self.sizes[c] for c in updated]
        uniform = median_low(states) if states else 1  # its chunks are all of one size
        count = max(0, ceil(margin / uniform * MARGIN_RATIO) - 1) if margin > 0 else 0
        while count > 0 and sum(states[:count]) > margin:  # an oversize chunk among the first
            count -= 1
        self.pinned = frozenset(updated[:count])
        for chunk in chunks:
            if chunk.small or chunk.index in self.pinned:
                b.live(chunk.index, Place.GPU)
                if chunk.small and b.ranks > 1:
                    b.resident(chunk.index, Place.GPU, "remote")
        self.margin = max(0, margin)
        if self.pinned != frozenset(updated):
            b.buffers.append(("fp32 chunk for CPU Adam", Place.GPU, buffer))
        self.movable = [c for c in movable if c not in self.pinned]
        self.fixed = b.held_bytes(Place.GPU)
        self.resident = {c for c in resident if c in set(self.movable)}
        for c in self.movable:
            b.resident(c, Place.HOST, *(name for name in b.uses.home_lists(c) if name != "param"))
            b.resident(c, Place.GPU if c in self.resident else Place.HOST, "param")
        self.used = self.fixed + sum(self.sizes[c] for c in self.resident)
        self.host_used = self.host_peak = b.held_bytes(Place.HOST)
        self.last = -1  # the step everything waits for
        self.moment = 0
        # Groups whose remote chunks are there, and of each group's tensors what they are: H(OLD), F(WD), B(WD).
        self.whole = {c.index for c in chunks if c.small and b.ranks > 1}
        self.sliced = b.ranks > 1
        self._small = {c.index for c in chunks if c.small}
        # Chunks whose gradients of earlier micro-batches go to lists of their own. What is summed over the ranks is
        # added to grad32 afterwards; on one rank what stays on the GPU adds its gradients in place.
        self.listed = [c.index for c in chunks if uses.updated(c.index)] if self.sliced else self.movable
        self.grad_lists = ("grad", "grad_remote") if self.sliced else ("grad",)
        self.tensors = [[s.tensor for s in c.slots] for c in chunks]
        self.state = dict.fromkeys((t for row in self.tensors for t in row), "H")

    # One thing after the other: every step waits for the one before.

    def _then(self) -> list[int]:
        return [self.last] if self.last >= 0 else []

    def _host(self, change: int) -> None:
        self.host_used += change
        self.host_peak = max(self.host_peak, self.host_used)

    def _evict_one(self, keep: Iterable[int]) -> bool:
        """The chunk whose next use is farthest goes to the host; clean or not, it is written back. Of a group that is
        whole the remote chunks go first."""
        kept = set(keep)
        candidates = [c for c in self.resident | (self.whole & self.pinned) if c not in kept]
        if not candidates:
            return False
        farthest = max(candidates, key=lambda c: (self._next_use(c), -c))
        if farthest in self.whole:
            self._disperse(farthest)
        else:
            self._evict(farthest)
        return True

    # Groups.

    def _gather(self, c: int) -> None:
        self.last = self.b.gather(c, self.moment, self._then())
        self.whole.add(c)
        self.used += self.others[c]

    def _disperse(self, c: int) -> None:
        """Drop the remote chunks of a group."""
        self.last = self.b.drop(Queue.NET, c, self.moment, self._then(), "remote")
        self.whole.remove(c)
        self.used -= self.others[c]

    def _reduce(self, c: int) -> None:
        """The gradients in place of a group: summed, of which the own chunk stays."""
        self.last = self.b.reduce_scatter(c, self.moment, self._then())
        self.whole.remove(c)
        self.used -= self.others[c] if c not in self._small else 0

    def _after_moment(self, m: int) -> None:
        """Tensors change state; groups that are all HOLD_AFTER_FWD or all HOLD_AFTER_BWD are given up."""
        w = self.workload
        moment = w.moments[m]
        chunk_of = self.b.layout.chunk_of
        last_batch = moment.micro_batch == w.micro_batches - 1
        touched: set[int] = set()
        for t in w.reads[m]:
            touched.add(chunk_of[t])
            if moment.phase is not Phase.BWD:
                self.state[t] = "F"
            elif self.uses.final.get((moment.micro_batch, t), m) <= m:
                self.state[t] = "B"
        for t in w.gradients[m]:
            touched.add(chunk_of[t])
            if self.uses.final[moment.micro_batch, t] == m:
                self.state[t] = "B"
        for c in sorted(touched):
            uses = self.uses
            if m == uses.last_gradient(c):
                self._reduce(c)
            elif c in self.whole and c not in self._small:
                states = {self.state[t] for t in self.tensors[c]}
                dirty = last_batch and uses.updated(c) and uses.spans[c][-1][1] <= m
                if states in ({"F"}, {"B"}) and not dirty:
                    self._disperse(c)

    def _turn(self, m: int) -> None:
        """The end of FWD, and of a micro-batch (its groups that are still whole are given up)."""
        moments = self.workload.moments
        before = moments[m - 1]
        if m > 0 and moments[m].micro_batch != before.micro_batch:
            self._disperse_all()
            self.state = dict.fromkeys(self.state, "H")
        elif m > 0 and before.phase is Phase.FWD and moments[m].phase is not Phase.FWD:
            self.state = {t: "H" if state == "F" else state for t, state in self.state.items()}

    def _disperse_all(self) -> None:
        for c in sorted(self.whole - self._small):
            self._disperse(c)

    def _evict(self, c: int) -> None:
        self.b.writeback(c, "param", self.moment, self._then())
        self.last = self.b.drop(Queue.D2H, c, self.moment)
        self.resident.remove(c)
        self.used -= self.sizes[c]
        self._host(self.sizes[c])

    def _fetch(self, c: int) -> None:
        self.b.fetch(c, self.moment, self._then())
        self.last = self.b.free(Queue.H2D, c, "param", Place.HOST, self.moment)
        self.resident.add(c)
        self.used += self.sizes[c]
        self._host(-self.sizes[c])

    def _next_use(self, c: int) -> int:
        moments, total = self.uses.touched[c], len(self.workload.moments)
        if not moments:
            return 2 * total
        n = bisect_right(moments, self.moment)
        return moments[n] if n < len(moments) else total + moments[0]

    def _make_room(self, size: int, needed: tuple[int, ...]) -> None:
        """Evict until `size` more bytes fit the published capacity of this moment."""
        tide, m = self.uses.tide, self.moment
        non_model = max(tide[m], tide[(m + 1) % len(tide)])
        limit = self.machine.gpu_budget_bytes - non_model - self.reserve
        while self.used + size > limit:
            if not self._evict_one(needed):
                raise DoesNotFit(
                    policy="patrickstar",
                    place="gpu",
                    needed_bytes=self.used + size + non_model + self.reserve,
                    available_bytes=self.machine.gpu_budget_bytes,
                    what=f"{describe_moment(self.workload, m)}; {len(needed)} chunks used in it, "
                    f"{format_bytes(self.used - self.fixed + size)}; "
                    f"a reserve of one {self.unit}, {format_bytes(self.reserve)}; "
                    f"small parameters, states and the fp32 buffer, {format_bytes(self.fixed)}",
                )

    def most_needed(self) -> tuple[int, int]:
        """(bytes needed, moment) of the moment that needs most: what cannot be evicted, the tide, the reserve."""
        uses, tide = self.uses, self.uses.tide
        opening = [0] * (len(tide) + 1)
        for c in self.listed:
            for _, first, final in uses.spans[c][:-1]:
                opening[first] += self._gradient_bytes(c)
                opening[final + 1] -= self._gradient_bytes(c)
        movable = set(self.movable)
        gradients, most = 0, (0, 0)
        for m in range(len(tide)):
            gradients += opening[m]
            chunks = sum(self.sizes[c] + self.others[c] for c in uses.by_moment[m] if c in movable)
            chunks += sum(self.others[c] for c in uses.by_moment[m] if c in self.pinned)
            beside = max(tide[m], tide[(m + 1) % len(tide)]) + (self.reserve if chunks or gradients else 0)
            most = max(most, (self.fixed + chunks + gradients + beside, m))
        return most

    def _gradient_bytes(self, c: int) -> int:
        return sum(self.b.layout.payload_bytes(c, name) for name in self.grad_lists)

    def play(self) -> None:
        """One iteration. Raises DoesNotFit with what the worst moment needs, not the first that is short."""
        try:
            self.iteration()
        except DoesNotFit as short:
            needed_bytes, m = self.most_needed()
            if short.place != "gpu" or needed_bytes <= short.needed_bytes:
                raise
            raise DoesNotFit(
                policy="patrickstar",
                place="gpu",
                needed_bytes=needed_bytes,
                available_bytes=short.available_bytes,
                what=f"{describe_moment(self.workload, m)}; its chunks and gradient lists; a reserve of one "
                f"{self.unit}, {format_bytes(self.reserve)}; "
                f"small parameters, states and the fp32 buffer, {format_bytes(self.fixed)}",
            ) from None

    def iteration(self) -> None:
        b, uses, w = self.b, self.uses, self.workload
        opens: dict[int, list[int]] = {}
        closes: dict[int, list[int]] = {}
        for c in self.listed:
            for _, first, final in uses.spans[c][:-1]:
                opens.setdefault(first, []).append(c)
                closes.setdefault(final, []).append(c)
        movable = set(self.movable)
        stays = self._small if self.sliced else set(range(len(self.sizes))) - movable
        budget = self.machine.gpu_budget_bytes
        for m in range(len(w.moments)):
            self.moment = m
            if self.sliced:
                self._turn(m)
            needed = tuple(c for c in uses.by_moment[m] if c not in stays)
            while self.used > budget - uses.tide[m] and self._evict_one(needed):
                pass
            for c in needed:
                if c in movable and c not in self.resident:
                    self._make_room(self.sizes[c], needed)
                    self._fetch(c)
                if self.sliced and c not in self.whole:
                    self._make_room(self.others[c], needed)
                    self._gather(c)
            for c in opens.get(m, ()):
                self._make_room(self._gradient_bytes(c), needed)
                for name in self.grad_lists:
                    self.last = b.alloc(Queue.COMPUTE, c, name, Place.GPU, m, self._then())
                self.used += self._gradient_bytes(c)
            if self.used + uses.tide[m] > budget:
                raise DoesNotFit(
                    policy="patrickstar",
                    place="gpu",
                    needed_bytes=self.used + uses.tide[m],
                    available_bytes=budget,
                    what=f"{describe_moment(w, m)} beside {format_bytes(self.used)} that cannot be evicted",
                )
            self.last = b.compute(m, self._then())
            for c in closes.get(m, ()):
                if self.sliced:
                    self.last = b.reduce_scatter(c, m, self._then(), "grad_remote")
                if c in movable:
                    b.writeback(c, "grad", m, self._then())
                    self._host(b.layout.payload_bytes(c, "grad"))
                    freed = b.free(Queue.D2H, c, "grad", Place.GPU, m)
                    self.last = b.cpu_add(c, "grad", m, [freed])
                    self._host(-b.layout.payload_bytes(c, "grad"))
                else:
                    self.last = b.free(Queue.NET, c, "grad", Place.GPU, m)
                self.used -= self._gradient_bytes(c)
            if self.sliced:
                self._after_moment(m)
        if self.sliced:
            self._disperse_all()
        self._adam()

    def _adam(self) -> None:
        """After the backward pass, in chunk order, one chunk after the other."""
        b, uses = self.b, self.uses
        down: set[int] = set()  # working lists on the GPU whose gradient has been sent down
        if self.several and self.settings.clip:  # the norm is that of the accumulated gradient: add the last one first
            for c in self.movable:
                if uses.updated(c):
                    self._send_down(c, down)
                    self.last = b.cpu_add(c, "param", uses.last_gradient(c), self._then())
        for c in range(len(self.sizes)):
            if not uses.updated(c):
                continue
            if b.modes[c] == "pin":
                self.last = b.gpu_adam(c, self._then())
                if self.sliced and c in self._small:
                    self.last = b.gather(c, 0, self._then())
                continue
            self._send_down(c, down)
            self.last = b.cpu_adam(c, self._then())
            if c in down:
                b.fetch(c, uses.last_gradient(c), self._then(), size_bytes=b.layout.slice_numel(c) * 4)
                self.last = b.free(Queue.H2D, c, "param", Place.HOST)
                self._host(-self.sizes[c])

    def _send_down(self, c: int, down: set[int]) -> None:
        if c in self.resident and c not in down:
            self.last = self.b.writeback(c, "param", self.uses.last_gradient(c), self._then())
            self._host(self.sizes[c])
            down.add(c)

    def restore(self, start: frozenset[int]) -> None:
        for c in sorted(self.resident - start):
            self._evict(c)
        for c in sorted(start - self.resident):
            self._fetch(c)

    def plan(self, rounds: int) -> Plan:
        b = self.b
        if self.host_peak > self.machine.host_budget_bytes:
            raise DoesNotFit(
                policy="patrickstar",
                place="host",
                needed_bytes=self.host_peak,
                available_bytes=self.machine.host_budget_bytes,
                what=f"optimizer states of {len(self.movable)} chunks and the working lists that are not on the GPU",
            )
        first = b.steps[0]
        b.wait(first.id, Ref(self.last, 1))
        b.predictions["policy_iteration_s"] = sum(b.cost.seconds(step) for step in b.steps if step.stash is None)
        b.choices["capacity"] = (
            "GPU budget less the higher non-model peak of this moment and the next, less a reserve of one "
            f"{self.unit} ({format_bytes(self.reserve)})"
        )
        b.choices["margin_space"] = (
            f"{format_bytes(self.margin)}: states of {len(self.pinned)} chunks on the GPU (0.8 of it, ceil - 1)"
        )
        b.choices["moves"] = "on demand and synchronous; evicted chunks are written back, clean ones too"
        if self.sliced:
            b.choices["groups"] = (
                "single chunks (memory saving communication)"
                if self.unit == "chunk"
                else f"of {b.ranks} chunks, one a rank"
            ) + ", gathered for use and given up when all their tensors were used"
        b.choices["adam"] = "after backward, in chunk order; nothing overlaps it"
        if self.several:
            b.choices["micro_batches"] = "not in the original: gradients are sent down and added synchronously"
        if rounds > MOST_ITERATIONS:
            b.choices["cycle"] = "its residents repeat only after several iterations; moved back at the end of each one"
        return b.plan()
