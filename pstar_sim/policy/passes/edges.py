"""Memory edges from a draft's window, without implied ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate

from pstar_sim.core.choose import Window
from pstar_sim.core.draft import DraftRow
from pstar_sim.core.step import Queue, Ref, Step
from pstar_sim.policy.passes.memory_edges import ByteMove, QueueSlot, fifo_edges


def slots_of(steps: Sequence[Step]) -> tuple[dict[int, QueueSlot], dict[str, int]]:
    """(step -> queue and position, queue -> number of steps)."""
    slots: dict[int, QueueSlot] = {}
    lengths: Counter[str] = Counter()
    for step in steps:
        slots[step.id] = QueueSlot(step.queue, lengths[step.queue])
        lengths[step.queue] += 1
    return slots, lengths


def memory_edges(
    steps: Sequence[Step],
    rows: Sequence[DraftRow],
    ends: Sequence[tuple[int, int]],
    window: Window,
    *,
    host_as_predicted: bool = False,
) -> dict[int, list[Ref]]:
    """Step -> steps it waits for, so that GPU and host keep budgets in every legal interleaving.

    ends: row -> its first and last step.
    window: predicted schedule.
    host_as_predicted: the host never holds more than in the window, within its budget: what slower disks have not
        written yet does not pile up.
    """
    slots, lengths = slots_of(steps)
    window_events = list(window.events)
    edges: dict[int, list[Ref]] = {}
    for take, free, room in (
        ("gpu_take", "gpu_free", window.gpu_free_bytes),
        ("host_take", "host_free", window.host_free_bytes),
    ):
        takes = [getattr(row.charge, take) for row in rows]
        frees = [getattr(row.charge, free) for row in rows]
        events = [
            ByteMove(ends[i][1], k, -frees[i]) if done else ByteMove(ends[i][0], k, takes[i])
            for i, k, done in window_events
            if (frees[i] if done else takes[i])
        ]
        if take == "host_take" and host_as_predicted:
            room = max(accumulate((event.take for event in events), initial=0))
        for step, refs in fifo_edges(events, room, slots, lengths).items():
            edges.setdefault(step, []).extend(refs)
    return edges


def without_implied(steps: Sequence[Step], memory: Mapping[int, Sequence[Ref]]) -> tuple[Step, ...]:
    """With data and memory edges, without those implied by a queue's order, or by an earlier step there that waits for
    the same step or one behind it. Over one iteration back becomes the previous iteration's first step of the queue,
    which runs later."""
    queue_of = {step.id: step.queue for step in steps}
    position_of, lengths, first = _positions(queue_of)
    # (queue, other queue) -> latest position waited for; positions of the previous iteration are negative
    waited: dict[tuple[Queue, Queue], int] = {}
    out: list[Step] = []
    for step in steps:
        refs = (*step.after, *memory[step.id]) if step.id in memory else step.after
        if not refs:
            out.append(step)
            continue
        mine, at = step.queue, position_of[step.id]
        best: dict[Queue, tuple[int, Ref]] = {}
        for ref in refs:
            queue = queue_of[ref.id]
            if ref.back > 1:
                ref = Ref(first[queue], 1)
            position = position_of[ref.id]
            if queue == mine and (ref.back or position < at):
                continue
            absolute = position - ref.back * lengths[queue]
            if absolute <= waited.get((mine, queue), -lengths[queue] - 1):
                continue
            if queue not in best or absolute > best[queue][0]:
                best[queue] = (absolute, ref)
        for queue, (absolute, _) in best.items():
            waited[mine, queue] = absolute
        out.append(_waiting_for(step, [ref for _, ref in best.values()]))
    return tuple(out)


def _waiting_for(step: Step, refs: list[Ref]) -> Step:
    if len(refs) > 1:
        refs.sort(key=lambda ref: (ref.back, ref.id))
    after = tuple(refs)
    return step if after == step.after else step.waiting_for(after)


def _positions(queue_of: Mapping[int, Queue]) -> tuple[dict[int, int], Counter[Queue], dict[Queue, int]]:
    lengths: Counter[Queue] = Counter()
    position_of: dict[int, int] = {}
    first: dict[Queue, int] = {}
    for number, queue in queue_of.items():
        position_of[number] = lengths[queue]
        lengths[queue] += 1
        first.setdefault(queue, number)
    return position_of, lengths, first
