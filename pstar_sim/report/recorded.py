"""What torch recorded, in words: a snapshot's peak, and two peaks beside each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from pstar_sim.core.plan import Plan
from pstar_sim.core.timeline import Timeline
from pstar_sim.recorded.held import Held, Site, held_of_timeline, in_like_kinds
from pstar_sim.recorded.kinds import KINDS, UNKNOWN
from pstar_sim.report.byte_curves import moment_windows
from pstar_sim.report.palette import CATEGORY_NAMES
from pstar_sim.report.run_figures import Figure, figures
from pstar_sim.terminal import table_text
from pstar_sim.units import format_bytes, format_s

MOST_SITES = 4  # per kind
LEAST_SHARE = 0.01  # of the larger peak: smaller differences have no sites
_NAMES = {**CATEGORY_NAMES, UNKNOWN: "unknown"}


def planned(plan: Plan, timeline: Timeline, name: str) -> Held:
    held = held_of_timeline(timeline, name)
    moments, start_s, _ = moment_windows(timeline)
    begun = int(moments[max(0, int(np.searchsorted(start_s, held.at_s or 0.0, side="right")) - 1)])
    moment = plan.workload.moments[begun]
    note = f"planned for {format_bytes(plan.gpu_budget_bytes)} of the GPU; the peak is in moment {begun}, {moment.name}"
    return replace(held, at=moment.name, facts={"gpu_budget_bytes": plan.gpu_budget_bytes}, notes=[note])


def held_text(held: Held, *, width: int) -> str:
    """By kind, with the largest calls of each."""
    rows: list[tuple[str, str, str]] = []
    for kind in KINDS:
        if size := held.kinds.get(kind):
            rows.append((_NAMES[kind], format_bytes(size), ""))
            rows += [(f"- {s.call}", format_bytes(s.bytes), _blocks(s)) for s in _of(held.sites, kind)[:MOST_SITES]]
    rows.append(("allocated", format_bytes(held.bytes), ""))
    if held.reserved_bytes is not None:
        rows.append(("reserved", format_bytes(held.reserved_bytes), ""))
    table = table_text(("at the peak", "bytes", "blocks"), rows, width=width, title=f"{held.name}: {_time_words(held)}")
    return table


def notes_of(held: Held) -> Iterator[str]:
    """Below a table: fragmentation, refusals, what the recording lacks."""
    if held.reserved_bytes is not None and held.reserved_bytes > held.bytes:
        free = held.reserved_bytes - held.bytes
        yield (
            f"{held.name}: {format_bytes(free)} ({free / held.reserved_bytes:.0%}) of what the allocator had reserved "
            "was in no block: cached, or in pieces"
        )
    refusals = held.facts.get("out_of_memory")
    for refusal in refusals if isinstance(refusals, list) else []:
        free_bytes = refusal["device_free_bytes"]
        device = "" if free_bytes is None else f", {format_bytes(free_bytes)} of the device were free"
        cached = refusal["reserved_bytes"] - refusal["allocated_bytes"]
        yield (
            f"{held.name}: out of memory: {format_bytes(refusal['asked_bytes'])} were asked for with "
            f"{format_bytes(refusal['allocated_bytes'])} allocated{device}, and {format_bytes(cached)} reserved "
            "without a block"
        )
    yield from (f"{held.name}: {note}" for note in held.notes)


def _time_words(held: Held) -> str:
    steps, step_s = held.facts.get("steps"), held.facts.get("step_s")
    how = f"the last of {steps} marked steps" if steps else "no step is marked: the whole recording"
    if isinstance(step_s, float):
        how += f", {format_s(step_s)}"
    return f"{how}; the peak is {held.at}"


def _blocks(site: Site) -> str:
    return f"{site.blocks:,}"


def _of(sites: Sequence[Site], kind: str) -> list[Site]:
    return [site for site in sites if site.kind == kind]


def beside_text(first: Held, second: Held, *, width: int) -> str:
    """By kind, and below it the calls that differ."""
    first, second = in_like_kinds(first, second)
    floor = LEAST_SHARE * max(first.bytes, second.bytes)
    rows: list[tuple[str, str, str, str]] = []
    for kind in KINDS:
        one, two = first.kinds.get(kind, 0), second.kinds.get(kind, 0)
        if not one and not two:
            continue
        rows.append(_row(_NAMES[kind], one, two))
        if abs(two - one) >= floor:
            rows += [_row(f"- {call}", a, b) for call, a, b in _calls(first, second, kind)[:MOST_SITES]]
    rows.append(_row("allocated", first.bytes, second.bytes))
    if first.reserved_bytes is not None or second.reserved_bytes is not None:
        rows.append(_row("reserved", first.reserved_bytes, second.reserved_bytes))
    heads = ("at the peak", first.name, second.name, "difference")
    return table_text(heads, rows, width=width)


def _row(name: str, one: int | None, two: int | None) -> tuple[str, str, str, str]:
    words = ["-" if size is None else format_bytes(size) for size in (one, two)]
    if one is None or two is None:
        return name, words[0], words[1], "-"
    gap = two - one
    return name, words[0], words[1], "equal" if not gap else f"{'+' if gap > 0 else '-'}{format_bytes(abs(gap))}"


def _calls(first: Held, second: Held, kind: str) -> list[tuple[str, int | None, int | None]]:
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for which, held in enumerate((first, second)):
        for site in _of(held.sites, kind):
            sums[site.call][which] += site.bytes
    ordered = sorted(sums.items(), key=lambda item: (-abs(item[1][1] - item[1][0]), item[0]))
    return [(call, one if first.sites else None, two if second.sites else None) for call, (one, two) in ordered]


def run_figures(predicted: Timeline, measured: Timeline) -> list[Figure]:
    """Seconds, work of queues, waits by cause, bytes; a missing figure is 0."""
    columns: list[dict[str, float]] = []
    for timeline, other in ((predicted, measured), (measured, predicted)):
        row: dict[str, float] = {"iteration_s": timeline.iteration_s}
        for name, of in (("busy_s", "{}, at work_s"), ("stall_s", "compute waits for {}_s")):
            own, others = getattr(timeline, name), getattr(other, name)
            row |= {
                of.format(key): own.get(key, 0.0) for key in sorted({*own, *others}) if own.get(key) or others.get(key)
            }
        keys = sorted({*timeline.moved_bytes, *other.moved_bytes})
        row |= {f"{key} moved_bytes": timeline.moved_bytes.get(key, 0) for key in keys}
        columns.append(row)
    return figures(*columns)


def beside_as_json(first: Held, second: Held) -> dict[str, object]:
    first, second = in_like_kinds(first, second)
    kinds = {
        kind: {"first": first.kinds.get(kind, 0), "second": second.kinds.get(kind, 0)}
        for kind in KINDS
        if kind in first.kinds or kind in second.kinds
    }
    rows = {kind: {**row, "difference": row["second"] - row["first"]} for kind, row in kinds.items()}
    return {
        "first": first.to_json(),
        "second": second.to_json(),
        "kinds": rows,
        "difference_bytes": second.bytes - first.bytes,
    }
