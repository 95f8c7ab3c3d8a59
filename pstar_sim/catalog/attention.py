"""Attention kernels: which one a job runs, and its calls as a moment names them.

A kernel is a property of a job; its rates are a GPU's (attention_rates.py). Fused kernels keep one log-sum per query
and no scores, so all of them need the same memory. They leave out what a causal mask or a window hides. torch's
memory-efficient kernel leaves out what a causal mask hides, and no window. The math kernel computes every score as
matrix products, keeps the probabilities, and has no calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ATTENTION", "USUAL", "AttentionCall", "AttentionKernel", "call_flops", "needed_flops"]

AttentionCall = tuple[int, int, int, int, int, int, int]
"""(heads of all sequences, queries, keys, width of a key, width of a value, causal, backward); the last two are 0 or 1.
A causal call with fewer keys than queries has a window of that many."""


@dataclass(frozen=True, kw_only=True)
class AttentionKernel:
    """says: the sentence of the documentation.

    windows: whether what is outside of a window costs nothing.
    """

    says: str
    windows: bool = True


USUAL = "flash"
"""The kernel that scaled_dot_product_attention of torch takes on the GPU."""

ATTENTION: Mapping[str, AttentionKernel] = {
    USUAL: AttentionKernel(says="the fused kernel that torch takes on the GPU"),
    "fa2": AttentionKernel(says="FlashAttention-2"),
    "fa3": AttentionKernel(says="FlashAttention-3 (Hopper)"),
    "fa4": AttentionKernel(says="FlashAttention-4 (Blackwell)"),
    "cudnn": AttentionKernel(says="cuDNN's fused attention"),
    "triton": AttentionKernel(says="the Triton kernel of 2023, as in MPT"),
    "flex": AttentionKernel(says="torch's FlexAttention"),
    "efficient": AttentionKernel(says="torch's memory-efficient kernel, as xFormers'", windows=False),
    "math": AttentionKernel(says="products and a softmax, all scores kept", windows=False),
}


def call_flops(call: AttentionCall) -> int:
    """Returns the flops of a call as torch counts them: a causal mask saves none. Forward has two products, the scores
    and the scores by the values; backward five, the scores again and the gradients of scores, values, queries and
    keys."""
    heads, queries, keys, key_width, value_width, _, backward = call
    widths = 3 * key_width + 2 * value_width if backward else key_width + value_width
    return 2 * heads * queries * keys * widths


def needed_flops(call: AttentionCall) -> float:
    """Returns the flops of the scores that the mask leaves."""
    _, queries, keys, *_, causal, _ = call
    if not causal:
        return float(call_flops(call))
    return call_flops(call) * (1 - keys / (2 * queries) if keys <= queries else queries / (2 * keys))
