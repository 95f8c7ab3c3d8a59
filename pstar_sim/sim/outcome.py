"""timeline: what a record of a run says, in the schema that simulator and executor share.

[Note: where an iteration begins] Iteration k lasts from the end of the last step of the compute queue of k-1 to that
of k. Samples, peaks and stalls are those of this window, and of the compute steps in it.

[Note: stall causes] While the compute queue waits, the chain of steps that it waits for is followed backwards in
time: the step that ended last, before it the step that one waited for (or followed on its queue), and so on until the
wait began. Every second of the wait belongs to the step of the chain running then and is put down to its queue: "h2d",
"d2h", "adam". A fetch that itself waited for CPU Adam thus blames Adam for that part and the link for its own. Adam
held back by the barrier (it names the optimizer step in `after`, or follows one that does) is "barrier"; the part of a
copy or an Adam by which short DRAM bandwidth stretched it is "dram". A span carries the cause with the most seconds.
"""

from __future__ import annotations

from collections import defaultdict

from pstar_sim.core.effects import CATEGORIES
from pstar_sim.core.follow import Record
from pstar_sim.core.plan import Plan
from pstar_sim.core.timeline import ByteSample, Span, Timeline
from pstar_sim.sim.memory import PLACES, Memory

__all__ = ["timeline"]


def timeline(plan: Plan, record: Record, memory: Memory) -> Timeline:
    """The timeline of a plan that was followed; the last iteration of the record is the one that counts."""
    program, steps = record.program, plan.steps
    k = len(record.ended) - 1
    previous = program.previous()
    stall_s: dict[str, float] = defaultdict(float)
    spans: list[Span] = []
    for it in range(k + 1):
        ready, begun, ended, waited_for = record.ready[it], record.begun[it], record.ended[it], record.waited_for[it]
        for i, step in enumerate(steps):
            cause = ""
            if begun[i] > ready[i]:
                if program.queue_of[i] == program.compute:
                    blame = _blame(record, previous, i, it)
                    cause = max(blame, key=lambda c: blame[c]) if blame else program.lanes[waited_for[i]]
                    if it == k:
                        for name, seconds in blame.items():
                            stall_s[name] += seconds
                else:  # a collective may also have waited for other ranks only
                    cause = program.lanes[waited_for.get(i, i)]
            spans.append(
                Span(
                    step=step.id,
                    iteration=it,
                    queue=step.queue,
                    kind=step.kind,
                    chunk=step.chunk,
                    moment=step.moment,
                    bytes=step.bytes,
                    ready_s=ready[i],
                    start_s=begun[i],
                    end_s=ended[i],
                    cause=cause,
                )
            )
    busy_s = {
        queue.value: sum(record.ended[k][i] - record.begun[k][i] for i in order)
        for queue, order in zip(program.queues, program.order)
    }
    samples, peaks = _samples(record, memory)
    return Timeline(
        source="simulated",
        iterations=k + 1,
        iteration_s=record.iteration_s,
        spans=tuple(spans),
        samples=samples,
        peak_bytes=peaks,
        moved_bytes=dict(plan.moved_bytes),
        stall_s=dict(stall_s),
        busy_s=busy_s,
        label=plan.policy,
        phases=tuple(m.phase.value for m in plan.workload.moments),
        budget_bytes={place.value: size for place, size in plan.budgets.items()},
    )


def _blame(record: Record, previous: list[int], i: int, k: int) -> dict[str, float]:
    """[Note: stall causes] Seconds by cause of the wait of step i of iteration k."""
    program = record.program
    since_s, at_s = record.ready[k][i], record.begun[k][i]
    blame: dict[str, float] = defaultdict(float)
    j = record.waited_for[k][i]
    kj = k - program.backs(i, j)
    while at_s > since_s:
        start_s = max(record.arrived[kj][j], since_s)
        if start_s < at_s:
            whole = record.ended[kj][j] - record.arrived[kj][j]
            lost = record.dram_lost[kj][j] * (at_s - start_s) / whole if record.dram_lost and whole > 0 else 0.0
            blame[program.lanes[j]] += at_s - start_s - lost
            if lost > 0:
                blame["dram"] += lost
            at_s = start_s
        if at_s <= since_s:
            break
        if j in record.waited_for[kj]:
            before = record.waited_for[kj][j]
            j, kj = before, kj - program.backs(j, before)
        elif previous[j] >= 0:
            j = previous[j]
        elif kj > 0:
            j, kj = program.order[program.queue_of[j]][-1], kj - 1
        else:
            break
    return blame


def _samples(record: Record, memory: Memory) -> tuple[tuple[ByteSample, ...], dict[str, int]]:
    """Bytes over the window of the last iteration, and the peak of each place in it."""
    program, k = record.program, len(record.ended) - 1
    begin_s = record.ended[k - 1][program.order[program.compute][-1]]
    low, held = memory.marks[k - 1]
    high, _ = memory.marks[k]
    cells = list(held)
    width = len(CATEGORIES)
    places = sorted({cell // width for _, cell, _ in memory.log} | {0, 1})
    samples = [ByteSample(0.0, PLACES[p], CATEGORIES[c], cells[p * width + c]) for p in places for c in range(width)]
    used = [sum(cells[p * width : (p + 1) * width]) for p in range(len(PLACES))]
    peaks = list(used)
    for time_s, cell, change in memory.log[low:high]:
        cells[cell] += change
        place = cell // width
        used[place] += change
        if used[place] > peaks[place]:
            peaks[place] = used[place]
        samples.append(ByteSample(time_s - begin_s, PLACES[place], CATEGORIES[cell % width], cells[cell]))
    return tuple(samples), {PLACES[p]: peaks[p] for p in places}
