"""zero3_offload: DeepSpeed's ZeRO-3 with the optimizer on the CPU, as it really runs.

Parameters live in slices on the GPUs (`params=gpu`) or on the hosts (`params=cpu`). The forward pass gathers slices
ahead, as the traced order needs them; in the backward pass a gather starts when the moment before its use ends. A
gathered chunk is kept if it is used again soon. Gradients leave in buckets of 5e8 parameters. The moment after a bucket
waits for its sum over the ranks and, in the last micro-batch, for its copy to the host: into memory that is not pinned,
at a few GB/s (`flush=blocking`), or into pinned memory as fp32, at the link's rate (`flush=async`). optimizer.step() is
behind the barrier and goes sub-group by sub-group: Adam on the CPU, then the updated parameters up, then the next
sub-group. Twin-flow (`ratio` < 1) keeps the last sub-groups' states on the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import PAGEABLE, Place
from pstar_sim.dtypes import DTYPES
from pstar_sim.policy.kit.capabilities import Capabilities
from pstar_sim.policy.kit.iteration_order import ON_HOST, in_order
from pstar_sim.policy.kit.options import Option, one_of, share, switch, whole_number
from pstar_sim.policy.passes.builder import Builder
from pstar_sim.policy.systems.sharded import (
    MAX_REUSE_PARAMS,
    PREFETCH_PARAMS,
    REDUCE_BUCKET_PARAMS,
    SUB_GROUP_PARAMS,
    Sharded,
)
from pstar_sim.policy.systems.sharded_visits import ahead_in_forward, params_before, sub_groups, traced_visits
from pstar_sim.policy.systems.shards import Flush, Scheme
from pstar_sim.units import format_bytes
from pstar_sim.workload.relay import STASH_PLACES
from pstar_sim.workload.workload import Workload

__all__ = [
    "BUFFER_FACTOR",
    "CAPABILITIES",
    "GRADIENT_BYTES_PER_PARAM",
    "OPTIONS",
    "TRACED_OPTIONS",
    "Offloaded",
    "Offloading",
    "optimizer_bytes",
    "zero3_offload",
]  # fmt: skip

GRADIENT_BYTES_PER_PARAM = 4
"""Bytes per parameter of the optimizer's fp32 gradient: with AdamW's states 16 bytes per parameter, on CPU or GPU."""

BUFFER_FACTOR = 1.5
"""Factor by which DeepSpeed's memory estimators multiply host use. 16 x 1.5 = 24 bytes per parameter agrees with the
nodes that run DeepSpeed (24 to 28), and with the GPU bytes of twin-flow's resident share (24.8 measured)."""

TRACED_OPTIONS = {
    "bucket": Option(whole_number(), "parameters whose gradients leave together", REDUCE_BUCKET_PARAMS),
    "reuse": Option(whole_number(), "keep parameters that are used again within this many", MAX_REUSE_PARAMS),
    "prefetch": Option(whole_number(), "bring parameters this many ahead (gathers in forward)", PREFETCH_PARAMS),
}
"""Options of every policy that is based on DeepSpeed's ZeRO-3."""

CAPABILITIES = Capabilities(disks=False, cpu_updates=True)

OPTIONS = {
    "subgroup": Option(whole_number(least=1), "parameters (of one rank) that are updated at a time", SUB_GROUP_PARAMS),
    "ratio": Option(share(), "share of the optimizer that is on the CPU; the rest stays on the GPU", 1.0),
    "flush": Option(one_of("blocking", "async"), "how the last gradients go to the host", "blocking"),
    "params": Option(one_of("gpu", "cpu"), "where parameters live between uses", "gpu"),
    "checkpoints": Option(one_of(*STASH_PLACES), "place of the inputs of blocks that recompute", "gpu"),
    "pinned": Option(switch(), "updated parameters go up from pinned memory", True),
    **TRACED_OPTIONS,
}


def zero3_offload(
    workload: Workload,
    machine: Machine,
    settings: Settings,
    *,
    subgroup: int = SUB_GROUP_PARAMS,
    ratio: float = 1.0,
    flush: str = "blocking",
    params: str = "gpu",
    checkpoints: str = "gpu",
    pinned: bool = True,
    bucket: int = REDUCE_BUCKET_PARAMS,
    reuse: int = MAX_REUSE_PARAMS,
    prefetch: int = PREFETCH_PARAMS,
) -> Plan:
    """Returns the plan. Host bytes per rank, with AdamW: 24 (`params=cpu`: 27) per parameter of its own slices. GPU
    bytes per rank: 2 N / P (with `params=gpu`), the gathered chunks, the gradient bucket, 24 per parameter that
    twin-flow keeps there, the tide.

    Raises DoesNotFit if the host or the GPU has less.
    """
    stash_via = None
    if checkpoints == "host":
        workload = in_order("zero3_offload", workload, ON_HOST)  # with to("cpu"), a copy that blocks
        stash_via = None if machine.link.pageable_bytes_per_s is None else PAGEABLE
    b = Builder("zero3_offload", workload, machine, settings, stash_via=stash_via)
    choice = Offloading(
        home=Place.GPU if params == "gpu" else Place.HOST,
        subgroup=subgroup,
        ratio=ratio,
        flush=Flush.BLOCKING if flush == "blocking" else Flush.FP32,
        bucket=bucket,
        reuse=reuse,
        prefetch=prefetch,
    )
    o = Offloaded(b, choice)
    s = o.sharded
    _optimizer_step(o, pinned=pinned)
    width = 0 if params == "gpu" else DTYPES[workload.dtype].bytes
    o.hold(host_bytes_per_param=BUFFER_FACTOR * (optimizer_bytes(workload) + width))
    b.choices["capacity"] = o.describe()
    b.choices["moves"] = o.describe_moves()
    if checkpoints == "host":
        b.choices["checkpoints"] = (
            f"{format_bytes(b.stash_bytes)} of block inputs go to the host; compute waits for each"
        )
    o.check_room()
    b.choices["flush"] = (
        "gradients go to unpinned host memory, the GPU waits for each bucket"
        if flush == "blocking"
        else "gradients go to pinned host memory as fp32; the next moment waits for each bucket"
    )
    if s.shards.unpinned is None and (flush == "blocking" or not pinned):
        b.choices["unpinned"] = "the machine gives no rate for copies of unpinned memory; they are timed as pinned ones"
    b.choices["adam"] = (
        f"after the barrier, {len(o.groups)} sub-groups one after the other, updated parameters go up behind each"
        if params == "gpu"
        else f"after the barrier, {len(o.groups)} sub-groups one after the other"
    )
    return b.plan(predict=True)


def _optimizer_step(o: Offloaded, *, pinned: bool) -> None:
    """Steps of a sub-group end in order, so its last chunk's stand for all."""
    s = o.sharded
    ends: list[int] = []
    updated: dict[int, list[int]] = {}
    behind: list[int] = []  # steps for which the next sub-group's update waits
    for group in o.groups:
        if group[0] in o.resident:
            for c in group:
                updated[c] = s.update_resident(c)
        else:
            done = {c: s.cpu_adam(c, behind) for c in group}
            for c in group:
                updated[c] = s.copy_up(c, done.values(), pinned=pinned) or [done[c]]
            behind = updated[group[-1]]
        ends += updated[group[-1]]
    s.finish(ends, updated)


def optimizer_bytes(workload: Workload) -> float:
    """States, and the gradient in fp32."""
    return workload.states_bytes_per_param + GRADIENT_BYTES_PER_PARAM


@dataclass(frozen=True, kw_only=True)
class Offloading:
    """The choices of zero3_offload and its successors; OPTIONS explains those that are not here.

    home: of parameters between visits.
    every: every k-th of the offloaded sub-groups has its Adam on the GPU too; 0: none.
    """

    home: Place
    subgroup: int
    ratio: float
    every: int = 0
    flush: Flush
    bucket: int
    reuse: int
    prefetch: int


class Offloaded:
    """One iteration of zero3_offload or a successor, up to the update, written into `b`.

    groups: of the optimizer, in order.
    resident: Adam and states on the GPU.
    staged: Adam on the GPU, to which the states come.
    """

    def __init__(self, b: Builder, choice: Offloading) -> None:
        self.b = b
        trained = [c.index for c in b.layout.chunks if b.uses.updated(c.index)]
        own = {c: b.layout.slice_numel(c) for c in trained}
        self.groups = sub_groups(b.layout, trained, choice.subgroup)
        sizes = [sum(own[c] for c in group) for group in self.groups]
        first = _offloaded_groups(sizes, choice.ratio)
        self.resident = frozenset(c for group in self.groups[first:] for c in group)
        every = self.groups[choice.every - 1 : first : choice.every] if choice.every else []
        self.staged = frozenset(c for group in every for c in group)
        self.offloaded_params = sum(sizes[:first])
        self.resident_params = sum(sizes[first:])
        visits = traced_visits(b.uses, choice.reuse)
        ahead = params_before(visits, b.uses, choice.prefetch)
        scheme = Scheme(
            visits=visits,
            gather_at=ahead_in_forward(ahead, b.workload),
            fetch_at=ahead,
            home=choice.home,
            resident=self.resident,
            staged=self.staged,
            bucket_params=choice.bucket,
            flush=choice.flush,
            sums_wait=True,
        )
        self.sharded = Sharded(b, scheme)
        self.sharded.run()

    def hold(self, *, host_bytes_per_param: float) -> None:
        """What the system holds beyond the plan's lists, on the host and on the GPU."""
        b, s = self.b, self.sharded
        s.hold_on_host("the optimizer's own host buffers", int(host_bytes_per_param * self.offloaded_params))
        s.hold_bucket()
        listed = sum(b.uses.home_bytes(c) - b.layout.payload_bytes(c, "param") for c in self.resident)
        factor = BUFFER_FACTOR if self.offloaded_params else 1.0  # without twin-flow, as zero3_resident
        resident = int(factor * optimizer_bytes(b.workload) * self.resident_params)
        s.hold("the resident optimizer's own buffers", Place.GPU, resident - listed)

    def check_room(self) -> None:
        """Raise DoesNotFit if what is always held exceeds a place. A lack at other times is found when the steps are
        scheduled."""
        s = self.sharded
        offloaded, resident = (f"{n / 1e9:.2f} B parameters" for n in (self.offloaded_params, self.resident_params))
        what = f"a rank's optimizer of {offloaded} with its buffers"
        self.b.check_room(Place.HOST, self.b.held_bytes(Place.HOST), what)
        parts = ["a rank's slices of the parameters"] if s.shards.scheme.home is Place.GPU else []
        parts += [f"its optimizer of {resident}"] if self.resident_params else []
        s.check_gpu_room(", ".join([*parts, "the gradient bucket"]))

    def describe_moves(self) -> str:
        waits = "; compute waits for the gathers of the backward pass and for the sums of gradients"
        return self.sharded.describe_moves() + (waits if self.sharded.shards.ranks > 1 else "")

    def describe(self) -> str:
        b = self.b
        share = self.offloaded_params / max(1, self.offloaded_params + self.resident_params)
        where = "the GPU" if self.sharded.shards.scheme.home is Place.GPU else "the host"
        return (
            f"parameters live on {where}; {share:.0%} of the optimizer on the host, "
            f"{format_bytes(b.held_bytes(Place.HOST))} per rank with its buffers"
        )


def _offloaded_groups(sizes: Sequence[int], ratio: float) -> int:
    wanted = ratio * sum(sizes)
    held = 0
    for n, size in enumerate(sizes):
        if held + size / 2 > wanted:
            return n
        held += size
    return len(sizes)
