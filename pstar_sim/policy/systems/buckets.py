"""Buckets: gradients are summed over the ranks and leave together.

[Note: gradients of several micro-batches] A resident chunk accumulates in grad32 on the GPU, others on the host
(cpu_add). DeepSpeed brings the sum up, adds there and sends it down, which uses the link instead of the CPU and is
hidden by backward as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pstar_sim.core.step import Place
from pstar_sim.policy.passes.step_by_step.disks import read_in, write_out
from pstar_sim.policy.passes.step_by_step.gradient_lists import GradientLists, arrivals
from pstar_sim.policy.systems.shards import Flush, Shards
from pstar_sim.workload.workload import Phase


class Buckets:
    """The gradients of one iteration; `before` and `behind` are called once per moment, in order.

    lists: of gradients outside working lists.
    complete: moment -> chunks whose gradient is, behind it.
    arrived: chunk -> steps after which its gradient is at Adam's place.
    peak_bytes: of gradient lists on the GPU.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._b = b = shards.b
        listed = [c for c in shards.trained if not shards.in_place(c)]
        self.lists = GradientLists(b, listed, stay=shards.on_gpu, whole=shards.scheme.whole)
        self.arrived: dict[int, Sequence[int]] = {}
        self.peak_bytes = 0
        _, self.complete = arrivals(b.uses, shards.trained)
        self._bucket: list[int] = []
        self._bucket_params = 0
        self._gone: list[dict[int, int]] = []  # per bucket that left: chunk -> step that freed its lists
        self._gone_bytes = 0  # bytes of the latest
        self._open: set[int] = set()  # chunks with lists that arrive or are in the bucket
        self._open_bytes = 0
        self._stall: list[int] = []  # steps for which the next moment waits

    def before(self, m: int) -> list[int]:
        """Open lists of gradients that begin to arrive; returns what the moment waits for."""
        for c in self.lists.opens.get(m, ()):
            self.lists.open(c, m, self._make_room(c))
        stall, self._stall = self._stall, []
        return stall

    def _make_room(self, c: int) -> Iterable[int]:
        two_lists = self._shards.scheme.two_lists
        stay = 0 if two_lists and self._open else 1  # buckets that left whose lists may still be there
        beside = self._gone_bytes if stay and not (two_lists and self._gone and c in self._gone[-1]) else 0
        self._open.add(c)
        self._open_bytes += self.lists.bytes_of(c)
        self.peak_bytes = max(self.peak_bytes, beside + self._open_bytes)
        return self._gone[-1 - stay].values() if len(self._gone) > stay else ()

    def behind(self, m: int, here: int) -> None:
        """The bucket leaves when full, and at a micro-batch's end."""
        for c in self.complete.get(m, ()):
            self._fill(c, m, here)
        if not self._bucket:
            return
        moments = self._b.workload.moments
        following = moments[m + 1] if m + 1 < len(moments) else None
        if following is None or following.phase is Phase.ADAM or following.micro_batch != moments[m].micro_batch:
            self._flush(m, here)

    def _fill(self, c: int, m: int, here: int) -> None:
        numel, limit = self._b.layout.chunks[c].numel, self._shards.scheme.bucket_params
        if self._bucket and self._bucket_params + numel > limit:
            self._flush(m, here)
        self._bucket.append(c)
        self._bucket_params += numel
        if self._bucket_params >= limit:
            self._flush(m, here)

    def _flush(self, m: int, here: int) -> None:
        for c in self._bucket:
            self.arrived[c] = self._leave(c, m, here)
        self._gone.append({c: self.lists.freed[c] for c in self._bucket if c in self.lists.chunks})
        self._gone_bytes = sum(map(self.lists.bytes_of, self._gone[-1]))
        self._open -= self._gone[-1].keys()
        self._open_bytes -= self._gone_bytes
        self._bucket, self._bucket_params = [], 0

    def _leave(self, c: int, m: int, here: int) -> Sequence[int]:
        summed = self.lists.sum(c, m, [here], "remote" if self._shards.in_place(c) else "grad_remote")
        if self._shards.scheme.sums_wait:
            self._stall += summed
        if c not in self._shards.on_gpu:
            return [self._send(c, m, summed)]
        return [self.lists.keep(c, m, summed)] if c in self.lists.chunks else summed

    def _send(self, c: int, m: int, summed: Sequence[int]) -> int:
        b, shards, flush = self._b, self._shards, self._shards.scheme.flush
        last = b.workload.moments[m].micro_batch == b.workload.micro_batches - 1
        blocking = last and flush is Flush.BLOCKING
        waited_for = last and flush is not Flush.PINNED
        size_bytes = b.layout.slice_numel(c) * 4 if last and flush is Flush.FP32 else None
        down = self.lists.send(c, m, summed, size_bytes=size_bytes, via=shards.unpinned if blocking else None)
        if waited_for:
            self._stall.append(down)
        if shards.scheme.states is not Place.NVME:
            return self.lists.add(c, m)
        earlier = [self.lists.added[c]] if c in self.lists.added else []
        so_far = [read_in(b, c, self.lists.host_list, m, earlier)] if earlier else []
        written = write_out(b, c, self.lists.host_list, m, [self.lists.add(c, m, so_far)])
        self.lists.added[c] = written
        return written
