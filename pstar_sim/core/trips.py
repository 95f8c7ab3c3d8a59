"""Trips: what moves between a GPU and another place without being a list of a chunk.

A stash goes to the host and comes back ([Note: stashes] in workload/workload.py). A border's activations or gradient go
to or come from another pipeline stage ([Note: borders] there). Their bytes on the GPU are part of the tide.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pstar_sim.core.step import Kind, Queue
from pstar_sim.workload.workload import Workload

TRIPS: Mapping[Kind, Queue] = {
    Kind.STASH_OUT: Queue.D2H,
    Kind.STASH_IN: Queue.H2D,
    Kind.SEND: Queue.SEND,
    Kind.RECEIVE: Queue.RECEIVE,
}
"""Kinds of steps that make a trip -> their queue."""
ARRIVALS = frozenset({Kind.STASH_IN, Kind.RECEIVE})

_TRIPS = ("trips",)  # key of `Workload.derived`


class Trip(NamedTuple):
    """number: of the stash or the border.
    behind: moment that the step follows.
    until: moment that waits for the step.
    """

    kind: Kind
    number: int
    bytes: int
    behind: int
    until: int
    what: str

    @property
    def moment(self) -> int:
        """That which makes what leaves, or needs what arrives."""
        return self.until if self.kind in ARRIVALS else self.behind


def trips_of(workload: Workload) -> Mapping[tuple[Kind, int], Trip]:
    """(kind, number) -> trip, in a queue's order, the same object for the same workload."""
    known = workload.derived.get(_TRIPS)
    if known is None:
        known = workload.derived[_TRIPS] = {(trip.kind, trip.number): trip for trip in _trips(workload)}
    return known  # type: ignore[return-value]


def _trips(w: Workload) -> list[Trip]:
    trips = []
    for n, s in enumerate(w.stashes):
        what = f"stash {n} (of {s.block})"
        trips.append(Trip(Kind.STASH_OUT, n, s.bytes, s.made, s.gone, what))
        trips.append(Trip(Kind.STASH_IN, n, s.bytes, s.back, s.needed, what))
    for n, b in enumerate(w.borders):
        kind, way = (Kind.RECEIVE, "from") if b.receives else (Kind.SEND, "to")
        trips.append(Trip(kind, n, b.bytes, b.behind, b.until, f"border {n} ({b.what} {way} stage {b.peer})"))
    return trips
