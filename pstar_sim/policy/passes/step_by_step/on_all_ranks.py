"""What is the same on every GPU, for policies that write their steps one by one: whole chunks and all-reduced
gradients. On one rank there is nothing to do for either."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pstar_sim.policy.passes.builder import Builder

__all__ = ["all_reduced", "gathered"]


def gathered(b: Builder, c: int, moment: int, own: int, after: Iterable[int] = ()) -> int:
    """The step after which the chunk is whole on this GPU: `own`, which brings this rank's slice, and on several ranks
    the gather of the others' behind it and `after`."""
    return b.gather(c, moment, [own, *after]) if b.layout.ranks > 1 else own


def all_reduced(b: Builder, c: int, moment: int, list_name: str, after: Sequence[int]) -> Sequence[int]:
    """The steps after which the gradient in `list_name`, which is complete after `after`, is the sum over the ranks of
    a replicated layout, on each of them."""
    if b.ranks == 1:
        return after
    return [b.gather(c, moment, [b.reduce_scatter(c, moment, after, list_name)], list_name)]
