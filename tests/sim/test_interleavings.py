"""Every policy's plan, in timings nobody planned for: the order on each queue and the `after` edges alone must keep it
within both budgets and every read satisfied (`play` refuses whatever is not)."""

import random
from collections.abc import Callable

import pytest

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Settings
from pstar_sim.errors import DoesNotFit
from pstar_sim.policy.registry import policies
from pstar_sim.sim import play
from pstar_sim.testing import random_workload, round_machine
from pstar_sim.workload.workload import Workload


def tight(w: Workload, rng: random.Random) -> Machine:
    """A machine for part of the model, with copies, Adam and compute of the same order."""
    model_bytes = sum(t.bytes for t in w.tensors) + w.trainable_params * 12
    gpu = int(w.peak_non_model_bytes + model_bytes * rng.choice((0.15, 0.3, 0.6, 1.5)))
    return round_machine(
        gpu_memory_bytes=gpu,
        host_memory_bytes=2**40,
        h2d_bytes_per_s=2e9,
        hbm_bytes_per_s=1e11,
        dram_bytes_per_s=2e10,
        adam_params_per_s=2e8,
    )


def shaken(seed: int) -> Callable[[int, int], float]:
    """A factor of 1/20 to 20 for each step, or now and then for a whole stretch of them."""
    rng = random.Random(seed)
    whole = rng.random() < 0.3
    factors: dict[tuple[int, int], float] = {}
    return lambda step, k: factors.setdefault((step // 7 if whole else step, k), 20.0 ** rng.uniform(-1, 1))


@pytest.mark.parametrize("name", sorted(policies()))
def test_two_hundred_timings_keep_every_plan_within_its_room(name: str, whole: bool) -> None:
    """Forty plans in five timings each; of the policy that searches, which takes most of the time, ten in twenty but
    for --whole."""
    timings = 20 if name == "optimal" and not whole else 5
    played = moved = 0
    for seed in range(100):
        rng = random.Random(seed)
        w = random_workload(rng)
        settings = Settings(update=rng.choice(("step", "eager")), clip=rng.random() < 0.3)
        try:
            plan = policies()[name](w, tight(w, rng), settings)
        except DoesNotFit:
            continue
        for shake in range(timings):
            t = play(plan, jitter=shaken(seed * timings + shake), max_iterations=3)
            assert t.peak_bytes["gpu"] <= plan.gpu_budget_bytes
            assert t.peak_bytes["host"] <= plan.host_budget_bytes
            played += 1
        moved += bool(t.moved_bytes["h2d"])
        if played >= 200:
            break
    assert played >= (60 if name in ("all_on_gpu", "zero3_resident") else 200)
    assert moved or name in ("all_on_gpu", "zero3_resident")
