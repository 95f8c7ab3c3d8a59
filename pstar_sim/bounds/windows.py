"""Update windows, for the closed form and the joint bound ([Note: the bound] of pinned.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pstar_sim.bounds.bound_facts import Array, BoundFacts
from pstar_sim.policy.kit.update_windows import Inside


@dataclass(frozen=True, kw_only=True)
class Windows:
    """An entry per window j, in which the updates of the chunks J_j lie.

    span_s: iteration outside of the window.
    params, bytes: of all chunks of J_j.
    down_s: shortest copy down of a chunk of J_j, or part (`parts_of`).
    up_s, adam_s: likewise.
    reduce_s, gather_s: shortest last sum and gather.
    net_s: all of these, one after the other.
    behind_barrier: whether copies down may lie outside the window.
    """

    span_s: Array
    params: Array
    bytes: Array
    down_s: Array
    up_s: Array
    adam_s: Array
    reduce_s: Array
    gather_s: Array
    net_s: Array
    behind_barrier: bool

    def seconds(self, *, adam_s: float, up: float, down: float) -> Mapping[str, Array]:
        """Returns the least seconds of an iteration, per window, if nothing of J_j is pinned, by the serial resource
        ("adam", "h2d", "d2h").

        Another resource's shortest work comes before its first work in the window and after its last, on several ranks
        the shortest sum and gather too.

        adam_s: CPU Adam, per parameter.
        up, down: bytes per second.
        """
        none = np.zeros(len(self.span_s))
        before_s, sum_s = (none, none) if self.behind_barrier else (self.down_s, self.reduce_s)
        span_s = self.span_s + sum_s + self.gather_s
        found = {
            "adam": span_s + self.params * adam_s + before_s + self.up_s,
            "h2d": span_s + self.bytes / up + before_s + self.adam_s,
        }
        if not self.behind_barrier:
            found["d2h"] = span_s + self.bytes / down + self.adam_s + self.up_s
        return found

    def gpu_s(self, adam_s: float) -> Array:
        """Least seconds per window if the GPU updates all of J_j.

        adam_s: GPU Adam, per parameter.
        """
        sum_s = np.zeros(len(self.span_s)) if self.behind_barrier else self.reduce_s
        return self.span_s + sum_s + self.params * adam_s + self.gather_s


def update_windows(facts: BoundFacts) -> Iterator[Windows]:
    """Last gradient to next first read: of all chunks, then of all but small ones."""
    for members in _groups(facts):
        first, final = facts.first[members], facts.final[members]
        span_s = np.maximum(0.0, facts.clock[final + 1] - facts.clock[first])
        yield _windows(facts, members, Inside(first, final), span_s, behind_barrier=False)


def barrier_windows(facts: BoundFacts, *, clip: bool) -> Iterator[Windows]:
    """From the last moment's end to each next first read.

    clip: from the last sum over the ranks, on several.
    """
    begin_s = facts.barrier_s(clip=clip)
    for members in _groups(facts):
        first = facts.first[members]
        yield _windows(facts, members, Inside(first), begin_s - facts.clock[first], behind_barrier=True)


def _groups(facts: BoundFacts) -> list[NDArray[np.bool_]]:
    """All, and all but small ones, whose copies are shortest: windows without them are tighter."""
    everything = np.ones(len(facts.params), dtype=bool)
    if not everything.size:
        return []
    return [everything, ~facts.small] if facts.small.any() and not facts.small.all() else [everything]


def _windows(
    facts: BoundFacts, members: NDArray[np.bool_], inside: Inside, span_s: Array, *, behind_barrier: bool
) -> Windows:
    net = facts.net
    down_s, up_s, adam_s, reduce_s, gather_s = (
        inside.least(seconds[members])
        for seconds in (facts.part_down_s, facts.part_up_s, facts.part_adam_s, net.reduce_s, net.gather_s)
    )
    collectives_s = net.gather_s if behind_barrier else net.reduce_s + net.gather_s
    return Windows(
        span_s=span_s,
        params=inside.sums(facts.params[members]),
        bytes=inside.sums(facts.bytes[members]),
        down_s=down_s,
        up_s=up_s,
        adam_s=adam_s,
        reduce_s=reduce_s,
        gather_s=gather_s,
        net_s=inside.sums(collectives_s[members]),
        behind_barrier=behind_barrier,
    )
