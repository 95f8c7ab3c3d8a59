"""What each constant of the search buys: `optimal` of three jobs with the constant as it is, and taken away, halved or
doubled.

The figures of a row: by how much the iterations are longer than with the constant (the mean over the jobs, and the job
where it is most), and the effort of planning in scheduled ops, as a share of the effort with the constant; and CPU
seconds of planning. Iterations and effort are the same in every run. Constants of the bounds are measured by how far
the fluid bound falls and by its CPU seconds. Prints a row per change, writes results/search_constants.json.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from _results import write_result

import pstar_sim as ps
from pstar_sim.bounds.fluid import MOST_POINTS, fluid_bound
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Settings
from pstar_sim.policy.family import search, tide
from pstar_sim.policy.family.course import Knobs
from pstar_sim.policy.family.searched import own_plans
from pstar_sim.policy.kit.points import Point
from pstar_sim.workload.workload import Workload

EAGER, BARRIER = Settings(update="eager", clip=False), Settings(update="step", clip=True)
FAMILY, CORE = "pstar_sim.policy.family", "pstar_sim.core"
OF_TIDE = ("CLOSE_TO_BOUND",)  # constants of the policies that do not stream

# (module, constant, what is put in its place)
SEARCH: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    (f"{FAMILY}.search", "GOOD_ENOUGH", (0.0,)),
    (f"{FAMILY}.search", "BETTER", (1e-6, 1e-4)),
    (f"{FAMILY}.search", "HOPELESS", (1.0, 2.0)),
    (f"{FAMILY}.search", "AGAIN", (2.0,)),
    (f"{FAMILY}.search", "KEPT", (1,)),
    (f"{FAMILY}.search", "LARGE", (1e9,)),
    (f"{FAMILY}.search", "CALM", (0.0,)),
    (f"{FAMILY}.search", "OVERHEAD_OPS", (0,)),
    (f"{FAMILY}.search", "TURNS", ((),)),
    (f"{FAMILY}.search", "USUAL", (Knobs(lead_chunks=1), Knobs(lead_chunks=3))),
    (f"{FAMILY}.search", "FEWER_PINS", ((),)),
    (f"{FAMILY}.search", "FIRST_STEP", (8,)),
    (f"{FAMILY}.searched", "FIRST_OPS", (25_000, 100_000)),
    (f"{FAMILY}.searched", "OTHER_OPS", (15_000,)),
    (f"{FAMILY}.searched", "SECOND_OPS", (0,)),
    (f"{FAMILY}.searched", "REST_OPS", (0,)),
    (f"{FAMILY}.searched", "REST_OPS_OF_FEW", (0, 300_000)),
    (f"{FAMILY}.searched", "WORTH_A_SIZE", (1.0,)),
    (f"{FAMILY}.searched", "WORTH_A_SIZE_OF_FEW", (1.0,)),
    (f"{FAMILY}.searched", "COARSE", (0,)),
    (f"{FAMILY}.searched", "MOST_WASTE", (1.0,)),
    (f"{FAMILY}.searched", "FEWEST_CHUNKS", (1,)),
    (f"{FAMILY}.searched", "MOST_CHUNKS", (800,)),
    (f"{FAMILY}.course", "LINGER_COPIES", (1, 4)),
    (f"{FAMILY}.eviction", "LAPS", (1,)),
    (f"{FAMILY}.asynchronous", "CLOSE_TO_BOUND", (0.0, 1.0)),
    (f"{CORE}.choose", "MOST_WINDOWS", (12,)),
    (f"{CORE}.layout", "WANTED_CHUNKS", (12,)),
    (f"{CORE}.layout", "MOST_WASTE", (0.036,)),
)
BOUNDS: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("pstar_sim.bounds.fluid", "MOST_POINTS", (75, 150)),
    ("pstar_sim.bounds.fluid", "FAR", (2.0, 40.0)),
)


def jobs() -> dict[str, tuple[Workload, Machine, Settings]]:
    def gpt(name: str, batch: int, micro_batches: int = 1) -> Workload:
        return ps.preset(name, batch=batch, seq=1024, dtype="bf16", micro_batches=micro_batches)

    return {
        "1B, 5 GB, eager": (gpt("1B", 4), ps.machine("rtx4090", gpu_memory="5GB"), EAGER),
        "1B, 6 GB, 3 micro-batches": (gpt("1B", 2, 3), ps.machine("rtx4090", gpu_memory="6GB"), BARRIER),
        "llama-3-8b, h100-80, eager": (
            ps.preset("llama-3-8b", batch=1, seq=1024, dtype="bf16"), ps.machine("h100-80"), EAGER,
        ),
    }  # fmt: skip


@contextmanager
def changed(module: str, name: str, value: Any) -> Iterator[None]:
    room = importlib.import_module(module)
    usual = getattr(room, name)
    setattr(room, name, value)
    try:
        yield
    finally:
        setattr(room, name, usual)


@contextmanager
def counted() -> Iterator[list[int]]:
    """The number of ops that the searches schedule meanwhile."""
    ops = [0]
    attempt_course = search.attempt_course

    def counting(*args: Any, **named: Any) -> Any:
        found = attempt_course(*args, **named)
        ops[0] += len(found.draft.rows) * (len(found.window.periods_s) + 1)
        return found

    with changed(f"{FAMILY}.search", "attempt_course", counting):
        yield ops


def planned(workload: Workload, machine: Machine, settings: Settings, *, by_tide: bool) -> tuple[float, int, float]:
    """(seconds per iteration, ops scheduled by the search, CPU seconds of planning)."""
    begin_s = time.process_time()
    with counted() as ops:
        if by_tide:
            plan = tide.tide(workload, machine, settings)
            seconds = float(str(plan.predictions["policy_iteration_s"]))
        else:
            seconds = min(f.seconds for f in own_plans(workload, machine, settings, Point(streams=True), "optimal"))
    return seconds, ops[0], time.process_time() - begin_s


def bounded(workload: Workload, machine: Machine, settings: Settings, most_points: int) -> tuple[float, int, float]:
    """(seconds of the fluid bound, points, CPU seconds)."""
    begin_s = time.process_time()
    layout = build_layout(workload)
    bound = fluid_bound(workload, machine, settings, layout, most_points=most_points)
    return bound.seconds, most_points, time.process_time() - begin_s


def measured(change: tuple[str, str, Any]) -> list[tuple[float, int, float]]:
    """Of every job with a constant changed."""
    module, name, value = change
    with changed(module, name, value):
        if "bounds" in module:
            most = value if name == "MOST_POINTS" else MOST_POINTS
            return [bounded(*job, most_points=most) for job in jobs().values()]
        return [planned(*job, by_tide=name in OF_TIDE) for job in jobs().values()]


def figures(now: list[tuple[float, int, float]], usual: list[tuple[float, int, float]]) -> dict[str, float]:
    longer = [a[0] / b[0] - 1 for a, b in zip(now, usual)]
    effort = sum(b[1] for b in usual)
    return {
        "mean_longer": sum(longer) / len(longer),
        "most_longer": max(longer, key=abs),
        "effort": sum(a[1] for a in now) / effort if effort else 1.0,
        "cpu_s": sum(a[2] for a in now),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="constants of this name")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    every = list(jobs().values())
    usual = [planned(*job, by_tide=False) for job in every]
    tides = [planned(*job, by_tide=True) for job in every]
    bounds = [bounded(*job, most_points=MOST_POINTS) for job in every]
    print(f"as it is: {sum(r[1] for r in usual):,} ops, {sum(r[2] for r in usual):.1f} s of CPU\n")
    print(
        "| constant | is | becomes | iterations | most | effort | CPU s |\n|---|---|---|---:|---:|---:|---:|",
        flush=True,
    )
    changes = [
        (module, name, value)
        for module, name, values in (*SEARCH, *BOUNDS)
        for value in values
        if args.only in (None, name)
    ]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(args.workers) as pool:
        for (module, name, value), now in zip(changes, pool.map(measured, changes)):
            was = getattr(importlib.import_module(module), name)
            row = figures(now, bounds if "bounds" in module else tides if name in OF_TIDE else usual)
            rows.append({"module": module, "constant": name, "is": str(was), "becomes": str(value), **row})
            print(
                f"| {module.removeprefix('pstar_sim.')}.{name} | {str(was)[:24]} | {str(value)[:60]} | "
                f"{row['mean_longer']:+.3%} | {row['most_longer']:+.3%} | {row['effort']:.0%} | {row['cpu_s']:.1f} |",
                flush=True,
            )
    if args.only is None:
        write_result("search_constants", {
            "jobs": list(jobs()), "cpu_s": sum(r[2] for r in usual), "ops": sum(r[1] for r in usual),
            "tide_cpu_s": sum(r[2] for r in tides), "fluid_cpu_s": sum(r[2] for r in bounds), "rows": rows,
        })  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
