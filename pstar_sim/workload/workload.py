"""Workload: one training iteration as data, the contents of a trace file and the input of every policy.

Tensors are parameters, moments the clock, with flops and tide, and uses say which moments read a parameter, and in
which its gradient arrives.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from typing import Protocol

from pstar_sim.arguments import MOST, instance, whole
from pstar_sim.catalog.attention import ATTENTION, AttentionCall, call_flops
from pstar_sim.dtypes import AUTOCAST, BASES, DTYPES, MASTER, PRODUCTS, STORAGE, same_size
from pstar_sim.errors import TraceError
from pstar_sim.python310 import StrEnum
from pstar_sim.renderers import render_html
from pstar_sim.workload.kernels import LOSSES
from pstar_sim.workload.optimizers import OptimizerSpec, optimizer_spec
from pstar_sim.workload.orders import Order

__all__ = [
    "ACTIVATIONS",
    "ATTENTION_ALONE",
    "COLLECTIVES",
    "CROSSINGS",
    "MOST_MOMENTS",
    "Border",
    "Collective",
    "Moment",
    "Phase",
    "Product",
    "Stash",
    "Tensor",
    "Use",
    "UseKind",
    "Workload",
    "activations_text",
    "copy_moment",
    "in_low_dtype",
    "odd_micro_batch",
    "product_flops",
    "repeat_micro_batch",
    "retype",
    "single_micro_batch",
    "with_optimizer",
]

ACTIVATIONS = ("keep", "recompute", "offload")
"""Ways to treat a block's activations between its forward and its backward pass."""

NO_ATTENTION = "none"
"""The kernel of a model without attention."""

ATTENTION_ALONE = "attention"
"""Only the core of attention is recomputed: scores and softmax."""

Product = tuple[int, int, int, int]
"""A matrix product that one kernel computes: (batches, m, k, n) is `batches` products of m x k by k x n."""


Collective = tuple[str, str, int]
"""(operation, group, bytes): an exchange between the ranks of a group, for which a moment waits. The operation is one
of COLLECTIVES, the bytes are those of the whole tensor, in an all-to-all those of a rank, and the machine names the
ranks (`Machine.groups`)."""
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def in_low_dtype(product: Product) -> bool:
    """Whether the tensor cores compute it in a dtype of PRODUCTS: each side is a multiple of 16."""
    return all(side % 16 == 0 for side in product[1:])


def product_flops(product: Product) -> int:
    """A multiplication and an addition for each of its terms."""
    batches, m, k, n = product
    return 2 * batches * m * k * n


class Phase(StrEnum):
    FWD = "FWD"
    RECOMPUTE = "RECOMPUTE"
    BWD = "BWD"
    ADAM = "ADAM"


class UseKind(StrEnum):
    READ = "read"
    GRADIENT = "gradient"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """One parameter.

    name: of the parameter in its model.
    shape: extents of its axes.
    dtype: its working dtype.
    bytes: in its working dtype.
    frozen: it gets no gradient and no update.
    tied_to: index of the tensor whose storage it shares. A tied tensor has no bytes of its own, and uses name the other
        tensor.
    group: optimizer parameter group.
    spread: ranks that have other tensors in its place, such as experts. Every spread-th of the ranks that share a batch
        has this one, and adds up its gradient with the others that have it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    frozen: bool = False
    tied_to: int | None = None
    group: int = 0
    spread: int = 1

    @property
    def numel(self) -> int:
        numel = 1
        for extent in self.shape:
            numel *= extent
        return numel


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Interval between two observable points of the iteration; the clock of a plan.

    name: the event that opens it: "begin:MODULE", "end:MODULE", "grad:MODULE", "backward-end" or "step".
    phase: forward, recomputed forward, backward, or the optimizer step.
    module: the module of its name.
    micro_batch: its index.
    flops: floating-point operations of its work.
    bytes_read, bytes_written: of GPU memory, by its operators.
    start_bytes, peak_bytes, end_bytes: non-model bytes (logical, of live storages) when it opens, at most, and when it
        closes.
    duration_s: measured seconds of the moment's own work (without stalls), None in a trace that was not recorded.
    products: (batches, m, k, n) of each matrix product of its work; `flops` counts their flops too. Empty if they are
        not known.
    attentions: each call of fused attention; `flops` counts them as `call_flops` does. Empty if they are not known.
    operators: of the framework; 0 if they are not known.
    collectives: of the ranks that split layers with this one, one after the other, for which the moment waits.
    """

    name: str
    phase: Phase
    module: str
    micro_batch: int
    flops: int
    bytes_read: int
    bytes_written: int
    start_bytes: int
    peak_bytes: int
    end_bytes: int
    duration_s: float | None = None
    products: tuple[Product, ...] = ()
    attentions: tuple[AttentionCall, ...] = ()
    operators: int = 0
    collectives: tuple[Collective, ...] = ()


def copy_moment(
    moment: Moment,
    start_bytes: int,
    peak_bytes: int,
    end_bytes: int,
    micro_batch: int | None = None,
    duration_s: float | None = None,
    named: tuple[str, str] | None = None,
) -> Moment:
    """`dataclasses.replace` takes several times as long."""
    name, module = named or (moment.name, moment.module)
    return Moment(
        name=name,
        phase=moment.phase,
        module=module,
        micro_batch=moment.micro_batch if micro_batch is None else micro_batch,
        flops=moment.flops,
        bytes_read=moment.bytes_read,
        bytes_written=moment.bytes_written,
        start_bytes=start_bytes,
        peak_bytes=peak_bytes,
        end_bytes=end_bytes,
        duration_s=moment.duration_s if duration_s is None else duration_s,
        products=moment.products,
        attentions=moment.attentions,
        operators=moment.operators,
        collectives=moment.collectives,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """A moment (by index) reads a tensor (by index), or the tensor's gradient arrives in it.

    moment: index of the moment.
    tensor: index of the tensor.
    kind: whether the tensor is read or its gradient arrives.
    """

    moment: int
    tensor: int
    kind: UseKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Stash:
    """The activations that one block's forward keeps, on their way to the host and back ([Note: stashes]).

    block: the module.
    micro_batch: index of the micro-batch.
    bytes: bytes of all its tensors.
    made: last moment of the block's forward.
    gone: last moment whose peak counts the bytes; from then on they are on the host.
    back: first moment whose peak counts the bytes again.
    needed: first moment of the block's backward.
    """

    block: str
    micro_batch: int
    bytes: int
    made: int
    gone: int
    back: int
    needed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Border:
    """What one stage of a pipeline sends to another ([Note: borders]).

    peer: number of the other stage.
    receives: whether this stage receives it.
    what: one of CROSSINGS.
    micro_batch: index of the micro-batch; of the weights of a tied table the first, of their gradients the last.
    bytes: bytes of the tensor.
    behind: moment that the transfer follows, the first whose peak counts the bytes of what is received, and the last
        that makes what is sent.
    until: moment that waits for the transfer, the first that needs what is received, and the last whose peak counts the
        bytes of what is sent.
    part: of the model, that sends activations or receives gradients, counted over all stages; 0 where each has one.
    """

    peer: int
    receives: bool
    what: str
    micro_batch: int
    bytes: int
    behind: int
    until: int
    part: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """One iteration of one model. The last moment is the optimizer step (phase ADAM, name "step").

    activations: (block, "keep" | "recompute" | "offload") for every block, in the order of the forward pass; empty if
        the model's own choice holds for all blocks (`checkpointing`).
    stashes: stashes of offloaded blocks, in the order in which they are made.

    [Note: stashes] The copy out of a stash follows moment `made`, and moment `gone` waits for it. The copy in follows
    moment `back`, and moment `needed` waits for it. So the gpu holds the bytes exactly while a peak counts them or one
    of the two copies runs. Memory that the peaks leave free is free with any timing.

    borders: of a stage of a pipeline, in the order of the moments that they follow.

    [Note: borders] A border is one end of a stash: what is sent leaves the GPU as a stash does, what is received comes
    as one. A transfer follows moment `behind`, and moment `until` waits for it. A table that embedding and head share
    is the first stage's. The last receives its weights once per iteration, adds the gradients of the head up in fp32,
    and sends their sum, which the first adds to the embedding's gradient of the last micro-batch. The last holds copy
    and sum throughout, beside its model data.

    model: name that the user gave the model.
    dtype: working dtype of the model.
    batch: sequences per micro-batch. In a workload that stands for a whole job, those of all GPUs together; within a
        plan and in a list of one workload per rank, those of one rank.
    sequence: tokens of one sequence; within a plan and in such a list, those that a rank has.
    micro_batches: per iteration.
    checkpointing: whether the model recomputes activations.
    tensors: all parameters.
    moments: the clock of the iteration, in order.
    uses: the moments that read each parameter, and in which its gradient arrives.
    optimizer: states that the optimizer keeps for each trainable parameter.
    dtype_open: whether the user left the dtype open, so that a comparison takes the dtype of the GPU.
    attention: a kernel of attention.py, or NO_ATTENTION.
    kernels: flavour in which the other operators run (kernels.py); "captured" for those of the module itself, "" in a
        file without flavour.
    order: the order in which it runs its micro-batches.
    loss: of a language model's preset, one of LOSSES (kernels.py).
    dropout: of a preset, as `Dropout` (kernels.py) writes it.
    recompute: of a preset that recomputes less than all blocks: ATTENTION_ALONE (without checkpointing), or every-N.
    autocast: dtype to which autocast casts the inputs of products, one of AUTOCAST (dtypes.py); None without autocast.
    products: dtype to which linear modules of the layers cast for their products, of PRODUCTS (dtypes.py), or None.
    source: "capture" (fake tensors), "recorded" (a real iteration) or "preset".
    recorded_on: name of the machine whose durations the moments carry, or None.
    torch_version: version of torch that captured the workload; "" for a preset.
    notes: any other text, for people.
    """

    model: str
    dtype: str
    batch: int
    sequence: int
    micro_batches: int
    checkpointing: bool
    attention: str
    source: str
    tensors: tuple[Tensor, ...]
    moments: tuple[Moment, ...]
    uses: tuple[Use, ...]
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    torch_version: str = ""
    recorded_on: str | None = None
    notes: str = ""
    activations: tuple[tuple[str, str], ...] = ()
    stashes: tuple[Stash, ...] = ()
    borders: tuple[Border, ...] = ()
    dtype_open: bool = False
    kernels: str = ""
    order: Order = Order.DEPTH_FIRST
    loss: str = LOSSES[0]
    dropout: str | None = None
    autocast: str | None = None
    recompute: str | None = None
    products: str | None = None

    def __post_init__(self) -> None:
        check_workload(self)

    def __repr__(self) -> str:
        return (
            f"<Workload {self.model}, {self.dtype}, batch {self.batch} x {self.micro_batches}, "
            f"sequence {self.sequence}, {self.params} parameters, {len(self.moments)} moments>"
        )

    def _repr_html_(self) -> str:
        return render_html(self)

    @property
    def said(self) -> dict[str, object]:
        """The kernels and the notes, which each row of an answer repeats."""
        return {"kernels": self.kernels, "notes": self.notes}

    @cached_property
    def fingerprint(self) -> str:
        """Digest of names, shapes, dtypes, ties, freezing and groups of the parameters."""
        rows = [(t.name, t.shape, t.dtype, t.frozen, t.tied_to, t.group) for t in self.tensors]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]

    @cached_property
    def derived(self) -> dict[tuple[object, ...], object]:
        """What other modules derive once from this workload. A key begins with a name; key and value
        hold what it depends on."""
        return {}

    @cached_property
    def states_bytes_per_param(self) -> float:
        """Mean per trainable parameter; without any, of a tensor of no kind."""
        numel, size = self.states_of(self.tensors)
        return size / numel if numel else sum(size for _, size in self.optimizer.state_bytes)

    def states_of(self, tensors: Sequence[Tensor]) -> tuple[int, int]:
        """Trainable parameters, and bytes of states."""
        kinds = self.optimizer.states_by_dtype(t.dtype for t in tensors)
        numel, size = 0, 0
        for t in tensors:
            if not t.frozen and t.tied_to is None:
                states = kinds[t.dtype][self.optimizer.kind_of(t.name, t.shape)]
                numel += t.numel
                size += sum(states.list_bytes(t.numel, [t.shape]).values())
        return numel, size

    @cached_property
    def params(self) -> int:
        """Tied parameters count once."""
        return sum(t.numel for t in self.tensors if t.tied_to is None)

    @cached_property
    def trainable_params(self) -> int:
        return sum(t.numel for t in self.tensors if t.tied_to is None and not t.frozen)

    @cached_property
    def states_bytes(self) -> int:
        """Of all trainable parameters, without padding."""
        return round(self.trainable_params * self.states_bytes_per_param)

    @cached_property
    def weights_bytes(self) -> int:
        """Of all parameters; tied ones count once."""
        return sum(t.bytes for t in self.tensors if t.tied_to is None)

    @property
    def tokens(self) -> int:
        """Per iteration, of all micro-batches."""
        return self.batch * self.sequence * self.micro_batches

    @property
    def compute_dtype(self) -> str:
        """Of the inputs of products, which decides their rate and whether gradients need loss scaling."""
        return self.autocast or self.dtype

    @cached_property
    def boundaries_on_host(self) -> bool:
        """Stashes are inputs of blocks that recompute from them (relay.py), not activations of offloaded blocks."""
        offloaded = {block for block, how in self.activations if how == "offload"}
        return any(stash.block not in offloaded for stash in self.stashes)

    @cached_property
    def peak_non_model_bytes(self) -> int:
        return max(m.peak_bytes for m in self.moments)

    @cached_property
    def stash_room(self) -> tuple[tuple[str, int], ...]:
        """(block, bytes) on the host: the most that a block's stashes take at a time, each in multiples of 256
        bytes."""
        sizes: dict[str, int] = {}
        there: dict[str, list[tuple[int, int]]] = {}  # block -> (needed, bytes) of stashes that are still in use
        for stash in self.stashes:
            mine = [(needed, size) for needed, size in there.get(stash.block, ()) if needed > stash.made]
            there[stash.block] = mine = [*mine, (stash.needed, _in_room(stash))]
            sizes[stash.block] = max(sizes.get(stash.block, 0), sum(size for _, size in mine))
        return tuple(sizes.items())

    @cached_property
    def stash_offsets(self) -> tuple[int, ...]:
        """In the `stash_room` of its block, in bytes."""
        ends: dict[str, int] = {}
        offsets = []
        for stash in self.stashes:
            offsets.append(0 if self.order.one_by_one else ends.get(stash.block, 0))
            ends[stash.block] = offsets[-1] + _in_room(stash)
        return tuple(offsets)

    @property
    def relayed(self) -> bool:
        """Whether the engine has to run the iteration: for its order, or for boundaries on the host (relay.py)."""
        return not self.order.of_loop or self.boundaries_on_host

    @cached_property
    def flops(self) -> int:
        return sum(m.flops for m in self.moments)

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """Tensors read in each moment, ascending."""
        return self._by_moment(UseKind.READ)

    @cached_property
    def gradients(self) -> tuple[tuple[int, ...], ...]:
        """Tensors per moment (each arrival, not only the last)."""
        return self._by_moment(UseKind.GRADIENT)

    def _by_moment(self, kind: UseKind) -> tuple[tuple[int, ...], ...]:
        rows: list[set[int]] = [set() for _ in self.moments]
        for use in self.uses:
            if use.kind is kind:
                rows[use.moment].add(use.tensor)
        return tuple(tuple(sorted(row)) for row in rows)


CROSSINGS = ("activations", "gradients", "tied weights", "tied gradients")
"""What crosses a border: activations on their way forward, their gradients, and of a table that embedding and head
share the weights and the sum of the head's gradients."""
MOST_MOMENTS = 2_000_000
"""Largest number of moments of one iteration. More take gigabytes of memory and hours to plan."""
_MOST_BYTES = 2**48  # of one tensor; sums of tensors fit in 64 bits
_MOST_PEAK_BYTES = 2**58  # of one moment: a batch far beyond all machines is still told how much it lacks
_WORKING_LISTS = ("param", "grad", "grad32", "remote", "grad_remote", "grad32_remote")


_Bad = Callable[[str, object, str], TraceError]
"""Makes the error from a field, its value and the value it must have."""


def check_workload(w: Workload) -> None:

    def bad(field_name: str, value: object, want: str) -> TraceError:
        return TraceError(f"workload {w.model!r}: {field_name} is {value!r}; {want}")

    _check_header(w, bad)
    _check_moments(w, bad)
    _check_order(w, bad)
    _check_optimizer(w, bad)
    for i, t in enumerate(w.tensors):
        _check_tensor(w, i, t, bad)
    _check_indices(w, bad)
    _check_uses(w, bad)
    _check_choices(w, bad)
    _check_stashes(w, bad)
    _check_borders(w, bad)


def _check_header(w: Workload, bad: _Bad) -> None:
    if w.dtype not in DTYPES:
        raise bad("dtype", w.dtype, f"known dtypes are {', '.join(DTYPES)}")
    if w.attention not in ATTENTION and w.attention != NO_ATTENTION:
        raise bad("attention", w.attention, f"known kernels are {', '.join(ATTENTION)}; {NO_ATTENTION} without any")
    if w.loss not in LOSSES:
        raise bad("loss", w.loss, f"known losses are {', '.join(LOSSES)}")
    if w.autocast not in (None, *AUTOCAST):
        raise bad("autocast", w.autocast, f"known dtypes are {', '.join(AUTOCAST)}")
    if w.autocast is not None and w.dtype != MASTER:
        raise bad("dtype", w.dtype, f"under autocast it must be {MASTER}")
    if w.products not in (None, *PRODUCTS):
        raise bad("products", w.products, f"known dtypes are {', '.join(PRODUCTS)}")
    for name in ("batch", "sequence", "micro_batches"):
        if getattr(w, name) < 1:
            raise bad(name, getattr(w, name), "it must be at least 1")
        if getattr(w, name) > MOST:
            raise bad(name, getattr(w, name), f"it must be at most {MOST}")
    if not w.tensors:
        raise bad("tensors", 0, "a model needs at least one parameter")
    if not w.moments or w.moments[-1].phase is not Phase.ADAM:
        raise bad("moments", len(w.moments), "the last moment must be the optimizer step (phase ADAM)")


_Rule = tuple[str, Callable[[Workload, Moment], bool], str]
"""(field of a moment, whether its value is wrong, what it must be); a text may name fields of the two as w and m."""


_FIGURES = ("flops", "bytes_read", "bytes_written", "start_bytes", "end_bytes", "operators")
_figures_of = attrgetter(*_FIGURES)
_RULES: tuple[_Rule, ...] = (
    (
        "peak_bytes",
        lambda w, m: not 0 <= max(m.start_bytes, m.end_bytes) <= m.peak_bytes,
        "it must be at least start_bytes and end_bytes",
    ),
    (
        "peak_bytes",
        lambda w, m: m.peak_bytes > _MOST_PEAK_BYTES,
        f"more than {_MOST_PEAK_BYTES} is on no GPU; take a smaller batch or shorter sequences",
    ),
    (
        "micro_batch",
        lambda w, m: not 0 <= m.micro_batch < w.micro_batches,
        "there are {w.micro_batches} micro-batches",
    ),
    (
        "duration_s",
        lambda w, m: m.duration_s is not None and not 0 <= m.duration_s < float("inf"),
        "it must be a finite number of seconds",
    ),
    (
        "products",
        lambda w, m: bool(m.products) and min(map(min, m.products)) < 1,
        "extents of products must be at least 1",
    ),
    (
        "products",
        lambda w, m: bool(m.products) and sum(map(product_flops, m.products)) > m.flops,
        "they have more flops than the moment, {m.flops}",
    ),
    (
        "collectives",
        lambda w, m: any(what not in COLLECTIVES or size < 1 for what, _, size in m.collectives),
        f"each is one of {', '.join(COLLECTIVES)}, of a group, and has bytes",
    ),
    (
        "attentions",
        lambda w, m: bool(m.attentions) and any(min(c[:5]) < 1 or c[5] < 0 or c[6] not in (0, 1) for c in m.attentions),
        "heads, queries, keys and widths must be at least 1, causal at least 0, backward 0 or 1",
    ),
    (
        "attentions",
        lambda w, m: bool(m.attentions) and sum(map(call_flops, m.attentions)) > m.flops,
        "they have more flops than the moment, {m.flops}",
    ),
)


def _check_moments(w: Workload, bad: _Bad) -> None:
    done: set[tuple[int, ...]] = set()  # work of moments, which their copies share
    for i, m in enumerate(w.moments):
        work = id(m.products), id(m.attentions), id(m.collectives), m.flops
        usual = 0 <= m.start_bytes <= m.peak_bytes <= _MOST_PEAK_BYTES and 0 <= m.end_bytes <= m.peak_bytes
        counted = m.bytes_read >= 0 and m.bytes_written >= 0 and m.operators >= 0
        if not (usual and counted and 0 <= m.micro_batch < w.micro_batches and m.duration_s is None and work in done):
            _check_moment(w, i, m, bad)
            done.add(work)


def _check_moment(w: Workload, i: int, m: Moment, bad: _Bad) -> None:
    figures = _figures_of(m)
    if min(figures) < 0:
        at = figures.index(min(figures))
        raise bad(f"moments[{i}].{_FIGURES[at]}", figures[at], "it must not be negative")
    for name, wrong, want in _RULES:
        if wrong(w, m):
            raise bad(f"moments[{i}].{name}", getattr(m, name), want.format(w=w, m=m))


def _check_optimizer(w: Workload, bad: _Bad) -> None:
    if w.optimizer.dram_bytes_per_param < 1:
        raise bad("optimizer.dram_bytes_per_param", w.optimizer.dram_bytes_per_param, "it must be at least 1")
    names = [name for name, _ in w.optimizer.state_bytes]
    for i, (name, size) in enumerate(w.optimizer.state_bytes):
        if names.index(name) < i or name in _WORKING_LISTS:
            raise bad(f"optimizer.state_bytes[{i}]", name, "each state needs a name of its own")
        if size < 1:
            raise bad(f"optimizer.state_bytes[{i}]", size, f"{name} needs at least 1 byte per parameter")


def _check_tensor(w: Workload, i: int, t: Tensor, bad: _Bad) -> None:
    if t.bytes > _MOST_BYTES:
        raise bad(f"tensors[{i}].bytes", t.bytes, f"a tensor has at most {_MOST_BYTES}")
    if t.bytes < 0 or min(t.shape, default=0) < 0:
        raise bad(f"tensors[{i}].bytes", t.bytes, f"bytes and shape ({list(t.shape)}) must not be negative")
    dtype = STORAGE.get(t.dtype)
    if t.tied_to is None and dtype is not None and t.bytes != (size := dtype.stored(t.shape) * dtype.bytes):
        raise bad(f"tensors[{i}].bytes", t.bytes, f"shape {list(t.shape)} of {t.dtype} has {size}")
    if t.dtype in BASES and not t.frozen:
        raise bad(f"tensors[{i}].frozen", t.frozen, f"a tensor of {t.dtype} is not trained")
    if t.group < 0:
        raise bad(f"tensors[{i}].group", t.group, "it must be the number of an optimizer group, from 0")
    if t.spread < 1:
        raise bad(f"tensors[{i}].spread", t.spread, "it must be the number of ranks with such tensors, at least 1")
    if t.tied_to is not None and not (0 <= t.tied_to < len(w.tensors) and w.tensors[t.tied_to].tied_to is None):
        raise bad(f"tensors[{i}].tied_to", t.tied_to, "it must be the index of a tensor that is not tied itself")


def _check_indices(w: Workload, bad: _Bad) -> None:
    tied = {i for i, t in enumerate(w.tensors) if t.tied_to is not None}
    frozen = {i for i, t in enumerate(w.tensors) if t.frozen}
    last, count, gradient = len(w.moments), len(w.tensors), UseKind.GRADIENT
    for u in w.uses:
        moment, tensor = u.moment, u.tensor
        if not 0 <= moment < last or not 0 <= tensor < count:
            raise bad("uses", (moment, tensor), "moment and tensor must be indices into their tables")
        if tensor in tied:
            want = "a tied tensor is used under the index of the tensor whose storage it shares"
            raise bad("uses", (moment, tensor), want)
        if tensor in frozen and u.kind is gradient:
            raise bad("uses", (moment, tensor), "a frozen tensor has no gradient")


_PHASES = {"begin": (Phase.FWD, Phase.RECOMPUTE), "end": (Phase.FWD, Phase.RECOMPUTE), "grad": (Phase.BWD,)}
"""Phases of each event that opens a moment and names a module."""


def _check_order(w: Workload, bad: _Bad) -> None:
    """Micro-batches begin one after the other, each forward then backward, the optimizer step last. A moment opens with
    the bytes of the one before, except where a micro-batch is over. An iteration not known yet has the optimizer step
    alone."""
    first, last = w.moments[0], w.moments[-1]
    if (first.micro_batch and first is not last) or last.micro_batch != w.micro_batches - 1:
        want = f"they go from 0 to {w.micro_batches - 1}, in order"
        raise bad("moments[].micro_batch", (first.micro_batch, last.micro_batch), want)
    in_turn = w.order.one_by_one
    latest: dict[int, int] = {}  # micro-batch -> its latest moment
    for i, m in enumerate(w.moments):
        if m.phase is Phase.ADAM and m is not last:
            raise bad(f"moments[{i}].phase", m.phase.value, "the optimizer step is the last moment")
        if m.phase not in _PHASES.get(m.name.partition(":")[0], (m.phase,)):
            raise bad(f"moments[{i}].phase", m.phase.value, f"{m.name!r} does not open a moment of that phase")
        if m.micro_batch in latest:
            if m.phase is Phase.FWD:
                _check_phase(w, i, m, latest[m.micro_batch], bad)
            if in_turn and m.micro_batch != len(latest) - 1:
                want = f"micro-batch {len(latest) - 1} has begun, and order is {w.order}"
                raise bad(f"moments[{i}].micro_batch", m.micro_batch, want)
        else:
            _check_begin(w, i, m, len(latest), bad)
        before = w.moments[i - 1]
        if i and m.start_bytes != before.end_bytes and (m.micro_batch == before.micro_batch or not in_turn):
            _check_bytes(w, i, m, bad)
        latest[m.micro_batch] = i
    odd = None if in_turn else odd_micro_batch(w)
    if odd is not None:
        want = "where micro-batches run side by side, each has the same moments as micro-batch 0"
        raise bad("moments[].micro_batch", odd, want)


def _in_room(stash: Stash) -> int:
    return -(-stash.bytes // 256) * 256


def odd_micro_batch(w: Workload) -> int | None:
    """The first with other moments than micro-batch 0, or another order."""
    rows: dict[int, list[tuple[str, Phase]]] = {}
    for m in w.moments[:-1]:
        rows.setdefault(m.micro_batch, []).append((m.name, m.phase))
    return next((u for u, row in rows.items() if row != rows[0]), None)


def _check_begin(w: Workload, i: int, m: Moment, begun: int, bad: _Bad) -> None:
    if m.phase is not Phase.FWD and m is not w.moments[-1]:
        raise bad(f"moments[{i}].phase", m.phase.value, "a micro-batch begins with its forward pass")
    if i and m.micro_batch != begun:
        raise bad(f"moments[{i}].micro_batch", m.micro_batch, f"it must be {begun}, after micro-batch {begun - 1}")


def _check_phase(w: Workload, i: int, m: Moment, before: int, bad: _Bad) -> None:
    if w.moments[before].phase is not Phase.FWD:
        name, phase = w.moments[before].name, w.moments[before].phase.value
        want = f"moment {before} ({name}) is of {phase} already; a micro-batch has one forward pass"
        raise bad(f"moments[{i}].phase", m.phase.value, want)


def _check_bytes(w: Workload, i: int, m: Moment, bad: _Bad) -> None:
    before = w.moments[i - 1]
    if not w.activations:  # mixed of two captures if blocks were chosen
        want = f"moment {i - 1} ({before.name}) ends with {before.end_bytes}; the moments are not in their order"
        raise bad(f"moments[{i}].start_bytes", m.start_bytes, want)


def _check_uses(w: Workload, bad: _Bad) -> None:
    """The optimizer step reads nothing, and a gradient arrives in backward, after the first read."""
    forward, step = ([m.phase is phase for m in w.moments] for phase in (Phase.FWD, Phase.ADAM))
    base = [m.micro_batch * len(w.tensors) for m in w.moments]
    first: dict[int, int] = {}  # base + tensor -> moment
    gradients: list[tuple[int, int]] = []
    gradient, never = UseKind.GRADIENT, len(w.moments)
    for u in w.uses:
        moment, tensor = u.moment, u.tensor
        if step[moment]:
            raise bad("uses", (moment, tensor), "the optimizer step uses no parameter and makes no gradient")
        if u.kind is gradient:
            if forward[moment]:
                raise bad("uses", (moment, tensor), "a gradient arrives in the backward pass, not in the forward pass")
            gradients.append((moment, tensor))
        elif moment < first.get(key := base[moment] + tensor, never):
            first[key] = moment
    for moment, tensor in gradients:
        read = first.get(base[moment] + tensor, moment)
        if read > moment:
            raise bad("uses", (moment, tensor), f"its gradient arrives before its first read, in moment {read}")


def _check_choices(w: Workload, bad: _Bad) -> None:
    """An offloaded block has a stash per micro-batch, as does one that recomputes from a boundary on the host; no other
    has."""
    chosen = dict(w.activations)
    if len(chosen) != len(w.activations):
        raise bad("activations", len(w.activations), "each block is named once")
    for block, how in w.activations:
        if how not in ACTIVATIONS:
            raise bad(f"activations[{block!r}]", how, f"known choices are {', '.join(ACTIVATIONS)}")
    there = [(s.block, s.micro_batch) for s in w.stashes]
    usual = "recompute" if w.checkpointing else "keep"
    boundary = {block for block, _ in there if chosen.get(block, usual) == "recompute"}
    away = boundary | {block for block, how in w.activations if how == "offload"}
    wanted = {(block, u) for block in away for u in range(w.micro_batches)}
    if len(set(there)) != len(there) or set(there) != wanted:
        raise bad("stashes", len(there), f"each offloaded block has one stash per micro-batch, in total {len(wanted)}")


def _check_stashes(w: Workload, bad: _Bad) -> None:
    """Alone and against the one before; peaks count all bytes."""
    counted = [0] * (len(w.moments) + 1)  # changes of the bytes of stashes that the peaks count
    for i, s in enumerate(w.stashes):
        if s.bytes <= 0 or not 0 <= s.made < s.gone < s.back < s.needed < len(w.moments) - 1:
            raise bad(f"stashes[{i}]", s, "it must have bytes, and moments made < gone < back < needed before the step")
        ends = (s.made, s.gone, s.back, s.needed) if w.order.one_by_one else (s.made, s.needed)
        if any(w.moments[m].micro_batch != s.micro_batch for m in ends):
            raise bad(f"stashes[{i}].micro_batch", s.micro_batch, "all its moments must be of that micro-batch")
        if i:
            _check_beside(i, s, w.stashes[i - 1], bad, in_turn=not w.boundaries_on_host)
        for begin, end in ((s.made, s.gone), (s.back, s.needed)):
            counted[begin] += s.bytes
            counted[end + 1] -= s.bytes
    held = 0
    for m, change in enumerate(counted[:-1]):
        held += change
        if held > w.moments[m].peak_bytes:
            raise bad(
                f"moments[{m}].peak_bytes", w.moments[m].peak_bytes, f"{held} bytes of stashes are on the GPU then"
            )


def _check_borders(w: Workload, bad: _Bad) -> None:
    for i, b in enumerate(w.borders):
        if b.what not in CROSSINGS:
            raise bad(f"borders[{i}].what", b.what, f"it is one of {', '.join(CROSSINGS)}")
        if b.bytes <= 0 or not 0 <= b.behind < b.until < len(w.moments):
            raise bad(f"borders[{i}]", b, "it must have bytes, and moments behind < until")
        if i and b.behind < w.borders[i - 1].behind:
            raise bad(f"borders[{i}].behind", b.behind, "borders come in the order of the moments that they follow")
        if any(w.moments[m].peak_bytes < b.bytes for m in (b.behind, b.until)):
            raise bad(f"borders[{i}].bytes", b.bytes, "the peaks of its moments must count its bytes")


def _check_beside(i: int, s: Stash, before: Stash, bad: _Bad, *, in_turn: bool) -> None:
    if s.made <= before.made:
        raise bad(f"stashes[{i}].made", s.made, "stashes come in the order in which they are made")
    if s.micro_batch == before.micro_batch:
        if (in_turn and s.gone < before.gone) or s.back >= before.back or s.needed >= before.needed:
            raise bad(
                f"stashes[{i}]",
                s,
                "a stash made later is gone later, comes back earlier and is needed earlier",
            )


class HasActivations(Protocol):
    """A job whose treatment of activations is known."""

    @property
    def activations(self) -> tuple[tuple[str, str], ...]: ...

    @property
    def checkpointing(self) -> bool: ...


def activations_text(w: HasActivations) -> str:
    """Such as "activations recomputed", or block by block "blocks 0-4 of 20 offloaded, 5-19 kept"."""
    if not w.activations:
        return f"activations {'recomputed' if w.checkpointing else 'kept'}"
    parts: list[tuple[str, str]] = []
    for how, word in (("offload", "offloaded"), ("recompute", "recomputed"), ("keep", "kept")):
        mine = [n for n, (_, chosen) in enumerate(w.activations) if chosen == how]
        if mine:
            parts.append((_spans(mine), word))
    longest = max(range(len(parts)), key=lambda i: len(parts[i][0]))
    if len(parts) > 1 and len(parts[longest][0]) > 20:
        parts.append(("the others", parts.pop(longest)[1]))
    of = f" of {len(w.activations)}"
    return "activations of blocks " + ", ".join(
        f"{which}{'' if i else of} {word}" for i, (which, word) in enumerate(parts)
    )


def _spans(numbers: Sequence[int]) -> str:
    strides = {b - a for a, b in pairwise(numbers)}
    if len(numbers) > 3 and len(strides) == 1 and strides != {1}:
        return f"{numbers[0]}, {numbers[1]} ... {numbers[-1]}"
    out: list[list[int]] = []
    for n in numbers:
        if out and n == out[-1][1] + 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in out)


def retype(w: Workload, dtype: str) -> Workload:
    """Bytes and flops stay; loss scaling and rates differ. Raises TraceError between types of different size."""
    if dtype == w.dtype:
        return replace(w, dtype_open=False) if w.dtype_open else w
    if not same_size(dtype, w.dtype):
        raise TraceError(f"workload {w.model!r} is in {w.dtype}; it cannot stand for {dtype}, whose size differs")
    tensors = tuple(replace(t, dtype=dtype) if t.dtype == w.dtype else t for t in w.tensors)
    return replace(w, dtype=dtype, tensors=tensors, dtype_open=False)


def with_optimizer(w: Workload, name: str | None = None, masters: str | None = None) -> Workload:
    """name: by default the workload's.
    masters: as in `optimizer_spec`, by default the workload's.

    Raises UnknownName.
    """
    if name is None and masters is None:
        return w
    masters = masters or w.optimizer.masters
    spec = optimizer_spec(name or w.optimizer.name, masters=masters, width=DTYPES[w.dtype].bytes)
    return w if spec == w.optimizer else replace(w, optimizer=spec)


def repeat_micro_batch(w: Workload, micro_batches: int) -> Workload:
    """w: of one micro-batch, which then comes `micro_batches` times. Raises TraceError if w already has several, or for
    more than MOST_MOMENTS moments."""
    instance("w", w, Workload, "a Workload", error=TraceError)
    micro_batches = whole("micro_batches", micro_batches, error=TraceError)
    if w.micro_batches != 1:
        raise TraceError(f"workload {w.model!r} already has {w.micro_batches} micro-batches; trace one to repeat it")
    body, step = w.moments[:-1], w.moments[-1]
    if (most := max(1, MOST_MOMENTS // max(1, len(body)))) < micro_batches:
        raise TraceError(
            f"workload {w.model!r}: micro_batches is {micro_batches}; one micro-batch has {len(body)} moments and an "
            f"iteration at most {MOST_MOMENTS}, so give at most {most}"
        )
    more = range(1, micro_batches)
    moments = (copy_moment(m, m.start_bytes, m.peak_bytes, m.end_bytes, u) for u in more for m in body)
    own = [use for use in w.uses if use.moment < len(body)]
    uses = (Use(moment=use.moment + u * len(body), tensor=use.tensor, kind=use.kind) for u in more for use in own)
    last = replace(step, micro_batch=micro_batches - 1)
    stashes = tuple(
        replace(
            s,
            micro_batch=u,
            made=s.made + u * len(body),
            gone=s.gone + u * len(body),
            back=s.back + u * len(body),
            needed=s.needed + u * len(body),
        )
        for u in range(micro_batches)
        for s in w.stashes
    )
    return replace(
        w,
        micro_batches=micro_batches,
        moments=(*body, *moments, last),
        uses=(*own, *uses),
        stashes=stashes,
    )


def single_micro_batch(w: Workload) -> Workload:
    """The reverse of `repeat_micro_batch`. Raises TraceError if the micro-batches differ."""
    if w.micro_batches == 1:
        return w
    count = (len(w.moments) - 1) // w.micro_batches
    one = replace(
        w,
        micro_batches=1,
        moments=(*w.moments[:count], replace(w.moments[-1], micro_batch=0)),
        uses=tuple(use for use in w.uses if use.moment < count),
        stashes=tuple(s for s in w.stashes if s.micro_batch == 0),
    )
    again = repeat_micro_batch(one, w.micro_batches)
    if again.moments != w.moments or set(again.uses) != set(w.uses) or again.stashes != w.stashes:
        raise TraceError(f"workload {w.model!r}: its {w.micro_batches} micro-batches differ; trace one to repeat it")
    return one
