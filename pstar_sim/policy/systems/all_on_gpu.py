"""all_on_gpu: no offloading. Parameters, gradients and optimizer states live on the GPU, Adam runs there.

The reference every offloading policy is measured against where it fits. Uses 14 bytes a parameter in 2-byte training
(the gradient overwrites the working list), 18 with several micro-batches.

On several ranks this is plain data parallelism: every GPU holds everything, a chunk's gradient is all-reduced
(reduce-scatter, then gather) as soon as it is complete, and each GPU updates all parameters in optimizer.step(), under
clipping not before all gradients are there: the norm is that of all sums.
"""

from __future__ import annotations

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Place
from pstar_sim.policy.kit.capabilities import Capabilities
from pstar_sim.policy.kit.room import describe_moment, worst_moment
from pstar_sim.policy.passes.builder import Builder
from pstar_sim.units import format_bytes
from pstar_sim.workload.workload import Workload

__all__ = ["CAPABILITIES", "all_on_gpu"]

CAPABILITIES = Capabilities(yardstick=True)


def all_on_gpu(workload: Workload, machine: Machine, settings: Settings) -> Plan:
    """Everything resident; Adam after the step moment, or (eager, no barrier) after the chunk's last gradient.

    Raises DoesNotFit where model data and the tide's peak exceed the GPU.
    """
    whole = build_layout(workload, chunk_bytes=settings.chunk_bytes)
    b = Builder("all_on_gpu", workload, machine, settings, layout=whole)
    for chunk in b.layout.chunks:
        b.live(chunk.index, Place.GPU)
    model = b.held_bytes(Place.GPU)
    worst = worst_moment(b.uses.tide)
    b.check_room(
        Place.GPU,
        model + b.uses.tide[worst],
        f"{format_bytes(model)} of parameters, gradients and optimizer states beside "
        f"{describe_moment(workload, worst)}",
    )
    barrier = settings.barrier(workload.dtype)
    final: dict[int, list[int]] = {}  # moment -> chunks whose last gradient arrives in it
    for chunk in b.layout.chunks:
        if b.uses.updated(chunk.index):
            final.setdefault(b.uses.last_gradient(chunk.index), []).append(chunk.index)
    at_once = barrier is None and b.ranks == 1  # an update behind its gradient would wait for the all-reduce
    gradient = "grad32" if workload.micro_batches > 1 else "param"
    summed: dict[int, list[int]] = {}
    for m in range(len(workload.moments)):
        computed = b.compute(m)
        for c in final.get(m, ()):
            if b.ranks > 1:
                summed[c] = [b.gather(c, m, [b.reduce_scatter(c, m, [computed], gradient)], gradient)]
            if at_once:
                b.gpu_adam(c)
    if not at_once:
        norm = [step for steps in list(summed.values())[-1:] for step in steps] if settings.clip else []
        arrived = [c for chunks in final.values() for c in chunks]
        for c in arrived if b.ranks > 1 else sorted(arrived):
            b.gpu_adam(c, after=[*summed.get(c, ()), *norm])
    b.choices["capacity"] = f"everything is resident: {format_bytes(model)} and the tide's peak"
    b.choices["adam"] = "on the GPU, " + (
        "behind each last gradient" if at_once else f"after the step moment ({barrier or 'all-reduced by then'})"
    )
    return b.plan()
