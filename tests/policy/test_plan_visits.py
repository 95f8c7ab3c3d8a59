"""plan_visits: a policy of one's own says who is on the GPU when, and what it says wrongly is named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import pstar_sim as ps
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Kind
from pstar_sim.errors import CannotPlan, DoesNotFit
from pstar_sim.policy import Job, Visit, plan_visits
from pstar_sim.policy.kit.points import Point
from pstar_sim.testing import chain_workload
from pstar_sim.units import MIB
from pstar_sim.workload.adapter import Adapter

LAYERS = 4  # moments 0 to 3 forward, 4 to 7 backward, 8 the step; a chunk is a layer


def job(gpu_memory: str = "8GB") -> Job:
    settings = Settings(update="eager", clip=False, chunk_bytes=2 * MIB)
    return Job("mine", chain_workload(LAYERS, MIB), ps.machine("rtx4090", gpu_memory=gpu_memory), settings)


def each_use(of: Job, but: Sequence[int] = ()) -> list[Visit]:
    return [Visit(c, m, m) for c in of.moving if c not in but for m in of.uses.touched[c]]


def fetches(plan: Plan) -> dict[int, list[int]]:
    """Chunk -> moments that it is fetched for."""
    found: dict[int, list[int]] = {}
    for step in plan.steps:
        if step.kind is Kind.FETCH and step.list == "param":
            found.setdefault(step.chunk if step.chunk is not None else -1, []).append(step.moment or 0)
    return {c: sorted(moments) for c, moments in found.items()}


def test_a_longer_visit_saves_the_second_fetch_and_an_earlier_one_is_served_earlier() -> None:
    of = job()
    plan = plan_visits(of, [*each_use(of), Visit(0, 0, 7), Visit(1, 5, 6), Visit(2, 1, 2)])
    plan.check()
    assert fetches(plan) == {0: [0], 1: [1, 5], 2: [1, 5], 3: [3]}


def test_pinned_and_streamed_chunks_are_updated_on_the_gpu() -> None:
    of = job()
    plan = plan_visits(of, each_use(of, but=[0]), pinned=[0], streamed=[1])
    plan.check()
    assert plan.modes == ("pin", "stream", "cpu", "cpu")
    assert {step.chunk for step in plan.steps if step.kind is Kind.GPU_UPDATE} == {0, 1}
    assert 0 not in fetches(plan)


def test_copies_on_demand_wait_for_the_moment_before() -> None:
    of = job()
    ahead, demand = (ps.play(plan_visits(of, each_use(of), prefetch=how)).iteration_s for how in ("edf", "none"))
    assert ahead < demand


@pytest.mark.parametrize(
    "visits, modes, message",
    [
        ([Visit(0, 0, 8)], {}, r"mine: chunk 1 is used in moment 1, which none of its visits contains"),
        ([Visit(9, 0, 0)], {}, r"mine: Visit\(chunk=9, first=0, last=0\): there is no such chunk; chunks are 0 to 3"),
        ([Visit(0, 3, 2)], {}, r"Visit\(chunk=0, first=3, last=2\) is not within the moments 0 to 8"),
        ([Visit(0, 0, 9)], {}, r"Visit\(chunk=0, first=0, last=9\) is not within the moments 0 to 8"),
        ([Visit(0, 0, 8)], {"pinned": [0]}, r"Visit\(chunk=0, .*\): the chunk is pinned, so it has no visits"),
        ([], {"pinned": [7]}, r"pinned chunk 7: there is no such chunk; chunks are 0 to 3"),
        ([], {"prefetch": "two"}, r"prefetch='two' is not \"none\", \"edf\" or a whole number from 1"),
        ([], {"prefetch": 0}, r"prefetch=0 is not"),
        ([], {"prefetch": True}, r"prefetch=True is not"),
        ([], {"adam": "EDF"}, r"adam='EDF' is not \"after-backward\", \"fifo\" or \"edf\""),
        ([], {"pinned": [0], "streamed": [0]}, r"chunk 0 is pinned and streamed"),
    ],
)
def test_what_is_wrong_is_named(visits: list[Visit], modes: dict[str, Any], message: str) -> None:
    of = job()
    with pytest.raises(CannotPlan, match=message):
        plan_visits(of, visits, **modes)


def test_visits_that_do_not_fit_say_what_they_need() -> None:
    w = chain_workload(LAYERS, 256 * MIB)  # a layer is 512 MiB
    of = Job("mine", w, ps.machine("rtx4090", gpu_memory="2.2GB"), Settings(update="eager", clip=False))
    one = plan_visits(of, each_use(of))
    assert one.check() is not None
    with pytest.raises(
        DoesNotFit, match=r"mine does not fit: gpu needs .*moment \d+ .*the chunks that visit the GPU"
    ) as short:
        plan_visits(of, [Visit(c, 0, 8) for c in of.moving])
    assert short.value.needed_bytes > short.value.available_bytes


def test_what_never_gets_a_gradient_cannot_be_pinned_and_what_is_small_is_there_anyway() -> None:
    w = ps.preset("gpt2", batch=1, seq=128, lora=Adapter(rank=8))
    of = Job("mine", w, ps.machine("rtx4090"), Settings())
    frozen = next(c for c in of.moving if not of.uses.updated(c))
    with pytest.raises(CannotPlan, match=rf"chunk {frozen} gets no gradient, so it has no states to pin or stream"):
        plan_visits(of, each_use(of, but=[frozen]), pinned=[frozen])
    small = min(of.small)
    with pytest.raises(CannotPlan, match=r"the chunk is small and always on the GPU"):
        plan_visits(of, [*each_use(of), Visit(small, 0, 0)])


def test_a_visit_ends_with_the_last_gradient_of_its_chunk() -> None:
    """What lies in the working list then is nowhere else."""
    of = job()
    for streamed in ([], [3]):
        plain = plan_visits(of, each_use(of), streamed=streamed)
        longer = plan_visits(of, [*each_use(of), Visit(3, 4, 8), Visit(3, 7, 8)], streamed=streamed)
        longer.check()
        assert longer.steps == plain.steps


def test_the_orders_of_the_job_s_point_hold_unless_others_are_asked_for() -> None:
    of, asked = job(), Point(prefetch="none", adam="after-backward")
    by_point = Job("mine", of.workload, of.machine, of.settings, asked)
    want = plan_visits(of, each_use(of), prefetch="none", adam="after-backward")
    assert plan_visits(by_point, each_use(of)).steps == want.steps != plan_visits(of, each_use(of)).steps
