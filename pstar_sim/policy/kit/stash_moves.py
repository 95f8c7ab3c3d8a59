"""Stashes in a plan: the copies that begin behind a moment, and the copies that a moment waits for ([Note: stashes] in
workload/workload.py).

Every policy's plan copies the stashes. `Builder.compute` writes the copies next to the moments, in the order of the
program, so that steps can never wait for each other in a circle. The asynchronous family (passes/stash_copies.py)
writes the copies into its draft, so that they compete for the link with all other copies. The workload says which
blocks are offloaded.
"""

from __future__ import annotations

from collections.abc import Iterable

from pstar_sim.core.step import Kind
from pstar_sim.workload.workload import Workload

__all__ = ["StashMoves", "moment_of", "stash_cuts"]


class StashMoves:
    """Stashes by the moments that make them, wait for them or need them.

    blocking: whether the compute queue waits while a stash is copied: the copy out ends before moment made + 1 begins,
        and the copy in begins when moment needed - 1 has ended.
    made, gone, back, needed: moment -> indices of stashes, by the moments of [Note: stashes]. For blocking copies
        `gone` is the moment after `made`, and `back` the moment before `needed`.
    out_of, in_of: stash -> step of its copy, once written.
    """

    def __init__(self, workload: Workload, *, blocking: bool = False) -> None:
        self.made: dict[int, list[int]] = {}
        self.gone: dict[int, list[int]] = {}
        self.back: dict[int, list[int]] = {}
        self.needed: dict[int, list[int]] = {}
        self.out_of: dict[int, int] = {}
        self.in_of: dict[int, int] = {}
        for n, stash in enumerate(workload.stashes):
            self.made.setdefault(stash.made, []).append(n)
            self.gone.setdefault(stash.made + 1 if blocking else stash.gone, []).append(n)
            self.back.setdefault(stash.needed - 1 if blocking else stash.back, []).append(n)
            self.needed.setdefault(stash.needed, []).append(n)

    def waits(self, moment: int) -> list[int]:
        out = [self.out_of[n] for n in self.gone.get(moment, ())]
        return out + [self.in_of[n] for n in self.needed.get(moment, ())]


def moment_of(workload: Workload, kind: Kind, stash: int) -> int:
    """Returns the moment of a copy of a stash: for a stash_out the moment that makes the stash, for a stash_in the
    moment that needs it."""
    own = workload.stashes[stash]
    return own.made if kind is Kind.STASH_OUT else own.needed


def stash_cuts(workload: Workload) -> Iterable[int]:
    """Returns the moments that have to open a block, so that a block can be treated as one moment: copies begin after
    the last moment of a block, and the first moment of a block waits for them."""
    for s in workload.stashes:
        yield from (s.made + 1, s.gone, s.gone + 1, s.back, s.back + 1, s.needed)
