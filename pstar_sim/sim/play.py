"""Follows a plan on its machine until two successive iterations agree: core/follow.py (one.py) a single rank, or one
for all equal ranks or those of a stage, SimPy (several_ranks.py) ranks that differ, or one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pstar_sim.core.plan import Plan
from pstar_sim.core.plan_set import PlanSet
from pstar_sim.core.timeline import Timeline
from pstar_sim.cost import CostModel, cost_of
from pstar_sim.errors import PlanError
from pstar_sim.sim.one import Jitter, play_one, play_set

__all__ = ["Jitter", "peaks_of_ranks", "play", "play_each", "play_stages", "slowest"]


def play(
    plan: Plan,
    *,
    cost: CostModel | None = None,
    max_iterations: int = 8,
    jitter: Jitter | None = None,
    every_rank: bool = False,
    rank: int | None = None,
) -> Timeline:
    """Simulates the plan on its machine until it is steady, for at most `max_iterations` (>= 2) iterations. Equal
    arguments give equal timelines.

    cost: None: of the plan's own workload, machine and layout. Equal ranks are simulated once (several_ranks.py).
    jitter: on the seconds of each step, for tests.
    every_rank: simulate all ranks one by one.
    rank: None: the slowest, if ranks differ.

    Raises PlanError, naming the step, for a plan that deadlocks, that goes over a budget, or whose steps contradict
    each other, and for a rank that the machine lacks.
    """
    count = plan.machine.world_size
    if rank is not None and not 0 <= rank < count:
        raise PlanError(f"rank is {rank}; {plan.machine.name} has ranks 0 to {count - 1}")
    timelines = play_each(plan, cost=cost, max_iterations=max_iterations, jitter=jitter, every_rank=every_rank)
    return slowest(timelines) if rank is None else timelines[rank]


def play_each(
    plan: Plan,
    *,
    cost: CostModel | None = None,
    max_iterations: int = 8,
    jitter: Jitter | None = None,
    every_rank: bool = False,
) -> tuple[Timeline, ...]:
    """Arguments and errors are those of `play`."""
    if max_iterations < 2:
        raise PlanError(f"max_iterations must be at least 2, so that two can agree, not {max_iterations}")
    if plan.machine.world_size > 1 or plan.ranked is not None:
        from pstar_sim.sim.several_ranks import play_ranks

        return play_ranks(plan, cost, max_iterations, jitter, every_rank=every_rank)
    return (play_one(plan, cost or cost_of(plan.workload, plan.machine, plan.layout), max_iterations, jitter),)


def play_stages(plans: PlanSet, *, max_iterations: int = 8, jitter: Jitter | None = None) -> tuple[Timeline, ...]:
    """Simulated together. Errors are those of `play`."""
    if len(plans.plans) == 1:
        return (play(plans.plans[0], max_iterations=max_iterations, jitter=jitter),)
    return play_set(plans, max_iterations, jitter)


def slowest(timelines: Sequence[Timeline]) -> Timeline:
    """The first of equally slow ranks, whose period is the machine's."""
    return max(timelines, key=lambda timeline: timeline.iteration_s)


def peaks_of_ranks(plan: Plan, timeline: Timeline) -> tuple[Mapping[str, int], ...]:
    """By place."""
    from pstar_sim.sim.several_ranks import classes_of

    classes = classes_of(plan.machine, plan.ranked)
    alike = len(set(classes)) == 1
    return tuple(each.peak_bytes for each in ([timeline] * len(classes) if alike else play_each(plan)))
