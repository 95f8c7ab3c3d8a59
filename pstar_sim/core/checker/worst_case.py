"""The most bytes that a place can hold in any legal interleaving: a maximum closure over start events (which take) and
end events (which free), found exactly as a minimum cut."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pstar_sim.core.checker.unrolled import Unrolled, label
from pstar_sim.core.checker.walk import Walk
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Kind, Place, Queue


@dataclass(frozen=True, kw_only=True)
class Worst:
    bytes: int
    moment: int
    running: tuple[int, ...]

    def text(self, plan: Plan, what: str, budget: int) -> str:
        """what: for example "gpu of rank 1"."""
        by_id = {step.id: step for step in plan.steps}
        under_way = ", ".join(label(by_id[i]) for i in self.running[:8]) or "nothing"
        when = "between two iterations" if self.moment < 0 else f"in moment {self.moment}"
        return (
            f"{what} may hold {self.bytes} bytes, {self.bytes - budget} more than its budget of {budget}: "
            f"{when}, with {under_way} under way; a memory edge is missing or the budget is too small"
        )


def worst_case(plan: Plan, program: Unrolled, walk: Walk, place: Place) -> Worst:
    """The most bytes that the place can hold, and when."""
    held = _held_at_cut(plan, walk, place)
    takes, frees_of = _moves(plan, program, walk, place)
    frees = _frees(program, frees_of)
    # Each take forces the frees of a prefix of every queue to have happened: number of frees, per queue.
    ends = [[done for done, _ in row] for row in frees]
    groups: dict[tuple[int, ...], int] = {}
    members: dict[tuple[int, ...], list[int]] = {}
    for s, size in takes.items():
        if size:
            forced = tuple(map(bisect_left, ends, program.clock[s]))
            groups[forced] = groups.get(forced, 0) + size
            members.setdefault(forced, []).append(s)
    gain, chosen = closure(list(groups.items()), [[size for _, size in row] for row in frees])
    if not chosen:
        return Worst(bytes=held, moment=-1, running=())
    prefixes = list(groups)
    started = [s for g in chosen for s in members[prefixes[g]]]
    done = [max(program.clock[s][q] for s in started) for q in range(len(program.queues))]
    running = [s for s in started if program.sequence(s) >= done[program.queue_of[s % program.count]]]
    return Worst(
        bytes=held + gain,
        moment=_moment_at(plan, program, running, done),
        running=tuple(sorted({program.step(s).id for s in running})),
    )


def _held_at_cut(plan: Plan, walk: Walk, place: Place) -> int:
    held = sum(plan.layout.payload_bytes(c, name) for c, name, where in walk.initial if where is place)
    held += sum(size for _, where, size in plan.buffers if where is place)
    if place is Place.GPU:
        moments = plan.workload.moments  # the last moment's fall has happened, the first moment's rise has not
        held += min(moments[-1].peak_bytes, moments[0].peak_bytes)
    return held


def _moves(plan: Plan, program: Unrolled, walk: Walk, place: Place) -> tuple[dict[int, int], dict[int, int]]:
    tide = [m.peak_bytes for m in plan.workload.moments]
    takes: dict[int, int] = {}
    frees: dict[int, int] = {}
    for s in program.order[: program.iterations * program.count]:
        step = program.step(s)
        if step.kind is Kind.COMPUTE and place is Place.GPU:
            assert step.moment is not None
            peak, after = tide[step.moment], tide[(step.moment + 1) % len(tide)]
            takes[s], frees[s] = max(0, peak - tide[step.moment - 1]), max(0, peak - after)
        if s in walk.takes and walk.takes[s][0] is place:
            takes[s] = walk.takes[s][1]
        if s in walk.frees and walk.frees[s][0] is place:
            frees[s] = walk.frees[s][1]
    return takes, frees


def _frees(program: Unrolled, frees_of: Mapping[int, int]) -> list[list[tuple[int, int]]]:
    frees: list[list[tuple[int, int]]] = [[] for _ in program.queues]
    for s, size in frees_of.items():
        if size:
            frees[program.queue_of[s % program.count]].append((program.sequence(s), size))
    for row in frees:
        row.sort()
    return frees


def _moment_at(plan: Plan, program: Unrolled, running: list[int], done: list[int]) -> int:
    """Under way, or the last before, when these run and so many steps have ended per queue; -1 if none."""
    clock = [i for i in range(program.count) if program.queues[program.queue_of[i]] is Queue.COMPUTE]
    compute = program.queue_of[clock[0]]
    ahead = [program.sequence(s) for s in running if program.queue_of[s % program.count] == compute]
    at = max(ahead) if ahead else done[compute] - 1
    for back in range(at, -1, -1):
        step = plan.steps[clock[back % len(clock)]]
        if step.kind is Kind.COMPUTE and step.moment is not None:
            return step.moment
    return -1


def closure(takes: list[tuple[tuple[int, ...], int]], frees: list[list[int]]) -> tuple[int, list[int]]:
    """The most (bytes of chosen takes) - (bytes of the frees that they force), and the takes to choose.

    takes: (forced frees in each queue's list, bytes).
    frees: per queue, in order.

    Minimum cut: source -> take -> last forced free of each queue -> the free before it ..., each free -> sink.
    """
    if not takes:
        return 0, []
    first = len(takes) + 1  # node of the first free, after the source and the takes
    sink_bytes, tails, heads = _forced_frees([forced for forced, _ in takes], frees, first)
    source, sink = 0, first + len(sink_bytes)
    capacities = [size for _, size in takes] + sink_bytes
    total = sum(size for _, size in takes)
    finite_tails = [source] * len(takes) + list(range(first, sink))
    finite_heads = list(range(1, first)) + [sink] * len(sink_bytes)
    flow, reached = _min_cut(
        np.array(finite_tails + tails, dtype=np.int64),
        np.array(finite_heads + heads, dtype=np.int64),
        np.array(capacities + [total + 1] * len(tails), dtype=np.int64),
        len(capacities),
        source,
        sink,
    )
    chosen = [g for g in range(len(takes)) if reached[g + 1]]
    forced_most = [max((takes[g][0][q] for g in chosen), default=0) for q in range(len(frees))]
    gain = sum(takes[g][1] for g in chosen) - sum(sum(sizes[:n]) for sizes, n in zip(frees, forced_most))
    assert gain == total - flow, "the cut does not equal the flow"
    return gain, chosen


def _forced_frees(
    takes: list[tuple[int, ...]], frees: list[list[int]], first: int
) -> tuple[list[int], list[int], list[int]]:
    """(bytes of each node, tails, heads), nodes counted from `first`. Frees that every take forces together, or not at
    all, are one."""
    sink_bytes: list[int] = []
    tails: list[int] = []
    heads: list[int] = []
    for q, sizes in enumerate(frees):
        node_at: dict[int, int] = {}
        begin = 0
        for stop in sorted({forced[q] for forced in takes} - {0}):
            node = first + len(sink_bytes)
            if begin:
                tails.append(node)
                heads.append(node_at[begin])
            sink_bytes.append(sum(sizes[begin:stop]))
            node_at[stop] = node
            begin = stop
        for g, forced in enumerate(takes):
            if forced[q]:
                tails.append(g + 1)
                heads.append(node_at[forced[q]])
    return sink_bytes, tails, heads


def _min_cut(
    tails: NDArray[np.int64],
    heads: NDArray[np.int64],
    capacities: NDArray[np.int64],
    finite: int,
    source: int,
    sink: int,
) -> tuple[int, NDArray[np.bool_]]:
    """(maximum flow, source's side of a minimum cut), exact for 64-bit capacities.

    scipy's solver counts in 32 bits: the first flow is in units of a power of two, rounded down; what an edge then
    lacks is found in smaller units, until the unit is a byte.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    nodes = sink + 1
    # Indices have 32 bits too: before 1.15 scipy's solver takes no others.
    at, to = (np.concatenate(ends).astype(np.int32) for ends in ((tails, heads), (heads, tails)))

    def solve(size: NDArray[np.int64]) -> tuple[int, NDArray[np.int64]]:
        graph: Any = csr_array((size.astype(np.int32), (at, to)), shape=(nodes, nodes))
        result = maximum_flow(graph, source, sink)
        sent = csr_array(result.flow)[tails, heads]  # net: negative if the flow goes back
        return int(result.flow_value), np.asarray(sent).ravel().astype(np.int64)

    value, most = 0, int(capacities[:finite].sum())
    left, back = capacities, np.zeros_like(capacities)
    while most:
        bits = max(0, most.bit_length() - 30)
        more, sent = solve(np.concatenate((np.minimum(left, most), np.minimum(back, most))) >> bits)
        value += more << bits
        left, back = left - (sent << bits), back + (sent << bits)
        most = len(at) << bits if bits else 0
    at, to = np.concatenate((tails[left > 0], heads[back > 0])), np.concatenate((heads[left > 0], tails[back > 0]))
    residual = csr_array((np.ones(len(at), dtype=np.int8), (at, to)), shape=(nodes, nodes))
    reached = np.zeros(nodes, dtype=np.bool_)
    reached[breadth_first_order(residual, source, directed=True, return_predecessors=False)] = True
    return value, reached
