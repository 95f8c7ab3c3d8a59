"""Every policy that knows several GPUs, on random jobs: each plan is proved, and representative ranks stand for all."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from drawn import TIME_TO_SHRINK, Drawn, chances, jobs, planned, seeds
from hypothesis import given, settings

from pstar_sim.bounds.shares import tightest
from pstar_sim.catalog.loader import load_catalog, load_machine
from pstar_sim.catalog.machine import Machine, Rank
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.planner.compare import compare
from pstar_sim.policy import find_policy
from pstar_sim.sim.play import play
from pstar_sim.testing import random_jitter
from pstar_sim.workload.presets import preset

POLICIES = (
    "all_on_gpu",
    "zero_offload",
    "patrickstar",
    "patrickstar:msc=on",
    "zero3_resident",
    "zero3_offload",
    "zero_infinity",
    "stronghold",
)
pytestmark = TIME_TO_SHRINK
SAME = 1e-3
"""What the explicit and the representative simulation may differ by."""


def play_both(plan: Plan) -> float:
    once, all_of_them = play(plan), play(plan, every_rank=True)
    assert once.iteration_s == pytest.approx(all_of_them.iteration_s, rel=SAME)
    assert once.moved_bytes == all_of_them.moved_bytes
    assert once.peak_bytes["gpu"] <= plan.gpu_budget_bytes
    return once.iteration_s


@pytest.mark.parametrize("policy", POLICIES)
def test_every_plan_is_correct_and_one_rank_stands_for_all(policy: str, whole: bool) -> None:
    fitted = several = 0
    seldom = policy in ("all_on_gpu", "zero3_resident")  # has room

    @settings(max_examples=40 if whole or seldom else 15)
    @given(jobs(ranks=(1, 2, 3, 4)), chances(), seeds())
    def holds(job: Drawn, chance: random.Random, shake: random.Random) -> None:
        nonlocal fitted, several
        plan = planned(find_policy(policy), job)
        if plan is None:
            return
        proved = plan.check(job.workload, job.machine)
        play_both(plan)
        fitted += 1
        several += len(job.machine.ranks) > 1
        if chance.random() < 0.25:
            peak = play(plan, jitter=random_jitter(shake, plan), max_iterations=3).peak_bytes
            assert all(size <= proved.peak_bytes[place] for place, size in peak.items())

    holds()
    assert fitted >= 2 and several >= 1


def mixed(*gpus: str, switches: bool = False) -> Machine:
    """A100 and V100 ranks, each with its own link, two per PCIe switch or on ports of their own."""
    catalog = load_catalog()
    links = {"a100-40": "pcie4-x16", "v100-32": "pcie3-x16"}
    total = sum(2 if name == "a100-40" else 1 for name in gpus)
    ranks = tuple(
        Rank(
            gpu=catalog.gpu(name),
            link=catalog.link(links[name]),
            batch_share=(2 if name == "a100-40" else 1) / total,
            root=i // 2 if switches else None,
        )
        for i, name in enumerate(gpus)
    )
    return Machine(
        name="mixed",
        ranks=ranks,
        host=catalog.host("node-a100-1tb"),
        peer=catalog.fabric("nvlink2"),
        root_bytes_per_s=12e9 if switches else None,
    )


A, V = "a100-40", "v100-32"


@pytest.mark.parametrize(
    ("gpus", "switches"),
    [
        ((A, V), False),
        *(pytest.param((A, A, V, V), switches, marks=pytest.mark.whole) for switches in (False, True)),
        ((A, V, A, V), True),
    ],
)
def test_an_a100_beside_a_v100(gpus: tuple[str, ...], switches: bool) -> None:
    """The A100 takes 8 sequences, the V100 4: planned for both, simulated with each rank's own GPU, link and batch."""
    machine = mixed(*gpus, switches=switches)
    jobs = {A: preset("gpt2", batch=8, seq=128, dtype="fp16"), V: preset("gpt2", batch=4, seq=128, dtype="fp16")}
    workloads = [jobs[name] for name in gpus]
    workload = tightest(workloads, machine)
    for policy in ("zero_offload", "patrickstar", "zero3_resident"):
        plan = find_policy(policy)(workload, machine, Settings())
        plan.check(workload, machine)
        seconds = play_both(replace(plan, ranked=tuple(workloads)))
        # Not faster than the A100s or the V100s alone with the same share each, on as many GPUs.
        for name in (A, V):
            alone = mixed(*[name] * len(gpus), switches=switches)
            best = play(find_policy(policy)(jobs[name], alone, Settings())).iteration_s
            assert seconds > best * 0.98
    row = compare(workloads, machine, policies=["patrickstar"], near=False).rows[0]
    assert row.fits
    assert row.tokens_per_s == pytest.approx(sum(w.tokens for w in workloads) / (row.iteration_s or 0))
    assert row.lower_bound_s is not None and row.iteration_s is not None
    assert row.lower_bound_s <= row.iteration_s


@pytest.mark.parametrize("policy", ["zero_offload", "patrickstar"])
def test_the_eight_gpus_of_yard(policy: str) -> None:
    """2B on 8 V100 in pairs on PCIe switches: one rank and eight ranks take the same time."""
    machine = load_machine("v100-32x8")
    workload = preset("2B", batch=8, seq=1024, dtype="fp16")
    tight = replace(
        machine, ranks=tuple(replace(r, gpu=replace(r.gpu, usable_bytes=18 * 10**9)) for r in machine.ranks)
    )
    for where in (machine, tight):
        play_both(find_policy(policy)(workload, where, Settings()))
