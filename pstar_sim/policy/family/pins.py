"""How many chunks keep optimizer states on the GPU: a closed form for every number.

[Note: update windows] Chunk j is first used in moment f_j, and its gradient is final after moment b_j. All chunks i
with f_i <= f_j and b_i >= b_j that the CPU updates run their Adam between the end of b_j and the next start of f_j: T
>= compute(f_j .. b_j) + the sum of their Adam times + one copy each way, and the same with copies as the serial
resource. Behind a barrier the window opens at the iteration's end. Pinning the chunks used first is best, because the
r-th unpinned one then has the shortest span, so the number determines the chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pstar_sim.core.step import Kind
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.passes import gradient_rows

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class PinFacts:
    """Of chunks that could be pinned, in that order, and of the job.

    final: moment of the last gradient.
    pinned_bytes: working list and states.
    add_s, gpu_add_s: of all micro-batches.
    fold_s: the last gradient's add by CPU Adam.
    barrier: no Adam before the last moment.
    room_bytes: least for working lists, with nothing pinned.
    gaps: fetches per iteration of a chunk that never stays over a turn.
    """

    first: Sequence[int]
    final: Sequence[int]
    working_bytes: Sequence[int]
    pinned_bytes: Sequence[int]
    adam_s: Sequence[float]
    gpu_adam_s: Sequence[float]
    add_s: Sequence[float]
    fold_s: Sequence[float]
    gpu_add_s: Sequence[float]
    down_s: Sequence[float]
    up_s: Sequence[float]
    moments_s: Sequence[float]
    barrier: bool
    room_bytes: int
    gaps: int


def iteration_bounds(facts: PinFacts, most: int, *, surely: bool = False) -> Array:
    """Lower estimates, of shape (most + 1,).

    surely: no plan is below.
    """
    count = len(facts.first)
    if not count:
        return np.full(most + 1, float(np.sum(facts.moments_s)))
    clock = np.concatenate(([0.0], np.cumsum(facts.moments_s)))
    first, final = np.asarray(facts.first), np.asarray(facts.final)
    adam = np.add(facts.adam_s, facts.fold_s)
    down, up = np.asarray(facts.down_s), np.asarray(facts.up_s)
    total = float(clock[-1])
    barrier = facts.barrier
    span = total - clock[first] if barrier else np.maximum(0.0, clock[final + 1] - clock[first])
    border = 0.0 if barrier else down
    rows = [(adam, up + border), (up, adam + border)]  # (seconds in series, seconds of copies around them)
    if not barrier:
        rows.append((down, adam + up))
    work, around = (np.array(row) for row in zip(*rows))
    if surely:  # the first and the last copy may be other chunks'
        around *= 0
    windows = _windows(first, None if barrier else final, span, work, around)

    def suffix(row: Array) -> Array:
        return np.concatenate((np.cumsum(row[::-1])[::-1], [0.0]))

    pinned_adam = np.concatenate(([0.0], np.cumsum(np.add(facts.gpu_adam_s, facts.gpu_add_s))))
    bounds = np.maximum(windows, total + pinned_adam)
    np.maximum(bounds, suffix(adam + np.asarray(facts.add_s)), out=bounds)
    if surely:
        return np.asarray(np.maximum(bounds, suffix(up))[: most + 1], dtype=np.float64)
    # Copies up: each unpinned chunk once, and again over every gap that it leaves.
    working, pinned = np.asarray(facts.working_bytes, float), np.asarray(facts.pinned_bytes, float)
    rate = float(np.sum(up)) / max(1.0, float(working.sum()))
    moving = suffix(working)
    left = facts.room_bytes - np.concatenate(([0.0], np.cumsum(pinned)))
    refetched = np.maximum(0.0, moving - np.maximum(0.0, left)) * facts.gaps
    np.maximum(bounds, (moving + refetched) * rate, out=bounds)
    return np.asarray(bounds[: most + 1], dtype=np.float64)


def least_of_rivals(facts: PinFacts, most: int) -> tuple[float, float]:
    """Without pins, and with any, however gradients add up and go down."""
    none = [0.0] * len(facts.first)
    least = replace(facts, add_s=none, fold_s=none, gpu_add_s=none, down_s=list(map(min, facts.down_s, facts.up_s)))
    bounds = iteration_bounds(least, most, surely=True)
    return float(bounds[0]), float(bounds.min())


def _windows(
    first: NDArray[np.int64], final: NDArray[np.int64] | None, span: Array, work: Array, around: Array
) -> Array:
    """Entry p: the longest with the first p pinned, 0 if all are. No table of all pairs of chunks is made.

    work: per resource and chunk, serial in a window.
    around: per resource and chunk, around these.
    """
    count = len(first)
    inside = np.zeros_like(work)  # [resource, j]: work of the chunks of window j that are not pinned
    longest = np.zeros(count + 1)
    begin = np.searchsorted(first, first)  # first window that opens no earlier
    for p in range(count - 1, -1, -1):
        rest = slice(begin[p], None)
        mine = work[:, p : p + 1]
        inside[:, rest] += mine if final is None else np.where(final[rest] <= final[p], mine, 0.0)
        longest[p] = (span[p:] + inside[:, p:] + around[:, p:]).max()
    return longest


def most_pins(
    working_bytes: Sequence[int], pinned_bytes: Sequence[int], need: Sequence[Sequence[int]], room: Sequence[int]
) -> int:
    """How many, in order.

    need: moment -> indices of chunks.
    room: at each moment; a pinned chunk that it needs counts once.
    """
    working = np.asarray(working_bytes, dtype=np.int64)
    held = np.concatenate(([0], np.cumsum(np.asarray(pinned_bytes, dtype=np.int64))))
    count = len(working)
    most = count
    worst: dict[tuple[int, ...], int] = {}
    for chunks, left in zip(need, room):
        key = tuple(chunks)
        worst[key] = min(left, worst.get(key, left))
    for chunks, left in worst.items():
        beside = int(sum(working[c] for c in chunks))
        while most > 0:
            now = beside - int(sum(working[c] for c in chunks if c < most))
            if held[most] + now <= left:
                break
            most -= 1
    return most


def most_pins_of(job: Job) -> int:
    """How many chunks can be pinned, in the order of `Job.candidates`, with working list and states."""
    position = {c: n for n, c in enumerate(job.candidates)}
    need = [tuple(position[c] for c in block.chunks if c in position) for block in job.blocks]
    fixed = [sum(job.sizes[c] for c in block.chunks if c not in position) for block in job.blocks]
    return most_pins(
        [job.sizes[c] for c in job.candidates],
        [job.permanent[c] for c in job.candidates],
        need,
        [left - beside for left, beside in zip(_room(job), fixed)],
    )


def least_budget(job: Job, pins: int) -> int:
    """Of the GPU, with which `most_pins_of` is as many."""
    pinned = frozenset(job.candidates[:pins])
    held = sum(job.permanent[c] for c in pinned)
    needs = [
        held + sum(job.sizes[c] for c in block.chunks if c not in pinned) - left
        for block, left in zip(job.blocks, _room(job))
    ]
    return job.machine.gpu_budget_bytes + max(needs)


def _room(job: Job) -> list[int]:
    budget = job.machine.gpu_budget_bytes - job.small_bytes
    return [
        budget - block.tide_bytes - gradient_rows.room(job, n) - sum(job.remote[c] for c in block.chunks)
        for n, block in enumerate(job.blocks)
    ]


def pin_facts(job: Job) -> PinFacts:
    uses, cost, order = job.uses, job.cost, job.candidates
    down = "grad32" if job.sums_on_gpu else "param"
    return PinFacts(
        first=[uses.first_use(c) for c in order],
        final=[uses.last_gradient(c) for c in order],
        working_bytes=[job.sizes[c] for c in order],
        pinned_bytes=[job.permanent[c] for c in order],
        adam_s=[cost.cpu_adam_s(c) for c in order],
        gpu_adam_s=[cost.gpu_adam_s(c) for c in order],
        add_s=[cost.cpu_add_s(c) * job.host_adds[c] for c in order],
        fold_s=[job.folds[c] * cost.update_adds.of_update(Kind.CPU_UPDATE, c).seconds for c in order],
        gpu_add_s=[cost.gpu_adds.chunks_s[c] for c in order],
        down_s=[job.down[c, down][1] for c in order],
        up_s=[cost.transfer_s(job.sizes[c], "h2d") for c in order],
        moments_s=cost.moments_s,
        barrier=job.barrier is not None,
        room_bytes=min(_room(job)),
        gaps=job.workload.order.turns(job.workload.micro_batches),
    )
