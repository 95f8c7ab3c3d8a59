"""The ledger: who holds what in which place, in bytes.

A payload is a list of a chunk at a place; it has a number, a size and a category. Three books are kept by the table
EFFECTS in core/step.py. `Moves` books a whole run of a plan, whose steps are compiled once to entries about payloads:
the simulator's. `Holdings` books steps that run one after the other: that of policies, while they write a plan.
`Ledger` books one move at a time: the executor's. Numbers only: no memory, no clock.

[Note: categories] A payload counts as "param", "grad" or "states" by its list, with one exception: once the last
gradient of a chunk has overwritten its working list in place, that payload (and its copies) counts as "grad" until an
update turns it into parameters again or its room is given up. The sum over categories is not touched by this.

[Note: booked at once] Bytes do not decide when a step starts, so a whole run is booked after it happened. The entries
of all events of a run, sorted by payload, say what was where before each of them: the last TAKE or FREE of the payload
says whether it was there, the last entry that gave it a category says which.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pstar_sim.core.effects import (
    CATEGORIES,
    NON_MODEL,
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
from pstar_sim.core.layout import Layout
from pstar_sim.core.plan import Plan, Resident
from pstar_sim.core.step import EFFECTS, UPDATES, Kind, Place, Step
from pstar_sim.errors import PlanError
from pstar_sim.units import format_bytes

__all__ = ["PLACES", "WIDTH", "Changes", "Holdings", "Ledger", "Moves", "Payloads"]

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
_Columns = tuple[list[int], list[Any], list[int]]
"""Entries by column: what, payload, value (the bytes of TIDE, the category of BECOME)."""
_Pattern = list[tuple[int, str, int, int]]
"""(what, list, place, value): entries before the chunk is known."""


class Payloads:
    """Numbers for (chunk, list, place), given as they are met. names, sizes, places, categories: of each; the category
    is that of the list."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._lock = threading.Lock()
        self._number: dict[tuple[int, str, int], int] = {}
        self.names: list[tuple[int, str, int]] = []
        self.sizes: list[int] = []
        self.places: list[int] = []
        self.categories: list[int] = []

    def number(self, chunk: int, list_name: str, place: int) -> int:
        key = (chunk, list_name, place)
        number = self._number.get(key)
        return self._new(key) if number is None else number

    def find(self, chunk: int, list_name: str, place: int) -> int:
        """Its number; -1 for what was never met."""
        return self._number.get((chunk, list_name, place), -1)

    def _new(self, key: tuple[int, str, int]) -> int:
        chunk, list_name, place = key
        with self._lock:  # one that is met by two threads at once has one number
            if key not in self._number:
                number = len(self._number)
                category = CATEGORIES.index(category_of(list_name))
                # Written from `number` on: an interruption may have left some of the columns longer.
                self.names[number:] = [key]
                self.sizes[number:] = [self._layout.payload_bytes(chunk, list_name)]
                self.places[number:] = [place]
                self.categories[number:] = [category]
                self._number[key] = number
            return self._number[key]

    def resident(self, number: int) -> Resident:
        chunk, list_name, place = self.names[number]
        return Resident(chunk, list_name, PLACES[place])


def _columns(entries: Sequence[tuple[int, Any, int]]) -> _Columns:
    return [entry[0] for entry in entries], [entry[1] for entry in entries], [entry[2] for entry in entries]


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
        (what, who, value), counts = self._compile()
        sizes, peak = payloads.sizes, plan.workload.peak_non_model_bytes
        self.cells = [0] * (len(PLACES) * WIDTH)
        self.cells[_GPU * WIDTH + _TIDE] = tide_at_cut([m.peak_bytes for m in plan.workload.moments])
        for payload in initial:
            self.cells[payloads.places[payload] * WIDTH + payloads.categories[payload]] += sizes[payload]
        for _, where, size in plan.buffers:
            self.cells[PLACES.index(where) * WIDTH + _BUFFER] += size
        self.used = [sum(self.cells[p * WIDTH : (p + 1) * WIDTH]) for p in range(len(PLACES))]
        exact = np.int64 if sum(self.cells) + sum(sizes) + peak < _LARGEST else np.object_
        self._first = np.cumsum([0, *counts])  # of each event's entries
        self._what, self._who = np.array(what, dtype=np.int64), np.array(who, dtype=np.int64)
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

    def _compile(self) -> tuple[tuple[list[int], list[int], list[int]], list[int]]:
        """Columns (what, who, value) of the entries of events 0, 1, 2, ... one behind the other, and how many each has:
        event 2 * i is the start of step i, event 2 * i + 1 its end."""
        moments = self._moments()
        number, compute = self.payloads.number, Kind.COMPUTE
        patterns: dict[tuple[int, str | None, int, bool], list[_Columns]] = {}
        what: list[int] = []
        who: list[int] = []
        value: list[int] = []
        counts: list[int] = []
        for step in self.plan.steps:
            chunk = step.chunk
            if step.kind is compute:
                if step.moment is None or step.moment >= len(moments):
                    raise PlanError(f"step {step.id}: a compute step needs moment=, below {len(moments)}")
                for columns in moments[step.moment]:
                    what += columns[0]
                    who += columns[1]
                    value += columns[2]
                    counts.append(len(columns[0]))
                continue
            key = (id(step.kind), step.list, id(step.place), chunk is None)  # members hash slowly
            pattern_of = patterns.get(key)
            if pattern_of is None:
                pattern_of = patterns[key] = [
                    _columns([(entry, (name, place), worth) for entry, name, place, worth in pattern])
                    for pattern in self._pattern(step)
                ]
            for columns in pattern_of:
                what += columns[0]
                who += [number(chunk, name, place) for name, place in columns[1]]  # type: ignore[arg-type]
                value += columns[2]
                counts.append(len(columns[0]))
        return (what, who, value), counts

    def _moments(self) -> list[tuple[_Columns, _Columns]]:
        """Of each moment, the entries of its start and of its end, by column."""
        plan, number = self.plan, self.payloads.number
        working = ("param", "remote") if plan.layout.ranks > 1 else ("param",)
        in_place = self._overwritten_in_place()
        peaks = [m.peak_bytes for m in plan.workload.moments]
        found = []
        for m, (rise, fall, read) in enumerate(zip(*tide_moves(peaks), needed(plan.layout, plan.workload))):
            needs = [number(c, name, _GPU) for c in read for name in working]
            begins = [NEED] * len(needs), needs, [0] * len(needs)
            turned = [number(c, name, _GPU) for c in in_place.get(m, ()) for name in working]
            ends = [BECOME] * len(turned), turned, [_GRAD] * len(turned)
            if rise:
                for column, entry in zip(begins, (TIDE, -1, rise)):
                    column.append(entry)
            if fall:
                for column, entry in zip(ends, (TIDE, -1, -fall)):
                    column.insert(0, entry)
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
        if step.kind in UPDATES:
            place = _HOST if EFFECTS[step.kind].reads is Place.HOST else _GPU
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
        word, payload = self._word(step), name_of(self.payloads.resident(int(self._who[entry])))
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


class Holdings:
    """Who holds what while steps run one after the other.

    residents, buffers: those of the cut. tide: non-model bytes of each moment, which the GPU holds as well; None leaves
    them out.
    used_bytes, peak_bytes: what each place holds now, and the most that it has held, in the order of PLACES.

    A step that takes what is there, or frees what is not, changes nothing: the checker says whether it may.
    """

    def __init__(
        self,
        layout: Layout,
        residents: Iterable[Resident],
        buffers: Iterable[tuple[str, Place, int]] = (),
        tide: Sequence[int] | None = None,
    ) -> None:
        self._layout = layout
        self._lists: dict[tuple[str, int], _Listed] = {}  # (list, place) -> where it is written who has it there
        self._touched: dict[tuple[int, str | None, int], tuple[_Listed | None, _Listed | None]] = {}
        self._rises, self._falls = tide_moves(tide) if tide else ((), ())
        self.used_bytes = [0] * len(PLACES)
        if tide:
            self.used_bytes[_GPU] += tide_at_cut(tide)
        for _, place, size in buffers:
            self.used_bytes[PLACES.index(place)] += size
        for r in residents:
            if r.chunk >= 0:  # else it stands for a buffer
                self._listed(r.list, r.place).chunks.add(r.chunk)
                self.used_bytes[PLACES.index(r.place)] += layout.payload_bytes(r.chunk, r.list)
        self.peak_bytes = list(self.used_bytes)

    def holds(self, chunk: int, list_name: str, place: Place) -> bool:
        return chunk in self._listed(list_name, place).chunks

    def chunks(self, list_name: str, place: Place) -> Set[int]:
        """Those whose list is at the place, now and as it goes on."""
        return self._listed(list_name, place).chunks

    @property
    def residents(self) -> frozenset[Resident]:
        """Who is somewhere."""
        return frozenset(Resident(c, x.name, PLACES[x.place]) for x in self._lists.values() for c in x.chunks)

    def run(self, step: Step) -> None:
        """A step starts and ends."""
        taken, freed = self._of(step)
        if taken is not None or self._rises:
            self._take(step, taken)
        if freed is not None or self._falls:
            self._free(step, freed)

    def begin(self, step: Step) -> None:
        """A step starts: it takes."""
        self._take(step, self._of(step)[0])

    def end(self, step: Step) -> None:
        """A step ends: it frees."""
        self._free(step, self._of(step)[1])

    def _take(self, step: Step, taken: _Listed | None) -> None:
        if taken is not None and step.chunk is not None:
            if step.chunk not in taken.chunks:
                taken.chunks.add(step.chunk)
                self._grow(taken.place, self._layout.payload_bytes(step.chunk, taken.name))
        elif self._rises and step.moment is not None and step.kind is Kind.COMPUTE:
            self._grow(_GPU, self._rises[step.moment])

    def _free(self, step: Step, freed: _Listed | None) -> None:
        if freed is not None and step.chunk is not None:
            if step.chunk in freed.chunks:
                freed.chunks.remove(step.chunk)
                self.used_bytes[freed.place] -= self._layout.payload_bytes(step.chunk, freed.name)
        elif self._falls and step.moment is not None and step.kind is Kind.COMPUTE:
            self.used_bytes[_GPU] -= self._falls[step.moment]

    def _grow(self, place: int, size_bytes: int) -> None:
        used = self.used_bytes[place] = self.used_bytes[place] + size_bytes
        if used > self.peak_bytes[place]:
            self.peak_bytes[place] = used

    def _of(self, step: Step) -> tuple[_Listed | None, _Listed | None]:
        """The lists that steps like this take and free, by the table."""
        key = (id(step.kind), step.list, id(step.place))  # members hash slowly
        touched = self._touched.get(key)
        if touched is None:
            taken, freed = takes(step), frees(step)
            touched = self._touched[key] = (
                None if taken is None else self._listed(taken[0].list, taken[0].place),
                None if freed is None else self._listed(freed[0].list, freed[0].place),
            )
        return touched

    def _listed(self, list_name: str, place: Place) -> _Listed:
        key = (list_name, PLACES.index(place))
        listed = self._lists.get(key)
        if listed is None:
            listed = self._lists[key] = _Listed(*key)
        return listed


@dataclass(slots=True)
class _Listed:
    """Chunks that have this list at this place."""

    name: str
    place: int
    chunks: set[int] = field(default_factory=set)


class Ledger:
    """Who holds what now, one move at a time; a move that is refused changes nothing.

    budget_bytes: of each place (in the order of PLACES); may be lowered. tide_bytes: non-model bytes on the gpu.
    peak_bytes: the most that payloads and buffers held of each place.

    [Note: claims] A payload is claimed, then its memory is asked for, then it is held. A claim counts against the
    budget, so that two threads are never promised the same room, and is withdrawn where memory is refused. A payload
    that leaves is held until its memory is given back. What an interruption left in between is `unfinished`.
    """

    def __init__(self, plan: Plan) -> None:
        self.budget_bytes = [plan.gpu_budget_bytes, plan.host_budget_bytes, plan.nvme_budget_bytes]
        self.tide_bytes = 0
        self._payloads = Payloads(plan.layout)
        self._buffers = [0] * len(PLACES)
        for _, place, size in plan.buffers:
            self._buffers[PLACES.index(place)] += size
        self._used = list(self._buffers)  # claims are in it
        self._claimed = [0] * len(PLACES)
        self.peak_bytes = list(self._buffers)
        self._held: set[int] = set()
        self._unfinished: set[int] = set()

    def holds(self, chunk: int, list_name: str, place: Place) -> bool:
        return self._payloads.find(chunk, list_name, PLACES.index(place)) in self._held

    @property
    def residents(self) -> frozenset[Resident]:
        """Who is somewhere."""
        return frozenset(self._payloads.resident(number) for number in self._held)

    @property
    def unfinished(self) -> list[Resident]:
        """What was claimed and not held yet, or is leaving."""
        return [self._payloads.resident(number) for number in self._unfinished]

    def used_bytes(self, place: Place) -> int:
        """Bytes of payloads, claims and buffers."""
        return self._used[PLACES.index(place)]

    def held_bytes(self, place: Place) -> int:
        """Bytes of payloads and buffers, without claims."""
        p = PLACES.index(place)
        return self._used[p] - self._claimed[p]

    def room_bytes(self, place: Place) -> int:
        """Bytes that could still be claimed."""
        p = PLACES.index(place)
        return self.budget_bytes[p] - self._used[p] - (self.tide_bytes if p == _GPU else 0)

    def claim(self, chunk: int, list_name: str, place: Place) -> int:
        """Its bytes. Raises PlanError where it is held or claimed already, or the place would go over its budget."""
        number = self._number(chunk, list_name, place)
        if number in self._held or number in self._unfinished:
            raise PlanError(f"{list_name} of chunk {chunk} already has memory on the {place.value}")
        size, p = self._payloads.sizes[number], PLACES.index(place)
        if size > (room := self.room_bytes(place)):
            raise PlanError(
                f"{place.value} over budget: {list_name} of chunk {chunk} ({format_bytes(size)}) would make it "
                f"{self.budget_bytes[p] - room + size} bytes, {size - room} more than the plan's {self.budget_bytes[p]}"
            )
        self._unfinished.add(number)
        self._used[p] += size
        self._claimed[p] += size
        return size

    def hold(self, chunk: int, list_name: str, place: Place) -> None:
        """What was claimed has its memory."""
        number, p = self._number(chunk, list_name, place), PLACES.index(place)
        self._claimed[p] -= self._payloads.sizes[number]
        self._held.add(number)
        self._unfinished.discard(number)
        self.peak_bytes[p] = max(self.peak_bytes[p], self._used[p] - self._claimed[p])

    def withdraw(self, chunk: int, list_name: str, place: Place) -> None:
        """What was claimed gets no memory."""
        number, p = self._number(chunk, list_name, place), PLACES.index(place)
        size = self._payloads.sizes[number]
        self._used[p] -= size
        self._claimed[p] -= size
        self._unfinished.discard(number)

    def leave(self, chunk: int, list_name: str, place: Place) -> None:
        """Its memory is about to be given back. Raises PlanError where it is not held."""
        number = self._number(chunk, list_name, place)
        if number not in self._held:
            raise PlanError(f"{list_name} of chunk {chunk} has no memory on the {place.value} to free")
        self._unfinished.add(number)

    def left(self, chunk: int, list_name: str, place: Place) -> int:
        """Its memory is given back; its bytes."""
        number = self._number(chunk, list_name, place)
        size = self._payloads.sizes[number]
        self._held.remove(number)
        self._used[PLACES.index(place)] -= size
        self._unfinished.discard(number)
        return size

    def set_tide(self, tide_bytes: int) -> int:
        """By how much the tide changes. Raises PlanError where a rise does not fit."""
        held = self._used[_GPU] + tide_bytes
        if tide_bytes > self.tide_bytes and held > self.budget_bytes[_GPU]:
            raise PlanError(
                f"gpu over budget: {self._used[_GPU]} bytes of payloads and {tide_bytes} of non-model data "
                f"are {held - self.budget_bytes[_GPU]} more than the plan's {self.budget_bytes[_GPU]}"
            )
        change, self.tide_bytes = tide_bytes - self.tide_bytes, tide_bytes
        return change

    def mend(self) -> None:
        """After an interruption: nobody holds what is unfinished, and the bytes are counted anew."""
        self._held -= self._unfinished
        self._unfinished.clear()
        self._used, self._claimed = list(self._buffers), [0] * len(PLACES)
        for number in self._held:
            self._used[self._payloads.places[number]] += self._payloads.sizes[number]

    def clear(self) -> None:
        """Nobody holds anything from now on. The bytes stay: they are those of the end, from which the past is counted
        back."""
        self._held.clear()
        self._unfinished.clear()

    def _number(self, chunk: int, list_name: str, place: Place) -> int:
        return self._payloads.number(chunk, list_name, PLACES.index(place))
