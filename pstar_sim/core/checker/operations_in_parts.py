"""[Note: parts of a step] in core/step.py: each operation in parts has them all, once, in order, as many as a chunk's
others. walk.py says when each may run."""

from __future__ import annotations

from pstar_sim.core.checker.unrolled import label
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Kind, Step
from pstar_sim.errors import PlanError

_LISTS = {Kind.WRITEBACK: ("param", "grad32"), Kind.FETCH: ("param",), Kind.CPU_UPDATE: (None,)}


def check_part(plan: Plan, step: Step) -> None:
    """What can be checked of one part alone. Raises PlanError."""
    part = step.part
    if part is None:
        return
    if step.kind not in _LISTS:
        raise PlanError(f"{label(step)} has part={part}; only {', '.join(_LISTS)} can be parts")
    if step.list not in _LISTS[step.kind]:
        raise PlanError(f"{label(step)} has part={part}; this list is copied in one piece")
    if part.of < 2 or not 0 <= part.number < part.of:
        raise PlanError(f"{label(step)} has part={part}; parts are counted from 0, and there are at least two")
    assert step.chunk is not None
    if plan.modes[step.chunk] != "cpu":
        raise PlanError(f"{label(step)} has part={part}; only chunks that the CPU updates are updated in parts")


def check_parts(plan: Plan) -> None:
    first: dict[int, Step] = {}
    latest: dict[tuple[Kind, int, str | None], Step] = {}
    for step in plan.steps:
        if step.part is None or step.chunk is None:
            continue
        other = first.setdefault(step.chunk, step)
        assert other.part is not None
        if other.part.of != step.part.of:
            raise PlanError(f"{label(step)} is one of {step.part.of} parts and {label(other)} of {other.part.of}")
        key = (step.kind, step.chunk, step.list)
        before = latest.get(key)
        wanted = 0 if before is None or before.part is None else before.part.number + 1
        if step.part.number != wanted:
            found = "is missing" if wanted < step.part.of else "was the last"
            which = wanted if wanted < step.part.of else step.part.of - 1
            raise PlanError(f"{label(step)} comes where part {which}/{step.part.of} {found}")
        latest[key] = step
    for step in latest.values():
        if not step.completes:
            assert step.part is not None
            raise PlanError(f"{label(step)} is the last of its operation; part {step.part.number + 1} is missing")
