"""Plans by search: all three ways to update a chunk, counts by a roofline, the rest by playing neighbours.

Chunks are pinned (states on the GPU for ever), streamed (states come for one update) or updated on the CPU; a roofline
says how many of each, they are interleaved through the layers, and the event loop plays neighbouring numbers and knobs
(search.py). Where the caller leaves the chunk size open a few sizes are tried, and the most promising searches go on.
What was found is followed (pace.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import Layout, build_layout, size_near
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.errors import DoesNotFit
from pstar_sim.policy.family.attempt import Attempt
from pstar_sim.policy.family.pace import period_s
from pstar_sim.policy.family.search import Search
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.points import Point
from pstar_sim.policy.kit.ties import burden, least_of
from pstar_sim.policy.passes.fits import check_gpu
from pstar_sim.units import format_bytes, format_s
from pstar_sim.workload.workload import Workload

__all__ = ["Found", "own_plans", "searched"]

FEWEST_CHUNKS, MOST_CHUNKS = 16, 400  # of other chunk sizes that are tried
MOST_WASTE = 0.06  # of them
COARSE = 100  # so few chunks or fewer are worth cutting finer
FIRST_OPS, OTHER_OPS = 50_000, 30_000  # effort on the usual chunk size, on each other one
SECOND_OPS, REST_OPS, REST_OPS_OF_FEW = 40_000, 100_000, 150_000  # and then on the best two, on the best one
WORTH_A_SIZE, WORTH_A_SIZE_OF_FEW = 2e-2, 5e-3  # so far from the floor other chunk sizes are tried


@dataclass(frozen=True, slots=True)
class Found:
    """A plan, whose it is, and its seconds as followed. pins_alone_s: what the closed form allows without streams."""

    seconds: float
    of: str
    plan: Plan
    pins_alone_s: float = 0.0


def searched(name: str, workload: Workload, machine: Machine, settings: Settings, point: Point) -> Plan:
    """The plan of another policy of the family where it may stream: the best of the search, at the usual chunk size.
    Raises DoesNotFit."""
    own = own_plans(workload, machine, settings, point, name, sizes=False)
    best = least_of(own, seconds=lambda f: f.seconds, burden=lambda f: burden(f.plan))
    predictions = dict(best.plan.predictions) | {"policy_iteration_s": best.seconds}
    return replace(best.plan, predictions=predictions)


def own_plans(
    workload: Workload,
    machine: Machine,
    settings: Settings,
    point: Point,
    name: str,
    *,
    sizes: bool = True,
) -> Iterator[Found]:
    """The best of the search over each chunk size tried. Raises DoesNotFit if no size fits."""
    usual = build_layout(workload, chunk_bytes=settings.chunk_bytes, ranks=len(machine.ranks))
    reason: DoesNotFit | None = None
    few = len(usual.chunks) <= COARSE
    searches: list[Search] = []  # over the sizes that fit
    tried: dict[str, str] = {}

    def look(layout: Layout, effort_ops: int, point: Point = point) -> None:
        nonlocal reason
        job = Job(name, workload, machine, settings, point, layout)
        try:
            check_gpu(job)
        except DoesNotFit as short:
            reason = reason or short
            return
        search = Search(job, 0)
        if go_on(search, effort_ops):
            searches.append(search)
        else:
            reason = reason or search.short()

    def go_on(search: Search, effort_ops: int) -> bool:
        attempts = search.run(effort_ops)
        if attempts:
            size = format_bytes(search.job.layout.chunk_bytes)
            tried[size + ("" if search.job.follow_tide else ", constant capacity")] = format_s(search.seconds)
        return bool(attempts)

    def far() -> bool:
        worth = WORTH_A_SIZE_OF_FEW if few else WORTH_A_SIZE
        return not any(search.seconds <= search.floor_s * (1 + worth) for search in searches)

    look(usual, FIRST_OPS)
    if sizes and settings.chunk_bytes is None and far():
        for factor in (0.5, 0.25, 0.125) if few else (0.5, 2.0):
            size = int(usual.chunk_bytes * factor)
            layout = build_layout(
                workload, chunk_bytes=size_near(workload, size) if few else size, ranks=len(machine.ranks)
            )
            if FEWEST_CHUNKS <= len(layout.chunks) <= MOST_CHUNKS and layout.waste <= MOST_WASTE:
                look(layout, OTHER_OPS)
    if sizes and point.capacity == "tide" and not searches:
        # Room that only low tide has is sometimes better left to what passes through.
        look(usual, FIRST_OPS, replace(point, capacity="peak"))
    for search in sorted(searches, key=lambda search: search.seconds)[:2]:
        go_on(search, SECOND_OPS)
    left_ops = REST_OPS_OF_FEW if few else REST_OPS
    for search in sorted(searches, key=lambda search: search.seconds)[:3]:
        if left_ops > 0 and not any(search.good_enough for search in searches):
            go_on(search, left_ops)
            left_ops = search.effort_ops  # of one that knows nothing more to try
    if not searches:
        assert reason is not None
        raise reason
    search = min(searches, key=lambda search: search.seconds)
    for attempt in search.fastest:  # followed, since the event loop's own figure is a prediction
        plan = attempt.plan(_choices(search, attempt, tried))
        yield Found(period_s(plan), name, plan, search.alone_s)


def _choices(search: Search, attempt: Attempt, sizes: dict[str, str]) -> dict[str, object]:
    modes, knobs = attempt.modes, attempt.knobs
    count = len(search.job.candidates)
    cpu = count - len(modes.pinned) - len(modes.streamed)
    return {
        "capacity": "GPU budget less the non-model bytes of each moment"
        if search.job.follow_tide
        else "GPU budget less the highest non-model bytes of any moment",
        "modes": f"of {count} chunks {len(modes.pinned)} pinned, {len(modes.streamed)} streamed, {cpu} by CPU Adam",
        "pins": f"{len(modes.pinned)} of {count} chunks ({search.most} would fit)",
        "tried": len(search.tried),
        "chunk_sizes": sizes,
        "kept_gaps": len(attempt.course.kept),
        "stay_over_the_border": len(attempt.course.stays),
        "copies_down": "as the next forward needs them" if knobs.down == "edf" else "in the order they come",
        "roofline_s": search.floor_s,
    }
