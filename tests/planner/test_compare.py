"""Compare, best, what binds, what a barrier costs, what would fit: on a chain whose figures can be worked out by hand.

Two layers of 1 M parameters in bf16; FWD 1 s and BWD 2 s a layer (recorded), so 6 s of compute an iteration.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

import pstar_sim as ps
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings, load_plan
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import DoesNotFit, PlanError, PstarError, UnknownName
from pstar_sim.planner.binding import bound_by
from pstar_sim.planner.compare import Row, compare, without_barrier
from pstar_sim.planner.nearest import nearest
from pstar_sim.policy.family.pins import iteration_bounds, most_pins_of, pin_facts
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.points import Point
from pstar_sim.policy.kit.sharing import least_known_s
from pstar_sim.policy.kit.ties import AS_FAST
from pstar_sim.policy.registry import can, find_policy
from pstar_sim.policy.systems.all_on_gpu import all_on_gpu
from pstar_sim.policy.systems.zero_offload import zero_offload
from pstar_sim.report.tables import heading
from pstar_sim.testing import chain_workload, round_machine
from pstar_sim.units import MIB
from pstar_sim.workload.loading import Loading
from pstar_sim.workload.workload import Workload, with_optimizer

MB, GB = 10**6, 10**9
FREE = Settings(update="eager", clip=False)


machine = partial(
    round_machine,
    gpu_memory_bytes=GB,
    host_memory_bytes=GB,
    h2d_bytes_per_s=2 * MB,
    hbm_bytes_per_s=28 * MB,
    flops_per_s={"fp16": 1e9},
    dram_bytes_per_s=100 * GB,
    adam_params_per_s=MB,
)
"""GPU Adam: 28 MB a layer over 28 MB/s of HBM = 1 s."""


def chain() -> Workload:
    return chain_workload(2, 1_048_576, forward_s=1.0)


def never(workload: Workload, machine: Machine, settings: Settings) -> Plan:
    raise DoesNotFit(policy="never", place="gpu", needed_bytes=3 * GB, available_bytes=GB, what="all of it")


def test_the_figures_of_everything_resident_are_those_worked_out_by_hand() -> None:
    """6 s of compute and two GPU Adams of 28 x 1.048576 MB / 28 MB/s; one token an iteration; nothing moves."""
    (row,) = compare(chain(), machine(), policies=[all_on_gpu], barrier_cost=True).rows
    assert row.policy == "all_on_gpu" and row.fits and row.reason is None
    assert row.iteration_s == pytest.approx(6 + 2 * 1.048576)
    assert row.tokens_per_s == pytest.approx(1 / (6 + 2 * 1.048576))
    assert (row.h2d_bytes, row.d2h_bytes, row.bound_by) == (0, 0, "compute")
    assert row.peak_gpu_bytes == 2 * 1_048_576 * 14
    assert row.barrier_cost_s == pytest.approx(0), "Adam on the compute queue takes its time before or after the step"
    assert row.lower_bound_s is not None and row.gap == pytest.approx(row.iteration_s / row.lower_bound_s - 1)


def test_the_keys_are_those_of_the_json_objects() -> None:
    keys = list(Row(policy="p", fits=False).to_json())
    assert keys == [
        "policy", "fits", "reason", "iteration_s", "tokens_per_s", "lower_bound_s", "gap", "bound_by", "peak_gpu_bytes",
        "peak_host_bytes", "peak_gpu_bytes_by_rank", "h2d_bytes", "d2h_bytes", "barrier_cost_s", "certificate",
        "expected_error", "trust", "tflops_per_gpu", "mfu", "short_of", "needed_bytes", "available_bytes",
        "needed_for", "nearest",
    ]  # fmt: skip
    result = compare(chain(), machine(), policies=[all_on_gpu, never])
    assert json.loads(json.dumps(result.to_json(), allow_nan=False))[1]["fits"] is False
    assert list(result.to_frame().columns) == [*keys, "kernels", "notes"]


def test_no_barrier_no_cost() -> None:
    (row,) = compare(chain(), machine(), policies=["zero_offload"], update="eager", clip=False).rows
    assert row.barrier_cost_s is None


def test_the_cost_of_the_barrier_is_the_difference_of_two_simulations() -> None:
    (barred,) = compare(chain(), machine(), policies=["tide"], barrier_cost=True).rows
    (free,) = compare(chain(), machine(), policies=["tide"], settings=FREE).rows
    assert barred.iteration_s is not None and free.iteration_s is not None
    assert barred.barrier_cost_s == pytest.approx(barred.iteration_s - free.iteration_s)


def test_no_policy_is_planned_without_its_barrier_unless_asked() -> None:
    """A plan without the barrier takes as long as the plan itself."""
    asked: list[str] = []

    def counted(workload: Workload, machine: Machine, settings: Settings) -> Plan:
        asked.append(settings.update)
        return zero_offload(workload, machine, settings)

    w, m = chain(), machine()
    names = ["tide", counted]
    few = compare(w, m, policies=names)
    assert asked == ["step"] and {row.barrier_cost_s for row in few.rows} == {None}
    assert "barrier costs: with --barrier-costs" in " ".join(str(few).split())
    every = compare(w, m, policies=names, barrier_cost=True)
    assert asked == ["step", "step", "eager"] and every.rows[1].barrier_cost_s is not None
    assert "--barrier-costs" not in str(every)
    assert compare(w, m, policies=names, only_best=True).best().row.barrier_cost_s is not None
    assert compare(w, m, policies=names, only_best=True, barrier_cost=False).best().row.barrier_cost_s is None


def test_fp16_without_its_barrier_is_bf16_at_the_same_rate() -> None:
    w = chain_workload(2, 1_048_576, dtype="fp16")
    free_w, free_m, free_s = without_barrier(w, machine(), Settings())
    assert free_s.barrier(free_w.dtype) is None
    assert free_w.dtype == "bf16" and {t.dtype for t in free_w.tensors} == {"bf16"}
    assert free_m.gpu.flops_per_s["bf16"] == machine().gpu.flops_per_s["fp16"]
    same_w, same_m, _ = without_barrier(chain(), machine(), Settings())
    assert same_w.dtype == "bf16" and same_m == machine()


def test_best_is_the_fastest_that_fits() -> None:
    result = compare(chain(), machine(), policies=[never, "zero_offload", all_on_gpu])
    times = {r.policy: r.iteration_s for r in result.rows if r.iteration_s is not None}
    assert result.best().row.policy == min(times, key=lambda p: times[p])
    assert result["zero_offload"].plan.policy == "zero_offload"
    with pytest.raises(PlanError, match="never does not fit"):
        result["never"]
    with pytest.raises(PlanError, match="compared were"):
        result["nobody"]


def test_when_nothing_fits_best_says_why_for_every_policy() -> None:
    with pytest.raises(PlanError, match=r"short by 2\.00 GB"):
        compare(chain(), machine(), policies=[never]).best()


def test_what_does_not_fit_names_a_policy_that_does() -> None:
    result = compare(chain(), machine(gpu_memory_bytes=20 * MB), policies=["all_on_gpu", "tide"])
    on_gpu, tide = result.rows
    assert not on_gpu.fits and tide.fits
    assert "short by" in str(on_gpu.reason) and "--policy tide" in str(on_gpu.reason)


def test_what_does_not_fit_in_host_memory_names_how_much_would_do() -> None:
    """2 x 1,048,576 parameters of 14 bytes and a gradient bucket: far below 16 GB, the step in which memory is
    suggested.
    """
    (row,) = compare(chain(), machine(host_memory_bytes=MB), policies=["zero_offload"]).rows
    assert "host needs" in str(row.reason) and "fits with --host-memory 16GB" in str(row.reason)


def test_a_plan_is_saved_with_its_predictions(tmp_path: Path) -> None:
    best = compare(chain(), machine(), policies=[all_on_gpu]).best()
    best.save(tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert again.predictions["iteration_s"] == best.timeline.iteration_s
    assert again.predictions["peak_gpu_bytes"] == best.row.peak_gpu_bytes
    assert again.steps == best.plan.steps
    assert ps.play(again).iteration_s == best.timeline.iteration_s


def test_a_host_with_room_for_the_payloads_alone_is_no_room() -> None:
    """Four layers of 2**20 parameters have 64 MiB of payloads on the host; a run also loads 8 MiB of weights."""
    four = chain_workload(4, 2**20)
    tight, wide = (round_machine(host_memory_bytes=mib * MIB) for mib in (64, 72))
    (row,) = compare(four, tight, policies=["zero_offload"], near=False).rows
    assert not row.fits and (row.short_of, row.needed_bytes) == ("host", 72 * MIB)
    assert row.needed_for == "67.11 MB of payloads, 8.389 MB of weights while they are loaded"
    assert compare(four, tight, policies=["zero_offload"], loading="in-place").rows[0].fits
    assert compare(four, wide, policies=["zero_offload"]).rows[0].fits


def test_html_and_text_name_the_policies_and_reasons() -> None:
    result = compare(chain(), machine(), policies=[never, all_on_gpu])
    for text in (result._repr_html_(), str(result)):
        assert "all_on_gpu" in text and "never does not fit" in text and "short by" in text
    assert "<table>" in result.best()._repr_html_()
    assert "what lives where" in result.best().explain()


@pytest.mark.parametrize(
    ("policies", "error", "text"),
    [
        (["tied"], UnknownName, "tide"),
        ([], PstarError, "at least one"),
        (["tide", "tide"], PstarError, "different names"),
        ([3], PstarError, r"policies = \[3\]: it must be names"),
    ],
)
def test_policies_that_make_no_sense(policies: list[object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        compare(chain(), machine(), policies=policies)  # type: ignore[arg-type]


def test_an_update_that_makes_no_sense() -> None:
    with pytest.raises(PstarError, match="'later'"):
        compare(chain(), machine(), update="later")


@pytest.mark.parametrize(
    ("stalls", "cost", "binds"),
    [
        ({}, None, "compute"),
        ({"h2d": 0.19}, None, "compute"),
        ({"h2d": 0.21}, None, "h2d"),
        ({"h2d": 1.0, "adam": 2.0}, None, "adam"),
        ({"dram": 3.0, "adam": 2.0}, None, "dram"),
        ({"d2h": 3.0, "adam": 2.0}, None, "d2h"),
        ({"barrier": 3.0}, 2.0, "barrier"),
        ({"barrier": 3.0}, 1.0, "adam"),
        ({"barrier": 3.0}, None, "barrier"),
    ],
)
def test_what_binds(stalls: dict[str, float], cost: float | None, binds: str) -> None:
    """Of an iteration of 10 s: below 0.2 s of waiting it is compute; else the largest cause; a barrier only if it is
    to blame.
    """
    timeline = Timeline(source="simulated", iterations=3, iteration_s=10.0, spans=(), samples=(), stall_s=stalls)
    assert bound_by(timeline, barrier_cost_s=cost) == binds


def test_settings_may_be_given_as_a_value_or_piecewise() -> None:
    one = compare(chain(), machine(), policies=[all_on_gpu], settings=FREE)
    two = compare(chain(), machine(), policies=[all_on_gpu], update="eager", clip=False)
    assert one.settings == two.settings == replace(Settings(), update="eager", clip=False)


def test_every_setting_may_be_given_piecewise() -> None:
    asked = Settings(update="eager", clip=False, chunk_bytes=2 * MIB, loop="step", sums="16-bit", effort=0.5)
    w = chain_workload(2, MIB, forward_s=1.0, micro_batches=2)
    assert compare(w, round_machine(), policies=["optimal"], **asdict(asked)).settings == asked


def test_the_heading_names_the_optimizer_and_the_bits_of_sums() -> None:
    w = chain_workload(2, MIB, forward_s=1.0, micro_batches=2)
    plain, other = (
        heading(compare(v, round_machine(), policies=["all_on_gpu"], sums=sums))
        for v, sums in ((w, "32-bit"), (with_optimizer(w, "sgd-momentum"), "16-bit"))
    )
    assert "adamw" not in plain and "sums" not in plain
    assert "sgd-momentum" in other and "16-bit sums" in other


def test_each_of_two_bounds_says_whose_it_is() -> None:
    """l2l runs layer by layer, the others micro-batch by micro-batch."""
    w = chain_workload(4, MIB, forward_s=1.0, micro_batches=2)
    one = str(compare(w, round_machine(), policies=["tide"]))
    said = str(compare(w, round_machine(), policies=["tide", "all_on_gpu", "l2l"], barrier_cost=False))
    assert "lower bound of this setting: " in one
    assert "lower bound of this setting for all policies but l2l: " in said
    assert "lower bound of this setting for l2l: " in said


@pytest.mark.parametrize(("needed", "words"), [(17_260_000, "18MB"), (171_000_000, "180MB"), (1_210_000_000, "1.3GB")])
def test_gpu_memory_is_named_as_exactly_as_the_job_is_small(needed: int, words: str) -> None:
    """Only on "virtual", whose GPU memory is set."""

    def wants(workload: Workload, machine: Machine, settings: Settings) -> Plan:
        raise DoesNotFit(
            policy="wants", place="gpu", needed_bytes=needed, available_bytes=machine.gpu_budget_bytes, what="it all"
        )

    w, m = chain(), round_machine(gpu_memory_bytes=10 * MB)
    error = DoesNotFit(policy="wants", place="gpu", needed_bytes=needed, available_bytes=10 * MB, what="it all")

    def ask(w: Workload, machine: Machine, settings: Settings, loading: Loading) -> DoesNotFit | None:
        return None if machine.gpu_budget_bytes >= needed else error

    assert nearest(wants, w, m, Settings(), error, ask=ask) == f"fits with --gpu-memory {words}"


def test_a_policy_of_ones_own_is_not_believed() -> None:
    """Its plan must be for the job that was asked about, and pass the checker; whatever it raises names it."""
    from pstar_sim.catalog.loader import load_machine
    from pstar_sim.policy.family.tide import tide
    from pstar_sim.workload.presets import preset

    w, machine = preset("gpt2", batch=2, seq=128), load_machine("t4", gpu_memory="2GB")

    def for_a_larger_gpu(workload: Any, machine: Any, settings: Settings) -> Plan:
        return tide(workload, load_machine("t4", gpu_memory="16GB"), settings)

    def without_waiting(workload: Any, machine: Any, settings: Settings) -> Plan:
        plan = tide(workload, machine, settings)
        return replace(plan, steps=tuple(structs.replace(step, after=()) for step in plan.steps))

    def nothing(workload: Any, machine: Any, settings: Settings) -> None:
        return None

    def broken(workload: Any, machine: Any, settings: Settings) -> Plan:
        raise ZeroDivisionError("of my own")

    for policy, words in (
        (for_a_larger_gpu, "for_a_larger_gpu made its plan for another machine"),
        (without_waiting, "step"),
        (nothing, "nothing returned NoneType"),
        (broken, "broken: ZeroDivisionError: of my own"),
    ):
        with pytest.raises(PlanError, match=words):
            compare(w, machine, policies=[policy])  # type: ignore[list-item]


def test_the_best_alone_is_the_best_of_a_whole_comparison() -> None:
    """What `pstar plan` asks: the same line and plan, without figures of the others that have to be planned for."""
    w = ps.preset("gpt2", batch=2, seq=128, dtype="fp16")
    m = ps.machine("v100-16")
    names = ["all_on_gpu", "zero_offload", "tide", "static_partition"]
    whole = ps.compare(w, m, policies=names, barrier_cost=True)
    alone = ps.compare(w, m, policies=names, only_best=True)
    best = whole.best()
    assert alone.best().row == best.row
    assert best.row.barrier_cost_s is not None
    assert alone.best().plan.steps == best.plan.steps
    assert [r.iteration_s for r in alone.rows] == [r.iteration_s for r in whole.rows]
    assert [r.policy for r in alone.rows if r.barrier_cost_s is not None] == [best.row.policy]
    known = {best.row.policy: (best.plan, best.timeline)}
    again = ps.compare(w, m, policies=names, only_best=True, made=known).best()
    assert again.row == best.row
    assert again.plan is best.plan


def test_the_best_alone_leaves_out_policies_that_a_plan_of_optimal_found_slower() -> None:
    w, m = ps.preset("gpt2", batch=2, seq=128), ps.machine("v100-16", gpu_memory="1.7GB")
    whole = ps.compare(w, m, effort=0.2, near=False)
    alone = ps.compare(w, m, effort=0.2, near=False, only_best=True, barrier_cost=False)
    assert alone.best().row == whole.best().row
    assert alone.best().plan.steps == whole.best().plan.steps
    left_out = {row.policy: row.iteration_s for row in whole.rows} | {row.policy: None for row in alone.rows}
    slower = [seconds for seconds in left_out.values() if seconds is not None]
    assert len(slower) > 3
    assert min(slower) > (whole.best().row.iteration_s or 0.0) * (1 + AS_FAST)


@pytest.mark.whole
def test_what_optimal_remembers_of_a_policy_that_it_leaves_out_is_surely_below_its_plans() -> None:
    """The closed form with copies around others' updates, which leaves it out, is an estimate."""
    w, m, settings = ps.preset("gpt2", batch=1, seq=128), ps.machine("v100-16", gpu_memory="1.6GB"), ps.Settings()
    find_policy("optimal")(w, m, settings)
    for policy in ("static_partition", "tide"):
        remembered_s = least_known_s(find_policy(policy), w, m, settings)
        job = Job(policy, w, m, settings, can(policy).point or Point())
        facts, most = pin_facts(job), most_pins_of(job)
        estimates_s, bounds_s = (iteration_bounds(facts, most, surely=sure) for sure in (False, True))
        assert 0 < remembered_s <= bounds_s.min() < estimates_s.min(), policy


def test_where_nothing_fits_the_best_alone_says_what_would() -> None:
    w = ps.preset("gpt2-xl", batch=2, seq=128, dtype="fp16")
    m = ps.machine("v100-16", gpu_memory="1.5GB")
    with pytest.raises(PlanError) as whole:
        ps.compare(w, m, policies=["all_on_gpu"]).best()
    with pytest.raises(PlanError) as alone:
        ps.compare(w, m, policies=["all_on_gpu"], only_best=True).best()
    assert str(alone.value) == str(whole.value)


def test_what_no_catalog_knows_is_compared_where_a_policy_has_no_room() -> None:
    """A chain of layers counts as a preset, but nothing can write it with a smaller batch."""
    chain = chain_workload(12, 10**8)
    rows = compare(chain, ps.machine("rtx4090", gpu_memory="2.5GB"), policies=["all_on_gpu", "tide"]).rows
    assert rows[0].short_of == "gpu" and "does not fit" in str(rows[0].reason)
