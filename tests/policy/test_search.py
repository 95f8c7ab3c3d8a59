"""The search of one job: its seconds are those of the plans, and random trials continue it."""

import math
from dataclasses import replace
from random import Random

import pytest

from pstar_sim import machine, preset
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Settings
from pstar_sim.policy.family.attempt import attempt_course
from pstar_sim.policy.family.course import Course, Knobs
from pstar_sim.policy.family.pace import period_s
from pstar_sim.policy.family.search import Search
from pstar_sim.policy.family.searched import _Sizes
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.points import Point
from pstar_sim.policy.kit.schedule import Modes
from pstar_sim.policy.passes.feasibility import check_host
from pstar_sim.testing import chain_workload, random_workload
from pstar_sim.workload.adapter import Adapter
from pstar_sim.workload.workload import UseKind, Workload

EAGER = Settings(update="eager", clip=False)
ENOUGH_OPS = 20_000


def _search(batch: int = 1) -> Search:
    workload = preset("1B", batch=batch, seq=1024, dtype="bf16", checkpointing=True)
    where = machine("h100-80", gpu_memory="6GB")
    return Search(Job("any", workload, where, EAGER, Point(streams=True), build_layout(workload)))


def test_the_plan_of_a_trial_that_seems_fastest_takes_no_longer_than_the_trial() -> None:
    """In one of these trials, two different windows take turns. Its plan takes 6 % longer than either."""
    search = _search()
    search.run(ENOUGH_OPS)
    least_s, too_few = float("inf"), 0
    for trial, seconds in search.tried.items():
        modes, knobs = search._key(trial)
        course = Course(search.job, modes, knobs)
        if course.least_room_bytes < 0 or not (made := attempt_course(course, limit_s=least_s)).fits:
            continue
        if min(seconds, made.iteration_s) < least_s:
            assert period_s(made.plan()) <= seconds * (1 + 1e-5)
            too_few += made.iteration_s < 0.95 * seconds
        least_s = min(least_s, seconds)
    assert too_few == 1 and search.seconds == least_s


def test_random_trials_continue_a_search() -> None:
    found = []
    for _ in range(2):
        search = _search(batch=2)
        search.run(ENOUGH_OPS)
        before_s, tried = search.seconds, len(search.tried)
        search.wander(ENOUGH_OPS)
        assert search.seconds <= before_s and len(search.tried) > tried
        assert search.effort_ops <= 0 or search.good_enough
        found.append((search.best, list(search.tried)))
    assert found[0] == found[1]


def test_a_search_of_adapters_ends() -> None:
    """No chunk can be pinned or streamed, so there are few trials, and none of them is near the roofline."""
    workload = preset("1B", batch=1, seq=1024, dtype="bf16", lora=Adapter(rank=16))
    where = machine("rtx4090", gpu_memory="2GB")
    search = Search(Job("any", workload, where, EAGER, Point(streams=True), build_layout(workload)))
    search.run(ENOUGH_OPS)
    assert search.count == 0 and search.seconds < math.inf and not search.good_enough
    search.wander(ENOUGH_OPS // 20)
    assert search.spent


def test_a_search_that_is_good_enough_has_nothing_more_to_try() -> None:
    workload = chain_workload(4, 1 << 20, flops=10**12)
    search = Search(Job("any", workload, machine("h100-80"), EAGER, Point(streams=True), build_layout(workload)))
    search.run(ENOUGH_OPS)
    assert search.good_enough and (search.exhausted or search.run(ENOUGH_OPS)) and search.exhausted


def test_a_search_begins_where_the_host_has_room() -> None:
    """With nothing pinned the host holds 18 bytes of each of 1.2 billion parameters, more than 11 GB. No start has to
    be given up for that, and streams are not lost."""
    workload = preset("1B", batch=1, seq=1024, dtype="bf16", micro_batches=4)
    where = machine("h100-80", gpu_memory="12GB", host_memory="19GB")
    search = Search(Job("any", workload, where, EAGER, Point(streams=True, sums=True), build_layout(workload)))
    starts = [search._modes(trial) for trial in search._roofline_starts(turned=False)]
    assert starts and all(modes.streamed for modes in starts)
    for modes in starts:
        check_host(search.job, modes)


def test_a_job_that_uses_its_chunks_often_begins_with_larger_ones() -> None:
    """1,000 layers of a chunk each, used in forward and backward of four micro-batches, are 8,000 uses: chunks of two
    layers are used 4,000 times. With one micro-batch nothing changes."""
    for micro_batches, times in ((4, 2), (1, None)):
        workload = chain_workload(1000, 64 << 20, dtype="bf16", micro_batches=micro_batches)
        sizes = _Sizes(workload, machine("h100-80"), EAGER, Point(streams=True, sums=True), "any", True)
        coarse = sizes._coarse()
        assert len(sizes.usual.chunks) == 1000
        assert (coarse and coarse.chunk_bytes // sizes.usual.chunk_bytes) == times


def uneven(layers: int = 6) -> Workload:
    """Four micro-batches. The first layer has a gradient in the last of them alone, the second layer in the last
    two."""
    w = chain_workload(layers, 1 << 20, micro_batches=4)
    since = {0: 3, 1: 2}
    return replace(
        w,
        uses=tuple(
            use
            for use in w.uses
            if use.kind is not UseKind.GRADIENT or w.moments[use.moment].micro_batch >= since.get(use.tensor, 0)
        ),
    )


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_what_an_attempt_is_given_up_for_is_no_more_than_it_takes(seed: int, clip: bool) -> None:
    """The seconds of CPU Adam are those of the rows, and no queue works for longer than an iteration."""
    rng = Random(seed)
    workload = uneven() if seed < 4 else random_workload(rng, layers=6, dtype="bf16")
    where = machine(rng.choice(("h100-80", "v100-32", "h100-80x4")))
    settings = Settings(update="step" if clip else "eager", clip=clip, chunk_bytes=2 << 20)
    job = Job("any", workload, where, settings, Point(streams=True, sums=True))
    search, made = Search(job), 0
    for _ in range(12):
        roles = {c: rng.choice(("cpu", "cpu", "stream", "pin")) for c in job.candidates}
        pinned, streamed = (frozenset(c for c in roles if roles[c] == role) for role in ("pin", "stream"))
        summed = frozenset(c for c in roles if c not in pinned and rng.random() < 0.5) if job.may_sum else frozenset()
        course = Course(job, Modes(pinned, streamed, summed), Knobs())
        if course.least_room_bytes < 0 or not (found := attempt_course(course)).fits:
            continue
        made += 1
        assert search._adam_s(course.modes) == pytest.approx(found.busy_s[0])
        busy_s = max(*found.busy_s, search._adam_s(course.modes))
        if found.window.repeats:
            assert busy_s <= found.iteration_s * (1 + 1e-6)
        given_up = attempt_course(course, limit_s=0.9 * busy_s)
        assert not given_up.fits and not given_up.window.periods_s
        assert attempt_course(course, limit_s=1.1 * found.iteration_s).fits
    assert made
