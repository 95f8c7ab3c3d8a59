"""The file of a plan: exact round trip, and one clear error for each way it can be damaged."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from changed import put

from pstar_sim.core.plan import Plan, Settings, load_plan
from pstar_sim.core.step import Place
from pstar_sim.errors import PlanError
from pstar_sim.testing import chain_workload, random_workload

MakePlan = Callable[..., Plan]


@pytest.fixture
def saved(hand_plan: MakePlan, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    hand_plan(
        buffers=(("staging", Place.GPU, 0),),
        predictions={"iteration_s": 0.1 + 0.2},
        choices={"pins": [0, 2], "why": "by hand"},
    ).save(path)
    return path


def edited(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    return path


def test_everything_survives_the_file(saved: Path, hand_plan: MakePlan):
    plan, read = hand_plan(), load_plan(saved)
    assert read.steps == plan.steps
    assert (read.policy, read.settings, read.modes, read.initial) == ("by hand", Settings(), plan.modes, plan.initial)
    assert (read.gpu_budget_bytes, read.host_budget_bytes) == (4136, 28_672)
    assert read.machine == plan.machine
    assert read.layout == plan.layout
    w, v = plan.workload, read.workload
    assert (v.tensors, v.moments, v.uses, v.optimizer) == (w.tensors, w.moments, w.uses, w.optimizer)
    assert v.fingerprint == w.fingerprint
    assert read.predictions == {"iteration_s": 0.1 + 0.2}  # to the last bit
    assert read.choices == {"pins": [0, 2], "why": "by hand"}
    assert read.buffers == (("staging", Place.GPU, 0),)
    assert read.check().peak_bytes["gpu"] == 4136


def test_saving_what_was_read_gives_the_same_bytes(saved: Path, tmp_path: Path):
    again = tmp_path / "folder" / "again.json"
    again.parent.mkdir()
    load_plan(saved).save(again)
    assert again.read_bytes() == saved.read_bytes()
    assert [p.name for p in again.parent.iterdir()] == ["again.json"]  # no temporary file is left


def test_who_runs_the_iterations_is_kept(hand_plan: MakePlan, tmp_path: Path):
    settings = Settings(loop="step")
    hand_plan(settings=settings).save(tmp_path / "p.json")
    assert load_plan(tmp_path / "p.json").settings == settings


@pytest.mark.parametrize("seed", range(5))
def test_workloads_of_any_kind_survive(seed: int, hand_plan: MakePlan, tmp_path: Path):
    from pstar_sim.core.layout import build_layout

    w = random_workload(seed)
    layout = build_layout(w)
    modes = tuple("frozen" if c.frozen else "cpu" for c in layout.chunks)
    hand_plan(workload=w, layout=layout, modes=modes, initial=frozenset(), steps=()).save(tmp_path / "p.json")
    v = load_plan(tmp_path / "p.json").workload
    assert (v.tensors, v.moments, v.uses) == (w.tensors, w.moments, w.uses)


def test_products_survive(hand_plan: MakePlan, tmp_path: Path):
    w = hand_plan().workload
    first = replace(w.moments[0], flops=150, products=((1, 2, 5, 5), (3, 2, 2, 2)))
    plan = hand_plan(workload=replace(w, moments=(first, *w.moments[1:])))
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").workload.moments == plan.workload.moments


def test_a_step_is_one_line_of_the_file(saved: Path, hand_text: str):
    lines = [line.strip(' ,"') for line in saved.read_text().splitlines()]
    assert all(line in lines for line in hand_text.splitlines())


def test_a_value_without_json_form_is_refused_and_nothing_is_written(hand_plan: MakePlan, tmp_path: Path):
    with pytest.raises(PlanError, match="plan field 'choices' cannot be written"):
        hand_plan(choices={"what": object()}).save(tmp_path / "p.json")
    with pytest.raises(PlanError, match="plan field 'predictions' cannot be written"):
        hand_plan(predictions={"gap": float("nan")}).save(tmp_path / "p.json")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(PlanError, match=r"none\.json: cannot be read: No such file"):
        load_plan(tmp_path / "none.json")


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_named(saved: Path, keep: float):
    text = saved.read_text()
    saved.write_text(text[: int(len(text) * keep)])
    with pytest.raises(PlanError, match=r"plan\.json: is truncated or not JSON: line \d+, column \d+"):
        load_plan(saved)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not a pstar-sim plan"),
        (b"hello", "is not a pstar-sim plan"),
        (b"\xff\xfe\x00", "is not a pstar-sim plan .it is not text"),
        (b"[1, 2]", "is not a pstar-sim plan"),
        (b'{"format": "something else"}', "is not a pstar-sim plan"),
        (b'{"format": "pstar-sim plan", "version": "1"}', "field 'version' is '1'"),
        (b'{"format": "pstar-sim plan", "version": 99}', r"newer pstar-sim \(plan version 99; this one reads 2\)"),
        (
            b'{"format": "pstar-sim plan", "version": 1}',
            r"earlier .*version 1; this one reads 2\); make the plan again",
        ),
        (b'{"format": "pstar-sim plan", "version": 2}', "field 'policy' is missing"),
        (b'{"choices": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"gpu_budget_bytes": 1, "gpu_budget_bytes": 2}', "field 'gpu_budget_bytes' is given twice"),
        (b'{"gpu_budget_bytes": ' + b"9" * 5000 + b"}", "a number has too many digits"),
    ],
)
def test_a_foreign_or_newer_file_is_named(tmp_path: Path, content: bytes, said: str):
    path = tmp_path / "odd.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=said) as caught:
        load_plan(path)
    assert str(path) in str(caught.value)


def again(field: str) -> Callable[[dict[str, Any]], None]:
    """The last row of a field once more."""

    def change(values: Any) -> None:
        values[field] += values[field][-1:] or [["room", "gpu", 4]] * 2

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (again("initial"), r"field 'initial\[\d+\]' is .* of chunk \d+ on the \w+ a second time"),
        (again("buffers"), r"field 'buffers\[\d+\]' is '.*' on the \w+ a second time"),
        (put("policy", value=3), "field 'policy' is 3; it must be a text"),
        (put("colour", value=3), "field 'colour' is not known"),
        (put("gpu_budget_bytes", value=-5), "field 'gpu_budget_bytes' is -5; it must be positive"),
        (put("gpu_budget_bytes", value=1.5), "field 'gpu_budget_bytes' is 1.5; it must be a whole number"),
        (
            put("gpu_budget_bytes", value=10**30),
            "field 'gpu_budget_bytes' is 10*; it must be a whole number of at most 64",
        ),
        (put("workload", "moments", "peak_bytes", 1, value=2**63), "peak_bytes.1.' is 9223372036854775808; it must be"),
        (
            put("predictions", "iteration_s", value=10**400),
            "field 'predictions.iteration_s' is 10*...; it must be a fin",
        ),
        (
            put("workload", "moments", "peak_bytes", 1, value=2**62),
            r"moments.1..peak_bytes is 4611686018427387904; more",
        ),
        (put("layout", "ranks", value=0), "field 'layout.ranks' is 0; it must divide the machine's 1 ranks"),
        (put("settings", "update", value="never"), "field 'settings': update must be .*, not 'never'"),
        (put("settings", "clip", value=1), "field 'settings.clip' is 1; it must be true or false"),
        (put("settings", "speed", value=1), "field 'settings.speed' is not known"),
        (put("machine", "host", "cores", value="two"), "field 'machine.host.cores' is \"two\"; it must be a whole"),
        (put("machine", "ranks", value=[]), r"field 'machine': machine 'toy': ranks = \(\)"),
        (put("workload", "batch", value=0), "workload 'chain-2x1024': batch is 0"),
        (put("workload", "moments", "flops", value=[1]), "field 'workload.moments': its columns differ in length"),
        (put("workload", "moments", "phase", 0, value="SLEEP"), "field 'workload.moments.phase.0.' is \"SLEEP\""),
        (put("workload", "tensors", "bytes", 1, value="big"), "field 'workload.tensors.bytes.1.' is \"big\""),
        (put("workload", "tensors", "shape", 0, value=[7]), r"tensors\[0\].bytes is 2048; shape \[7\] of bf16 has 14"),
        (put("layout", "chunks", 0, "slots", value=[]), "field 'layout' has no place for tensor 'layers.0.weight0'"),
        (
            put("layout", "chunks", 0, "slots", 0, 0, value=1),
            "names tensor 1, which is unknown, tied or placed|does not",
        ),
        (put("layout", "chunks", 0, "numel", value=10), "overlaps another or the chunk's end"),
        (put("layout", "state_bytes", value=[]), "field 'layout.state_bytes' differs"),
        (put("modes", value=["cpu"]), "field 'modes' has 1 entries; the layout has 2 chunks"),
        (put("modes", 0, value="frozen"), "field 'modes.0.' is 'frozen'; chunk 0 is trainable"),
        (put("initial", 0, value=[9, "param", "host"]), "initial: there is no chunk 9"),
        (put("initial", 0, value=[0, "param", "moon"]), "field 'initial.0..2.' is \"moon\"; it must be one of gpu"),
        (put("buffers", value=[["staging", "gpu", -1]]), "field 'buffers.0.' has -1 bytes"),
        (put("predictions", "iteration_s", value="soon"), "field 'predictions.iteration_s' is \"soon\""),
        (put("steps", 0, value="0 h2d jump"), r"steps\[0\].*: step '0 h2d jump': 'jump' is not a kind of step"),
        (put("steps", 2, value="2 compute compute moment=77"), r"steps\[2\] .*: the workload has 5 moments"),
        (put("steps", 0, value="0 h2d fetch chunk=5 list=param"), r"steps\[0\] .*: the layout has 2 chunks"),
        (put("steps", 0, value="0 h2d fetch list=param"), r"steps\[0\] .*: a fetch step needs chunk="),
        (put("steps", 0, value="0 h2d fetch chunk=0 list=x"), r"steps\[0\] .*: chunk 0 has no list 'x'"),
    ],
)
def test_a_file_edited_into_nonsense_names_the_field(
    saved: Path, change: Callable[[dict[str, Any]], object], said: str
):
    edited(saved, change)
    with pytest.raises(PlanError, match=said) as caught:
        load_plan(saved)
    assert str(caught.value).startswith(str(saved))


def test_a_number_too_large_for_a_float_is_refused(saved: Path):
    saved.write_text(saved.read_text().replace('"predictions": {', '"predictions": {"gap": 1e400, '))
    with pytest.raises(PlanError, match=r"field 'predictions\.gap' is Infinity; it must be a finite number"):
        load_plan(saved)


def test_a_missing_field_is_named_wherever_it_is(saved: Path):
    values = json.loads(saved.read_text())
    for where in (["steps"], ["machine", "host"], ["workload", "uses", "kind"], ["layout", "chunks", 0, "numel"]):
        damaged = json.loads(saved.read_text())
        inner = damaged
        for name in where[:-1]:
            inner = inner[name]
        del inner[where[-1]]
        saved.write_text(json.dumps(damaged))
        with pytest.raises(PlanError, match=f"{where[-1]}'? is missing"):
            load_plan(saved)
        saved.write_text(json.dumps(values))


def test_a_bad_line_is_named_by_its_number(saved: Path):
    text = saved.read_text().replace("2 compute compute moment=0", "2 compute sleep moment=0")
    number = next(i for i, line in enumerate(text.splitlines(), 1) if "sleep" in line)
    saved.write_text(text)
    with pytest.raises(PlanError, match=rf"line {number} \(steps\[2\]\): .*'sleep' is not a kind"):
        load_plan(saved)


def test_a_plan_edited_by_hand_so_that_it_reads_but_is_wrong_fails_the_check(saved: Path):
    saved.write_text(saved.read_text().replace(" after=7,12", " after=12"))
    with pytest.raises(PlanError, match=r"step 13 \(cpu_adam chunk 1\)"):
        load_plan(saved).check()


def test_a_plan_is_held_against_the_workload_and_machine_it_is_used_on(hand_plan: MakePlan):
    plan = hand_plan()
    w, m = plan.workload, plan.machine
    assert plan.check(w, m).steps == 15
    slower = replace(m, host=replace(m.host, reserved_bytes=999_000))
    for workload, machine, said in [
        (chain_workload(2, 1040), None, "was made for model 'chain-2x1024' .* not 'chain-2x1040'"),
        (chain_workload(2, 1024, dtype="fp32"), None, "was made for bf16, not fp32"),
        (chain_workload(2, 1024, micro_batches=2), None, "was made for 1 micro-batches per iteration, not 2"),
        (chain_workload(2, 1024, checkpointing=True), None, "was made for 5 moments .* not 7"),
        (replace(w, batch=7), None, "was made for batch 1, not 7"),
        (replace(w, sequence=7), None, "was made for sequence 1, not 7"),
        (None, replace(m, name="other"), "was made for machine 'toy', not 'other'"),
        (None, slower, "may use 28.67 kB of host memory but machine 'toy' has 1 kB to give"),
    ]:
        with pytest.raises(PlanError, match=said):
            plan.check(workload, machine)


def test_it_describes_itself(hand_plan: MakePlan):
    text = hand_plan(predictions={"iteration_s": 0.5}).describe()
    assert "by hand: chain-2x1024, bf16, batch 1 x 1, sequence 1, checkpointing off, on toy" in text
    assert "Adam runs after the barrier (clip)" in text
    assert "3 fetch, 5 compute, 3 drop, 2 writeback, 2 cpu_adam" in text
    assert "moves 6.144 kB to the gpu and 4.096 kB to the host" in text
    assert "predicted iteration: 500.0 ms" in text
