"""Schedule: the decisions of an asynchronous policy. The passes write its draft.

Knows no queue and no clock but the seconds a position takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from pstar_sim.policy.kit.job import Job

__all__ = ["Modes", "Position", "Schedule", "Stretch"]


@dataclass(frozen=True, slots=True)
class Modes:
    """Where the states and gradients of chunks live.

    pinned: chunks whose states stay on the GPU; their gradients add up there.
    streamed: chunks whose states come for one update. CPU Adam updates all others.
    summed: chunks whose gradients of all micro-batches add up on the GPU although their states live elsewhere.
        `Schedule.sums` says when their sums are there.
    spilt: those of them whose sums go to the host between two micro-batches.
    """

    pinned: frozenset[int]
    streamed: frozenset[int] = frozenset()
    summed: frozenset[int] = frozenset()
    spilt: frozenset[int] = frozenset()


class Position(NamedTuple):
    """One place on the compute queue: block >= 0, the block of moments it is; chunk >= 0, the streamed chunk it
    updates.

    tide_bytes: non-model bytes.
    """

    block: int
    chunk: int
    tide_bytes: int
    seconds: float


class Stretch(NamedTuple):
    """Positions first to last, both included."""

    first: int
    last: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Schedule:
    """The decisions of an asynchronous policy.

    positions: positions of the compute queue, in order.
    at: block -> its position.
    updates: streamed chunk -> position of its update.
    visits: chunk that is not resident -> stretches over which its working list is on the GPU, ascending.
    whole: on several ranks, chunk -> stretches over which the others' slices are there, resident chunks included.
    sums: chunk in `Modes.summed` -> stretches over which its sum of gradients is on the GPU, ascending. Between two of
        them the sum is on the host. The last stretch of a streamed chunk ends with its update; behind that of any other
        chunk the sum goes down.
    stays: chunks whose working list is also on the GPU between the last stretch and the first of the next iteration.
    room: bytes at each position that are not known to be needed.
    resident_bytes: bytes that small and pinned chunks hold on the GPU for ever.
    lead_bytes: room that early fetches leave free for urgent fetches.
    prefetch: how far ahead copies may go: "none", a number of chunks, or "edf".
    adam: order of CPU Adam: "after-backward", "fifo" or "edf".
    down: order of the copies to the host: "edf" (as the next forward needs them), "fifo", or "adam" (as "edf", but what
        CPU Adam waits for first, then parameters that leave, then states).
    states_first: whether states of streamed chunks go down before parameters that stay.
    lists_at_once: the most gradient lists on the GPU at a time; None: as many as there is room for.
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

    def rows_as(self, other: Schedule) -> bool:
        """Whether the passes write the same rows for both schedules, which then differ at most in the room for copies
        ahead."""
        names = (f.name for f in fields(self) if f.name not in ("room", "lead_bytes"))
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def fetched(self, chunk: int) -> Sequence[Stretch]:
        """The chunk's visits for which its working list is fetched: all of them, except the first one where the list
        stays over the border."""
        stretches = self.visits[chunk]
        return stretches[1:] if chunk in self.stays else stretches

    def never_leaves(self, chunk: int) -> bool:
        """Whether the working list of a streamed chunk is on the GPU alone, all the time: no gradient goes through the
        list on the host either."""
        alone = chunk in self.updates and chunk in self.stays and len(self.visits[chunk]) == 1
        return alone and (self.sums_on_gpu(chunk) or not self.job.add_last)

    def sums_on_gpu(self, chunk: int) -> bool:
        """Whether the gradients of all micro-batches of a chunk that is not resident add up on the GPU."""
        return self.job.sums_on_gpu or chunk in self.modes.summed

    def adds_up(self, chunk: int) -> bool:
        """Whether the sum of a chunk's gradients is on the GPU while its states are not."""
        return self.sums_on_gpu(chunk) and not self.is_resident(chunk)

    def all_in_grad32(self, chunk: int) -> bool:
        """Whether the whole gradient of a chunk that is not resident is in grad32 when the chunk is updated, and none
        of it in the working list."""
        return self.job.add_last or self.sums_on_gpu(chunk)

    def folds(self, chunk: int) -> bool:
        """Whether the update of a chunk that is not resident adds its last gradient to the sum of the others, and that
        takes time (on several ranks only on the host)."""
        if self.job.ranks > 1 and chunk in self.updates:
            return False
        return not self.all_in_grad32(chunk) and bool(self.job.lists_of(chunk, summed=False))

    def sum_waits(self, chunk: int) -> bool:
        """Whether the sum of a streamed chunk's gradients is on the GPU before the states come for the update."""
        return chunk in self.sums and chunk in self.updates and self.sums[chunk][-1].first != self.updates[chunk]

    @property
    def held(self) -> frozenset[int]:
        """Streamed chunks whose sum of gradients is never on the host."""
        return frozenset(c for c, stretches in self.sums.items() if c in self.updates and len(stretches) == 1)

    @property
    def never_on_host(self) -> frozenset[tuple[int, str]]:
        """(chunk, list) of streamed chunks of which the host never has a copy."""
        working = ((c, "param") for c in self.visits if self.never_leaves(c))
        return frozenset((*((c, "grad32") for c in self.held), *working))

    def is_resident(self, chunk: int) -> bool:
        """Whether the chunk's working list and states are always on the GPU."""
        return chunk in self.modes.pinned or chunk in self.job.small
