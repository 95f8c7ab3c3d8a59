"""Tables of plans by moment, worked out by hand. No model and no torch takes part."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

import executor
from executor.session.timetable import Timetable
from pstar_sim.catalog.loader import load_machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Kind, Place, Queue
from pstar_sim.errors import PlanError
from pstar_sim.policy.registry import find_policy
from pstar_sim.testing import chain_workload
from pstar_sim.units import MIB
from pstar_sim.workload.workload import Use, UseKind, Workload

PURE = ("cursor", "refusals", "timetable")  # files of executor/session that know no torch


def plan_of(policy: str, w: Workload) -> Plan:
    machine = load_machine("virtual", gpu_memory=200 * MIB)
    return find_policy(policy)(w, machine, Settings(update="step", clip=False, chunk_bytes=2 * MIB))


def chain(micro_batches: int = 1) -> Workload:
    """Three layers of 2 MiB: F0 F1 F2 B2 B1 B0 in each micro-batch, then the step."""
    return chain_workload(
        3, MIB, forward_s=1.0, tide_bytes=[n * MIB for n in (1, 2, 3, 3, 2, 1, 0)], micro_batches=micro_batches
    )


def test_moments_of_a_chain() -> None:
    table = Timetable(plan_of("zero_offload", chain()))
    assert table.names[:2] == ["begin:layers.0", "begin:layers.1"] and table.names[-2:] == ["grad:layers.0", "step"]
    assert table.peaks == [n * MIB for n in (1, 2, 3, 3, 2, 1, 0)]
    assert table.cut_tide == 0  # the step's, below the first moment's
    assert table.between == [n * MIB for n in (1, 2, 3, 2, 1, 0, 0)]
    assert table.reads == [(0,), (1,), (2,), (2,), (1,), (0,), ()]
    assert table.uses == [[0, 5], [1, 4], [2, 3]]
    assert table.tensors_of == [[0], [1], [2]] and table.trainable == {0, 1, 2}
    assert table.read_in("grad:layers.1") == {1} and table.read_behind("grad:layers.1") == {0}
    assert table.read_in("begin:elsewhere") == table.read_behind("step") == set()
    assert table.following == [*table.names[1:], ""]
    assert table.rows[3] == (table.before[3], table.compute[3], (2,), 3 * MIB, {2}) and table.before[3]


def test_gradients_of_a_chain() -> None:
    table = Timetable(plan_of("zero_offload", chain()))
    assert table.due == [set(), set(), set(), {2}, {1}, {0}, set()]
    assert table.early == [set()] * 7
    assert table.first_complete == 3
    assert [table.final_in(0, t) for t in (0, 1, 2)] == [5, 4, 3]


def test_a_gradient_is_final_once_per_micro_batch() -> None:
    """Moments 0 to 5 and 6 to 11; chunk 2 has all its gradients in B2 of the second."""
    table = Timetable(plan_of("zero_offload", chain(micro_batches=2)))
    assert [table.final_in(m, 2) for m in (0, 5, 6, 11)] == [3, 3, 9, 9]
    assert table.due[3] == table.due[9] == {2}
    assert table.first_complete == 9


def test_a_layer_used_twice_is_due_at_its_last_gradient() -> None:
    """Tensor 2 gets a gradient in B1 too."""
    w = chain()
    w = replace(w, uses=(*w.uses, Use(moment=4, tensor=2, kind=UseKind.GRADIENT)))
    table = Timetable(plan_of("zero_offload", w))
    assert table.early[3] == {2} and table.due[3] == set() and table.due[4] == {1, 2}
    assert table.final_in(0, 2) == 4


def test_the_next_use_goes_over_the_border() -> None:
    table = Timetable(plan_of("zero_offload", chain()))
    assert [table.until_use(0, at) for at in (-1, 0, 4, 5, 6)] == [1, 5, 1, 2, 1]
    assert table.next_of_name("begin:layers.0", 1) == 0 and table.next_of_name("grad:layers.2", 1) == 3
    assert table.next_of_name("begin:elsewhere", 0) is None


@pytest.mark.parametrize("policy", ["zero_offload", "tide", "patrickstar", "all_on_gpu"])
def test_each_compute_step_is_in_one_row(policy: str) -> None:
    plan = plan_of(policy, chain(micro_batches=2))
    table = Timetable(plan)
    rows = [i for m, i in enumerate(table.compute) for i in (*table.before[m], i)] + table.tail
    assert rows == [i for i, step in enumerate(plan.steps) if step.queue is Queue.COMPUTE]
    assert [plan.steps[i].moment for i in table.compute] == list(range(len(table.names)))
    assert all(plan.steps[i].kind is Kind.COMPUTE for i in table.compute)
    assert not table.on_demand_only and table.sums == []


def test_what_cannot_leave_the_gpu() -> None:
    """zero_offload: masters are on the host, so nothing. all_on_gpu: all 14 bytes of each of 3 * 2**20 parameters."""
    assert Timetable(plan_of("zero_offload", chain())).permanent_bytes == 0
    table = Timetable(plan_of("all_on_gpu", chain()))
    assert table.permanent_bytes == 14 * 3 * MIB
    assert all(place is Place.GPU for place, _, _ in table.cut)


def test_a_plan_without_steps_is_on_demand() -> None:
    table = Timetable(replace(plan_of("zero_offload", chain()), steps=()))
    assert table.on_demand_only and table.compute == table.before == table.tail == []


def test_compute_steps_out_of_order_are_refused() -> None:
    plan = plan_of("zero_offload", chain())
    moments = [i for i, step in enumerate(plan.steps) if step.kind is Kind.COMPUTE]
    steps = list(plan.steps)
    steps[moments[0]], steps[moments[1]] = steps[moments[1]], steps[moments[0]]
    with pytest.raises(PlanError, match="is of moment 1, not 0"):
        Timetable(replace(plan, steps=tuple(steps)))
    without_last = tuple(step for i, step in enumerate(plan.steps) if i != moments[-1])
    with pytest.raises(PlanError, match="compute steps for 6 of 7 moments"):
        Timetable(replace(plan, steps=without_last))


@pytest.mark.parametrize("name", PURE)
def test_what_decides_knows_no_torch(name: str) -> None:
    """Nor any file of the executor that does."""
    pure = {f"executor.session.{other}" for other in PURE}
    text = (Path(executor.__file__).parent / "session" / f"{name}.py").read_text()
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not [n for n in names if n.split(".")[0] in ("torch", "executor") and n not in pure]
