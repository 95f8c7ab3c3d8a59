"""Closed forms of ways: least seconds and bytes.

[Note: in closed form] For any stage the first micro-batch comes through the stages before it, the stage computes all,
and the last goes back; where optimizer steps do not meet, the stage alone counts. Bytes are stage 0's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pstar_sim.bounds.stages import seconds_in_step
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.model_shapes import model_entry
from pstar_sim.collector import without_garbage_collection
from pstar_sim.core.plan import Settings
from pstar_sim.core.workspace import bytes_of_all
from pstar_sim.cost import Computing
from pstar_sim.errors import ModelError
from pstar_sim.planner.jobs import Job
from pstar_sim.planner.stages_cut import Cut
from pstar_sim.planner.stages_degrees import Way
from pstar_sim.planner.stages_machines import machine_of_stage
from pstar_sim.units import format_bytes
from pstar_sim.workload.pipeline import cells_of, peak_in_schedule
from pstar_sim.workload.presets.shared import Stage
from pstar_sim.workload.presets.shortened import Shortened, shortened


@dataclass(frozen=True, kw_only=True)
class Closed:
    """Bytes of 0: not counted.

    alike: GPUs.
    """

    way: Way
    bound_s: float = 0.0
    activation_bytes: int = 0
    model_bytes: int = 0
    alike: bool = False


def beyond_all(job: Job, machine: Machine) -> str:
    """Why no way has room; "" if one may."""
    assert job.model is not None and job.seq is not None
    entry, axes = model_entry(job.model), job.but(dtype=job.dtype_on(machine)).given
    whole = shortened(entry, Stage(layers=range(entry.layers)), batch=1, sequence=job.seq, **axes)
    needed_bytes, all_bytes = whole.model_bytes, bytes_of_all(machine)
    if needed_bytes <= all_bytes:
        return ""
    places = "all GPUs and hosts" if machine.nvme is None else "all GPUs, hosts and disks"
    return (
        f"do not fit: weights and optimizer states take {format_bytes(needed_bytes)}, and {places} together have "
        f"{format_bytes(all_bytes)}"
    )


@without_garbage_collection()
def closed_forms(
    job: Job, machine: Machine, ways: Iterable[Way], settings: Settings, missing: dict[str, list[str]], *, counts: bool
) -> list[Closed]:
    """missing: gets what cannot be.
    counts: bytes of ways that recompute less than they might.

    Raises ModelError if nothing can.
    """
    found, refusal = list[Closed](), None
    for way in ways:
        try:
            cut = Cut(job=way.of(job), machine=machine, parallelism=way.parallelism)
            found.append(_closed(cut, way, settings, counts=counts and way.keeps > 0))
        except ModelError as error:
            missing.setdefault(f"by any policy: {error}", []).append(str(way.parallelism))
            refusal = error
    if refusal is not None and not found:
        raise refusal
    return found


def _closed(cut: Cut, way: Way, settings: Settings, *, counts: bool) -> Closed:
    spread, machine = way.parallelism, cut.machine
    if cut.shares:
        jobs = [(one, Computing(one, on).moments_s) for (one, _), on in zip(cut.parts(), cut.machines)]
        return Closed(way=way, bound_s=way.micro_batches * seconds_in_step(jobs, again=True))
    parts = [cut.shortened(stage) for stage in cut.stages]
    bound_s, own = _bound_s(parts, machine, way, settings), parts[:: spread.pipeline]
    if not counts:
        return Closed(way=way, bound_s=bound_s, alike=True)
    sharing = machine_of_stage(machine, spread, 0).data_parallel_size
    model_bytes = sum(one.model_bytes for one in own) // sharing
    size = _activation_bytes(way, own)
    return Closed(way=way, bound_s=bound_s, activation_bytes=size, model_bytes=model_bytes, alike=True)


def _activation_bytes(way: Way, parts: Sequence[Shortened]) -> int:
    """parts: of stage 0."""
    spread = way.parallelism
    filling = spread.pipeline * (1 + (spread.virtual > 1))
    cells = cells_of(spread.schedule, spread.pipeline, min(way.micro_batches, filling), spread.virtual)
    return peak_in_schedule([(one.moments, one.crossings) for one in parts], cells, 0)


def _bound_s(parts: Sequence[Shortened], machine: Machine, way: Way, settings: Settings) -> float:
    before_s = longest_s = 0.0
    stages = way.parallelism.pipeline
    meet = settings.barrier(parts[0].written.workload.compute_dtype) is not None
    for number in range(stages):
        on, seconds = machine_of_stage(machine, way.parallelism, number), []
        for one in parts[number::stages]:
            cost = Computing(one.written.workload, on)
            seconds.append(sum(one.each(cost.moments_s[:-1])))
        step_s = cost.group_s(one.moments[-1].collectives)
        longest_s = max(longest_s, before_s * meet + way.micro_batches * sum(seconds) + step_s)
        before_s += seconds[0]  # of the stage's first part: it begins, and ends, an iteration
    return longest_s
