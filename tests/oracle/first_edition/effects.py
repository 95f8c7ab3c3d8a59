"""Effects of a step on memory, in the first edition: [Note: what a step does to memory] of core/step.py, as it was."""

from __future__ import annotations

from pstar_sim.core.layout import Layout
from pstar_sim.core.plan import Plan, Resident
from pstar_sim.core.step import Kind, Place, Step
from pstar_sim.errors import PlanError
from pstar_sim.workload.workload import Workload

__all__ = [
    "CATEGORIES",
    "NON_MODEL",
    "OTHERS",
    "category_of",
    "frees",
    "gradient_list",
    "name_of",
    "needed",
    "reads",
    "takes",
    "tide_at_cut",
    "tide_moves",
]

NON_MODEL = "non-model"
CATEGORIES = (NON_MODEL, "param", "grad", "states", "buffer")

OTHERS = {"remote": "param", "grad_remote": "grad"}
"""Lists of the other ranks' slices -> the list whose slices they are ([Note: several ranks] in core/step.py)."""

_CATEGORY = {"param": "param", "grad": "grad", "grad32": "grad", "remote": "param", "grad_remote": "grad"}


def category_of(list_name: str) -> str:
    """Returns the category of a list in a timeline: "param", "grad" or "states"."""
    return _CATEGORY.get(list_name, "states")


def takes(step: Step) -> tuple[Resident, bool] | None:
    """Returns (the resident that a step takes at its start, whether the step takes only an absent resident). Returns
    None if the step takes none. The tide's rise of a compute step is in `tide_moves`."""
    kind = step.kind
    if kind is Kind.FETCH:
        return _resident(step, Place.GPU), True
    if kind is Kind.WRITEBACK:
        return _resident(step, Place.HOST), True
    if kind is Kind.ALLOC:
        return _resident(step, step.place), False
    if kind is Kind.CPU_ADD:
        return Resident(_chunk(step), "grad32", Place.HOST), True
    if kind is Kind.NVME_READ:
        return _resident(step, Place.HOST), True
    if kind is Kind.NVME_WRITE:
        return _resident(step, Place.NVME), True
    if kind is Kind.GATHER and step.list in OTHERS:
        return _resident(step, Place.GPU), True
    return None


def frees(step: Step) -> tuple[Resident, bool] | None:
    """Returns (the resident that a step frees at its end, whether the step frees only a present resident). Returns None
    if the step frees none."""
    kind = step.kind
    if kind is Kind.DROP:
        return _resident(step, Place.GPU), False
    if kind is Kind.FREE:
        return _resident(step, step.place), False
    if kind is Kind.CPU_ADD:
        if step.list == "param":  # the last gradient, in place in the working list, which stays
            return None
        return Resident(_chunk(step), "grad", Place.HOST), True
    if kind is Kind.REDUCE_SCATTER and step.list in OTHERS:
        return _resident(step, Place.GPU), False
    return None


def _chunk(step: Step) -> int:
    if step.chunk is None:
        raise PlanError(f"step {step.id}: a {step.kind.value} step needs chunk=")
    return step.chunk


def _resident(step: Step, place: Place | None) -> Resident:
    if step.list is None:
        raise PlanError(f"step {step.id}: a {step.kind.value} step needs list=")
    if place is None:
        raise PlanError(f"step {step.id}: a {step.kind.value} step needs place=")
    return Resident(_chunk(step), step.list, place)


def tide_moves(workload: Workload) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (rise, fall) of the tide at each moment: non-model bytes taken when it starts, and freed when it ends."""
    peaks = [m.peak_bytes for m in workload.moments]
    count = len(peaks)
    rise = tuple(max(0, peaks[m] - peaks[m - 1]) for m in range(count))
    fall = tuple(max(0, peaks[m] - peaks[(m + 1) % count]) for m in range(count))
    return rise, fall


def tide_at_cut(workload: Workload) -> int:
    """Returns the non-model bytes between two iterations: after the last moment's fall, before the first one's rise."""
    return min(workload.moments[-1].peak_bytes, workload.moments[0].peak_bytes)


def name_of(resident: Resident) -> str:
    """Returns the resident in words, for messages: "the param list of chunk 3 on the gpu"."""
    return f"the {resident.list} list of chunk {resident.chunk} on the {resident.place.value}"


def gradient_list(plan: Plan) -> dict[tuple[int, int], str]:
    """Returns (chunk, micro-batch) -> the list on the gpu that takes the chunk's gradients in that micro-batch.

    It is "grad32" where that list stays on the gpu (a pinned chunk that accumulates). It is "grad" in the micro-batches
    for which the plan allocates it (as many, in order, as it has alloc steps), or in all if it stays on the gpu. In the
    other micro-batches it is "param", in place: a plan that passes the checker has that in the last micro-batch only.
    Where lists are sliced, gradients arrive whole, in that list and the list of the others' slices; "grad32" is then
    never used.
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


def reads(step: Step) -> tuple[Resident, ...]:
    """Returns the lists that a step copies or reduces, which have to be present when it starts; none for moments and
    Adam."""
    if step.list is None or step.chunk is None:
        return ()
    there = _SOURCE.get(step.kind)
    if there is None:
        return ()
    own = OTHERS.get(step.list, step.list)
    if step.kind is Kind.REDUCE_SCATTER and own != step.list:
        return Resident(step.chunk, own, there), Resident(step.chunk, step.list, there)
    return (Resident(step.chunk, own, there),)


_SOURCE = {
    Kind.FETCH: Place.HOST,
    Kind.WRITEBACK: Place.GPU,
    Kind.GATHER: Place.GPU,
    Kind.REDUCE_SCATTER: Place.GPU,
    Kind.NVME_READ: Place.NVME,
    Kind.NVME_WRITE: Place.HOST,
}


def needed(layout: Layout, workload: Workload) -> list[tuple[int, ...]]:
    """Returns the chunks that each moment reads, ascending."""
    chunk_of = layout.chunk_of
    return [tuple(sorted({chunk_of[t] for t in tensors})) for tensors in workload.reads]
