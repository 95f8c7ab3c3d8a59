"""Whole chunks and all-reduced gradients, the same on every GPU; no step on one rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pstar_sim.policy.passes.builder import Builder


def gathered(b: Builder, c: int, moment: int, own: int, after: Iterable[int] = ()) -> int:
    """The step after which the chunk is whole here: a gather of others' slices, on one rank `own`.

    own: brings this rank's slice.
    """
    return b.gather(c, moment, [own, *after]) if b.layout.ranks > 1 else own


def all_reduced(b: Builder, c: int, moment: int, after: Sequence[int]) -> Sequence[int]:
    """After which each rank has the sum, for a chunk on every GPU (replicated). The gradient is complete after `after`,
    where it is accumulated."""
    if b.ranks == 1:
        return after
    list_name = "grad32" if b.workload.micro_batches > 1 else "param"
    return [b.gather(c, moment, [b.reduce_scatter(c, moment, after, list_name)], list_name)]
