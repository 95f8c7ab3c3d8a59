"""GPT-2, operator by operator: see the package for units and sources."""

from __future__ import annotations

from pstar_sim.workload.presets.losses import language_loss, language_loss_backward
from pstar_sim.workload.presets.shared import (
    ROOT,
    Shape,
    attend,
    attend_backward,
    begin,
    declare,
    declare_norm,
    embedding_backward,
    last_product_again,
    layer_norm_backward,
    layers_backward,
    layers_forward,
    linear,
    norm,
)
from pstar_sim.workload.tape import Tape
from pstar_sim.workload.workload import Phase

__all__ = ["write_gpt"]


def write_gpt(t: Tape, s: Shape) -> None:
    """Write GPT-2: learned positions, LayerNorm with bias, fused qkv, "gelu_new" as eight operators or as one."""
    m = s.model
    flavour = s.flavour
    h, w = m.hidden, t.width
    u, f = s.tokens * h * w, s.tokens * m.ffn * w
    stats = 2 * s.tokens * w
    wte, wpe, ln_f = "transformer.wte.weight", "transformer.wpe.weight", norm("transformer.ln_f")
    t.parameter(wte, m.vocab, h)
    t.parameter(wpe, m.max_seq, h)
    for i in range(m.layers):
        block = f"transformer.h.{i}"
        declare_norm(t, f"{block}.ln_1", h)
        declare(t, f"{block}.attn.c_attn", (h, 3 * h), 3 * h)
        declare(t, f"{block}.attn.c_proj", (h, h), h)
        declare_norm(t, f"{block}.ln_2", h)
        declare(t, f"{block}.mlp.c_fc", (h, m.ffn), m.ffn)
        declare(t, f"{block}.mlp.c_proj", (m.ffn, h), h)
    declare_norm(t, "transformer.ln_f", h)
    head = "lm_head.weight"
    if not s.axes.language_head:
        pass
    elif m.tied:
        t.tie(head, wte)
    else:
        t.parameter(head, m.vocab, h)

    # Bytes of outputs of a norm and of an activation that are not kept, because backward computes them again.
    normed, again = (u, f) if flavour.recomputed else (0, 0)

    def activate(phase: Phase) -> None:
        """Write the activation: from the product's output (f) to the input of the next product (f)."""
        if flavour.fused:
            if not (flavour.recomputed and phase is Phase.RECOMPUTE):
                t.op(f, unsaved=f)
            return
        t.op(f)  # x/2, kept
        t.op(f)  # x^3
        t.op(f, dead=f)
        t.op(f, dead=f, read=2 * f)
        t.op(f, dead=f)
        t.op(f, dead=f)  # tanh, kept
        t.op(f, unsaved=f)  # 1 + tanh, kept
        t.op(f, unsaved=3 * f, read=2 * f)

    def activate_backward() -> None:
        """Write its backward: from the gradient of the activation's output (f) to that of its input (f). Frees the kept
        tensors."""
        if flavour.fused:
            t.op(f, dead=2 * f, read=2 * f)
            return
        t.op(f)
        t.op(f, dead=3 * f)
        t.op(f, dead=2 * f)
        t.op(f, dead=f)
        t.op(f)
        t.op(f)
        t.op(f)
        t.op(f, dead=4 * f)
        t.op(f, dead=2 * f)
        t.op(f, dead=f)
        t.op(f, dead=2 * f)

    def forward(i: int, phase: Phase) -> int:
        block = f"transformer.h.{i}"
        t.open("begin", f"{block}.ln_1", phase, [*norm(f"{block}.ln_1"), *linear(f"{block}.attn.c_attn")])
        t.op(u + stats, unsaved=stats)
        t.op(3 * u, products=[s.product(h, 3 * h)], dead=normed, read=u)
        t.open("end", f"{block}.attn.c_attn", phase, linear(f"{block}.attn.c_proj"))
        kept = attend(t, s, 3 * u)
        t.op(u, unsaved=4 * u - normed, products=[s.product(h, h)])
        t.op(u, unsaved=u, read=2 * u)
        t.open("begin", f"{block}.ln_2", phase, [*norm(f"{block}.ln_2"), *linear(f"{block}.mlp.c_fc")])
        t.op(u + stats, unsaved=stats)
        t.op(f, products=[s.product(h, m.ffn)], dead=normed, read=u)
        t.open("end", f"{block}.mlp.c_fc", phase, linear(f"{block}.mlp.c_proj"))
        activate(phase)
        if phase is Phase.RECOMPUTE:
            if not s.axes.early_stop:
                last_product_again(t, s, u, f)
            t.op(dead=u)  # [Note: early stop]; the attention's output ends with its frame
        else:
            t.op(u, dead=again, unsaved=f - again, products=[s.product(m.ffn, h)], read=f)
            t.op(u, dead=2 * u, unsaved=2 * u - normed, read=2 * u)
        return kept

    def backward(i: int, kept: int) -> None:
        block = f"transformer.h.{i}"
        t.open("grad", f"{block}.mlp.c_proj", Phase.BWD, linear(f"{block}.mlp.c_proj"))
        names = linear(f"{block}.mlp.c_proj")
        t.op(again)
        t.linear_backward(names, grad_in=f, grad_out=u, saved=f, product=s.product(m.ffn, h), dead=f)
        activate_backward()
        t.open("grad", f"{block}.mlp.c_fc", Phase.BWD, [*linear(f"{block}.mlp.c_fc"), *norm(f"{block}.ln_2")])
        names = linear(f"{block}.mlp.c_fc")
        t.op(normed)
        t.linear_backward(names, grad_in=u, grad_out=f, saved=u, product=s.product(h, m.ffn), dead=f + u)
        layer_norm_backward(t, f"{block}.ln_2", u, stats)
        t.open("grad", f"{block}.attn.c_proj", Phase.BWD, linear(f"{block}.attn.c_proj"))
        names = linear(f"{block}.attn.c_proj")
        t.linear_backward(names, grad_in=u, grad_out=u, saved=u, product=s.product(h, h))
        attend_backward(t, s, 3 * u, kept)
        t.op(3 * u, dead=3 * u)
        t.open("grad", f"{block}.attn.c_attn", Phase.BWD, [*linear(f"{block}.attn.c_attn"), *norm(f"{block}.ln_1")])
        names = linear(f"{block}.attn.c_attn")
        t.op(normed)
        t.linear_backward(names, grad_in=u, grad_out=3 * u, saved=u, product=s.product(h, 3 * h), dead=4 * u)
        layer_norm_backward(t, f"{block}.ln_1", u, stats)

    positions = s.sequence * h * w
    begin(t, s)
    t.open("begin", "transformer.wte", Phase.FWD, [wte, wpe])
    t.op(u)
    t.op(positions)
    t.op(u, read=u + positions)
    kept = layers_forward(t, s, forward)
    t.open("begin", "transformer.ln_f", Phase.FWD, ln_f)
    t.op(u + stats, dead=u + positions)
    if s.axes.language_head:
        language_loss(t, s, "lm_head", head, u)
        language_loss_backward(t, s, "lm_head", head, u, tied=m.tied)
    else:
        t.open("grad", ROOT, Phase.BWD)
        t.op(u, dead=u)
    t.open("grad", "transformer.ln_f", Phase.BWD, ln_f)
    layer_norm_backward(t, "transformer.ln_f", u, stats, residual=False)
    layers_backward(t, s, forward, backward, kept)
    t.open("grad", "transformer.wte", Phase.BWD)
    t.op(positions, read=u)
    t.gradient([wpe], allocated=False)
    t.op(dead=positions)
    embedding_backward(t, [wte], wte if m.tied and s.axes.language_head else None, u)
    t.open("backward-end", ROOT, Phase.BWD)
