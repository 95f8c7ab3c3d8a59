"""Which step has to end before another may take its bytes.

[Note: FIFO tokens] Every byte of a place is a token with one owner. Take a predicted schedule that keeps the budget and
repeats. With F bytes free at first, hand the n-th byte taken (by starts) to the step that frees byte n - F (by ends).
If every step waits for those that free its tokens, no byte ever has two owners, whatever the timing: the budget holds
in every legal interleaving. The predicted schedule, in which every byte is free before it is taken, loses no time.

[Note: windows] Iterations overlap, so the schedule is a window: from the first step of iteration w on the compute queue
to the first of w + 1. It has every step once: of iteration w, of w - 1 (late: Adam) and of w + 1 (early: fetches for
the next forward).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate

from msgspec import Struct

from pstar_sim.core.step import Ref


class ByteMove(Struct, frozen=True):
    """`step` of iteration w + `iteration` takes `take` bytes, or frees -`take`."""

    step: int
    iteration: int
    take: int


class QueueSlot(Struct, frozen=True):
    queue: str
    position: int


def fifo_edges(
    window: Sequence[ByteMove], free_bytes: int, slots: Mapping[int, QueueSlot], lengths: Mapping[str, int]
) -> dict[int, list[Ref]]:
    """Step -> steps it waits for, so that a place keeps its budget in every legal interleaving.

    window: takes and frees of the predicted schedule, each step's once, frees before takes at the same time.
    free_bytes: when it opens.
    lengths: steps per queue; only the latest of each is named.

    Raises ValueError for a window that does not repeat (frees more or fewer bytes than it takes) or keep the budget
    (takes bytes before they are free).
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
    def __init__(self, window: Sequence[ByteMove], slots: Mapping[int, QueueSlot], lengths: Mapping[str, int]) -> None:
        self._slots, self._lengths = slots, lengths
        self._order = {id(e): n for n, e in enumerate(window)}
        self._events = [e for e in window if e.take < 0]
        self._ends = list(accumulate(-e.take for e in self._events))  # number of bytes freed up to each free
        self.volume = self._ends[-1] if self._ends else 0

    def latest(self, take: ByteMove, low: int, high: int) -> list[Ref]:
        """Per queue, the latest that frees one of bytes low .. high (ordinals) of `take`."""
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
