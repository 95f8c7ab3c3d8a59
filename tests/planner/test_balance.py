"""Shares of a batch that a policy does not take from the machine: those of `whale` and of `optimal`, and their gain."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import pstar_sim as ps
from pstar_sim.catalog.machine import Machine
from pstar_sim.cli import main
from pstar_sim.core.plan import load_plan
from pstar_sim.errors import PstarError
from pstar_sim.planner.compare import compare
from pstar_sim.planner.fits import fits
from pstar_sim.planner.limits import max_batch
from pstar_sim.testing import chain_workload, round_machine
from pstar_sim.units import MIB, format_bytes
from pstar_sim.workload.trace import save_trace
from pstar_sim.workload.workload import Workload


def job(sequences: int) -> Workload:
    """Two layers of MIB parameters; a sequence takes 1e9 flops per forward moment, 6e9 per iteration."""
    return replace(chain_workload(2, MIB, flops=sequences * 10**9, tide_bytes=sequences * MIB), batch=sequences)


def two_and_one() -> Machine:
    """Two GPUs, one with 2e9 flops per second and one with 1e9; collectives and updates take no time to speak of."""
    m = round_machine(ranks=2, peer_bytes_per_s=1e15, hbm_bytes_per_s=1e15, pageable_bytes_per_s=MIB)
    ranks = [replace(r, gpu=replace(r.gpu, flops_per_s={"bf16": n * 1e9})) for r, n in zip(m.ranks, (2, 1))]
    return replace(m, name="two and one", ranks=tuple(ranks))


def test_the_gain_over_equal_shares_is_that_worked_out_by_hand() -> None:
    """12 sequences: 8 and 4 take 8 * 6 / 2 = 24 s; 6 and 6 take 6 * 6 / 1 = 36 s."""
    found = compare([job(6)] * 2, two_and_one(), policies=["whale", "all_on_gpu"], cut=job)
    assert found["whale"].timeline.iteration_s == pytest.approx(24, rel=1e-6)
    assert found["all_on_gpu"].timeline.iteration_s == pytest.approx(36, rel=1e-6)
    plan = found["whale"].plan
    assert [r.batch_share for r in plan.machine.ranks] == pytest.approx([8 / 12, 4 / 12])
    assert plan.workload.batch == 8 and [job.batch for job in plan.jobs] == [8, 4]
    assert found.notes[0] == "whale: " + str(plan.choices["balance"])
    assert "24.000 s per iteration, 1.50 times as fast as equal shares" in found.notes[0]
    assert found["whale"].row.tokens_per_s == pytest.approx(sum(w.tokens for w in (job(8), job(4))) / 24)
    plan.check()


def test_each_rank_has_a_timeline_of_its_own() -> None:
    """Of equal shares the fast GPU computes 18 of 36 s, and waits for the other in the collectives."""
    plan = compare([job(6)] * 2, two_and_one(), policies=["all_on_gpu"])["all_on_gpu"].plan
    fast, slow = (ps.play(plan, rank=r) for r in range(2))
    assert fast.iteration_s == pytest.approx(slow.iteration_s) == pytest.approx(36, rel=1e-6)
    assert (fast.busy_s["compute"], slow.busy_s["compute"]) == pytest.approx((18, 36), rel=1e-6)
    assert fast.stall_s["net"] == pytest.approx(18, rel=1e-6)
    with pytest.raises(PstarError, match="rank is 2; two and one has ranks 0 to 1"):
        ps.play(plan, rank=2)


def test_equal_shares_are_as_equal_as_whole_sequences_allow() -> None:
    found = compare([job(4), job(3)], two_and_one(), policies=["whale"], cut=job)
    assert "GPU virtual 5+2: 15.000 s" in found.notes[0] and "(virtual 4+3: 18.000 s)" in found.notes[0]


def test_a_batch_that_the_ranks_cannot_share_is_refused_where_another_policy_is_asked_too() -> None:
    w, m = ps.preset("tiny-gpt2", batch=7, seq=32), ps.machine("v100-16x2+p100-16")
    found = compare(w, m, policies=["whale"])
    assert re.search(r"v100-16 \d\+\d, p100-16 1: .*equal shares \(v100-16 3\+2, p100-16 2", found.notes[0])
    for policies in (["whale", "tide"], None):
        with pytest.raises(PstarError, match="batch 7 cannot be shared evenly by the 3 ranks"):
            compare(w, m, policies=policies)
    with pytest.raises(PstarError, match="batch 2 cannot be shared evenly"):
        compare(ps.preset("tiny-gpt2", batch=2, seq=32), m, policies=["whale"])


def test_equal_shares_that_do_not_fit_are_named() -> None:
    """States take 28 MiB of each GPU; the second has room for 3 sequences."""
    m = two_and_one()
    small = replace(m.ranks[1].gpu, memory_bytes=31 * MIB, usable_bytes=31 * MIB)
    m = replace(m, ranks=(m.ranks[0], replace(m.ranks[1], gpu=small)))
    policy = "whale:schedule=all_on_gpu"
    found = compare([job(6)] * 2, m, policies=[policy], cut=job)
    assert f"GPU virtual 9+3; equal shares (virtual 6+6) do not fit: {policy} does not fit: gpu" in found.notes[0]
    # 28 + 9 MiB on the first, 28 + 3 of 31 on the second
    best = found[policy]
    report = best.plan.check()
    assert best.row.peak_gpu_bytes == report.peak_bytes["gpu"] == 37 * MIB
    assert best.row.peak_gpu_bytes_by_rank == (37 * MIB, 31 * MIB)
    for rank, held in (("rank 0", 37 * MIB), ("rank 1", 31 * MIB)):
        assert f"gpu of {rank}: at most {format_bytes(held)} ({held} bytes" in report.describe()
        assert f"gpu of {rank} at most: {format_bytes(held)} of " in best.explain()


def test_on_equal_gpus_it_is_the_policy_that_it_schedules_with() -> None:
    m = round_machine(ranks=2, peer_bytes_per_s=1e15)
    found = compare([job(2)] * 2, m, policies=["whale", "all_on_gpu"])
    assert found["whale"].plan.steps == found["all_on_gpu"].plan.steps
    assert "whale" not in [row.policy for row in compare([job(2)] * 2, m, near=False).rows]


def test_all_known_policies_have_an_answer_where_gpus_differ() -> None:
    found = compare([job(6)] * 2, two_and_one(), near=False, barrier_cost=False, cut=job)
    assert {row.policy for row in found.rows} == set(ps.policies().to_frame()["policy"])
    assert all(row.fits or row.reason for row in found.rows)
    assert {"all_on_gpu", "patrickstar", "tide", "optimal", "zero3_offload"} <= set(found.planned)
    assert found["whale"].row.iteration_s < found["all_on_gpu"].row.iteration_s


def test_a_job_that_cannot_be_cut() -> None:
    found = compare([job(6)] * 2, two_and_one(), policies=["whale", "whale:speed=seconds"])
    assert [row.fits for row in found.rows] == [False, False]
    assert str(found.rows[1].reason).startswith("whale:speed=seconds: a GPU would take ")
    assert "give compare(cut=...)" in str(found.rows[0].reason)
    with pytest.raises(PstarError, match="cut = 3"):
        compare([job(6)] * 2, two_and_one(), policies=["whale"], cut=3)  # type: ignore[arg-type]
    (row,) = compare([job(6)] * 2, two_and_one(), policies=["whale"], cut=lambda n: None).rows  # type: ignore[arg-type, return-value]
    assert "cut(8) = None" in str(row.reason)


def test_optimal_has_the_fastest_shares() -> None:
    """12 sequences: 8 and 4 take 24 s, 9 and 3 take 27 s, 6 and 6 take 36 s."""
    policies = ["optimal", "optimal:shares=machine", "tide"]
    found = compare([job(6)] * 2, two_and_one(), policies=policies, cut=job)
    assert found["optimal"].timeline.iteration_s == pytest.approx(24, rel=1e-6)
    assert [job.batch for job in found["optimal"].plan.jobs] == [8, 4]
    assert found["optimal:shares=machine"].timeline.iteration_s == pytest.approx(36, rel=1e-6)
    assert re.search(r"GPU virtual 8\+4: 24.000 s .*; equal shares \(virtual 6\+6\) take at least 36", found.notes[0])
    found["optimal"].plan.check()


@pytest.mark.whole
def test_optimal_takes_a_rivals_plan_that_is_faster_with_all_gpus_together() -> None:
    """As if both GPUs were the slower one, its own plan is the fastest."""
    machine = ps.machine("v100-32x1+rtx5090-128gbx1", gpu_memory="3GB")
    job = ps.preset("gpt2", batch=2, seq=256, micro_batches=4)
    found = compare(job, machine, policies=["optimal"], near=False, update="eager", clip=False)["optimal"]
    words = re.fullmatch(r"that of (\w+): (.+), optimal's own (.+)", str(found.plan.choices["schedule"]))
    assert words is not None and words[2] != words[3] and found.plan.policy == "optimal"
    rival = compare(job, machine, policies=[words[1]], near=False, update="eager", clip=False)[words[1]]
    assert found.timeline.iteration_s <= rival.timeline.iteration_s
    found.plan.check()


def test_a_job_with_shares_of_its_own_keeps_them() -> None:
    """No function cuts the job, which is no preset."""
    plan = compare([job(6)] * 2, two_and_one(), policies=["optimal"])["optimal"].plan
    assert {job.batch for job in plan.jobs} == {6}


def small_beside_large() -> Machine:
    """Two GPUs of one speed. The second has room for less than half of what the first has."""
    m = two_and_one()
    sizes = [32 * MIB, 12 * MIB]
    gpus = [replace(m.ranks[0].gpu, memory_bytes=size, usable_bytes=size) for size in sizes]
    return replace(m, name="small beside large", ranks=tuple(replace(r, gpu=g) for r, g in zip(m.ranks, gpus)))


@pytest.mark.whole
def test_the_bound_of_a_preset_is_over_all_shares() -> None:
    """The gap of `tide` counts what equal shares cost."""
    w = ps.preset("gpt2", batch=6, seq=128)
    found = compare(w, "v100-16+p100-16", policies=["optimal", "tide"], near=False, barrier_cost=False, effort=0.2)
    best, equal = found.rows
    assert best.lower_bound_s == pytest.approx(equal.lower_bound_s, rel=0.05)
    assert "1 micro-batch of 6 in any shares" in str(best.certificate["relative_to"])
    assert best.gap < 0.05 and equal.gap > 0.25


def test_capacity_with_the_roomiest_shares() -> None:
    """A batch that does not fit in equal halves fits where the larger GPU takes most of it."""
    m = small_beside_large()

    def write(batch: int) -> Workload:
        return ps.preset("tiny-gpt2", batch=batch, seq=128)

    limits = {row.policy: row.value for row in max_batch(m, write, policies=["optimal", "tide"]).rows}
    assert limits["optimal"] > 1.3 * limits["tide"] > 0
    answer = fits(write(limits["optimal"]), m, policies=["optimal", "tide"], near=False)
    rows = {row.policy: row for row in answer.rows}
    assert rows["optimal"].fits and not rows["tide"].fits
    first, second = map(int, str(rows["optimal"].shares).removeprefix("virtual ").split("+"))
    assert first > second and first + second == limits["optimal"]
    assert fits([job(2)] * 2, two_and_one(), policies=["whale"], near=False).rows[0].reason is not None


def test_questions_that_take_the_machines_shares_refuse_it() -> None:
    w, m = [job(2)] * 2, two_and_one()
    with pytest.raises(PstarError, match=r"whale chooses each GPU's share .* name another policy"):
        ps.ablate(w, m, begin="whale")
    with pytest.raises(PstarError, match=r"whale:speed=seconds chooses"):
        ps.sensitivity(w, m, policies=["whale:speed=seconds"])
    alike = round_machine(ranks=2, peer_bytes_per_s=1e15)
    assert fits(w, alike, policies=["whale"], times=False, near=False).rows[0].fits
    assert "whale" not in [row.policy for row in fits(w, m, times=False, near=False).rows]


def test_from_a_trace_to_a_plan_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The shares are looked for among the variants of the trace."""
    trace, file = tmp_path / "w.parquet", tmp_path / "plan.json"
    argv = ["plan", "--trace", str(trace), "--machine", "v100-16+p100-16", "--dtype", "fp16", "--policy", "whale"]
    argv += ["--batch", "12", "-o", str(file)]
    save_trace([job(n) for n in (6, 10)], trace)
    assert main(argv) == 3
    assert "batch=11; it holds: batch 6" in re.sub(r"\s+", " ", capsys.readouterr().out)
    save_trace([job(n) for n in (1, 6, 11)], trace)
    assert main(argv) == 0
    assert "note: whale: sequences per GPU v100-16 11, p100-16 1" in capsys.readouterr().err
    plan = load_plan(file)
    assert [round(12 * r.batch_share, 6) for r in plan.machine.ranks] == [11, 1]
    assert main(["check", str(file)]) == 0
    assert main(["explain", str(file)]) == 0
    words = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "balance: sequences per GPU v100-16 11" in words and "batch 11 on rank 0, 1 on rank 1 x" in words


def test_the_machine_by_name_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["compare", "--model", "gpt2", "--batch", "6", "--seq", "64", "--policy", "whale", "--json"]
    assert main([*argv, "--machine", "v100-16+p100-16"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["rows"][0]["fits"] and "times as fast as equal shares" in said.err
    assert main([*argv, "--machine", "v100-16x2+p100-16", "--batch", "7"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["fits"]
    assert main([*argv, "--machine", "v100-16x0+p100-16"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
