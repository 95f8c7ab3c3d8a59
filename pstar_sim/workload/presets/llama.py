"""Llama, Qwen, Mistral, Gemma, Mixtral, gpt-oss and DeepSeek-V3.

Where they differ: llama_attention.py, llama_mlp.py, llama_norms.py. A sliding window changes only the flops of flash
attention.
"""

from __future__ import annotations

from pstar_sim.workload.presets.llama_attention import GroupedAttention, LatentAttention
from pstar_sim.workload.presets.llama_mlp import Experts, GatedMlp
from pstar_sim.workload.presets.llama_norms import Norms
from pstar_sim.workload.presets.losses import language_loss, language_loss_backward, loss_sums
from pstar_sim.workload.presets.shared import (
    Shape,
    begin,
    declare_head,
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
    layers_backward,
    layers_forward,
)
from pstar_sim.workload.tape import Tape
from pstar_sim.workload.workload import Phase


def write_llama(t: Tape, s: Shape) -> None:
    """Rotary positions, RMSNorm in fp32, gated feed-forward layers or experts."""
    m = s.model
    u, r = s.tokens * m.hidden * t.width, s.rows * m.hidden * t.wide
    v, table_out = s.part_of(u), s.tokens * m.hidden * t.wide
    layers = _LayerWriter(t, s)
    norms = layers.norms
    embedding, norm, head = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
    if s.part.first:
        t.parameter(embedding, m.vocab, m.hidden)
    for i in s.part.layers:
        layers.declare(i)
    if s.part.last:
        t.parameter(norm, m.hidden)
        declare_head(t, s, head, embedding)
    table = embedding if s.part.first else head

    rotary = 2 * s.sequence * layers.attention.rotary_dim * t.wide
    held = v if norms.upcast and not s.recomputes(s.part.layers[0]) else 0  # the first layer's input: no norm keeps it
    embedded = held if s.part.first else 0  # which ends with the model's forward
    begin(t, s, received=r, table=table)
    if s.part.first:
        t.open("begin", "model.embed_tokens", Phase.FWD, [embedding])
        t.op(table_out)
        t.reduce(table_out)
        drop_embedded(t, s)
    t.op(rotary, read=0)
    kept = layers_forward(t, s, layers.forward)
    if s.part.last:
        t.open("begin", "model.norm", Phase.FWD, [norm])
        norms.forward(r, s.rows)
        if norms.upcast:
            t.op(dead=v + embedded)
        copied = s.casts * v
        t.op(copied, read=s.casts * r)
        head_comes(t, s, head)
        language_loss(t, s, "lm_head", head, u)
        loss_sums(t, s)
        t.op(dead=s.casts * r)
        t.end_autocast()
        language_loss_backward(t, s, "lm_head", head, u, tied=s.tied)
        t.op(s.casts * r, dead=copied, read=copied)
        t.open("grad", "model.norm", Phase.BWD, [norm])
        norms.backward(norm, r, s.rows, residual=False)
    else:
        t.op(dead=embedded)
        hand_on(t, r)
    layers_backward(t, s, layers.forward, layers.backward, kept)
    if s.part.first:
        gradient_comes(t, s, embedding)
        t.open("grad", "model.embed_tokens", Phase.BWD)
    t.op(dead=rotary)
    if s.part.first:
        drop_embedded_backward(t, s)
        gathered = t.gather(table_out)
        embedding_backward(t, [embedding], embedding if s.tied else None, r)
        t.op(dead=gathered)
    end(t, s, r, held=held, table=table)


class _LayerWriter:
    def __init__(self, t: Tape, s: Shape) -> None:
        self.t, self.s = t, s
        self.u, self.r = s.tokens * s.model.hidden * t.width, s.rows * s.model.hidden * t.wide
        self.v = s.part_of(self.u)
        self.norms = Norms(t, s)
        part = GroupedAttention if s.model.latent is None else LatentAttention
        self.attention: GroupedAttention | LatentAttention = part(t, s, self.norms)
        self._dense = GatedMlp(t, s, ffn=s.model.ffn)
        self._experts = None if s.model.experts is None else Experts(t, s)
        self.normed = self.v if s.flavour.recomputed else 0
        self.post = s.model.post_norms

    def mlp(self, i: int) -> GatedMlp | Experts:
        return self._experts if self._experts is not None and self.s.model.has_experts(i) else self._dense

    def _names(self, i: int) -> tuple[str, str, str, str]:
        block = f"model.layers.{i}"
        before = "pre_feedforward_layernorm" if self.post else "post_attention_layernorm"
        names = ("input_layernorm", "post_attention_layernorm", before, "post_feedforward_layernorm")
        first, behind, second, last = (f"{block}.{name}" for name in names)
        return first, behind, second, last

    def declare(self, i: int) -> None:
        self.attention.declare(f"model.layers.{i}")
        self.mlp(i).declare(f"model.layers.{i}")
        for name in dict.fromkeys(self._names(i) if self.post else self._names(i)[:3]):
            self.t.parameter(f"{name}.weight", self.s.model.hidden)

    def forward(self, i: int, phase: Phase) -> int:
        """Returns what attention keeps besides q, k, v and its output."""
        t, s, u, v, r, norms = self.t, self.s, self.u, self.v, self.r, self.norms
        block, mlp = f"model.layers.{i}", self.mlp(i)
        first, behind, second, last = self._names(i)
        t.open("begin", first, phase, [f"{first}.weight", *self.attention.first(block)])
        norms.forward(r, s.rows)
        kept = self.attention.forward(block, phase, s.model.window_of(i))
        t.reduce(u)
        if self.post:
            t.open("begin", behind, phase, [f"{behind}.weight"])
            norms.forward(v, s.rows, inner=True)
        mask = drop(t, s)
        t.op(r + mask, dead=v, unsaved=self.attention.out_bytes + mask, read=v + r)
        t.open("begin", second, phase, [f"{second}.weight", *mlp.first(block)])
        norms.forward(r, s.rows)
        mlp.forward(block, phase)
        if phase is Phase.RECOMPUTE:
            self._recompute_ends(mlp, last)
            return kept
        mlp.finish(phase)
        if self.post:
            t.open("begin", last, phase, [f"{last}.weight"])
            norms.forward(v, s.rows, inner=True)
        entered = (
            i > s.part.layers[0] and not s.recomputes(i) and norms.upcast
        )  # then no operator keeps the layer's input
        gone = v + (v if norms.upcast else 0) + (v if entered else 0)
        held = (
            0 if isinstance(mlp, Experts) else v + s.casts * v - self.normed
        )  # experts let go of the norm's output themselves
        mask = drop(t, s)
        t.op(r + mask, dead=gone, unsaved=held + (0 if norms.upcast else r) + mask, read=v + r)
        return kept

    def _recompute_ends(self, mlp: GatedMlp | Experts, last: str) -> None:
        """[Note: early stop]; the residual is freed with its frame."""
        t, s, u, v = self.t, self.s, self.u, self.v
        if mlp.whole or self.post:
            mlp.finish(Phase.RECOMPUTE)
            if self.post:
                t.open("begin", last, Phase.RECOMPUTE, [f"{last}.weight"])
                self.norms.forward(v, s.rows, inner=True)
            mask = drop(t, s)
            t.op((mask and v) + mask, dead=v + (mask and v), read=2 * (mask and v))
        elif s.mask or not s.axes.early_stop:
            last_product_again(t, s, u, s.tokens * s.model.ffn * t.width)
        t.op(dead=v if self.norms.upcast else s.casts * self.r)

    def backward(self, i: int, kept: int) -> None:
        """From the gradient of layer i's output (1 u) to that of its input."""
        t, s, v, r, norms = self.t, self.s, self.v, self.r, self.norms
        block = f"model.layers.{i}"
        first, behind, second, last = self._names(i)
        if self.post:
            t.open("grad", last, Phase.BWD, [f"{last}.weight"])
        dropped = bool(drop_backward(t, s))
        if self.post:
            norms.backward(f"{last}.weight", v, s.rows, residual=False, shared=not dropped)
        self.mlp(i).backward(block, own=self.post or dropped)
        t.open("grad", second, Phase.BWD, [f"{second}.weight"])
        norms.backward(f"{second}.weight", r, s.rows)
        if self.post:
            t.open("grad", behind, Phase.BWD, [f"{behind}.weight"])
        dropped = bool(drop_backward(t, s))
        if self.post:
            norms.backward(f"{behind}.weight", v, s.rows, residual=False, shared=not dropped)
        reads = [f"{first}.weight"]
        own = self.post or dropped
        self.attention.backward(block, kept, s.model.window_of(i), reads=reads, own=own)
        norms.backward(f"{first}.weight", r, s.rows)
        if s.recomputes(i) and norms.upcast:
            t.op(dead=v)  # the checkpoint: in bf16 no norm kept it
