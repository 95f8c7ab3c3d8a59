"""Every policy on random workloads, machines and settings: each question of each plan; the keep set against LRU; memory
edges found for others."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from drawn import TIME_TO_SHRINK, Drawn, chances, jobs, seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from pstar_sim.bounds.bounds import lower_bound
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Kind, Place, Queue, Ref
from pstar_sim.errors import CannotPlan, DoesNotFit, PlanError, PstarError
from pstar_sim.policy import Builder, find_policy, policies
from pstar_sim.policy.family.residency import UseGap, belady, gaps_of
from pstar_sim.policy.kit.blocks import Stretch
from pstar_sim.policy.registry import named
from pstar_sim.policy.systems.all_on_gpu import all_on_gpu
from pstar_sim.sim.play import play
from pstar_sim.testing import (
    chain_workload,
    check_once,
    check_policy,
    random_machine,
)
from pstar_sim.units import MIB
from pstar_sim.workload.workload import Workload

pytestmark = TIME_TO_SHRINK


SELDOM = ("all_on_gpu", "zero3_resident")
"""Policies that have room for a few jobs alone, and then move nothing."""
EXAMPLES = {"optimal": 8, "stronghold": 24, **dict.fromkeys(SELDOM, 60)}
"""Where they are not 16."""


@pytest.mark.parametrize("name", sorted(named(lambda able: able.balance is None)))
def test_every_plan_is_proved_is_above_its_bound_and_keeps_its_room_in_any_timing(name: str, whole: bool) -> None:
    """Of random jobs: the plan is right, and the same again; simulated, it is not faster than the bound; in timings
    nobody planned for, the order on each queue and the `after` edges alone keep both budgets (`play` refuses a read of
    what is not there). With --whole more jobs, each with all effort."""
    played = moved = 0
    examples = (4 if whole else 1) * EXAMPLES.get(name, 16)

    @settings(max_examples=examples)
    @given(jobs(), seeds())
    def holds(job: Drawn, shake: random.Random) -> None:
        nonlocal played, moved
        asked = job if not whole else job._replace(settings=replace(job.settings, effort=1.0))
        made: list[Plan] = []

        def policy(*of: Any) -> Plan:
            made.append(find_policy(name)(*of))
            return made[-1]

        try:
            if not check_once(policy, *asked, rng=shake):
                return
        except CannotPlan:
            return
        plan = made[-1]
        timeline = play(plan)
        bound = lower_bound(plan.workload, job.machine, plan.settings, plan.layout)
        assert timeline.iteration_s >= bound.seconds * (1 - 1e-9), bound
        for _ in range(3):
            peak = play(plan, jitter=shaken(shake), max_iterations=3).peak_bytes
            assert peak["gpu"] <= plan.gpu_budget_bytes <= job.machine.gpu_budget_bytes
            assert peak["host"] <= plan.host_budget_bytes <= job.machine.host_budget_bytes
        played += 1
        moved += bool(timeline.moved_bytes["h2d"])

    holds()
    assert played >= 3 and (moved or name in SELDOM)


def shaken(rng: random.Random) -> Callable[[int, int], float]:
    """A factor of 1/20 to 20 for each step, or now and then for a whole stretch of them."""
    stretch = rng.random() < 0.3
    factors: dict[tuple[int, int], float] = {}
    return lambda step, k: factors.setdefault((step // 7 if stretch else step, k), 20.0 ** rng.uniform(-1, 1))


def fitted(policy: Callable[[Workload, Machine, Settings], Plan], examples: int) -> int:
    """Puts the policy through that many random jobs; how many of them it made a plan for."""
    count = 0

    @settings(max_examples=examples)
    @given(jobs(), seeds())
    def holds(job: Drawn, shake: random.Random) -> None:
        nonlocal count
        count += check_once(policy, *job, rng=shake)

    holds()
    return count


def test_the_last_gradient_is_added_behind_the_earlier_ones() -> None:
    """Seed 50082: with a slow CPU the last write-back overtakes the one of the micro-batch before."""
    assert check_policy(find_policy("tide"), examples=1, seed=50_082).fitted == 1


TRIED = [([name for name in policies() if name != "optimal"], 8, 15), (["optimal"], 4, 15)]
"""Policies, jobs for them, and jobs with --whole: the search of `optimal` takes most of the time."""


@pytest.mark.parametrize(("names", "few", "many"), TRIED, ids=["others", "optimal"])
def test_more_memory_never_stops_a_plan_from_fitting(names: list[str], few: int, many: int, whole: bool) -> None:
    short = fitted = 0

    @settings(max_examples=many if whole else few)
    @given(jobs(), chances())
    def holds(job: Drawn, chance: random.Random) -> None:
        nonlocal short, fitted
        others = [random_machine(chance, job.workload) for _ in range(4)]
        for policy in map(find_policy, names):
            fits = False
            for machine in sorted([job.machine, *others], key=lambda m: m.gpu_budget_bytes):
                try:
                    policy(job.workload, machine, job.settings)
                    fits = True
                    fitted += 1
                except DoesNotFit as error:
                    assert not fits or error.place == "host"
                    short += 1

    holds()
    assert short and fitted


# check_policy itself: what it has to find.


def without_a_barrier(workload: Workload, machine: Machine, settings: Settings) -> Plan:
    return all_on_gpu(workload, machine, Settings(update="eager", clip=False, chunk_bytes=settings.chunk_bytes))


def one_edge_short(workload: Workload, machine: Machine, settings: Settings) -> Plan:
    plan = find_policy("zero_offload")(workload, machine, settings)
    steps = tuple(structs.replace(s, after=()) if s.kind is Kind.CPU_UPDATE else s for s in plan.steps)
    return replace(plan, steps=steps)


def over_budget(workload: Workload, machine: Machine, settings: Settings) -> Plan:
    plan = find_policy("tide")(workload, machine, settings)
    return replace(plan, gpu_budget_bytes=2 * plan.gpu_budget_bytes)


def moody(workload: Workload, machine: Machine, settings: Settings) -> Plan:
    name = "tide" if random.random() < 0.5 else "patrickstar"
    return find_policy(name)(workload, machine, settings)


def wrong_reason(workload: Workload, machine: Machine, settings: Settings) -> Plan:
    budget = machine.gpu_budget_bytes
    raise DoesNotFit(policy="x", place="gpu", needed_bytes=budget - 1, available_bytes=budget, what="too proud")


def broken(workload: Workload, machine: Machine, settings: Settings) -> Plan:
    raise KeyError("chunk")


def nothing(workload: Workload, machine: Machine, settings: Settings) -> Plan:
    return None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (without_a_barrier, "not for the given settings"),
        (one_edge_short, "adam"),
        (over_budget, "gpu memory but machine 'random' has"),
        (moody, "made two different plans"),
        (wrong_reason, "that would fit"),
        (broken, "KeyError: 'chunk'"),
        (nothing, "returns a Plan, not NoneType"),
    ],
)
def test_what_is_wrong_is_found_and_the_seed_shows_it_again(policy, message: str) -> None:
    with pytest.raises(PstarError, match=f"policy '{policy.__name__}', seed [0-9]+: .*{message}") as caught:
        check_policy(policy)
    if policy is not moody:
        seed = int(str(caught.value).split("seed ")[1].split(":")[0])
        with pytest.raises(PstarError, match=f"seed {seed}: .*{message}"):
            check_policy(policy, examples=1, seed=seed)


# The keep set.


def lru_misses(uses: Sequence[int], capacity: int) -> int:
    """Fetches of a cache of `capacity` chunks that gives up the one not used for longest; one use a moment."""
    cache: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for chunk in uses:
        if chunk in cache:
            cache.move_to_end(chunk)
            continue
        misses += 1
        if len(cache) == capacity:
            cache.popitem(last=False)
        cache[chunk] = None
    return misses


def belady_misses(uses: Sequence[int], capacity: int) -> int:
    """The first use of each chunk, and each gap that is not kept. A moment needs its own chunk anyway."""
    chunks = sorted(set(uses))
    gaps = [gap for c in chunks for gap in gaps_of(c, [Stretch(m, m) for m, u in enumerate(uses) if u == c])]
    return len(chunks) + len(gaps) - len(belady(gaps, [1] * (max(chunks) + 1), [capacity - 1] * len(uses)))


def fewest_misses(uses: Sequence[int], capacity: int) -> int:
    """By trying every possible eviction."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for chunk in uses:
        following: dict[frozenset[int], int] = {}
        for held, misses in states.items():
            if chunk in held:
                found = [(held, misses)]
            elif len(held) < capacity:
                found = [(held | {chunk}, misses + 1)]
            else:
                found = [(held - {out} | {chunk}, misses + 1) for out in held]
            for state, count in found:
                following[state] = min(count, following.get(state, count))
        states = following
    return min(states.values())


@settings(max_examples=60)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_belady_never_misses_more_than_lru_and_is_optimal(uses: list[int]) -> None:
    for capacity in range(1, max(uses) + 2):
        misses = belady_misses(uses, capacity)
        assert misses <= lru_misses(uses, capacity)
        assert misses == fewest_misses(uses, capacity)


def test_over_forward_and_backward_lru_keeps_little() -> None:
    """8 layers, 4 fit: LRU keeps the last 4 (12 misses), Belady the same; twice in a row LRU loses all it kept."""
    there_and_back = [*range(8), *reversed(range(8))]
    assert (lru_misses(there_and_back, 4), belady_misses(there_and_back, 4)) == (12, 12)
    round_and_round = [*range(8), *range(8)]
    assert lru_misses(round_and_round, 4) == 16
    assert belady_misses(round_and_round, 4) == 12  # 0, 1 and 2 stay beside the one in use; then 7 in the place of 0


@settings(max_examples=60)
@given(chances())
def test_the_keep_set_never_takes_more_than_the_room(rng: random.Random) -> None:
    length = rng.randint(4, 40)
    sizes = [rng.choice((1, 1, 1, 3)) for _ in range(6)]
    gaps = []
    for c in range(6):
        mine = sorted(rng.sample(range(length), rng.randint(1, min(6, length))))
        gaps += gaps_of(c, [Stretch(m, m) for m in mine])
        if rng.random() < 0.3 and mine[0] + length > mine[-1] + 1:
            gaps.append(UseGap(mine[-1], mine[0] + length, c))
    room = [rng.randint(0, 6) for _ in range(length)]
    held = [0] * length
    kept = belady(gaps, sizes, room)
    for gap in kept:
        for t in range(gap.start + 1, gap.end):
            held[t % length] += sizes[gap.chunk]
    assert all(held[t] <= room[t] for t in range(length))
    for gap in set(gaps) - kept:  # and nothing is given up that still fits
        assert any(held[t % length] + sizes[gap.chunk] > room[t % length] for t in range(gap.start + 1, gap.end))


# A policy that names its data edges only: the builder finds the memory edges.


def on_demand(workload: Workload, machine: Machine, settings: Settings) -> Plan:
    """Fetches as early as memory allows, drops after each use, one micro-batch only."""
    if workload.micro_batches > 1:
        raise DoesNotFit(policy="on_demand", place="gpu", needed_bytes=1, available_bytes=0, what="micro-batches")
    b = Builder("on_demand", workload, machine, settings)
    uses = b.uses
    away: dict[int, int] = {}  # chunk -> step that last made its working list leave
    waiting: dict[int, int] = {}  # chunk -> its first fetch
    down: dict[int, int] = {}
    here: set[int] = set()
    end = -1
    for chunk in b.layout.chunks:
        b.live(chunk.index, Place.HOST)
    for m, needed in enumerate(uses.by_moment):
        after = []
        for c in needed:
            if c not in here:
                fetch = b.fetch(c, m, after=[away[c]] if c in away else [])
                waiting.setdefault(c, fetch)
                after.append(fetch)
                here.add(c)
        end = b.compute(m, after=after)
        for c in needed:
            if uses.updated(c) and m == uses.touched[c][-1]:
                down[c] = b.writeback(c, "param", m, after=[end])
                away[c] = b.drop(Queue.D2H, c, m)
            elif m + 1 in uses.touched[c] or (uses.updated(c) and m >= uses.last_gradient(c)):
                continue
            else:
                away[c] = b.drop(Queue.COMPUTE, c, m)
            here.remove(c)
    barrier = settings.barrier(workload.dtype) is not None
    for c in sorted(down, key=uses.first_use):
        adam = b.cpu_adam(c, after=[down[c], end] if barrier else [down[c]])
        b.wait(waiting[c], Ref(adam, 1))
    for c, fetch in waiting.items():
        b.wait(fetch, Ref(away[c], 1))
    return b.plan(predict=True)


def test_the_builder_finds_memory_edges() -> None:
    assert fitted(on_demand, 40) > 5


def test_the_builder_refuses_what_does_not_come_back() -> None:
    def forgetful(workload: Workload, machine: Machine, settings: Settings) -> Plan:
        b = Builder("forgetful", workload, machine, settings)
        for chunk in b.layout.chunks:
            b.live(chunk.index, Place.HOST)
        for m, needed in enumerate(b.uses.by_moment):
            b.compute(m, after=[b.fetch(c, m) for c in needed])
        return b.plan(predict=True)

    with pytest.raises(
        ValueError, match=r"forgetful: .* is held at the beginning or at the end of the iteration, but not at both"
    ):
        w = chain_workload(2, MIB)
        forgetful(w, random_machine(random.Random(0), w), Settings())
    with pytest.raises(PstarError, match="policy 'forgetful', seed 0: ValueError"):
        check_policy(forgetful)
    assert issubclass(PlanError, PstarError)
