"""A lower bound of offloaded activations alone: computing, and the waits for the copies of stashes.

[Note: the bound of stashes] No plan is faster than the following schedule. The moments run one after the other. Each
stash is copied out after the moment that makes it. The moment after which the stash's bytes are no longer counted waits
for this copy. The stash is copied in after the moment from which its bytes are counted again. The moment that needs the
stash waits for this copy. The link carries nothing else. Every plan has these waits (the checker proves them) and more
traffic on the link. In each direction the copies run in the order in which the stashes are made. A stash made earlier
is also awaited earlier, so no other order makes any wait end earlier. Successive iterations do not overlap on the
compute queue.
"""

from __future__ import annotations

from pstar_sim.cost import CostModel
from pstar_sim.policy.kit.stash_moves import StashMoves
from pstar_sim.workload.workload import Workload

__all__ = ["stash_bound_s"]


def stash_bound_s(w: Workload, cost: CostModel) -> float:
    """Returns the seconds of one iteration by [Note: the bound of stashes]; without stashes, the seconds of computing
    alone."""
    moves = StashMoves(w)
    copies = [(cost.transfer_s(s.bytes, "d2h"), cost.transfer_s(s.bytes, "h2d")) for s in w.stashes]
    out_s, in_s = [0.0] * len(copies), [0.0] * len(copies)  # end of each copy, in seconds
    clock = down = up = 0.0
    for m, seconds in enumerate(cost.moments_s):
        waits = [out_s[n] for n in moves.gone.get(m, ())] + [in_s[n] for n in moves.needed.get(m, ())]
        clock = max(clock, *waits, 0.0) + seconds
        for n in moves.made.get(m, ()):
            down = out_s[n] = max(clock, down) + copies[n][0]
        for n in moves.back.get(m, ()):
            up = in_s[n] = max(clock, up, out_s[n]) + copies[n][1]
    return clock
