"""A job spread over GPUs in one way, planned stage by stage and simulated as a whole.

Beside it: `stages_degrees`, ways; `stages_cut`, jobs of stages; `stages_machines`, what each runs on;
`stages_compared`, all ways planned; `stages_shortages`, what they lack.

[Note: planned again] A policy that orders copies by the cost model's seconds plans as if a stage's receives, and the
sums of a kind of GPU, came at once. So once simulated, each is planned again with its moments' waits for others added
to their seconds, and the faster set kept. Of several ways only the fastest is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pstar_sim.bounds.stages import stages_bound_s
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.model_shapes import ModelEntry
from pstar_sim.collector import without_garbage_collection
from pstar_sim.core.check_report import CheckReport
from pstar_sim.core.checker.meetings import prove_set
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.plan_set import PlanSet, Share, meetings_of, slices_as, sums_of
from pstar_sim.core.step import Kind, Queue
from pstar_sim.core.timeline import Timeline
from pstar_sim.cost import cost_of
from pstar_sim.errors import CannotPlan, DoesNotFit, FalseFigures, ModelError, PlanError
from pstar_sim.planner.binding import bound_by
from pstar_sim.planner.jobs import Job
from pstar_sim.planner.stages_cut import Cut
from pstar_sim.planner.stated import SECONDS_AGREE
from pstar_sim.policy.kit.options import split_spec
from pstar_sim.policy.registry import Policy, can, find_policy, plan_to_run, sharded_as
from pstar_sim.sim.play import play_stages
from pstar_sim.workload.parallelism import Parallelism
from pstar_sim.workload.workload import Workload, copy_moment

EVEN = "even_split_s"
"""Key of predictions: seconds with equal shares of layers."""
_ALIKE = 1.1
"""Times as large a part of the node."""
_OTHER_STAGES = (Queue.SEND, Queue.RECEIVE, "stages")
"""Causes of a wait for another stage, as a timeline names them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedStages:
    """timelines: of one simulation."""

    plans: PlanSet
    timelines: tuple[Timeline, ...]

    @property
    def gain_of_split(self) -> float | None:
        """Over equal shares of layers; None without such a plan."""
        even_s = self.plans.plans[0].predictions.get(EVEN)
        return None if even_s is None else even_s / self.iteration_s

    @cached_property
    def computing(self) -> tuple[float, ...]:
        """Share of the iteration, by plan."""
        seconds = [timeline.busy_s["compute"] for timeline in self.timelines]
        if self.plans.shares:  # whose moments end with those of others
            seconds = [sum(cost_of(p.workload, p.machine, p.layout).moments_s) for p in self.plans.plans]
        return tuple(busy_s / self.iteration_s for busy_s in seconds)

    @property
    def bound_by(self) -> str:
        """Of the stage that computes most (`binding.bound_by`)."""
        busiest = max(self.timelines, key=lambda timeline: timeline.busy_s["compute"])
        return bound_by(busiest, barrier_cost_s=None)

    @property
    def iteration_s(self) -> float:
        return max(timeline.iteration_s for timeline in self.timelines)

    @cached_property
    def lower_bound_s(self) -> float:
        """Of any plans of these stages with their layouts (bounds/stages.py)."""
        return stages_bound_s(self.plans)

    @property
    def pins(self) -> tuple[int, ...]:
        """Chunks of each stage, but small ones, whose states stay on the GPU."""
        return tuple(
            sum(mode == "pin" and not chunk.small for mode, chunk in zip(plan.modes, plan.layout.chunks))
            for plan in self.plans.plans
        )

    @property
    def tokens_per_s(self) -> float:
        first = self.plans.plans[0]
        return first.workload.tokens * first.machine.data_parallel_size / self.iteration_s

    @property
    def bubble(self) -> float:
        """Share of the iteration in which a GPU computes nothing, mean of the GPUs."""
        counts = self.plans.counts
        return 1 - sum(count * share for count, share in zip(counts, self.computing)) / sum(counts)

    @property
    def sums(self) -> float:
        """Share in which layers wait for sums over the ranks that split them, mean of the stages."""
        seconds = 0.0
        for plan in self.plans.plans:
            cost = cost_of(plan.workload, plan.machine, plan.layout)
            seconds += sum(cost.group_s(m.collectives) for m in plan.workload.moments if m.collectives)
        return seconds / len(self.plans.plans) / self.iteration_s


def plan_stages(
    job: Job,
    machine: Machine,
    policy: str | Policy,
    parallelism: Parallelism,
    settings: Settings | None = None,
    *,
    shape: ModelEntry | None = None,
    again: bool = True,
    pins: Sequence[int] = (),
    cut: Cut | None = None,
) -> PlannedStages:
    """Plans and simulates all stages, or kinds of GPUs.

    shape: the model's, if it is not in the catalog.
    again: [Note: planned again].
    pins: of each plan; empty: searched for.
    cut: if known.

    Raises PstarError for degrees that job or machine do not allow, and DoesNotFit and CannotPlan, naming the stage.
    """
    settings = settings or Settings()
    if parallelism.data_on(machine.world_size) * parallelism.context > 1:
        policy = sharded_as(policy, parallelism.shard)
    cut = cut or Cut(job=job, machine=machine, parallelism=parallelism, shape=shape)
    planned = _fastest_split(cut, policy, settings, pins) if cut.shares else _planned(cut, policy, settings, pins)[0]
    return planned_again(planned, policy, settings) if again else planned


def _planned(cut: Cut, policy: str | Policy, settings: Settings, pins: Sequence[int]) -> tuple[PlannedStages, Cut]:
    """The cut has room."""
    spread = cut.parallelism
    functions = [_pinned(policy, each) for each in pins or (None,) * cut.members]
    refusals: list[DoesNotFit] = []
    while True:
        plans: list[Plan] = []
        try:
            plans += (
                plan_to_run(function, cut.workload(member), on, settings)
                for member, (on, function) in enumerate(zip(cut.machines, functions))
            )
            break
        except DoesNotFit as error:
            refusals.append(error.restated(what=f"{_named(cut, len(plans))}{error.what}"))
            less = cut.after(len(plans), error)
            if less is None:
                raise min(refusals, key=lambda each: each.short_bytes) from error
            cut = less
        except (CannotPlan, PlanError) as error:
            raise CannotPlan(f"{_named(cut, len(plans))}{error}") from error
    if not all(slices_as(plan, spread.shard) for plan in plans):
        raise CannotPlan(f"{plans[0].policy} slices otherwise; leave shard={spread.shard} out")
    return _together(spread, plans, cut.shares), cut


def _fastest_split(cut: Cut, policy: str | Policy, settings: Settings, pins: Sequence[int]) -> PlannedStages:
    """From shares by speed towards equal ones, while that is faster. Then the node is divided by what kinds use."""

    def planned(towards: Cut) -> tuple[PlannedStages, Cut] | None:
        try:
            return _planned(towards, policy, settings, pins)
        except (CannotPlan, DoesNotFit, ModelError):
            return None

    even: tuple[PlannedStages, Cut] | None
    fastest = even = _planned(cut, policy, settings, pins)
    while even is fastest and (nearer := even[1].nearer_equal) is not None and (found := planned(nearer)):
        even, fastest = found, min(fastest, found, key=lambda each: each[0].iteration_s)
    if even[1].nearer_equal is not None:
        even = planned(replace(cut, even=True, most=(), nodes=()))
    best, less = fastest = min(fastest, even or fastest, key=lambda each: each[0].iteration_s)
    if nodes := _parts_used(best):
        best, _ = min(fastest, planned(replace(less, nodes=nodes)) or fastest, key=lambda each: each[0].iteration_s)
    return best if even is None else _stating(best, {EVEN: even[0].iteration_s})


def _parts_used(planned: PlannedStages) -> tuple[int, ...]:
    """Of the node, in hundredths of the most; () for about those they have."""
    used = [t.peak_bytes["host"] + t.peak_bytes.get("nvme", 0) for t in planned.timelines]
    nodes = [1 + 99 * size // max(1, *used) for size in used]
    times = [part / (share.node or share.parts) for part, share in zip(nodes, planned.plans.shares)]
    return tuple(nodes) if max(times) > _ALIKE * min(times) else ()


def _stating(planned: PlannedStages, figures: Mapping[str, float]) -> PlannedStages:
    stated = {**figures, "iteration_s": planned.iteration_s}
    plans = tuple(replace(plan, predictions=stated) for plan in planned.plans.plans)
    return replace(planned, plans=replace(planned.plans, plans=plans))


def _pinned(policy: str | Policy, pins: int | None) -> Policy:
    if isinstance(policy, str):
        name, options = split_spec(policy)
        if pins is not None and can(name).point is not None and "pins=" not in options:
            policy = f"{name}:{options},pins={pins}" if options else f"{name}:pins={pins}"
    return find_policy(policy) if isinstance(policy, str) else policy


def _named(cut: Cut, member: int) -> str:
    if cut.shares:
        return f"{cut.machines[member].gpu.name}: "
    return f"stage {member}: " if cut.members > 1 else ""


@without_garbage_collection()
def planned_again(planned: PlannedStages, policy: str | Policy, settings: Settings) -> PlannedStages:
    """[Note: planned again]. Returns the faster."""
    spread = planned.plans.parallelism
    policy = sharded_as(policy, spread.shard)
    able = can(split_spec(policy)[0] if isinstance(policy, str) else policy)
    if len(planned.plans.plans) == 1 or (able.point is None and not able.tries_others):
        return planned
    function = find_policy(policy) if isinstance(policy, str) else policy
    plans = []
    for plan, timeline in zip(planned.plans.plans, planned.timelines):
        try:
            own = _with_waits(plan, timeline, sums_of(plan) if planned.plans.shares else {})
            again = plan_to_run(function, own, plan.machine, settings)
        except (CannotPlan, DoesNotFit, PlanError):
            return planned
        plans.append(replace(again, workload=plan.workload))
    found = _stating(_together(spread, plans, planned.plans.shares), planned.plans.plans[0].predictions)
    return min(planned, found, key=lambda each: each.iteration_s)


def _with_waits(plan: Plan, timeline: Timeline, sums: Mapping[int, int]) -> Workload:
    """The job as if measured with waits for others.

    sums: step -> its moment, of those that end with others.
    """
    w, last = plan.workload, timeline.iterations - 1
    own_s = cost_of(w, plan.machine, plan.layout).moments_s
    seconds = list(own_s)
    columns = timeline.columns("spans")
    names = ("iteration", "step", "kind", "moment", "cause", "ready_s", "start_s", "end_s")
    for iteration, step, kind, moment, cause, ready_s, start_s, end_s in zip(*(columns[name] for name in names)):
        if iteration == last and kind is Kind.COMPUTE and cause in _OTHER_STAGES:
            seconds[moment] += start_s - ready_s
        if iteration == last and step in sums:
            seconds[moment] += max(0.0, end_s - start_s - own_s[moment])
    moments = tuple(
        copy_moment(m, m.start_bytes, m.peak_bytes, m.end_bytes, duration_s=s) for m, s in zip(w.moments, seconds)
    )
    return replace(w, moments=moments, source="recorded", recorded_on=plan.machine.name)


def _together(parallelism: Parallelism, plans: Sequence[Plan], shares: tuple[Share, ...] = ()) -> PlannedStages:
    made = PlanSet(parallelism=parallelism, plans=tuple(plans), meetings=meetings_of(plans), shares=shares)
    timelines = play_stages(made)
    seconds = max(timeline.iteration_s for timeline in timelines)
    stated = tuple(replace(plan, predictions={"iteration_s": seconds}) for plan in plans)
    return PlannedStages(plans=replace(made, plans=stated), timelines=timelines)


def examine_set(plans: PlanSet) -> tuple[tuple[CheckReport, ...], float]:
    """Proves and simulates a set; returns proofs and seconds. Raises PlanError, and FalseFigures
    for other seconds than stated."""
    reports = prove_set(plans)
    seconds = max(timeline.iteration_s for timeline in play_stages(plans))
    for stage, plan in enumerate(plans.plans):
        stated = plan.predictions.get("iteration_s", seconds)
        if abs(stated - seconds) > SECONDS_AGREE * seconds:
            raise FalseFigures(
                (f"{plans.names[stage]} states {stated:.6g} s per iteration; a simulation takes {seconds:.6g} s",)
            )
    return reports, seconds
