"""A plan as a torch memory snapshot, for https://pytorch.org/memory_viz and `torch.cuda._memory_viz`.

Device 0 is the GPU, 1 the host, 2 the disks. Payloads are blocks with calls named after parameters, non-model data with
the moment in which they grow. Bytes are the simulated iteration's, addresses made up.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pstar_sim.core.effects import category_of, frees, takes
from pstar_sim.core.ledger import PLACES, Holdings
from pstar_sim.core.plan import Plan, Resident
from pstar_sim.core.step import Place
from pstar_sim.core.timeline import Timeline
from pstar_sim.report.byte_curves import moment_windows, steady_start_s
from pstar_sim.report.residence import check_of_plan

BASE = 0x7F0000000000  # of addresses
EPOCH_US = 1_600_000_000_000_000  # viewers show times as dates

Frames = list[dict[str, object]]


class _Change(NamedTuple):
    """To a place, or from it (below 0).

    key: of the block; those of one key of which a part leaves are a stack.
    """

    time_s: float
    place: Place
    key: object
    bytes: int
    category: str
    frames: Frames


def to_memory_viz(plan: Plan, timeline: Timeline) -> bytes:
    """Raises PstarError for steps not in the plan."""
    check_of_plan(plan, timeline)
    changes = [*_payloads(plan, timeline), *_levels(plan, timeline)]
    changes.sort(key=lambda change: (change.time_s, change.bytes > 0))
    devices = [_Device(number) for number in range(len(PLACES))]
    for change in changes:
        devices[PLACES.index(change.place)].apply(change)
    root = {
        "segments": [segment for device in devices for segment in device.segments()],
        "device_traces": [device.events() for device in devices],
        "allocator_settings": {},
        "external_annotations": [],
    }
    return pickle.dumps(root, protocol=4)


def _payloads(plan: Plan, timeline: Timeline) -> Iterator[_Change]:
    held = Holdings(plan.layout, plan.initial)
    steps = {step.id: step for step in plan.steps}
    live = {resident for resident in plan.initial if resident.chunk >= 0}
    origin = steady_start_s(timeline)
    events: list[tuple[float, int, int, bool]] = []
    for n, span in enumerate(timeline.spans):
        events.append((span.start_s, 1, 2 * n, True))
        events.append((span.end_s, int(span.end_s <= span.start_s), 2 * n + 1, False))
    later: list[_Change] = []
    begun = set(live)
    for at_s, _, n, begins in sorted(events):
        step = steps[timeline.spans[n // 2].step]
        (held.begin if begins else held.end)(step)
        touched = takes(step) if begins else frees(step)
        if touched is None or touched.resident.chunk < 0:
            continue
        one = touched.resident
        if held.holds(one.chunk, one.list, one.place) == (one in begun):
            continue
        sign = -1 if one in begun else 1
        begun ^= {one}
        if at_s < origin:
            live = set(begun)
        elif at_s - origin <= timeline.iteration_s:
            later.append(_payload(plan, one, at_s - origin, sign))
    yield from (_payload(plan, one, 0.0, 1) for one in sorted(live, key=lambda r: (r.place, r.list, r.chunk)))
    yield from later


def _payload(plan: Plan, one: Resident, time_s: float, sign: int) -> _Change:
    chunk = plan.layout.chunks[one.chunk]
    names = [plan.workload.tensors[slot.tensor].name for slot in chunk.slots]
    frames = [_frame(f"{one.list} of chunk {one.chunk}", plan), *(_frame(name, plan) for name in names)]
    size = plan.layout.payload_bytes(one.chunk, one.list)
    return _Change(time_s, one.place, one, sign * size, category_of(one.list), frames)


def _levels(plan: Plan, timeline: Timeline) -> Iterator[_Change]:
    moments, start_s, _ = moment_windows(timeline)
    now: dict[tuple[str, str], int] = {}
    for sample in timeline.samples:
        key = sample.place, sample.category
        change = sample.bytes - now.get(key, 0)
        now[key] = sample.bytes
        if sample.category not in ("non-model", "buffer") or not change:
            continue
        at = int(moments[max(0, int(np.searchsorted(start_s, sample.time_s, side="right")) - 1)])
        moment = plan.workload.moments[at]
        names = (sample.category,) if sample.category == "buffer" else (moment.name, moment.module, "non-model data")
        frames = [_frame(name, plan) for name in names]
        yield _Change(sample.time_s, Place(sample.place), key, change, sample.category, frames)


def _frame(name: str, plan: Plan) -> dict[str, object]:
    return {"name": name, "filename": f"{plan.policy} plan of {plan.workload.model}", "line": 0}


class _Block(NamedTuple):
    address: int
    bytes: int
    frames: Frames
    category: str


@dataclass
class _Device:
    number: int
    end: int = 0  # of the addresses
    free: list[tuple[int, int]] = field(default_factory=list)  # (address, bytes), by address
    stacks: dict[object, list[_Block]] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def apply(self, change: _Change) -> None:
        stack = self.stacks.setdefault(change.key, [])
        if change.bytes > 0:
            stack.append(self._take(change, change.bytes))
        left = -change.bytes
        while left > 0 and stack:
            block = stack.pop()
            self._give(block, change.time_s)
            if block.bytes > left:  # a part stays
                rest = change._replace(bytes=block.bytes - left, frames=block.frames)
                stack.append(self._take(rest, rest.bytes))
            left -= block.bytes

    def _take(self, change: _Change, size: int) -> _Block:
        place = next((n for n, (_, room) in enumerate(self.free) if room >= size), None)
        if place is None:
            address, self.end = self.end, self.end + size
        else:
            address, room = self.free.pop(place)
            if room > size:
                self.free.insert(place, (address + size, room - size))
        block = _Block(address, size, change.frames, change.category)
        self._row("alloc", block, change.time_s)
        return block

    def _give(self, block: _Block, time_s: float) -> None:
        self._row("free_requested", block, time_s)
        self._row("free_completed", block, time_s)
        merged: list[tuple[int, int]] = []
        for address, size in sorted([*self.free, (block.address, block.bytes)]):
            if merged and sum(merged[-1]) == address:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((address, size))
        self.free = merged

    def _row(self, action: str, block: _Block, time_s: float) -> None:
        self.rows.append(
            {
                "action": action,
                "addr": BASE + block.address,
                "size": block.bytes,
                "stream": 0,
                "time_us": EPOCH_US + round(time_s * 1e6),
                "user_metadata": block.category,
                "frames": block.frames,
            }
        )

    def events(self) -> list[dict[str, Any]]:
        if not self.rows:
            return []
        whole = {"addr": BASE, "size": self.end, "stream": 0, "time_us": EPOCH_US, "frames": []}
        return [{"action": "segment_alloc", **whole}, *self.rows]

    def segments(self) -> Iterator[Mapping[str, object]]:
        if not self.rows:
            return
        live = [block for stack in self.stacks.values() for block in stack]
        rows: list[tuple[int, int, str, Frames]] = [(b.address, b.bytes, "active_allocated", b.frames) for b in live]
        rows += [(address, size, "inactive", []) for address, size in self.free]
        active = sum(block.bytes for block in live)
        yield {
            "device": self.number,
            "address": BASE,
            "total_size": self.end,
            "allocated_size": active,
            "active_size": active,
            "requested_size": active,
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": [_listed(*row) for row in sorted(rows, key=lambda row: row[0])],
        }


def _listed(address: int, size: int, state: str, frames: Sequence[object]) -> dict[str, object]:
    requested = size if state == "active_allocated" else 0
    return {"address": BASE + address, "size": size, "requested_size": requested, "state": state, "frames": frames}
