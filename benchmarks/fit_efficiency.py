"""Fits the efficiency model to the published rows that scope.toml calls fitted or to fit.

Least squares of log(predicted / published) of times and phases, over the ten numbers below, with a weak pull to where
they start. Residuals are plans made and simulated, as in `pstar validate`; their derivatives are differences of such
runs, taken once at the start, so one run of this script is one step of Gauss and Newton: repeat it until nothing moves.
hbm and launch_us are held where --hold says: the rows cannot tell them from one another, and a free fit takes half the
datasheet's bandwidth and 240 us of launches.

Prints each number with its physical meaning and its sensitivity (by how much the median time changes when the number
grows by a tenth), and the fit with each whole machine left out in turn: errors on the rows of that machine.

    python benchmarks/fit_efficiency.py        # some minutes; writes benchmarks/results/fit_efficiency.json
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from _results import write_result
from numpy.typing import NDArray
from scipy.optimize import least_squares

from pstar_sim.catalog.efficiency import fitted
from pstar_sim.catalog.generations import generations
from pstar_sim.catalog.loader import load_catalog
from pstar_sim.validation.experiments import experiment_of, runs_of
from pstar_sim.validation.replay import replay, row_value
from pstar_sim.validation.rows import PublishedRow, published_rows
from pstar_sim.validation.scope import published_scope, rule_of
from pstar_sim.validation.setups import Experiment, published_machine

HARNESS = "deep-optimizer-states-results"
VM = "v100-32-vm"
MEANING = {
    "matmul": "share of the fp32 peak that large products reach",
    "hbm": "share of the GPU memory's bandwidth that operators reach (held)",
    "launch_us": "beginnings and ends of a moment's kernels (held)",
    "flash": "share of the rate of large products that fused attention reaches on an A100",
    "wait_us": "time of a moment in which the GPU waits for DeepSpeed's hooks",
    "adam_dram": "share of a node's DRAM bandwidth that CPU Adam reaches",
    "adam_gparams_core": "fused AdamW of one core",
    "pageable_gb_per_s": "blocking copies of memory that is not pinned",
    "loop_ms": "reading of the batch and logging in Deep Optimizer States' script, per micro-batch",
    "vm_adam_gparams": "CPU Adam of STRONGHOLD's virtual machine",
}
STEP, PULL = 0.05, 0.03
Array = NDArray[np.float64]


def start() -> dict[str, float]:
    """Returns the numbers that are shipped."""
    e = fitted()
    vm = published_machine(VM, e, "deepspeed")
    loop_s = next(experiment_of(run, e).loop_s for run in fit_runs() if run[0].source.startswith(HARNESS))
    return {
        "matmul": e.matmul,
        "hbm": e.hbm,
        "launch_us": e.launch_s * 1e6,
        "flash": generations()["a100"].flash,
        "wait_us": load_catalog().framework("deepspeed").wait_s * 1e6,
        "adam_dram": e.adam_dram,
        "adam_gparams_core": e.adam_params_per_core_s / 1e9,
        "pageable_gb_per_s": e.pageable_bytes_per_s / 1e9,
        "loop_ms": loop_s * 1e3,
        "vm_adam_gparams": vm.host.adam_params_per_s / 1e9,
    }


def fit_runs() -> list[tuple[PublishedRow, ...]]:
    """Runs whose rows are fitted or to fit, their times and phases only."""
    rules = published_scope()
    rows = [r for r in published_rows() if rule_of(r, rules).use in ("fitted", "to fit")]
    return runs_of(r for r in rows if r.metric.endswith("_ms") or r.metric == "tokens_per_s_per_gpu")


def job(run: tuple[PublishedRow, ...], v: dict[str, float]) -> Experiment:
    """Returns the run with these numbers in place of the shipped ones."""
    efficiency = replace(
        fitted(),
        matmul=v["matmul"],
        hbm=v["hbm"],
        launch_s=v["launch_us"] * 1e-6,
        adam_dram=v["adam_dram"],
        adam_params_per_core_s=v["adam_gparams_core"] * 1e9,
        pageable_bytes_per_s=v["pageable_gb_per_s"] * 1e9,
    )
    experiment = experiment_of(run, efficiency)
    machine = experiment.machine
    assert machine.framework is not None and machine.gpu.products is not None
    if machine.framework.name == "deepspeed":
        machine = replace(machine, framework=replace(machine.framework, wait_s=v["wait_us"] * 1e-6))
    shape = replace(machine.gpu.products, flash=v["flash"])
    machine = replace(machine, ranks=tuple(replace(r, gpu=replace(r.gpu, products=shape)) for r in machine.ranks))
    if machine.name == VM:
        machine = replace(machine, host=replace(machine.host, adam_params_per_s=v["vm_adam_gparams"] * 1e9))
    loop_s = v["loop_ms"] / 1e3 if run[0].source.startswith(HARNESS) else 0.0
    return replace(experiment, machine=machine, loop_s=loop_s)


def residuals(runs: Sequence[tuple[PublishedRow, ...]], values: dict[str, float]) -> Array:
    """log(predicted / published seconds) of every row; a run that does not fit is an error of the experiment."""
    found: list[float] = []
    for run in runs:
        outcome = replay(job(run, values))
        if outcome.reason:
            raise SystemExit(f"{run[0].system}, {run[0].params}: {outcome.reason}")
        for row in run:
            value = row_value(row, outcome)
            assert value is not None
            found.append(math.log(value / row.value) * (-1 if row.metric == "tokens_per_s_per_gpu" else 1))
    return np.array(found)


def solved(base: Array, slopes: Array, held: Array) -> Array:
    """Logarithms of the factors by which the numbers change."""

    def weighed(x: Array) -> Array:
        return np.concatenate([base + slopes @ (x * ~held), PULL * x])

    return np.asarray(least_squares(weighed, np.zeros(slopes.shape[1]), loss="soft_l1", f_scale=0.1).x * ~held)


def spread(errors: Array) -> dict[str, float]:
    sizes = np.abs(np.expm1(errors))
    return {
        "rows": len(errors),
        "median": round(float(np.median(sizes)), 4),
        "p90": round(float(np.quantile(sizes, 0.9)), 4),
        "bias": round(float(np.median(errors)), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hold", nargs="*", default=["hbm", "launch_us"], help="numbers that are not fitted")
    held = np.array([name in parser.parse_args().hold for name in MEANING])
    runs, values = fit_runs(), start()
    base = residuals(runs, values)
    columns = [(residuals(runs, {**values, n: values[n] * math.exp(STEP)}) - base) / STEP for n in values]
    slopes = np.stack(columns, axis=1)
    machines = np.array([row.hardware for run in runs for row in run])
    change = solved(base, slopes, held)
    numbers: dict[str, object] = {}
    for i, (name, value) in enumerate(values.items()):
        grown = float(np.median(np.abs(slopes[:, i])) * math.log(1.1))
        best = float(f"{value * math.exp(change[i]):.3g}")
        numbers[name] = {"meaning": MEANING[name], "shipped": value, "fit": best, "a_tenth_more": round(grown, 4)}
        print(f"{name:18s} {value:8.4g} -> {best:8.4g}   a tenth more: {grown:.2%}   {MEANING[name]}")
    without: dict[str, object] = {}
    for machine in dict.fromkeys(machines):
        out = machines == machine
        other = solved(base[~out], slopes[~out], held)
        without[machine] = {"out": spread((base + slopes @ other)[out]), "in": spread((base + slopes @ change)[out])}
        print(f"without {machine}: {without[machine]}")
    print(spread(base), spread(base + slopes @ change))
    write_result(
        "fit_efficiency",
        {"numbers": numbers, "shipped": spread(base), "fit": spread(base + slopes @ change), "left_out": without},
    )


if __name__ == "__main__":
    main()
