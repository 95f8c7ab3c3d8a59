"""Blocks: neighbouring moments with the same chunks. Positions: where blocks and updates run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct

from pstar_sim.policy.kit.facts import Facts


class Block(Struct, frozen=True):
    """Moments first..last (inclusive) that need the same `chunks`."""

    first: int
    last: int
    chunks: tuple[int, ...]
    tide_bytes: int
    seconds: float


class Stretch(NamedTuple):
    """Both included."""

    first: int
    last: int


def merged(stretches: Iterable[Stretch]) -> list[Stretch]:
    """By their begins; those that overlap or touch become one."""
    out: list[Stretch] = []
    for stretch in stretches:
        if out and stretch.first <= out[-1].last + 1:
            out[-1] = Stretch(out[-1].first, max(out[-1].last, stretch.last))
        else:
            out.append(stretch)
    return out


class Position(NamedTuple):
    """A place on the compute queue.

    block: that runs here, -1 for an update.
    chunk: streamed, updated here, -1 for a block.
    """

    block: int
    chunk: int
    tide_bytes: int
    seconds: float


def blocks_of(
    uses: Facts, seconds: Sequence[float], tide: Sequence[int], permanent: frozenset[int], cuts: frozenset[int]
) -> list[Block]:
    """Neighbours with the same chunks become one, and a moment without chunks joins the one before if its tide is no
    higher and it takes no time or stands between equal needs.

    permanent: always on the GPU.
    cuts: moments that open a block; the optimizer step is always its own.
    """
    count = len(uses.by_moment)
    needs = [tuple(c for c in row if c not in permanent) for row in uses.by_moment]
    following: list[tuple[int, ...]] = [()] * (count + 1)
    for m in range(count - 1, -1, -1):
        following[m] = needs[m] or following[m + 1]
    out: list[Block] = []
    for m in range(count):
        merge = False
        if out and m not in cuts and m != count - 1:
            block = out[-1]
            if needs[m] == block.chunks:
                merge = True
            elif not needs[m] and tide[m] <= block.tide_bytes:
                merge = seconds[m] == 0.0 or following[m] == block.chunks
        if merge:
            b = out[-1]
            out[-1] = Block(b.first, m, b.chunks, max(b.tide_bytes, tide[m]), b.seconds + seconds[m])
        else:
            out.append(Block(m, m, needs[m], tide[m], seconds[m]))
    return out
