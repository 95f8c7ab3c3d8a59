"""all_on_gpu: no offloading. Parameters, gradients and optimizer states live on the GPU, and Adam runs there.

This policy is the reference for every offloading policy, for jobs that fit the GPU. The policy takes 14 bytes per
parameter in 2-byte training, where the gradient overwrites the working list, and 18 with several micro-batches.

On several ranks the policy is plain data parallelism. Every GPU holds everything, a chunk's gradient is all-reduced
(reduce-scatter, then gather) as soon as it is complete, and each GPU updates all parameters in optimizer.step(). With
clipping, the update first waits for all gradients, because the norm is that of all sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Place
from pstar_sim.policy.kit.capabilities import Capabilities
from pstar_sim.policy.passes.builder import Builder
from pstar_sim.policy.passes.step_by_step.checks import check_beside_tide
from pstar_sim.policy.passes.step_by_step.on_all_ranks import all_reduced
from pstar_sim.policy.systems.gpu_optimizers import ADAM, check_adam, hold_copy
from pstar_sim.units import format_bytes
from pstar_sim.workload.workload import Workload

__all__ = ["CAPABILITIES", "OPTIONS", "all_on_gpu"]

CAPABILITIES = Capabilities(yardstick=True)

OPTIONS = {"adam": ADAM}


def all_on_gpu(workload: Workload, machine: Machine, settings: Settings, *, adam: str = "fused") -> Plan:
    """Returns the plan with everything resident. Adam runs after the step moment, or (eager, no barrier) after the
    chunk's last gradient.

    adam: where all parameters are updated after the step moment (gpu_optimizers.py).

    Raises CannotPlan as `check_adam` does. Raises DoesNotFit if model data and the tide's peak exceed the GPU.
    """
    whole = build_layout(workload, chunk_bytes=settings.chunk_bytes, sums=settings.sums)
    b = Builder("all_on_gpu", workload, machine, settings, layout=whole)
    for chunk in b.layout.chunks:
        b.live(chunk.index, Place.GPU)
    barrier = settings.barrier(workload.compute_dtype)
    at_once = barrier is None and b.ranks == 1  # on several ranks, an eager update would wait for the all-reduce
    via = check_adam(adam, b.policy, workload, at_once=at_once)
    copied = hold_copy(b, adam)
    model = b.held_bytes(Place.GPU)
    check_beside_tide(b, model, f"{format_bytes(model)} of parameters, gradients and optimizer states")
    final: dict[int, list[int]] = {}  # moment -> chunks whose last gradient arrives in it
    for chunk in b.layout.chunks:
        if b.uses.updated(chunk.index):
            final.setdefault(b.uses.last_gradient(chunk.index), []).append(chunk.index)
    summed = _moments(b, final, update_at_once=at_once)
    if not at_once:
        chunks = [c for row in final.values() for c in row]
        _optimizer_step(b, chunks if b.ranks > 1 else sorted(chunks), summed, via)
    b.choices["capacity"] = f"everything is resident: {format_bytes(model)} and the tide's peak"
    b.choices["adam"] = "on the GPU, " + (
        "behind each last gradient"
        if at_once
        else f"after the step moment ({barrier or 'all-reduced by then'}){copied}"
    )
    return b.plan()


def _moments(b: Builder, final: Mapping[int, Iterable[int]], *, update_at_once: bool) -> dict[int, Sequence[int]]:
    """With the all-reduce after each last gradient and, `update_at_once`, Adam. Returns chunk -> steps after which its
    gradient is the sum over ranks.

    final: moment -> chunks with their last gradient.
    """
    summed: dict[int, Sequence[int]] = {}
    for m in range(len(b.workload.moments)):
        computed = b.compute(m)
        for c in final.get(m, ()):
            summed[c] = all_reduced(b, c, m, [computed])
            if update_at_once:
                b.gpu_adam(c)
    return summed


def _optimizer_step(b: Builder, chunks: Iterable[int], summed: Mapping[int, Sequence[int]], via: str | None) -> None:
    norm = list(summed.values())[-1] if summed and b.settings.clip else []
    for c in chunks:
        b.gpu_adam(c, after=[*summed[c], *norm], via=via)
