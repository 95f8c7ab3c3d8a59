"""Where PatrickStar's chunks live, and payloads that move one at a time.

patrickstar.py says which of this is published.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median_low

from pstar_sim.core.ledger import PLACES
from pstar_sim.core.step import Place, Queue
from pstar_sim.policy.kit.facts import Facts
from pstar_sim.policy.kit.room import describe_moment
from pstar_sim.policy.passes.builder import Builder
from pstar_sim.units import format_bytes, format_count

MARGIN_RATIO = 0.8
GPU, HOST = PLACES.index(Place.GPU), PLACES.index(Place.HOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Homes:
    """small: all lists on the GPU, whole on several ranks.
    pinned: chunks with states on the GPU.
    movable: states on the host, a moving working list, ascending.
    brought_bytes: to the GPU before a use: a movable chunk's own slice, and its group's remote chunks.
    remote_bytes: of a chunk's group, 0 with one rank.
    buffer_bytes: fp32, through which parameters come up, 0 with all states on the GPU.
    """

    small: frozenset[int]
    pinned: frozenset[int]
    movable: tuple[int, ...]
    brought_bytes: Mapping[int, int]
    remote_bytes: Sequence[int]
    margin_bytes: int
    buffer_bytes: int


def homes_of(uses: Facts, budget_bytes: int) -> Homes:
    layout = uses.layout
    own = [layout.payload_bytes(c.index, "param") for c in layout.chunks]
    remote = [layout.whole_bytes(c.index) - own[c.index] for c in layout.chunks]
    large = [c.index for c in layout.chunks if not c.small]
    updated = [c for c in large if uses.updated(c)]
    margin = margin_space(uses, budget_bytes)
    count = chunks_in_margin(margin, [uses.home_bytes(c) - own[c] for c in updated])
    pinned = frozenset(updated[:count])
    brought = {c: remote[c] if c in pinned else own[c] + remote[c] for c in large}
    return Homes(
        small=frozenset(c.index for c in layout.chunks if c.small),
        pinned=pinned,
        movable=tuple(c for c in large if c not in pinned),
        brought_bytes={c: size for c, size in brought.items() if size},
        remote_bytes=remote,
        margin_bytes=max(0, margin),
        buffer_bytes=0 if len(pinned) == len(updated) else fp32_buffer_bytes(uses),
    )


def margin_space(uses: Facts, budget_bytes: int) -> int:
    """For states of chunks that move, perhaps negative: budget - peak non-model - fp32 buffer - small chunks with their
    states - all working lists - remote chunks of one group."""
    layout = uses.layout
    space = budget_bytes - max(uses.tide) - fp32_buffer_bytes(uses)
    remote = 0
    for chunk in layout.chunks:
        own, whole = layout.payload_bytes(chunk.index, "param"), layout.whole_bytes(chunk.index)
        if chunk.small:
            space -= uses.home_bytes(chunk.index) + whole - own
        else:
            space -= own
            remote = max(remote, whole - own)
    return space - remote


def fp32_buffer_bytes(uses: Facts) -> int:
    """4 bytes per parameter of the largest chunk."""
    layout = uses.layout
    large = (c.index for c in layout.chunks if not c.small)
    return max((layout.slice_numel(c) * 4 for c in large if uses.updated(c)), default=0)


def chunks_in_margin(margin_bytes: int, states_bytes: Sequence[int]) -> int:
    """First chunks with states in margin space: ceil(margin / states of a chunk * 0.8) - 1.

    states_bytes: the original's chunks have one size, here the median counts, lowered until states fit with an oversize
        one among the first.
    """
    if margin_bytes <= 0 or not states_bytes:
        return 0
    count = max(0, ceil(margin_bytes / median_low(states_bytes) * MARGIN_RATIO) - 1)
    while count > 0 and sum(states_bytes[:count]) > margin_bytes:
        count -= 1
    return count


class Memory:
    """Payloads that move one at a time: every step waits for the one before; holdings of `b` say where payloads are.

    whole: groups with remote chunks here.
    fixed_bytes: never move from the GPU.
    unit: "chunk" or "group", of communication and reserve.
    """

    def __init__(self, b: Builder, homes: Homes, resident: Collection[int], unit: str) -> None:
        """resident: movable, on the GPU between two iterations."""
        self.b = b
        self.homes = homes
        self.unit = unit
        self.budget_bytes = b.machine.gpu_budget_bytes
        self._own = [b.layout.payload_bytes(c.index, "param") for c in b.layout.chunks]
        self._reside(resident)
        self._holdings = b.holdings
        self.on_gpu = b.holdings.chunks("param", Place.GPU)
        self.whole = b.holdings.chunks("remote", Place.GPU)
        self.fixed_bytes = self.used_bytes - sum(self._own[c] for c in resident)
        self.last = -1
        self._next = [(self._next_use(c, -1), -c) for c in range(len(self._own))]
        self.begin(0)

    def begin(self, moment: int) -> None:
        self.moment = moment
        for c in self.b.uses.by_moment[moment]:
            self._next[c] = self._next_use(c, moment), -c

    def _reside(self, resident: Collection[int]) -> None:
        b, homes = self.b, self.homes
        for c in (*homes.small, *homes.pinned):
            b.live(c, Place.GPU)
        for c in homes.small:
            b.resident(c, Place.GPU, *b.whole)
        for c in homes.movable:
            b.resident(c, Place.HOST, *(name for name in b.uses.home_lists(c) if name != "param"))
            b.resident(c, Place.GPU if c in resident else Place.HOST, "param")
        if homes.buffer_bytes:
            b.buffers.append(("fp32 chunk for CPU Adam", Place.GPU, homes.buffer_bytes))

    def then(self) -> list[int]:
        return [self.last] if self.last >= 0 else []

    # Holdings.

    @property
    def resident(self) -> frozenset[int]:
        return frozenset(self.on_gpu - self.homes.small - self.homes.pinned)

    @property
    def used_bytes(self) -> int:
        """Without the tide; small chunks' room counts even while others' gradients have left it."""
        used = self._holdings.used_bytes[GPU]
        if self.b.ranks == 1:
            return used
        return used + sum(self.homes.remote_bytes[c] for c in self.homes.small - self.whole)

    @property
    def host_peak_bytes(self) -> int:
        return self._holdings.peak_bytes[HOST]

    # Working lists. A payload exists in one place.

    def fetch(self, c: int) -> None:
        self.b.fetch(c, self.moment, self.then())
        self.last = self.b.free(Queue.H2D, c, "param", Place.HOST, self.moment)

    def evict(self, c: int) -> None:
        """Written back, changed or not."""
        self.b.writeback(c, "param", self.moment, self.then())
        self.last = self.b.drop(Queue.D2H, c, self.moment)

    def send_gradient(self, c: int) -> None:
        """In its working list, whose room on the GPU stays."""
        self.last = self.b.writeback(c, "param", self.b.uses.last_gradient(c), self.then())

    def fetch_updated(self, c: int) -> None:
        """In 4 bytes per parameter, through the fp32 buffer."""
        size = self.b.layout.slice_numel(c) * 4
        self.b.fetch(c, self.b.uses.last_gradient(c), self.then(), size_bytes=size)
        self.last = self.b.free(Queue.H2D, c, "param", Place.HOST)

    # Groups.

    def gather(self, c: int) -> None:
        self.last = self.b.gather(c, self.moment, self.then())

    def disperse(self, c: int) -> None:
        self.last = self.b.drop(Queue.NET, c, self.moment, self.then(), "remote")

    def disperse_all(self) -> None:
        for c in sorted(self.whole - self.homes.small):
            self.disperse(c)

    def reduce(self, c: int) -> None:
        """In the working lists; the own chunk's gradients stay."""
        self.last = self.b.reduce_scatter(c, self.moment, self.then())

    # Room.

    def bring(self, c: int, needed: Collection[int]) -> None:
        """Brings the slices that are missing. needed: may not leave."""
        if c not in self.on_gpu:
            self.make_room(self._own[c], needed)
            self.fetch(c)
        if self.b.ranks > 1 and c not in self.whole:
            self.make_room(self.homes.remote_bytes[c], needed)
            self.gather(c)

    def non_model_bytes(self, m: int) -> int:
        """The higher peak of this moment and the next, by the published capacity."""
        tide = self.b.uses.tide
        return max(tide[m], tide[(m + 1) % len(tide)])

    def make_room(self, size_bytes: int, needed: Collection[int]) -> None:
        """Until so many more fit the published capacity, with a reserve of one chunk or group; `needed` stay. Raises
        DoesNotFit if nothing else can leave."""
        b, m = self.b, self.moment
        total = size_bytes + self.non_model_bytes(m) + b.layout.chunk_bytes
        while self.used_bytes + total > self.budget_bytes and self._evict_farthest(needed):
            pass
        used = self.used_bytes
        if used + total > self.budget_bytes:
            b.check_room(
                Place.GPU,
                used + total,
                f"{describe_moment(b.workload, m)}; {format_count(len(needed), 'chunk')} used in it, "
                f"{format_bytes(used - self.fixed_bytes + size_bytes)}; {self.describe_fixed()}",
            )

    def trim(self, needed: Collection[int]) -> None:
        """Until the rest fits the budget less the moment's non-model bytes, without the reserve, as in the original."""
        capacity = self.budget_bytes - self.b.uses.tide[self.moment]
        while self.used_bytes > capacity and self._evict_farthest(needed):
            pass

    def _evict_farthest(self, needed: Collection[int]) -> bool:
        """Belady's rule; a whole group's remote chunks go first."""
        candidates = (self.resident | (self.whole & self.homes.pinned)).difference(needed)
        if not candidates:
            return False
        farthest = max(candidates, key=self._next.__getitem__)
        if farthest in self.whole:
            self.disperse(farthest)
        else:
            self.evict(farthest)
        return True

    def _next_use(self, c: int, moment: int) -> int:
        """One round further if the recorded moments are exhausted."""
        moments, total = self.b.uses.touched[c], len(self.b.workload.moments)
        if not moments:
            return 2 * total
        n = bisect_right(moments, moment)
        return moments[n] if n < len(moments) else total + moments[0]

    def describe_fixed(self) -> str:
        return (
            f"a reserve of one {self.unit}, {format_bytes(self.b.layout.chunk_bytes)}; "
            f"small parameters, states and the fp32 buffer, {format_bytes(self.fixed_bytes)}"
        )
