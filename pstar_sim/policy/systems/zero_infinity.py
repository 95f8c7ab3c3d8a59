"""zero_infinity: ZeRO-Infinity (Rajbhandari et al., 2021). Everything in slices on the hosts, or on their disks.

Every rank brings its slice of the next parameters through its own link and gathers the rest from the others, so that
all links of a node carry parameters at once. While one operator computes, the slices of the next operator are gathered,
the slices of the second next are fetched from the host, and the slices of the third next are read from the disks.
Gradients are reduce-scattered and go down during the backward pass. optimizer.step() updates on the CPU sub-group by
sub-group. States on disks come to the host one sub-group ahead of their update, and are written back after it.
Activation checkpoints stay on the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Place, Queue
from pstar_sim.dtypes import DTYPES
from pstar_sim.errors import PlanError
from pstar_sim.policy.kit.capabilities import Capabilities
from pstar_sim.policy.kit.options import Option, one_of, switch, whole_number
from pstar_sim.policy.kit.room import queue_of_writes
from pstar_sim.policy.passes.builder import Builder
from pstar_sim.policy.passes.step_by_step.disks import read_in, write_out
from pstar_sim.policy.systems.sharded import (
    MAX_REUSE_PARAMS,
    REDUCE_BUCKET_PARAMS,
    REPLICAS,
    SUB_GROUP_PARAMS,
    Sharded,
    slices_on,
)
from pstar_sim.policy.systems.sharded_visits import operators_before, sub_groups, traced_visits
from pstar_sim.policy.systems.shards import Scheme
from pstar_sim.policy.systems.zero3_offload import BUFFER_FACTOR, optimizer_bytes
from pstar_sim.units import format_bytes
from pstar_sim.workload.workload import Workload

__all__ = ["CAPABILITIES", "OPTIONS", "zero_infinity"]

CAPABILITIES = Capabilities(
    disks=False, cpu_updates=True, from_disks=("params=cpu,states=nvme", "params=nvme,states=nvme")
)

OPTIONS = {
    "params": Option(one_of("cpu", "nvme"), "where parameters live between uses", "cpu"),
    "states": Option(one_of("cpu", "nvme"), "where optimizer states and gradients live", "cpu"),
    "overlap": Option(switch(), "bring what the next operators need while one computes", True),
    "subgroup": Option(whole_number(least=1), "parameters (of one rank) that are updated at a time", SUB_GROUP_PARAMS),
    "bucket": Option(whole_number(), "parameters whose gradients leave together", REDUCE_BUCKET_PARAMS),
    "reuse": Option(whole_number(), "keep parameters that are used again within this many", MAX_REUSE_PARAMS),
    "replicas": REPLICAS,
}


def zero_infinity(
    workload: Workload,
    machine: Machine,
    settings: Settings,
    *,
    params: str = "cpu",
    states: str = "cpu",
    overlap: bool = True,
    subgroup: int = SUB_GROUP_PARAMS,
    bucket: int = REDUCE_BUCKET_PARAMS,
    reuse: int = MAX_REUSE_PARAMS,
    replicas: int | str = 1,
) -> Plan:
    """Returns the plan. GPU bytes per rank: the operators under way, the parameters reused soon, the gradient bucket,
    the tide. Host bytes per rank: (16 + 2) x 1.5 = 27 per parameter of its own slices, by DeepSpeed's estimator (the
    paper itself counts 20). Lists on the disks take host memory only while they are on their way.

    Raises PlanError if lists should live on disks that the machine does not have, CannotPlan as `slices_on` does, and
    DoesNotFit if the GPU, the host or the disks are too small.
    """
    if "nvme" in (params, states) and machine.nvme is None:
        raise PlanError(
            f"machine {machine.name!r} has no disks; give --disks FOLDER, or disks = NAME in a machine file"
        )
    b = Builder("zero_infinity", workload, machine, settings, slices=slices_on(machine, replicas))
    visits = traced_visits(b.uses, reuse)
    gather, fetch, read = (operators_before(visits, n if overlap else 0) for n in (1, 2, 3))
    scheme = Scheme(
        visits=visits,
        gather_at=gather,
        fetch_at=fetch,
        read_at=read,
        home=Place.NVME if params == "nvme" else Place.HOST,
        states=Place.NVME if states == "nvme" else Place.HOST,
        bucket_params=bucket,
    )
    s = Sharded(b, scheme)
    s.run()
    groups = sub_groups(b.layout, s.shards.trained, subgroup)
    _optimizer_step(s, groups)
    if scheme.states is Place.HOST:
        own = sum(b.layout.slice_numel(c) for c in s.shards.trained)
        params_bytes = DTYPES[workload.dtype].bytes if scheme.home is Place.HOST else 0
        s.hold_on_host("host buffers", int(BUFFER_FACTOR * (optimizer_bytes(workload) + params_bytes) * own))
    s.hold_bucket()
    b.choices["capacity"] = (
        f"parameters live on {_where(scheme.home)}, optimizer states and gradients on {_where(scheme.states)}: "
        f"{format_bytes(b.held_bytes(Place.HOST))} of host memory per rank between iterations"
    )
    b.choices["moves"] = s.describe_moves() + (
        "; an operator ahead gathered, two fetched, three read" if overlap else "; on demand"
    )
    b.choices["adam"] = f"on the CPU, after the barrier, {len(groups)} sub-groups" + (
        ", each read from the disks one ahead and written back behind its update" if scheme.states is Place.NVME else ""
    )
    b.check_room(Place.HOST, b.held_bytes(Place.HOST), "a rank's slices of what lives on the host, with their buffers")
    b.check_room(Place.NVME, b.held_bytes(Place.NVME), "a rank's slices of what lives on the disks")
    s.check_gpu_room("the gradient bucket and the parameters of small tensors")
    return b.plan(predict=True)


def _where(place: Place) -> str:
    return "the disks" if place is Place.NVME else "the host"


def _optimizer_step(s: Sharded, groups: Sequence[Sequence[int]]) -> None:
    updated: dict[int, list[int]] = {}
    ends: list[int] = []
    gone: list[int] = []  # ends of the group before
    arrived = _bring_in(s, groups[0], ()) if groups else {}
    for n, group in enumerate(groups):
        following = _bring_in(s, groups[n + 1], gone) if n + 1 < len(groups) else {}
        gone = []
        for c in group:
            updated[c], left = _update(s, c, arrived[c])
            gone += [*updated[c], *left]
        ends += gone
        arrived = following
    s.finish(ends, updated)


def _bring_in(s: Sharded, group: Sequence[int], gone: Sequence[int]) -> dict[int, list[int]]:
    """gone: steps after which the host has room for another group."""
    b, scheme, m = s.b, s.shards.scheme, s.last_moment
    arrived: dict[int, list[int]] = {}
    for c in group:
        arrived[c] = []
        before = [*s.before_update(c), *gone]
        if scheme.states is Place.NVME:
            lists = [*b.layout.states_of(c).names, s.buckets.lists.host_list]
            arrived[c] += [read_in(b, c, name, m, before) for name in lists]
        if scheme.home is Place.NVME:
            arrived[c].append(b.alloc(Queue.NVME, c, "param", Place.HOST, m, [*before, *s.gathers.release_steps(c)]))
    return arrived


def _update(s: Sharded, c: int, arrived: list[int]) -> tuple[list[int], list[int]]:
    """Steps after which parameters are at home, and other lists have left the host."""
    b, scheme, m = s.b, s.shards.scheme, s.last_moment
    adam = s.cpu_adam(c, arrived)
    up = s.copy_up(c, [adam])
    left: list[int] = []
    home = up or [adam]
    if scheme.home is Place.NVME:
        if up:
            left.append(b.free(queue_of_writes(b.machine), c, "param", Place.HOST, m, up))
        else:
            home = [write_out(b, c, "param", m, [adam])]
    if scheme.states is Place.NVME:
        left += [write_out(b, c, name, m, [adam]) for name in b.layout.states_of(c).names]
        left.append(b.free(queue_of_writes(b.machine), c, s.buckets.lists.host_list, Place.HOST, m, [adam]))
    return home, left
