"""optimal on random workloads, machines and settings: correct, never behind another policy, fits wherever one fits."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from drawn import TIME_TO_SHRINK, Drawn, chances, jobs, planned
from hypothesis import given, settings

from pstar_sim import machine, preset
from pstar_sim.core.plan import LOOPS, Settings
from pstar_sim.core.step import Kind, Queue
from pstar_sim.errors import DoesNotFit, PstarError
from pstar_sim.policy import find_policy
from pstar_sim.policy.family.attempt import attempt_course
from pstar_sim.policy.family.course import Course, Knobs
from pstar_sim.policy.family.pace import period_s
from pstar_sim.policy.family.search import Search
from pstar_sim.policy.family.searched import _Sizes
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.points import Point
from pstar_sim.policy.kit.schedule import Modes
from pstar_sim.policy.kit.ties import AS_FAST
from pstar_sim.policy.optimal import POINT
from pstar_sim.policy.passes.feasibility import check_gpu, check_host
from pstar_sim.policy.registry import built_in, can_follow
from pstar_sim.sim.play import play

pytestmark = TIME_TO_SHRINK


@settings(max_examples=10)
@given(jobs(), chances())
def test_never_behind_another_policy(job: Drawn, chance: random.Random) -> None:
    workload, machine, asked = job
    asked = replace(asked, loop=chance.choice(LOOPS), effort=1.0)
    if chance.random() < 0.5:  # host DRAM that copies and Adam have to share
        scarce = machine.link.h2d_bytes_per_s * chance.choice((1, 2, 3))
        machine = replace(machine, host=replace(machine.host, dram_bytes_per_s=scarce))
    fastest: dict[str, float] = {}
    for name, policy in built_in().items():
        try:
            plan = policy(workload, machine, asked)
        except PstarError:
            continue
        if not can_follow(asked, workload, policy):  # another order of the iteration: no rival
            continue
        fastest[name] = play(plan).iteration_s
        assert period_s(plan) == pytest.approx(fastest[name], rel=1e-9)
        if name == "optimal":
            plan.check()
            assert plan.predictions["policy_iteration_s"] == pytest.approx(fastest[name], rel=1e-9)
    if fastest:
        assert fastest["optimal"] <= min(fastest.values()) * (1 + AS_FAST), fastest


@pytest.mark.parametrize("policy", ["static_partition", "tide", "optimal"])
def test_on_several_ranks(policy: str) -> None:
    """Proved for all ranks at once; one that stands for all takes as long as every one of them played by itself. A plan
    that is never steady has a pace, which the two ways to play it find to some thousandths."""
    several = 0

    @settings(max_examples=6)
    @given(jobs(ranks=(2, 4)))
    def holds(job: Drawn) -> None:
        nonlocal several
        plan = planned(find_policy(policy), job)
        if plan is None:
            return
        plan.check(job.workload, job.machine)
        alone, everyone = play(plan), play(plan, every_rank=True)
        assert alone.iteration_s == pytest.approx(everyone.iteration_s, rel=5e-3)
        assert period_s(plan) == pytest.approx(alone.iteration_s, rel=1e-9)
        several += 1

    holds()
    assert several


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_any_choice_of_modes_that_has_room_makes_a_correct_plan(ranks: int) -> None:
    made_plans = 0

    @settings(max_examples=12)
    @given(jobs(ranks=(ranks,)), chances())
    def holds(drawn: Drawn, chance: random.Random) -> None:
        nonlocal made_plans
        workload, machine, asked = drawn
        if ranks == 1 and chance.random() < 0.2:
            machine = replace(machine, ranks=(replace(machine.ranks[0], link=replace(machine.link, duplex=False)),))
        job = Job("any", workload, machine, asked, Point(streams=True, sums=True))
        order = list(job.candidates)
        chance.shuffle(order)
        pins = chance.randint(0, len(order) // 2)
        streams = chance.randint(0, len(order) - pins)
        share = chance.choice((0.0, 0.5, 1.0)) if job.may_sum else 0.0
        summed = frozenset(c for c in order[pins:] if chance.random() < share)
        spilt = frozenset(c for c in summed if chance.random() < share / 2)
        modes = Modes(frozenset(order[:pins]), frozenset(order[pins : pins + streams]), summed, spilt)
        knobs = Knobs(
            linger=chance.random() < 0.5,
            lead_chunks=chance.randint(0, 3),
            down=chance.choice(("edf", "fifo", "adam")),
            stay=chance.choice((0.0, 0.25, 1.0)),
            states_first=chance.random() < 0.5,
        )
        try:
            check_gpu(job)
            check_host(job, modes)
        except DoesNotFit:
            return
        course = Course(job, modes, knobs)
        if min(course.room) < 0:
            return
        made = attempt_course(course)
        assert made.window.stuck is None
        plan = made.plan()
        plan.check()
        timeline = play(plan)
        assert timeline.peak_bytes["gpu"] <= machine.gpu_budget_bytes
        assert timeline.peak_bytes["host"] <= machine.host_budget_bytes
        made_plans += 1

    holds()
    assert made_plans >= 2


def test_the_forward_pass_does_not_wait_for_parameters_on_their_way_down() -> None:
    """A streamed embedding stays over the border, is read first and then given up until its gradient: behind its copy
    down, on that queue. On the compute queue the drop would hold the forward pass up for all of the copy."""
    workload = preset("llama-3-8b", batch=4, seq=1024, dtype="bf16", checkpointing=True)
    card = machine("h100-80", gpu_memory="79GB")
    job = Job("any", workload, card, Settings(update="eager", clip=False), Point(streams=True))
    embedding = job.candidates[0]
    made = attempt_course(Course(job, Modes(frozenset(job.candidates[1:22]), frozenset({embedding})), Knobs()))
    assert embedding in made.course.stays
    plan = made.plan()
    plan.check()
    drops = [s for s in plan.steps if s.kind is Kind.DROP and s.chunk == embedding and s.list == "param"]
    assert [s.queue for s in drops] == [Queue.D2H]  # in order behind the copy
    downs = {s.id for s in plan.steps if s.kind is Kind.WRITEBACK and s.chunk == embedding and s.list == "param"}
    assert downs
    for step in plan.steps:
        if step.queue is Queue.COMPUTE:
            assert not downs & {ref.id for ref in step.after}


def test_behind_a_barrier_pinned_chunks_are_updated_between_streamed_ones() -> None:
    """What is pinned waits for nothing, so it fills the time in which states of streamed chunks are on their way: the
    first and the last update are those of streamed chunks."""
    workload = preset("1B", batch=4, seq=1024, dtype="bf16", checkpointing=True)
    job = Job("any", workload, machine("rtx4090"), Settings(update="step", clip=True), Point(streams=True))
    pinned, streamed = frozenset(job.candidates[4:12]), frozenset(job.candidates[:4])
    plan = attempt_course(Course(job, Modes(pinned, streamed), Knobs())).plan()
    plan.check()
    order = [s.chunk for s in plan.steps if s.kind is Kind.GPU_UPDATE and (s.chunk in pinned or s.chunk in streamed)]
    assert len(order) == 12
    assert order[0] in streamed and order[-1] in streamed
    places = [n for n, c in enumerate(order) if c in streamed]
    assert max(b - a for a, b in pairwise(places)) <= 4  # eight pinned chunks in three gaps


def test_a_search_that_is_given_more_effort_goes_on() -> None:
    workload = preset("4B", batch=4, seq=1024, dtype="bf16", checkpointing=True)
    job = Job("any", workload, machine("rtx4090"), Settings(update="step", clip=True), Point(streams=True))
    search = Search(job)
    search.run(15_000)
    first_s, tried = search.seconds, dict(search.tried)
    search.run(60_000)
    assert search.seconds <= first_s
    assert all(search.tried[choice] == seconds for choice, seconds in tried.items())
    assert len(search.tried) > len(tried)


def test_other_trials_are_made_before_the_search_goes_on_from_the_fastest_of_them() -> None:
    workload = preset("4B", batch=4, seq=1024, dtype="bf16", checkpointing=True)
    job = Job("any", workload, machine("rtx4090"), Settings(update="step", clip=True), Point(streams=True))
    search = Search(job)
    search.run(15_000)
    assert search.best is not None
    search.effort_ops = 100_000
    best = search.best[1]
    others = [replace(best, streams=best.streams // parts) for parts in (2, 1, 4)]
    made = search._fastest_first(others)
    assert [trial.streams for trial in made] == [best.streams, best.streams // 2, best.streams // 4]
    assert [search.tried[trial] for trial in made] == sorted(search.tried[trial] for trial in others)


def test_a_chunk_size_that_is_continued_in_vain_promises_less() -> None:
    workload = preset("4B", batch=1, seq=1024, dtype="bf16", checkpointing=True)
    over = _Sizes(workload, machine("rtx4090"), Settings(effort=0.2, update="eager", clip=False), POINT, "any", True)
    over.run()
    assert len(over.searches) > 1
    first = over._promising()
    assert first is not None
    over._in_vain[first] = 1000
    second = over._promising()
    assert second is not None and second is not first


FROZEN = Path(__file__).parents[2] / "benchmarks" / "machines"


@pytest.mark.whole
def test_more_effort_goes_on_and_the_plan_says_why_it_stopped() -> None:
    """Near its bound a search stops by itself, however much effort it has."""
    where = machine(FROZEN / "rtx4090.toml", gpu_memory="12GB")
    small = preset("1B", batch=1, seq=1024, dtype="bf16", checkpointing=True)
    least, usual = (find_policy("optimal")(small, where, Settings(effort=effort)) for effort in (0.05, 1))
    assert least.predictions["policy_iteration_s"] > usual.predictions["policy_iteration_s"]
    assert "until the effort is used up" in str(least.choices["search"])
    large = preset("4B", batch=16, seq=1024, dtype="bf16", checkpointing=True)
    enough = find_policy("optimal")(
        large, machine(FROZEN / "a100-80.toml"), Settings(update="eager", clip=False, effort=100)
    )
    assert "until a plan is within 0.1%" in str(enough.choices["search"])


def test_what_fits_does_not_depend_on_the_effort() -> None:
    workload = preset("1B", batch=1, seq=1024, dtype="bf16", checkpointing=True)
    plan = find_policy("optimal")(workload, machine("v100-32", gpu_memory="3GB"), Settings(effort=1e-6))
    plan.check()
