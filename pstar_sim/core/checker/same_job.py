"""Checks that a plan is for the workload and the machine with which it is used."""

from __future__ import annotations

import dataclasses

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan
from pstar_sim.errors import PlanError
from pstar_sim.units import format_bytes
from pstar_sim.workload.presets import variant
from pstar_sim.workload.relay import boundaries_on_host, relay
from pstar_sim.workload.workload import Moment, Workload, activations_text

_MOMENT = tuple(f.name for f in dataclasses.fields(Moment) if f.name not in ("duration_s", "products"))
"""Fields that are equal in two captures of one job. Measured durations differ from one recording to the next, and a
file of an earlier version names no products."""


def check_workload_of(plan: Plan, workload: Workload) -> None:
    """Raise PlanError naming the first difference between the plan's workload and `workload`."""
    mine = plan.workload
    workload = _as_planned(plan, workload)
    if (workload.dtype, workload.autocast, workload.products) != (mine.dtype, mine.autocast, mine.products):
        made, asked = (
            (f"autocast to {w.autocast}" if w.autocast else w.dtype)
            + (f" with products in {w.products}" if w.products else "")
            for w in (mine, workload)
        )
        raise PlanError(f"the plan was made for {made}, not {asked}; make a plan for {asked}")
    if workload.fingerprint != mine.fingerprint:
        raise PlanError(
            f"the plan was made for model {mine.model!r} ({mine.params} parameters, "
            f"fingerprint {mine.fingerprint}), not {workload.model!r} ({workload.params} parameters, "
            f"fingerprint {workload.fingerprint})"
        )
    if workload.optimizer != mine.optimizer:
        raise PlanError(
            f"the plan was made for optimizer {mine.optimizer}, not {workload.optimizer}; make a plan for the latter"
        )
    if workload.activations and workload.activations != mine.activations:
        raise PlanError(
            f"the plan was made for {activations_text(mine)}, not for {activations_text(workload)}; choose the "
            "same for each block"
        )
    for name in ("batch", "sequence"):
        made, asked = getattr(mine, name), getattr(workload, name)
        if made != asked:
            raise PlanError(f"the plan was made for {name} {made}, not {asked}; make a plan for {name} {asked}")
    if workload.micro_batches != mine.micro_batches:
        raise PlanError(
            f"the plan was made for {mine.micro_batches} micro-batches per iteration, not "
            f"{workload.micro_batches}; make a plan for that number"
        )
    if len(workload.moments) != len(mine.moments) or set(workload.uses) != set(mine.uses):
        raise PlanError(
            f"the plan was made for {len(mine.moments)} moments and {len(mine.uses)} uses of parameters "
            f"(checkpointing {'on' if mine.checkpointing else 'off'}), not {len(workload.moments)} and "
            f"{len(workload.uses)} (checkpointing {'on' if workload.checkpointing else 'off'}), or in another order"
        )
    if workload.stashes != mine.stashes:
        raise PlanError("the plan was made for other bytes or moments of the activations that go to the host (stashes)")
    _check_moments(mine, workload)


def _as_planned(plan: Plan, workload: Workload) -> Workload:
    """A preset that stands for the whole job as the plan has it: one rank's share of the batch, the plan's dtype if it
    names none, and the order that the policy chose."""
    mine = plan.workload
    if mine.relayed and workload.order.of_loop and not workload.stashes:
        if not mine.order.of_loop:
            workload = relay(workload, stash="host" if mine.boundaries_on_host else "gpu")
        else:
            workload = boundaries_on_host(workload)
    dtype = mine.dtype if workload.dtype_open else workload.dtype
    share = max(rank.batch_share for rank in plan.machine.ranks)
    whole = plan.machine.data_parallel_size > 1 and round(workload.batch * share, 6) == mine.batch
    if workload.source == "preset" and not workload.activations and (whole or dtype != workload.dtype):
        return variant(workload, batch=mine.batch if whole else workload.batch, dtype=dtype)
    return workload


def _check_moments(mine: Workload, workload: Workload) -> None:
    differ = [
        (i, name)
        for i, (a, b) in enumerate(zip(mine.moments, workload.moments))
        for name in _MOMENT
        if getattr(a, name) != getattr(b, name)
    ]
    if differ:
        i, name = differ[0]
        a, b = getattr(mine.moments[i], name), getattr(workload.moments[i], name)
        raise PlanError(
            f"the plan was made for a workload with {name} {a}, not {b}, in moment {i} ({mine.moments[i].name}); "
            f"{len({i for i, _ in differ})} of {len(mine.moments)} moments differ"
        )


def check_machine(plan: Plan, machine: Machine) -> None:
    """Raises PlanError for a plan for another machine, or for more memory than `machine` has."""
    if machine.name != plan.machine.name:
        raise PlanError(
            f"the plan was made for machine {plan.machine.name!r}, not {machine.name!r}; make a plan for the latter"
        )
    if machine.world_size != plan.machine.world_size:
        raise PlanError(f"the plan was made for {plan.machine.world_size} GPUs, not {machine.world_size}")
    check_budgets(plan, machine)


def check_budgets(plan: Plan, machine: Machine) -> None:
    for place, budget, has in (
        ("gpu", plan.gpu_budget_bytes, machine.gpu_budget_bytes),
        ("host", plan.host_budget_bytes, machine.host_budget_bytes),
        ("nvme", plan.nvme_budget_bytes, machine.nvme_budget_bytes),
    ):
        if budget > has:
            raise PlanError(
                f"the plan may use {format_bytes(budget)} of {place} memory but machine {machine.name!r} has "
                f"{format_bytes(has)} to give, short by {format_bytes(budget - has)}"
            )
