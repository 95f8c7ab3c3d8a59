"""Fits the efficiency model to the published rows that scope.toml calls fitted, and writes the result.

Plain least squares of log(predicted / published) over iteration times and phases, over five parameters that hold for
all machines, one of the logs' harness and the Adam rate of one virtual machine. Every residual is a plan made
and simulated, as in `pstar validate`. Writes pstar_sim/catalog/efficiency.toml, and in pstar_sim/validation/data
harness.toml and the virtual machine's Adam in machines.toml. Run again it gives the same figures.

    python benchmarks/fit_efficiency.py            # prints before and after
    python benchmarks/fit_efficiency.py --write    # and writes the files
"""

from __future__ import annotations

import argparse
import datetime
import math
import re
from dataclasses import replace
from pathlib import Path

from scipy.optimize import least_squares

from pstar_sim.catalog.efficiency import Efficiency, fitted
from pstar_sim.catalog.machine import Machine
from pstar_sim.validation.experiments import experiment_of, runs_of
from pstar_sim.validation.replay import replay, row_value
from pstar_sim.validation.rows import PublishedRow, published_rows
from pstar_sim.validation.scope import published_scope, rule_of
from pstar_sim.validation.setups import Experiment

HERE = Path(__file__).resolve().parent.parent / "pstar_sim"
HARNESS = "deep-optimizer-states-results"
VM = "v100-32-vm"
NAMES = ("matmul", "launch_us", "adam_dram", "adam_gparams_core", "pageable_gb_per_s", "loop_ms", "vm_adam_gparams")


def fitted_runs() -> list[tuple[PublishedRow, ...]]:
    """Runs whose rows are fitted, their times and phases only."""
    rules = published_scope()
    rows = [r for r in published_rows() if rule_of(r, rules).use == "fitted" and r.metric.endswith("_ms")]
    return runs_of(rows)


def efficiency_of(values: tuple[float, ...]) -> Efficiency:
    matmul, launch_us, adam_dram, adam_core, pageable, _, _ = values
    return replace(
        fitted(),
        matmul=matmul,
        launch_s=launch_us * 1e-6,
        adam_dram=adam_dram,
        adam_params_per_core_s=adam_core * 1e9,
        pageable_bytes_per_s=pageable * 1e9,
    )


def job(run: tuple[PublishedRow, ...], values: tuple[float, ...]) -> Experiment:
    """The run with these parameters in place of the shipped ones."""
    experiment = experiment_of(run, efficiency_of(values))
    machine: Machine = experiment.machine
    if machine.name == VM:
        machine = replace(machine, host=replace(machine.host, adam_params_per_s=values[6] * 1e9))
    loop_s = values[5] / 1e3 if run[0].source.startswith(HARNESS) else 0.0
    return replace(experiment, machine=machine, loop_s=loop_s)


def residuals(values: tuple[float, ...], runs: list[tuple[PublishedRow, ...]]) -> list[float]:
    """log(predicted / published) of every row; a run that does not fit is an error of the experiment."""
    found: list[float] = []
    for run in runs:
        outcome = replay(job(run, values))
        if outcome.reason:
            raise SystemExit(f"{run[0].system}, {run[0].params}: {outcome.reason}")
        for row in run:
            value = row_value(row, outcome)
            assert value is not None
            found.append(math.log(value / row.value))
    return found


def report(title: str, values: tuple[float, ...], errors: list[float]) -> None:
    sizes = sorted(abs(math.expm1(e)) for e in errors)
    print(title)
    for name, value in zip(NAMES, values, strict=True):
        print(f"  {name:20s} {value:10.4g}")
    print(f"  {len(sizes)} rows: median {sizes[len(sizes) // 2]:.1%}, 90th {sizes[int(0.9 * (len(sizes) - 1))]:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the files of the catalog and of validation")
    args = parser.parse_args()
    runs = fitted_runs()
    e = fitted()
    start = (
        e.matmul,
        e.launch_s * 1e6,
        e.adam_dram,
        e.adam_params_per_core_s / 1e9,
        e.pageable_bytes_per_s / 1e9,
        350.0,
        0.33,
    )
    report("before", start, residuals(start, runs))

    def shifted(logs: list[float]) -> list[float]:
        values = tuple(s * math.exp(x) for s, x in zip(start, logs, strict=True))
        return residuals((min(values[0], 1.0), *values[1:]), runs)

    result = least_squares(shifted, [0.0] * len(start), diff_step=0.02, xtol=3e-3)
    values = tuple(float(s * math.exp(x)) for s, x in zip(start, result.x, strict=True))
    values = tuple(float(f"{v:.3g}") for v in values)
    report("after", values, residuals(values, runs))
    if args.write:
        write(values, len(result.fun))


def write(values: tuple[float, ...], rows: int) -> None:
    today = datetime.date.today().isoformat()
    shown = dict(zip(NAMES, values, strict=True))
    source = f"fitted to {rows} published rows, see `pstar validate` (benchmarks/fit_efficiency.py)"
    for path, section, names in (
        (HERE / "catalog" / "efficiency.toml", "[fitted]", NAMES[:5]),
        (HERE / "validation" / "data" / "harness.toml", f'["{HARNESS}"]', NAMES[5:6]),
    ):
        head, _, tail = path.read_text(encoding="utf-8").partition(section)
        for name in names:
            tail = re.sub(rf"^{name} = .*$", f"{name} = {shown[name]:g}", tail, flags=re.MULTILINE)
        if names == NAMES[:5]:
            tail = re.sub(r"^source = .*$", f'source = "{source}"', tail, flags=re.MULTILINE)
        tail = re.sub(r"^checked = .*$", f"checked = {today}", tail, flags=re.MULTILINE)
        path.write_text(head + section + tail, encoding="utf-8")
    path = HERE / "validation" / "data" / "machines.toml"
    text = path.read_text(encoding="utf-8")
    section = "[hosts.vm-12-cores.calibrated]\nadam_gparams_per_s = "
    text = re.sub(re.escape(section) + r".*", f"{section}{shown['vm_adam_gparams']:g}", text)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
