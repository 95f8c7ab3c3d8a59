"""Parts that several families share: linear layers, norms, attention, embeddings, losses, stacks of layers.

The package gives units, sources and omissions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pstar_sim.catalog.model_shapes import ModelEntry
from pstar_sim.workload.axes import Axes
from pstar_sim.workload.kernels import FLAVOURS, Flavour
from pstar_sim.workload.tape import Tape, input_gradient, weight_gradient
from pstar_sim.workload.workload import Phase, Product

__all__ = [
    "ROOT",
    "Shape",
    "attend",
    "attend_backward",
    "begin",
    "declare",
    "declare_norm",
    "embedding_backward",
    "language_loss",
    "language_loss_backward",
    "last_product_again",
    "layer_norm_backward",
    "layers_backward",
    "layers_forward",
    "linear",
    "norm",
    "separate_qkv_backward",
]

ROOT = "<root>"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model with the batch that runs through it.

    batch: sequences per micro-batch.
    sequence: tokens per sequence.
    axes: with a value for each. Without a language head there are no logits over the vocabulary (the head of a few
        labels is left out). For `early_stop` see [Note: early stop].
    """

    model: ModelEntry
    batch: int
    sequence: int
    axes: Axes

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    def product(self, rows: int, columns: int) -> Product:
        """Returns the product of every token with a rows x columns matrix."""
        return 1, self.tokens, rows, columns

    @property
    def flavour(self) -> Flavour:
        """Of the operators beside attention."""
        return FLAVOURS[self.axes.kernels or "eager"]

    @property
    def attention_width(self) -> int:
        """Width of the outputs of all heads."""
        return self.model.heads * self.model.value_dim

    def attention_flops(self, window: int = 0) -> int:
        """Returns the flops of scores and weighted sum, of all heads. A causal mask saves no flops, as in torch's own
        count.

        window: the most tokens that a token attends to; 0 for all.
        """
        m, seen = self.model, min(self.sequence, window or self.sequence)
        if self.axes.attention != "flash":
            seen = self.sequence  # only flash attention skips tokens outside of the window
        return 2 * self.batch * self.sequence * seen * m.heads * (m.head_dim + m.value_dim)

    @property
    def attention_products(self) -> tuple[Product, Product]:
        """Returns the products of scores and weighted sum of the math kernel, of all heads of all sequences."""
        m, batches = self.model, self.batch * self.model.heads
        return (batches, self.sequence, m.head_dim, self.sequence), (batches, self.sequence, self.sequence, m.value_dim)


# Attention, common to all families


def attend(t: Tape, s: Shape, qkv: int, *, window: int = 0) -> int:
    """Write scaled dot-product attention of q, k, v (qkv bytes together).

    Returns the bytes that backward needs in addition to q, k, v and the output. Flash and efficient kernels keep one
    fp32 log-sum per query. The math kernel computes in fp32, keeps scaled copies of q, k, v and the probabilities, and
    needs the scores too.
    """
    m = s.model
    u = s.tokens * s.attention_width * t.width
    if s.axes.attention == "math":
        scores = s.batch * m.heads * s.sequence**2 * 4
        copies = qkv * 4 // t.width
        t.op(copies + 2 * scores, dead=scores, read=qkv)
        kept = copies + scores
        t.op(u, unsaved=kept, products=s.attention_products, read=qkv)
    else:
        kept = s.tokens * m.heads * 4
        t.op(kept, read=0)
        t.op(u, unsaved=kept, flops=s.attention_flops(window), read=qkv)
    return kept


def attend_backward(t: Tape, s: Shape, qkv: int, kept: int, *, window: int = 0) -> None:
    """Write the backward of attention. The gradients of q, k, v replace these, the output, its gradient and the kept
    tensors."""
    u = s.tokens * s.attention_width * t.width
    if s.axes.attention == "math":
        scores = s.batch * s.model.heads * s.sequence**2 * 4
        scored, summed = s.attention_products
        products = [f(x) for x in (summed, scored) for f in (input_gradient, weight_gradient)]
        t.op(2 * scores, dead=2 * scores, products=products)
        flops = 0
    else:
        flops = s.attention_flops(window) * 5 // 2  # the scores are computed once more
    t.op(qkv, dead=2 * u + qkv + kept, flops=flops, read=2 * qkv + 2 * u)


# Head and loss of the language models


def language_loss(t: Tape, s: Shape, module: str, weight: str, u: int) -> None:
    """Logits in the working dtype, logits in fp32, and their log-softmax, which alone stays for backward. A fused loss
    keeps the logits and a log-sum of each token. A loss in place keeps the fp32 logits."""
    m = s.model
    logits = s.tokens * m.vocab * t.width
    logits32 = s.tokens * m.vocab * 4
    labels = s.tokens * 8
    t.open("begin", module, Phase.FWD, [weight])
    t.op(logits, products=[s.product(m.hidden, m.vocab)], read=u)
    t.open("end", module, Phase.FWD)
    if s.flavour.loss == "fused":
        t.op(labels + 4 * s.tokens, read=logits)
        return
    if t.width < 4:
        t.op(logits32, read=logits)
    if s.flavour.loss == "in place":
        t.op(labels, dead=logits if t.width < 4 else 0, read=logits32)
        return
    t.op(labels + logits32, read=logits32)
    t.op(dead=logits32 if t.width == 4 else logits + logits32)


def language_loss_backward(t: Tape, s: Shape, module: str, weight: str, u: int, *, tied: bool) -> None:
    """Write the backward of the loss, up to the gradient of the last hidden state (1 u). The gradient of a tied weight
    waits for the embedding's gradient."""
    m = s.model
    logits = s.tokens * m.vocab * t.width
    logits32 = s.tokens * m.vocab * 4
    labels = s.tokens * 8
    t.open("grad", ROOT, Phase.BWD)
    if s.flavour.loss == "fused":
        t.op(logits, dead=labels + 4 * s.tokens + logits, read=logits)
    else:
        if s.flavour.loss == "unfused":
            t.op(logits32, dead=labels, read=0)
            t.op(logits32, dead=2 * logits32, read=2 * logits32)
        else:
            t.op(dead=labels, read=logits32)
        if t.width < 4:
            t.op(logits, dead=logits32, read=logits32)
    t.open("grad", module, Phase.BWD, [weight])
    product = s.product(m.hidden, m.vocab)
    if tied:
        products = [input_gradient(product), *t.weight_products(weight_gradient(product))]
        t.op(t.size([weight]) + u, dead=logits + u, products=products, read=2 * logits + u)
    else:
        t.linear_backward([weight], grad_in=u, grad_out=logits, saved=u, product=product, dead=logits + u)


def embedding_backward(t: Tape, tables: list[str], tied: str | None, u: int) -> None:
    """Writes dense gradients, one after the other. The gradient of the tied table is added to the head's gradient; both
    and their sum are alive for a moment."""
    for name in tables:
        if name == tied:
            size = t.size([name])
            t.op(size, dead=u)
            t.op(size, dead=2 * size, read=2 * size)
            t.gradient([name])
        else:
            t.gradient([name], allocated=False)
    if tied is None:
        t.op(dead=u)


# Parts of all families.


def linear(module: str, *, bias: bool = True) -> list[str]:
    return [f"{module}.weight", f"{module}.bias"] if bias else [f"{module}.weight"]


def norm(module: str) -> list[str]:
    return [f"{module}.weight", f"{module}.bias"]


def declare(t: Tape, module: str, shape: tuple[int, int], bias: int) -> None:
    t.parameter(f"{module}.weight", *shape)
    if bias:
        t.parameter(f"{module}.bias", bias)


def declare_norm(t: Tape, module: str, hidden: int) -> None:
    t.parameter(f"{module}.weight", hidden)
    t.parameter(f"{module}.bias", hidden)


def layer_norm_backward(t: Tape, module: str, u: int, stats: int, *, residual: bool = True) -> None:
    """Write the backward of the norm: from the gradient of its output (and of the residual, both alive) to their sum (1
    u). Frees the norm's input."""
    names = norm(module)
    t.op(u + t.size(names), dead=2 * u + stats, read=2 * u)
    if residual:
        t.op(u, dead=2 * u, read=2 * u)
    t.gradient(names)


def begin(t: Tape, s: Shape, batch_bytes: int = 0) -> None:
    """The batch is alive for the whole iteration.

    batch_bytes: 0: token numbers and labels, 8 bytes each.
    """
    t.level = batch_bytes or 2 * 8 * s.tokens
    t.open("begin", ROOT, Phase.FWD)


def layers_forward(t: Tape, s: Shape, forward: Callable[[int, Phase], int]) -> int:
    """Returns the bytes that attention keeps per layer."""
    kept = 0
    t.saving = not s.axes.checkpointing
    for i in range(s.model.layers):
        kept = forward(i, Phase.FWD)
    t.saving = True
    return kept


def layers_backward(
    t: Tape, s: Shape, forward: Callable[[int, Phase], int], backward: Callable[[int, int], None], kept: int
) -> None:
    for i in reversed(range(s.model.layers)):
        if s.axes.checkpointing:
            kept = forward(i, Phase.RECOMPUTE)
        backward(i, kept)


def last_product_again(t: Tape, s: Shape, u: int, f: int) -> None:
    """The last matmul and its residual sum, which a recompute runs again although no operator needs them."""
    t.op(u, products=[s.product(s.model.ffn, s.model.hidden)], read=f)
    t.op(u, dead=2 * u, read=2 * u)


def separate_qkv_backward(t: Tape, s: Shape, module: str, order: tuple[str, str, str], u: int) -> None:
    """Write the backward of three square projections of one input: from three gradients (3 u) to their sum (1 u)."""
    h = s.model.hidden
    t.open("grad", f"{module}.{order[0]}", Phase.BWD, [n for x in order for n in linear(f"{module}.{x}")])
    for k, x in enumerate(order):
        names = linear(f"{module}.{x}")
        t.linear_backward(names, grad_in=u, grad_out=u, saved=u, product=s.product(h, h), dead=u)
        if k:
            t.op(u, dead=2 * u, read=2 * u)
