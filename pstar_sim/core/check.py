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
from dataclasses import dataclass, field, replace

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.check_fields import check_fields
from pstar_sim.core.check_job import check_budgets, check_machine, check_workload_of
from pstar_sim.core.check_stashes import check_stash_step, check_stashes
from pstar_sim.core.figures import byte_figures, not_checked
from pstar_sim.core.plan import Plan, Resident
from pstar_sim.core.step import Kind, Place, Queue, Step
from pstar_sim.core.unrolled import OTHERS, Unrolled, label
from pstar_sim.core.walk import Walk
from pstar_sim.core.worst_case import worst_case
from pstar_sim.errors import FalseFigures, PlanError
from pstar_sim.units import format_bytes
from pstar_sim.workload.workload import DTYPE_BYTES, Workload

__all__ = ["CheckReport", "check_plan", "prove"]

MOST_UNROLLED = 4


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What was proved. peak_bytes: the most each place can hold in any legal interleaving (exact). peak_at: the moment
    it holds that in (-1: at the cut). running: the steps under way then. iterations: how many had to be unrolled (2
    unless a queue may run further ahead). figures: names of what the plan states that was computed again and is so.
    not_checked: a line for each kind of thing that it states and that was not ([Note: what a check says])."""

    steps: int
    moments: int
    iterations: int
    peak_bytes: dict[str, int]
    peak_at: dict[str, int]
    running: dict[str, tuple[int, ...]]
    budget_bytes: dict[str, int] = field(default_factory=dict)
    figures: tuple[str, ...] = ()
    not_checked: tuple[str, ...] = ()

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
        if self.figures:
            lines.append(f"as stated: {', '.join(self.figures)}")
        lines += [f"not checked: {line}" for line in self.not_checked]
        return "\n".join(lines)


def check_plan(plan: Plan, workload: Workload | None = None, machine: Machine | None = None) -> CheckReport:
    """Prove the plan, and hold its figures of bytes against the proof; where they are given, also that it is for this
    workload and machine. Raises PlanError with the first violation, naming steps, moment and bytes; FalseFigures with
    every figure that is false."""
    if workload is not None:
        check_workload_of(plan, workload)
    if machine is not None:
        check_machine(plan, machine)
    report = prove(plan)
    stated = byte_figures(plan, report.peak_bytes)
    if stated.false:
        raise FalseFigures(stated.false)
    why = dict.fromkeys(plan.predictions, "seconds and bounds, which `pstar check` computes")
    rest = not_checked(plan, stated.checked, why, workload=workload is not None, machine=machine is not None)
    return replace(report, figures=stated.checked, not_checked=rest)


def prove(plan: Plan) -> CheckReport:
    """That every legal interleaving of the steps is correct and within budgets that the plan's machine has. Raises
    PlanError with the first violation, naming steps, moment and bytes."""
    check_fields(plan)
    check_budgets(plan, plan.machine)
    order = _check_structure(plan)
    program = Unrolled(plan, order, 2)
    iterations = 2
    while not program.bounded():
        if iterations == MOST_UNROLLED:
            raise PlanError(
                f"nothing keeps queue {program.unbounded_queue()} from running {MOST_UNROLLED - 1} iterations ahead of "
                "another; an edge to a step of the previous iteration (id@-1) is missing"
            )
        iterations += 1
        program = Unrolled(plan, order, iterations)
    _check_barrier(plan, program)
    check_stashes(plan, program)
    walk = Walk(plan, program)
    walk.run()
    _check_pins(plan)
    budgets = plan.budgets
    if any(r.place is Place.NVME for r in plan.initial) or any(s.queue is Queue.NVME for s in plan.steps):
        budgets[Place.NVME] = plan.nvme_budget_bytes
    peaks: dict[str, int] = {}
    moments: dict[str, int] = {}
    running: dict[str, tuple[int, ...]] = {}
    for place, budget in budgets.items():
        worst = worst_case(plan, program, walk, place)
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
    Kind.STASH_OUT: (Queue.D2H,),
    Kind.STASH_IN: (Queue.H2D,),
}
_COLLECTIVES = (Kind.GATHER, Kind.REDUCE_SCATTER)
_NEEDS_LIST = (Kind.FETCH, Kind.WRITEBACK, Kind.DROP, Kind.ALLOC, Kind.FREE, Kind.NVME_READ, Kind.NVME_WRITE)


def _check_structure(plan: Plan) -> list[int]:
    """Positions of the steps in a legal order of one iteration."""
    steps, w = plan.steps, plan.workload
    position: dict[int, int] = {}
    for i, step in enumerate(steps):
        if step.id < 0:
            raise PlanError(f"{label(step)} has id {step.id}; ids are whole numbers from 0")
        if step.id in position:
            raise PlanError(f"step id {step.id} is used twice")
        position[step.id] = i
    for step in steps:
        for ref in step.after:
            if ref.id not in position:
                raise PlanError(f"{label(step)} is after step {ref.id}, which the plan does not have")
            if ref.back not in (0, 1):
                raise PlanError(f"{label(step)} is after {ref}; only the previous iteration (@-1) can be named")
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
        raise PlanError(f"{label(step)} has via={step.via}; only copies between host and gpu can go another way")
    if step.queue not in queues:
        raise PlanError(f"{label(step)} is on queue {step.queue.value}; it belongs on {', '.join(queues)}")
    if step.stash is not None and step.kind not in (Kind.STASH_OUT, Kind.STASH_IN):
        raise PlanError(f"{label(step)} has stash={step.stash}; only stash_out and stash_in move one")
    moments = len(plan.workload.moments)
    if step.moment is not None and not 0 <= step.moment < moments:
        raise PlanError(f"{label(step)} has moment={step.moment}; the workload has {moments}, from 0")
    if step.kind is Kind.COMPUTE:
        if step.bytes:
            raise PlanError(f"{label(step)} has bytes={step.bytes}; a moment moves none")
        if step.chunk is not None or step.list is not None or step.place is not None:
            raise PlanError(f"{label(step)} has chunk=, list= or place=; what a moment uses is in the workload")
        return
    if step.kind in (Kind.STASH_OUT, Kind.STASH_IN):
        check_stash_step(plan, step)
        return
    if step.chunk is None or not 0 <= step.chunk < len(plan.layout.chunks):
        raise PlanError(f"{label(step)} needs chunk=, below {len(plan.layout.chunks)}")
    if step.place is not None and step.kind not in _HAS_PLACE:
        raise PlanError(f"{label(step)} has place={step.place}; where a {step.kind.value} works follows from its kind")
    if step.kind in _COLLECTIVES:
        _check_collective(plan, step)
    elif step.kind in _NEEDS_LIST:
        if step.list is None:
            raise PlanError(f"{label(step)} needs list=")
        payload = plan.layout.payload_bytes(step.chunk, step.list)
        allowed = {payload}
        if step.kind in (Kind.FETCH, Kind.WRITEBACK):
            allowed.add(plan.layout.slice_numel(step.chunk) * 4)  # a policy that moves the list in fp32
        if step.list in OTHERS and step.kind not in (Kind.DROP, Kind.FREE, Kind.ALLOC):
            raise PlanError(f"{label(step)}: the slices of other ranks are gathered, reduced and dropped, not copied")
        if step.bytes not in allowed:
            raise PlanError(f"{label(step)} has bytes={step.bytes}; the payload has {payload} bytes")
    else:
        _check_update(plan, step)
    if step.kind in (Kind.ALLOC, Kind.FREE):
        if step.place is None:
            raise PlanError(f"{label(step)} needs place=")
    elif step.kind is Kind.DROP and step.place not in (None, Place.GPU):
        raise PlanError(f"{label(step)} has place={step.place}; drop frees the gpu")


_HAS_PLACE = (Kind.ALLOC, Kind.FREE, Kind.DROP)
_SUM_BYTES = 8
"""A parameter, of grad32 += grad: grad32 is read and written."""


def _check_update(plan: Plan, step: Step) -> None:
    """Adam, and the sum of gradients on the host. bytes: memory traffic of the trainable parameters of this rank's
    slice of the chunk, padding left out."""
    assert step.chunk is not None
    chunk, w = plan.layout.chunks[step.chunk], plan.workload
    params = 0 if chunk.frozen else -(-sum(slot.numel for slot in chunk.slots) // plan.layout.ranks)
    if step.kind is Kind.CPU_ADD:
        each = _SUM_BYTES + DTYPE_BYTES[chunk.dtype]
        if step.list not in (None, "grad", "param"):
            raise PlanError(f"{label(step)} has list={step.list}; it adds grad, or the gradient in param")
    else:
        each = w.optimizer.dram_bytes_per_param
        if step.list is not None:
            raise PlanError(f"{label(step)} has list={step.list}; an update works on all lists of its chunk")
    if step.bytes != params * each:
        raise PlanError(
            f"{label(step)} has bytes={step.bytes}; it needs its memory traffic, {each} bytes of each of {params} "
            f"parameters, {params * each} bytes"
        )


def _check_collective(plan: Plan, step: Step) -> None:
    assert step.chunk is not None
    ranks = len(plan.machine.ranks)
    if ranks == 1:
        raise PlanError(f"{label(step)}: machine {plan.machine.name!r} has one gpu; there is nobody to exchange with")
    allowed: tuple[str, ...] = ("param", "grad", "grad32")
    if plan.layout.ranks > 1:
        allowed = ("remote",) if step.kind is Kind.GATHER else ("remote", "grad_remote")
    if step.list not in allowed:
        raise PlanError(f"{label(step)} needs list= one of {', '.join(allowed)}")
    whole = plan.layout.payload_bytes(step.chunk, OTHERS.get(step.list, step.list)) * plan.layout.ranks
    if step.bytes != whole:
        raise PlanError(f"{label(step)} has bytes={step.bytes}; the whole chunk has {whole} bytes")


_ADAM_OF = {"cpu": Kind.CPU_ADAM, "pin": Kind.GPU_ADAM, "stream": Kind.GPU_ADAM}


def _check_updates(plan: Plan) -> None:
    """Every chunk with a gradient has one Adam an iteration, no other chunk has one."""
    trained = {plan.layout.chunk_of[t]: m for m, row in enumerate(plan.workload.gradients) for t in row}  # the last one
    done: dict[int, Step] = {}
    for step in plan.steps:
        if step.kind not in (Kind.CPU_ADAM, Kind.GPU_ADAM):
            continue
        assert step.chunk is not None
        if step.chunk in done:
            raise PlanError(f"{label(step)} updates a chunk that {label(done[step.chunk])} updates already")
        if step.chunk not in trained:
            raise PlanError(f"{label(step)} updates a chunk that gets no gradient")
        last = trained[step.chunk]
        if step.moment not in (None, last):
            raise PlanError(f"{label(step)} has moment={step.moment}; the chunk's last gradient comes in moment {last}")
        mode = plan.modes[step.chunk]
        if _ADAM_OF[mode] is not step.kind:
            raise PlanError(f"{label(step)} is not how a chunk of mode {mode!r} is updated ({_ADAM_OF[mode].value})")
        done[step.chunk] = step
    for chunk in sorted(trained):
        if chunk not in done:
            raise PlanError(f"chunk {chunk} gets gradients but no cpu_adam or gpu_adam step updates it")


def _check_pins(plan: Plan) -> None:
    """Of the two modes with Adam on the gpu, "pin" keeps the states there and "stream" does not."""
    states = [name for name, _ in plan.layout.state_bytes]
    for step in plan.steps if states else ():
        if step.kind is Kind.GPU_ADAM and step.chunk is not None:
            stay = all(Resident(step.chunk, name, Place.GPU) in plan.initial for name in states)
            mode = plan.modes[step.chunk]
            if (mode == "pin") != stay:
                where = "between two iterations" if stay else "only while they are updated"
                raise PlanError(f"chunk {step.chunk} has mode {mode!r}, but its states are on the gpu {where}")


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
        stuck = [label(steps[i]) for i in range(count) if open_edges[i]]
        raise PlanError(
            f"a deadlock: {len(stuck)} steps wait for each other in a circle, among them {', '.join(stuck[:6])}"
        )
    return order


def _check_barrier(plan: Plan, program: Unrolled) -> None:
    w = plan.workload
    barrier = plan.settings.barrier(w.dtype)
    if barrier is None:
        return
    (last,) = (i for i, s in enumerate(plan.steps) if s.kind is Kind.COMPUTE and s.moment == len(w.moments) - 1)
    norm = _norm_needs(plan) if plan.settings.clip else []
    for i, step in enumerate(plan.steps):
        if step.kind not in (Kind.CPU_ADAM, Kind.GPU_ADAM):
            continue
        for j, why in ((last, f"the barrier ({barrier}) forbids it"), *norm):
            if not program.precedes(j, i):
                raise PlanError(f"{label(step)} may start before {label(plan.steps[j])} has ended; {why}")


def _norm_needs(plan: Plan) -> list[tuple[int, str]]:
    """What an iteration's gradient norm needs, beside its gradients having arrived: (position of a step, why). Each
    queue runs its steps in order, so the last one of a kind stands for all of them."""
    # Where every rank holds everything it has the whole sum only when the other ranks' slices of it are back.
    summed = Kind.REDUCE_SCATTER if plan.layout.ranks > 1 else Kind.GATHER
    needs: dict[Kind, str] = {
        Kind.CPU_ADD: "the gradient norm (clip) needs all gradients added first",
        summed: "the gradient norm (clip) needs all gradients summed over the ranks first",
    }
    last = {step.kind: i for i, step in enumerate(plan.steps)}
    return [(last[kind], why) for kind, why in needs.items() if kind in last]
