"""Memory edges: which step has to end before another one may take its bytes.

[Note: FIFO tokens] Think of every byte of a place as a token with one owner. Given one predicted schedule that keeps
the budget and repeats for ever, put all takes in the order of their starts, all frees in the order of their ends, and
hand the n-th byte taken to the step that frees byte n - F, where F bytes are free when counting begins. If every step
waits for the steps that free its tokens, no byte ever has two owners, whatever the timing: the budget holds in every
legal interleaving. And the predicted schedule loses nothing, because in it every byte is free before it is taken.

[Note: windows] Successive iterations overlap, so the schedule is written down as one window: from the first step of
iteration w on the compute queue to that of w + 1. It contains every step once, some of iteration w, some of w - 1
(late: Adam) and some of w + 1 (early: fetches for the next forward).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pstar_sim.core.step import Ref

__all__ = ["Event", "Slot", "fifo_edges"]


class Event(NamedTuple):
    """In the window, step `step` of iteration w + `iteration` takes (take > 0) or frees (take < 0) bytes."""

    step: int
    iteration: int
    take: int


class Slot(NamedTuple):
    """Where a step stands: its queue and its position there in one iteration."""

    queue: str
    position: int


def fifo_edges(
    window: Sequence[Event], free_bytes: int, slots: Mapping[int, Slot], lengths: Mapping[str, int]
) -> dict[int, list[Ref]]:
    """Edges (step -> steps it has to wait for) that keep one place within its budget in every legal interleaving.

    window: takes and frees in the order they happen in the predicted schedule, each step's once (frees before takes
    where both happen at once). free_bytes: bytes of the place that nobody holds when the window opens. lengths: steps
    on each queue in one iteration. Only the latest step of each queue is named: its queue is in order.

    Raises ValueError for a window that frees more or less than it takes, or in which bytes are taken before they are
    free (it then does not repeat, or does not keep the budget).
    """
    takes = [e for e in window if e.take > 0]
    frees = [e for e in window if e.take < 0]
    volume = sum(e.take for e in takes)
    if volume != -sum(e.take for e in frees):
        raise ValueError(f"the window takes {volume} bytes and frees {-sum(e.take for e in frees)}")
    if free_bytes < 0:
        raise ValueError(f"{-free_bytes} bytes too many are held when the window opens")
    edges: dict[int, list[Ref]] = {}
    if not volume:
        return edges
    order = {id(e): n for n, e in enumerate(window)}
    ends: list[int] = []  # byte ordinal behind each free
    total = 0
    for e in frees:
        total -= e.take
        ends.append(total)
    taken = 0
    for take in takes:
        low, high = taken - free_bytes, taken + take.take - free_bytes  # ordinals of the frees it gets
        taken += take.take
        latest: dict[str, tuple[int, Ref]] = {}
        # Frees of windows 0 (this one), 1 and 2 back; what was free before those never needs an edge.
        for back in range(3):
            a, b = max(low + back * volume, 0), min(high + back * volume, volume)
            if a >= b:
                continue
            for n in range(bisect_left(ends, a + 1), bisect_left(ends, b) + 1):
                free = frees[n]
                if back == 0 and order[id(free)] > order[id(take)]:
                    raise ValueError(f"step {take.step} takes bytes before step {free.step} has freed them")
                behind = take.iteration - free.iteration + back
                slot = slots[free.step]
                if behind < 0:
                    raise ValueError(f"step {take.step} would wait for step {free.step} of a later iteration")
                ref = Ref(free.step, behind)
                absolute = slot.position - behind * lengths[slot.queue]
                if slot.queue not in latest or absolute > latest[slot.queue][0]:
                    latest[slot.queue] = (absolute, ref)
        if latest:
            edges.setdefault(take.step, []).extend(ref for _, ref in latest.values())
    return edges
