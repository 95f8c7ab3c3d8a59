"""Llama and Qwen2, operator by operator: see the package for units and sources."""

from __future__ import annotations

from pstar_sim.workload.presets.shared import (
    ROOT,
    Shape,
    attend,
    attend_backward,
    begin,
    declare,
    embedding_backward,
    language_loss,
    language_loss_backward,
    last_product_again,
    layers_backward,
    layers_forward,
    linear,
)
from pstar_sim.workload.tape import Tape
from pstar_sim.workload.workload import Phase

__all__ = ["write_llama"]


def write_llama(t: Tape, s: Shape) -> None:
    """Llama and Qwen2: rotary positions, RMSNorm in fp32, grouped keys and values, gated feed-forward (SiLU)."""
    m = s.model
    flavour = s.flavour
    h, w = m.hidden, t.width
    kv_width = m.kv_heads * m.head_dim
    u, f, kv = s.tokens * h * w, s.tokens * m.ffn * w, s.tokens * kv_width * w
    upcast = w < 4 and not flavour.fused
    wide = s.tokens * h * 4 if upcast else 0  # a norm's fp32 copy of its input; in fp32, or fused, it keeps the input
    # Bytes that are not kept for backward, which computes them again: the output of a norm, of the activation.
    normed, again = (u, f) if flavour.recomputed else (0, 0)
    row = s.tokens * 4
    embedding, norm, head = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
    t.parameter(embedding, m.vocab, h)
    for i in range(m.layers):
        block = f"model.layers.{i}"
        for name, out, rows, bias in (
            ("self_attn.q_proj", h, h, m.attention_bias),
            ("self_attn.k_proj", kv_width, h, m.attention_bias),
            ("self_attn.v_proj", kv_width, h, m.attention_bias),
            ("self_attn.o_proj", h, h, False),
            ("mlp.gate_proj", m.ffn, h, False),
            ("mlp.up_proj", m.ffn, h, False),
            ("mlp.down_proj", h, m.ffn, False),
        ):
            declare(t, f"{block}.{name}", (out, rows), out if bias else 0)
        t.parameter(f"{block}.input_layernorm.weight", h)
        t.parameter(f"{block}.post_attention_layernorm.weight", h)
    t.parameter(norm, h)
    if m.tied:
        t.tie(head, embedding)
    else:
        t.parameter(head, m.vocab, h)

    def weights(block: str, *modules: str) -> list[str]:
        biased = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj") if m.attention_bias else ()
        return [name for x in modules for name in linear(f"{block}.{x}", bias=x in biased)]

    def rms_norm() -> None:
        if flavour.fused:
            t.op(u + row, unsaved=row)
            return
        if upcast:
            t.op(wide, read=u)
        square = wide or u
        t.op(square)
        t.op(3 * row, dead=square + 2 * row)
        t.op(square)
        if upcast:
            t.op(u, dead=square, read=square)
        t.op(u, unsaved=u + wide + row)

    def rms_norm_backward(name: str, residual: bool = True) -> None:
        """Backward of the norm: from the gradient of its output (and the residual's, both alive) to their sum (1 u)."""
        if flavour.fused:
            t.op(u + t.size([name]), dead=2 * u + row, read=2 * u)
            t.gradient([name])
            if residual:
                t.op(u, dead=2 * u, read=2 * u)
            return
        square = wide or u
        t.op(u)
        t.op(u)
        t.op(t.size([name]), dead=u)
        t.gradient([name])
        t.op(dead=2 * u)
        if upcast:
            t.op(square, dead=u, read=u)
        t.op(square)
        t.op(square)
        t.op(row, dead=2 * square)
        t.op(2 * row, dead=2 * row)
        t.op(square, dead=row)
        t.op(square)
        t.op(square)
        t.op(square, dead=4 * square)
        t.op(square, dead=2 * square + row, read=2 * square)
        if upcast:
            t.op(u, dead=square, read=square)
        if residual:
            t.op(u, dead=2 * u, read=2 * u)

    def rope(q: int) -> None:
        if flavour.fused:
            t.op(q)
            return
        t.op(q)
        t.op(q // 2)
        t.op(q, dead=q // 2)
        t.op(q, dead=q, read=2 * q)
        t.op(q, dead=2 * q, read=2 * q)

    def rope_backward(q: int) -> None:
        if flavour.fused:
            t.op(q, dead=q)
            return
        t.op(q)
        t.op(q // 2)
        t.op(q, dead=q // 2)
        t.op(q, dead=q)
        t.op(q, dead=2 * q, read=2 * q)
        t.op(q, dead=q)
        t.op(q, dead=2 * q, read=2 * q)

    def forward(i: int, phase: Phase) -> int:
        block = f"model.layers.{i}"
        entered = i > 0 and not s.checkpointing and upcast  # then nobody keeps the layer's input for backward
        qkv = weights(block, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        t.open("begin", f"{block}.input_layernorm", phase, [f"{block}.input_layernorm.weight", *qkv])
        rms_norm()
        t.op(u + 2 * kv, products=[s.product(h, n) for n in (h, kv_width, kv_width)], dead=normed, read=3 * u)
        t.open("end", f"{block}.self_attn.v_proj", phase, weights(block, "self_attn.o_proj"))
        rope(u)
        rope(kv)
        t.op(dead=u + kv)
        kept = attend(t, s, u + 2 * kv)
        t.op(u, unsaved=2 * u + 2 * kv - normed, products=[s.product(h, h)])
        t.op(u, dead=u, unsaved=u, read=2 * u)
        gated = weights(block, "mlp.gate_proj", "mlp.up_proj")
        after = f"{block}.post_attention_layernorm"
        t.open("begin", after, phase, [f"{after}.weight", *gated])
        rms_norm()
        t.op(f, products=[s.product(h, m.ffn)], read=u)
        if not flavour.fused:
            t.op(f, unsaved=f)
        t.op(f, products=[s.product(h, m.ffn)], dead=normed, read=u)
        t.open("end", f"{block}.mlp.up_proj", phase, weights(block, "mlp.down_proj"))
        if not (flavour.recomputed and phase is Phase.RECOMPUTE):
            t.op(f, unsaved=2 * f, read=2 * f)
        if phase is Phase.RECOMPUTE:
            if not s.early_stop:
                last_product_again(t, s, u, f)
            t.op(dead=u if upcast else 0)  # [Note: early stop]; the residual dies with its frame
        else:
            t.op(u, dead=again, unsaved=f - again, products=[s.product(m.ffn, h)], read=f)
            gone = u + (u if upcast else 0) + (u if entered else 0)
            t.op(u, dead=gone, unsaved=u + (0 if upcast else u) - normed, read=2 * u)
        return kept

    def backward(i: int, kept: int) -> None:
        block = f"model.layers.{i}"
        down, up, gate = (weights(block, f"mlp.{x}_proj") for x in ("down", "up", "gate"))
        o, q, k, v = (weights(block, f"self_attn.{x}_proj") for x in "oqkv")
        up_product = s.product(h, m.ffn)
        t.open("grad", f"{block}.mlp.down_proj", Phase.BWD, [*down, *up, *gate])
        t.op(again)
        t.linear_backward(down, grad_in=f, grad_out=u, saved=f, product=s.product(m.ffn, h), dead=f)
        if flavour.fused:
            t.op(2 * f, dead=3 * f, read=3 * f)
        else:
            t.op(f)
            t.op(f, dead=3 * f)
        t.op(normed)
        t.linear_backward(up, grad_in=u, grad_out=f, saved=u, product=up_product, dead=f)
        if not flavour.fused:
            t.op(f, dead=2 * f)
        t.linear_backward(gate, grad_in=u, grad_out=f, saved=u, product=up_product, dead=f + u)
        t.op(u, dead=2 * u)
        t.open("grad", f"{block}.post_attention_layernorm", Phase.BWD, [f"{block}.post_attention_layernorm.weight"])
        rms_norm_backward(f"{block}.post_attention_layernorm.weight")
        t.open("grad", f"{block}.self_attn.o_proj", Phase.BWD, o)
        t.linear_backward(o, grad_in=u, grad_out=u, saved=u, product=s.product(h, h))
        attend_backward(t, s, u + 2 * kv, kept)
        rope_backward(kv)
        rope_backward(u)
        t.open("grad", f"{block}.self_attn.v_proj", Phase.BWD, [*v, *k, *q, f"{block}.input_layernorm.weight"])
        t.op(normed)
        t.linear_backward(v, grad_in=u, grad_out=kv, saved=u, product=s.product(h, kv_width), dead=kv)
        t.linear_backward(k, grad_in=u, grad_out=kv, saved=u, product=s.product(h, kv_width), dead=kv)
        t.op(u, dead=2 * u)
        t.linear_backward(q, grad_in=u, grad_out=u, saved=u, product=s.product(h, h), dead=u)
        t.op(u, dead=3 * u)
        rms_norm_backward(f"{block}.input_layernorm.weight")
        if s.checkpointing and upcast:
            t.op(dead=u)  # the checkpoint: in bf16 no norm kept it

    rotary = 2 * s.sequence * m.head_dim * w
    begin(t, s)
    t.open("begin", "model.embed_tokens", Phase.FWD, [embedding])
    t.op(u)
    t.op(rotary, read=0)
    kept = layers_forward(t, s, forward)
    t.open("begin", "model.norm", Phase.FWD, [norm])
    rms_norm()
    if upcast:
        t.op(dead=u + (0 if s.checkpointing else u))  # the last hidden state, and the embedding's, which no norm kept
    language_loss(t, s, "lm_head", head, u)
    language_loss_backward(t, s, "lm_head", head, u, tied=m.tied)
    t.open("grad", "model.norm", Phase.BWD, [norm])
    rms_norm_backward(norm, residual=False)
    layers_backward(t, s, forward, backward, kept)
    t.open("grad", "model.embed_tokens", Phase.BWD)
    t.op(dead=rotary)
    embedding_backward(t, [embedding], embedding if m.tied else None, u)
    t.open("backward-end", ROOT, Phase.BWD)
