"""zero_offload: the static partition of ZeRO-Offload (Ren et al., 2021).

All working-precision parameters stay on the GPU. Gradients leave it during the backward pass through a bucket of two
chunks; optimizer states and Adam live on the host. The update is behind the barrier whatever was asked for (the
original knows no other), each chunk is copied back while the next one is updated, and optimizer.step() blocks: the
first moment of the next iteration waits for the last copy.

On several ranks this is ZeRO-2 with offloading: the parameters are whole on every GPU, gradients are reduce-scattered
and each rank sends its slice to the host, where its slice of the states is updated; the slices of the parameters come
back and are gathered.
"""

from __future__ import annotations

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Place, Queue, Ref
from pstar_sim.policy.kit.capabilities import Capabilities
from pstar_sim.policy.kit.room import describe_moment, worst_moment
from pstar_sim.policy.passes.builder import Builder
from pstar_sim.units import format_bytes
from pstar_sim.workload.workload import Workload

__all__ = ["BUCKET_CHUNKS", "CAPABILITIES", "zero_offload"]

CAPABILITIES = Capabilities(yardstick=True)

BUCKET_CHUNKS = 2


def zero_offload(workload: Workload, machine: Machine, settings: Settings) -> Plan:
    """Every gradient leaves the GPU, every parameter comes back. Small chunks are nothing special here.

    Raises DoesNotFit where parameters, the gradient bucket and the tide's peak exceed the GPU, or states and
    gradients the host.
    """
    b = Builder("zero_offload", workload, machine, settings)
    uses = b.uses
    several = workload.micro_batches > 1
    chunks = [c.index for c in b.layout.chunks]
    trained = [c for c in chunks if uses.updated(c)]
    for c in chunks:
        b.resident(c, Place.GPU, *(("param", "remote") if b.ranks > 1 else ("param",)))
        if uses.updated(c):
            b.live(c, Place.HOST)
            if not several:  # with several micro-batches cpu_add frees the gradient each time
                b.resident(c, Place.HOST, "grad")

    # Gradients of a micro-batch open (alloc) and close (write-back) in the order the backward pass produces them.
    opened: dict[int, list[int]] = {}
    closed: dict[int, list[int]] = {}
    lists = ("grad", "grad_remote") if b.ranks > 1 else ("grad",)
    for c in trained:
        for _, first, last in uses.spans[c]:
            opened.setdefault(first, []).append(c)
            closed.setdefault(last, []).append(c)

    computed: list[int] = []  # moment -> its step
    free_of: dict[int, int] = {}  # chunk -> the latest step that freed its gradient on the GPU
    add_of: dict[int, int] = {}  # chunk -> its latest cpu_add
    filling: list[int] = []  # in the bucket, gradients still arriving
    leaving: list[int] = []  # in the bucket, on their way to the host, oldest first
    bucket_bytes = 0
    norm: list[int] = []  # of the gradients of all ranks: every update waits for the last sum
    for m in range(len(workload.moments)):
        for c in opened.get(m, ()):
            # Chunks still filling up cannot leave; of the others as many may linger as the bucket has room for.
            stay = max(0, BUCKET_CHUNKS - 1 - len(filling))
            gone, leaving = leaving[: max(0, len(leaving) - stay)], leaving[max(0, len(leaving) - stay) :]
            for name in lists:
                b.alloc(Queue.COMPUTE, c, name, Place.GPU, m, after=[free_of[g] for g in {*gone, c} if g in free_of])
            leaving = [g for g in leaving if g != c]
            filling.append(c)
            bucket_bytes = max(
                bucket_bytes, sum(b.layout.payload_bytes(g, n) for g in (*filling, *leaving) for n in lists)
            )
        computed.append(b.compute(m))
        for c in closed.get(m, ()):
            final = computed[m]
            if b.ranks > 1:
                final = b.reduce_scatter(c, m, [computed[m]], "grad_remote")
                norm = [final] if settings.clip else []
            b.writeback(c, "grad", m, after=[final, *([add_of[c]] if c in add_of else [])])
            free_of[c] = b.free(Queue.D2H, c, "grad", Place.GPU, m)
            filling.remove(c)
            leaving.append(c)
            if several:
                add_of[c] = b.cpu_add(c, "grad", m, after=[free_of[c]])
    # optimizer.step(): Adam in order of the next use, the copies back behind it; the next forward waits for the last.
    copied = -1
    for c in sorted(trained, key=lambda c: (uses.first_use(c), c)):
        adam = b.cpu_adam(c, after=[computed[-1], add_of.get(c, free_of[c]), *norm])
        copied = b.fetch(c, 0, after=[adam])
        if b.ranks > 1:
            copied = b.gather(c, 0, after=[copied, computed[-1]])
    if copied >= 0:
        b.wait(computed[0], Ref(copied, 1))

    parameters = b.held_bytes(Place.GPU)
    worst = worst_moment(uses.tide)
    b.check_room(
        Place.GPU,
        parameters + bucket_bytes + uses.tide[worst],
        f"{format_bytes(parameters)} of parameters, all resident, and a gradient bucket of "
        f"{format_bytes(bucket_bytes)} beside {describe_moment(workload, worst)}",
    )
    host = b.held_bytes(Place.HOST)
    arriving = sum(b.layout.payload_bytes(c, "grad") for c in trained) if several else 0
    b.check_room(
        Place.HOST,
        host + arriving,
        f"working list, {'accumulated gradients, ' if several else ''}gradients and optimizer states of "
        f"{sum(b.cost.params) / 1e9:.2f} B parameters",
    )
    b.choices["capacity"] = (
        f"all parameters resident ({format_bytes(parameters)}), gradients pass through a bucket of "
        f"{BUCKET_CHUNKS} chunks ({format_bytes(bucket_bytes)})"
    )
    b.choices["adam"] = "on the CPU, behind the barrier, each chunk copied back while the next is updated"
    if settings.barrier(workload.dtype) is None:
        b.choices["update"] = "eager was asked for; ZeRO-Offload updates in optimizer.step() only, so the barrier stays"
    return b.plan()
