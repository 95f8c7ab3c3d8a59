"""A lower bound of offloaded activations alone: computing, and the waits for the copies of stashes.

[Note: the bound of stashes] No plan is faster than this schedule. The moments run one after the other. Each stash is
copied out after the moment that makes it, and the moment after which its bytes are no longer counted waits for the
copy. It is copied in after the moment from which its bytes are counted again, and the moment that needs it waits. The
link carries nothing else. Every plan has these waits (the checker proves them). In each direction the copies run in the
order in which the stashes are made; one made earlier is also awaited earlier, so no other order makes any wait end
earlier.
"""

from __future__ import annotations

from dataclasses import replace

from pstar_sim.core.step import Kind
from pstar_sim.cost import CostModel
from pstar_sim.policy.kit.trip_moves import TripMoves
from pstar_sim.workload.workload import Workload


def stash_bound_s(w: Workload, cost: CostModel) -> float:
    """[Note: the bound of stashes]; without stashes, computing alone."""
    moves = TripMoves(replace(w, borders=()))
    ends_s: list[float] = []  # of the copies, in the order in which they begin
    out_s: dict[int, float] = {}  # stash -> end of its copy out
    clock = down = up = 0.0
    for m, seconds in enumerate(cost.moments_s):
        clock = max([clock, *(ends_s[row] for row in moves.waits(m))]) + seconds
        for trip in moves.behind.get(m, ()):
            if trip.kind is Kind.STASH_OUT:
                end_s = down = out_s[trip.number] = max(clock, down) + cost.transfer_s(trip.bytes, "d2h")
            else:
                end_s = up = max(clock, up, out_s[trip.number]) + cost.transfer_s(trip.bytes, "h2d")
            moves.step_of[trip.kind, trip.number] = len(ends_s)
            ends_s.append(end_s)
    return clock
