"""Adam on the GPU for resident and streamed chunks, on the CPU for others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from pstar_sim.core.step import Kind, Queue
from pstar_sim.policy.kit.facts import Facts
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.schedule import Modes
from pstar_sim.policy.passes.disk_rows import DiskRows, DiskTrips
from pstar_sim.policy.passes.draft_rows import After, DraftRows, ends_of
from pstar_sim.policy.passes.working_lists import WorkingLists


def room(job: Job, chunk: int, modes: Modes) -> int:
    """What comes for a streamed chunk's update, without a sum that a mode asks for."""
    return job.visiting_bytes(chunk, held=chunk in modes.summed)


def resident_updates(
    job: Job, pinned: Collection[int], at: Sequence[int], updates: Mapping[int, int]
) -> dict[int, list[int]]:
    """Position -> resident chunks updated behind it, in order.

    Behind a barrier between updates of streamed chunks, whose states queue on the link: copies down begin at once, and
    room for copies up is free early.

    pinned: besides small ones.
    at, updates: as in `Schedule`.
    """
    uses = job.uses
    residents = sorted(filter(uses.updated, (*job.small, *pinned)), key=lambda c: (uses.first_use(c), c))
    behind: dict[int, list[int]] = {}
    if job.barrier is None:
        for c in residents:
            behind.setdefault(at[job.update_block[c]], []).append(c)
        return behind
    if len(updates) < 2:
        return {at[-1]: residents}
    done = 0
    for number, n in enumerate(sorted(updates.values()), start=1):
        until = min(len(residents), round(number / (len(updates) - 1) * len(residents)))
        behind[n] = residents[done:until]
        done = until
    return behind


def dropped_lists(
    job: Job, pinned: Collection[int], at: Sequence[int], behind: Mapping[int, Sequence[int]]
) -> dict[int, tuple[int, int]]:
    """Pinned chunk -> position behind which its working list is dropped, and behind which it is allocated anew and
    updated.

    pinned, at: as for `resident_updates`.
    behind: by `resident_updates`.
    """
    if not job.drops_pinned_lists:
        return {}
    until = {c: n for n, chunks in behind.items() for c in chunks}
    unused = {c: (at[job.update_block[c]], until[c]) for c in pinned if job.uses.updated(c)}
    return {c: (last, update) for c, (last, update) in unused.items() if last < update}


def adam_key(adam: str, uses: Facts, chunk: int) -> tuple[float, ...]:
    """Of CPU updates that are ready, the smallest goes first."""
    if adam == "fifo":
        return (1.0, float(uses.last_gradient(chunk)), float(uses.first_use(chunk)))
    return (1.0, float(uses.first_use(chunk)))


class UpdateRows:
    def __init__(self, rows: DraftRows, working: WorkingLists, trips: DiskTrips) -> None:
        self._rows = rows
        self._working = working
        self._trips = trips
        self.disks = DiskRows(rows)
        self._parameters_down: dict[int, int] = {}  # streamed chunk -> write-back of its updated parameters
        self._barrier_waited_for = False  # by an update of a resident chunk
        schedule = rows.schedule
        pinned = schedule.modes.pinned
        self._residents_behind = resident_updates(schedule.job, pinned, schedule.at, schedule.updates)
        self._drops_behind: defaultdict[int, list[int]] = defaultdict(list)  # position -> pinned chunks
        for c, (last, _) in dropped_lists(schedule.job, pinned, schedule.at, self._residents_behind).items():
            self._drops_behind[last].append(c)

    @property
    def before_at(self) -> Iterable[int]:
        return self._rows.schedule.updates.values()

    @property
    def behind_at(self) -> Iterable[int]:
        return {*self._rows.schedule.updates.values(), *self._drops_behind, *self._residents_behind}

    def before(self, n: int) -> Sequence[int]:
        rows, schedule = self._rows, self._rows.schedule
        job, c = schedule.job, schedule.positions[n].chunk
        ready = {"grad32": rows.add_of[c]} if c in rows.add_of else {}
        ready |= self.disks.read(c)
        lists = job.visiting(c, held=schedule.sum_waits(c))
        arriving = [self._working.fetch(c, n, name, ((ready[name], 0),) if name in ready else ()) for name in lists]
        if (
            schedule.all_in_grad32(c) and schedule.visits[c][-1].first == n
        ):  # the chunk's working list has left, so only room is needed
            gone: After = ((rows.release_of[c, "param"], 0),)
            rows.add(Queue.COMPUTE, Kind.ALLOC, c, "param", job.uses.last_gradient(c), after=gone)
        return arriving

    def update(self, c: int, waits: Sequence[int]) -> int:
        """A position of its own."""
        rows = self._rows
        after = ends_of((*waits, *((rows.sum_of[c],) if c in rows.sum_of else ())))
        charge = rows.charge_of_update(Kind.GPU_UPDATE, c)
        here = rows.add(Queue.COMPUTE, Kind.GPU_UPDATE, c, charge=charge, after=after, is_position=True, gated=True)
        rows.gpu_update_of[c] = here
        return here

    def behind(self, n: int, here: int) -> None:
        rows, schedule = self._rows, self._rows.schedule
        if schedule.positions[n].chunk >= 0:
            self._send_states(schedule.positions[n].chunk, here)
        for c in self._drops_behind.get(n, ()):
            rows.release_of[c, "param"] = rows.drop(c, "param", schedule.job.uses.last_gradient(c))
        for c in self._residents_behind.get(n, ()):
            self._update_resident(c)

    def _send_states(self, c: int, here: int) -> None:
        """Copies down, of updated parameters too unless they never leave the GPU; accumulated gradients are dropped."""
        rows, schedule = self._rows, self._rows.schedule
        job = schedule.job
        moment = job.uses.last_gradient(c)
        if job.several:
            name = schedule.modes.sum_list(c)
            rows.release_of[c, name] = rows.drop(c, name, moment)
            self.disks.write(c, "grad32", here)
        key, ready = rows.down_key(c), ((here, 0),)
        for number, name in enumerate(job.states_of(c)):
            self.disks.write(c, name, rows.writeback(c, name, moment, ready, (*key, 1.0 + number), drop=True))
        if schedule.never_leaves(c):
            return
        stays = c in schedule.stays
        order = (2.0, float(job.uses.first_use(c))) if stays and schedule.states_first else (*key, 0.0)
        after: After = (*ready, *self._trips.before_gradient(c))
        self._parameters_down[c] = rows.writeback(c, "param", moment, after, order, drop=not stays)
        self._trips.updated(c, self._parameters_down[c])
        self.disks.write(c, "param", self._parameters_down[c])

    def _update_resident(self, c: int) -> None:
        rows, schedule = self._rows, self._rows.schedule
        job = schedule.job
        gated = job.barrier is not None and not self._barrier_waited_for
        self._barrier_waited_for = True
        after: After = ((rows.sum_of[c], 0),) if c in rows.sum_of else ()
        if (c, "param") in rows.release_of:
            gone: After = ((rows.release_of[c, "param"], 0),)
            rows.add(Queue.COMPUTE, Kind.ALLOC, c, "param", job.uses.last_gradient(c), after=gone)
        rows.gpu_update_of[c] = rows.add(Queue.COMPUTE, Kind.GPU_UPDATE, c, after=after, gated=gated)

    def close(self) -> None:
        """CPU Adam. Parameters that stay are copied down from the list where the next iteration's gradients arrive,
        which wait for that copy."""
        rows, schedule = self._rows, self._rows.schedule
        job, uses = schedule.job, schedule.job.uses
        last_block = rows.end_of[schedule.at[-1]]
        for c, down in rows.send_of.items():
            waits = [
                down,
                *((rows.add_of[c],) if c in rows.add_of else ()),
                *((last_block,) if schedule.updates_wait else ()),
            ]
            waits += self.disks.read(c).values()
            key = self.disks.adam_key(c) or adam_key(schedule.adam, uses, c)
            charge = rows.charge_of_update(Kind.CPU_UPDATE, c)
            rows.cpu_update_of[c] = rows.add(
                Queue.ADAM, Kind.CPU_UPDATE, c, charge=charge, after=ends_of(waits), key=key, gated=True
            )
            for name in (*job.states_of(c), "param", "grad32"):
                self.disks.write(c, name, rows.cpu_update_of[c])
        self.disks.close()
        for c, down in self._parameters_down.items():
            if c in schedule.stays:
                first = schedule.at[job.block_of[uses.spans[c][-1][1]]]  # position of its first last gradient
                rows.wait(rows.first_drop_of.get(c, rows.end_of[first]), (down, 1))
