"""Models of experts: what a token goes through, and how likely a chunk is used.

Each token goes through `per_token` of a layer's `count` experts. Where every choice of experts is as likely, a chunk
that holds j of them is left alone by one token with probability C(count - j, per_token) / C(count, per_token), and by a
micro-batch with that to the power of its tokens. For one expert that is 1 - (1 - per_token / count) ** tokens. A plan
brings every chunk all the same: what a router chooses is known too late to fetch it in time.
"""

from __future__ import annotations

from math import comb

from pstar_sim.catalog.model_shapes import ExpertsShape, ModelEntry

__all__ = ["experts_note", "use_probability"]


def use_probability(experts: ExpertsShape, tokens: int, *, of: int = 1) -> float:
    """The probability that `tokens` tokens use at least one of `of` experts of a layer."""
    missed = comb(experts.count - of, experts.per_token) / comb(experts.count, experts.per_token)
    return 1 - missed**tokens


def experts_note(entry: ModelEntry) -> str:
    """What stands beside the number of parameters in an answer; empty for a model without experts."""
    x = entry.experts
    if x is None:
        return ""
    return f"{entry.active_params / 1e9:.2f} B active per token ({x.per_token} of {x.count} experts)"
