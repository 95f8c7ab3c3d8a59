"""Several policies on one workload and one machine, each planned, simulated and compared with the lower bound. Policies
are known only as functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pstar_sim.arguments import flag, function, instance, refused, text, whole
from pstar_sim.bounds.certificate import Certificate, Certifier, certificate_of, require_bounded
from pstar_sim.catalog.machine import Machine
from pstar_sim.collector import without_garbage_collection
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.timeline import Timeline
from pstar_sim.core.workspace import without_workspace
from pstar_sim.cost import VERSION
from pstar_sim.dtypes import unscaled
from pstar_sim.errors import CannotPlan, DoesNotFit, NothingFits, PlanError, PstarError
from pstar_sim.planner.asked import OnPart, asked_policies, settings_of, teller
from pstar_sim.planner.balance import Balanced, Cut, all_balance, balances
from pstar_sim.planner.batch_shares import Share, machine_of, share_out, unmodelled_notes
from pstar_sim.planner.binding import bound_by
from pstar_sim.planner.collection import Collection
from pstar_sim.planner.confidence import confidence
from pstar_sim.planner.explain import explain
from pstar_sim.planner.machine_notes import attention_notes, machine_notes
from pstar_sim.planner.memory_needs import with_room
from pstar_sim.planner.nearest import Elsewhere, Remedy, as_flags, in_words, remedies
from pstar_sim.planner.trust import Trust, trust, validation_digest
from pstar_sim.planner.utilization import tflops_and_mfu
from pstar_sim.policy.kit.sharing import least_known_s, plan_once, plans_shared, remember_s
from pstar_sim.policy.kit.ties import AS_FAST, burden, least_of
from pstar_sim.policy.registry import (
    Policy,
    built_in,
    can,
    can_follow,
    find_policy,
    is_built_in,
    policy_name,
    words_of_others,
)
from pstar_sim.renderers import render_html
from pstar_sim.sim.play import peaks_of_ranks, play
from pstar_sim.units import format_s
from pstar_sim.workload.loading import Loading, loading_of
from pstar_sim.workload.workload import Workload

__all__ = ["Comparison", "Planned", "Row", "barrier_cost_of", "compare", "plan_and_play", "without_barrier"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """The answer of one policy; the keys of `pstar compare --json`. A policy that does not fit has a reason and no
    figures.

    lower_bound_s: lower bound for the policy's own chunk size.
    gap: iteration_s / lower_bound_s - 1.
    certificate: kind of the bound, the term that binds it and the setting for which it holds; or the reason why there
        is none (`Certificate.text`).
    bound_by: see `binding.bound_by`.
    peak_gpu_bytes, peak_host_bytes: the most of any rank.
    peak_gpu_bytes_by_rank: None if these are equal.
    barrier_cost_s: what the policy would save if no Adam had to wait for all gradients; None if nothing makes it wait,
        or if that was not asked of this policy.
    expected_error: one standard deviation of the seconds, as a share of them, from published runs of this class of
        machine, or of any class if this class has none. None for a policy that does not fit.
    trust: the basis of expected_error.
    tflops_per_gpu, mfu: see utilization.py.
    short_of: "gpu", "host" or "nvme"; None if the policy fits.
    needed_bytes, available_bytes, needed_for: in the place that is short, and what needs it.
    nearest: changes that would make the policy fit.
    """

    policy: str
    fits: bool
    reason: str | None = None
    iteration_s: float | None = None
    tokens_per_s: float | None = None
    lower_bound_s: float | None = None
    gap: float | None = None
    bound_by: str | None = None
    peak_gpu_bytes: int | None = None
    peak_host_bytes: int | None = None
    peak_gpu_bytes_by_rank: tuple[int, ...] | None = None
    h2d_bytes: int | None = None
    d2h_bytes: int | None = None
    barrier_cost_s: float | None = None
    certificate: Mapping[str, object] | None = None
    expected_error: float | None = None
    trust: str | None = None
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    short_of: str | None = None
    needed_bytes: int | None = None
    available_bytes: int | None = None
    needed_for: str | None = None
    nearest: str | None = None

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class Planned:
    """A plan, its predicted timeline, and its line of the table."""

    row: Row
    plan: Plan
    timeline: Timeline

    def save(self, path: str | Path) -> None:
        """With its predictions filled in."""
        self.with_predictions().save(path)

    def with_predictions(self) -> Plan:
        """The figures of its line of the table (only numbers) become the plan's predictions, in place of the policy's
        own estimate. The plan's choices say where the inputs come from, which version of the cost model predicted, and
        which rows of validation the expected error is of."""
        figures = {k: float(v) for k, v in self.row.to_json().items() if isinstance(v, int | float) and k != "fits"}
        sources = confidence(self.plan.workload, self.plan.machine)
        return replace(
            self.plan,
            predictions={k: v for k, v in self.plan.predictions.items() if k != "policy_iteration_s"} | figures,
            choices={
                **self.plan.choices,
                "cost_model": VERSION,
                "validation": validation_digest(),
                "confidence": sources,
                "certificate": dict(self.row.certificate or {}),
            },
        )

    @property
    def policy(self) -> str:
        return self.row.policy

    def explain(self) -> str:
        """Where chunks live and why, what binds, and the gain of following the tide."""
        return explain(self.plan, self.timeline, bound_by=self.row.bound_by, barrier_cost_s=self.row.barrier_cost_s)

    def __repr__(self) -> str:
        return f"<Planned {self.plan!r}, {self.row.iteration_s:.3f} s>"

    def _repr_html_(self) -> str:
        return render_html(self)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Comparison(Collection):
    """Rows in the order asked for. `planned` has every policy that fits.

    workload: the job of one rank.
    batch: sequences per micro-batch, of all GPUs together.
    notes: omissions of the answer (several GPUs).
    changes: flags under which some policy would fit, the smallest change first.
    named: whether the caller named the policies.
    """

    workload: Workload
    machine: Machine
    settings: Settings
    batch: int
    rows: tuple[Row, ...]
    planned: Mapping[str, Planned]
    notes: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    named: bool = True

    def best(self) -> Planned:
        """The fastest policy that fits; of equally fast ones that which moves and pins least (policy/kit/ties.py), then
        the first. A loop of the user cannot follow a plan in another order than the workload's. Such a plan is the best
        only if `Settings.loop` is "step", or if policies were named and no other fits. Raises NothingFits with every
        reason if no policy fits."""
        if not (self.planned if self.named else _in_order(self.workload, self.settings, self.planned)):
            raise NothingFits(
                f"no policy fits {self.workload.model} on {self.machine.name}: "
                + "; ".join(r.reason or f"{r.policy} runs layer by layer, which needs loop='step'" for r in self.rows)
            )
        return _best(self.workload, self.settings, self.rows, self.planned)

    def __getitem__(self, policy: str) -> Planned:
        """In any spelling of its spec. Raises PlanError if the policy was not compared or does not fit."""
        text("policy", policy, "the name of one that was compared")
        if policy not in self.planned and ":" in policy:
            policy = policy_name(policy)
        if policy not in self.planned:
            known = {row.policy: row.reason for row in self.rows}
            why = known.get(policy) or f"compared were {', '.join(known)}"
            raise PlanError(f"there is no plan of {policy!r}: {why}")
        return self.planned[policy]

    def to_json(self) -> list[dict[str, object]]:
        return [{**row.to_json(), **self.workload.said} for row in self.rows]

    def _repr_html_(self) -> str:
        return render_html(self)


def compare(
    workload: Workload | Sequence[Workload],
    machine: Machine | str,
    *,
    policies: Iterable[str | Policy] | str | None = None,
    settings: Settings | None = None,
    update: str | None = None,
    clip: bool | None = None,
    chunk_bytes: int | str | None = None,
    loop: str | None = None,
    sums: str | None = None,
    effort: float | None = None,
    loading: Loading | str | None = None,
    barrier_cost: bool | None = None,
    near: bool | None = True,
    certify: bool = False,
    only_best: bool = False,
    made: Mapping[str, tuple[Plan, Timeline]] | None = None,
    cut: Cut | None = None,
    on_part: OnPart | None = None,
) -> Comparison:
    """Returns the plans, the simulated seconds and the bounds of every policy (all known policies if none is named).

    workload: the job of all GPUs together, which get their shares of its batch; or a list of workloads, one per rank.
    policies: names or specs (`tide:capacity=peak`), or functions (workload, machine, settings) -> Plan.
    settings: update, clip, chunk_bytes, loop, sums and effort override single fields of them.
    loading: as in `fits`.
    barrier_cost: whether to plan and simulate every fitting policy also without its barrier. None: the best policy if
        `only_best`, else none.
    near: whether to look for the nearest machine or setting under which the other policies would fit; None: where no
        policy fits.
    certify: whether to use the tighter bound of the fluid linear program, which takes seconds.
    only_best: for `best()` alone: without changes if some policy fits, policies known to be slower, and, if none is
        named, those in an order that the loop cannot follow.
    made: plans and timelines of policies for this very job.
    cut: number of sequences per micro-batch -> the job of one GPU, for policies that choose the shares of unequal GPUs
        (`whale`). A preset needs no `cut`.
    on_part: called with the next part of the work, the number of policies done and the number of all policies.

    Raises UnknownName for an unknown policy, and PstarError for settings that make no sense.
    """
    machine = machine_of(machine)
    changes = {
        "update": update, "clip": clip, "chunk_bytes": chunk_bytes, "loop": loop, "sums": sums, "effort": effort,
    }  # fmt: skip
    settings = replace(settings_of(settings), **{k: v for k, v in changes.items() if v is not None})  # type: ignore[arg-type]
    asked = [_named(p) for p in asked_policies(policies, machine)]
    names = [name for name, _ in asked]
    if len(set(names)) != len(names):
        raise PstarError(f"policies must have different names, not {', '.join(names)}")
    loading = loading_of(loading)
    for what, value in (("near", near or near is None), ("certify", certify), ("only_best", only_best)):
        flag(what, value)
    if barrier_cost is not None:
        flag("barrier_cost", barrier_cost)
    if made is not None and not isinstance(made, Mapping):
        raise refused("made", made, "plans and timelines by policy")
    if cut is not None:
        function("cut", cut)
    tell = teller(on_part)
    share = share_out(workload, machine, nearly=all_balance((policy for _, policy in asked), machine))
    if policies is None and only_best:
        asked = [(name, policy) for name, policy in asked if can_follow(settings, share.workload, policy)]
    costs = only_best if barrier_cost is None else barrier_cost
    free = _free(share.workload, share.ranked, machine, settings) if costs else None
    with without_garbage_collection(), plans_shared(share.workload, *(free[:1] if free is not None else ())):
        return _compare(
            share,
            machine,
            settings,
            asked,
            free,
            every_cost=free is not None and not only_best,
            loading=loading,
            near=near,
            certify=certify,
            only_best=only_best,
            made=made or {},
            cut=cut,
            tell=tell,
            named=policies is not None,
        )


def _compare(
    share: Share,
    machine: Machine,
    settings: Settings,
    asked: Sequence[tuple[str, Policy]],
    free: _Free | None,
    *,
    every_cost: bool,
    loading: Loading,
    near: bool | None,
    certify: bool,
    only_best: bool,
    made: Mapping[str, tuple[Plan, Timeline]],
    cut: Cut | None,
    tell: OnPart,
    named: bool,
) -> Comparison:
    workload = share.workload
    certifier = Certifier(workload, machine, settings, lp=certify, ranked=share.ranked)
    tell("lower bound", 0, len(asked))
    usual = certifier.usual()
    found = _Found()
    # A policy that tries others comes last, when their seconds are known; if only the best counts first, as it leaves
    # out those that take longer.
    for n, (name, policy) in enumerate(sorted(asked, key=lambda one: can(one[1]).tries_others is not only_best)):
        job = _Question(share=share, machine=machine, settings=settings, loading=loading, free=free)
        if only_best and found.beats(policy, job):
            continue
        tell(name, n, len(asked))
        try:
            found.add(name, policy, job, certifier, made.get(name), cut=cut, certify=certify, every_cost=every_cost)
        except CannotPlan as reason:
            found.rows.append(_unfit(name, usual, reason=str(reason)))
        except DoesNotFit as short:
            found.failures[name] = (policy, short.with_traceback(None))  # its frames hold everything up to here
            found.rows.append(_unfit(name, usual))
    order = {name: n for n, (name, _) in enumerate(asked)}
    rows, failures = sorted(found.rows, key=lambda row: order[row.policy]), found.failures
    planned = {row.policy: found.planned[row.policy] for row in rows if row.fits}
    changes: list[Remedy] = []
    others = _fitting(workload, settings, rows, planned)
    elsewhere = Elsewhere(workload, machine, loading)
    near_wanted = near is not False and not ((only_best or near is None) and others)
    for i, row in enumerate(rows):
        if row.policy in failures:
            policy, error = failures[row.policy]
            hint = ""
            if near_wanted:
                tell(f"what would do for {row.policy}", len(rows), len(asked))
                ways = remedies(policy, workload, machine, settings, error, elsewhere=elsewhere)
                changes += ways
                hint = in_words(ways, others)
            rows[i] = unfit_row(row.policy, error, usual, hint)
    if others and only_best:
        best = _best(workload, settings, rows, planned)
        name = best.row.policy
        known = _with_barrier_cost(best, dict(asked)[name], found.free.get(name, free))
        rows[rows.index(best.row)] = known.row
        planned[name] = known
    short_of_gpu = not named and {short.place for _, short in failures.values()} == {"gpu"}
    timelines = {name: p.timeline for name, p in planned.items()}
    return Comparison(
        changes=tuple(dict.fromkeys(as_flags(one.words) for one in sorted(changes, key=lambda one: one.rank))),
        workload=workload,
        machine=machine,
        settings=settings,
        batch=share.batch,
        rows=tuple(rows),
        planned=planned,
        notes=(
            *(found.gains[name] for name in order if name in found.gains),
            *(words_of_others(order) if named else ()),
            *unmodelled_notes(workload, machine, timelines, short_of_gpu=short_of_gpu),
            *attention_notes(machine, workload.attention),
            *machine_notes(machine, [(p.plan, p.timeline) for p in planned.values()]),
        ),
        named=named,
    )


@dataclass(frozen=True)
class _Found:
    """free: the job without a barrier of each policy that chooses its shares.
    gains: theirs over equal shares, in words.
    """

    rows: list[Row] = field(default_factory=list)
    planned: dict[str, Planned] = field(default_factory=dict)
    failures: dict[str, tuple[Policy, DoesNotFit]] = field(default_factory=dict)
    free: dict[str, _Free | None] = field(default_factory=dict)
    gains: dict[str, str] = field(default_factory=dict)

    def add(
        self,
        name: str,
        policy: Policy,
        job: _Question,
        certifier: Certifier,
        made: tuple[Plan, Timeline] | None,
        *,
        cut: Cut | None,
        certify: bool,
        every_cost: bool,
    ) -> None:
        """Raises CannotPlan and DoesNotFit."""
        asked, machine, settings = job.share.workload, job.machine, job.settings
        tokens = job.share.tokens
        own: Balanced | None = None
        if made is None:
            search = certifier.shares() if cut is None else None
            jobs = balances(policy, job.share, machine, settings, cut, search=search)
            plan, timeline, own, job = _fastest(policy, name, job, jobs)
        else:
            plan, timeline = made[0], made[1].labelled(name)
        if own is not None:
            self.free[name] = job.free
        barrier_cost_s = _barrier_cost(policy, timeline, job.free) if every_cost else None
        if own is not None:
            gain = _gain(policy, own, settings, timeline.iteration_s, planned_again=own.least_s == 0)
            plan = replace(plan, choices={**plan.choices, "balance": gain})
            self.gains[name] = f"{name}: {gain}"
            certifier = Certifier(job.share.workload, job.machine, settings, lp=certify, ranked=job.share.ranked)
        belief = trust(plan.machine, plan.policy, job.share.workload)
        row = _figures(plan, name, belief, timeline, tokens, _certificate(certifier, plan, asked), barrier_cost_s)
        self.planned[name] = Planned(row=row, plan=plan, timeline=timeline)
        self.rows.append(row)

    def beats(self, policy: Policy, job: _Question) -> bool:
        workload, machine, settings = job.share.workload, job.machine, job.settings
        if job.share.ranked is not None or machine.mixed:
            return False
        best_s = min((_pace(p.row) for p in _in_order(workload, settings, self.planned)), default=math.inf)
        return least_known_s(policy, workload, without_workspace(workload, machine), settings) > best_s * (1 + AS_FAST)


def _fastest(
    policy: Policy, name: str, job: _Question, jobs: Iterable[Balanced]
) -> tuple[Plan, Timeline, Balanced | None, _Question]:
    """With any of the shares, `jobs` in the order of their bounds; the job's own plan if there are none.

    Raises CannotPlan, and DoesNotFit of the first if none fits.
    """
    best: tuple[Plan, Timeline, Balanced | None, _Question] | None = None
    reason: DoesNotFit | None = None
    for own in jobs:
        if best is not None and own.least_s * (1 + AS_FAST) >= best[1].iteration_s:
            break
        if best is not None and own.least_s == 0:
            break
        there = _of_balance(own, job)
        try:
            plan, timeline = there.planned(policy, name)
        except DoesNotFit as short:
            reason = reason or short.with_traceback(None)
            continue
        if best is None or timeline.iteration_s < best[1].iteration_s:
            best = plan, timeline, own, there
    if best is not None:
        plan, timeline, chosen, there = best
        return (*_with_rivals(policy, name, there, plan, timeline), chosen, there)
    if reason is not None:
        raise reason
    return (*job.planned(policy, name), None, job)


def _with_rivals(policy: Policy, name: str, job: _Question, plan: Plan, timeline: Timeline) -> tuple[Plan, Timeline]:
    """What it tried as if each GPU had the hardest job, and is below its seconds, is played with the job of each."""
    if policy not in built_in().values() or not can(policy).tries_others:
        return plan, timeline
    own_s, machine = timeline.iteration_s, without_workspace(job.share.workload, job.machine)
    for rival, others_plan in built_in().items():
        if not 0 < least_known_s(others_plan, job.share.workload, machine, job.settings) < own_s:
            continue
        try:
            other, played = job.planned(others_plan, name)
        except (CannotPlan, DoesNotFit):
            continue
        if played.iteration_s * (1 + AS_FAST) < timeline.iteration_s:
            words = f"that of {rival}: {format_s(played.iteration_s)}, {name}'s own {format_s(own_s)}"
            other = replace(other, policy=plan.policy, choices={**other.choices, "schedule": words})
            plan, timeline = other, played.labelled(name)
    return plan, timeline


def _certificate(proof: Certifier, plan: Plan, workload: Workload) -> Certificate:
    require_bounded(plan)
    same = plan.workload.order is workload.order
    return proof.of(plan.layout) if same else certificate_of(plan, lp=proof.lp)


def _with_barrier_cost(best: Planned, policy: Policy, free: _Free | None) -> Planned:
    cost_s = _barrier_cost(policy, best.timeline, free)
    row = replace(best.row, barrier_cost_s=cost_s, bound_by=bound_by(best.timeline, barrier_cost_s=cost_s))
    return replace(best, row=row)


_Free = tuple[Workload, Machine, Settings, Sequence[Workload] | None]
"""A job in which no Adam waits for all gradients, with the workloads rank by rank if they differ."""


def _free(workload: Workload, ranked: Sequence[Workload] | None, machine: Machine, settings: Settings) -> _Free | None:
    """None if no Adam waits anyway."""
    if settings.barrier(workload.compute_dtype) is None:
        return None
    return (*without_barrier(workload, machine, settings), _retyped(ranked, machine, settings))


@dataclass(frozen=True, kw_only=True)
class _Question:
    """free: the job if no Adam waits; None if that is not asked."""

    share: Share
    machine: Machine
    settings: Settings
    loading: Loading
    free: _Free | None

    def planned(self, policy: Policy, name: str) -> tuple[Plan, Timeline]:
        w, m, s, ranked = self.share.workload, self.machine, self.settings, self.share.ranked
        return plan_and_play(policy, w, m, s, loading=self.loading, label=name, workloads=ranked)


def _of_balance(own: Balanced, job: _Question) -> _Question:
    wanted = job.free is not None
    free = _free(own.share.workload, own.share.ranked, own.machine, job.settings) if wanted else None
    return replace(job, share=own.share, machine=own.machine, free=free)


def _gain(policy: Policy, own: Balanced, settings: Settings, seconds: float, *, planned_again: bool) -> str:
    """planned_again: whether equal shares are planned too; otherwise their bound counts."""
    even = own.even
    if not planned_again:
        least = Certifier(even.workload, own.even_machine, settings, ranked=even.ranked).own_bound_s()
        return (
            f"sequences per GPU {own.words}: {format_s(seconds)} per iteration; equal shares ({own.even_words}) take "
            f"at least {format_s(least)}"
        )
    try:
        _, timeline = plan_and_play(policy, even.workload, own.even_machine, settings, workloads=even.ranked)
    except DoesNotFit as short:
        return f"sequences per GPU {own.words}; equal shares ({own.even_words}) do not fit: {short}"
    return (
        f"sequences per GPU {own.words}: {format_s(seconds)} per iteration, {timeline.iteration_s / seconds:.2f} times "
        f"as fast as equal shares ({own.even_words}: {format_s(timeline.iteration_s)})"
    )


def _fitting(workload: Workload, settings: Settings, rows: Sequence[Row], planned: Mapping[str, Planned]) -> list[str]:
    if not planned:
        return []
    first, later_first = _best(workload, settings, rows, planned).row, rows[::-1]
    return [r.policy for r in sorted(later_first, key=lambda r: (r is not first, _pace(r))) if r.fits]


def _retyped(ranked: Sequence[Workload] | None, machine: Machine, settings: Settings) -> Sequence[Workload] | None:
    if ranked is None:
        return None
    known = {id(w): without_barrier(w, machine, settings)[0] for w in ranked}
    return tuple(known[id(w)] for w in ranked)


def plan_and_play(
    policy: Policy,
    workload: Workload,
    machine: Machine,
    settings: Settings,
    *,
    loading: Loading | None = None,
    label: str = "",
    workloads: Sequence[Workload] | None = None,
) -> tuple[Plan, Timeline]:
    """Returns the plan and its simulated timeline, with the fields for its picture.

    loading: the host then has room for a run of the plan (memory_needs.py), not only for its payloads.
    workloads: each rank's own, if these differ. `workload` is at least as hard as each.

    A user's policy is not trusted: its plan has to be for this job and pass the checker. Raises DoesNotFit and
    CannotPlan, and PlanError naming the policy for any other fault of it.
    """

    def plan_on(where: Machine, asked: Settings) -> Plan:
        if is_built_in(policy):
            return plan_once(policy, workload, where, asked)
        return _users_plan(policy, workload, where, asked, label)

    if loading is None:
        plan = plan_on(machine, settings)
    else:
        plan = with_room(plan_on, policy, workload, machine, settings, loading=loading)
    played, timeline = _played(plan, label, workloads)
    if workloads is None and not machine.mixed:
        remember_s(plan, timeline.iteration_s)
    return played, timeline


def _users_plan(policy: Policy, workload: Workload, machine: Machine, settings: Settings, label: str) -> Plan:
    name = label or getattr(policy, "__name__", "policy")
    try:
        plan = policy(workload, machine, settings)
    except PstarError:
        raise
    except Exception as error:
        raise PlanError(
            f"policy {name}: {type(error).__name__}: {error}; a policy returns a Plan or raises DoesNotFit"
        ) from error
    if not isinstance(plan, Plan):
        raise PlanError(f"policy {name} returned {type(plan).__name__}; a policy returns a Plan or raises DoesNotFit")
    asked = (workload, machine, settings, machine.gpu_budget_bytes, machine.host_budget_bytes)
    made = (plan.workload, plan.machine, plan.settings, plan.gpu_budget_bytes, plan.host_budget_bytes)
    for what, one, other in zip(("workload", "machine", "settings", "GPU budget", "host budget"), asked, made):
        if one is not other and one != other:
            raise PlanError(f"policy {name} made its plan for another {what} than it was asked for")
    plan.check()
    return plan


def _played(plan: Plan, label: str, ranked: Sequence[Workload] | None) -> tuple[Plan, Timeline]:
    plan = replace(plan, ranked=None if ranked is None else tuple(ranked))
    return plan, play_plan(plan, label=label)


def play_plan(plan: Plan, *, label: str = "", rank: int | None = None) -> Timeline:
    """The plan's simulated timeline.

    rank: None: the slowest, if ranks differ.
    """
    instance("plan", plan, Plan, "a Plan")
    if rank is not None:
        whole("rank", rank, least=0)
    timeline = play(plan, rank=rank)
    return timeline.labelled(label) if label else timeline


def without_barrier(workload: Workload, machine: Machine, settings: Settings) -> tuple[Workload, Machine, Settings]:
    """The job if no Adam waited: eager, without clipping, and bf16 in place of fp16 (no loss scaling, the same
    rate)."""
    free = replace(settings, update="eager", clip=False)
    if free.barrier(workload.compute_dtype) is None:
        return workload, machine, free
    scaled, dtype = workload.compute_dtype, unscaled(workload.compute_dtype)
    tensors = tuple(replace(t, dtype=unscaled(t.dtype)) for t in workload.tensors)
    gpus = {
        id(r.gpu): replace(r.gpu, flops_per_s={**r.gpu.flops_per_s, dtype: r.gpu.flops_per_s[scaled]})
        for r in machine.ranks
        if scaled in r.gpu.flops_per_s
    }
    ranks = tuple(replace(r, gpu=gpus.get(id(r.gpu), r.gpu)) for r in machine.ranks)
    retyped = (
        replace(workload, autocast=dtype) if workload.autocast else replace(workload, dtype=dtype, tensors=tensors)
    )
    return retyped, replace(machine, ranks=ranks), free


def barrier_cost_of(plan: Plan, timeline: Timeline) -> float | None:
    """Seconds that the policy would save without the wait; None if none waits, or if the policy then lacks room. Raises
    UnknownName for an unknown policy."""
    free = _free(plan.workload, plan.ranked, plan.machine, plan.settings)
    return _barrier_cost(find_policy(plan.policy), timeline, free)


def _barrier_cost(
    policy: Policy,
    timeline: Timeline,
    free: _Free | None,
) -> float | None:
    if free is None:
        return None
    workload, machine, settings, ranked = free
    try:
        _, unbound = plan_and_play(policy, workload, machine, settings, workloads=ranked)
    except DoesNotFit:
        return None  # the eager plan needs more room, so there is nothing to compare with
    return max(0.0, timeline.iteration_s - unbound.iteration_s)


def unfit_row(name: str, error: DoesNotFit, certificate: Certificate | None = None, hint: str = "") -> Row:
    return replace(
        _unfit(name, certificate, reason=str(error) + (f"; {hint}" if hint else "")),
        short_of=error.place,
        needed_bytes=error.needed_bytes,
        available_bytes=error.available_bytes,
        needed_for=error.what,
        nearest=hint or None,
    )


def _unfit(name: str, certificate: Certificate | None, *, reason: str | None = None) -> Row:
    if certificate is None:
        return Row(policy=name, fits=False, reason=reason)
    return Row(policy=name, fits=False, reason=reason, lower_bound_s=certificate.seconds, certificate=certificate.text)


def _figures(
    plan: Plan,
    name: str,
    belief: Trust,
    timeline: Timeline,
    tokens: int,
    certificate: Certificate,
    barrier_cost_s: float | None,
) -> Row:
    bound_s = certificate.seconds
    peaks = peaks_of_ranks(plan, timeline)
    gpus = tuple(peak["gpu"] for peak in peaks)
    tflops, mfu = tflops_and_mfu(plan.ranked or (plan.workload,), timeline.iteration_s, plan.machine)
    return Row(
        policy=name,
        fits=True,
        iteration_s=timeline.iteration_s,
        tokens_per_s=tokens / timeline.iteration_s,
        lower_bound_s=bound_s,
        gap=timeline.iteration_s / bound_s - 1,
        bound_by=bound_by(timeline, barrier_cost_s=barrier_cost_s),
        peak_gpu_bytes=max(gpus),
        peak_host_bytes=max(peak["host"] for peak in peaks),
        peak_gpu_bytes_by_rank=gpus if len(set(gpus)) > 1 else None,
        h2d_bytes=timeline.moved_bytes["h2d"],
        d2h_bytes=timeline.moved_bytes["d2h"],
        barrier_cost_s=barrier_cost_s,
        certificate=certificate.text,
        expected_error=belief.error,
        trust=belief.label,
        tflops_per_gpu=tflops,
        mfu=mfu,
    )


def _best(workload: Workload, settings: Settings, rows: Sequence[Row], planned: Mapping[str, Planned]) -> Planned:
    fitting = {row.policy: planned[row.policy] for row in rows if row.fits}
    followed = _in_order(workload, settings, fitting) or list(fitting.values())
    return least_of(followed, seconds=lambda p: _pace(p.row), burden=lambda p: burden(p.plan))


def _in_order(workload: Workload, settings: Settings, planned: Mapping[str, Planned]) -> list[Planned]:
    any_order = settings.loop == "step"
    return [p for p in planned.values() if any_order or p.plan.workload.relayed == workload.relayed]


def _pace(row: Row) -> float:
    """To a nanosecond, so that rounding does not decide between equals."""
    return round(row.iteration_s or 0.0, 9)


def _named(policy: str | Policy) -> tuple[str, Policy]:
    if isinstance(policy, str):
        return policy_name(policy), find_policy(policy)
    if not callable(policy):
        raise PstarError(f"a policy is a name or a function (workload, machine, settings) -> Plan, not {policy!r}")
    return policy_name(policy), policy
