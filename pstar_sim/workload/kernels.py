"""Kernels: flavours of one model's operators, and the bytes that each keeps for the backward pass.

- eager: a kernel per operator, as Hugging Face's models run without further packages. "gelu_new" is eight operators, an
  RMSNorm nine, and the loss turns logits into fp32 and keeps their log-softmax.
- fused: one kernel each for activation, norm, rotary positions and loss (flash-attn, Liger, Apex). The loss keeps the
  logits in the working dtype; its gradient is as large.
- compiled: as fused, by torch.compile. Outputs of norms and activations are computed again in backward.
- megatron: as fused, but the loss works in place on fp32 logits, which it keeps, and scores of attention by products
  are of the working dtype.

The attention kernel is separate (catalog/attention.py), and so is a language model's loss:

- whole: the flavour's, on all logits at once.
- chunked: head and loss run piece by piece, and once more in the backward pass (torchtune, TRL).
- fused: head, loss and their gradients run piece by piece in the forward pass (Liger's fused linear cross-entropy).

BERT and ViT are written for eager kernels and the whole loss alone.

[Note: masks] Dropout keeps a byte per element (torch's native_dropout; on a CPU the dtype's width) of outputs of
embedding, attention and feed-forward layers, and of the math kernel's probabilities, which stay as dropped, too. Fused
attention draws its mask again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pstar_sim.arguments import refused
from pstar_sim.errors import ModelError

CAPTURED = "captured"
"""Flavour of a workload that was captured or recorded: the kernels are those of the module."""


@dataclass(frozen=True, kw_only=True)
class Flavour:
    """fused: activation, norm and rotary positions are one kernel each.
    recomputed: backward computes outputs of norms and activations once more.
    loss: "unfused" (fp32 logits and a log-softmax), "fused" (logits of the working dtype) or "in place" (fp32 logits
        overwritten).
    low_scores: the math kernel's scores are of the working dtype; else it computes in fp32, from copies.
    """

    fused: bool
    recomputed: bool = False
    loss: str
    low_scores: bool = False


FLAVOURS = {
    "eager": Flavour(fused=False, loss="unfused"),
    "fused": Flavour(fused=True, loss="fused"),
    "compiled": Flavour(fused=True, recomputed=True, loss="fused"),
    "megatron": Flavour(fused=True, loss="in place", low_scores=True),
}
KERNELS = tuple(FLAVOURS)
FUSED = "fused"
LOSSES = ("whole", "chunked", FUSED)


def kernels_text(kernels: str) -> str:
    """Such as "fused kernels"; empty for a workload that names none."""
    return f"{kernels} kernels" if kernels else ""


class Dropout(NamedTuple):
    """Rates, from 0 to below 1 ([Note: masks])."""

    hidden: float = 0.0
    attention: float = 0.0

    def __str__(self) -> str:
        """As `dropout` reads it."""
        if self.hidden == self.attention:
            return f"{self.hidden:g}"
        return ",".join(f"{name}={rate:g}" for name, rate in self._asdict().items() if rate)


def dropout(value: object) -> Dropout:
    """Reads 0.1, "0.1", or "hidden=0.1" and "attention=0.1" alone or together; None is 0. Raises ModelError."""
    if value is None or isinstance(value, Dropout):
        return value or Dropout()
    given: dict[str, float] = {}
    for word in str(value).split(","):
        name, equals, rate = word.rpartition("=")
        try:
            number = float(rate)
        except ValueError:
            number = -1.0
        names = Dropout._fields if not equals else (name.strip(),)
        if not 0 <= number < 1 or any(n in given or n not in Dropout._fields for n in names):
            want = "a rate from 0 to below 1, such as 0.1, or hidden=0.1 or attention=0.1 for those alone"
            raise refused("dropout", value, want, ModelError)
        given |= dict.fromkeys(names, number)
    return Dropout(**given)
