"""zero3_resident: FSDP, or ZeRO-3 without offloading (Rajbhandari et al., 2020). Everything is on the GPUs, in slices.

A block's parameters are gathered one block ahead of their use and given up after it, in forward and again in backward
(recomputation included). Gradients are reduce-scattered as they are complete. Each rank updates its own slice on its
GPU in optimizer.step(). A rank's slice of the gradients is kept in fp32. With 2-byte parameters and 12 bytes of states,
this makes the 18 bytes per parameter of DeepSpeed's memory estimator. Nothing crosses the link. With one rank the
policy is all_on_gpu with the bytes of the real systems.
"""

from __future__ import annotations

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Place
from pstar_sim.policy.kit.capabilities import Capabilities
from pstar_sim.policy.kit.options import Option, switch
from pstar_sim.policy.passes.builder import Builder
from pstar_sim.policy.systems.gpu_optimizers import ADAM, check_adam, hold_copy
from pstar_sim.policy.systems.sharded import REPLICAS, Sharded, slices_on
from pstar_sim.policy.systems.sharded_visits import block_visits, operators_before, traced_visits
from pstar_sim.policy.systems.shards import Scheme
from pstar_sim.policy.systems.zero3_offload import GRADIENT_BYTES_PER_PARAM
from pstar_sim.units import format_bytes
from pstar_sim.workload.workload import Workload

__all__ = ["CAPABILITIES", "OPTIONS", "zero3_resident"]

CAPABILITIES = Capabilities(disks=False, shards={"parameters": ""})

OPTIONS = {
    "reshard": Option(switch(), "give parameters up after forward and gather them again for backward", True),
    "adam": ADAM,
    "replicas": REPLICAS,
}


def zero3_resident(
    workload: Workload,
    machine: Machine,
    settings: Settings,
    *,
    reshard: bool = True,
    adam: str = "fused",
    replicas: int | str = 1,
) -> Plan:
    """Returns the plan. GPU bytes per rank: 18 N / P for the P ranks of a replica, the whole parameters of a block and
    of the next block, the block's gradients, and the tide.

    reshard: False keeps the chunks that forward has gathered until backward (FSDP's SHARD_GRAD_OP).

    adam: kernels of each rank's optimizer (gpu_optimizers.py).

    Raises CannotPlan as `check_adam` and `slices_on` do. Raises DoesNotFit if this exceeds the GPU.
    """
    via = check_adam(adam, "zero3_resident", workload)
    b = Builder("zero3_resident", workload, machine, settings, slices=slices_on(machine, replicas))
    updated = frozenset(c.index for c in b.layout.chunks if b.uses.updated(c.index))
    visits = block_visits(b.uses) if reshard else traced_visits(b.uses, workload.params * len(workload.moments))
    ahead = operators_before(visits, 1)
    s = Sharded(b, Scheme(visits=visits, gather_at=ahead, resident=updated))
    s.run()
    ends = {c: [s.gpu_adam(c, via=via)] for c in sorted(updated)}
    s.finish([i for row in ends.values() for i in row], ends)

    gradients = sum(b.layout.slice_numel(c) for c in updated) * GRADIENT_BYTES_PER_PARAM
    listed = sum(b.layout.payload_bytes(c, "grad32") for c in updated if "grad32" in b.uses.home_lists(c))
    s.hold("gradients of this rank's slices, fp32", Place.GPU, gradients - listed)
    # Without lists for a block's gradients until they are summed, the plan has a buffer for them.
    block = 0 if s.buckets.lists.chunks else _largest_block_bytes(b)
    s.hold("whole gradients of a block", Place.GPU, block)
    whole = [v._replace(first=ahead[v.first]) for v in visits] if s.shards.ranks > 1 else []
    copied = hold_copy(b, adam, whole, block)
    b.choices["capacity"] = (
        f"everything on the GPU, {format_bytes(b.held_bytes(Place.GPU))} of slices and gradients, blocks gathered one "
        "ahead"
    )
    b.choices["moves"] = s.describe_moves()
    b.choices["adam"] = f"on the GPU, in optimizer.step(), each rank its own slices{copied}"
    s.check_gpu_room("a rank's slices of everything and the gradients of a block")
    return b.plan(predict=True)


def _largest_block_bytes(b: Builder) -> int:
    opened: dict[int, int] = {}
    for v in block_visits(b.uses):
        if b.uses.updated(v.chunk) and not b.layout.chunks[v.chunk].small:
            opened[v.first] = opened.get(v.first, 0) + b.layout.whole_bytes(v.chunk)
    return max(opened.values(), default=0)
