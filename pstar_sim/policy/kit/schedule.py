"""Schedule: the decisions of an asynchronous policy, from which the passes write its draft. It knows no queue, and no
times but the seconds of each position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import NamedTuple

from pstar_sim.policy.kit.blocks import Position
from pstar_sim.policy.kit.job import Job

__all__ = ["Modes", "Schedule", "Stretch"]


@dataclass(frozen=True, slots=True)
class Modes:
    """pinned: states on the GPU, where gradients add up too.
    streamed: states come to the GPU for one update. CPU Adam updates all others.
    summed: gradients of all micro-batches add up on the GPU although the states live elsewhere. `Schedule.sums` says
        when they are there.
    spilt: of `summed`, those whose sums go to the host between two micro-batches.
    on_disks: states on the machine's disks between two updates, and on the host for the update.
    """

    pinned: frozenset[int]
    streamed: frozenset[int] = frozenset()
    summed: frozenset[int] = frozenset()
    spilt: frozenset[int] = frozenset()
    on_disks: frozenset[int] = frozenset()


class Stretch(NamedTuple):
    """Both included."""

    first: int
    last: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Schedule:
    """at: block -> its position.
    updates: streamed chunk -> position of its update.
    visits: chunk that is not resident -> where its working list is on the GPU, ascending.
    whole: on several ranks, chunk -> where the others' slices are on this GPU, resident chunks included.
    sums: chunk in `Modes.summed` -> stretches with its sum on the GPU, ascending; between two the sum is on the host.
        The last stretch of a streamed chunk ends with its update. Any other chunk's sum goes down behind its last
        stretch.
    stays: chunks also on the GPU between the last stretch and the next iteration's first.
    room: bytes at each position that are not known to be needed.
    resident_bytes: of small and pinned chunks.
    lead_bytes: room that early fetches leave free for urgent fetches.
    prefetch, adam, down: as in `plan_visits` and `Knobs`.
    lists_at_once: most gradient lists on the GPU; None: what has room.
    disk_room_bytes: of the host, for states that pass on their way from and to disks.
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
        """Whether both differ at most in the room for copies ahead."""
        names = (f.name for f in fields(self) if f.name not in ("room", "lead_bytes"))
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def fetched(self, chunk: int) -> Sequence[Stretch]:
        """All visits, except the first of a list that stays over the border."""
        stretches = self.visits[chunk]
        return stretches[1:] if chunk in self.stays else stretches

    def never_leaves(self, chunk: int) -> bool:
        """A streamed chunk's working list is never on the host, not even with a gradient: it is on the GPU all the
        time, or until its gradient is in a sum there and again from the update on."""
        update, summed = self.updates.get(chunk), self.sums_on_gpu(chunk)
        if update is None or chunk not in self.stays:
            return False
        alone = all(summed and following.first == update for _, following in pairwise(self.visits[chunk]))
        return alone and (summed or not self.job.add_last)

    def sums_on_gpu(self, chunk: int) -> bool:
        """Whether the gradients of all micro-batches of a chunk that is not resident add up on the GPU."""
        return self.job.sums_on_gpu or chunk in self.modes.summed

    def adds_up(self, chunk: int) -> bool:
        return self.sums_on_gpu(chunk) and not self.is_resident(chunk)

    def all_in_grad32(self, chunk: int) -> bool:
        return self.job.all_in_grad32(chunk, self.modes.summed)

    def folds(self, chunk: int) -> bool:
        """The update of a chunk that is not resident adds its last gradient to the others in time of its own (on
        several ranks only on the host)."""
        if self.job.ranks > 1 and chunk in self.updates:
            return False
        return not self.all_in_grad32(chunk) and bool(self.job.lists_of(chunk, summed=False))

    @property
    def updates_wait(self) -> bool:
        """Whether every CPU Adam waits for the end of the last moment, as it does behind a barrier."""
        return self.job.barrier is not None or self.adam == "after-backward"

    def sum_waits(self, chunk: int) -> bool:
        """A streamed chunk's sum is on the GPU before the states come."""
        return chunk in self.sums and chunk in self.updates and self.sums[chunk][-1].first != self.updates[chunk]

    @property
    def held(self) -> frozenset[int]:
        """Streamed chunks whose sum is never on the host."""
        return frozenset(c for c, stretches in self.sums.items() if c in self.updates and len(stretches) == 1)

    @property
    def never_on_host(self) -> frozenset[tuple[int, str]]:
        """(chunk, list) pairs of streamed chunks that the host never holds, and those that live on disks."""
        working = ((c, "param") for c in self.visits if self.never_leaves(c))
        return frozenset((*((c, "grad32") for c in self.held), *working, *self.on_disks))

    @property
    def on_disks(self) -> frozenset[tuple[int, str]]:
        """The (chunk, list) pairs that live on disks."""
        return frozenset((c, name) for c in self.modes.on_disks for name in self.job.states_of(c))

    def is_resident(self, chunk: int) -> bool:
        return chunk in self.modes.pinned or chunk in self.job.small
