"""GPU memory of chunks on CUDA: storages that get and lose their memory in place, from blocks that fit again.

[Note: reserved bytes] A plan's budget is what the process may *reserve* on the card, not what its tensors hold: memory
that torch keeps for later is taken from others all the same. So that the two stay together, payloads of the size that
moves most (the uniform chunk) come from one private MemPool, in which every block has that size and any free one fits
any of them. The pool may grow to the budget less the highest tide and what is resident for good: memory that non-model
data never needs. It is never given back and never split, so a steady iteration asks the driver for nothing.

What does not fit there (other sizes, and room that the plan takes at low tide only) is allocated outside the pool,
under a stream of its own, so that torch keeps it apart from the user's tensors too. Its free blocks go back to the
driver when the tide, or another size, needs the room; that stops the device, is counted in `exchanges`, and does not
happen under a plan of uniform chunks whose payloads and highest tide fit the budget together.

`torch.cuda.set_per_process_memory_fraction` has no part in this: it would make torch refuse memory, in the middle of an
operator, for what cached blocks of the wrong size hold. What keeps the budget is the arena's ledger (bytes in use), the
gate (bytes whose work is in flight) and this module (bytes that are free).

[Note: torch versions] `torch.cuda.use_mem_pool` concerns the current thread from torch 2.8 on and every thread before,
where a context by stream is used instead. Both refuse to be entered twice for one pool, hence the lock.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pstar_sim.core.effects import frees, takes
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Place
from pstar_sim.errors import OutOfMemory

__all__ = ["Blocks", "PoolShape", "block_bytes", "pool_shape"]

log = logging.getLogger("executor")

MIB = 1 << 20
PoolShape = tuple[int, int]  # bytes of a block, bytes the pool may grow to


def block_bytes(size: int) -> int:
    """What torch's allocator takes from the driver for a block of its own of this size: multiples of 2 MiB (small ones
    share such a piece)."""
    return -(-size // (2 * MIB)) * (2 * MIB) if size > MIB else -(-max(size, 1) // 512) * 512


def pool_shape(plan: Plan) -> PoolShape:
    """Of the pool of equal blocks: the payload size that comes and goes most often, and the bytes that the highest tide
    and what is resident for good leave for it."""
    moves: dict[tuple[int, str], int] = {}
    for step in plan.steps:
        if step.chunk is None:
            continue
        for found in (takes(step), frees(step)):
            if found is not None and found[0].place is Place.GPU:
                key = found[0].chunk, found[0].list
                moves[key] = moves.get(key, 0) + 1
    if not plan.steps:  # everything on demand
        moves = {(chunk.index, "param"): 1 for chunk in plan.layout.chunks}
    counts: dict[int, int] = {}
    for (chunk, list_name), count in moves.items():
        size = block_bytes(plan.layout.payload_bytes(chunk, list_name))
        counts[size] = counts.get(size, 0) + count
    if not counts:
        return 0, 0
    block = max(counts, key=lambda size: (counts[size] * size, size))
    for_good = sum(
        block_bytes(plan.layout.payload_bytes(r.chunk, r.list))
        for r in plan.initial
        if r.place is Place.GPU and r.chunk >= 0 and (r.chunk, r.list) not in moves
    )
    for_good += sum(size for _, place, size in plan.buffers if place is Place.GPU)
    return block, max(0, plan.gpu_budget_bytes - plan.workload.peak_non_model_bytes - for_good)


class Blocks:
    """Memory of payloads on one device. Every method may be called from any thread.

    pool_bytes: what the pool of equal blocks has reserved. exchanges: how often cached memory went back to the driver
    because something else needed the room.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.exchanges = 0
        self.pool_bytes = 0
        self._budget_bytes = 0
        self._block, self._most_bytes = 0, 0
        self._free_blocks = 0  # of the pool
        self._in_pool: set[int] = set()  # storages that have one of its blocks
        self._in_former: set[int] = set()  # the same, of pools of earlier plans
        self._loose_held_bytes = 0  # outside the pool, with memory
        self._loose_free: Counter[int] = Counter()  # outside the pool, given back and still reserved: blocks by size
        self._lock = threading.Lock()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def expect(self, shape: PoolShape, budget_bytes: int) -> None:
        """A plan with these figures begins. What an earlier one left is kept where the block is the same."""
        with self._lock:
            if shape[0] != self._block:
                with torch.cuda.device(self.device):
                    self._pool = torch.cuda.MemPool() if shape[0] else None
                self._in_former |= self._in_pool
                self._in_pool.clear()
                self.pool_bytes = self._free_blocks = 0
            self._block, self._most_bytes = shape
            self._budget_bytes = budget_bytes

    @property
    def loose_free_bytes(self) -> int:
        """Reserved outside the pool, of use to nobody at present."""
        return sum(size * count for size, count in self._loose_free.items())

    def grow(self, payload: torch.Tensor) -> None:
        """Memory for a payload that has none. Raises OutOfMemory, nothing changed, if the device has none left."""
        storage = payload.untyped_storage()
        size = payload.numel() * payload.element_size()
        block = block_bytes(size)
        with self._lock:
            if self._fits_pool(block):
                self._allocate(lambda: storage.resize_(size), pooled=True, asked_bytes=size)
                self._in_pool.add(storage._cdata)
                self._count_block()
                return
            if not self._loose_free[block]:
                self._make_room(block)
            self._allocate(lambda: storage.resize_(size), pooled=False, asked_bytes=size)
            self._loose_free[block] = max(0, self._loose_free[block] - 1)
            self._loose_held_bytes += block

    def shrink(self, payload: torch.Tensor) -> None:
        """Take the memory away. Nothing on the device may use it any more."""
        storage = payload.untyped_storage()
        with self._lock:
            size = storage.nbytes()
            if not size:
                return
            storage.resize_(0)
            if storage._cdata in self._in_pool:
                self._in_pool.discard(storage._cdata)
                self._free_blocks += 1
            elif storage._cdata in self._in_former:
                self._in_former.discard(storage._cdata)
            else:
                block = block_bytes(size)
                self._loose_held_bytes -= block
                self._loose_free[block] += 1

    def payload(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor on a storage of its own without memory (it has some for a moment: torch makes no other)."""
        made: list[torch.Tensor] = []
        size = numel * dtype.itemsize
        block = block_bytes(size)

        def allocate() -> None:
            made.append(torch.empty(numel, dtype=dtype, device=self.device))

        with self._lock:
            pooled = self._fits_pool(block)
            self._allocate(allocate, pooled=pooled, asked_bytes=size)
            made[0].untyped_storage().resize_(0)
            if pooled:
                self._count_block()
                self._free_blocks += 1
            else:
                self._loose_free[block] = max(1, self._loose_free[block])
        return made[0]

    def make_room(self, others_bytes: int) -> None:
        """Non-model data may need so many bytes: free memory outside the pool goes back if it stands in the way."""
        with self._lock:
            free = self.loose_free_bytes
            if free and self.pool_bytes + self._loose_held_bytes + free + others_bytes > self._budget_bytes:
                self._exchange()

    def _fits_pool(self, block: int) -> bool:
        if not self._block or block != self._block:
            return False
        return self._free_blocks > 0 or self.pool_bytes + block <= self._most_bytes

    def _count_block(self) -> None:
        if self._free_blocks:
            self._free_blocks -= 1
        else:
            self.pool_bytes += self._block

    def _make_room(self, more_bytes: int) -> None:
        """Cached memory goes back before the process reserves more than the budget."""
        reserved = torch.cuda.memory_reserved(self.device)
        if reserved + more_bytes <= self._budget_bytes:
            return
        idle = reserved - torch.cuda.memory_allocated(self.device) - self._free_blocks * self._block
        if idle >= more_bytes:
            self._exchange()

    def _exchange(self) -> None:
        self.exchanges += 1
        self._loose_free.clear()
        torch.cuda.empty_cache()  # stops the device; leaves the pool's blocks alone

    def _allocate(self, allocate: Callable[[], object], *, pooled: bool, asked_bytes: int) -> None:
        for last in (False, True):
            try:
                with torch.cuda.device(self.device), torch.cuda.stream(self._stream), self._routed(pooled):
                    allocate()
                return
            except torch.OutOfMemoryError as error:
                if last:
                    payloads = len(self._in_pool) * self._block + self._loose_held_bytes
                    raise OutOfMemory(
                        what="a chunk",
                        asked_bytes=asked_bytes,
                        payload_bytes=payloads,
                        other_bytes=max(0, torch.cuda.memory_allocated(self.device) - payloads),
                        limit_bytes=None,
                    ) from error
            self._exchange()  # inside a pool's context torch frees nothing of what it keeps elsewhere

    @contextlib.contextmanager
    def _routed(self, pooled: bool) -> Iterator[None]:
        """See [Note: torch versions]."""
        if not pooled:
            yield
            return
        c: Any = torch._C
        if hasattr(c, "_cuda_beginAllocateCurrentThreadToPool"):
            with torch.cuda.use_mem_pool(self._pool, self.device):
                yield
            return
        index = self.device.index
        c._cuda_beginAllocateCurrentStreamToPool(index, self._pool.id)
        try:
            yield
        finally:
            end = getattr(c, "_cuda_endAllocateCurrentStreamToPool", None) or c._cuda_endAllocateToPool
            end(index, self._pool.id)
            c._cuda_releasePool(index, self._pool.id)

    def close(self) -> None:
        """Every payload is gone: the pool's memory goes back to the driver."""
        with self._lock:
            self._pool = None
            self._in_pool.clear()
            self._in_former.clear()
            self._block = self.pool_bytes = self._free_blocks = self._loose_held_bytes = 0
            self._exchange()
