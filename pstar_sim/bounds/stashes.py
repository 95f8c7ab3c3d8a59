"""A lower bound of offloaded activations alone: computing, and the copies of stashes that it waits for.

[Note: the bound of stashes] No plan is faster than the moments one after the other, each stash copied out behind the
moment that makes it and awaited by the moment behind which its bytes are no longer counted, copied in behind the moment
from which they are counted again and awaited by the one that needs it, with each direction of the link to themselves:
every plan has these waits (core/checker/stashes.py proves them) and more on the link. On one direction the copies go in
the order in which they are made; a stash made earlier is also awaited earlier, so no other order makes any wait end
earlier. Successive iterations do not overlap on the compute queue.
"""

from __future__ import annotations

from pstar_sim.cost import CostModel
from pstar_sim.policy.kit.stashes import StashMoves
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
