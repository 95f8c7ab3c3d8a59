"""Kernels: flavours of one model's operators, and the bytes that each keeps for the backward pass.

- eager: a kernel per operator, as Hugging Face's models run without further packages. "gelu_new" is eight operators, an
  RMSNorm nine, and the loss turns logits into fp32 and keeps their log-softmax.
- fused: one kernel each for activation, norm, rotary positions and loss (flash-attn, Liger, Apex). The loss keeps the
  logits in the working dtype; its gradient is as large.
- compiled: as fused, by torch.compile. Outputs of norms and activations are computed again in backward.
- megatron: as fused, but the loss works in place on fp32 logits, which it keeps.

The attention kernel is separate (catalog/attention.py), and so is a language model's loss:

- whole: the flavour's, on all logits at once.
- chunked: head and loss run piece by piece, and once more in the backward pass (torchtune, TRL).
- fused: head, loss and their gradients run piece by piece in the forward pass (Liger's fused linear cross-entropy).

BERT and ViT are written for eager kernels and the whole loss alone. A captured module names "captured".
"""

from __future__ import annotations

from dataclasses import dataclass

CAPTURED = "captured"
"""Flavour of a workload that was captured or recorded: the kernels are those of the module."""


@dataclass(frozen=True, kw_only=True)
class Flavour:
    """fused: activation, norm and rotary positions are one kernel each.
    recomputed: backward computes outputs of norms and activations once more.
    loss: "unfused" (fp32 logits and a log-softmax), "fused" (logits of the working dtype) or "in place" (fp32 logits
        overwritten).
    """

    fused: bool
    recomputed: bool = False
    loss: str


FLAVOURS = {
    "eager": Flavour(fused=False, loss="unfused"),
    "fused": Flavour(fused=True, loss="fused"),
    "compiled": Flavour(fused=True, recomputed=True, loss="fused"),
    "megatron": Flavour(fused=True, loss="in place"),
}
KERNELS = tuple(FLAVOURS)
FUSED = "fused"
LOSSES = ("whole", "chunked", FUSED)


def kernels_text(kernels: str) -> str:
    """Such as "fused kernels"; empty for a workload that names none."""
    return f"{kernels} kernels" if kernels else ""
