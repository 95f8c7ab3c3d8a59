"""The checker from first to last; `__init__.py` says how it proves a plan."""

from __future__ import annotations

from dataclasses import replace

from pstar_sim.catalog.machine import Machine
from pstar_sim.collector import without_garbage_collection
from pstar_sim.core.check_fields import check_fields
from pstar_sim.core.check_report import CheckReport, GpuPeak
from pstar_sim.core.checker.barrier import check_barrier
from pstar_sim.core.checker.same_job import check_budgets, check_machine, check_workload_of
from pstar_sim.core.checker.structure import check_pins, check_structure
from pstar_sim.core.checker.trips import check_trips
from pstar_sim.core.checker.unrolled import Unrolled
from pstar_sim.core.checker.walk import Walk
from pstar_sim.core.checker.worst_case import Worst, worst_case
from pstar_sim.core.figures import byte_figures, not_checked
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import DISK_QUEUES, Place
from pstar_sim.errors import FalseFigures, PlanError
from pstar_sim.units import format_ranks
from pstar_sim.workload.workload import Workload

MOST_UNROLLED = 4


def check_plan(plan: Plan, workload: Workload | None = None, machine: Machine | None = None) -> CheckReport:
    """Proves the plan, compares its byte figures with the proof, and checks that it is for `workload` and `machine`.
    Raises PlanError with the first violation, naming steps, moment and bytes. Raises FalseFigures with all that are
    false."""
    if workload is not None:
        check_workload_of(plan, workload)
    if machine is not None:
        check_machine(plan, machine)
    report = prove(plan)
    stated = byte_figures(plan, report.peak_bytes)
    if stated.false:
        raise FalseFigures(stated.false)
    why = dict.fromkeys(plan.predictions, "seconds and bounds, which `pstar check` computes")
    rest = not_checked(plan, stated.checked, why, workload=workload is not None, machine=machine is not None)
    return replace(report, figures=stated.checked, not_checked=rest)


@without_garbage_collection()
def prove(plan: Plan) -> CheckReport:
    """Proves every legal interleaving correct and within budgets that the machine has. Raises PlanError with the first
    violation, naming steps, moment and bytes."""
    check_fields(plan)
    check_budgets(plan, plan.machine)
    order = check_structure(plan)
    program = Unrolled(plan, order, 2)
    iterations = 2
    while not program.bounded():
        if iterations == MOST_UNROLLED:
            raise PlanError(
                f"nothing keeps queue {program.unbounded_queue()} from running {MOST_UNROLLED - 1} iterations ahead of "
                "another; an edge to a step of the previous iteration (id@-1) is missing"
            )
        iterations += 1
        program = Unrolled(plan, order, iterations)
    check_barrier(plan, program)
    check_trips(plan, program)
    walk = Walk(plan, program)
    walk.run()
    check_pins(plan)
    budgets = plan.budgets
    held = {r.place for r in plan.initial} | {place for _, place, _ in plan.buffers}
    if Place.NVME in held or any(s.queue in DISK_QUEUES for s in plan.steps):
        budgets[Place.NVME] = plan.nvme_budget_bytes
    gpus = _gpu_peaks(plan, program, walk)
    largest = max(gpus, key=lambda gpu: gpu.bytes)
    worst: dict[Place, Worst | GpuPeak] = {Place.GPU: largest}
    for place, budget in budgets.items():
        if place is not Place.GPU:
            worst[place] = found = worst_case(plan, program, walk, place)
            if found.bytes > budget:
                raise PlanError(found.text(plan, place.value, budget))
    budgets[Place.GPU] = largest.budget_bytes
    return CheckReport(
        steps=len(plan.steps),
        moments=len(plan.workload.moments),
        iterations=iterations,
        peak_bytes={place.value: peak.bytes for place, peak in worst.items()},
        peak_at={place.value: peak.moment for place, peak in worst.items()},
        running={place.value: peak.running for place, peak in worst.items()},
        budget_bytes={place.value: budget for place, budget in budgets.items()},
        gpus=gpus,
    )


def _gpu_peaks(plan: Plan, program: Unrolled, walk: Walk) -> tuple[GpuPeak, ...]:
    """One for all ranks with the same job and budget. Raises PlanError for a rank over budget."""
    ranks_of: dict[tuple[int, int], list[int]] = {}
    for r, (job, budget) in enumerate(zip(plan.jobs, plan.gpu_budgets)):
        ranks_of.setdefault((id(job), budget), []).append(r)
    worst_of: dict[int, Worst] = {}
    peaks: list[GpuPeak] = []
    for (job_id, budget), ranks in ranks_of.items():
        if job_id not in worst_of:
            alone = replace(plan, workload=plan.jobs[ranks[0]], ranked=None)
            worst_of[job_id] = worst_case(alone, program, walk, Place.GPU)
        worst = worst_of[job_id]
        if worst.bytes > budget:
            what = "gpu" if len(ranks_of) == 1 else f"gpu of {format_ranks(ranks)}"
            raise PlanError(worst.text(plan, what, budget))
        peaks.append(
            GpuPeak(
                ranks=tuple(ranks),
                bytes=worst.bytes,
                moment=worst.moment,
                running=worst.running,
                budget_bytes=budget,
            )
        )
    return tuple(peaks)
