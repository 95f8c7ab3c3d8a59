"""Effects of steps and moments on memory, as pure functions: [Note: what a step does to memory] in core/step.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pstar_sim.core.layout import Layout
from pstar_sim.core.plan import Plan, Resident
from pstar_sim.core.step import EFFECTS, OTHERS, UPDATES, Kind, Place, Step, Touch
from pstar_sim.errors import PlanError
from pstar_sim.workload.workload import Workload

__all__ = [
    "CATEGORIES",
    "NON_MODEL",
    "OTHERS",
    "Touched",
    "category_of",
    "folded_lists",
    "frees",
    "gradient_list",
    "name_of",
    "needed",
    "overwritten_in_place",
    "reads",
    "takes",
    "tide_at_cut",
    "tide_moves",
]

NON_MODEL = "non-model"
CATEGORIES = (NON_MODEL, "param", "grad", "states", "buffer")

_CATEGORY = {"param": "param", "grad": "grad", "grad32": "grad"}
_CATEGORY |= {others: _CATEGORY[own] for others, own in OTHERS.items()}


def category_of(list_name: str) -> str:
    """As in a timeline."""
    return _CATEGORY.get(list_name, "states")


class Touched(NamedTuple):
    """lenient: taken only if absent, freed only if present."""

    resident: Resident
    lenient: bool


def takes(step: Step) -> Touched | None:
    """When the step starts. The tide's rise is in `tide_moves`."""
    return _touched(step, EFFECTS[step.kind].takes)


def frees(step: Step) -> Touched | None:
    """When the step ends."""
    return _touched(step, EFFECTS[step.kind].frees)


def reads(step: Step) -> tuple[Resident, ...]:
    """What a step copies or reduces; none for moments and Adam."""
    if step.list is None or step.chunk is None:
        return ()
    there = EFFECTS[step.kind].reads
    if there is None or step.kind in UPDATES:
        return ()
    own = OTHERS.get(step.list, step.list)
    if step.kind is Kind.REDUCE_SCATTER and own != step.list:
        return Resident(step.chunk, own, there), Resident(step.chunk, step.list, there)
    return (Resident(step.chunk, own, there),)


def _touched(step: Step, touch: Touch | None) -> Touched | None:
    if touch is None or not touch.concerns(step.list):
        return None
    list_name, place = touch.list or step.list, touch.place or step.place
    if list_name is None:
        raise PlanError(f"step {step.id}: a {step.kind.value} step needs list=")
    if place is None:
        raise PlanError(f"step {step.id}: a {step.kind.value} step needs place=")
    if step.chunk is None:
        raise PlanError(f"step {step.id}: a {step.kind.value} step needs chunk=")
    return Touched(Resident(step.chunk, list_name, place), touch.lenient)


def tide_moves(tide: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(rise, fall) of the tide at each moment: taken when it starts, freed when it ends.

    tide: per moment of an iteration, or per block.
    """
    changes = [now - before for before, now in zip((tide[-1], *tide), tide)]
    rise = tuple(change if change > 0 else 0 for change in changes)
    fall = tuple(-change if change < 0 else 0 for change in (*changes[1:], changes[0]))
    return rise, fall


def tide_at_cut(tide: Sequence[int]) -> int:
    """After the last moment's fall, before the first's rise."""
    return min(tide[-1], tide[0])


def name_of(resident: Resident) -> str:
    """Such as "the param list of chunk 3 on the gpu"."""
    return f"the {resident.list} list of chunk {resident.chunk} on the {resident.place.value}"


def gradient_list(plan: Plan) -> dict[tuple[int, int], str]:
    """Returns (chunk, micro-batch) -> list on the gpu in which the chunk's gradients arrive.

    "grad32" if that stays on the gpu or the plan allocates it there; "grad" in micro-batches for which the plan
    allocates it (the first, one per alloc), or in all if it stays there; "param", in place, otherwise: in a checked
    plan the last micro-batch. On a sliced layout whole gradients arrive in it and in the others' slices, and in
    "grad32" only with those.
    """
    alloc, gpu = Kind.ALLOC, Place.GPU
    opened = [step for step in plan.steps if step.kind is alloc and step.place is gpu]
    allocated = Counter([step.chunk for step in opened if step.list == "grad"])
    summed = _on_gpu(plan, "grad32" if plan.layout.ranks == 1 else "grad32_remote")
    stays = {r.chunk for r in plan.initial if r.place is gpu and r.list == "grad"}
    batches: dict[int, list[int]] = {}
    for chunk, batch in _last_gradients(plan):
        batches.setdefault(chunk, []).append(batch)
    target: dict[tuple[int, int], str] = {}
    for chunk, mine in batches.items():
        if chunk in summed:
            count, where = len(mine), "grad32"
        elif chunk in stays:
            count, where = len(mine), "grad"
        else:
            count, where = allocated[chunk], "grad"
        for i, batch in enumerate(mine):
            target[chunk, batch] = where if i < count else "param"
    return target


def folded_lists(plan: Plan) -> dict[int, int]:
    """Returns step -> gradient lists that an update adds to another before it begins.

    A cpu_add adds a gradient to the sum on the host, and a sum on the gpu takes each gradient as it arrives; the update
    adds the rest. On a sliced layout, adds on the gpu are left out. A part of an update makes its part of each.
    """
    if plan.workload.micro_batches == 1:
        return {}
    summed, added = _on_gpu(plan, "grad32"), Counter(step.chunk for step in plan.steps if step.kind is Kind.CPU_ADD)
    arrived = Counter(chunk for chunk, _ in _last_gradients(plan))
    kinds = UPDATES if plan.layout.ranks == 1 else {Kind.CPU_UPDATE}
    updates = {i: step.chunk for i, step in enumerate(plan.steps) if step.kind in kinds and step.chunk is not None}
    lists = {i: arrived[c] - added[c] + (added[c] > 0) for i, c in updates.items() if c not in summed}
    return {i: count - 1 for i, count in lists.items() if count > 1}


def _on_gpu(plan: Plan, list_name: str) -> set[int]:
    opened = {s.chunk for s in plan.steps if s.kind is Kind.ALLOC and s.place is Place.GPU and s.list == list_name}
    stays = {r.chunk for r in plan.initial if r.place is Place.GPU and r.list == list_name}
    return {chunk for chunk in opened | stays if chunk is not None}


def overwritten_in_place(plan: Plan) -> list[tuple[int, int]]:
    """(moment, chunk) of working lists with only final gradients when the moment ends."""
    last = _last_gradients(plan)
    return [(last[where], where[0]) for where, list_name in gradient_list(plan).items() if list_name == "param"]


def _last_gradients(plan: Plan) -> dict[tuple[int, int], int]:
    """(chunk, micro-batch) -> moment of its last gradient, ordered by the first."""
    w, chunk_of = plan.workload, plan.layout.chunk_of
    last: dict[tuple[int, int], int] = {}
    for m, (moment, tensors) in enumerate(zip(w.moments, w.gradients)):
        for t in tensors:
            last[chunk_of[t], moment.micro_batch] = m
    return last


def needed(layout: Layout, workload: Workload) -> list[tuple[int, ...]]:
    """The chunks that each moment reads, ascending."""
    chunk_of = layout.chunk_of
    chunks = {tensors: tuple(sorted({chunk_of[t] for t in tensors})) for tensors in set(workload.reads)}
    return [chunks[tensors] for tensors in workload.reads]
