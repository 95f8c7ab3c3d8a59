"""Plans of two micro-batches in which the first gradient of a streamed chunk waits on the host for the update and comes
up without an add, while the second stays on the GPU. No policy writes such plans; a plan made by hand may be one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from pstar_sim.bounds.bounds import lower_bound
from pstar_sim.bounds.fluid import fluid_bound
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Kind, Place, Ref, Step
from pstar_sim.errors import PlanError
from pstar_sim.policy.family.attempt import attempt
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.points import Point
from pstar_sim.policy.kit.schedule import Modes
from pstar_sim.sim.play import play
from pstar_sim.testing import chain_workload, round_machine

MIB = 2**20
NONE = frozenset[int]()


@pytest.fixture
def waiting() -> Plan:
    """All chunks are streamed. The host adds slowly, so that a plan without its adds is far faster."""
    workload = chain_workload(4, MIB, tide_bytes=4 * MIB, micro_batches=2, forward_s=1e-3)
    machine = round_machine(gpu_memory_bytes=48 * MIB, adam_params_per_s=1e8)
    settings = Settings(update="step", clip=False, chunk_bytes=2 * MIB)
    job = Job("by hand", workload, machine, settings, Point(streams=True, sums=True))
    made = attempt(job, Modes(NONE, frozenset(job.candidates)))
    assert made.window.stuck is None
    return _without_adds(made.plan())


def _without_adds(plan: Plan) -> Plan:
    """The plan without its adds on the host: what waited for an add waits until that gradient has gone down, and the
    list that comes up for the update is the gradient."""
    adds = {s.id: s.chunk for s in plan.steps if s.kind is Kind.CPU_ADD}
    down = {s.chunk: s.id for s in plan.steps if s.kind is Kind.FREE and s.list == "grad"}  # behind its copy down
    update = {s.chunk: s.id for s in plan.steps if s.kind is Kind.GPU_UPDATE}
    new_id = max(s.id for s in plan.steps) + 1
    steps: list[Step] = []
    for step in plan.steps:
        if step.id in adds:
            continue
        after = [
            structs.replace(r, id=(update if r.back else down)[adds[r.id]]) if r.id in adds else r for r in step.after
        ]
        step = structs.replace(step, after=tuple(dict.fromkeys(after)))
        assert step.chunk is None or step.list != "grad32" or step.kind in (Kind.FETCH, Kind.DROP)
        if step.list == "grad32":
            assert step.chunk is not None
            size = plan.layout.payload_bytes(step.chunk, "grad")
            waits = (Ref(down[step.chunk], 0),) if step.kind is Kind.FETCH else ()
            step = structs.replace(step, list="grad", bytes=size, after=tuple(dict.fromkeys((*step.after, *waits))))
        steps.append(step)
        if step.kind is Kind.GPU_UPDATE:
            assert step.chunk is not None
            size = plan.layout.payload_bytes(step.chunk, "grad")
            free = structs.replace(step, id=new_id, kind=Kind.FREE, list="grad", place=Place.HOST, bytes=size, after=())
            steps.append(free)
            new_id += 1
    initial = tuple(r for r in plan.initial if r.list != "grad32")
    return replace(plan, steps=tuple(steps), initial=initial)


def test_the_bounds_know_such_plans(waiting: Plan) -> None:
    waiting.check()
    job = (waiting.workload, waiting.machine, waiting.settings, waiting.layout)
    assert fluid_bound(*job).seconds <= play(waiting).iteration_s
    assert lower_bound(*job).seconds <= play(waiting).iteration_s


def test_with_clipping_the_norm_would_miss_a_gradient(waiting: Plan) -> None:
    clipped = replace(waiting, settings=replace(waiting.settings, clip=True))
    with pytest.raises(PlanError, match="so the norm misses their sum"):
        clipped.check()
