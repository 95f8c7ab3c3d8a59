"""Attention kernels: which a job runs, and calls as a moment names them.

Their rates are a GPU's (attention_rates.py). Fused kernels keep one log-sum per query and no scores, and skip what a
causal mask or a window hides, torch's memory-efficient kernel no window. The math kernel computes every score as matrix
products, keeps probabilities, and has no calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

AttentionCall = tuple[int, int, int, int, int, int, int]
"""(heads of all sequences, queries, keys, width of a key, width of a value, causal, backward). Causal is 0 without a
mask, else the number of ranks that share the sequence's queries in balanced parts, 1 for all; backward is 0 or 1. A
causal call with fewer keys than queries has a window of that many."""


USUAL = "flash"
"""The kernel that scaled_dot_product_attention of torch takes on the GPU."""


@dataclass(frozen=True, kw_only=True)
class AttentionKernel:
    """torch: torch's kernel that keeps as much.

    windows: outside of a window costs nothing.
    """

    torch: str = USUAL
    windows: bool = True


ATTENTION: Mapping[str, AttentionKernel] = {
    USUAL: AttentionKernel(),
    "fa2": AttentionKernel(),  # FlashAttention-2
    "fa3": AttentionKernel(),  # FlashAttention-3, for Hopper
    "fa4": AttentionKernel(),  # FlashAttention-4, for Blackwell
    "cudnn": AttentionKernel(),
    "triton": AttentionKernel(),  # of 2023, as in MPT
    "flex": AttentionKernel(),  # torch's FlexAttention
    "efficient": AttentionKernel(torch="efficient", windows=False),  # as xFormers'
    "math": AttentionKernel(torch="math", windows=False),  # products and a softmax
}


def call_flops(call: AttentionCall) -> int:
    """As torch counts: a causal mask saves none. Forward has two products, scores and scores by values; backward five,
    scores again and the gradients of scores, values, queries and keys."""
    heads, queries, keys, key_width, value_width, _, backward = call
    widths = 3 * key_width + 2 * value_width if backward else key_width + value_width
    return 2 * heads * queries * keys * widths


def needed_flops(call: AttentionCall) -> float:
    """Flops of the scores that the mask leaves."""
    _, part, keys, *_, causal, _ = call
    if not causal:
        return float(call_flops(call))
    queries = part * causal
    return call_flops(call) * (1 - keys / (2 * queries) if keys <= queries else queries / (2 * keys))
