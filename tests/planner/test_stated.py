"""What a plan file states is computed again by the check, or named as not checked: a false figure never passes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from changed import put
from msgspec import structs

import pstar_sim as ps
from pstar_sim.catalog.machine import Machine
from pstar_sim.cli import main
from pstar_sim.core import plan as core
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Plan, Resident
from pstar_sim.core.step import Place
from pstar_sim.cost import VERSION
from pstar_sim.errors import FalseFigures, PlanError, TraceError
from pstar_sim.planner.compare import compare
from pstar_sim.planner.stated import examine
from pstar_sim.testing import chain_workload
from pstar_sim.units import MIB
from pstar_sim.workload.orders import Order
from pstar_sim.workload.trace import load_trace, save_trace
from pstar_sim.workload.workload import Phase, Workload, repeat_micro_batch

Values = dict[str, Any]


@pytest.fixture(scope="module")
def machine() -> Machine:
    return ps.machine("v100-32", gpu_memory="1.1GB", host_memory="20GB")


@pytest.fixture(scope="module")
def workload() -> Workload:
    return replace(chain_workload(6, 8 * MIB, tide_bytes=MIB, dtype="fp16", micro_batches=2, forward_s=0.01), batch=4)


@pytest.fixture(scope="module")
def written(machine: Machine, workload: Workload, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stated") / "plan.json"
    compare(workload, machine, policies=["tide"], barrier_cost=True)["tide"].save(path)
    return path


@pytest.fixture
def values(written: Path) -> Values:
    values: Values = json.loads(written.read_text())
    return values


def saved(values: Values, folder: Path) -> Path:
    path = folder / "edited.json"
    path.write_text(json.dumps(values))
    return path


# What a plan is for.


def test_a_plan_is_for_its_batch_its_sequence_and_every_byte_of_its_tide(written: Path, workload: Workload) -> None:
    plan = ps.load_plan(written)
    plan.check(workload, plan.machine)
    # Recorded again, a job has other durations and is the same job; the order of its uses says nothing.
    plan.check(replace(workload, uses=workload.uses[::-1]))
    tenth = tuple(
        replace(m, peak_bytes=m.peak_bytes // 10, start_bytes=m.start_bytes // 10, end_bytes=m.end_bytes // 10)
        for m in workload.moments
    )
    one = (*workload.moments[:3], replace(workload.moments[3], flops=1), *workload.moments[4:])
    peak = (replace(workload.moments[0], peak_bytes=workload.moments[0].peak_bytes + 1), *workload.moments[1:])
    for other, said in (
        (replace(workload, batch=32), "made for batch 4, not 32"),
        (replace(workload, sequence=9), "made for sequence 1, not 9"),
        (
            replace(workload, moments=tenth),
            r"with (start|peak|end)_bytes \d+, not \d+, in moment \d+ \(.*\); \d+ of 25 mom",
        ),
        (replace(workload, moments=peak), "with peak_bytes .*, not .*, in moment 0 .*; 1 of 25 moments differ"),
        (replace(workload, moments=one), "with flops .* in moment 3 "),
        (replace(workload, uses=workload.uses[1:]), "or in another order"),
    ):
        with pytest.raises(PlanError, match=said):
            plan.check(other)
        with pytest.raises(PlanError, match=said):
            core.load_plan(written).check(other)


def test_stored_peaks_divided_by_ten_are_refused(values: Values, workload: Workload, tmp_path: Path) -> None:
    """The other way round: the file was edited, the job is what it was."""
    for name in ("start_bytes", "peak_bytes", "end_bytes"):
        row = values["workload"]["moments"][name]
        values["workload"]["moments"][name] = [size // 10 for size in row]
    with pytest.raises(PlanError, match="_bytes"):
        core.load_plan(saved(values, tmp_path)).check(workload)


# Figures.


def multiplied(*where: str, by: float) -> Callable[[Values], None]:
    def change(values: Values) -> None:
        for name in where[:-1]:
            values = values[name]
        values[where[-1]] = type(values[where[-1]])(values[where[-1]] * by)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (multiplied("predictions", "iteration_s", by=0.5), "iteration_s is .* the simulation of its steps gives"),
        (multiplied("predictions", "iteration_s", by=1.00001), "iteration_s is .* the simulation of its steps gives"),
        (multiplied("predictions", "tokens_per_s", by=2), "tokens_per_s is .* the simulation"),
        (put("predictions", "peak_gpu_bytes", value=1), "peak_gpu_bytes is 1 in the plan, but its steps hold"),
        (put("predictions", "peak_host_bytes", value=1), "peak_host_bytes is 1 in the plan, but its steps hold"),
        (multiplied("predictions", "peak_gpu_bytes", by=9), "peak_gpu_bytes is .* but its steps hold"),
        (multiplied("predictions", "h2d_bytes", by=1.5), "h2d_bytes is .* but its steps move"),
        (multiplied("predictions", "d2h_bytes", by=0), "d2h_bytes is 0 in the plan, but its steps move"),
        (multiplied("predictions", "lower_bound_s", by=0.9), "lower_bound_s is .* but the joint LP"),
        (put("predictions", "gap", value=0.0), "gap is 0 in the plan, but"),
        (put("predictions", "barrier_cost_s", value=-1.0), "barrier_cost_s is -1 in the plan"),
        (put("predictions", "expected_error", value=-0.1), "expected_error is -0.1 in the plan; it is a share"),
        (put("choices", "confidence", value={"compute": "calibrated"}), "confidence is .* but by its machine it is"),
        (put("choices", "certificate", value={"bound": None}), "certificate.bound is None in the plan, but"),
        (multiplied("gpu_budget_bytes", by=100), "may use .* of gpu memory but machine 'v100-32' has"),
        (multiplied("host_budget_bytes", by=100), "may use .* of host memory but machine 'v100-32' has"),
        (put("nvme_budget_bytes", value=5), "may use 5 B of nvme memory but machine 'v100-32' has 0 B"),
        (
            lambda v: [r["gpu"].update(usable_bytes=r["gpu"]["usable_bytes"] - 1) for r in v["machine"]["ranks"]],
            "of gpu memory but",
        ),
        (lambda v: v["machine"]["host"].update(memory_bytes=10**10), "of host memory but machine"),
        (lambda v: v["machine"]["host"].update(measured=not v["machine"]["host"]["measured"]), "confidence is"),
        (lambda v: [r["link"].update(h2d_bytes_per_s=1e8) for r in v["machine"]["ranks"]], "iteration_s is"),
        (lambda v: v["workload"].update(batch=5), "tokens_per_s is"),
        (lambda v: v["workload"]["tensors"]["bytes"].__setitem__(0, 7), r"tensors\[0\].bytes is 7; shape"),
    ],
)
def test_a_false_figure_is_refused(
    values: Values, change: Callable[[Values], None], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(values)
    path = saved(values, tmp_path)
    with pytest.raises(PlanError, match=said):
        ps.load_plan(path).check()
    assert main(["check", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_each_false_figure_is_a_line(values: Values, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values["predictions"] |= {"iteration_s": values["predictions"]["iteration_s"] / 2, "h2d_bytes": 7.0, "gap": 0.5}
    path = saved(values, tmp_path)
    assert main(["check", str(path)]) == 2
    said = capsys.readouterr()
    lines = [line.split()[1] for line in said.out.splitlines() if line.startswith("false: ")]
    assert lines == ["h2d_bytes", "iteration_s", "gap"]
    assert said.err.count("\n") == 1 and said.err.endswith("; and 2 more of its figures are false\n")
    assert main(["check", "--json", str(path)]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ok"], len(answer["false"])) == (False, 3)
    with pytest.raises(FalseFigures) as caught:
        ps.load_plan(path).check()
    assert len(caught.value.false) == 3
    # What only runs needs no seconds: a run refuses the false bytes alone.
    with pytest.raises(FalseFigures) as caught:
        core.load_plan(path).check()
    assert len(caught.value.false) == 1


def test_all_that_a_file_states_is_checked_or_named(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ps.load_plan(written)
    for report in (plan.check(), core.load_plan(written).check()):
        named = {name for line in report.not_checked for name in line.split(":")[0].split(", ")}
        assert {*plan.predictions, *plan.choices} <= {*report.figures, *named}
        assert not set(report.figures) & named
        assert {"the workload (moments", "the machine (memory"} <= named
    assert {"barrier_cost_s", "capacity"} <= {
        name for line in plan.check().not_checked for name in line.split(":")[0].split(", ")
    }
    held = plan.check(plan.workload, plan.machine).not_checked
    assert not any(line.startswith(("the workload", "the machine")) for line in held)
    assert main(["check", str(written)]) == 0
    said = capsys.readouterr().out
    assert "as stated: " in said and "iteration_s" in said.split("as stated: ")[1].splitlines()[0]
    assert "not checked: barrier_cost_s: of another plan, without the barrier" in said


def test_an_expected_error_of_another_validation_is_named(values: Values, tmp_path: Path) -> None:
    """Rows are added to validation, so that a plan of yesterday states another error."""
    now = values["predictions"]["expected_error"]
    values["predictions"]["expected_error"] = now + 0.0257
    with pytest.raises(FalseFigures, match=f"expected_error is .* in the plan, but validation finds {now:.9g}"):
        ps.load_plan(saved(values, tmp_path)).check()
    values["choices"]["validation"] = "of yesterday"
    path = saved(values, tmp_path)
    report = ps.load_plan(path).check()
    assert not {"expected_error", "validation"} & set(report.figures)
    assert {
        f"expected_error: of a validation that this pstar-sim does not have; its own finds {now:.9g}",
        "validation: this pstar-sim has no validation with this digest",
    } <= set(report.not_checked)
    assert main(["check", str(path)]) == main(["explain", str(path)]) == 0


@pytest.mark.parametrize("nonsense", ["NaN", "Infinity", '"small"'])
def test_an_expected_error_that_is_no_number_is_refused(values: Values, nonsense: str, tmp_path: Path) -> None:
    values["predictions"]["expected_error"] = "HERE"
    path = tmp_path / "nonsense.json"
    path.write_text(json.dumps(values).replace('"HERE"', nonsense))
    with pytest.raises(PlanError, match="expected_error"):
        ps.load_plan(path).check()


def test_a_figure_that_nobody_knows_is_named(values: Values, tmp_path: Path) -> None:
    values["predictions"]["joules"] = 3.0
    assert any(line.startswith("joules: ") for line in ps.load_plan(saved(values, tmp_path)).check().not_checked)


@pytest.mark.parametrize(
    "name",
    [
        "iteration_s", "tokens_per_s", "peak_gpu_bytes", "peak_host_bytes", "h2d_bytes", "d2h_bytes", "cost_model",
        "confidence", "certificate",
    ],
)  # fmt: skip
def test_a_figure_that_is_missing_is_named(values: Values, name: str, tmp_path: Path) -> None:
    whole = ps.load_plan(saved(values, tmp_path))
    assert not any("missing" in line for line in whole.check().not_checked)
    del values["predictions" if name in values["predictions"] else "choices"][name]
    path = saved(values, tmp_path)
    for report in (ps.load_plan(path).check(), core.load_plan(path).check()):
        assert f"{name}: missing in the plan" in report.not_checked and name not in report.figures


# Parameters that nobody reads.


def test_parameters_that_no_moment_reads_have_a_place(hand_plan: Callable[..., Plan]) -> None:
    """A third layer in which nothing happens: its parameters have to be somewhere all the same."""
    plan = hand_plan()
    spare = replace(plan.workload.tensors[0], name="spare.weight")
    w = replace(plan.workload, tensors=(*plan.workload.tensors, spare))
    layout = build_layout(w, chunk_bytes=2048)
    more: dict[str, object] = {"workload": w, "layout": layout, "modes": ("cpu", "cpu", "frozen")}
    with pytest.raises(PlanError, match=r"no place holds the current parameters of chunk 2 \('?.*spare.weight"):
        hand_plan(**more).check()
    for place in (Place.HOST, Place.GPU):
        there = plan.initial | {Resident(2, "param", place)}
        hand_plan(**more, initial=there, gpu_budget_bytes=9000, host_budget_bytes=40_000).check()
    # It is there at first, and given up in the first iteration.
    there = plan.initial | {Resident(2, "param", Place.GPU)}
    text = plan.to_text() + "15 d2h drop chunk=2 list=param bytes=2048 after=11\n"
    with pytest.raises(PlanError, match="gives up the only current copy of the parameters"):
        hand_plan(text, **more, initial=there, gpu_budget_bytes=9000).check()


# Order and ranges.


def shuffled(w: Workload, rng: random.Random) -> Workload:
    moments = list(w.moments[:-1])
    rng.shuffle(moments)
    return _forced(w, (*moments, w.moments[-1]))


def _forced(w: Workload, moments: tuple[Any, ...]) -> Workload:
    """What a faulty writer would have: fields set behind the check's back."""
    other = replace(w)
    object.__setattr__(other, "moments", moments)
    return other


def test_moments_shuffled_under_unshuffled_uses_are_refused(workload: Workload, written: Path, tmp_path: Path) -> None:
    """As a trace, its digest right, and in a plan."""
    for seed in range(8):
        bad = shuffled(workload, random.Random(seed))
        save_trace(bad, tmp_path / "t.parquet")
        with pytest.raises(TraceError, match=r"moments\[.*(phase|micro_batch|start_bytes) is"):
            load_trace(tmp_path / "t.parquet")
        plan = core.load_plan(written)
        object.__setattr__(plan, "workload", bad)
        plan.save(tmp_path / "p.json")
        with pytest.raises(PlanError, match=r"moments\[.*(phase|micro_batch|start_bytes) is"):
            ps.load_plan(tmp_path / "p.json")


@pytest.mark.parametrize(
    ("index", "change", "said"),
    [
        (1, {"phase": Phase.BWD}, "'begin:layers.1' does not open a moment of that phase"),
        (1, {"name": "grad:layers.1", "phase": Phase.BWD}, "start_bytes|moment 1 .* is of BWD already"),
        (7, {"name": "begin:layers.5", "phase": Phase.FWD}, "moment 6 .* is of BWD already; a micro-batch has one"),
        (3, {"phase": Phase.ADAM, "name": "x"}, "the optimizer step is the last moment"),
        (3, {"micro_batch": 1}, "micro_batch is 0; micro-batch 1 has begun, and order is depth-first"),
        (3, {"micro_batch": 1, "order": Order.LAYER_MAJOR}, "side by side, each has the same moments"),
        (0, {"micro_batch": 1}, "moments.*micro_batch is .*they go from 0 to 1, in order"),
        (12, {"phase": Phase.BWD, "name": "x"}, "a micro-batch begins with its forward pass"),
        (4, {"start_bytes": 0}, "moment 3 .* ends with .*; the moments are not in their order"),
    ],
)
def test_phases_and_micro_batches_are_in_order(
    workload: Workload, index: int, change: dict[str, Any], said: str
) -> None:
    moments, order = list(workload.moments), change.get("order", workload.order)
    moments[index] = replace(moments[index], **{name: value for name, value in change.items() if name != "order"})
    with pytest.raises(TraceError, match=said):
        replace(workload, moments=tuple(moments), order=order)


def test_uses_are_in_order(workload: Workload) -> None:
    one = chain_workload(2, 1024)
    step, gradient = len(one.moments) - 1, next(u for u in one.uses if u.kind == "gradient")
    for use, said in (
        (replace(one.uses[0], moment=step), "the optimizer step uses no parameter"),
        (replace(gradient, moment=0), "arrives in the backward pass, not in the forward pass"),
        (replace(one.uses[0], moment=-1), "must be indices into their tables"),
        (replace(one.uses[0], tensor=99), "must be indices into their tables"),
    ):
        with pytest.raises(TraceError, match=said):
            replace(one, uses=(*one.uses, use))
    late = tuple(replace(u, moment=3) if u.kind == "read" and u.tensor == gradient.tensor else u for u in one.uses)
    if gradient.moment < 3:
        with pytest.raises(TraceError, match="its gradient arrives before its first read, in moment 3"):
            replace(one, uses=late)
    assert repeat_micro_batch(one, 3).micro_batches == 3


def test_ranges_hold_for_plans_that_were_never_in_a_file(hand_plan: Callable[..., Plan]) -> None:
    plan = hand_plan()
    for change, said in (
        ({"modes": ("cpu",)}, "field 'modes' has 1 entries; the layout has 2 chunks"),
        ({"initial": plan.initial | {Resident(-2, "param", Place.HOST)}}, "there is no chunk -2"),
        ({"initial": plan.initial | {Resident(-1, "nobody's", Place.HOST)}}, "there is no chunk -1"),
        (
            {"steps": (structs.replace(plan.steps[0], id=-1), *plan.steps[1:])},
            "ids are whole numbers from 0|does not have",
        ),
        ({"steps": (structs.replace(plan.steps[0], chunk=7), *plan.steps[1:])}, "needs chunk=, below 2"),
        ({"buffers": (("x", Place.GPU, -5),)}, "field 'buffers.0.' has -5 bytes"),
    ):
        with pytest.raises(PlanError, match=said):
            replace(plan, **change).check()  # type: ignore[arg-type]


# Another cost model.


@pytest.mark.parametrize("version", [0, VERSION - 1, VERSION + 1, True, "1"])
def test_figures_of_another_cost_model_are_to_be_planned_again(values: Values, version: object, tmp_path: Path) -> None:
    values["choices"]["cost_model"] = version
    with pytest.raises(
        FalseFigures, match=f"cost_model is {version!r} in the plan, .* by version {VERSION}; plan again"
    ):
        examine(ps.load_plan(saved(values, tmp_path)))


def test_a_file_without_its_version_is_checked_all_the_same(values: Values, tmp_path: Path) -> None:
    del values["choices"]["cost_model"]
    assert "iteration_s" in examine(ps.load_plan(saved(values, tmp_path))).report.figures
    values["predictions"]["iteration_s"] *= 0.99
    with pytest.raises(FalseFigures, match="iteration_s"):
        examine(ps.load_plan(saved(values, tmp_path)))


def test_a_bound_is_above_zero(values: Values, tmp_path: Path) -> None:
    for wrong in (0.0, -1.0):
        values["predictions"]["lower_bound_s"] = wrong
        with pytest.raises(PlanError, match=r"lower_bound_s is .*; a lower bound is above 0|states no lower_bound_s"):
            examine(ps.load_plan(saved(values, tmp_path)))


@pytest.mark.parametrize("change", [lambda said: said.pop("DRAM"), lambda said: said.update(DRAM="guessed")])
def test_sources_that_leave_an_input_out_or_call_it_otherwise_are_false(
    values: Values, change: Callable[[Values], None], tmp_path: Path
) -> None:
    change(values["choices"]["confidence"])
    with pytest.raises(FalseFigures, match="confidence is"):
        examine(ps.load_plan(saved(values, tmp_path)))
