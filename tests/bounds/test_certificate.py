"""Worked figures with streamed states, and what a certificate says when things go wrong."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from drawn import TIME_TO_SHRINK, Drawn, jobs, planned
from hypothesis import given
from hypothesis import strategies as st

from pstar_sim.bounds import fluid
from pstar_sim.bounds.bounds import lower_bound
from pstar_sim.bounds.certificate import Certifier, agree
from pstar_sim.bounds.fluid import fluid_bound
from pstar_sim.bounds.fluid_facts import FluidFacts
from pstar_sim.bounds.linear import LinearProgram, Unsolved
from pstar_sim.cli import main
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Settings, load_plan
from pstar_sim.cost import cost_of
from pstar_sim.errors import PlanError
from pstar_sim.planner.compare import compare
from pstar_sim.planner.stated import examine
from pstar_sim.policy.registry import policies
from pstar_sim.sim import play
from pstar_sim.testing import chain_workload, random_workload, round_machine
from pstar_sim.units import MIB

EAGER, STEP = Settings(update="eager", clip=False), Settings(update="step", clip=False)
MPARAM = 2**20

pytestmark = TIME_TO_SHRINK

machine = partial(
    round_machine,
    gpu_memory_bytes=2**40,
    host_memory_bytes=2**40,
    h2d_bytes_per_s=1e9,
    d2h_bytes_per_s=1e9,
    hbm_bytes_per_s=1e12,
    adam_params_per_s=1e9,
    dram_bytes_per_s=1e15,
)


def test_streams_by_hand() -> None:
    """4 layers of 1 Mi parameters in bf16: compute 12 s, GPU Adam 1 s a layer, CPU Adam 8 s a layer. No room for states
    beside the chunk of a moment: nothing is pinned (budget 2 MiB). Copies up at 14 MiB/s: 1 s for a layer's 12 MiB of
    states and 2 MiB of parameters. With y Mi streamed: compute 12 + y, adam (4 - y) 8: y = 20/9, T = 12 + 20/9."""
    w = chain_workload(4, MPARAM, forward_s=1.0)
    m = machine(
        gpu_memory_bytes=2 * MIB,
        h2d_bytes_per_s=14 * MIB,
        d2h_bytes_per_s=14 * MIB,
        adam_params_per_s=MPARAM / 8,
        hbm_bytes_per_s=28 * MIB,
    )
    b = lower_bound(w, m, EAGER, build_layout(w))
    # windows: the last chunk's window holds all Adams: T >= span 3 + 8 (4 - y) + copies down and up of 1/7 s each
    meet = (3 + 32 + 2 / 7 - 12) / 9
    assert b.pinned_params == 0
    assert b.seconds == pytest.approx(12 + meet, rel=1e-6)
    assert b.streamed_params / MPARAM == pytest.approx(meet, rel=1e-5)
    assert lower_bound(w, m, EAGER, build_layout(w), stream=False).seconds == pytest.approx(3 + 32 + 2 / 7, rel=1e-6)


def test_slow_links_make_streams_worthless() -> None:
    """The same, but states take 120 s a layer up: what is streamed costs more than its Adam on the CPU (8 s)."""
    w = chain_workload(4, MPARAM, forward_s=1.0)
    m = machine(
        gpu_memory_bytes=2 * MIB,
        h2d_bytes_per_s=MIB / 10,
        d2h_bytes_per_s=MIB,
        adam_params_per_s=MPARAM / 8,
        hbm_bytes_per_s=28 * MIB,
    )
    b = lower_bound(w, m, EAGER, build_layout(w))
    assert (b.binding, b.streamed_params) == ("h2d", 0)


def test_sums_may_visit_the_gpu() -> None:
    """3 micro-batches, 2 layers at 28 s of CPU Adam each, no room for sums on the gpu. With a link that costs nothing
    they visit it and nothing is added on the host: 56 s. With clipping, which has all three added there if they come
    down one by one, the same."""
    w = chain_workload(2, MPARAM, forward_s=1e-3, micro_batches=3)
    m = machine(
        gpu_memory_bytes=2 * MIB,
        h2d_bytes_per_s=1e15,
        d2h_bytes_per_s=1e15,
        adam_params_per_s=MPARAM / 28,
        hbm_bytes_per_s=28 * MIB / 1e9,
    )
    for settings in (EAGER, Settings(update="eager", clip=True)):
        assert lower_bound(w, m, settings, build_layout(w)).terms["adam"] == pytest.approx(56.0, rel=1e-3)


def test_the_fluid_bound_is_no_less_than_the_closed_form_and_no_plan_beats_it(whole: bool) -> None:
    """Random models, machines and settings; all policies."""
    played, examples = 0, 25 if whole else 4

    @hypothesis.settings(max_examples=examples)
    @given(st.integers(1, 4).flatmap(lambda layers: jobs(layers=layers)))
    def holds(job: Drawn) -> None:
        nonlocal played
        certifier = Certifier(*job, lp=True)
        for policy in policies().values():
            plan = planned(policy, job)
            if plan is None or not plan.workload.order.of_loop:  # its bound is another one
                continue
            bound = certifier.of(plan.layout).seconds
            seconds = play(plan).iteration_s
            assert seconds >= bound * (1 - 1e-9), (plan.policy, seconds, bound)
            assert bound >= lower_bound(*job, plan.layout).seconds * (1 - 1e-12)
            played += 1

    holds()
    assert played > 2.4 * examples


def test_a_program_that_does_not_solve_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    w = chain_workload(3, MPARAM, forward_s=1.0)
    m, layout = machine(), build_layout(w)
    closed = lower_bound(w, m, EAGER, layout)
    monkeypatch.setattr(fluid, "MOST_STEPS", 1)
    found = fluid_bound(w, m, EAGER, layout)
    assert (found.seconds, found.method) == (closed.seconds, "joint LP")
    (note,) = found.notes
    assert "did not solve (HiGHS: iteration limit reached); the bound is the joint LP" in note
    result = compare(w, m, policies=["tide"], settings=EAGER, certify=True, barrier_cost=False)
    certificate = result.rows[0].certificate
    assert certificate is not None and (certificate["bound"], certificate["note"]) == ("joint LP", note)


def test_the_proof_holds_for_any_multipliers() -> None:
    """min x + y, x + 2 y >= 3, x <= 1: 2; proved to the last digit, and by the dual, not the value."""
    p = LinearProgram()
    x, y = p.variable(most=1.0), p.variable(most=10.0)
    p.minimise(x + y)
    p.add(x + 2 * y >= 3.0)
    found = p.solve()
    assert found.value == pytest.approx(1.5) and found.proved == pytest.approx(1.5, abs=1e-12)
    p.add(x == 1.0)
    assert p.solve().proved == pytest.approx(2.0, abs=1e-12)
    p.add(y <= 0.5)
    with pytest.raises(Unsolved, match="HiGHS: infeasible"):
        p.solve()


def test_a_plan_carries_its_certificate_and_check_recomputes_it() -> None:
    w = chain_workload(3, MPARAM, forward_s=1.0)
    result = compare(w, machine(), policies=["tide"], settings=EAGER, barrier_cost=False)
    plan = result["tide"].with_predictions()
    said = plan.choices["certificate"]
    assert isinstance(said, dict) and said["bound"] == "joint LP"
    assert "modes cpu, pin and stream" in said["relative_to"]
    assert agree(plan).endswith("as stored")
    assert "which --certify" not in agree(plan, lp=True)
    wrong = replace(plan, predictions={**plan.predictions, "lower_bound_s": 7.0})
    with pytest.raises(PlanError, match=r"lower_bound_s is 7 s in the plan, but the joint LP .* is 9\.0"):
        agree(wrong)
    odd = replace(plan, predictions={**plan.predictions, "gap": 0.5})
    with pytest.raises(PlanError, match=r"^gap is 0\.5 in the plan, but"):
        examine(odd)


def test_fewer_points_are_a_weaker_bound_but_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks have fewer."""
    w = random_workload(11, layers=6, micro_batches=1)
    m = machine(
        gpu_memory_bytes=w.peak_non_model_bytes + w.params * 4,
        h2d_bytes_per_s=1e9,
        d2h_bytes_per_s=1e9,
        adam_params_per_s=3e8,
    )
    layout = build_layout(w)
    coarse = fluid_bound(w, m, EAGER, layout, most_points=4)
    fine = fluid_bound(w, m, EAGER, layout)
    assert coarse.seconds <= fine.seconds * (1 + 1e-6)
    assert fluid.MOST_POINTS > 4
    count = len(layout.chunks)
    monkeypatch.setattr(fluid, "MANY_CHUNKS", 1)
    assert fluid_bound(w, m, EAGER, layout, most_points=4 * count) == coarse
    assert count > 1


def test_fewer_points_keep_the_moments_that_need_most() -> None:
    """Of all moments, the one with the most bytes of tide and chunks read has a point, however few points there are.
    Where such moments are passed over, chunks seem to have room in which they do not fit."""
    m = machine(h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9)
    for seed in range(12):
        w = random_workload(seed, layers=6, micro_batches=1)
        layout = build_layout(w)
        facts = FluidFacts(w, m, layout, cost_of(w, m, layout), dram_bytes_per_s=1e15, most_points=5)
        size = [layout.payload_bytes(c, "param") for c in range(len(layout.chunks))]
        needed = [moment.peak_bytes + sum(size[c] for c in read) for moment, read in zip(w.moments, facts.job.read_in)]
        assert len(facts.points) <= 6 < len(w.moments)
        assert max(needed[point] for point in facts.points) == max(needed)


def test_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """plan --certify, check (joint LP against the stored program, and both), a forged figure, a program that does
    not solve."""
    job = ["--model", "1B", "--batch", "1", "--seq", "512", "--machine", "v100-32", "--update", "eager", "--no-clip"]
    path = tmp_path / "plan.json"
    assert main(["plan", *job, "--policy", "tide", "--certify", "-o", str(path)]) == 0
    assert load_plan(path).choices["certificate"]["bound"] == "fluid LP"  # type: ignore[index]
    capsys.readouterr()
    assert main(["check", str(path)]) == 0
    assert "of the fluid LP, which --certify solves again" in " ".join(capsys.readouterr().out.split())
    assert main(["check", "--certify", str(path)]) == 0
    assert capsys.readouterr().out.rstrip().endswith("as stored")
    assert main(["explain", str(path)]) == 0
    assert "the bound: fluid LP" in capsys.readouterr().out

    forged = load_plan(path)
    replace(forged, predictions={**forged.predictions, "lower_bound_s": 99.0}).save(path)
    assert main(["check", "--certify", str(path)]) != 0
    assert "lower_bound_s is 99 s in the plan, but the fluid LP of its workload" in capsys.readouterr().err

    def give_up(*_: object, **__: object) -> None:
        raise Unsolved("out of time")

    monkeypatch.setattr(fluid, "_FluidProgram", give_up)
    assert main(["compare", *job, "--policy", "tide", "--certify"]) == 0
    said = capsys.readouterr()
    assert said.err == "pstar: the fluid linear program did not solve (out of time); the bound is the joint LP\n"
    assert "joint LP" in said.out


def test_a_plan_of_the_first_edition_calls_the_joint_program_a_closed_form() -> None:
    """Its figure is that of the joint program: it agrees, and a forged one does not. What no solver found is closed."""
    w = chain_workload(3, MPARAM, forward_s=1.0)
    plan = compare(w, machine(), policies=["tide"], settings=EAGER, barrier_cost=False)["tide"].with_predictions()
    said = plan.choices["certificate"]
    assert isinstance(said, dict) and said["bound"] == "joint LP"
    old = replace(plan, choices={**plan.choices, "certificate": {**said, "bound": "closed form"}})
    assert agree(old).endswith("as stored")
    assert "certificate" in examine(old).report.figures
    with pytest.raises(PlanError, match="but the joint LP"):
        agree(replace(old, predictions={**old.predictions, "lower_bound_s": 7.0}))
    assert lower_bound(w, machine(), EAGER, plan.layout, stream=False).method == "closed form"


@pytest.mark.parametrize("asked", [{"policies": ["l2l"], "loop": "step"}, {"policies": ["tide"], "sums": "16-bit"}])
def test_certify_solves_the_fluid_program_of_layer_major_plans_and_of_sums_in_16_bits(asked: dict[str, Any]) -> None:
    w = chain_workload(4, 2**20, micro_batches=2, flops=10**9)
    (row,) = compare(w, machine(), certify=True, barrier_cost=False, near=False, **asked).rows
    assert row.fits and row.certificate is not None and row.lower_bound_s is not None
    assert row.certificate["bound"] == "fluid LP" and "note" not in row.certificate
    assert 0 < row.lower_bound_s <= (row.iteration_s or 0)
