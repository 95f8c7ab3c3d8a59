"""A torch memory snapshot (`torch.cuda.memory._dump_snapshot`, an out-of-memory dump) as columns: each device's blocks,
and bytes allocated and reserved after each event.

[Note: what a snapshot knows] A snapshot has the allocator's segments at the dump, and its latest events. Events name
addresses, so a block is an `alloc` up to the `free_completed` of its address; a request to free ends nothing: another
stream may still use the block. Live blocks without an `alloc`, and frees without one, are older than the first event:
the recording began later, or its ring of `max_entries` events lost its start. Events have bytes asked for; the
allocator takes multiples of ROUND_BYTES, which `torch.cuda.memory_allocated` counts. The rest of a segment is reserved
and free.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pstar_sim.errors import TraceError
from pstar_sim.recorded.plain_pickle import LEAST_BYTES, PickleFault, read_plain
from pstar_sim.units import format_bytes

ROUND_BYTES = 512
LARGEST_BYTES = 8_000_000_000  # of a file: what is read needs about ten times as much memory
_MOST = 2**62
_BUILT_IN = "torch/built-in"
_LIVES = ("active_allocated", "active_pending_free", "active_awaiting_free")

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Frame:
    """One call of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        parts = self.file.replace("\\", "/").split("/")
        return f"{'/'.join(parts[-2:])}:{self.line} {self.function}" if self.file and self.line else self.function


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """One device's, by column; events are numbered from 0.

    born: its allocation, -1 before the first event.
    died: its end, the number of events if alive at the dump.
    stack, end_stack: indices into `DeviceHistory.stacks`, 0 where unknown.
    tag: index into `DeviceHistory.tags`, 0 for none.
    """

    size_bytes: Ints
    born: Ints
    died: Ints
    stack: Ints
    end_stack: Ints
    tag: Ints


@dataclass(frozen=True, slots=True)
class Mark:
    """Named by the run (`torch.profiler.record_function`, a step of the profiler or optimizer)."""

    name: str
    start_us: int
    end_us: int


@dataclass(frozen=True, slots=True)
class OutOfMemoryEvent:
    """A refused request. free_bytes: of the device, None where the file does not say."""

    event: int
    asked_bytes: int
    free_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class DeviceHistory:
    """[Note: what a snapshot knows]

    time_us: per event, never falling.
    allocated_bytes, reserved_bytes: before the first event, and after each.
    stacks: calls, innermost first; stack 0 is empty.
    tags: categories of blocks, tag 0 is "".
    unsplit_bytes: of blocks at the dump beyond rounded sizes, unknown for freed ones.
    largest_free_bytes: one piece, at the dump.
    """

    device: int
    time_us: Ints
    allocated_bytes: Ints
    reserved_bytes: Ints
    blocks: Blocks
    stacks: Sequence[tuple[Frame, ...]]
    tags: Sequence[str]
    marks: Sequence[Mark]
    out_of_memory: Sequence[OutOfMemoryEvent]
    unsplit_bytes: int
    largest_free_bytes: int

    @property
    def events(self) -> int:
        return len(self.time_us)

    def live_at(self, state: int) -> NDArray[np.bool_]:
        """For each block, whether it lives after `state` events."""
        return (self.blocks.born < state) & (self.blocks.died >= state)

    @cached_property
    def before(self) -> NDArray[np.bool_]:
        """For each block, whether its allocation is not in the recording."""
        return self.blocks.born < 0

    def lost_words(self) -> str | None:
        """What the recording does not have."""
        count = int(self.before.sum())
        if not count:
            return None
        size = format_bytes(int(self.blocks.size_bytes[self.before].sum()))
        full = self.events >= 1000 and self.events % 1000 == 0
        why = (
            f"its ring of {self.events:,} entries was full and has lost its start; record with a larger max_entries"
            if full
            else "the recording began after them; begin before the model is built"
        )
        return f"the allocation of {count:,} blocks of {size} is missing: {why}"

    def steps(self) -> list[tuple[int, int]]:
        """(first event, event after the last) of marked steps: the profiler's, else between ends of the optimizer's."""
        profiler = [(m.start_us, m.end_us) for m in self.marks if m.name.startswith("ProfilerStep#")]
        ends = sorted(m.end_us for m in self.marks if m.name.startswith("Optimizer.step#"))
        spans = sorted(profiler) if profiler else list(itertools.pairwise(ends))
        return [(self.event_at(start), self.event_at(end)) for start, end in spans if end > start]

    def event_at(self, time_us: int) -> int:
        """The first at or after a time."""
        return int(np.searchsorted(self.time_us, time_us))


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The devices of a file, without those that have no events and segments.

    pinned_bytes: kept pinned by torch's allocator on the host, None in files that do not say.
    """

    path: str
    devices: Sequence[DeviceHistory]
    pinned_bytes: int | None = None

    def device(self, number: int | None = None) -> DeviceHistory:
        """Of that number, or the fullest. Raises TraceError for another."""
        if number is None:
            return max(self.devices, key=lambda d: int(d.allocated_bytes.max()))
        for device in self.devices:
            if device.device == number:
                return device
        numbers = ", ".join(str(d.device) for d in self.devices)
        raise TraceError(f"{self.path}: has no device {number}; it has {numbers}")


def is_snapshot(path: str | Path) -> bool:
    """As a pickle of protocol 2 or newer begins."""
    try:
        with Path(path).open("rb") as file:
            return file.read(1) == b"\x80"
    except OSError:
        return False


def load_snapshot(path: str | Path) -> Snapshot:
    """Raises TraceError, naming the file, for anything else; nothing of the file is run."""
    try:
        size = Path(path).stat().st_size
        if size > LARGEST_BYTES:
            raise TraceError(
                f"{path}: has {format_bytes(size)}, and at most {format_bytes(LARGEST_BYTES)} are read; record fewer "
                "entries (max_entries) or only Python's stacks (stacks='python')"
            )
        data = Path(path).read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return _snapshot(str(path), read_plain(data), len(data))
    except PickleFault as fault:
        raise TraceError(f"{path}: is not a memory snapshot of torch: {fault}") from None


def _snapshot(path: str, root: Any, size: int) -> Snapshot:
    if type(root) is not dict or "segments" not in root:
        raise PickleFault("it holds no 'segments'; write it with torch.cuda.memory._dump_snapshot(FILE)")
    budget = _Walk(size)
    segments = [_dict(one, "a segment") for one in budget.list(root["segments"], "segments")]
    traces = [budget.list(one, "a trace") for one in budget.list(root.get("device_traces", []), "device_traces")]
    marks = [_dict(one, "a mark") for one in budget.list(root.get("external_annotations", []), "external_annotations")]
    numbers = {_whole(one, "device", "a segment", default=0) for one in segments}
    numbers |= {number for number, trace in enumerate(traces) if trace}
    if not numbers:
        raise PickleFault("it has no segments and no events: nothing was allocated before the dump")
    devices = []
    for number in sorted(numbers):
        builder = _Builder(number, budget)
        builder.follow(traces[number] if number < len(traces) else [])
        builder.close([s for s in segments if _whole(s, "device", "a segment", default=0) == number])
        devices.append(builder.history(_marks(marks, number)))
    return Snapshot(path=path, devices=devices, pinned_bytes=_pinned(root.get("host_segments"), budget))


def _pinned(segments: Any, walk: _Walk) -> int | None:
    if segments is None:
        return None
    rows = [_dict(one, "a segment") for one in walk.list(segments, "host_segments")]
    return sum(_whole(row, "total_size", "a segment") for row in rows)


class _Walk:
    """Counts walked rows: a list in many places would be walked as often."""

    def __init__(self, size: int) -> None:
        self.left = 1000 + size // LEAST_BYTES

    def list(self, value: Any, what: str) -> list[Any]:
        if type(value) is not list:
            raise PickleFault(f"{what} is no list")
        self.left -= len(value)
        if self.left < 0:
            raise PickleFault("its lists repeat each other more often than a file of its size can")
        return value


def _dict(value: Any, what: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise PickleFault(f"{what} is no dict")
    return value


def _whole(row: Mapping[str, Any], key: str, what: str, default: int | None = None) -> int:
    value = row.get(key, default)
    if type(value) is not int or not 0 <= value < _MOST:
        raise PickleFault(f"{what} has {key} = {str(value)[:30]}, where a whole number was to be")
    return value


def _rounded(size: int) -> int:
    return -(-size // ROUND_BYTES) * ROUND_BYTES


class _Builder:
    def __init__(self, device: int, walk: _Walk) -> None:
        self.device, self.walk = device, walk
        self.time_us: list[int] = []
        self.reserved: list[int] = []  # change by each event
        self.rows: list[list[int]] = []  # size, born, died, stack, end_stack, tag
        self.live: dict[int, int] = {}  # address -> row
        self.ooms: list[OutOfMemoryEvent] = []
        self.stacks: dict[tuple[Frame, ...], int] = {(): 0}
        self.tags: dict[str, int] = {"": 0}
        self._by_list: dict[int, int] = {}
        self._frames: dict[int, Frame] = {}
        self.reserved_end = self.largest_free = self.unsplit = 0

    def follow(self, trace: Sequence[Any]) -> None:
        completed = any(type(e) is dict and e.get("action") == "free_completed" for e in trace)
        ends = "free_completed" if completed else "free_requested"
        for number, entry in enumerate(trace):
            event = _dict(entry, "an event")
            action = event.get("action")
            change = 0
            if action == "alloc":
                self._alloc(number, event)
            elif action == ends:
                self._free(number, event)
            elif action in ("segment_alloc", "segment_map"):
                change = _whole(event, "size", "an event")
            elif action in ("segment_free", "segment_unmap"):
                change = -_whole(event, "size", "an event")
            elif action == "oom":
                free = event.get("device_free")
                free_bytes = free if type(free) is int and 0 <= free < _MOST else None
                self.ooms.append(OutOfMemoryEvent(number, _whole(event, "size", "an event"), free_bytes))
            time_us = _whole(event, "time_us", "an event", default=number)  # a profile's events have none
            self.time_us.append(max(time_us, self.time_us[-1]) if self.time_us else time_us)
            self.reserved.append(change)

    def _alloc(self, number: int, event: Mapping[str, Any]) -> None:
        address = _whole(event, "addr", "an event")
        before = self.live.pop(address, None)
        if before is not None:  # its end was not recorded
            self.rows[before][2] = number
        self.live[address] = len(self.rows)
        size = _rounded(_whole(event, "size", "an event"))
        self.rows.append([size, number, -1, self._stack(event), 0, self._tag(event)])

    def _free(self, number: int, event: Mapping[str, Any]) -> None:
        row = self.live.pop(_whole(event, "addr", "an event"), None)
        if row is None:
            row = len(self.rows)
            self.rows.append([_rounded(_whole(event, "size", "an event")), -1, number, 0, 0, self._tag(event)])
        self.rows[row][2] = number
        self.rows[row][4] = self._stack(event)

    def close(self, segments: Sequence[Mapping[str, Any]]) -> None:
        """Blocks that no event allocated, and what is free."""
        seen: set[int] = set()
        for segment in segments:
            total = _whole(segment, "total_size", "a segment")
            at = _whole(segment, "address", "a segment", default=0)
            active = free = 0
            for one in self.walk.list(segment.get("blocks", []), "blocks"):
                block = _dict(one, "a block")
                size = _whole(block, "size", "a block")
                address = _whole(block, "address", "a block", default=at)
                at = address + size
                if block.get("state") not in _LIVES:
                    free = max(free, size)
                    continue
                active += size
                row = self.live.get(address)
                if row is None:
                    row = len(self.rows)
                    asked = block.get("requested_size")
                    known = type(asked) is int and 0 < asked <= size
                    wanted = _rounded(asked) if known and type(asked) is int else size
                    self.rows.append([min(wanted, size), -1, -1, self._stack(block), 0, self._tag(block)])
                seen.add(row)
                self.unsplit += max(0, size - self.rows[row][0])
            self.reserved_end += total
            self.largest_free = max(self.largest_free, free)
        for address in [a for a, row in self.live.items() if segments and row not in seen]:
            self.live.pop(address)  # its end is behind the dump's segments

    def history(self, marks: Sequence[Mark]) -> DeviceHistory:
        events = len(self.time_us)
        table = np.array(self.rows, np.int64).reshape(-1, 6)
        table[table[:, 2] < 0, 2] = events
        size, born, died = table[:, 0], table[:, 1], table[:, 2]
        change = np.zeros(events + 1, np.int64)
        np.add.at(change, np.maximum(born + 1, 0), size)
        ended = died < events
        np.add.at(change, died[ended] + 1, -size[ended])
        reserved = np.concatenate([[0], np.cumsum(np.array(self.reserved, np.int64))]).astype(np.int64)
        return DeviceHistory(
            device=self.device,
            time_us=np.array(self.time_us, np.int64),
            allocated_bytes=np.cumsum(change),
            reserved_bytes=reserved + (self.reserved_end - int(reserved[-1])),
            blocks=Blocks(
                size_bytes=size, born=born, died=died, stack=table[:, 3], end_stack=table[:, 4], tag=table[:, 5]
            ),
            stacks=list(self.stacks),
            tags=list(self.tags),
            marks=marks,
            out_of_memory=self.ooms,
            unsplit_bytes=self.unsplit,
            largest_free_bytes=self.largest_free,
        )

    def _stack(self, row: Mapping[str, Any]) -> int:
        frames = row.get("frames")
        if type(frames) is not list or not frames:
            return 0
        number = self._by_list.get(id(frames))
        if number is None:
            calls = tuple(self._frame(one) for one in self.walk.list(frames, "frames"))
            number = self._by_list[id(frames)] = self.stacks.setdefault(calls, len(self.stacks))
        return number

    def _frame(self, value: Any) -> Frame:
        frame = self._frames.get(id(value))
        if frame is None:
            row = _dict(value, "a frame")
            line = row.get("line")
            file, function = str(row.get("filename", ""))[:1000], str(row.get("name", ""))[:1000]
            if file == "none":  # of a profile: torch/nn/modules/linear.py(130): forward, or a built-in function
                inside = re.fullmatch(r"(.*)\((\d+)\): (.*)", function)
                file, line, function = (inside[1], int(inside[2]), inside[3]) if inside else (_BUILT_IN, 0, function)
            frame = self._frames[id(value)] = Frame(file, line if type(line) is int else 0, function)
        return frame

    def _tag(self, row: Mapping[str, Any]) -> int:
        said = row.get("category") or row.get("user_metadata") or ""
        if type(said) is dict:
            said = said.get("cat") or said.get("category") or ""
        return self.tags.setdefault(said[:100], len(self.tags)) if type(said) is str else 0


def _marks(rows: Sequence[Mapping[str, Any]], device: int) -> list[Mark]:
    open_: dict[str, list[int]] = collections.defaultdict(list)
    found: list[Mark] = []
    for row in rows:
        name, stage, of = row.get("name"), row.get("stage"), row.get("device", device)
        if type(name) is not str or of != device:
            continue
        time_us = _whole(row, "time_us", "a mark")
        if stage == "START":
            open_[name].append(time_us)
        elif stage == "END" and open_[name]:
            found.append(Mark(name, open_[name].pop(), time_us))
    return sorted(found, key=lambda mark: mark.start_us)


def is_torch(file: str) -> bool:
    return "/site-packages/torch/" in file.replace("\\", "/") or file.startswith("torch/")
