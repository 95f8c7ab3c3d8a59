"""Lower bound on the seconds of one steady iteration, for every legal schedule of a setting.

pinned.py has the closed form for schedules that stream no chunk, joint.py a small linear program, fluid.py a finer one
over time; rank_facts.py says what several ranks add.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from pstar_sim.bounds.bound_facts import Bound, BoundFacts
from pstar_sim.bounds.disk_bound import disk_bound_s
from pstar_sim.bounds.joint import joint_bound
from pstar_sim.bounds.linear import Unsolved
from pstar_sim.bounds.pinned import pinned_bound
from pstar_sim.bounds.rank_facts import costs_of_ranks
from pstar_sim.bounds.stash_bound import stash_bound_s
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import Layout
from pstar_sim.core.plan import Settings
from pstar_sim.cost import CostModel
from pstar_sim.units import format_bytes
from pstar_sim.workload.workload import Workload, activations_text

STASHES, DISKS = "stashes", "nvme"
CLOSED = "closed form"  # of these two, for which no program has rows


def lower_bound(
    workload: Workload,
    machine: Machine,
    settings: Settings,
    layout: Layout,
    *,
    max_pinned: int | None = None,
    stream: bool = True,
    ranked: Sequence[Workload] | None = None,
    costs: Sequence[CostModel] | None = None,
) -> Bound:
    """[Note: the joint bound] of joint.py, of several ranks the largest ([Note: the bound of several ranks]).

    stream: False for schedules that stream no chunk, by [Note: the bound] of pinned.py.
    max_pinned: parameters, without small chunks, whose states may stay on the gpu (0 with stream=False: all CPU Adam).
    ranked: each rank's workload, if these differ; `workload` is at least as hard as each.
    costs: of each kind of rank, by default those of workload and machine.

    """
    barrier = settings.barrier(workload.compute_dtype) is not None
    of_rank = partial(_of_rank, workload, machine, settings, layout, max_pinned=max_pinned, stream=stream)
    bounds = [
        _with_disks(_with_stashes(of_rank(cost), workload, cost), disk_bound_s(workload, layout, cost, barrier=barrier))
        for cost in costs or costs_of_ranks(workload, machine, layout, ranked)
    ]
    return max(bounds, key=lambda bound: bound.seconds)


def _of_rank(
    workload: Workload,
    machine: Machine,
    settings: Settings,
    layout: Layout,
    cost: CostModel,
    *,
    max_pinned: int | None,
    stream: bool,
) -> Bound:
    facts = BoundFacts(workload, machine, layout, cost)
    barrier = settings.barrier(workload.compute_dtype) is not None
    limit = np.inf if max_pinned is None else max_pinned + float(facts.params[facts.small].sum())
    if not stream:
        return pinned_bound(facts, barrier, limit, clip=settings.clip)
    try:
        return joint_bound(workload, layout, facts, cost, barrier=barrier, clip=settings.clip, x_limit=limit)
    except Unsolved as error:
        return _of_compute(facts, f"its linear program was not solved ({error})")


def _with_stashes(bound: Bound, workload: Workload, cost: CostModel) -> Bound:
    if not workload.stashes:
        return bound
    return _with_term(bound, STASHES, stash_bound_s(workload, cost))


def _with_disks(bound: Bound, seconds: float) -> Bound:
    return _with_term(bound, DISKS, seconds) if seconds else bound


def _with_term(bound: Bound, name: str, seconds: float) -> Bound:
    bound = replace(bound, terms={**bound.terms, name: seconds})
    return replace(bound, seconds=seconds, binding=name, method=CLOSED) if seconds > bound.seconds else bound


def _of_compute(facts: BoundFacts, why: str) -> Bound:
    seconds = float(facts.clock[-1])
    return Bound(
        seconds=seconds,
        binding="compute",
        terms={"compute": seconds},
        pinned_params=0,
        max_pinned_params=0,
        notes=(f"the lower bound counts compute alone: {why}",),
    )


def relative_to(
    workload: Workload, machine: Machine, settings: Settings, layout: Layout, shared: str | None = None
) -> str:
    """The setting for which a bound holds.

    shared: words for a micro-batch of ranks that differ.
    """
    w = workload
    barrier = settings.barrier(w.compute_dtype)
    return ", ".join(
        (
            f"cost model of {machine.name}",
            f"chunks of {format_bytes(layout.chunk_bytes)}" + _held_by(machine, layout),
            activations_text(w) if w.activations else f"checkpointing {'on' if w.checkpointing else 'off'}",
            f"{w.micro_batches} micro-batch{'es' if w.micro_batches > 1 else ''} of {shared or w.batch}"
            + w.order.words,
            f"Adam behind a barrier ({barrier})" if barrier else "Adam as gradients arrive",
            "modes cpu, pin and stream" + (", sums in 16 bits" if layout.sum_bytes == 2 else ""),
        )
    )


def _held_by(machine: Machine, layout: Layout) -> str:
    count = machine.world_size
    if count == 1:
        return ""
    return f" sliced over {layout.ranks} GPUs" if layout.ranks > 1 else f" whole on each of {count} GPUs"
