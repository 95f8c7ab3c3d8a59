"""The ledger: which payload is in which place, in bytes.

There are three books, all by the table EFFECTS in core/step.py: `Moves`, for the simulator, books a whole run of a
plan; `Holdings`, for policies, steps that run one after the other; `Ledger`, for the executor, one move at a time.

[Note: categories] The list of a payload gives its category, "param", "grad" or "states". But once the last gradient of
a chunk has overwritten its working list, that payload (and its copies) counts as "grad" until an update or the end of
its memory.

[Note: booked at once] Bytes do not decide when a step starts, so a run is booked after it happened. Of its entries by
payload, the last TAKE or FREE says whether a payload was there, and its last entry with a category which it had.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pstar_sim.core.effects import (
    CATEGORIES,
    NON_MODEL,
    category_of,
    frees,
    name_of,
    needed,
    overwritten_in_place,
    reads,
    takes,
    tide_at_cut,
    tide_moves,
)
from pstar_sim.core.layout import Layout
from pstar_sim.core.plan import Plan, Resident
from pstar_sim.core.step import EFFECTS, UPDATES, Kind, Place, Step
from pstar_sim.core.trips import TRIPS
from pstar_sim.errors import PlanError
from pstar_sim.units import format_bytes

PLACES = (Place.GPU, Place.HOST, Place.NVME)
WIDTH = len(CATEGORIES)
"""Bytes are kept by cell: place * WIDTH + category."""

_GPU, _HOST = PLACES.index(Place.GPU), PLACES.index(Place.HOST)
_TIDE, _PARAM, _GRAD, _BUFFER = (CATEGORIES.index(c) for c in (NON_MODEL, "param", "grad", "buffer"))
_LARGEST = 1 << 62  # larger sums of bytes are kept as Python integers

# Kinds of entries about a payload: it has to be there; the tide changes (no payload); it is taken; it is taken if
# absent; it is freed; it is freed if present; a copy reads it; it becomes the target of that copy; its category
# changes.
NEED, TIDE, TAKE, TAKE_ABSENT, FREE, FREE_PRESENT, READ, COPY, BECOME = range(9)
_LIST_COPIES = frozenset({Kind.FETCH, Kind.WRITEBACK, Kind.NVME_READ, Kind.NVME_WRITE})

_Ints = NDArray[np.signedinteger[Any]]
_Pattern = list[tuple[int, str, int, int]]
"""(kind of entry, list, place, value): entries before the chunk is known. value: the bytes of TIDE, the category of
BECOME."""


class Payloads:
    """names: number -> (chunk, list, place).
    places: number -> index into PLACES.
    categories: number -> index into CATEGORIES, by the payload's list.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._lock = threading.Lock()
        self.numbers: dict[tuple[int, str, int], int] = {}
        self.names: list[tuple[int, str, int]] = []
        self.sizes: list[int] = []
        self.places: list[int] = []
        self.categories: list[int] = []

    def number(self, chunk: int, list_name: str, place: int) -> int:
        key = (chunk, list_name, place)
        number = self.numbers.get(key)
        return self._new(key) if number is None else number

    def _new(self, key: tuple[int, str, int]) -> int:
        chunk, list_name, place = key
        with self._lock:  # a payload that two threads meet at once gets one number
            if key not in self.numbers:
                number = len(self.numbers)
                # Written from `number` on: an interruption may have left some of the columns longer.
                self.names[number:] = [key]
                self.sizes[number:] = [self._layout.payload_bytes(chunk, list_name)]
                self.places[number:] = [place]
                self.categories[number:] = [_category(list_name)]
                self.numbers[key] = number
            return self.numbers[key]

    def resident(self, number: int) -> Resident:
        chunk, list_name, place = self.names[number]
        return Resident(chunk, list_name, PLACES[place])


def _category(list_name: str) -> int:
    return CATEGORIES.index(category_of(list_name))


def _spread(first: _Ints, counts: _Ints) -> _Ints:
    """first, first + 1, ..., first + count - 1 of each pair."""
    spread: _Ints = np.repeat(first - (np.cumsum(counts, dtype=counts.dtype) - counts), counts)
    spread += np.arange(len(spread), dtype=spread.dtype)
    return spread


@dataclass(frozen=True, slots=True)
class Changes:
    """Columns, in the order of the changes.

    event: index into the events of the run.
    cell: place * WIDTH + category.
    size: negative when freed.
    held: per place, after each change.
    """

    event: _Ints
    cell: _Ints
    size: NDArray[Any]
    held: tuple[NDArray[Any], ...]


class Moves:
    """cells: bytes of each cell at the cut.

    Raises PlanError for a step that lacks a field its kind needs, and for a plan over a budget at the cut.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._budget = [plan.gpu_budget_bytes, plan.host_budget_bytes, plan.nvme_budget_bytes]
        self._lists: dict[tuple[str, int], int] = {}
        self.cells = [0] * (len(PLACES) * WIDTH)
        self._tide = [m.peak_bytes for m in plan.workload.moments]
        self.cells[_GPU * WIDTH + _TIDE] = tide_at_cut(self._tide)
        initial = self._book_initial()
        for _, where, size in plan.buffers:
            self.cells[PLACES.index(where) * WIDTH + _BUFFER] += size
        self.used = [sum(self.cells[p * WIDTH : (p + 1) * WIDTH]) for p in range(len(PLACES))]
        what, who, value, counts = self._compile()
        self._what = what.astype(np.int8)
        self._first = np.append(0, np.cumsum(counts)).astype(np.int32)  # first entry of each event
        # Payload -1, the last of these, stands for the tide.
        sizes = [size or 0 for name, _ in self._lists for size in plan.layout.list_bytes(name)] + [0]
        exact = np.int64 if sum(self.cells) + sum(sizes) + plan.workload.peak_non_model_bytes < _LARGEST else np.object_
        self._value: NDArray[Any] = value.astype(exact)
        self._size: NDArray[Any] = np.array(sizes, dtype=exact)
        count = len(plan.layout.chunks)
        self._place = np.append(np.repeat([p for _, p in self._lists], count), _GPU).astype(np.int8)
        self._home = np.append(np.repeat([_category(name) for name, _ in self._lists], count), _TIDE).astype(np.int8)
        self._present = np.zeros(len(sizes), dtype=bool)
        self._present[initial] = True
        self._who = who.astype(np.min_scalar_type(-len(sizes)))  # small numbers are sorted faster
        for p, used in enumerate(self.used):
            if used > self._budget[p]:
                raise self._over("between two iterations the plan holds", p, used)

    def _book_initial(self) -> list[int]:
        plan = self.plan
        at_cut: defaultdict[tuple[str, Place], list[int]] = defaultdict(list)
        for r in plan.initial:
            if r.chunk >= 0:
                at_cut[r.list, r.place].append(r.chunk)
        payloads: list[int] = []
        for (name, place), chunks in at_cut.items():
            p = PLACES.index(place)
            self.cells[p * WIDTH + _category(name)] += sum([plan.layout.payload_bytes(c, name) for c in chunks])
            first = self._first_of(name, p)
            payloads += [first + c for c in chunks]
        return payloads

    # -- what each step does ------------------------------------------------------------------------------------------

    def _first_of(self, list_name: str, place: int) -> int:
        return self._lists.setdefault((list_name, place), len(self._lists) * len(self.plan.layout.chunks))

    def _resident(self, payload: int) -> Resident:
        n, chunk = divmod(payload, len(self.plan.layout.chunks))
        list_name, place = list(self._lists)[n]
        return Resident(chunk, list_name, PLACES[place])

    def _compile(self) -> tuple[_Ints, _Ints, _Ints, _Ints]:
        """Columns (kind, payload, value) of the entries of events 0, 1, 2, ..., and their number for each. Event 2 * i
        is step i's start, 2 * i + 1 its end.

        Entries are written once for all steps that differ in their chunk alone, as if it were chunk 0 (updates: per
        kind of states), and once for all steps of a moment.
        """
        moments, compute = len(self.plan.workload.moments), Kind.COMPUTE
        patterns = self._moments()
        alike: dict[tuple[Kind, str | None, Place | None, bool, bool, tuple[str, ...]], int] = {}
        names = {c.index: self.plan.layout.states_of(c.index).names for c in self.plan.layout.chunks}
        number: list[int] = []
        chunk: list[int] = []
        for step in self.plan.steps:
            if step.kind is compute:
                if step.moment is None or not 0 <= step.moment < moments:
                    raise PlanError(f"step {step.id}: a compute step needs moment=, from 0 to {moments - 1}")
                number.append(step.moment)
                chunk.append(0)
                continue
            states = names.get(step.chunk or 0, ()) if step.kind in UPDATES else ()
            key = (step.kind, step.list, step.place, step.chunk is None, step.completes, states)
            n = alike.get(key)
            if n is None:
                n = alike[key] = moments + len(alike)
                for at_end, pattern in enumerate(self._pattern(step, states)):
                    entries = [
                        (2 * n + at_end, what, self._first_of(name, p), value) for what, name, p, value in pattern
                    ]
                    patterns.append(np.array(entries, dtype=np.int64).reshape(-1, 4).T)
            number.append(n)
            chunk.append(step.chunk or 0)
        if max(map(abs, chunk), default=0) > np.iinfo(np.int64).max:
            self.plan.layout.payload_bytes(max(chunk, key=abs), "param")  # raises
        pattern, what, who, value = np.concatenate(patterns, axis=1)
        order = np.argsort(pattern, kind="stable")
        counts = np.bincount(pattern, minlength=2 * (moments + len(alike)))
        of_event = (2 * np.array(number)[:, np.newaxis] + (0, 1)).ravel()
        entry = order[_spread((np.cumsum(counts) - counts)[of_event], counts[of_event])]
        about = np.repeat(np.repeat(chunk, 2), counts[of_event])
        self._know(who[entry], about)
        return what[entry], who[entry] + about, value[entry], counts[of_event]

    def _know(self, first: _Ints, chunk: _Ints) -> None:
        layout, (lists, _) = self.plan.layout, zip(*self._lists)
        chunks = len(layout.chunks)
        there = np.array([[size is not None for size in layout.list_bytes(name)] for name in lists])
        inside = (chunk >= 0) & (chunk < chunks)
        known = (first < 0) | inside & there[first // chunks, np.where(inside, chunk, 0)]
        if not known.all():
            n = int(np.argmin(known))
            layout.payload_bytes(int(chunk[n]), lists[int(first[n]) // chunks])

    def _moments(self) -> list[_Ints]:
        plan = self.plan
        lists = ("param", "remote") if plan.layout.ranks > 1 else ("param",)
        working = np.array([self._first_of(name, _GPU) for name in lists])
        rise, fall = map(np.array, tide_moves(self._tide))

        def about(what: int, moment: _Ints, chunk: _Ints, value: int, *, at_end: int) -> _Ints:
            """For each working list of these chunks at these moments."""
            moment = np.repeat(moment, len(working))
            who = (chunk[:, np.newaxis] + working).ravel()
            return np.stack([2 * moment + at_end, np.full_like(who, what), who, np.full_like(who, value)])

        def of_tide(change: _Ints, *, at_end: int) -> _Ints:
            moment = np.flatnonzero(change)
            return np.stack([2 * moment + at_end, np.full_like(moment, TIDE), np.full_like(moment, -1), change[moment]])

        read = needed(plan.layout, plan.workload)
        reading = np.repeat(np.arange(len(read)), list(map(len, read)))
        overwriting, overwritten = np.array(overwritten_in_place(plan), dtype=np.int64).reshape(-1, 2).T
        return [
            about(NEED, reading, np.fromiter(chain.from_iterable(read), np.int64), 0, at_end=0),
            of_tide(rise, at_end=0),
            of_tide(-fall, at_end=1),
            about(BECOME, overwriting, overwritten, _GRAD, at_end=1),
        ]

    def _pattern(self, step: Step, states: Iterable[str]) -> tuple[_Pattern, _Pattern]:
        """Of start and end. A part but the last leaves no category: [Note: parts of a step] in step.py.

        states: changed by an update.
        """
        begins: _Pattern = []
        ends: _Pattern = []
        if step.kind in TRIPS:  # its bytes are in the tide, those of a stash also in a buffer
            return begins, ends
        taken, freed = takes(step), frees(step)
        if step.chunk is None:
            raise PlanError(f"step {step.id}: a {step.kind.value} step needs chunk=")
        if step.kind in UPDATES:
            place = _HOST if EFFECTS[step.kind].reads is Place.HOST else _GPU
            begins += [(NEED, name, place, 0) for name in ("param", *states)]
            ends += [(BECOME, "param", place, _PARAM)] if step.completes else []
        begins += [(NEED, r.list, PLACES.index(r.place), 0) for r in reads(step)]
        if taken is not None:
            resident, lenient = taken
            name, place = resident.list, PLACES.index(resident.place)
            begins.append((TAKE_ABSENT if lenient else TAKE, name, place, 0))
            if step.kind in _LIST_COPIES and step.completes:
                ends += [(READ, *begins[0][1:]), (COPY, name, place, 0)]
            elif step.kind is Kind.GATHER:
                ends.append((BECOME, name, place, _PARAM))
        if freed is not None:
            resident, lenient = freed
            ends.append((FREE_PRESENT if lenient else FREE, resident.list, PLACES.index(resident.place), 0))
        return begins, ends

    # -- what a run did -----------------------------------------------------------------------------------------------

    def book(self, events: Sequence[int]) -> Changes:
        """[Note: booked at once]

        events: in order of time, from the cut on.

        Raises PlanError for the first step that takes a payload already there, frees or needs an absent one, or brings
        a place over budget.
        """
        run = np.array(events, dtype=np.int64)
        counts = self._first[run + 1] - self._first[run]
        event = np.repeat(np.arange(len(run), dtype=np.int32), counts)  # per entry of the run
        entry = _spread(self._first[run], counts)
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
        """(entry, cell, bytes), by payload in the order of the run, and the first entry that contradicts its place."""
        home, size = self._home, self._size
        order = np.argsort(self._who[entry], kind="stable")
        which = entry[order]
        what, who = self._what[which], self._who[which]
        here = np.arange(len(order), dtype=np.int32)
        opens = np.maximum.accumulate(np.where(np.diff(who, prepend=-2) != 0, here, 0))  # first entry of the payload

        def last(rows: NDArray[np.bool_]) -> _Ints:
            """Of the same payload, or -1."""
            before = np.full_like(here, -1)
            np.maximum.accumulate(np.where(rows, here, before)[:-1], out=before[1:])
            before[before < opens] = -1
            return before

        takes, frees = (what == TAKE) | (what == TAKE_ABSENT), (what == FREE) | (what == FREE_PRESENT)
        moved = last(takes | frees)
        there = np.where(moved >= 0, takes[moved], self._present[who])
        against = np.where(there, what == TAKE, (what == NEED) | (what == FREE))
        takes, frees, turns = takes & ~there, frees & there, ((what == BECOME) | (what == COPY)) & there
        # Categories. A copy has the category that its READ (the entry before it in the run) found. It points to the
        # entry that gave this category to the source, which may be a copy itself.
        given = last(takes | turns)
        category = home[who]
        become = np.flatnonzero(what == BECOME)
        category[become] = self._value[which[become]]
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
            (size[who[taken]], -size[who[freed]], -size[who[turned]], size[who[turned]], self._value[which[tide]])
        )
        kinds = np.concatenate((category[taken], old[freed], old[turned], category[turned], 0 * tide + _TIDE))
        places = self._place[who[rows]]
        happened = np.argsort(order[rows], kind="stable")
        happened = happened[sizes[happened] != 0]
        cells = (places * WIDTH + kinds)[happened]
        return order[rows][happened], cells, sizes[happened], int(order[against].min()) if against.any() else None

    # -- words --------------------------------------------------------------------------------------------------------

    def _contradiction(self, step: int, entry: int) -> PlanError:
        word, payload = self._word(step), name_of(self._resident(int(self._who[entry])))
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
    """While steps run one after the other.

    tide: per moment; None leaves them out.
    used_bytes, peak_bytes: in the order of PLACES.

    A step that takes a payload already there, or frees an absent one, changes nothing.
    """

    def __init__(
        self,
        layout: Layout,
        residents: Iterable[Resident],
        buffers: Iterable[tuple[str, Place, int]] = (),
        tide: Sequence[int] | None = None,
    ) -> None:
        self._layout = layout
        self._lists: dict[tuple[str, int], _Listed] = {}  # (list, place) -> its record of chunks
        self._touched: dict[tuple[int, str | None, int], tuple[_Listed | None, _Listed | None]] = {}
        self._rises, self._falls = tide_moves(tide) if tide else ((), ())
        self.used_bytes = [0] * len(PLACES)
        if tide:
            self.used_bytes[_GPU] += tide_at_cut(tide)
        for _, place, size in buffers:
            self.used_bytes[PLACES.index(place)] += size
        for r in residents:
            if r.chunk >= 0:  # chunk -1 stands for a buffer
                self._listed(r.list, r.place).chunks.add(r.chunk)
                self.used_bytes[PLACES.index(r.place)] += layout.payload_bytes(r.chunk, r.list)
        self.peak_bytes = list(self.used_bytes)
        self._at_cut = {key: frozenset(listed.chunks) for key, listed in self._lists.items()}

    def holds(self, chunk: int, list_name: str, place: Place) -> bool:
        return chunk in self._listed(list_name, place).chunks

    def chunks(self, list_name: str, place: Place) -> Set[int]:
        """A live view."""
        return self._listed(list_name, place).chunks

    @property
    def changed(self) -> frozenset[Resident]:
        """What came or left since the cut."""
        return frozenset(
            Resident(c, name, PLACES[p])
            for (name, p), listed in self._lists.items()
            for c in listed.chunks ^ self._at_cut.get((name, p), frozenset())
        )

    def run(self, step: Step) -> None:
        taken, freed = self._of(step)
        if taken is not None or self._rises:
            self._take(step, taken)
        if freed is not None or self._falls:
            self._free(step, freed)

    def begin(self, step: Step) -> None:
        self._take(step, self._of(step)[0])

    def end(self, step: Step) -> None:
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
        key = (id(step.kind), step.list, id(step.place))  # members hash slowly
        touched = self._touched.get(key)
        if touched is None:
            taken, freed = takes(step), frees(step)
            touched = self._touched[key] = (
                None if taken is None else self._listed(taken.resident.list, taken.resident.place),
                None if freed is None else self._listed(freed.resident.list, freed.resident.place),
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
    name: str
    place: int
    chunks: set[int] = field(default_factory=set)


class Ledger:
    """What is held now; a refused move changes nothing.

    budget_bytes: in the order of PLACES; may be lowered.
    tide_bytes: non-model bytes on the gpu.
    peak_bytes: with buffers, in each place.

    [Note: claims] A payload is claimed, then allocated, then held. A claim counts against the budget, so two threads
    never get the same room, and is withdrawn if the allocation fails. A payload that leaves is held until its memory is
    released. `unfinished` has what an interruption left in between.
    """

    def __init__(self, plan: Plan) -> None:
        self.budget_bytes = [plan.gpu_budget_bytes, plan.host_budget_bytes, plan.nvme_budget_bytes]
        self.tide_bytes = 0
        self._payloads = Payloads(plan.layout)
        self._buffers = [0] * len(PLACES)
        for _, place, size in plan.buffers:
            self._buffers[PLACES.index(place)] += size
        self._used = list(self._buffers)  # includes claims
        self._claimed = [0] * len(PLACES)
        self.peak_bytes = list(self._buffers)
        self._held: set[int] = set()
        self._unfinished: set[int] = set()

    def holds(self, chunk: int, list_name: str, place: Place) -> bool:
        return self._payloads.numbers.get((chunk, list_name, PLACES.index(place)), -1) in self._held

    @property
    def residents(self) -> frozenset[Resident]:
        return frozenset(self._payloads.resident(number) for number in self._held)

    @property
    def unfinished(self) -> list[Resident]:
        """Claimed but not held yet, or about to be released."""
        return [self._payloads.resident(number) for number in self._unfinished]

    def used_bytes(self, place: Place) -> int:
        """Payloads, claims and buffers count."""
        return self._used[PLACES.index(place)]

    def held_bytes(self, place: Place) -> int:
        """Without claims."""
        p = PLACES.index(place)
        return self._used[p] - self._claimed[p]

    def room_bytes(self, place: Place) -> int:
        p = PLACES.index(place)
        return self.budget_bytes[p] - self._used[p] - (self.tide_bytes if p == _GPU else 0)

    def claim(self, chunk: int, list_name: str, place: Place) -> int:
        """Raises PlanError if it is held or claimed already, or the place would go over budget."""
        number = self._number(chunk, list_name, place)
        if number in self._held or number in self._unfinished:
            raise PlanError(f"{list_name} of chunk {chunk} already has memory on the {place.value}")
        size, p = self._payloads.sizes[number], PLACES.index(place)
        if size > (room := self.room_bytes(place)):
            raise PlanError(
                f"{place.value} over budget: {list_name} of chunk {chunk} ({format_bytes(size)}) would bring it to "
                f"{self.budget_bytes[p] - room + size} bytes, {size - room} more than the plan's {self.budget_bytes[p]}"
            )
        self._unfinished.add(number)
        self._used[p] += size
        self._claimed[p] += size
        return size

    def hold(self, chunk: int, list_name: str, place: Place) -> None:
        number, p = self._number(chunk, list_name, place), PLACES.index(place)
        self._claimed[p] -= self._payloads.sizes[number]
        self._held.add(number)
        self._unfinished.discard(number)
        self.peak_bytes[p] = max(self.peak_bytes[p], self._used[p] - self._claimed[p])

    def withdraw(self, chunk: int, list_name: str, place: Place) -> None:
        number, p = self._number(chunk, list_name, place), PLACES.index(place)
        size = self._payloads.sizes[number]
        self._used[p] -= size
        self._claimed[p] -= size
        self._unfinished.discard(number)

    def begin_release(self, chunk: int, list_name: str, place: Place) -> None:
        """Raises PlanError if the payload is not held."""
        number = self._number(chunk, list_name, place)
        if number not in self._held:
            raise PlanError(f"{list_name} of chunk {chunk} has no memory on the {place.value} to free")
        self._unfinished.add(number)

    def end_release(self, chunk: int, list_name: str, place: Place) -> int:
        number = self._number(chunk, list_name, place)
        size = self._payloads.sizes[number]
        self._held.remove(number)
        self._used[PLACES.index(place)] -= size
        self._unfinished.discard(number)
        return size

    def set_tide(self, tide_bytes: int) -> int:
        """Returns the change. Raises PlanError if a rise does not fit."""
        held = self._used[_GPU] + tide_bytes
        if tide_bytes > self.tide_bytes and held > self.budget_bytes[_GPU]:
            raise PlanError(
                f"gpu over budget: {self._used[_GPU]} bytes of payloads and {tide_bytes} of non-model data "
                f"are {held - self.budget_bytes[_GPU]} more than the plan's {self.budget_bytes[_GPU]}"
            )
        change, self.tide_bytes = tide_bytes - self.tide_bytes, tide_bytes
        return change

    def mend(self) -> None:
        """After an interruption, unfinished payloads are not held."""
        self._held -= self._unfinished
        self._unfinished.clear()
        self._used, self._claimed = list(self._buffers), [0] * len(PLACES)
        for number in self._held:
            self._used[self._payloads.places[number]] += self._payloads.sizes[number]

    def clear(self) -> None:
        """Earlier samples are counted back from `used_bytes`, which stays."""
        self._held.clear()
        self._unfinished.clear()

    def _number(self, chunk: int, list_name: str, place: Place) -> int:
        return self._payloads.number(chunk, list_name, PLACES.index(place))
