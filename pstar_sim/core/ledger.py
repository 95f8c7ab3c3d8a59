"""The ledger: who holds what in which place, in bytes.

A payload is a list of a chunk at a place; it has a number, a size and a category. `Moves` are the steps of a plan as
entries about payloads, compiled once from the table EFFECTS in core/step.py. Numbers only: no memory, no clock.

[Note: categories] A payload counts as "param", "grad" or "states" by its list, with one exception: once the last
gradient of a chunk has overwritten its working list in place, that payload (and its copies) counts as "grad" until an
update turns it into parameters again or its room is given up. The sum over categories is not touched by this.

[Note: booked at once] Bytes do not decide when a step starts, so a whole run is booked after it happened. The entries
of all events of a run, sorted by payload, say what was where before each of them: the last TAKE or FREE of the payload
says whether it was there, the last entry that gave it a category says which.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pstar_sim.core.effects import (
    CATEGORIES,
    NON_MODEL,
    category_of,
    final_gradients,
    frees,
    gradient_list,
    name_of,
    needed,
    reads,
    takes,
    tide_at_cut,
    tide_moves,
)
from pstar_sim.core.layout import Layout
from pstar_sim.core.plan import Plan, Resident
from pstar_sim.core.step import OTHERS, Kind, Place, Step
from pstar_sim.errors import PlanError
from pstar_sim.units import format_bytes

__all__ = ["PLACES", "WIDTH", "Changes", "Ledger", "Moves", "Payloads"]

PLACES = (Place.GPU, Place.HOST, Place.NVME)
WIDTH = len(CATEGORIES)
"""Bytes are kept by cell: place * WIDTH + category."""

_GPU, _HOST = PLACES.index(Place.GPU), PLACES.index(Place.HOST)
_TIDE, _PARAM, _GRAD, _BUFFER = (CATEGORIES.index(c) for c in (NON_MODEL, "param", "grad", "buffer"))
_LARGEST = 1 << 62  # sums of bytes beyond are kept as Python's integers

# What an entry says of its payload: it has to be there; the tide changes (no payload); it is taken, or only if absent;
# it is freed, or only if present; a copy reads it; it is what that copy left there; it is of another category now.
NEED, TIDE, TAKE, TAKE_ABSENT, FREE, FREE_PRESENT, READ, COPY, BECOME = range(9)
_COPIES = frozenset({Kind.FETCH, Kind.WRITEBACK, Kind.NVME_READ, Kind.NVME_WRITE})

_Ints = NDArray[np.int64]
_Entries = list[tuple[int, int, int]]
"""(what, payload, value): the value is the bytes of TIDE and the category of BECOME."""
_Pattern = list[tuple[int, str, int, int]]
"""(what, list, place, value): entries before the chunk is known."""


class Payloads:
    """Numbers for (chunk, list, place), given as they are met. names, sizes, places, categories: of each; the category
    is that of the list."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._number: dict[tuple[int, str, int], int] = {}
        self.names: list[tuple[int, str, int]] = []
        self.sizes: list[int] = []
        self.places: list[int] = []
        self.categories: list[int] = []

    def number(self, chunk: int, list_name: str, place: int) -> int:
        key = (chunk, list_name, place)
        number = self._number.get(key)
        if number is None:
            number = self._number[key] = len(self.names)
            self.names.append(key)
            self.sizes.append(self._layout.payload_bytes(chunk, list_name))
            self.places.append(place)
            self.categories.append(CATEGORIES.index(category_of(list_name)))
        return number

    def word(self, number: int) -> str:
        """For messages: "the param list of chunk 3 on the gpu"."""
        chunk, list_name, place = self.names[number]
        return name_of(Resident(chunk, list_name, PLACES[place]))


@dataclass(frozen=True, slots=True)
class Changes:
    """Columns of changes of bytes, in the order in which they happened. event: index into the events of the run. held:
    of each place, its bytes after each change."""

    event: _Ints
    cell: _Ints
    size: NDArray[Any]
    held: tuple[NDArray[Any], ...]


class Moves:
    """What every step of a plan does to the bytes of each place.

    cells: bytes of each cell at the cut. used: of each place. Raises PlanError for a step that lacks what its kind
    needs, and where the plan is over a budget at the cut.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.payloads = payloads = Payloads(plan.layout)
        self._budget = [plan.gpu_budget_bytes, plan.host_budget_bytes, plan.nvme_budget_bytes]
        initial = [payloads.number(r.chunk, r.list, PLACES.index(r.place)) for r in plan.initial if r.chunk >= 0]
        entries, counts = self._compile()
        sizes, peak = payloads.sizes, plan.workload.peak_non_model_bytes
        self.cells = [0] * (len(PLACES) * WIDTH)
        self.cells[_GPU * WIDTH + _TIDE] = tide_at_cut(plan.workload)
        for payload in initial:
            self.cells[payloads.places[payload] * WIDTH + payloads.categories[payload]] += sizes[payload]
        for _, where, size in plan.buffers:
            self.cells[PLACES.index(where) * WIDTH + _BUFFER] += size
        self.used = [sum(self.cells[p * WIDTH : (p + 1) * WIDTH]) for p in range(len(PLACES))]
        exact = np.int64 if sum(self.cells) + sum(sizes) + peak < _LARGEST else np.object_
        what, who, value = zip(*entries)
        self._first = np.cumsum([0, *counts])  # of each event's entries
        self._what, self._who = np.array(what), np.array(who)
        self._value: NDArray[Any] = np.array(value, dtype=exact)
        # Payload -1, the last of these, stands for the tide.
        self._size: NDArray[Any] = np.array([*sizes, 0], dtype=exact)
        self._place, self._home = np.array([*payloads.places, _GPU]), np.array([*payloads.categories, _TIDE])
        self._present = np.zeros(len(sizes) + 1, dtype=bool)
        self._present[initial] = True
        for p, used in enumerate(self.used):
            if used > self._budget[p]:
                raise self._over("between two iterations the plan holds", p, used)

    # -- what each step does ------------------------------------------------------------------------------------------

    def _compile(self) -> tuple[_Entries, list[int]]:
        """Entries of events 0, 1, 2, ... one behind the other, and how many each has: event 2 * i is the start of step
        i, event 2 * i + 1 its end."""
        moments = self._moments()
        number = self.payloads.number
        patterns: dict[tuple[Kind, str | None, Place | None, bool], tuple[_Pattern, _Pattern]] = {}
        entries: _Entries = []
        counts: list[int] = []
        for step in self.plan.steps:
            chunk = step.chunk
            if step.kind is Kind.COMPUTE:
                if step.moment is None or step.moment >= len(moments):
                    raise PlanError(f"step {step.id}: a compute step needs moment=, below {len(moments)}")
                for row in moments[step.moment]:
                    entries += row
                    counts.append(len(row))
                continue
            key = (step.kind, step.list, step.place, chunk is None)
            if key not in patterns:
                patterns[key] = self._pattern(step)
            for pattern in patterns[key]:
                for what, list_name, place, value in pattern:
                    entries.append((what, number(chunk, list_name, place), value))  # type: ignore[arg-type]
                counts.append(len(pattern))
        return entries, counts

    def _moments(self) -> list[tuple[_Entries, _Entries]]:
        """Of each moment, the entries of its start and of its end."""
        plan, number = self.plan, self.payloads.number
        working = ("param", "remote") if plan.layout.ranks > 1 else ("param",)
        in_place = self._overwritten_in_place()
        found = []
        for m, (rise, fall, read) in enumerate(zip(*tide_moves(plan.workload), needed(plan.layout, plan.workload))):
            begins = [(NEED, number(c, name, _GPU), 0) for c in read for name in working]
            ends = [(BECOME, number(c, name, _GPU), _GRAD) for c in in_place.get(m, ()) for name in working]
            if rise:
                begins.append((TIDE, -1, rise))
            if fall:
                ends.insert(0, (TIDE, -1, -fall))
            found.append((begins, ends))
        return found

    def _pattern(self, step: Step) -> tuple[_Pattern, _Pattern]:
        """What the start and the end of a step like this do to the payloads of its chunk."""
        begins: _Pattern = []
        ends: _Pattern = []
        if step.kind in (Kind.STASH_OUT, Kind.STASH_IN):  # its bytes are in the tide and in a buffer
            return begins, ends
        taken, freed = takes(step), frees(step)
        if step.chunk is None:
            raise PlanError(f"step {step.id}: a {step.kind.value} step needs chunk=")
        if step.kind in (Kind.CPU_ADAM, Kind.GPU_ADAM):
            place = _GPU if step.kind is Kind.GPU_ADAM else _HOST
            begins += [(NEED, name, place, 0) for name in ("param", *self.plan.layout.state_lists)]
            ends.append((BECOME, "param", place, _PARAM))
        begins += [(NEED, r.list, PLACES.index(r.place), 0) for r in reads(step)]
        if taken is not None:
            resident, lenient = taken
            name, place = resident.list, PLACES.index(resident.place)
            begins.append((TAKE_ABSENT if lenient else TAKE, name, place, 0))
            if step.kind in _COPIES:
                ends += [(READ, *begins[0][1:]), (COPY, name, place, 0)]
            elif step.kind is Kind.GATHER:
                ends.append((BECOME, name, place, _PARAM))
        if freed is not None:
            resident, lenient = freed
            ends.append((FREE_PRESENT if lenient else FREE, resident.list, PLACES.index(resident.place), 0))
        return begins, ends

    def _overwritten_in_place(self) -> dict[int, list[int]]:
        """Moment -> chunks whose working list holds nothing but final gradients when it ends."""
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

    # -- what a run did -----------------------------------------------------------------------------------------------

    def book(self, events: Sequence[int]) -> Changes:
        """[Note: booked at once] events: in the order in which they happened, from the cut on. Raises PlanError for the
        first step that takes what is there, frees what is not, needs what is absent, or brings a place over the plan's
        budget."""
        run = np.array(events, dtype=np.int64)
        first = self._first[run]
        counts = self._first[run + 1] - first
        event = np.repeat(np.arange(len(run)), counts)  # of each entry of the run
        entry = np.arange(len(event)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        at, cell, size, wrong = self._changes(entry)
        place = cell // WIDTH
        held = tuple(used + np.cumsum(np.where(place == p, size, 0)) for p, used in enumerate(self.used))
        beyond = [(int(np.argmax(row > budget)), p) for p, (row, budget) in enumerate(zip(held, self._budget))
                  if len(row) and row.max() > budget]  # fmt: skip
        n, p = min(beyond, default=(-1, -1))
        if n >= 0 and (wrong is None or at[n] < wrong):
            raise self._beyond(int(run[event[at[n]]]) // 2, int(entry[at[n]]), p, int(held[p][n]))
        if wrong is not None:
            raise self._contradiction(int(run[event[wrong]]) // 2, int(entry[wrong]))
        return Changes(event[at], cell, size, held)

    def _changes(self, entry: _Ints) -> tuple[_Ints, _Ints, NDArray[Any], int | None]:
        """Of every change of bytes in a run of these entries: which entry makes it, cell and size; and the first entry
        that contradicts what is there. Arrays are in order of the payloads, entries of one in the order of the run."""
        home, size = self._home, self._size
        order = np.argsort(self._who[entry], kind="stable")
        which = entry[order]
        what, who, value = self._what[which], self._who[which], self._value[which]
        here = np.arange(len(order))
        opens = np.maximum.accumulate(np.where(np.diff(who, prepend=-2) != 0, here, 0))  # first entry of the payload

        def last(rows: NDArray[np.bool_]) -> _Ints:
            """Of each entry, the last one of `rows` before it about the same payload, -1 for none."""
            before = np.concatenate(([-1], np.maximum.accumulate(np.where(rows, here, -1))[:-1]))
            return np.where(before >= opens, before, -1)

        takes, frees = (what == TAKE) | (what == TAKE_ABSENT), (what == FREE) | (what == FREE_PRESENT)
        moved = last(takes | frees)
        there = np.where(moved >= 0, takes[moved], self._present[who])
        against = np.where(there, what == TAKE, (what == NEED) | (what == FREE))
        takes, frees, turns = takes & ~there, frees & there, ((what == BECOME) | (what == COPY)) & there
        # Categories. A copy gives the one that its READ, the entry before in the run, found: it points to the entry
        # that had given it to the source, which may be a copy itself.
        given = last(takes | turns)
        category = np.where(what == BECOME, value, home[who]).astype(np.int64)
        copies = np.flatnonzero((what == COPY) & turns)
        position = np.empty_like(order)
        position[order] = here
        read = position[order[copies] - 1]
        source = here.copy()
        source[copies] = np.where(given[read] >= 0, given[read], copies)
        category[copies] = home[who[read]]
        while not np.array_equal(further := source[source], source):
            source = further
        category = category[source]
        old = np.where(given >= 0, category[given], home[who])
        taken, freed = np.flatnonzero(takes), np.flatnonzero(frees)
        turned, tide = np.flatnonzero(turns & (old != category)), np.flatnonzero(what == TIDE)
        rows = np.concatenate((taken, freed, turned, turned, tide))
        sizes = np.concatenate(
            (size[who[taken]], -size[who[freed]], -size[who[turned]], size[who[turned]], value[tide])
        )
        kinds = np.concatenate((category[taken], old[freed], old[turned], category[turned], 0 * tide + _TIDE))
        places = self._place[who[rows]]
        happened = np.argsort(order[rows], kind="stable")
        happened = happened[sizes[happened] != 0]
        cells = (places * WIDTH + kinds)[happened]
        return order[rows][happened], cells, sizes[happened], int(order[against].min()) if against.any() else None

    # -- words --------------------------------------------------------------------------------------------------------

    def _contradiction(self, step: int, entry: int) -> PlanError:
        word, payload = self._word(step), self.payloads.word(int(self._who[entry]))
        if self._what[entry] == NEED:
            return PlanError(f"{word} needs {payload}, which is not there")
        if self._what[entry] == TAKE:
            return PlanError(f"{word} takes {payload}, which is there already")
        return PlanError(f"{word} frees {payload}, which is not there")

    def _beyond(self, step: int, entry: int, place: int, used: int) -> PlanError:
        word = self._word(step)
        if self._what[entry] == TIDE:
            return self._over(f"{word} raises the tide by {self._value[entry]} bytes: the gpu holds", place, used)
        return self._over(f"{word} takes {self._size[self._who[entry]]} bytes: the place holds", place, used)

    def _over(self, what: str, place: int, used: int) -> PlanError:
        budget = self._budget[place]
        return PlanError(
            f"{what} {used} bytes on the {PLACES[place]}, {used - budget} more than its budget of "
            f"{budget} ({format_bytes(budget)})"
        )

    def _word(self, index: int) -> str:
        step = self.plan.steps[index]
        about = "" if step.chunk is None else f" of chunk {step.chunk}"
        at = "" if step.moment is None else f" at moment {step.moment}"
        return f"step {step.id} ({step.kind.value}{about}{at})"


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
