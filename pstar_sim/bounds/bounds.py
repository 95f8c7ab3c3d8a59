"""Lower bound on the seconds of one steady iteration, for any legal schedule of this setting.

Knows workload, machine, settings and layout; knows no plan. Update windows, room and bytes for chunks of unequal size,
several micro-batches in either order, frozen parameters, a barrier and shared DRAM. pinned.py is the closed form where
no chunk is streamed (`stream=False`); joint.py adds streaming to it and is a small linear program; fluid.py is the
finer one, in time; stashes.py is the bound of offloaded activations alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pstar_sim.bounds.bound_facts import Bound, BoundFacts
from pstar_sim.bounds.joint import joint_bound
from pstar_sim.bounds.linear import Unsolved
from pstar_sim.bounds.pinned import pinned_bound
from pstar_sim.bounds.stashes import stash_bound_s
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import Layout
from pstar_sim.core.plan import Settings
from pstar_sim.cost import CostModel, cost_of
from pstar_sim.errors import PlanError
from pstar_sim.units import format_bytes
from pstar_sim.workload.workload import Workload, activations_text

__all__ = ["bound_reason", "lower_bound", "relative_to"]

STASHES = "stashes"


def lower_bound(
    workload: Workload,
    machine: Machine,
    settings: Settings,
    layout: Layout,
    *,
    max_pinned: int | None = None,
    stream: bool = True,
    cost: CostModel | None = None,
) -> Bound:
    """The bound for every legal schedule, by [Note: the joint bound] of joint.py.

    stream: False for schedules that stream no chunk, by [Note: the bound].
    max_pinned: the most parameters, small chunks not counted, whose states may stay on the gpu for ever (0 with
        stream=False: "everything by CPU Adam").

    A workload that does not fit still gets a bound: that of pinning nothing. Raises PlanError, with `bound_reason`,
    where there is no bound.
    """
    reason = bound_reason(workload, machine)
    if reason is not None:
        raise PlanError(reason)
    cost = cost or cost_of(workload, machine, layout)
    bound = _without_stashes(workload, machine, settings, layout, cost, max_pinned=max_pinned, stream=stream)
    if workload.stashes:
        seconds = stash_bound_s(workload, cost)
        terms = {**bound.terms, STASHES: seconds}
        bound = replace(bound, terms=terms)
        if seconds > bound.seconds:
            bound = replace(bound, seconds=seconds, binding=STASHES)
    return bound


def _without_stashes(
    workload: Workload,
    machine: Machine,
    settings: Settings,
    layout: Layout,
    cost: CostModel,
    *,
    max_pinned: int | None,
    stream: bool,
) -> Bound:
    """The bound of everything but the waits for stashes ([Note: the bound of stashes] in stashes.py)."""
    facts = BoundFacts(workload, machine, layout, cost)
    barrier = settings.barrier(workload.dtype) is not None
    limit = np.inf if max_pinned is None else max_pinned + float(facts.params[facts.small].sum())
    if not stream:
        return pinned_bound(facts, barrier, limit)
    try:
        return joint_bound(workload, layout, facts, cost, barrier=barrier, clip=settings.clip, x_limit=limit)
    except Unsolved as error:
        seconds = float(facts.clock[-1])
        note = f"the joint linear program did not solve ({error}); the bound is that of compute alone"
        return Bound(
            seconds=seconds, binding="compute", terms={"compute": seconds}, pinned_params=0, max_pinned_params=0,
            notes=(note,),
        )  # fmt: skip


def bound_reason(workload: Workload, machine: Machine) -> str | None:
    """Why there is no bound for this job; None where there is one."""
    count = len(machine.ranks)
    if count == 1:
        return None
    return f"{machine.name} has {count} GPUs; what collectives and shared parts cost at least is not in the bound"


def relative_to(workload: Workload, machine: Machine, settings: Settings, layout: Layout) -> str:
    """The setting for which a bound holds, in words; it claims nothing for another cost model, chunk size and so on."""
    w = workload
    barrier = settings.barrier(w.dtype)
    return ", ".join(
        (
            f"cost model of {machine.name} ({machine.confidence})",
            f"chunks of {format_bytes(layout.chunk_bytes)}",
            activations_text(w) if w.activations else f"checkpointing {'on' if w.checkpointing else 'off'}",
            f"{w.micro_batches} micro-batch{'es' if w.micro_batches > 1 else ''} of {w.batch}"
            + (", layer by layer" if w.layer_major else ""),
            f"Adam behind a barrier ({barrier})" if barrier else "Adam as gradients arrive",
            "modes cpu, pin and stream",
        )
    )
