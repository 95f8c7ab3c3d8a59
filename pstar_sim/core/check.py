"""The independent checker: proves that every legal interleaving of a plan's steps is correct and within budget.

Shares no code with the policies or with core/effects.py, so that an error in one is not repeated in the other.

How. Two successive iterations are unrolled. [Note: what precedes what] Each queue runs its steps in order, so all
that must have ended before a step starts is one number a queue: how many of its steps. These vectors (vector clocks)
follow from queue order and `after` in one pass and are exact. If any two steps that touch the same list of the same
chunk, one of them changing it, are ordered by them, then every legal interleaving computes the same, and playing the
plan once, in any legal order, shows whether what each step needs is there and what it says. Bytes do depend on the
interleaving: the most a place can hold is a maximum closure over the start events (which take) and end events (which
free), found exactly as a minimum cut.

[Note: one rank is enough] All ranks run the same program, so the n-th collective is the same step everywhere, and each
rank's waits are in the order of one and the same program: what is proved of one rank holds for all, with any durations
of the collectives, and they cannot wait for each other in a circle. A gather makes the others' slices what the own one
is at the same step of their run; a gradient counts as whole only after a reduce_scatter has summed it over the ranks.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Kind, Place, Queue, Step
from pstar_sim.errors import PlanError
from pstar_sim.units import format_bytes

__all__ = ["CheckReport", "check_plan"]

MOST_UNROLLED = 4


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What was proved. peak_bytes: the most each place can hold in any legal interleaving (exact). peak_at: the moment
    it holds that in (-1: at the cut). running: the steps under way then. iterations: how many had to be unrolled (2
    unless a queue may run further ahead)."""

    steps: int
    moments: int
    iterations: int
    peak_bytes: dict[str, int]
    peak_at: dict[str, int]
    running: dict[str, tuple[int, ...]]
    budget_bytes: dict[str, int] = field(default_factory=dict)

    def describe(self) -> str:
        """For people."""
        lines = [f"correct: {self.steps} steps, {self.moments} moments, every legal interleaving"]
        for place, size in self.peak_bytes.items():
            moment = self.peak_at[place]
            when = "between two iterations" if moment < 0 else f"in moment {moment}"
            lines.append(
                f"{place}: at most {format_bytes(size)} ({size} bytes, {when}) "
                f"of {format_bytes(self.budget_bytes[place])}"
            )
        return "\n".join(lines)


def check_plan(plan: Plan) -> CheckReport:
    """Raises PlanError with the first violation, naming steps, moment and bytes."""
    order = _check_structure(plan)
    program = _Program(plan, order, 2)
    iterations = 2
    while not program.bounded():
        if iterations == MOST_UNROLLED:
            raise PlanError(
                f"nothing keeps queue {program.unbounded_queue()} from running {MOST_UNROLLED - 1} iterations ahead of "
                "another; an edge to a step of the previous iteration (id@-1) is missing"
            )
        iterations += 1
        program = _Program(plan, order, iterations)
    _check_barrier(plan, program)
    walk = _Walk(plan, program)
    walk.run()
    budgets = plan.budgets
    if any(r.place is Place.NVME for r in plan.initial) or any(s.queue is Queue.NVME for s in plan.steps):
        budgets[Place.NVME] = plan.nvme_budget_bytes
    peaks: dict[str, int] = {}
    moments: dict[str, int] = {}
    running: dict[str, tuple[int, ...]] = {}
    for place, budget in budgets.items():
        worst = _worst_case(plan, program, walk, place)
        peaks[place.value], moments[place.value], running[place.value] = worst.bytes, worst.moment, worst.running
        if worst.bytes > budget:
            raise PlanError(worst.text(plan, place, budget))
    return CheckReport(
        steps=len(plan.steps),
        moments=len(plan.workload.moments),
        iterations=iterations,
        peak_bytes=peaks,
        peak_at=moments,
        running=running,
        budget_bytes={place.value: budget for place, budget in budgets.items()},
    )


# --- structure: everything that can be said of steps one by one, and that there is an order at all ---

_QUEUES: dict[Kind, tuple[Queue, ...]] = {
    Kind.COMPUTE: (Queue.COMPUTE,),
    Kind.FETCH: (Queue.H2D,),
    Kind.WRITEBACK: (Queue.D2H,),
    Kind.DROP: tuple(Queue),
    Kind.ALLOC: tuple(Queue),
    Kind.FREE: tuple(Queue),
    Kind.CPU_ADD: (Queue.ADAM,),
    Kind.CPU_ADAM: (Queue.ADAM,),
    Kind.GPU_ADAM: (Queue.COMPUTE,),
    Kind.GATHER: (Queue.NET,),
    Kind.REDUCE_SCATTER: (Queue.NET,),
    Kind.NVME_READ: (Queue.NVME,),
    Kind.NVME_WRITE: (Queue.NVME,),
}
_COLLECTIVES = (Kind.GATHER, Kind.REDUCE_SCATTER)
_OTHERS = {"remote": "param", "grad_remote": "grad"}  # the slices of the other ranks, and the list of the own one
_NEEDS_LIST = (Kind.FETCH, Kind.WRITEBACK, Kind.DROP, Kind.ALLOC, Kind.FREE, Kind.NVME_READ, Kind.NVME_WRITE)


def _label(step: Step) -> str:
    words = [step.kind.value]
    if step.chunk is not None:
        words.append(f"chunk {step.chunk}")
    if step.list is not None:
        words.append(step.list)
    if step.kind is Kind.COMPUTE:
        words = [f"moment {step.moment}"]
    return f"step {step.id} ({' '.join(words)})"


def _check_structure(plan: Plan) -> list[int]:
    """Positions of the steps in a legal order of one iteration."""
    steps, w = plan.steps, plan.workload
    position: dict[int, int] = {}
    for i, step in enumerate(steps):
        if step.id in position:
            raise PlanError(f"step id {step.id} is used twice")
        position[step.id] = i
    for step in steps:
        for ref in step.after:
            if ref.id not in position:
                raise PlanError(f"{_label(step)} is after step {ref.id}, which the plan does not have")
            if ref.back not in (0, 1):
                raise PlanError(f"{_label(step)} is after {ref}; only the previous iteration (@-1) can be named")
        _check_step(plan, step)
    clock = [step.moment for step in steps if step.kind is Kind.COMPUTE]
    for m in range(len(w.moments)):
        if m >= len(clock) or clock[m] != m:
            found = f"moment {clock[m]}" if m < len(clock) else "the end"
            raise PlanError(
                f"the compute queue has {found} where moment {m} belongs; each moment needs one step, in order"
            )
    if len(clock) > len(w.moments):
        raise PlanError(f"the compute queue has {len(clock)} moments; the workload has {len(w.moments)}")
    _check_updates(plan)
    return _legal_order(steps, position)


def _check_step(plan: Plan, step: Step) -> None:
    queues = _QUEUES[step.kind]
    if step.via is not None and step.kind not in (Kind.FETCH, Kind.WRITEBACK):
        raise PlanError(f"{_label(step)} has via={step.via}; only copies between host and gpu can go another way")
    if step.queue not in queues:
        raise PlanError(f"{_label(step)} is on queue {step.queue.value}; it belongs on {', '.join(queues)}")
    if step.kind is Kind.COMPUTE:
        if step.bytes:
            raise PlanError(f"{_label(step)} has bytes={step.bytes}; a moment moves none")
        return
    if step.chunk is None or step.chunk >= len(plan.layout.chunks):
        raise PlanError(f"{_label(step)} needs chunk=, below {len(plan.layout.chunks)}")
    if step.kind in _COLLECTIVES:
        _check_collective(plan, step)
    elif step.kind in _NEEDS_LIST:
        if step.list is None:
            raise PlanError(f"{_label(step)} needs list=")
        payload = plan.layout.payload_bytes(step.chunk, step.list)
        allowed = {payload}
        if step.kind in (Kind.FETCH, Kind.WRITEBACK):
            allowed.add(plan.layout.slice_numel(step.chunk) * 4)  # a policy that moves the list in fp32
        if step.list in _OTHERS and step.kind not in (Kind.DROP, Kind.FREE, Kind.ALLOC):
            raise PlanError(f"{_label(step)}: the slices of other ranks are gathered, reduced and dropped, not copied")
        if step.bytes not in allowed:
            raise PlanError(f"{_label(step)} has bytes={step.bytes}; the payload has {payload} bytes")
    elif step.bytes <= 0:
        raise PlanError(f"{_label(step)} has bytes={step.bytes}; it needs its memory traffic")
    if step.kind in (Kind.ALLOC, Kind.FREE):
        if step.place is None:
            raise PlanError(f"{_label(step)} needs place=")
    elif step.kind is Kind.DROP and step.place not in (None, Place.GPU):
        raise PlanError(f"{_label(step)} has place={step.place}; drop frees the gpu")


def _check_collective(plan: Plan, step: Step) -> None:
    assert step.chunk is not None
    ranks = len(plan.machine.ranks)
    if ranks == 1:
        raise PlanError(f"{_label(step)}: machine {plan.machine.name!r} has one gpu; there is nobody to exchange with")
    allowed: tuple[str, ...] = ("param", "grad", "grad32")
    if plan.layout.ranks > 1:
        allowed = ("remote",) if step.kind is Kind.GATHER else ("remote", "grad_remote")
    if step.list not in allowed:
        raise PlanError(f"{_label(step)} needs list= one of {', '.join(allowed)}")
    whole = plan.layout.payload_bytes(step.chunk, _OTHERS.get(step.list, step.list)) * plan.layout.ranks
    if step.bytes != whole:
        raise PlanError(f"{_label(step)} has bytes={step.bytes}; the whole chunk has {whole} bytes")


_ADAM_OF = {"cpu": Kind.CPU_ADAM, "pin": Kind.GPU_ADAM, "stream": Kind.GPU_ADAM}


def _check_updates(plan: Plan) -> None:
    """Every chunk with a gradient has one Adam an iteration, no other chunk has one."""
    trained = {plan.layout.chunk_of[t] for row in plan.workload.gradients for t in row}
    done: dict[int, Step] = {}
    for step in plan.steps:
        if step.kind not in (Kind.CPU_ADAM, Kind.GPU_ADAM):
            continue
        assert step.chunk is not None
        if step.chunk in done:
            raise PlanError(f"{_label(step)} updates a chunk that {_label(done[step.chunk])} updates already")
        if step.chunk not in trained:
            raise PlanError(f"{_label(step)} updates a chunk that gets no gradient")
        mode = plan.modes[step.chunk] if step.chunk < len(plan.modes) else ""
        if mode in _ADAM_OF and _ADAM_OF[mode] is not step.kind:
            raise PlanError(f"{_label(step)} is not how a chunk of mode {mode!r} is updated ({_ADAM_OF[mode].value})")
        done[step.chunk] = step
    for chunk in sorted(trained):
        if chunk not in done:
            raise PlanError(f"chunk {chunk} gets gradients but no cpu_adam or gpu_adam step updates it")


def _legal_order(steps: tuple[Step, ...], position: dict[int, int]) -> list[int]:
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
        stuck = [_label(steps[i]) for i in range(count) if open_edges[i]]
        raise PlanError(
            f"a deadlock: {len(stuck)} steps wait for each other in a circle, among them {', '.join(stuck[:6])}"
        )
    return order


# --- what precedes what ---


class _Program:
    """Steps unrolled over some iterations; an instance is iteration * len(steps) + position."""

    def __init__(self, plan: Plan, order: list[int], iterations: int) -> None:
        steps = plan.steps
        self.steps = steps
        self.count = len(steps)
        self.iterations = iterations
        self.order = [k * self.count + i for k in range(iterations + 1) for i in order]
        self.queues = sorted({step.queue for step in steps})
        index = {queue: q for q, queue in enumerate(self.queues)}
        position = {step.id: i for i, step in enumerate(steps)}
        self.queue_of = [index[step.queue] for step in steps]
        self.length = [0] * len(self.queues)
        self.rank: list[int] = []  # of a step on its queue
        for q in self.queue_of:
            self.rank.append(self.length[q])
            self.length[q] += 1

        # clock[s][q]: how many steps of queue q must have ended before instance s starts.
        zero = [0] * len(self.queues)
        self.clock: list[list[int]] = [zero] * (self.count * (iterations + 1))
        ended = [zero] * len(self.queues)  # clock at the end of the last instance on each queue
        at_end: list[list[int]] = [zero] * (self.count * (iterations + 1))
        for s in self.order:
            k, i = divmod(s, self.count)
            q = self.queue_of[i]
            now = list(ended[q])
            for ref in steps[i].after:
                if ref.back > k:
                    continue
                for p, value in enumerate(at_end[(k - ref.back) * self.count + position[ref.id]]):
                    if value > now[p]:
                        now[p] = value
            self.clock[s] = now
            after = list(now)
            after[q] = k * self.length[q] + self.rank[i] + 1
            at_end[s] = ended[q] = after

    def step(self, instance: int) -> Step:
        return self.steps[instance % self.count]

    def iteration(self, instance: int) -> int:
        return instance // self.count

    def sequence(self, instance: int) -> int:
        """Its place among all instances on its queue."""
        k, i = divmod(instance, self.count)
        return k * self.length[self.queue_of[i]] + self.rank[i]

    def precedes(self, first: int, then: int) -> bool:
        """Whether `first` has ended when `then` starts, in every legal interleaving."""
        return self.clock[then][self.queue_of[first % self.count]] > self.sequence(first)

    def _ahead(self) -> Iterator[int]:
        """Queues whose first step of iteration N can start before iteration 0 has ended everywhere."""
        seen: set[int] = set()
        for i in range(self.count):
            q = self.queue_of[i]
            if q in seen:
                continue
            seen.add(q)
            clock = self.clock[self.iterations * self.count + i]
            if any(done < length for done, length in zip(clock, self.length)):
                yield q

    def bounded(self) -> bool:
        """Whether at no time more than `iterations` successive iterations are under way."""
        return next(self._ahead(), None) is None

    def unbounded_queue(self) -> str:
        return self.queues[next(self._ahead())].value


def _check_barrier(plan: Plan, program: _Program) -> None:
    w = plan.workload
    barrier = plan.settings.barrier(w.dtype)
    if barrier is None:
        return
    (last,) = (i for i, s in enumerate(plan.steps) if s.kind is Kind.COMPUTE and s.moment == len(w.moments) - 1)
    adds = [i for i, s in enumerate(plan.steps) if s.kind is Kind.CPU_ADD] if plan.settings.clip else []
    for i, step in enumerate(plan.steps):
        if step.kind not in (Kind.CPU_ADAM, Kind.GPU_ADAM):
            continue
        for j, why in ((last, f"the barrier ({barrier}) forbids it"), *((j, _NORM) for j in adds[-1:])):
            if not program.precedes(j, i):
                raise PlanError(f"{_label(step)} may start before {_label(plan.steps[j])} has ended; {why}")


_NORM = "the gradient norm (clip) needs all gradients added first"


# --- playing it once, with a race check ---


@dataclass(slots=True)
class _Content:
    """What a list says. version: updates applied (parameters, states), iteration (gradients). marks: (micro-batch,
    tensor) of each gradient in it; in the working list these tensors are no longer parameters. summed: how much of
    these gradients is the sum over all ranks, "no", "slice" or "yes"."""

    version: int
    marks: set[tuple[int, int]] = field(default_factory=set)
    summed: str = "no"

    def copy(self) -> _Content:
        return _Content(self.version, set(self.marks), self.summed)


_Key = tuple[int, str, Place]
_FROM_TO = {
    Kind.FETCH: (Place.HOST, Place.GPU),
    Kind.WRITEBACK: (Place.GPU, Place.HOST),
    Kind.NVME_READ: (Place.NVME, Place.HOST),
    Kind.NVME_WRITE: (Place.HOST, Place.NVME),
}


def _key_name(key: _Key) -> str:
    return f"the {key[1]} list of chunk {key[0]} on the {key[2].value}"


class _Walk:
    """Plays all unrolled iterations in one legal order. takes, frees: per instance, (place, bytes)."""

    def __init__(self, plan: Plan, program: _Program) -> None:
        self.plan = plan
        self.program = program
        w, layout = plan.workload, plan.layout
        self.states = [name for name, _ in layout.state_bytes]
        self.content: dict[_Key, _Content | None] = {}
        for r in plan.initial:
            if r.chunk >= 0:
                layout.payload_bytes(r.chunk, r.list)
                fresh = r.list in ("param", "remote") or r.list in self.states
                self.content[r.chunk, r.list, r.place] = _Content(0) if fresh else None
        self.initial = frozenset(self.content)
        self.ranks = len(plan.machine.ranks)
        self.sliced = layout.ranks > 1
        self.last_change: dict[_Key, int] = {}
        self.looks: dict[_Key, dict[int, int]] = {}
        self.takes: dict[int, tuple[Place, int]] = {}
        self.frees: dict[int, tuple[Place, int]] = {}

        # Gradients that become final in each moment: the last firing of a tensor in its micro-batch.
        last: dict[tuple[int, int], int] = {}
        for m, tensors in enumerate(w.gradients):
            for t in tensors:
                last[w.moments[m].micro_batch, t] = m
        self.finals: list[list[int]] = [[] for _ in w.moments]
        self.expected: dict[int, set[tuple[int, int]]] = {}
        for (u, t), m in last.items():
            self.finals[m].append(t)
            self.expected.setdefault(layout.chunk_of[t], set()).add((u, t))
        self.target = self._targets()

    def _targets(self) -> dict[tuple[int, int], str]:
        """Where the gradients of (chunk, micro-batch) arrive on the gpu."""
        allocs: dict[int, int] = {}
        for step in self.plan.steps:
            if step.kind is Kind.ALLOC and step.list == "grad" and step.place is Place.GPU:
                assert step.chunk is not None
                allocs[step.chunk] = allocs.get(step.chunk, 0) + 1
        target: dict[tuple[int, int], str] = {}
        for chunk, marks in self.expected.items():
            batches = sorted({u for u, _ in marks})
            if (chunk, "grad32", Place.GPU) in self.initial and not self.sliced:
                lists = ["grad32"] * len(batches)
            elif (chunk, "grad", Place.GPU) in self.initial:
                lists = ["grad"] * len(batches)
            else:
                own = min(allocs.get(chunk, 0), len(batches))
                lists = ["grad"] * own + ["param"] * (len(batches) - own)
            target.update(((chunk, u), name) for u, name in zip(batches, lists))
        return target

    def run(self) -> None:
        program, w = self.program, self.plan.workload
        play: dict[Kind, Callable[[int, int, Step], None]] = {
            Kind.COMPUTE: self._compute,
            Kind.ALLOC: self._alloc,
            Kind.FREE: self._free,
            Kind.DROP: self._free,
            Kind.FETCH: self._copy,
            Kind.WRITEBACK: self._copy,
            Kind.CPU_ADD: self._add,
            Kind.CPU_ADAM: self._adam,
            Kind.GPU_ADAM: self._adam,
            Kind.GATHER: self._gather,
            Kind.REDUCE_SCATTER: self._reduce_scatter,
            Kind.NVME_READ: self._copy,
            Kind.NVME_WRITE: self._copy,
        }
        peaks = [m.peak_bytes for m in w.moments]
        self._rise = [max(0, peak - peaks[m - 1]) for m, peak in enumerate(peaks)]
        self._fall = [max(0, peak - peaks[(m + 1) % len(peaks)]) for m, peak in enumerate(peaks)]
        before: dict[_Key, object] = {}
        for k in range(program.iterations):
            for s in program.order[k * program.count : (k + 1) * program.count]:
                step = program.step(s)
                play[step.kind](s, k, step)
            self._check_cut(k)
            after = {key: self._relative(key, content, k) for key, content in self.content.items()}
            if k == program.iterations - 1 and after != before:
                odd = min(key for key in after if after[key] != before[key])
                raise PlanError(f"{_key_name(odd)} does not hold the same after each iteration")
            before = after

    def _relative(self, key: _Key, content: _Content | None, iteration: int) -> object:
        if content is None:
            return None
        version = content.version - iteration if key[0] in self.expected else content.version
        return version, frozenset(content.marks), content.summed

    def _check_cut(self, iteration: int) -> None:
        now = frozenset(self.content)
        if now == self.initial:
            self._check_no_divergence(iteration)
            return
        extra, missing = sorted(now - self.initial), sorted(self.initial - now)
        what = []
        if extra:
            what.append(f"{_key_name(extra[0])} is left over ({len(extra)} in all)")
        if missing:
            what.append(f"{_key_name(missing[0])} is gone ({len(missing)} in all)")
        raise PlanError(f"not a steady state: after iteration {iteration} {' and '.join(what)}")

    def _check_no_divergence(self, iteration: int) -> None:
        """Two copies of an optimizer state may differ inside an iteration (between an update and its write-back), not
        from one to the next."""
        versions: dict[tuple[int, str], dict[Place, int]] = {}
        for (chunk, name, place), content in self.content.items():
            if name in self.states and content is not None:
                versions.setdefault((chunk, name), {})[place] = content.version
        for (chunk, name), copies in versions.items():
            if len(set(copies.values())) > 1:
                has = ", ".join(f"{version} updates on the {place.value}" for place, version in sorted(copies.items()))
                raise PlanError(
                    f"after iteration {iteration} the copies of the {name} list of chunk {chunk} diverge: {has}"
                )

    # races

    def _look(self, s: int, key: _Key) -> None:
        change = self.last_change.get(key)
        if change is not None and change != s and not self.program.precedes(change, s):
            self._race(change, s, key)
        self.looks.setdefault(key, {})[self.program.queue_of[s % self.program.count]] = s

    def _change(self, s: int, key: _Key) -> None:
        change = self.last_change.get(key)
        if change is not None and change != s and not self.program.precedes(change, s):
            self._race(change, s, key)
        for look in self.looks.pop(key, {}).values():
            if look != s and not self.program.precedes(look, s):
                self._race(look, s, key)
        self.last_change[key] = s

    def _race(self, first: int, then: int, key: _Key) -> None:
        program = self.program
        a, b = program.step(first), program.step(then)
        back = program.iteration(then) - program.iteration(first)
        edge = f"{a.id}@-1" if back else f"{a.id}"
        raise PlanError(
            f"nothing makes {_label(b)} wait for {_label(a)}{' of the previous iteration' if back else ''}: both touch "
            f"{_key_name(key)} and one changes it; an edge after={edge} is missing"
        )

    # moves

    def _take(self, s: int, key: _Key) -> None:
        self._change(s, key)
        if key in self.content:
            raise PlanError(f"{_label(self.program.step(s))} takes {_key_name(key)}, which is there already")
        self.content[key] = None
        self.takes[s] = (key[2], self.plan.layout.payload_bytes(key[0], key[1]))

    def _give(self, s: int, key: _Key) -> None:
        self._change(s, key)
        if key not in self.content:
            raise PlanError(f"{_label(self.program.step(s))} frees {_key_name(key)}, which is not there")
        del self.content[key]
        self.frees[s] = (key[2], self.plan.layout.payload_bytes(key[0], key[1]))

    def _present(self, step: Step, key: _Key, why: str) -> _Content | None:
        if key not in self.content:
            raise PlanError(f"{_label(step)} {why} {_key_name(key)}, which is not there")
        return self.content[key]

    def _name(self, tensor: int) -> str:
        return f"tensor {self.plan.workload.tensors[tensor].name!r}"

    # kinds of steps

    def _compute(self, s: int, k: int, step: Step) -> None:
        w, chunk_of = self.plan.workload, self.plan.layout.chunk_of
        assert step.moment is not None
        m = step.moment
        moment = w.moments[m]
        for t in w.reads[m]:
            chunk = chunk_of[t]
            for name in ("param", "remote") if self.sliced else ("param",):
                self._read(s, k, step, (chunk, name, Place.GPU), t)
        for t in self.finals[m]:
            own = self.target[chunk_of[t], moment.micro_batch]
            for name in (own, *(other for other, mine in _OTHERS.items() if mine == own and self.sliced)):
                self._put_gradient(s, k, step, (chunk_of[t], name, Place.GPU), t)
        if self._rise[m]:
            self.takes[s] = (Place.GPU, self._rise[m])
        if self._fall[m]:
            self.frees[s] = (Place.GPU, self._fall[m])

    def _read(self, s: int, k: int, step: Step, key: _Key, t: int) -> None:
        """A moment reads tensor t in a working list (or the other ranks' part of it)."""
        self._look(s, key)
        content = self._present(step, key, f"reads {self._name(t)} in")
        if content is None:
            raise PlanError(f"{_label(step)} reads {self._name(t)} in {_key_name(key)}, which nothing has filled")
        wanted = k if key[0] in self.expected else 0
        if content.version != wanted:
            raise PlanError(
                f"{_label(step)} reads stale parameters: {_key_name(key)} has {content.version} updates where "
                f"iteration {k} needs {wanted}"
            )
        if content.marks and any((u, t) in content.marks for u in range(self.plan.workload.micro_batches)):
            raise PlanError(
                f"{_label(step)} reads {self._name(t)} in {_key_name(key)} after its gradient has overwritten it"
            )

    def _put_gradient(self, s: int, k: int, step: Step, key: _Key, t: int) -> None:
        """The gradient of tensor t becomes final in a moment; it goes to this list (or to its part of the gradient)."""
        w = self.plan.workload
        assert step.moment is not None
        u = w.moments[step.moment].micro_batch
        self._change(s, key)
        content = self._present(step, key, f"puts the gradient of {self._name(t)} in")
        if _OTHERS.get(key[1], key[1]) == "param":
            if content is None:
                raise PlanError(f"{_label(step)} overwrites {_key_name(key)}, which nothing has filled")
            if any((v, t) in content.marks for v in range(w.micro_batches)):
                raise PlanError(
                    f"{_label(step)} puts the gradient of {self._name(t)} of micro-batch {u} in {_key_name(key)} "
                    "over the one of an earlier micro-batch; it needs a grad list of its own (alloc)"
                )
        elif content is None or content.version != k or (key[1] != "grad32" and any(v != u for v, _ in content.marks)):
            content = self.content[key] = _Content(k)
        if content.marks and content.summed != "no":
            raise PlanError(
                f"{_label(step)} puts the gradient of {self._name(t)} in {_key_name(key)}, where the sum over all "
                "ranks of earlier ones is; a reduce_scatter belongs after the last of them"
            )
        content.marks.add((u, t))

    def _alloc(self, s: int, k: int, step: Step) -> None:
        assert step.chunk is not None and step.list is not None and step.place is not None
        self._take(s, (step.chunk, step.list, step.place))

    def _free(self, s: int, k: int, step: Step) -> None:
        assert step.chunk is not None and step.list is not None
        place = Place.GPU if step.kind is Kind.DROP else step.place
        assert place is not None
        key = (step.chunk, step.list, place)
        content = self.content.get(key)
        self._give(s, key)
        if content is not None and (step.list == "param" or step.list in self.states):
            self._check_not_lost(step, key, content)
        elif content is not None and step.list == "remote" and content.marks:
            raise PlanError(f"{_label(step)} gives up gradients that no reduce_scatter has summed over the ranks")

    def _check_not_lost(self, step: Step, key: _Key, content: _Content) -> None:
        """What was given up is somewhere else too, or something newer is."""
        for place in Place:
            other = self.content.get((key[0], key[1], place))
            if other is None:
                continue
            if other.version > content.version or (other.version == content.version and other.marks >= content.marks):
                return
        what = "gradients" if content.marks else "parameters" if key[1] == "param" else "states"
        raise PlanError(f"{_label(step)} gives up the only current copy of the {what} in {_key_name(key)}")

    def _copy(self, s: int, k: int, step: Step) -> None:
        assert step.chunk is not None and step.list is not None
        there, here = _FROM_TO[step.kind]
        source, target = (step.chunk, step.list, there), (step.chunk, step.list, here)
        self._look(s, source)
        content = self._present(step, source, "copies")
        if content is None:
            raise PlanError(f"{_label(step)} copies {_key_name(source)}, which nothing has filled")
        if target in self.content:
            self._change(s, target)
        else:
            self._take(s, target)
        self.content[target] = content.copy()

    def _gather(self, s: int, k: int, step: Step) -> None:
        """Sliced: the others' parameters come. Replicated: the other slices of a gradient's sum come."""
        assert step.chunk is not None and step.list is not None
        target = (step.chunk, step.list, Place.GPU)
        if not self.sliced:
            self._change(s, target)
            content = self._present(step, target, "gathers")
            if content is None or content.summed != "slice":
                raise PlanError(f"{_label(step)}: no reduce_scatter has summed a slice of {_key_name(target)} before")
            content.summed = "yes"
            return
        own = (step.chunk, "param", Place.GPU)
        self._look(s, own)
        content = self._present(step, own, "sends")
        if content is None or content.marks:
            raise PlanError(f"{_label(step)} sends {_key_name(own)}, which does not hold parameters")
        if target in self.content:
            self._change(s, target)
        else:
            self._take(s, target)
        self.content[target] = _Content(content.version)

    def _reduce_scatter(self, s: int, k: int, step: Step) -> None:
        assert step.chunk is not None and step.list is not None
        chunk = step.chunk
        own = (chunk, _OTHERS.get(step.list, step.list), Place.GPU)
        for key in {own, (chunk, step.list, Place.GPU)}:
            self._change(s, key)
            content = self._present(step, key, "reduces")
            marks = content.marks if content is not None and content.version == k else set()
            if not marks or content is None or content.summed != "no":
                raise PlanError(f"{_label(step)} reduces {_key_name(key)}, which holds no gradient of this rank's")
            missing = {(u, t) for u, t in self.expected[chunk] if u in {v for v, _ in marks}} - marks
            if missing:
                u, t = min(missing)
                raise PlanError(
                    f"{_label(step)} reduces {_key_name(key)} before it is complete: the gradient of {self._name(t)} "
                    f"of micro-batch {u} is not in it"
                )
        mine = self.content[own]
        assert mine is not None
        if not self.sliced:
            mine.summed = "slice"
            return
        mine.summed = "yes"
        self._give(s, (chunk, step.list, Place.GPU))
        total = (chunk, "grad32", Place.GPU)
        if step.list == "grad_remote" and total in self.content:
            self._change(s, total)
            held = self.content[total]
            if held is None or held.version != k:
                held = self.content[total] = _Content(k, summed="yes")
            if held.marks & mine.marks:
                raise PlanError(f"{_label(step)} adds a gradient to {_key_name(total)} a second time")
            held.marks |= mine.marks

    def _only_ours(self, content: _Content) -> bool:
        """Whether its gradients are this rank's own, not (wholly) the sum over all."""
        return self.ranks > 1 and bool(content.marks) and content.summed != "yes"

    def _add(self, s: int, k: int, step: Step) -> None:
        assert step.chunk is not None
        grad, param = (step.chunk, "grad", Place.HOST), (step.chunk, "param", Place.HOST)
        total = (step.chunk, "grad32", Place.HOST)
        self._look(s, grad)
        source = param if step.list == "param" or (step.list != "grad" and grad not in self.content) else grad
        self._look(s, source)
        content = self._present(step, source, "adds")
        expected = self.expected.get(step.chunk, set())
        if content is None or content.version != k or not content.marks:
            raise PlanError(f"{_label(step)} adds {_key_name(source)}, which holds no gradient of this iteration")
        if self._only_ours(content):
            raise PlanError(
                f"{_label(step)} adds {_key_name(source)}, which no reduce_scatter has summed over the ranks"
            )
        batches = {u for u, _ in content.marks}
        missing = {(u, t) for u, t in expected if u in batches} - content.marks
        if missing:
            u, t = min(missing)
            raise PlanError(
                f"{_label(step)} adds {_key_name(source)} before it is complete: the gradient of {self._name(t)} of "
                f"micro-batch {u} is not in it"
            )
        if total in self.content:
            self._change(s, total)
        else:
            self._take(s, total)
        held = self.content[total]
        if held is None or held.version != k:
            held = self.content[total] = _Content(k, summed="yes")
        if held.marks & content.marks:
            raise PlanError(f"{_label(step)} adds the gradient of micro-batch {min(batches)} a second time")
        held.marks |= content.marks
        if source is grad:
            self._give(s, grad)

    def _adam(self, s: int, k: int, step: Step) -> None:
        assert step.chunk is not None
        place = Place.HOST if step.kind is Kind.CPU_ADAM else Place.GPU
        chunk = step.chunk
        for name in self.states:
            key = (chunk, name, place)
            self._change(s, key)
            content = self._present(step, key, "needs")
            if content is None or content.version != k:
                raise PlanError(f"{_label(step)} needs {_key_name(key)} as the last update left it, and it is not")
            content.version = k + 1
        param = (chunk, "param", place)
        self._change(s, param)
        content = self._present(step, param, "needs")
        found: set[tuple[int, int]] = set()
        unsummed: list[_Key] = []
        if content is not None and content.version == k:
            found |= content.marks
            unsummed += [param] if self._only_ours(content) else []
        for name in ("grad", "grad32"):
            key = (chunk, name, place)
            self._change(s, key)
            gradient = self.content.get(key)
            if gradient is not None and gradient.version == k:
                found |= gradient.marks
                unsummed += [key] if self._only_ours(gradient) else []
        if unsummed:
            raise PlanError(
                f"{_label(step)} updates with the gradient in {_key_name(unsummed[0])}, which is this rank's own: a "
                f"reduce_scatter {'' if self.sliced else 'and a gather '}of it belong before"
            )
        on_host = (chunk, "grad32", Place.HOST)
        summed = place is Place.HOST or on_host in self.content  # the sum is kept on the host
        if summed and self.plan.settings.clip and self.plan.workload.micro_batches > 1:
            total = self.content.get(on_host)
            added = total.marks if total is not None and total.version == k else set()
            if found - added:
                u, t = min(found - added)
                raise PlanError(
                    f"{_label(step)}: the norm misses the gradient of {self._name(t)} of micro-batch {u}; with "
                    "clipping and several micro-batches a cpu_add adds each gradient before any Adam"
                )
        missing = self.expected[chunk] - found
        if missing:
            u, t = min(missing)
            raise PlanError(
                f"{_label(step)} does not find the gradient of {self._name(t)} of micro-batch {u} on the {place.value}:"
                f" it was not written back (or not added) before; {len(missing)} of {len(self.expected[chunk])} missing"
            )
        self.content[param] = _Content(k + 1)


# --- the most bytes a place can hold ---


@dataclass(frozen=True, kw_only=True)
class _Worst:
    bytes: int
    moment: int
    running: tuple[int, ...]

    def text(self, plan: Plan, place: Place, budget: int) -> str:
        by_id = {step.id: step for step in plan.steps}
        under_way = ", ".join(_label(by_id[i]) for i in self.running[:8]) or "nothing"
        when = "between two iterations" if self.moment < 0 else f"in moment {self.moment}"
        return (
            f"{place.value} may hold {self.bytes} bytes, {self.bytes - budget} more than its budget of {budget}: "
            f"{when}, with {under_way} under way; a memory edge is missing or the budget is too small"
        )


def _worst_case(plan: Plan, program: _Program, walk: _Walk, place: Place) -> _Worst:
    held = sum(plan.layout.payload_bytes(c, name) for c, name, where in walk.initial if where is place)
    held += sum(size for _, where, size in plan.buffers if where is place)
    if place is Place.GPU:
        moments = plan.workload.moments  # the last one's fall has happened, the first one's rise has not
        held += min(moments[-1].peak_bytes, moments[0].peak_bytes)

    frees: list[list[tuple[int, int]]] = [[] for _ in program.queues]  # per queue: (sequence, bytes), ascending
    for s, (where, size) in walk.frees.items():
        if where is place and size:
            frees[program.queue_of[s % program.count]].append((program.sequence(s), size))
    for row in frees:
        row.sort()
    # Each take forces the frees of a prefix of every queue to have happened: how many, per queue.
    groups: dict[tuple[int, ...], int] = {}
    members: dict[tuple[int, ...], list[int]] = {}
    for s, (where, size) in walk.takes.items():
        if where is place and size:
            forced = tuple(bisect_left(row, (done, 0)) for row, done in zip(frees, program.clock[s]))
            groups[forced] = groups.get(forced, 0) + size
            members.setdefault(forced, []).append(s)
    gain, chosen = _closure(list(groups.items()), [[size for _, size in row] for row in frees])
    if not chosen:
        return _Worst(bytes=held, moment=-1, running=())
    prefixes = list(groups)
    started = [s for g in chosen for s in members[prefixes[g]]]
    done = [max(program.clock[s][q] for s in started) for q in range(len(program.queues))]
    running = [s for s in started if program.sequence(s) >= done[program.queue_of[s % program.count]]]
    clock = [i for i in range(program.count) if program.queues[program.queue_of[i]] is Queue.COMPUTE]
    compute = program.queue_of[clock[0]]
    ahead = [program.sequence(s) for s in running if program.queue_of[s % program.count] == compute]
    at = max(ahead) if ahead else done[compute] - 1
    moment = -1
    for back in range(at, -1, -1):
        step = plan.steps[clock[back % len(clock)]]
        if step.kind is Kind.COMPUTE and step.moment is not None:
            moment = step.moment
            break
    return _Worst(bytes=held + gain, moment=moment, running=tuple(sorted({program.step(s).id for s in running})))


def _closure(takes: list[tuple[tuple[int, ...], int]], frees: list[list[int]]) -> tuple[int, list[int]]:
    """Maximum of (bytes of the chosen takes) - (bytes of the frees they force), and which takes to choose.

    takes: (how many frees of each queue's list are forced, bytes); frees: bytes, in order, per queue. A minimum cut:
    source -> take -> last forced free of each queue -> the one before it ... , each free -> sink.
    """
    if not takes:
        return 0, []
    # Frees between two positions that no take tells apart are one node.
    first = len(takes) + 1
    sink_bytes: list[int] = []
    tails: list[int] = []
    heads: list[int] = []
    for q, sizes in enumerate(frees):
        stops = sorted({forced[q] for forced, _ in takes} - {0})
        node_at: dict[int, int] = {}
        begin = 0
        for stop in stops:
            node = first + len(sink_bytes)
            if begin:
                tails.append(node)
                heads.append(node_at[begin])
            sink_bytes.append(sum(sizes[begin:stop]))
            node_at[stop] = node
            begin = stop
        for g, (forced, _) in enumerate(takes):
            if forced[q]:
                tails.append(g + 1)
                heads.append(node_at[forced[q]])
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


def _min_cut(
    tails: NDArray[np.int64],
    heads: NDArray[np.int64],
    capacities: NDArray[np.int64],
    finite: int,
    source: int,
    sink: int,
) -> tuple[int, NDArray[np.bool_]]:
    """(maximum flow, nodes on the source's side of a minimum cut), exact for 64-bit capacities.

    scipy's solver counts in 32 bits. So: solve in units of a power of two, rounded down; that flow is legal, and short
    of the maximum by less than a unit for each finite edge (the first `finite` ones). What is left is a second, small
    flow in what the first one leaves over, where no capacity above that bound matters.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    nodes = sink + 1
    bits = max(0, int(capacities[:finite].sum()).bit_length() - 30)
    unit = 1 << bits

    def solve(at: NDArray[np.int64], to: NDArray[np.int64], size: NDArray[np.int64]) -> tuple[int, NDArray[np.int64]]:
        graph: Any = csr_array((size.astype(np.int32), (at, to)), shape=(nodes, nodes))
        result = maximum_flow(graph, source, sink)
        sent = csr_array(result.flow)[tails, heads]  # net: negative where it goes back
        return int(result.flow_value), np.asarray(sent).ravel().astype(np.int64)

    units = np.minimum(capacities >> bits, (1 << 30) - 1)
    value, sent = solve(tails, heads, units)
    value, sent = value * unit, sent * unit
    left, back = capacities - sent, sent
    if unit > 1:
        bound = (finite + 1) * unit
        assert bound < 2**31
        at, to = np.concatenate((tails, heads)), np.concatenate((heads, tails))
        spare = np.concatenate((np.minimum(left, bound), np.minimum(back, bound)))
        more, extra = solve(at, to, spare)
        value += more
        left, back = left - extra, back + extra
    at, to = np.concatenate((tails[left > 0], heads[back > 0])), np.concatenate((heads[left > 0], tails[back > 0]))
    residual = csr_array((np.ones(len(at), dtype=np.int8), (at, to)), shape=(nodes, nodes))
    reached = np.zeros(nodes, dtype=np.bool_)
    reached[breadth_first_order(residual, source, directed=True, return_predecessors=False)] = True
    return value, reached
