"""The fastest way to run one global batch with the variants of a trace file.

A variant whose batch divides a rank's share is repeated as micro-batches.

[Note: what is planned] Candidates (ways.py) come in the order of their promises, lower bounds on their plans: at first
the time of computing and stashes with the link to themselves, then the bound at the usual chunk size, first of
stand-ins with fewer micro-batches, then of the candidate. A candidate is bounded and made on its turn while its
promise is below the best so far. `optimal` searches long, so at first it plans at most SEARCHED candidates, at most
ALIKE of them with the same number of micro-batches, all with room for tide. Then the other policies are asked about the
rest where non-model data have room and a bound is below the best, and `optimal` plans those on which one is faster
(policy/kit/ties.py).

If `session.step` runs the iterations (`Settings.loop`), `optimal` also races layer-major candidates, with caps of their
own.

Of a policy with its own rule (`Capabilities.activations`) only its ways are raced, of pairs of variants that differ in
recomputation alone.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pstar_sim.bounds.bounds import lower_bound
from pstar_sim.catalog.machine import Machine
from pstar_sim.collector import without_garbage_collection
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import CannotPlan, DoesNotFit, TraceError
from pstar_sim.planner.balance import refuse_balance
from pstar_sim.planner.compare import plan_and_play
from pstar_sim.planner.memory_needs import shortage
from pstar_sim.planner.nearest import Elsewhere, asker, nearest
from pstar_sim.planner.tried import Cap, Tried, WayOutcome
from pstar_sim.planner.ways import Way, relayed_ways, words
from pstar_sim.policy.kit.options import split_spec
from pstar_sim.policy.kit.points import Point
from pstar_sim.policy.kit.ties import AS_FAST, burden, least_of
from pstar_sim.policy.registry import Policy, built_in, can, find_policy, keeps_order, named, policy_at, reorders
from pstar_sim.workload.loading import Loading, loading_of
from pstar_sim.workload.orders import Order
from pstar_sim.workload.workload import Workload

SEARCHED, ALIKE = 5, 2  # limits for a policy that takes long: candidates in all, and with one number of micro-batches
(SEARCHING,) = named(lambda able: able.tries_others)  # the policy that takes long
MOST_SPLITS_NAMED = 8  # numbers of micro-batches without a variant that are named
QUICK = policy_at(Point())  # the policy whose own checks of room say which candidates are worth planning


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The fastest way, and those it was chosen from.

    workload: one rank's share.
    tried: way in words -> outcome.
    left_out: not considered, and why.
    """

    workload: Workload
    words: str
    policy: str
    plan: Plan
    timeline: Timeline
    iteration_s: float
    tried: tuple[tuple[str, Tried], ...]
    left_out: tuple[str, ...]

    def choices(self) -> dict[str, object]:
        tried = {way: row.to_json() for way, row in self.tried}
        return {"variant": self.words, "variants_tried": tried, "not_considered": self.left_out}


@without_garbage_collection()
def choose(
    among: Sequence[Way | Workload],
    machine: Machine,
    settings: Settings,
    *,
    policy: str = SEARCHING,
    loading: Loading | str | None = None,
    on_way: Callable[[str, int, int], None] | None = None,
) -> Chosen:
    """The fastest under `policy` by [Note: what is planned], each one rank's share of the same batch.

    loading: as in `fits`.
    on_way: called with the work in hand, the ways done and all.

    Raises DoesNotFit, of the nearest candidate, if none fits, CannotPlan if the policy can plan none, and TraceError
    if they are not the same work.
    """
    ways: Sequence[Way] = [one if isinstance(one, Way) else Way(one) for one in among]
    shares = sorted({way.batch * way.micro_batches for way in ways})
    if len(shares) != 1:
        raise TraceError(f"the workloads have {shares} sequences per iteration; give workloads with the same number")
    refuse_balance([policy], machine)
    if settings.loop == "step" and can(policy).tries_others:
        ways = (*ways, *relayed_ways(ways, policy))
    own = _own_ways(ways, machine, settings, policy)
    left_out = (*_splits_left_out(ways), _OWN_RULE.format(policy)) if own else _left_out(ways)
    ways = own or ways
    # each candidate in its own order
    race = _Race(ways, machine, replace(settings, loop="own"), policy, loading_of(loading), on_way)
    later = race.run_all()
    if race.searching:
        race.ask_others()
    for way in later:
        if race.best is None:
            race.run(way)
    if race.best is None:
        raise race.refusal(left_out) if race.shortest is not None else race.unable[0]
    if race.unable:
        left_out = (*left_out, f"{len(race.unable)} of {len(ways)} ways: {race.unable[0]}")
    plan, timeline = replace(race.best[0], settings=settings), race.best[1]
    chosen = Chosen(
        workload=plan.workload,
        words=words(plan.workload, ways),
        policy=policy,
        plan=plan,
        timeline=timeline,
        iteration_s=timeline.iteration_s,
        tried=tuple(race.tried.items()),
        left_out=tuple(left_out),
    )
    return replace(chosen, plan=replace(plan, choices={**plan.choices, **chosen.choices()}))


def _own_ways(ways: Sequence[Way], machine: Machine, settings: Settings, policy: str) -> list[Way]:
    rule = can(policy).activations
    if rule is None:
        return []
    plain = [way for way in ways if not way.activations]
    keeping = {(way.batch, way.attention): way for way in plain if not way.checkpointing}
    pairs = [(way, keeping.get((way.batch, way.attention))) for way in plain if way.checkpointing and not way.recompute]
    return [Way(w) for way, kept in pairs if kept for w in rule(way.workload, kept.workload, machine, settings)]


class _Race:
    """promise_s: see [Note: what is planned]; at first the time of computing and stashes.
    fast: plans and timelines that take best_s.
    best: moves and pins least of `fast`.
    shortest: the nearest, and why it does not fit.
    reorders: plans have other orders, so bounds of the workloads do not hold.
    """

    def __init__(
        self,
        ways: Sequence[Way],
        machine: Machine,
        settings: Settings,
        policy: str,
        loading: Loading,
        on_way: Callable[[str, int, int], None] | None,
    ) -> None:
        self.on_way = on_way
        self.loading = loading
        self.ways, self.machine, self.settings, self.policy = ways, machine, settings, policy
        self.function: Policy = find_policy(policy)
        self.reorders = reorders(self.function)
        self.searching = can(split_spec(policy)[0]).tries_others and len(ways) > SEARCHED
        # All candidates have one model's tensors, so one chunk size suits all.
        first = build_layout(
            ways[0].source, chunk_bytes=settings.chunk_bytes, ranks=machine.data_parallel_size, sums=settings.sums
        )
        self.usual = replace(settings, chunk_bytes=first.chunk_bytes)
        self.chunk_bytes = first.chunk_bytes
        self.least_s = {way: way.compute_s(machine, self.chunk_bytes) for way in ways}
        self.promise_s = dict(self.least_s)
        self.bounds_s: dict[tuple[Way, int, bool], float] = {}  # candidate, micro-batches, whether plans may stream
        self.planned: set[Way] = set()
        self.splits: Counter[tuple[Order, int]] = Counter()  # planned candidates by order and number of micro-batches
        self.best: tuple[Plan, Timeline] | None = None
        self.fast: list[tuple[Plan, Timeline]] = []
        self.best_s = float("inf")
        self.shortest: tuple[Way, DoesNotFit] | None = None
        self.crowded: set[Way] = set()  # whose non-model data alone have no room
        self.unable: list[CannotPlan] = []
        self.tried: dict[str, Tried] = {}

    def run_all(self) -> list[Way]:
        """In the order of their promises; returns those a long search left out because tide has no room."""
        later: list[Way] = []
        # Of equal promises the candidate with fewer micro-batches goes first, then the candidate that moves less.
        less = [(way.micro_batches, way.stash_bytes, n) for n, way in enumerate(self.ways)]
        heap = [(self.promise_s[way], 0, rank) for way, rank in zip(self.ways, less)]
        heapq.heapify(heap)
        while heap:
            self._tell(f"planning by {self.policy}", len(self.ways) - len(heap))
            _, stage, rank = heapq.heappop(heap)
            way = self.ways[rank[-1]]
            counts = self._stand_ins(way)
            if stage == len(counts) or self._hopeless(way) is not None:
                self.run(way)
                continue
            short = self._short(way, counts[stage])
            if short is not None:
                self.note(way, short)
                later.append(way)
                continue
            self.promise_s[way] = max(self.promise_s[way], self._bound_s(way, counts[stage]))
            heapq.heappush(heap, (self.promise_s[way], stage + 1, rank))
        return later

    def run(self, way: Way) -> None:
        hopeless = self._hopeless(way)
        if hopeless is not None:
            self.tried[self._words(way)] = hopeless
        else:
            self._plan(way)

    def ask_others(self) -> None:
        others = [policy for name, policy in built_in().items() if name != self.policy]
        reordering = [policy for policy in others if can(policy).reorders]  # whose order may have less non-model data
        for number, way in enumerate(sorted(self.ways, key=self.promise_s.__getitem__)):
            self._tell("asking other policies", number)
            for policy in reordering if way in self.crowded else others:
                if way in self.planned or not self._could_win(self.least_s[way]):
                    break
                if not keeps_order(way.micro_batches, way.order, policy):
                    continue
                if not self._may_win(way, stream=can(policy).streams_states):
                    continue
                try:
                    _, timeline = self._planned(policy, way)
                except (DoesNotFit, CannotPlan):
                    continue
                if self._could_win(timeline.iteration_s):
                    self._plan(way)

    def _tell(self, what: str, behind: int) -> None:
        if self.on_way is not None:
            self.on_way(what, behind, len(self.ways))

    def _could_win(self, seconds: float) -> bool:
        return seconds < self.best_s

    def _may_win(self, way: Way, *, stream: bool) -> bool:
        """No bound of the candidate is above the best so far.

        stream: plans may stream chunks.
        """
        return all(self._could_win(self._bound_s(way, count, stream=stream)) for count in self._stand_ins(way))

    def _stand_ins(self, way: Way) -> tuple[int, ...]:
        return way.stand_ins() if self.machine.data_parallel_size == 1 else (way.repeats,)

    def _bound_s(self, way: Way, count: int, *, stream: bool = True) -> float:
        """Of plans with the usual chunks.

        stream: as in `_may_win`.
        count: micro-batches of the stand-in.
        """
        key = (way, count, stream)
        if key not in self.bounds_s:
            self.bounds_s[key] = self.least_s[way]
            if not self.reorders:
                w = way.stand_in(count)
                # on several GPUs chunks are sliced, or whole on each
                layouts = {
                    build_layout(w, chunk_bytes=self.chunk_bytes, ranks=n, sums=self.usual.sums)
                    for n in (1, self.machine.data_parallel_size)
                }
                bounds = [
                    lower_bound(
                        w, self.machine, self.usual, layout, stream=stream, costs=way.costs(count, self.machine, layout)
                    )
                    for layout in layouts
                ]
                self.bounds_s[key] = max(self.bounds_s[key], min(bound.seconds for bound in bounds))
        return self.bounds_s[key]

    def _short(self, way: Way, count: int) -> DoesNotFit | None:
        if not self.searching or (count == 1 and way.repeats > 1):
            return None
        w = way.stand_in(count)
        if w.peak_non_model_bytes > self.machine.gpu_budget_bytes:
            self.crowded.add(way)
        return shortage(QUICK, w, self.machine, self.usual, loading=self.loading)

    def _words(self, way: Way) -> str:
        return words(way, self.ways)

    def _planned(self, policy: Policy, way: Way) -> tuple[Plan, Timeline]:
        return plan_and_play(policy, way.workload, self.machine, self.settings, loading=self.loading)

    def _plan(self, way: Way) -> None:
        self.planned.add(way)
        try:
            plan, timeline = self._planned(self.function, way)
        except DoesNotFit as error:
            self.note(way, error)
            return
        except CannotPlan as error:
            self.unable.append(error)
            return
        self.splits[way.order, way.micro_batches] += 1
        self.tried[self._words(way)] = Tried(outcome=WayOutcome.PLANNED, seconds=timeline.iteration_s)
        self.best_s = min(self.best_s, timeline.iteration_s)
        limit_s = self.best_s * (1 + AS_FAST)
        self.fast = [one for one in (*self.fast, (plan, timeline)) if one[1].iteration_s <= limit_s]
        self.best = least_of(self.fast, seconds=lambda one: one[1].iteration_s, burden=lambda one: burden(one[0]))

    def refusal(self, left_out: Sequence[str]) -> DoesNotFit:
        """Of the nearest, with changes that would make it fit, and the ways not tried (`left_out`)."""
        assert self.shortest is not None
        way, error = self.shortest

        ask = asker(QUICK if self.searching else self.policy)
        elsewhere = Elsewhere(way.workload, self.machine, self.loading)
        hint = nearest(self.function, way.workload, self.machine, self.settings, error, ask=ask, elsewhere=elsewhere)
        ways = f"that is {self._words(way)}, which lacks least of {len(self.ways)} tried"
        return error.restated(policy=self.policy, what="; ".join((error.what, ways, hint, *left_out)))

    def note(self, way: Way, error: DoesNotFit) -> None:
        short = Tried(outcome=WayOutcome.NO_ROOM, place=error.place, short_bytes=error.short_bytes)
        self.tried[self._words(way)] = short
        if self.shortest is None or error.short_bytes < self.shortest[1].short_bytes:
            self.shortest = (way, error)

    def _hopeless(self, way: Way) -> Tried | None:
        if self.best is None:
            return None
        least, promise = self.least_s[way], self.promise_s[way]
        if least >= self.best_s:
            return Tried(outcome=WayOutcome.COMPUTING, seconds=least, stashes=bool(way.stash_bytes))
        if promise >= self.best_s:
            return Tried(outcome=WayOutcome.BOUND, seconds=promise, chunk_bytes=self.chunk_bytes)
        if self.searching and self._enough(way):
            return Tried(
                outcome=WayOutcome.CAPPED, seconds=promise, cap=Cap(policy=SEARCHING, ways=SEARCHED, alike=ALIKE)
            )
        return None

    def _enough(self, way: Way) -> bool:
        alike = self.splits[way.order, way.micro_batches]
        return alike >= ALIKE or sum(n for (order, _), n in self.splits.items() if order is way.order) >= SEARCHED


def _left_out(ways: Sequence[Way]) -> tuple[str, ...]:
    known = {way.checkpointing for way in ways if not way.activations}
    out = _splits_left_out(ways)
    if known == {True}:
        out.append("activations kept or offloaded: every variant recomputes them")
    elif known == {False}:
        out.append("activations recomputed: no variant recomputes them")
    if False in known:
        chosen = [how for way in ways for _, how in way.activations]
        if not chosen:
            out.append("activations chosen block by block: the variants are not stacks of equal blocks")
        elif "offload" not in chosen:
            out.append("activations of some blocks offloaded: these blocks keep none, or need them at once")
        else:
            out.append("activations chosen block by block in other ways: " + _SETS)
    return tuple(out)


def _splits_left_out(ways: Sequence[Way]) -> list[str]:
    share = ways[0].batch * ways[0].micro_batches
    splits = {way.micro_batches for way in ways}
    missing = [n for n in range(1, share + 1) if share % n == 0 and n not in splits]
    if not missing:
        return []
    named = [str(n) for n in missing[:MOST_SPLITS_NAMED]]
    named += [f"{len(missing) - len(named)} more"] if len(missing) > len(named) else []
    few = len(missing) == 1 and missing[0] == 1
    return [f"{', '.join(named)} micro-batch{'' if few else 'es'}: there is no variant for {'it' if few else 'them'}"]


_OWN_RULE = "activations chosen block by block in other ways: {} has a rule of its own"
_SETS = "the first blocks or every n-th one were offloaded, the last ones kept (quarters of them each)"
