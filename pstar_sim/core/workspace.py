"""[Note: beside payloads] What a run with lists on disks takes of the host beside payloads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import TypeVar

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Place
from pstar_sim.dtypes import DTYPES
from pstar_sim.errors import DoesNotFit
from pstar_sim.units import format_bytes
from pstar_sim.workload.optimizers import MASTERS
from pstar_sim.workload.workload import Workload

T = TypeVar("T")

_INSIDE = ("host without workspace",)  # key of `Workload.derived`
WORKSPACE = "workspace"  # the buffer's name
PIECE_BYTES = 4 << 20  # of a value on its way between a file and a list
BUFFERS_BYTES = 1 << 20  # of all threads that read or write disks, for what is no whole page
CAST_ELEMENTS = 1 << 18  # of a piece: its 1 MiB stays in cache
ROUNDING_BYTES = (4 * 4 + 3 * 8) * CAST_ELEMENTS  # four lists in fp32, and what three operators of a rounding make
WHOLE_BYTES = 16  # per element of a tensor that is updated whole
MOMENT_BYTES = 8_000  # of one micro-batch: hooks, tables, and small blocks that malloc keeps
STEPS_PER_MOMENT, STEP_BYTES = 3, 2_000  # of all micro-batches
LOGGED_ITERATIONS, LOGGED_STEPS = 16, 4_000  # the most that a run keeps logs of, but of 2 iterations at least
LOGGED_BYTES = 500  # of a step: its row, and changes of bytes


def logged_iterations(steps: int) -> int:
    return max(2, min(LOGGED_ITERATIONS, LOGGED_STEPS // max(1, steps)))


def workspace_bytes(w: Workload) -> int:
    trained = [t for t in w.tensors if not t.frozen]
    of_dtype = w.optimizer.states_by_dtype(t.dtype for t in trained)
    states = [each for kinds in of_dtype.values() for each in kinds]
    narrow = max((sum(0 < row.per_element < 4 for row in each.lists) for each in states), default=0)
    casts = 2 + narrow if narrow or any(DTYPES[name].bytes < 4 for name in of_dtype) else 1
    whole = max((t.numel for t in trained), default=0) if any(each.whole for each in states) else 0
    rounding = ROUNDING_BYTES if w.optimizer.masters == MASTERS[1] else 0
    pieces = PIECE_BYTES + BUFFERS_BYTES + casts * 4 * CAST_ELEMENTS
    steps = STEPS_PER_MOMENT * len(w.moments)
    logged = min(LOGGED_ITERATIONS * steps, max(LOGGED_STEPS, 2 * steps))
    tables = MOMENT_BYTES * len(w.moments) // w.micro_batches + STEP_BYTES * steps
    return pieces + WHOLE_BYTES * whole + rounding + tables + LOGGED_BYTES * logged


def bytes_of_all(machine: Machine, *, disks: bool = True) -> int:
    """The budgets of all GPUs, hosts and (`disks`) disks."""
    each = machine.gpu_budget_bytes + machine.host_budget_bytes + (machine.nvme_budget_bytes if disks else 0)
    return each * machine.world_size


def beyond_all(workload: Workload, machine: Machine, *, disks: bool = True, beside_bytes: int = 0) -> bool:
    """Whether weights and states take more than these places together.

    beside_bytes: there too, per rank.
    """
    needed_bytes = workload.weights_bytes + workload.states_bytes + beside_bytes * machine.world_size
    return needed_bytes > bytes_of_all(machine, disks=disks)


def with_host_budget(machine: Machine, budget_bytes: int) -> Machine:
    memory = budget_bytes * machine.local_ranks + machine.host.reserved_bytes
    return replace(machine, host=replace(machine.host, memory_bytes=memory))


def without_workspace(workload: Workload, machine: Machine) -> Machine:
    """One object for the same two, with disks."""
    if machine.nvme is None:
        return machine
    known = workload.derived.setdefault(_INSIDE, {})
    assert isinstance(known, dict)
    if id(machine) not in known:
        budget_bytes = max(1, machine.host_budget_bytes - workspace_bytes(workload))
        known[id(machine)] = machine, with_host_budget(machine, budget_bytes)  # kept, so no other machine has its id
    inside: Machine = known[id(machine)][1]
    return inside


def beside_workspace(
    ask: Callable[[Machine], T], workload: Workload, machine: Machine, on_disks: Callable[[T], object]
) -> T:
    inside = without_workspace(workload, machine)
    if inside is machine:
        return ask(machine)
    size_bytes = workspace_bytes(workload)
    try:
        return ask(inside)
    except DoesNotFit as short:
        # an answer that leaves the disks alone may have the whole host
        lacking = {"host": short.needed_bytes - inside.host_budget_bytes, "nvme": short.short_bytes}
        if lacking.get(short.place, inf) <= size_bytes and not beyond_all(workload, machine, disks=False):
            with suppress(DoesNotFit):
                if not on_disks(whole := ask(machine)):
                    return whole
        if short.place != "host":
            raise
        raise short.restated(
            needed_bytes=short.needed_bytes + size_bytes,
            available_bytes=machine.host_budget_bytes,
            what=f"{short.what}, {format_bytes(size_bytes)} that a run with disks takes beside",
        ) from short


def planned_beside_workspace(ask: Callable[[Machine], Plan], workload: Workload, machine: Machine) -> Plan:
    plan = beside_workspace(ask, workload, machine, lambda made: made.nvme_budget_bytes)
    if machine.nvme is None:
        return plan
    row = (WORKSPACE, Place.HOST, workspace_bytes(workload))
    buffers = (*plan.buffers, row) if plan.nvme_budget_bytes else plan.buffers
    return replace(plan, machine=machine, host_budget_bytes=machine.host_budget_bytes, buffers=buffers)
