"""The stages of a pipeline, or the kinds of GPUs that split layers.

Each stage is proved alone, sends and receives taking any time, so its proof holds among the others.

[Note: no circle] Stages do not wait for each other for ever exactly if their steps have an order once each meeting is
one step. One iteration suffices: nothing of the one before waits for this one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import groupby

from pstar_sim.core.check_report import CheckReport
from pstar_sim.core.checker.check import check_plan
from pstar_sim.core.checker.unrolled import label
from pstar_sim.core.plan import Plan
from pstar_sim.core.plan_set import PlanSet, meetings_of, slices_as, whole_chunks
from pstar_sim.core.step import Kind, Queue
from pstar_sim.errors import PlanError
from pstar_sim.units import format_bytes, format_count
from pstar_sim.workload.orders import Order
from pstar_sim.workload.parallelism import Parallelism
from pstar_sim.workload.pipeline import cells_of
from pstar_sim.workload.tape import CONTEXT, EXPERTS, TENSOR
from pstar_sim.workload.workload import Collective, Phase

_Node = int | tuple[int, int]
"""Number of a meeting, or (stage, id of a step)."""


def prove_set(plans: PlanSet) -> tuple[CheckReport, ...]:
    """Raises PlanError with the first violation, naming the stage."""
    reports = []
    for stage, plan in enumerate(plans.plans):
        try:
            reports.append(check_plan(plan))
        except PlanError as error:
            raise PlanError(f"{plans.names[stage]}: {error}") from None
    _check_jobs(plans)
    if plans.shares:
        _check_shares(plans)
    _check_meetings(plans)
    _check_order(plans)
    return tuple(reports)


def _check_jobs(plans: PlanSet) -> None:
    spread, first, names = plans.parallelism, plans.plans[0], plans.names
    for name, plan in zip(names, plans.plans):
        for what in ("model", "dtype", "batch", "sequence", "micro_batches"):
            if getattr(plan.workload, what) != getattr(first.workload, what):
                raise PlanError(
                    f"{name} has {what} {getattr(plan.workload, what)!r}, and {names[0]} "
                    f"{getattr(first.workload, what)!r}; they are of one job"
                )
        if plan.settings != first.settings:
            raise PlanError(f"{name} has other settings than {names[0]}: {plan.settings}")
        ranks = {group.name: group.ranks for group in plan.machine.groups}
        scattered = {
            group for m in plan.workload.moments for what, group, _ in m.collectives if what == "reduce_scatter"
        }
        here = Parallelism(
            tensor=ranks.get(TENSOR, 1),
            sequence=TENSOR in scattered,
            context=ranks.get(CONTEXT, 1),
            experts=ranks.get(EXPERTS, 1),
            data=plan.machine.data_parallel_size // ranks.get(CONTEXT, 1),
        )
        same = ("tensor", "sequence", "context", "experts", *(() if spread.data is None else ("data",)))
        if any(getattr(here, what) != getattr(spread, what) for what in same):
            raise PlanError(f"{name} is of {here}; the set is of {spread}")
        _check_shard(plan, name, spread.shard)
    parts = 1 + max((b.part for plan in plans.plans for b in plan.workload.borders if b.part), default=-1)
    if (spread.virtual > 1 and parts != spread.pipeline * spread.virtual - 1) or (spread.virtual == 1 and parts):
        raise PlanError(f"{parts or 'no'} borders of parts are crossed; the set is of {spread}")
    for stage, plan in enumerate(plans.plans):
        _check_schedule(plan, names[stage], 0 if plans.shares else stage, spread)


def _check_shares(plans: PlanSet) -> None:
    """Moments, order and sums are the same; split tensors, hosts and disks have the parts of the shares."""
    spread, shares, first = plans.parallelism, plans.shares, plans.plans[0]
    if (
        spread.pipeline > 1
        or min(min(share[:2]) for share in shares) < 1
        or sum(share.ranks for share in shares) != spread.tensor
    ):
        raise PlanError(f"shares are {shares}, of ranks and parts of a layer; the set is of {spread}")
    for name, plan, share in zip(plans.names, plans.plans, shares):
        runs = [[s.moment for s in each.steps if s.kind is Kind.COMPUTE] for each in (first, plan)]
        sums = [[(m.name, [_met(c) for c in m.collectives]) for m in each.workload.moments] for each in (first, plan)]
        if runs[0] != runs[1] or sums[0] != sums[1]:
            raise PlanError(f"{name} waits for other sums than {plans.names[0]}, or in another order")
        tensors = plan.workload.tensors
        if [t.name for t in tensors] != [t.name for t in first.workload.tensors]:
            raise PlanError(f"{name} has other tensors than {plans.names[0]}")
        if share.parts != shares[0].parts and [t.shape for t in tensors] == [t.shape for t in first.workload.tensors]:
            raise PlanError(f"{name} has tensors as large as {plans.names[0]}; the shares are {plans.split}")
        for t, other in zip(tensors, first.workload.tensors):
            if not all(a == b or _of_one(a, share.parts, b, shares[0].parts) for a, b in zip(t.shape, other.shape)):
                raise PlanError(
                    f"{t.name} is {t.shape} on {name} and {other.shape} on {plans.names[0]}; the shares are "
                    f"{plans.split}"
                )
        own, others = share.node or share.parts, shares[0].node or shares[0].parts
        for what, size, of_first in zip(_OF_NODES, _of_nodes(plan), _of_nodes(first)):
            if not _of_one(size + 1, own, of_first + 1, others):  # rounded down
                raise PlanError(
                    f"{name} has {format_bytes(size)} of {what}, and {plans.names[0]} {format_bytes(of_first)}; of the "
                    f"node {name} has {format_count(own, 'part')} and {plans.names[0]} {others}"
                )


_OF_NODES = ("host memory", "pinned host memory", "disks")


def _of_nodes(plan: Plan) -> tuple[int, ...]:
    host, disks = plan.machine.host, plan.machine.nvme
    return host.memory_bytes, host.pinned_bytes or 0, 0 if disks is None else disks.memory_bytes


def _met(collective: Collective) -> tuple[str, str, int | None]:
    what, group, size = collective
    return what, group, size if group == TENSOR else None  # other groups are of one kind, with bytes of its own


def _of_one(size: int, parts: int, other: int, others: int) -> bool:
    """Parts of one size, rounded up."""
    return max((size - 1) * others, (other - 1) * parts) < min(size * others, other * parts)


def _check_shard(plan: Plan, name: str, shard: str | None) -> None:
    if not slices_as(plan, shard):
        what = f"slices parameters, of which {len(whole_chunks(plan))} of {len(plan.layout.chunks)} chunks stay whole"
        sliced = plan.layout.ranks > 1
        raise PlanError(f"{name} {what if sliced else 'slices nothing'}; the set has shard={shard}")


def _check_schedule(plan: Plan, name: str, stage: int, spread: Parallelism) -> None:
    """By the order in which moments run forwards and backwards of micro-batches."""
    w = plan.workload
    if w.order is Order.LAYER_MAJOR:
        return
    passes = [run for run, _ in groupby((m.micro_batch, m.phase is not Phase.FWD) for m in w.moments[:-1])]
    cells = cells_of(spread.schedule, spread.pipeline, w.micro_batches, spread.virtual)[stage]
    if passes != [(cell.micro_batch, cell.backward) for cell in cells]:
        order = f"another order than schedule={spread.schedule}"
        raise PlanError(f"{name} runs its micro-batches in {order}; the set is of {spread}")


def _check_meetings(plans: PlanSet) -> None:
    wanted, given = set(meetings_of(plans.plans)), set(plans.meetings)
    if len(given) != len(plans.meetings):
        raise PlanError("a meeting is listed twice")
    for meeting in (*(wanted - given), *(given - wanted)):
        what = "is missing" if meeting in wanted else "is not one that the stages need"
        raise PlanError(f"the meeting of {_words(plans, meeting.steps)} {what}")


def _words(plans: PlanSet, steps: Sequence[tuple[int, int]]) -> str:
    labels = [{step.id: label(step) for step in plan.steps} for plan in plans.plans]

    def words(member: int, step: int) -> str:
        if not 0 <= member < len(labels):
            return f"stage {member}'s step {step}"
        return f"{plans.names[member]}'s {labels[member].get(step, f'step {step}')}"

    return " and ".join(words(*each) for each in steps)


def _check_order(plans: PlanSet) -> None:
    """[Note: no circle]"""
    meeting_of = {member: n for n, meeting in enumerate(plans.meetings) for member in meeting.steps}
    before: defaultdict[_Node, set[_Node]] = defaultdict(set)
    for stage, plan in enumerate(plans.plans):
        nodes: dict[int, _Node] = {step.id: meeting_of.get((stage, step.id), (stage, step.id)) for step in plan.steps}
        latest: dict[Queue, _Node] = {}
        for step in plan.steps:
            node = nodes[step.id]
            waits = {nodes[ref.id] for ref in step.after if not ref.back}
            if step.queue in latest:
                waits.add(latest[step.queue])
            before[node] |= waits - {node}
            latest[step.queue] = node
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        stuck = next((n for n in error.args[1] if isinstance(n, int)), None)
        steps = plans.meetings[stuck].steps if stuck is not None else error.args[1][:1]
        raise PlanError(f"the stages wait for each other in a circle, through {_words(plans, steps)}") from None
