"""A block's stash goes to the host and comes back, and what crosses a stage's borders is sent and received
(core/trips.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pstar_sim.core.step import Kind
from pstar_sim.core.trips import TRIPS, Trip
from pstar_sim.policy.kit.trip_moves import TripMoves
from pstar_sim.policy.passes.draft_rows import After, DraftRows

_IN_TURN = frozenset({Kind.SEND, Kind.RECEIVE})


class TripRows:
    """Copies out go first: the forward of the block after the next waits for them; copies in have a deadline, as
    fetches. Sends and receives go as moments make and need them, as in other stages."""

    def __init__(self, rows: DraftRows) -> None:
        self._rows = rows
        self._workload = rows.schedule.job.workload
        self._moves = TripMoves(self._workload)
        self._latest: dict[Kind, int] = {}

    @property
    def before_at(self) -> Iterable[int]:
        some = self._workload.stashes or self._workload.borders
        return range(len(self._rows.schedule.positions)) if some else ()

    @property
    def behind_at(self) -> Iterable[int]:
        return self.before_at

    def before(self, n: int) -> Sequence[int]:
        job, position = self._rows.schedule.job, self._rows.schedule.positions[n]
        return self._moves.waits(job.blocks[position.block].first) if position.block >= 0 else ()

    def behind(self, n: int, here: int) -> None:
        schedule, moves = self._rows.schedule, self._moves
        position = schedule.positions[n]
        if position.block < 0:
            return
        for trip in moves.behind.get(schedule.job.blocks[position.block].last, ()):
            moves.step_of[trip.kind, trip.number] = self._move(trip, here)

    def _move(self, trip: Trip, here: int) -> int:
        schedule, kind = self._rows.schedule, trip.kind
        after: After = ((here, 0),)
        if kind in _IN_TURN:
            key: tuple[float, ...] = (float(trip.number),)
            after += ((self._latest[kind], 0),) if kind in self._latest else ()
        elif kind is Kind.STASH_OUT:
            key = (-1.0, float(trip.number))
        else:
            key = (float(schedule.at[schedule.job.block_of[trip.until]]), -1.0)
        charge = schedule.job.charges.of_trip(kind, trip.number)
        self._latest[kind] = row = self._rows.add(
            TRIPS[kind], kind, charge=charge, after=after, key=key, stash=trip.number
        )
        return row
