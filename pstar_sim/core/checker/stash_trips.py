"""The checker's part about stashes: each goes to the host once and comes back once, in time, in every interleaving.

[Note: stashes] in workload/workload.py says which steps have to wait for which. With these four edges the gpu holds a
stash only while the tide counts it, so the proof of the budget (worst_case.py) does not mention stashes. (A stash is
out before it comes back, because `gone` is before `back` on the compute queue.) The plan has one buffer on the host for
stashes, which it holds throughout. The buffer has room for one stash of each block. Two stashes of one block cannot
need that room at once: micro-batches follow one another (check_workload), so on the compute queue the moment that needs
the earlier stash waits until this stash is back, and comes before the moment that makes the later stash.
"""

from __future__ import annotations

from pstar_sim.core.checker.unrolled import Unrolled, label
from pstar_sim.core.plan import STASHES, Plan
from pstar_sim.core.step import Kind, Place, Step
from pstar_sim.errors import PlanError

__all__ = ["check_stash_step", "check_stashes"]


def check_stash_step(plan: Plan, step: Step) -> None:
    """Check the fields of one step alone. Raises PlanError."""
    stashes = plan.workload.stashes
    if step.stash is None or not 0 <= step.stash < len(stashes):
        raise PlanError(f"{label(step)} needs stash=, below {len(stashes)}")
    if step.chunk is not None or step.list is not None or step.place is not None:
        raise PlanError(f"{label(step)} has chunk=, list= or place=; a stash is not a list of a chunk")
    stash = stashes[step.stash]
    if step.bytes != stash.bytes:
        raise PlanError(f"{label(step)} has bytes={step.bytes}; the stash has {stash.bytes} bytes")
    moment = stash.made if step.kind is Kind.STASH_OUT else stash.needed
    if step.moment != moment:
        raise PlanError(f"{label(step)} has moment={step.moment}; it belongs to moment {moment}")


def check_stashes(plan: Plan, program: Unrolled) -> None:
    """Raises PlanError for a stash that is not moved, or is moved twice, too early or too late; and if the room on the
    host is too small."""
    _check_room(plan)
    moments = {step.moment: i for i, step in enumerate(plan.steps) if step.kind is Kind.COMPUTE}
    moves = _moves(plan)
    for n, stash in enumerate(plan.workload.stashes):
        for kind in (Kind.STASH_OUT, Kind.STASH_IN):
            if (kind, n) not in moves:
                raise PlanError(f"no {kind.value} step moves stash {n} (of {stash.block})")
        out, back = moves[Kind.STASH_OUT, n], moves[Kind.STASH_IN, n]
        for first, then, why in (
            (moments[stash.made], out, "which makes it"),
            (out, moments[stash.gone], "behind which its bytes are no longer counted"),
            (moments[stash.back], back, "from which on its bytes are counted again"),
            (back, moments[stash.needed], "which needs it"),
        ):
            if not program.precedes(first, then):
                a, b = plan.steps[first], plan.steps[then]
                moment = a if a.kind is Kind.COMPUTE else b
                raise PlanError(
                    f"nothing makes {label(b)} wait for {label(a)}: stash {n} (of {stash.block}) and {label(moment)}, "
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
    """Returns (kind, stash) -> position of the step that moves it. Raises PlanError if two steps move one stash."""
    moves: dict[tuple[Kind, int], int] = {}
    for i, step in enumerate(plan.steps):
        if step.stash is not None:
            if (step.kind, step.stash) in moves:
                other = plan.steps[moves[step.kind, step.stash]]
                raise PlanError(f"{label(step)} moves a stash that {label(other)} moves already")
            moves[step.kind, step.stash] = i
    return moves
