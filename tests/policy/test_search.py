"""The search of one job: its seconds are those of the plans, and random trials continue it."""

from pstar_sim import machine, preset
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Settings
from pstar_sim.policy.family.attempt import attempt_course
from pstar_sim.policy.family.course import Course
from pstar_sim.policy.family.pace import period_s
from pstar_sim.policy.family.search import Search
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.points import Point

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
