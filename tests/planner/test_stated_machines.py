"""No figure of a plan file can be changed unnoticed, on any kind of machine: each is changed, and called false."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from changed import put

import pstar_sim as ps
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.overrides import override
from pstar_sim.cli import main
from pstar_sim.core.plan import Plan, load_plan
from pstar_sim.errors import FalseFigures, PlanError
from pstar_sim.planner.compare import compare
from pstar_sim.planner.stated import examine
from pstar_sim.testing import chain_workload, round_machine
from pstar_sim.units import MIB
from pstar_sim.workload.workload import Workload

CHANGED = (
    ("iteration_s", "tokens_per_s", "peak_gpu_bytes", "d2h_bytes"),
    ("lower_bound_s", "expected_error", "peak_host_bytes"),
    ("gap", "h2d_bytes", "mfu", "tflops_per_gpu"),
    ("barrier_cost_s",),
)
"""Figures that are changed at once."""


def job(sequences: int) -> Workload:
    """Six layers of 8 MiB; a sequence takes 4 MiB of the tide and 10 GFLOP of each moment."""
    w = chain_workload(6, 8 * MIB, flops=sequences * 10**10, tide_bytes=sequences * 4 * MIB, dtype="fp16")
    return replace(w, batch=sequences)


def tight(name: str, **more: object) -> Machine:
    """A machine of the catalog whose GPUs do not hold all states."""
    return ps.machine(name, gpu_memory="1.3GB", **more)  # type: ignore[arg-type]


def two_nodes() -> Machine:
    return override(tight("v100-32"), ["gpus=2", "nodes=2", "network.bandwidth=10GB/s"])


def two_mixed_nodes() -> Machine:
    """Two nodes of two GPUs; the second GPU of each has half the rate of the first."""
    m = two_nodes()
    slow = replace(m.gpu, flops_per_s={name: rate / 2 for name, rate in m.gpu.flops_per_s.items()})
    return replace(m, ranks=tuple(replace(r, gpu=slow) if i % 2 else r for i, r in enumerate(m.ranks)))


def with_disks() -> Machine:
    return round_machine(
        gpu_memory_bytes=400 * MIB, host_memory_bytes=5 * 2**28, nvme_memory_bytes=2**31, h2d_bytes_per_s=2**30
    )


MACHINES: dict[str, tuple[Callable[[], Machine], str, tuple[int, ...]]] = {
    "one GPU": (lambda: tight("v100-32"), "tide", (4,)),
    "equal node": (lambda: tight("v100-32", gpus=2), "zero3_offload", (4, 4)),
    "equal GPUs with unequal shares": (lambda: tight("v100-32", gpus=2), "patrickstar", (4, 2)),
    "mixed node": (lambda: tight("v100-16+p100-16"), "tide", (4, 4)),
    "mixed node, shares by speed": (lambda: tight("v100-16+p100-16"), "whale:schedule=zero_offload", (4, 4)),
    "two nodes": (two_nodes, "zero3_offload", (4, 4, 4, 4)),
    "two mixed nodes": (two_mixed_nodes, "patrickstar", (4, 2, 4, 2)),
    "disks": (with_disks, "zero_infinity:states=nvme", (4,)),
}


@pytest.fixture(scope="module", params=MACHINES)
def plan(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """A plan with everything that is stated of it, as it comes from its file."""
    machine, policy, batches = MACHINES[request.param]
    known = {n: job(n) for n in batches}
    path = tmp_path_factory.mktemp("stated") / "plan.json"
    found = compare([known[n] for n in batches], machine(), policies=[policy], near=False, barrier_cost=True, cut=job)
    found[policy].save(path)
    return load_plan(path)


def test_every_figure_is_computed_again(plan: Plan) -> None:
    assert {*plan.predictions, "mfu"} == {*chain(*CHANGED)}
    report = examine(plan, lp=True).report
    assert set(plan.predictions) <= set(report.figures)
    words = report.describe()
    assert words.startswith("correct: ") and all(name in words for name in plan.predictions)


def changes(plan: Plan, name: str) -> set[float]:
    """Other values of a figure: by factors, or by a byte."""
    stated, little = plan.predictions.get(name, 0.5), 1e-4 * max(1, plan.predictions["iteration_s"])
    if name.endswith("_bytes"):
        return {stated + 1, round(stated / 2.9) - 1}
    return {stated * 1.7 + little, stated / 2.9 - little}


@pytest.mark.parametrize("names", CHANGED, ids=lambda names: names[0])
def test_figures_that_were_changed_are_false_and_no_others(plan: Plan, names: tuple[str, ...]) -> None:
    """To larger and smaller values. The gap is beside others than seconds and their bound, which say what it is; a
    barrier's cost, which takes a program, is alone."""
    for larger in (True, False):
        changed = {name: max(changes(plan, name)) if larger else min(changes(plan, name)) for name in names}
        with pytest.raises(FalseFigures) as caught:
            examine(replace(plan, predictions=plan.predictions | changed), lp="barrier_cost_s" in names)
        assert {line.partition(" is ")[0] for line in caught.value.false} == {*names}


def test_no_word_turns_the_check_off(plan: Plan, tmp_path: Path) -> None:
    figures = set(examine(plan).report.figures)
    path = tmp_path / "plan.json"
    plan.save(path)

    def source(part: dict[str, Any]) -> None:
        part["source"] += " "

    values = json.loads(path.read_text())
    values["choices"]["shares"] = "equal"
    values["machine"]["notes"] = "bought in 2019"
    values["workload"]["notes"] = "the one of May"
    source(values["machine"]["host"])
    for rank in values["machine"]["ranks"][:1]:
        source(rank["gpu"])
        source(rank["link"])
    path.write_text(json.dumps(values))
    assert set(examine(load_plan(path)).report.figures) == figures
    values["predictions"]["iteration_s"] *= 1.7
    values["predictions"]["tokens_per_s"] /= 2.9
    values["predictions"] |= {"peak_gpu_bytes": 1, "peak_host_bytes": 1e15}
    path.write_text(json.dumps(values))
    with pytest.raises(FalseFigures) as caught:
        examine(load_plan(path))
    false = {line.split()[0] for line in caught.value.false}
    assert false == {"iteration_s", "tokens_per_s", "peak_gpu_bytes", "peak_host_bytes"}


# Ranks whose jobs differ.


@pytest.fixture
def shares(tmp_path: Path) -> Path:
    """Two V100, one with 4 sequences and one with 2."""
    path = tmp_path / "shares.json"
    found = compare([job(4), job(2)], tight("v100-32", gpus=2), policies=["zero_offload"], near=False)
    found["zero_offload"].save(path)
    return path


def test_a_file_holds_the_job_of_each_rank(shares: Path) -> None:
    plan = load_plan(shares)
    assert plan.ranked is not None
    for rank, kept in zip(plan.ranked, (job(4), job(2))):
        assert (rank.batch, rank.moments, rank.tensors, rank.uses) == (
            kept.batch,
            kept.moments,
            kept.tensors,
            kept.uses,
        )
    assert plan.tokens == 6 and "batch 4 on rank 0, 2 on rank 1 x 1" in plan.describe()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("ranked", 1, "workload", "batch", value=3), "tokens_per_s is .* the simulation"),
        (put("ranked", 0, "workload", "batch", value=3), "workload is not the hardest of the jobs"),
        (put("ranked", 1, "workload", "moments", "flops", 1, value=9 * 10**12), "workload is not the hardest"),
        (put("ranked", 1, "workload", "moments", "peak_bytes", 1, value=2**40), "gpu of rank 1 may hold"),
        (put("workload", "moments", "flops", 1, value=9 * 10**12), "workload is not the hardest"),
        (put("ranked", 1, "ranks", value=[0]), r"'ranked' has jobs for ranks \[0, 0\]; each of the ranks 0 to 1"),
        (put("ranked", 1, "ranks", value=[1, 2]), r"'ranked' has jobs for ranks \[0, 1, 2\]"),
        (put("ranked", 1, "workload", "dtype", value="fp32"), "rank 1 has other parameters|dtype is"),
        (put("ranked", 1, "workload", value=3), r"field 'ranked\[1\].workload' is 3"),
        (put("ranked", value=[]), "iteration_s is .* the simulation|tokens_per_s is"),
    ],
)
def test_a_job_of_a_rank_that_was_changed_is_refused(
    shares: Path, change: Callable[[Any], None], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    values = json.loads(shares.read_text())
    change(values)
    shares.write_text(json.dumps(values))
    with pytest.raises(PlanError, match=said):
        examine(load_plan(shares))
    assert main(["check", str(shares)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
