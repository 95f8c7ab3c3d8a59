"""Checks that every index and name in a plan refers to something, before it is read further or proved."""

from __future__ import annotations

from pstar_sim.core.layout import sum_bytes_of
from pstar_sim.core.plan import MODES, Plan
from pstar_sim.core.step import Kind, to_text
from pstar_sim.core.trips import TRIPS, trips_of
from pstar_sim.dtypes import STORAGE
from pstar_sim.errors import PlanError


def check_fields(plan: Plan) -> None:
    """Every field but the steps. Raises PlanError naming the field."""
    for name in ("gpu_budget_bytes", "host_budget_bytes"):
        if getattr(plan, name) <= 0:
            raise PlanError(f"field {name!r} is {getattr(plan, name)}; it must be positive")
    if plan.nvme_budget_bytes < 0:
        raise PlanError(f"field 'nvme_budget_bytes' is {plan.nvme_budget_bytes}; it must not be negative")
    ranks = plan.machine.data_parallel_size
    if plan.layout.ranks < 1 or ranks % plan.layout.ranks:
        raise PlanError(f"field 'layout.ranks' is {plan.layout.ranks}; it must divide the machine's {ranks} ranks")
    for i, chunk in enumerate(plan.layout.chunks):
        if chunk.spread < 1 or ranks % chunk.spread:
            want = f"it must divide the machine's {ranks} ranks"
            raise PlanError(f"field 'layout.chunks[{i}].spread' is {chunk.spread}; {want}")
    width = sum_bytes_of(plan.workload, plan.settings.sums)
    if plan.layout.sum_bytes != width:
        raise PlanError(
            f"field 'layout.sum_bytes' is {plan.layout.sum_bytes}; with sums={plan.settings.sums!r} it must be {width}"
        )
    _check_layout(plan)
    _check_modes(plan)
    _check_buffers(plan)
    names = {(name, place) for name, place, _ in plan.buffers}
    for resident in plan.initial:
        if resident.chunk == -1 and (resident.list, resident.place) in names:
            continue
        _check_list(plan, resident.chunk, resident.list, "initial")


def _check_modes(plan: Plan) -> None:
    chunks = plan.layout.chunks
    if len(plan.modes) != len(chunks):
        raise PlanError(f"field 'modes' has {len(plan.modes)} entries; the layout has {len(chunks)} chunks")
    updated = {plan.layout.chunk_of[t] for tensors in plan.workload.gradients for t in tensors}
    for i, mode in enumerate(plan.modes):
        # A trainable chunk that gets no gradient in the workload (an expert that no token reached) has no states
        # either.
        if mode not in MODES or (chunks[i].frozen and mode != "frozen") or (mode == "frozen" and i in updated):
            kind = "frozen" if chunks[i].frozen else "trainable"
            raise PlanError(f"field 'modes[{i}]' is {mode!r}; chunk {i} is {kind} (known modes: {', '.join(MODES)})")


def _check_buffers(plan: Plan) -> None:
    for i, (name, place, size) in enumerate(plan.buffers):
        if size < 0:
            raise PlanError(f"field 'buffers[{i}]' has {size} bytes; it must not be negative")
        if (name, place) in [row[:2] for row in plan.buffers[:i]]:
            raise PlanError(f"field 'buffers[{i}]' is {name!r} on the {place.value} a second time")


def check_step_fields(plan: Plan) -> None:
    """Each step by itself. Raises PlanError naming the step."""
    chunks, trips = plan.layout.chunks, trips_of(plan.workload)
    for i, step in enumerate(plan.steps):
        where = f"steps[{i}] ({to_text(step)!r})"
        if step.moment is not None and step.moment >= len(plan.workload.moments):
            raise PlanError(f"{where}: the workload has {len(plan.workload.moments)} moments")
        if step.chunk is not None and step.chunk >= len(chunks):
            raise PlanError(f"{where}: the layout has {len(chunks)} chunks")
        if step.kind is Kind.COMPUTE:
            if step.moment is None:
                raise PlanError(f"{where}: a compute step needs moment=")
        elif step.kind in TRIPS:
            if (step.kind, step.stash) not in trips:
                own = sum(kind is step.kind for kind, _ in trips)
                raise PlanError(f"{where}: needs stash=; the workload has {own} for a {step.kind.value}")
        elif step.chunk is None:
            raise PlanError(f"{where}: a {step.kind.value} step needs chunk=")
        elif step.list is not None:
            _check_list(plan, step.chunk, step.list, where)


def _check_list(plan: Plan, chunk: int, list_name: str, where: str) -> None:
    try:
        plan.layout.payload_bytes(chunk, list_name)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from None


def _check_layout(plan: Plan) -> None:
    w = plan.workload
    if plan.layout.optimizer != w.optimizer:
        raise PlanError("field 'layout.optimizer' differs from 'workload.optimizer'")
    seen: set[int] = set()
    for c in plan.layout.chunks:
        where = f"layout.chunks[{c.index}]"
        end = 0
        for s in c.slots:
            if s.tensor >= len(w.tensors) or w.tensors[s.tensor].tied_to is not None or s.tensor in seen:
                raise PlanError(
                    f"field '{where}.slots' names tensor {s.tensor}, which is unknown, tied or placed already"
                )
            t = w.tensors[s.tensor]
            seen.add(s.tensor)
            kind = 0 if t.frozen else w.optimizer.kind_of(t.name, t.shape)
            size = STORAGE[c.dtype].stored(t.shape)
            if (size, t.dtype, t.frozen, t.group, kind, t.spread) != (
                s.numel, c.dtype, c.frozen, c.group, c.kind, c.spread
            ):  # fmt: skip
                want = "in size, dtype, freezing, group or states"
                raise PlanError(f"field '{where}' does not fit tensor {t.name!r} {want}")
            if s.offset < end or s.offset + s.numel > c.numel:
                raise PlanError(f"field '{where}.slots': tensor {t.name!r} overlaps another or the chunk's end")
            end = s.offset + s.numel
    missing = [t.name for i, t in enumerate(w.tensors) if t.tied_to is None and i not in seen]
    if missing:
        raise PlanError(f"field 'layout' has no place for tensor {missing[0]!r}")
