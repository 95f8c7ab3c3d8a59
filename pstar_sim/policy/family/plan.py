"""The plan of a draft that was chosen: its order and its memory edges are those of the window."""

from __future__ import annotations

from collections.abc import Mapping

from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Place, Ref
from pstar_sim.policy.family.course import Course
from pstar_sim.policy.family.program import Attempt
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.passes.builder import Builder
from pstar_sim.policy.passes.edges import memory_edges

__all__ = ["plan_of"]


def plan_of(g: Job, chosen: Attempt, choices: Mapping[str, object] | None = None, policy: str | None = None) -> Plan:
    """The plan. choices: what `explain` is told, beside the seconds per iteration that the window predicts."""
    b = Builder(policy or g.name, g.workload, g.machine, g.settings, layout=g.layout, stashes=False)
    b.choices.update(choices or {})
    b.predictions["policy_iteration_s"] = chosen.iteration_s
    _residents(b, g, chosen.course)
    ends = _steps(b, g, chosen)
    return b.plan(memory=memory_edges(b.steps, chosen.draft.rows, ends, chosen.window))


def _residents(b: Builder, g: Job, course: Course) -> None:
    """Who is where at the cut."""
    for c in (*g.small, *course.modes.pinned):
        b.live(c, Place.GPU)
        if g.ranks > 1 and c not in course.needed_whole:  # a small one that never changes is whole for ever
            b.resident(c, Place.GPU, "remote")
    for c in g.moving:
        if c in course.modes.pinned:
            continue
        b.live(c, Place.HOST)
        if c in course.modes.streamed:
            b.modes[c] = "stream"
        if c in course.stays:
            b.resident(c, Place.GPU, "param")


def _steps(b: Builder, g: Job, chosen: Attempt) -> list[tuple[int, int]]:
    """The steps, in the order of one iteration: what the window shows of it early, in it, and late. Returns of each row
    the first and the last step that it became."""
    rows = chosen.draft.rows
    started = [(i, k) for i, k, done in chosen.window.events if not done]
    order = [i for early in (1, 0, -1) for i, k in started if k == early]
    ends: list[tuple[int, int]] = [(0, 0)] * len(rows)
    total = 0
    for i in order:
        n = rows[i].block
        length = g.blocks[n].last - g.blocks[n].first + 1 if n >= 0 else 1
        ends[i] = (total, total + length - 1)
        total += length
    for i in order:
        after = [Ref(ends[j][1], back) for j, back in rows[i].after]
        if rows[i].block < 0:
            b.row(rows[i], after)
            continue
        block = g.blocks[rows[i].block]
        for m in range(block.first, block.last + 1):
            b.compute(m, after if m == block.first else ())
    return ends
