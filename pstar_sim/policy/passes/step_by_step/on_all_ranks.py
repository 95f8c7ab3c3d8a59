"""Whole chunks, the same on every GPU; no step on one rank."""

from __future__ import annotations

from collections.abc import Iterable

from pstar_sim.policy.passes.builder import Builder


def gathered(b: Builder, c: int, moment: int, own: int, after: Iterable[int] = ()) -> int:
    """The step after which the chunk is whole here: a gather of others' slices, on one rank `own`.

    own: brings this rank's slice.
    """
    return b.gather(c, moment, [own, *after]) if b.layout.ranks > 1 else own
