"""What the accelerator waits for, from the stalls of a timeline. The cost of a barrier is an argument: it takes a
second plan.
"""

from __future__ import annotations

from pstar_sim.core.timeline import Timeline

BINDS = ("compute", "adam", "h2d", "d2h", "dram", "barrier", "net", "nvme", "nvme_write", "send", "receive", "stages")

COMPUTE_BOUND_STALL = 0.02
"""Below this share of the iteration in stalls, the accelerator counts as always busy."""
BARRIER_SHARE = 0.5
"""CPU Adam behind a barrier counts as "barrier" if dropping the barrier saves at least this share of the waiting."""


def bound_by(timeline: Timeline, *, barrier_cost_s: float | None) -> str:
    """Returns one of BINDS.

    "compute" if the accelerator waits less than 2 % of the iteration. Otherwise the cause of most of its waiting
    (`Timeline.stall_s`). Waiting for Adam behind a barrier counts as "barrier" if at least half of all waiting would
    end without it (`barrier_cost_s`, if known), else as "adam".
    """
    total = sum(timeline.stall_s.values())
    if total <= COMPUTE_BOUND_STALL * timeline.iteration_s:
        return "compute"
    worst = max(BINDS, key=lambda name: timeline.stall_s.get(name, 0.0))
    if worst == "barrier" and barrier_cost_s is not None and barrier_cost_s < BARRIER_SHARE * total:
        return "adam"
    return worst
