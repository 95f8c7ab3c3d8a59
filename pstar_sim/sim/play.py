"""play(plan): follows the plan on its machine until two successive iterations agree, and returns bytes and seconds of
every step.

core/follow.py (one.py) follows a single rank, or one rank that stands for all equal ranks. SimPy (several_ranks.py)
simulates ranks that differ, and ranks one by one. The simulator decides nothing: the plan gives order and waits, the
cost model gives seconds.
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
    """Simulates the plan on its machine until it is steady, for at most `max_iterations` (>= 2) iterations. Returns the
    timeline. Equal arguments give equal timelines.

    cost: cost model; None: that of the plan's own workload, machine and layout. On a machine of several ranks, equal
        ranks are simulated once (several_ranks.py).
    jitter: factor on the seconds of each step, for tests.
    every_rank: whether to simulate all ranks one by one.
    workloads: each rank's own workload; None: the plan's.
    rank: rank of the timeline, if ranks differ; None: the slowest rank.

    Raises PlanError, naming the step, for a plan that deadlocks, that goes over a budget, or whose steps contradict
    each other.
    """
    if max_iterations < 2:
        raise PlanError(f"max_iterations must be at least 2, so that two can agree, not {max_iterations}")
    if len(plan.machine.ranks) > 1:
        from pstar_sim.sim.several_ranks import play_ranks

        return play_ranks(plan, cost, max_iterations, jitter, every_rank=every_rank, workloads=workloads, rank=rank)
    return play_one(plan, cost or cost_of(plan.workload, plan.machine, plan.layout), max_iterations, jitter)
