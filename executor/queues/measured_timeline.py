"""A run's logs as a Timeline, in the simulator's schema.

An iteration lasts from the last compute step's end in the one before to its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from executor.memory.arena import PLACES
from executor.memory.byte_log import ByteChange
from executor.queues.logs import IterationLog, StepLog, counted_bytes
from pstar_sim.core.effects import CATEGORIES
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Place, Queue
from pstar_sim.core.timeline import ByteSample, Span, Timeline
from pstar_sim.errors import PlanError


def build_timeline(
    plan: Plan,
    steps: Iterable[StepLog],
    iterations: Sequence[IterationLog],
    changes: Iterable[ByteChange],
    first_s: float,
) -> Timeline:
    """Of the last stretch on plan.

    iteration_s, samples, peaks and stalls are the last finished iteration's. Raises PlanError without one.
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
    for step in rows:
        if step.iteration != last.number:
            continue
        busy_s[step.step.queue.value] = busy_s.get(step.step.queue.value, 0.0) + step.end_s - step.start_s
        if step.step.queue is Queue.COMPUTE and step.start_s > step.ready_s and step.cause:
            stall_s[step.cause] = stall_s.get(step.cause, 0.0) + step.start_s - step.ready_s
    samples, peaks = _samples(plan, changes, start_s, end_s)
    return Timeline(
        source="measured",
        iterations=len(done),
        iteration_s=end_s - start_s,
        spans=spans,
        samples=samples,
        peak_bytes=peaks,
        moved_bytes=counted_bytes(plan, rows, last.number),
        stall_s=stall_s,
        busy_s=busy_s,
        label=plan.policy,
        phases=tuple(m.phase.value for m in plan.workload.moments),
        budget_bytes={"gpu": plan.gpu_budget_bytes, "host": plan.host_budget_bytes},
    )


def _last_stretch(iterations: Sequence[IterationLog]) -> list[IterationLog]:
    stretch: list[IterationLog] = []
    for row in reversed(iterations):
        if not row.on_plan or (stretch and row.number != stretch[0].number - 1):
            break
        stretch.insert(0, row)
    return stretch


def _samples(
    plan: Plan, changes: Iterable[ByteChange], start_s: float, end_s: float
) -> tuple[tuple[ByteSample, ...], dict[str, int]]:
    held = {(place, category): 0 for place in PLACES for category in CATEGORIES}
    for _, place, size in plan.buffers:
        held[place, "buffer"] += size
    samples: list[ByteSample] = []
    peaks = {place.value: 0 for place in PLACES}
    begun = False

    def begin() -> None:
        for (place, category), size in held.items():
            if size:
                samples.append(ByteSample(0.0, place.value, category, size))
        for place in PLACES:
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
