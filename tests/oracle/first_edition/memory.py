"""Bytes at each place while a plan is played: [Note: what a step does to memory] as numbers that rise and fall.

Kept apart from the checker on purpose: this module follows one interleaving as it happens and refuses the first error;
it proves nothing about other interleavings.

[Note: categories] A payload counts as "param", "grad" or "states" by its list, with one exception. Once the last
gradient of a chunk has overwritten its working list in place, that payload (and its copies) counts as "grad" until an
update turns it into parameters again or its memory is freed. The sum over categories does not depend on this.
"""

from __future__ import annotations

from dataclasses import dataclass

from first_edition.effects import (
    CATEGORIES,
    NON_MODEL,
    OTHERS,
    category_of,
    frees,
    gradient_list,
    name_of,
    needed,
    reads,
    takes,
    tide_at_cut,
    tide_moves,
)
from pstar_sim.core.plan import Plan, Resident
from pstar_sim.core.step import Kind, Place, Step
from pstar_sim.errors import PlanError
from pstar_sim.units import format_bytes

__all__ = ["PLACES", "Memory"]

PLACES = (Place.GPU, Place.HOST, Place.NVME)
_GPU = PLACES.index(Place.GPU)
_TIDE, _PARAM, _GRAD, _BUFFER = (CATEGORIES.index(c) for c in (NON_MODEL, "param", "grad", "buffer"))
_COPIES = (Kind.FETCH, Kind.WRITEBACK, Kind.NVME_READ, Kind.NVME_WRITE)
_CELLS = len(CATEGORIES)  # a cell of the table is place * _CELLS + category


@dataclass(slots=True)
class _Effect:
    """The effect of one step, precomputed. Payloads (a list of a chunk at a place) are indices.

    take: payload taken at the start (-1: none).
    strict: whether it must be absent then; otherwise it is taken if absent.
    give: payload freed at the end.
    lenient: whether it may be absent.
    rise, fall: the tide, in bytes.
    needs: payloads that must be present at the start.
    becomes: (payload, category) after the step.
    copied: (from, to) payloads of a copy.
    """

    take: int = -1
    strict: bool = False
    give: int = -1
    lenient: bool = False
    rise: int = 0
    fall: int = 0
    needs: tuple[int, ...] = ()
    becomes: tuple[tuple[int, int], ...] = ()
    copied: tuple[int, int] | None = None


class Memory:
    """The bytes now, per place and category, a log of every change, and the changes that each step of the plan makes.

    log: (time_s, cell, change in bytes), where cell // len(CATEGORIES) is the place and the rest the category.

    Raises PlanError from `start` and `end` for a step that takes a payload that is present, frees or needs a payload
    that is absent, or brings a place over the plan's budget.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._index: dict[tuple[int, str, Place], int] = {}
        self._names: list[Resident] = []
        self._size: list[int] = []
        self._place: list[int] = []
        self._home: list[int] = []  # category by list
        self.log: list[tuple[float, int, int]] = []
        self.cells = [0] * (len(PLACES) * _CELLS)
        self._used = [0] * len(PLACES)
        self._budget = [plan.gpu_budget_bytes, plan.host_budget_bytes, plan.nvme_budget_bytes]
        self._working = ("param", "remote") if plan.layout.ranks > 1 else ("param",)
        self._rise, self._fall = tide_moves(plan.workload)
        self._reads = needed(plan.layout, plan.workload)
        self._in_place = self._overwritten_in_place()
        initial = [self._resident(r) for r in sorted(plan.initial) if r.chunk >= 0]
        self._effects = [self._effect(step) for step in plan.steps]
        self._present = [False] * len(self._names)
        self._category = list(self._home)
        for payload in initial:
            self._present[payload] = True
            self._change(0.0, self._place[payload], self._category[payload], self._size[payload])
        for _, place, size in plan.buffers:
            self._change(0.0, PLACES.index(place), _BUFFER, size)
        self._change(0.0, _GPU, _TIDE, tide_at_cut(plan.workload))
        for place_index in range(len(PLACES)):
            if self._used[place_index] > self._budget[place_index]:
                raise self._over("between two iterations the plan holds", place_index)

    def start(self, step: int, now_s: float) -> None:
        """Take the memory that the step (its position in plan.steps) takes when it starts."""
        effect = self._effects[step]
        for payload in effect.needs:
            if not self._present[payload]:
                raise PlanError(f"{self._word(step)} needs {name_of(self._names[payload])}, which is not there")
        if effect.rise:
            self._change(now_s, _GPU, _TIDE, effect.rise)
            if self._used[_GPU] > self._budget[_GPU]:
                raise self._over(f"{self._word(step)} raises the tide by {effect.rise} bytes: the gpu holds", _GPU)
        payload = effect.take
        if payload >= 0:
            if self._present[payload]:
                if effect.strict:
                    raise PlanError(f"{self._word(step)} takes {name_of(self._names[payload])}, which is there already")
                return
            self._present[payload] = True
            self._category[payload] = self._home[payload]
            place = self._place[payload]
            self._change(now_s, place, self._category[payload], self._size[payload])
            if self._used[place] > self._budget[place]:
                raise self._over(f"{self._word(step)} takes {self._size[payload]} bytes: the place holds", place)

    def end(self, step: int, now_s: float) -> None:
        """Free the memory that the step frees when it ends."""
        effect = self._effects[step]
        if effect.fall:
            self._change(now_s, _GPU, _TIDE, -effect.fall)
        if effect.copied is not None:
            source, target = effect.copied
            self._become(target, self._category[source], now_s)
        for payload, category in effect.becomes:
            self._become(payload, category, now_s)
        payload = effect.give
        if payload >= 0:
            if self._present[payload]:
                self._present[payload] = False
                self._change(now_s, self._place[payload], self._category[payload], -self._size[payload])
            elif not effect.lenient:
                raise PlanError(f"{self._word(step)} frees {name_of(self._names[payload])}, which is not there")

    def _become(self, payload: int, category: int, now_s: float) -> None:
        old = self._category[payload]
        if self._present[payload] and old != category:
            self._change(now_s, self._place[payload], old, -self._size[payload])
            self._change(now_s, self._place[payload], category, self._size[payload])
            self._category[payload] = category

    def _change(self, now_s: float, place: int, category: int, size: int) -> None:
        if size:
            cell = place * _CELLS + category
            self.cells[cell] += size
            self._used[place] += size
            self.log.append((now_s, cell, size))

    def _payload(self, chunk: int, list_name: str, place: Place) -> int:
        key = (chunk, list_name, place)
        index = self._index.get(key)
        if index is None:
            index = self._index[key] = len(self._names)
            self._names.append(Resident(*key))
            self._size.append(self.plan.layout.payload_bytes(chunk, list_name))
            self._place.append(PLACES.index(place))
            self._home.append(CATEGORIES.index(category_of(list_name)))
        return index

    def _resident(self, resident: Resident) -> int:
        return self._payload(resident.chunk, resident.list, resident.place)

    def _effect(self, step: Step) -> _Effect:
        kind = step.kind
        if kind is Kind.COMPUTE:
            m = step.moment
            if m is None or m >= len(self._rise):
                raise PlanError(f"step {step.id}: a compute step needs moment=, below {len(self._rise)}")
            working = self._working
            needs = tuple(self._payload(c, name, Place.GPU) for c in self._reads[m] for name in working)
            becomes = tuple(
                (self._payload(c, name, Place.GPU), _GRAD) for c in self._in_place.get(m, ()) for name in working
            )
            return _Effect(rise=self._rise[m], fall=self._fall[m], needs=needs, becomes=becomes)
        effect = _Effect()
        if kind in (Kind.STASH_OUT, Kind.STASH_IN):  # its bytes are in the tide and in a buffer
            return effect
        taken, freed = takes(step), frees(step)
        if taken is not None:
            effect.take, effect.strict = self._resident(taken[0]), not taken[1]
        if freed is not None:
            effect.give, effect.lenient = self._resident(freed[0]), freed[1]
        if step.chunk is None:
            raise PlanError(f"step {step.id}: a {kind.value} step needs chunk=")
        c = step.chunk
        needs = tuple(self._resident(r) for r in reads(step))
        if kind in _COPIES:
            effect.needs = needs
            if step.completes:
                effect.copied = (needs[0], effect.take)
        elif kind in (Kind.GATHER, Kind.REDUCE_SCATTER):
            effect.needs = needs
            if kind is Kind.GATHER and step.list in OTHERS:
                effect.becomes = ((effect.take, _PARAM),)
        elif kind in (Kind.CPU_UPDATE, Kind.GPU_UPDATE):
            place = Place.HOST if kind is Kind.CPU_UPDATE else Place.GPU
            lists = ("param", *self.plan.layout.state_lists)
            effect.needs = tuple(self._payload(c, name, place) for name in lists)
            if step.completes:
                effect.becomes = ((effect.needs[0], _PARAM),)
        return effect

    def _overwritten_in_place(self) -> dict[int, list[int]]:
        """Returns moment -> chunks whose working list holds only final gradients when the moment ends."""
        w, chunk_of = self.plan.workload, self.plan.layout.chunk_of
        last: dict[tuple[int, int], int] = {}
        for m, tensors in enumerate(w.gradients):
            for t in tensors:
                last[chunk_of[t], w.moments[m].micro_batch] = m
        rows: dict[int, list[int]] = {}
        for where, list_name in gradient_list(self.plan).items():
            if list_name == "param":
                rows.setdefault(last[where], []).append(where[0])
        return rows

    def _word(self, index: int) -> str:
        step = self.plan.steps[index]
        about = "" if step.chunk is None else f" of chunk {step.chunk}"
        at = "" if step.moment is None else f" at moment {step.moment}"
        return f"step {step.id} ({step.kind.value}{about}{at})"

    def _over(self, what: str, place: int) -> PlanError:
        used, budget = self._used[place], self._budget[place]
        return PlanError(
            f"{what} {used} bytes on the {PLACES[place]}, {used - budget} more than its budget of "
            f"{budget} ({format_bytes(budget)})"
        )
