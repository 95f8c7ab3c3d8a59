"""Workloads that no capture makes but a faulty file may hold: refused by name, or planned right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pstar_sim.catalog.loader import load_machine
from pstar_sim.core.plan import Settings, load_plan
from pstar_sim.errors import CannotPlan, TraceError
from pstar_sim.policy.registry import find_policy
from pstar_sim.testing import chain_workload
from pstar_sim.workload.optimizers import OptimizerSpec
from pstar_sim.workload.workload import Use, UseKind, Workload


def chain() -> Workload:
    """Four layers of 300 kB each in a chain of 4 FWD, 4 BWD and a step: layer 3's gradient arrives in moment 4."""
    return chain_workload(4, 150_000, tide_bytes=10_000)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (OptimizerSpec(state_bytes=(("param32", 4), ("momentum", 4), ("momentum", 4))), "each state needs a name"),
        (OptimizerSpec(state_bytes=(("param", 4),)), "each state needs a name"),
        (OptimizerSpec(state_bytes=(("param32", 0),)), "param32 needs at least 1 byte"),
        (OptimizerSpec(dram_bytes_per_param=0), "dram_bytes_per_param is 0; it must be at least 1"),
    ],
)
def test_an_optimizer_that_is_none(spec: OptimizerSpec, says: str) -> None:
    with pytest.raises(TraceError, match=says):
        replace(chain(), optimizer=spec)


def test_a_group_below_0() -> None:
    w = chain()
    with pytest.raises(TraceError, match=r"tensors\[1\]\.group is -1; it must be the number of an optimizer group"):
        replace(w, tensors=(w.tensors[0], replace(w.tensors[1], group=-1), *w.tensors[2:]))


@pytest.mark.parametrize("policy", ["tide", "static_partition", "zero_offload", "patrickstar"])
def test_a_read_after_the_last_gradient_cannot_be_planned(policy: str) -> None:
    w = chain()
    late = replace(w, uses=(*w.uses, Use(moment=6, tensor=3, kind=UseKind.READ)))
    with pytest.raises(CannotPlan, match=r"is read in moment 6 .* after its last gradient in moment 4"):
        find_policy(policy)(late, load_machine("virtual", gpu_memory=10**7), Settings())


@pytest.mark.parametrize("policy", ["tide", "static_partition"])
def test_a_trainable_parameter_without_a_gradient_is_planned_saved_and_loaded(policy: str, tmp_path: Path) -> None:
    w = chain()
    idle = replace(w, uses=tuple(u for u in w.uses if u.kind is UseKind.READ or u.tensor != 2))
    plan = find_policy(policy)(idle, load_machine("virtual", gpu_memory=10**6), Settings())
    assert plan.modes[plan.layout.chunk_of[2]] == "frozen"
    plan.check()
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").modes == plan.modes


def test_an_attention_kernel_that_is_none() -> None:
    with pytest.raises(TraceError, match=r"attention is 'flsh'; known kernels are flash, fa2, .*; none without any"):
        replace(chain(), attention="flsh")


@pytest.mark.parametrize("name", ["flops", "bytes_read", "bytes_written", "start_bytes", "end_bytes", "operators"])
def test_a_negative_figure_of_a_moment_is_named(name: str) -> None:
    w = chain()
    moments = (*w.moments[:2], replace(w.moments[2], **{name: -1}), *w.moments[3:])
    with pytest.raises(TraceError, match=rf"moments\[2\]\.{name} is -1; it must not be negative"):
        replace(w, moments=moments)
