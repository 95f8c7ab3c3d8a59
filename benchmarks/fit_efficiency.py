"""Fits the efficiency model to the published rows that scope.toml calls fitted.

Least squares of log(predicted / published) of times and phases, over the numbers below, with a weak pull to their
start. Residuals come from plans made and simulated, as in `pstar validate`. Their derivatives are differences of such
runs, taken once at the start. So one run of this script is one step of Gauss and Newton: repeat it until nothing
changes. hbm and launch_us are held at the values of --hold: the rows cannot separate them, and a free fit takes half
the datasheet's bandwidth and 240 us of launches.

Prints each number with its physical meaning and its sensitivity (the change of the median time when the number grows by
a tenth), and the fit with each whole machine left out in turn: errors on the rows of that machine.

    python benchmarks/fit_efficiency.py        # some minutes; writes benchmarks/results/fit_efficiency.json
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from _results import write_result
from numpy.typing import NDArray
from scipy.optimize import least_squares

from pstar_sim.catalog.attention_rates import attention_rates
from pstar_sim.catalog.efficiency import fitted
from pstar_sim.catalog.loader import load_catalog
from pstar_sim.cost import flops_rate
from pstar_sim.dtypes import MASTER
from pstar_sim.validation.experiments import experiment_of, runs_of
from pstar_sim.validation.replay import replay, row_value
from pstar_sim.validation.rows import PublishedRow, published_rows
from pstar_sim.validation.scope import published_scope, rule_of
from pstar_sim.validation.setups import Experiment, published_machine

HARNESS = "deep-optimizer-states-results"
VM = "v100-32-vm"
FASTER = ("tokens_per_s_per_gpu", "tok_s_gpu", "samples_s", "total_TFLOPS_8N")
TIMES = (*FASTER, "fwd_s", "bwd_s", "adam_s", "iter_s")
ON_GPU = ("all_on_gpu", "zero3_resident")
"""Policies whose plans use no host memory, so that no number of the host moves them."""
MEANING = {
    "matmul": "share of the fp32 peak that large products reach",
    "hbm": "share of the GPU memory's bandwidth that operators reach (held)",
    "launch_us": "beginnings and ends of a moment's kernels (held)",
    "triton_tflops": "both passes of the Triton attention kernel of 2023 on an A100",
    "operator_us": "Python of one operator of a model",
    "wait_us": "time of a moment in which the GPU waits for DeepSpeed's hooks",
    "net_loss": "share of its speed that compute loses while a collective of FSDP runs",
    "zero_net_loss": "the same for DeepSpeed",
    "adam_dram": "share of a node's DRAM bandwidth that CPU Adam reaches",
    "adam_gparams_core": "fused AdamW of one core",
    "adam_found_gparams_per_s": "CPU step of a process with the one thread that a launcher leaves it",
    "pageable_gb_per_s": "blocking copies of memory that is not pinned",
    "bound_adam_gparams": "CPU Adam of Polaris' node where each process is bound to a NUMA domain",
    "loop_ms": "reading of the batch and logging in Deep Optimizer States' script, per micro-batch",
    "geforce_tensor": "share of a GeForce card's tensor peak that large products reach",
    "geforce_peer": "share of a link's rate that collectives through the host's memory reach",
    "a800_tensor": "share of the tensor peak that large products reach on the cards of a node of A800",
    "vm_adam_gparams": "CPU Adam of STRONGHOLD's virtual machine",
}
GEFORCE = "rtx3090"
A800, A800_PEAK = "a100-80-a800", 312e12
_GEFORCE: Any = load_catalog().gpus[GEFORCE].values
STEP, PULL = 0.05, 0.03
MOST = {"geforce_tensor": 1.0, "a800_tensor": 1.0}  # shares of a peak
Array = NDArray[np.float64]


Run = tuple[PublishedRow, ...]


@dataclass(frozen=True)
class Replayed:
    """A run's job with some numbers, and log(predicted / published seconds) of its rows. A run that does not fit has
    errors that are not numbers."""

    job: Experiment
    errors: tuple[float, ...]


def start() -> dict[str, float]:
    """Returns the shipped numbers."""
    e = fitted()
    hosts = {name: published_machine(name, e, "deepspeed").host for name in (VM, "polaris-bound")}
    loop_s = next(experiment_of(run, e).loop_s for run in runs_for("fitted") if run[0].source.startswith(HARNESS))
    return {
        "matmul": e.matmul,
        "hbm": e.hbm,
        "launch_us": e.launch_s * 1e6,
        "triton_tflops": _triton_tflops(),
        "operator_us": load_catalog().framework("pytorch").operator_s * 1e6,
        "wait_us": load_catalog().framework("deepspeed").wait_s * 1e6,
        "net_loss": load_catalog().framework("pytorch").net_loss,
        "zero_net_loss": load_catalog().framework("deepspeed").net_loss,
        "adam_dram": e.adam_dram,
        "adam_gparams_core": e.adam_params_per_core_s / 1e9,
        "adam_found_gparams_per_s": e.adam_found_params_per_s / 1e9,
        "pageable_gb_per_s": e.pageable_bytes_per_s / 1e9,
        "bound_adam_gparams": hosts["polaris-bound"].adam_params_per_s / 1e9,
        "loop_ms": loop_s * 1e3,
        "geforce_tensor": _GEFORCE.tensor_core_efficiency,
        "geforce_peer": _GEFORCE.peer_share,
        "a800_tensor": _a800_tensor(),
        "vm_adam_gparams": hosts[VM].adam_params_per_s / 1e9,
    }


def _a800_tensor() -> float:
    gpu = published_machine("a800-80x8", fitted(), "deepspeed").gpu
    return gpu.flops_per_s["bf16"] / A800_PEAK


def _triton_tflops() -> float:
    return attention_rates()["a100"].kernels["triton"].both


def runs_for(*uses: str) -> list[Run]:
    """Returns the runs whose rows have one of these uses in scope.toml, with their times and phases only."""
    rules = published_scope()
    rows = [r for r in published_rows() if rule_of(r, rules).use in uses]
    return runs_of(r for r in rows if r.metric.endswith("_ms") or r.metric in TIMES)


def job(run: Run, v: dict[str, float]) -> Experiment:
    """Returns the job of a run, with these numbers in place of the shipped numbers that affect the job."""
    on_gpu = experiment_of(run, fitted()).policy.partition(":")[0] in ON_GPU
    efficiency = replace(
        fitted(),
        matmul=v["matmul"],
        hbm=v["hbm"],
        launch_s=v["launch_us"] * 1e-6,
    )
    if not on_gpu:
        efficiency = replace(
            efficiency,
            adam_dram=v["adam_dram"],
            adam_params_per_core_s=v["adam_gparams_core"] * 1e9,
            adam_found_params_per_s=v["adam_found_gparams_per_s"] * 1e9,
            pageable_bytes_per_s=v["pageable_gb_per_s"] * 1e9,
        )
    experiment = experiment_of(run, efficiency)
    machine = experiment.machine
    shape = machine.gpu.products
    assert machine.framework is not None and shape is not None
    zero = machine.framework.name == "deepspeed"
    python = replace(
        machine.framework,
        operator_s=v["operator_us"] * 1e-6,
        wait_s=v["wait_us"] * 1e-6 if zero else machine.framework.wait_s,
        net_loss=v["zero_net_loss" if zero else "net_loss"] if machine.world_size > 1 else 0.0,
    )
    machine = replace(machine, framework=python)
    if experiment.attention == "triton" and shape.generation == "a100":
        shape = replace(shape, flash=shape.flash * v["triton_tflops"] / _triton_tflops())
    dtypes = (experiment.dtype,) if experiment.autocast is None else (experiment.autocast, MASTER)
    rates = {dtype: flops_rate(machine, dtype) for dtype in dtypes if dtype}  # a rate that is not used moves nothing
    gpu = replace(machine.gpu, products=shape, flops_per_s=rates)
    if gpu.name == GEFORCE:
        share = v["geforce_tensor"] / _GEFORCE.tensor_core_efficiency
        rates = {dtype: rate if dtype == "fp32" else rate * share for dtype, rate in rates.items()}
        gpu = replace(gpu, flops_per_s=rates, peer_share=v["geforce_peer"])
    if gpu.name == A800:
        gpu = replace(gpu, flops_per_s=dict.fromkeys(rates, A800_PEAK * v["a800_tensor"]))
    machine = replace(machine, ranks=tuple(replace(r, gpu=gpu) for r in machine.ranks))
    own = {VM: "vm_adam_gparams", "polaris-bound": "bound_adam_gparams"}.get(machine.name.partition(" (")[0])
    if own is not None and not on_gpu:
        machine = replace(machine, host=replace(machine.host, adam_params_per_s=v[own] * 1e9))
    loop_s = v["loop_ms"] / 1e3 if run[0].source.startswith(HARNESS) else 0.0
    return replace(experiment, machine=machine, loop_s=loop_s)


def replayed(run: Run, values: dict[str, float], known: Replayed | None = None) -> Replayed:
    """Returns the run replayed with these numbers; `known` if the job is the same."""
    made = job(run, values)
    if known is not None and made == known.job:
        return known
    outcome = replay(made)
    errors: list[float] = []
    for row in run:
        value = row_value(row, outcome)
        log = math.nan if value is None else math.log(value / row.value)
        errors.append(-log if row.metric in FASTER else log)
    return Replayed(made, tuple(errors))


def errors_of(found: Sequence[Replayed]) -> Array:
    return np.array([error for one in found for error in one.errors])


def derivatives(runs: Sequence[Run], values: dict[str, float], known: Sequence[Replayed]) -> Array:
    """Returns the derivatives of the errors of all rows by the logarithm of each number."""
    base = errors_of(known)
    columns = []
    for name in values:
        more = {**values, name: values[name] * math.exp(STEP)}
        columns.append((errors_of([replayed(r, more, k) for r, k in zip(runs, known)]) - base) / STEP)
    return np.stack(columns, axis=1)


def solved(base: Array, slopes: Array, held: Array, most: Array) -> Array:
    """Returns the logarithms of the factors by which the numbers change, at most `most`."""

    def weighed(x: Array) -> Array:
        return np.concatenate([base + slopes @ (x * ~held), PULL * x])

    bounds = (-np.inf, np.maximum(most, 1e-9))
    return np.asarray(least_squares(weighed, np.zeros(len(most)), loss="soft_l1", f_scale=0.1, bounds=bounds).x * ~held)


def spread(errors: Array) -> dict[str, float]:
    """Returns errors as `pstar validate` gives them; a row without a prediction counts 100 %."""
    sizes = np.where(np.isnan(errors), 1.0, np.abs(np.expm1(errors)))
    return {
        "rows": len(errors),
        "median": round(float(np.median(sizes)), 4),
        "p90": round(float(np.quantile(sizes, 0.9)), 4),
        "bias": round(float(np.nanmedian(errors)), 4),
    }


def sensitivity(base: Array, slope: Array) -> dict[str, object]:
    """Returns the effect of a number on the rows: how many rows it moves, by how much, and the errors with a tenth less
    and a tenth more."""
    moves = np.abs(np.nan_to_num(slope)) > 0.01
    return {
        "rows_moved": int(moves.sum()),
        "moved_by_a_tenth_more": round(float(np.median(slope[moves]) * math.log(1.1)), 4) if moves.any() else 0.0,
        "a_tenth_less": spread(base + slope * math.log(0.9)),
        "a_tenth_more": spread(base + slope * math.log(1.1)),
    }


def in_words(found: dict[str, object]) -> str:
    less, more = found["a_tenth_less"], found["a_tenth_more"]
    assert isinstance(less, dict) and isinstance(more, dict)
    return (
        f"moves {found['rows_moved']} rows by {found['moved_by_a_tenth_more']:+.1%}; a tenth less {less['median']:.1%} "
        f"/ {less['p90']:.1%}, a tenth more {more['median']:.1%} / {more['p90']:.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hold", nargs="*", default=["hbm", "launch_us"], help="numbers that are not fitted")
    held = np.array([name in parser.parse_args().hold for name in MEANING])
    values = start()
    runs, unseen = runs_for("fitted"), runs_for("tested")
    known, others = [replayed(r, values) for r in runs], [replayed(r, values) for r in unseen]
    base, tested = errors_of(known), errors_of(others)
    if np.isnan(base).any():
        raise SystemExit("a fitted run does not fit: its experiment is wrong")
    slopes = derivatives(runs, values, known)
    most = np.array([math.log(MOST[name] / value) if name in MOST else np.inf for name, value in values.items()])
    change = solved(base, slopes, held, most)
    best = {name: float(f"{value * math.exp(x):.3g}") for (name, value), x in zip(values.items(), change)}
    found = errors_of([replayed(r, best) for r in runs])
    other_slopes = derivatives(unseen, values, others)
    print(f"{len(values) - held.sum()} numbers fitted, {held.sum()} held; median and 90th percentile of errors:")
    print(f"fitted rows {spread(base)}, with the fit {spread(base + slopes @ change)}, replayed {spread(found)}")
    print(f"tested rows {spread(tested)}")
    numbers: dict[str, object] = {}
    for i, (name, value) in enumerate(values.items()):
        does = {"fitted": sensitivity(base, slopes[:, i]), "tested": sensitivity(tested, other_slopes[:, i])}
        numbers[name] = {"meaning": MEANING[name], "held": bool(held[i]), "shipped": value, "fit": best[name], **does}
        print(f"{name:18s} {value:8.4g} -> {best[name]:8.4g}   {MEANING[name]}")
        print("\n".join(f"    {use} {in_words(said)}" for use, said in does.items()))
    machines = np.array([row.hardware for run in runs for row in run])
    without: dict[str, object] = {}
    for machine in dict.fromkeys(machines):
        out = machines == machine
        other = solved(base[~out], slopes[~out], held, most)
        without[machine] = {
            "out": spread((base + slopes @ other)[out]),
            "in": spread((base + slopes @ change)[out]),
            "numbers": {n: float(f"{v * math.exp(x):.3g}") for (n, v), x in zip(values.items(), other)},
        }
        print(f"without {machine}: {without[machine]}")
    write_result(
        "fit_efficiency",
        {
            "numbers": numbers,
            "shipped": spread(base),
            "fit": spread(base + slopes @ change),
            "fit_replayed": spread(found),
            "tested": spread(tested),
            "left_out": without,
        },
    )


if __name__ == "__main__":
    main()
