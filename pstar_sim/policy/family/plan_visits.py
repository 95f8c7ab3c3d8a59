"""Plans from visits, for a user's policy that decides when chunks are on the GPU; the passes take care of
micro-batches, ranks, stashes and updates.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from operator import attrgetter

from pstar_sim.core.choose import choose
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Place
from pstar_sim.errors import CannotPlan, DoesNotFit
from pstar_sim.policy.family.attempt import Attempt, least_window
from pstar_sim.policy.family.course import Course, Knobs
from pstar_sim.policy.family.disks import fastest_apart, with_disks
from pstar_sim.policy.kit.blocks import Stretch, merged
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.room import budget_bytes, describe_moment
from pstar_sim.policy.kit.schedule import Modes, modes_of
from pstar_sim.policy.kit.visits import Visit
from pstar_sim.policy.passes.feasibility import check_gpu, check_host
from pstar_sim.policy.passes.lowering import draft_of


def plan_visits(
    job: Job,
    visits: Iterable[Visit],
    *,
    pinned: Collection[int] = (),
    streamed: Collection[int] = (),
    prefetch: str | int | None = None,
    adam: str | None = None,
    lists_at_once: int | None = None,
) -> Plan:
    """Returns the plan in which chunks are on the GPU for these visits.

    visits: at least `job.uses.touched[chunk]` for each chunk of `job.moving` that is not pinned. Those that overlap or
        follow one another are merged, and what comes after a chunk's last gradient (`job.uses.last_gradient(chunk)`),
        with which it leaves, is ignored.
    pinned: of `job.candidates` (with gradients, not small), states stay on the GPU; they are always there and have no
        visits.
    streamed: of `job.candidates`, states come to the GPU for the update.
    prefetch: "none": fetched when the moment before the visit has ended; a number from 1: that many chunks ahead; "edf"
        (the point's value, for None): as far ahead as there is room, earliest deadline first.
    adam: order of CPU Adam: "after-backward", "fifo" (as gradients arrive) or "edf" (as the next forward needs
        parameters; the point's value, for None).
    lists_at_once: at most n separate gradient lists on the GPU: one opens when the n-th before it has left. n must
        exceed those filled at the same time. None: all with room.

    Raises CannotPlan for visits that leave out a use, or name no chunk or moment, and DoesNotFit if a moment's visits
    do not fit the GPU, or lists the host: fewer or shorter visits, or fewer pinned chunks, need less.
    """
    made = schedule_visits(
        job,
        visits,
        pinned=pinned,
        streamed=streamed,
        prefetch=prefetch,
        adam=adam,
        lists_at_once=lists_at_once,
    )
    return made.plan()


def schedule_visits(
    job: Job,
    visits: Iterable[Visit],
    *,
    pinned: Collection[int] = (),
    streamed: Collection[int] = (),
    prefetch: str | int | None = None,
    adam: str | None = None,
    lists_at_once: int | None = None,
    gpu_bytes: int | None = None,
    limit_s: float = math.inf,
) -> Attempt:
    """`plan_visits` without steps. Raises its errors.

    gpu_bytes: model data and tide, by default the GPU's budget.
    limit_s: an iteration with more work on any queue is not scheduled (`least_window`).
    """
    prefetch = job.point.prefetch if prefetch is None else prefetch
    adam = job.point.adam if adam is None else adam
    _check_orders(job, prefetch, adam)
    modes = modes_of(job, pinned, streamed)
    _check_modes(job, modes)
    modes = with_disks(job, modes)
    blocks = _blocks(job, modes, visits)
    check_gpu(job)
    check_host(job, modes)
    knobs = Knobs(linger=False, stay=0.0)
    course = Course(job, modes, knobs, blocks)
    if course.least_room_bytes < 0:
        tightest = course.positions[course.room.index(course.least_room_bytes)]
        what = "the chunks that visit the GPU" + (f" and {len(modes.pinned)} that stay there" if modes.pinned else "")
        if tightest.block >= 0:
            what = f"{describe_moment(job.workload, job.blocks[tightest.block].first)}; {what}"
        raise _short(job, Place.GPU, -course.least_room_bytes, what)
    spare = 0 if gpu_bytes is None else max(0, job.machine.gpu_budget_bytes - gpu_bytes)

    def made_of(course: Course) -> Attempt:
        room = [left - spare for left in course.room]
        schedule = replace(course.schedule(), prefetch=prefetch, adam=adam, room=room, lists_at_once=lists_at_once)
        draft = draft_of(schedule)
        draft.gpu_free_bytes -= spare
        window = least_window(draft)
        return Attempt(course, schedule, draft, choose(draft) if window.iteration_s <= limit_s else window)

    whole = made_of(course)
    if whole.window.stuck is not None:
        _, place, wanted, free = whole.window.stuck
        raise _short(job, Place(place), max(1, wanted - free), "the visits, in the order that was chosen")
    return fastest_apart(whole, lambda modes: made_of(Course(job, modes, knobs, blocks)))


def room_beside(job: Job, visits: Iterable[Visit]) -> Sequence[int]:
    """Free in each of `job.blocks` beside these visits, gradient lists, other ranks' slices and gradients on their way
    down, negative where they do not fit. Raises CannotPlan as `plan_visits` does.
    """
    modes = Modes(frozenset())
    return Course(job, modes, Knobs(stay=0.0), _blocks(job, modes, visits)).room


def _check_orders(job: Job, prefetch: str | int, adam: str) -> None:
    ahead = isinstance(prefetch, int) and not isinstance(prefetch, bool) and prefetch >= 1
    if not ahead and prefetch not in ("none", "edf"):
        raise CannotPlan(f'{job.name}: prefetch={prefetch!r} is not "none", "edf" or a whole number from 1')
    if adam not in ("after-backward", "fifo", "edf"):
        raise CannotPlan(f'{job.name}: adam={adam!r} is not "after-backward", "fifo" or "edf"')


def _check_modes(job: Job, modes: Modes) -> None:
    for c in sorted(modes.pinned | modes.streamed):
        _check_chunk(job, c, f"{'pinned' if c in modes.pinned else 'streamed'} chunk {c}")
        if not job.uses.updated(c):
            raise CannotPlan(
                f"{job.name}: chunk {c} gets no gradient, so it has no states to pin or stream; a visit over all "
                "moments keeps it on the GPU"
            )
    if both := sorted(modes.pinned & modes.streamed):
        raise CannotPlan(f"{job.name}: chunk {both[0]} is pinned and streamed; a chunk has one mode only")


def _check_chunk(job: Job, chunk: int, what: str) -> None:
    if not 0 <= chunk < len(job.sizes):
        raise CannotPlan(f"{job.name}: {what}: there is no such chunk; chunks are 0 to {len(job.sizes) - 1}")
    if chunk in job.small:
        raise CannotPlan(f"{job.name}: {what}: the chunk is small and always on the GPU; leave it out")


def _blocks(job: Job, modes: Modes, visits: Iterable[Visit]) -> list[list[Stretch]]:
    moments = len(job.workload.moments)
    held: list[list[Stretch]] = [[] for _ in job.sizes]
    for visit in visits:
        _check_chunk(job, visit.chunk, str(visit))
        if visit.chunk in modes.pinned:
            raise CannotPlan(f"{job.name}: {visit}: the chunk is pinned, so it has no visits; leave it out")
        if not 0 <= visit.first <= visit.last < moments:
            raise CannotPlan(f"{job.name}: {visit} is not within the moments 0 to {moments - 1}")
        last = visit.last
        if job.uses.updated(visit.chunk):  # the chunk leaves with its last gradient
            last = min(last, job.uses.last_gradient(visit.chunk))
        if visit.first <= last:
            held[visit.chunk].append(Stretch(job.block_of[visit.first], job.block_of[last]))
    stretches = [merged(sorted(each)) for each in held]
    for c in job.moving:
        left_out = [m for m in job.uses.touched[c] if not _within(stretches[c], job.block_of[m])]
        if left_out and c not in modes.pinned:
            raise CannotPlan(
                f"{job.name}: chunk {c} is used in moment {left_out[0]}, which none of its visits contains"
            )
    return stretches


def _within(stretches: Sequence[Stretch], block: int) -> bool:
    at = bisect_right(stretches, block, key=attrgetter("first"))
    return at > 0 and block <= stretches[at - 1].last


def _short(job: Job, place: Place, short_bytes: int, what: str) -> DoesNotFit:
    budget = budget_bytes(job.machine, place)
    return DoesNotFit(
        policy=job.name, place=place.value, needed_bytes=budget + short_bytes, available_bytes=budget, what=what
    )
