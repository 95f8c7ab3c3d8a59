"""Rates of fused attention by kernel, mask, length and heads, as read from attention.toml.

[Note: seconds of attention] A call takes

    seconds = flops that the mask leaves / rate * (1 + half / keys) / width

`rate` is that of the pass (forward or backward), `half` the tokens at which a call takes twice as long (more under a
causal mask, whose blocks on the diagonal are computed whole), and `width` 1 for heads of 128 and more, `narrow` for
heads of 64, on a straight line between and below. A sequence with a window is as long as its window.

Figures are TFLOPS of one card; others of its generation relate as their `flash` does (product_shape.py): the usual
kernel's rate over both passes, without a mask, on long sequences and wide heads. A kernel without rates is taken to run
as the usual one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Annotated

from pstar_sim.catalog.attention import AttentionCall
from pstar_sim.catalog.figures import Known, Origin
from pstar_sim.schema.fields import Table, Text, between, says
from pstar_sim.schema.parsing import parse_toml
from pstar_sim.schema.reading import read_table

_WIDE, _NARROW = 128, 64
_Tflops = Annotated[float, between(1, 1e5)]
_Tokens = Annotated[float, between(0, 1e5)]


class KernelRates(Table, frozen=True, kw_only=True):
    """Rates of one kernel, by [Note: seconds of attention]."""

    forward: Annotated[_Tflops, says("TFLOPS of the forward pass")]
    backward: Annotated[_Tflops, says("TFLOPS of the backward pass")]
    narrow: Annotated[float, between(0.1, 1), says("share of both that heads 64 wide reach")]
    half: Annotated[_Tokens, says("tokens at which a call without a mask takes twice as long")]
    half_causal: Annotated[_Tokens, says("the same under a causal mask")]
    known: Annotated[Known, says("how the rates are known")]

    def of(self, call: AttentionCall) -> float:
        """TFLOPS of a call."""
        _, _, keys, key_width, value_width, causal, backward = call
        rate = self.backward if backward else self.forward
        half = self.half_causal if causal else self.half
        return rate * self._width((key_width + value_width) / 2) / (1 + half / keys)

    @property
    def both(self) -> float:
        """Of both passes: five parts of backward for two of forward."""
        return 3.5 / (1 / self.forward + 2.5 / self.backward)

    def _width(self, width: float) -> float:
        if width <= _NARROW:
            return self.narrow * width / _NARROW
        return min(1.0, self.narrow + (1 - self.narrow) * (width - _NARROW) / (_WIDE - _NARROW))


class AttentionRates(Origin, frozen=True, kw_only=True):
    """A table of attention.toml."""

    usual: Annotated[Text, says("kernel that torch takes")]
    kernels: Annotated[Mapping[str, KernelRates], says("rates by kernel")]

    def of(self, kernel: str, call: AttentionCall) -> float:
        usual = self.kernels[self.usual]
        return self.kernels.get(kernel, usual).of(call) / usual.both


@cache
def attention_rates() -> Mapping[str, AttentionRates]:
    """By generation. Raises CatalogError for a field that is missing or wrong."""
    name = "attention.toml"
    raws = parse_toml(name, (files("pstar_sim.catalog") / name).read_text(encoding="utf-8"))
    return {generation: read_table(AttentionRates, name, generation, raw) for generation, raw in raws.items()}


def attention_rate(generation: str, kernel: str, call: AttentionCall) -> float:
    """A call's rate over the usual kernel's, both passes, without a mask, on long sequences and wide heads; 1 without
    rates."""
    rates = attention_rates().get(generation)
    return 1.0 if rates is None else rates.of(kernel, call)
