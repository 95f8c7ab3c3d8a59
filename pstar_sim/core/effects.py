"""What a step does to memory, as pure functions: the table of [Note: what a step does to memory] in core/step.py.

`takes` and `frees` name the resident a single step touches; whether a fetch, write-back or cpu_add takes anything
depends on who is resident already, so `resolve` walks a whole plan once and says what each step takes and frees.
Used by ledger, simulator and the policies' memory edges; the checker has code of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from pstar_sim.core.layout import Layout
from pstar_sim.core.plan import Plan, Resident
from pstar_sim.core.step import EFFECTS, OTHERS, Kind, Place, Step, Touch
from pstar_sim.errors import PlanError
from pstar_sim.workload.workload import Workload

__all__ = [
    "CATEGORIES",
    "NON_MODEL",
    "OTHERS",
    "Effect",
    "Move",
    "category_of",
    "final_gradients",
    "frees",
    "gradient_list",
    "held_at_cut",
    "name_of",
    "needed",
    "reads",
    "resolve",
    "takes",
    "tide_at_cut",
    "tide_moves",
    "topological",
]

NON_MODEL = "non-model"
CATEGORIES = (NON_MODEL, "param", "grad", "states", "buffer")

_CATEGORY = {"param": "param", "grad": "grad", "grad32": "grad", "remote": "param", "grad_remote": "grad"}


def category_of(list_name: str) -> str:
    """Category of a list in a timeline: "param", "grad" or "states"."""
    return _CATEGORY.get(list_name, "states")


def takes(step: Step) -> tuple[Resident, bool] | None:
    """The resident a step takes at its start and whether it takes it only if absent; None if it takes none.
    The tide's rise of a compute step is in `tide_moves`."""
    return _touched(step, EFFECTS[step.kind].takes)


def frees(step: Step) -> tuple[Resident, bool] | None:
    """The resident a step frees at its end and whether it frees it only if present; None if it frees none."""
    return _touched(step, EFFECTS[step.kind].frees)


def _touched(step: Step, touch: Touch | None) -> tuple[Resident, bool] | None:
    if touch is None or not touch.concerns(step.list):
        return None
    list_name, place = touch.list or step.list, touch.place or step.place
    if list_name is None:
        raise PlanError(f"step {step.id}: a {step.kind.value} step needs list=")
    if place is None:
        raise PlanError(f"step {step.id}: a {step.kind.value} step needs place=")
    if step.chunk is None:
        raise PlanError(f"step {step.id}: a {step.kind.value} step needs chunk=")
    return Resident(step.chunk, list_name, place), touch.lenient


def tide_moves(workload: Workload) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(rise, fall) of the tide at each moment: non-model bytes taken when it starts, and freed when it ends."""
    peaks = [m.peak_bytes for m in workload.moments]
    count = len(peaks)
    rise = tuple(max(0, peaks[m] - peaks[m - 1]) for m in range(count))
    fall = tuple(max(0, peaks[m] - peaks[(m + 1) % count]) for m in range(count))
    return rise, fall


def tide_at_cut(workload: Workload) -> int:
    """Non-model bytes between two iterations: the last moment's fall has happened, the first one's rise has not."""
    return min(workload.moments[-1].peak_bytes, workload.moments[0].peak_bytes)


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes of a category at a place that a step takes or frees."""

    place: Place
    category: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Effect:
    """What a step takes when it starts and frees when it ends; None for nothing (also where it would be 0 bytes)."""

    take: Move | None = None
    free: Move | None = None


def held_at_cut(plan: Plan) -> dict[tuple[Place, str], int]:
    """Bytes by place and category at the cut: initial residents, buffers, and the tide there."""
    held: dict[tuple[Place, str], int] = {}

    def add(place: Place, category: str, size: int) -> None:
        held[place, category] = held.get((place, category), 0) + size

    add(Place.GPU, NON_MODEL, tide_at_cut(plan.workload))
    for resident in plan.initial:
        if resident.chunk >= 0:
            add(resident.place, category_of(resident.list), plan.layout.payload_bytes(resident.chunk, resident.list))
    for _, place, size in plan.buffers:
        add(place, "buffer", size)
    return held


def resolve(plan: Plan) -> dict[int, Effect]:
    """Step id -> what it takes and frees, for any iteration of the plan.

    Walks each resident's own steps in an order of the plan's dependencies, from `initial`. (In a plan the checker
    accepts all legal orders give the same result, and `initial` is reached again.) Raises PlanError for a cycle, for
    taking what is there, and for freeing what is not.
    """
    rise, fall = tide_moves(plan.workload)
    present = set(plan.initial)
    payload = plan.layout.payload_bytes
    effects: dict[int, Effect] = {}
    for step in topological(plan.steps):
        take = free = None
        if step.kind is Kind.COMPUTE:
            if step.moment is None or not step.moment < len(rise):
                raise PlanError(f"step {step.id}: a compute step needs moment=, below {len(rise)}")
            if rise[step.moment]:
                take = Move(Place.GPU, NON_MODEL, rise[step.moment])
            if fall[step.moment]:
                free = Move(Place.GPU, NON_MODEL, fall[step.moment])
        else:
            taken, freed = takes(step), frees(step)
            if taken is not None:
                resident, if_absent = taken
                if resident not in present:
                    present.add(resident)
                    take = _move(resident, payload(resident.chunk, resident.list))
                elif not if_absent:
                    raise PlanError(f"step {step.id} ({step.kind.value}) takes {name_of(resident)}, which is there")
            if freed is not None:
                resident, if_present = freed
                if resident in present:
                    present.remove(resident)
                    free = _move(resident, payload(resident.chunk, resident.list))
                elif not if_present:
                    raise PlanError(f"step {step.id} ({step.kind.value}) frees {name_of(resident)}, which is not there")
        effects[step.id] = _NOTHING if take is None and free is None else Effect(take, free)
    return effects


_NOTHING = Effect()


def _move(resident: Resident, size: int) -> Move | None:
    return Move(resident.place, category_of(resident.list), size) if size else None


def name_of(resident: Resident) -> str:
    """For messages: "the param list of chunk 3 on the gpu"."""
    return f"the {resident.list} list of chunk {resident.chunk} on the {resident.place.value}"


def topological(steps: Sequence[Step]) -> list[Step]:
    """Steps of one iteration in an order that keeps queue order and `after` (of this iteration); earliest in the plan
    first. Raises PlanError for an unknown or doubled id, and for a cycle, naming steps on it."""
    position = {step.id: i for i, step in enumerate(steps)}
    if len(position) != len(steps):
        seen: set[int] = set()
        for step in steps:
            if step.id in seen:
                raise PlanError(f"step id {step.id} is used twice")
            seen.add(step.id)
    waiting = [0] * len(steps)
    followers: list[list[int]] = [[] for _ in steps]
    last_on: dict[str, int] = {}
    for i, step in enumerate(steps):
        before = last_on.get(step.queue)
        if before is not None:
            followers[before].append(i)
            waiting[i] += 1
        last_on[step.queue] = i
        for ref in step.after:
            if ref.back:
                continue
            j = position.get(ref.id)
            if j is None:
                raise PlanError(f"step {step.id} is after step {ref.id}, which the plan does not have")
            followers[j].append(i)
            waiting[i] += 1
    ready = [i for i, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    order: list[Step] = []
    while ready:
        i = heapq.heappop(ready)
        order.append(steps[i])
        for j in followers[i]:
            waiting[j] -= 1
            if waiting[j] == 0:
                heapq.heappush(ready, j)
    if len(order) < len(steps):
        stuck = [str(step.id) for step, count in zip(steps, waiting) if count > 0]
        raise PlanError(f"{len(stuck)} steps wait for each other in a circle, among them {', '.join(stuck[:8])}")
    return order


def gradient_list(plan: Plan) -> dict[tuple[int, int], str]:
    """(chunk, micro-batch) -> the list on the gpu that the chunk's gradients go to in that micro-batch.

    "grad32" where that list stays on the gpu (a pinned chunk that accumulates), "grad" in the micro-batches the plan
    allocates it for (as many, in order, as it has alloc steps) or in all if it stays on the gpu, and "param", in
    place, in the others: a plan that passes the checker has that in the last micro-batch only. Where lists are sliced
    gradients arrive whole, in that list and the one of the others' slices; "grad32" is then never such a list.
    """
    w = plan.workload
    chunk_of = plan.layout.chunk_of
    batches: dict[int, list[int]] = {}
    for moment, tensors in zip(w.moments, w.gradients):
        for tensor in tensors:
            mine = batches.setdefault(chunk_of[tensor], [])
            if moment.micro_batch not in mine:
                mine.append(moment.micro_batch)
    allocated: dict[int, int] = {}
    for step in plan.steps:
        if step.kind is Kind.ALLOC and step.list == "grad" and step.place is Place.GPU and step.chunk is not None:
            allocated[step.chunk] = allocated.get(step.chunk, 0) + 1
    target: dict[tuple[int, int], str] = {}
    for chunk, mine in batches.items():
        if Resident(chunk, "grad32", Place.GPU) in plan.initial and plan.layout.ranks == 1:
            count, where = len(mine), "grad32"
        elif Resident(chunk, "grad", Place.GPU) in plan.initial:
            count, where = len(mine), "grad"
        else:
            count, where = allocated.get(chunk, 0), "grad"
        for i, batch in enumerate(mine):
            target[chunk, batch] = where if i < count else "param"
    return target


def final_gradients(workload: Workload) -> list[tuple[int, ...]]:
    """Tensors whose gradient becomes final for its micro-batch in each moment: at its last firing there. Before that
    a gradient that fires several times is non-model data."""
    last: dict[tuple[int, int], int] = {}
    for m, tensors in enumerate(workload.gradients):
        for t in tensors:
            last[workload.moments[m].micro_batch, t] = m
    finals: list[list[int]] = [[] for _ in workload.moments]
    for (_, t), m in last.items():
        finals[m].append(t)
    return [tuple(sorted(row)) for row in finals]


def reads(step: Step) -> tuple[Resident, ...]:
    """Lists that have to be there when a step starts and that it copies or reduces; none for moments and Adam."""
    if step.list is None or step.chunk is None:
        return ()
    there = EFFECTS[step.kind].reads
    if there is None or step.kind in (Kind.CPU_ADAM, Kind.GPU_ADAM):
        return ()
    own = OTHERS.get(step.list, step.list)
    if step.kind is Kind.REDUCE_SCATTER and own != step.list:
        return Resident(step.chunk, own, there), Resident(step.chunk, step.list, there)
    return (Resident(step.chunk, own, there),)


def needed(layout: Layout, workload: Workload) -> list[tuple[int, ...]]:
    """Chunks each moment reads, ascending."""
    chunk_of = layout.chunk_of
    return [tuple(sorted({chunk_of[t] for t in tensors})) for tensors in workload.reads]
