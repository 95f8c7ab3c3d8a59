"""Kernels: flavours in which the operators of one model run, and the bytes that each flavour keeps for the backward
pass.

- eager: every operator of PyTorch is a kernel of its own, as Hugging Face's models run without further packages.
  "gelu_new" is eight operators, an RMSNorm nine, and the loss turns the logits into fp32 and keeps their log-softmax.
- fused: one kernel each for activation, norm, rotary positions and loss (flash-attn, Liger, Apex). The loss keeps the
  logits in the working dtype; its gradient is as large.
- compiled: as fused, by torch.compile. Outputs of norms and of activations are not kept, because backward can compute
  them again from their inputs.
- megatron: as fused, but the loss works in place on fp32 logits, which it keeps.

The attention kernel is a separate choice (catalog/attention.py), and so is the loss of a language model:

- whole: the flavour's, on all logits at once.
- chunked: head and loss run piece by piece, and once more in the backward pass (torchtune, TRL).
- fused: head, loss and their gradients run piece by piece in the forward pass (Liger's fused linear cross-entropy).

BERT and ViT are written for eager kernels and the whole loss alone. A captured module names "captured".
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CAPTURED", "FLAVOURS", "FUSED", "KERNELS", "LOSSES", "Flavour", "kernels_text"]

CAPTURED = "captured"
"""Flavour of a workload that was captured or recorded: the kernels are those of the module."""


@dataclass(frozen=True, kw_only=True)
class Flavour:
    """fused: activation, norm and rotary positions are one kernel each.
    recomputed: backward computes outputs of norms and activations once more.
    loss: "unfused" (fp32 logits and a log-softmax beside them), "fused" (logits of the working dtype) or "in place"
        (fp32 logits that the loss overwrites).
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
    """Such as "fused kernels"; empty for a workload that names no flavour."""
    return f"{kernels} kernels" if kernels else ""
