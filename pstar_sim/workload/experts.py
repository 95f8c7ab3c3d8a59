"""Models of experts: the parameters that a token goes through, and the probability that a chunk is used.

Each token goes through `per_token` of a layer's `count` experts. If every choice of experts is equally likely, one
token uses none of the j experts of a chunk with probability C(count - j, per_token) / C(count, per_token). A
micro-batch uses none of them with this probability to the power of its tokens. A plan brings every chunk anyway: the
router's choice is known too late to fetch one in time.
"""

from __future__ import annotations

from math import comb

from pstar_sim.catalog.model_shapes import ExpertsShape, ModelEntry

__all__ = ["experts_note", "use_probability"]


def use_probability(experts: ExpertsShape, tokens: int, *, of: int = 1) -> float:
    """That `tokens` tokens use at least one of `of` experts of a layer."""
    missed = comb(experts.count - of, experts.per_token) / comb(experts.count, experts.per_token)
    return 1 - missed**tokens


def experts_note(entry: ModelEntry) -> str:
    """Next to the number of parameters; empty for a model without experts."""
    x = entry.experts
    if x is None:
        return ""
    return f"{entry.active_params / 1e9:.2f} B active per token ({x.per_token} of {x.count} experts)"
