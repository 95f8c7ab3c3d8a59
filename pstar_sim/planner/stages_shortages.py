"""What ways lack."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.model_shapes import ModelEntry
from pstar_sim.core.plan import Settings
from pstar_sim.errors import CannotPlan, DoesNotFit, ModelError
from pstar_sim.planner.jobs import Job
from pstar_sim.planner.memory_needs import shortage
from pstar_sim.planner.stages_cut import stages_of
from pstar_sim.planner.stages_degrees import Way, with_shards
from pstar_sim.planner.stages_machines import machine_of_stage
from pstar_sim.policy.registry import Policy, sharded_as
from pstar_sim.workload.loading import WHOLE, Loading
from pstar_sim.workload.parallelism import CUTS


def stages_shortage(
    job: Job,
    machine: Machine,
    policy: str | Policy,
    ways: Iterable[Way],
    settings: Settings,
    *,
    shape: ModelEntry | None = None,
    loading: Loading = WHOLE,
) -> DoesNotFit | CannotPlan | None:
    """Why no way has room, by the one that lacks least; None if one has. Of an even cut the first, the last and the one
    that trains most decide: others have no more layers than the first, fewer micro-batches in flight, and neither
    embedding nor head.

    shape: as in `ways_of`.
    loading: as in `fits`.

    Raises ModelError for a job that cannot be cut in any of them.
    """
    refusals: list[DoesNotFit | CannotPlan] = []
    unable: list[ModelError] = []
    every = list(ways)
    alone = len(every) == 1
    for _, way in (pair for each in every for pair in with_shards({"": policy}, each, machine, alone=alone)):
        spread = way.parallelism
        try:
            workloads = stages_of(way.of(job), machine, spread, shape=shape)
        except ModelError as error:
            unable.append(error)
            continue
        stages = range(len(workloads))
        most = max(stages, key=lambda stage: workloads[stage].trainable_params)
        for stage in stages if spread.cut != CUTS[0] else sorted({0, most, stages[-1]}):
            part = machine_of_stage(machine, spread, stage)
            where = f"{spread}, stage {stage}" if spread.pipeline > 1 else str(spread)
            try:
                short = shortage(
                    sharded_as(policy, spread.shard), workloads[stage], part, settings, loading=loading, others=False
                )
            except CannotPlan as error:
                refusals.append(CannotPlan(f"{where}: {error}"))
                break
            if short is not None:
                refusals.append(short.restated(what=f"{where}: {short.what}"))
                break
        else:
            return None
    if unable and not refusals:
        raise unable[0]
    if not refusals:
        return CannotPlan("no way to spread the model over the GPUs is left")
    return min(refusals, key=lambda r: r.short_bytes if isinstance(r, DoesNotFit) else inf)
