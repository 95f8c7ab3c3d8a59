"""play(plan): the plan followed on its machine until two successive iterations agree, bytes and seconds of every step.

core/follow.py (one.py) follows a single rank, or one rank that stands for all equal ones. SimPy (several_ranks.py)
simulates ranks that differ, and ranks one by one. Nothing is decided here: order and waits are the plan's, seconds are
the cost model's.
"""

from __future__ import annotations

from collections.abc import Sequence

from pstar_sim.core.plan import Plan
from pstar_sim.core.timeline import Timeline
from pstar_sim.cost import CostModel, cost_of
from pstar_sim.errors import PlanError
from pstar_sim.sim.one import Jitter, play_one
from pstar_sim.workload.workload import Workload

__all__ = ["Jitter", "play"]


def play(
    plan: Plan,
    *,
    cost: CostModel | None = None,
    max_iterations: int = 8,
    jitter: Jitter | None = None,
    every_rank: bool = False,
    workloads: Sequence[Workload] | None = None,
    rank: int | None = None,
) -> Timeline:
    """Simulate the plan on its machine until it is steady, at most `max_iterations` (>= 2) iterations.

    cost: cost model, by default of the plan's own workload, machine and layout. On a machine of several ranks equal
        ones are simulated once (several_ranks.py).
    every_rank: simulate all ranks, one by one.
    workloads: each rank's own workload, where it is not the plan's.
    rank: whose timeline, where ranks differ; None: the slowest rank's.

    Raises PlanError, naming the step, for a plan that deadlocks, goes over a budget, or whose steps contradict each
    other. Equal arguments give equal timelines.
    """
    if max_iterations < 2:
        raise PlanError(f"max_iterations must be at least 2 (two that may agree), not {max_iterations}")
    if len(plan.machine.ranks) > 1:
        from pstar_sim.sim.several_ranks import play_ranks

        return play_ranks(plan, cost, max_iterations, jitter, every_rank=every_rank, workloads=workloads, rank=rank)
    return play_one(plan, cost or cost_of(plan.workload, plan.machine, plan.layout), max_iterations, jitter)
