"""Updates in parts: text, elements, seconds by hand, and each way of writing parts that the checker refuses."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from drawn import LITTLE_EFFORT
from msgspec import structs

from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Plan, Settings, load_plan, steps_from_text
from pstar_sim.core.step import Kind, Part, Queue, Ref, Step, from_text, to_text
from pstar_sim.errors import CannotPlan, DoesNotFit, PlanError
from pstar_sim.policy.passes.parts import in_parts, parts_of
from pstar_sim.policy.registry import built_in, find_policy
from pstar_sim.sim.play import play
from pstar_sim.testing import (
    chain_workload,
    random_machine,
    random_ranks,
    random_settings,
    random_workload,
    round_machine,
)
from pstar_sim.workload.presets import preset

ONE = 2**20  # parameters of a layer that is copied in 2 s and updated in 1 s


def chain(layers: int = 1, parts: int = 4) -> Plan:
    """Each layer is a chunk that the CPU updates in parts."""
    w = chain_workload(layers, ONE, forward_s=1.0)
    plan = find_policy("tide:pins=0")(w, round_machine(), Settings(update="eager", clip=False))
    counts = {c.index: parts for c in plan.layout.chunks} if parts > 1 else {}
    return replace(in_parts(plan, counts), predictions={})


def test_a_part_is_read_back() -> None:
    step = Step(id=3, queue=Queue.ADAM, kind=Kind.CPU_UPDATE, chunk=1, moment=2, part=Part(0, 8), bytes=28)
    assert to_text(step) == "3 adam cpu_adam chunk=1 moment=2 part=0/8 bytes=28"
    assert from_text(to_text(step)) == step
    for wrong in ("8/8", "0/1", "3", "a/b", "-1/4"):
        with pytest.raises(PlanError, match=re.escape(wrong)):
            from_text(f"3 adam cpu_adam chunk=1 part={wrong}")


@pytest.mark.parametrize("ranks", [1, 3])
def test_parts_share_out_all_elements_in_order(ranks: int) -> None:
    layout = build_layout(chain_workload(1, 1000), ranks=ranks)
    for count in (2, 3, 7):
        ends = [layout.part_range(0, Part(n, count)) for n in range(count)]
        assert [first for first, _ in ends] == [0, *(end for _, end in ends[:-1])]
        assert ends[-1][1] == layout.slice_numel(0)
        assert all(first % 64 == 0 for first, _ in ends)
        size = layout.payload_bytes(0, "param")
        assert sum(layout.part_bytes(0, Part(n, count), size) for n in range(count)) == size


def test_down_adam_and_up_overlap() -> None:
    """Forward 1 s and backward 2 s; then the gradient goes down in 2 s, Adam takes 1 s, the parameters come up in 2 s:
    8 s. In four parts Adam keeps pace with the copy down, and the copy up begins when the list on the gpu is free,
    2 s after the backward: 7 s."""
    assert play(chain(parts=1)).iteration_s == pytest.approx(8.0)
    assert play(chain(parts=4)).iteration_s == pytest.approx(7.0)
    assert chain(parts=4).moved_bytes == chain(parts=1).moved_bytes


def test_a_file_with_parts_is_read_and_proved(tmp_path_factory: pytest.TempPathFactory) -> None:
    plan = chain(layers=3)
    path = tmp_path_factory.mktemp("parts") / "plan.json"
    plan.save(path)
    again = load_plan(path)
    assert again.steps == plan.steps == steps_from_text(plan.to_text())
    assert again.check().steps == len(plan.steps)


def without(plan: Plan, chosen: Callable[[Step], bool], change: Callable[[Step], Step | None]) -> Plan:
    """The plan with the first step that is chosen changed, or left out."""
    found = next(step for step in plan.steps if chosen(step))
    changed = change(found)
    steps = [changed if step is found else step for step in plan.steps]
    return replace(plan, steps=tuple(step for step in steps if step is not None))


def part(kind: Kind, number: int) -> Callable[[Step], bool]:
    return lambda step: step.kind is kind and step.part is not None and step.part.number == number


def swapped(plan: Plan, kind: Kind) -> Plan:
    """The first two parts in each other's place."""
    one, two = (next(s for s in plan.steps if part(kind, n)(s)) for n in (0, 1))
    new = {one.id: structs.replace(two, id=one.id), two.id: structs.replace(one, id=two.id)}
    return replace(plan, steps=tuple(new.get(s.id, s) for s in plan.steps))


WRONG: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "a part is missing": (
        lambda plan: without(
            plan,
            part(Kind.CPU_UPDATE, 1),
            lambda s: structs.replace(s, queue=Queue.ADAM, part=Part(2, 4), bytes=s.bytes),
        ),
        "comes where part 1/4 is missing",
    ),
    "a part comes twice": (
        lambda plan: without(plan, part(Kind.FETCH, 3), lambda s: structs.replace(s, part=Part(2, 4))),
        "comes where part 3/4 is missing",
    ),
    "parts out of order": (lambda plan: swapped(plan, Kind.CPU_UPDATE), "comes where part 0/4 is missing"),
    "another number of parts": (
        lambda plan: without(
            plan, part(Kind.FETCH, 0), lambda s: structs.replace(s, part=Part(0, 2), bytes=2 * s.bytes)
        ),
        "is one of",
    ),
    "bytes of another part": (
        lambda plan: without(plan, part(Kind.WRITEBACK, 1), lambda s: structs.replace(s, bytes=s.bytes // 2)),
        "the payload has",
    ),
    "an adam before its gradient": (
        lambda plan: without(plan, part(Kind.CPU_UPDATE, 2), lambda s: structs.replace(s, after=())),
        "cpu_adam chunk 0 part 2/4",
    ),
    "a fetch before its adam": (
        lambda plan: without(plan, part(Kind.FETCH, 3), lambda s: structs.replace(s, after=())),
        "nothing makes step",
    ),
    "a fetch behind the adam of the part before": (
        lambda plan: without(
            plan, part(Kind.FETCH, 3), lambda s: structs.replace(s, after=tuple(Ref(r.id - 1, r.back) for r in s.after))
        ),
        "nothing makes step",
    ),
    "one part of an update in one piece": (
        lambda plan: replace(
            plan,
            steps=tuple(
                structs.replace(s, part=None, bytes=4 * s.bytes) if s.kind is Kind.CPU_UPDATE and s.completes else s
                for s in plan.steps
            ),
        ),
        "part 3 is missing",
    ),
    "a drop in parts": (
        lambda plan: without(plan, lambda s: s.kind is Kind.DROP, lambda s: structs.replace(s, part=Part(0, 4))),
        "can be parts",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_written_wrongly_is_refused(name: str) -> None:
    wrong, message = WRONG[name]
    plan = chain()
    plan.check()
    with pytest.raises(PlanError, match=re.escape(message)):
        wrong(plan).check()


def test_a_drop_among_the_parts_of_the_copy_is_refused() -> None:
    plan = chain()
    steps = list(plan.steps)
    drop = next(s for s in steps if s.kind is Kind.DROP)
    steps.remove(drop)
    steps.insert(steps.index(next(s for s in steps if part(Kind.WRITEBACK, 2)(s))), drop)
    with pytest.raises(PlanError, match=r"which is not there|gives up"):
        replace(plan, steps=tuple(steps)).check()


def test_random_plans_in_parts_are_proved() -> None:
    """Policies, ranks, micro-batches and numbers of parts at random; every plan stays correct and within its budgets,
    moves the same bytes, and waits for parts where it waited for the whole."""
    proved = 0
    for number in range(110):
        rng = random.Random(f"parts {number}")
        w = random_workload(rng)
        machine = random_ranks(rng, random_machine(rng, w), rng.choice((1, 1, 2, 4)))
        policy = built_in()[rng.choice(("tide", "static_partition", "optimal", "l2l", "zero_offload", "patrickstar"))]
        try:
            plan = policy(w, machine, replace(random_settings(rng), effort=LITTLE_EFFORT))
        except (DoesNotFit, CannotPlan):
            continue
        counts = {c.index: rng.choice((2, 3, 5)) for c in plan.layout.chunks if rng.random() < 0.7}
        parted = replace(in_parts(plan, counts), predictions={})
        if parted.steps == plan.steps:
            continue
        assert parted.check().steps == len(parted.steps) > len(plan.steps)
        assert parted.moved_bytes == plan.moved_bytes
        proved += 1
    assert proved >= 20


def test_large_chunks_alone_are_updated_in_parts() -> None:
    """The two vocabulary matrices of Llama-3-8B, 525 M parameters each beside chunks of 218 M; no chunk of GPT-2."""
    llama = build_layout(preset("llama-3-8b", batch=1, seq=128))
    names = {
        c: preset("llama-3-8b", batch=1, seq=128).tensors[llama.chunks[c].slots[0].tensor].name for c in parts_of(llama)
    }
    assert sorted(names.values()) == ["lm_head.weight", "model.embed_tokens.weight"]
    assert set(parts_of(llama).values()) == {2}
