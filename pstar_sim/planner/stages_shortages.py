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
from pstar_sim.planner.stages_cut import Cut
from pstar_sim.planner.stages_degrees import Way, with_shards
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
        cut: Cut | None = Cut(job=way.of(job), machine=machine, parallelism=spread, shape=shape)
        while cut is not None:
            try:
                short = _first_shortage(cut, policy, settings, loading)
            except ModelError as error:
                unable.append(error)
                break
            if short is None:
                return None
            member, refusal = short
            cut = cut.after(member, refusal) if cut.shares and isinstance(refusal, DoesNotFit) else None
            refusals.append(refusal)
    if unable and not refusals:
        raise unable[0]
    if not refusals:
        return CannotPlan("no way to spread the model over the GPUs is left")
    return min(refusals, key=lambda r: r.short_bytes if isinstance(r, DoesNotFit) else inf)


def _first_shortage(
    cut: Cut, policy: str | Policy, settings: Settings, loading: Loading
) -> tuple[int, DoesNotFit | CannotPlan] | None:
    spread, workloads = cut.parallelism, cut.workloads
    members = range(len(workloads))
    most = max(members, key=lambda n: workloads[n].trainable_params)
    for n in members if spread.cut != CUTS[0] or cut.shares else sorted({0, most, members[-1]}):
        part = cut.machines[n]
        name = part.gpu.name if cut.shares else f"stage {n}"
        where = f"{spread}, {name}" if len(members) > 1 else str(spread)
        try:
            sliced = sharded_as(policy, spread.shard)
            short = shortage(sliced, workloads[n], part, settings, loading=loading, others=None)
        except CannotPlan as error:
            return n, CannotPlan(f"{where}: {error}")
        if short is not None:
            return n, short.restated(what=f"{where}: {short.what}")
    return None
