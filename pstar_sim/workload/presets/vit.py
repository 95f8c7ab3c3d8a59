"""ViT, operator by operator."""

from __future__ import annotations

from pstar_sim.workload.presets.shared import (
    ROOT,
    Shape,
    attend,
    attend_backward,
    begin,
    declare,
    declare_norm,
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
    stats = 2 * s.tokens * w
    front = "vit.embeddings"
    pixels = s.batch * 3 * m.image**2
    t.parameter(f"{front}.cls_token", 1, 1, h)
    t.parameter(f"{front}.position_embeddings", 1, m.max_seq, h)
    t.parameter(f"{front}.patch_embeddings.projection.weight", h, 3, m.patch, m.patch)
    t.parameter(f"{front}.patch_embeddings.projection.bias", h)
    for i in range(m.layers):
        block = f"vit.layers.{i}"
        for x in "qkvo":
            declare(t, f"{block}.attention.{x}_proj", (h, h), h)
        declare_norm(t, f"{block}.layernorm_before", h)
        declare_norm(t, f"{block}.layernorm_after", h)
        declare(t, f"{block}.mlp.fc1", (m.ffn, h), m.ffn)
        declare(t, f"{block}.mlp.fc2", (h, m.ffn), h)
    declare_norm(t, "vit.layernorm", h)
    declare(t, "classifier", (m.classes, h), m.classes)

    def forward(i: int, phase: Phase) -> int:
        block = f"vit.layers.{i}"
        qkv = [n for x in "qkv" for n in linear(f"{block}.attention.{x}_proj")]
        t.open("begin", f"{block}.layernorm_before", phase, [*norm(f"{block}.layernorm_before"), *qkv])
        t.op(u + stats, unsaved=stats)
        t.op(3 * u, products=[s.product(h, h)] * 3, read=3 * u)
        t.open("end", f"{block}.attention.v_proj", phase, linear(f"{block}.attention.o_proj"))
        kept = attend(t, s, u, 2 * u)
        t.op(u, unsaved=4 * u, products=[s.product(h, h)])
        t.op(u, dead=u, unsaved=u, read=2 * u)
        reads = [*norm(f"{block}.layernorm_after"), *linear(f"{block}.mlp.fc1")]
        t.open("begin", f"{block}.layernorm_after", phase, reads)
        t.op(u + stats, unsaved=stats)
        t.op(f, products=[s.product(h, m.ffn)], read=u)
        t.op(f, unsaved=f)
        t.open("begin", f"{block}.mlp.fc2", phase, linear(f"{block}.mlp.fc2"))
        if phase is not Phase.RECOMPUTE:  # [Note: early stop]
            t.op(u, unsaved=f, products=[s.product(m.ffn, h)], read=f)
            t.op(u, dead=u, unsaved=2 * u, read=2 * u)
        return kept

    def backward(i: int, kept: int) -> None:
        block = f"vit.layers.{i}"
        t.open("grad", f"{block}.mlp.fc2", Phase.BWD, linear(f"{block}.mlp.fc2"))
        names = linear(f"{block}.mlp.fc2")
        t.linear_backward(names, grad_in=f, grad_out=u, saved=f, product=s.product(m.ffn, h), dead=f)
        t.op(f, dead=2 * f, read=2 * f)
        names = linear(f"{block}.mlp.fc1")
        t.open("grad", f"{block}.mlp.fc1", Phase.BWD, [*names, *norm(f"{block}.layernorm_after")])
        t.linear_backward(names, grad_in=u, grad_out=f, saved=u, product=s.product(h, m.ffn), dead=f + u)
        layer_norm_backward(t, f"{block}.layernorm_after", u, stats)
        names = linear(f"{block}.attention.o_proj")
        t.open("grad", f"{block}.attention.o_proj", Phase.BWD, names)
        t.linear_backward(names, grad_in=u, grad_out=u, saved=u, product=s.product(h, h))
        attend_backward(t, s, u, 2 * u, kept)
        separate_qkv_backward(t, s, f"{block}.attention", ("v_proj", "k_proj", "q_proj"), u)
        t.op(dead=u)  # the norm's output, which all three read
        layer_norm_backward(t, f"{block}.layernorm_before", u, stats)

    begin(t, s, pixels * w + 8 * s.batch)
    patch = linear(f"{front}.patch_embeddings.projection")
    others = [f"{front}.cls_token", f"{front}.position_embeddings"]
    t.open("begin", f"{front}.patch_embeddings.projection", Phase.FWD, [*patch, *others])
    patches = s.batch * (m.max_seq - 1)
    convolution = (1, patches, 3 * m.patch**2, h)  # patches do not overlap: a product
    t.op(patches * h * w, products=[convolution], read=pixels * w)
    t.op(u, dead=patches * h * w)
    t.op(u, dead=u)
    kept = layers_forward(t, s, forward)
    small, classes = s.batch * m.classes * w, (1, s.batch, h, m.classes)
    t.open("begin", "vit.layernorm", Phase.FWD, [*norm("vit.layernorm"), *linear("classifier")])
    t.op(u + stats)
    t.op(3 * small, dead=2 * small, products=[classes])
    names = linear("classifier")
    t.open("grad", "classifier", Phase.BWD, names)
    t.linear_backward(names, grad_in=u, grad_out=small, saved=u, product=classes, dead=u + small)
    t.open("grad", "vit.layernorm", Phase.BWD, norm("vit.layernorm"))
    layer_norm_backward(t, "vit.layernorm", u, stats, residual=False)
    layers_backward(t, s, forward, backward, kept)
    t.open("grad", front, Phase.BWD)
    t.gradient(others, allocated=False)
    t.op(patches * h * w, dead=u)
    t.op(t.size(patch), products=t.weight_products(patch, weight_gradient(convolution)), read=pixels * w)
    t.gradient(patch)
    t.op(dead=patches * h * w)
    t.open("backward-end", ROOT, Phase.BWD)
