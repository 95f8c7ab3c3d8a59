"""What binds: which resource the accelerator waits for, from the stalls that a timeline puts down to their causes.

Knows a timeline only; the cost of a barrier is an argument, because it takes a second plan.
"""

from __future__ import annotations

from pstar_sim.core.timeline import Timeline

__all__ = ["BINDS", "bound_by"]

BINDS = ("compute", "adam", "h2d", "d2h", "dram", "barrier", "net", "nvme")

COMPUTE_BOUND_STALL = 0.02
"""Below this share of the iteration the accelerator counts as busy all the time."""
BARRIER_SHARE = 0.5
"""CPU Adam behind a barrier is the barrier's fault when removing it saves at least this share of the waiting."""


def bound_by(timeline: Timeline, *, barrier_cost_s: float | None) -> str:
    """One of BINDS.

    "compute": the accelerator waits less than 2 % of the iteration. Else the cause of most of its waiting
    (`Timeline.stall_s`). Waiting for Adam behind a barrier counts as "barrier" if at least half of all waiting would go
    without the barrier (`barrier_cost_s`, where known), else as "adam".
    """
    total = sum(timeline.stall_s.values())
    if total <= COMPUTE_BOUND_STALL * timeline.iteration_s:
        return "compute"
    worst = max(BINDS, key=lambda name: timeline.stall_s.get(name, 0.0))
    if worst == "barrier" and barrier_cost_s is not None and barrier_cost_s < BARRIER_SHARE * total:
        return "adam"
    return worst
