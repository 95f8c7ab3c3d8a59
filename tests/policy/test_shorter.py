"""Attempts in a shorter job: they cost less, and their seconds are those of the whole job."""

from dataclasses import replace

import pytest

from pstar_sim import machine, preset
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Settings
from pstar_sim.core.step import Queue
from pstar_sim.policy.family.attempt import attempt_course
from pstar_sim.policy.family.course import Course, Knobs
from pstar_sim.policy.family.search import Search
from pstar_sim.policy.family.searched import own_plans
from pstar_sim.policy.family.shorter import FEWEST, FEWEST_BEHIND_BARRIER, SHOWN, shorter
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.points import Point
from pstar_sim.policy.kit.schedule import Modes
from pstar_sim.workload.workload import Workload, repeat_micro_batch

ONE = preset("1B", batch=1, seq=1024, dtype="bf16", checkpointing=True)
EAGER = Settings(update="eager", clip=False)
POINT = Point(streams=True, sums=True)
WHOLE = 16


def _job(workload: Workload, where: Machine) -> Job:
    return Job("any", workload, where, EAGER, POINT, build_layout(workload))


def _modes(job: Job, *, pins: int, streams: int, sums: int) -> Modes:
    order = job.candidates
    return Modes(frozenset(order[:pins]), frozenset(order[pins : pins + streams]), frozenset(order[pins : pins + sums]))


@pytest.mark.parametrize(
    "memory, pins, streams, sums, within",
    [
        ("7GB", 2, 4, 14, 1e-4),
        ("6GB", 0, 10, 20, 1e-4),
        ("6GB", 0, 4, 0, 3e-2),  # CPU Adam falls behind with its adds
    ],
)
def test_the_seconds_are_those_of_the_whole_job(memory: str, pins: int, streams: int, sums: int, within: float) -> None:
    where = machine("rtx4090", gpu_memory=memory)
    whole = _job(repeat_micro_batch(ONE, WHOLE), where)
    short_workload = shorter(whole.workload, barrier=False)
    assert short_workload is not None
    short = _job(short_workload, where)
    modes = _modes(whole, pins=pins, streams=streams, sums=sums)
    long = attempt_course(Course(whole, modes, Knobs()))
    made = attempt_course(Course(short, modes, Knobs()), times_left_out=WHOLE - SHOWN)
    assert made.fits and long.fits
    assert made.iteration_s == pytest.approx(long.iteration_s, rel=within)
    assert made.busy_s == pytest.approx(long.busy_s, rel=0.02)
    assert made.fetched_bytes == pytest.approx(long.fetched_bytes, rel=0.05)
    assert len(made.draft.rows) < len(long.draft.rows) / 2


def test_what_is_left_out() -> None:
    """16 micro-batches less 5 are 11 times the middle one. All sums are on the host, so a micro-batch sends the
    gradient of each chunk down once."""
    where = machine("rtx4090")
    short_workload = shorter(repeat_micro_batch(ONE, WHOLE), barrier=False)
    assert short_workload is not None and short_workload.micro_batches == 5
    job = _job(short_workload, where)
    modes = _modes(job, pins=0, streams=0, sums=0)
    left_out = attempt_course(Course(job, modes, Knobs()), times_left_out=11).left_out
    assert left_out is not None
    seconds = [s for s, m in zip(job.cost.moments_s, job.workload.moments) if m.micro_batch == 2]
    assert left_out.work_s[Queue.COMPUTE] == pytest.approx(sum(seconds), rel=0.02)  # and adds of the small chunks
    down_s = sum(job.down[c, "param"][1] for c in job.candidates)
    assert left_out.work_s[Queue.D2H] == pytest.approx(down_s)
    assert left_out.least_s == 11 * max(left_out.work_s.values())


def test_which_jobs_are_shortened() -> None:
    for barrier, fewest in ((False, FEWEST), (True, FEWEST_BEHIND_BARRIER)):
        assert shorter(repeat_micro_batch(ONE, fewest - 1), barrier=barrier) is None
        assert shorter(repeat_micro_batch(ONE, fewest), barrier=barrier) is not None
    assert shorter(ONE, barrier=False) is None
    long = repeat_micro_batch(ONE, FEWEST)
    slower = replace(long.moments[4], flops=2 * long.moments[4].flops)
    assert (
        shorter(replace(long, moments=(*long.moments[:4], slower, *long.moments[5:])), barrier=False) is None
    )  # they differ


def test_the_plan_has_all_micro_batches() -> None:
    where = machine("rtx4090", gpu_memory="8GB")
    workload = repeat_micro_batch(ONE, FEWEST)
    for found in own_plans(workload, where, replace(EAGER, effort=0.1), POINT, "any"):
        assert found.plan.workload.micro_batches == FEWEST
        found.plan.check()


def test_if_no_attempt_fits_the_whole_job_the_whole_job_is_searched() -> None:
    """Here the shorter job has a larger GPU, so all its chunks are pinned. They do not fit the smaller GPU."""
    workload = repeat_micro_batch(ONE, FEWEST)
    short_workload = shorter(workload, barrier=False)
    assert short_workload is not None
    whole = _job(workload, machine("rtx4090", gpu_memory="6GB"))
    search = Search(whole, _job(short_workload, machine("a100-80")))
    search.most = search.fewest = len(whole.candidates)
    search.run()
    assert search.fastest and all(a.pins == len(whole.candidates) for a in search.fastest)
    made = search.whole()
    assert made and made[0].course.job is not search.shown and made[0].pins < len(whole.candidates)
