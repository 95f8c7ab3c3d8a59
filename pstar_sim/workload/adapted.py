"""Adapters and quantised bases of captured and recorded workloads: what the model would be with them.

A matrix's gradient needs the same input as A's. So `executor.capture` traces the model with everything frozen but the
target matrices and `Adapter.save`, and here each of their gradients makes way for an adapter (`LowRank`).

[Note: frozen after the fact] Of a trace in which everything is trained, gradients of what is frozen now and the
products that make them are left out. The inputs kept for them stay (a trace does not say for which operators a tensor
is kept), as does the backward pass down to the embedding. So the answer is an upper bound, and says so.

A linear module is known by the product of its forward pass. A matrix's gradient is made behind that of the module's
input: a peak above both together is elsewhere, and stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

from pstar_sim.dtypes import BASES, DTYPES
from pstar_sim.errors import ModelError
from pstar_sim.workload.adapter import Adapter, check_save, chosen_modules, saved_part
from pstar_sim.workload.axes import all_axes
from pstar_sim.workload.lora import OWN_ADAPTERS, LowRank, adapter_note, is_quantised, is_stack, low_rank, saved_name
from pstar_sim.workload.mixing import block_of
from pstar_sim.workload.tape import Tape
from pstar_sim.workload.workload import Moment, Phase, Product, Tensor, Use, UseKind, Workload, product_flops

ESTIMATED = "seconds of moments that adapters or a base change are estimated, the others recorded"
UPPER = "an upper bound: the trace keeps inputs of matrices that are frozen now (pstar trace --lora leaves them out)"


def adapted(w: Workload, adapter: Adapter | None, base: str | None = None) -> Workload:
    """Returns the workload with these adapters, and with its frozen matrices in this base.

    w: of a model that is trained whole, or of which the targets and what is saved are.
    base: as in `preset`.

    Raises ModelError for what the model has not, and for a base without adapters.
    """
    check_base(adapter, base)
    if adapter is None:
        return w
    if w.autocast:
        raise ModelError(f"lora: {w.model} was traced under autocast; {OWN_ADAPTERS}, or trace it without autocast")
    return _Change(w, adapter, base).made()


def check_base(lora: object, base: str | None) -> None:
    """Raises ModelError for a base that is not known, and for one without adapters."""
    names = all_axes()["base"].names
    if base is not None and base not in names:
        raise ModelError(f"base is {base!r}; known bases are {', '.join(names)}")
    if lora is None and base in BASES:
        raise ModelError(
            f"base is {base!r}; what is trained is not quantised; train adapters beside it, such as lora r=16"
        )


@dataclass
class _Figures:
    """Changes of the figures of a moment.

    gone: bytes of gradients that are not made any more.
    beside: the most bytes beside the moment's products, of a dequantised matrix or of an adapter's operators.
    ahead: the most bytes in front of the products.
    stacks: bytes of dequantised stacks, which are there together.
    """

    flops: int = 0
    read: int = 0
    written: int = 0
    operators: int = 0
    gone: int = 0
    beside: int = 0
    ahead: int = 0
    stacks: int = 0
    removed: tuple[Product, ...] = ()
    added: tuple[Product, ...] = ()
    changed: bool = False

    def add(self, m: Moment) -> None:
        """What a tape wrote."""
        self.flops += m.flops
        self.read += m.bytes_read
        self.written += m.bytes_written
        self.operators += m.operators
        self.added += m.products
        self.changed = True


class _Change:
    def __init__(self, w: Workload, adapter: Adapter, base: str | None) -> None:
        self.w, self.adapter = w, adapter
        self.base = BASES.get(base or "")
        self.width = DTYPES[w.dtype].bytes
        names = [t.name for t in w.tensors]
        if any(name.endswith(".lora_A.weight") or ".lora_A." in name for name in names):
            raise ModelError(f"lora: {w.model} has adapters already; leave --lora and --base out")
        check_save(adapter, names)
        self.saved = {i: part for i, t in enumerate(w.tensors) if (part := saved_part(adapter, t.name)) is not None}
        self._check_saved()
        modules = {self._module(i): i for i in self.products}
        heads = [module for module, i in modules.items() if self._is_head(i)]
        chosen = [modules[module] for module in chosen_modules(adapter, list(modules), heads)]
        self.pairs = {i: self._pair(i) for i in self._trained(chosen)}
        self.figures = [_Figures() for _ in w.moments]
        self.shifts = [0] * (len(w.moments) + 1)  # changes of the level from the moment's begin
        self.packed = {i for i, t in enumerate(w.tensors) if self._is_packed(i, t)}

    def _module(self, i: int) -> str:
        return self.w.tensors[i].name.removesuffix(".weight")

    def _check_saved(self) -> None:
        w = self.w
        owners = [(i, t.tied_to) for i, t in enumerate(w.tensors) if t.tied_to is not None]
        for i, owner in owners:
            if i in self.saved or owner in self.saved:
                mine, other = (i, owner) if i in self.saved else (owner, i)
                raise ModelError(
                    f"lora save: {w.tensors[mine].name} shares its table with {w.tensors[other].name}; peft trains a "
                    f"copy of one of them: {OWN_ADAPTERS}"
                )

    @cached_property
    def products(self) -> dict[int, Product]:
        """Matrix of a linear module -> the product of its forward pass."""
        found: dict[int, Product] = {}
        for m, reads in zip(self.w.moments, self.w.reads):
            if m.phase is not Phase.FWD:
                continue
            for i in reads:
                t = self.w.tensors[i]
                if i not in found and len(t.shape) == 2 and t.name == f"{m.module}.weight":
                    shapes = t.shape[::-1], t.shape
                    product = next((p for p in m.products if p[2:] in shapes), None) or self._counted(m, t)
                    if product is not None:
                        found[i] = product
        return found

    def _counted(self, m: Moment, t: Tensor) -> Product | None:
        rows, rest = divmod(m.flops, 2 * t.numel)
        if m.products or not rows or rest:
            return None
        bias = next((other.shape for other in self.w.tensors if other.name == f"{m.module}.bias"), t.shape[:1])
        outputs, inputs = t.shape if bias == t.shape[:1] else t.shape[::-1]
        return 1, rows, inputs, outputs

    def _is_head(self, i: int) -> bool:
        """Whether a linear module makes the logits: it has a row for each of a table, and is in no block."""
        w = self.w
        tables = {t.shape[0] for n, t in enumerate(w.tensors) if len(t.shape) == 2 and n not in self.products}
        return block_of(w.tensors[i].name) is None and (
            w.tensors[i].shape[0] in tables or any(t.tied_to == i for t in w.tensors)
        )

    def _trained(self, chosen: Sequence[int]) -> list[int]:
        """All of them, or in a trace for adapters those that its capture knew as linear modules. Raises ModelError
        where others are trained."""
        w = self.w
        trained = [i for i in chosen if i in self.gradients]
        if len(trained) < len(chosen) and (not trained or self.gradients - self.saved.keys() - {*trained}):
            name = next(w.tensors[i].name for i in chosen if i not in self.gradients)
            raise ModelError(
                f"lora: {name} is not trained in this trace, so that it does not say what backward keeps for an "
                f"adapter; trace the model with --lora, or {OWN_ADAPTERS}"
            )
        return trained

    @cached_property
    def gradients(self) -> set[int]:
        return {i for row in self.w.gradients for i in row}

    def _pair(self, i: int) -> LowRank:
        w, t = self.w, self.w.tensors[i]
        _, _, inputs, outputs = self.products[i]
        biased = any(other.name == f"{self._module(i)}.bias" for other in w.tensors)
        return low_rank(self.adapter, self._module(i), inputs, outputs, packed=self._is_packed(i, t), biased=biased)

    def _is_packed(self, i: int, t: Tensor) -> bool:
        linear = i in self.products or is_stack(t.name, t.shape)
        inside = t.tied_to is None and block_of(t.name) is not None
        return bool(
            self.base and linear and inside and i not in self.saved and is_quantised(t.name, t.shape, self.base)
        )

    # The workload

    def made(self) -> Workload:
        w = self.w
        late = any(not t.frozen for i, t in enumerate(w.tensors) if i not in self.pairs and i not in self.saved)
        for at, m in enumerate(w.moments):
            self._without_gradients(at, m)
            for i in {*w.reads[at], *w.gradients[at]}:
                if i in self.products or i in self.packed:
                    self._multiply(at, m, i)
        tensors, places = self._tensors()
        uses = self._uses(places)
        level, moments = 0, []
        for at, m in enumerate(w.moments):
            level += self.shifts[at]
            moments.append(self._moment(m, self.figures[at], level, level + self.shifts[at + 1]))
        recorded = any(m.duration_s is not None for m in w.moments) and ESTIMATED
        notes = [adapter_note(tensors, self.adapter, w.dtype), late and UPPER, recorded, w.notes]
        return replace(
            w,
            tensors=tuple(tensors),
            moments=tuple(moments),
            uses=uses,
            notes="; ".join(note for note in notes if note),
        )

    def _without_gradients(self, at: int, m: Moment) -> None:
        figures = self.figures[at]
        for i in self.w.gradients[at]:
            if i in self.saved:
                continue
            t = self.w.tensors[i]
            figures.gone += t.bytes
            figures.written -= t.bytes
            figures.changed = True
            if i not in self.products:
                continue
            _, rows, inputs, outputs = self.products[i]
            product = next((p for p in m.products if p[2] == rows and {p[1], p[3]} == {inputs, outputs}), None)
            if product is not None or (m.flops and not m.products):
                figures.removed += (product,) if product is not None else ()
                figures.flops -= product_flops(self.products[i])
                figures.read -= rows * (inputs + outputs) * self.width
                figures.operators -= 1

    def _multiply(self, at: int, m: Moment, i: int) -> None:
        """What stands beside the product of a matrix: its dequantised form, and its adapter."""
        figures, pair = self.figures[at], self.pairs.get(i)
        trained = i in self.w.gradients[at]
        forward = m.phase is not Phase.BWD and not trained
        again = m.phase is Phase.RECOMPUTE and trained and pair is not None  # its recompute would have ended here
        if i in self.packed:
            self._dequantise(figures, i, [forward] if not again else [True, False])
        if pair is None:
            return
        tokens = self.products[i][1]
        kept = pair.kept_bytes(self.width, tokens)
        if forward or again:
            saves = m.phase is Phase.RECOMPUTE or (m.micro_batch, i) not in self.recomputed
            written = _written(pair, self.w.dtype, tokens, saves=saves, product=again)
            figures.add(written)
            if again:
                figures.ahead = written.peak_bytes
            else:
                figures.beside = max(figures.beside, written.peak_bytes)
            self.shifts[at + 1] += written.end_bytes
        if trained:
            below = i in self.w.reads[at]
            written = _written(pair, self.w.dtype, tokens, backward=True, below=below)
            figures.add(written)
            figures.beside = max(figures.beside, written.peak_bytes - (0 if again else kept))
            self.shifts[at + 1] -= kept

    @cached_property
    def recomputed(self) -> set[tuple[int, int]]:
        """(micro-batch, tensor) that a recompute reads: its forward pass keeps nothing."""
        rows = zip(self.w.moments, self.w.reads)
        return {(m.micro_batch, i) for m, reads in rows if m.phase is Phase.RECOMPUTE for i in reads}

    def _dequantise(self, figures: _Figures, i: int, passes: Sequence[bool]) -> None:
        assert self.base is not None
        t = self.w.tensors[i]
        rooms = [self._room(i, forward) for forward in passes]
        if is_stack(t.name, t.shape):
            figures.stacks += max(rooms)
        figures.beside = max(figures.beside, figures.stacks, *rooms)
        figures.written += sum(rooms)
        figures.read += sum(rooms) + len(rooms) * self._stored(i) - t.bytes
        figures.operators += len(rooms)
        figures.changed = True

    def _stored(self, i: int) -> int:
        assert self.base is not None
        return self.base.stored(self._shape(i))

    def _shape(self, i: int) -> tuple[int, ...]:
        return self.products[i][:1:-1] if i in self.products else self.w.tensors[i].shape

    def _room(self, i: int, forward: bool) -> int:
        assert self.base is not None
        numel = self.w.tensors[i].numel
        if forward and self.base.name == "int8":
            _, tokens, inputs, outputs = self.products[i]
            return tokens * (inputs + max(2 * inputs, 4 * outputs))
        return numel * self.width

    def _tensors(self) -> tuple[list[Tensor], dict[int, int]]:
        """Each with what stands beside it, and the places of what the uses mean now."""
        tensors: list[Tensor] = []
        places: dict[int, int] = {}
        for i, t in enumerate(self.w.tensors):
            places[i] = len(tensors)
            if i in self.packed:
                assert self.base is not None
                stored = replace(t, dtype=self.base.name, shape=self._shape(i), bytes=self._stored(i), frozen=True)
                tensors.append(stored)
            else:
                tensors.append(replace(t, frozen=True))
            if i in self.saved:
                places[i] = len(tensors)
                tensors.append(replace(t, name=saved_name(t.name, self.saved[i]), frozen=False))
            for name, shape in self.pairs[i].parameters.items() if i in self.pairs else ():
                size = prod(shape) * self.width
                tensors.append(Tensor(name=name, shape=shape, dtype=self.w.dtype, bytes=size, group=t.group))
        owners = {places[i]: places[t.tied_to] for i, t in enumerate(self.w.tensors) if t.tied_to is not None}
        return [replace(t, tied_to=owners.get(n)) for n, t in enumerate(tensors)], places

    def _uses(self, places: Mapping[int, int]) -> tuple[Use, ...]:
        uses: dict[Use, None] = {}
        for use in self.w.uses:
            i, read = use.tensor, use.kind is UseKind.READ
            beside = range(places[i] + 1, places[i] + 1 + len(self.pairs[i].parameters)) if i in self.pairs else ()
            own = [places[i]] if read or i in self.saved else []
            uses |= dict.fromkeys(replace(use, tensor=place, kind=UseKind.READ) for place in beside)
            uses |= dict.fromkeys(replace(use, tensor=place) for place in (*own, *beside))
        return tuple(uses)

    def _moment(self, m: Moment, figures: _Figures, before: int, behind: int) -> Moment:
        """before, behind: changes of the level at begin and end."""
        left = list(m.products)
        for product in figures.removed:
            left.remove(product)
        made = m.start_bytes + sum(batches * rows * columns for batches, rows, _, columns in left) * self.width
        known = bool(m.products) or not m.flops
        made = made if known else m.peak_bytes
        rest = m.peak_bytes
        if rest <= made + figures.gone:
            rest = max(m.start_bytes, m.end_bytes, rest - figures.gone)
        most = max(rest, m.start_bytes + figures.ahead, made + figures.beside if figures.beside else 0)
        return replace(
            m,
            flops=m.flops + figures.flops,
            bytes_read=max(0, m.bytes_read + figures.read),
            bytes_written=max(0, m.bytes_written + figures.written),
            operators=max(0, m.operators + figures.operators),
            products=(*left, *figures.added) if known else (),
            start_bytes=m.start_bytes + before,
            peak_bytes=max(most + before, m.end_bytes + behind),
            end_bytes=m.end_bytes + behind,
            duration_s=None if figures.changed else m.duration_s,
        )


@lru_cache(maxsize=256)
def _written(
    pair: LowRank,
    dtype: str,
    tokens: int,
    *,
    saves: bool = True,
    product: bool = False,
    backward: bool = False,
    below: bool = True,
) -> Moment:
    """A moment with the operators of an adapter alone.

    product: that of its matrix comes first.
    below: as in `LowRank.backward`.
    """
    t = Tape(dtype)
    for name, shape in pair.parameters.items():
        t.parameter(name, *shape)
    t.level = pair.kept_bytes(t.width, tokens) if backward else 0
    t.saving = saves
    t.open("begin", pair.module, Phase.FWD, list(pair.parameters))
    if backward:
        pair.backward(t, tokens, below=below)
    else:
        out = tokens * pair.outputs * t.width
        if product:
            t.op(out, products=[(1, tokens, pair.inputs, pair.outputs)], read=tokens * pair.inputs * t.width)
        pair.forward(t, tokens, stops=product)
        t.op(dead=out if product else 0)
    t.close()
    return t.moments[0]
