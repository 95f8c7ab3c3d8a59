"""Kernels: flavours in which the operators of one model run, and what each flavour keeps for the backward pass.

- eager: every operator of PyTorch is a kernel of its own, as Hugging Face's models run without further packages:
  "gelu_new" is eight operators, an RMSNorm nine, and the loss turns the logits into fp32 and keeps their log-softmax.
- fused: one kernel each for activation, norm, rotary positions and loss (flash-attn, Liger, Apex). The loss keeps the
  logits in the working dtype; its gradient is as large.
- compiled: as fused, by torch.compile. What a kernel can compute again from its input, outputs of norms and of
  activations, is not kept: backward computes it once more.
- megatron: as fused, but the loss works in place on fp32 logits, which it keeps.

No flavour cuts the logits into pieces. Which attention kernel runs is a choice of its own ("flash", "efficient" or
"math"). BERT and ViT are written for eager alone. A captured module runs what it really does: its workload names
"captured". Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CAPTURED", "FLAVOURS", "KERNELS", "Flavour", "kernels_text"]

CAPTURED = "captured"
"""Of a workload that was captured or recorded: the kernels are those of the module."""


@dataclass(frozen=True, kw_only=True)
class Flavour:
    """How operators run.

    fused: activation, norm and rotary positions are one kernel each.
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


def kernels_text(kernels: str) -> str:
    """ "fused kernels"; empty for a workload that names none, as one written by hand."""
    return f"{kernels} kernels" if kernels else ""
