"""Trips in a plan: the steps that begin behind a moment, and the steps that a moment waits for (core/trips.py).

`Builder.compute` writes them next to the moments, in the order of the program, so that steps can never wait for each
other in a circle. The asynchronous family (passes/trip_rows.py) writes them into its draft, so that the copies compete
for the link with all others. The workload says which blocks are offloaded, and what crosses the borders of a stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from pstar_sim.core.step import Kind
from pstar_sim.core.trips import ARRIVALS, Trip, trips_of
from pstar_sim.workload.workload import Workload

__all__ = ["TripMoves", "trip_cuts"]


class TripMoves:
    """blocking: whether the compute queue waits while a stash is copied: the copy out ends before moment made + 1
        begins, and the copy in begins when moment needed - 1 has ended.
    behind: moment -> trips that follow it; for blocking copies in, the moment before `needed`.
    until: moment -> (kind, number) of the trips for which it waits; for blocking copies out, moment made + 1.
    step_of: (kind, number) -> step of the trip, once written.
    """

    def __init__(self, workload: Workload, *, blocking: bool = False) -> None:
        self.behind: defaultdict[int, list[Trip]] = defaultdict(list)
        self.step_of: dict[tuple[Kind, int], int] = {}
        self.until: defaultdict[int, list[tuple[Kind, int]]] = defaultdict(list)
        for key, trip in trips_of(workload).items():
            behind, until = trip.behind, trip.until
            if blocking and trip.kind is Kind.STASH_OUT:
                until = behind + 1
            elif blocking and trip.kind is Kind.STASH_IN:
                behind = until - 1
            self.behind[behind].append(trip)
            self.until[until].append(key)
        for trips in self.behind.values():
            trips.sort(key=lambda trip: trip.kind in ARRIVALS)
        for keys in self.until.values():
            keys.sort(key=lambda key: key[0] in ARRIVALS)

    def waits(self, moment: int) -> list[int]:
        """Steps for which a moment waits."""
        return [self.step_of[key] for key in self.until.get(moment, ())]


def trip_cuts(workload: Workload) -> Iterable[int]:
    """Moments that have to open a block, so that a block can be treated as one moment: trips begin behind the last
    moment of a block, and the first waits for them."""
    for trip in trips_of(workload).values():
        yield from (trip.behind + 1, trip.until)
        yield trip.behind if trip.kind in ARRIVALS else trip.until + 1
