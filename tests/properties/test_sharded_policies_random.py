"""ZeRO-3 and its successors on random jobs and 1, 2 and 4 ranks: every plan is proved and keeps its budgets."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from drawn import TIME_TO_SHRINK, Drawn, chances, jobs, planned, seeds
from hypothesis import given, settings

from pstar_sim.catalog.machine import Fabric, Machine, Nvme
from pstar_sim.core.step import Kind
from pstar_sim.errors import DoesNotFit
from pstar_sim.policy import find_policy
from pstar_sim.sim.play import play
from pstar_sim.testing import random_jitter, random_machine, random_settings, random_workload

pytestmark = TIME_TO_SHRINK
TRACED = "bucket=1e6,reuse=2e6"
SPECS = (
    "zero3_resident",
    f"zero3_offload:{TRACED},prefetch=5e5",
    f"zero3_offload:flush=async,params=cpu,subgroup=1e6,{TRACED},prefetch=5e5",
    f"zero3_offload:ratio=0.6,subgroup=1e6,pinned=off,{TRACED},prefetch=0",
    f"deep_optimizer_states:every=2,subgroup=1e6,{TRACED}",
    f"deep_optimizer_states:every=3,ratio=0.7,subgroup=1e6,{TRACED}",
    f"zero_infinity:subgroup=1e6,{TRACED}",
    f"zero_infinity:params=nvme,states=nvme,subgroup=1e6,{TRACED}",
)


def with_ranks(machine: Machine, ranks: int, rng: random.Random) -> Machine:
    """So many ranks like the machine's own, with four times its memory; some with disks, all with a rate for copies
    that are not pinned."""
    (one,) = machine.ranks
    gpu = replace(one.gpu, memory_bytes=one.gpu.memory_bytes * 4, usable_bytes=one.gpu.usable_bytes * 4)
    link = replace(one.link, pageable_bytes_per_s=one.link.d2h_bytes_per_s / 3)
    peer = Fabric(name="random", bytes_per_s=10 ** rng.uniform(8, 11), latency_s=1e-6, measured=True, source="random")
    disks = Nvme(
        name="random",
        memory_bytes=10**10,
        read_bytes_per_s=10 ** rng.uniform(8, 10),
        write_bytes_per_s=10 ** rng.uniform(8, 10),
        latency_s=1e-5,
        measured=True,
        source="random",
    )
    return replace(
        machine,
        ranks=(replace(one, gpu=gpu, link=link, batch_share=1 / ranks),) * ranks,
        host=replace(machine.host, memory_bytes=machine.host.memory_bytes * 2),
        peer=peer if ranks > 1 else None,
        nvme=disks,
    )


def sharded(job: Drawn, ranks: int, chance: random.Random) -> Drawn:
    return job._replace(machine=with_ranks(job.machine, ranks, chance))


@pytest.mark.parametrize(
    ("spec", "ranks"),
    [
        pytest.param(spec, ranks, marks=[pytest.mark.whole] if (n + m) % 2 else [])
        for n, spec in enumerate(SPECS)
        for m, ranks in enumerate((1, 2, 4))
    ],
)
def test_every_plan_is_proved(spec: str, ranks: int, whole: bool) -> None:
    fitted = 0

    @settings(max_examples=6 if whole or spec == "zero3_resident" else 3)
    @given(jobs(), chances(), seeds())
    def holds(job: Drawn, chance: random.Random, shake: random.Random) -> None:
        nonlocal fitted
        workload, machine, asked = sharded(job, ranks, chance)
        try:
            plan = find_policy(spec)(workload, machine, asked)
        except DoesNotFit as short:
            assert short.needed_bytes > short.available_bytes
            return
        fitted += 1
        proved = plan.check(workload, machine)
        for jitter in (None, random_jitter(shake, plan)):
            timeline = play(plan, jitter=jitter, max_iterations=4)
            for place in ("gpu", "host"):
                assert timeline.peak_bytes[place] <= proved.peak_bytes[place] <= proved.budget_bytes[place]

    holds()
    assert fitted


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_gradient_is_scattered_once_a_micro_batch(ranks: int) -> None:
    """Reduce-scatters: one of each trained chunk a micro-batch; gathers: whole chunks, at least one of each that is
    read and lives in slices."""
    fitted = 0

    @settings(max_examples=6)
    @given(jobs(), chances())
    def holds(drawn: Drawn, chance: random.Random) -> None:
        nonlocal fitted
        job = sharded(drawn, ranks, chance)
        for spec in (SPECS[0], SPECS[1], SPECS[6]):
            plan = planned(find_policy(spec), job)
            if plan is None:
                continue
            fitted += 1
            trained = {s.chunk for s in plan.steps if s.kind in (Kind.CPU_UPDATE, Kind.GPU_UPDATE)}
            scattered = [s for s in plan.steps if s.kind is Kind.REDUCE_SCATTER]
            gathered = [s for s in plan.steps if s.kind is Kind.GATHER]
            assert len(scattered) == len(trained) * job.workload.micro_batches
            for step in (*scattered, *gathered):
                assert step.chunk is not None
                assert step.bytes == plan.layout.whole_bytes(step.chunk)
            assert {s.chunk for s in gathered} >= trained

    holds()
    assert fitted


def test_more_ranks_never_hold_more_on_each_host() -> None:
    """A rank's slices shrink with the ranks: 24 N / P (rounded up to whole aligned slices)."""
    workload = random_workload(3, frozen=False, unused=False, micro_batches=1)
    spec = SPECS[1]
    held = []
    for ranks in (1, 2, 4):
        machine = with_ranks(random_machine(random.Random(0), workload), ranks, random.Random(0))
        machine = replace(machine, host=replace(machine.host, memory_bytes=10**12))
        machine = replace(
            machine,
            ranks=tuple(
                replace(r, gpu=replace(r.gpu, memory_bytes=10**12, usable_bytes=10**12)) for r in machine.ranks
            ),
        )
        plan = find_policy(spec)(workload, machine, random_settings(random.Random(0)))
        own = sum(plan.layout.slice_numel(c) for c, mode in enumerate(plan.modes) if mode == "cpu")
        assert plan.check().peak_bytes["host"] == 24 * own
        held.append(own)
    assert held == sorted(held, reverse=True)
    assert held[0] / held[2] == pytest.approx(4, rel=0.01)
