"""The exact optimum of tiny instances, by search of every state; written without looking at the bounds' code.

A chain of layers, one chunk each; fp32, one optimizer state, so that every list fills one slot of the gpu. All
durations are whole units, so some best schedule starts everything at whole units (any schedule may be shifted to the
left until each start waits for an end). One micro-batch. What it ranges over, at every unit and for every queue: start
any step that may start, or none.

- per chunk, for the whole schedule: Adam on the CPU or on the gpu. States of the latter may stay on the gpu, visit it,
  or anything between; so may its parameters, and its gradient before the update.
- gpu slots: lists there, lists on their way up (from the start of the copy) or down (until its end), the tide of the
  moment that runs (between two moments the lower tide of both, as in the project's model).
- a list whose content the host has too may be given up at any time for nothing; it is, when its slot is needed.
- the compute queue does an iteration's updates before the first moment of the next ([Note: the cut] of plan.py); the
  CPU may be later. barrier: no Adam before the last moment of the iteration has ended.

It leaves out only what cannot help: gradients in a list of their own, copies of what is there already.
The iteration takes the least mean length of a cycle of this graph, found by policy iteration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, product

# where a list of a chunk is: on the gpu only, on both (equal), on the host only
GPU, BOTH, HOST = 0, 1, 2
IDLE, MOMENT = -1, -2


@dataclass(frozen=True)
class Tiny:
    """Units of a forward moment (backward: twice that), of copies up and down and of both Adams. tide: slots, for each
    of 2 * layers moments."""

    layers: int
    slots: int
    forward: int
    up: int
    down: int
    cpu_adam: int
    gpu_adam: int
    tide: tuple[int, ...]
    barrier: bool


# A chunk: (has gradient, where its working list is, where its state is); on the CPU the state is always HOST.
_Chunk = tuple[bool, int, int]
# (moment next or running, what compute does, units left, chunks, copy up, copy down, CPU Adam); a copy: (chunk, list,
# units left), an Adam: (chunk, units left), None for nothing
_Work = tuple[int, ...] | None
_State = tuple[int, int, int, tuple[_Chunk, ...], _Work, _Work, _Work]


def exact_optimum(tiny: Tiny, *, modes: Sequence[tuple[bool, ...]] | None = None) -> Fraction | None:
    """Units an iteration takes at best; None if no choice of modes fits. modes: which chunks are updated on the gpu."""
    found = [_Graph(tiny, on_gpu).best() for on_gpu in modes or product((False, True), repeat=tiny.layers)]
    return min((f for f in found if f is not None), default=None)


class _Graph:
    def __init__(self, tiny: Tiny, on_gpu: tuple[bool, ...]) -> None:
        self.t, self.on_gpu = tiny, on_gpu
        n = tiny.layers
        self.moments = [*range(n), *reversed(range(n))]
        self.length = [tiny.forward] * n + [2 * tiny.forward] * n

    def best(self) -> Fraction | None:
        chunks = tuple((False, HOST, HOST) for _ in self.on_gpu)
        start: _State = (0, IDLE, 0, chunks, None, None, None)
        number = {start: 0}
        todo = [start]
        edges: list[list[tuple[int, int]]] = []
        at = 0
        while at < len(todo):
            row: set[tuple[int, int]] = set()
            for after, done in self.next(todo[at]):
                if after not in number:
                    number[after] = len(todo)
                    todo.append(after)
                row.add((number[after], done))
            edges.append(sorted(row))
            at += 1
        rate = _most_per_step(edges)
        return None if rate == 0 else 1 / rate

    def next(self, state: _State) -> Iterator[tuple[_State, int]]:
        """Every state one unit later, and whether an iteration has ended in between."""
        pc, comp, left, chunks, up, down, adam = state
        t, n = self.t, self.t.layers
        works: list[tuple[int, int]] = [(comp, left)]
        if comp == IDLE:
            works = [(IDLE, 0)]
            c = self.moments[pc]
            grad, param, _ = chunks[c]
            overwritten = pc >= n and _copies(down, c, 0)
            late = pc == 0 and any(on and g for on, (g, _, _) in zip(self.on_gpu, chunks))
            if not grad and param != HOST and not overwritten and not late:
                works.append((MOMENT, self.length[pc]))
            for i, (g, p, s) in enumerate(chunks):
                busy = any(_copies(copy, i) for copy in (up, down))
                if self.on_gpu[i] and g and p != HOST and s != HOST and not busy and (not t.barrier or pc == 0):
                    works.append((i, t.gpu_adam))
        ups: list[_Work] = [up]
        if up is None:
            ups = [None]
            for i, (g, p, s) in enumerate(chunks):
                if p == HOST and not _copies(adam, i) and (not g or self.on_gpu[i]):
                    ups.append((i, 0, t.up))
                if self.on_gpu[i] and s == HOST:
                    ups.append((i, 1, t.up))
        downs: list[_Work] = [down]
        if down is None:
            can: list[_Work] = []
            for i, (g, p, s) in enumerate(chunks):
                if comp == i or (comp == MOMENT and self.moments[pc] == i and pc >= n):
                    continue
                if p == GPU and (g or self.on_gpu[i]):
                    can.append((i, 0, t.down))
                if self.on_gpu[i] and s == GPU:
                    can.append((i, 1, t.down))
            # nothing is lost by a copy of one unit that nobody else wants to read or change meanwhile
            downs = can if can and t.down == 1 and not any(self.on_gpu) else [None, *can]
        adams: list[_Work] = [adam]
        if adam is None:
            can = [
                (i, t.cpu_adam)
                for i, (g, p, _) in enumerate(chunks)
                if not self.on_gpu[i] and g and p != GPU and (not t.barrier or pc < n)
            ]
            adams = can if can and t.cpu_adam == 1 else [None, *can]
        for (now, units), a, b, c in product(works, ups, downs, adams):
            if now >= 0 and (_copies(a, now) or _copies(b, now)):
                continue  # its lists may not be copied while Adam changes them
            if now == MOMENT and pc >= n and _copies(b, self.moments[pc], 0):
                continue  # nor one that the gradient overwrites
            for kept in self._evict(pc, now, chunks, a, b):
                yield self._advance((pc, now, units, kept, a, b, c))

    def _evict(
        self, pc: int, now: int, chunks: tuple[_Chunk, ...], up: _Work, down: _Work
    ) -> Iterator[tuple[_Chunk, ...]]:
        """Chunks with just so many copies given up that all fits."""
        t = self.t
        wait = 0 if pc == 0 else min(t.tide[pc - 1], t.tide[pc])
        used = t.tide[pc] if now == MOMENT else wait
        free: list[tuple[int, int]] = []
        for i, (_, p, s) in enumerate(chunks):
            for which, where in ((0, p), (1, s)):
                if where == HOST:
                    used += _copies(up, i, which)
                    continue
                used += 1
                needed = now == i or (which == 0 and now == MOMENT and self.moments[pc] == i)
                copied = _copies(down, i, which)
                if where == BOTH and not needed and not copied:
                    free.append((i, which))
        over = used - t.slots
        if over <= 0:
            yield chunks
            return
        for gone in combinations(free, over):
            rows = [list(c) for c in chunks]
            for i, which in gone:
                rows[i][1 + which] = HOST
            yield tuple((bool(g), p, s) for g, p, s in rows)

    def _advance(self, state: _State) -> tuple[_State, int]:
        pc, comp, left, chunks, up, down, adam = state
        rows = [list(c) for c in chunks]
        done = 0
        if comp != IDLE:
            left -= 1
            if left == 0:
                if comp == MOMENT:
                    if pc >= self.t.layers:
                        rows[self.moments[pc]][:2] = [True, GPU]
                    pc += 1
                    if pc == len(self.moments):
                        pc, done = 0, 1
                else:
                    rows[comp] = [False, GPU, GPU]
                comp = IDLE
        if up is not None:
            i, which, units = up
            up = (i, which, units - 1) if units > 1 else None
            if up is None:
                rows[i][1 + which] = BOTH
        if down is not None:
            i, which, units = down
            down = (i, which, units - 1) if units > 1 else None
            if down is None:
                rows[i][1 + which] = BOTH
                if which == 0 and not self.on_gpu[i]:
                    rows[i][1] = HOST  # nobody reads the gradient on the gpu again
        if adam is not None:
            i, units = adam
            adam = (i, units - 1) if units > 1 else None
            if adam is None:
                rows[i] = [False, HOST, HOST]
        kept = tuple((bool(g), p, s) for g, p, s in rows)
        return (pc, comp, left, kept, up, down, adam), done


def _copies(step: tuple[int, ...] | None, chunk: int, which: int | None = None) -> bool:
    """Whether a copy or CPU Adam under way is of this chunk (and list)."""
    return step is not None and step[0] == chunk and (which is None or step[1] == which)


def _most_per_step(edges: list[list[tuple[int, int]]]) -> Fraction:
    """Largest mean of the second figure over a cycle that node 0 reaches, by policy iteration. Means of two cycles of
    these sizes differ by far more than rounding, and the answer is counted on the cycle itself. Nodes without a way on
    stand still."""
    ways = [row or [(i, 0)] for i, row in enumerate(edges)]
    choice = [max(row, key=lambda e: e[1]) for row in ways]
    while True:
        gain, value = _evaluate(choice)
        changed = False
        for i, row in enumerate(ways):
            best = choice[i]
            for edge in row:
                if gain[edge[0]] > gain[best[0]] + SAME:
                    best, changed = edge, True
            choice[i] = best
        if changed:
            continue
        for i, row in enumerate(ways):
            own = gain[i]
            best, best_value = choice[i], choice[i][1] + value[choice[i][0]]
            for edge in row:
                at = edge[1] + value[edge[0]]
                if at > best_value + SAME and abs(gain[edge[0]] - own) < SAME:
                    best, best_value, changed = edge, at, True
            choice[i] = best
        if not changed:
            return _mean_from(choice, 0)


SAME = 1e-7


def _evaluate(choice: list[tuple[int, int]]) -> tuple[list[float], list[float]]:
    """For each node that follows its choice: the mean of the cycle it ends in, and its advantage on the way there."""
    count = len(choice)
    gain, value, seen = [0.0] * count, [0.0] * count, [-1] * count
    for first in range(count):
        path, node = [], first
        while seen[node] == -1:
            seen[node] = first
            path.append(node)
            node = choice[node][0]
        if seen[node] == first:  # a new cycle
            cycle = path[path.index(node) :]
            mean = sum(choice[i][1] for i in cycle) / len(cycle)
            gain[node], value[node] = mean, 0.0
            for i in reversed(cycle[1:]):
                gain[i], value[i] = mean, choice[i][1] - mean + value[choice[i][0]]
            path = path[: path.index(node)]
        for i in reversed(path):
            after, reward = choice[i]
            gain[i], value[i] = gain[after], reward - gain[after] + value[after]
    return gain, value


def _mean_from(choice: list[tuple[int, int]], node: int) -> Fraction:
    path: dict[int, int] = {}
    while node not in path:
        path[node] = len(path)
        node = choice[node][0]
    cycle = [i for i, at in path.items() if at >= path[node]]
    return Fraction(sum(choice[i][1] for i in cycle), len(cycle))
