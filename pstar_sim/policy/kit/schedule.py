"""Schedule: the decisions of an asynchronous policy, from which the passes write its draft.

A schedule knows no queue. The only times that it knows are the seconds of each position.
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
    """Where the states and gradients of chunks live.

    pinned: chunks whose states stay on the GPU, and whose gradients add up there.
    streamed: chunks whose states come to the GPU for one update. CPU Adam updates all others.
    summed: chunks whose gradients of all micro-batches add up on the GPU although their states live elsewhere.
        `Schedule.sums` says when the sums are on the GPU.
    spilt: chunks in `summed` whose sums go to the host between two micro-batches.
    """

    pinned: frozenset[int]
    streamed: frozenset[int] = frozenset()
    summed: frozenset[int] = frozenset()
    spilt: frozenset[int] = frozenset()


class Stretch(NamedTuple):
    """The positions first to last, both included."""

    first: int
    last: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Schedule:
    """The decisions of an asynchronous policy.

    positions: positions of the compute queue, in order.
    at: block -> its position.
    updates: streamed chunk -> position of its update.
    visits: chunk that is not resident -> stretches over which its working list is on the GPU, ascending.
    whole: on several ranks, chunk -> stretches over which the others' slices are on this GPU, resident chunks included.
    sums: chunk in `Modes.summed` -> stretches over which its sum of gradients is on the GPU, ascending. Between two
        stretches the sum is on the host. The last stretch of a streamed chunk ends with its update. Any other chunk's
        sum goes down behind its last stretch.
    stays: chunks whose working list is also on the GPU between the last stretch and the first of the next iteration.
    room: bytes at each position that are not known to be needed.
    resident_bytes: bytes that small and pinned chunks always hold on the GPU.
    lead_bytes: room that early fetches leave free for urgent fetches.
    prefetch: how far ahead copies may go: "none", a number of chunks, or "edf".
    adam: order of CPU Adam: "after-backward", "fifo" or "edf".
    down: order of the copies to the host: "edf" or "fifo", as in `Knobs.down`.
    states_first: whether states of streamed chunks go down before parameters that stay.
    lists_at_once: the largest number of gradient lists on the GPU at a time; None: the largest number for which there
        is room.
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
        """Returns whether the passes write the same rows for both schedules. The schedules then differ at most in the
        room for copies ahead."""
        names = (f.name for f in fields(self) if f.name not in ("room", "lead_bytes"))
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def fetched(self, chunk: int) -> Sequence[Stretch]:
        """Returns the chunk's visits for which its working list is fetched: all visits, except the first visit of a
        list that stays over the border."""
        stretches = self.visits[chunk]
        return stretches[1:] if chunk in self.stays else stretches

    def never_leaves(self, chunk: int) -> bool:
        """Returns whether the working list of a streamed chunk is never on the host, not even with a gradient. The list
        is on the GPU all the time, or until its gradient is in a sum there and again from the update on."""
        update, summed = self.updates.get(chunk), self.sums_on_gpu(chunk)
        if update is None or chunk not in self.stays:
            return False
        alone = all(summed and following.first == update for _, following in pairwise(self.visits[chunk]))
        return alone and (summed or not self.job.add_last)

    def sums_on_gpu(self, chunk: int) -> bool:
        """Returns whether the gradients of all micro-batches of a chunk that is not resident add up on the GPU."""
        return self.job.sums_on_gpu or chunk in self.modes.summed

    def adds_up(self, chunk: int) -> bool:
        """Returns whether the sum of a chunk's gradients is on the GPU while its states are not."""
        return self.sums_on_gpu(chunk) and not self.is_resident(chunk)

    def all_in_grad32(self, chunk: int) -> bool:
        """Returns the answer of `Job.all_in_grad32` for the modes."""
        return self.job.all_in_grad32(chunk, self.modes.summed)

    def folds(self, chunk: int) -> bool:
        """Returns whether the update of a chunk that is not resident adds its last gradient to the sum of the others,
        and whether this add takes time (on several ranks only on the host)."""
        if self.job.ranks > 1 and chunk in self.updates:
            return False
        return not self.all_in_grad32(chunk) and bool(self.job.lists_of(chunk, summed=False))

    def sum_waits(self, chunk: int) -> bool:
        """Returns whether the sum of a streamed chunk's gradients is on the GPU before the states come for the
        update."""
        return chunk in self.sums and chunk in self.updates and self.sums[chunk][-1].first != self.updates[chunk]

    @property
    def held(self) -> frozenset[int]:
        """Streamed chunks whose sum of gradients is never on the host."""
        return frozenset(c for c, stretches in self.sums.items() if c in self.updates and len(stretches) == 1)

    @property
    def never_on_host(self) -> frozenset[tuple[int, str]]:
        """The (chunk, list) pairs of streamed chunks that the host never holds."""
        working = ((c, "param") for c in self.visits if self.never_leaves(c))
        return frozenset((*((c, "grad32") for c in self.held), *working))

    def is_resident(self, chunk: int) -> bool:
        """Returns whether the chunk's working list and states are always on the GPU."""
        return chunk in self.modes.pinned or chunk in self.job.small
