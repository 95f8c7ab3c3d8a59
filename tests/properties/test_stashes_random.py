"""Random blocks offloaded, in the plans of every policy: proved by the checker, and played with random durations."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from bounded import offloaded_chain
from drawn import LITTLE_EFFORT, TIME_TO_SHRINK, Drawn, chances, planned, seeds
from hypothesis import given, settings
from msgspec import structs

from pstar_sim.bounds.bounds import lower_bound
from pstar_sim.bounds.fluid import fluid_bound
from pstar_sim.bounds.stash_bound import stash_bound_s
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Settings
from pstar_sim.cost import CostModel
from pstar_sim.errors import PlanError
from pstar_sim.policy.registry import built_in
from pstar_sim.sim.play import play
from pstar_sim.testing import chain_workload, random_jitter, random_machine
from pstar_sim.units import KIB
from pstar_sim.workload.mixing import block_names, offload_blocks
from pstar_sim.workload.workload import Workload, repeat_micro_batch

pytestmark = TIME_TO_SHRINK
UPDATES = ("step", "eager")


def test_every_policy_on_random_choices(whole: bool) -> None:
    @settings(max_examples=12 if whole else 3)
    @given(chances(), seeds())
    def holds(chance: random.Random, shake: random.Random) -> None:
        w = offloaded_chain(chance)
        machine: Machine = random_machine(chance, w)
        asked = Settings(update=chance.choice(UPDATES), clip=chance.random() < 0.5, effort=LITTLE_EFFORT)
        checked = 0
        for name, policy in built_in().items():
            plan = planned(policy, Drawn(w, machine, asked))
            if plan is None:
                continue
            report = plan.check()
            assert sum(step.stash is not None for step in plan.steps) == 2 * len(w.stashes)
            timeline = play(plan)
            bound = lower_bound(w, machine, asked, plan.layout).seconds
            assert timeline.iteration_s >= bound * (1 - 1e-9), name
            jittered = play(plan, jitter=random_jitter(shake, plan), max_iterations=6)
            for place, most in report.peak_bytes.items():
                assert jittered.peak_bytes.get(place, 0) <= most, (name, place)
            checked += 1
            for step in shake.sample(plan.steps, min(6, len(plan.steps))):
                if step.stash is None or not step.after:
                    continue
                steps = tuple(structs.replace(s, after=s.after[1:]) if s is step else s for s in plan.steps)
                with pytest.raises(PlanError):
                    replace(plan, steps=steps).check()
        assert checked or not w.stashes or machine.gpu_budget_bytes < 4 * w.peak_non_model_bytes

    holds()


def loaded_choice(rng: random.Random) -> tuple[Workload, Machine]:
    """As `random_choice`, with layers whose gradients and parameters take the link as long as their activations do, on
    one link or two, fast or slow host memory, and a GPU that holds some of it."""
    layers = rng.randint(4, 8)
    left = [rng.randrange(16, 512) * KIB for _ in range(layers)]
    up = [sum(left[: n + 1]) for n in range(layers)]
    w = chain_workload(layers, 2**17, tide_bytes=[*up, *up[::-1], 0], forward_s=10 ** rng.uniform(-4, -2))
    blocks = block_names(w)
    w = offload_blocks(w, blocks[: rng.randint(1, layers - 2)])
    w = repeat_micro_batch(w, rng.choice((1, 1, 2, 3)))
    machine = random_machine(rng, w)
    (rank,) = machine.ranks
    rate = 10 ** rng.uniform(7.5, 9.5)
    link = replace(rank.link, h2d_bytes_per_s=rate, d2h_bytes_per_s=rate, duplex=rng.random() < 0.6)
    host = replace(machine.host, dram_bytes_per_s=10 ** rng.uniform(8, 10.5), memory_bytes=10**11)
    return w, replace(machine, ranks=(replace(rank, link=link),), host=host)


@pytest.mark.slow
def test_stashes_raise_the_bound_and_no_policy_beats_it(whole: bool) -> None:
    """Beside the chunks' copies on the link: never lower than the bound of the same moments without stashes, or than
    that of computing and stashes alone; often higher than both; and no plan of any policy is faster, by the joint LP
    or the fluid program."""
    higher = finer = plans = 0
    examples = 30 if whole else 4

    @settings(max_examples=examples)
    @given(chances())
    def holds(chance: random.Random) -> None:
        nonlocal higher, finer, plans
        w, machine = loaded_choice(chance)
        asked = Settings(update=chance.choice(UPDATES), clip=chance.random() < 0.5, effort=LITTLE_EFFORT)
        searched = chance.random() < 1 / 3
        layout = build_layout(w)
        bound = lower_bound(w, machine, asked, layout).seconds
        pinned = lower_bound(w, machine, asked, layout, stream=False).seconds
        without = replace(w, stashes=(), activations=())
        alone = stash_bound_s(w, CostModel(w, machine, layout))
        before = max(lower_bound(without, machine, asked, layout).seconds, alone)
        assert bound >= before * (1 - 1e-6)
        assert pinned >= max(lower_bound(without, machine, asked, layout, stream=False).seconds, alone) * (1 - 1e-9)
        higher += bound > before * 1.01
        fluid = fluid_bound(w, machine, asked, layout).seconds
        assert fluid >= bound * (1 - 1e-9)
        finer += fluid > max(bound, fluid_bound(without, machine, asked, layout).seconds) * 1.001
        for name, policy in built_in().items():
            plan = None if name == "optimal" and not searched else planned(policy, Drawn(w, machine, asked))
            if plan is None:
                continue
            plans += 1
            seconds = play(plan).iteration_s
            mine = plan.layout
            assert seconds >= lower_bound(w, machine, asked, mine).seconds * (1 - 1e-6), name
            if mine == layout:
                assert seconds >= fluid * (1 - 1e-6), name
                if name not in ("optimal", "deep_optimizer_states"):
                    assert seconds >= pinned * (1 - 1e-6), name

    holds()
    assert plans > 3 * examples and higher > examples / 6 and finer > examples / 6, (plans, higher, finer)
