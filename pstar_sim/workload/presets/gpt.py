"""GPT-2, operator by operator."""

from __future__ import annotations

from pstar_sim.workload.presets.losses import language_loss, language_loss_backward, loss_sums
from pstar_sim.workload.presets.shared import (
    ROOT,
    Shape,
    attend,
    attend_backward,
    begin,
    declare,
    declare_head,
    declare_norm,
    drop,
    drop_backward,
    drop_embedded,
    drop_embedded_backward,
    embedding_backward,
    end,
    gradient_comes,
    hand_on,
    head_comes,
    last_product_again,
    layer_norm_backward,
    layers_backward,
    layers_forward,
    linear,
    norm,
)
from pstar_sim.workload.tape import Tape
from pstar_sim.workload.workload import Phase


def write_gpt(t: Tape, s: Shape) -> None:
    """Learned positions, LayerNorm with bias, fused qkv, "gelu_new" as eight operators or as one."""
    m = s.model
    flavour = s.flavour
    h, w = m.hidden, t.width
    u, f = s.tokens * h * w, s.tokens * m.ffn * w
    v = s.part_of(u)
    a = s.attention_width
    q = s.tokens * a * w
    # Under autocast the residual stream is fp32, and so are outputs of norm and activation unless they are fused.
    r, wide = s.rows * h * t.wide, s.tokens * m.ffn * t.wide
    n, copied, copied_f = (r, v, f) if s.casts else (v, 0, 0)
    low = v if t.autocast else 0  # a gradient of the residual stream, in 16 bits
    stats = 2 * s.rows * t.wide
    wte, wpe, ln_f = "transformer.wte.weight", "transformer.wpe.weight", norm("transformer.ln_f")
    if s.part.first:
        t.parameter(wte, m.vocab, h)
        t.parameter(wpe, m.max_seq, h)
    for i in s.part.layers:
        block = f"transformer.h.{i}"
        declare_norm(t, f"{block}.ln_1", h)
        declare(t, f"{block}.attn.c_attn", (h, 3 * a), 3 * a)
        declare(t, f"{block}.attn.c_proj", (a, h), h)
        declare_norm(t, f"{block}.ln_2", h)
        declare(t, f"{block}.mlp.c_fc", (h, m.ffn), m.ffn)
        declare(t, f"{block}.mlp.c_proj", (m.ffn, h), h)
    head = "lm_head.weight"
    if s.part.last:
        declare_norm(t, "transformer.ln_f", h)
    if s.part.last and s.axes.language_head:
        declare_head(t, s, head, wte)
    table = wte if s.part.first else head

    # Bytes of outputs of a norm and of an activation that are not kept, because backward computes them again.
    normed, again = (v, f) if flavour.recomputed else (0, 0)

    def activate(phase: Phase) -> None:
        """From the product's output (f) to the next one's input (f)."""
        if flavour.fused:
            if not (flavour.recomputed and phase is Phase.RECOMPUTE):
                t.op(f, unsaved=f)
            return
        t.op(f)  # x/2, kept
        t.op(copied_f and wide, read=copied_f)  # x in fp32, kept
        t.op(wide)  # x^3
        t.op(wide, dead=wide)
        t.op(wide, dead=wide, read=2 * wide)
        t.op(wide, dead=wide)
        t.op(wide, dead=wide)  # tanh, kept
        t.op(wide, unsaved=wide)  # 1 + tanh, kept
        t.op(wide, dead=copied_f, unsaved=2 * wide + f, read=2 * wide)

    def activate_backward() -> None:
        """From the gradient of its output (f) to that of its input (f); frees the kept tensors."""
        if flavour.fused:
            t.op(f, dead=2 * f, read=2 * f)
            return
        t.op(wide)
        t.op(wide, dead=3 * (f - copied_f))
        t.op(copied_f, dead=copied_f and 3 * wide + f)
        t.op(wide, dead=2 * wide)
        t.op(wide, dead=wide)
        t.op(copied_f)
        t.op(wide, dead=copied_f and wide)
        t.op(wide)
        t.op(wide)
        t.op(wide, dead=4 * wide)
        t.op(copied_f, dead=copied_f and wide)
        t.op(f, dead=2 * f)
        t.op(f, dead=f)
        t.op(f, dead=2 * f)

    def forward(i: int, phase: Phase) -> int:
        block = f"transformer.h.{i}"
        t.open("begin", f"{block}.ln_1", phase, [*norm(f"{block}.ln_1"), *linear(f"{block}.attn.c_attn")])
        t.op(n + stats, unsaved=stats)
        t.op(copied, read=copied and n)
        t.cast(linear(f"{block}.attn.c_attn"))
        gathered = t.gather(u)
        t.op(3 * q, products=[s.product(h, 3 * a)], dead=normed + gathered, read=u)
        t.open("end", f"{block}.attn.c_attn", phase, linear(f"{block}.attn.c_proj"))
        kept = attend(t, s, q, 2 * q)
        t.cast(linear(f"{block}.attn.c_proj"))
        t.op(u, unsaved=4 * q - normed, products=[s.product(a, h)], read=q)
        t.reduce(u)
        mask = drop(t, s)
        t.op(r + mask, dead=copied and n, unsaved=v + mask, read=v + r)
        t.open("begin", f"{block}.ln_2", phase, [*norm(f"{block}.ln_2"), *linear(f"{block}.mlp.c_fc")])
        t.op(n + stats, unsaved=stats)
        t.op(copied, read=copied and n)
        t.cast(linear(f"{block}.mlp.c_fc"))
        gathered = t.gather(u)
        t.op(f, products=[s.product(h, m.ffn)], dead=normed + gathered, read=u)
        t.open("end", f"{block}.mlp.c_fc", phase, linear(f"{block}.mlp.c_proj"))
        activate(phase)
        t.op(copied_f, read=copied_f and wide)
        t.cast(linear(f"{block}.mlp.c_proj"))
        if phase is Phase.RECOMPUTE:
            if s.mask or not s.axes.early_stop:
                last_product_again(t, s, u, f)
            gone = v + (copied and n) + (copied_f and wide)
            t.op(dead=gone)  # [Note: early stop]; the attention's output ends with its frame
        else:
            t.op(u, dead=again + (copied_f and wide), unsaved=f - again, products=[s.product(m.ffn, h)], read=f)
            t.reduce(u)
            mask = drop(t, s)
            t.op(r + mask, dead=2 * v + (copied and n), unsaved=v + r - normed + mask, read=v + r)
        return kept

    def backward(i: int, kept: int) -> None:
        block = f"transformer.h.{i}"
        t.open("grad", f"{block}.mlp.c_proj", Phase.BWD, linear(f"{block}.mlp.c_proj"))
        names = linear(f"{block}.mlp.c_proj")
        t.op(low, read=low and r)
        dropped = drop_backward(t, s, low)
        t.op(again)
        gone = f + dropped + t.gather(u)
        t.linear_backward(names, grad_in=f, grad_out=u, saved=f, product=s.product(m.ffn, h), dead=gone)
        t.sum_at_end(names[1:])
        t.op(copied_f and wide, dead=copied_f, read=copied_f)
        activate_backward()
        t.open("grad", f"{block}.mlp.c_fc", Phase.BWD, [*linear(f"{block}.mlp.c_fc"), *norm(f"{block}.ln_2")])
        names = linear(f"{block}.mlp.c_fc")
        t.op(normed)
        gone = f + v + t.gather(u)
        t.linear_backward(names, grad_in=u, grad_out=f, saved=u, product=s.product(h, m.ffn), dead=gone)
        t.reduce(u)
        t.op(copied and r, dead=copied, read=copied)
        layer_norm_backward(t, f"{block}.ln_2", r, stats, grad=n)
        t.open("grad", f"{block}.attn.c_proj", Phase.BWD, linear(f"{block}.attn.c_proj"))
        names = linear(f"{block}.attn.c_proj")
        t.op(low, read=low and r)
        gone = drop_backward(t, s, low) + t.gather(u)
        t.linear_backward(names, grad_in=q, grad_out=u, saved=q, product=s.product(a, h), dead=gone)
        t.sum_at_end(names[1:])
        attend_backward(t, s, q, 2 * q, kept)
        t.op(3 * q, dead=3 * q)
        t.open("grad", f"{block}.attn.c_attn", Phase.BWD, [*linear(f"{block}.attn.c_attn"), *norm(f"{block}.ln_1")])
        names = linear(f"{block}.attn.c_attn")
        t.op(normed)
        gone = 3 * q + v + t.gather(u)
        t.linear_backward(names, grad_in=u, grad_out=3 * q, saved=u, product=s.product(h, 3 * a), dead=gone)
        t.reduce(u)
        t.op(copied and r, dead=copied, read=copied)
        layer_norm_backward(t, f"{block}.ln_1", r, stats, grad=n)

    def head_and_loss() -> None:
        t.open("begin", "transformer.ln_f", Phase.FWD, ln_f)
        t.op(n + stats, dead=embedded)
        if s.axes.language_head:
            t.op(copied, read=copied and n)
            head_comes(t, s, head)
            language_loss(t, s, "lm_head", head, u)
            loss_sums(t, s)
            t.op(dead=copied and n)
            t.end_autocast()
            language_loss_backward(t, s, "lm_head", head, u, tied=s.tied)
            t.op(copied and r, dead=copied, read=copied)
        else:
            t.open("grad", ROOT, Phase.BWD)
            t.end_autocast()
            t.op(n, dead=n)
        t.open("grad", "transformer.ln_f", Phase.BWD, ln_f)
        layer_norm_backward(t, "transformer.ln_f", r, stats, residual=False, grad=n)

    positions, table_out = s.part_of(s.sequence * h * t.wide), s.tokens * h * t.wide
    embedded = r + positions if s.part.first else 0  # bytes that end with the model's forward
    begin(t, s, received=r, table=table)
    if s.part.first:
        t.open("begin", "transformer.wte", Phase.FWD, [wte, wpe])
        t.op(table_out)
        t.reduce(table_out)
        t.op(positions)
        t.op(r, read=r + positions)
        drop_embedded(t, s)
    kept = layers_forward(t, s, forward)
    if s.part.last:
        head_and_loss()
    else:
        t.op(dead=embedded)
        hand_on(t, r)
    layers_backward(t, s, forward, backward, kept)
    if s.part.first:
        gradient_comes(t, s, wte)
        t.open("grad", "transformer.wte", Phase.BWD)
        drop_embedded_backward(t, s)
        t.op(positions, read=r)
        t.gradient([wpe], allocated=False)
        t.sum_at_end([wpe])
        t.op(dead=positions)
        gathered = t.gather(table_out)
        embedding_backward(t, [wte], wte if s.tied and s.axes.language_head else None, r)
        t.op(dead=gathered)
    end(t, s, r, table=table)
