"""LoRA: a preset whose own parameters are frozen and whose matrices have low-rank adapters beside them.

`AdaptedTape` writes the families (presets/) with y = W x + s B (A x) for each target matrix W; A is rank x in, B out x
rank. Compared with training the whole model:

- parameters: every base tensor is frozen. A and B are trained, in the working dtype (PEFT's are in fp32: 2 bytes more
  for each adapter parameter).
- flops: forward takes 2 T r (in + out) more per target, backward twice that; gradients of base matrices, a third of the
  model's matrix flops, are not computed.
- activations: A x (T r values) is kept for backward per target. While an adapter runs, its output, the scaled output
  and the sum are alive beside the base's. There is no dropout before A, so no copy of x.
- recompute: an adapter on a checkpointed layer's last matrix makes that recompute too: the tensor that backward needs
  last, A x, comes after it.

The workload is an upper bound: inputs kept only for a frozen matrix's gradient count, and backward goes down to the
embedding. Source: Hu et al., LoRA, 2021; peft's Linear layer.

[Note: quantised base] Frozen matrices of the layers' linear modules, adapted or not, are stored in a base of `BASES`.
Embeddings, head, norms, biases and routers keep the working dtype, and so do stacks of experts (no linear modules in
transformers) unless the base is of stacks too. Each pass dequantises a matrix before its product: written and read in
the working dtype, alive until the product ends; matrices of all experts of a layer together. The forward product of
int8 instead has its input's codes, an fp16 copy of it and later 32-bit sums beside them. Source: bitsandbytes'
MatMul4Bit and MatMul8bitLt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pstar_sim.catalog.attention import AttentionCall
from pstar_sim.dtypes import BASES, Dtype
from pstar_sim.errors import ModelError
from pstar_sim.workload.adapter import Adapter
from pstar_sim.workload.tape import Tape, input_gradient, weight_gradient
from pstar_sim.workload.workload import Phase, Product, Tensor, Use, UseKind, Workload, product_flops

__all__ = ["ALL_LINEAR", "AdaptedTape", "adapter_of", "base_of", "default_targets", "is_stack", "quantised_params"]

ALL_LINEAR = "all-linear"
_DEFAULT = {
    "gpt": ("c_attn",),
    "llama": ("q_proj", "v_proj"),
    "bert": ("query", "value"),
    "vit": ("q_proj", "v_proj"),
}


def default_targets(family: str) -> tuple[str, ...]:
    """peft's: query and value, or the fused matrix."""
    return _DEFAULT[family]


def adapter_of(workload: Workload) -> Adapter | None:
    """From the tensors of `AdaptedTape`."""
    found = [t for t in workload.tensors if t.name.endswith(".lora_A.weight")]
    if not found:
        return None
    names = dict.fromkeys(t.name.removesuffix(".lora_A.weight").rpartition(".")[2] for t in found)
    return Adapter(rank=found[0].shape[0], targets=tuple(names))


def base_of(workload: Workload) -> str | None:
    """The dtype of frozen matrices, one of `BASES`; None: the working dtype."""
    return next((t.dtype for t in workload.tensors if t.dtype in BASES), None)


def is_stack(name: str, shape: Sequence[int]) -> bool:
    """The matrices of all experts of a layer."""
    return len(shape) == 3 and ".experts." in name


def quantised_params(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel for t in tensors if t.dtype in BASES)


@dataclass(frozen=True)
class _AdaptedWeight:
    a: str
    b: str
    inputs: int
    outputs: int
    numel: int


class AdaptedTape(Tape):
    """Every parameter is frozen, and every target matrix has an adapter.

    base: of `BASES`, for matrices of linear modules; None: the working dtype.
    tokens: rows of every matmul.
    input_first: matrices are in x out (GPT-2).
    """

    def __init__(self, dtype: str, adapter: Adapter, *, base: str | None, family: str, tokens: int) -> None:
        super().__init__(dtype)
        self.base = BASES.get(base or "")
        self.adapter = adapter
        self.tokens = tokens
        self.names = adapter.targets if adapter.targets is not None else default_targets(family)
        self.input_first = family == "gpt"
        self._targets: dict[str, _AdaptedWeight] = {}  # weight -> its adapter
        self._matrices: set[str] = set()
        self._pending: list[str] = []  # matrices read in this forward moment whose matmul has not come yet
        self._stacks: list[str] = []  # quantised matrices of experts, likewise
        self._phase = Phase.FWD
        self._inside = False

    @property
    def adapted(self) -> int:
        return len(self._targets)

    # Parameters

    def parameter(self, name: str, *shape: int) -> None:
        super().parameter(name, *shape)
        self.tensors[-1] = replace(self.tensors[-1], frozen=True)
        module, _, kind = name.rpartition(".")
        parts = module.split(".")
        inside = any(part.isdigit() for part in parts)
        if self.base is not None and inside and _is_quantised(name, shape, self.base):
            stored = shape[::-1] if self.input_first else shape
            size = self.base.stored(stored)
            self.tensors[-1] = replace(self.tensors[-1], dtype=self.base.name, shape=stored, bytes=size)
        if kind != "weight" or len(shape) != 2:
            return
        self._matrices.add(name)
        if inside and (parts[-1] in self.names or ALL_LINEAR in self.names):
            inputs, outputs = shape if self.input_first else shape[::-1]
            if self.adapter.rank >= min(shape):
                raise ModelError(
                    f"lora r={self.adapter.rank}: {name} is {shape[0]} x {shape[1]}; the rank must be less than "
                    f"{min(shape)}"
                )
            a, b = f"{module}.lora_A.weight", f"{module}.lora_B.weight"
            super().parameter(a, self.adapter.rank, inputs)
            super().parameter(b, outputs, self.adapter.rank)
            self._targets[name] = _AdaptedWeight(a, b, inputs, outputs, shape[0] * shape[1])

    def size(self, names: Iterable[str]) -> int:
        """Base parameters have no gradient."""
        return 0

    def weight_products(self, *products: Product) -> list[Product]:
        return []

    def borrow(self, name: str, *shape: int) -> None:
        """A frozen table needs no other stage."""
        self.parameter(name, *shape)

    # Moments

    def open(self, event: str, module: str, phase: Phase, reads: Sequence[str] = ()) -> None:
        self._settle()
        beside = [x for name in reads if name in self._targets for x in self._adapters(name)]
        super().open(event, module, phase, [*reads, *beside])
        self._phase = phase
        if phase in (Phase.FWD, Phase.RECOMPUTE):
            self._pending = [name for name in reads if name in self._matrices]
            self._stacks = [name for name in reads if self._is_stored(name) and name not in self._matrices]

    def _adapters(self, name: str) -> tuple[str, str]:
        target = self._targets[name]
        return target.a, target.b

    def _settle(self) -> None:
        """Matmuls of matrices that the moment read but did not multiply: a recompute would have ended before, but an
        adapter needs them."""
        left, self._pending, self._stacks = self._pending, [], []
        for name in left:
            if name in self._targets and self._phase is Phase.RECOMPUTE:
                target = self._targets[name]
                out = self.tokens * target.outputs * self.width
                whole = (1, self.tokens, target.inputs, target.outputs)
                room = self._dequantise([name], forward=True)
                super().op(out, products=[whole], read=self.tokens * target.inputs * self.width)
                super().op(dead=room)
                self._forward(target)
                super().op(dead=out)

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
        done = [] if not products or self._inside else self._multiplied(products)
        room = self._dequantise(done, forward=True)
        super().op(out, dead=dead, unsaved=unsaved, products=products, attention=attention, read=read)
        super().op(dead=room)
        for each in done:
            if each in self._targets:
                self._forward(self._targets[each])

    def _multiplied(self, products: Sequence[Product]) -> list[str]:
        """The first pending matrix if these are its products, several (q, k and v), or those of all experts."""
        total = 0
        for count, name in enumerate(self._pending, start=1):
            total += self._numel(name)
            if sum(map(product_flops, products)) == 2 * self.tokens * total:
                done, self._pending = self._pending[:count], self._pending[count:]
                return done
        of_experts = {product[:1:-1] for product in products}  # (columns, rows)
        done = [name for name in self._stacks if self.tensors[self._index[name]].shape[1:] in of_experts]
        self._stacks = [name for name in self._stacks if name not in done]
        return done

    def _is_stored(self, name: str) -> bool:
        return self.base is not None and name in self._index and self.tensors[self._index[name]].dtype in BASES

    def _dequantise(self, names: Iterable[str], *, forward: bool = False) -> int:
        """One after the other, experts together; returns the bytes alive during the product, which the caller frees."""
        names = [name for name in names if self._is_stored(name)]
        alone = [self._room(name, forward) for name in names if name in self._matrices]
        together = sum(self._numel(name) * self.width for name in names if name not in self._matrices)
        *others, largest = sorted((together, *alone))
        for size in filter(None, others):
            super().op(size, dead=size)
        super().op(largest)
        return largest

    def _room(self, name: str, forward: bool) -> int:
        weight = self.tensors[self._index[name]]
        if forward and weight.dtype == "int8":
            outputs, inputs = weight.shape
            return self.tokens * (inputs + max(2 * inputs, 4 * outputs))
        return weight.numel * self.width

    def _numel(self, name: str) -> int:
        return self.tensors[self._index[name]].numel

    def _forward(self, target: _AdaptedWeight) -> None:
        rank, w, tokens = self.adapter.rank, self.width, self.tokens
        low, out = tokens * rank * w, tokens * target.outputs * w
        self._inside = True
        self.op(low, unsaved=low, products=[(1, tokens, target.inputs, rank)], read=tokens * target.inputs * w)
        self.op(out, products=[(1, tokens, rank, target.outputs)], read=low)
        self.op(out, dead=out)  # scaled
        self.op(out, dead=2 * out, read=2 * out)  # added to the base's output
        self._inside = False

    def gradient(self, names: Iterable[str], *, allocated: bool = True) -> None:
        """Base parameters have none, and `linear_backward` writes those of adapters."""

    def linear_backward(
        self, names: Sequence[str], *, grad_in: int, grad_out: int, saved: int, product: Product, dead: int = 0
    ) -> None:
        room = self._dequantise(names)
        super().op(grad_in, products=[input_gradient(product)], read=grad_out)
        super().op(dead=room)
        rank, w, tokens = self.adapter.rank, self.width, self.tokens
        for name in names:
            target = self._targets.get(name)
            if target is None:
                continue
            low, out, back = tokens * rank * w, tokens * target.outputs * w, tokens * target.inputs * w
            grad_a, grad_b = rank * target.inputs * w, rank * target.outputs * w
            self.op(out, read=out)  # the scaled gradient
            b = (1, tokens, rank, target.outputs)
            self.op(low + grad_b, dead=out, products=[input_gradient(b), weight_gradient(b)], read=2 * out + low)
            self._final(target.b, grad_b)
            a = (1, tokens, target.inputs, rank)
            self.op(back + grad_a, dead=2 * low, products=[input_gradient(a), weight_gradient(a)], read=2 * low + back)
            self._final(target.a, grad_a)
            self.op(back, dead=2 * back, read=2 * back)  # both gradients of the input added
        self.op(dead=dead)

    def _final(self, name: str, size: int) -> None:
        self.uses.append(Use(moment=len(self.moments), tensor=self._index[name], kind=UseKind.GRADIENT))
        self.level -= size


def _is_quantised(name: str, shape: Sequence[int], base: Dtype) -> bool:
    """[Note: quantised base]"""
    if is_stack(name, shape):
        return base.stacks
    return len(shape) == 2 and name.endswith(".weight") and not name.endswith(".mlp.gate.weight")
