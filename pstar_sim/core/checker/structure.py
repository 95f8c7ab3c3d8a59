"""All that can be checked step by step, and that the steps have an order."""

from __future__ import annotations

from collections.abc import Callable

from pstar_sim.core.checker.operations_in_parts import check_part, check_parts
from pstar_sim.core.checker.order import legal_order
from pstar_sim.core.checker.trips import check_trip_step
from pstar_sim.core.checker.unrolled import OTHERS, label
from pstar_sim.core.plan import Plan, Resident
from pstar_sim.core.step import DISK_QUEUES, PAGEABLE, UNFUSED, Kind, Place, Queue, Step
from pstar_sim.core.trips import TRIPS
from pstar_sim.dtypes import STORAGE
from pstar_sim.errors import PlanError

_QUEUES: dict[Kind, tuple[Queue, ...]] = {
    Kind.COMPUTE: (Queue.COMPUTE,),
    Kind.FETCH: (Queue.H2D,),
    Kind.WRITEBACK: (Queue.D2H,),
    Kind.DROP: tuple(Queue),
    Kind.ALLOC: tuple(Queue),
    Kind.FREE: tuple(Queue),
    Kind.CPU_ADD: (Queue.ADAM,),
    Kind.CPU_UPDATE: (Queue.ADAM,),
    Kind.GPU_UPDATE: (Queue.COMPUTE,),
    Kind.GATHER: (Queue.NET,),
    Kind.REDUCE_SCATTER: (Queue.NET,),
    Kind.NVME_READ: (Queue.NVME,),
    Kind.NVME_WRITE: DISK_QUEUES,
    **{kind: (queue,) for kind, queue in TRIPS.items()},
}


def check_structure(plan: Plan) -> list[int]:
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
                raise PlanError(f"{label(step)} waits for step {ref.id}, which is not in the plan")
            if ref.back not in (0, 1):
                raise PlanError(f"{label(step)} waits for {ref}; only the previous iteration (@-1) can be named")
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
    check_parts(plan)
    _check_updates(plan)
    return legal_order(steps, position)


def _check_step(plan: Plan, step: Step) -> None:
    queues = _QUEUES[step.kind]
    if step.via == UNFUSED and step.kind is not Kind.GPU_UPDATE:
        raise PlanError(f"{label(step)} has via={step.via}; only updates on the gpu can")
    if step.via == PAGEABLE and step.kind not in (Kind.FETCH, Kind.WRITEBACK, Kind.STASH_OUT, Kind.STASH_IN):
        raise PlanError(f"{label(step)} has via={step.via}; only copies between host and gpu can go another way")
    if step.queue not in queues:
        raise PlanError(f"{label(step)} is on queue {step.queue.value}; it belongs on {', '.join(queues)}")
    if step.stash is not None and step.kind not in TRIPS:
        raise PlanError(f"{label(step)} has stash={step.stash}; only {', '.join(TRIPS)} steps move one")
    moments = len(plan.workload.moments)
    if step.moment is not None and not 0 <= step.moment < moments:
        raise PlanError(f"{label(step)} has moment={step.moment}; the workload has {moments}, from 0")
    if step.kind not in _OF_NO_CHUNK:
        _check_chunk(plan, step)
    check_part(plan, step)
    _CHECKS[step.kind](plan, step)


def _check_moment(plan: Plan, step: Step) -> None:
    if step.bytes:
        raise PlanError(f"{label(step)} has bytes={step.bytes}; a moment moves no bytes")
    if step.chunk is not None or step.list is not None or step.place is not None:
        raise PlanError(f"{label(step)} has chunk=, list= or place=; the workload says which chunks a moment uses")


def _check_chunk(plan: Plan, step: Step) -> None:
    if step.chunk is None or not 0 <= step.chunk < len(plan.layout.chunks):
        raise PlanError(f"{label(step)} needs chunk=, below {len(plan.layout.chunks)}")
    if step.place is not None and step.kind not in (Kind.ALLOC, Kind.FREE, Kind.DROP):
        raise PlanError(f"{label(step)} has place={step.place}; where a {step.kind.value} works follows from its kind")


def _payload(plan: Plan, step: Step) -> int:
    assert step.chunk is not None
    if step.list is None:
        raise PlanError(f"{label(step)} needs list=")
    return plan.layout.payload_bytes(step.chunk, step.list)


def _check_bytes(step: Step, payload: int, *others: int) -> None:
    if step.bytes != payload and step.bytes not in others:
        raise PlanError(f"{label(step)} has bytes={step.bytes}; the payload has {payload} bytes")


def _check_copy(plan: Plan, step: Step) -> None:
    """A policy may move the list in fp32."""
    payload = _payload(plan, step)
    if step.list in OTHERS:
        raise PlanError(f"{label(step)}: the slices of other ranks are gathered, reduced and dropped, not copied")
    assert step.chunk is not None
    if step.part is not None:
        payload = plan.layout.part_bytes(step.chunk, step.part, payload)
    in_fp32 = plan.layout.slice_numel(step.chunk) * 4
    _check_bytes(step, payload, *([in_fp32] if step.kind in (Kind.FETCH, Kind.WRITEBACK) and step.part is None else []))


def _check_room(plan: Plan, step: Step) -> None:
    _check_bytes(step, _payload(plan, step))
    if step.place is None:
        raise PlanError(f"{label(step)} needs place=")


def _check_drop(plan: Plan, step: Step) -> None:
    _check_bytes(step, _payload(plan, step))
    if step.place not in (None, Place.GPU):
        raise PlanError(f"{label(step)} has place={step.place}; drop frees the gpu")


def _check_update(plan: Plan, step: Step) -> None:
    """An Adam, or an add of gradients on the host; `bytes` is the traffic of this rank's slice, without padding and
    frozen parameters."""
    assert step.chunk is not None
    chunk = plan.layout.chunks[step.chunk]
    params = plan.layout.trained_params[step.chunk]
    if step.kind is Kind.CPU_ADD:
        width = STORAGE[chunk.dtype].bytes
        traffic = params * (2 * max(plan.layout.sum_bytes, width) + width)  # the sum is read and written
        if step.list not in (None, "grad", "param"):
            raise PlanError(
                f"{label(step)} has list={step.list}; list= must be grad, or param where the gradient lies there"
            )
    else:
        traffic = plan.layout.updates_bytes[step.chunk]
        if step.list is not None:
            raise PlanError(f"{label(step)} has list={step.list}; an update works on all lists of its chunk")
    each = traffic // params if params else 0
    if step.part is not None:
        traffic = plan.layout.part_bytes(step.chunk, step.part, traffic)
    if step.bytes != traffic:
        share = "" if step.part is None else f"part {step.part} of "
        raise PlanError(
            f"{label(step)} has bytes={step.bytes}; bytes= must be its memory traffic, {traffic} ({share}{params} "
            f"parameters, {each} bytes each)"
        )


def _check_collective(plan: Plan, step: Step) -> None:
    assert step.chunk is not None
    ranks = plan.machine.data_parallel_size
    if ranks == 1:
        raise PlanError(f"{label(step)}: machine {plan.machine.name!r} has one gpu; collectives need several")
    allowed: tuple[str, ...] = ("param", "grad", "grad32")
    if plan.layout.ranks > 1:
        allowed = ("remote",) if step.kind is Kind.GATHER else tuple(OTHERS)
    if step.list not in allowed:
        raise PlanError(f"{label(step)} needs list= one of {', '.join(allowed)}")
    slices = plan.layout.slices_of(step.chunk)
    whole = plan.layout.payload_bytes(step.chunk, OTHERS.get(step.list, step.list)) * slices
    if step.bytes != whole:
        raise PlanError(f"{label(step)} has bytes={step.bytes}; the whole chunk has {whole} bytes")


_OF_NO_CHUNK = (Kind.COMPUTE, *TRIPS)
_CHECKS: dict[Kind, Callable[[Plan, Step], None]] = {
    Kind.COMPUTE: _check_moment,
    Kind.FETCH: _check_copy,
    Kind.WRITEBACK: _check_copy,
    Kind.DROP: _check_drop,
    Kind.ALLOC: _check_room,
    Kind.FREE: _check_room,
    Kind.CPU_ADD: _check_update,
    Kind.CPU_UPDATE: _check_update,
    Kind.GPU_UPDATE: _check_update,
    Kind.GATHER: _check_collective,
    Kind.REDUCE_SCATTER: _check_collective,
    Kind.NVME_READ: _check_copy,
    Kind.NVME_WRITE: _check_copy,
    **dict.fromkeys(TRIPS, check_trip_step),
}
_ADAM_OF = {"cpu": Kind.CPU_UPDATE, "pin": Kind.GPU_UPDATE, "stream": Kind.GPU_UPDATE}


def _check_updates(plan: Plan) -> None:
    """One Adam per iteration for every chunk with a gradient, and no other."""
    trained = {plan.layout.chunk_of[t]: m for m, row in enumerate(plan.workload.gradients) for t in row}  # the last
    done: dict[int, Step] = {}
    for step in plan.steps:
        if step.kind not in (Kind.CPU_UPDATE, Kind.GPU_UPDATE):
            continue
        assert step.chunk is not None
        other = done.get(step.chunk)
        if other is not None and (step.part is None or other.part is None):
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


def check_pins(plan: Plan) -> None:
    """Mode "pin" keeps the states of its Adam on the gpu, "stream" does not."""
    for step in plan.steps:
        if step.kind is Kind.GPU_UPDATE and step.chunk is not None and plan.layout.states_of(step.chunk).names:
            states = plan.layout.states_of(step.chunk).names
            stay = all(Resident(step.chunk, name, Place.GPU) in plan.initial for name in states)
            mode = plan.modes[step.chunk]
            if (mode == "pin") != stay:
                where = "between two iterations" if stay else "only while they are updated"
                raise PlanError(f"chunk {step.chunk} has mode {mode!r}, but its states are on the gpu {where}")
