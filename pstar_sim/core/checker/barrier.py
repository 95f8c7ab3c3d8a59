"""The barrier: in every interleaving, an Adam starts after everything for which an update waits."""

from __future__ import annotations

from pstar_sim.core.checker.unrolled import Unrolled, label
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Kind
from pstar_sim.errors import PlanError


def check_barrier(plan: Plan, program: Unrolled) -> None:
    """Raises PlanError naming the update that may start too early, and what it has to wait for."""
    w = plan.workload
    barrier = plan.settings.barrier(w.compute_dtype)
    if barrier is None:
        return
    (last,) = (i for i, s in enumerate(plan.steps) if s.kind is Kind.COMPUTE and s.moment == len(w.moments) - 1)
    norm = _norm_needs(plan) if plan.settings.clip else []
    for i, step in enumerate(plan.steps):
        if step.kind not in (Kind.CPU_UPDATE, Kind.GPU_UPDATE):
            continue
        for j, why in ((last, f"the barrier ({barrier}) forbids it"), *norm):
            if not program.precedes(j, i):
                raise PlanError(f"{label(step)} may start before {label(plan.steps[j])} has ended; {why}")


def _norm_needs(plan: Plan) -> list[tuple[int, str]]:
    """What the gradient norm needs besides gradients, as (position of the step, reason); the last step of a kind stands
    for all on its queue."""
    # On a replicated layout, a rank has the whole sum only when the other ranks' slices of the sum are back.
    summed = Kind.REDUCE_SCATTER if plan.layout.ranks > 1 else Kind.GATHER
    needs: dict[Kind, str] = {
        Kind.CPU_ADD: "the gradient norm (clip) needs all gradients added first",
        summed: "the gradient norm (clip) needs all gradients summed over the ranks first",
    }
    last = {step.kind: i for i, step in enumerate(plan.steps)}
    found = [(last[kind], why) for kind, why in needs.items() if kind in last]
    sums = [i for i, step in enumerate(plan.steps) if step.kind is Kind.WRITEBACK and step.list == "grad32"]
    why = "the gradient norm (clip) needs all sums of gradients on the host first"
    return [*found, *((i, why) for i in sums[-1:])]
