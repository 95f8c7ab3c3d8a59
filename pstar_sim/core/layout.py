"""Chunk layout: the chunk and the position of each parameter.

[Note: why the chunk size is searched] Power-of-two chunks filled in order waste 20-110 % once biases, norms and
vocabulary matrices are counted. So small tensors go into resident chunks, a tensor larger than a chunk gets one of its
exact size, and the uniform size is the multiple of a granule that wastes least. Tensors share a chunk only if alike in
being frozen, dtype, optimizer group, states (optimizers.py) and the ranks that have them; a tied tensor takes no room.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, log2, sqrt
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from pstar_sim.core.step import OTHERS, Part
from pstar_sim.dtypes import MASTER, STORAGE
from pstar_sim.errors import PlanError
from pstar_sim.units import KIB, MIB
from pstar_sim.workload.optimizers import MASTER_LIST, OptimizerSpec, States
from pstar_sim.workload.workload import UseKind, Workload

PART_ALIGN = 64  # elements
ALIGN = 16  # elements: 64 bytes in fp32, the alignment of vectorised kernels and copy engines
ALIGN_BYTES = 4 * ALIGN  # of the masters, which updates work on: pure bf16 has twice as many elements in a vector
# benchmarks/search_constants.md says what each of these constants buys. Plans of small models with smaller chunks are
# a little faster in the cost model, which ignores the executor's cost of a further step.
GRANULE_BYTES = 2 * MIB  # chunk sizes are multiples of the granule, as allocators hand out memory
WANTED_CHUNKS = 24  # no size exceeds the model's bytes over this: fewer chunks leave no choice of order
USUAL_BYTES = 128 * MIB  # wanted size, and its half: larger chunks overlap less, smaller chunks copy slower
USUAL_PART = 32  # for a small model it aims at this part of the model and its half
MOST_WASTE = 0.018  # a size that wastes more is taken only if no size wastes less
OVERSIZE = 0.3  # weight in the score: share of the bytes in chunks that hold one larger tensor each
OCTAVES = 0.12  # weight in the score: octaves between the chunks and the wanted sizes
WASTE = 10.0  # weight in the score: share of padding
GOOD = 0.2  # score at which no finer granule is tried
MOST_SIZES = 96  # sizes that are scored per granule: bounds the time that a large model takes
MOST_STARTS = 64  # tensors at which a run of a candidate's size may begin: bounds the time and the memory
_SEARCHED = ("chunk bytes",)  # key of `Workload.derived`: the size for any ranks
SMALL_BYTES = MIB  # tensors below this size stay resident
SMALL_PART = 400  # in a small model, so do tensors below this part of it
MOST_SMALL = 0.05  # unless all of them exceed this share: 600 thin layers must not all be resident


class Slot(Struct, frozen=True, kw_only=True):
    """Tensor (index in the workload) at stored elements [offset, offset + numel) of its chunk."""

    tensor: int
    offset: int
    numel: int
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """numel: with waste.
    small: of tensors too small to be worth moving; stays resident.
    kind: position of its states in `OptimizerSpec.all_states`.
    spread: as of its tensors.
    """

    index: int
    dtype: str
    numel: int
    slots: tuple[Slot, ...]
    frozen: bool = False
    small: bool = False
    group: int = 0
    kind: int = 0
    spread: int = 1

    @property
    def params(self) -> int:
        """Without padding."""
        return sum(slot.numel for slot in self.slots)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Chunks in order of first use, small ones first.

    chunk_bytes: the working list of a uniform chunk.
    ranks: equal slices of each list, one per rank (fewer than the machine has where each of several replicas has all
        slices). A chunk of spread tensors has fewer (`slices_of`). Payloads are one rank's. With several slices there
        are also those of OTHERS (core/step.py), the other ranks' slices.
    sum_bytes: bytes per parameter of "grad32": 4, or 2 if it has the dtype of a 2-byte chunk.
    """

    chunk_bytes: int
    chunks: tuple[Chunk, ...]
    optimizer: OptimizerSpec
    ranks: int = 1
    sum_bytes: int = 4

    @cached_property
    def chunk_of(self) -> dict[int, int]:
        return {slot.tensor: c.index for c in self.chunks for slot in c.slots}

    @cached_property
    def waste(self) -> float:
        """Share of payload elements that hold no parameter."""
        used = sum(s.numel for c in self.chunks for s in c.slots)
        total = sum(c.numel for c in self.chunks)
        return 1 - used / total if total else 0.0

    @cached_property
    def state_lists(self) -> tuple[str, ...]:
        return self.optimizer.lists

    @cached_property
    def _states(self) -> dict[str, tuple[States, ...]]:
        return self.optimizer.states_by_dtype(c.dtype for c in self.chunks)

    def _optimizer_of(self, chunk: Chunk) -> OptimizerSpec:
        return self.optimizer.of_width(STORAGE[chunk.dtype].bytes)

    def states_of(self, chunk: int) -> States:
        """A frozen chunk has no states."""
        c = self.chunks[chunk]
        return self._states[c.dtype][c.kind]

    def slices_of(self, chunk: int) -> int:
        """Equal parts of each of its lists: those of the ranks that have the chunk."""
        return max(1, self.ranks // self.chunks[chunk].spread)

    def is_own_master(self, chunk: int) -> bool:
        """As wide as its masters: fp32, or without fp32 masters."""
        c = self.chunks[chunk]
        return c.frozen or STORAGE[c.dtype].bytes == self._optimizer_of(c).master_bytes

    @cached_property
    def own_params(self) -> tuple[int, ...]:
        """Per chunk, of one rank's slice, without padding."""
        return tuple([-(-c.params // self.slices_of(c.index)) for c in self.chunks])

    @cached_property
    def trained_params(self) -> tuple[int, ...]:
        """As `own_params`; 0 for a frozen chunk."""
        return tuple([0 if c.frozen else params for c, params in zip(self.chunks, self.own_params)])

    @cached_property
    def updates_bytes(self) -> tuple[int, ...]:
        """Per chunk, memory traffic of one rank's update without padding; 0 if frozen."""
        return tuple(
            [
                self.states_of(c).update_bytes(params, self._shapes(c), self.slices_of(c)) if params else 0
                for c, params in enumerate(self.trained_params)
            ]
        )

    def _shapes(self, chunk: int) -> list[tuple[int, ...]]:
        return [slot.shape for slot in self.chunks[chunk].slots]

    def unpadded_states_bytes(self, chunk: int) -> int:
        """All states of one rank's slice, without padding."""
        params, slices = self.own_params[chunk], self.slices_of(chunk)
        return sum(self.states_of(chunk).list_bytes(params, self._shapes(chunk), slices).values())

    @cached_property
    def lists(self) -> tuple[str, ...]:
        others = tuple(OTHERS) if self.ranks > 1 else ()
        return ("param", "grad", "grad32", *self.state_lists, *others)

    @cached_property
    def _payloads(self) -> dict[tuple[int, str], int]:
        table: dict[tuple[int, str], int] = {}
        for c in self.chunks:
            numel, width, slices = self.slice_numel(c.index), STORAGE[c.dtype].bytes, self.slices_of(c.index)
            table[c.index, "param"] = numel * width
            if self.ranks > 1:
                table[c.index, "remote"] = numel * width * (slices - 1)
            if not c.frozen:
                table[c.index, "grad"] = numel * width
                table[c.index, "grad32"] = numel * self.sum_width(c.index)
                if self.ranks > 1:
                    table[c.index, "grad_remote"] = numel * width * (slices - 1)
                    table[c.index, "grad32_remote"] = numel * self.sum_width(c.index) * (slices - 1)
                states = self.states_of(c.index).list_bytes(numel, self._shapes(c.index), slices)
                table |= {(c.index, name): size for name, size in states.items()}
        return table

    @cached_property
    def _lists_bytes(self) -> dict[str, tuple[int | None, ...]]:
        payloads = self._payloads
        return {name: tuple([payloads.get((c.index, name)) for c in self.chunks]) for name in self.lists}

    def sum_width(self, chunk: int) -> int:
        """Bytes per parameter of the chunk's sum of gradients."""
        return max(self.sum_bytes, STORAGE[self.chunks[chunk].dtype].bytes)

    def slice_numel(self, chunk: int) -> int:
        """Elements of a rank's slice, rounded up: equal and aligned."""
        numel, slices = self.chunks[chunk].numel, self.slices_of(chunk)
        if slices == 1:
            return numel
        align = _alignment(self.states_of(chunk))
        unit = slices * align
        return (numel + unit - 1) // unit * align

    def whole_bytes(self, chunk: int) -> int:
        return self.payload_bytes(chunk, "param") * self.slices_of(chunk)

    def payload_bytes(self, chunk: int, list_name: str) -> int:
        """Bytes of one rank's slice; for the lists of OTHERS, of all others'. A frozen chunk has only "param"
        and "remote". Raises PlanError for an unknown chunk or list."""
        try:
            return self._payloads[chunk, list_name]
        except KeyError:
            pass
        if not 0 <= chunk < len(self.chunks):
            raise PlanError(f"there is no chunk {chunk}; the layout has chunks 0 to {len(self.chunks) - 1}")
        kind = "frozen chunk" if self.chunks[chunk].frozen else "chunk"
        frozen = ("param", "remote") if self.ranks > 1 else ("param",)
        known = ", ".join(frozen if self.chunks[chunk].frozen else self.lists)
        raise PlanError(f"{kind} {chunk} has no list {list_name!r}; it has {known}")

    def part_range(self, chunk: int, part: Part) -> tuple[int, int]:
        """(first, end) in a rank's slice of every list, at multiples of `PART_ALIGN` and of blocks of states."""
        numel, align = self.slice_numel(chunk), max(PART_ALIGN, self.states_of(chunk).block)
        first, end = (numel * n // part.of // align * align for n in (part.number, part.number + 1))
        return first, numel if part.last else end

    def part_bytes(self, chunk: int, part: Part, size_bytes: int) -> int:
        """Spread evenly over the elements."""
        (first, end), numel = self.part_range(chunk, part), self.slice_numel(chunk)
        return size_bytes * end // numel - size_bytes * first // numel

    def list_bytes(self, list_name: str) -> tuple[int | None, ...]:
        """Per chunk; None for a chunk without this list."""
        return self._lists_bytes.get(list_name, (None,) * len(self.chunks))

    def states_bytes(self, chunk: int) -> int:
        """Of one rank's slice; 0 if frozen."""
        return sum(self._payloads.get((chunk, name), 0) for name in self.state_lists)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `layout_file.layout_of` is the reverse."""
        return {
            "chunk_bytes": self.chunk_bytes,
            "ranks": self.ranks,
            "state_bytes": [[name, width] for name, width in self.optimizer.state_bytes],
            **({"sum_bytes": self.sum_bytes} if self.sum_bytes != Layout.sum_bytes else {}),
            "chunks": [
                {
                    "dtype": c.dtype,
                    "numel": c.numel,
                    "frozen": c.frozen,
                    "small": c.small,
                    "group": c.group,
                    **({"spread": c.spread} if c.spread > 1 else {}),
                    "slots": [[s.tensor, s.offset, s.numel] for s in c.slots],
                }
                for c in self.chunks
            ],
        }


class _Item(NamedTuple):
    """padded: rounded up to whole vectors and blocks of states."""

    first_use: int
    tensor: int
    numel: int
    padded: int
    shape: tuple[int, ...]


class _Class(NamedTuple):
    frozen: bool
    dtype: str
    group: int
    kind: int
    spread: int

    @property
    def width(self) -> int:
        return STORAGE[self.dtype].bytes


def build_layout(workload: Workload, *, chunk_bytes: int | None = None, ranks: int = 1, sums: str = "32-bit") -> Layout:
    """Returns the workload's layout, the same object for the same workload object. Without `chunk_bytes`, the size that
    wastes least is searched.

    sums: as `Settings.sums`.

    Raises PlanError for chunk_bytes that is not positive, a dtype without a known width, ranks < 1, and 16-bit sums of
    an fp32 model.
    """
    if ranks < 1:
        raise PlanError(f"ranks is {ranks}; a layout needs at least one rank")
    if chunk_bytes is not None and chunk_bytes <= 0:
        raise PlanError(f"chunk_bytes is {chunk_bytes}; a chunk needs a positive number of bytes")
    key = ("layout", chunk_bytes, ranks, sums)
    known = workload.derived.get(key)
    if not isinstance(known, Layout):
        workload.derived[key] = known = _with_sums(_built(workload, chunk_bytes, ranks), workload, sums)
    return known


def _with_sums(layout: Layout, workload: Workload, sums: str) -> Layout:
    sum_bytes = sum_bytes_of(workload, sums)
    return layout if layout.sum_bytes == sum_bytes else replace(layout, sum_bytes=sum_bytes)


def sum_bytes_of(workload: Workload, sums: str) -> int:
    """Bytes per parameter of a sum of gradients.

    sums: as `Settings.sums`.

    Raises PlanError for 16-bit sums of an fp32 model.
    """
    if sums == "32-bit":
        return STORAGE[MASTER].bytes
    dtype = STORAGE[workload.dtype]
    if not dtype.can_sum:
        raise PlanError(
            f"sums in 16 bits are for 16-bit models; {workload.model} is {workload.dtype}, whose gradients have 32 bits"
        )
    return dtype.bytes


def layout_of_parts(workload: Workload, parts: Sequence[tuple[int, int]], *, sums: str = "32-bit") -> Layout:
    """A chunk per part of the iteration holds the tensors (or those of a class) that the part reads first. Tensors
    never read have chunks of their own. No chunk is small; the same workload object gives the same layout object.

    parts: (first, last) moment, with none between two parts.
    sums: as `Settings.sums`.

    Raises as `build_layout`.
    """
    key = ("layout of parts", tuple(parts), sums)
    known = workload.derived.get(key)
    if not isinstance(known, Layout):
        workload.derived[key] = known = _with_sums(_of_parts(workload, [first for first, _ in parts]), workload, sums)
    return known


def _of_parts(workload: Workload, begins: Sequence[int]) -> Layout:
    rows: list[tuple[int, _Class, list[_Item]]] = []
    for key, items in _in_order_of_first_use(workload).items():
        mine: dict[int, list[_Item]] = {}
        for item in items:
            never = item.first_use == len(workload.moments)
            mine.setdefault(len(begins) if never else bisect_right(begins, item.first_use), []).append(item)
        rows += [(part, key, own) for part, own in mine.items()]
    rows.sort(key=lambda row: (row[0], row[2][0]))
    chunks = [(key, own, sum(item.padded for item in own), False) for _, key, own in rows]
    return Layout(
        chunk_bytes=max(numel * key.width for key, _, numel, _ in chunks),
        chunks=tuple(_chunk(index, *row) for index, row in enumerate(chunks)),
        optimizer=workload.optimizer,
    )


def size_near(workload: Workload, chunk_bytes: int) -> int:
    """The size within half an octave that wastes least, then is nearest."""
    _, classes = _by_size(_in_order_of_first_use(workload))
    granule = GRANULE_BYTES
    while granule > 4 * KIB and granule > chunk_bytes // 32:
        granule //= 2
    low, high = int(chunk_bytes / sqrt(2)) // granule + 1, int(chunk_bytes * sqrt(2)) // granule
    near = [n * granule for n in range(low, high + 1, max(1, (high - low) // 64))] or [chunk_bytes]
    return min(near, key=lambda size: (_waste(classes, size), abs(log2(size / chunk_bytes))))


def _built(workload: Workload, chunk_bytes: int | None, ranks: int) -> Layout:
    small, large = _by_size(_in_order_of_first_use(workload))
    if chunk_bytes is None:
        known = workload.derived.get(_SEARCHED)
        chunk_bytes = workload.derived[_SEARCHED] = known if isinstance(known, int) else _search(large)

    packed: list[tuple[_Class, list[_Item], int]] = []  # class, items, elements
    for key, items in large.items():
        packed.extend((key, row, numel) for row, numel in _pack(items, chunk_bytes // key.width))
    packed.sort(key=lambda row: row[1][0])  # by the first use of the chunk's first tensor
    rows = [(key, items, sum(item.padded for item in items), True) for key, items in small.items()]
    rows += [(key, items, numel, False) for key, items, numel in packed]
    return Layout(
        chunk_bytes=chunk_bytes,
        chunks=tuple(_chunk(index, *row) for index, row in enumerate(rows)),
        optimizer=workload.optimizer,
        ranks=ranks,
    )


def _chunk(index: int, key: _Class, items: Iterable[_Item], numel: int, small: bool) -> Chunk:
    slots: list[Slot] = []
    offset = 0
    for item in items:
        slots.append(Slot(tensor=item.tensor, offset=offset, numel=item.numel, shape=item.shape))
        offset += item.padded
    return Chunk(
        index=index,
        numel=numel,
        slots=tuple(slots),
        small=small,
        frozen=key.frozen,
        dtype=key.dtype,
        group=key.group,
        kind=key.kind,
        spread=key.spread,
    )


def _alignment(states: States) -> int:
    width = next((row.per_element for row in states.lists if row.name == MASTER_LIST), STORAGE[MASTER].bytes)
    return max(ALIGN_BYTES // width, states.block)


def _in_order_of_first_use(workload: Workload) -> dict[_Class, list[_Item]]:
    """With storage of their own, those never read last."""
    never = len(workload.moments)
    first = [never] * len(workload.tensors)
    for use in workload.uses:
        if use.kind is UseKind.READ and use.moment < first[use.tensor]:
            first[use.tensor] = use.moment
    order = sorted(range(len(first)), key=lambda i: (first[i], i))
    optimizer = workload.optimizer
    kinds = optimizer.states_by_dtype({t.dtype for t in workload.tensors} & STORAGE.keys())
    aligns = {name: [_alignment(states) for states in kinds[name]] for name in kinds}
    classes: dict[_Class, list[_Item]] = {}
    for index in order:
        tensor = workload.tensors[index]
        if tensor.tied_to is not None:
            continue
        if tensor.dtype not in STORAGE:
            raise PlanError(f"tensor {tensor.name!r} has dtype {tensor.dtype!r}; chunks can hold {', '.join(STORAGE)}")
        kind = 0 if tensor.frozen else optimizer.kind_of(tensor.name, tensor.shape)
        key = _Class(tensor.frozen, tensor.dtype, tensor.group, kind, tensor.spread)
        align, numel = aligns[tensor.dtype][kind], STORAGE[tensor.dtype].stored(tensor.shape)
        item = _Item(first[index], index, numel, -(-numel // align) * align, tensor.shape)
        classes.setdefault(key, []).append(item)
    return classes


def _by_size(classes: Mapping[_Class, Sequence[_Item]]) -> tuple[dict[_Class, list[_Item]], dict[_Class, list[_Item]]]:
    limit = _small_limit(classes)
    small: dict[_Class, list[_Item]] = {}
    large: dict[_Class, list[_Item]] = {}
    for key, items in classes.items():
        width = key.width
        for item in items:
            (small if item.numel * width < limit else large).setdefault(key, []).append(item)
    return small, large


def _padded_bytes(classes: Mapping[_Class, Sequence[_Item]]) -> int:
    return sum(key.width * sum([item.padded for item in items]) for key, items in classes.items())


def _small_limit(classes: Mapping[_Class, Sequence[_Item]]) -> float:
    """Below it a tensor is not worth moving: 1 MiB, or 1/400 of a small model, less if they make up over 5 %: hundreds
    of thin layers must not all be resident."""
    total_bytes = _padded_bytes(classes)
    limit = min(float(SMALL_BYTES), total_bytes / SMALL_PART)
    widths = [(key.width, items) for key, items in classes.items()]
    sizes = np.array(sorted(item.numel * width for width, items in widths for item in items))
    held = np.concatenate(([0], np.cumsum(sizes)))
    while limit >= 1 and held[np.searchsorted(sizes, limit)] > MOST_SMALL * total_bytes:
        limit /= 2
    return limit


def _search(classes: Mapping[_Class, Sequence[_Item]]) -> int:
    """By `_score`, at most 2 % waste if any size allows it, and at least about 24 chunks. The granule is halved until a
    good size is found."""
    total = _padded_bytes(classes)
    used = sum(key.width * sum([item.numel for item in items]) for key, items in classes.items())
    if total == 0:
        return GRANULE_BYTES
    granule = _coarsest(total)
    finest = max(4 * KIB, granule // 32)
    prefixes = {
        key: np.concatenate(([0], np.cumsum([item.padded for item in items]) * key.width)).astype(np.int64)
        for key, items in classes.items()
    }
    padded = {key: np.array([item.padded for item in items], dtype=np.int64) for key, items in classes.items()}
    rows = [(numels, _ends(numels), key.width) for key, numels in padded.items()]
    best = (inf, 0)
    while True:
        tried = ((_score(rows, size, total, used), size) for size in _candidates(prefixes, granule, total))
        best = min([best, *tried])
        if best[0] < GOOD or granule <= finest:
            return best[1]
        granule //= 2


def _coarsest(total: int) -> int:
    granule = GRANULE_BYTES
    while granule > 4 * KIB and granule > total / 64:
        granule //= 2
    return granule


def _candidates(prefixes: Mapping[_Class, NDArray[np.int64]], granule: int, total: int) -> list[int]:
    """Multiples of the granule that some run of tensors just fills; others pack like a smaller one of these."""
    most = max(granule, total // WANTED_CHUNKS // granule * granule)
    sizes: set[int] = {most}
    for prefix in prefixes.values():
        starts = prefix[: max(1, min(MOST_STARTS, len(prefix) - 1))]
        runs = (prefix[None, :] - starts[:, None]).ravel()
        runs = runs[(runs > 0) & (runs <= most)]
        sizes.update(np.unique(-(-runs // granule) * granule).tolist())
    ordered = sorted(size for size in sizes if size >= most // 64)
    if len(ordered) <= MOST_SIZES:
        return ordered
    wanted = np.geomspace(ordered[0], ordered[-1], MOST_SIZES)
    picks = np.unique(np.searchsorted(ordered, wanted).clip(0, len(ordered) - 1))
    return [ordered[i] for i in picks.tolist()]


def _waste(classes: Mapping[_Class, Sequence[_Item]], size: int) -> float:
    used = held = 0
    for key, items in classes.items():
        used += sum(item.numel for item in items) * key.width
        held += sum(numel for _, numel in _pack(items, size // key.width)) * key.width
    return round(1 - used / held, 3) if held else 0.0


def _score(classes: Iterable[tuple[NDArray[np.int64], Sequence[int], int]], size: int, total: int, used: int) -> float:
    """A penalty: waste, bytes in oversize chunks, mean octaves from 64 to 128 MiB (1/64 to 1/32 of a smaller model); at
    least 1 for too much waste.

    classes: padded elements, their running sum, and bytes per element.
    total, used: with and without padding.
    """
    held = oversize = 0
    octaves = 0.0
    high = min(USUAL_BYTES, total / USUAL_PART)
    usual = max(0.0, log2(size / high), log2(high / 2 / size))  # octaves of a chunk of that size
    for padded, ends, width in classes:
        for numel in _packed_numels(padded, ends, size // width):
            payload = numel * width
            held += payload
            if payload > size:
                oversize += payload
                octaves += payload * max(0.0, log2(payload / high), log2(high / 2 / payload))
            else:
                octaves += payload * usual
    waste = 1 - used / held
    if waste > MOST_WASTE:
        return 1 + 100 * waste
    return min(0.99, OVERSIZE * oversize / held + OCTAVES * octaves / held + WASTE * waste)


def _pack(items: Sequence[_Item], capacity: int) -> list[tuple[list[_Item], int]]:
    """(items, elements) per chunk. A tensor above the capacity gets its own and leaves the open chunk open. The last is
    trimmed."""
    capacity = _aligned(capacity)
    oversize = [([item], item.padded) for item in items if item.padded > capacity]
    rest = [item for item in items if item.padded <= capacity] if oversize else items
    chunks = [
        (list(rest[begin:end]), numel) for begin, end, numel in _cuts(_ends([item.padded for item in rest]), capacity)
    ]
    return chunks + oversize


def _packed_numels(padded: NDArray[np.int64], ends: Sequence[int], capacity: int) -> list[int]:
    capacity = _aligned(capacity)
    over = padded > capacity
    oversize: list[int] = padded[over].tolist()
    if oversize:
        ends = _ends(padded[~over])
    return [numel for _, _, numel in _cuts(ends, capacity)] + oversize


def _cuts(ends: Sequence[int], capacity: int) -> list[tuple[int, int, int]]:
    """ends: running sum of elements, each within the capacity."""
    chunks: list[tuple[int, int, int]] = []
    begin, base = 0, 0
    while begin < len(ends):
        end = bisect_right(ends, base + capacity)
        chunks.append((begin, end, capacity if end < len(ends) else ends[-1] - base))
        begin, base = end, ends[end - 1]
    return chunks


def _ends(padded: Sequence[int] | NDArray[np.int64]) -> list[int]:
    ends: list[int] = np.cumsum(padded, dtype=np.int64).tolist()
    return ends


def _aligned(capacity: int) -> int:
    return max(capacity // ALIGN * ALIGN, ALIGN)
