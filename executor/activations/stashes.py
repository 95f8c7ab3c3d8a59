"""Stashes: what autograd saved in an offloaded block's forward, and its copies to the host and back.

Each storage is copied once; parameters, buffers and all else that outlives the block stay on the gpu. At the end of the
forward, storages are chosen until the plan's bytes are used up. `stash_out` copies them to the host, and the moment
that waits for the copy frees the gpu's memory; `stash_in` copies them into memory taken before, of which autograd gets
views.

[Note: who lets go] Only the user's thread takes and frees memory, where the tide says so: freed when moment `gone`
begins, taken when `back` begins. With streams, a copy's tensors are held until its event.

[Note: addresses] An address identifies a storage only as long as it lives.

[Note: never wrong data] A tensor unpacked while its bytes are on the host (off the plan) is copied back at once. Where
bytes on the host may still be read, the new stash stays on the gpu and is counted, as do bytes beyond the plan's.

[Note: ahead of its step] A block's operations behind its last unit (a dropout, a sum) are differentiated before that
unit's gradient arrives: in the moment before the one that waits for `stash_in`. If the copy has not happened by then,
the user's thread makes it, and the step counts its bytes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from executor.devices.backend import StreamBackend
from executor.devices.torch26 import saved_tensor_hooks
from executor.devices.torch_private import storage_key, version_of
from executor.memory.arena import Arena
from executor.moments.hooks import MomentClock, tensors_of
from executor.moments.unseen import unseen
from pstar_sim.core.slabs import stash_key
from pstar_sim.core.step import Kind, Queue, Step
from pstar_sim.errors import ContractError
from pstar_sim.policy.kit.trip_moves import TripMoves
from pstar_sim.workload.workload import Stash


@dataclass(frozen=True, kw_only=True, slots=True)
class StashReport:
    """saved_bytes: in the block's forward, with its inputs, without parameters and buffers.
    freed_bytes: of moved_bytes, those that left the gpu.
    """

    block: str
    micro_batch: int
    planned_bytes: int
    saved_bytes: int
    moved_bytes: int
    freed_bytes: int


@dataclass(slots=True)
class _View:
    """alias: the tensor without its graph, while the gpu holds the storage.
    version: torch's, of the contents at the saving.
    """

    alias: torch.Tensor | None
    version: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Saved:
    """One storage with tensors that autograd saved.

    source: its bytes on the gpu, as the forward made them.
    returned: new memory for them.
    back: the copy into `returned` was made, or issued with event `arrival`.
    """

    __slots__ = (
        "__weakref__",
        "arrival",
        "back",
        "changed",
        "host",
        "returned",
        "size_bytes",
        "source",
        "stash",
        "views",
    )

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.size_bytes = storage.nbytes()
        self.source: torch.Tensor | None = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.source.set_(storage, 0, (self.size_bytes,), (1,))
        self.host: torch.Tensor | None = None
        self.returned: torch.Tensor | None = None
        self.back = False
        self.stash: int | None = None
        self.arrival: Any = None
        self.changed = False
        self.views: list[_View] = []

    def add(self, tensor: torch.Tensor) -> int:
        view = _View(
            tensor.detach(),
            version_of(tensor),
            tensor.dtype,
            tuple(tensor.size()),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
        )
        self.views.append(view)
        return len(self.views) - 1

    @property
    def only_on_host(self) -> bool:
        return self.source is None and not self.back

    def let_go(self) -> None:
        """Free the gpu's memory, unless something else holds it."""
        self.changed = self.changed or any(v.alias is not None and version_of(v.alias) != v.version for v in self.views)
        for view in self.views:
            view.alias = None
        self.source = None


class BlockSaves:
    def __init__(self, stashes: Stashes, inputs: Any) -> None:
        self._present = stashes.present
        self.inputs = {storage_key(t) for t in tensors_of(inputs)}
        self.saved: dict[int, weakref.ref[_Saved]] = {}

    @property
    def _stashes(self) -> Stashes:
        stashes = self._present()
        if stashes is None:
            raise ContractError(
                "a graph belongs to a prepared model that no longer exists; keep a reference to the model"
            )
        return stashes

    def pack(self, tensor: torch.Tensor) -> Any:
        stashes = self._stashes
        with unseen(), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            parameter = stashes.parameters.keep(tensor)
            if parameter is not None:
                return parameter
            if not stashes.takes(tensor):
                return tensor.detach()
            key = storage_key(tensor)
            known = self.saved.get(key)
            saved = known() if known is not None else None
            if saved is None or saved.source is None:  # [Note: addresses]
                saved = _Saved(tensor)
                self.saved[key] = weakref.ref(saved)
            return saved, saved.add(tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        first, second = packed
        if isinstance(first, _Saved):
            return self._stashes.tensor(first, second)
        return self._stashes.parameters.restore(packed)


class ForwardSaves(BlockSaves):
    """What a micro-batch's forward saves, block by block, in a relay with boundaries on the host. A recomputed block
    saves its inputs before its call, so a block owns what its forward saved, and inputs saved before."""

    def __init__(self, stashes: Stashes) -> None:
        super().__init__(stashes, ())
        self._before: dict[int, weakref.ref[_Saved]] = {}

    def hooks(self) -> AbstractContextManager[None]:
        """Receives what autograd saves in this thread."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def begin(self, inputs: Any) -> None:
        self.saved = {key: ref for key, ref in self.saved.items() if _holds_source(ref)}
        self._before = dict(self.saved)
        self.inputs = {storage_key(t) for t in tensors_of(inputs)}

    def end(self, block: str) -> None:
        stashes = self._stashes
        mine = BlockSaves(stashes, ())
        mine.inputs = self.inputs
        mine.saved = {
            key: ref for key, ref in self.saved.items() if key in self.inputs or self._before.get(key) is not ref
        }
        if not mine.saved:
            stashes.note_unsaved(block)
        stashes.collected(block, mine)


def hooks_of_others() -> bool:
    hooks = saved_tensor_hooks()
    return hooks is not None and not isinstance(getattr(hooks[0], "__self__", None), ForwardSaves)


@dataclass(frozen=True)
class SavedParameters:
    """What autograd keeps of parameters: `off_plan.reads.Reads`.

    keep(tensor): what is kept of a view of a working list; None for others.
    """

    keep: Callable[[torch.Tensor], Any]
    restore: Callable[[Any], torch.Tensor]


class Stashes:
    """present(): the stashes of the session's plan, None if the session is gone: objects in a graph do not hold it.
    reports: of the last iteration, in order.
    """

    def __init__(
        self,
        arena: Arena,
        buffers: Iterable[torch.Tensor],
        clock: MomentClock,
        parameters: SavedParameters,
        *,
        off_plan: Callable[[], bool],
        note_deviation: Callable[[str], None],
        present: Callable[[], Stashes | None],
    ) -> None:
        w = arena.plan.workload
        self.arena = arena
        self.backend = arena.backend
        self.clock = clock
        self.parameters = parameters
        self.present = present
        self.reports: list[StashReport] = []
        self._lock = threading.Lock()
        self._ahead_bytes = 0  # summed over the session; see [Note: ahead of its step]
        self._rooms: dict[tuple[str, int], list[weakref.ref[_Saved]]] = {}  # (block, offset) -> storages there
        self._unsaved: set[str] = set()  # blocks that save nothing for their stash
        self._off_plan = off_plan
        self._note_deviation = note_deviation
        self._moves = TripMoves(w)
        self._offsets = w.stash_offsets
        self._stash: dict[tuple[str, int], int] = {(s.block, s.micro_batch): n for n, s in enumerate(w.stashes)}
        self._chosen: dict[int, list[weakref.ref[_Saved]]] = {}  # stash -> storages to move, in the current iteration
        self._out: dict[int, list[weakref.ref[_Saved]]] = {}  # stash -> storages that were moved
        self._ahead: dict[int, int] = {}  # stash -> bytes copied ahead of its step and not yet counted
        self._returning: list[int] = []  # stashes that need memory on the gpu again
        self._flying: dict[tuple[Kind, int], tuple[Any, list[torch.Tensor]]] = {}
        self._buffers = {storage_key(b) for b in buffers}

    @property
    def planned(self) -> Sequence[Stash]:
        return self.arena.plan.workload.stashes

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor may go to the host: a plain one on the accelerator, neither a buffer nor a leaf with a
        gradient."""
        return (
            type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and tensor.layout is torch.strided
            and tensor.device.type == self.backend.device.type
            and tensor.untyped_storage().nbytes() > 0
            and storage_key(tensor) not in self._buffers
            and not (tensor.is_leaf and tensor.requires_grad)
        )

    # -- forward ------------------------------------------------------------------------------------------------------

    def boundaries(self) -> ForwardSaves | None:
        """For a micro-batch's forward, in a relay with boundaries on the host."""
        return ForwardSaves(self) if self.arena.plan.workload.boundaries_on_host else None

    def note_unsaved(self, block: str) -> None:
        if block in self._unsaved or (block, self.clock.micro_batch) not in self._stash:
            return
        self._unsaved.add(block)
        self._note_deviation(
            f"{block} recomputes from what torch.utils.checkpoint does not save (keyword arguments, objects): that "
            "stays on the accelerator; give the block its tensors as positional arguments"
        )

    def collect(self, inputs: Any) -> BlockSaves:
        return BlockSaves(self, inputs)

    def collected(self, block: str, found: BlockSaves) -> None:
        """Choose the storages that go to the host. Off the plan they are copied at once."""
        n = self._stash.get((block, self.clock.micro_batch))
        if n is None:
            return
        stash = self.planned[n]
        alive = [(ref() is not None, key, ref) for key, ref in found.saved.items()]
        inner: list[_Saved] = []
        outer: list[_Saved] = []
        for there, key, ref in alive:
            saved = ref() if there else None
            if saved is not None:
                (outer if key in found.inputs else inner).append(saved)
        chosen, left = _fitting(inner, stash.bytes)
        # Of the block's inputs only the output of the block before belongs to it; all blocks share masks and the like.
        for saved in sorted(outer, key=lambda e: abs(left - e.size_bytes)):
            if saved.size_bytes <= left:
                chosen.append(saved)
                left -= saved.size_bytes
        over = sum(e.size_bytes for e in inner) - sum(e.size_bytes for e in chosen if e in inner)
        if over > 0:
            self._note_deviation(
                f"{block} saved {over} bytes more than the plan offloads ({stash.bytes}); they stay on the accelerator"
            )
        self._chosen[n] = [weakref.ref(e) for e in chosen]
        self._report(stash, saved_bytes=sum(e.size_bytes for e in (*inner, *outer)))
        if self._off_plan():
            with unseen(), torch.no_grad():
                self._send(n)  # copied in the user's thread, so complete
                self._let_go(n)

    def _report(self, stash: Stash, **figures: Any) -> None:
        key = (stash.block, stash.micro_batch)
        known = next((i for i, r in enumerate(self.reports) if (r.block, r.micro_batch) == key), None)
        if "saved_bytes" in figures:
            if known is not None:
                del self.reports[known]
            blank = StashReport(
                block=stash.block, micro_batch=stash.micro_batch, planned_bytes=stash.bytes, saved_bytes=0,
                moved_bytes=0, freed_bytes=0,
            )  # fmt: skip
            self.reports.append(replace(blank, **figures))
        elif known is not None:
            self.reports[known] = replace(self.reports[known], **figures)

    # -- copies: what queues call -------------------------------------------------------------------------------------

    def copied_bytes(self, queue: Queue) -> int:
        """Bytes that steps of the queue copied, without those of [Note: ahead of its step]."""
        with self._lock:
            ahead_bytes = self._ahead_bytes if queue is Queue.H2D else 0
            return self.backend.copied_bytes[queue.value] - ahead_bytes

    def move(self, step: Step) -> int:
        """Returns the bytes that had been copied ahead."""
        assert step.stash is not None
        out = step.kind is Kind.STASH_OUT
        touched = self._send(step.stash) if out else self._fetch(step.stash)
        self.backend.fence(step.queue)
        streams = self.backend.streams
        if touched and streams is not None:  # issued; see [Note: who lets go]
            self._flying[step.kind, step.stash] = (streams.record(step.queue), touched)
        return 0 if out else self._count_ahead(step.stash)

    def _count_ahead(self, n: int) -> int:
        with self._lock:
            return self._ahead.pop(n, 0)

    def _send(self, n: int) -> list[torch.Tensor]:
        stash = self.planned[n]
        offset = self._offsets[n]
        place = stash.block, offset
        if any(saved.only_on_host for saved in _alive(self._rooms.get(place, ()))):
            self._note_deviation(
                f"the stash of {stash.block} stays on the accelerator: the host's room still holds an earlier stash"
            )
            self._out[n] = []
            return []
        self._count_ahead(n)  # left over from an iteration that left the plan
        room = self.arena.slabs.first_bytes(stash_key(stash.block), offset + stash.bytes)
        gone: list[weakref.ref[_Saved]] = []
        touched: list[torch.Tensor] = []
        for saved in _alive(self._chosen.pop(n, ())):
            if saved.source is None:
                continue
            target = room[offset : offset + saved.size_bytes]
            offset += saved.size_bytes
            self.backend.copy(target, saved.source, Queue.D2H)
            saved.host, saved.stash = target, n
            touched.append(saved.source)
            gone.append(weakref.ref(saved))
        self._rooms[place] = self._out[n] = gone
        return touched

    def _fetch(self, n: int) -> list[torch.Tensor]:
        copies = (self._bring(saved, self.backend.streams) for saved in _alive(self._out.get(n, ())))
        return [memory for memory in copies if memory is not None]

    def _bring(self, saved: _Saved, issues: StreamBackend | None = None, *, ahead: bool = False) -> torch.Tensor | None:
        """Unless it is back.

        issues: the backend, where this thread only issues the copy.
        ahead: whether no step asks for the copy.
        """
        with self._lock:
            if saved.back or saved.returned is None or saved.host is None:
                return None
            self.backend.copy(saved.returned, saved.host, Queue.H2D)
            saved.arrival = None if issues is None else issues.record(Queue.H2D)
            if ahead and saved.stash is not None:
                self._ahead_bytes += saved.size_bytes
                self._ahead[saved.stash] = self._ahead.get(saved.stash, 0) + saved.size_bytes
            saved.back = True
            return saved.returned

    # -- the user's thread --------------------------------------------------------------------------------------------

    def at(self, moment: int) -> None:
        """Frees the gpu's memory of stashes on the host, and notes those that return."""
        for kind, n in self._moves.until.get(moment, ()):
            self._flying.pop((kind, n), None)  # the compute queue is behind the copy
            if kind is Kind.STASH_OUT:
                self._let_go(n)
        streams = self.backend.streams
        for key, (event, _) in list(self._flying.items()):  # copies for graphs that were freed early
            if streams is not None and streams.query(event):
                self._flying.pop(key, None)
        self._returning += [t.number for t in self._moves.behind.get(moment, ()) if t.kind is Kind.STASH_IN]

    def _let_go(self, n: int) -> None:
        moved = freed = 0
        for saved in _alive(self._out.get(n, ())):
            if saved.source is None:
                continue
            storage = weakref.ref(saved.source.untyped_storage())
            saved.let_go()
            moved += saved.size_bytes
            freed += saved.size_bytes if storage() is None else 0
        self._report(self.planned[n], moved_bytes=moved, freed_bytes=freed)

    def settle(self) -> None:
        """Memory of returning stashes is taken outside the engine's own work, so that the model's counters see it."""
        while self._returning:
            n = self._returning.pop(0)
            for saved in _alive(self._out.get(n, ())):
                if saved.source is None and saved.returned is None:
                    saved.returned = self._memory(saved.size_bytes)

    def _memory(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.backend.device)

    def tensor(self, saved: _Saved, index: int) -> torch.Tensor:
        view = saved.views[index]
        if view.alias is not None:
            if version_of(view.alias) != view.version:
                raise _changed(view)
            return view.alias
        if saved.changed:
            raise _changed(view)
        if saved.returned is None:
            saved.returned = self._memory(saved.size_bytes)
        with unseen(), torch.no_grad():
            self._bring(saved, ahead=True)
            if saved.arrival is not None:
                assert self.backend.streams is not None
                self.backend.streams.wait_event(Queue.COMPUTE, saved.arrival)
            made = torch.empty(0, dtype=view.dtype, device=saved.returned.device)
            return made.set_(saved.returned.untyped_storage(), view.offset, view.size, view.stride)


def _fitting(saved: Iterable[_Saved], limit_bytes: int) -> tuple[list[_Saved], int]:
    chosen: list[_Saved] = []
    left = limit_bytes
    for each in sorted(saved, key=lambda e: -e.size_bytes):
        if each.size_bytes <= left:
            chosen.append(each)
            left -= each.size_bytes
    return chosen, left


def _alive(refs: Iterable[weakref.ref[_Saved]]) -> list[_Saved]:
    return [saved for ref in refs if (saved := ref()) is not None]


def _holds_source(ref: weakref.ref[_Saved]) -> bool:
    saved = ref()
    return saved is not None and saved.source is not None


def _changed(view: _View) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{view.dtype}, {list(view.size)}] of an offloaded block; hint: do not write into a block's results"
    )
