"""Tape: a workload written operator by operator, as the model would run.

A family (presets/) calls `open` at a moment's begin, `op` for each operator that allocates, and `gradient` when a
parameter's is final; the level of live bytes is cut into moments.

[Note: sequence parallelism] Ranks that split a layer's products otherwise each have all of its input and, after a sum,
of its output, norms and residual sums. With sequence parallelism each has part of the tokens: an all-gather comes
before the products, a reduce-scatter replaces the sum, and as only the part is kept, backward repeats the gather.
Source: Korthikanti et al., 2022.

[Note: context parallelism] Ranks that split each sequence have all parameters and meet in attention alone: keys and
values are gathered before it and again in backward, their gradients reduce-scattered. Rank i of c has parts i and
2c-1-i of 2c, so under a causal mask all have as many scores. A ring moves as many bytes; what it hides behind the
scores is not modelled. Gradients of parameters are summed over these ranks as in data parallelism.
Source: Liu et al., 2023 (ring attention); Llama 3, 2024 (gathers); torch, _context_parallel/_load_balancer.py.

[Note: slices of borders] Ranks that split layers, not tokens, all have what crosses a border of stages: each sends a
slice, and its peers gather them. Source: Megatron-LM, scatter_gather_tensors_in_pipeline.

[Note: products in fp8] A layer's product reads both factors twice, for the largest value and for the cast, and writes
copies of a byte per element, which live until it ends. What backward needs keeps the working dtype.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pstar_sim.catalog.attention import AttentionCall, call_flops
from pstar_sim.dtypes import DTYPES
from pstar_sim.workload.workload import (
    Collective,
    Moment,
    Phase,
    Product,
    Tensor,
    Use,
    UseKind,
    copy_moment,
    in_low_dtype,
    product_flops,
)

TENSOR = "tensor"
"""Group of the ranks that split the tensors of each layer."""
CONTEXT = "context"
"""Group of the ranks that split each sequence ([Note: context parallelism])."""
_LAYER = re.compile(r"(?<=\.)(\d+)(?=\.)")
EXPERTS = "experts"
"""Group of the ranks that share the experts of a layer ([Note: experts on several ranks] in presets/llama_mlp.py)."""


class Crossing(NamedTuple):
    """What crosses a pipeline stage's border.

    what: one of CROSSINGS (workload.py).
    moment: if received, the last before the one that needs it; if sent, the last that makes it.
    turn: "each" micro-batch, or "first" or "last" alone.
    counted: by the tape; else peaks up to the transfer's end have the bytes besides.
    """

    receives: bool
    what: str
    moment: int
    bytes: int
    turn: str = "each"
    counted: bool = True


def _around_layer(path: str) -> tuple[str, int, str]:
    """With the layer's number."""
    before, number, behind = _LAYER.split(path, maxsplit=1)
    return before, int(number), behind


def input_gradient(product: Product) -> Product:
    """Of a linear layer's input."""
    batches, m, k, n = product
    return batches, m, n, k


def weight_gradient(product: Product) -> Product:
    """Of a linear layer's weight."""
    batches, m, k, n = product
    return batches, n, m, k


class Tape:
    """Sizes are in bytes.

    width: of products' inputs and outputs.
    wide: of parameters, their gradients, and activations that autocast leaves alone.
    level: non-model bytes alive.
    tensor, sequence, context, experts: as in `Stage` (presets/shared.py).
    saving: autograd keeps what backward needs, False in a checkpointed segment.
    low: [Note: products in fp8]
    alike: layers of one kind.
    """

    def __init__(self, dtype: str, autocast: str | None = None) -> None:
        self.dtype = dtype
        self.width = DTYPES[autocast or dtype].bytes
        self.wide = DTYPES[dtype].bytes
        self.autocast = autocast is not None
        self.alike = not self.autocast
        self.level = 0
        self.saving = True
        self.low = False
        self.tensor = 1
        self.sequence = False
        self.context = self.experts = 1
        self.tensors: list[Tensor] = []
        self.moments: list[Moment] = []
        self.uses: list[Use] = []
        self.crossings: list[Crossing] = []
        self._index: dict[str, int] = {}
        self._borrowed: dict[str, Tensor] = {}
        self.summed: dict[int, int] = {}  # moment -> bytes of its `sum_at_end`
        self._arriving = (0, 0)  # bytes of a slice that was received, and of the whole
        self._casts: dict[str, bool] = {}  # parameter whose copy is there -> whether backward needs it
        self._opened: tuple[str, Phase, str] | None = None
        self._again: tuple[int, int, int] | None = None
        self._reset()

    def _reset(self) -> None:
        self._start = self._peak = self.level
        self._flops = self._read = self._written = self._operators = 0
        self._products: list[Product] = []
        self._attentions: list[AttentionCall] = []
        self._collectives: list[Collective] = []

    # Parameters

    def parameter(self, name: str, *shape: int, spread: int = 1) -> None:
        """Its index is its place in the order of declaration.

        spread: as in `Tensor`.
        """
        size = math.prod(shape) * self.wide
        self._index[name] = len(self.tensors)
        self.tensors.append(Tensor(name=name, shape=shape, dtype=self.dtype, bytes=size, spread=spread))

    def tie(self, name: str, to: str) -> None:
        """`name` shares the storage of the earlier parameter `to`."""
        owner = self._index[to]
        shape = self.tensors[owner].shape
        self._index[name] = owner
        self.tensors.append(Tensor(name=name, shape=shape, dtype=self.dtype, bytes=0, tied_to=owner))

    def size(self, names: Iterable[str]) -> int:
        return sum(self._tensor(name).bytes for name in names)

    def _tensor(self, name: str) -> Tensor:
        return self._borrowed[name] if name in self._borrowed else self.tensors[self._index[name]]

    def weight_products(self, names: Sequence[str], *products: Product) -> list[Product]:
        """None if the weights are not trained."""
        return list(products)

    # Moments

    def open(self, event: str, module: str, phase: Phase, reads: Sequence[str] = ()) -> None:
        """Begins a moment; closes the one before."""
        self._close()
        if self._again is not None:
            self._repeat(*self._again)
        part, size = self._arriving
        self._arriving = (0, 0)
        if part < size:
            self._gathered(TENSOR, size)
            self.level -= part
        self._opened = (f"{event}:{module}" if event in ("begin", "end", "grad") else event, phase, module)
        for i in sorted({self._index[name] for name in reads if name not in self._borrowed}):
            self.uses.append(Use(moment=len(self.moments), tensor=i, kind=UseKind.READ))
            self._read += self.tensors[i].bytes
        self._read += sum(self._borrowed[name].bytes for name in {*reads} & self._borrowed.keys())

    def repeat(self, first: int, times: int, layers: int) -> None:
        """Moments from `first` to the next come `times` times more, each `layers` layers further on."""
        self._again = first, times, layers

    def _repeat(self, first: int, times: int, layers: int) -> None:
        self._again = None
        moments, uses = self.moments[first:], [u for u in self.uses if u.moment >= first]
        grown = self.level - moments[0].start_bytes
        before, layer, behind = _around_layer(self.tensors[uses[0].tensor].name)
        tensors = self._index[f"{before}{layer + layers}{behind}"] - uses[0].tensor
        named = [(m, m.name.removesuffix(m.module), *_around_layer(m.module)) for m in moments]
        summed = [(at, size) for at, size in self.summed.items() if at >= first]
        for n in range(1, times + 1):
            for m, event, before, layer, behind in named:
                start, peak, end = (size + n * grown for size in (m.start_bytes, m.peak_bytes, m.end_bytes))
                module = f"{before}{layer + n * layers}{behind}"
                self.moments.append(copy_moment(m, start, peak, end, named=(event + module, module)))
            later, other = n * len(moments), n * tensors
            self.uses += [Use(moment=u.moment + later, tensor=u.tensor + other, kind=u.kind) for u in uses]
            self.summed |= {at + later: size for at, size in summed}
        self.level += times * grown
        self._reset()

    def close(self) -> None:
        """With the optimizer step."""
        self.open("step", "<root>", Phase.ADAM)
        if summed := sum(self.summed.values()):
            self.all_reduce(summed)
        self._close()

    def _close(self) -> None:
        if self._opened is not None:
            name, phase, module = self._opened
            self.moments.append(
                Moment(
                    name=name,
                    phase=phase,
                    module=module,
                    micro_batch=0,
                    flops=self._flops,
                    bytes_read=self._read,
                    bytes_written=self._written,
                    start_bytes=self._start,
                    peak_bytes=self._peak,
                    end_bytes=self.level,
                    products=tuple(self._products),
                    attentions=tuple(self._attentions),
                    operators=self._operators,
                    collectives=tuple(self._collectives),
                )
            )
        self._reset()

    # Operators

    def op(
        self,
        out: int = 0,
        *,
        dead: int = 0,
        unsaved: int = 0,
        products: Sequence[Product] = (),
        attention: AttentionCall | None = None,
        read: int | None = None,
    ) -> None:
        """Allocates `out` bytes, then frees `dead`, and `unsaved` if autograd saves nothing.

        read: activation bytes, by default `out`; `open` counts parameters.
        """
        copied = self._cast_low(products) if self.low else 0
        self.level += out + copied
        self._peak = max(self._peak, self.level)
        self.level -= copied + (dead if self.saving else dead + unsaved)
        self._flops += sum(map(product_flops, products))
        self._products += products
        if attention is not None:
            self._flops += call_flops(attention)
            self._attentions.append(attention)
        moved = out if read is None else read
        self._operators += bool(moved or out or products)
        self._read += moved
        self._written += out
        assert self.level >= 0, "more bytes freed than taken"

    def _cast_low(self, products: Iterable[Product]) -> int:
        """Returns the bytes of the largest product's copies."""
        assert self._opened is not None
        inside = any(part.isdigit() for part in self._opened[2].split("."))
        sizes = [b * (m * k + k * n) for b, m, k, n in filter(in_low_dtype, products if inside else ())]
        self._read += 2 * self.width * sum(sizes)
        self._written += sum(sizes)
        self._operators += 2 * len(sizes)
        return max(sizes, default=0)

    def all_reduce(self, *sizes: int) -> None:
        """In place, over the ranks that split a layer's tensors."""
        if self.tensor > 1:
            self._collectives += [("all_reduce", TENSOR, size) for size in sizes]

    def gather(self, size: int) -> int:
        """Ranks' parts come together before a product. Returns the bytes for the caller to free, 0 where each rank has
        all."""
        return self._gathered(TENSOR, size) if self.sequence else 0

    def gather_keys(self, size: int) -> int:
        """Keys and values of one rank's part of the sequences, `size` bytes, become those of all. Returns the bytes of
        all; 0 where each rank has them."""
        return self._gathered(CONTEXT, size * self.context) if self.context > 1 else 0

    def _gathered(self, group: str, size: int) -> int:
        self._collectives.append(("all_gather", group, size))
        self.level += size
        self._peak = max(self._peak, self.level)
        return size

    def reduce(self, size: int) -> None:
        """Parts of a product are added up in place, or scattered."""
        if not self.sequence:
            self.all_reduce(size)
            return
        self._scattered(TENSOR, size, size // self.tensor)

    def reduce_keys(self, size: int) -> None:
        """Gradients of all keys and values become those of one rank's part, `size` bytes."""
        if self.context > 1:
            self._scattered(CONTEXT, size * self.context, size)

    def _scattered(self, group: str, size: int, part: int) -> None:
        self._collectives.append(("reduce_scatter", group, size))
        self.level += part
        self._peak = max(self._peak, self.level)
        self.level -= size

    def exchange(self, size: int) -> None:
        """Rows, `size` bytes of a rank, go to the ranks of their experts, or come back; as many arrive."""
        if self.experts > 1:
            self._collectives.append(("all_to_all", EXPERTS, size))
            self.level += size
            self._peak = max(self._peak, self.level)
            self.level -= size

    def sum_at_end(self, names: Iterable[str]) -> None:
        """Of parameters that ranks have whole, but compute from part of the tokens: one all-reduce before the optimizer
        step."""
        size = self.size(names) if self.sequence else 0
        self.summed[len(self.moments)] = self.summed.get(len(self.moments), 0) + size

    def receive(self, what: str, size: int) -> None:
        """What the next moment needs comes from another stage ([Note: slices of borders])."""
        part = self._slice_of(size)
        self.crossings.append(Crossing(True, what, len(self.moments), part))
        self.level += part
        self._peak = max(self._peak, self.level)
        self._arriving = (part, size)

    def send(self, what: str, size: int) -> None:
        """What this moment made goes to another stage, ends here."""
        part = self._slice_of(size)
        copied = part if part < size else 0
        self.op(copied)
        self.crossings.append(Crossing(False, what, len(self.moments), part))
        self.level -= size + copied

    def _slice_of(self, size: int) -> int:
        return size if self.sequence else -(-size // self.tensor)

    def cross_once(self, receives: bool, what: str, size: int, *, turn: str, counted: bool = False) -> None:
        """As `receive` and `send`, in one micro-batch only."""
        self.crossings.append(Crossing(receives, what, len(self.moments), size, turn, counted))

    def borrow(self, name: str, *shape: int) -> None:
        """A copy of another stage's tensor, whose gradients add up ([Note: borders] in workload.py)."""
        size = math.prod(shape) * self.wide
        self._borrowed[name] = Tensor(name=name, shape=shape, dtype=self.dtype, bytes=size)

    def cast(self, names: Iterable[str]) -> None:
        """Autocast copies parameters at first use. [Note: casts of parameters] A copy lives until the outermost
        autocast ends, with forward or a checkpoint's recompute. Backward needs copies of matrices that no checkpoint
        drops, each until its input gradient is there."""
        for name in names if self.autocast else ():
            if name not in self._casts:
                self._casts[name] = self.saving and len(self._tensor(name).shape) > 1
                self.op(self.grown([name]), read=self.size([name]))

    def end_autocast(self) -> None:
        gone = [name for name, needed in self._casts.items() if not needed]
        self.level -= self.grown(gone)
        for name in gone:
            del self._casts[name]

    def uncast(self, names: Iterable[str]) -> None:
        """Gradients of copies end as gradients of parameters."""
        for name in names if self.autocast else ():
            size = self.grown([name])
            self.level -= size if self._casts.pop(name, False) else 0
            self.op(self.size([name]), dead=size, read=size)

    def grown(self, names: Iterable[str]) -> int:
        """Bytes of gradients as backward makes them: under autocast, of the copies."""
        return self.size(names) * self.width // self.wide

    def gradient(self, names: Iterable[str], *, allocated: bool = True) -> None:
        """Final gradients leave non-model data at once.

        allocated: already counted.
        """
        names = tuple(names)
        if not allocated:
            self.op(self.size(names))
        for i in sorted({self._index[name] for name in names if name not in self._borrowed}):
            self.uses.append(Use(moment=len(self.moments), tensor=i, kind=UseKind.GRADIENT))
        self.level -= self.size(names)

    def linear_backward(
        self, names: Sequence[str], *, grad_in: int, grad_out: int, saved: int, product: Product, dead: int = 0
    ) -> None:
        """grad_in, grad_out: bytes of input and (read) output gradients.
        dead: freed at the end.
        """
        products = [input_gradient(product), *self.weight_products(names, weight_gradient(product))]
        self.op(grad_in + self.grown(names), products=products, read=2 * grad_out + saved)
        self.uncast(names)
        self.gradient(names)
        self.op(dead=dead)
