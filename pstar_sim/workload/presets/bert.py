"""BERT, operator by operator."""

from __future__ import annotations

from pstar_sim.workload.presets.shared import (
    ROOT,
    Shape,
    attend,
    attend_backward,
    begin,
    declare,
    declare_norm,
    embedding_backward,
    layer_norm_backward,
    layers_backward,
    layers_forward,
    linear,
    norm,
    separate_qkv_backward,
)
from pstar_sim.workload.tape import Tape, input_gradient, weight_gradient
from pstar_sim.workload.workload import Phase


def write_bert(t: Tape, s: Shape) -> None:
    """For masked language modelling: LayerNorm after each sum, separate q, k, v, exact GELU, transformed head."""
    m = s.model
    h, w = m.hidden, t.width
    u, f = s.tokens * h * w, s.tokens * m.ffn * w
    r, copied = s.tokens * h * t.wide, s.casts * u  # autocast leaves outputs of norms in fp32, and copies them
    stats = 2 * s.tokens * t.wide
    tables = [f"bert.embeddings.{x}_embeddings.weight" for x in ("word", "position", "token_type")]
    for name, rows in zip(tables, (m.vocab, m.max_seq, 2), strict=True):
        t.parameter(name, rows, h)
    declare_norm(t, "bert.embeddings.LayerNorm", h)
    for i in range(m.layers):
        block = f"bert.encoder.layer.{i}"
        for x in ("query", "key", "value"):
            declare(t, f"{block}.attention.self.{x}", (h, h), h)
        declare(t, f"{block}.attention.output.dense", (h, h), h)
        declare_norm(t, f"{block}.attention.output.LayerNorm", h)
        declare(t, f"{block}.intermediate.dense", (m.ffn, h), m.ffn)
        declare(t, f"{block}.output.dense", (h, m.ffn), h)
        declare_norm(t, f"{block}.output.LayerNorm", h)
    head, bias, transform = "cls.predictions.decoder.weight", "cls.predictions.bias", "cls.predictions.transform"
    t.parameter(bias, m.vocab)
    declare(t, f"{transform}.dense", (h, h), h)
    declare_norm(t, f"{transform}.LayerNorm", h)
    if m.tied:
        t.tie(head, tables[0])
    else:
        t.parameter(head, m.vocab, h)
    t.tie("cls.predictions.decoder.bias", bias)

    def forward(i: int, phase: Phase) -> int:
        block = f"bert.encoder.layer.{i}"
        qkv = [n for x in ("query", "key", "value") for n in linear(f"{block}.attention.self.{x}")]
        t.open("begin", f"{block}.attention.self.query", phase, qkv)
        t.op(3 * copied, read=s.casts * r)
        t.cast(qkv)
        t.op(3 * u, products=[s.product(h, h)] * 3, read=3 * u)
        reads = [*linear(f"{block}.attention.output.dense"), *norm(f"{block}.attention.output.LayerNorm")]
        t.open("end", f"{block}.attention.self.value", phase, reads)
        kept = attend(t, s, u, 2 * u)
        t.cast(linear(f"{block}.attention.output.dense"))
        t.op(u, unsaved=4 * u + 3 * copied, products=[s.product(h, h)])
        t.op(r, dead=u, read=u + r)
        t.op(r + stats, unsaved=r + stats)
        t.open("begin", f"{block}.intermediate.dense", phase, linear(f"{block}.intermediate.dense"))
        t.op(copied, read=s.casts * r)
        t.cast(linear(f"{block}.intermediate.dense"))
        t.op(f, products=[s.product(h, m.ffn)], read=u)
        t.op(f, unsaved=f)
        reads = [*linear(f"{block}.output.dense"), *norm(f"{block}.output.LayerNorm")]
        t.open("begin", f"{block}.output.dense", phase, reads)
        t.cast(linear(f"{block}.output.dense"))
        t.op(u, unsaved=f, products=[s.product(m.ffn, h)], read=f)
        t.op(r, dead=u + s.casts * r, unsaved=copied or u, read=u + r)
        entered = i > 0 and not s.recomputes(i)  # then no operator of autocast keeps the layer's input
        t.op(r + stats, dead=s.casts * r if entered else 0, unsaved=r + stats)
        if phase is Phase.RECOMPUTE:
            t.op(dead=r)  # the layer's output is not needed again
        return kept

    def backward(i: int, kept: int) -> None:
        block = f"bert.encoder.layer.{i}"
        dense, out = f"{block}.intermediate.dense", f"{block}.output"
        t.open("grad", out, Phase.BWD, [*norm(f"{out}.LayerNorm"), *linear(f"{out}.dense")])
        layer_norm_backward(t, f"{out}.LayerNorm", r, stats, residual=False)
        names = linear(f"{out}.dense")
        t.op(copied, read=s.casts * r)
        t.linear_backward(names, grad_in=f, grad_out=u, saved=f, product=s.product(m.ffn, h), dead=f + copied)
        t.open("grad", dense, Phase.BWD, linear(dense))
        t.op(f, dead=2 * f, read=2 * f)
        names = linear(dense)
        t.linear_backward(names, grad_in=u, grad_out=f, saved=u, product=s.product(h, m.ffn), dead=f + u)
        t.op(s.casts * r, dead=copied, read=copied)
        t.op(r, dead=2 * r, read=2 * r)
        out = f"{block}.attention.output"
        t.open("grad", out, Phase.BWD, [*norm(f"{out}.LayerNorm"), *linear(f"{out}.dense")])
        layer_norm_backward(t, f"{out}.LayerNorm", r, stats, residual=False)
        names = linear(f"{out}.dense")
        t.op(copied, read=s.casts * r)
        t.linear_backward(names, grad_in=u, grad_out=u, saved=u, product=s.product(h, h), dead=copied)
        attend_backward(t, s, u, 2 * u, kept)
        separate_qkv_backward(t, s, f"{block}.attention.self", ("value", "key", "query"), u)
        there = s.recomputes(i) or not s.casts
        t.op(r, dead=(3 if there else 2) * r, read=2 * r)  # the layer's input goes with the residual's gradient

    begin(t, s)
    embedded = "bert.embeddings.LayerNorm"
    t.open("begin", "bert.embeddings.word_embeddings", Phase.FWD, [*tables, *norm(embedded)])
    t.op(2 * r)
    t.op(r, dead=2 * r)
    t.op(s.sequence * h * t.wide)
    t.op(r, dead=r + s.sequence * h * t.wide, read=r)
    t.op(r + stats)
    kept = layers_forward(t, s, forward)
    embedded_too = 0 if s.recomputes(0) else s.casts * r
    t.op(dead=embedded_too)
    logits, logits32 = s.tokens * m.vocab * w, s.casts * s.tokens * m.vocab * 4
    t.open("begin", f"{transform}.dense", Phase.FWD, [*linear(f"{transform}.dense"), *norm(f"{transform}.LayerNorm")])
    t.op(copied, read=s.casts * r)
    t.cast(linear(f"{transform}.dense"))
    t.op(u, products=[s.product(h, h)])
    t.op(u)
    t.op(s.casts * r, dead=copied, read=copied)
    t.op(r + stats)
    t.open("begin", "cls.predictions.decoder", Phase.FWD, [head, bias])
    t.op(copied, read=s.casts * r)
    t.cast([head, bias])
    t.op(logits, dead=s.casts * r, products=[s.product(h, m.vocab)], read=u)
    t.op(logits, dead=(1 - s.casts) * logits)
    t.op(logits32, dead=s.casts * (logits + r), read=s.casts * logits)  # autocast leaves the log-softmax in 16 bits
    t.end_autocast()
    t.open("grad", ROOT, Phase.BWD)
    t.op(logits32 or logits, dead=logits32, read=0)
    t.op(s.casts * logits, dead=logits32, read=logits32)
    t.op(logits, dead=2 * logits, read=2 * logits)
    t.open("grad", "cls.predictions.decoder", Phase.BWD, [head])
    product = s.product(h, m.vocab)
    products = [input_gradient(product), *t.weight_products([head], weight_gradient(product))]
    t.op(u + t.grown([head, bias]), dead=logits + u, products=products, read=2 * logits + u)
    t.uncast([head, bias])
    t.op(s.casts * r, dead=copied, read=copied)
    t.gradient([bias] if m.tied else [bias, head])
    names = [*linear(f"{transform}.dense"), *norm(f"{transform}.LayerNorm")]
    t.open("grad", f"{transform}.dense", Phase.BWD, names)
    layer_norm_backward(t, f"{transform}.LayerNorm", r, stats, residual=False)
    t.op(copied, dead=s.casts * r, read=s.casts * r)
    t.op(u, dead=2 * u)
    t.linear_backward(linear(f"{transform}.dense"), grad_in=u, grad_out=u, saved=u, product=s.product(h, h), dead=2 * u)
    t.op(s.casts * r, dead=copied, read=copied)
    layers_backward(t, s, forward, backward, kept)
    t.open("grad", "bert.embeddings.LayerNorm", Phase.BWD, norm(embedded))
    layer_norm_backward(t, embedded, r, stats, residual=False)
    embedding_backward(t, [tables[1], tables[2], tables[0]], tables[0] if m.tied else None, r)
    t.open("backward-end", ROOT, Phase.BWD)
