"""Attention of the llama family: grouped keys and values, or multi-head latent, from the norm's output to attention's,
and back."""

from __future__ import annotations

from pstar_sim.workload.presets.llama_norms import Norms
from pstar_sim.workload.presets.shared import Shape, attend, attend_backward, declare, linear
from pstar_sim.workload.tape import Tape
from pstar_sim.workload.workload import Phase, Product


class GroupedAttention:
    """Fewer keys and values than queries, as since Llama 2.

    out_bytes: read by the output projection.
    """

    def __init__(self, t: Tape, s: Shape, norms: Norms) -> None:
        self.t, self.s, self.norms = t, s, norms
        m = s.model
        self.q_width, self.kv_width = m.heads * m.head_dim, m.kv_heads * m.head_dim
        self.u = s.tokens * m.hidden * t.width
        self.v = s.part_of(self.u)
        self.r, self.copied = s.rows * m.hidden * t.wide, s.casts * self.v
        self.out_bytes, self.kv = s.tokens * self.q_width * t.width, s.tokens * self.kv_width * t.width
        self.normed = self.v if s.flavour.recomputed else 0
        self.rotary_dim = m.head_dim

    def declare(self, block: str) -> None:
        t, m = self.t, self.s.model
        if m.sinks:
            t.parameter(f"{block}.self_attn.sinks", m.heads)
        for x, out in (("q", self.q_width), ("k", self.kv_width), ("v", self.kv_width)):
            declare(t, f"{block}.self_attn.{x}_proj", (out, m.hidden), out if m.attention_bias else 0)
        declare(t, f"{block}.self_attn.o_proj", (m.hidden, self.q_width), m.hidden if m.output_bias else 0)
        for name in self._inner(block):
            t.parameter(name, m.head_dim)

    def _weights(self, block: str, projections: str) -> list[str]:
        m = self.s.model
        biased = ("qkv" if m.attention_bias else "") + ("o" if m.output_bias else "")
        return [name for x in projections for name in linear(f"{block}.self_attn.{x}_proj", bias=x in biased)]

    def _inner(self, block: str) -> list[str]:
        return [f"{block}.self_attn.{x}_norm.weight" for x in "qk"] if self.s.model.qk_norm else []

    def _late(self, block: str) -> list[str]:
        return [*self._inner(block), *([f"{block}.self_attn.sinks"] if self.s.model.sinks else [])]

    def first(self, block: str) -> list[str]:
        return self._weights(block, "qkv")

    def forward(self, block: str, phase: Phase, window: int) -> int:
        """From the norm's output (of a rank's tokens) to attention's (1 u). Returns the kernel's bytes beside q, k, v
        and output."""
        t, s, m, u, q, kv = self.t, self.s, self.s.model, self.u, self.out_bytes, self.kv
        widths = (self.q_width, self.kv_width, self.kv_width)
        t.op(3 * self.copied, read=s.casts * self.r)
        t.cast(self._weights(block, "qkv"))
        gone = self.normed + t.gather(u)
        t.op(q + 2 * kv, products=[s.product(m.hidden, n) for n in widths], dead=gone, read=3 * u)
        t.open("end", f"{block}.self_attn.v_proj", phase, [*self._weights(block, "o"), *self._late(block)])
        if m.qk_norm:
            self.norms.forward(q, s.tokens * m.heads, inner=True)
            self.norms.forward(kv, s.tokens * m.kv_heads, inner=True)
        rotated = self.norms.rope(q) + self.norms.rope(kv)
        t.op(dead=q + kv)
        t.op(s.casts * (q + kv), read=s.casts * rotated)
        kept = attend(t, s, q, 2 * kv, window=window)
        t.cast(self._weights(block, "o"))
        saved = (3 if s.casts else 1) * self.v + q + 2 * kv - self.normed
        product = s.product(self.q_width, m.hidden)
        t.op(u, dead=s.casts * (rotated + self.r), unsaved=saved, products=[product], read=u)
        return kept

    def backward(self, block: str, kept: int, window: int, *, reads: list[str], own: bool) -> None:
        """From attention's gradient to that of the norm's output (1 u).

        reads: of the last moment, besides the projections.
        own: nothing else needs the output's gradient.
        """
        t, s, m, u, q_bytes, kv = self.t, self.s, self.s.model, self.u, self.out_bytes, self.kv
        o, q, k, v = (self._weights(block, x) for x in "oqkv")
        t.open("grad", f"{block}.self_attn.o_proj", Phase.BWD, [*o, *self._late(block)])
        product = s.product(self.q_width, m.hidden)
        low = self.v if t.autocast else 0
        t.op(low, read=low and self.r)
        gone = (self.v if own else low) + t.gather(u)
        t.linear_backward(o, grad_in=q_bytes, grad_out=u, saved=q_bytes, product=product, dead=gone)
        attend_backward(t, s, q_bytes, 2 * kv, kept, window=window)
        if m.sinks:
            t.gradient([f"{block}.self_attn.sinks"], allocated=False)
        self.norms.rope_backward(kv)
        self.norms.rope_backward(q_bytes)
        if m.qk_norm:
            q_norm, k_norm = self._inner(block)
            self.norms.backward(k_norm, kv, s.tokens * m.kv_heads, residual=False)
            self.norms.backward(q_norm, q_bytes, s.tokens * m.heads, residual=False)
        t.open("grad", f"{block}.self_attn.v_proj", Phase.BWD, [*v, *k, *q, *reads])
        t.op(self.normed)
        gone = self.v - self.copied + t.gather(u)  # the norm's output
        narrow = s.product(m.hidden, self.kv_width)
        product = s.product(m.hidden, self.q_width)
        r, copied = self.r if s.casts else u, self.copied
        for names, out, of, others in ((v, kv, narrow, 0), (k, kv, narrow, 1), (q, q_bytes, product, 1)):
            t.linear_backward(names, grad_in=u, grad_out=out, saved=u, product=of, dead=out + copied)
            t.op(s.casts * r, dead=copied, read=copied)
            t.op(others * r, dead=others * 2 * r)
        t.op(dead=gone)
        t.reduce(u)


class LatentAttention:
    """Multi-head latent attention: narrow queries, keys and values, normed and then widened (DeepSeek-V3).

    [Note: narrow projections] Ranks that split heads each have these whole, and sum gradients of their outputs; with
    sequence parallelism each makes those of its tokens, and gathers them.
    Source: Megatron-LM, core/transformer/multi_latent_attention.py.
    """

    def __init__(self, t: Tape, s: Shape, norms: Norms) -> None:
        self.t, self.s, self.norms = t, s, norms
        m, x = s.model, s.model.latent
        assert x is not None
        each = s.tokens * t.width
        self.widths = {
            "q_a_proj": (x.q_rank, m.hidden),
            "q_b_proj": (m.heads * m.head_dim, x.q_rank),
            "kv_a_proj_with_mqa": (x.kv_rank + x.rotary, m.hidden),
            "kv_b_proj": (m.heads * (x.plain + x.value), x.kv_rank),
            "o_proj": (m.hidden, m.heads * x.value),
        }
        self.out_bytes = each * m.heads * x.value
        self.u = s.part_of(each * m.hidden)
        self.all_q, self.all_kv, self.all_rot = each * x.q_rank, each * x.kv_rank, each * x.rotary
        self.q_low, self.kv_low, self.k_rot = map(s.part_of, (self.all_q, self.all_kv, self.all_rot))
        self.q, self.kv = each * m.heads * m.head_dim, each * m.heads * (x.plain + x.value)
        self.v = each * m.heads * x.value  # a part of kv
        self.q_rot = each * m.heads * x.rotary
        self.normed = self.u if s.flavour.recomputed else 0
        self.rotary_dim = x.rotary

    def declare(self, block: str) -> None:
        x = self.s.model.latent
        assert x is not None
        for name, shape in self.widths.items():
            declare(self.t, f"{block}.self_attn.{name}", shape, 0)
            if name == "q_a_proj":
                self.t.parameter(f"{block}.self_attn.q_a_layernorm.weight", x.q_rank)
            if name == "kv_a_proj_with_mqa":
                self.t.parameter(f"{block}.self_attn.kv_a_layernorm.weight", x.kv_rank)

    def first(self, block: str) -> list[str]:
        names = [f"{block}.self_attn.{name}.weight" for name in self.widths if name != "o_proj"]
        return [*names, *(f"{block}.self_attn.{x}_a_layernorm.weight" for x in ("q", "kv"))]

    def _of(self, name: str) -> Product:
        columns, rows = self.widths[name]
        batches, tokens, *_ = self.s.product(rows, columns)
        return batches, self.s.rows if "_a_" in name else tokens, rows, columns

    def _project(self, name: str, out: int, read: int, dead: int = 0) -> None:
        self.t.op(out, products=[self._of(name)], read=read, dead=dead)

    def forward(self, block: str, phase: Phase, window: int) -> int:
        t, s, norms, u = self.t, self.s, self.norms, self.u
        self._project("q_a_proj", self.q_low, u)
        norms.forward(self.q_low, s.rows, inner=True)
        self._project("q_b_proj", self.q, self.all_q, dead=t.gather(self.all_q))
        self._project("kv_a_proj_with_mqa", self.kv_low + self.k_rot, u, dead=self.normed)
        norms.forward(self.kv_low, s.rows, inner=True)
        self._project("kv_b_proj", self.kv, self.all_kv, dead=t.gather(self.all_kv))
        t.open("end", f"{block}.self_attn.kv_b_proj", phase, [f"{block}.self_attn.o_proj.weight"])
        if t.gather(self.all_rot):
            t.op(dead=self.k_rot)
        norms.rope(self.q_rot)
        norms.rope(self.all_rot)
        t.op(self.q, dead=self.q + self.q_rot)
        t.op(self.q, dead=2 * self.all_rot)
        kept = attend(t, s, self.q, self.q + self.v, window=window)
        saved = u + 2 * self.q + self.kv + self.q_low + self.kv_low - self.normed
        product, out = self._of("o_proj"), s.tokens * s.model.hidden * t.width
        t.op(out, unsaved=saved, products=[product], read=self.out_bytes)
        return kept

    def _back(self, block: str, name: str, *, grad_in: int, grad_out: int, dead: int) -> None:
        weight, product = [f"{block}.self_attn.{name}.weight"], self._of(name)
        self.t.linear_backward(weight, grad_in=grad_in, grad_out=grad_out, saved=grad_in, product=product, dead=dead)
        if "_a_" in name:
            self.t.sum_at_end(weight)

    def backward(self, block: str, kept: int, window: int, *, reads: list[str], own: bool) -> None:
        t, s, norms, u = self.t, self.s, self.norms, self.u
        t.open("grad", f"{block}.self_attn.o_proj", Phase.BWD, [f"{block}.self_attn.o_proj.weight"])
        whole = s.tokens * s.model.hidden * t.width
        self._back(block, "o_proj", grad_in=self.out_bytes, grad_out=whole, dead=own * u + t.gather(whole))
        attend_backward(t, s, self.q, self.q + self.v, kept, window=window)
        t.op(self.kv, dead=self.kv)
        norms.rope_backward(self.q_rot)
        t.op(self.all_rot, dead=self.q, read=self.q)  # one rotary part of the keys for all heads
        norms.rope_backward(self.all_rot)
        t.reduce(self.all_rot)
        t.open("grad", f"{block}.self_attn.kv_b_proj", Phase.BWD, [*self.first(block), *reads])
        gone = self.kv + self.kv_low + t.gather(self.all_kv)
        self._back(block, "kv_b_proj", grad_in=self.all_kv, grad_out=self.kv, dead=gone)
        t.reduce(self.all_kv)
        norms.backward(f"{block}.self_attn.kv_a_layernorm.weight", self.kv_low, s.rows, residual=False)
        t.op(self.normed)
        narrow = self.kv_low + self.k_rot
        self._back(block, "kv_a_proj_with_mqa", grad_in=u, grad_out=narrow, dead=narrow)
        gone = self.q + self.q_low + t.gather(self.all_q)
        self._back(block, "q_b_proj", grad_in=self.all_q, grad_out=self.q, dead=gone)
        t.reduce(self.all_q)
        norms.backward(f"{block}.self_attn.q_a_layernorm.weight", self.q_low, s.rows, residual=False)
        self._back(block, "q_a_proj", grad_in=u, grad_out=self.q_low, dead=self.q_low)
        t.op(u, dead=3 * u)
