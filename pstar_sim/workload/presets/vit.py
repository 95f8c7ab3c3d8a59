"""ViT, operator by operator."""

from __future__ import annotations

from pstar_sim.workload.presets.shared import (
    Shape,
    attend,
    attend_backward,
    begin,
    declare,
    declare_norm,
    end,
    hand_on,
    layer_norm_backward,
    layers_backward,
    layers_forward,
    linear,
    norm,
    separate_qkv_backward,
)
from pstar_sim.workload.tape import Tape, weight_gradient
from pstar_sim.workload.workload import Phase


def write_vit(t: Tape, s: Shape) -> None:
    """For image classification: patches by strided convolution, class token, LayerNorm first, exact GELU."""
    m = s.model
    h, w = m.hidden, t.width
    u, f = s.tokens * h * w, s.tokens * m.ffn * w
    v, a = s.part_of(u), s.attention_width
    q, stats = s.tokens * a * w, 2 * s.rows * w
    front = "vit.embeddings"
    pixels = s.batch * 3 * m.image**2
    if s.part.first:
        t.parameter(f"{front}.cls_token", 1, 1, h)
        t.parameter(f"{front}.position_embeddings", 1, m.max_seq, h)
        t.parameter(f"{front}.patch_embeddings.projection.weight", h, 3, m.patch, m.patch)
        t.parameter(f"{front}.patch_embeddings.projection.bias", h)
    for i in s.part.layers:
        block = f"vit.layers.{i}"
        for x in "qkv":
            declare(t, f"{block}.attention.{x}_proj", (a, h), a)
        declare(t, f"{block}.attention.o_proj", (h, a), h)
        declare_norm(t, f"{block}.layernorm_before", h)
        declare_norm(t, f"{block}.layernorm_after", h)
        declare(t, f"{block}.mlp.fc1", (m.ffn, h), m.ffn)
        declare(t, f"{block}.mlp.fc2", (h, m.ffn), h)
    if s.part.last:
        declare_norm(t, "vit.layernorm", h)
        declare(t, "classifier", (m.classes, h), m.classes)

    def forward(i: int, phase: Phase) -> int:
        block = f"vit.layers.{i}"
        qkv = [n for x in "qkv" for n in linear(f"{block}.attention.{x}_proj")]
        t.open("begin", f"{block}.layernorm_before", phase, [*norm(f"{block}.layernorm_before"), *qkv])
        t.op(v + stats, unsaved=stats)
        gathered = t.gather(u)
        t.op(3 * q, products=[s.product(h, a)] * 3, dead=gathered, read=3 * u)
        t.open("end", f"{block}.attention.v_proj", phase, linear(f"{block}.attention.o_proj"))
        kept = attend(t, s, q, 2 * q)
        t.op(u, unsaved=4 * q, products=[s.product(a, h)])
        t.reduce(u)
        t.op(v, dead=v, unsaved=v, read=2 * v)
        reads = [*norm(f"{block}.layernorm_after"), *linear(f"{block}.mlp.fc1")]
        t.open("begin", f"{block}.layernorm_after", phase, reads)
        t.op(v + stats, unsaved=stats)
        gathered = t.gather(u)
        t.op(f, products=[s.product(h, m.ffn)], dead=gathered, read=u)
        t.op(f, unsaved=f)
        t.open("begin", f"{block}.mlp.fc2", phase, linear(f"{block}.mlp.fc2"))
        if phase is not Phase.RECOMPUTE:  # [Note: early stop]
            t.op(u, unsaved=f, products=[s.product(m.ffn, h)], read=f)
            t.reduce(u)
            t.op(v, dead=v, unsaved=2 * v, read=2 * v)
        return kept

    def backward(i: int, kept: int) -> None:
        block = f"vit.layers.{i}"
        t.open("grad", f"{block}.mlp.fc2", Phase.BWD, linear(f"{block}.mlp.fc2"))
        names = linear(f"{block}.mlp.fc2")
        gone = f + t.gather(u)
        t.linear_backward(names, grad_in=f, grad_out=u, saved=f, product=s.product(m.ffn, h), dead=gone)
        t.sum_at_end(names[1:])
        t.op(f, dead=2 * f, read=2 * f)
        names = linear(f"{block}.mlp.fc1")
        t.open("grad", f"{block}.mlp.fc1", Phase.BWD, [*names, *norm(f"{block}.layernorm_after")])
        gone = f + v + t.gather(u)
        t.linear_backward(names, grad_in=u, grad_out=f, saved=u, product=s.product(h, m.ffn), dead=gone)
        t.reduce(u)
        layer_norm_backward(t, f"{block}.layernorm_after", v, stats)
        names = linear(f"{block}.attention.o_proj")
        t.open("grad", f"{block}.attention.o_proj", Phase.BWD, names)
        gathered = t.gather(u)
        t.linear_backward(names, grad_in=q, grad_out=u, saved=q, product=s.product(a, h), dead=gathered)
        t.sum_at_end(names[1:])
        attend_backward(t, s, q, 2 * q, kept)
        separate_qkv_backward(t, s, f"{block}.attention", ("v_proj", "k_proj", "q_proj"), q)
        t.op(dead=v)  # the norm's output, which all three read
        layer_norm_backward(t, f"{block}.layernorm_before", v, stats)

    begin(t, s, s.part.first * pixels * w + s.part.last * 8 * s.batch, received=v)
    patch = linear(f"{front}.patch_embeddings.projection")
    others = [f"{front}.cls_token", f"{front}.position_embeddings"]
    patches = s.batch * (m.max_seq - 1)
    convolution = (1, patches, 3 * m.patch**2, h)  # patches do not overlap: a product
    if s.part.first:
        t.open("begin", f"{front}.patch_embeddings.projection", Phase.FWD, [*patch, *others])
        t.op(patches * h * w, products=[convolution], read=pixels * w)
        t.op(u, dead=patches * h * w)
        t.op(u, dead=u)
        if t.sequence:
            t.op(v, dead=u)  # every rank computes all tokens, and keeps a copy of its own
    kept = layers_forward(t, s, forward)
    if s.part.last:
        small, classes = s.batch * m.classes * w, (1, s.batch, h, m.classes)
        t.open("begin", "vit.layernorm", Phase.FWD, [*norm("vit.layernorm"), *linear("classifier")])
        t.op(v + stats)
        t.op(3 * small, dead=2 * small, products=[classes])
        names = linear("classifier")
        t.open("grad", "classifier", Phase.BWD, names)
        t.linear_backward(names, grad_in=v, grad_out=small, saved=v, product=classes, dead=v + small)
        t.open("grad", "vit.layernorm", Phase.BWD, norm("vit.layernorm"))
        layer_norm_backward(t, "vit.layernorm", v, stats, residual=False)
    else:
        hand_on(t, v)
    layers_backward(t, s, forward, backward, kept)
    if s.part.first:
        t.open("grad", front, Phase.BWD)
        t.op(dead=t.gather(u) and v)
        t.gradient(others, allocated=False)
        t.op(patches * h * w, dead=u)
        t.op(t.size(patch), products=t.weight_products(patch, weight_gradient(convolution)), read=pixels * w)
        t.gradient(patch)
        t.op(dead=patches * h * w)
    end(t, s, v)
