"""Ledger: who is where and how many bytes each place holds. Refuses an illegal move and then changes nothing.

Residents are lists of chunks (`Resident`) and whatever else has a name and bytes: a gradient buffer, an activation
stash. The tide is one number. `apply_start` and `apply_end` follow [Note: what a step does to memory] in core/step.py.
Numbers only: it owns no memory and knows no clock. The simulator and the executor's engine each keep one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

from pstar_sim.core.effects import (
    CATEGORIES,
    NON_MODEL,
    OTHERS,
    category_of,
    final_gradients,
    frees,
    gradient_list,
    reads,
    takes,
    tide_at_cut,
    tide_moves,
)
from pstar_sim.core.layout import Layout
from pstar_sim.core.plan import Plan, Resident
from pstar_sim.core.step import Kind, Place, Step
from pstar_sim.errors import PlanError
from pstar_sim.units import format_bytes

__all__ = ["Ledger"]


class Ledger:
    """capacities: bytes each place may hold, the tide included; a place that is missing may hold nothing.
    buffers: (name, place, bytes) held throughout. initial: residents at the start. tide_bytes: the tide at the start.

    peak_bytes: the most each place has held since the start or `reset_peaks`.
    """

    def __init__(
        self,
        capacities: Mapping[Place, int],
        layout: Layout,
        *,
        initial: Iterable[Resident] = (),
        buffers: Iterable[tuple[str, Place, int]] = (),
        tide_bytes: int = 0,
    ) -> None:
        self.layout = layout
        self.capacities = dict(capacities)
        self._held = dict.fromkeys(capacities, 0)
        self._by_category = {(place, category): 0 for place in capacities for category in CATEGORIES}
        self._residents: dict[tuple[Hashable, Place], tuple[int, str]] = {}
        self._in_use: dict[tuple[Hashable, Place], int] = {}
        self.peak_bytes: dict[Place, int] = dict.fromkeys(capacities, 0)
        self._uses: Sequence[tuple[tuple[int, str], ...]] = ()
        self._peaks: Sequence[int] = ()
        self._falls: Sequence[int] = ()
        for name, place, size in buffers:
            self.take_bytes(name, place, size, "buffer")
        for resident in initial:
            if resident.chunk >= 0:
                self.take(resident)
        self.set_tide(tide_bytes)

    @staticmethod
    def for_plan(plan: Plan) -> Ledger:
        """A ledger at the plan's cut, ready for `apply_start` and `apply_end` of its steps. Raises PlanError where
        what the plan holds at the cut is over a budget already."""
        w = plan.workload
        ledger = Ledger(
            plan.budgets,
            plan.layout,
            initial=plan.initial,
            buffers=plan.buffers,
            tide_bytes=tide_at_cut(w),
        )
        chunk_of = plan.layout.chunk_of
        target = gradient_list(plan)
        uses: list[tuple[tuple[int, str], ...]] = []
        for moment, read, gradients in zip(w.moments, w.reads, final_gradients(w)):
            used = {(chunk_of[t], "param") for t in read}
            used |= {(chunk_of[t], target[chunk_of[t], moment.micro_batch]) for t in gradients}
            if plan.layout.ranks > 1:  # read and written whole
                used |= {(c, others) for c, name in used for others, own in OTHERS.items() if own == name}
            uses.append(tuple(sorted(used)))
        ledger._uses = uses
        ledger._peaks = [m.peak_bytes for m in w.moments]
        ledger._falls = tide_moves(w)[1]
        return ledger

    def bytes(self, place: Place, category: str | None = None) -> int:
        """Bytes `place` holds, all or of one category ("non-model", "param", "grad", "states", "buffer")."""
        if category is None:
            return self._held.get(place, 0)
        return self._by_category.get((place, category), 0)

    def room(self, place: Place) -> int:
        """Bytes that could still be taken."""
        return self.capacities.get(place, 0) - self._held.get(place, 0)

    def holds(self, chunk: int, list_name: str, place: Place) -> bool:
        return (Resident(chunk, list_name, place), place) in self._residents

    def residents(self) -> Iterator[Resident]:
        """Every list of a chunk that is somewhere."""
        return (key for key, _ in self._residents if isinstance(key, Resident))

    def in_use(self, resident: Resident) -> bool:
        return (resident, resident.place) in self._in_use

    def take(self, resident: Resident) -> None:
        """Raises PlanError if it is there already or has no room."""
        size = self.layout.payload_bytes(resident.chunk, resident.list)
        self.take_bytes(resident, resident.place, size, category_of(resident.list))

    def release(self, resident: Resident) -> None:
        """Raises PlanError if it is absent or in use."""
        self.release_bytes(resident, resident.place)

    def take_bytes(self, key: Hashable, place: Place, size: int, category: str = "buffer") -> None:
        """Any other resident, under any key of its own. Raises PlanError as `take` does."""
        if (key, place) in self._residents:
            raise PlanError(f"{_name(key, place)} is there already")
        if category not in CATEGORIES:
            raise PlanError(f"{category!r} is not a category of bytes ({', '.join(CATEGORIES)})")
        self._room_for(size, place, _name(key, place))
        self._residents[key, place] = (size, category)
        self._add(place, category, size)

    def release_bytes(self, key: Hashable, place: Place) -> None:
        """Raises PlanError as `release` does."""
        if (key, place) not in self._residents:
            raise PlanError(f"{_name(key, place)} is not there")
        if (key, place) in self._in_use:
            raise PlanError(f"{_name(key, place)} is in use and cannot be freed")
        size, category = self._residents.pop((key, place))
        self._add(place, category, -size)

    def set_tide(self, tide_bytes: int) -> None:
        """Non-model bytes on the gpu from now on. Raises PlanError if they do not fit."""
        now = self.bytes(Place.GPU, NON_MODEL)
        if tide_bytes > now:
            self._room_for(tide_bytes - now, Place.GPU, f"a tide of {format_bytes(tide_bytes)}")
        if tide_bytes != now:
            self._add(Place.GPU, NON_MODEL, tide_bytes - now)

    def use(self, resident: Resident) -> None:
        """It cannot be freed until `unuse`. Raises PlanError if it is absent."""
        key = (resident, resident.place)
        if key not in self._residents:
            raise PlanError(f"{_name(*key)} is needed and is not there")
        self._in_use[key] = self._in_use.get(key, 0) + 1

    def unuse(self, resident: Resident) -> None:
        key = (resident, resident.place)
        if key not in self._in_use:
            raise PlanError(f"{_name(*key)} is not in use")
        self._in_use[key] -= 1
        if not self._in_use[key]:
            del self._in_use[key]

    def apply_start(self, step: Step) -> None:
        """What the step does when it starts. Raises PlanError naming the step, and changes nothing, if it may not."""
        try:
            if step.kind is Kind.COMPUTE:
                self._begin_moment(step)
                return
            for resident in reads(step):
                if (resident, resident.place) not in self._residents:
                    raise PlanError(f"{_name(resident, resident.place)} is needed and is not there")
            taken = takes(step)
            if taken is not None:
                resident, if_absent = taken
                if not (if_absent and (resident, resident.place) in self._residents):
                    self.take(resident)
        except PlanError as error:
            raise PlanError(f"step {step.id} ({step.kind.value}): {error}") from None

    def apply_end(self, step: Step) -> None:
        """What the step does when it ends. Raises PlanError naming the step, and changes nothing, if it may not."""
        try:
            if step.kind is Kind.COMPUTE:
                moment = self._moment(step)
                for chunk, list_name in self._uses[moment]:
                    self.unuse(Resident(chunk, list_name, Place.GPU))
                if self._falls[moment]:
                    self.set_tide(self._peaks[moment] - self._falls[moment])
                return
            freed = frees(step)
            if freed is not None:
                resident, if_present = freed
                if not (if_present and (resident, resident.place) not in self._residents):
                    self.release(resident)
        except PlanError as error:
            raise PlanError(f"step {step.id} ({step.kind.value}): {error}") from None

    def reset_peaks(self) -> None:
        self.peak_bytes = dict(self._held)

    def _moment(self, step: Step) -> int:
        if step.moment is None or step.moment >= len(self._uses):
            raise PlanError(f"moment {step.moment} is not one of the plan's {len(self._uses)}")
        return step.moment

    def _begin_moment(self, step: Step) -> None:
        moment = self._moment(step)
        used = [Resident(chunk, list_name, Place.GPU) for chunk, list_name in self._uses[moment]]
        for resident in used:
            if (resident, Place.GPU) not in self._residents:
                raise PlanError(f"moment {moment} needs {_name(resident, Place.GPU)}, which is not there")
        self.set_tide(self._peaks[moment])
        for resident in used:
            self.use(resident)

    def _room_for(self, size: int, place: Place, what: str) -> None:
        room = self.room(place)
        if size > room:
            raise PlanError(
                f"{what} takes {size} bytes and {place.value} has {room} left of {self.capacities.get(place, 0)} "
                f"(short by {format_bytes(size - room)})"
            )

    def _add(self, place: Place, category: str, size: int) -> None:
        held = self._held[place] = self._held.get(place, 0) + size
        self._by_category[place, category] = self._by_category.get((place, category), 0) + size
        if held > self.peak_bytes.get(place, 0):
            self.peak_bytes[place] = held


def _name(key: Hashable, place: Place) -> str:
    if isinstance(key, Resident):
        return f"the {key.list} list of chunk {key.chunk} on the {place.value}"
    return f"{key!r} on the {place.value}"
