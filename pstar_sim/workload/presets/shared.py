"""What several families share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from pstar_sim.catalog.attention import ATTENTION, USUAL, AttentionCall
from pstar_sim.catalog.model_shapes import ModelEntry
from pstar_sim.workload.axes import Axes
from pstar_sim.workload.kernels import FLAVOURS, Flavour, dropout
from pstar_sim.workload.tape import Tape, input_gradient, weight_gradient
from pstar_sim.workload.workload import ATTENTION_ALONE, Phase, Product

ROOT = "<root>"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of a model: `layers`, with the embedding if `first`, with head and loss if `last`.

    tensor: ranks that split each layer's heads, feed-forward width and vocabulary.
    share: of the rank written; None: they have equal parts.
    sequence: they split tokens beside the products ([Note: sequence parallelism] in tape.py).
    context: ranks that split each sequence ([Note: context parallelism] in tape.py).
    experts: ranks that share the experts of each layer ([Note: experts on several ranks] in llama_mlp.py).
    """

    layers: range
    first: bool = True
    last: bool = True
    tensor: int = 1
    share: Fraction | None = None
    sequence: bool = False
    context: int = 1
    experts: int = 1

    @property
    def whole(self) -> bool:
        return self.first and self.last


@dataclass(frozen=True, kw_only=True)
class Shape:
    """stage: the part written; None: the whole model.

    sequence: tokens of a sequence that a rank has.

    axes: each with a value. Without a language head there are no logits over the vocabulary (a head of a few labels is
        left out). `early_stop`: [Note: early stop].
    """

    model: ModelEntry
    batch: int
    sequence: int
    axes: Axes
    stage: Stage | None = None

    @property
    def part(self) -> Stage:
        return self.stage or Stage(layers=range(self.model.layers))

    @property
    def tied(self) -> bool:
        """Whether head and embedding share one table in this part."""
        return self.model.tied and self.part.whole

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def rows(self) -> int:
        """Of one rank, beside the products."""
        return self.tokens // (self.part.tensor if self.part.sequence else 1)

    def part_of(self, size: int) -> int:
        """One rank's, beside the products, of `size` bytes."""
        return size * self.rows // self.tokens

    def product(self, rows: int, columns: int) -> Product:
        """Of every token with a rows x columns matrix."""
        return 1, self.tokens, rows, columns

    @property
    def flavour(self) -> Flavour:
        """Of the operators beside attention."""
        return FLAVOURS[self.axes.kernels or "eager"]

    @property
    def mask(self) -> int:
        """Bytes, of one rank's hidden state ([Note: masks] in kernels.py)."""
        return self.rows * self.model.hidden if dropout(self.axes.dropout).hidden else 0

    @property
    def recomputes_attention(self) -> bool:
        return self.axes.recompute == ATTENTION_ALONE

    def recomputes(self, layer: int) -> bool:
        """Whether the layer is a checkpoint: all layers, or the last of each N."""
        every = int((self.axes.recompute or "every-1").partition("every-")[2] or 1)
        return bool(self.axes.checkpointing) and (layer + 1) % every == 0

    def kind_of(self, layer: int) -> tuple[bool, bool, int]:
        """Recomputation, experts and sight."""
        return self.recomputes(layer), self.model.has_experts(layer), self.model.window_of(layer)

    @property
    def casts(self) -> int:
        """1 if autocast copies outputs of norms and activations, 0 if they come in 16 bits or none are copied."""
        return int(self.axes.autocast is not None and not self.flavour.fused)

    @property
    def attention_width(self) -> int:
        """Of the outputs of all heads."""
        return self.model.heads * self.model.value_dim

    def attend(self, window: int = 0, *, backward: bool = False) -> AttentionCall:
        """A fused kernel's.

        window: tokens that a token attends to at most, 0 for all.
        """
        m, parts = self.model, self.part.context
        seen = self.sequence * parts
        if window and ATTENTION[self.axes.attention or USUAL].windows:
            seen = min(window, seen)
        return self.batch * m.heads, self.sequence, seen, m.head_dim, m.value_dim, parts * m.causal, int(backward)

    @property
    def attention_products(self) -> tuple[Product, Product]:
        """Scores and weighted sum of the math kernel, all heads and sequences."""
        m, batches = self.model, self.batch * self.model.heads
        return (batches, self.sequence, m.head_dim, self.sequence), (batches, self.sequence, self.sequence, m.value_dim)


# Attention, common to all families


def attend(t: Tape, s: Shape, q: int, kv: int, *, window: int = 0) -> int:
    """Of q and k, v (kv bytes together); returns the bytes that backward needs beside these and the output. Flash and
    efficient keep one fp32 log-sum per query; math computes in fp32, keeps scaled copies of q, k, v and the
    probabilities, and needs the scores too.
    """
    m, qkv = s.model, q + kv
    u = s.tokens * s.attention_width * t.width
    if s.axes.attention == "math":
        scores, dropped = _scores(t, s)
        copies = 0 if s.flavour.low_scores else qkv * 4 // t.width
        t.op(copies + 2 * scores, dead=scores, read=qkv)
        t.op(dropped, read=dropped and scores)
        kept = copies + scores + dropped
        t.op(u, unsaved=kept, products=s.attention_products, read=qkv)
    else:
        kept = s.tokens * m.heads * 4
        gathered = t.gather_keys(kv)
        t.op(u + kept, unsaved=kept, dead=gathered, attention=s.attend(window), read=q + (gathered or kv))
    if s.recomputes_attention:
        t.op(dead=kept)
    return kept


def _scores(t: Tape, s: Shape) -> tuple[int, int]:
    """Bytes of all scores, and of dropped ones with their mask."""
    count = s.batch * s.model.heads * s.sequence**2
    width = t.width if s.flavour.low_scores else 4
    return count * width, count * (width + 1) if dropout(s.axes.dropout).attention else 0


def attend_backward(t: Tape, s: Shape, q: int, kv: int, kept: int, *, window: int = 0) -> None:
    """Gradients of q, k, v replace these, the output, its gradient and what was kept."""
    u = s.tokens * s.attention_width * t.width
    gathered = t.gather_keys(kv)
    every = q + (gathered or kv)
    if s.recomputes_attention:
        _attend_again(t, s, every, kept, window)
    if s.axes.attention == "math":
        scores, dropped = _scores(t, s)
        gradient = scores if dropped else 0
        t.op(gradient, dead=gradient, read=dropped)
        scored, summed = s.attention_products
        products = [f(x) for x in (summed, scored) for f in (input_gradient, weight_gradient)]
        t.op(2 * scores, dead=2 * scores, products=products)
        call = None
    else:
        call = s.attend(window, backward=True)
    t.op(every, dead=2 * u + q + kv + gathered + kept, attention=call, read=2 * every + 2 * u)
    t.reduce_keys(kv)


def _attend_again(t: Tape, s: Shape, qkv: int, kept: int, window: int) -> None:
    """Math ends with the probabilities, as a recompute stops early."""
    if s.axes.attention == "math":
        scores, _ = _scores(t, s)
        t.op(kept + scores, dead=scores, products=s.attention_products[:1], read=qkv)
    else:
        u = s.tokens * s.attention_width * t.width
        t.op(u + kept, dead=u, attention=s.attend(window), read=qkv)


def embedding_backward(t: Tape, tables: list[str], tied: str | None, u: int) -> None:
    """Dense, one after the other; the tied table's is added to the head's, both and their sum alive for a moment."""
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


def layer_norm_backward(
    t: Tape, module: str, r: int, stats: int, *, residual: bool = True, grad: int | None = None
) -> None:
    """From the gradients of the norm's output and the residual (both alive) to their sum (1 r); frees the input.

    grad: bytes of the output's gradient, r by default.
    """
    names = norm(module)
    grad = r if grad is None else grad
    t.op(r + t.size(names), dead=r + grad + stats, read=r + grad)
    t.sum_at_end(names)
    if residual:
        t.op(r, dead=2 * r, read=2 * r)
    t.gradient(names)


def declare_head(t: Tape, s: Shape, head: str, embedding: str) -> None:
    """Perhaps the embedding's table, here or in the first stage."""
    if s.tied:
        t.tie(head, embedding)
    elif s.model.tied:
        t.borrow(head, s.model.vocab, s.model.hidden)
    else:
        t.parameter(head, s.model.vocab, s.model.hidden)


def begin(t: Tape, s: Shape, batch_bytes: int = 0, *, received: int = 0, table: str = "") -> None:
    """The batch lives for the whole iteration.

    batch_bytes: 0: token numbers and labels, 8 bytes each, on first and last stage.
    received: a later stage's input.
    table: what embedding and head may share, as named in this part.
    """
    t.level = batch_bytes or (s.part.first + s.part.last) * 8 * s.tokens
    copy, summed = _between_stages(t, s, table)
    if s.part.last:
        t.level += copy + summed
    t.open("begin", ROOT, Phase.FWD, [table] if copy and s.part.first else [])
    if copy and s.part.first:
        t.cross_once(False, "tied weights", copy, turn="first")
    if not s.part.first:
        t.receive("activations", received)


def _between_stages(t: Tape, s: Shape, table: str) -> tuple[int, int]:
    """Weights and gradients of a table that first and last stage share, 0 if it is not trained."""
    if not s.model.tied or s.part.first == s.part.last or not s.axes.language_head:
        return 0, 0
    size = t.size([table])
    return size, size // t.wide * 4


def head_comes(t: Tape, s: Shape, head: str) -> None:
    """In the moment before the head's; it may be another stage's."""
    if copy := _between_stages(t, s, head)[0]:
        t.cross_once(True, "tied weights", copy, turn="first", counted=True)


def gradient_comes(t: Tape, s: Shape, embedding: str) -> None:
    """In the moment before the embedding's gradient; the head's may come from another stage."""
    if summed := _between_stages(t, s, embedding)[1]:
        t.cross_once(True, "tied gradients", summed, turn="last")


def hand_on(t: Tape, size: int) -> None:
    """A stage without loss: output goes on, and the gradient comes back."""
    t.end_autocast()
    t.send("activations", size)
    t.open("grad", ROOT, Phase.BWD)
    t.receive("gradients", size)


def end(t: Tape, s: Shape, size: int, *, held: int = 0, table: str = "") -> None:
    """A later stage sends its input's gradient.

    held: bytes of an input that no operator keeps.
    table: as in `begin`.
    """
    t.open("backward-end", ROOT, Phase.BWD)
    summed = _between_stages(t, s, table)[1]
    if summed and s.part.last:
        t.cross_once(False, "tied gradients", summed, turn="last", counted=True)
    if not s.part.first:
        t.op(dead=held)
        t.send("gradients", size)


def layers_forward(t: Tape, s: Shape, forward: Callable[[int, Phase], int]) -> int:
    """Returns the bytes that attention keeps per layer."""
    kept = 0
    for i in _to_write(t, s, s.part.layers):
        t.saving = not s.recomputes(i)
        kept = forward(i, Phase.FWD)
    t.saving = True
    return kept


def layers_backward(
    t: Tape, s: Shape, forward: Callable[[int, Phase], int], backward: Callable[[int, int], None], kept: int
) -> None:
    for i in _to_write(t, s, s.part.layers[::-1]):
        if s.recomputes(i):
            kept = forward(i, Phase.RECOMPUTE)
            t.end_autocast()
        backward(i, kept)


def _to_write(t: Tape, s: Shape, layers: Sequence[int]) -> Iterator[int]:
    """The tape repeats the others ([Note: alike layers] in shortened.py)."""
    lead, period = period_of(tuple(map(s.kind_of, layers))) if t.alike else (0, 0)
    times = (len(layers) - lead - 1) // period - 1 if period else 0
    yield from layers[:lead]
    first = len(t.moments) + 1
    yield from layers[lead : lead + period]
    if times:
        t.repeat(first, times, layers[lead + period] - layers[lead])
    yield from layers[lead + (1 + times) * period :]


@lru_cache(maxsize=256)
def period_of(kinds: tuple[object, ...]) -> tuple[int, int]:
    """Layers before it, and of each, so that fewest are written; (0, 0) if all are."""
    least, found = len(kinds), (0, 0)
    for period in range(1, len(kinds) // 2):
        lead = len(kinds) - period
        while lead > 1 and kinds[lead - 1] == kinds[lead - 1 + period]:
            lead -= 1
        count = lead + 2 * period + (len(kinds) - lead) % period
        if count < least:
            least, found = count, (lead, period)
    return found


def drop(t: Tape, s: Shape) -> int:
    """Returns the bytes of a mask that the residual sum makes, as one kernel."""
    if s.mask and not s.flavour.fused:
        v = s.rows * s.model.hidden * t.width
        t.op(v + s.mask, dead=v, unsaved=s.mask, read=v)
        return 0
    return s.mask


def drop_backward(t: Tape, s: Shape, low: int = 0) -> int:
    """Returns the gradient's own bytes."""
    if not s.mask:
        return low
    v = s.rows * s.model.hidden * t.width
    t.op(v, dead=low + s.mask, read=v + s.mask)
    return v


def drop_embedded(t: Tape, s: Shape) -> None:
    r = s.rows * s.model.hidden * t.wide
    t.op((s.mask and r) + s.mask, dead=s.mask and r, read=s.mask and r)


def drop_embedded_backward(t: Tape, s: Shape) -> None:
    r = s.rows * s.model.hidden * t.wide
    t.op(s.mask and r, dead=s.mask and r + s.mask, read=s.mask and r + s.mask)


def last_product_again(t: Tape, s: Shape, u: int, f: int) -> None:
    """With mask and residual sum, though only a mask is needed."""
    t.op(u, products=[s.product(s.model.ffn, s.model.hidden)], read=f)
    t.reduce(u)
    v, mask = s.part_of(u), drop(t, s)
    summed = v if mask or not s.axes.early_stop else 0
    t.op(summed + mask, dead=v + summed, read=2 * summed)


def separate_qkv_backward(t: Tape, s: Shape, module: str, order: tuple[str, str, str], q: int) -> None:
    """From gradients of three projections (3 q) to their input's (fp32 under autocast)."""
    h = s.model.hidden
    u = s.tokens * h * t.width
    summed, copied = (s.tokens * h * t.wide, u) if s.casts else (u, 0)
    t.open("grad", f"{module}.{order[0]}", Phase.BWD, [n for x in order for n in linear(f"{module}.{x}")])
    gathered = t.gather(u)
    product = s.product(h, s.attention_width)
    for k, x in enumerate(order):
        names = linear(f"{module}.{x}")
        t.linear_backward(names, grad_in=u, grad_out=q, saved=u, product=product, dead=q + copied)
        t.op(s.casts * summed, dead=copied, read=copied)
        if k:
            t.op(summed, dead=2 * summed, read=2 * summed)
    t.op(dead=gathered)
    t.reduce(u)
