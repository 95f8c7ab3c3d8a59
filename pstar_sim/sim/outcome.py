"""A run's record, in the schema that simulator and executor share.

[Note: where an iteration begins] Iteration k lasts from the last compute step's end in k-1 to that in k; samples, peaks
and stalls are of this window, and its compute steps.

[Note: stall causes] While compute waits, the chain of causes is followed backwards: from the step that ended last to
those each waited for, or followed on its queue, until the wait began. Each second counts for the queue of the step that
ran then: "h2d", "d2h", "adam". Adam behind the barrier (with the optimizer step in `after`, or following such an Adam)
is "barrier", a pipeline stage's wait for another at a transfer or the optimizer step "stages", and what short DRAM adds
to a copy or an Adam "dram". A span carries its longest cause.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from pstar_sim.core.follow import Record
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Queue
from pstar_sim.core.timeline import ByteSample, RowsByColumn, Span, Timeline
from pstar_sim.sim.bytes_held import Held
from pstar_sim.workload.workload import Phase

_BORDERS = (Queue.SEND.value, Queue.RECEIVE.value)
_OTHER_STAGES = "stages"


def timeline(plan: Plan, record: Record, held: Held, moved_bytes: Mapping[str, int] | None = None) -> Timeline:
    """Of the last iteration.

    moved_bytes: by default the plan's.
    """
    program, times = record.program, record.times
    k = record.iterations - 1
    worked_s = times.end[k] - times.begin[k]
    waits = _Waits(record)
    phases = {phase: phase.value for phase in Phase}
    return Timeline(
        source="simulated",
        iterations=record.iterations,
        iteration_s=record.iteration_s,
        spans=RowsByColumn(Span, partial(_spans, plan, record, waits)),
        samples=RowsByColumn(ByteSample, held.samples),
        peak_bytes=dict(held.peaks),
        moved_bytes=dict(moved_bytes or plan.moved_bytes),
        stall_s=waits.stall_s(k),
        busy_s={
            queue.value: sum(worked_s[list(order)].tolist()) for queue, order in zip(program.queues, program.order)
        },
        label=plan.policy,
        phases=tuple([phases[m.phase] for m in plan.workload.moments]),
        budget_bytes={place.value: size for place, size in plan.budgets.items()},
    )


def _spans(plan: Plan, record: Record, waits: _Waits) -> dict[str, list[Any]]:
    steps, count, times = plan.steps, record.iterations, record.times
    return {
        "step": [step.id for step in steps] * count,
        "iteration": [k for k in range(count) for _ in steps],
        "queue": [step.queue for step in steps] * count,
        "kind": [step.kind for step in steps] * count,
        "chunk": [step.chunk for step in steps] * count,
        "moment": [step.moment for step in steps] * count,
        "bytes": [step.bytes for step in steps] * count,
        "ready_s": times.ready.ravel().tolist(),
        "start_s": times.begin.ravel().tolist(),
        "end_s": times.end.ravel().tolist(),
        "cause": waits.causes(),
    }


class _Waits:
    """[Note: stall causes]"""

    def __init__(self, record: Record) -> None:
        times = record.times
        self._record, self._program, self._previous = record, record.program, record.program.previous()
        self._waited = times.begin > times.ready
        self._ready, self._begin, self._end = times.ready.tolist(), times.begin.tolist(), times.end.tolist()

    def stall_s(self, k: int) -> dict[str, float]:
        """Cause -> seconds of waits in iteration k."""
        stall_s: dict[str, float] = defaultdict(float)
        order = np.array(self._program.order[self._program.compute])
        for i in order[self._waited[k][order]].tolist():
            for cause, seconds in self._blame(i, k).items():
                stall_s[cause] += seconds
        return dict(stall_s)

    def causes(self) -> list[str]:
        """Per iteration and step, "" without a wait."""
        program, causes = self._program, [""] * self._waited.size
        for n in np.flatnonzero(self._waited).tolist():
            k, i = divmod(n, len(program.ids))
            blame = self._blame(i, k) if program.queue_of[i] == program.compute else {}
            if blame:
                causes[n] = max(blame, key=lambda c: blame[c])
            else:  # a collective may have waited only for other ranks
                causes[n] = program.lanes[self._record.last_wait[k].get(i, i)]
        return causes

    def _blame(self, i: int, k: int) -> dict[str, float]:
        program, last_wait, dram_loss_s = self._program, self._record.last_wait, self._record.dram_loss_s
        since_s, at_s = self._ready[k][i], self._begin[k][i]
        blame: dict[str, float] = defaultdict(float)
        met_s = self._record.arrival_s[k].get(i, at_s)
        if met_s < at_s:  # the optimizer step of a stage, which other stages share
            blame[_OTHER_STAGES] = at_s - met_s
            at_s = met_s
        if at_s <= since_s:
            return blame
        j = last_wait[k][i]
        kj = k - program.backs(i, j)
        while at_s > since_s:
            arrived_s = self._record.arrival_s[kj].get(j, self._begin[kj][j])
            start_s = max(arrived_s, since_s)
            begin_s = min(at_s, self._begin[kj][j])
            if start_s < begin_s and program.lanes[j] in _BORDERS:  # until the other stage comes to it
                blame[_OTHER_STAGES] += begin_s - start_s
                blame[program.lanes[j]] += at_s - begin_s
                at_s = start_s
            elif start_s < at_s:
                whole = self._end[kj][j] - arrived_s
                lost = dram_loss_s[kj][j] * (at_s - start_s) / whole if dram_loss_s and whole > 0 else 0.0
                blame[program.lanes[j]] += at_s - start_s - lost
                if lost > 0:
                    blame["dram"] += lost
                at_s = start_s
            if at_s <= since_s:
                break
            if j in last_wait[kj]:
                before = last_wait[kj][j]
                j, kj = before, kj - program.backs(j, before)
            elif self._previous[j] >= 0:
                j = self._previous[j]
            elif kj > 0:
                j, kj = program.order[program.queue_of[j]][-1], kj - 1
            else:
                break
        return blame
