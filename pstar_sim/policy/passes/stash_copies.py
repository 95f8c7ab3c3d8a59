"""Stash copies: the stash of a block's forward goes to the host and comes back ([Note: stashes] in
workload/workload.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pstar_sim.core.step import Kind, Queue
from pstar_sim.policy.kit.stash_moves import StashMoves
from pstar_sim.policy.passes.draft_rows import DraftRows

__all__ = ["StashCopies"]


class StashCopies:
    """A copy out goes first on its queue, because the forward pass of the block after the next waits for it. A copy in
    has a deadline, as a fetch does."""

    def __init__(self, rows: DraftRows) -> None:
        self._rows = rows
        self._moves = StashMoves(rows.schedule.job.workload)

    @property
    def before_at(self) -> Iterable[int]:
        schedule = self._rows.schedule
        return range(len(schedule.positions)) if schedule.job.workload.stashes else ()

    @property
    def behind_at(self) -> Iterable[int]:
        return self.before_at

    def before(self, n: int) -> Sequence[int]:
        job, position = self._rows.schedule.job, self._rows.schedule.positions[n]
        return self._moves.waits(job.blocks[position.block].first) if position.block >= 0 else ()

    def behind(self, n: int, here: int) -> None:
        schedule, moves = self._rows.schedule, self._moves
        job, position = schedule.job, schedule.positions[n]
        if position.block < 0:
            return
        moment = job.blocks[position.block].last
        for s in moves.made.get(moment, ()):
            moves.out_of[s] = self._copy(s, Queue.D2H, Kind.STASH_OUT, (-1.0, float(s)), here)
        for s in moves.back.get(moment, ()):
            use = schedule.at[job.block_of[job.workload.stashes[s].needed]]
            moves.in_of[s] = self._copy(s, Queue.H2D, Kind.STASH_IN, (float(use), -1.0), here)

    def _copy(self, stash: int, queue: Queue, kind: Kind, key: tuple[float, ...], here: int) -> int:
        charge = self._rows.schedule.job.charges.of_stash(kind, stash)
        return self._rows.add(queue, kind, charge=charge, after=((here, 0),), key=key, stash=stash)
