"""The asynchronous family on random jobs and hosts that are too small for all states: plans on disks are proved, and
none is below the bounds."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from drawn import TIME_TO_SHRINK, Drawn, chances, jobs, planned, seeds
from hypothesis import given, settings

from pstar_sim.bounds.bounds import lower_bound
from pstar_sim.catalog.machine import Nvme
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import DISK_COPIES, DISK_QUEUES, Kind, Place, Queue
from pstar_sim.errors import CannotPlan, PlanError
from pstar_sim.policy import find_policy
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.schedule import Modes
from pstar_sim.policy.passes.feasibility import needed_on_host
from pstar_sim.sim.play import play
from pstar_sim.testing import random_jitter

pytestmark = TIME_TO_SHRINK


def with_little_host(job: Drawn, chance: random.Random) -> Drawn:
    """The host has a share of the room that all chunks would need, and the machine has disks."""
    workload, machine, asked = job
    if chance.random() < 0.5:  # so many chunks that working lists on disks leave room
        asked = replace(asked, chunk_bytes=2**20)
    needed = needed_on_host(Job("any", workload, machine, asked), Modes(frozenset()))
    host_bytes = int(needed * chance.uniform(0.05, 0.8)) * machine.local_ranks + machine.host.reserved_bytes
    rates = read, write = 10 ** chance.uniform(7, 10), 10 ** chance.uniform(7, 10)
    known = chance.random() < 0.4
    beside = [rate * chance.uniform(0.4, 1.1) if known else None for rate in rates]
    disks = Nvme(
        name="random",
        memory_bytes=10**10,
        read_bytes_per_s=read,
        write_bytes_per_s=write,
        read_beside_bytes_per_s=beside[0],
        write_beside_bytes_per_s=beside[1],
        latency_s=1e-5,
        measured=True,
        source="random",
    )
    host = replace(machine.host, memory_bytes=host_bytes)
    return Drawn(workload, replace(machine, host=host, nvme=disks), asked)


def on_disks(policy: str, job: Drawn, chance: random.Random) -> Plan | None:
    """Returns the plan, if it keeps states on disks."""
    try:
        plan = planned(find_policy(policy), with_little_host(job, chance))
    except CannotPlan:
        return None
    return plan if plan is not None and any(row.place is Place.NVME for row in plan.initial) else None


@pytest.mark.parametrize("policy", ["tide", "optimal", "l2l", "karma"])
def test_every_plan_is_proved_and_above_the_bound(policy: str, whole: bool) -> None:
    fitted, queues, lists = 0, set[Queue](), Counter[str]()

    @settings(max_examples=60 if whole else 15 if policy == "optimal" else 30)
    @given(jobs(ranks=(1, 2)), chances(), seeds())
    def holds(job: Drawn, chance: random.Random, shake: random.Random) -> None:
        nonlocal fitted
        plan = on_disks(policy, job, chance)
        if plan is None:
            return
        fitted += 1
        lists.update({row.list for row in plan.initial if row.place is Place.NVME})
        queues.update(step.queue for step in plan.steps if step.kind is Kind.NVME_WRITE)
        proved = plan.check()
        for jitter in (None, random_jitter(shake, plan)):
            timeline = play(plan, jitter=jitter, max_iterations=4)
            for place in ("gpu", "host", "nvme"):
                assert timeline.peak_bytes[place] <= proved.peak_bytes[place] <= proved.budget_bytes[place]
        bound = lower_bound(plan.workload, plan.machine, plan.settings, plan.layout)
        assert play(plan).iteration_s >= bound.seconds * (1 - 1e-9)
        assert bound.binding != "nvme" or bound.method == "closed form"
        assert plan.moved_bytes["nvme_read"] >= plan.moved_bytes["nvme_write"]

    holds()

    assert fitted and queues == {*DISK_QUEUES}
    assert not whole or lists["param"] > 1 < lists["grad32"]


@pytest.mark.parametrize("policy", ["tide", "karma"])
def test_a_plan_without_one_of_its_disk_steps_is_refused(policy: str) -> None:
    """Each step reads, writes or frees a list that the next iteration needs, or has no room for. A step that does not
    wait for another may be right all the same: then it is proved, and no order of the steps breaks it."""
    kinds = Counter[tuple[str, bool]]()

    @settings(max_examples=10)
    @given(jobs(), chances(), seeds())
    def holds(job: Drawn, chance: random.Random, shake: random.Random) -> None:
        plan = on_disks(policy, job, chance)
        if plan is None:
            return
        moves = [step for step in plan.steps if step.kind in DISK_COPIES]
        step = chance.choice(moves)
        without = tuple(
            one.waiting_for(tuple(ref for ref in one.after if ref.id != step.id))
            for one in plan.steps
            if one is not step
        )
        with pytest.raises(PlanError):
            replace(plan, steps=without).check()
        step = chance.choice([step for step in moves if step.after] or [step])
        early = step.waiting_for(step.after[:-1])
        mutant = replace(plan, steps=tuple(early if one is step else one for one in plan.steps))
        try:
            proved = mutant.check()
        except PlanError:
            kinds["early", False] += 1
            return
        kinds["early", True] += 1
        for _ in range(3):
            timeline = play(mutant, jitter=random_jitter(shake, mutant), max_iterations=4)
            for place in ("gpu", "host", "nvme"):
                assert timeline.peak_bytes[place] <= proved.peak_bytes[place] <= proved.budget_bytes[place]

    holds()

    assert kinds["early", False]
