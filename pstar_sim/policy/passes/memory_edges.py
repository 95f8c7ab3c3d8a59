"""Memory edges: which step has to end before another step may take its bytes.

[Note: FIFO tokens] Think of every byte of a place as a token with one owner. Take one predicted schedule that keeps the
budget and repeats for ever. Let F bytes be free at first, and hand the n-th byte taken (takes in the order of their
starts) to the step that frees byte n - F (frees in the order of their ends). If every step waits for the steps that
free its tokens, no byte ever has two owners, whatever the timing: the budget holds in every legal interleaving. The
predicted schedule loses no time, because in it every byte is free before it is taken.

[Note: windows] Successive iterations overlap, so the schedule is one window: from the first step of iteration w on the
compute queue to the first of w + 1. It contains every step once: of iteration w, of w - 1 (late steps: Adam) and of w +
1 (early steps: fetches for the next forward).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from pstar_sim.core.step import Ref

__all__ = ["ByteMove", "QueueSlot", "fifo_edges"]


class ByteMove(NamedTuple):
    """Step `step` of iteration w + `iteration` takes `take` bytes, or frees -`take` bytes."""

    step: int
    iteration: int
    take: int


class QueueSlot(NamedTuple):
    queue: str
    position: int


def fifo_edges(
    window: Sequence[ByteMove], free_bytes: int, slots: Mapping[int, QueueSlot], lengths: Mapping[str, int]
) -> dict[int, list[Ref]]:
    """Returns step -> steps for which it waits, so that one place keeps its budget in every legal interleaving.

    window: takes and frees in the order of the predicted schedule, each step's once. A free comes before a take at the
        same time.
    free_bytes: when the window opens.
    lengths: steps on each queue. Only the latest step of each queue is named.

    Raises ValueError for a window that frees more or fewer bytes than it takes (it does not repeat), or takes bytes
    before they are free (it does not keep the budget).
    """
    takes = [e for e in window if e.take > 0]
    frees = _Frees(window, slots, lengths)
    if sum(e.take for e in takes) != frees.volume:
        raise ValueError(
            f"the window takes {sum(e.take for e in takes)} bytes and frees {frees.volume}; both must be equal"
        )
    if free_bytes < 0:
        raise ValueError(f"{-free_bytes} bytes too many are held when the window opens")
    edges: dict[int, list[Ref]] = {}
    taken = 0
    for take in takes:
        low = taken - free_bytes
        taken += take.take
        if latest := frees.latest(take, low, low + take.take):
            edges.setdefault(take.step, []).extend(latest)
    return edges


class _Frees:
    """Tokens, in the order in which frees end."""

    def __init__(self, window: Sequence[ByteMove], slots: Mapping[int, QueueSlot], lengths: Mapping[str, int]) -> None:
        self._slots, self._lengths = slots, lengths
        self._order = {id(e): n for n, e in enumerate(window)}
        self._events = [e for e in window if e.take < 0]
        self._ends = list(accumulate(-e.take for e in self._events))  # number of bytes freed up to each free
        self.volume = self._ends[-1] if self._ends else 0

    def latest(self, take: ByteMove, low: int, high: int) -> list[Ref]:
        """Per queue, the latest step that frees one of the bytes low .. high (ordinals) of `take`."""
        found: dict[str, tuple[int, Ref]] = {}
        # Frees of this window and of the two windows before it. Bytes that were free before these windows need no edge.
        for back in range(3):
            a, b = max(low + back * self.volume, 0), min(high + back * self.volume, self.volume)
            if a >= b:
                continue
            for free in self._events[bisect_left(self._ends, a + 1) : bisect_left(self._ends, b) + 1]:
                ref = self._ref(take, free, back)
                slot = self._slots[free.step]
                absolute = slot.position - ref.back * self._lengths[slot.queue]
                if slot.queue not in found or absolute > found[slot.queue][0]:
                    found[slot.queue] = (absolute, ref)
        return [ref for _, ref in found.values()]

    def _ref(self, take: ByteMove, free: ByteMove, back: int) -> Ref:
        if back == 0 and self._order[id(free)] > self._order[id(take)]:
            raise ValueError(f"step {take.step} takes bytes before step {free.step} has freed them")
        behind = take.iteration - free.iteration + back
        if behind < 0:
            raise ValueError(f"step {take.step} would wait for step {free.step} of a later iteration")
        return Ref(free.step, behind)
