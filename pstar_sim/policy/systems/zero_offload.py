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
from pstar_sim.core.step import Place, Ref
from pstar_sim.policy.kit.capabilities import Capabilities
from pstar_sim.policy.passes.builder import Builder
from pstar_sim.policy.passes.step_by_step.checks import check_beside_tide
from pstar_sim.policy.passes.step_by_step.gradient_lists import GradientLists
from pstar_sim.policy.passes.step_by_step.on_all_ranks import gathered
from pstar_sim.units import format_bytes
from pstar_sim.workload.workload import Workload

__all__ = ["BUCKET_CHUNKS", "CAPABILITIES", "zero_offload"]

CAPABILITIES = Capabilities(yardstick=True)

BUCKET_CHUNKS = 2


def zero_offload(workload: Workload, machine: Machine, settings: Settings) -> Plan:
    """Returns the plan. Small chunks are treated like all others.

    Raises DoesNotFit if parameters, the gradient bucket and the tide's peak exceed the GPU, or if states and gradients
    exceed the host.
    """
    b = Builder("zero_offload", workload, machine, settings)
    chunks = [c.index for c in b.layout.chunks]
    trained = [c for c in chunks if b.uses.updated(c)]
    gradients = GradientLists(b, trained)
    for c in chunks:
        b.resident(c, Place.GPU, *b.whole)
    for c in trained:
        b.live(c, Place.HOST)
        b.resident(c, Place.HOST, gradients.host_list)
    bucket = _Bucket(gradients)
    computed = _forward_and_backward(b, gradients, bucket)
    _optimizer_step(b, gradients, trained, computed)

    parameters = b.held_bytes(Place.GPU)
    check_beside_tide(
        b,
        parameters + bucket.peak_bytes,
        f"{format_bytes(parameters)} of parameters, all resident, and a gradient bucket of "
        f"{format_bytes(bucket.peak_bytes)}",
    )
    b.check_room(
        Place.HOST,
        b.held_bytes(Place.HOST) + sum(gradients.passing_bytes(c) for c in trained),
        f"working list, {gradients.on_host} and optimizer states of {sum(b.cost.params) / 1e9:.2f} B parameters",
    )
    b.choices["capacity"] = (
        f"all parameters resident ({format_bytes(parameters)}), gradients pass through a bucket of "
        f"{BUCKET_CHUNKS} chunks ({format_bytes(bucket.peak_bytes)})"
    )
    b.choices["adam"] = "on the CPU, behind the barrier, each chunk copied back while the next is updated"
    if settings.barrier(workload.compute_dtype) is None:
        b.choices["update"] = "eager was asked for; ZeRO-Offload updates in optimizer.step() only, so the barrier stays"
    return b.plan()


class _Bucket:
    def __init__(self, gradients: GradientLists) -> None:
        self._gradients = gradients
        self._filling: list[int] = []  # chunks whose gradients are still arriving
        self._leaving: list[int] = []  # chunks whose gradients are on their way to the host, oldest first
        self.peak_bytes = 0

    def enter(self, c: int) -> list[int]:
        """Returns the chunks whose gradients have to be gone before."""
        # Gradients that still arrive cannot leave. Of the others, as many may stay as the bucket has room for.
        stay = max(0, BUCKET_CHUNKS - 1 - len(self._filling))
        first = max(0, len(self._leaving) - stay)
        gone = self._leaving[:first]
        self._leaving = [g for g in self._leaving[first:] if g != c]
        self._filling.append(c)
        held = sum(self._gradients.bytes_of(g) for g in (*self._filling, *self._leaving))
        self.peak_bytes = max(self.peak_bytes, held)
        return gone

    def leave(self, c: int) -> None:
        self._filling.remove(c)
        self._leaving.append(c)


def _forward_and_backward(b: Builder, gradients: GradientLists, bucket: _Bucket) -> list[int]:
    computed: list[int] = []
    for m in range(len(b.workload.moments)):
        for c in gradients.opens.get(m, ()):
            gradients.open(c, m, [gradients.freed[g] for g in bucket.enter(c)])
        computed.append(b.compute(m))
        for c in gradients.closes.get(m, ()):
            gradients.close(c, m, [computed[m]])
            bucket.leave(c)
    return computed


def _optimizer_step(b: Builder, gradients: GradientLists, trained: list[int], computed: list[int]) -> None:
    """In order of the next use, copies back after it."""
    back = -1
    for c in sorted(trained, key=lambda c: (b.uses.first_use(c), c)):
        arrived = gradients.added.get(c, gradients.freed[c])
        adam = b.cpu_adam(c, after=[computed[-1], arrived, *gradients.all_there()])
        back = gathered(b, c, 0, b.fetch(c, 0, after=[adam]), [computed[-1]])
    if back >= 0:
        b.wait(computed[0], Ref(back, 1))
