from __future__ import annotations

from pstar_sim.core.choose import Window
from pstar_sim.core.draft import Draft, DraftRow
from pstar_sim.core.plan import Plan, Resident
from pstar_sim.core.step import DISK_QUEUES, UPDATES, Kind, Place, Queue, Ref
from pstar_sim.core.trips import trips_of
from pstar_sim.policy.kit.schedule import Schedule
from pstar_sim.policy.passes.builder import After, Builder
from pstar_sim.policy.passes.edges import memory_edges


def plan_of(schedule: Schedule, draft: Draft, window: Window) -> Plan:
    job = schedule.job
    b = Builder(job.name, job.workload, job.machine, job.settings, layout=job.layout, trips=False)
    b.predictions["policy_iteration_s"] = window.iteration_s
    _residents(b, schedule)
    ends = _steps(b, schedule, draft, window)
    tight = bool(schedule.modes.on_disks)
    return b.plan(memory=memory_edges(b.steps, draft.rows, ends, window, host_as_predicted=tight))


def _residents(b: Builder, schedule: Schedule) -> None:
    job, modes = schedule.job, schedule.modes
    for c in (*job.small, *modes.pinned):
        b.live(c, Place.GPU)
        if job.ranks > 1 and c not in schedule.whole:  # a small chunk that never changes is always whole
            b.resident(c, Place.GPU, "remote")
    for c in job.moving:
        if c in modes.pinned:
            continue
        b.live(c, Place.HOST)
        if c in modes.streamed:
            b.modes[c] = "stream"
        if c in schedule.stays:
            b.resident(c, Place.GPU, "param")
    for c, name in schedule.never_on_host:
        b.initial.discard(Resident(c, name, Place.HOST))
    for c, name in schedule.on_disks:
        b.resident(c, Place.NVME, name)


def _steps(b: Builder, schedule: Schedule, draft: Draft, window: Window) -> list[tuple[int, int]]:
    """First the window's steps of the next iteration, then its own, then earlier ones. Returns each row's first and
    last step."""
    rows, blocks = draft.rows, schedule.job.blocks
    started = [(i, k) for i, k, done in window.events if not done]
    order = [i for i, _ in sorted(started, key=lambda start: -start[1])]
    ends: list[tuple[int, int]] = [(0, 0)] * len(rows)
    total = 0
    for i in order:
        n = rows[i].block
        length = blocks[n].last - blocks[n].first + 1 if n >= 0 else 1
        ends[i] = (total, total + length - 1)
        total += length
    gate = {rows[j].queue: Ref(ends[j][1]) for j in sorted(draft.gate, key=ends.__getitem__)}  # the last of each queue
    for i in order:
        after = [Ref(ends[j][1], back) for j, back in rows[i].after]
        after += gate.values() if rows[i].gated else ()
        if rows[i].block < 0:
            step_of(b, rows[i], after)
            continue
        block = blocks[rows[i].block]
        for m in range(block.first, block.last + 1):
            b.compute(m, after if m == block.first else ())
    return ends


def step_of(b: Builder, row: DraftRow, after: After) -> int:
    if row.stash >= 0:
        moment = trips_of(b.workload)[row.kind, row.stash].moment
        return b.add(row.queue, row.kind, stash=row.stash, moment=moment, after=after)
    if row.kind in UPDATES:
        return b.add(row.queue, row.kind, chunk=row.chunk, moment=b.uses.last_gradient(row.chunk), after=after)
    place = None
    if row.kind in (Kind.ALLOC, Kind.FREE):
        place = Place.HOST if row.queue in (Queue.H2D, Queue.ADAM, *DISK_QUEUES) else Place.GPU
    return b.add(
        row.queue, row.kind, chunk=row.chunk, list_name=row.list_name, place=place, moment=row.moment, after=after
    )
