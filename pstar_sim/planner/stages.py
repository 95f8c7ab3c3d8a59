"""A job cut into the stages of a pipeline, each planned as a job of its own, and all simulated together.

[Note: which parallelisms] The ways are every degree that divides the GPUs, the layers and the sequences of an
iteration, with the micro-batches asked for (or the nearest number that divides a rank's sequences), and with the most,
one sequence each, which gives the smallest bubble and the fewest activations. Without a pipeline also with a quarter as
many: parameters move less often. "auto" takes sequence parallelism wherever tensor ranks can split the sequence: the
same bytes cross the links, and ranks keep less. It splits sequences over ranks (cp), which leaves a rank as much of the
model as sharing them and gathers keys, only where they are too few for all ranks, or one takes LONG of the GPU. Experts
are whole on each rank, or shared by as many ranks as a node or all have. Stages have one part, or two (interleaved)
with the micro-batches asked for. Pipelines whose bubble, (p-1)/(v m+p-1) for v parts, is above MOST_BUBBLE are left
out, the others planned in the order of their bounds until one is above the fastest plan. A way's bound: for any stage
the first micro-batch comes through the first parts of the stages before it, the stage computes all, and the last goes
back; where optimizer steps do not meet, iterations overlap and the stage alone counts. A row's (bounds/stages.py) also
has updates and copies, and needs a plan. "all" plans every way, schedule, two and four parts, and sequence parallelism
or not.

[Note: few micro-batches] A full pipeline adds the same seconds for every micro-batch. So among several ways, one with
many is planned with one more than it has stages and with two per stage (interleaved: two and three per stage), and its
seconds follow the line through both, never below its bound. Where overlap ends or modes change, the line is too low; so
the fastest row is planned whole, until the fastest, ways left out included, is one that is. A policy that searches
finds other plans for more micro-batches and is planned whole.

[Note: planned again] A policy that orders copies by the cost model's seconds plans a stage as if its receives came at
once. So once simulated, each stage is planned again with the seconds that its moments waited for others added to
theirs, and the faster set kept. Of several ways only the fastest is.

[Note: cut by speed] Whale's rule: each layer goes to the stage that then ends first, by the cost model, with embedding
and head where they are. A stage without room gives one away, until all have room.

A stage has its GPUs' share of the node's host memory, bandwidth, cores and disks. Its ranks follow one another, so
neighbours in a pipeline are far apart and ranks that share a batch near (Megatron-LM's order).
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, product
from math import inf

from pstar_sim.arguments import text
from pstar_sim.bounds.stages import stages_bound_s
from pstar_sim.catalog.machine import Fabric, Group, Host, Machine, Neighbour, Nvme, Rank
from pstar_sim.catalog.model_shapes import ModelEntry, model_entry
from pstar_sim.core.check_report import CheckReport
from pstar_sim.core.checker.meetings import prove_set
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.plan_set import PlanSet, meetings_of
from pstar_sim.core.step import Kind, Queue
from pstar_sim.core.timeline import Timeline
from pstar_sim.cost import CostModel, cost_of
from pstar_sim.errors import CannotPlan, DoesNotFit, FalseFigures, ModelError, PlanError, PstarError
from pstar_sim.planner.asked import OnPart, teller
from pstar_sim.planner.binding import bound_by
from pstar_sim.planner.jobs import Job
from pstar_sim.planner.machine_notes import machine_notes
from pstar_sim.planner.memory_needs import shortage
from pstar_sim.planner.stated import SECONDS_AGREE
from pstar_sim.planner.utilization import tflops_and_mfu
from pstar_sim.policy.kit.capabilities import capabilities_of
from pstar_sim.policy.kit.options import split_spec
from pstar_sim.policy.registry import Policy, can, find_policy, sharded_as
from pstar_sim.sim.play import play_stages
from pstar_sim.units import format_count, format_s
from pstar_sim.workload.loading import WHOLE, Loading
from pstar_sim.workload.parallelism import CUTS, Parallelism
from pstar_sim.workload.pipeline import INTERLEAVED, SCHEDULES, Part, cells_of, in_schedule
from pstar_sim.workload.presets import CUT, check_blocks, split_widths, stage_of
from pstar_sim.workload.presets.shared import Stage
from pstar_sim.workload.tape import CONTEXT, EXPERTS, TENSOR
from pstar_sim.workload.workload import Workload

ASKED = ("auto", "all")
"""Questions about parallelism: the ways that can be the fastest, and every way."""
_FEWER = 4
"""How many times fewer micro-batches are tried too where there is no pipeline."""
LONG = 0.5
"""Share of a GPU, by Korthikanti's terms, that one sequence takes where "auto" splits it."""
_OTHER_STAGES = (Queue.SEND, Queue.RECEIVE, "stages")
"""Causes of a wait for another stage, as a timeline names them."""
_UNCUT = f"presets of the families {' and '.join(CUT)} are cut, not those of {{}}"
_ENOUGH = "ranks can share the sequences, and each has room for one"
MOST_BUBBLE = 0.5
"""Largest bubble, by its closed form, of a pipeline that "auto" plans."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedStages:
    """timelines: of the stages, from one simulation of all."""

    plans: PlanSet
    timelines: tuple[Timeline, ...]

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
    def tokens_per_s(self) -> float:
        first = self.plans.plans[0]
        return first.workload.tokens * first.machine.data_parallel_size / self.iteration_s

    @property
    def bubble(self) -> float:
        """Share of the iteration in which a GPU computes nothing, mean of the stages."""
        busy = sum(t.busy_s["compute"] for t in self.timelines) / len(self.timelines)
        return 1 - busy / self.iteration_s

    @property
    def sums(self) -> float:
        """Share in which layers wait for sums over the ranks that split them, mean of the stages."""
        seconds = 0.0
        for plan in self.plans.plans:
            cost = cost_of(plan.workload, plan.machine, plan.layout)
            seconds += sum(cost.group_s(m.collectives) for m in plan.workload.moments if m.collectives)
        return seconds / len(self.plans.plans) / self.iteration_s


@dataclass(frozen=True, kw_only=True)
class Way:
    parallelism: Parallelism
    batch: int
    micro_batches: int


@dataclass(frozen=True, kw_only=True)
class StagesRow:
    """The answer of one policy on one parallelism; the keys of `pstar compare --parallel --json`.

    batch: sequences per micro-batch, of all ranks of a stage.
    lower_bound_s: of the iteration, for any plans of these stages with their layouts.
    gap: iteration_s / lower_bound_s - 1.
    bubble: share of the iteration in which a GPU computes nothing, in the mean of the stages.
    sums: share of the iteration in which layers wait for sums over the ranks that split them, likewise.
    peak_gpu_bytes, peak_host_bytes: of a rank of each stage.
    short_of: place that is short; None if it fits.
    needed_bytes, available_bytes: in that place.
    tflops_per_gpu, mfu: see utilization.py.
    few: micro-batches of the larger plan behind the seconds ([Note: few micro-batches]); None if all are planned.
    """

    parallel: str
    policy: str
    batch: int
    micro_batches: int
    fits: bool
    iteration_s: float | None = None
    tokens_per_s: float | None = None
    lower_bound_s: float | None = None
    gap: float | None = None
    bubble: float | None = None
    sums: float | None = None
    bound_by: str | None = None
    peak_gpu_bytes: tuple[int, ...] = ()
    peak_host_bytes: tuple[int, ...] = ()
    reason: str | None = None
    short_of: str | None = None
    needed_bytes: int | None = None
    available_bytes: int | None = None
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    few: int | None = None

    @property
    def cut(self) -> str | None:
        """Of the layers into stages; None for one stage."""
        spread = Parallelism.parse(self.parallel)
        return spread.cut if spread.pipeline > 1 else None


@dataclass(frozen=True, kw_only=True, eq=False)
class StagesComparison:
    """rows: those that fit, the fastest first, then the others.

    left_out: ways not planned, with the reason.
    slower: ways whose bounds, in brackets, are above the fastest plan.
    notes: on the machine.
    """

    job: Job
    machine: Machine
    rows: tuple[StagesRow, ...]
    left_out: tuple[str, ...]
    slower: tuple[str, ...]
    notes: tuple[str, ...]
    best: PlannedStages | None

    @property
    def gain_of_cut(self) -> float | None:
        """Speed of the fastest plan cut by speed over the fastest cut evenly; None without both."""
        fastest = {
            cut: min((row.iteration_s for row in self.rows if row.iteration_s and row.cut == cut), default=None)
            for cut in CUTS
        }
        even_s, speed_s = (fastest[cut] for cut in CUTS)
        return even_s / speed_s if even_s and speed_s else None


def ways_of(
    job: Job, machine: Machine, parallel: str | Parallelism, *, shape: ModelEntry | None = None
) -> tuple[list[Way], list[str]]:
    """The ways that a question names, and what is left out.

    parallel: one of ASKED, a parallelism, or its text.
    shape: the model's, if it is not in the catalog.

    Raises PstarError for a text that names none, and for a job of no preset.
    """
    if parallel in ASKED:
        return ways_to_spread(job, machine, every=parallel == ASKED[1], shape=shape)
    if job.model is None or job.batch is None:
        raise PstarError("a trace is of a whole model; give a model, whose preset is spread, with batch and seq")
    of_file = isinstance(parallel, Parallelism)  # which says its micro-batches, too
    if not isinstance(parallel, Parallelism):
        parallel = Parallelism.parse(text("parallel", parallel, "auto, all, or a parallelism such as tp=2,pp=4"))
    one = Way(parallelism=parallel, batch=job.batch, micro_batches=job.micro_batches or 1)
    data, sequences = parallel.data_on(machine.world_size), one.batch * one.micro_batches
    if of_file or parallel.pipeline == 1 or sequences % data or one.batch <= data:
        return [one], []
    single = f"{parallel} in single sequences, --batch {data} --micro-batches {sequences // data}"
    return [one], [f"{single}: a way that is named runs in the micro-batches asked; auto tries both"]


def ways_to_spread(
    job: Job, machine: Machine, *, every: bool = False, shape: ModelEntry | None = None
) -> tuple[list[Way], list[str]]:
    """[Note: which parallelisms], and what is left out.

    every: all schedules, any bubble.
    shape: as in `ways_of`.

    Raises PstarError for a job of no preset.
    """
    if job.model is None or job.batch is None:
        raise PstarError("a trace is of a whole model; give --model, whose preset is cut into stages")
    entry, ways = shape or model_entry(job.model), list[Way]()
    missing: dict[str, list[str]] = {}  # reason -> ways
    for one in _degrees_on(machine):
        if why := _why_not(entry, job, machine, one, every=every):
            missing.setdefault(why, []).append(str(one))
            continue
        for way in _in_all_orders(entry, job, machine, one, every=every):
            bubble = closed_bubble(way.parallelism, way.micro_batches)
            if every or bubble <= MOST_BUBBLE:
                ways.append(way)
                continue
            of_way = f"{way.parallelism} with {format_count(way.micro_batches, 'micro-batch')} ({bubble:.0%})"
            missing.setdefault(f"a bubble of more than {MOST_BUBBLE:.0%}", []).append(of_way)
    counted = {_UNCUT.format(entry.family): "with tp, cp or pp", _ENOUGH: "with cp"}
    left_out = [f"{'; '.join(of)}: {why}" for why, of in missing.items() if why not in counted]
    for why, which in counted.items():
        if why in missing:
            left_out.append(f"{format_count(len(missing[why]), 'way')} {which}: {why}")
    return ways, left_out


def _degrees_on(machine: Machine) -> Iterator[Parallelism]:
    """All that divide the GPUs, with ranks that split a layer in one node."""
    gpus = machine.world_size
    for tensor in _divisors(machine.local_ranks):
        for stages in _divisors(gpus // tensor):
            for context in _divisors(gpus // tensor // stages):
                data = gpus // stages // tensor // context
                yield Parallelism(tensor=tensor, context=context, pipeline=stages, data=data)


def _why_not(entry: ModelEntry, job: Job, machine: Machine, one: Parallelism, *, every: bool) -> str:
    """Why these degrees are left out; "" if they are not."""
    assert job.batch is not None and one.data is not None
    local, summing = machine.local_ranks, one.data * one.context
    sequences, seq = job.batch * (job.micro_batches or 1), job.seq or 0
    if one.tensor * one.pipeline * one.context > 1 and entry.family not in CUT:
        return _UNCUT.format(entry.family)
    if one.context > 1 and not every and sequences % summing == 0:
        if _bytes_of_sequence(entry, job, one.tensor, one.pipeline) < LONG * machine.gpu.memory_bytes:
            return _ENOUGH
    if one.pipeline > entry.layers:
        return f"the model has {entry.layers} blocks"
    if one.tensor > 1 and entry.latent is not None:
        return "its layers are not split over ranks"
    if any(size % one.tensor for size in split_widths(entry).values()):
        widths = ", ".join(f"{size} {what}" for what, size in split_widths(entry).items())
        return f"{one.tensor} ranks cannot split {widths}"
    if one.context > 1 and seq % (2 * one.context):
        return f"a sequence of {job.seq} is not {2 * one.context} equal parts"
    if any(n % local and local % n for n in (one.context * one.tensor, summing * one.tensor)):
        return f"stages of {summing * one.tensor} GPUs do not fill nodes of {local}"
    if sequences % one.data:
        return f"dp ranks cannot share {format_count(sequences, 'sequence')}"
    return _unlike(machine, one) if machine.mixed else ""


def _in_all_orders(entry: ModelEntry, job: Job, machine: Machine, one: Parallelism, *, every: bool) -> Iterator[Way]:
    """These degrees with all numbers of micro-batches, schedules, cuts, sequence parallelism and degrees of experts."""
    assert job.batch is not None and one.data is not None
    stages, asked = one.pipeline, job.micro_batches or 1
    splits = one.tensor > 1 and (job.seq or 0) % (one.tensor * one.context) == 0 and job.autocast is None
    splitting = (True, False) if splits and every else (splits,)
    cuts = CUTS if machine.mixed and stages > 1 else CUTS[:1]
    experts = _degrees_of_experts(entry, one.data * one.context, machine.local_ranks // one.tensor, every=every)
    each = job.batch * asked // one.data
    usual = min(_divisors(each), key=lambda count: (abs(count - asked), count))
    fewer = min(_divisors(each), key=lambda count: (abs(count - usual // _FEWER), count))
    for micro_batches in dict.fromkeys((usual, each, *((fewer,) if stages == 1 else ()))):
        orders = _orders(entry.layers, stages, micro_batches, usual, every=every)
        for (schedule, virtual), split, cut, share in product(orders, splitting, cuts, experts):
            if virtual == 1 or cut == CUTS[0]:
                spread = replace(one, schedule=schedule, virtual=virtual, sequence=split, cut=cut, experts=share)
                yield Way(parallelism=spread, batch=job.batch * asked // micro_batches, micro_batches=micro_batches)


def _degrees_of_experts(entry: ModelEntry, sharing: int, local: int, *, every: bool) -> list[int]:
    """Of ranks that share sequences or split them, `local` of them in a node."""
    count = 1 if entry.experts is None else entry.experts.count
    degrees = [n for n in _divisors(sharing) if count % n == 0 and (local % n == 0 or n % local == 0)]
    return degrees if every else sorted({1, max(n for n in degrees if n <= local), degrees[-1]})


def _bytes_of_sequence(entry: ModelEntry, job: Job, tensor: int, stages: int) -> float:
    """What a rank keeps of one, by Korthikanti et al., 2022: 34 bytes of an element of the hidden size and layer, or
    2 and one layer's if it recomputes; and logits in 16 and in 32 bits."""
    assert job.seq is not None
    layers, whole = -(-entry.layers // stages), 34 / tensor
    each = whole * layers if job.checkpointing is False else 2 * layers + whole
    return job.seq * (entry.hidden * each + 6 * entry.vocab / tensor)


def _unlike(machine: Machine, parallelism: Parallelism) -> str:
    try:
        for stage in range(parallelism.pipeline):
            machine_of_stage(machine, parallelism, stage)
    except PstarError as error:
        return str(error)
    return ""


def _orders(layers: int, stages: int, micro_batches: int, usual: int, *, every: bool) -> list[tuple[str, int]]:
    """Schedules, each with the parts of a stage; parts make bubbles smaller, which most micro-batches make too."""
    if stages == 1:
        return [(SCHEDULES[0], 1)]
    plain = [(schedule, 1) for schedule in SCHEDULES if schedule != INTERLEAVED]
    parts = (2, 4) if every else (2,) if micro_batches == usual else ()
    able = [v for v in parts if stages * v <= layers and micro_batches % stages == 0]
    return plain[: None if every else 1] + [(INTERLEAVED, v) for v in able]


def closed_bubble(spread: Parallelism, micro_batches: int) -> float:
    """Of equal stages whose links take no time."""
    return (spread.pipeline - 1) / (spread.virtual * micro_batches + spread.pipeline - 1)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def compare_stages(
    job: Job,
    machine: Machine,
    policies: Sequence[str | Policy],
    ways: Sequence[Way],
    *,
    left_out: Sequence[str] = (),
    every: bool = False,
    settings: Settings | None = None,
    on_part: OnPart | None = None,
) -> StagesComparison:
    """Plans the ways with every policy that can, by [Note: which parallelisms].

    every: also ways that cannot be the fastest.

    Raises PstarError for a job that cannot be cut in any of the ways.
    """
    tell = teller(on_part)
    settings = settings or Settings()
    named = {policy if isinstance(policy, str) else policy.__name__: policy for policy in policies}
    alone = len(ways) == 1
    asked = _Asked(job=job, machine=machine, settings=settings, policies=named, alone=alone)
    rows: list[StagesRow] = []
    planned: dict[StagesRow, PlannedStages] = {}
    missing: dict[str, list[str]] = {}
    bounds: dict[Way, float] = {}
    for way in ways:
        try:
            bounds[way] = 0.0 if alone else _bound_s(job, machine, way, settings) * (not every)
        except ModelError as error:
            missing.setdefault(f"by any policy: {error}", []).append(str(way.parallelism))
            refusal = error
    if ways and not bounds:
        raise refusal
    waiting = deque(sorted(bounds, key=bounds.__getitem__))
    while True:
        first = min(rows, key=_place, default=None)
        fastest_s = inf if first is None or first.iteration_s is None else first.iteration_s
        if waiting and bounds[waiting[0]] <= fastest_s:
            way = waiting.popleft()
            for policy, own in _with_shards(asked.policies, way, machine, alone=alone):
                tell(f"{own.parallelism} {policy}", len(rows), len(ways) * len(policies))
                try:
                    row, stages = asked.answer(own, policy, whole=alone)
                except CannotPlan as error:
                    why = str(error).removeprefix(f"{policy}: ")
                    missing.setdefault(f"by {policy}: {why}", []).append(str(own.parallelism))
                    continue
                rows.append(row)
                planned |= {row: stages} if stages else {}
        elif first is not None and first.few:
            tell(f"{first.parallel} {first.policy}, all micro-batches", len(rows), len(ways) * len(policies))
            spread = Parallelism.parse(first.parallel)
            way = Way(parallelism=spread, batch=first.batch, micro_batches=first.micro_batches)
            row, stages = asked.answer(way, first.policy, whole=True)
            rows[rows.index(first)] = row
            planned |= {row: stages} if stages else {}
        else:
            break
    slower = [f"{way.parallelism} {way.batch} x {way.micro_batches} ({format_s(bounds[way])})" for way in waiting]
    rows.sort(key=_place)
    best = planned.get(rows[0]) if rows else None
    if best is not None and not alone:
        best = planned_again(best, named[rows[0].policy], settings)
        rows[0] = _row(rows[0], best)
    notes = machine_notes(machine, zip(best.plans.plans, best.timelines) if best else ())
    if any(row.few for row in rows):
        notes.append(
            "rows with ≈ are planned with fewer micro-batches: their seconds follow a line, their peaks are those of "
            "these plans; the fastest row has all"
        )
    return StagesComparison(
        job=job,
        machine=machine,
        rows=tuple(rows),
        left_out=(*left_out, *(f"{'; '.join(dict.fromkeys(of))} {why}" for why, of in missing.items())),
        slower=tuple(slower),
        notes=tuple(notes),
        best=best,
    )


def _with_shards(
    policies: Mapping[str, str | Policy], way: Way, machine: Machine, *, alone: bool
) -> Iterator[tuple[str, Way]]:
    """Each policy with the way and, if several are asked about (not `alone`), what else it can slice."""
    spread = way.parallelism
    shared = spread.data_on(machine.world_size) * spread.context > 1
    for name, policy in policies.items():
        more = [word for word, options in can(policy).shards.items() if options]
        for shard in (spread.shard, *(more if shared and not alone and spread.shard is None else ())):
            yield name, replace(way, parallelism=replace(spread, shard=shard))


def _place(row: StagesRow) -> tuple[bool, float]:
    return not row.fits, row.iteration_s or 0.0


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """policies: by their names.
    alone: one way is asked about.
    """

    job: Job
    machine: Machine
    settings: Settings
    policies: Mapping[str, str | Policy]
    alone: bool

    def answer(self, way: Way, policy: str, *, whole: bool) -> tuple[StagesRow, PlannedStages | None]:
        """Returns the row and its plans; None for a way that does not fit or, unless `whole`, has so many
        micro-batches that [Note: few micro-batches] answers. Raises CannotPlan."""
        said = StagesRow(
            parallel=str(way.parallelism),
            policy=policy,
            batch=way.batch,
            micro_batches=way.micro_batches,
            fits=False,
        )
        stages, schedule = way.parallelism.pipeline, way.parallelism.schedule
        counts = (2 * stages, 3 * stages) if schedule == INTERLEAVED else (stages + 1, max(2 * stages, 3))
        try:
            if (
                whole
                or self._searches(policy)
                or schedule not in (SCHEDULES[0], INTERLEAVED)
                or way.micro_batches <= 2 * counts[-1]
            ):
                planned = self._plan(way, policy, again=self.alone)
                return _row(said, planned), planned
            few, more = (_row(said, self._plan(replace(way, micro_batches=count), policy)) for count in counts)
            return _on_line(few, more, counts, way.micro_batches), None
        except DoesNotFit as error:
            short = replace(said, reason=str(error), short_of=error.place)
            return replace(short, needed_bytes=error.needed_bytes, available_bytes=error.available_bytes), None

    def _plan(self, way: Way, policy: str, *, again: bool = False) -> PlannedStages:
        own = replace(self.job, batch=way.batch, micro_batches=way.micro_batches)
        return plan_stages(own, self.machine, self.policies[policy], way.parallelism, self.settings, again=again)

    def _searches(self, policy: str) -> bool:
        named = self.policies[policy]
        return capabilities_of(find_policy(named) if isinstance(named, str) else named).tries_others


def _on_line(few: StagesRow, more: StagesRow, counts: Sequence[int], micro_batches: int) -> StagesRow:
    def line(value: Callable[[StagesRow], float]) -> float:
        a, b = value(few), value(more)
        return b + (micro_batches - counts[1]) * (b - a) / (counts[1] - counts[0])

    bound_s = line(lambda row: row.lower_bound_s or 0.0)
    seconds = max(bound_s, line(lambda row: row.iteration_s or 0.0))
    tokens = (more.tokens_per_s or 0.0) * (more.iteration_s or 0.0) * micro_batches / counts[1]
    faster = tokens / seconds / (more.tokens_per_s or 1.0)
    return replace(
        more,
        few=counts[1],
        iteration_s=seconds,
        tokens_per_s=tokens / seconds,
        tflops_per_gpu=(more.tflops_per_gpu or 0.0) * faster,
        mfu=None if more.mfu is None else more.mfu * faster,
        lower_bound_s=bound_s,
        gap=seconds / bound_s - 1,
        bubble=line(lambda row: (row.bubble or 0.0) * (row.iteration_s or 0.0)) / seconds,
        sums=line(lambda row: (row.sums or 0.0) * (row.iteration_s or 0.0)) / seconds,
    )


def _bound_s(job: Job, machine: Machine, way: Way, settings: Settings) -> float:
    own = replace(job, batch=way.batch, micro_batches=way.micro_batches)
    before_s = longest_s = 0.0
    stages, parts = way.parallelism.pipeline, list(_micro_batch_of_parts(own, machine, way.parallelism))
    for number in range(stages):
        on, seconds = machine_of_stage(machine, way.parallelism, number), []
        for one, _ in parts[number::stages]:
            *moments_s, step_s = CostModel(one, on, build_layout(one)).moments_s
            seconds.append(sum(moments_s))
        meet = settings.barrier(parts[0][0].compute_dtype) is not None
        longest_s = max(longest_s, before_s * meet + way.micro_batches * sum(seconds) + step_s)
        before_s += seconds[0]  # of the stage's first part: it begins, and ends, an iteration
    return longest_s


def _row(said: StagesRow, planned: PlannedStages) -> StagesRow:
    plans = planned.plans.plans
    machines = (plan.machine for plan in plans)
    tflops, mfu = tflops_and_mfu([plan.workload for plan in plans], planned.iteration_s, *machines)
    return replace(
        said,
        fits=True,
        iteration_s=planned.iteration_s,
        tokens_per_s=planned.tokens_per_s,
        lower_bound_s=planned.lower_bound_s,
        gap=planned.iteration_s / planned.lower_bound_s - 1,
        bubble=planned.bubble,
        sums=planned.sums,
        bound_by=planned.bound_by,
        peak_gpu_bytes=tuple(t.peak_bytes["gpu"] for t in planned.timelines),
        peak_host_bytes=tuple(t.peak_bytes["host"] for t in planned.timelines),
        tflops_per_gpu=tflops,
        mfu=mfu,
    )


def plan_stages(
    job: Job,
    machine: Machine,
    policy: str | Policy,
    parallelism: Parallelism,
    settings: Settings | None = None,
    *,
    shape: ModelEntry | None = None,
    again: bool = True,
) -> PlannedStages:
    """Plans and simulates all stages.

    shape: the model's, if it is not in the catalog.
    again: [Note: planned again].

    Raises PstarError for degrees that the job or the machine does not allow, and DoesNotFit and CannotPlan, naming the
    stage.
    """
    settings = settings or Settings()
    if parallelism.data_on(machine.world_size) * parallelism.context > 1:
        policy = sharded_as(policy, parallelism.shard)
    function = find_policy(policy) if isinstance(policy, str) else policy
    most = [sys.maxsize] * parallelism.pipeline  # layers of each stage
    while True:
        plans: list[Plan] = []
        workloads = stages_of(job, machine, parallelism, shape=shape, most=most)
        try:
            plans += (function(w, machine_of_stage(machine, parallelism, n), settings) for n, w in enumerate(workloads))
            break
        except DoesNotFit as error:
            stage = len(plans)
            cut = _layers_of(job, machine, parallelism, shape=shape, most=most)
            most[stage] = len(cut[stage]) - 1
            if parallelism.cut == CUTS[0] or error.place != "gpu" or not most[stage] or sum(most) < cut[-1].stop:
                raise error.restated(what=f"{_named(parallelism, stage)}{error.what}") from error
        except (CannotPlan, PlanError) as error:
            raise CannotPlan(f"{_named(parallelism, len(plans))}{error}") from error
    planned = _together(parallelism, plans)
    return planned_again(planned, policy, settings) if again else planned


def _named(spread: Parallelism, stage: int) -> str:
    return f"stage {stage}: " if spread.pipeline > 1 else ""


def planned_again(planned: PlannedStages, policy: str | Policy, settings: Settings) -> PlannedStages:
    """[Note: planned again]. Returns the faster."""
    spread = planned.plans.parallelism
    able = can(split_spec(policy)[0] if isinstance(policy, str) else policy)
    if spread.pipeline == 1 or (able.point is None and not able.tries_others):
        return planned
    function = find_policy(policy) if isinstance(policy, str) else policy
    plans = []
    for plan, timeline in zip(planned.plans.plans, planned.timelines):
        try:
            again = function(_with_waits(plan, timeline), plan.machine, settings)
        except (CannotPlan, DoesNotFit, PlanError):
            return planned
        plans.append(replace(again, workload=plan.workload))
    return min(planned, _together(spread, plans), key=lambda each: each.iteration_s)


def _with_waits(plan: Plan, timeline: Timeline) -> Workload:
    """The job as if its moments were measured with their waits for other stages."""
    w, last = plan.workload, timeline.iterations - 1
    seconds = list(cost_of(w, plan.machine, plan.layout).moments_s)
    for span in timeline.spans:
        if span.iteration == last and span.moment is not None and span.cause in _OTHER_STAGES:
            seconds[span.moment] += (span.start_s - span.ready_s) * (span.kind is Kind.COMPUTE)
    moments = tuple(replace(m, duration_s=s) for m, s in zip(w.moments, seconds))
    return replace(w, moments=moments, source="recorded", recorded_on=plan.machine.name)


def _together(parallelism: Parallelism, plans: Sequence[Plan]) -> PlannedStages:
    made = PlanSet(parallelism=parallelism, plans=tuple(plans), meetings=meetings_of(plans))
    timelines = play_stages(made)
    seconds = max(timeline.iteration_s for timeline in timelines)
    stated = tuple(replace(plan, predictions={"iteration_s": seconds}) for plan in plans)
    return PlannedStages(plans=replace(made, plans=stated), timelines=timelines)


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
    for _, way in (pair for each in every for pair in _with_shards({"": policy}, each, machine, alone=alone)):
        own, spread = replace(job, batch=way.batch, micro_batches=way.micro_batches), way.parallelism
        try:
            workloads = stages_of(own, machine, spread, shape=shape)
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


def examine_set(plans: PlanSet) -> tuple[tuple[CheckReport, ...], float]:
    """Proves and simulates all stages; returns the proofs and the seconds of an iteration. Raises PlanError with the
    first violation, and FalseFigures for other seconds than stated."""
    reports = prove_set(plans)
    seconds = max(timeline.iteration_s for timeline in play_stages(plans))
    for stage, plan in enumerate(plans.plans):
        stated = plan.predictions.get("iteration_s", seconds)
        if abs(stated - seconds) > SECONDS_AGREE * seconds:
            raise FalseFigures(
                (f"stage {stage} states {stated:.6g} s per iteration; a simulation takes {seconds:.6g} s",)
            )
    return reports, seconds


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
    parts = list(_micro_batch_of_parts(job, machine, parallelism, shape=shape, most=most))
    cells = cells_of(parallelism.schedule, parallelism.pipeline, job.micro_batches or 1, parallelism.virtual)
    return [in_schedule(parts[number :: len(cells)], cells, number) for number in range(len(cells))]


def _micro_batch_of_parts(
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
    _check_cut(entry, parallelism, machine.world_size)
    if job.batch % data:
        raise PstarError(f"batch is {job.batch}; the {data} ranks of a stage share it, so give a multiple of {data}")
    check_blocks(entry, job)
    axes = job.but(dtype=job.dtype_on(machine)).given
    for number, layers in enumerate(_layers_of(job, machine, parallelism, shape=shape, most=most)):
        stage = _part(parallelism, number, layers)
        yield stage_of(entry, stage, batch=job.batch // data, sequence=job.seq, **axes)


def _check_cut(entry: ModelEntry, spread: Parallelism, gpus: int) -> None:
    degrees = {"tp": spread.tensor, "cp": spread.context, "ep": spread.experts, "pp": spread.pipeline}
    given = [*(f"{key}={ranks}" for key, ranks in degrees.items() if ranks > 1), *(["sp"] if spread.sequence else [])]
    if given and entry.family not in CUT:
        raise ModelError(f"model {entry.name}: {','.join(given)}: {_UNCUT.format(entry.family)}; dp={gpus} would do")


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


def _layers_of(
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


def machine_of_stage(machine: Machine, parallelism: Parallelism, stage: int) -> Machine:
    """The ranks of a stage with their part of the nodes, and what joins them with its neighbours. Raises PstarError for
    ranks that differ within a stage, or do not fill nodes."""
    data, local, tensor = parallelism.data_on(machine.world_size), machine.local_ranks, parallelism.tensor
    summing = data * parallelism.context  # ranks that add up gradients
    gpus = summing * tensor
    if local % tensor:
        raise PstarError(
            f"parallelism {parallelism}: tp is {tensor}; each layer waits for sums over these ranks, so they are "
            f"planned inside a node, of {local} GPUs on {machine.name}: take a number that divides {local}"
        )
    if gpus % local and local % gpus:
        raise PstarError(
            f"the {gpus} GPUs of a stage do not fill the nodes of {machine.name}, of {local} GPUs each; take a number "
            f"that divides {local}, or a multiple of it"
        )
    here = min(gpus, local) // tensor  # ranks of a node that are planned: one stands for all that split its tensors
    part = here / local
    host, disks, network = machine.host, machine.nvme, machine.network
    every = _roomy_first(machine)[stage * gpus : (stage + 1) * gpus]
    if any((rank.gpu, rank.link) != (every[0].gpu, every[0].link) for rank in every):
        kinds = " and ".join(dict.fromkeys(rank.gpu.name for rank in every))
        raise PstarError(
            f"{machine.name}: stage {stage} would have GPUs that differ, {kinds}; take so many stages that the GPUs of "
            "each are equal, or share the batch by speed (policy whale, without a parallelism)"
        )
    price = machine.price_usd_per_hour
    return replace(
        machine,
        name=f"{machine.name} stage {stage}" if parallelism.pipeline > 1 else machine.name,
        ranks=tuple(replace(rank, batch_share=1 / summing) for rank in every[::tensor]),
        nodes=summing // here,
        network=network if network is None else replace(network, bytes_per_s=network.bytes_per_s / tensor),
        groups=_groups_of(machine, parallelism),
        host=host if part == 1 else _part_of_host(host, part),
        nvme=disks if disks is None or part == 1 else _part_of_disks(disks, part),
        root_bytes_per_s=_part_of_root(machine, every[: here * tensor], tensor),
        price_usd_per_hour=None if price is None else price / parallelism.pipeline,
        neighbours=tuple(
            Neighbour(stage=other, fabric=_between(machine, stage * gpus, other * gpus, here * tensor))
            for other in sorted({0, stage - 1, stage + 1, parallelism.pipeline - 1} - {stage})
            if 0 <= other < parallelism.pipeline
        ),
    )


def _groups_of(machine: Machine, parallelism: Parallelism) -> tuple[Group, ...]:
    """Raises PstarError for ranks of cp or ep that do not fill nodes."""
    groups, tensor, local = [], parallelism.tensor, machine.local_ranks
    summing = parallelism.data_on(machine.world_size) * parallelism.context
    if tensor > 1:
        groups.append(Group(name=TENSOR, ranks=tensor, fabric=_inside(machine)))
    for name, key, ranks, what in (
        (CONTEXT, "cp", parallelism.context, "split each sequence"),
        (EXPERTS, "ep", parallelism.experts, "share experts"),
    ):
        here = tensor * ranks
        if here % local and local % here:
            near = [n for n in _divisors(summing) if not (tensor * n) % local or not local % (tensor * n)]
            best = min(near, key=lambda n: (abs(n - ranks), n))
            beside = f",dp={summing // best}" if name == CONTEXT and parallelism.data else ""
            raise PstarError(
                f"parallelism {parallelism}: {here} GPUs {what}, which do not fill the nodes of {machine.name}, of "
                f"{local} GPUs each; {key}={best}{beside} would"
            )
        if ranks > 1:
            groups.append(Group(name=name, ranks=ranks, fabric=_joining(machine, name, here, tensor)))
    return tuple(groups)


def _joining(machine: Machine, name: str, gpus: int, tensor: int) -> Fabric:
    """What joins every `tensor`-th of `gpus`; over nodes as in [Note: collectives] (cost.py), so that latencies of all
    hops are equal. What an all-to-all has for ranks of its own node stays inside, beside what leaves it by a share of
    the network."""
    inside, away = _inside(machine), gpus // machine.local_ranks
    if away <= 1:
        return inside
    ranks, here, fabric = gpus // tensor, machine.local_ranks // tensor, _between(machine, 0, gpus - 1, tensor)
    hops_s = (here - 1) * inside.latency_s + (away - 1) * fabric.latency_s
    if name == EXPERTS:
        share = (ranks - 1) / ranks * away / (away - 1)
        fabric = replace(fabric, bytes_per_s=fabric.bytes_per_s / here * share)
    elif here > 1:
        fabric = min(fabric, inside, key=lambda each: each.bytes_per_s)
    return replace(fabric, latency_s=hops_s / (ranks - 1))


def _roomy_first(machine: Machine) -> tuple[Rank, ...]:
    """First stages hold more activations, so GPUs with more memory come first."""
    if not machine.mixed or machine.nodes > 1:
        return machine.ranks
    return tuple(sorted(machine.ranks, key=lambda rank: -rank.gpu.memory_bytes))


def _between(machine: Machine, rank: int, other: int, together: int) -> Fabric:
    """`together` ranks send at once and share the network."""
    if rank // machine.local_ranks == other // machine.local_ranks:
        return _inside(machine)
    if machine.network is None:
        raise PstarError(f"machine {machine.name!r} has {machine.nodes} nodes and no network; give network = NAME")
    return replace(machine.network, bytes_per_s=machine.network.bytes_per_s / together)


def _inside(machine: Machine) -> Fabric:
    if machine.peer is not None:
        return machine.peer
    link = machine.link
    rate = min(link.h2d_bytes_per_s, link.d2h_bytes_per_s) * machine.gpu.peer_share
    return Fabric(
        name=f"{link.name} through the host", bytes_per_s=rate, latency_s=link.latency_s, measured=False, source=""
    )


def _part_of_host(host: Host, part: float) -> Host:
    return replace(
        host,
        memory_bytes=int(host.memory_bytes * part),
        reserved_bytes=int(host.reserved_bytes * part),
        pinned_bytes=None if host.pinned_bytes is None else int(host.pinned_bytes * part),
        dram_bytes_per_s=host.dram_bytes_per_s * part,
        cores=max(1, int(host.cores * part)),
        adam_params_per_s=host.adam_params_per_s * part,
    )


def _part_of_disks(disks: Nvme, part: float) -> Nvme:
    return replace(
        disks,
        memory_bytes=int(disks.memory_bytes * part),
        read_bytes_per_s=disks.read_bytes_per_s * part,
        write_bytes_per_s=disks.write_bytes_per_s * part,
    )


def _part_of_root(machine: Machine, ranks: Sequence[Rank], tensor: int) -> float | None:
    """So that the most planned ranks on one switch have what each rank on the fullest one has.

    ranks: of a stage in a node, of which one stands for `tensor`.
    """
    planned = Counter(rank.root for rank in ranks[::tensor] if rank.root is not None)
    if machine.root_bytes_per_s is None or not planned:
        return machine.root_bytes_per_s
    every = Counter(rank.root for rank in machine.ranks[: machine.local_ranks])
    return machine.root_bytes_per_s * (max(planned.values()) / max(every[rank.root] for rank in ranks))
