"""What each constant of the search buys: plans of a few jobs with the constant as it is, and with another value in its
place (none of it, half, twice).

The figures of a row: by how much the iterations are longer than with the constant (the mean over the jobs, and the job
where it is most), by how much more bytes the plans move, the effort of planning in scheduled rows, and CPU seconds of
planning. Iterations, bytes and effort are the same in every run; each constant is measured on the jobs of its group
(GROUPS). Constants of the bounds are measured by how far the fluid bound falls. Prints a row per change, writes
results/search_constants.json. About 12 minutes of CPU time.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

from _results import write_result

import pstar_sim as ps
from pstar_sim.bounds import fluid
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.planner import variants
from pstar_sim.policy.family import attempt
from pstar_sim.policy.family.course import Knobs
from pstar_sim.policy.family.searched import own_plans
from pstar_sim.policy.family.tide import tide
from pstar_sim.policy.kit.points import Point
from pstar_sim.policy.kit.ties import burden, least_of
from pstar_sim.policy.optimal import optimal
from pstar_sim.units import MIB
from pstar_sim.workload.workload import Workload

EAGER, BARRIER = Settings(update="eager", clip=False), Settings(update="step", clip=True)
FAMILY, CORE, PLANNER = "pstar_sim.policy.family", "pstar_sim.core", "pstar_sim.planner"
KIT = "pstar_sim.policy.kit"

Job = tuple[Workload, Machine, Settings]
Change = tuple[str, str, str, Any]

# (group, module, constant, what is put in its place)
CHANGES: tuple[tuple[str, str, str, tuple[Any, ...]], ...] = (
    ("search", f"{FAMILY}.search", "GOOD_ENOUGH", (0.0,)),
    ("search", f"{FAMILY}.search", "HOPELESS", (1.0, 2.0)),
    ("search", f"{FAMILY}.search", "AGAIN", (1.0, 2.0)),
    ("search", f"{FAMILY}.search", "LARGE", (1e9,)),
    ("search", f"{FAMILY}.search", "MOST_LARGE", (1,)),
    ("search", f"{FAMILY}.search", "OVERHEAD_OPS", (0,)),
    ("search", f"{FAMILY}.search", "TURNS", ((),)),
    ("search", f"{FAMILY}.search", "FRONT", (0,)),
    ("search", f"{FAMILY}.search", "START_HEADS", (0.0,)),
    ("search", f"{FAMILY}.search", "USUAL", (Knobs(lead_chunks=1), Knobs(lead_chunks=3), Knobs(stay=0.0))),
    ("search", f"{FAMILY}.search", "FEWER_PINS", ((),)),
    ("search", f"{FAMILY}.search", "FIRST_STEP", (10**6,)),
    ("search", f"{FAMILY}.searched", "FIRST_OPS", (25_000,)),
    ("search", f"{FAMILY}.searched", "OTHER_OPS", (15_000,)),
    ("search", f"{FAMILY}.searched", "SECOND_OPS", (0,)),
    ("search", f"{FAMILY}.searched", "REST_OPS", (0,)),
    ("search", f"{FAMILY}.searched", "REST_OPS_OF_FEW", (100_000,)),
    ("search", f"{FAMILY}.searched", "SECOND", (1,)),
    ("search", f"{FAMILY}.searched", "REST", (1,)),
    ("search", f"{FAMILY}.searched", "FACTORS", ((),)),
    ("search", f"{FAMILY}.searched", "FACTORS_OF_FEW", ((), (0.5, 2.0))),
    ("search", f"{FAMILY}.searched", "WORTH_A_SIZE", (0.0, 1.0)),
    ("search", f"{FAMILY}.searched", "WORTH_A_SIZE_OF_FEW", (0.0, 1.0)),
    ("search", f"{FAMILY}.searched", "COARSE", (0,)),
    ("search", f"{FAMILY}.searched", "MOST_WASTE", (1.0,)),
    ("search", f"{FAMILY}.searched", "FEWEST_CHUNKS", (1,)),
    ("search", f"{FAMILY}.searched", "MOST_CHUNKS", (10**6,)),
    ("search", f"{FAMILY}.modes", "SHARES", (2, 257)),
    ("search", f"{FAMILY}.course", "LINGER_COPIES", (1,)),
    ("search", f"{FAMILY}.course", "SHORT", (0,)),
    ("search", f"{KIT}.ties", "AS_FAST", (0.0,)),
    ("search", f"{CORE}.choose", "MOST_WINDOWS", (3, 12)),
    ("ranks", f"{KIT}.job", "SUMS_TAKE", (0.0, 1.0)),
    ("ranks", f"{FAMILY}.course", "SUMS_TAKE", (0.0, 1.0)),
    ("lru", f"{FAMILY}.eviction", "LAPS", (1,)),
    ("tide", f"{FAMILY}.asynchronous", "CLOSE_TO_BOUND", (0.0, 1.0)),
    ("tide", f"{FAMILY}.asynchronous", "NEIGHBOURS", (0,)),
    ("tide", f"{FAMILY}.asynchronous", "MORE_THAN_STATIC", (0,)),
    ("tide", f"{KIT}.ties", "AS_FAST", (0.0,)),
    ("tide", f"{CORE}.layout", "WANTED_CHUNKS", (12, 48)),
    ("tide", f"{CORE}.layout", "MOST_WASTE", (0.009, 0.036)),
    ("tide", f"{CORE}.layout", "USUAL_BYTES", (64 * MIB, 256 * MIB)),
    ("tide", f"{CORE}.layout", "USUAL_PART", (16, 64)),
    ("tide", f"{CORE}.layout", "OVERSIZE", (0.0,)),
    ("tide", f"{CORE}.layout", "OCTAVES", (0.0,)),
    ("tide", f"{CORE}.layout", "WASTE", (0.0,)),
    ("tide", f"{CORE}.layout", "GOOD", (0.0, 1.0)),
    ("tide", f"{CORE}.layout", "MOST_SIZES", (24, 384)),
    ("tide", f"{CORE}.layout", "MOST_STARTS", (8, 512)),
    ("tide", f"{CORE}.layout", "SMALL_BYTES", (0, 16 * MIB)),
    ("tide", f"{CORE}.layout", "SMALL_PART", (10**9, 40)),
    ("tide", f"{CORE}.layout", "MOST_SMALL", (1.0,)),
    ("optimal", "pstar_sim.policy.optimal", "FAR_AHEAD", (0.0, 1.0)),
    ("variants", f"{PLANNER}.variants", "WORTH", (0.0, 0.05)),
    ("variants", f"{PLANNER}.variants", "SEARCHED", (3, 10)),
    ("variants", f"{PLANNER}.variants", "ALIKE", (1, 10)),
    ("fluid", "pstar_sim.bounds.fluid", "MOST_POINTS", (75,)),
    ("fluid", "pstar_sim.bounds.fluid", "FAR", (2.0,)),
)


class Planned(NamedTuple):
    """seconds: per iteration, or of a bound.
    moved_bytes: by one rank per iteration.
    effort: rows scheduled.
    cpu_s: of planning.
    """

    seconds: float
    moved_bytes: int
    effort: int
    cpu_s: float


def gpt(name: str, batch: int, micro_batches: int = 1) -> Workload:
    return ps.preset(name, batch=batch, seq=1024, dtype="bf16", micro_batches=micro_batches)


def jobs() -> dict[str, Job]:
    return {
        "1B, 5 GB, eager": (gpt("1B", 4), ps.machine("rtx4090", gpu_memory="5GB"), EAGER),
        "1B, 6 GB, 3 micro-batches": (gpt("1B", 2, 3), ps.machine("rtx4090", gpu_memory="6GB"), BARRIER),
        "12B, v100-32": (gpt("12B", 8), ps.machine("v100-32"), BARRIER),
        "llama-3-8b, h100-80, eager": (
            ps.preset("llama-3-8b", batch=1, seq=1024, dtype="bf16"), ps.machine("h100-80"), EAGER,
        ),
    }  # fmt: skip


def of_ranks() -> dict[str, Job]:
    eight = ps.machine("v100-32x8", gpu_memory="4GB")
    return {
        "1B, 8 x 4 GB, eager": (gpt("1B", 4), eight, EAGER),
        "1B, 8 x 4 GB, 2 micro-batches": (gpt("1B", 2, 2), eight, BARRIER),
    }


def of_tide() -> dict[str, Job]:
    """Smaller and larger GPUs, one and three micro-batches: a plan of tide takes little time."""
    return {
        f"{model}, {machine}, {memory}, {micro} micro-batches, {word}": (
            gpt(model, 4, micro), ps.machine(machine, gpu_memory=memory), settings,
        )
        for model, machine, memory in (
            ("1B", "rtx4090", "5GB"), ("1B", "rtx4090", "10GB"), ("4B", "rtx4090", "23GB"), ("12B", "v100-32", "31GB"),
        )
        for micro in (1, 3)
        for word, settings in (("eager", EAGER), ("barrier", BARRIER))
    }  # fmt: skip


def of_variants() -> dict[str, tuple[Sequence[Workload], Machine]]:
    """Candidates of a batch."""

    def among(model: str, sizes: Sequence[int]) -> Sequence[Workload]:
        plain = [
            ps.preset(model, batch=size, seq=1024, dtype="bf16", checkpointing=how)
            for size in sizes
            for how in (True, False)
        ]
        return variants.candidates(plain, max(sizes))

    return {
        "1B, batch 8, 12 GB": (among("1B", (4, 8)), ps.machine("rtx4090", gpu_memory="12GB")),
        "4B, batch 16": (among("4B", (16,)), ps.machine("rtx4090")),
    }


def best_plan(found: Iterator[Any]) -> tuple[float, int]:
    best = least_of(found, seconds=lambda f: f.seconds, burden=lambda f: burden(f.plan))
    return best.seconds, sum(best.plan.moved_bytes.values())


def own(job: Job, point: Point) -> tuple[float, int]:
    return best_plan(own_plans(*job, point, "optimal"))


def by_policy(policy: Callable[..., Plan], job: Job) -> tuple[float, int]:
    plan = policy(*job)
    return float(str(plan.predictions["policy_iteration_s"])), sum(plan.moved_bytes.values())


def of_race(job: tuple[Sequence[Workload], Machine]) -> tuple[float, int]:
    chosen = variants.choose(*job, EAGER)
    return chosen.iteration_s, sum(chosen.plan.moved_bytes.values())


def bounded(job: Job) -> tuple[float, int]:
    workload, machine, settings = job
    bound = fluid.fluid_bound(workload, machine, settings, build_layout(workload), most_points=fluid.MOST_POINTS)
    return bound.seconds, 0


# group -> its jobs, and what is done with one
GROUPS: Mapping[str, tuple[Callable[[], Mapping[str, Any]], Callable[[Any], tuple[float, int]]]] = {
    "search": (jobs, lambda job: own(job, Point(streams=True))),
    "ranks": (of_ranks, lambda job: own(job, Point(streams=True))),
    "lru": (jobs, lambda job: own(job, Point(streams=True, eviction="lru"))),
    "tide": (of_tide, lambda job: by_policy(tide, job)),
    "optimal": (jobs, lambda job: by_policy(optimal, job)),
    "variants": (of_variants, of_race),
    "fluid": (jobs, bounded),
}


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
    """The number of rows that are scheduled meanwhile."""
    rows = [0]
    choose = attempt.choose

    def counting(draft: Any, **named: Any) -> Any:
        window = choose(draft, **named)
        rows[0] += len(draft.rows) * (len(window.periods_s) + 1)
        return window

    with changed(f"{FAMILY}.attempt", "choose", counting):
        yield rows


def planned(group: str) -> list[Planned]:
    """Of every job of the group."""
    make, plan = GROUPS[group]
    found = []
    for job in make().values():
        begin_s = time.process_time()
        with counted() as rows:
            seconds, moved_bytes = plan(job)
        found.append(Planned(seconds, moved_bytes, rows[0], time.process_time() - begin_s))
    return found


def measured(change: Change) -> list[Planned]:
    """Of every job of the group, with a constant changed."""
    group, module, name, value = change
    with changed(module, name, value):
        return planned(group)


def figures(now: list[Planned], usual: list[Planned]) -> dict[str, float]:
    longer = [a.seconds / b.seconds - 1 for a, b in zip(now, usual)]
    effort, moved_bytes = sum(b.effort for b in usual), sum(b.moved_bytes for b in usual)
    return {
        "mean_longer": sum(longer) / len(longer),
        "most_longer": max(longer, key=abs),
        "moved": sum(a.moved_bytes for a in now) / moved_bytes if moved_bytes else 1.0,
        "effort": sum(a.effort for a in now) / effort if effort else 1.0,
        "cpu_s": sum(a.cpu_s for a in now),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="constants of these names")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    changes: list[Change] = [
        (group, module, name, value)
        for group, module, name, values in CHANGES
        for value in values
        if not args.only or name in args.only
    ]
    groups = sorted({change[0] for change in changes})
    print(
        "| constant | is | becomes | group | iterations | most | bytes | effort | CPU s |\n"
        "|---|---|---|---|---:|---:|---:|---:|---:|"
    )
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(args.workers) as pool:
        usual = dict(zip(groups, pool.map(planned, groups)))
        for group, found in usual.items():
            print(f"| as it is | | | {group} | | | | | {sum(f.cpu_s for f in found):.1f} |", flush=True)
        for (group, module, name, value), now in zip(changes, pool.map(measured, changes)):
            was = getattr(importlib.import_module(module), name)
            row = figures(now, usual[group])
            rows.append(
                {"group": group, "module": module, "constant": name, "is": str(was), "becomes": str(value), **row}
            )
            print(
                f"| {module.removeprefix('pstar_sim.')}.{name} | {str(was)[:24]} | {str(value)[:60]} | {group} | "
                f"{row['mean_longer']:+.3%} | {row['most_longer']:+.3%} | {row['moved'] - 1:+.2%} | "
                f"{row['effort']:.0%} | {row['cpu_s']:.1f} |",
                flush=True,
            )
    if not args.only:
        as_it_is = {
            group: {"jobs": list(GROUPS[group][0]()), "effort": sum(f.effort for f in found),
                    "cpu_s": sum(f.cpu_s for f in found)}
            for group, found in usual.items()
        }  # fmt: skip
        print(write_result("search_constants", {"groups": as_it_is, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
