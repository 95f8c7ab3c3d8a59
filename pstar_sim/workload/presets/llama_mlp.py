"""Feed-forward layers of the llama family: one gated layer, or experts of which each token goes through a few.

[Note: experts] Rows of tokens are copied for each of their experts and sorted by expert; one grouped product per matrix
computes all experts of a layer, and weighted rows are added up, as in transformers 5 (grouped_mm). So a layer's experts
are all read in one moment, and their gradients arrive in one. Each expert's matrices are tensors of their own: a chunk
holds whole experts. Loads are assumed balanced.

[Note: experts on several ranks] Of e ranks that share experts each has an e-th of them, so its rows go to the ranks of
their experts (dispatch) and come back (combine), and their gradients likewise: an all-to-all each. Ranks that split
layers have a part of each expert's width, and sum its outputs. With sequence parallelism each routes its part of the
tokens; rows are gathered behind the dispatch and reduce-scattered before the combine.
Source: Megatron-LM, core/transformer/moe (all-to-all dispatcher).
"""

from __future__ import annotations

from pstar_sim.workload.presets.shared import Shape, declare
from pstar_sim.workload.tape import Tape
from pstar_sim.workload.workload import Phase, Product


class GatedMlp:
    """A gated feed-forward layer (SiLU or GELU).

    whole: a recompute runs all of it, even before a residual sum alone.
    alone: nothing else reads the norm's output.
    """

    whole = False

    def __init__(self, t: Tape, s: Shape, *, ffn: int, name: str = "mlp", alone: bool = True) -> None:
        self.t, self.s, self.ffn, self.name, self.alone = t, s, ffn, name, alone
        self.u, self.f = s.tokens * s.model.hidden * t.width, s.tokens * ffn * t.width
        self.v = s.part_of(self.u)
        self.r, self.copied = s.rows * s.model.hidden * t.wide, s.casts * self.v
        # Bytes of outputs of a norm and of an activation that are not kept, because backward computes them again.
        self.normed = self.v if s.flavour.recomputed and alone else 0
        self.again = self.f if s.flavour.recomputed else 0

    def declare(self, block: str) -> None:
        h = self.s.model.hidden
        for x, shape in (("gate", (self.ffn, h)), ("up", (self.ffn, h)), ("down", (h, self.ffn))):
            declare(self.t, f"{block}.{self.name}.{x}_proj", shape, 0)

    def _weight(self, block: str, x: str) -> str:
        return f"{block}.{self.name}.{x}_proj.weight"

    def first(self, block: str) -> list[str]:
        return [self._weight(block, "gate"), self._weight(block, "up")]

    def forward(self, block: str, phase: Phase) -> None:
        """From the norm's output to the last product's input."""
        t, s, u, f, fused = self.t, self.s, self.u, self.f, self.s.flavour.fused
        up = s.product(s.model.hidden, self.ffn)
        t.op(self.copied, read=s.casts * self.r)
        t.cast([self._weight(block, "gate")])
        gone = self.normed + t.gather(u)
        t.op(f, products=[up], read=u)
        if not fused:
            t.op(f, unsaved=f)
        t.op(self.copied, read=s.casts * self.r)
        t.cast([self._weight(block, "up")])
        t.op(f, products=[up], dead=gone, read=u)
        t.open("end", f"{block}.{self.name}.up_proj", phase, [self._weight(block, "down")])
        if not (s.flavour.recomputed and phase is Phase.RECOMPUTE):
            t.op(f, unsaved=2 * f, read=2 * f)
        t.cast([self._weight(block, "down")])

    def finish(self, phase: Phase) -> None:
        """The last product, whose output has 1 u, or a rank's part of it."""
        if phase is Phase.RECOMPUTE:
            self.t.op(self.again)
        product = self.s.product(self.ffn, self.s.model.hidden)
        gone = self.again + self.s.casts * self.r
        self.t.op(self.u, dead=gone, unsaved=self.f - self.again, products=[product], read=self.f)
        self.t.reduce(self.u)

    def backward(self, block: str, *, own: bool) -> None:
        """From the output's gradient to that of the norm's output (1 u).

        own: nothing else needs the output's gradient.
        """
        t, s, u, f, fused = self.t, self.s, self.u, self.f, self.s.flavour.fused
        down, up, gate = (self._weight(block, x) for x in ("down", "up", "gate"))
        t.open("grad", f"{block}.{self.name}.down_proj", Phase.BWD, [down, up, gate])
        low = self.v if t.autocast else 0
        t.op(low, read=low and self.r)
        t.op(self.again)
        product = s.product(self.ffn, s.model.hidden)
        gone = f + (self.v if own else low) + t.gather(u)
        t.linear_backward([down], grad_in=f, grad_out=u, saved=f, product=product, dead=gone)
        if fused:
            t.op(2 * f, dead=3 * f, read=3 * f)
        else:
            t.op(f)
            t.op(f, dead=3 * f)
        t.op(self.normed)
        gone = f + (self.v if self.alone else 0) + t.gather(u)
        product = s.product(s.model.hidden, self.ffn)
        t.linear_backward([up], grad_in=u, grad_out=f, saved=u, product=product, dead=f + self.copied)
        t.op(s.casts * self.r, dead=self.copied, read=self.copied)
        if not fused:
            t.op(f, dead=2 * f)
        t.linear_backward([gate], grad_in=u, grad_out=f, saved=u, product=product, dead=gone)
        t.op(s.casts * self.r, dead=self.copied, read=self.copied)
        summed = self.r if s.casts else u
        t.op(summed, dead=2 * summed)
        t.reduce(u)


class Experts:
    """[Note: experts]

    whole: a recompute runs all: the router's gradient needs the experts' outputs.
    """

    whole = True

    def __init__(self, t: Tape, s: Shape) -> None:
        self.t, self.s = t, s
        x = s.model.experts
        assert x is not None
        self.x, self.own = x, x.count // s.part.experts
        each = x.per_token * t.width
        self.v = s.rows * s.model.hidden * t.width
        # Of rows at a rank's experts and, for h, as it routes them.
        self.routed_h, self.rows_h, self.rows_f = (
            tokens * each * width
            for tokens, width in ((s.rows, s.model.hidden), (s.tokens, s.model.hidden), (s.tokens, x.ffn))
        )
        # A router in fp32 keeps copies of its input and of its weights.
        copied = x.fp32_router and t.width < 4
        self.input32, self.weight32 = (4 * n * s.model.hidden if copied else 0 for n in (s.rows, x.count))
        self.logits = s.rows * x.count * (4 if copied else t.width)
        self.chosen = s.rows * x.count * 4 + s.rows * x.per_token * (4 + 8 + 2 * 8)
        self.normed, self.again = (self.v, self.rows_f) if s.flavour.recomputed else (0, 0)
        # Bytes that operators of the activation keep in addition to gate, up and their product. gpt-oss clamps both and
        # keeps more.
        self.steps = 0 if s.flavour.fused else (3 if x.biases else 1) * self.rows_f
        beside = GatedMlp(t, s, ffn=x.shared * x.ffn, name="mlp.shared_experts", alone=False)
        self.shared = beside if x.shared else None

    def declare(self, block: str) -> None:
        """The matrices of an expert are adjacent."""
        t, x, h, spread = self.t, self.x, self.s.model.hidden, self.s.part.experts
        declare(t, f"{block}.mlp.gate", (x.count, h), x.count if x.biases else 0)
        for e in range(self.own):
            expert = f"{block}.mlp.experts.{e}"
            t.parameter(f"{expert}.gate_up_proj", 1, 2 * x.ffn, h, spread=spread)
            t.parameter(f"{expert}.down_proj", 1, h, x.ffn, spread=spread)
            if x.biases:
                t.parameter(f"{expert}.gate_up_proj_bias", 1, 2 * x.ffn, spread=spread)
                t.parameter(f"{expert}.down_proj_bias", 1, h, spread=spread)
        if self.shared is not None:
            self.shared.declare(block)

    def _router(self, block: str) -> list[str]:
        return [f"{block}.mlp.gate.{x}" for x in (("weight", "bias") if self.x.biases else ("weight",))]

    def _of(self, block: str, matrix: str) -> list[str]:
        kinds = (matrix, f"{matrix}_bias") if self.x.biases else (matrix,)
        return [f"{block}.mlp.experts.{e}.{kind}" for e in range(self.own) for kind in kinds]

    def first(self, block: str) -> list[str]:
        return self._router(block)

    def _grouped(self, rows: int, columns: int) -> Product:
        count, all_rows = self.own, self.s.tokens * self.x.per_token
        if all_rows % count:
            return 1, all_rows, rows, columns
        return count, all_rows // count, rows, columns

    def _routed(self) -> Product:
        return 1, self.s.rows, self.s.model.hidden, self.x.count

    def _to_experts(self) -> None:
        """Rows, or in backward gradients of theirs."""
        self.t.exchange(self.routed_h)
        if self.t.gather(self.rows_h):
            self.t.op(dead=self.routed_h)

    def _from_experts(self) -> None:
        if self.t.sequence:
            self.t.reduce(self.rows_h)
        self.t.exchange(self.routed_h)

    def _summed(self) -> None:
        if not self.t.sequence:
            self.t.reduce(self.v)

    def forward(self, block: str, phase: Phase) -> None:
        """From the norm's output to the sum of theirs (1 v)."""
        t, s, v, routed, wide, f = self.t, self.s, self.v, self.routed_h, self.rows_h, self.rows_f
        h = s.model.hidden
        t.op(self.input32 + self.weight32, read=v if self.input32 else 0)
        t.op(self.logits, products=[self._routed()], read=self.input32 or v)
        t.op(self.chosen, dead=self.logits, read=self.logits)
        experts = [*self._of(block, "gate_up_proj"), *self._of(block, "down_proj")]
        t.open("begin", f"{block}.mlp.experts", phase, experts)
        t.op(routed, read=routed)
        self._to_experts()
        t.op(2 * f, products=[self._grouped(h, 2 * self.x.ffn)], read=wide)
        t.op(self.steps)
        t.op(f, read=2 * f)
        t.op(wide, products=[self._grouped(self.x.ffn, h)], dead=self.again, read=f)
        self._from_experts()
        t.op(routed)
        t.op(routed, dead=routed)
        kept = wide + routed + 3 * f + self.steps - self.again + self.chosen + self.input32 + self.weight32
        t.op(v, dead=routed, unsaved=kept + (0 if self.shared else v), read=routed)
        self._summed()
        if self.shared is not None:
            t.open("begin", f"{block}.mlp.shared_experts", phase, self.shared.first(block))
            self.shared.forward(block, phase)
            self.shared.finish(phase)
            t.op(v, dead=2 * v, unsaved=v, read=2 * v)
        t.op(dead=self.normed, unsaved=-self.normed)

    def finish(self, phase: Phase) -> None:
        """`forward` wrote all operators."""

    def backward(self, block: str, *, own: bool) -> None:
        t, s, v, routed, wide, f = self.t, self.s, self.v, self.routed_h, self.rows_h, self.rows_f
        h, fused = s.model.hidden, s.flavour.fused
        t.op(self.normed)
        if self.shared is not None:
            self.shared.backward(block, own=False)
        experts = [*self._of(block, "gate_up_proj"), *self._of(block, "down_proj"), *self._router(block)]
        t.open("grad", f"{block}.mlp.experts", Phase.BWD, experts)
        t.op(routed, dead=v if own else 0, read=v)
        t.op(2 * routed + self.again, dead=3 * routed, read=3 * routed)
        self._to_experts()
        down, up = self._grouped(self.x.ffn, h), self._grouped(h, 2 * self.x.ffn)
        names = self._of(block, "down_proj")
        t.linear_backward(names, grad_in=f, grad_out=wide, saved=f, product=down, dead=wide + f)
        if fused:
            t.op(2 * f, dead=3 * f, read=3 * f)
        else:
            t.op(2 * f)
            t.op(2 * f, dead=5 * f + self.steps)
        names = self._of(block, "gate_up_proj")
        t.linear_backward(names, grad_in=wide, grad_out=2 * f, saved=wide, product=up, dead=2 * f + wide)
        self._from_experts()
        t.op(v, dead=routed, read=routed)
        self._summed()
        t.op(self.logits, dead=self.chosen)
        names, dead = self._router(block), self.logits + (self.input32 + self.weight32 or v)
        kept = self.input32 or v
        t.linear_backward(names, grad_in=kept, grad_out=self.logits, saved=kept, product=self._routed(), dead=dead)
        t.sum_at_end(names)
        if self.input32:
            t.op(v, dead=self.input32 + v)
        for _ in range(1 if self.shared is None else 2):
            t.op(v, dead=2 * v, read=2 * v)
