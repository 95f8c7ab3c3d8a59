"""A lower bound of the disks alone.

[Note: the bound of disks] A state of a chunk that is updated is somewhere at every moment, and a state that is never on
the disks is on the GPU or the host. So the states that are never there have no more bytes than the host's budget and
what the highest tide leaves of the GPU's. The update changes every other state, which is therefore read from the disks
and written to them once per iteration. Reads and writes take turns. Gradients, working lists and latencies are not
counted.
"""

from __future__ import annotations

from pstar_sim.core.layout import Layout
from pstar_sim.cost import CostModel
from pstar_sim.policy.kit.facts import facts_of
from pstar_sim.workload.workload import Workload


def disk_bound_s(w: Workload, layout: Layout, cost: CostModel) -> float:
    """[Note: the bound of disks]; 0 where the states have room without disks, or there are none."""
    machine, trained = cost.machine, facts_of(w, layout).trained
    states = sum(layout.payload_bytes(c, name) for c in trained for name in layout.states_of(c).names)
    elsewhere = machine.gpu_budget_bytes - max(m.peak_bytes for m in w.moments) + machine.host_budget_bytes
    if machine.nvme is None or states <= elsewhere:
        return 0.0
    each_s = 1 / machine.nvme.read_bytes_per_s + 1 / machine.nvme.write_bytes_per_s
    return (states - elsewhere) * machine.local_ranks * each_s
