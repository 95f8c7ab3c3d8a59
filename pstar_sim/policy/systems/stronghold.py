"""stronghold: a working window of layers on the GPU, the rest on the host (Sun et al., 2022).

While layer i computes, the layers up to i + w are on their way to the GPU. A layer stays between two uses if fewer than
w others are used meanwhile, so the last w layers stay from the forward pass to the backward pass. The states of the
first w layers live on the GPU, where they are updated, and they stay from the backward pass to the next forward. Every
other layer's gradient leaves as soon as it is final. Its Adam runs on the CPU during the rest of the backward pass and
the next forward pass, which waits for a layer that is not ready. Embeddings and head stay.

The window has 2w buffers of constant size for layers that come and go, beside the highest tide. Unlike published, after
their forward pass layers of the first window are not given up and unchanged layers not copied down, and activations
saved for the backward pass go to the host only if the workload says so (`offload`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate, pairwise

from pstar_sim.catalog.machine import Machine
from pstar_sim.collector import without_garbage_collection
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.errors import DoesNotFit
from pstar_sim.policy.family.attempt import Attempt
from pstar_sim.policy.family.plan_visits import schedule_visits
from pstar_sim.policy.kit.capabilities import Capabilities
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.options import Option, either, one_of, whole_number
from pstar_sim.policy.kit.points import Point
from pstar_sim.policy.kit.ties import AS_FAST
from pstar_sim.policy.kit.visits import Visit
from pstar_sim.policy.passes import gradient_rows
from pstar_sim.units import format_bytes, format_s
from pstar_sim.workload.mixing import block_of
from pstar_sim.workload.workload import Workload

__all__ = ["CAPABILITIES", "OPTIONS", "stronghold"]

CAPABILITIES = Capabilities(searches=True, near=Point(capacity="peak", eviction="lru", prefetch=1, adam="fifo"))
OPTIONS = {
    "window": Option(
        either(one_of("auto"), whole_number(least=1)),
        "layers ahead of the one that computes, or the fewest that pay",
        "auto",
    )
}


@without_garbage_collection()
def stronghold(workload: Workload, machine: Machine, settings: Settings, *, window: str | int = "auto") -> Plan:
    """Returns the plan. GPU bytes: all lists of the first w layers and of parameters outside layers, 2w working lists
    of layers, the tide's peak. Host bytes: all lists of the other layers.

    window: w; "auto" is the smallest of the fastest windows.

    Raises DoesNotFit if the GPU has no room for a window of one layer, or if the host has no room for the layers
    outside the window.
    """
    job = Job("stronghold", workload, machine, settings, Point(capacity="peak"))
    solver = _Solver(_ChunksByLayer(job))
    w = solver.best() if window == "auto" else min(int(window), solver.layers.count)
    return solver.attempt(w).plan(_choices(solver, w, auto=window == "auto"))


class _ChunksByLayer:
    """A layer is a numbered module ("h.5"), in a model without, each chunk. A chunk belongs to the first layer it
    holds, or none if it also holds others' parameters.

    of: moving chunk -> layer, by first use.
    outside: of no layer, always on the GPU.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        names = {c: self._names(c) for c in job.moving}
        modules = {block for blocks in names.values() for block in blocks if block}
        numbered = any(all(blocks) for blocks in names.values())
        if not numbered:
            names = {c: [str(c)] for c in job.moving}
        order = sorted((c for c in job.moving if all(names[c])), key=lambda c: (job.uses.first_use(c), c))
        number: dict[str | None, int] = {}
        self.of = {c: number.setdefault(names[c][0], len(number)) for c in order}
        self.count = len(set(self.of.values()))
        shared = f"groups of the {len(modules)} layers that share chunks"
        self.words = f"{self.count} " + (
            "chunks" if not numbered else "layers" if self.count == len(modules) else shared
        )
        self.outside = [c for c in job.moving if c not in self.of]

    def _names(self, c: int) -> list[str | None]:
        tensors = self.job.workload.tensors
        return [block_of(tensors[slot.tensor].name) for slot in self.job.layout.chunks[c].slots]

    def first(self, w: int) -> list[int]:
        return [c for c, layer in self.of.items() if layer < w]

    @cached_property
    def buffer_bytes(self) -> int:
        """Working lists of the largest layer, and separate gradient lists."""
        job = self.job
        held = [0] * self.count
        for c, layer in self.of.items():
            held[layer] += job.whole_bytes(c)
        return max(held, default=0) + max(gradient_rows.room(job, n) for n in range(len(job.blocks)))

    @cached_property
    def resident_bytes(self) -> list[int]:
        """By window: small chunks, and those of no layer and the first w."""
        job, held = self.job, [0] * self.count
        for c, layer in self.of.items():
            held[layer] += job.permanent[c] + job.remote[c]
        outside = sum(job.permanent[c] + job.remote[c] for c in self.outside)
        return list(accumulate(held, initial=job.small_bytes + outside))

    @cached_property
    def tide_peak_bytes(self) -> int:
        return max(self.job.tide)

    @cached_property
    def chunks_of_one(self) -> int:
        """Chunks of the layer with the most."""
        return max(Counter(self.of.values()).values(), default=1)

    @cached_property
    def gaps(self) -> list[tuple[int, int, int, int]]:
        """(chunk, moment, next moment that uses it, other layers used in between)."""
        runs = list(self._runs())
        begins = [begin for begin, _ in runs]
        found = []
        for c, layer in self.of.items():
            for a, b in pairwise(self.job.uses.touched[c]):
                between = {run for _, run in runs[bisect_left(begins, a + 1) : bisect_left(begins, b)]}
                found.append((c, a, b, len(between - {layer})))
        return found

    def _runs(self) -> Iterator[tuple[int, int]]:
        last = -1
        for m, chunks in enumerate(self.job.uses.by_moment):
            for layer in sorted({self.of[c] for c in chunks if c in self.of}):
                if layer != last:
                    yield m, layer
                last = layer


class _Solver:
    """By window, each made once.

    refused: window -> why.
    """

    def __init__(self, layers: _ChunksByLayer) -> None:
        self.layers = layers
        self.tried: dict[int, Attempt] = {}
        self.refused: dict[int, DoesNotFit] = {}

    def attempt(self, w: int) -> Attempt:
        """Raises DoesNotFit."""
        if w not in self.tried:
            self.tried[w] = self._attempt(w)
        return self.tried[w]

    def _attempt(self, w: int) -> Attempt:
        layers, job = self.layers, self.layers.job
        needed, budget = self.needed_bytes(w), job.machine.gpu_budget_bytes
        if needed > budget:
            what = f"a window of {w} of {layers.words}: {self.describe(w)}"
            raise DoesNotFit(policy=job.name, place="gpu", needed_bytes=needed, available_bytes=budget, what=what)
        end = len(job.workload.moments) - 1
        stay = [*layers.outside, *layers.first(w)]
        pinned = [c for c in stay if job.uses.updated(c)]
        visits = [Visit(c, 0, end) for c in stay if not job.uses.updated(c)]
        visits += self._visits(w, frozenset(stay))
        return schedule_visits(
            job,
            visits,
            pinned=pinned,
            prefetch=w * layers.chunks_of_one,
            adam="fifo",
            gpu_bytes=needed,
            limit_s=self._limit_s(),
        )

    def _visits(self, w: int, stay: frozenset[int]) -> Iterator[Visit]:
        job = self.layers.job
        for c in job.moving:
            if c not in stay:
                yield from (Visit(c, m, m) for m in job.uses.touched[c])
        for c, begin, end, others in self.layers.gaps:
            if c not in stay and others < w:
                yield Visit(c, begin, end)

    def resident_bytes(self, w: int) -> int:
        return self.layers.resident_bytes[w]

    def pool_bytes(self, w: int) -> int:
        """2w buffers, or fewer if fewer layers come and go."""
        return min(2 * w, self.layers.count - w) * self.layers.buffer_bytes

    def needed_bytes(self, w: int) -> int:
        return self.resident_bytes(w) + self.pool_bytes(w) + self.layers.tide_peak_bytes

    def describe(self, w: int) -> str:
        return (
            f"{format_bytes(self.resident_bytes(w))} always on the GPU, {format_bytes(self.pool_bytes(w))} of buffers, "
            f"{format_bytes(self.layers.tide_peak_bytes)} for the tide's peak"
        )

    def most(self) -> int:
        """The largest window with room on the GPU, at least 1."""
        budget = self.layers.job.machine.gpu_budget_bytes
        return max((w for w in range(1, self.layers.count + 1) if self.needed_bytes(w) <= budget), default=1)

    def best(self) -> int:
        """The smallest window as fast as the fastest: the largest and powers of two, then halfway between the best and
        its neighbours. Smaller windows, whose copies alone often take longer, come last. Where any plan will do,
        the largest that fits leaves least on the host. Raises DoesNotFit if none fits."""
        most = self.most()
        for w in sorted({most, *(1 << n for n in range(most.bit_length()))}, reverse=True):
            self._try(w)
            if self.tried and self.layers.job.settings.any_will_do:
                return w
        if not self.tried:
            raise self.refused[most]
        while (between := self._halfway()) is not None:
            self._try(between)
        return self._smallest_of_fastest()

    def _try(self, w: int) -> None:
        try:
            self.attempt(w)
        except DoesNotFit as reason:  # a small window may leave too much on the host
            self.refused[w] = reason

    def _limit_s(self) -> float:
        return min((a.iteration_s for a in self.tried.values()), default=math.inf) * (1 + AS_FAST)

    def _smallest_of_fastest(self) -> int:
        limit_s = self._limit_s()
        return min(w for w, a in self.tried.items() if a.iteration_s <= limit_s)

    def _halfway(self) -> int | None:
        best, known = self._smallest_of_fastest(), sorted((*self.tried, *self.refused))
        below, above = (
            max((w for w in known if w < best), default=best),
            min((w for w in known if w > best), default=best),
        )
        return next(((a + b) // 2 for a, b in ((below, best), (best, above)) if b - a > 1), None)


def _choices(solver: _Solver, w: int, *, auto: bool) -> dict[str, object]:
    layers, job = solver.layers, solver.layers.job
    choices: dict[str, object] = {
        "window": f"{w} of {layers.words}" + (f" ({solver.most()} would fit)" if auto else ""),
        "capacity": solver.describe(w),
    }
    if job.barrier is not None:
        choices["barrier"] = f"{job.barrier}: no Adam beside the backward pass"
    if auto:
        choices["windows_tried"] = {
            n: ("" if a.fits else "at least ") + format_s(a.iteration_s) for n, a in sorted(solver.tried.items())
        }
    return choices
