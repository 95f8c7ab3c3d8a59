"""LoRA: a model whose own parameters are frozen and whose matrices have low-rank adapters beside them.

LowRank is what an adapter adds: y = W x + s B (A x) for a target matrix W; A is rank x in, B out x rank. AdaptedTape
writes the families (presets/) with it, adapted.py puts it beside what was captured. Beside training the whole model:

- parameters: only A and B are trained, in the working dtype (PEFT's are in fp32: 2 bytes more for each parameter).
- flops: forward takes 2 T r (in + out) more per target, backward twice that; gradients of base matrices, a third of the
  model's matrix flops, are not computed.
- activations: A x (T r values) is kept per target. While an adapter runs, its output, the scaled output and the sum are
  alive beside the base's. Without dropout before A there is no copy of x.
- recompute: an adapter on a checkpointed layer's last matrix makes that and A x, which backward needs last, recompute
  too.

DoRA: y = m / |W + s B A| (W x + s B (A x)), the norm per output. As in peft each forward pass makes B A of an identity
matrix (2 r in (in + out) flops), and outputs of base and adapter are kept for m's gradient. Source: Liu et al., 2024.

Presets are upper bounds: inputs kept only for a frozen matrix's gradient count, and backward reaches the embedding.
Source: Hu et al., LoRA, 2021; peft's Linear layer.

[Note: quantised base] Frozen matrices of the layers' linear modules, adapted or not, are stored in a base of `BASES`.
All others keep the working dtype, stacks of experts (no linear modules in transformers) too unless the base is of
stacks. Each pass dequantises a matrix before its product, in the working dtype, alive until the product ends; matrices
of all experts of a layer together. The forward product of int8 instead has its input's codes, an fp16 copy of it and
later 32-bit sums beside them. Source: bitsandbytes' MatMul4Bit and MatMul8bitLt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pstar_sim.catalog.attention import AttentionCall
from pstar_sim.dtypes import BASES, DTYPES, Dtype
from pstar_sim.errors import ModelError
from pstar_sim.workload.adapter import (
    ALL_LINEAR,
    Adapter,
    check_save,
    chosen_modules,
    is_target,
    last_names,
    named_by,
    saved_part,
)
from pstar_sim.workload.optimizers import is_head
from pstar_sim.workload.tape import Tape, input_gradient, weight_gradient
from pstar_sim.workload.workload import Phase, Product, Tensor, Workload, product_flops

_DEFAULT = {
    "gpt": ("c_attn",),
    "llama": ("q_proj", "v_proj"),
    "bert": ("query", "value"),
    "vit": ("q_proj", "v_proj"),
}
"""What peft adapts when none is named."""
_A, _B, _M = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector.weight"
_SAVED = ".modules_to_save"


def adapter_of(workload: Workload) -> Adapter | None:
    """From the tensors that adapters bring."""
    pairs = [t for t in workload.tensors if t.name.endswith(_A)]
    if not pairs:
        return None
    matrices = [t.name.removesuffix(".weight") for t in workload.tensors if len(t.shape) == 2 and t.frozen]
    names = [t.name for t in workload.tensors]
    return Adapter(
        rank=pairs[0].shape[0],
        targets=named_by([t.name.removesuffix(_A) for t in pairs], matrices),
        save=tuple(dict.fromkeys(name.partition(_SAVED)[0] for name in names if _SAVED in name)),
        dora=any(name.endswith(_M) for name in names),
    )


def saved_name(parameter: str, module: str) -> str:
    """Of the copy that is trained.

    module: of `Adapter.save`, which holds the parameter.
    """
    return f"{module}{_SAVED}{parameter.removeprefix(module)}"


def base_of(workload: Workload) -> str | None:
    """The dtype of frozen matrices, one of `BASES`; None: the working dtype."""
    return next((t.dtype for t in workload.tensors if t.dtype in BASES), None)


def is_stack(name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter is the matrices of all experts of a layer."""
    return len(shape) == 3 and ".experts." in name


def packed_bytes(workload: Workload) -> int:
    """By which a quantised base is smaller than in the working dtype."""
    width = DTYPES[workload.dtype].bytes
    return sum(t.numel * width - t.bytes for t in workload.tensors if t.dtype in BASES)


def quantised_params(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel for t in tensors if t.dtype in BASES)


@dataclass(frozen=True)
class LowRank:
    """Parameters and operators of the adapter of a linear module.

    rank, inputs, outputs: extents of A and B.
    dora: whether it has a magnitude for each output.
    biased: whether the module adds a bias.
    packed: whether the matrix is quantised.
    """

    module: str
    rank: int
    inputs: int
    outputs: int
    dora: bool = False
    biased: bool = False
    packed: bool = False

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape."""
        pair: dict[str, tuple[int, ...]] = {
            f"{self.module}{_A}": (self.rank, self.inputs),
            f"{self.module}{_B}": (self.outputs, self.rank),
        }
        return pair | ({f"{self.module}{_M}": (self.outputs,)} if self.dora else {})

    def forward(self, t: Tape, tokens: int, *, stops: bool = False) -> None:
        """Behind the product of the base, whose output is alive. Kept for backward: `kept_bytes`.

        stops: it is the end of a recompute, which stops early: at A x, if nothing behind it is kept.
        """
        w, numel = t.width, self.inputs * self.outputs
        low, out = tokens * self.rank * w, tokens * self.outputs * w
        eye, narrow = self.inputs**2 * w, self.inputs * self.rank * w
        if self.dora:
            Tape.op(t, numel * w if self.packed else 0)  # dequantised once more
            Tape.op(t, eye, read=0)
            Tape.op(t, narrow, products=[(1, self.inputs, self.inputs, self.rank)], read=eye)
            Tape.op(t, numel * w, products=[(1, self.inputs, self.rank, self.outputs)], read=narrow)
            Tape.op(t, numel * w)  # scaled
            Tape.op(t, numel * w, dead=numel * w, read=2 * numel * w)  # added to the base's matrix
            Tape.op(t, self.outputs * w, dead=numel * w + self.outputs * w, read=numel * w)  # norm
        Tape.op(t, low, unsaved=low, products=[(1, tokens, self.inputs, self.rank)], read=tokens * self.inputs * w)
        if stops and not self.dora:
            return
        Tape.op(t, out, products=[(1, tokens, self.rank, self.outputs)], read=low)
        if not self.dora:
            Tape.op(t, out, dead=out)  # scaled
            Tape.op(t, out, dead=2 * out, read=2 * out)  # added to the base's output
            return
        own = out if self.biased else 0
        Tape.op(t, own)  # the base's output without its bias
        Tape.op(t, out)  # times magnitude over norm - 1
        Tape.op(t, out)  # the adapter's output times magnitude over norm
        Tape.op(t, out, dead=out)  # scaled
        Tape.op(t, out, dead=2 * out, unsaved=out + own, read=2 * out)
        Tape.op(t, dead=(2 if self.packed else 1) * numel * w + eye + narrow)
        Tape.op(t, out, dead=out + own, unsaved=out - own, read=2 * out)  # added to the base's output

    def kept_bytes(self, width: int, tokens: int) -> int:
        """A x; of DoRA also the outputs of base and adapter."""
        return tokens * (self.rank + (2 * self.outputs if self.dora else 0)) * width

    def backward(self, t: Tape, tokens: int, *, below: bool = True) -> None:
        """Behind the gradient of the base's input, which is alive. Ends what `forward` kept.

        below: whether something below the module needs the gradient of its input.
        """
        rank, w, (a, b, *m) = self.rank, t.width, self.parameters
        low, out, back = tokens * rank * w, tokens * self.outputs * w, tokens * self.inputs * w
        grad_a, grad_b = rank * self.inputs * w, rank * self.outputs * w
        Tape.op(t, out, read=out)  # the scaled gradient
        if self.dora:
            Tape.op(t, 2 * out, dead=3 * out, read=3 * out)  # of the adapter's output, and of the magnitude
            Tape.op(t, 2 * out, dead=2 * out, read=3 * out)  # of the base's output, and of the magnitude
            Tape.op(t, out, dead=2 * out, read=2 * out)  # both gradients of the base's output added
            Tape.op(t, self.outputs * w, read=0)
            Tape.gradient(t, m)
        of_b, of_a = (1, tokens, rank, self.outputs), (1, tokens, self.inputs, rank)
        products = [input_gradient(of_b), weight_gradient(of_b)]
        Tape.op(t, low + grad_b, dead=out, products=products, read=2 * out + low)
        Tape.gradient(t, [b])
        if below:
            products = [input_gradient(of_a), weight_gradient(of_a)]
            Tape.op(t, back + grad_a, dead=2 * low, products=products, read=2 * low + back)
            Tape.gradient(t, [a])
            Tape.op(t, back, dead=2 * back, read=2 * back)  # both gradients of the input added
        else:
            Tape.op(t, grad_a, dead=2 * low, products=[weight_gradient(of_a)], read=low + back)
            Tape.gradient(t, [a])


def adapter_note(tensors: Sequence[Tensor], given: Adapter, dtype: str) -> str:
    """Such as "LoRA r=16 on q_proj, v_proj", and how many parameters a base has in which width."""
    names = [t.name.removesuffix(_A) for t in tensors if t.name.endswith(_A)]
    whole = (t.name.partition(_SAVED)[0].rpartition(".")[2] for t in tensors if _SAVED in t.name)
    kind = "DoRA" if given.dora else "rsLoRA (costs what LoRA costs)" if given.rs else "LoRA"
    on = ", ".join(given.targets) if isinstance(given.targets, tuple) else last_names(names) if names else given.targets
    words = f"{kind} r={given.rank} on {on}"
    words += f", {', '.join(saved)} trained whole" if (saved := dict.fromkeys(whole)) else ""
    if any(is_stack(t.name, t.shape) for t in tensors) and ALL_LINEAR in (given.targets or ()):
        words += " (none on stacks of experts and routers, to which some versions of peft extend it)"
    packed = [t for t in tensors if t.dtype in BASES]
    if not packed:
        return words
    (base,) = {t.dtype for t in packed}
    quantised, total = quantised_params(tensors), sum(t.numel for t in tensors if t.tied_to is None)
    width = sum(t.bytes for t in packed) / quantised
    per, unit = (1e9, "B") if total >= 1e8 else (1e6, "M")
    words += f", {quantised / per:.2f} {unit} of {total / per:.2f} {unit} parameters in {base}, {width:.3f} bytes each"
    words += ", planned only: pstar run has no DoRA beside a quantised base" if given.dora else ""
    stacks = sum(t.numel for t in tensors if is_stack(t.name, t.shape) and t.dtype != base)
    if stacks:
        words += f", {stacks / per:.2f} {unit} of experts stay in {dtype} (nf4-experts quantises their stacks too)"
    return words


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
        self.input_first = family == "gpt"
        self._usual = replace(adapter, targets=adapter.targets or _DEFAULT[family])
        self.alike = in_all_layers(adapter)
        self._linear: list[str] = []
        self._targets: dict[str, LowRank] = {}  # weight -> its adapter
        self._matrices: set[str] = set()
        self._pending: list[str] = []  # matrices read in this forward moment whose matmul has not come yet
        self._stacks: list[str] = []  # quantised matrices of experts, likewise
        self._phase = Phase.FWD

    def check(self) -> None:
        """Raises ModelError for a target that no matrix is, and for `save` that no module is."""
        check_save(self.adapter, (name for name in self._index if not name.endswith((_A, _B, _M))))
        for head in (name.removesuffix(".weight") for name in self._index if is_head(name)):
            if isinstance(self._usual.targets, tuple) and is_target(self._usual.targets, head, [head]):
                raise ModelError(
                    f"lora targets: presets have no adapter on {head}: save={head} trains it in full, where it is not "
                    f"tied; a trace of the model has one (pstar trace hf:ORG/NAME --lora {self.adapter})"
                )
        chosen_modules(self._usual, self._linear)

    # Parameters

    def parameter(self, name: str, *shape: int, spread: int = 1) -> None:
        super().parameter(name, *shape, spread=spread)
        self.tensors[-1] = replace(self.tensors[-1], frozen=True)
        saved = saved_part(self.adapter, name)
        if saved is not None:
            super().parameter(saved_name(name, saved), *shape, spread=spread)
            self._index[name] = len(self.tensors) - 1
        module, _, kind = name.rpartition(".")
        inside = any(part.isdigit() for part in module.split("."))
        packed = self.base is not None and inside and saved is None and is_quantised(name, shape, self.base)
        if packed:
            assert self.base is not None
            stored = shape[::-1] if self.input_first else shape
            size = self.base.stored(stored)
            self.tensors[-1] = replace(self.tensors[-1], dtype=self.base.name, shape=stored, bytes=size)
        if kind == "bias":
            for weight in self._targets.keys() & {f"{module}.weight"}:
                self._targets[weight] = replace(self._targets[weight], biased=True)
        if kind != "weight" or len(shape) != 2:
            return
        self._matrices.add(name)
        if not (inside or module == _BEHIND_LAYERS) or name.endswith(_ROUTER):
            return
        self._linear.append(module)
        if saved is None and is_target(self._usual.targets or (), module):
            inputs, outputs = shape if self.input_first else shape[::-1]
            pair = low_rank(self.adapter, module, inputs, outputs, packed=packed)
            for adapted, extents in pair.parameters.items():
                super().parameter(adapted, *extents, spread=spread)
            self._targets[name] = pair

    def tie(self, name: str, to: str) -> None:
        for one in (name, to):
            if saved_part(self.adapter, one):
                raise ModelError(
                    f"lora save: {one} shares its table with {to if one is name else name}; peft trains a copy of one "
                    f"of them: {OWN_ADAPTERS}"
                )
        super().tie(name, to)

    def _is_trained(self, name: str) -> bool:
        return not self._tensor(name).frozen

    def size(self, names: Iterable[str]) -> int:
        """Base parameters have no gradient."""
        return super().size(filter(self._is_trained, names))

    def weight_products(self, names: Sequence[str], *products: Product) -> list[Product]:
        return list(products) if any(map(self._is_trained, names)) else []

    def borrow(self, name: str, *shape: int) -> None:
        """A frozen table needs no other stage."""
        self.parameter(name, *shape)

    # Moments

    def open(self, event: str, module: str, phase: Phase, reads: Sequence[str] = ()) -> None:
        self._settle()
        beside = [x for name in reads if name in self._targets for x in self._targets[name].parameters]
        super().open(event, module, phase, [*reads, *beside])
        self._phase = phase
        if phase in (Phase.FWD, Phase.RECOMPUTE):
            self._pending = [name for name in reads if name in self._matrices]
            self._stacks = [name for name in reads if self._is_stored(name) and name not in self._matrices]

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
                target.forward(self, self.tokens, stops=True)
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
        done = self._multiplied(products) if products else []
        room = self._dequantise(done, forward=True)
        super().op(out, dead=dead, unsaved=unsaved, products=products, attention=attention, read=read)
        super().op(dead=room)
        for each in done:
            if each in self._targets:
                self._targets[each].forward(self, self.tokens)

    def _multiplied(self, products: Sequence[Product]) -> list[str]:
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

    def gradient(self, names: Iterable[str], *, allocated: bool = True) -> None:
        """Base parameters have none."""
        super().gradient(filter(self._is_trained, names), allocated=allocated)

    def linear_backward(
        self, names: Sequence[str], *, grad_in: int, grad_out: int, saved: int, product: Product, dead: int = 0
    ) -> None:
        if any(map(self._is_trained, names)):
            super().linear_backward(names, grad_in=grad_in, grad_out=grad_out, saved=saved, product=product, dead=dead)
            return
        room = self._dequantise(names)
        super().op(grad_in, products=[input_gradient(product)], read=grad_out)
        super().op(dead=room)
        for name in names:
            if name in self._targets:
                self._targets[name].backward(self, self.tokens)
        self.op(dead=dead)


def in_all_layers(adapter: Adapter) -> bool:
    """Not a pattern or number, which may choose some."""
    targets = adapter.targets or ()
    return isinstance(targets, tuple) and not any(map(str.isdigit, "".join((*adapter.save, *targets))))


_BEHIND_LAYERS = "cls.predictions.transform.dense"
"""A linear module of BERT outside its layers."""
_ROUTER = ".mlp.gate.weight"
"""Of a router, which is no linear module in transformers."""
OWN_ADAPTERS = "trace a model that has its adapters, pstar trace py:MODULE:FACTORY"


def low_rank(
    adapter: Adapter, module: str, inputs: int, outputs: int, *, packed: bool, biased: bool = False
) -> LowRank:
    """Raises ModelError for a rank as large as the matrix; above its smaller side peft takes one."""
    if adapter.rank >= max(inputs, outputs):
        raise ModelError(
            f"lora r={adapter.rank}: {module}.weight is {inputs} x {outputs}; the rank must be less than "
            f"{max(inputs, outputs)}"
        )
    return LowRank(module, adapter.rank, inputs, outputs, dora=adapter.dora, packed=packed, biased=biased)


def is_quantised(name: str, shape: Sequence[int], base: Dtype) -> bool:
    """[Note: quantised base]"""
    if is_stack(name, shape):
        return base.stacks
    return len(shape) == 2 and name.endswith(".weight") and not name.endswith(_ROUTER)
