"""RMSNorm and rotary positions of the llama family."""

from __future__ import annotations

from pstar_sim.workload.presets.shared import Shape
from pstar_sim.workload.tape import Tape


class Norms:
    """upcast: a norm keeps an fp32 copy of its input for backward, not the input (as in fp32, under autocast on the
        residual stream, or fused).
    wide_output: a norm multiplies by its weight in fp32, as in Gemma, and keeps the other factor in fp32.
    """

    def __init__(self, t: Tape, s: Shape) -> None:
        self.t = t
        self.fused = s.flavour.fused
        self.upcast = t.wide < 4 and not self.fused
        self.autocast = bool(s.casts)
        self.wide_output = self.upcast and s.model.post_norms

    def _wide(self, size: int) -> int:
        return size * 4 // self.t.width if self.upcast else 0

    def forward(self, size: int, rows: int, *, inner: bool = False) -> None:
        """Input and output have `size` bytes.

        inner: only the norm needs the input.
        """
        t, row, wide = self.t, rows * 4, self._wide(size)
        if self.fused:
            t.op(size * t.width // t.wide + row, unsaved=row)
        else:
            if self.upcast:
                t.op(wide, read=size)
            square = wide or size
            t.op(square)
            t.op(3 * row, dead=square + 2 * row)
            t.op(square)
            if self.wide_output:
                t.op(square)
                t.op(size, dead=square, unsaved=2 * wide + row, read=square)
            else:
                if self.upcast:
                    t.op(size, dead=square, read=square)
                t.op(size, unsaved=size + wide + row)
        if inner:
            t.op(dead=size if self.upcast else 0, unsaved=0 if self.upcast else size)

    def backward(self, name: str, size: int, rows: int, *, residual: bool = True, shared: bool = False) -> None:
        """From the gradients of the norm's output and of the residual (both alive) to their sum.

        shared: others need the output's gradient too.
        """
        t, row, wide = self.t, rows * 4, self._wide(size)
        stays = size if shared else 0
        t.sum_at_end([name])
        if self.fused:
            grad = size * t.width // t.wide
            t.op(size + t.size([name]), dead=size + grad + row - stays, read=size + grad)
            t.gradient([name])
        else:
            square = wide or size
            if self.wide_output:
                t.op(square, dead=size - stays, read=size)
                t.op(square)
                t.op(t.size([name]), dead=square)
                t.gradient([name])
                t.op(square, dead=2 * square)
            else:
                t.op(size)
                t.op(size)
                t.op(t.size([name]), dead=size)
                t.gradient([name])
                t.op(dead=2 * size - stays)
            if self.upcast and not self.wide_output:
                t.op(square, dead=size, read=size)
            t.op(square)
            t.op(square)
            t.op(row, dead=2 * square)
            t.op(2 * row, dead=2 * row)
            t.op(square, dead=row)
            t.op(square)
            t.op(square)
            t.op(square, dead=4 * square)
            t.op(square, dead=2 * square + row, read=2 * square)
            if self.upcast:
                t.op(size, dead=square, read=square)
        if residual:
            t.op(size, dead=2 * size, read=2 * size)

    def _rotated(self, size: int) -> int:
        """Autocast leaves rotary positions in fp32."""
        return size * self.t.wide // self.t.width if self.autocast else size

    def rope(self, size: int) -> int:
        """The input stays. Returns the bytes of the output."""
        t, out = self.t, self._rotated(size)
        t.op(out, read=size)
        if not self.fused:
            t.op(size // 2)
            t.op(size, dead=size // 2)
            t.op(out, dead=size, read=2 * size)
            t.op(out, dead=2 * out, read=2 * out)
        return out

    def rope_backward(self, size: int) -> None:
        """From the output's gradient to the input's."""
        t = self.t
        if self.fused:
            t.op(size, dead=size)
            return
        out = self._rotated(size)
        t.op(self.autocast * out, dead=self.autocast * size, read=self.autocast * size)
        t.op(out)
        t.op(self.autocast * size, dead=self.autocast * out)
        t.op(size // 2)
        t.op(size, dead=size // 2)
        t.op(size, dead=size)
        t.op(size, dead=2 * size, read=2 * size)
        t.op(out, dead=out)
        t.op(self.autocast * size, dead=self.autocast * out)
        t.op(size, dead=2 * size, read=2 * size)
