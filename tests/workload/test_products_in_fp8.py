"""Products in fp8: what they change in a job, their seconds by hand and beside published runs, what refuses them."""

from __future__ import annotations

from dataclasses import replace

import pytest

import pstar_sim as ps
from executor.run import check_hardware
from pstar_sim.catalog.loader import load_machine
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Settings
from pstar_sim.cost import CostModel
from pstar_sim.errors import ModelError, PlanError
from pstar_sim.policy.registry import find_policy
from pstar_sim.testing import round_machine
from pstar_sim.workload.mixing import block_of
from pstar_sim.workload.presets import preset, variant
from pstar_sim.workload.workload import Workload, product_flops


def job(products: str | None, *, model: str = "llama-3.2-1b", seq: int = 512, kernels: str = "fused") -> Workload:
    return preset(model, batch=1, seq=seq, products=products, kernels=kernels)


def seconds(w: Workload, machine: ps.Machine) -> float:
    return sum(CostModel(w, machine, build_layout(w)).moments_s)


def test_what_is_stored_stays_and_copies_live_for_a_product() -> None:
    plain, cast = job(None), job("fp8")
    assert (cast.tensors, cast.uses, cast.states_bytes_per_param) == (
        plain.tensors, plain.uses, plain.states_bytes_per_param,
    )  # fmt: skip
    for before, after in zip(plain.moments, cast.moments):
        assert (after.flops, after.products, after.end_bytes) == (before.flops, before.products, before.end_bytes)
        inside = block_of(before.module) is not None
        largest = max((b * (m * k + k * n) for b, m, k, n in before.products), default=0)
        assert 0 <= after.peak_bytes - before.peak_bytes <= (largest if inside else 0)
        written = sum(b * (m * k + k * n) for b, m, k, n in before.products) if inside else 0
        assert after.bytes_written - before.bytes_written == written
        assert after.bytes_read - before.bytes_read == 4 * written  # two passes over 2 bytes


def test_products_of_the_layers_take_half_of_the_time_at_twice_the_rate() -> None:
    """Rates of whole iterations, which know nothing of copies. The head's products stay in bf16."""
    machine = round_machine(flops_per_s={"bf16": 1e12, "fp8": 2e12})
    plain, cast = job(None), job("fp8")
    of_layers = sum(product_flops(p) for m in plain.moments for p in m.products if block_of(m.module) is not None)
    assert of_layers > sum(m.flops for m in plain.moments) / 2
    assert seconds(plain, machine) - seconds(cast, machine) == pytest.approx(of_layers / 2e12)


def test_a_side_that_is_no_multiple_of_16_stays_in_bf16() -> None:
    machine = round_machine(flops_per_s={"bf16": 1e12, "fp8": 2e12})
    odd = [job(products, seq=500) for products in (None, "fp8")]
    assert seconds(odd[0], machine) == seconds(odd[1], machine)


def test_seconds_are_near_published_runs() -> None:
    """torchao's float8 (tensorwise) on H100, Llama-3-8B with 8,192 tokens: +25 %; torchtitan: +28 %. Both compile."""
    h100 = load_machine("h100-80")
    plain, cast = (job(products, model="llama-3.1-8b", seq=8192, kernels="compiled") for products in (None, "fp8"))
    assert seconds(plain, h100) / seconds(cast, h100) == pytest.approx(1.265, abs=0.05)
    assert cast.peak_non_model_bytes == plain.peak_non_model_bytes


def test_a_card_without_units_and_jobs_that_no_library_runs_are_refused() -> None:
    with pytest.raises(PlanError, match="gpu 'a100-80' has no units for products in fp8; leave --products out"):
        find_policy("tide")(job("fp8"), load_machine("a100-80"), Settings())
    for others in ({"lora": "r=8"}, {"attention": "math"}, {"dtype": "fp16"}, {"autocast": "fp16"}):
        with pytest.raises(ModelError, match="products is 'fp8'; they are for bf16, not beside"):
            preset("llama-3.2-1b", batch=1, seq=512, products="fp8", **others)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="products is 'int4'; known dtypes of products are fp8"):
        job("int4")


def test_a_plan_keeps_them_and_is_planned_only() -> None:
    machine = ps.machine("rtx4090-128gb")
    plan = find_policy("tide")(job("fp8"), machine, Settings())
    assert plan.workload.products == "fp8" and variant(plan.workload, batch=2).products == "fp8"
    plan.check(machine=machine)
    with pytest.raises(PlanError, match="made for bf16 with products in fp8, not bf16"):
        plan.check(workload=replace(job(None)))
    with pytest.raises(PlanError, match="products in fp8, which are planned only; plan without --products"):
        check_hardware(plan, "virtual")
