"""The fitted figures that are shipped are those that benchmarks/fit_efficiency.py gives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from pstar_sim.catalog.attention_rates import attention_rates
from pstar_sim.catalog.efficiency import fitted
from pstar_sim.catalog.loader import load_catalog
from pstar_sim.validation.experiments import experiment_of, runs_of
from pstar_sim.validation.replay import replay, row_value
from pstar_sim.validation.rows import published_rows
from pstar_sim.validation.scope import published_scope, rule_of
from pstar_sim.validation.setups import published_machine

RESULT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "fit_efficiency.json"


def test_every_fitted_figure_is_what_the_fit_gives() -> None:
    e = fitted()
    logs = runs_of(r for r in published_rows() if r.source.startswith("deep-optimizer-states-results"))
    adam = {
        name: published_machine(name, e, "deepspeed").host.adam_params_per_s for name in ("polaris-bound", "v100-32-vm")
    }
    shipped = {
        "matmul": e.matmul,
        "hbm": e.hbm,
        "launch_us": e.launch_s * 1e6,
        "triton_tflops": attention_rates()["a100"].kernels["triton"].both,
        "operator_us": load_catalog().framework("pytorch").operator_s * 1e6,
        "wait_us": load_catalog().framework("deepspeed").wait_s * 1e6,
        "adam_dram": e.adam_dram,
        "adam_gparams_core": e.adam_params_per_core_s / 1e9,
        "adam_found_gparams_per_s": e.adam_found_params_per_s / 1e9,
        "pageable_gb_per_s": e.pageable_bytes_per_s / 1e9,
        "bound_adam_gparams": adam["polaris-bound"] / 1e9,
        "loop_ms": experiment_of(logs[0]).loop_s * 1e3,
        "net_loss": load_catalog().framework("pytorch").net_loss,
        "zero_net_loss": load_catalog().framework("deepspeed").net_loss,
        "geforce_tensor": load_catalog().gpus["rtx3090"].values.tensor_core_efficiency,
        "geforce_peer": load_catalog().gpus["rtx3090"].values.peer_share,
        "a800_tensor": published_machine("a800-80x8", e, "deepspeed").gpu.flops_per_s["bf16"] / 312e12,
        "vm_adam_gparams": adam["v100-32-vm"] / 1e9,
    }
    numbers = json.loads(RESULT.read_text(encoding="utf-8"))["numbers"]
    assert {name: of["fit"] for name, of in numbers.items()} == pytest.approx(shipped)
    assert {name: of["shipped"] for name, of in numbers.items()} == pytest.approx(shipped), "the fit has not settled"
    assert [name for name, of in numbers.items() if of["held"]] == ["hbm", "launch_us"]


def test_what_torch_keeps_is_the_median_of_the_fitted_runs() -> None:
    """Qwen 1.8B with DeepSpeed's ZeRO-3, six lengths: what the card showed beside tensors and context."""
    rules, kept = published_scope(), []
    rows = [r for r in published_rows() if r.metric == "gpu_peak_GB" and rule_of(r, rules).use == "fitted"]
    for run in runs_of(rows):
        made = experiment_of(run)
        assert made.machine.framework is not None
        if made.machine.framework.name == "deepspeed":
            none = replace(made.machine, framework=replace(made.machine.framework, kept_bytes=0))
            predicted = row_value(run[0], replay(replace(made, machine=none)))
            assert predicted is not None
            kept.append(run[0].value - predicted)
    assert len(kept) == 6
    assert load_catalog().framework("deepspeed").kept_bytes / 1e9 == pytest.approx(median(kept), abs=0.01)
