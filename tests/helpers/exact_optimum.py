"""The exact optimum of tiny instances, by search of every state; written without looking at the bounds' code.

A chain of layers, one chunk each; one optimizer state of 4 bytes per parameter. The working list and a gradient fill
one slot of the GPU, the state and a sum of gradients `wide` slots (1: fp32, 2: two-byte dtypes). All durations are
whole units. Copies and Adam do not slow one another down, and the host has room for everything, or for all but a number
of lists of states (`Tiny.host`). Then the others are on disks, which read or write one list at a time, or, with
`Tiny.beside`, read one while they write another. A state's lists (`Tiny.lists`) are read before an update on the CPU
and written after it, each by itself, in any order and as often as room wants it; which lists stay is not chosen
beforehand. Updates on the GPU are not searched with disks.

Where a read and a write slow one another down, they end at the next whole unit, and neither waits for a time at which
nothing ends: there the least of these schedules is searched, and the optimum may be lower.

Space of schedules: every order of steps that core/step.py describes and the checker accepts, of any period. For each
chunk and the whole schedule two things are chosen, a `Way`: Adam on the CPU or on the GPU; and whether the gradients of
all micro-batches add up in one list on the GPU (`summed`), or the last one overwrites the working list and the others
have a list of their own. Everything else is chosen step by step, whenever a queue is free:

- Where lists are. States of a chunk that is updated on the GPU may stay on the GPU, visit it, or anything between. So
  may working lists. A sum on the GPU may go down and come up again between two gradients or before the update. A
  gradient in a list of its own may wait on the GPU for the update, go down and be added there, go down and wait there
  for the update or for the way up.
- Adds: on the host one step each. The last gradient that came down needs no step, unless it is in the way of the next
  one or gradients are clipped (the checker's norm). An update on the CPU is longer by an add for each list of gradients
  that it finds, but for one. (An update on the GPU would be, too, which is left out.) A sum made on the host comes up
  for an update on the GPU. On the GPU an add makes the backward moment longer.
- What a queue does next, or that it waits although it could start a step.
- Slots hold lists, lists on their way up from the start of the copy, lists on their way down until its end, and the
  tide of the moment that runs (between two moments the lower tide of both). A list whose content the host has too may
  be given up at any time for nothing. So may a working list whose gradients are in a sum on the GPU, until the update.
- The compute queue does an iteration's updates before the first moment of the next one ([Note: the cut] of plan.py).
  Behind a barrier no Adam starts before the last moment has ended, and with clipping none before the last add and the
  last copy down of a sum.

What is searched and the checker refuses, so that the optimum may be lower than that of legal plans: with clipping, an
update on the GPU after a sum on the host, or a gradient there, that lacks a gradient on the GPU.

What is not searched, and why nothing is lost:

- A step starts when another step ends, not in between: with the order of all steps fixed, starting each of them as
  early as possible makes nothing later.
- A list is given up only when its slot is needed: until then it can do no harm.
- Copies of what is there already, a sum that is updated on the CPU and comes up again after its last gradient, a
  gradient list for the last micro-batch (it is a slot more than overwriting the working list, which nothing reads any
  more).
- Updates in parts. All chunks of an instance have one size, and only chunks much larger than the others are updated in
  parts.
- Ways whose least work on one queue, or whose least way around the border of one chunk, takes no less than the best
  period found so far (branch and bound over ways, the most promising first).

The iteration takes the least mean length of a cycle of the graph of states. Policy iteration finds it; the answer is
counted on the cycle itself. States are columns of an array, so that numpy makes one kind of step in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Tiny", "Way", "exact_optimum"]

_States = NDArray[np.int64]
_Mask = NDArray[np.bool_]


class Way(NamedTuple):
    """The place of a chunk's update, and the place where its gradients add up.

    on_gpu: whether Adam runs on the GPU.
    summed: whether the chunk's gradients add up in one list on the GPU.
    """

    on_gpu: bool
    summed: bool = False


@dataclass(frozen=True)
class Tiny:
    """An instance.

    forward: units of a forward moment (backward: twice that).
    times: factors of these units, of each layer; None: 1. Routed experts compute less per byte than attention.
    up, down: units of a copy of one slot.
    cpu_adam, gpu_adam, cpu_add: units of a step for one chunk.
    gpu_add: units by which an add makes a moment longer.
    tide: slots, for each of the 2 * layers moments of a micro-batch or, where `order` is given, for each moment.
    wide: slots of a state and of a sum.
    order: (layer, backward, micro-batch) of each moment; None: depth-first.
    host: lists of states for which the host has room; None: all, and no disks.
    lists: of a state, of equal size.
    read, write: units that the disks take for a list.
    beside: speeds of a read alone or a write alone, and of a read and a write together; None: they take turns.
    """

    layers: int
    slots: int
    forward: int
    up: int
    down: int
    cpu_adam: int
    gpu_adam: int
    tide: tuple[int, ...]
    barrier: bool
    micro_batches: int = 1
    clip: bool = False
    wide: int = 1
    cpu_add: int = 1
    gpu_add: int = 0
    order: tuple[tuple[int, bool, int], ...] | None = None
    host: int | None = None
    lists: int = 1
    read: int = 1
    write: int = 1
    beside: tuple[int, int, int] | None = None
    times: tuple[int, ...] | None = None

    @property
    def forwards(self) -> tuple[int, ...]:
        """Units of each layer's forward moment."""
        return tuple(self.forward * factor for factor in self.times or (1,) * self.layers)

    @property
    def moments(self) -> tuple[tuple[int, bool, int], ...]:
        if self.order is not None:
            return self.order
        forward = [(i, False) for i in range(self.layers)]
        backward = [(i, True) for i in reversed(range(self.layers))]
        return tuple((i, back, u) for u in range(self.micro_batches) for i, back in forward + backward)

    @property
    def levels(self) -> tuple[int, ...]:
        """Slots of the tide in each moment."""
        return self.tide * (len(self.moments) // len(self.tide))

    @property
    def ways(self) -> tuple[Way, ...]:
        each = (False, True) if self.micro_batches > 1 else (False,)
        places = (False, True) if self.host is None else (False,)
        return tuple(Way(on_gpu, summed) for on_gpu in places for summed in each)


def exact_optimum(
    tiny: Tiny,
    *,
    ways: Sequence[tuple[Way, ...]] | None = None,
    streams: bool = True,
    most_states: int | None = None,
) -> Fraction | None:
    """Returns the least units of an iteration; None if nothing fits. Raises MemoryError for a graph with more than
    `most_states` states.

    ways: ways of all chunks to choose from; None: all ways.
    streams: False for schedules in which states that are on the GPU once never leave it.
    most_states: most states of a graph.
    """
    chosen = sorted(
        (_least(tiny, each), _states(each), each) for each in ways or product(tiny.ways, repeat=tiny.layers)
    )
    best: Fraction | None = None
    for least, _, each in chosen:
        if best is not None and least >= best:
            break
        found = _Graph(tiny, each, streams=streams, most_states=most_states).best()
        if found is not None and (best is None or found < best):
            best = found
    return best


def _states(ways: Sequence[Way]) -> int:
    """Returns a number that grows with the number of states of these ways."""
    return sum(way.on_gpu * (2 - way.summed) for way in ways)


def _least(t: Tiny, ways: Sequence[Way]) -> int:
    """Returns the least units of these ways: the work of each queue, and each chunk's way around the border."""
    length = [t.forwards[layer] * (1 + back) for layer, back, _ in t.moments]
    compute, cpu, around = sum(length), 0, 0
    up = down = t.wide * _away(t, ways)  # slots
    for i, way in enumerate(ways):
        compute += way.on_gpu * t.gpu_adam + way.summed * (t.micro_batches - 1) * t.gpu_add
        adds = 0 if way.summed else max(0, t.micro_batches - 2)
        if way.on_gpu:
            down += adds
            up += t.wide * (adds > 0)
            cpu += adds * t.cpu_add
            continue
        folds = int(t.micro_batches > 1 and not t.clip and not way.summed)  # adds inside the update, at least
        if t.micro_batches > 1 and not way.summed:
            adds = t.micro_batches if t.clip or t.micro_batches > 2 else 1
        last_down = t.wide if way.summed else 1
        cpu += t.cpu_adam + adds * t.cpu_add
        up += 1
        down += last_down if way.summed else t.micro_batches
        uses = [m for m, (layer, _, _) in enumerate(t.moments) if layer == i]
        around = max(
            around, sum(length[uses[0] : uses[-1] + 1]) + last_down * t.down + t.cpu_adam + folds * t.cpu_add + t.up
        )
    return max(compute, cpu, up * t.up, down * t.down, around)


def _away(t: Tiny, ways: Sequence[Way]) -> int:
    """Returns the number of states, and of sums between two backward passes, for which one moment has no room beside
    the list that it reads. Each of them goes down and comes up at least once per iteration."""
    most = 0
    states, sums = sum(way.on_gpu for way in ways), sum(way.summed for way in ways)
    for m, level in enumerate(t.levels):
        back = [layer for layer, backward, _ in t.moments[:m] if backward]
        between = len(set(back)) == t.layers and not t.moments[m][1]  # every sum has begun, and none is over
        most = max(most, states + sums * between - (t.slots - level - 1) // t.wide)
    return most


# Rows of a state: where it comes from, the moment next or running; what each queue does and units left of it.
_FROM, _MOMENT, _COMPUTE, _COMPUTE_LEFT, _UP, _UP_LEFT, _DOWN, _DOWN_LEFT, _CPU, _CPU_LEFT = range(10)
_QUEUES = ((_COMPUTE, _COMPUTE_LEFT), (_UP, _UP_LEFT), (_DOWN, _DOWN_LEFT), (_CPU, _CPU_LEFT))
# What the compute queue does: nothing, its moment, or Adam of chunk i (_ADAM + i).
_IDLE, _RUNS, _ADAM = 0, 1, 2

# Rows of a chunk. P: its working list. PENDING: whether all gradients have come and Adam is due. W: the gradient in a
# list of its own. S: the sum. X: its state (Adam on the GPU), or whether the last gradient is added (on the CPU).
_P, _PENDING, _W, _S, _X = range(5)
_LISTS = (_P, _W, _S, _X)
# A state with disks: on the disks only, on both (equal), on the host only
_ON_DISKS, _CLEAN, _DIRTY = 0, 1, 2
# P and X: on the host only, on both (equal), on the GPU only
_HOST, _BOTH, _GPU = 0, 1, 2
# W: none to add; on the GPU only; on both; on the host only; a new one on the GPU only and an older one on the host
_NO_W, _W_GPU, _W_BOTH, _W_HOST, _W_TWO = range(5)
_W_IS_THERE = np.array([False, True, True, False, True])
# S, summed on the GPU: none; on the GPU only; on both; on the host only
_NO_S, _S_GPU, _S_BOTH, _S_HOST = range(4)
# S, summed on the host for Adam on the GPU: nothing added; on the host only; on both
_NO_SUM, _SUM_HOST, _SUM_BOTH = range(3)
# What the CPU queue does to chunk i: (1 + 3 * i) + one of these
_UPDATE, _ADD_W, _ADD_P = range(3)


class _Graph:
    def __init__(
        self, tiny: Tiny, ways: Sequence[Way], *, streams: bool = True, most_states: int | None = None
    ) -> None:
        self.t, self.ways, self.streams, self.most_states = tiny, ways, streams, most_states
        t, moments = tiny, tiny.moments
        self.count = len(moments)
        self.layer = np.array([layer for layer, _, _ in moments])
        self.backward = np.array([back for _, back, _ in moments])
        self.batch = np.array([u for _, _, u in moments])
        self.last = self.backward & (self.batch == t.micro_batches - 1)
        sums = np.array([ways[layer].summed for layer, _, _ in moments])
        adds = sums & self.backward & (self.batch > 0)
        self.length = np.array(t.forwards)[self.layer] * (1 + self.backward) + t.gpu_add * adds
        tide = np.array(t.levels)
        self.tide = tide
        self.waiting = np.minimum(tide, np.concatenate(([0], tide[:-1])))  # the step's tide is 0
        # slots that a moment takes beside what is there: a gradient list, or a new sum
        self.opens = np.where(sums, t.wide * (self.batch == 0), ~self.last) * self.backward
        self.first_final = int(np.flatnonzero(self.last)[0])
        before_last = self.backward & (self.batch == t.micro_batches - 2)
        # of each chunk: the moment of the last gradient that has a list of its own
        self.own_last = [max(np.flatnonzero(before_last & (self.layer == i)), default=-1) for i in range(t.layers)]
        # the list that is read, + 1, what is left of it, the same of writes, and where each list of a state is
        self.reads = 10 + 5 * t.layers
        self.writes = self.reads + 2
        self.queues = (*_QUEUES, (self.reads, self.reads + 1), (self.writes, self.writes + 1))
        self.states = t.layers * t.lists
        self.rows = self.reads + 4 + self.states
        self.alone, *self.together = t.beside or (1, 1, 1)
        most = max(int(self.length.max()), t.gpu_adam, t.cpu_adam + 2 * t.cpu_add, t.wide * t.up, t.wide * t.down) + 1
        queues = [self.count, 2 + t.layers, most, *([1 + 5 * t.layers, most] * 2), 1 + 3 * t.layers, most]
        alone = t.micro_batches == 1 and not any(way.on_gpu for way in ways)  # without W, S, X
        on_disks = (4 + self.states) * [1]
        if t.host is not None:
            work = (self.alone * t.read + 1, self.alone * t.write + 1)
            on_disks = [1 + self.states, work[0], 1 + self.states, work[1]] + self.states * [3]
        radix = [*queues, *([3, 2, *([1, 1, 1] if alone else [5, 4, 3])] * t.layers), *on_disks]
        self.place = np.cumprod([1, *radix[:-1]], dtype=np.float64)
        if self.place[-1] * radix[-1] >= 2**62:
            raise ValueError("a state of this instance does not fit into one number")
        self.place = self.place.astype(np.int64)

    def row(self, chunk: int, which: int) -> int:
        return 10 + 5 * chunk + which

    def slots(self, which: int) -> int:
        return self.t.wide if which in (_S, _X) else 1

    def keys(self, x: _States) -> _States:
        found: _States = self.place @ x[1:]
        return found

    # -- the graph --

    def best(self) -> Fraction | None:
        """Returns the least mean length of a cycle; None where there is none."""
        source, target, units, done = self._edges()
        return _shortest_cycle(source, target, units, done)

    def _edges(self) -> tuple[_States, _States, _States, _States]:
        """Returns all edges between states in which a step has ended, breadth first: (from, to, units, iterations
        ended)."""
        x = np.zeros((self.rows, 1), dtype=np.int64)
        known, number = self.keys(x), np.zeros(1, dtype=np.int64)
        parts: list[tuple[_States, ...]] = []
        while x.shape[1]:
            after, units, done = self._after(x)
            key = self.keys(after)
            fresh, first, position = np.unique(key, return_index=True, return_inverse=True)
            at = np.minimum(np.searchsorted(known, fresh), len(known) - 1)
            seen = known[at] == fresh
            count = len(known) + np.cumsum(~seen) - 1
            numbers = np.where(seen, number[at], count)
            parts.append((after[_FROM], numbers[position], units, done))
            x = after[:, first[~seen]]
            x[_FROM] = numbers[~seen]
            where = np.searchsorted(known, fresh[~seen])
            known, number = np.insert(known, where, fresh[~seen]), np.insert(number, where, numbers[~seen])
            if self.most_states is not None and len(known) > self.most_states:
                raise MemoryError(f"more than {self.most_states} states")
        source, target, units, done = (np.concatenate(column) for column in zip(*parts))
        return source, target, units, done

    def _after(self, x: _States) -> tuple[_States, _States, _States]:
        """Returns all states in which the next step has ended, the units until then, and whether an iteration has
        ended."""
        for stage in (self._compute, self._up, self._down, self._cpu, self._disks):
            x = stage(x)
        together = (x[self.reads] > 0) & (x[self.writes] > 0)
        speeds = [np.ones_like(x[0]) for _ in _QUEUES] + [np.where(together, k, self.alone) for k in self.together]
        lefts = [
            np.where(x[what] > 0, -(-x[units] // speed), 2**30) for (what, units), speed in zip(self.queues, speeds)
        ]
        left = np.stack(lefts).min(axis=0)
        for (what, units), speed in zip(self.queues, speeds):
            x[units] = np.maximum(0, x[units] - np.where(x[what] > 0, speed * left, 0))
        x, left = x[:, left < 2**30], left[left < 2**30]
        done = self._end(x)
        self._order_lists(x)
        different = _different(done, left, self.keys(x), x[_FROM])
        return x[:, different], left[different], done[different]

    # -- what may start --

    def _compute(self, x: _States) -> _States:
        t, made = self.t, [x]
        for i, way in enumerate(self.ways):
            ready = (x[_COMPUTE] == _IDLE) & self._may_run(x, i, way)
            made.append(_with(x[:, ready], _COMPUTE, _RUNS, _COMPUTE_LEFT, self.length[x[_MOMENT, ready]]))
            if way.on_gpu:
                ready = (x[_COMPUTE] == _IDLE) & self._may_update_on_gpu(x, i, way)
                made.append(_with(x[:, ready], _COMPUTE, _ADAM + i, _COMPUTE_LEFT, t.gpu_adam))
        return self._fitting(np.concatenate(made, axis=1))

    def _may_run(self, x: _States, i: int, way: Way) -> _Mask:
        """Returns a mask of the states in which the next moment is one of this layer and may start."""
        m = x[_MOMENT]
        p, pending, w, s, _ = x[self.row(i, 0) : self.row(i + 1, 0)]
        ready = (self.layer[m] == i) & (p != _HOST) & (pending == 0)
        for j, other in enumerate(self.ways):
            if other.on_gpu:  # updates of an iteration come before the next one
                ready &= (m != 0) | (x[self.row(j, _PENDING)] == 0)
        back, last = self.backward[m], self.last[m]
        if way.summed:
            there = _on_gpu(s) & ~self._copied(x, i, _S)
            return ready & (~back | np.where(self.batch[m] == 0, s == _NO_S, there))
        free = (w == _NO_W) | (w == _W_HOST)
        return ready & (~back | np.where(last, ~self._copied(x, i, _P), free))

    def _may_update_on_gpu(self, x: _States, i: int, way: Way) -> _Mask:
        p, pending, w, s, state = x[self.row(i, 0) : self.row(i + 1, 0)]
        ready = (pending == 1) & (state != _HOST) & ~self._busy(x, i)
        if self.t.barrier or self.t.clip:
            ready &= x[_MOMENT] == 0
        if way.summed:
            ready &= _on_gpu(s)
        else:
            ready &= (p != _HOST) & (w <= _W_BOTH) & (s != _SUM_HOST)
        return ready & self._norm_is_there(x)

    def _norm_is_there(self, x: _States) -> _Mask:
        """Returns a mask of the states in which all adds and copies down of sums are done, with clipping and several
        micro-batches."""
        there = np.ones(x.shape[1], dtype=bool)
        if not self.t.clip or self.t.micro_batches == 1:
            return there
        for j, way in enumerate(self.ways):
            _, pending, w, s, added = x[self.row(j, 0) : self.row(j + 1, 0)]
            fine = ~self._copied(x, j, _S) & ~self._adds(x, j)
            if way.summed:
                fine &= (s >= _S_BOTH) | way.on_gpu
            elif way.on_gpu:
                fine &= w != _W_TWO
            else:
                fine &= (added == 1) & (w == _NO_W)
            there &= fine | (pending == 0)
        return there

    def _norm_is_taken(self, x: _States, i: int) -> _Mask:
        """Returns a mask of the states in which an Adam of the iteration whose gradients wait in chunk i has started,
        with clipping."""
        taken = np.zeros(x.shape[1], dtype=bool)
        if not self.t.clip or self.t.micro_batches == 1:
            return taken
        for j in range(self.t.layers):
            taken |= (x[self.row(j, _PENDING)] == 0) | (x[_COMPUTE] == _ADAM + j) | (x[_CPU] == 1 + 3 * j + _UPDATE)
        return taken & (x[self.row(i, _PENDING)] == 1) & (x[_MOMENT] <= self.first_final)

    def _up(self, x: _States) -> _States:
        made, idle = [x], x[_UP] == 0
        for i, way in enumerate(self.ways):
            for which, ready in self._may_come(x, i, way):
                units = self.t.up * self.slots(which)
                made.append(_with(x[:, idle & ready], _UP, self._copy(i, which), _UP_LEFT, units))
        return self._fitting(np.concatenate(made, axis=1))

    def _may_come(self, x: _States, i: int, way: Way) -> Iterator[tuple[int, _Mask]]:
        """Yields the lists that may come up."""
        p, pending, w, s, state = x[self.row(i, 0) : self.row(i + 1, 0)]
        rests = x[_COMPUTE] != _ADAM + i
        yield _P, (p == _HOST) & rests & ((pending == 0) | (way.on_gpu and not way.summed))
        if way.summed:
            yield _S, (s == _S_HOST) & rests & ((pending == 0) | way.on_gpu)
        if way.on_gpu:
            yield _X, (state == _HOST) & rests
        if way.on_gpu and not way.summed and self.t.micro_batches > 1:
            adds_rest = ~self._adds(x, i)
            yield _S, (s == _SUM_HOST) & rests & self._all_own(x, i) & (w != _W_TWO) & adds_rest
            yield _W, (w == _W_HOST) & rests & self._all_own(x, i) & adds_rest

    def _down(self, x: _States) -> _States:
        made, idle = [x], x[_DOWN] == 0
        for i, way in enumerate(self.ways):
            for which, ready in self._may_go(x, i, way):
                units = self.t.down * self.slots(which)
                made.append(_with(x[:, idle & ready], _DOWN, self._copy(i, which), _DOWN_LEFT, units))
        return np.concatenate(made, axis=1)

    def _may_go(self, x: _States, i: int, way: Way) -> Iterator[tuple[int, _Mask]]:
        """Yields the lists that may go down."""
        p, _, w, s, state = x[self.row(i, 0) : self.row(i + 1, 0)]
        m, rests = x[_MOMENT], x[_COMPUTE] != _ADAM + i
        runs = (x[_COMPUTE] == _RUNS) & (self.layer[m] == i) & self.backward[m]
        yield _P, (p == _GPU) & rests & ~(runs & self.last[m] & (not way.summed))
        if way.summed:
            yield _S, (s == _S_GPU) & rests & ~runs & ~self._norm_is_taken(x, i)
        elif self.t.micro_batches > 1:
            yield _W, (w == _W_GPU) & rests
        if way.on_gpu and self.streams:
            yield _X, (state == _GPU) & rests

    def _cpu(self, x: _States) -> _States:
        t, made, idle = self.t, [x], x[_CPU] == 0
        for i, way in enumerate(self.ways):
            if not way.on_gpu:
                ready = idle & self._may_update_on_cpu(x, i, way)
                units = t.cpu_adam + t.cpu_add * self._folded(x[:, ready], i, way)
                made.append(_with(x[:, ready], _CPU, 1 + 3 * i + _UPDATE, _CPU_LEFT, units))
            if way.summed or t.micro_batches == 1:
                continue
            p, pending, w, _, added = x[self.row(i, 0) : self.row(i + 1, 0)]
            open_still = idle & ~self._norm_is_taken(x, i)
            ready = open_still & (w >= _W_BOTH) & (x[_UP] != self._copy(i, _W))
            made.append(_with(x[:, ready], _CPU, 1 + 3 * i + _ADD_W, _CPU_LEFT, t.cpu_add))
            if t.clip and not way.on_gpu:
                ready = open_still & (pending == 1) & (p == _HOST) & (added == 0)
                made.append(_with(x[:, ready], _CPU, 1 + 3 * i + _ADD_P, _CPU_LEFT, t.cpu_add))
        return np.concatenate(made, axis=1)

    def _may_update_on_cpu(self, x: _States, i: int, way: Way) -> _Mask:
        t = self.t
        p, pending, w, s, added = x[self.row(i, 0) : self.row(i + 1, 0)]
        ready = (pending == 1) & ~self._busy(x, i)
        if t.barrier or t.clip:
            ready &= x[_MOMENT] <= self.first_final
        if way.summed:
            ready &= s >= _S_BOTH
        elif t.clip and t.micro_batches > 1:
            ready &= (p == _HOST) & (w == _NO_W) & (added == 1)
        else:
            ready &= (p == _HOST) & ((w == _NO_W) | (w == _W_HOST))
        if t.host is not None:
            for k in self._lists(i):
                ready &= (x[self._state(k)] != _ON_DISKS) & (x[self.writes] != 1 + k)
        return ready & self._norm_is_there(x)

    def _disks(self, x: _States) -> _States:
        if self.t.host is None:
            return x
        for queue, other, work in ((self.reads, self.writes, self.t.read), (self.writes, self.reads, self.t.write)):
            made, idle = [x], (x[queue] == 0) & ((x[other] == 0) | (self.t.beside is not None))
            for k in range(self.states):
                state, rests = x[self._state(k)], x[_CPU] != self._update(k)
                ready = idle & (state == _ON_DISKS if queue == self.reads else (state == _DIRTY) & rests)
                made.append(_with(x[:, ready], queue, 1 + k, queue + 1, self.alone * work))
            x = np.concatenate(made, axis=1)
        fitting = []
        while x.shape[1]:
            states = x[self._state(0) : self._state(self.states)]
            over = (states != _ON_DISKS).sum(axis=0) + (x[self.reads] > 0) > self.t.host
            fitting.append(x[:, ~over])
            x = x[:, over]
            given_up = [
                _with(x[:, (x[self._state(k)] == _CLEAN) & (x[_CPU] != self._update(k))], self._state(k), _ON_DISKS)
                for k in range(self.states)
            ]
            x = np.concatenate(given_up, axis=1)
            x = x[:, _different(self.keys(x), x[_FROM])]
        return np.concatenate(fitting, axis=1)

    def _order_lists(self, x: _States) -> None:
        """Swap two lists of a state, which are alike, so that states of the graph that differ in nothing else are
        one."""
        for i in range(self.t.layers if self.t.lists == 2 else 0):
            first, second = self._lists(i)
            rows = (self._state(first), self._state(second))
            busy = [(x[self.reads] == 1 + k) + 2 * (x[self.writes] == 1 + k) for k in (first, second)]
            swap = 4 * x[rows[0]] + busy[0] < 4 * x[rows[1]] + busy[1]
            x[np.ix_(rows, swap)] = x[np.ix_(rows[::-1], swap)]
            for queue in (self.reads, self.writes):
                of_both = (x[queue] == 1 + first) | (x[queue] == 1 + second)
                x[queue] = np.where(swap & of_both, 2 + first + second - x[queue], x[queue])

    def _state(self, k: int) -> int:
        """The row of a list of a state."""
        return self.reads + 4 + k

    def _lists(self, chunk: int) -> range:
        return range(chunk * self.t.lists, (chunk + 1) * self.t.lists)

    def _update(self, k: int) -> int:
        """What the CPU queue does while it changes the list of a state."""
        return 1 + 3 * (k // self.t.lists) + _UPDATE

    def _folded(self, x: _States, i: int, way: Way) -> _States:
        """Returns the number of gradients that an update on the CPU adds up itself: the last gradient, which is added
        to the sum of the others, and the gradient before it if it has a list of its own and others were added
        before."""
        if way.summed or self.t.clip or self.t.micro_batches == 1:
            return np.zeros(x.shape[1], dtype=np.int64)
        return 1 + (x[self.row(i, _W)] == _W_HOST) * (self.t.micro_batches > 2)

    # -- what is under way --

    def _copy(self, chunk: int, which: int) -> int:
        return 1 + 5 * chunk + which

    def _copied(self, x: _States, i: int, which: int) -> _Mask:
        copied: _Mask = (x[_UP] == self._copy(i, which)) | (x[_DOWN] == self._copy(i, which))
        return copied

    def _adds(self, x: _States, i: int) -> _Mask:
        adds: _Mask = (x[_CPU] == 1 + 3 * i + _ADD_W) | (x[_CPU] == 1 + 3 * i + _ADD_P)
        return adds

    def _busy(self, x: _States, i: int) -> _Mask:
        """Returns a mask of the states in which a copy or an add of the chunk is running."""
        busy = self._adds(x, i)
        for which in _LISTS:
            busy |= self._copied(x, i, which)
        return busy

    def _all_own(self, x: _States, i: int) -> _Mask:
        """Returns a mask of the states in which all gradients that have lists of their own have come."""
        came: _Mask = (x[_MOMENT] > self.own_last[i]) | (x[self.row(i, _PENDING)] == 1)
        return came

    # -- room --

    def _fitting(self, x: _States) -> _States:
        """Returns the states that fit, after giving up enough lists, in each possible way."""
        fitting = []
        while x.shape[1]:
            over = self._used(x) > self.t.slots
            fitting.append(x[:, ~over])
            x = x[:, over]
            given_up = [
                _with(x[:, may], row, without)
                for i, way in enumerate(self.ways)
                for row, may, without in self._may_give_up(x, i, way)
            ]
            x = np.concatenate(given_up, axis=1)
            x = x[:, _different(self.keys(x), x[_FROM])]
        return np.concatenate(fitting, axis=1)

    def _used(self, x: _States) -> NDArray[np.int64]:
        t, m = self.t, x[_MOMENT]
        runs = x[_COMPUTE] == _RUNS
        used = np.where(runs, self.tide[m] + self.opens[m], self.waiting[m])
        for i, way in enumerate(self.ways):
            p, _, w, s, state = x[self.row(i, 0) : self.row(i + 1, 0)]
            used = used + (p != _HOST) + _W_IS_THERE[w]
            # Adam behind a sum writes new parameters into a list that may be a new one
            used += (x[_COMPUTE] == _ADAM + i) & (p == _HOST)
            used += t.wide * (_on_gpu(s) if way.summed else s == _SUM_BOTH)
            if way.on_gpu:
                used += t.wide * (state != _HOST)
            for which in _LISTS:
                used += self.slots(which) * (x[_UP] == self._copy(i, which))
        return used

    def _may_give_up(self, x: _States, i: int, way: Way) -> Iterator[tuple[int, _Mask, int]]:
        """Yields (row, in which states its list on the GPU may be given up, the row's value then)."""
        p, _, w, s, state = x[self.row(i, 0) : self.row(i + 1, 0)]
        m, rests = x[_MOMENT], x[_COMPUTE] != _ADAM + i
        runs = (x[_COMPUTE] == _RUNS) & (self.layer[m] == i)
        yield self.row(i, _P), (p == _BOTH) & rests & ~runs, _HOST
        if way.summed:
            yield self.row(i, _S), (s == _S_BOTH) & rests & ~(runs & self.backward[m]), _S_HOST
        if way.on_gpu:
            if self.streams:
                yield self.row(i, _X), (state == _BOTH) & rests, _HOST
            if not way.summed:
                yield self.row(i, _S), (s == _SUM_BOTH) & rests, _SUM_HOST
                yield self.row(i, _W), (w == _W_BOTH) & rests, _W_HOST

    # -- what ends --

    def _end(self, x: _States) -> NDArray[np.int64]:
        """Change x where steps end. Returns in which states an iteration ends."""
        for i, way in enumerate(self.ways):
            self._end_copies(x, i, way)
            self._end_on_cpu(x, i, way)
            self._end_on_gpu(x, i, way)
        ends = (x[_COMPUTE] == _RUNS) & (x[_COMPUTE_LEFT] == 0)
        x[_MOMENT, ends] += 1
        done = x[_MOMENT] == self.count
        x[_MOMENT, done] = 0
        for what, units in self.queues:
            x[what, x[units] == 0] = 0
        return done.astype(np.int64)

    def _end_copies(self, x: _States, i: int, way: Way) -> None:
        ends = {which: (x[_UP] == self._copy(i, which)) & (x[_UP_LEFT] == 0) for which in _LISTS}
        x[self.row(i, _P), ends[_P]] = _BOTH
        x[self.row(i, _X), ends[_X]] = _BOTH
        x[self.row(i, _S), ends[_S]] = _S_BOTH if way.summed else _SUM_BOTH
        x[self.row(i, _W), ends[_W]] = _W_BOTH
        ends = {which: (x[_DOWN] == self._copy(i, which)) & (x[_DOWN_LEFT] == 0) for which in _LISTS}
        pending = x[self.row(i, _PENDING)] == 1
        # lists that are not read on the GPU again are freed at once
        x[self.row(i, _P), ends[_P]] = np.where((not way.on_gpu) | (way.summed & pending), _HOST, _BOTH)[ends[_P]]
        x[self.row(i, _X), ends[_X]] = _BOTH
        x[self.row(i, _S), ends[_S]] = np.where((not way.on_gpu) & pending, _S_HOST, _S_BOTH)[ends[_S]]
        x[self.row(i, _W), ends[_W]] = np.where(way.on_gpu & self._all_own(x, i), _W_BOTH, _W_HOST)[ends[_W]]

    def _end_on_cpu(self, x: _States, i: int, way: Way) -> None:
        for queue in (self.reads, self.writes):
            for k in self._lists(i):
                x[self._state(k), (x[queue + 1] == 0) & (x[queue] == 1 + k)] = _CLEAN
        ended = np.where(x[_CPU_LEFT] == 0, x[_CPU], 0)
        updated = ended == 1 + 3 * i + _UPDATE
        if self.t.host is not None:
            for k in self._lists(i):
                x[self._state(k), updated] = _DIRTY
        x[self.row(i, 0) : self.row(i + 1, 0), updated] = 0
        added = ended == 1 + 3 * i + _ADD_W
        w = x[self.row(i, _W)]
        x[self.row(i, _W), added] = np.where(w == _W_TWO, _W_GPU, _NO_W)[added]
        if way.on_gpu:
            x[self.row(i, _S), added] = _SUM_HOST
        x[self.row(i, _X), ended == 1 + 3 * i + _ADD_P] = 1

    def _end_on_gpu(self, x: _States, i: int, way: Way) -> None:
        m, ends = x[_MOMENT], x[_COMPUTE_LEFT] == 0
        updated = ends & (x[_COMPUTE] == _ADAM + i)
        x[self.row(i, 0) : self.row(i + 1, 0), updated] = np.array([[_GPU], [0], [_NO_W], [_NO_S], [_GPU]])
        back = ends & (x[_COMPUTE] == _RUNS) & (self.layer[m] == i) & self.backward[m]
        last = back & self.last[m]
        x[self.row(i, _PENDING), last] = 1
        if way.summed:
            x[self.row(i, _S), back] = _S_GPU
            x[self.row(i, _P), last] = _HOST  # the list is not read again, and the update writes it anew
            return
        x[self.row(i, _P), last] = _GPU
        w = x[self.row(i, _W)]
        own = back & ~self.last[m]
        x[self.row(i, _W), own] = np.where(w == _W_HOST, _W_TWO, _W_GPU)[own]


def _on_gpu(s: _States) -> _Mask:
    """Returns a mask of the states in which a sum that is made on the GPU is there."""
    there: _Mask = (s == _S_GPU) | (s == _S_BOTH)
    return there


def _with(x: _States, *rows_and_values: object) -> _States:
    """Returns a copy of x with these rows changed: row, value, row, value, ..."""
    changed = x.copy()
    for row, value in zip(rows_and_values[::2], rows_and_values[1::2]):
        changed[row] = value  # type: ignore[call-overload]
    return changed


def _different(*columns: _States) -> _States:
    """Returns the positions at which these columns are different, the first position of each."""
    order = np.lexsort(columns)
    keep = np.ones(len(order), dtype=bool)
    keep[1:] = np.any([column[order][1:] != column[order][:-1] for column in columns], axis=0)
    return order[keep]


# -- the shortest cycle --

_SAME = 1e-9


def _shortest_cycle(source: _States, target: _States, units: _States, done: _States) -> Fraction | None:
    """Returns the least units per iteration of a cycle that node 0 reaches, by policy iteration; None if no cycle ends
    an iteration. Every node must be reachable from node 0. Rates of two cycles of these sizes differ by far more than
    rounding, and the result is counted on the cycle itself."""
    count = int(max(source.max(initial=0), target.max(initial=0))) + 1
    stuck = np.setdiff1d(np.arange(count), source)  # nodes without a way on stand still
    source, target = np.concatenate((source, stuck)), np.concatenate((target, stuck))
    units = np.concatenate((units, np.ones_like(stuck)))
    done = np.concatenate((done, np.zeros_like(stuck)))
    order = np.argsort(source, kind="stable")
    target, units, done = target[order], units[order], done[order]
    begin = np.searchsorted(source[order], np.arange(count))
    owner = source[order]
    choice = begin.copy()
    while True:
        rate, value, best = _evaluated(target[choice], units[choice], done[choice])
        reached = rate[target]
        highest = np.maximum.reduceat(reached, begin)
        better = highest > rate + _SAME
        if better.any():
            choice = np.where(better, _first_at(reached >= highest[owner] - _SAME / 2, begin), choice)
            continue
        worth = np.where(reached > rate[owner] - _SAME, done - rate[owner] * units + value[target], -np.inf)
        highest = np.maximum.reduceat(worth, begin)
        better = highest > value + 1e-7
        if not better.any():
            return best
        choice = np.where(better, _first_at(worth >= highest[owner], begin), choice)


def _first_at(holds: _Mask, begin: _States) -> _States:
    """Returns for each node the first of its edges for which `holds` is true (for a node without such an edge, an edge
    of another node)."""
    where = np.flatnonzero(holds)
    return where[np.minimum(np.searchsorted(where, begin), len(where) - 1)]


def _evaluated(
    target: _States, units: _States, done: _States
) -> tuple[NDArray[np.float64], NDArray[np.float64], Fraction | None]:
    """Evaluates nodes with a single edge each. Returns the rate of the cycle in which each node ends, the node's
    advantage on the way there, and the units per iteration on the fastest cycle."""
    count = len(target)
    doublings = max(1, int(np.ceil(np.log2(count)))) + 1
    jump, least = target, np.minimum(np.arange(count), target)
    for _ in range(doublings):
        least = np.minimum(least, least[jump])
        jump = jump[jump]
    root = least[jump]  # of each cycle the lowest node
    jump, all_units, all_done = target.copy(), units.copy(), done.copy()
    roots = np.unique(root)
    jump[roots], all_units[roots], all_done[roots] = roots, 0, 0
    for _ in range(doublings):
        all_units, all_done, jump = all_units + all_units[jump], all_done + all_done[jump], jump[jump]
    # around each cycle: the root's own way, and from there back to the root
    around_units, around_done = units + all_units[target], done + all_done[target]
    rate = (around_done / around_units)[root]
    fastest = roots[np.argmax((around_done / around_units)[roots])]
    best = Fraction(int(around_units[fastest]), int(around_done[fastest])) if around_done[fastest] else None
    return rate, all_done - rate * all_units, best
