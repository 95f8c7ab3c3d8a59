"""Edges of a plan: memory edges from the window of a draft, without edges that others imply.

The last passes: they need the order of the steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pstar_sim.core.choose import Window
from pstar_sim.core.draft import DraftRow
from pstar_sim.core.step import Ref, Step
from pstar_sim.policy.passes.memory_edges import ByteMove, QueueSlot, fifo_edges

__all__ = ["memory_edges", "without_implied"]


def slots_of(steps: Sequence[Step]) -> tuple[dict[int, QueueSlot], dict[str, int], dict[str, int]]:
    """(step -> queue and position, steps on each queue, first step of each queue)."""
    slots: dict[int, QueueSlot] = {}
    lengths: dict[str, int] = {}
    first: dict[str, int] = {}
    for step in steps:
        queue = step.queue
        position = lengths.get(queue, 0)
        if position == 0:
            first[queue] = step.id
        slots[step.id] = QueueSlot(queue, position)
        lengths[queue] = position + 1
    return slots, lengths, first


def memory_edges(
    steps: Sequence[Step], rows: Sequence[DraftRow], ends: Sequence[tuple[int, int]], window: Window
) -> dict[int, list[Ref]]:
    """Step -> the steps that it has to wait for, so that GPU and host keep their budgets in every legal interleaving.
    ends: row -> the first and the last step that the row stands for. window: the predicted schedule of the rows."""
    slots, lengths, _ = slots_of(steps)
    edges: dict[int, list[Ref]] = {}
    for take, free, room in (
        ("gpu_take", "gpu_free", window.gpu_free_bytes),
        ("host_take", "host_free", window.host_free_bytes),
    ):
        takes = [getattr(row.charge, take) for row in rows]
        frees = [getattr(row.charge, free) for row in rows]
        events = [
            ByteMove(ends[i][1], k, -frees[i]) if done else ByteMove(ends[i][0], k, takes[i])
            for i, k, done in window.events
            if (frees[i] if done else takes[i])
        ]
        for step, refs in fifo_edges(events, room, slots, lengths).items():
            edges.setdefault(step, []).extend(refs)
    return edges


def without_implied(steps: Sequence[Step], memory: Mapping[int, Sequence[Ref]]) -> tuple[Step, ...]:
    """The steps with data and memory edges, without those that are implied: by the order of a queue, or by an earlier
    step of the same queue that waited for the same step or a later one. A reference more than one iteration back
    becomes one to the first step of that queue in the previous iteration, which comes after it."""
    slots, lengths, first = slots_of(steps)
    # (queue, other queue) -> latest position waited for, in the previous iteration < 0
    waited: dict[tuple[str, str], int] = {}
    out: list[Step] = []
    for step in steps:
        refs = (*step.after, *memory.get(step.id, ()))
        if not refs:
            out.append(step)
            continue
        mine = slots[step.id]
        best: dict[str, tuple[int, Ref]] = {}
        for ref in refs:
            if ref.back > 1:
                ref = Ref(first[slots[ref.id].queue], 1)
            slot = slots[ref.id]
            if slot.queue == mine.queue and (ref.back or slot.position < mine.position):
                continue
            absolute = slot.position - ref.back * lengths[slot.queue]
            if absolute <= waited.get((mine.queue, slot.queue), -lengths[slot.queue] - 1):
                continue
            if slot.queue not in best or absolute > best[slot.queue][0]:
                best[slot.queue] = (absolute, ref)
        for queue, (absolute, _) in best.items():
            waited[mine.queue, queue] = absolute
        after = tuple(sorted((ref for _, ref in best.values()), key=lambda r: (r.back, r.id)))
        out.append(step if after == step.after else replace(step, after=after))
    return tuple(out)
