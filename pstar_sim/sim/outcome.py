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
from collections.abc import Mapping
from functools import partial
from typing import Any

from pstar_sim.core.follow import Record
from pstar_sim.core.plan import Plan
from pstar_sim.core.timeline import ByteSample, Rows, Span, Timeline
from pstar_sim.sim.memory import Held

__all__ = ["timeline"]


def timeline(plan: Plan, record: Record, held: Held, moved_bytes: Mapping[str, int] | None = None) -> Timeline:
    """The timeline of a plan that was followed; the last iteration of the record is the one that counts. moved_bytes:
    by default those of the plan."""
    program = record.program
    k = len(record.ended) - 1
    begun, ended = record.begun[k], record.ended[k]
    previous = program.previous()
    stall_s: dict[str, float] = defaultdict(float)
    for i in program.order[program.compute]:
        if begun[i] > record.ready[k][i]:
            for name, seconds in _blame(record, previous, i, k).items():
                stall_s[name] += seconds
    return Timeline(
        source="simulated",
        iterations=k + 1,
        iteration_s=record.iteration_s,
        spans=Rows(Span, partial(_spans, plan, record)),
        samples=Rows(ByteSample, held.samples),
        peak_bytes=dict(held.peaks),
        moved_bytes=dict(moved_bytes or plan.moved_bytes),
        stall_s=dict(stall_s),
        busy_s={
            queue.value: sum(ended[i] - begun[i] for i in order) for queue, order in zip(program.queues, program.order)
        },
        label=plan.policy,
        phases=tuple(m.phase.value for m in plan.workload.moments),
        budget_bytes={place.value: size for place, size in plan.budgets.items()},
    )


def _spans(plan: Plan, record: Record) -> dict[str, list[Any]]:
    """Columns of the spans: every step of every iteration, in the order of the plan."""
    steps, count = plan.steps, len(record.ended)
    return {
        "step": [step.id for step in steps] * count,
        "iteration": [k for k in range(count) for _ in steps],
        "queue": [step.queue for step in steps] * count,
        "kind": [step.kind for step in steps] * count,
        "chunk": [step.chunk for step in steps] * count,
        "moment": [step.moment for step in steps] * count,
        "bytes": [step.bytes for step in steps] * count,
        "ready_s": [time_s for row in record.ready for time_s in row],
        "start_s": [time_s for row in record.begun for time_s in row],
        "end_s": [time_s for row in record.ended for time_s in row],
        "cause": _causes(record),
    }


def _causes(record: Record) -> list[str]:
    """What each step waited for, "" where it did not wait."""
    program, previous = record.program, record.program.previous()
    causes: list[str] = []
    for k, (ready, begun, waited_for) in enumerate(zip(record.ready, record.begun, record.waited_for)):
        for i in range(len(ready)):
            cause = ""
            if begun[i] > ready[i]:
                if program.queue_of[i] == program.compute:
                    blame = _blame(record, previous, i, k)
                    cause = max(blame, key=lambda c: blame[c]) if blame else program.lanes[waited_for[i]]
                else:  # a collective may also have waited for other ranks only
                    cause = program.lanes[waited_for.get(i, i)]
            causes.append(cause)
    return causes


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
