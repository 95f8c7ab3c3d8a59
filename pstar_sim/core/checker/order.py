"""There is an order in which every step can run."""

from __future__ import annotations

import heapq

from pstar_sim.core.checker.unrolled import label
from pstar_sim.core.step import Queue, Step
from pstar_sim.errors import PlanError


def legal_order(steps: tuple[Step, ...], position: dict[int, int]) -> list[int]:
    """Positions in an order that satisfies each queue and every edge inside the iteration. Raises PlanError naming
    steps of a circle.
    """
    count = len(steps)
    follows: list[list[int]] = [[] for _ in range(count)]
    open_edges = [0] * count
    last: dict[Queue, int] = {}
    for i, step in enumerate(steps):
        before = [position[ref.id] for ref in step.after if ref.back == 0]
        if step.queue in last:
            before.append(last[step.queue])
        last[step.queue] = i
        for j in before:
            follows[j].append(i)
            open_edges[i] += 1
    heap = [i for i in range(count) if open_edges[i] == 0]
    order: list[int] = []
    while heap:
        i = heapq.heappop(heap)
        order.append(i)
        for j in follows[i]:
            open_edges[j] -= 1
            if open_edges[j] == 0:
                heapq.heappush(heap, j)
    if len(order) < count:
        stuck = [label(steps[i]) for i in range(count) if open_edges[i]]
        raise PlanError(
            f"a deadlock: {len(stuck)} steps wait for each other in a circle, among them {', '.join(stuck[:6])}"
        )
    return order
