"""Notes on the machine's effects: more GPUs than its host is meant for, kernels without rates for its GPU, one memory
for CPU and GPU, little pinned memory, disks that wear out."""

from __future__ import annotations

from collections.abc import Iterable

from pstar_sim.catalog.attention import ATTENTION, USUAL
from pstar_sim.catalog.attention_rates import attention_rates
from pstar_sim.catalog.loader import as_listed, load_machine, machine_names
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Kind
from pstar_sim.core.timeline import Timeline
from pstar_sim.cost import timed_as
from pstar_sim.units import format_bytes, format_count

ASSUMED_FILLS = 600
"""How often the disks of a node may be filled, where their rating is not known: 600 TB of 1 TB is usual."""
_DAY_S = 86_400.0
_DAYS_OF_A_YEAR = 365.25


def machine_notes(machine: Machine, plans: Iterable[tuple[Plan, Timeline]]) -> list[str]:
    """plans: of the policies that fit."""
    plans = list(plans)
    copies = any(plan.moved_bytes["h2d"] or plan.moved_bytes["d2h"] for plan, _ in plans)
    on_cpu = not plans or any(step.kind is Kind.CPU_UPDATE for plan, _ in plans for step in plan.steps)
    notes = [*added_gpus_notes(machine), *(thread_notes(machine) if on_cpu else [])]
    if machine.pool_bytes is not None:
        notes.append(
            f"{machine.name} has one memory of {format_bytes(machine.pool_bytes)} for CPU and GPU: memory that the "
            "GPU may use is not counted for the host (--host-memory SIZE moves the border), "
            "and offloading is a copy inside it"
        )
    if copies:
        notes += pinned_notes(machine)
    return [*notes, *(line for plan, timeline in plans if (line := disk_life(plan, timeline.iteration_s)))]


def units_notes(machine: Machine, dtype: str) -> list[str]:
    """On matrix products of a dtype that the GPU has no units for."""
    timed = timed_as(machine.gpu, dtype)
    if timed == dtype:
        return []
    return [f"{dtype} is forced: {machine.gpu.name} has no {dtype} units; timed at the rate of {timed}"]


def attention_notes(machine: Machine, kernel: str) -> list[str]:
    shape = machine.gpu.products
    rates = None if shape is None else attention_rates().get(shape.generation)
    if rates is None or kernel in (USUAL, *rates.kernels) or kernel not in ATTENTION or kernel == "math":
        return []
    unknown = f"{kernel} attention has no rates on {machine.gpu.name}, and may not run there"
    return [f"{unknown}: it is timed as {rates.usual}, which torch takes"]


def added_gpus_notes(machine: Machine) -> list[str]:
    """More GPUs than the catalog's machine has share the host of the fewer, and have no link that those lack."""
    listed, count = as_listed(machine), machine.local_ranks
    if listed is None or count <= listed.local_ranks:
        return []
    fewer = "one" if listed.local_ranks == 1 else str(listed.local_ranks)
    host = machine.host
    between = "no NVLink or the like" if machine.peer is None else machine.peer.name
    shared = f"{format_count(host.cores, 'core')} and {format_bytes(host.memory_bytes)} for all"
    nodes = [name for name in machine_names() if _is_node_of(load_machine(name), machine)]
    instead = f"; a node as it is built: {' or '.join(nodes)}" if nodes else ""
    return [f"{format_count(count, 'GPU')} on the host of {fewer}: {between}, {shared}{instead}"]


def _is_node_of(node: Machine, machine: Machine) -> bool:
    return node.gpu.name == machine.gpu.name and node.local_ranks == machine.local_ranks


def pinned_notes(machine: Machine) -> list[str]:
    if machine.host.pinned_bytes is None:
        return []
    rate = format_bytes(machine.link.pageable_bytes_per_s or 0)
    can_pin = format_bytes(machine.host.pinned_bytes)
    return [f"the host can pin {can_pin}: lists of a job beyond that are copied at the pageable rate, {rate}/s"]


def thread_notes(machine: Machine) -> list[str]:
    """On CPU Adam of processes whose threads are said or left by a launcher."""
    threads = machine.host.threads
    if threads is None:
        return []
    own = max(1, machine.host.cores // machine.local_ranks)
    rate = f"{machine.adam_params_per_s / 1e9:.2g} billion parameters/s"
    said = f"CPU Adam: each process has {format_count(threads, 'thread')} of {format_count(own, 'core')}, {rate}"
    if machine.host.as_found:
        said += (
            f", as torchrun and accelerate leave it; with OMP_NUM_THREADS={own} say --cpu-threads {own}, which has "
            f"{machine.host.adam_params_per_s / machine.local_ranks / 1e9:.2g}"
        )
    return [said]


def disk_life(plan: Plan, iteration_s: float) -> str:
    """Words for the bytes written to a node's disks, and their life by their rating or an assumed one; empty if it
    writes none."""
    machine = plan.machine
    disks, written = machine.nvme, plan.moved_bytes.get("nvme_write", 0) * machine.local_ranks
    if disks is None or not written:
        return ""
    million = 1e6 * written * machine.world_size / machine.local_ranks / plan.tokens
    per_day = written / iteration_s * _DAY_S
    rated = disks.life_bytes or ASSUMED_FILLS * disks.memory_bytes
    days = rated / per_day
    life = f"{days / _DAYS_OF_A_YEAR:.1f} years" if days >= _DAYS_OF_A_YEAR else f"{days:,.1f} days"
    by = (
        f"{disks.name} is rated for {rated / 1e12:,.0f} TB"
        if disks.life_bytes
        else f"a rating of {rated / 1e12:,.0f} TB is assumed, {ASSUMED_FILLS} times their room (--set nvme.life=)"
    )
    return (
        f"{plan.policy} writes {format_bytes(written)} per iteration to the disks of a node, {format_bytes(million)} "
        f"per million tokens, {per_day / 1e12:,.1f} TB per day; {by}, which lasts {life}"
    )
