"""deep_optimizer_states: every k-th sub-group of the offloaded optimizer is updated on the GPU (Maurya et al., 2024).

The policy is ZeRO-3 with the optimizer on the host, as zero3_offload, with these differences. Gradients go down into
pinned memory, as fp32, and the next moment waits for them. Gradients of the sub-groups updated on the GPU stay there.
In optimizer.step() the states of every k-th sub-group come up to the GPU, are updated there and go down again while the
CPU updates the other sub-groups. Parameters that the CPU has updated go up during the next sub-group's Adam. With
several micro-batches all gradients are added on the host, and the sums for the GPU come up too.
"""

from __future__ import annotations

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Place
from pstar_sim.policy.kit.capabilities import Capabilities
from pstar_sim.policy.kit.options import Option, share, whole_number
from pstar_sim.policy.passes.builder import Builder
from pstar_sim.policy.systems.sharded import MAX_REUSE_PARAMS, PREFETCH_PARAMS, REDUCE_BUCKET_PARAMS
from pstar_sim.policy.systems.shards import Flush
from pstar_sim.policy.systems.zero3_offload import BUFFER_FACTOR, TRACED_OPTIONS, Offloaded, Offloading, optimizer_bytes
from pstar_sim.workload.workload import Workload

__all__ = ["CAPABILITIES", "OPTIONS", "PREFETCH_BYTES_PER_PARAM", "SUB_GROUP_PARAMS", "deep_optimizer_states"]

SUB_GROUP_PARAMS = 100_000_000
"""Default of the published runs."""

PREFETCH_BYTES_PER_PARAM = 3
"""Bytes of host buffers per parameter, beyond the 24 bytes of zero3_offload. Nodes show 27 to 45 bytes with the
buffers. The constant takes the least of these, so that no run that was made is refused."""

CAPABILITIES = Capabilities(disks=False, streams_states=True)
OPTIONS = {
    "every": Option(whole_number(least=1), "every k-th sub-group is updated on the GPU", 2),
    "subgroup": Option(whole_number(least=1), "parameters (of one rank) that are updated at a time", SUB_GROUP_PARAMS),
    "ratio": Option(share(), "share of the optimizer that is on the CPU; the rest stays on the GPU", 1.0),
    **TRACED_OPTIONS,
}


def deep_optimizer_states(
    workload: Workload,
    machine: Machine,
    settings: Settings,
    *,
    every: int = 2,
    subgroup: int = SUB_GROUP_PARAMS,
    ratio: float = 1.0,
    bucket: int = REDUCE_BUCKET_PARAMS,
    reuse: int = MAX_REUSE_PARAMS,
    prefetch: int = PREFETCH_PARAMS,
) -> Plan:
    """Returns the plan. Host bytes per rank: 27 per parameter of its own slices. GPU bytes: as for zero3_offload, and
    in optimizer.step() also the states of one sub-group on the GPU and of the next sub-group on its way.

    Raises DoesNotFit if the host or the GPU has less.
    """
    b = Builder("deep_optimizer_states", workload, machine, settings)
    choice = Offloading(
        home=Place.GPU,
        subgroup=subgroup,
        ratio=ratio,
        every=every,
        flush=Flush.FP32,
        bucket=bucket,
        reuse=reuse,
        prefetch=prefetch,
    )
    o = Offloaded(b, choice)
    staged = _optimizer_step(o)
    o.hold(host_bytes_per_param=BUFFER_FACTOR * optimizer_bytes(workload) + PREFETCH_BYTES_PER_PARAM)
    o.check_room()
    b.choices["capacity"] = o.describe()
    b.choices["moves"] = o.describe_moves()
    b.choices["flush"] = "gradients go to pinned host memory as fp32; the next moment waits for each bucket"
    b.choices["adam"] = (
        f"after the barrier, {len(o.groups)} sub-groups: states of {staged} of them (one in {every}) are staged up, "
        "updated on the GPU and sent down while the CPU updates the others"
    )
    return b.plan(predict=True)


def _optimizer_step(o: Offloaded) -> int:
    """Returns the number of staged sub-groups.

    A period is sub-groups for the CPU, then a staged one, whose states come up before the parameters of its period, and
    of the one before.
    """
    s = o.sharded
    updated: dict[int, list[int]] = {}
    ends: list[int] = []
    gone: list[int] = []  # per staged sub-group so far, the step with which its states have left the GPU
    staged = [group for group in o.groups if group[0] in o.staged]
    periods = 0  # number of periods that are over

    def stage_up_to(count: int) -> None:
        for group in staged[len(gone) : count]:
            left = -1
            for c in group:
                update, left = s.stage(c, gone[-2:-1])  # after the last but one: at most two are on the GPU
                updated[c] = [update]
                ends.append(update)
            gone.append(left)
            ends.append(left)

    for group in o.groups:
        stage_up_to(periods + 2)  # of this period and of the next
        if group[0] in o.staged:
            periods += 1
            continue
        for c in group:
            updated[c] = [s.gpu_adam(c)] if c in o.resident else s.copy_up(c, [s.cpu_adam(c)])
        ends += updated[group[-1]]
    s.finish(ends, updated)
    return len(staged)
