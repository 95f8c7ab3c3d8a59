"""The jobs of the stages of a pipeline.

[Note: cut by speed] Whale's rule: each layer goes to the stage that then ends first, by the cost model, with embedding
and head where they are. A stage without room gives one away, until all have room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.model_shapes import ModelEntry, model_entry
from pstar_sim.core.layout import build_layout
from pstar_sim.cost import CostModel
from pstar_sim.errors import ModelError, PstarError
from pstar_sim.planner.jobs import Job
from pstar_sim.planner.stages_machines import machine_of_stage
from pstar_sim.workload.parallelism import CUTS, Parallelism
from pstar_sim.workload.pipeline import Part, cells_of, in_schedule
from pstar_sim.workload.presets import check_blocks, check_split, stage_of
from pstar_sim.workload.presets.shared import Stage
from pstar_sim.workload.workload import Workload


def stages_of(
    job: Job,
    machine: Machine,
    parallelism: Parallelism,
    *,
    shape: ModelEntry | None = None,
    most: Sequence[int] = (),
) -> list[Workload]:
    """Of one rank of each stage. Raises PstarError for a job that cannot be cut so.

    shape: the model's, if it is not in the catalog.
    most: layers of each stage that is cut by speed, if limited.
    """
    parts = list(micro_batch_of_parts(job, machine, parallelism, shape=shape, most=most))
    cells = cells_of(parallelism.schedule, parallelism.pipeline, job.micro_batches or 1, parallelism.virtual)
    return [in_schedule(parts[number :: len(cells)], cells, number) for number in range(len(cells))]


def micro_batch_of_parts(
    job: Job,
    machine: Machine,
    parallelism: Parallelism,
    *,
    shape: ModelEntry | None = None,
    most: Sequence[int] = (),
) -> Iterator[Part]:
    data = parallelism.data_on(machine.world_size)
    if job.model is None or job.batch is None or job.seq is None:
        raise PstarError("a trace is of a whole model; give --model, whose preset is cut into stages")
    entry = shape or model_entry(job.model)
    check_way(entry, job, machine, parallelism)
    axes = job.but(dtype=job.dtype_on(machine)).given
    for number, layers in enumerate(layers_of(job, machine, parallelism, shape=shape, most=most)):
        stage = _part(parallelism, number, layers)
        yield stage_of(entry, stage, batch=job.batch // data, sequence=job.seq, **axes)


def check_way(
    entry: ModelEntry, job: Job, machine: Machine, parallelism: Parallelism, *, sequences: str = "batch"
) -> None:
    """Raises PstarError for what no workload of the stages can be written for.

    sequences: what the job's batch is called.
    """
    assert job.batch is not None and job.seq is not None
    data = parallelism.data_on(machine.world_size)
    parts = _even(entry.layers, parallelism, entry.name)
    check_split(entry, _part(parallelism, 0, parts[0]), sequence=job.seq, **job.given)
    if job.batch % data:
        raise PstarError(
            f"{sequences} is {job.batch}; the {data} ranks of a stage share it, so give a multiple of {data}"
        )
    check_blocks(entry, job)


def _part(parallelism: Parallelism, number: int, layers: range) -> Stage:
    return Stage(
        layers=layers,
        first=number == 0,
        last=number == parallelism.pipeline * parallelism.virtual - 1,
        tensor=parallelism.tensor,
        sequence=parallelism.sequence,
        context=parallelism.context,
        experts=parallelism.experts,
    )


def layers_of(
    job: Job, machine: Machine, parallelism: Parallelism, *, shape: ModelEntry | None, most: Sequence[int]
) -> list[range]:
    assert job.model is not None and job.batch is not None and job.seq is not None
    entry, stages = shape or model_entry(job.model), parallelism.pipeline
    even = _even(entry.layers, parallelism, job.model)
    if parallelism.cut == CUTS[0] or stages == 1:
        return even
    axes = job.but(dtype=job.dtype_on(machine)).given
    batch = job.batch // parallelism.data_on(machine.world_size)
    each_s, ends_s = [], []
    for number in range(stages):
        own, seconds = machine_of_stage(machine, parallelism, number), []
        for layers in (1, 2):
            part = _part(parallelism, number, range(layers))
            one, _ = stage_of(entry, part, batch=batch, sequence=job.seq, **axes)
            seconds.append(sum(CostModel(one, own, build_layout(one)).moments_s))
        each_s.append(seconds[1] - seconds[0])
        ends_s.append(seconds[0])
    counts = [1] * stages
    for _ in range(entry.layers - stages):
        able = [n for n in range(stages) if not most or counts[n] < most[n]]
        counts[min(able, key=lambda n: ends_s[n] + counts[n] * each_s[n])] += 1
    return [range(begin, end) for begin, end in pairwise(accumulate(counts, initial=0))]


def _even(layers: int, spread: Parallelism, model: str) -> list[range]:
    """Of each part of each stage."""
    parts = spread.pipeline * spread.virtual
    if parts > layers:
        said = f"pp is {spread.pipeline}" + (f" and v is {spread.virtual}" if spread.virtual > 1 else "")
        what = "stages" if spread.virtual == 1 else "parts of stages"
        raise ModelError(f"model {model}: {said}; the model has {layers} blocks, so at most {layers} {what}")
    each, more = divmod(layers, parts)
    ends = [each * (n + 1) + min(more, n + 1) for n in range(parts)]
    return [range(begin, end) for begin, end in zip([0, *ends], ends)]
