"""A schedule becomes a draft, position by position ([Note: passes] in draft_rows.py)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from pstar_sim.core.draft import Charge, Draft
from pstar_sim.core.effects import tide_at_cut
from pstar_sim.core.step import Kind, Queue
from pstar_sim.policy.kit.schedule import Schedule
from pstar_sim.policy.passes.collective_rows import Collectives
from pstar_sim.policy.passes.disk_rows import DiskTrips
from pstar_sim.policy.passes.draft_rows import DraftRows, Pass, ends_of
from pstar_sim.policy.passes.feasibility import held_on_host, trips_bytes
from pstar_sim.policy.passes.floors import Floors
from pstar_sim.policy.passes.gradient_rows import GradientRows
from pstar_sim.policy.passes.trip_rows import TripRows
from pstar_sim.policy.passes.update_rows import UpdateRows
from pstar_sim.policy.passes.working_lists import WorkingLists


def draft_of(schedule: Schedule) -> Draft:
    """Rows could run one after the other.

    The passes' order is that of their rows on the compute queue, and between equal deadlines. Last gradients go down
    once summed, so Collectives comes before Gradients; first fetches wait for CPU Adam, so `WorkingLists.close` after
    `UpdateRows.close`.
    """
    rows = DraftRows(schedule)
    floors = Floors(rows)
    on_disks = DiskTrips(rows)
    working, collectives = WorkingLists(rows, floors, on_disks), Collectives(rows, floors)
    trips, gradients = TripRows(rows), GradientRows(rows, working, on_disks)
    updates = UpdateRows(rows, working, on_disks)
    before: defaultdict[int, list[Pass]] = defaultdict(list)  # position -> passes with rows before it, in order
    behind: defaultdict[int, list[Pass]] = defaultdict(list)
    one: Pass
    for one in (working, collectives, gradients, trips, updates):
        for n in one.before_at:
            before[n].append(one)
    for one in (trips, collectives, working, gradients, updates):
        for n in one.behind_at:
            behind[n].append(one)
    for n, position in enumerate(schedule.positions):
        waits = [row for one in before[n] for row in one.before(n)] if n in before else ()
        if position.chunk >= 0:
            here = updates.update(position.chunk, waits)
        else:
            here = _moments(rows, n, waits)
        rows.end(here)
        if n in behind:
            for one in behind[n]:
                one.behind(n, here)
        rows.leave()
    gradients.close()
    updates.close()
    on_disks.close()
    working.close()
    collectives.close()
    floors.close()
    return _draft(rows, updates)


def _moments(rows: DraftRows, n: int, waits: Sequence[int]) -> int:
    job, position = rows.schedule.job, rows.schedule.positions[n]
    charge = job.block_charges[position.block]
    if position.seconds != charge.seconds:  # the block includes adds of gradients
        charge = Charge(position.seconds, charge.gpu_take, charge.gpu_free)
    return rows.add(
        Queue.COMPUTE,
        Kind.COMPUTE,
        charge=charge,
        after=ends_of(waits),
        is_position=True,
        block=position.block,
    )


def _draft(rows: DraftRows, updates: UpdateRows) -> Draft:
    schedule = rows.schedule
    job, machine, modes = schedule.job, schedule.job.machine, schedule.modes
    gpu_free = machine.gpu_budget_bytes - schedule.resident_bytes - sum(job.sizes[c] for c in schedule.stays)
    gpu_free += sum(job.remote[c] for c in job.small_visits)  # counted at every position, absent at the cut
    return Draft(
        rows=rows.rows,
        gpu_free_bytes=gpu_free - tide_at_cut([block.tide_bytes for block in job.blocks]),
        host_free_bytes=machine.host_budget_bytes
        - held_on_host(job, modes.pinned, schedule.never_on_host)
        - updates.disks.held_bytes
        - trips_bytes(job, modes),
        room=schedule.room,
        lead_bytes=schedule.lead_bytes,
        gate=rows.last_adds,
        rates=job.cost.rates(measured=False),
    )
