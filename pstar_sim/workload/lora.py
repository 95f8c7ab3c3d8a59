"""LoRA: a preset whose own parameters are frozen and whose matrices have low-rank adapters beside them.

`AdaptedTape` writes the same families (presets/) down with y = W x + s B (A x) for each target matrix W. A is rank x
in, B is out x rank. The workload differs from training the whole model in these points:

- parameters: every base tensor is frozen (read, no gradient, no optimizer states). A and B are trained, in the working
  dtype with the optimizer's states like any other parameter. (PEFT keeps adapters in fp32; in 16-bit training that is 2
  bytes more for each adapter parameter.)
- flops: forward takes 2 T r (in + out) more for each target, backward twice that. The gradients of the base matrices, a
  third of the model's matrix flops, are not computed.
- activations: A x (T r values) is kept for backward for each target. While an adapter runs, its output, the scaled
  output and the sum are alive beside the base's output. There is no dropout before A, so no copy of x.
- recompute: if a checkpointed layer's last matrix has an adapter, that matrix is recomputed too, because the tensor
  that backward needs last, A x, comes after it.

The workload is an upper bound in two places. Inputs that autograd keeps only for a frozen matrix's gradient still count
as kept. The backward pass still goes down to the embedding, though nothing below the lowest adapter is needed. Weights
quantized to less than the working dtype (QLoRA) are not modelled. Source: Hu et al., LoRA, 2021; peft's Linear layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pstar_sim.catalog.attention import AttentionCall
from pstar_sim.errors import ModelError
from pstar_sim.workload.adapter import Adapter
from pstar_sim.workload.tape import Tape, input_gradient, weight_gradient
from pstar_sim.workload.workload import Phase, Product, Use, UseKind, Workload, product_flops

__all__ = ["ALL_LINEAR", "AdaptedTape", "adapter_of", "default_targets"]

ALL_LINEAR = "all-linear"
_DEFAULT = {
    "gpt": ("c_attn",),
    "llama": ("q_proj", "v_proj"),
    "bert": ("query", "value"),
    "vit": ("q_proj", "v_proj"),
}


def default_targets(family: str) -> tuple[str, ...]:
    """What peft adapts when none is named: query and value, or the fused matrix that holds them."""
    return _DEFAULT[family]


def adapter_of(workload: Workload) -> Adapter | None:
    """Derived from the tensors of `AdaptedTape`; None if it has none."""
    found = [t for t in workload.tensors if t.name.endswith(".lora_A.weight")]
    if not found:
        return None
    names = dict.fromkeys(t.name.removesuffix(".lora_A.weight").rpartition(".")[2] for t in found)
    return Adapter(rank=found[0].shape[0], targets=tuple(names))


@dataclass(frozen=True)
class _AdaptedWeight:
    a: str
    b: str
    inputs: int
    outputs: int
    numel: int


class AdaptedTape(Tape):
    """A tape on which every parameter is frozen and every target matrix has an adapter.

    tokens: rows of every matmul.
    input_first: matrices are declared in x out (as in GPT-2).
    """

    def __init__(self, dtype: str, adapter: Adapter, *, family: str, tokens: int) -> None:
        super().__init__(dtype)
        self.adapter = adapter
        self.tokens = tokens
        self.names = adapter.targets if adapter.targets is not None else default_targets(family)
        self.input_first = family == "gpt"
        self._targets: dict[str, _AdaptedWeight] = {}  # weight -> its adapter
        self._matrices: set[str] = set()
        self._pending: list[str] = []  # matrices read in this forward moment whose matmul has not come yet
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
        if kind != "weight" or len(shape) != 2:
            return
        self._matrices.add(name)
        parts = module.split(".")
        inside = any(part.isdigit() for part in parts)
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
        """A frozen table needs no other stage: each has its own."""
        self.parameter(name, *shape)

    # Moments

    def open(self, event: str, module: str, phase: Phase, reads: Sequence[str] = ()) -> None:
        self._settle()
        beside = [x for name in reads if name in self._targets for x in self._adapters(name)]
        super().open(event, module, phase, [*reads, *beside])
        self._phase = phase
        if phase in (Phase.FWD, Phase.RECOMPUTE):
            self._pending = [name for name in reads if name in self._matrices]

    def _adapters(self, name: str) -> tuple[str, str]:
        target = self._targets[name]
        return target.a, target.b

    def _settle(self) -> None:
        """Add the matmuls of matrices that the moment read but did not multiply. A recompute would have ended before
        these, but an adapter needs the matmul before it."""
        left, self._pending = self._pending, []
        for name in left:
            if name in self._targets and self._phase is Phase.RECOMPUTE:
                target = self._targets[name]
                out = self.tokens * target.outputs * self.width
                whole = (1, self.tokens, target.inputs, target.outputs)
                super().op(out, products=[whole], read=self.tokens * target.inputs * self.width)
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
        super().op(out, dead=dead, unsaved=unsaved, products=products, attention=attention, read=read)
        if not products or not self._pending or self._inside:
            return
        # The matmul of the first pending matrix, or of several at once (q, k and v of one input).
        total = 0
        for count, name in enumerate(self._pending, start=1):
            total += self._numel(name)
            if sum(map(product_flops, products)) == 2 * self.tokens * total:
                done, self._pending = self._pending[:count], self._pending[count:]
                for each in done:
                    if each in self._targets:
                        self._forward(self._targets[each])
                return

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
        """Base parameters have no gradient, and `linear_backward` writes those of adapters."""

    def linear_backward(
        self, names: Sequence[str], *, grad_in: int, grad_out: int, saved: int, product: Product, dead: int = 0
    ) -> None:
        self.op(grad_in, products=[input_gradient(product)], read=grad_out)
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
