"""What the ZeRO-3 family of policies has in common: one iteration of sharded data parallelism, up to the update.

Every rank holds its own slice of each chunk (with one rank: the whole chunk) on the GPU or on the host. A chunk is made
whole for a visit, a run of moments that use it, some way ahead of its first one: its slice is fetched over the link if
it lives on the host, the others' slices are gathered. Gradients leave in buckets: reduce-scattered, and sent to the
host where the optimizer is there. optimizer.step() blocks, so successive iterations do not overlap; what it does is the
policy's own (`Sharded.computed`, `gradient_at`, `cpu_adam`, `copy_up`, `gpu_adam`, `finish`).

With one rank there are no collectives, and what lives on the GPU does not move at all.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from pstar_sim.core.step import PAGEABLE, Kind, Place, Queue, Ref
from pstar_sim.policy.kit.facts import Facts
from pstar_sim.policy.kit.room import describe_moment, worst_moment
from pstar_sim.policy.passes.builder import Builder
from pstar_sim.units import format_bytes
from pstar_sim.workload.workload import Phase, Workload

__all__ = [
    "MAX_REUSE_PARAMS",
    "PREFETCH_PARAMS",
    "REDUCE_BUCKET_PARAMS",
    "SUB_GROUP_PARAMS",
    "Sharded",
    "Visit",
    "block_visits",
    "operators_before",
    "params_before",
    "sub_groups",
    "traced_visits",
]

# DeepSpeed's defaults, in parameters (deepspeed/runtime/zero/config.py).
REDUCE_BUCKET_PARAMS = 500_000_000
PREFETCH_PARAMS = 50_000_000
MAX_REUSE_PARAMS = 1_000_000_000
SUB_GROUP_PARAMS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Visit:
    """Chunk is whole on the GPU from the start of moment `first` to the end of moment `last`."""

    first: int
    last: int
    chunk: int


def block_visits(uses: Facts) -> list[Visit]:
    """FSDP's rule: the chunks of a block (layer) come before its first moment and go after its last, in forward and
    again in backward, where recomputation and gradients of a block are one visit. Sorted."""
    runs = _blocks(uses.workload)
    run_of = [r for r, (first, last) in enumerate(runs) for _ in range(first, last + 1)]
    out: list[Visit] = []
    for chunk, touched in enumerate(uses.touched):
        mine = sorted({run_of[m] for m in touched})
        begin = 0
        for n in range(1, len(mine) + 1):
            if n == len(mine) or mine[n] > mine[n - 1] + 1:
                out.append(Visit(runs[mine[begin]][0], runs[mine[n - 1]][1], chunk))
                begin = n
    return sorted(out, key=lambda v: (v.first, v.chunk))


_BLOCK = re.compile(r"(.*?\.\d+)(?:\.|$)")


def _blocks(workload: Workload) -> list[tuple[int, int]]:
    """Runs of moments (first, last) of one block in one direction. A block is a module's path up to its first number
    ("h.5" for "h.5.mlp.c_fc"), without one the module itself; moments that use nothing go with the block before."""
    runs: list[tuple[int, int]] = []
    open_key: tuple[str, bool, int] | None = None
    for m, moment in enumerate(workload.moments):
        match = _BLOCK.match(moment.module)
        key = (match[1] if match else moment.module, moment.phase is Phase.FWD, moment.micro_batch)
        busy = bool(workload.reads[m] or workload.gradients[m])
        if runs and (key == open_key or (not busy and moment.phase is not Phase.ADAM)):
            runs[-1] = (runs[-1][0], m)
        else:
            runs.append((m, m))
            open_key = key
    return runs


def traced_visits(uses: Facts, reuse_params: int) -> list[Visit]:
    """DeepSpeed's rule: a chunk goes after a use unless it is used again within `reuse_params` parameters' worth of
    other reads in the traced order (stage3_max_reuse_distance). Sorted."""
    w = uses.workload
    read = [0, *accumulate(sum(w.tensors[t].numel for t in row) for row in w.reads)]
    out: list[Visit] = []
    for chunk, touched in enumerate(uses.touched):
        if not touched:
            continue
        first = touched[0]
        for a, b in pairwise(touched):
            if b > a + 1 and read[b] - read[a + 1] > reuse_params:
                out.append(Visit(first, a, chunk))
                first = b
        out.append(Visit(first, touched[-1], chunk))
    return sorted(out, key=lambda v: (v.first, v.chunk))


def operators_before(visits: Sequence[Visit], ahead: int) -> dict[int, int]:
    """Opening moment of a visit -> moment with whose start it may be asked for: that of the operator (moment that
    opens visits) `ahead` before it."""
    opening = sorted({v.first for v in visits})
    return {m: opening[max(0, n - ahead)] if ahead <= n else 0 for n, m in enumerate(opening)}


def params_before(visits: Sequence[Visit], uses: Facts, ahead_params: int) -> dict[int, int]:
    """As `operators_before`, for a prefetcher that asks for the next operators until it has `ahead_params` parameters
    on their way (stage3_prefetch_bucket_size); with any at all, it is one operator ahead at least."""
    size: dict[int, int] = {}
    for v in visits:
        size[v.first] = size.get(v.first, 0) + uses.layout.chunks[v.chunk].numel
    opening = sorted(size)
    if ahead_params <= 0:
        return {m: m for m in opening}
    before = [0, *accumulate(size[m] for m in opening)]
    # Operator n is asked for at operator j - 1, where j is the first with fewer than ahead_params from j to n - 1.
    out: dict[int, int] = {}
    for n, m in enumerate(opening):
        j = min(n, bisect_left(before, before[n] - ahead_params + 1))
        out[m] = opening[j - 1] if j > 0 else 0
    return out


def sub_groups(b: Builder, chunks: Iterable[int], params: int) -> list[list[int]]:
    """Runs of chunks in order, closed as soon as this rank's slices in them hold `params` parameters."""
    groups: list[list[int]] = []
    held = 0
    for c in chunks:
        if held == 0:
            groups.append([])
        groups[-1].append(c)
        held += b.layout.slice_numel(c)
        if held >= params:
            held = 0
    return groups


class Sharded:
    """Writes one iteration into `b`.

    home: where parameters live between visits (the GPU, the host or the disks). states: where the states and the
    gradients of chunks that are updated on the host are (the host or the disks). resident: chunks whose states stay on
    the GPU. staged: chunks whose states come to the GPU for the update (their parameters have to live there). All
    others are updated on the host. bucket_params: gradients (whole, not sliced) that leave together; 0: each chunk's as
    soon as it is complete. blocking: the last micro-batch's gradients go to host memory that is not pinned and the next
    moment waits for them, as does everything the training process would launch. wide: they are converted on the GPU and
    cross the link in fp32 (a copy that the CPU does not touch cannot convert them on the host).

    [Note: gradients of several micro-batches] A resident chunk accumulates in grad32 on the GPU. All others' gradients
    are added on the host (cpu_add), as everywhere in this project; DeepSpeed brings the sum so far up to the GPU, adds
    there and sends it down, which takes the link instead of the CPU and is hidden behind the backward pass as well.
    """

    def __init__(
        self,
        b: Builder,
        *,
        home: Place,
        states: Place = Place.HOST,
        visits: Sequence[Visit],
        resident: frozenset[int],
        staged: frozenset[int] = frozenset(),
        bucket_params: int,
        blocking: bool,
        wide: bool = False,
    ) -> None:
        self.b = b
        self.uses = b.uses
        self.workload = b.workload
        self.ranks = b.layout.ranks
        self.several = b.workload.micro_batches > 1
        # How a copy of memory that is not pinned goes; where the machine gives no rate for it, as that of pinned.
        self.unpinned = None if b.machine.link.pageable_bytes_per_s is None else PAGEABLE
        self.home = home
        self.states = states
        self.resident = resident
        self.staged = staged
        # Chunks whose gradient never leaves the GPU.
        self.on_gpu = resident if self.several else resident | staged
        self.bucket_params = bucket_params
        self.blocking = blocking
        self.wide = wide
        chunks = b.layout.chunks
        self.trained = [c.index for c in chunks if b.uses.updated(c.index)]
        self.kept = frozenset(c.index for c in chunks if c.small)  # whole on every GPU all the time
        self.visits = [v for v in visits if v.chunk not in self.kept and self._moves(v.chunk)]
        self.computed: list[int] = []  # moment -> its step
        self.gradient_at: dict[int, list[int]] = {}  # chunk -> steps after which its gradient is where Adam wants it
        self._ready: dict[int, int] = {}  # chunk -> the step that made it whole for the visit that is open
        self._left_host: dict[int, int] = {}  # chunk -> the step that freed what was read from the disks for a fetch
        self._gone: dict[int, list[int]] = {}  # chunk -> the steps that freed what a visit had taken
        self._opening: list[int] = []  # steps that may start with the iteration
        self._free_of: dict[int, int] = {}  # chunk -> the step that freed its gradient list on the GPU
        self._added: dict[int, int] = {}  # chunk -> its latest cpu_add
        self._last_add = -1
        self._last_sum = -1  # the latest reduce_scatter
        self._bucket: list[int] = []
        self._freed: list[list[int]] = []  # bucket -> steps that freed its gradient lists
        self._stall: list[int] = []  # what the next moment waits for
        self._filling: set[int] = set()
        self._held_grad_bytes = [0, 0]  # of the bucket before, and of this one with what is still filling
        self.bucket_peak_bytes = 0
        self.bytes_gathered = 0

    def _moves(self, c: int) -> bool:
        """Something has to be brought before the chunk can be used."""
        return self.ranks > 1 or not self.lives_on_gpu(c)

    def lives_on_gpu(self, c: int) -> bool:
        """Its own slice of the parameters is on the GPU all the time."""
        return self.home is Place.GPU or c in self.resident or c in self.kept

    def in_place(self, c: int) -> bool:
        """The gradient overwrites the working list: nothing else wants it whole, and it is not accumulated."""
        return c in self.on_gpu and not self.several

    # Residents.

    def reside(self) -> None:
        """Where everything is between two iterations."""
        b = self.b
        for chunk in b.layout.chunks:
            c = chunk.index
            if c in self.resident:
                b.live(c, Place.GPU)
            elif self.lives_on_gpu(c):
                b.resident(c, Place.GPU, "param")
            if c in self.kept and self.ranks > 1:
                b.resident(c, Place.GPU, "remote")
            if not b.uses.updated(c):
                if not self.lives_on_gpu(c):
                    b.resident(c, self.home, "param")
            elif c in self.staged:
                b.modes[c] = "stream"
                b.resident(c, Place.HOST, *b.layout.state_lists, *(("grad32",) if self.several else ()))
            elif c not in self.resident:
                b.resident(c, self.states, *b.layout.state_lists, self.gradient_list)
                if self.home is not Place.NVME:
                    b.resident(c, Place.HOST, "param")
                elif not self.lives_on_gpu(c):
                    b.resident(c, Place.NVME, "param")

    @property
    def gradient_list(self) -> str:
        """List that CPU Adam takes the gradient from."""
        return "grad32" if self.several else "grad"

    # Forward and backward.

    def forward_and_backward(
        self, gather_at: Mapping[int, int], fetch_at: Mapping[int, int], read_at: Mapping[int, int] | None = None
    ) -> None:
        """All moments with their copies, collectives and buckets. gather_at, fetch_at, read_at: opening moment of a
        visit -> the moment with whose start its gather, its fetch, its read from the disks may start (read_at: for
        parameters that live there)."""
        b, w, uses = self.b, self.workload, self.uses
        reads: dict[int, list[Visit]] = {}
        fetches: dict[int, list[Visit]] = {}
        gathers: dict[int, list[Visit]] = {}
        closing: dict[int, list[Visit]] = {}
        last_visit: dict[int, Visit] = {}
        for v in self.visits:
            free = last_visit[v.chunk].last + 1 if v.chunk in last_visit else 0  # not before the visit before has ended
            fetches.setdefault(max(free, fetch_at[v.first]), []).append(v)
            gathers.setdefault(max(free, gather_at[v.first]), []).append(v)
            if read_at is not None:
                reads.setdefault(max(free, read_at[v.first]), []).append(v)
            closing.setdefault(v.last, []).append(v)
            last_visit[v.chunk] = v
        arriving: dict[int, list[int]] = {}
        complete: dict[int, list[int]] = {}
        for c in self.trained:
            for _, first, last in uses.spans[c]:
                arriving.setdefault(first, []).append(c)
                complete.setdefault(last, []).append(c)
        opens: dict[int, list[int]] = {}
        for v in self.visits:
            opens.setdefault(v.first, []).append(v.chunk)

        for m in range(len(w.moments)):
            for v in reads.get(m, ()):
                self._read(v, m)
            for v in fetches.get(m, ()):
                self._fetch(v, m)
            for v in gathers.get(m, ()):
                self._gather(v, m)
            for c in arriving.get(m, ()):
                self._open_gradient(c, m)
            waits = [self._ready[c] for c in opens.get(m, ()) if c in self._ready]
            self.computed.append(b.compute(m, after=[*waits, *self._stall]))
            self._stall = []
            if m == 0:
                self._opening.append(self.computed[0])
            for v in closing.get(m, ()):
                if not (self.in_place(v.chunk) and v == last_visit[v.chunk]):
                    self._leave(v, m)
            for c in complete.get(m, ()):
                self._close_gradient(c, m)
            after = w.moments[m + 1] if m < self.last_moment else None
            if after is None or after.micro_batch != w.moments[m].micro_batch or after.phase is Phase.ADAM:
                self._flush(m)

    def _asked_at(self, m: int) -> list[int]:
        return [self.computed[m - 1]] if m > 0 else []

    def _read(self, v: Visit, m: int) -> None:
        """The own slice of a chunk that lives on the disks comes to the host."""
        c = v.chunk
        if self.lives_on_gpu(c) or self.home is not Place.NVME:
            return
        step = self.read_in(c, "param", v.first, [*self._asked_at(m), *self._gone.get(c, ())])
        self._ready[c] = step
        if m == 0:
            self._opening.append(step)

    def _fetch(self, v: Visit, m: int) -> None:
        """The own slice of a chunk that lives on the host (or came there from the disks) comes up."""
        c = v.chunk
        if self.lives_on_gpu(c):
            return
        read = [self._ready[c]] if self.home is Place.NVME else []
        step = self.b.fetch(c, v.first, after=[*self._asked_at(m), *read, *self._gone.get(c, ())])
        if read:
            self._left_host[c] = self.b.free(Queue.H2D, c, "param", Place.HOST, v.first, [step])
        self._ready[c] = step
        if m == 0:
            self._opening.append(step)

    def _gather(self, v: Visit, m: int) -> None:
        """The other ranks' slices come."""
        if self.ranks == 1:
            return
        c = v.chunk
        own = [] if self.lives_on_gpu(c) else [self._ready[c]]
        step = self.b.gather(c, v.first, [*self._asked_at(m), *own, *self._gone.get(c, ())])
        self._ready[c] = step
        self.bytes_gathered += self.b.layout.whole_bytes(c)
        if m == 0:
            self._opening.append(step)

    def _drop(self, c: int, list_name: str, m: int) -> int:
        return self.b.drop(Queue.COMPUTE, c, m, [self.computed[m]], list_name)

    def gone(self, c: int) -> list[int]:
        """Steps after which nothing is left of the chunk's last visit."""
        return self._gone.get(c, [])

    def _leave(self, v: Visit, m: int) -> None:
        """What a visit has brought goes, unchanged."""
        c = v.chunk
        gone: list[int] = []
        if self.ranks > 1:
            gone.append(self._drop(c, "remote", m))
        if not self.lives_on_gpu(c):
            gone.append(self._drop(c, "param", m))
        if c in self._left_host:
            gone.append(self._left_host[c])
        self._gone[c] = gone

    # Gradients.

    def _lists(self, c: int) -> tuple[str, ...]:
        """Lists on the GPU that a gradient of the chunk takes; none where it lies in a permanent one."""
        if self.in_place(c) or (c in self.on_gpu and self.ranks == 1):
            return ()
        return ("grad", "grad_remote") if self.ranks > 1 else ("grad",)

    def _open_gradient(self, c: int, m: int) -> None:
        size = 0
        for name in self._lists(c):
            before = [self._free_of[c]] if c in self._free_of else []
            earlier = self._freed[-2] if len(self._freed) >= 2 else []  # two buckets at most are under way
            self.b.alloc(Queue.COMPUTE, c, name, Place.GPU, m, after=[*before, *earlier])
            size += self.b.layout.payload_bytes(c, name)
        self._held_grad_bytes[1] += size
        self.bucket_peak_bytes = max(self.bucket_peak_bytes, sum(self._held_grad_bytes))
        self._filling.add(c)

    def _close_gradient(self, c: int, m: int) -> None:
        self._filling.discard(c)
        numel = self.b.layout.chunks[c].numel
        held = sum(self.b.layout.chunks[g].numel for g in self._bucket)
        if self._bucket and held + numel > self.bucket_params:
            self._flush(m)
            held = 0
        self._bucket.append(c)
        if held + numel >= self.bucket_params:
            self._flush(m)

    def _flush(self, m: int) -> None:
        """The bucket leaves: summed over the ranks, and to the host where Adam wants it there."""
        b = self.b
        last_batch = self.workload.moments[m].micro_batch == self.workload.micro_batches - 1
        freed: list[int] = []
        held = 0
        for c in self._bucket:
            held += sum(b.layout.payload_bytes(c, name) for name in self._lists(c))
            ready = self.computed[m]
            if self.ranks > 1:
                name = "remote" if self.in_place(c) else "grad_remote"
                ready = self._last_sum = b.reduce_scatter(c, m, [self.computed[m]], name)
                if self.in_place(c):
                    self._gone[c] = [ready]
            self.gradient_at[c] = [ready]
            if c in self.on_gpu:
                if self._lists(c):  # reduced into grad32, which stays
                    self._free_of[c] = b.free(Queue.NET, c, "grad", Place.GPU, m, after=[ready])
                    freed.append(self._free_of[c])
                    self.gradient_at[c] = [self._free_of[c]]
                continue
            now = self.blocking and last_batch
            added = [self._added[c]] if c in self._added else []
            down = b.add(
                Queue.D2H,
                Kind.WRITEBACK,
                chunk=c,
                list_name="grad",
                moment=m,
                size_bytes=b.layout.slice_numel(c) * 4
                if self.wide and last_batch
                else b.layout.payload_bytes(c, "grad"),
                after=[ready, *added],
                via=self.unpinned if now else None,
            )
            self._free_of[c] = b.free(Queue.D2H, c, "grad", Place.GPU, m, after=[down])
            freed.append(self._free_of[c])
            self.gradient_at[c] = [self._free_of[c]]
            if self.several:
                total = [self.read_in(c, "grad32", m, added)] if added and self.states is Place.NVME else []
                self._added[c] = self._last_add = b.cpu_add(c, "grad", m, after=[self._free_of[c], *total])
                self.gradient_at[c] = [self._added[c]]
            if self.states is Place.NVME:
                self.gradient_at[c] = [self.write_out(c, self.gradient_list, m, self.gradient_at[c])]
                if self.several:
                    self._added[c] = self.gradient_at[c][0]
            if now:
                self._stall = [down]
        if self._bucket:
            self._freed.append(freed)
            self._held_grad_bytes = [held, self._held_grad_bytes[1] - held]
        self._bucket = []

    def read_in(self, c: int, list_name: str, m: int, after: Iterable[int]) -> int:
        """A list comes from the disks to the host; returns the step that reads it."""
        return self.b.add(Queue.NVME, Kind.NVME_READ, chunk=c, list_name=list_name, moment=m, after=after)

    def write_out(self, c: int, list_name: str, m: int, after: Iterable[int]) -> int:
        """A list goes from the host to the disks; returns the step that has freed it on the host."""
        written = self.b.add(Queue.NVME, Kind.NVME_WRITE, chunk=c, list_name=list_name, moment=m, after=after)
        return self.b.free(Queue.NVME, c, list_name, Place.HOST, m, [written])

    # The update, behind the barrier: optimizer.step().

    @property
    def last_moment(self) -> int:
        return len(self.workload.moments) - 1

    def stage(self, c: int, room: Iterable[int]) -> tuple[int, int]:
        """States of a staged chunk come up, are updated and go down again. room: steps that have to end first. Returns
        (its gpu_adam, the step with which its states have left)."""
        b, m = self.b, self.last_moment
        before = [self.computed[-1], *self.gradient_at[c], *room]
        lists = [*b.layout.state_lists, *(("grad32",) if self.several else ())]
        update = self.gpu_adam(c, [b.fetch(c, m, before, list_name=name) for name in lists])
        gone = update
        for name in lists:
            down = [b.writeback(c, name, m, [update])] if name in b.layout.state_lists else [update]
            gone = b.drop(Queue.D2H, c, m, down, name)
        return update, gone

    def cpu_adam(self, c: int, after: Iterable[int] = ()) -> int:
        return self.b.cpu_adam(c, after=[self.computed[-1], *self.gradient_at[c], *self._all_summed(), *after])

    def _all_summed(self) -> list[int]:
        """What every update waits for under clipping: the norm is that of all gradients, summed over the ranks."""
        return [self._last_sum] if self._last_sum >= 0 and self.b.settings.clip else []

    def copy_up(self, c: int, after: Iterable[int], *, pinned: bool = True) -> list[int]:
        """The updated parameters go where they live; returns the steps that bring them (none where that is the
        host)."""
        if not self.lives_on_gpu(c):
            return []
        return [self.b.fetch(c, 0, after=list(after), via=None if pinned else self.unpinned)]

    def gpu_adam(self, c: int, after: Iterable[int] = ()) -> int:
        """Of a chunk whose states are on the GPU; after all gradients have been added, for the norm."""
        norm = [*([self._last_add] if self._last_add >= 0 else []), *self._all_summed()]
        return self.b.gpu_adam(c, after=[self.computed[-1], *self.gradient_at[c], *norm, *after])

    def finish(self, last: Iterable[int], updated: Mapping[int, list[int]]) -> None:
        """The chunks that are whole on every GPU are made whole again, and the next iteration waits for all of it.
        updated: chunk -> the steps after which its own slice is up to date. last: steps that optimizer.step() ends
        with."""
        ends = list(last)
        if self.ranks > 1:
            for c in sorted(self.kept & set(updated)):
                ends.append(self.b.gather(c, 0, updated[c]))
                self.bytes_gathered += self.b.layout.whole_bytes(c)
        for step in self._opening:
            self.b.wait(step, *(Ref(i, 1) for i in ends))

    def hold(self, name: str, place: Place, size_bytes: int) -> None:
        """A buffer of the system's own, if there is anything of it beyond the lists."""
        if size_bytes > 0:
            self.b.buffers.append((name, place, size_bytes))

    def check_gpu_room(self, what: str) -> None:
        """Raise DoesNotFit where what the GPU holds all the time leaves no room for the highest tide."""
        b = self.b
        worst = worst_moment(b.uses.tide)
        b.check_room(
            Place.GPU,
            b.held_bytes(Place.GPU) + b.uses.tide[worst],
            f"{what}, {format_bytes(b.held_bytes(Place.GPU))}, beside {describe_moment(b.workload, worst)}",
        )

    def describe_moves(self) -> str:
        if self.ranks == 1:
            return "one rank: no collectives"
        return (
            f"{self.ranks} ranks: each holds 1/{self.ranks} of every chunk; {format_bytes(self.bytes_gathered)} are "
            "gathered an iteration"
        )
