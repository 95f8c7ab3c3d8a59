"""Head and loss of language models, whole or in pieces (kernels.py).

A chunked loss has CHUNKS pieces, a fused one as many as keep a piece's logits near the hidden state's size; it makes
the gradients of hidden state and weight in forward, and holds them until backward. The weight's gradient of each piece
is made whole, turned into fp32 and added.
Source: Liger-Kernel, ops/fused_linear_cross_entropy.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from pstar_sim.workload.presets.shared import ROOT, Shape
from pstar_sim.workload.tape import Tape, input_gradient, weight_gradient
from pstar_sim.workload.workload import Phase, Product

CHUNKS = 8


def language_loss(t: Tape, s: Shape, module: str, weight: str, u: int) -> None:
    """u: bytes of the last hidden state."""
    t.open("begin", module, Phase.FWD, [weight])
    t.cast([weight])
    gathered = t.gather(u)
    labels = s.tokens * 8
    if s.axes.loss == "whole":
        _whole_loss(t, s, module, u)
    elif s.axes.loss == "chunked":
        for product in _pieces(s):
            t.op(dead=_piece_of_loss(t, product))
        t.op(labels, read=labels)
        t.open("end", module, Phase.FWD)
    else:
        size = t.size([weight])
        size32 = size * 4 // t.width if t.width < 4 else 0
        t.op(u + size + labels, read=0)
        for product in _pieces(s):
            logits = _logits(product, t.width)
            t.op(logits, products=[product], read=_hidden(product, t.width))
            t.op(read=2 * logits)
            t.op(size, products=_gradients(t, weight, product), read=2 * logits)
            t.op(size32, read=size if size32 else 0)
            t.op(dead=logits + size + size32, read=size + (size32 or size))  # added to the sum
        t.op(dead=s.part_of(u) + labels)
        t.open("end", module, Phase.FWD)
    t.op(dead=gathered)


def loss_sums(t: Tape, s: Shape) -> None:
    """Ranks that split the vocabulary sum three figures per token: largest logit, sum of exponentials, and its label's
    logit."""
    t.all_reduce(*[4 * s.tokens] * 3)


def language_loss_backward(t: Tape, s: Shape, module: str, weight: str, u: int, *, tied: bool) -> None:
    """To the gradient of the last hidden state (1 u, or a rank's part of the sequence); a tied weight's waits for the
    embedding's."""
    t.open("grad", ROOT, Phase.BWD)
    if s.axes.loss == "whole":
        _whole_loss_backward(t, s, module, weight, u, tied=tied)
        t.reduce(u)
        return
    t.open("grad", module, Phase.BWD, [weight])
    if s.axes.loss == "chunked":
        size = t.size([weight])
        gathered = t.gather(u)
        t.op(u + size, read=0)
        for product in _pieces(s):
            kept = _piece_of_loss(t, product)
            logits, logits32 = _logits(product, t.width), _logits(product, 4)
            t.op(logits32, dead=kept, read=logits32)
            if t.width < 4:
                t.op(logits, dead=logits32, read=logits32)
            t.op(size, dead=size + logits, products=_gradients(t, weight, product), read=2 * logits + 2 * size)
        t.op(dead=s.part_of(u) + gathered + s.tokens * 8)
    if not tied:
        t.gradient([weight])
    t.reduce(u)


def _pieces(s: Shape) -> Iterator[Product]:
    most = -(-s.tokens // CHUNKS)
    if s.axes.loss == "fused":
        most = 1 << (-(-s.tokens // -(-s.model.vocab // s.model.hidden)) - 1).bit_length()
    for start in range(0, s.tokens, most):
        yield 1, min(most, s.tokens - start), s.model.hidden, s.model.vocab


def _piece_of_loss(t: Tape, product: Product) -> int:
    logits, logits32 = _logits(product, t.width), _logits(product, 4)
    t.op(logits, products=[product], read=_hidden(product, t.width))
    if t.width < 4:
        t.op(logits32, read=logits)
    t.op(logits32, dead=logits32 if t.width == 4 else logits + logits32, read=logits32)
    return logits32


def _gradients(t: Tape, weight: str, product: Product) -> list[Product]:
    return [input_gradient(product), *t.weight_products([weight], weight_gradient(product))]


def _logits(product: Product, width: int) -> int:
    _, tokens, _, vocab = product
    return tokens * vocab * width


def _hidden(product: Product, width: int) -> int:
    _, tokens, hidden, _ = product
    return tokens * hidden * width


def _whole_loss(t: Tape, s: Shape, module: str, u: int) -> None:
    m = s.model
    logits = s.tokens * m.vocab * t.width
    logits32 = s.tokens * m.vocab * 4
    labels = s.tokens * 8
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


def _whole_loss_backward(t: Tape, s: Shape, module: str, weight: str, u: int, *, tied: bool) -> None:
    m = s.model
    logits = s.tokens * m.vocab * t.width
    logits32 = s.tokens * m.vocab * 4
    labels = s.tokens * 8
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
    saved = s.part_of(u) + t.gather(u)
    product = s.product(m.hidden, m.vocab)
    if tied:
        products = _gradients(t, weight, product)
        t.op(t.grown([weight]) + u, dead=logits + saved, products=products, read=2 * logits + u)
        t.uncast([weight])
    else:
        t.linear_backward([weight], grad_in=u, grad_out=logits, saved=u, product=product, dead=logits + saved)
