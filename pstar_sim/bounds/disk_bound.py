"""A lower bound of the disks alone.

[Note: the bound of disks] At every moment, each state of a chunk that is updated is somewhere, and so is its working
list or, of as many bytes, the last gradient behind it. Between its gradients, the sum of those that it has is there too
(one of them may wait as it is). GPU and host have room for what the tide leaves of one and for the other's budget. The
remaining bytes are on the disks alone. The update changes them, or they are gradients of this iteration: all are read
from the disks and written to them once per iteration, as fast as `Nvme.least_s`. The moment with most of them counts.
Bytes count, of whichever lists of whichever chunks: masters may be elsewhere than moments.

Behind a barrier, all states and gradients are somewhere when the last moment ends, and no update has begun. What GPU
and host then have no room for is read afterwards. Of the chunks first read up to moment f, the updates end before the
next f. Their new states, and their new working lists, are somewhere when f begins. What GPU and host then have no room
for has been written in between. So T >= all moments from f on + both.

Frozen chunks and latencies are not counted.
"""

from __future__ import annotations

import numpy as np

from pstar_sim.bounds.bound_facts import Array
from pstar_sim.core.layout import Layout
from pstar_sim.cost import CostModel
from pstar_sim.policy.kit.facts import Facts, facts_of
from pstar_sim.policy.kit.update_windows import Inside
from pstar_sim.workload.workload import Workload


def disk_bound_s(w: Workload, layout: Layout, cost: CostModel, *, barrier: bool) -> float:
    """[Note: the bound of disks]; 0 where the lists have room without disks, or there are none.

    barrier: no update begins before the last moment ends.
    """
    machine, facts = cost.machine, facts_of(w, layout)
    if machine.nvme is None or not facts.trained:
        return 0.0
    working = np.array([layout.payload_bytes(c, "param") for c in facts.trained], dtype=float)
    states = [sum(layout.payload_bytes(c, name) for name in layout.states_of(c).names) for c in facts.trained]
    lists = working + np.array(states, dtype=float)
    sums = _sums_bytes(facts, working)
    room = machine.gpu_budget_bytes + machine.host_budget_bytes - np.array([m.peak_bytes for m in w.moments])
    read_s, write_s = (machine.local_ranks / r for r in (machine.nvme.read_bytes_per_s, machine.nvme.write_bytes_per_s))
    most = max(0.0, float((lists.sum() + _waiting_bytes(facts, sums) - room).max()))
    seconds = machine.nvme.least_s(most * read_s, most * write_s)
    if barrier:
        first = np.array([facts.reads[c][0] for c in facts.trained])
        clock = np.concatenate(([0.0], np.cumsum(cost.moments_s)))
        inside = Inside(first)
        old = inside.sums(lists - working + sums[:, -1]) - room[-1]
        new = inside.sums(lists) - room[first]
        moves_s = zip(np.maximum(0.0, old) * read_s, np.maximum(0.0, new) * write_s)
        moved_s = np.array([machine.nvme.least_s(float(before), float(behind)) for before, behind in moves_s])
        seconds = max(seconds, float((clock[-1] - clock[first] + moved_s)[moved_s > 0].max(initial=0.0)))
    return seconds


def _sums_bytes(facts: Facts, working: Array) -> Array:
    """[chunk of `trained`, number of gradients that it has had, from 0 on]: bytes of their sum, at least."""
    width = np.array([facts.layout.sum_width(c) / facts.width(c) for c in facts.trained])
    most = np.minimum(width, [len(facts.spans[c]) for c in facts.trained])
    found: Array = working[:, None] * np.minimum(np.arange(facts.workload.micro_batches + 1), most[:, None])
    return found


def _waiting_bytes(facts: Facts, sums: Array) -> Array:
    """Per moment, of all chunks that are between their gradients."""
    changes = np.zeros(len(facts.workload.moments) + 1)
    for row, chunk in enumerate(facts.trained):
        arrivals = [last for _, _, last in facts.spans[chunk]]
        np.add.at(changes, np.array(arrivals[:-1], dtype=int) + 1, np.diff(sums[row])[: len(arrivals) - 1])
        changes[arrivals[-1] + 1] -= sums[row][len(arrivals) - 1]
    return np.cumsum(changes)[:-1]
