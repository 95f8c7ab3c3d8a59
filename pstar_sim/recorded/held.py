"""What a device holds at a step's peak, by kind and allocating call, of a snapshot or a plan."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pstar_sim.core.timeline import Timeline
from pstar_sim.recorded.kinds import CHUNKS, IN_CHUNKS, KINDS, kinds_of, site_words
from pstar_sim.recorded.snapshot import DeviceHistory, Snapshot
from pstar_sim.recorded.tide import last_step, moment_events
from pstar_sim.units import format_s
from pstar_sim.workload.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """One kind's blocks at the peak, of one call."""

    kind: str
    call: str
    bytes: int
    blocks: int


@dataclass(frozen=True, kw_only=True)
class Held:
    """The most that a device holds, at one instant.

    at: in words.
    at_s: from a timeline's steady iteration.
    sites: largest first, empty for a plan.
    reserved_bytes: at that instant, None for a plan.
    facts: more, for JSON.
    notes: for the reader.
    """

    name: str
    kinds: Mapping[str, int]
    at: str
    at_s: float | None = None
    sites: Sequence[Site] = ()
    reserved_bytes: int | None = None
    facts: Mapping[str, object] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def bytes(self) -> int:
        return sum(self.kinds.values())

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "peak_bytes": self.bytes,
            "kinds": dict(self.kinds),
            "at": self.at,
            "sites": [{"kind": s.kind, "call": s.call, "bytes": s.bytes, "blocks": s.blocks} for s in self.sites],
            **self.facts,
            "notes": list(self.notes),
        }


def in_like_kinds(first: Held, second: Held) -> tuple[Held, Held]:
    """CHUNKS in both, where one has them."""
    if CHUNKS not in first.kinds and CHUNKS not in second.kinds:
        return first, second
    return _with_chunks(first), _with_chunks(second)


def _with_chunks(held: Held) -> Held:
    kinds = {kind: size for kind, size in held.kinds.items() if kind not in IN_CHUNKS}
    kinds[CHUNKS] = held.bytes - sum(size for kind, size in kinds.items() if kind != CHUNKS)
    sites = [replace(site, kind=CHUNKS) if site.kind in IN_CHUNKS else site for site in held.sites]
    return replace(held, kinds=kinds, sites=sites)


def held_of_timeline(timeline: Timeline, name: str, *, place: str = "gpu") -> Held:
    """At equal times the last sample of a kind counts."""
    now: dict[str, int] = {}
    most, best, best_s = -1, now, 0.0
    rows = [s for s in timeline.samples if s.place == place]
    for number, sample in enumerate(rows):
        now[sample.category] = sample.bytes
        last = number + 1 == len(rows) or rows[number + 1].time_s > sample.time_s
        if last and sum(now.values()) > most:
            most, best, best_s = sum(now.values()), dict(now), sample.time_s
    return Held(
        name=name, kinds={kind: best[kind] for kind in KINDS if best.get(kind)}, at=format_s(best_s), at_s=best_s
    )


def held_of_snapshot(snapshot: Snapshot, device: int | None = None, job: Workload | None = None) -> Held:
    """Of a device's last whole step (`tide.last_step`).

    job: names what is older than the recording (recorded/kinds.py).
    """
    history = snapshot.device(device)
    kinds = kinds_of(history, job)
    first, end = last_step(history)
    state = first + int(np.argmax(history.allocated_bytes[first : end + 1]))
    live = history.live_at(state)
    allocated, reserved = int(history.allocated_bytes[state]), int(history.reserved_bytes[state])
    most = int(history.reserved_bytes.max())
    marked = job is not None and bool(moment_events(history, job))
    facts: dict[str, object] = {
        "device": history.device,
        "events": history.events,
        "recorded_s": _seconds(history, 0, history.events),
        "steps": len(history.steps()),
        "step_s": _seconds(history, first, end),
        "moments_marked": marked,
        "peak_event": state,
        "reserved_bytes": reserved,
        "most_reserved_bytes": most,
        "reserved_free_bytes": reserved - allocated,
        "largest_free_bytes_at_dump": history.largest_free_bytes,
        "pinned_host_bytes": snapshot.pinned_bytes,
        "out_of_memory": [
            {
                "asked_bytes": oom.asked_bytes,
                "device_free_bytes": oom.free_bytes,
                "allocated_bytes": int(history.allocated_bytes[oom.event]),
                "reserved_bytes": int(history.reserved_bytes[oom.event]),
            }
            for oom in history.out_of_memory
        ],
    }
    sums = np.bincount(kinds[live], weights=history.blocks.size_bytes[live], minlength=len(KINDS))
    return Held(
        name=Path(snapshot.path).name,
        kinds={kind: int(size) for kind, size in zip(KINDS, sums) if size},
        at=f"event {state} of {history.events}",
        sites=_sites(history, kinds, live),
        reserved_bytes=reserved,
        facts=facts,
        notes=[note for note in (history.lost_words(), *_others(snapshot, history)) if note],
    )


def _others(snapshot: Snapshot, history: DeviceHistory) -> list[str]:
    others = [d.device for d in snapshot.devices if d.device != history.device]
    return [f"device {history.device} is shown; the file also has {', '.join(map(str, others))}"] if others else []


def _seconds(history: DeviceHistory, first: int, end: int) -> float:
    return float(history.time_us[end - 1] - history.time_us[first]) / 1e6 if end > first else 0.0


def _sites(history: DeviceHistory, kinds: NDArray[np.int64], live: NDArray[np.bool_]) -> list[Site]:
    sums: dict[tuple[str, str], list[int]] = collections.defaultdict(lambda: [0, 0])
    words: dict[tuple[int, bool], str] = {}
    for row in np.flatnonzero(live).tolist():
        key = int(history.blocks.stack[row]), bool(history.blocks.born[row] < 0)
        if key not in words:
            words[key] = site_words(history, row)
        of = sums[KINDS[kinds[row]], words[key]]
        of[0] += int(history.blocks.size_bytes[row])
        of[1] += 1
    sites = [Site(kind=kind, call=call, bytes=size, blocks=count) for (kind, call), (size, count) in sums.items()]
    return sorted(sites, key=lambda site: (-site.bytes, site.kind, site.call))
