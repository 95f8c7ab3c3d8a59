"""The collectives of a plan on flat tensors.

Only the net queue's thread uses `Wire`, on a process group of its own, so their order is the plan's on every rank.

n elements are exchanged in equal slices of n // ranks, those left over (where nothing is sliced) summed whole. gloo has
no reduce-scatter: every rank sums the whole in place, twice the bytes.

[Note: bounded waits] The thread waits for gloo's collectives in short intervals, until a rank is known to be gone.
NCCL's are only issued, and whoever waits for their stream (also the user's `loss.item()`) waits inside the driver, for
ever if a rank never comes. So another thread watches the last one (`_Deadline`): when a rank is gone, or nothing has
come back for timeout_s, it fails the run and then aborts the communicator, which ends kernels and waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from executor.devices.torch_private import all_gather, default_store, limit_nccl, reduce_scatter

log = logging.getLogger("executor")

TORCH_LATER_S = 60.0  # torch's own limit, which ends the process without our message, comes this much later than ours
LOOK = timedelta(milliseconds=20)  # a thread that waits looks so often whether the other ranks are there


class Wire:
    """Collectives on `group`, a process group of its own (`open_group`).

    check(waited_s): called while waiting, raises when the others are gone.
    explain: the error for a collective that broke. broken(error): called from another thread, where `check` raised for
    NCCL.
    sent_bytes: to the others, if each goes round a ring (without the own slice).
    """

    def __init__(
        self,
        group: Any,
        *,
        check: Callable[[float], None],
        explain: Callable[[BaseException], BaseException],
        broken: Callable[[BaseException], None] = lambda error: None,
        device: torch.device | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.rank: int = group.rank()
        self.ranks: int = group.size()
        self.sent_bytes = 0
        self._group = group
        self._check = check
        self._explain = explain
        self._device = device
        self._clock = clock
        self._nccl = group.name() == "nccl"
        self._deadline = _Deadline(check, broken, clock) if self._nccl else None
        self.on_host: Wire = self  # buffers for tensors in host memory, which NCCL does not accept

    def _slice(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(what divides evenly, this rank's slice of it, the rest)."""
        size = flat.numel() // self.ranks
        even = flat[: size * self.ranks]
        return even, even[self.rank * size : (self.rank + 1) * size], flat[size * self.ranks :]

    def gather(self, flat: torch.Tensor) -> None:
        """Fills each rank's slice of `flat` from that rank, in place."""
        even, mine, _ = self._slice(flat)
        if even.numel():
            self._do(lambda: all_gather(self._group, even, mine, self._options("AllgatherOptions")))
            self.sent_bytes += mine.numel() * mine.element_size() * (self.ranks - 1)

    def reduce_scatter(self, flat: torch.Tensor) -> None:
        """This rank's slice becomes the sum, in place; others are undefined."""
        even, mine, rest = self._slice(flat)
        if even.numel():
            if self._nccl:
                self._do(lambda: reduce_scatter(self._group, mine, even, self._options("ReduceScatterOptions")))
            else:
                self.sum(even)
            self.sent_bytes += mine.numel() * mine.element_size() * (self.ranks - 1)
        if rest.numel():
            self.sum(rest)

    def sum(self, flat: torch.Tensor) -> None:
        """In place, over the ranks."""
        self._do(lambda: self._group.allreduce([flat], self._options("AllreduceOptions")))

    def broadcast(self, flat: torch.Tensor) -> None:
        """Fill `flat` with the first rank's values."""
        if self._nccl and flat.device.type == "cpu":
            self.on_host.broadcast(flat)
            return
        options = self._options("BroadcastOptions")
        options.rootRank = options.rootTensor = 0
        self._do(lambda: self._group.broadcast([flat], options))

    def exchange(self, row: torch.Tensor) -> torch.Tensor:
        """Every rank's [n] as [ranks, n]."""
        if self._nccl and row.device.type == "cpu":
            return self.on_host.exchange(row)
        rows = torch.empty(self.ranks * row.numel(), dtype=row.dtype, device=row.device)
        self._do(lambda: all_gather(self._group, rows, row.contiguous(), self._options("AllgatherOptions")))
        return rows.reshape(self.ranks, -1)

    def _do(self, begin: Callable[[], Any]) -> None:
        try:
            work = begin()
        except RuntimeError as error:
            raise self._explain(error) from error
        self._wait(work)

    def _wait(self, work: Any) -> None:
        """[Note: bounded waits]: gloo's Work.wait without a limit cannot be left when a rank is gone."""
        if self._deadline is not None:
            try:
                if work is not None:  # otherwise torch has ordered the stream itself
                    work.wait()  # on the device: orders the current stream, returns at once
            except RuntimeError as error:
                raise self._explain(error) from error
            self._deadline.watch(torch.cuda.current_stream(self._device).record_event())
            return
        start_s = self._clock()
        while not work.is_completed():
            with contextlib.suppress(RuntimeError):
                work.wait(LOOK)
            if work.is_completed():
                break
            try:
                self._check(self._clock() - start_s)
            except BaseException:
                _keep_for_ever(self._group)
                raise
        try:
            work.wait()  # raises the error that ended the work
        except RuntimeError as error:
            raise self._explain(error) from error

    def _options(self, name: str) -> Any:
        """NCCL is told that its caller waits at once: torch would give memory back late."""
        options = getattr(dist.distributed_c10d, name)()
        if self._nccl and hasattr(options, "asyncOp"):
            options.asyncOp = False
        return options

    def abort(self) -> None:
        """End NCCL's unfinished work (gloo's waits end themselves); any thread may call, repeatedly."""
        group, deadline = self._group, self._deadline
        if deadline is None or group is None or not deadline.end():
            return
        abort = getattr(group, "abort", None) or getattr(group, "_shutdown", None)
        if abort is None:
            log.error("torch %s cannot abort NCCL: this process waits for NCCL's own limit", torch.__version__)
            return
        abort()

    def close(self) -> None:
        """Another thread's collective continues without an owner."""
        if self._deadline is not None:
            self._deadline.end()
        self._group = None


class _Deadline:
    """[Note: bounded waits]"""

    def __init__(
        self,
        check: Callable[[float], None],
        broken: Callable[[BaseException], None],
        clock: Callable[[], float],
        every_s: float = 0.2,
    ) -> None:
        self._check = check
        self._broken = broken
        self._clock = clock
        self._every_s = every_s
        self._issued: list[tuple[float, Any]] = []  # (time of issue, event) of collectives that may not have happened
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, event: Any) -> None:
        with self._lock:
            self._issued.append((self._clock(), event))
            if len(self._issued) > 64:
                self._drop_done()
            if self._thread is None and not self._over.is_set():
                self._thread = threading.Thread(target=self._run, name="executor-collectives", daemon=True)
                self._thread.start()

    def end(self) -> bool:
        """Returns whether it still watched."""
        was = not self._over.is_set()
        self._over.set()
        return was

    def _drop_done(self) -> None:
        while self._issued and self._issued[0][1].query():
            self._issued.pop(0)

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            try:
                with self._lock:
                    self._drop_done()
                    waited_s = self._clock() - self._issued[0][0] if self._issued else 0.0
                if waited_s:
                    self._check(waited_s)
            except BaseException as error:  # passed on: this error ends the run
                self._broken(error)
                return


def _keep_for_ever(group: Any) -> None:
    """Destroying an abandoned collective's group, even at the process' end, would wait for a rank that is gone."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def open_group(backend: str, name: str, rank: int, ranks: int, timeout_s: float) -> Any:
    """A "gloo" or "nccl" group of `ranks` processes that know `name`. torch's `new_group` would need every process of
    the job, and its names differ where processes have made other groups."""
    store = dist.distributed_c10d.PrefixStore(name, default_store())
    limit = timedelta(seconds=timeout_s + TORCH_LATER_S)  # `check` reports before this limit
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, ranks, limit)
    options = dist.ProcessGroupNCCL.Options()
    limit_nccl(options, limit)
    return dist.ProcessGroupNCCL(store, rank, ranks, options)
