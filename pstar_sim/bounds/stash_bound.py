"""A lower bound of offloaded activations alone: computing, and the copies of stashes that it waits for.

[Note: the bound of stashes] No plan is faster than this schedule. The moments run one after the other. Each stash is
copied out behind the moment that makes it; the moment behind which its bytes are no longer counted waits for that copy.
The stash is copied in behind the moment from which its bytes are counted again; the moment that needs it waits for that
copy. The link carries nothing else. Every plan has these waits (the checker proves them) and more on the
link. On one direction the copies go in the order in which they are made; a stash made earlier is also awaited earlier,
so no other order makes any wait end earlier. Successive iterations do not overlap on the compute queue.
"""

from __future__ import annotations

from pstar_sim.cost import CostModel
from pstar_sim.policy.kit.stash_moves import StashMoves
from pstar_sim.workload.workload import Workload

__all__ = ["stash_bound_s"]


def stash_bound_s(w: Workload, cost: CostModel) -> float:
    """Seconds of one iteration by [Note: the bound of stashes]; without stashes, of computing alone."""
    moves = StashMoves(w)
    copies = [(cost.transfer_s(s.bytes, "d2h"), cost.transfer_s(s.bytes, "h2d")) for s in w.stashes]
    out_s, in_s = [0.0] * len(copies), [0.0] * len(copies)  # when each copy has ended
    clock = down = up = 0.0
    for m, seconds in enumerate(cost.moments_s):
        waits = [out_s[n] for n in moves.gone.get(m, ())] + [in_s[n] for n in moves.needed.get(m, ())]
        clock = max(clock, *waits, 0.0) + seconds
        for n in moves.made.get(m, ()):
            down = out_s[n] = max(clock, down) + copies[n][0]
        for n in moves.back.get(m, ()):
            up = in_s[n] = max(clock, up, out_s[n]) + copies[n][1]
    return clock
