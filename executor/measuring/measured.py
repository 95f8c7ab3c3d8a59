"""What a session logs while it runs, and the Timeline made of it afterwards, in the simulator's schema.

Logging appends to lists; nothing is computed before somebody asks. An iteration is measured as the simulator counts it:
from the end of the compute queue's last step of the iteration before to that of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from executor.memory.byte_log import ByteChange
from executor.queues.logs import IterationLog, StepLog
from pstar_sim.core.effects import CATEGORIES
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import COPIES, Kind, Place, Queue
from pstar_sim.core.timeline import ByteSample, Span, Timeline
from pstar_sim.errors import PlanError

__all__ = ["Measured", "Moved", "build_timeline", "with_tide"]


class Moved:
    """[Note: whose bytes] Bytes over the link by iteration. A copy of the plan belongs to the iteration whose step it
    is, whenever it runs: fetches run ahead of their iteration, writebacks run on into the next. What is copied on
    demand belongs to the iteration in progress, what an evaluation copies to the one that follows. So the figures of
    one iteration on plan are the plan's, and all of them together are what the backend has copied; what it has copied
    between two points in time is neither.
    """

    def __init__(self, already: Mapping[str, int]) -> None:
        """already: copied by direction before the first iteration."""
        self._known = dict(already)
        self._bytes: dict[int, dict[str, int]] = {}
        self._ended: dict[int, int] = {}  # iteration -> copies of the plan that have ended
        self._lock = threading.Lock()

    def step(self, iteration: int, direction: str, size_bytes: int) -> None:
        """A copy of the plan has ended."""
        with self._lock:
            self._add(iteration, direction, size_bytes)
            self._ended[iteration] = self._ended.get(iteration, 0) + 1

    def others(self, iteration: int, copied_bytes: Mapping[str, int]) -> None:
        """Nothing is under way: whatever else the backend has copied by now was of this iteration."""
        with self._lock:
            for direction, total in copied_bytes.items():
                self._add(iteration, direction, total - self._known[direction])

    def _add(self, iteration: int, direction: str, size_bytes: int) -> None:
        self._known[direction] += size_bytes
        row = self._bytes.setdefault(iteration, {"h2d": 0, "d2h": 0})
        row[direction] += size_bytes

    def of(self, iteration: int) -> Mapping[str, int]:
        with self._lock:
            return dict(self._bytes.get(iteration, {"h2d": 0, "d2h": 0}))

    def ended(self, iteration: int) -> int:
        return self._ended.get(iteration, 0)

    def forget(self, before: int) -> None:
        with self._lock:
            for iteration in [k for k in self._bytes if k < before]:
                del self._bytes[iteration]
                self._ended.pop(iteration, None)


def build_timeline(
    plan: Plan,
    steps: Iterable[StepLog],
    iterations: Sequence[IterationLog],
    changes: Iterable[ByteChange],
    first_s: float,
) -> Timeline:
    """Timeline of the run's last stretch of iterations on plan. first_s: when the run began.

    iteration_s, samples, peaks and stalls are those of the last finished iteration. Raises PlanError if none finished.
    """
    done = _last_stretch(iterations)
    if not done:
        raise PlanError("no iteration has run on plan yet; nothing was measured")
    before = [row for row in iterations if row.number == done[0].number - 1]
    begin_s = before[0].end_s if before else first_s
    starts = [begin_s, *(row.end_s for row in done[:-1])]
    numbers = {row.number: index for index, row in enumerate(done)}
    rows = [row for row in steps if row.iteration in numbers]
    spans = tuple(
        Span(
            step=row.step.id,
            iteration=numbers[row.iteration],
            queue=row.step.queue,
            kind=row.step.kind,
            chunk=row.step.chunk,
            moment=row.step.moment,
            bytes=row.step.bytes,
            ready_s=row.ready_s - begin_s,
            start_s=row.start_s - begin_s,
            end_s=row.end_s - begin_s,
            cause=row.cause,
        )
        for row in sorted(rows, key=lambda row: (row.start_s, row.step.id))
    )
    last = done[-1]
    start_s, end_s = starts[-1], last.end_s
    stall_s: dict[str, float] = {}
    busy_s: dict[str, float] = {}
    moved = {"h2d": 0, "d2h": 0}
    for step in rows:
        if step.iteration != last.number:
            continue
        busy_s[step.step.queue.value] = busy_s.get(step.step.queue.value, 0.0) + step.end_s - step.start_s
        if step.step.queue is Queue.COMPUTE and step.start_s > step.ready_s and step.cause:
            stall_s[step.cause] = stall_s.get(step.cause, 0.0) + step.start_s - step.ready_s
        if step.step.kind in COPIES:
            moved[step.step.queue.value] += step.copied_bytes
    samples, peaks = _samples(plan, changes, start_s, end_s)
    return Timeline(
        source="measured",
        iterations=len(done),
        iteration_s=end_s - start_s,
        spans=spans,
        samples=samples,
        peak_bytes=peaks,
        moved_bytes=moved,
        stall_s=stall_s,
        busy_s=busy_s,
        label=plan.policy,
        phases=tuple(m.phase.value for m in plan.workload.moments),
        budget_bytes={"gpu": plan.gpu_budget_bytes, "host": plan.host_budget_bytes},
    )


def _last_stretch(iterations: Sequence[IterationLog]) -> list[IterationLog]:
    """The newest iterations that ran on plan one after the other, oldest first."""
    stretch: list[IterationLog] = []
    for row in reversed(iterations):
        if not row.on_plan or (stretch and row.number != stretch[0].number - 1):
            break
        stretch.insert(0, row)
    return stretch


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One iteration's bytes. non_model_bytes: peak of each moment, from live storages. peak_gpu_bytes: most of payloads
    and non-model data together. payload_peak_bytes, peak_host_bytes: most the arena held. moved_bytes: per direction,
    counted where bytes are copied. on_plan: the measured iteration followed the plan; otherwise the rest is of no
    use."""

    non_model_bytes: tuple[int, ...]
    peak_gpu_bytes: int
    payload_peak_bytes: int
    peak_host_bytes: int
    moved_bytes: dict[str, int]
    on_plan: bool


def with_tide(timeline: Timeline, measured: Measured) -> Timeline:
    """The timeline with the non-model bytes that were measured of each moment (in an iteration of its own, which is not
    timed) in place of the plan's. See [Note: what a step does to memory] for what holds between two moments."""
    peaks = measured.non_model_bytes
    last = timeline.iterations - 1
    computes = [s for s in timeline.spans if s.queue is Queue.COMPUTE]
    origin_s = max((s.end_s for s in computes if s.iteration == last - 1), default=0.0)
    tide = [(0.0, min(peaks[-1], peaks[0]))]
    for span in computes:
        if span.iteration == last and span.kind is Kind.COMPUTE and span.moment is not None:
            m, following = span.moment, peaks[(span.moment + 1) % len(peaks)]
            tide += [(span.start_s - origin_s, peaks[m]), (span.end_s - origin_s, min(peaks[m], following))]
    kept = [s for s in timeline.samples if s.category != "non-model"]
    kept += [ByteSample(time_s, Place.GPU.value, "non-model", size) for time_s, size in tide]
    return replace(
        timeline,
        samples=tuple(sorted(kept, key=lambda s: s.time_s)),
        peak_bytes={**timeline.peak_bytes, "gpu": measured.peak_gpu_bytes},
    )


def _samples(
    plan: Plan, changes: Iterable[ByteChange], start_s: float, end_s: float
) -> tuple[tuple[ByteSample, ...], dict[str, int]]:
    """Byte samples in [start_s, end_s), the state at start_s first; peaks by place."""
    held = {(place, category): 0 for place in (Place.GPU, Place.HOST) for category in CATEGORIES}
    for _, place, size in plan.buffers:
        held[place, "buffer"] += size
    samples: list[ByteSample] = []
    peaks = {"gpu": 0, "host": 0}
    begun = False

    def begin() -> None:
        for (place, category), size in held.items():
            if size:
                samples.append(ByteSample(0.0, place.value, category, size))
        for place in (Place.GPU, Place.HOST):
            peaks[place.value] = _total(held, place)

    for change in changes:
        if change.time_s >= end_s:
            break
        if not begun and change.time_s >= start_s:
            begin()
            begun = True
        held[change.place, change.category] += change.change
        if begun:
            samples.append(
                ByteSample(
                    change.time_s - start_s, change.place.value, change.category, held[change.place, change.category]
                )
            )
            # The non-model part is the trace's figure for the moment, as in the plan; measure_iteration measures it.
            peaks[change.place.value] = max(peaks[change.place.value], _total(held, change.place))
    if not begun:
        begin()
    return tuple(samples), peaks


def _total(held: dict[tuple[Place, str], int], place: Place) -> int:
    return sum(size for (spot, _), size in held.items() if spot is place)
