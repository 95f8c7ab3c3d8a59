"""GPU memory of chunks on CUDA: storages that get and lose their memory in place, from blocks of equal size.

[Note: reserved bytes] A plan's budget limits the bytes in use; the process *reserves* more: torch's fragments
(benchmarks/gpu_memory.py measures them). Without expandable segments ([Note: pages]), payloads of the size that moves
most come from one private MemPool, in which any free block fits. The pool may grow to the budget less the highest tide
and the payloads that always stay. Where operators are refused memory all the same (ladder.py), `give_back` replaces it;
torch returns the free blocks of a pool without a holder to the driver.

Other payloads are allocated outside the pool, under a stream of their own. Their free blocks go back to the driver when
the tide, or another size, needs the room, which stops the device and is counted in `exchanges`.

[Note: exchanges] An exchange also drops the memory that torch keeps for operators, which ask the driver for it again.
So it comes when more than the budget and a slack would be reserved, and gives back all that is free. The slack (0 where
the plan takes all bytes of the card) begins with a twentieth of the budget, at least 64 MiB, and doubles with each
exchange, up to the bytes beyond the budget. Free pieces of segments in use cannot go back.

[Note: segments] torch cuts blocks below 10 MiB from segments of the driver. Blocks are counted by the bytes that they
take of a segment, the pool by its segments.

[Note: pages] torch cuts small tensors from free blocks of large ones, so the next large tensor (logits, attention)
finds no whole block and takes new memory. With `expandable_segments` each stream has one range of addresses, to which
pages (as a rule of 20 MiB) are mapped. A free page can be mapped elsewhere, so there is no pool. Before the tide rises
and before a payload gets memory, free pages are unmapped if more than the budget and a slack could be mapped: an
exchange too, but the slack stays.

Operators need no page for a rise of the tide while the pages of the highest tide are mapped and they use as much as in
the last iteration. A rise is assumed to find room where four times as much is free in their range. Payloads need pages
where they hold more than at any time since the last exchange. Where the two ranges do not fit side by side at their
largest, pages go to operators before the highest tide and back after it: two exchanges. With one range for both, a copy
into memory that operators have freed would wait for all issued work.

[Note: others] Tensors on the device outside the plan are in what torch reserves, not in the budget: what is in use
between two iterations beyond the plan's own.

[Note: fragments] Unless the user has set torch's allocator, a run sets `expandable_segments` or, where the driver maps
no pages, two others: from max_split_size_mb on blocks stay whole, and, under a cap, torch gives idle blocks back one by
one before it takes memory beyond the budget (garbage_collection_threshold, a share of what the process may reserve).
The end of the last run restores torch's own settings.

[Note: refused beside a pool] While a thread is inside a pool's context, torch (up to 2.11) gives no cached blocks back
to the driver for another thread, whose operator is refused memory although enough is idle. It runs once more inside
`undisturbed` (`guard.py`). Where operators are not watched yet, `Ladder.recover` keeps the plan if the requested bytes
are idle.

[Note: graphs] While a CUDA graph is captured, no thread may take or give back memory, and dropping a pool can end the
process, because its destructor cannot raise. A capture in the calling thread is refused with PlanError; one in another
thread cannot be detected.

[Note: torch versions] Neither context of torch26.py can be entered twice for one pool, hence the lock.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from executor.devices.torch26 import allocating_in, maps_pages, set_allocator
from executor.devices.torch_private import storage_key
from executor.devices.updates import scratch_bytes
from pstar_sim.core.effects import OTHERS, frees, takes
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Place
from pstar_sim.errors import OutOfMemory, PlanError

log = logging.getLogger("executor")

MIB = 1 << 20
LEAST_SLACK_BYTES = 64 * MIB
SLACK = 0.05  # of a budget, where it is more
PAGED_SLACK = 0.04  # the same with pages, parts of which come beside it
ROOMY = 4  # times a rise of the tide: free memory in which it finds room
WORTH_BYTES = 32 * MIB  # of free pages, for which an exchange is worth it
COLLECTED_SHARE = 0.9  # of a budget: with 0.75 torch also gives back where it reserves less than the budget anyway
_LARGE_BLOCKS = "max_split_size_mb:128"
_PAGES = "expandable_segments:True"
_DEFAULT = "expandable_segments:False"  # and all others as torch has them
_OURS = f"{_LARGE_BLOCKS},garbage_collection_threshold:"  # then the share; where there are no pages
_set_last: list[str] = []  # the settings that are ours, at most one
_in_use: weakref.WeakSet[Blocks] = weakref.WeakSet()  # with those settings
# torch reads the settings once, from either variable, when the process first allocates.
_UNSET = (
    "Before Python starts, take {0} out of PYTORCH_CUDA_ALLOC_CONF and of PYTORCH_ALLOC_CONF, or remove both: unset "
    "PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF"
)
PoolShape = tuple[int, int]  # bytes of a block, most bytes of the pool


def block_bytes(size: int) -> int:
    """[Note: segments]"""
    return _up(size, 2 * MIB) if size >= 10 * MIB else _up(max(size, 1), 512)


def segment_of(block: int) -> tuple[int, int]:
    """(bytes of the segment that holds such a block, blocks in it)."""
    if block >= 10 * MIB:
        return _up(block, 2 * MIB), 1
    segment = 2 * MIB if block <= MIB else 20 * MIB
    return segment, segment // block


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def set_up_allocator() -> None:
    """Let torch map pages, or keep large blocks whole. Raise PlanError where torch does not manage memory so."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        raise PlanError(
            f"torch's CUDA allocator is {backend!r}, which has no memory pools. " + _UNSET.format(f"backend:{backend}")
        )
    settings = _settings()
    rounded = settings.get("roundup_power2_divisions") or {}
    if any(int(divisions) > 1 for divisions in (rounded.values() if isinstance(rounded, dict) else [rounded])):
        raise PlanError(
            "torch's CUDA allocator has roundup_power2_divisions, which makes blocks larger than a plan counts: its "
            "budget would not hold. " + _UNSET.format("roundup_power2_divisions")
        )
    if not limit_fragments(1.0) and not settings.get("expandable_segments"):
        log.info("torch may reserve less beside a plan's budget with %s added to PYTORCH_ALLOC_CONF", _PAGES)


def limit_fragments(share: float) -> bool:
    """[Note: fragments]; returns whether the settings are ours.

    share: of the bytes that torch may reserve."""
    if _settings().get("PYTORCH_CUDA_ALLOC_CONF", "") not in {"", *_set_last}:
        return False
    if _set_last in ([], [_DEFAULT]):
        _set(_PAGES)
        try:
            pages = maps_pages()
        except BaseException:
            _set(_DEFAULT)
            raise
        if pages:
            return True
    elif _set_last == [_PAGES]:
        return True
    _set(f"{_DEFAULT},{_OURS}{min(max(share, 0.001), 0.999):.3f}")
    return True


def restore_settings(blocks: Blocks) -> None:
    """Torch's own, if they are ours and `blocks` are the last in use."""
    _in_use.discard(blocks)
    if _set_last and not _in_use and _settings().get("PYTORCH_CUDA_ALLOC_CONF", "") in {"", *_set_last}:
        _set(_DEFAULT)


def _set(settings: str) -> None:
    _set_last[:] = [settings]
    set_allocator(settings)


def _settings() -> dict[str, Any]:
    settings: dict[str, Any] = torch.cuda.memory._snapshot().get("allocator_settings", {})
    return settings


def split_bytes(device: torch.device) -> int:
    """Free bytes of segments in use, which torch cannot give back."""
    return int(torch.cuda.memory_stats(device).get("inactive_split_bytes.all.current", 0))


def check_no_capture(what: str) -> None:
    """Raise PlanError while this thread captures a CUDA graph: [Note: graphs]."""
    if torch.cuda.is_current_stream_capturing():
        raise PlanError(
            f"{what} while a CUDA graph is being captured, where memory can neither be taken nor given back; capture "
            "before prepare() or after session.close()"
        )


def pool_shape(plan: Plan) -> PoolShape:
    """(bytes of a block, most bytes) of the pool; a block is the payload size that moves most often."""
    moves: dict[tuple[int, str], int] = {}
    for step in plan.steps:
        if step.chunk is None:
            continue
        for found in (takes(step), frees(step)):
            if found is not None and found[0].place is Place.GPU:
                key = found[0].chunk, found[0].list
                moves[key] = moves.get(key, 0) + 1
    if not plan.steps:  # a plan without copies: every fetch is on demand
        moves = {(chunk.index, "param"): 1 for chunk in plan.layout.chunks}
    counts: dict[int, int] = {}
    for (chunk, list_name), count in moves.items():
        size = block_bytes(_storage_bytes(plan, chunk, list_name))
        counts[size] = counts.get(size, 0) + count
    if not counts:
        return 0, 0
    block = max(counts, key=lambda size: (counts[size] * size, size))
    for_good = sum(
        block_bytes(plan.layout.payload_bytes(r.chunk, r.list))
        for r in plan.initial
        if r.place is Place.GPU and r.chunk >= 0 and (r.chunk, r.list) not in moves
    )
    for_good += sum(size for _, place, size in plan.buffers if place is Place.GPU) + scratch_bytes(plan)
    return block, max(0, plan.gpu_budget_bytes - plan.workload.peak_non_model_bytes - for_good)


def _storage_bytes(plan: Plan, chunk: int, list_name: str) -> int:
    """The whole list where all ranks' slices lie side by side (slices.py)."""
    if list_name in OTHERS:
        return plan.layout.payload_bytes(chunk, OTHERS[list_name]) * plan.layout.ranks
    return plan.layout.payload_bytes(chunk, list_name)


class Blocks:
    """Memory of payloads on one device; any thread may call.

    pool_bytes: reserved by the pool of equal blocks.
    kept_bytes: of these, kept by torch when last asked for them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.exchanges = 0
        self.pool_bytes = 0
        self.slack_bytes = 0
        self._beyond_bytes = 0
        self._budget_bytes = 0
        self._paged = False  # [Note: pages]
        self._parts_bytes = 0  # free, and still reserved after the last exchange: of pages in part in use
        self._operators_bytes = 0  # of the plan's highest tide, or more that was mapped for it
        self._used_at: dict[int, tuple[int, int]] = {}  # tide -> bytes operators used as it was set: last, most
        self._most_held_bytes = 0  # by payloads since the last exchange: as much is mapped for them
        self._resting_bytes = 0  # beside payloads, between two iterations
        self._others_bytes = 0  # [Note: others]
        self._block, self._most_bytes = 0, 0
        self._free_blocks = 0  # of the pool
        self._in_pool: set[int] = set()  # storages that have one of its blocks
        self._in_former: dict[int, int] = {}  # the same, of pools that were replaced: storage -> bytes of its block
        self._former_free_bytes = 0  # of theirs, until the next exchange
        self.kept_bytes = 0
        self._loose_held_bytes = 0  # outside the pool, with memory
        self._loose_free: Counter[int] = Counter()  # outside the pool, given back and still reserved: blocks by size
        self._lock = threading.Lock()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None
        _in_use.add(self)

    def expect(
        self,
        shape: PoolShape,
        budget_bytes: int,
        *,
        beyond_bytes: int = 0,
        resting_bytes: int = 0,
        operators_bytes: int = 0,
    ) -> None:
        """Prepare for a plan; an earlier pool stays if its block is the same and it keeps to the new limit.

        resting_bytes: beside payloads between two iterations.
        operators_bytes: beside payloads at the highest tide.
        """
        with self._lock:
            self._paged = bool(_settings().get("expandable_segments"))
            if self._paged:
                shape = 0, 0
            if shape[0] != self._block or self.pool_bytes > shape[1]:
                self._replace_pool(shape[0])
            self._block, self._most_bytes = shape
            self._budget_bytes = budget_bytes
            self._beyond_bytes = beyond_bytes
            self._resting_bytes, self._operators_bytes, self._parts_bytes = resting_bytes, operators_bytes, 0
            self._used_at.clear()
            share = PAGED_SLACK if self._paged else SLACK
            self.slack_bytes = min(beyond_bytes, max(LEAST_SLACK_BYTES, int(share * budget_bytes)))

    def give_back(self) -> int:
        """Payloads' free memory goes to the driver, for operators: [Note: reserved bytes]. Returns the bytes by which
        reserved memory shrinks. Stops the device."""
        with self._lock:
            free = self._free_blocks * self._block
            before = torch.cuda.memory_reserved(self.device)
            if free:
                self._replace_pool(self._block)
            self._exchange()
            given = max(0, before - torch.cuda.memory_reserved(self.device))
            self.kept_bytes = max(0, free - given)
            if self.kept_bytes and segment_of(self._block)[1] == 1:  # else blocks in use keep free blocks beside them
                log.warning(
                    "torch %s keeps %d bytes of a memory pool that nobody uses: operators cannot have them",
                    torch.__version__, self.kept_bytes,
                )  # fmt: skip
            return given

    def _replace_pool(self, block: int) -> None:
        """Payloads keep blocks of the former pool; torch gives its free blocks back."""
        check_no_capture("a memory pool is replaced")
        for storage in self._in_pool:
            self._in_former[storage] = self._block
        self._former_free_bytes += self._free_blocks * self._block
        self._in_pool.clear()
        self.pool_bytes = self._free_blocks = 0
        with torch.cuda.device(self.device):
            self._pool = None  # without a holder: torch gives the pool's free blocks back
            self._pool = torch.cuda.MemPool() if block else None

    @property
    def loose_free_bytes(self) -> int:
        return sum(size * count for size, count in self._loose_free.items()) + self._former_free_bytes

    def grow(self, payload: torch.Tensor) -> None:
        """Raises OutOfMemory, with nothing changed."""
        storage = payload.untyped_storage()
        size = payload.numel() * payload.element_size()
        block = block_bytes(size)
        with self._lock:
            if self._fits_pool(block):
                self._before_a_segment()
                self._allocate(lambda: storage.resize_(size), pooled=True, asked_bytes=size)
                self._in_pool.add(storage_key(storage))
                self._count_block()
                return
            more = segment_of(block)[0]
            if self._paged:
                if (new := self._loose_held_bytes + more - self._most_held_bytes) > 0:
                    self._unmap_before(new)
            elif not self._loose_free[block]:
                self._make_room(more)
            self._allocate(lambda: storage.resize_(size), pooled=False, asked_bytes=size)
            self._loose_free[block] = max(0, self._loose_free[block] - 1)
            self._loose_held_bytes += block
            self._most_held_bytes = max(self._most_held_bytes, self._loose_held_bytes)

    def shrink(self, payload: torch.Tensor) -> None:
        """No work on the device may use it any more."""
        storage = payload.untyped_storage()
        with self._lock:
            size = storage.nbytes()
            if not size:
                return
            storage.resize_(0)
            if storage_key(storage) in self._in_pool:
                self._in_pool.discard(storage_key(storage))
                self._free_blocks += 1
            elif storage_key(storage) in self._in_former:
                self._former_free_bytes += self._in_former.pop(storage_key(storage))
            else:
                block = block_bytes(size)
                self._loose_held_bytes -= block
                self._loose_free[block] += 1

    def unmap_after(self, event: Any) -> None:
        """Torch unmaps no page of payloads before the event. (Where an operator is refused memory, it unmaps free pages
        itself, and waits only for the stream that allocated them.)"""
        self._stream.wait_event(event)

    def payload(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A storage of its own without memory, which it has for a moment: torch cannot make it otherwise."""
        made: list[torch.Tensor] = []
        size = numel * dtype.itemsize
        block = block_bytes(size)

        def allocate() -> None:
            made.append(torch.empty(numel, dtype=dtype, device=self.device))

        with self._lock:
            pooled = self._fits_pool(block)
            if pooled:
                self._before_a_segment()
            self._allocate(allocate, pooled=pooled, asked_bytes=size)
            made[0].untyped_storage().resize_(0)
            if pooled:
                self._count_block()
                self._free_blocks += 1  # again
            else:
                self._loose_free[block] = max(1, self._loose_free[block])
                self._most_held_bytes = max(self._most_held_bytes, self._loose_held_bytes + block)
        return made[0]

    def make_room(self, others_bytes: int) -> None:
        """Free memory outside the pool goes back where non-model data needs it."""
        with self._lock:
            if others_bytes <= self._resting_bytes:
                more = self._beside_payloads()[1] - self._resting_bytes
                self._others_bytes = more if more > WORTH_BYTES else 0
            if self._paged:
                mapped, used = (size - self._others_bytes for size in self._beside_payloads())
                self._unmap_before(self._new_pages(others_bytes, mapped, used))
                return
            free = self.loose_free_bytes
            held = self.pool_bytes + self._loose_held_bytes + free
            if free and held + others_bytes > self._budget_bytes + self.slack_bytes:
                self._exchange_for_room()

    def _beside_payloads(self) -> tuple[int, int]:
        """(reserved bytes but those of payloads, bytes of them in use)."""
        reserved, allocated = self._mapped_bytes()
        pooled_bytes = len(self._in_pool) * self._block + sum(self._in_former.values())
        return reserved - self._most_held_bytes, allocated - self._loose_held_bytes - pooled_bytes

    def _new_pages(self, tide_bytes: int, mapped: int, used: int) -> int:
        last, most = self._used_at.get(tide_bytes, (-MIB, 0))
        self._used_at[tide_bytes] = used, max(used, most)
        if abs(used - last) < MIB and mapped > self._operators_bytes - WORTH_BYTES:
            self._operators_bytes = max(mapped, self._operators_bytes)
            return 0
        rise = (tide_bytes if used >= most else tide_bytes * used // most) - used
        return rise if ROOMY * rise > mapped - used else 0

    @property
    def _limit_bytes(self) -> int:
        return self._budget_bytes + self.slack_bytes + self._others_bytes

    def _mapped_bytes(self) -> tuple[int, int]:
        """(reserved bytes, bytes of them in use)."""
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        return stats["reserved_bytes"]["all"]["current"], stats["allocated_bytes"]["all"]["current"]

    def _unmap_before(self, more_bytes: int) -> None:
        """[Note: pages]"""
        reserved, allocated = self._mapped_bytes()
        self._parts_bytes = min(self._parts_bytes, reserved - allocated)
        if reserved + more_bytes > self._limit_bytes and reserved - allocated - self._parts_bytes > WORTH_BYTES:
            self._exchange()
            reserved, allocated = self._mapped_bytes()
            self._parts_bytes = reserved - allocated  # or less, where operators gave more back meanwhile

    def idle_bytes(self) -> int:
        with self._lock:
            return self._idle_bytes()

    def _idle_bytes(self) -> int:
        reserved, allocated = torch.cuda.memory_reserved(self.device), torch.cuda.memory_allocated(self.device)
        return int(reserved) - int(allocated) - self._free_blocks * self._block

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """[Note: refused beside a pool]"""
        with self._lock:
            yield

    def _fits_pool(self, block: int) -> bool:
        if not self._block or block != self._block:
            return False
        more = segment_of(block)[0] + sum(self._in_former.values())  # former pools count until they are free
        return self._free_blocks > 0 or self.pool_bytes + more <= self._most_bytes

    def _before_a_segment(self) -> None:
        if not self._free_blocks and self._former_free_bytes:
            self._exchange()

    def _count_block(self) -> None:
        if self._free_blocks:
            self._free_blocks -= 1
        else:
            segment, blocks = segment_of(self._block)
            self.pool_bytes += segment
            self._free_blocks += blocks - 1

    def _make_room(self, more_bytes: int) -> None:
        if torch.cuda.memory_reserved(self.device) + more_bytes <= self._limit_bytes:
            return
        if self._idle_bytes() - split_bytes(self.device) >= more_bytes:
            self._exchange_for_room()

    def _exchange_for_room(self) -> None:
        """The next swing of the tide may be larger before it costs one too."""
        self._exchange()
        self.slack_bytes = min(self._beyond_bytes, 2 * self.slack_bytes)

    def _exchange(self) -> None:
        check_no_capture("memory is given back")
        self.exchanges += 1
        self._most_held_bytes = self._loose_held_bytes
        self._loose_free.clear()
        self._former_free_bytes = 0
        if self._paged:  # torch waits for one stream alone before it unmaps pages
            torch.cuda.synchronize(self.device)
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
        """[Note: torch versions]"""
        if not pooled:
            yield
            return
        with allocating_in(self._pool, self.device):
            yield

    def close(self) -> None:
        check_no_capture("a run ends")
        with self._lock:
            self._pool = None
            self._in_pool.clear()
            self._in_former.clear()
            self._block = self.pool_bytes = self._free_blocks = self._loose_held_bytes = self._others_bytes = 0
            self._exchange()
