"""Ways planned and compared.

[Note: in the order of bounds] Ways are planned in the order of their bounds until one is above the fastest plan. A
way's bound is its closed form (stages_closed.py); a row's (bounds/stages.py) also has updates and copies. "all" plans
every way.

[Note: less recomputation] Less keeps more and so waits no less: its bound and the waits of more have to be below the
fastest plan, and stage 0's GPU needs room for its activations. Where more is not planned, it has room for slices of
weights and states too, or the way counts as near to its bound as the nearest.

[Note: few micro-batches] A full pipeline adds the same seconds for every micro-batch. So one of several ways, with
many, is planned with one more than it has stages and with two per stage (interleaved: two and three), and its seconds
follow the line through both, not below its bound. The larger pins as the smaller. Where overlap ends, the line is too
low; so the fastest row is planned whole, until it is the fastest, and so is a policy that searches.

[Note: the first stage alone] Policies that only pin take long to search. So a way waits with an estimate: what stage 0
alone takes with the closed form's pins, on a line, and the bubble. The least is planned first, and none above
the fastest plan by more than CLOSE. Of one stage it is the searched plan's to 1 %, of others 2 % more to 5 % less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from pstar_sim.catalog.machine import Machine
from pstar_sim.collector import without_garbage_collection
from pstar_sim.core.plan import Settings
from pstar_sim.core.plan_set import Split
from pstar_sim.errors import CannotPlan, DoesNotFit, PlanError
from pstar_sim.planner.asked import OnPart, teller
from pstar_sim.planner.jobs import Job
from pstar_sim.planner.machine_notes import machine_notes
from pstar_sim.planner.stages import PlannedStages, plan_stages, planned_again
from pstar_sim.planner.stages_closed import Closed, beyond_all, closed_forms
from pstar_sim.planner.stages_cut import Cut
from pstar_sim.planner.stages_degrees import ALL_BLOCKS, NOTHING, Way, closed_bubble, with_shards
from pstar_sim.planner.utilization import tflops_and_mfu
from pstar_sim.policy.family.asynchronous import Asynchronous
from pstar_sim.policy.kit.capabilities import capabilities_of
from pstar_sim.policy.registry import Policy, can, find_policy
from pstar_sim.units import format_bytes, format_count, format_s
from pstar_sim.workload.parallelism import CUTS, Parallelism
from pstar_sim.workload.pipeline import INTERLEAVED, SCHEDULES

CLOSE = 1.02
"""[Note: the first stage alone]"""


@dataclass(frozen=True, kw_only=True)
class StagesRow:
    """The keys of `pstar compare --parallel --json`.

    batch: sequences per micro-batch, of all ranks of a stage.
    gap: iteration_s / lower_bound_s - 1.
    peak_gpu_bytes, peak_host_bytes: of a rank of each stage.
    short_of: None if it fits.
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
    split: Split | None = None
    gain_of_split: float | None = None
    recompute: str | None = None

    @property
    def way(self) -> Way:
        spread = Parallelism.parse(self.parallel)
        return Way(parallelism=spread, batch=self.batch, micro_batches=self.micro_batches, recompute=self.recompute)

    @property
    def cut(self) -> str | None:
        """None for one stage."""
        spread = Parallelism.parse(self.parallel)
        return spread.cut if spread.pipeline > 1 else None


@dataclass(frozen=True, kw_only=True, eq=False)
class StagesComparison:
    """rows: those that fit, the fastest first, then the others.

    slower: whose bounds, in brackets, are above the fastest plan.
    """

    job: Job
    machine: Machine
    rows: tuple[StagesRow, ...]
    left_out: tuple[str, ...]
    slower: tuple[str, ...]
    notes: tuple[str, ...]
    best: PlannedStages | None
    unplanned: int = 0

    @property
    def flags(self) -> str:
        """Of the fastest way; "" if none fits."""
        if self.best is None:
            return ""
        row = self.rows[0]
        said = [f"--parallel {row.parallel} --policy {row.policy}"]
        if (row.batch, row.micro_batches) != (self.job.batch, self.job.micro_batches or 1):
            said.append(f"--batch {row.batch} --micro-batches {row.micro_batches}")
        whole = {NOTHING: "--no-checkpointing", ALL_BLOCKS: "--checkpointing"}
        said += [] if row.recompute is None else [whole.get(row.recompute, f"--recompute {row.recompute}")]
        return " ".join(said)

    @property
    def gain_of_cut(self) -> float | None:
        """Speed of the fastest plan cut by speed over the fastest cut evenly; None without both."""
        fastest = {
            cut: min((row.iteration_s for row in self.rows if row.iteration_s and row.cut == cut), default=None)
            for cut in CUTS
        }
        even_s, speed_s = (fastest[cut] for cut in CUTS)
        return even_s / speed_s if even_s and speed_s else None


def compare_stages(
    job: Job,
    machine: Machine,
    policies: Sequence[str | Policy],
    ways: Sequence[Way],
    *,
    left_out: Sequence[str] = (),
    every: bool = False,
    limit_s: float = inf,
    settings: Settings | None = None,
    on_part: OnPart | None = None,
) -> StagesComparison:
    """every: also ways that cannot be the fastest.
    limit_s: slower ways do not count.

    Raises PstarError if the job cannot be cut in any.
    """
    tell = teller(on_part)
    settings = settings or Settings()
    named, alone = _by_name(policies), len(ways) == 1
    asked = _Asked(job=job, machine=machine, settings=settings, policies=named, alone=alone)
    rows: list[StagesRow] = []
    planned: dict[StagesRow, PlannedStages] = {}
    missing: dict[str, list[str]] = {}
    crowded: dict[str, list[int]] = {}  # what is recomputed -> bytes of activations, each without room
    ways_left = asked.with_room(ways, missing, crowded)
    waiting = _Waiting(ways_left, room_bytes=machine.gpu_budget_bytes, every=every)

    def plan(own: Way, policy: str) -> float:
        tell(f"{own.parallelism} {policy}", len(rows), len(ways) * len(policies))
        try:
            row, stages = asked.answer(own, policy, whole=alone)
        except CannotPlan as error:
            why = str(error).removeprefix(f"{policy}: ")
            missing.setdefault(f"by {policy}: {why}", []).append(str(own.parallelism))
            return inf
        rows.append(row)
        planned.update({row: stages} if stages else {})
        return row.iteration_s or inf

    while True:
        first = min(rows, key=_place, default=None)
        fastest_s = min(limit_s, inf if first is None or first.iteration_s is None else first.iteration_s)
        if (way := waiting.next_below(fastest_s)) is not None:
            seconds = inf
            for policy, own in with_shards(asked.policies, way, machine, alone=alone):
                estimate_s = 0.0 if every else asked.estimate_s(waiting.ways[way], policy)
                if estimate_s:
                    waiting.estimated.append((estimate_s, own, policy))
                seconds = min(seconds, estimate_s / CLOSE or plan(own, policy))
            waiting.planned(way, seconds)
        elif (nearest := waiting.nearest(fastest_s)) is not None:
            waiting.takes(nearest[0], plan(*nearest))
        elif first is not None and first.few and (first.iteration_s or 0.0) <= limit_s:
            tell(f"{first.parallel} {first.policy}, all micro-batches", len(rows), len(ways) * len(policies))
            row, stages = asked.answer(first.way, first.policy, whole=True)
            rows[rows.index(first)] = row
            planned |= {row: stages} if stages else {}
        else:
            break
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
        left_out=(
            *left_out,
            *(f"{'; '.join(dict.fromkeys(of))} {why}" for why, of in missing.items()),
            *_said_of(crowded, machine),
            *waiting.said_of_others(fastest_s),
        ),
        slower=tuple(waiting.above(fastest_s)),
        notes=tuple(notes),
        best=best,
        unplanned=len(waiting.ways) + len(waiting.estimated),
    )


class _Waiting:
    """[Note: less recomputation]."""

    def __init__(self, ways: Sequence[Closed], *, room_bytes: int, every: bool) -> None:
        self.ways = {closed.way: closed for closed in ways}
        self.room_bytes = room_bytes
        self.every = every
        self.bounds_s = {closed.way: closed.bound_s for closed in ways}
        self.waits_s: dict[Way, dict[int, float]] = {}  # by the way without its recomputation and by what it keeps
        self.least_times = inf  # seconds over the bound
        self.estimated = list[tuple[float, Way, str]]()  # [Note: the first stage alone], with the policy

    def next_below(self, fastest_s: float) -> Way | None:
        least_s = {way: self._least_s(closed, fastest_s) for way, closed in self.ways.items()}
        most_s = min([fastest_s, *(seconds for seconds, _, _ in self.estimated)])
        below = [way for way, seconds in least_s.items() if seconds <= most_s]
        return min(below, key=lambda way: (least_s[way], way.keeps), default=None)

    def planned(self, way: Way, seconds: float) -> None:
        del self.ways[way]
        self.takes(way, seconds)

    def takes(self, way: Way, seconds: float) -> None:
        if way not in self.bounds_s:
            way = replace(way, parallelism=replace(way.parallelism, shard=None))
        bound_s, waits_s = self.bounds_s[way], self.waits_s.setdefault(way.but(None), {})
        waits_s[way.keeps] = min(waits_s.get(way.keeps, inf), seconds - bound_s)
        self.least_times = min(self.least_times, seconds / (bound_s or 1.0))

    def nearest(self, fastest_s: float) -> tuple[Way, str] | None:
        """Of those estimated."""
        least = min(self.estimated, key=lambda each: each[0], default=None)
        if least is None or least[0] > fastest_s * CLOSE:
            return None
        self.estimated.remove(least)
        return least[1:]

    def above(self, fastest_s: float) -> list[str]:
        bounds = ((c.bound_s, c.way, "") for c in self.ways.values() if c.bound_s > fastest_s)
        return _named(sorted(bounds, key=lambda each: each[0]))

    def said_of_others(self, fastest_s: float) -> list[str]:
        known = [bool(self._known_s(c.way)) for c in self.ways.values() if c.bound_s <= fastest_s]
        reasons = {
            True: "at least the waits of the same way with more",
            False: "no room for weights and states too, and slower if as near to its bound as the nearest",
        }
        counts = {why: known.count(has) for has, why in reasons.items()}
        said = [
            f"{format_count(count, 'way')} with less recomputation: {why}" for why, count in counts.items() if count
        ]
        if self.estimated:
            each = sorted(self.estimated, key=lambda each: each[0])
            names = ", ".join(_named((seconds, way, f" by {policy}") for seconds, way, policy in each))
            why = "stage 0 alone is estimated to take the seconds in brackets, or more, with the bubble"
            said.append(f"{format_count(len(each), 'way')}: {why}: {names}")
        return said

    def _least_s(self, closed: Closed, fastest_s: float) -> float:
        if self.every:
            return 0.0
        plain, keeps = closed.way.but(None), closed.way.keeps
        more = (other for other in self.ways.values() if other.way.keeps < keeps and other.bound_s <= fastest_s)
        if any(other.way.but(None) == plain and self._least_s(other, fastest_s) <= fastest_s for other in more):
            return inf  # until their waits are known
        room = closed.activation_bytes + closed.model_bytes <= self.room_bytes
        known_s = self._known_s(closed.way)
        if keeps and not known_s and not room:
            return closed.bound_s * self.least_times
        return closed.bound_s + max(known_s, default=0.0)

    def _known_s(self, way: Way) -> list[float]:
        return [waits_s for keeps, waits_s in self.waits_s.get(way.but(None), {}).items() if keeps < way.keeps]


def _said_of(crowded: Mapping[str, Sequence[int]], machine: Machine) -> Iterator[str]:
    for how, sizes in crowded.items():
        count, least, has = format_count(len(sizes), "way"), format_bytes(min(sizes)), machine.gpu_budget_bytes
        yield f"{count} recomputing {how}: activations alone take {least} or more of the {format_bytes(has)} of a GPU"


def _named(ways: Iterable[tuple[float, Way, str]]) -> list[str]:
    alike: dict[tuple[Way, str], list[tuple[float, str]]] = {}
    for seconds, way, by in ways:
        alike.setdefault((way.but(None), by), []).append((seconds, way.recompute or ""))
    said = []
    for (plain, by), each in alike.items():
        kinds = " or ".join(how for _, how in each if how)
        said.append(f"{plain.but(kinds or None)}{by} ({format_s(min(each)[0])})")
    return said


def _place(row: StagesRow) -> tuple[bool, float]:
    return not row.fits, row.iteration_s or 0.0


def least_s(
    job: Job, machine: Machine, policies: Sequence[str | Policy], ways: Sequence[Way], settings: Settings
) -> float:
    """Bound of all ways with room; infinite without any."""
    asked = _Asked(job=job, machine=machine, settings=settings, policies=_by_name(policies), alone=False)
    return min((closed.bound_s for closed in asked.with_room(ways, {}, {})), default=inf)


def _by_name(policies: Iterable[str | Policy]) -> dict[str, str | Policy]:
    return {policy if isinstance(policy, str) else policy.__name__: policy for policy in policies}


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """written: of the last way."""

    job: Job
    machine: Machine
    settings: Settings
    policies: Mapping[str, str | Policy]
    alone: bool
    written: dict[Way, Cut] = field(default_factory=dict)

    @without_garbage_collection()
    def estimate_s(self, closed: Closed, policy: str) -> float:
        """[Note: the first stage alone]; 0 for other policies."""
        way, point = closed.way, can(self.policies[policy]).point
        if point is None or point.streams or point.sums or self._searches(policy) or not closed.alike:
            return 0.0
        counts, seconds = _few_of(way), list[float]()
        for count in dict.fromkeys(counts):
            cut = self._cut(replace(way, micro_batches=count))
            try:
                own = Asynchronous(policy, cut.workload(0), cut.machines[0], self.settings, point=point)
                seconds.append(own.first_s())
            except (CannotPlan, DoesNotFit, PlanError):  # as its plan will say
                return 0.0
        each_s = (seconds[-1] - seconds[0]) / max(1, counts[1] - counts[0])
        alone_s = seconds[-1] + (way.micro_batches - counts[1]) * each_s
        return alone_s / (1 - closed_bubble(way.parallelism, way.micro_batches))

    @without_garbage_collection()
    def answer(self, way: Way, policy: str, *, whole: bool) -> tuple[StagesRow, PlannedStages | None]:
        """Returns the row and its plans; None for a way that does not fit or, unless `whole`, has so many
        micro-batches that [Note: few micro-batches] answers. Raises CannotPlan."""
        said = StagesRow(
            parallel=str(way.parallelism),
            policy=policy,
            batch=way.batch,
            micro_batches=way.micro_batches,
            fits=False,
            recompute=way.recompute,
        )
        counts = _few_of(way)
        try:
            if whole or self._searches(policy) or counts[0] == way.micro_batches:
                planned = self._plan(way, policy, again=self.alone)
                return _row(said, planned), planned
            few = self._plan(replace(way, micro_batches=counts[0]), policy)
            larger = replace(way, micro_batches=counts[-1])
            try:
                more = self._plan(larger, policy, pins=few.pins)
            except DoesNotFit:
                more = self._plan(larger, policy)
            return _on_line(_row(said, few), _row(said, more), counts, way.micro_batches), None
        except DoesNotFit as error:
            short = replace(said, reason=str(error), short_of=error.place)
            return replace(short, needed_bytes=error.needed_bytes, available_bytes=error.available_bytes), None

    def _plan(self, way: Way, policy: str, *, again: bool = False, pins: Sequence[int] = ()) -> PlannedStages:
        named, own = self.policies[policy], self._cut(way)
        return plan_stages(
            own.job, self.machine, named, way.parallelism, self.settings, again=again, pins=pins, cut=own
        )

    def _cut(self, way: Way) -> Cut:
        if way not in self.written:
            job, spread = way.of(self.job), way.parallelism
            like = {_any_micro_batches(other): cut for other, cut in self.written.items()}.get(_any_micro_batches(way))
            if like is None:
                self.written.clear()
                like = Cut(job=job, machine=self.machine, parallelism=spread)
            self.written[way] = replace(like, job=job, parallelism=spread)
        return self.written[way]

    def with_room(
        self, ways: Sequence[Way], missing: dict[str, list[str]], crowded: dict[str, list[int]]
    ) -> list[Closed]:
        """For activations, as far as they are counted."""
        if self.alone:
            return [Closed(way=way) for way in ways]
        if words := beyond_all(self.job, self.machine):
            missing[words] = [f"all {format_count(len(ways), 'way')}"]
            return []
        counts, left = not any(map(self._searches, self.policies)), list[Closed]()
        for closed in closed_forms(self.job, self.machine, ways, self.settings, missing, counts=counts):
            if closed.activation_bytes > self.machine.gpu_budget_bytes:
                crowded.setdefault(str(closed.way.recompute), []).append(closed.activation_bytes)
            else:
                left.append(closed)
        return left

    def _searches(self, policy: str) -> bool:
        named = self.policies[policy]
        return capabilities_of(find_policy(named) if isinstance(named, str) else named).tries_others


def _any_micro_batches(way: Way) -> Way:
    return replace(way, micro_batches=1, parallelism=replace(way.parallelism, shard=None))


def _few_of(way: Way) -> tuple[int, int]:
    """All, twice, of a way without [Note: few micro-batches]."""
    stages, schedule = way.parallelism.pipeline, way.parallelism.schedule
    few, more = (2 * stages, 3 * stages) if schedule == INTERLEAVED else (stages + 1, max(2 * stages, 3))
    able = schedule in (SCHEDULES[0], INTERLEAVED) and way.micro_batches > 2 * more
    return (few, more) if able else (way.micro_batches, way.micro_batches)


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


def _row(said: StagesRow, planned: PlannedStages) -> StagesRow:
    plans = [plan for plan, count in zip(planned.plans.plans, planned.plans.counts) for _ in range(count)]
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
        split=planned.plans.split,
        gain_of_split=planned.gain_of_split,
    )
