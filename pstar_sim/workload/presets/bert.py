"""BERT, operator by operator."""

from __future__ import annotations

from pstar_sim.workload.presets.losses import loss_sums
from pstar_sim.workload.presets.shared import (
    ROOT,
    Shape,
    attend,
    attend_backward,
    begin,
    declare,
    declare_head,
    declare_norm,
    embedding_backward,
    end,
    gradient_comes,
    hand_on,
    head_comes,
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
    v, a = s.part_of(u), s.attention_width
    q = s.tokens * a * w
    r, copied = s.rows * h * t.wide, s.casts * v  # autocast leaves outputs of norms in fp32, and copies them
    stats = 2 * s.rows * t.wide
    tables = [f"bert.embeddings.{x}_embeddings.weight" for x in ("word", "position", "token_type")]
    if s.part.first:
        for name, rows in zip(tables, (m.vocab, m.max_seq, 2), strict=True):
            t.parameter(name, rows, h)
        declare_norm(t, "bert.embeddings.LayerNorm", h)
    for i in s.part.layers:
        block = f"bert.encoder.layer.{i}"
        for x in ("query", "key", "value"):
            declare(t, f"{block}.attention.self.{x}", (a, h), a)
        declare(t, f"{block}.attention.output.dense", (h, a), h)
        declare_norm(t, f"{block}.attention.output.LayerNorm", h)
        declare(t, f"{block}.intermediate.dense", (m.ffn, h), m.ffn)
        declare(t, f"{block}.output.dense", (h, m.ffn), h)
        declare_norm(t, f"{block}.output.LayerNorm", h)
    head, bias, transform = "cls.predictions.decoder.weight", "cls.predictions.bias", "cls.predictions.transform"
    if s.part.last:
        t.parameter(bias, m.vocab)
        declare(t, f"{transform}.dense", (h, h), h)
        declare_norm(t, f"{transform}.LayerNorm", h)
        declare_head(t, s, head, tables[0])
        t.tie("cls.predictions.decoder.bias", bias)
    table = tables[0] if s.part.first else head

    def forward(i: int, phase: Phase) -> int:
        block = f"bert.encoder.layer.{i}"
        qkv = [n for x in ("query", "key", "value") for n in linear(f"{block}.attention.self.{x}")]
        t.open("begin", f"{block}.attention.self.query", phase, qkv)
        t.op(3 * copied, read=s.casts * r)
        t.cast(qkv)
        gathered = t.gather(u)
        t.op(3 * q, products=[s.product(h, a)] * 3, dead=gathered, read=3 * u)
        reads = [*linear(f"{block}.attention.output.dense"), *norm(f"{block}.attention.output.LayerNorm")]
        t.open("end", f"{block}.attention.self.value", phase, reads)
        kept = attend(t, s, q, 2 * q)
        t.cast(linear(f"{block}.attention.output.dense"))
        t.op(u, unsaved=4 * q + 3 * copied, products=[s.product(a, h)])
        t.reduce(u)
        t.op(r, dead=v, read=v + r)
        t.op(r + stats, unsaved=r + stats)
        t.open("begin", f"{block}.intermediate.dense", phase, linear(f"{block}.intermediate.dense"))
        t.op(copied, read=s.casts * r)
        t.cast(linear(f"{block}.intermediate.dense"))
        gathered = t.gather(u)
        t.op(f, products=[s.product(h, m.ffn)], dead=gathered, read=u)
        t.op(f, unsaved=f)
        reads = [*linear(f"{block}.output.dense"), *norm(f"{block}.output.LayerNorm")]
        t.open("begin", f"{block}.output.dense", phase, reads)
        t.cast(linear(f"{block}.output.dense"))
        t.op(u, unsaved=f, products=[s.product(m.ffn, h)], read=f)
        t.reduce(u)
        t.op(r, dead=v + s.casts * r, unsaved=copied or v, read=v + r)
        entered = i > s.part.layers[0] and not s.recomputes(i)  # then no operator of autocast keeps the layer's input
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
        gone = f + copied + t.gather(u)
        t.linear_backward(names, grad_in=f, grad_out=u, saved=f, product=s.product(m.ffn, h), dead=gone)
        t.sum_at_end(names[1:])
        t.open("grad", dense, Phase.BWD, linear(dense))
        t.op(f, dead=2 * f, read=2 * f)
        names = linear(dense)
        gone = f + v + t.gather(u)
        t.linear_backward(names, grad_in=u, grad_out=f, saved=u, product=s.product(h, m.ffn), dead=gone)
        t.reduce(u)
        t.op(s.casts * r, dead=copied, read=copied)
        t.op(r, dead=2 * r, read=2 * r)
        out = f"{block}.attention.output"
        t.open("grad", out, Phase.BWD, [*norm(f"{out}.LayerNorm"), *linear(f"{out}.dense")])
        layer_norm_backward(t, f"{out}.LayerNorm", r, stats, residual=False)
        names = linear(f"{out}.dense")
        t.op(copied, read=s.casts * r)
        gone = copied + t.gather(u)
        t.linear_backward(names, grad_in=q, grad_out=u, saved=q, product=s.product(a, h), dead=gone)
        t.sum_at_end(names[1:])
        attend_backward(t, s, q, 2 * q, kept)
        separate_qkv_backward(t, s, f"{block}.attention.self", ("value", "key", "query"), q)
        there = s.recomputes(i) or not s.casts
        t.op(r, dead=(3 if there else 2) * r, read=2 * r)  # the layer's input goes with the residual's gradient

    def head_and_loss() -> None:
        logits, logits32 = s.tokens * m.vocab * w, s.casts * s.tokens * m.vocab * 4
        names = [*linear(f"{transform}.dense"), *norm(f"{transform}.LayerNorm")]
        beside = (1, s.rows, h, h)  # each rank has the matrix, and its tokens
        t.open("begin", f"{transform}.dense", Phase.FWD, names)
        t.op(copied, read=s.casts * r)
        t.cast(linear(f"{transform}.dense"))
        t.op(v, products=[beside])
        t.op(v)
        t.op(s.casts * r, dead=copied, read=copied)
        t.op(r + stats)
        head_comes(t, s, head)
        t.open("begin", "cls.predictions.decoder", Phase.FWD, [head, bias])
        t.op(copied, read=s.casts * r)
        t.cast([head, bias])
        gone = s.casts * r + t.gather(u)
        t.op(logits, dead=gone, products=[s.product(h, m.vocab)], read=u)
        t.op(logits, dead=(1 - s.casts) * logits)
        t.op(logits32, dead=s.casts * (logits + r), read=s.casts * logits)  # autocast leaves it in 16 bits
        loss_sums(t, s)
        t.end_autocast()
        t.open("grad", ROOT, Phase.BWD)
        t.op(logits32 or logits, dead=logits32, read=0)
        t.op(s.casts * logits, dead=logits32, read=logits32)
        t.op(logits, dead=2 * logits, read=2 * logits)
        t.open("grad", "cls.predictions.decoder", Phase.BWD, [head])
        product = s.product(h, m.vocab)
        products = [input_gradient(product), *t.weight_products([head], weight_gradient(product))]
        gone = logits + v + t.gather(u)
        t.op(u + t.grown([head, bias]), dead=gone, products=products, read=2 * logits + u)
        t.reduce(u)
        t.uncast([head, bias])
        t.op(s.casts * r, dead=copied, read=copied)
        t.gradient([bias] if s.tied else [bias, head])
        t.open("grad", f"{transform}.dense", Phase.BWD, names)
        layer_norm_backward(t, f"{transform}.LayerNorm", r, stats, residual=False)
        t.op(copied, dead=s.casts * r, read=s.casts * r)
        t.op(v, dead=2 * v)
        names = linear(f"{transform}.dense")
        t.linear_backward(names, grad_in=v, grad_out=v, saved=v, product=beside, dead=2 * v)
        t.sum_at_end(names)
        t.op(s.casts * r, dead=copied, read=copied)

    held = 0 if s.recomputes(s.part.layers[0]) else s.casts * r  # the first layer's input, which no operator keeps
    embedded = held if s.part.first else 0  # which ends with the model's forward
    positions, table_out = s.part_of(s.sequence * h * t.wide), s.tokens * h * t.wide
    first_norm = "bert.embeddings.LayerNorm"
    begin(t, s, received=r, table=table)
    if s.part.first:
        t.open("begin", "bert.embeddings.word_embeddings", Phase.FWD, [*tables, *norm(first_norm)])
        t.op(table_out + r)
        t.reduce(table_out)
        t.op(r, dead=2 * r)
        t.op(positions)
        t.op(r, dead=r + positions, read=r)
        t.op(r + stats)
    kept = layers_forward(t, s, forward)
    t.op(dead=embedded)
    if s.part.last:
        head_and_loss()
    else:
        hand_on(t, r)
    layers_backward(t, s, forward, backward, kept)
    if s.part.first:
        gradient_comes(t, s, tables[0])
        t.open("grad", first_norm, Phase.BWD, norm(first_norm))
        layer_norm_backward(t, first_norm, r, stats, residual=False)
        t.sum_at_end(tables[1:])
        gathered = t.gather(table_out)
        embedding_backward(t, [tables[1], tables[2], tables[0]], tables[0] if s.tied else None, r)
        t.op(dead=gathered)
    end(t, s, r, held=held, table=table)
