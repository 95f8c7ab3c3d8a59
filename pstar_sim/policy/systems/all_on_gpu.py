"""all_on_gpu: no offloading. Parameters, gradients and optimizer states live on the GPU, and Adam runs there.

The reference for offloading policies, for jobs that fit the GPU. It takes 14 bytes per parameter in 2-byte training,
where the gradient overwrites the working list, and 18 with several micro-batches.

On several ranks, plain data parallelism: every GPU holds everything, a chunk's gradient is all-reduced (reduce-scatter,
then gather) as soon as it is complete, and each GPU updates all parameters in optimizer.step(). With clipping, the
update first waits for all gradients, because the norm is that of all sums.

With shard=states (ZeRO-1; Megatron-LM's distributed optimizer) each of d ranks has a slice of the states: 6 + 12/d
bytes per parameter with several micro-batches in 2-byte training, 2 + 12/d with one. Gradients, whole on every GPU, are
reduce-scattered once, and updated slices are gathered beside the next forward, whose first use waits.
"""

from __future__ import annotations

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Kind, Place, Ref
from pstar_sim.policy.kit.capabilities import Capabilities
from pstar_sim.policy.kit.options import Option, one_of
from pstar_sim.policy.passes.builder import Builder
from pstar_sim.policy.passes.step_by_step.checks import check_beside_tide
from pstar_sim.policy.systems.gpu_optimizers import ADAM, check_adam, hold_copy
from pstar_sim.policy.systems.sharded import Sharded
from pstar_sim.policy.systems.shards import Scheme
from pstar_sim.units import format_bytes
from pstar_sim.workload.workload import Workload

__all__ = ["CAPABILITIES", "OPTIONS", "all_on_gpu"]

CAPABILITIES = Capabilities(disks=False, yardstick=True, shards={"none": "", "states": "shard=states"})

OPTIONS = {
    "adam": ADAM,
    "shard": Option(one_of(*CAPABILITIES.shards), "what ranks that share a batch slice: optimizer states", "none"),
}


def all_on_gpu(
    workload: Workload, machine: Machine, settings: Settings, *, adam: str = "fused", shard: str = "none"
) -> Plan:
    """Returns the plan with everything resident. Adam runs after the step moment, or (eager, no barrier) after the
    chunk's last gradient.

    adam: where all parameters are updated after the step moment (gpu_optimizers.py).
    shard: "states": each of several ranks has a slice of them; "none": all.

    Raises CannotPlan as `check_adam` does. Raises DoesNotFit if model data and the tide's peak exceed the GPU.
    """
    slices = 1 if shard == "none" else machine.data_parallel_size
    layout = build_layout(workload, chunk_bytes=settings.chunk_bytes, ranks=slices, sums=settings.sums)
    b = Builder("all_on_gpu", workload, machine, settings, layout=layout)
    barrier = settings.barrier(workload.compute_dtype)
    at_once = barrier is None and b.ranks == 1  # on several ranks, an eager update would wait for the all-reduce
    via = check_adam(adam, b.policy, workload, at_once=at_once)
    updated = frozenset(c.index for c in layout.chunks if b.uses.updated(c.index))
    s = Sharded(b, Scheme(resident=updated, whole=True, at_once=at_once))
    copied = hold_copy(b, adam)
    model = b.held_bytes(Place.GPU)
    check_beside_tide(b, model, f"{format_bytes(model)} of parameters, gradients and optimizer states")
    s.run()
    if not at_once:
        _optimizer_step(s, via)
    b.choices["capacity"] = f"everything is resident: {format_bytes(model)} and the tide's peak"
    b.choices["adam"] = "on the GPU, " + (
        "behind each last gradient"
        if at_once
        else f"after the step moment ({barrier or 'all-reduced by then'}){copied}"
    )
    return b.plan()


def _optimizer_step(s: Sharded, via: str | None) -> None:
    """In order; on several ranks, chunks whose sums end together follow each other."""
    trained, last = s.shards.trained, s.b.uses.last_gradient
    first = {last(c): c for c in reversed(trained)} if s.b.ranks > 1 else {}
    for c in sorted(trained, key=lambda c: (first.get(last(c), c), c)):
        s.gpu_adam(c, via=via)
    if s.shards.ranks > 1:
        _gather(s.b)


def _gather(b: Builder) -> None:
    computed = {step.moment: step.id for step in b.steps if step.kind is Kind.COMPUTE}
    updates = {step.chunk: step.id for step in b.steps if step.kind is Kind.GPU_UPDATE and step.chunk is not None}
    for c in sorted(updates, key=b.uses.first_use):
        first = b.uses.first_use(c)
        b.wait(computed[first], Ref(b.gather(c, first, [updates[c]]), 1))
