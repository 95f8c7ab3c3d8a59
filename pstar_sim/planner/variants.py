"""Variants: the fastest of the ways to run one global batch that the variants in a trace file allow.

A trace may hold a model at several batch sizes, with and without recomputation of activations. A variant whose batch
divides a rank's share of the global batch is repeated as micro-batches until the share is reached; every candidate then
does the same work, so the shortest iteration wins. Block by block (workload/mixing.py) activations may be kept,
recomputed (where the batch is there with and without recomputation) or offloaded to the host and fetched back (where it
is there without).

[Note: which blocks] The last blocks keep (their backward pass comes first), the first ones recompute or are offloaded
(theirs comes last, so there is most time): a quarter, half or three quarters of them, for offloading also all but the
last two. Or every second, fourth or eighth block is offloaded, which gives each of them the time of two, four or eight
blocks on the link. Of the other blocks none, the first half or all recompute. The very first block is not offloaded: a
model's forward often holds on to what it gives that block (the embeddings), so that the bytes would not go.

[Note: what is planned] Candidates are looked at in the order of what they promise: the larger of their lower bound (at
the usual chunk size) and of what computing and stashes take with the link to themselves. A candidate is planned only if
its promise is below the best so far. `optimal` searches long, so at first it plans at most SEARCHED
candidates, at most ALIKE of them with the same number of micro-batches, and leaves out candidates for which tide would
have no room. Then the other policies, which are quick, are asked about every candidate left over, where their bound
(for most policies the bound of plans that stream nothing) is below the best so far. Wherever one of them is faster,
`optimal` plans that candidate too. So `optimal` is as fast as what another policy would have chosen
(policy/kit/ties.py).

Where `session.step` runs the iterations (`Settings.loop`), `optimal` also races the candidates of several micro-batches
in layer-major order, with caps of their own.

A policy that chooses activations by a rule of its own (`Capabilities.activations`) makes its own ways from each pair of
variants that differ in recomputation alone; only these ways are raced.
"""

from __future__ import annotations

import contextlib
import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from pstar_sim.bounds.bounds import lower_bound
from pstar_sim.bounds.stashes import stash_bound_s
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.timeline import Timeline
from pstar_sim.cost import CostModel
from pstar_sim.errors import CannotPlan, DoesNotFit, TraceError
from pstar_sim.planner.balance import refuse_balance
from pstar_sim.planner.compare import plan_and_play
from pstar_sim.planner.memory_needs import shortage
from pstar_sim.planner.nearest import nearest
from pstar_sim.planner.tried import Cap, Tried, WayOutcome
from pstar_sim.policy.kit.collector import without_garbage_collection
from pstar_sim.policy.kit.order import ORDERS, in_order
from pstar_sim.policy.kit.points import Point
from pstar_sim.policy.kit.ties import AS_FAST, burden, least_of
from pstar_sim.policy.registry import Policy, built_in, can, can_follow, find_policy, named, policy_at, reorders
from pstar_sim.workload.mixing import block_names, mix_blocks, offload_blocks
from pstar_sim.workload.workload import Workload, activations_text, repeat_micro_batch

__all__ = ["MOST_MICRO_BATCHES", "Chosen", "candidates", "choose", "words"]

MOST_MICRO_BATCHES = 256  # more make plans of hundreds of thousands of steps
SEARCHED, ALIKE = 5, 2  # candidates that the policy that takes long plans, and of one number of micro-batches
(SEARCHING,) = named(lambda able: able.tries_others)  # that policy
MOST_SPLITS_NAMED = 8  # numbers of micro-batches that were left out
QUICK = policy_at(Point())  # whose own checks of room say where it is worth trying


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The fastest way, and the ways that it was chosen from.

    workload: the variant to run, one rank's share.
    words: the variant in words, among the variants looked at.
    iteration_s: seconds per iteration of its plan by `policy`.
    timeline: simulation of that plan.
    tried: each way that was looked at, in words -> its outcome.
    left_out: what was not considered, and why.
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
        """For `Plan.choices`: what was chosen among what."""
        tried = {way: row.to_json() for way, row in self.tried}
        return {"variant": self.words, "variants_tried": tried, "not_considered": self.left_out}


def words(w: Workload, among: Sequence[Workload] = ()) -> str:
    """A variant in words: "2 micro-batches of 8, activations recomputed"; with the attention kernel where the
    candidates differ in it: "..., flash attention"."""
    batches = f"{w.micro_batches} micro-batch{'es' if w.micro_batches > 1 else ''} of {w.batch}"
    kernel = f", {w.attention} attention" if any(other.attention != w.attention for other in among) else ""
    order = ", layer by layer" if w.layer_major else ""
    if w.boundaries_on_host:
        order += " with the boundaries on the host"
    return f"{batches}{order}, {activations_text(w)}{kernel}"


@without_garbage_collection()
def candidates(variants: Sequence[Workload], share: int) -> tuple[Workload, ...]:
    """One rank's workloads of `share` sequences per iteration that the variants of one model lead to, no two alike.

    A variant with one micro-batch is repeated; one with several is taken as it is. Raises TraceError where none
    divides the share (naming the batches there are), and for variants of different models, types or sequence lengths.
    """
    if not variants:
        raise TraceError("there are no variants to choose from")
    first = variants[0]
    for w in variants:
        if (w.fingerprint, w.sequence) != (first.fingerprint, first.sequence):
            raise TraceError(
                f"variants are of {first.model} ({first.dtype}, sequence {first.sequence}) and {w.model} ({w.dtype}, "
                f"sequence {w.sequence}); a global batch is of one of the two: choose it with --dtype or --seq"
            )
    found: dict[tuple[object, ...], Workload] = {}
    for w in (*variants, *_block_by_block(variants)):
        repeats, rest = divmod(share, w.batch * w.micro_batches)
        if rest or not repeats or (w.micro_batches > 1 and repeats > 1):
            continue
        if repeats * w.micro_batches <= MOST_MICRO_BATCHES:
            made = repeat_micro_batch(w, repeats) if repeats > 1 else w
            key = (made.batch, made.micro_batches, made.checkpointing, made.attention, made.activations)
            found.setdefault(key, made)
    if not found:
        sizes = sorted({w.batch * w.micro_batches for w in variants})
        raise TraceError(
            f"a rank's share of the global batch is {share} sequences; the trace holds micro-batches of "
            f"{', '.join(map(str, sizes))}, none of which divides it (in at most {MOST_MICRO_BATCHES} micro-batches)"
        )
    return tuple(found.values())


def _block_by_block(variants: Sequence[Workload]) -> Iterator[Workload]:
    """The workloads that [Note: which blocks] makes of the variants with one micro-batch in which no block was chosen
    yet."""
    plain = [w for w in variants if w.micro_batches == 1 and not w.activations]
    recomputing = {(w.batch, w.attention, w.dtype): w for w in reversed(plain) if w.checkpointing}
    seen: set[tuple[int, str, str]] = set()
    for kept in plain:
        same = (kept.batch, kept.attention, kept.dtype)
        if kept.checkpointing or same in seen:
            continue
        seen.add(same)
        blocks = block_names(kept)
        count = len(blocks)
        parts = sorted({count * quarters // 4 for quarters in (1, 2, 3)} - {0, count})
        recomputed = recomputing.get(same)
        # A model that is not a stack of equal blocks has nothing to mix; a block that leaves nothing, nothing to
        # offload.
        if recomputed is not None:
            with contextlib.suppress(TraceError):
                for n in parts:
                    yield mix_blocks(recomputed, kept, blocks[count - n :])
        for offloaded, recomputing_too in _offload_sets(blocks):
            with contextlib.suppress(TraceError):
                if not recomputing_too:
                    yield offload_blocks(kept, offloaded)
                elif recomputed is not None:
                    rest = set(blocks) - set(recomputing_too)
                    yield offload_blocks(mix_blocks(recomputed, kept, rest), offloaded)


def _offload_sets(blocks: Sequence[str]) -> Iterator[tuple[Sequence[str], Sequence[str]]]:
    """(blocks that are offloaded, blocks that recompute), by [Note: which blocks]."""
    count = len(blocks)
    ends = (1 + count // 4, 1 + count // 2, 1 + count * 3 // 4, count - 2)
    firsts = [blocks[1:n] for n in ends if 1 < n <= count - 2]
    strides = [blocks[1 : count - 2 : k] for k in (2, 4, 8) if k < count - 3]
    seen: set[tuple[tuple[str, ...], int]] = set()
    for offloaded in (*firsts, *strides):
        others = [block for block in blocks if block not in set(offloaded)]
        for n in (0, len(others)) if offloaded in firsts else (0, len(others) // 2, len(others)):
            if (tuple(offloaded), n) not in seen:
                seen.add((tuple(offloaded), n))
                yield offloaded, others[:n]


@without_garbage_collection()
def choose(
    workloads: Sequence[Workload],
    machine: Machine,
    settings: Settings,
    *,
    policy: str = SEARCHING,
    on_way: Callable[[str, int, int], None] | None = None,
) -> Chosen:
    """The fastest of `workloads` (each one rank's whole share of the same batch) by `policy`. [Note: what is planned]
    says which of them are planned.

    on_way: called with the work in hand, the number of ways done and the number of all ways. Raises DoesNotFit, of
    the candidate that lacks least, if none fits; CannotPlan if the policy can plan none; TraceError if they are not
    the same work.
    """
    if len({w.batch * w.micro_batches for w in workloads}) != 1:
        raise TraceError("the workloads are of different global batches; their iterations cannot be compared")
    refuse_balance([policy], machine)
    if settings.loop == "step" and can(policy).tries_others:
        workloads = (*workloads, *_layer_major(workloads, policy))
    own = _own_ways(workloads, machine, settings, policy)
    left_out = (*_splits_left_out(workloads), _OWN_RULE.format(policy)) if own else _left_out(workloads)
    workloads = own or workloads
    # each candidate in its own order
    race = _Race(workloads, machine, replace(settings, loop="own"), policy, on_way)
    later = race.run_all()
    if race.searching:
        race.ask_others()
    for w in later:
        if race.best is None:
            race.run(w)
    if race.best is None:
        raise race.refusal(left_out) if race.shortest is not None else race.unable[0]
    if race.unable:
        left_out = (*left_out, f"{len(race.unable)} of {len(workloads)} ways: {race.unable[0]}")
    plan, timeline = replace(race.best[0], settings=settings), race.best[1]
    chosen = Chosen(
        workload=plan.workload,
        words=words(plan.workload, workloads),
        policy=policy,
        plan=plan,
        timeline=timeline,
        iteration_s=timeline.iteration_s,
        tried=tuple(race.tried.items()),
        left_out=tuple(left_out),
    )
    return replace(chosen, plan=replace(plan, choices={**plan.choices, **chosen.choices()}))


def _layer_major(workloads: Sequence[Workload], policy: str) -> Iterator[Workload]:
    """The workloads of several micro-batches in the layer-major orders that they have."""
    for w, order in product(workloads, ORDERS[1:]):
        if w.micro_batches > 1 and not w.relayed:
            with contextlib.suppress(CannotPlan):
                yield in_order(policy, w, order)


def _own_ways(workloads: Sequence[Workload], machine: Machine, settings: Settings, policy: str) -> list[Workload]:
    """The ways that the policy's own rule makes of the workloads in which no block was chosen yet; none where it has no
    such rule, or where the workloads are of one kind only."""
    rule = can(policy).activations
    if rule is None:
        return []
    plain = [w for w in workloads if not w.activations]
    keeping = {(w.batch, w.attention, w.dtype): w for w in plain if not w.checkpointing}
    pairs = [(w, keeping.get((w.batch, w.attention, w.dtype))) for w in plain if w.checkpointing]
    return [way for recomputed, kept in pairs if kept for way in rule(recomputed, kept, machine, settings)]


class _Race:
    """Candidates planned one after the other by one policy.

    promise_s: see [Note: what is planned], by id; at first only what computing and stashes take.
    best_s: seconds of the fastest so far.
    fast: plans and timelines that are as fast as best_s.
    best: the one of them that moves and pins least.
    shortest: of the candidates that do not fit, the one that lacks least, and why it does not fit.
    reorders: whether the policy's plans have another order than the workloads, whose bounds then do not hold.
    unable: reasons why the policy cannot plan candidates, one per candidate.
    tried: each candidate in words -> its outcome.
    planned: ids of the candidates that were planned.
    """

    def __init__(
        self,
        workloads: Sequence[Workload],
        machine: Machine,
        settings: Settings,
        policy: str,
        on_way: Callable[[str, int, int], None] | None,
    ) -> None:
        self.on_way = on_way
        self.workloads, self.machine, self.settings, self.policy = workloads, machine, settings, policy
        self.function: Policy = find_policy(policy)
        self.reorders = reorders(self.function)
        self.searching = can(policy).tries_others and len(workloads) > SEARCHED
        # One model's tensors: the chunk size that suits one candidate suits all.
        usual = build_layout(workloads[0], chunk_bytes=settings.chunk_bytes, ranks=len(machine.ranks)).chunk_bytes
        self.usual = replace(settings, chunk_bytes=usual)
        self.layouts = {id(w): build_layout(w, chunk_bytes=usual, ranks=len(machine.ranks)) for w in workloads}
        self.least_s = {id(w): stash_bound_s(w, CostModel(w, machine, self.layouts[id(w)])) for w in workloads}
        self.promise_s = dict(self.least_s)
        self.bounds_s: dict[tuple[int, bool], float] = {}  # by id and whether plans may stream
        self.planned: set[int] = set()
        self.splits: Counter[tuple[bool, int]] = Counter()  # of those planned: order and number of micro-batches
        self.best: tuple[Plan, Timeline] | None = None
        self.fast: list[tuple[Plan, Timeline]] = []
        self.best_s = float("inf")
        self.shortest: tuple[Workload, DoesNotFit] | None = None
        self.unable: list[CannotPlan] = []
        self.tried: dict[str, Tried] = {}

    def run_all(self) -> list[Workload]:
        """Plan all candidates in the order of their promises; a bound is computed only when a candidate's turn comes.
        Returns the candidates that a policy with a long search left out because tide has no room for them."""
        later: list[Workload] = []
        # Of equal promises the one of fewer micro-batches, then the one that moves less.
        less = [(w.micro_batches, sum(s.bytes for s in w.stashes), n) for n, w in enumerate(self.workloads)]
        heap = [(self.promise_s[id(w)], False, rank) for w, rank in zip(self.workloads, less)]
        heapq.heapify(heap)
        while heap:
            self._tell(f"planning by {self.policy}", len(self.workloads) - len(heap))
            _, bounded, rank = heapq.heappop(heap)
            w = self.workloads[rank[-1]]
            if not bounded and self._hopeless(w) is None:
                short = shortage(QUICK, w, self.machine, self.usual) if self.searching else None
                if short is not None:
                    self.note(w, short)
                    later.append(w)
                    continue
                self.promise_s[id(w)] = self._bound_s(w)
                heapq.heappush(heap, (self.promise_s[id(w)], True, rank))
                continue
            self.run(w)
        return later

    def run(self, w: Workload) -> None:
        """Plan the candidate, if it is worth it."""
        hopeless = self._hopeless(w)
        if hopeless is not None:
            self.tried[self._words(w)] = hopeless
        else:
            self._plan(w)

    def ask_others(self) -> None:
        """Plan a candidate that was not planned if another policy is faster on it."""
        others = [policy for name, policy in built_in().items() if name != self.policy]
        for number, w in enumerate(sorted(self.workloads, key=lambda w: self.promise_s[id(w)])):
            self._tell("asking other policies", number)
            for policy in others:
                if id(w) in self.planned or not self._could_win(self.least_s[id(w)]):
                    break
                if not can_follow(self.settings, w, policy):
                    continue
                if not self._could_win(self._bound_s(w, stream=can(policy).streams_states)):
                    continue
                try:
                    _, timeline = plan_and_play(policy, w, self.machine, self.settings)
                except (DoesNotFit, CannotPlan):
                    continue
                if self._could_win(timeline.iteration_s):
                    self._plan(w)

    def _tell(self, what: str, behind: int) -> None:
        if self.on_way is not None:
            self.on_way(what, behind, len(self.workloads))

    def _could_win(self, seconds: float) -> bool:
        return seconds < self.best_s

    def _bound_s(self, w: Workload, *, stream: bool = True) -> float:
        """Seconds that no plan with the usual chunks goes below; stream=False: no such plan that streams nothing."""
        key = (id(w), stream)
        if key not in self.bounds_s:
            self.bounds_s[key] = self.least_s[id(w)]
            if not self.reorders:
                # on several GPUs chunks are sliced, or whole on each
                layouts = {self.layouts[id(w)], build_layout(w, chunk_bytes=self.usual.chunk_bytes)}
                bounds = [lower_bound(w, self.machine, self.usual, layout, stream=stream) for layout in layouts]
                self.bounds_s[key] = max(self.bounds_s[key], min(bound.seconds for bound in bounds))
        return self.bounds_s[key]

    def _words(self, w: Workload) -> str:
        return words(w, self.workloads)

    def _plan(self, w: Workload) -> None:
        self.planned.add(id(w))
        try:
            plan, timeline = plan_and_play(self.function, w, self.machine, self.settings)
        except DoesNotFit as error:
            self.note(w, error)
            return
        except CannotPlan as error:
            self.unable.append(error)
            return
        self.splits[w.layer_major, w.micro_batches] += 1
        self.tried[self._words(w)] = Tried(outcome=WayOutcome.PLANNED, seconds=timeline.iteration_s)
        self.best_s = min(self.best_s, timeline.iteration_s)
        limit_s = self.best_s * (1 + AS_FAST)
        self.fast = [one for one in (*self.fast, (plan, timeline)) if one[1].iteration_s <= limit_s]
        self.best = least_of(self.fast, seconds=lambda one: one[1].iteration_s, burden=lambda one: burden(one[0]))

    def refusal(self, left_out: Sequence[str]) -> DoesNotFit:
        """Why no candidate fits: what the nearest candidate lacks, what would make it fit, and what was not tried
        (`left_out`)."""
        assert self.shortest is not None
        w, error = self.shortest

        def ask(other: Workload, where: Machine, with_settings: Settings) -> DoesNotFit | None:
            return shortage(QUICK if self.searching else self.policy, other, where, with_settings)

        hint = nearest(self.function, w, self.machine, self.settings, error, ask=ask)
        ways = f"that is {self._words(w)}, which lacks least of {len(self.workloads)} tried"
        return error.restated(policy=self.policy, what="; ".join((error.what, ways, hint, *left_out)))

    def note(self, w: Workload, error: DoesNotFit) -> None:
        """Note that the candidate does not fit."""
        self.tried[self._words(w)] = Tried(outcome=WayOutcome.NO_ROOM, place=error.place, short_bytes=error.short_bytes)
        if self.shortest is None or error.short_bytes < self.shortest[1].short_bytes:
            self.shortest = (w, error)

    def _hopeless(self, w: Workload) -> Tried | None:
        """The outcome of a candidate that need not be planned; None if it has to be planned."""
        if self.best is None:
            return None
        least, promise = self.least_s[id(w)], self.promise_s[id(w)]
        if least >= self.best_s:
            return Tried(outcome=WayOutcome.COMPUTING, seconds=least, stashes=bool(w.stashes))
        if promise >= self.best_s:
            return Tried(outcome=WayOutcome.BOUND, seconds=promise, chunk_bytes=self.layouts[id(w)].chunk_bytes)
        if self.searching and self._enough(w):
            return Tried(
                outcome=WayOutcome.CAPPED, seconds=promise, cap=Cap(policy=SEARCHING, ways=SEARCHED, alike=ALIKE)
            )
        return None

    def _enough(self, w: Workload) -> bool:
        """Whether as many candidates in the order of this one are planned as the policy that takes long plans."""
        alike = self.splits[w.layer_major, w.micro_batches]
        return alike >= ALIKE or sum(n for (order, _), n in self.splits.items() if order is w.layer_major) >= SEARCHED


def _left_out(workloads: Sequence[Workload]) -> tuple[str, ...]:
    known = {w.checkpointing for w in workloads if not w.activations}
    out = _splits_left_out(workloads)
    if known == {True}:
        out.append("activations kept or offloaded: the trace holds no variant that keeps them")
    elif known == {False}:
        out.append("activations recomputed: the trace holds no such variant")
    if False in known:
        chosen = [how for w in workloads for _, how in w.activations]
        if not chosen:
            out.append("activations chosen block by block: the variants are not stacks of equal blocks")
        elif "offload" not in chosen:
            out.append("activations of some blocks offloaded: they leave none behind, or need them at once")
        else:
            out.append("activations chosen block by block in other ways: " + _SETS)
    return tuple(out)


def _splits_left_out(workloads: Sequence[Workload]) -> list[str]:
    """A line for the numbers of micro-batches that the batch would allow and no variant has."""
    share = workloads[0].batch * workloads[0].micro_batches
    splits = {w.micro_batches for w in workloads}
    missing = [n for n in range(1, share + 1) if share % n == 0 and n not in splits]
    if not missing:
        return []
    named = [str(n) for n in missing[:MOST_SPLITS_NAMED]]
    named += [f"{len(missing) - len(named)} more"] if len(missing) > len(named) else []
    few = len(missing) == 1 and missing[0] == 1
    return [f"{', '.join(named)} micro-batch{'' if few else 'es'}: there is no variant for {'it' if few else 'them'}"]


_OWN_RULE = "activations chosen block by block in other ways: {} has a rule of its own"
_SETS = "the first blocks or every n-th one were offloaded, the last ones kept (quarters of them each)"
