"""Predicted against measured iteration time on a calibrated machine: three link speeds x three memory budgets.

    python benchmarks/calibrated.py                      # calibrates first, under a minute; about ten minutes in all
    python benchmarks/calibrated.py --machine my.toml    # with the file of `pstar calibrate -o my.toml`

A run waits for a quiet moment. Its first iterations (`--left-out`) do not count: they take up to half as long again as
those behind them, in processor time too. An iteration during which other programs kept more than a fifth of a core busy
does not count; a run without a counted iteration is repeated. The machine's load decides what counts, never the result.
The processor time of the compute thread is printed beside the predicted time: it hardly depends on other programs.

GPT-2 is traced without being run, and each plan is made for the calibrated machine. The prediction is compared with the
median of interleaved runs on the virtual accelerator. No measurement of a run enters its prediction. Two more columns
compare other predictions: by the catalog's entry of the virtual accelerator for the same link and budget, and by the
model's own durations, recorded in a warm-up.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from _load import Others
from _results import write_result

from executor.calibrate import calibrate
from executor.capture import capture
from executor.measuring.rates import throttled
from executor.measuring.status import Status
from executor.run import TrainingJob
from executor.training import StepReport
from pstar_sim.catalog.loader import load_machine, resize
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.planner.compare import play_plan
from pstar_sim.policy.registry import find_policy

BANDWIDTHS_BYTES_PER_S = (0.25e9, 0.5e9, 2e9)
BUDGETS = ("0.9GB", "1.3GB", "2GB")
SETTINGS = Settings(update="step", clip=True)
BUSY_CORES = 0.2


@dataclass(frozen=True)
class Iteration:
    """One iteration: wall seconds, CPU seconds of the compute thread, cores that other programs kept busy meanwhile."""

    seconds: float
    compute_s: float
    others_cores: float


def one_run(job: TrainingJob, plan: Plan, bandwidth: float, steps: int) -> list[Iteration]:
    """Returns all iterations. Raises RuntimeError for a run that left its plan."""
    rows: list[Iteration] = []
    others = Others()
    cpu_s = time.thread_time()

    def on_step(report: StepReport, _: Status) -> None:
        nonlocal cpu_s
        now_s = time.thread_time()
        rows.append(Iteration(report.time_s, now_s - cpu_s, others.cores()))
        cpu_s = now_s

    result = job.run(plan, steps=steps, bandwidth=(bandwidth, bandwidth), on_step=on_step)
    if result.deviations:
        raise RuntimeError(f"the run left its plan: {result.deviations[0]}")
    return rows


def quiet(rows: Sequence[Iteration]) -> list[Iteration]:
    return [row for row in rows if row.others_cores <= BUSY_CORES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", help="a file that pstar calibrate wrote (default: calibrate now)")
    parser.add_argument("--policy", default="tide", help="policy of the plans (default: tide)")
    parser.add_argument("--runs", type=int, default=3, help="interleaved runs of each plan (default: 3)")
    parser.add_argument("--steps", type=int, default=8, help="iterations of a run (default: 8)")
    parser.add_argument("--left-out", type=int, default=4, help="iterations of a run that do not count (default: 4)")
    parser.add_argument("--attempts", type=int, default=4, help="runs at most for one that counts (default: 4)")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds to wait for a quiet moment (default: 20)")
    parser.add_argument("--recorded", action="store_true", help="also predict from a recorded warm-up")
    args = parser.parse_args()
    if args.left_out >= args.steps:
        parser.error(f"--left-out {args.left_out} leaves none of --steps {args.steps} iterations")
    begun_s = time.perf_counter()
    if args.machine is None:
        with tempfile.TemporaryDirectory() as folder:
            machine, _ = calibrate(Path(folder) / "this.toml", device="virtual")
            machine = load_machine(Path(folder) / "this.toml")
    else:
        machine = load_machine(args.machine)
    job = TrainingJob(model="gpt2", batch=2, sequence=64, dtype="fp32", checkpointing=True, lr=1e-4, clip=True)
    workload = capture(
        job.model, batch=job.batch, sequence=job.sequence, micro_batches=1, dtype=job.dtype, checkpointing=True
    )
    recorded = job.record(resize(machine, gpu_memory="4GB")) if args.recorded else None
    cases = [(bandwidth, budget) for bandwidth in BANDWIDTHS_BYTES_PER_S for budget in BUDGETS]
    plans, predicted_s, by_catalog_s, by_record_s, busy = [], [], [], [], []
    for bandwidth, budget in cases:
        here = throttled(resize(machine, gpu_memory=budget), bandwidth, bandwidth)
        plan = find_policy(args.policy)(workload, here, SETTINGS)
        timeline = play_plan(plan)
        plans.append(plan)
        predicted_s.append(timeline.iteration_s)
        busy.append(timeline.busy_s)
        entry = throttled(resize(load_machine("virtual"), gpu_memory=budget), bandwidth, bandwidth)
        by_catalog_s.append(play_plan(find_policy(args.policy)(workload, entry, SETTINGS)).iteration_s)
        by_record_s.append(
            None if recorded is None else play_plan(find_policy(args.policy)(recorded, here, SETTINGS)).iteration_s
        )
    say(f"calibrated and planned in {time.perf_counter() - begun_s:.0f} s; {len(cases)} plans x {args.runs} runs")
    measured: list[list[float]] = [[] for _ in cases]
    compute_s: list[list[float]] = [[] for _ in cases]
    loud = 0
    for number in range(args.runs):
        for column, cpu, plan, (bandwidth, budget) in zip(measured, compute_s, plans, cases):
            for _ in range(args.attempts):
                Others().wait(BUSY_CORES, args.patience)
                rows_of = one_run(job, plan, bandwidth, args.steps)[args.left_out :]
                if quiet(rows_of):
                    break
            else:
                loud += 1
            counted = quiet(rows_of) or rows_of
            column.append(statistics.median(row.seconds for row in counted))
            cpu.append(statistics.median(row.compute_s for row in counted))
            beside = statistics.median(row.others_cores for row in counted)
            sys.stderr.write(
                f"run {number + 1} of {args.runs}, {bandwidth / 1e9:g} GB/s, {budget}: {column[-1]:.3f} s, "
                f"{beside:.1f} cores busy with other programs\n"
            )
    say(f"{'link':>9} {'GPU':>6} {'predicted':>10} {'measured':>9} {'from':>7} {'to':>7} {'error':>7}   queues' shares")
    rows, errors = [], []
    of_catalog = []
    for (bandwidth, budget), expected_s, entry_s, other_s, column, cpu, queues in zip(
        cases, predicted_s, by_catalog_s, by_record_s, measured, compute_s, busy
    ):
        found_s = statistics.median(column)
        of_catalog.append(entry_s / found_s - 1)
        errors.append(expected_s / found_s - 1)
        shares = {queue: queues.get(queue, 0.0) / expected_s for queue in ("compute", "h2d", "d2h", "adam")}
        more = f"; by the catalog's entry {of_catalog[-1]:+.1%}"
        more += "" if other_s is None else f"; from a recorded warm-up {other_s / found_s - 1:+.1%}"
        say(
            f"{bandwidth / 1e9:>4g} GB/s {budget:>6} {expected_s:>8.3f} s {found_s:>7.3f} s {min(column):>7.3f} "
            f"{max(column):>7.3f} {errors[-1]:>+7.1%}   "
            + ", ".join(f"{queue} {share:.0%}" for queue, share in shares.items())
            + f"; compute {queues['compute']:.3f} s, on the processor {statistics.median(cpu):.3f} s"
            + more
        )
        rows.append(
            {
                "bandwidth_bytes_per_s": bandwidth,
                "gpu_memory": budget,
                "predicted_s": expected_s,
                "predicted_by_catalog_s": entry_s,
                "predicted_from_record_s": other_s,
                "measured_s": column,
                "predicted_compute_s": queues["compute"],
                "measured_compute_cpu_s": cpu,
                "error": errors[-1],
                "busy_shares": shares,
            }
        )
    sizes = [abs(error) for error in errors]
    median, worst = statistics.median(sizes), max(sizes)
    met = median <= 0.1 and worst <= 0.2
    say(
        f"median error {median:.1%} (goal 10 %), largest {worst:.1%} (goal 20 %): {'met' if met else 'missed'}; "
        f"{time.perf_counter() - begun_s:.0f} s"
    )
    say(f"by the catalog's entry: median error {statistics.median(map(abs, of_catalog)):.1%}")
    if loud:
        say(f"{loud} of {len(cases) * args.runs} runs had no iteration to themselves and count as they are")
    write_result(
        "calibrated",
        {
            "policy": args.policy,
            "model": f"{job.model}, batch {job.batch}, sequence {job.sequence}, {job.dtype}, checkpointing",
            "runs": rows,
            "median_error": median,
            "largest_error": worst,
            "median_error_of_catalog": statistics.median(map(abs, of_catalog)),
            "met": met,
            "runs_beside_other_programs": loud,
        },
    )


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
