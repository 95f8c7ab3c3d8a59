"""Models of experts: a token's parameters, and the probability that a chunk is used.

Each token goes through `per_token` of a layer's `count` experts. If all choices are equally likely, it uses none of a
chunk's j experts with probability C(count - j, per_token) / C(count, per_token), a micro-batch with the power of its
tokens. A plan brings every chunk anyway: the router's choice is known too late for a fetch.
"""

from __future__ import annotations

from math import comb

from pstar_sim.catalog.model_shapes import ExpertsShape, ModelEntry


def use_probability(experts: ExpertsShape, tokens: int, *, of: int = 1) -> float:
    """That the tokens use at least one of `of` experts of a layer."""
    missed = comb(experts.count - of, experts.per_token) / comb(experts.count, experts.per_token)
    return 1 - missed**tokens


def experts_note(entry: ModelEntry) -> str:
    """Next to the number of parameters; empty for a model without experts."""
    x = entry.experts
    if x is None:
        return ""
    return f"{entry.active_params / 1e9:.2f} B active per token ({x.per_token} of {x.count} experts)"
