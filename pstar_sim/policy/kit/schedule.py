"""An asynchronous policy's decisions, of which the passes write its draft. They know no queue, and no times but the
seconds of each position.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

from pstar_sim.policy.kit.blocks import Position, Stretch
from pstar_sim.policy.kit.job import Job

# Lists for which the host has room at a time on each of their ways: working lists from disks to the GPU, last gradients
# to disks, and sums of gradients that more is added to.
TRIPS = 2


@dataclass(frozen=True, slots=True)
class Modes:
    """pinned: states stay on the GPU, with sums.
    streamed: they come for one update; others have CPU Adam.
    summed: micro-batches' gradients add up on the GPU though states live elsewhere, when `Schedule.sums` says.
    spilt: of these, those that go to the host between two micro-batches.
    waiting: of these, streamed ones whose first of two gradients waits, unadded, beside the last for the update.
    on_disks: states on disks between two updates, on the host for them.
    host_states: of these states, lists that stay on the host.
    wholly_on_disks: of these, working lists too, which pass the host on their way to the GPU, and gradients.
    sums_on_disks: of these, micro-batches' sums too, which come to the host for each add, and for the update.
    """

    pinned: frozenset[int]
    streamed: frozenset[int] = frozenset()
    summed: frozenset[int] = frozenset()
    spilt: frozenset[int] = frozenset()
    waiting: frozenset[int] = frozenset()
    on_disks: frozenset[int] = frozenset()
    host_states: frozenset[str] = frozenset()
    wholly_on_disks: frozenset[int] = frozenset()
    sums_on_disks: frozenset[int] = frozenset()

    def sum_list(self, chunk: int) -> str:
        return "grad" if chunk in self.waiting else "grad32"

    def lists_on_disks(self, job: Job, chunk: int) -> tuple[str, ...]:
        """The working list first."""
        if chunk not in self.on_disks:
            return ()
        working = ("param",) if chunk in self.wholly_on_disks else ()
        sums = ("grad32",) if chunk in self.sums_on_disks else ()
        return (*working, *sums, *(name for name in job.states_of(chunk) if name not in self.host_states))

    def bytes_on_disks(self, job: Job, chunk: int) -> int:
        working = job.sizes[chunk] if chunk in self.wholly_on_disks else 0
        sums = job.layout.payload_bytes(chunk, "grad32") if chunk in self.sums_on_disks else 0
        return working + sums + job.states_bytes(chunk, self.host_states) if chunk in self.on_disks else 0


def modes_of(job: Job, pinned: Iterable[int], streamed: Iterable[int]) -> Modes:
    """In a layer-major workload, a streamed chunk's sum waits on the GPU for the update."""
    there = frozenset(streamed)
    return Modes(frozenset(pinned), there, summed=there if job.sums_on_gpu else frozenset())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Schedule:
    """at: block -> its position.
    updates: streamed chunk -> position of its update.
    visits: moving chunk -> its working list on the GPU, ascending.
    whole: chunk -> the other ranks' slices on this GPU, residents included.
    sums: chunk in `Modes.summed` -> its sum on the GPU, ascending; in between it is on the host. A streamed chunk's
        last stretch ends with its update, another's sum goes down behind its last.
    stays: also on the GPU between the last stretch and the next iteration's first.
    room: per position, not known to be needed.
    resident_bytes: small and pinned.
    lead_bytes: left by early fetches for urgent ones.
    prefetch, adam, down: as in `plan_visits` and `Knobs`.
    lists_at_once: gradient lists on the GPU, None: what has room.
    disk_room_bytes: on the host, for states from and to disks.
    """

    job: Job
    modes: Modes
    positions: Sequence[Position]
    at: Sequence[int]
    updates: Mapping[int, int]
    visits: Mapping[int, Sequence[Stretch]]
    whole: Mapping[int, Sequence[Stretch]]
    sums: Mapping[int, Sequence[Stretch]]
    stays: frozenset[int]
    room: Sequence[int]
    resident_bytes: int
    lead_bytes: int
    prefetch: str | int
    adam: str
    down: str = "edf"
    states_first: bool = False
    lists_at_once: int | None = None
    disk_room_bytes: int = 0

    def rows_as(self, other: Schedule) -> bool:
        """Whether both differ at most in room for copies ahead."""
        names = (f.name for f in fields(self) if f.name not in ("room", "lead_bytes"))
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def fetched(self, chunk: int) -> Sequence[Stretch]:
        """Visits without the first of a list that stays over the border."""
        stretches = self.visits[chunk]
        return stretches[1:] if chunk in self.stays else stretches

    def never_leaves(self, chunk: int) -> bool:
        """A streamed chunk's working list never on the host, not even with a gradient: always on the GPU, or until its
        gradient is in a sum there and again from the update."""
        update, summed = self.updates.get(chunk), self.sums_on_gpu(chunk)
        if update is None or chunk not in self.stays:
            return False
        alone = all(summed and following.first == update for _, following in pairwise(self.visits[chunk]))
        return alone and (summed or not self.job.add_last)

    def sums_on_gpu(self, chunk: int) -> bool:
        """Whether all micro-batches' gradients of a moving chunk add up on the GPU."""
        return self.job.sums_on_gpu or chunk in self.modes.summed

    def adds_up(self, chunk: int) -> bool:
        return self.sums_on_gpu(chunk) and not self.is_resident(chunk)

    def all_in_grad32(self, chunk: int) -> bool:
        return chunk not in self.modes.waiting and self.job.all_in_grad32(chunk, self.modes.summed)

    def folds(self, chunk: int) -> bool:
        """A moving chunk's update adds its last gradient, in time of its own (on several ranks only on the host)."""
        if self.job.ranks > 1 and chunk in self.updates:
            return False
        return not self.all_in_grad32(chunk) and bool(self.job.lists_of(chunk, summed=False))

    @property
    def updates_wait(self) -> bool:
        """Whether every CPU Adam waits for the last moment, as behind a barrier."""
        return self.job.barrier is not None or self.adam == "after-backward"

    def sum_waits(self, chunk: int) -> bool:
        """Whether the sum is on the GPU before a streamed chunk's states."""
        return chunk in self.sums and chunk in self.updates and self.sums[chunk][-1].first != self.updates[chunk]

    @property
    def held(self) -> frozenset[int]:
        """Streamed chunks whose sum is never on the host."""
        return frozenset(c for c, stretches in self.sums.items() if c in self.updates and len(stretches) == 1)

    @property
    def never_on_host(self) -> frozenset[tuple[int, str]]:
        """(chunk, list) of streamed chunks never there, and those on disks."""
        working = ((c, "param") for c in self.visits if self.never_leaves(c))
        return frozenset((*((c, "grad32") for c in self.held), *working, *self.on_disks))

    @property
    def on_disks(self) -> frozenset[tuple[int, str]]:
        """The (chunk, list) pairs that live on disks."""
        return frozenset((c, name) for c in self.modes.on_disks for name in self.lists_on_disks(c))

    def lists_on_disks(self, chunk: int) -> Sequence[str]:
        """Without a working list that never leaves the GPU."""
        lists = self.modes.lists_on_disks(self.job, chunk)
        return lists[1:] if lists[:1] == ("param",) and self.never_leaves(chunk) else lists

    def is_resident(self, chunk: int) -> bool:
        return chunk in self.modes.pinned or chunk in self.job.small
