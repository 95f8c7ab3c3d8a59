"""One rank by itself, or one of each stage, until two successive iterations agree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from pstar_sim.core.follow import Deadlock, Factor, Member, follow_all, follow_once
from pstar_sim.core.ledger import Moves
from pstar_sim.core.plan import Plan
from pstar_sim.core.plan_set import PlanSet, sums_of
from pstar_sim.core.program import Program
from pstar_sim.core.timeline import Timeline
from pstar_sim.cost import CostModel, cost_of
from pstar_sim.sim.bytes_held import held
from pstar_sim.sim.outcome import timeline

Jitter = Factor
"""(step id, iteration) -> factor on the step's nominal seconds, for tests of other legal interleavings."""


def play_one(
    plan: Plan,
    cost: CostModel,
    max_iterations: int,
    jitter: Jitter | None,
    *,
    moved_bytes: Mapping[str, int] | None = None,
) -> Timeline:
    """The rank has DRAM and link to itself.

    moved_bytes: by default the plan's.
    """
    program = Program.of(plan)
    moves = Moves(plan)
    member = Member(program, cost.step_costs(plan), cost.rates())
    try:
        record = follow_once(plan, member, factor=jitter, most=max_iterations)
    except Deadlock as error:  # an error before the deadlock comes first
        for record in error.records:
            moves.book(record.events)
        raise
    return timeline(plan, record, held(moves, record), moved_bytes)


def play_set(plans: PlanSet, max_iterations: int, jitter: Jitter | None = None) -> tuple[Timeline, ...]:
    """One rank stands for each stage, or kind of GPU, whose machine has its part of the nodes."""
    members, positions = [], []
    for plan in plans.plans:
        cost, program = cost_of(plan.workload, plan.machine, plan.layout), Program.of(plan)
        members.append(Member(program, cost.step_costs(plan), cost.rates(measured=False)))
        positions.append(program.position)
    begins = [[(stage, positions[stage][step]) for stage, step in meeting.steps] for meeting in plans.meetings]
    sums: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for stage, plan in enumerate(plans.plans if plans.shares else ()):
        for step, moment in sums_of(plan).items():
            sums[moment].append((stage, positions[stage][step]))
    moves = [Moves(plan) for plan in plans.plans]
    try:
        records = follow_all(members, begins=begins, ends=list(sums.values()), factor=jitter, most=max_iterations)
    except Deadlock as error:
        for own, record in zip(moves, error.records):
            own.book(record.events)
        raise
    return tuple(timeline(plan, record, held(own, record)) for plan, record, own in zip(plans.plans, records, moves))
