"""Each stash goes to the host and comes back once, and each border is crossed once, in time.

[Note: stashes] and [Note: borders] in workload/workload.py say what waits for what; with these edges the gpu holds the
bytes only while the tide counts them, so worst_case.py does not mention trips. One buffer on the host has room
throughout for the stashes in use at a time (`Workload.stash_room`).
"""

from __future__ import annotations

from pstar_sim.core.checker.unrolled import Unrolled, label
from pstar_sim.core.plan import STASHES, Plan
from pstar_sim.core.step import Kind, Place, Step
from pstar_sim.core.trips import ARRIVALS, trips_of
from pstar_sim.errors import PlanError


def check_trip_step(plan: Plan, step: Step) -> None:
    """The fields of one step alone. Raises PlanError."""
    trips = trips_of(plan.workload)
    trip = None if step.stash is None else trips.get((step.kind, step.stash))
    if trip is None:
        raise PlanError(f"{label(step)} needs stash=, below {len([kind for kind, _ in trips if kind is step.kind])}")
    if step.chunk is not None or step.list is not None or step.place is not None:
        raise PlanError(f"{label(step)} has chunk=, list= or place=; a stash is not a list of a chunk")
    if step.bytes != trip.bytes:
        raise PlanError(f"{label(step)} has bytes={step.bytes}; {trip.what} has {trip.bytes} bytes")
    if step.moment != trip.moment:
        raise PlanError(f"{label(step)} has moment={step.moment}; it belongs to moment {trip.moment}")


_BEFORE = {
    Kind.STASH_OUT: "which makes it",
    Kind.STASH_IN: "from which on its bytes are counted again",
    Kind.SEND: "which makes it",
    Kind.RECEIVE: "from which on its bytes are counted",
}
_BEHIND = {True: "which needs it", False: "behind which its bytes are no longer counted"}


def check_trips(plan: Plan, program: Unrolled) -> None:
    """Raises PlanError for a stash or border moved twice, not at all, too early or too late, and for too small a room
    on the host."""
    _check_room(plan)
    moments = {step.moment: i for i, step in enumerate(plan.steps) if step.kind is Kind.COMPUTE}
    moves = _moves(plan)
    for key, trip in trips_of(plan.workload).items():
        if key not in moves:
            raise PlanError(f"no {trip.kind.value} step moves {trip.what}")
        arrives, move = trip.kind in ARRIVALS, moves[key]
        for first, then, moment, why in (
            (moments[trip.behind], move, moments[trip.behind], _BEFORE[trip.kind]),
            (move, moments[trip.until], moments[trip.until], _BEHIND[arrives]),
        ):
            if not program.precedes(first, then):
                a, b = plan.steps[first], plan.steps[then]
                raise PlanError(
                    f"nothing makes {label(b)} wait for {label(a)}: {trip.what} and {label(plan.steps[moment])}, "
                    f"{why}; an edge after={a.id} is missing"
                )


def _check_room(plan: Plan) -> None:
    room = sum(size for _, size in plan.workload.stash_room)
    rooms = [(place, size) for name, place, size in plan.buffers if name == STASHES]
    if len(rooms) > bool(room) or any(place is not Place.HOST for place, _ in rooms):
        where = ", ".join(f"{size} bytes on the {place.value}" for place, size in rooms)
        wanted = "one, on the host" if room else "none: its workload has no stashes"
        raise PlanError(f"the plan has {len(rooms)} buffers {STASHES!r} ({where}); it needs {wanted}")
    held = sum(size for _, size in rooms)
    if held < room:
        raise PlanError(f"the plan's buffer {STASHES!r} on the host has {held} bytes; the stashes take {room}")


def _moves(plan: Plan) -> dict[tuple[Kind, int], int]:
    moves: dict[tuple[Kind, int], int] = {}
    for i, step in enumerate(plan.steps):
        if step.stash is not None:
            if (step.kind, step.stash) in moves:
                other = plan.steps[moves[step.kind, step.stash]]
                raise PlanError(f"{label(step)} moves a stash that {label(other)} moves already")
            moves[step.kind, step.stash] = i
    return moves
