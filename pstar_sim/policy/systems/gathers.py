"""Gathers: a chunk is whole for a visit.

A slice on disks is read to the host, one there fetched, and others' gathered. Afterwards what came is dropped
unchanged, but kept after the last visit if the gradient has overwritten the working list.
"""

from __future__ import annotations

from collections import defaultdict

from pstar_sim.core.step import Place, Queue
from pstar_sim.policy.kit.visits import Visit
from pstar_sim.policy.passes.step_by_step.disks import read_in
from pstar_sim.policy.systems.shards import Shards

_ByMoment = defaultdict[int, list[Visit]]


class Gathers:
    """The visits of one iteration; `before` and `behind` are called once per moment, in order.

    opening: steps that may start with it.
    bytes_gathered: as whole chunks.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._b = shards.b
        self.opening: list[int] = []
        self.bytes_gathered = 0
        self._request_steps: list[int] = []  # steps for which a new copy waits: the moment before
        self._ready: dict[int, int] = {}  # chunk -> the step that made it whole for the open visit
        self._left_host: dict[int, int] = {}  # chunk -> the step that freed the host memory of a disk read
        self._free_steps: dict[int, list[int]] = {}  # chunk -> the steps that freed the slices of a visit
        self._reads: _ByMoment = defaultdict(list)
        self._fetches: _ByMoment = defaultdict(list)
        self._gathers: _ByMoment = defaultdict(list)
        self._opens: _ByMoment = defaultdict(list)
        self._closes: _ByMoment = defaultdict(list)
        self._plan()

    def _plan(self) -> None:
        shards, scheme = self._shards, self._shards.scheme
        latest: dict[int, Visit] = {}
        for v in scheme.visits:
            if not shards.is_brought(v.chunk):
                continue
            earliest = latest[v.chunk].last + 1 if v.chunk in latest else 0  # after the chunk's previous visit
            latest[v.chunk] = v
            if not shards.lives_on_gpu(v.chunk):
                if scheme.home is Place.NVME:
                    self._reads[max(earliest, scheme.read_at[v.first])].append(v)
                self._fetches[max(earliest, scheme.fetch_at[v.first])].append(v)
            if shards.ranks > 1:
                self._gathers[max(earliest, scheme.gather_at[v.first])].append(v)
            self._opens[v.first].append(v)
            self._closes[v.last].append(v)
        for v in latest.values():
            if shards.in_place(v.chunk):  # the reduced gradient is in the working list
                self._closes[v.last].remove(v)

    def before(self, m: int) -> list[int]:
        """What moment `m` requests; returns what it waits for."""
        if not self._opens:
            return []
        asked = [
            *map(self._read, self._reads.get(m, ())),
            *map(self._fetch, self._fetches.get(m, ())),
            *map(self._gather, self._gathers.get(m, ())),
        ]
        if m == 0:
            self.opening += asked
        return [self._ready[v.chunk] for v in self._opens.get(m, ())]

    def behind(self, m: int, here: int) -> None:
        self._request_steps = [here]
        if m == 0:
            self.opening.append(here)
        for v in self._closes.get(m, ()):
            self._leave(v.chunk, m, here)

    def release_steps(self, c: int) -> list[int]:
        """Steps after which the chunk's last visit is gone."""
        return self._free_steps.get(c, [])

    def _read(self, v: Visit) -> int:
        c = v.chunk
        self._ready[c] = read_in(self._b, c, "param", v.first, [*self._request_steps, *self.release_steps(c)])
        return self._ready[c]

    def _fetch(self, v: Visit) -> int:
        b, c = self._b, v.chunk
        read = [self._ready[c]] if self._shards.scheme.home is Place.NVME else []
        self._ready[c] = b.fetch(c, v.first, after=[*self._request_steps, *read, *self.release_steps(c)])
        if read:
            self._left_host[c] = b.free(Queue.H2D, c, "param", Place.HOST, v.first, [self._ready[c]])
        return self._ready[c]

    def _gather(self, v: Visit) -> int:
        c = v.chunk
        own = [] if self._shards.lives_on_gpu(c) else [self._ready[c]]
        self._ready[c] = self._b.gather(c, v.first, [*self._request_steps, *own, *self.release_steps(c)])
        self.bytes_gathered += self._b.layout.whole_bytes(c)
        return self._ready[c]

    def gather_updated(self, c: int, after: list[int]) -> int:
        """A chunk that is always whole, after its update: for the next iteration."""
        self.bytes_gathered += self._b.layout.whole_bytes(c)
        return self._b.gather(c, 0, after)

    def _leave(self, c: int, m: int, here: int) -> None:
        lists = ["remote"] if self._shards.ranks > 1 else []
        lists += [] if self._shards.lives_on_gpu(c) else ["param"]
        self._free_steps[c] = [self._b.drop(Queue.COMPUTE, c, m, [here], name) for name in lists]
        if c in self._left_host:
            self._free_steps[c].append(self._left_host[c])
