"""Whole chunks and all-reduced gradients, which are the same on every GPU. On one rank there is nothing to do for
either."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pstar_sim.policy.passes.builder import Builder

__all__ = ["all_reduced", "gathered"]


def gathered(b: Builder, c: int, moment: int, own: int, after: Iterable[int] = ()) -> int:
    """The step after which the chunk is whole on this GPU: `own`, which brings this rank's slice, and on several ranks
    the gather of the others' behind it and `after`."""
    return b.gather(c, moment, [own, *after]) if b.layout.ranks > 1 else own


def all_reduced(b: Builder, c: int, moment: int, after: Sequence[int]) -> Sequence[int]:
    """The steps after which the gradient of a chunk that lives on every GPU (a replicated layout) is the sum over the
    ranks on each of them. It is complete after `after`, in the list in which it is accumulated."""
    if b.ranks == 1:
        return after
    list_name = "grad32" if b.workload.micro_batches > 1 else "param"
    return [b.gather(c, moment, [b.reduce_scatter(c, moment, after, list_name)], list_name)]
