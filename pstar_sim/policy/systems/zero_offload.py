"""zero_offload: the static partition of ZeRO-Offload (Ren et al., 2021).

All working-precision parameters stay on the GPU. Gradients leave the GPU during the backward pass through a bucket of
two chunks. Optimizer states and Adam live on the host. The update is always behind the barrier, as in the original.
Each chunk is copied back while the next is updated. optimizer.step() blocks: the first moment of the next iteration
waits for the last copy.

On several ranks the policy is ZeRO-2 with offloading. The parameters are whole on every GPU. Gradients are
reduce-scattered, and each rank sends its slice to the host, where its slice of the states is updated. The slices of the
parameters come back and are gathered.
"""

from __future__ import annotations

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Place
from pstar_sim.policy.kit.capabilities import Capabilities
from pstar_sim.policy.passes.builder import Builder
from pstar_sim.policy.passes.step_by_step.checks import check_beside_tide
from pstar_sim.policy.systems.sharded import Sharded
from pstar_sim.policy.systems.shards import Scheme
from pstar_sim.units import format_bytes
from pstar_sim.workload.workload import Workload

__all__ = ["CAPABILITIES", "zero_offload"]

CAPABILITIES = Capabilities(disks=False, yardstick=True, cpu_updates=True)


def zero_offload(workload: Workload, machine: Machine, settings: Settings) -> Plan:
    """Returns the plan. Small chunks are treated like all others.

    Raises DoesNotFit if parameters, the gradient bucket and the tide's peak exceed the GPU, or if states and gradients
    exceed the host.
    """
    b = Builder("zero_offload", workload, machine, settings)
    s = Sharded(b, Scheme(whole=True, two_lists=True))
    s.run()
    _optimizer_step(s)
    bucket_bytes, gradients = s.buckets.peak_bytes, s.buckets.lists

    parameters = b.held_bytes(Place.GPU)
    check_beside_tide(
        b,
        parameters + bucket_bytes,
        f"{format_bytes(parameters)} of parameters, all resident, and a gradient bucket of "
        f"{format_bytes(bucket_bytes)}",
    )
    b.check_room(
        Place.HOST,
        b.held_bytes(Place.HOST) + sum(gradients.passing_bytes(c) for c in s.shards.trained),
        f"working list, {gradients.on_host} and optimizer states of {sum(b.cost.params) / 1e9:.2f} B parameters",
    )
    b.choices["capacity"] = (
        f"all parameters resident ({format_bytes(parameters)}), gradients pass through a bucket of 2 chunks "
        f"({format_bytes(bucket_bytes)})"
    )
    b.choices["adam"] = "on the CPU, behind the barrier, each chunk copied back while the next is updated"
    if settings.barrier(workload.compute_dtype) is None:
        b.choices["update"] = "eager was asked for; ZeRO-Offload updates in optimizer.step() only, so the barrier stays"
    return b.plan()


def _optimizer_step(s: Sharded) -> None:
    """In order of the next use, copies back after it; the next iteration waits for the last chunk to be whole."""
    whole: list[int] = []
    for c in sorted(s.shards.trained, key=lambda c: (s.b.uses.first_use(c), c)):
        whole = s.copy_up(c, [s.cpu_adam(c)])
        if s.shards.ranks > 1:
            whole = [s.gathers.gather_updated(c, [*whole, s.barrier])]
    s.finish(whole, {})
