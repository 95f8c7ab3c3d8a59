"""The collectives of a plan on flat tensors: what a rank sends to the others and gets from them.

`Wire` is used by one thread at a time (the net queue's) on a process group of its own, so that the order of collectives
is the plan's on every rank and nothing of the user's comes between them. It knows no chunk and no plan.

A flat tensor of n elements is exchanged in equal slices of n // ranks; the few elements left over (only where nothing
is sliced and n is no multiple of the ranks) are summed whole. gloo has no reduce-scatter of its own (torch's is an
all-reduce of a copy): there every rank sums the whole tensor in place, twice the bytes, and uses its slice.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Wire", "open_group"]

SOON_S = 0.01  # a thread that has waited longer than this looks less often
NAPS_S = (5e-5, 5e-4)


class Wire:
    """Collectives on `group`, a backend's process group that is nobody else's (`open_group`). check(waited_s): called
    while waiting; raises when the others are gone. explain: what to raise for a collective that broke.

    sent_bytes: what this rank has sent to the others, a ring reckoned (its own slice left out).
    """

    def __init__(
        self,
        group: Any,
        *,
        check: Callable[[float], None],
        explain: Callable[[BaseException], BaseException],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.rank: int = group.rank()
        self.ranks: int = group.size()
        self.sent_bytes = 0
        self._group = group
        self._check = check
        self._explain = explain
        self._clock = clock
        self._nccl = group.name() == "nccl"
        self.on_host: Wire = self  # for tensors in host memory, which NCCL does not take

    def _slice(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(what divides evenly, this rank's slice of it, the rest)."""
        size = flat.numel() // self.ranks
        even = flat[: size * self.ranks]
        return even, even[self.rank * size : (self.rank + 1) * size], flat[size * self.ranks :]

    def gather(self, flat: torch.Tensor) -> None:
        """Each rank's slice of `flat` becomes that rank's own, in place. Returns when it is there."""
        even, mine, _ = self._slice(flat)
        if even.numel():
            self._do(lambda: self._group._allgather_base(even, mine))
            self.sent_bytes += mine.numel() * mine.element_size() * (self.ranks - 1)

    def reduce_scatter(self, flat: torch.Tensor) -> None:
        """This rank's slice of `flat` becomes the sum over the ranks, in place; the other slices are undefined."""
        even, mine, rest = self._slice(flat)
        if even.numel():
            if self._nccl:
                self._do(lambda: self._group._reduce_scatter_base(mine, even))
            else:
                self.sum(even)
            self.sent_bytes += mine.numel() * mine.element_size() * (self.ranks - 1)
        if rest.numel():
            self.sum(rest)

    def sum(self, flat: torch.Tensor) -> None:
        """`flat` becomes the sum over the ranks, in place."""
        self._do(lambda: self._group.allreduce([flat]))

    def broadcast(self, flat: torch.Tensor) -> None:
        """`flat` becomes that of the group's first rank."""
        if self._nccl and flat.device.type == "cpu":
            self.on_host.broadcast(flat)
            return
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._do(lambda: self._group.broadcast([flat], options))

    def exchange(self, row: torch.Tensor) -> torch.Tensor:
        """[n] of every rank -> [ranks, n]."""
        if self._nccl and row.device.type == "cpu":
            return self.on_host.exchange(row)
        rows = torch.empty(self.ranks * row.numel(), dtype=row.dtype, device=row.device)
        self._do(lambda: self._group._allgather_base(rows, row.contiguous()))
        return rows.reshape(self.ranks, -1)

    def _do(self, begin: Callable[[], Any]) -> None:
        try:
            work = begin()
        except RuntimeError as error:
            raise self._explain(error) from error
        self._wait(work)

    def _wait(self, work: Any) -> None:
        """Not Work.wait: that cannot be left when a rank that will never answer is known to be gone."""
        if self._nccl:
            work.wait()  # orders the stream; NCCL's own watchdog ends what never comes
            torch.cuda.current_stream().synchronize()
            return
        start_s = self._clock()
        while not work.is_completed():
            waited_s = self._clock() - start_s
            try:
                self._check(waited_s)
            except BaseException:
                _keep_for_ever(self._group)
                raise
            time.sleep(NAPS_S[waited_s > SOON_S])
        try:
            work.wait()  # raises what it died of
        except RuntimeError as error:
            raise self._explain(error) from error

    def close(self) -> None:
        """Give the group up; a collective that another thread is in goes on without an owner."""
        self._group = None


def _keep_for_ever(group: Any) -> None:
    """A collective was abandoned. Destroying its group would wait for it, at the end of the process at the latest, and
    so for a rank that is gone: leave it to the operating system."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def open_group(backend: str, name: str, rank: int, ranks: int, timeout_s: float) -> Any:
    """A process group ("gloo" or "nccl") of `ranks` processes that know `name`. Not by torch's `new_group`, in which
    every process of the job has to take part and whose names come apart where the processes have made other groups
    before."""
    store = dist.distributed_c10d.PrefixStore(name, dist.distributed_c10d._get_default_store())
    limit = timedelta(seconds=timeout_s)
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, ranks, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(store, rank, ranks, options)
