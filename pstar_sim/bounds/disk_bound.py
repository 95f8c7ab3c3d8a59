"""A lower bound of the disks alone.

[Note: the bound of disks] At every moment, each state of a chunk that is updated is somewhere, and so is its working
list or, of as many bytes or more, the gradient or sum of gradients behind it. When the tide is highest, GPU and host
have room for what the tide leaves of one and for the other's budget. The remaining bytes are on the disks alone. The
update changes them, or they are gradients of this iteration: all are read from the disks and written to them once per
iteration. Reads and writes take turns. Frozen chunks and latencies are not counted.
"""

from __future__ import annotations

from pstar_sim.core.layout import Layout
from pstar_sim.cost import CostModel
from pstar_sim.policy.kit.facts import facts_of
from pstar_sim.workload.workload import Workload


def disk_bound_s(w: Workload, layout: Layout, cost: CostModel) -> float:
    """[Note: the bound of disks]; 0 where the lists have room without disks, or there are none."""
    machine, trained = cost.machine, facts_of(w, layout).trained
    lists = sum(layout.payload_bytes(c, name) for c in trained for name in ("param", *layout.states_of(c).names))
    elsewhere = machine.gpu_budget_bytes - max(m.peak_bytes for m in w.moments) + machine.host_budget_bytes
    if machine.nvme is None or lists <= elsewhere:
        return 0.0
    each_s = 1 / machine.nvme.read_bytes_per_s + 1 / machine.nvme.write_bytes_per_s
    return (lists - elsewhere) * machine.local_ranks * each_s
