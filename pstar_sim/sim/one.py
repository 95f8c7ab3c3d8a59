"""One rank by itself, until two successive iterations agree."""

from __future__ import annotations

from collections.abc import Mapping

from pstar_sim.core.follow import Deadlock, Factor, follow
from pstar_sim.core.ledger import Moves
from pstar_sim.core.plan import Plan
from pstar_sim.core.program import Program
from pstar_sim.core.timeline import Timeline
from pstar_sim.cost import CostModel
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
    costs = cost.step_costs(plan)
    try:
        record = follow(program, costs, cost.rates(), factor=jitter, most=max_iterations)
    except Deadlock as error:  # an error before the deadlock comes first
        if error.record is not None:
            moves.book(error.record.events)
        raise
    return timeline(plan, record, held(moves, record), moved_bytes)
