"""The choices of all_on_gpu or a ZeRO system, and where chunks are under them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from pstar_sim.core.step import PAGEABLE, Place
from pstar_sim.policy.kit.visits import Visit
from pstar_sim.policy.passes.builder import Builder


class Flush(Enum):
    """The last micro-batch's gradients, to the host.

    PINNED: into pinned memory, as they are.
    FP32: pinned, converted to fp32 on the GPU: the CPU does not touch such a copy. The next moment waits: published
        backward passes grow by 4 bytes per parameter at the link's rate.
    BLOCKING: not pinned; the next moment waits, as does everything that the process would launch.
    """

    PINNED = auto()
    FP32 = auto()
    BLOCKING = auto()


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """visits: of whole chunks on the GPU.
    gather_at: a visit's first moment -> earliest moment for its gather.
    fetch_at: for its copy from the host.
    read_at: for its read from disks, if parameters live there.
    home: of parameters between visits.
    states: place of states and gradients for updates on the host (host or disks).
    resident: states stay on the GPU, parameters at `home`.
    staged: states come to the GPU for the update, where parameters have to live.
    whole: every chunk always is, on every GPU.
    bucket_params: of whole chunks whose gradients leave together, 0: each when complete.
    two_lists: of gradients are on the GPU at most, instead of two buckets, unless more arrive side by side.
    at_once: a chunk of `resident` is updated behind its last gradient, not behind the barrier.
    sums_wait: the moment after a bucket waits for its sum, as the last micro-batch's flush always does.
    """

    visits: Sequence[Visit] = ()
    gather_at: Mapping[int, int] = field(default_factory=dict)
    fetch_at: Mapping[int, int] = field(default_factory=dict)
    read_at: Mapping[int, int] = field(default_factory=dict)
    home: Place = Place.GPU
    states: Place = Place.HOST
    resident: frozenset[int] = frozenset()
    staged: frozenset[int] = frozenset()
    whole: bool = False
    bucket_params: int = 0
    two_lists: bool = False
    at_once: bool = False
    flush: Flush = Flush.PINNED
    sums_wait: bool = False


class Shards:
    """Every rank has its slice of each chunk.

    kept: always whole on every GPU: small ones, or all.
    on_gpu: their gradient never leaves.
    unpinned: `via` of unpinned memory, None without a rate for it: it then counts as pinned.
    """

    def __init__(self, b: Builder, scheme: Scheme) -> None:
        self.b = b
        self.scheme = scheme
        self.ranks = b.layout.ranks
        self.several = b.workload.micro_batches > 1
        self.trained = [c.index for c in b.layout.chunks if b.uses.updated(c.index)]
        self.kept = frozenset(c.index for c in b.layout.chunks if c.small or scheme.whole)
        self.on_gpu = scheme.resident if self.several else scheme.resident | scheme.staged
        self.unpinned = None if b.machine.link.pageable_bytes_per_s is None else PAGEABLE

    def lives_on_gpu(self, c: int) -> bool:
        return self.scheme.home is Place.GPU or c in self.kept

    def is_brought(self, c: int) -> bool:
        return c not in self.kept and (self.ranks > 1 or not self.lives_on_gpu(c))

    def in_place(self, c: int) -> bool:
        """The gradient never leaves the GPU and is not accumulated."""
        return c in self.on_gpu and not self.several

    def reside(self, host_list: str) -> None:
        """Records where each list is between two iterations.

        host_list: where Adam on the host finds a gradient.
        """
        b, scheme = self.b, self.scheme
        for c in range(len(b.layout.chunks)):
            if self.lives_on_gpu(c):
                b.resident(c, Place.GPU, *(b.whole if c in self.kept else ("param",)))
            elif scheme.home is Place.NVME or not b.uses.updated(c) or c in scheme.resident:
                b.resident(c, scheme.home, "param")
            if c in scheme.resident:
                b.modes[c] = "pin"
                b.resident(c, Place.GPU, *(name for name in b.uses.home_lists(c) if name != "param"))
                if scheme.whole and self.several and self.ranks > 1:
                    b.resident(c, Place.GPU, "grad32_remote")
            elif c in scheme.staged:
                b.modes[c] = "stream"
                b.resident(c, Place.HOST, *(name for name in b.uses.home_lists(c) if name != "param"))
            elif b.uses.updated(c):
                b.resident(c, scheme.states, *b.layout.states_of(c).names, host_list)
                if scheme.home is not Place.NVME:  # Adam on the host leaves the updated parameters there
                    b.resident(c, Place.HOST, "param")
