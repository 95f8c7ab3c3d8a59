"""A snapshot's tide as a timeline, and as moments of a trace.

[Note: moments of a snapshot] Marks named as a trace's moments ("begin:h.0", "end:h.0", "grad:h.0", "backward-end",
"step"; `executor.mark_moments` sets them) open these, in order: the tide is then known by moment, else by time alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pstar_sim.core.effects import NON_MODEL
from pstar_sim.core.step import Kind, Place, Queue
from pstar_sim.core.timeline import ByteSample, Span, Timeline
from pstar_sim.errors import TraceError
from pstar_sim.recorded.kinds import KINDS
from pstar_sim.recorded.snapshot import DeviceHistory
from pstar_sim.workload.workload import Workload, copy_moment

MOST_INSTANTS = 20_000  # that a timeline keeps: of more, the highest of each stretch

Ints = NDArray[np.int64]


def last_step(history: DeviceHistory) -> tuple[int, int]:
    """(first event, event after the last) of the last whole marked step, or all without marks, or where an error ended
    a later step."""
    steps = history.steps()
    if not steps or (history.out_of_memory and history.out_of_memory[-1].event >= steps[-1][1]):
        return 0, history.events
    return steps[-1]


def tide_of(
    history: DeviceHistory, kinds: NDArray[np.int64], job: Workload | None = None, *, label: str = ""
) -> Timeline:
    """Bytes of the last step by kind, with a span per marked moment. Raises TraceError without events."""
    if not history.events:
        raise TraceError(
            f"device {history.device} has no events, so there is no tide; record them with "
            "torch.cuda.memory._record_memory_history"
        )
    first, end = last_step(history)
    table = _by_kind(history, kinds)[:, first : end + 1]
    times = np.concatenate([history.time_us[first : first + 1], history.time_us[first:end]])
    seconds = (times - times[0]) / 1e6 if len(times) else np.zeros(1)
    chosen = _highest(table.sum(axis=0))
    samples: list[ByteSample] = []
    before = np.full(len(KINDS), -1, np.int64)
    for at in chosen.tolist():
        for row in np.flatnonzero(table[:, at] != before).tolist():
            if before[row] >= 0 or table[row, at]:
                samples.append(ByteSample(float(seconds[at]), Place.GPU.value, KINDS[row], int(table[row, at])))
        before = table[:, at]
    opened = [] if job is None else moment_events(history, job)
    spans = _spans(history, opened, first, end)
    return Timeline(
        source="measured",
        iterations=1,
        iteration_s=float(seconds[-1]),
        spans=spans,
        samples=samples,
        peak_bytes={Place.GPU.value: int(table.sum(axis=0).max())},
        label=label,
        phases=tuple(m.phase.value for m in job.moments) if job is not None and spans else (),
        budget_bytes={Place.GPU.value: int(history.reserved_bytes[first : end + 1].max())},
    )


def _by_kind(history: DeviceHistory, kinds: NDArray[np.int64]) -> Ints:
    blocks = history.blocks
    change = np.zeros((len(KINDS), history.events + 1), np.int64)
    np.add.at(change, (kinds, np.maximum(blocks.born + 1, 0)), blocks.size_bytes)
    ended = blocks.died < history.events
    np.add.at(change, (kinds[ended], blocks.died[ended] + 1), -blocks.size_bytes[ended])
    return np.cumsum(change, axis=1)


def _highest(total: Ints) -> Ints:
    if len(total) <= MOST_INSTANTS:
        return np.arange(len(total))
    edges = np.linspace(0, len(total), MOST_INSTANTS + 1).astype(np.int64)
    return np.array([low + int(np.argmax(total[low:high])) for low, high in itertools.pairwise(edges)])


def moment_events(history: DeviceHistory, job: Workload) -> list[int]:
    """Per moment of a job the event that opens it, in the last step with all marks, [] without them ([Note: moments of
    a snapshot])."""
    names = [moment.name for moment in job.moments]
    known = set(names)
    marks = [mark for mark in history.marks if mark.name in known]
    for start in range(len(marks) - len(names), -1, -1):
        if all(mark.name == name for mark, name in zip(marks[start:], names)):
            return [history.event_at(mark.start_us) for mark in marks[start : start + len(names)]]
    return []


def _spans(history: DeviceHistory, opened: Sequence[int], first: int, end: int) -> list[Span]:
    if not opened or opened[0] < first:
        return []
    origin = int(history.time_us[first])
    at = [*(int(history.time_us[min(e, history.events - 1)]) for e in opened), int(history.time_us[end - 1])]
    return [
        Span(
            step=n, iteration=0, queue=Queue.COMPUTE, kind=Kind.COMPUTE, chunk=None, moment=n, bytes=0,
            ready_s=(start - origin) / 1e6, start_s=(start - origin) / 1e6, end_s=(max(stop, start) - origin) / 1e6,
        )
        for n, (start, stop) in enumerate(itertools.pairwise(at))
    ]  # fmt: skip


def with_tide(job: Workload, history: DeviceHistory, kinds: NDArray[np.int64]) -> Workload:
    """The job with the snapshot's non-model bytes. Raises TraceError without marks of the job's moments."""
    opened = moment_events(history, job)
    if not opened:
        raise TraceError(
            f"the snapshot has no marks with the names of the moments of {job.model!r} ({job.moments[0].name!r}, ...), "
            "so its tide is known by time alone; mark them with executor.mark_moments(model) before the steps, or give "
            "-o a name that ends in .json or .png"
        )
    tide = _by_kind(history, kinds)[KINDS.index(NON_MODEL)]
    least = int(tide[opened[0]])  # batches and other data that is there before the step
    edges = [*opened, max(opened[-1], last_step(history)[1])]
    moments = []
    before = least
    for moment, start, stop in zip(job.moments, edges, edges[1:]):
        end_bytes = int(tide[stop])
        peak = int(tide[start : stop + 1].max())
        moments.append(copy_moment(moment, before, max(peak, before, end_bytes), end_bytes))
        before = end_bytes
    return replace(job, moments=tuple(moments), notes=f"non-model bytes measured{'; ' if job.notes else ''}{job.notes}")
