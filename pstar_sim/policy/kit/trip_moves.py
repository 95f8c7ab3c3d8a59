"""The steps that begin behind a moment, and those it waits for (core/trips.py).

`Builder.compute` writes them next to the moments, in program order, so they never wait in a circle; the asynchronous
family's draft (passes/trip_rows.py) lets copies compete for the link.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from pstar_sim.core.step import Kind
from pstar_sim.core.trips import ARRIVALS, Trip, trips_of
from pstar_sim.workload.workload import Workload


class TripMoves:
    """blocking: compute waits for a stash's copies: out before moment made + 1 begins, in when needed - 1 has ended.
    behind: moment -> trips behind it, before `needed` for blocking copies in.
    until: moment -> (kind, number) it waits for, at made + 1 for blocking copies out.
    step_of: (kind, number) -> step, once written.
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
    """Where a block has to open to be as one moment: trips begin behind its last, and its first waits for them."""
    for trip in trips_of(workload).values():
        yield from (trip.behind + 1, trip.until)
        yield trip.behind if trip.kind in ARRIVALS else trip.until + 1
