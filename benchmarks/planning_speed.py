"""CPU seconds of `optimal` with its certificate: GPT 18B on one GPU of four kinds, eager and behind the
barrier (limit 3 s), and GPT 175B on 64 GPUs, eight nodes of eight (limit 10 s).

Sequence 1024, checkpointing, bf16; batch 4, 8 and 16 a GPU (175B: 4). Imports are not counted. On several ranks there
is no bound, and the row says so. Prints a row a case, writes results/planning_speed.json, fails above a limit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

from _results import write_result

import pstar_sim as ps
from pstar_sim.bounds.bounds import bound_reason, lower_bound
from pstar_sim.catalog.loader import with_nodes
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.errors import DoesNotFit
from pstar_sim.policy.optimal import optimal
from pstar_sim.sim.play import play
from pstar_sim.workload.workload import Workload

MACHINES = ("v100-32", "a100-80", "rtx4090", "h100-80")
LARGE = (("a100-80x8", 8), ("h100-80x8", 8))
LIMIT_S, LARGE_LIMIT_S = 3.0, 10.0
SETTINGS = {"eager": Settings(update="eager", clip=False), "barrier": Settings(update="step", clip=True)}


def certified(workload: Workload, machine: Machine, settings: Settings) -> tuple[float, Plan, float | None]:
    """CPU seconds, the plan and its bound (None on several ranks). Raises DoesNotFit."""
    begin_s = time.process_time()
    plan = optimal(workload, machine, settings)
    none = bound_reason(workload, machine) is not None
    bound_s = None if none else lower_bound(workload, machine, settings, plan.layout).seconds
    return time.process_time() - begin_s, plan, bound_s


def cases() -> list[tuple[str, Machine, str, int, float]]:
    """Model, machine, settings, batch, limit in seconds."""
    one = [
        ("18B", ps.machine(name), settings, batch, LIMIT_S)
        for name in MACHINES
        for settings in SETTINGS
        for batch in (4, 8, 16)
    ]
    many = [
        ("175B", with_nodes(ps.machine(name), nodes), settings, 4, LARGE_LIMIT_S)
        for name, nodes in LARGE
        for settings in SETTINGS
    ]
    return one + many


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="of each case; the median is given")
    args = parser.parse_args()
    warm = ps.preset("1B", batch=1, seq=1024, dtype="bf16")
    certified(warm, ps.machine("v100-32"), SETTINGS["eager"])  # what the first call imports is not the planner's

    rows: list[dict[str, object]] = []
    over = 0
    print("| model | machine | GPUs | batch a GPU | update | iteration | over bound | CPU | limit |")
    print("|---|---|---:|---:|---|---:|---:|---:|---:|")
    for model, machine, setting, batch, limit_s in cases():
        workload = ps.preset(model, batch=batch, seq=1024, dtype="bf16", checkpointing=True)
        label = f"| {model} | {machine.name} | {len(machine.ranks)} | {batch} | {setting} |"
        try:
            took = [certified(workload, machine, SETTINGS[setting]) for _ in range(args.repeats)]
        except DoesNotFit as reason:
            print(f"{label} does not fit: {reason} |")
            continue
        cpu_s = statistics.median(seconds for seconds, _, _ in took)
        _, plan, bound_s = took[0]
        iteration_s = play(plan).iteration_s
        gap = None if bound_s is None else iteration_s / bound_s - 1
        over += cpu_s > limit_s
        shown = "no bound" if gap is None else f"{gap:.2%}"
        print(f"{label} {iteration_s:.3f} s | {shown} | {cpu_s:.2f} s | {limit_s:g} s |", flush=True)
        rows.append({"model": model, "machine": machine.name, "gpus": len(machine.ranks), "batch": batch,
                     "update": setting, "iteration_s": iteration_s, "bound_s": bound_s, "cpu_s": cpu_s,
                     "limit_s": limit_s})  # fmt: skip
    print(
        f"\n{over} of {len(rows)} cases over their limit; written to {write_result('planning_speed', {'rows': rows})}"
    )
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
