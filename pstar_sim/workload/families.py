"""Transformer families, operator by operator: which parameters, flops and live bytes, in the order of one iteration.

Each `write_*` follows what PyTorch and transformers do (module names, operators, what autograd saves, when a local
variable dies), so that a preset is close to a capture of the same model. The units are: `u` one activation of the
hidden size (batch x sequence x hidden, working dtype), `f` one of the feed-forward size. A residual stream value counts
from its making until nobody needs it. [Note: early stop] Non-reentrant checkpointing ends a recompute when the last
tensor that backward needs exists, so a last matmul whose output only feeds the residual sum is not recomputed.

Source: transformers 5 models gpt2, llama (qwen2), bert, vit; torch 2.13 autograd formulas; sizes compared with
storages counted under fake tensors. Bytes of the attention mask are left out: with no padding, none is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pstar_sim.catalog.models import ModelEntry
from pstar_sim.workload.tape import Tape
from pstar_sim.workload.workload import Phase

__all__ = ["Shape", "write_bert", "write_gpt", "write_llama", "write_vit"]

ROOT = "<root>"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model with the batch that runs through it. attention: "flash", "efficient" or "math". language_head: False for
    a GPT that classifies sequences: no logits over the vocabulary (its own head, of a few labels, is left out).
    early_stop: see [Note: early stop]; False for reentrant checkpoints, which run the whole layer again (gpt, llama).
    """

    model: ModelEntry
    batch: int
    sequence: int
    checkpointing: bool
    attention: str
    language_head: bool = True
    early_stop: bool = True

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    def flops(self, rows: int, columns: int) -> int:
        """Of one matmul of every token with a rows x columns matrix."""
        return 2 * self.tokens * rows * columns

    @property
    def attention_flops(self) -> int:
        """Scores and weighted sum, all heads; a causal mask saves nothing in torch's own count."""
        return 4 * self.batch * self.sequence**2 * self.model.hidden


# Attention, common to all families


def _attend(t: Tape, s: Shape, qkv: int) -> int:
    """Scaled dot-product attention of q, k, v (qkv bytes together).

    Returns the bytes that backward needs beside q, k, v and the output. Flash and efficient kernels keep one fp32
    log-sum per query. The math kernel computes in fp32: it keeps scaled copies of q, k, v and the probabilities, and
    needs the scores beside them.
    """
    m = s.model
    u = s.tokens * m.hidden * t.width
    if s.attention == "math":
        scores = s.batch * m.heads * s.sequence**2 * 4
        copies = qkv * 4 // t.width
        t.op(copies + 2 * scores, dead=scores, read=qkv)
        kept = copies + scores
    else:
        kept = s.tokens * m.heads * 4
        t.op(kept, read=0)
    t.op(u, unsaved=kept, flops=s.attention_flops, read=qkv)
    return kept


def _attend_backward(t: Tape, s: Shape, qkv: int, kept: int) -> None:
    """Its backward: gradients of q, k, v replace q, k, v, output, the output's gradient and what was kept."""
    u = s.tokens * s.model.hidden * t.width
    if s.attention == "math":
        scores = s.batch * s.model.heads * s.sequence**2 * 4
        t.op(2 * scores, dead=2 * scores, flops=2 * s.attention_flops)
        flops = 0
    else:
        flops = s.attention_flops * 5 // 2  # the scores are computed once more
    t.op(qkv, dead=2 * u + qkv + kept, flops=flops, read=2 * qkv + 2 * u)


# Head and loss of the language models


def _language_loss(t: Tape, s: Shape, module: str, weight: str, u: int) -> None:
    """Logits in the working dtype, in fp32, and their log-softmax; the last is what stays for backward."""
    m = s.model
    logits = s.tokens * m.vocab * t.width
    logits32 = s.tokens * m.vocab * 4
    labels = s.tokens * 8
    t.open("begin", module, Phase.FWD, [weight])
    t.op(logits, flops=s.flops(m.hidden, m.vocab), read=u)
    t.open("end", module, Phase.FWD)
    if t.width < 4:
        t.op(logits32, read=logits)
    t.op(labels + logits32, read=logits32)
    t.op(dead=logits32 if t.width == 4 else logits + logits32)


def _language_loss_backward(t: Tape, s: Shape, module: str, weight: str, u: int, *, tied: bool) -> None:
    """From the loss to the gradient of the last hidden state (1 u); a tied weight's waits for the embedding's."""
    m = s.model
    logits = s.tokens * m.vocab * t.width
    logits32 = s.tokens * m.vocab * 4
    labels = s.tokens * 8
    t.open("grad", ROOT, Phase.BWD)
    t.op(logits32, dead=labels, read=0)
    t.op(logits32, dead=2 * logits32, read=2 * logits32)
    if t.width < 4:
        t.op(logits, dead=logits32, read=logits32)
    t.open("grad", module, Phase.BWD, [weight])
    flops = 2 * s.flops(m.hidden, m.vocab)
    if tied:
        kept = flops // 2 + t.weight_flops([weight], flops // 2)
        t.op(t.size([weight]) + u, dead=logits + u, flops=kept, read=2 * logits + u)
    else:
        t.linear_backward([weight], grad_in=u, grad_out=logits, saved=u, flops=flops, dead=logits + u)


def _embedding_backward(t: Tape, tables: list[str], tied: str | None, u: int) -> None:
    """Dense gradients of the tables in turn; the tied one is added to the head's, all three alive for a moment."""
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


# What all families share


def _linear(module: str, *, bias: bool = True) -> list[str]:
    return [f"{module}.weight", f"{module}.bias"] if bias else [f"{module}.weight"]


def _norm(module: str) -> list[str]:
    return [f"{module}.weight", f"{module}.bias"]


def _declare(t: Tape, module: str, shape: tuple[int, int], bias: int) -> None:
    t.parameter(f"{module}.weight", *shape)
    if bias:
        t.parameter(f"{module}.bias", bias)


def _declare_norm(t: Tape, module: str, hidden: int) -> None:
    t.parameter(f"{module}.weight", hidden)
    t.parameter(f"{module}.bias", hidden)


def _layer_norm_backward(t: Tape, module: str, u: int, stats: int, *, residual: bool = True) -> None:
    """From the gradient of the norm's output (and the residual's, both alive) to their sum (1 u); frees its input."""
    names = _norm(module)
    t.op(u + t.size(names), dead=2 * u + stats, read=2 * u)
    if residual:
        t.op(u, dead=2 * u, read=2 * u)
    t.gradient(names)


def _begin(t: Tape, s: Shape, batch_bytes: int = 0) -> None:
    """The batch (token numbers and labels, 8 bytes each, when its size is not given) is alive the whole iteration."""
    t.level = batch_bytes or 2 * 8 * s.tokens
    t.open("begin", ROOT, Phase.FWD)


def _layers_forward(t: Tape, s: Shape, forward: Callable[[int, Phase], int]) -> int:
    """All layers; returns what each one's attention keeps beside q, k, v and its output."""
    kept = 0
    t.saving = not s.checkpointing
    for i in range(s.model.layers):
        kept = forward(i, Phase.FWD)
    t.saving = True
    return kept


def _layers_backward(
    t: Tape, s: Shape, forward: Callable[[int, Phase], int], backward: Callable[[int, int], None], kept: int
) -> None:
    for i in reversed(range(s.model.layers)):
        if s.checkpointing:
            kept = forward(i, Phase.RECOMPUTE)
        backward(i, kept)


def _last_product_again(t: Tape, s: Shape, u: int, f: int) -> None:
    """A layer's last matmul and its residual sum, run again for nothing."""
    t.op(u, flops=s.flops(s.model.ffn, s.model.hidden), read=f)
    t.op(u, dead=2 * u, read=2 * u)


# Families


def write_gpt(t: Tape, s: Shape) -> None:
    """GPT-2: learned positions, LayerNorm with bias, fused qkv, "gelu_new" as eight element-wise operators."""
    m = s.model
    h, w = m.hidden, t.width
    u, f = s.tokens * h * w, s.tokens * m.ffn * w
    stats = 2 * s.tokens * w
    wte, wpe, ln_f = "transformer.wte.weight", "transformer.wpe.weight", _norm("transformer.ln_f")
    t.parameter(wte, m.vocab, h)
    t.parameter(wpe, m.max_seq, h)
    for i in range(m.layers):
        block = f"transformer.h.{i}"
        _declare_norm(t, f"{block}.ln_1", h)
        _declare(t, f"{block}.attn.c_attn", (h, 3 * h), 3 * h)
        _declare(t, f"{block}.attn.c_proj", (h, h), h)
        _declare_norm(t, f"{block}.ln_2", h)
        _declare(t, f"{block}.mlp.c_fc", (h, m.ffn), m.ffn)
        _declare(t, f"{block}.mlp.c_proj", (m.ffn, h), h)
    _declare_norm(t, "transformer.ln_f", h)
    head = "lm_head.weight"
    if not s.language_head:
        pass
    elif m.tied:
        t.tie(head, wte)
    else:
        t.parameter(head, m.vocab, h)

    def forward(i: int, phase: Phase) -> int:
        block = f"transformer.h.{i}"
        t.open("begin", f"{block}.ln_1", phase, [*_norm(f"{block}.ln_1"), *_linear(f"{block}.attn.c_attn")])
        t.op(u + stats, unsaved=stats)
        t.op(3 * u, flops=s.flops(h, 3 * h), read=u)
        t.open("end", f"{block}.attn.c_attn", phase, _linear(f"{block}.attn.c_proj"))
        kept = _attend(t, s, 3 * u)
        t.op(u, unsaved=4 * u, flops=s.flops(h, h))
        t.op(u, unsaved=u, read=2 * u)
        t.open("begin", f"{block}.ln_2", phase, [*_norm(f"{block}.ln_2"), *_linear(f"{block}.mlp.c_fc")])
        t.op(u + stats, unsaved=stats)
        t.op(f, flops=s.flops(h, m.ffn), read=u)
        t.open("end", f"{block}.mlp.c_fc", phase, _linear(f"{block}.mlp.c_proj"))
        t.op(f)  # x/2, kept
        t.op(f)  # x^3
        t.op(f, dead=f)
        t.op(f, dead=f, read=2 * f)
        t.op(f, dead=f)
        t.op(f, dead=f)  # tanh, kept
        t.op(f, unsaved=f)  # 1 + tanh, kept
        t.op(f, unsaved=3 * f, read=2 * f)
        if phase is Phase.RECOMPUTE:
            if not s.early_stop:
                _last_product_again(t, s, u, f)
            t.op(dead=u)  # [Note: early stop]; the attention's output dies with the frame that held it
        else:
            t.op(u, unsaved=f, flops=s.flops(m.ffn, h), read=f)
            t.op(u, dead=2 * u, unsaved=2 * u, read=2 * u)
        return kept

    def backward(i: int, kept: int) -> None:
        block = f"transformer.h.{i}"
        t.open("grad", f"{block}.mlp.c_proj", Phase.BWD, _linear(f"{block}.mlp.c_proj"))
        names = _linear(f"{block}.mlp.c_proj")
        t.linear_backward(names, grad_in=f, grad_out=u, saved=f, flops=2 * s.flops(m.ffn, h), dead=f)
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
        t.open("grad", f"{block}.mlp.c_fc", Phase.BWD, [*_linear(f"{block}.mlp.c_fc"), *_norm(f"{block}.ln_2")])
        names = _linear(f"{block}.mlp.c_fc")
        t.linear_backward(names, grad_in=u, grad_out=f, saved=u, flops=2 * s.flops(h, m.ffn), dead=f + u)
        _layer_norm_backward(t, f"{block}.ln_2", u, stats)
        t.open("grad", f"{block}.attn.c_proj", Phase.BWD, _linear(f"{block}.attn.c_proj"))
        names = _linear(f"{block}.attn.c_proj")
        t.linear_backward(names, grad_in=u, grad_out=u, saved=u, flops=2 * s.flops(h, h))
        _attend_backward(t, s, 3 * u, kept)
        t.op(3 * u, dead=3 * u)
        t.open("grad", f"{block}.attn.c_attn", Phase.BWD, [*_linear(f"{block}.attn.c_attn"), *_norm(f"{block}.ln_1")])
        names = _linear(f"{block}.attn.c_attn")
        t.linear_backward(names, grad_in=u, grad_out=3 * u, saved=u, flops=2 * s.flops(h, 3 * h), dead=4 * u)
        _layer_norm_backward(t, f"{block}.ln_1", u, stats)

    positions = s.sequence * h * w
    _begin(t, s)
    t.open("begin", "transformer.wte", Phase.FWD, [wte, wpe])
    t.op(u)
    t.op(positions)
    t.op(u, read=u + positions)
    kept = _layers_forward(t, s, forward)
    t.open("begin", "transformer.ln_f", Phase.FWD, ln_f)
    t.op(u + stats, dead=u + positions)
    if s.language_head:
        _language_loss(t, s, "lm_head", head, u)
        _language_loss_backward(t, s, "lm_head", head, u, tied=m.tied)
    else:
        t.open("grad", ROOT, Phase.BWD)
        t.op(u, dead=u)
    t.open("grad", "transformer.ln_f", Phase.BWD, ln_f)
    _layer_norm_backward(t, "transformer.ln_f", u, stats, residual=False)
    _layers_backward(t, s, forward, backward, kept)
    t.open("grad", "transformer.wte", Phase.BWD)
    t.op(positions, read=u)
    t.gradient([wpe], allocated=False)
    t.op(dead=positions)
    _embedding_backward(t, [wte], wte if m.tied and s.language_head else None, u)
    t.open("backward-end", ROOT, Phase.BWD)


def write_llama(t: Tape, s: Shape) -> None:
    """Llama and Qwen2: rotary positions, RMSNorm in fp32, grouped keys and values, gated feed-forward (SiLU)."""
    m = s.model
    h, w = m.hidden, t.width
    kv_width = m.kv_heads * m.head_dim
    u, f, kv = s.tokens * h * w, s.tokens * m.ffn * w, s.tokens * kv_width * w
    upcast = w < 4
    wide = s.tokens * h * 4 if upcast else 0  # a norm's fp32 copy of its input; in fp32 it keeps the input itself
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
            _declare(t, f"{block}.{name}", (out, rows), out if bias else 0)
        t.parameter(f"{block}.input_layernorm.weight", h)
        t.parameter(f"{block}.post_attention_layernorm.weight", h)
    t.parameter(norm, h)
    if m.tied:
        t.tie(head, embedding)
    else:
        t.parameter(head, m.vocab, h)

    def weights(block: str, *modules: str) -> list[str]:
        biased = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj") if m.attention_bias else ()
        return [name for x in modules for name in _linear(f"{block}.{x}", bias=x in biased)]

    def rms_norm() -> None:
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
        """From the gradient of the norm's output (and the residual's, both alive) to their sum (1 u)."""
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
        t.op(q)
        t.op(q // 2)
        t.op(q, dead=q // 2)
        t.op(q, dead=q, read=2 * q)
        t.op(q, dead=2 * q, read=2 * q)

    def rope_backward(q: int) -> None:
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
        t.op(u + 2 * kv, flops=s.flops(h, h + 2 * kv_width), read=3 * u)
        t.open("end", f"{block}.self_attn.v_proj", phase, weights(block, "self_attn.o_proj"))
        rope(u)
        rope(kv)
        t.op(dead=u + kv)
        kept = _attend(t, s, u + 2 * kv)
        t.op(u, unsaved=2 * u + 2 * kv, flops=s.flops(h, h))
        t.op(u, dead=u, unsaved=u, read=2 * u)
        gated = weights(block, "mlp.gate_proj", "mlp.up_proj")
        after = f"{block}.post_attention_layernorm"
        t.open("begin", after, phase, [f"{after}.weight", *gated])
        rms_norm()
        t.op(f, flops=s.flops(h, m.ffn), read=u)
        t.op(f, unsaved=f)
        t.op(f, flops=s.flops(h, m.ffn), read=u)
        t.open("end", f"{block}.mlp.up_proj", phase, weights(block, "mlp.down_proj"))
        t.op(f, unsaved=2 * f, read=2 * f)
        if phase is Phase.RECOMPUTE:
            if not s.early_stop:
                _last_product_again(t, s, u, f)
            t.op(dead=u if upcast else 0)  # [Note: early stop]; the residual dies with its frame
        else:
            t.op(u, unsaved=f, flops=s.flops(m.ffn, h), read=f)
            gone = u + (u if upcast else 0) + (u if entered else 0)
            t.op(u, dead=gone, unsaved=u + (0 if upcast else u), read=2 * u)
        return kept

    def backward(i: int, kept: int) -> None:
        block = f"model.layers.{i}"
        down, up, gate = (weights(block, f"mlp.{x}_proj") for x in ("down", "up", "gate"))
        o, q, k, v = (weights(block, f"self_attn.{x}_proj") for x in "oqkv")
        matrix = 2 * s.flops(h, m.ffn)
        t.open("grad", f"{block}.mlp.down_proj", Phase.BWD, [*down, *up, *gate])
        t.linear_backward(down, grad_in=f, grad_out=u, saved=f, flops=matrix, dead=f)
        t.op(f)
        t.op(f, dead=3 * f)
        t.linear_backward(up, grad_in=u, grad_out=f, saved=u, flops=matrix, dead=f)
        t.op(f, dead=2 * f)
        t.linear_backward(gate, grad_in=u, grad_out=f, saved=u, flops=matrix, dead=f + u)
        t.op(u, dead=2 * u)
        t.open("grad", f"{block}.post_attention_layernorm", Phase.BWD, [f"{block}.post_attention_layernorm.weight"])
        rms_norm_backward(f"{block}.post_attention_layernorm.weight")
        t.open("grad", f"{block}.self_attn.o_proj", Phase.BWD, o)
        t.linear_backward(o, grad_in=u, grad_out=u, saved=u, flops=2 * s.flops(h, h))
        _attend_backward(t, s, u + 2 * kv, kept)
        rope_backward(kv)
        rope_backward(u)
        t.open("grad", f"{block}.self_attn.v_proj", Phase.BWD, [*v, *k, *q, f"{block}.input_layernorm.weight"])
        t.linear_backward(v, grad_in=u, grad_out=kv, saved=u, flops=2 * s.flops(h, kv_width), dead=kv)
        t.linear_backward(k, grad_in=u, grad_out=kv, saved=u, flops=2 * s.flops(h, kv_width), dead=kv)
        t.op(u, dead=2 * u)
        t.linear_backward(q, grad_in=u, grad_out=u, saved=u, flops=2 * s.flops(h, h), dead=u)
        t.op(u, dead=3 * u)
        rms_norm_backward(f"{block}.input_layernorm.weight")
        if s.checkpointing and upcast:
            t.op(dead=u)  # the checkpoint: in bf16 no norm kept it

    rotary = 2 * s.sequence * m.head_dim * w
    _begin(t, s)
    t.open("begin", "model.embed_tokens", Phase.FWD, [embedding])
    t.op(u)
    t.op(rotary, read=0)
    kept = _layers_forward(t, s, forward)
    t.open("begin", "model.norm", Phase.FWD, [norm])
    rms_norm()
    if upcast:
        t.op(dead=u + (0 if s.checkpointing else u))  # the last hidden state, and the embedding's, which no norm kept
    _language_loss(t, s, "lm_head", head, u)
    _language_loss_backward(t, s, "lm_head", head, u, tied=m.tied)
    t.open("grad", "model.norm", Phase.BWD, [norm])
    rms_norm_backward(norm, residual=False)
    _layers_backward(t, s, forward, backward, kept)
    t.open("grad", "model.embed_tokens", Phase.BWD)
    t.op(dead=rotary)
    _embedding_backward(t, [embedding], embedding if m.tied else None, u)
    t.open("backward-end", ROOT, Phase.BWD)


def write_bert(t: Tape, s: Shape) -> None:
    """BERT for masked language modelling: LayerNorm after each sum, separate q, k, v, exact GELU, transformed head."""
    m = s.model
    h, w = m.hidden, t.width
    u, f = s.tokens * h * w, s.tokens * m.ffn * w
    stats = 2 * s.tokens * w
    tables = [f"bert.embeddings.{x}_embeddings.weight" for x in ("word", "position", "token_type")]
    for name, rows in zip(tables, (m.vocab, m.max_seq, 2), strict=True):
        t.parameter(name, rows, h)
    _declare_norm(t, "bert.embeddings.LayerNorm", h)
    for i in range(m.layers):
        block = f"bert.encoder.layer.{i}"
        for x in ("query", "key", "value"):
            _declare(t, f"{block}.attention.self.{x}", (h, h), h)
        _declare(t, f"{block}.attention.output.dense", (h, h), h)
        _declare_norm(t, f"{block}.attention.output.LayerNorm", h)
        _declare(t, f"{block}.intermediate.dense", (m.ffn, h), m.ffn)
        _declare(t, f"{block}.output.dense", (h, m.ffn), h)
        _declare_norm(t, f"{block}.output.LayerNorm", h)
    head, bias, transform = "cls.predictions.decoder.weight", "cls.predictions.bias", "cls.predictions.transform"
    t.parameter(bias, m.vocab)
    _declare(t, f"{transform}.dense", (h, h), h)
    _declare_norm(t, f"{transform}.LayerNorm", h)
    if m.tied:
        t.tie(head, tables[0])
    else:
        t.parameter(head, m.vocab, h)
    t.tie("cls.predictions.decoder.bias", bias)

    def forward(i: int, phase: Phase) -> int:
        block = f"bert.encoder.layer.{i}"
        qkv = [n for x in ("query", "key", "value") for n in _linear(f"{block}.attention.self.{x}")]
        t.open("begin", f"{block}.attention.self.query", phase, qkv)
        t.op(3 * u, flops=s.flops(h, 3 * h), read=3 * u)
        reads = [*_linear(f"{block}.attention.output.dense"), *_norm(f"{block}.attention.output.LayerNorm")]
        t.open("end", f"{block}.attention.self.value", phase, reads)
        kept = _attend(t, s, 3 * u)
        t.op(u, unsaved=4 * u, flops=s.flops(h, h))
        t.op(u, dead=u, read=2 * u)
        t.op(u + stats, unsaved=u + stats)
        t.open("begin", f"{block}.intermediate.dense", phase, _linear(f"{block}.intermediate.dense"))
        t.op(f, flops=s.flops(h, m.ffn), read=u)
        t.op(f, unsaved=f)
        reads = [*_linear(f"{block}.output.dense"), *_norm(f"{block}.output.LayerNorm")]
        t.open("begin", f"{block}.output.dense", phase, reads)
        t.op(u, unsaved=f, flops=s.flops(m.ffn, h), read=f)
        t.op(u, dead=u, unsaved=u, read=2 * u)
        t.op(u + stats, unsaved=u + stats)
        if phase is Phase.RECOMPUTE:
            t.op(dead=u)  # the layer's output is not needed again
        return kept

    def backward(i: int, kept: int) -> None:
        block = f"bert.encoder.layer.{i}"
        dense, out = f"{block}.intermediate.dense", f"{block}.output"
        t.open("grad", out, Phase.BWD, [*_norm(f"{out}.LayerNorm"), *_linear(f"{out}.dense")])
        _layer_norm_backward(t, f"{out}.LayerNorm", u, stats, residual=False)
        names = _linear(f"{out}.dense")
        t.linear_backward(names, grad_in=f, grad_out=u, saved=f, flops=2 * s.flops(m.ffn, h), dead=f)
        t.open("grad", dense, Phase.BWD, _linear(dense))
        t.op(f, dead=2 * f, read=2 * f)
        names = _linear(dense)
        t.linear_backward(names, grad_in=u, grad_out=f, saved=u, flops=2 * s.flops(h, m.ffn), dead=f + u)
        t.op(u, dead=2 * u, read=2 * u)
        out = f"{block}.attention.output"
        t.open("grad", out, Phase.BWD, [*_norm(f"{out}.LayerNorm"), *_linear(f"{out}.dense")])
        _layer_norm_backward(t, f"{out}.LayerNorm", u, stats, residual=False)
        names = _linear(f"{out}.dense")
        t.linear_backward(names, grad_in=u, grad_out=u, saved=u, flops=2 * s.flops(h, h))
        _attend_backward(t, s, 3 * u, kept)
        _separate_qkv_backward(t, s, f"{block}.attention.self", ("value", "key", "query"), u)
        t.op(u, dead=3 * u, read=2 * u)  # the layer's input goes with the residual's gradient

    _begin(t, s)
    embedded = "bert.embeddings.LayerNorm"
    t.open("begin", "bert.embeddings.word_embeddings", Phase.FWD, [*tables, *_norm(embedded)])
    t.op(2 * u)
    t.op(u, dead=2 * u)
    t.op(s.sequence * h * w)
    t.op(u, dead=u + s.sequence * h * w, read=u)
    t.op(u + stats)
    kept = _layers_forward(t, s, forward)
    logits = s.tokens * m.vocab * w
    t.open("begin", f"{transform}.dense", Phase.FWD, [*_linear(f"{transform}.dense"), *_norm(f"{transform}.LayerNorm")])
    t.op(u, flops=s.flops(h, h))
    t.op(u)
    t.op(u + stats)
    t.open("begin", "cls.predictions.decoder", Phase.FWD, [head, bias])
    t.op(logits, flops=s.flops(h, m.vocab), read=u)
    t.op(logits, dead=logits)
    t.open("grad", ROOT, Phase.BWD)
    t.op(logits, read=0)
    t.op(logits, dead=2 * logits, read=2 * logits)
    t.open("grad", "cls.predictions.decoder", Phase.BWD, [head])
    flops = s.flops(h, m.vocab) + t.weight_flops([head], s.flops(h, m.vocab))
    t.op(u + t.size([head, bias]), dead=logits + u, flops=flops, read=2 * logits + u)
    t.gradient([bias] if m.tied else [bias, head])
    names = [*_linear(f"{transform}.dense"), *_norm(f"{transform}.LayerNorm")]
    t.open("grad", f"{transform}.dense", Phase.BWD, names)
    _layer_norm_backward(t, f"{transform}.LayerNorm", u, stats, residual=False)
    t.op(u, dead=2 * u)
    t.linear_backward(
        _linear(f"{transform}.dense"), grad_in=u, grad_out=u, saved=u, flops=2 * s.flops(h, h), dead=2 * u
    )
    _layers_backward(t, s, forward, backward, kept)
    t.open("grad", "bert.embeddings.LayerNorm", Phase.BWD, _norm(embedded))
    _layer_norm_backward(t, embedded, u, stats, residual=False)
    _embedding_backward(t, [tables[1], tables[2], tables[0]], tables[0] if m.tied else None, u)
    t.open("backward-end", ROOT, Phase.BWD)


def write_vit(t: Tape, s: Shape) -> None:
    """ViT for image classification: patches by a strided convolution, class token, LayerNorm before, exact GELU."""
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
            _declare(t, f"{block}.attention.{x}_proj", (h, h), h)
        _declare_norm(t, f"{block}.layernorm_before", h)
        _declare_norm(t, f"{block}.layernorm_after", h)
        _declare(t, f"{block}.mlp.fc1", (m.ffn, h), m.ffn)
        _declare(t, f"{block}.mlp.fc2", (h, m.ffn), h)
    _declare_norm(t, "vit.layernorm", h)
    _declare(t, "classifier", (m.classes, h), m.classes)

    def forward(i: int, phase: Phase) -> int:
        block = f"vit.layers.{i}"
        qkv = [n for x in "qkv" for n in _linear(f"{block}.attention.{x}_proj")]
        t.open("begin", f"{block}.layernorm_before", phase, [*_norm(f"{block}.layernorm_before"), *qkv])
        t.op(u + stats, unsaved=stats)
        t.op(3 * u, flops=s.flops(h, 3 * h), read=3 * u)
        t.open("end", f"{block}.attention.v_proj", phase, _linear(f"{block}.attention.o_proj"))
        kept = _attend(t, s, 3 * u)
        t.op(u, unsaved=4 * u, flops=s.flops(h, h))
        t.op(u, dead=u, unsaved=u, read=2 * u)
        reads = [*_norm(f"{block}.layernorm_after"), *_linear(f"{block}.mlp.fc1")]
        t.open("begin", f"{block}.layernorm_after", phase, reads)
        t.op(u + stats, unsaved=stats)
        t.op(f, flops=s.flops(h, m.ffn), read=u)
        t.op(f, unsaved=f)
        t.open("begin", f"{block}.mlp.fc2", phase, _linear(f"{block}.mlp.fc2"))
        if phase is not Phase.RECOMPUTE:  # [Note: early stop]
            t.op(u, unsaved=f, flops=s.flops(m.ffn, h), read=f)
            t.op(u, dead=u, unsaved=2 * u, read=2 * u)
        return kept

    def backward(i: int, kept: int) -> None:
        block = f"vit.layers.{i}"
        t.open("grad", f"{block}.mlp.fc2", Phase.BWD, _linear(f"{block}.mlp.fc2"))
        names = _linear(f"{block}.mlp.fc2")
        t.linear_backward(names, grad_in=f, grad_out=u, saved=f, flops=2 * s.flops(m.ffn, h), dead=f)
        t.op(f, dead=2 * f, read=2 * f)
        names = _linear(f"{block}.mlp.fc1")
        t.open("grad", f"{block}.mlp.fc1", Phase.BWD, [*names, *_norm(f"{block}.layernorm_after")])
        t.linear_backward(names, grad_in=u, grad_out=f, saved=u, flops=2 * s.flops(h, m.ffn), dead=f + u)
        _layer_norm_backward(t, f"{block}.layernorm_after", u, stats)
        names = _linear(f"{block}.attention.o_proj")
        t.open("grad", f"{block}.attention.o_proj", Phase.BWD, names)
        t.linear_backward(names, grad_in=u, grad_out=u, saved=u, flops=2 * s.flops(h, h))
        _attend_backward(t, s, 3 * u, kept)
        _separate_qkv_backward(t, s, f"{block}.attention", ("v_proj", "k_proj", "q_proj"), u)
        t.op(dead=u)  # the norm's output, which all three read
        _layer_norm_backward(t, f"{block}.layernorm_before", u, stats)

    _begin(t, s, pixels * w + 8 * s.batch)
    patch = _linear(f"{front}.patch_embeddings.projection")
    others = [f"{front}.cls_token", f"{front}.position_embeddings"]
    t.open("begin", f"{front}.patch_embeddings.projection", Phase.FWD, [*patch, *others])
    patches = s.batch * (m.max_seq - 1)
    convolution = 2 * patches * 3 * m.patch**2 * h
    t.op(patches * h * w, flops=convolution, read=pixels * w)
    t.op(u, dead=patches * h * w)
    t.op(u, dead=u)
    kept = _layers_forward(t, s, forward)
    small = s.batch * m.classes * w
    t.open("begin", "vit.layernorm", Phase.FWD, [*_norm("vit.layernorm"), *_linear("classifier")])
    t.op(u + stats)
    t.op(3 * small, dead=2 * small, flops=2 * s.batch * h * m.classes)
    names = _linear("classifier")
    t.open("grad", "classifier", Phase.BWD, names)
    t.linear_backward(names, grad_in=u, grad_out=small, saved=u, flops=4 * s.batch * h * m.classes, dead=u + small)
    t.open("grad", "vit.layernorm", Phase.BWD, _norm("vit.layernorm"))
    _layer_norm_backward(t, "vit.layernorm", u, stats, residual=False)
    _layers_backward(t, s, forward, backward, kept)
    t.open("grad", front, Phase.BWD)
    t.gradient(others, allocated=False)
    t.op(patches * h * w, dead=u)
    t.op(t.size(patch), flops=t.weight_flops(patch, convolution), read=pixels * w)
    t.gradient(patch)
    t.op(dead=patches * h * w)
    t.open("backward-end", ROOT, Phase.BWD)


def _separate_qkv_backward(t: Tape, s: Shape, module: str, order: tuple[str, str, str], u: int) -> None:
    """Backward of three square projections of one input: from three gradients (3 u) to their sum (1 u)."""
    h = s.model.hidden
    t.open("grad", f"{module}.{order[0]}", Phase.BWD, [n for x in order for n in _linear(f"{module}.{x}")])
    for k, x in enumerate(order):
        names = _linear(f"{module}.{x}")
        t.linear_backward(names, grad_in=u, grad_out=u, saved=u, flops=2 * s.flops(h, h), dead=u)
        if k:
            t.op(u, dead=2 * u, read=2 * u)
