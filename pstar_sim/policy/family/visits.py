"""A plan from visits: for a policy of one's own, whose idea is who is on the GPU when.

Micro-batches, ranks, stashes and updates are matters of the passes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import NamedTuple

from pstar_sim.core.choose import choose
from pstar_sim.core.plan import Plan
from pstar_sim.errors import CannotPlan, DoesNotFit
from pstar_sim.policy.family.course import Course, Knobs
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.schedule import Modes
from pstar_sim.policy.passes.fits import check_gpu, check_host
from pstar_sim.policy.passes.lowering import draft_of
from pstar_sim.policy.passes.plan import plan_of

__all__ = ["Visit", "plan_visits"]


class Visit(NamedTuple):
    """The working list of `chunk` is on the GPU from moment `first` to moment `last`, both included. On several ranks
    the chunk is whole then."""

    chunk: int
    first: int
    last: int


def plan_visits(
    job: Job,
    visits: Iterable[Visit],
    *,
    pinned: Collection[int] = (),
    streamed: Collection[int] = (),
    prefetch: str | int = "edf",
    adam: str = "edf",
) -> Plan:
    """The plan in which chunks are on the GPU for these visits.

    visits: of each chunk of `job.moving` that is not pinned, at least the moments `job.uses.touched[chunk]`. Visits
        that overlap or follow one another are one.
    pinned: chunks whose states stay on the GPU.
    streamed: chunks whose states come to the GPU for the update. All others are updated by Adam on the CPU.
    prefetch: "none" fetches a chunk when the moment before its visit has ended, a number that many chunks ahead, "edf"
        as far ahead as there is room, the earliest deadline first.
    adam: order of Adam on the CPU: "after-backward", "fifo" (as gradients arrive) or "edf" (as the next forward needs
        parameters).

    Raises CannotPlan for visits that leave out a use or name what is not there, DoesNotFit where a moment's visits do
    not fit the GPU or what lives on the host does not fit the host.
    """
    modes = Modes(frozenset(pinned), frozenset(streamed))
    _check_modes(job, modes)
    blocks = _blocks(job, modes, visits)
    check_gpu(job)
    check_host(job, modes.pinned)
    course = Course(job, modes, Knobs(linger=False, stay=0.0), blocks)
    if course.least_room_bytes < 0:
        raise _short(job, "gpu", -course.least_room_bytes, "the visits of the tightest moment and its non-model data")
    schedule = replace(course.schedule(), prefetch=prefetch, adam=adam)
    draft = draft_of(schedule)
    window = choose(draft)
    if window.stuck is not None:
        _, place, wanted, free = window.stuck
        raise _short(job, place, wanted - free, "the visits, in the order that was chosen")
    return plan_of(schedule, draft, window)


def _check_modes(job: Job, modes: Modes) -> None:
    known = frozenset(job.candidates)
    if other := sorted((modes.pinned | modes.streamed) - known):
        raise CannotPlan(f"{job.name}: chunk {other[0]} cannot be pinned or streamed; those in job.candidates can")
    if both := sorted(modes.pinned & modes.streamed):
        raise CannotPlan(f"{job.name}: chunk {both[0]} is pinned and streamed; it can be one of them")


def _blocks(job: Job, modes: Modes, visits: Iterable[Visit]) -> list[list[int]]:
    """Of each chunk the ascending blocks over which it is on the GPU; none of one that does not move."""
    moments = len(job.workload.moments)
    moving = frozenset(job.moving) - modes.pinned
    held: dict[int, set[int]] = {c: set() for c in moving}
    for visit in visits:
        if visit.chunk not in moving:
            raise CannotPlan(f"{job.name}: {visit} is of a chunk that does not move; those in job.moving do")
        if not 0 <= visit.first <= visit.last < moments:
            raise CannotPlan(f"{job.name}: {visit} is not within the moments 0 to {moments - 1}")
        held[visit.chunk].update(range(job.block_of[visit.first], job.block_of[visit.last] + 1))
    for c in sorted(moving):
        if left_out := sorted(set(job.touched[c]) - held[c]):
            moment = next(m for m in job.uses.touched[c] if job.block_of[m] == left_out[0])
            raise CannotPlan(f"{job.name}: chunk {c} is used in moment {moment}, which none of its visits contains")
    return [sorted(held.get(c, ())) for c in range(len(job.sizes))]


def _short(job: Job, place: str, bytes_: int, what: str) -> DoesNotFit:
    machine = job.machine
    budget = machine.gpu_budget_bytes if place == "gpu" else machine.host_budget_bytes
    return DoesNotFit(policy=job.name, place=place, needed_bytes=budget + bytes_, available_bytes=budget, what=what)
