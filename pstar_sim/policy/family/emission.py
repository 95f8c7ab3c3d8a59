"""Emission: an attempt that was chosen becomes a plan, its order and its memory edges those of the event loop."""

from __future__ import annotations

from collections.abc import Mapping

from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Place, Ref
from pstar_sim.policy.family.ground import Ground
from pstar_sim.policy.family.program import Attempt
from pstar_sim.policy.kit.emit import Builder, memory_edges

__all__ = ["emit"]


def emit(g: Ground, chosen: Attempt, choices: Mapping[str, object] | None = None, policy: str | None = None) -> Plan:
    """The plan. choices: what `explain` is told, beside the time the event loop predicts."""
    course = chosen.course
    b = Builder(policy or g.name, g.workload, g.machine, g.settings, layout=g.builder.layout, stashes=False)
    b.choices.update(choices or {})
    b.predictions["policy_iteration_s"] = chosen.outcome.iteration_s
    for c in (*g.small, *course.modes.pinned):
        b.reside_on_gpu(c)
        if g.ranks > 1 and c not in course.visits:  # a small one that never changes is whole for ever
            b.resident(c, Place.GPU, "remote")
    for c in g.moving:
        if c in course.modes.pinned:
            continue
        b.reside_on_host(c)
        if c in course.modes.streamed:
            b.modes[c] = "stream"
        if c in course.stays:
            b.resident(c, Place.GPU, "param")
    # The order of one iteration: what the window shows of it early, in it, and late.
    started = [(i, k) for i, k, done in chosen.outcome.events if not done]
    order = [i for early in (1, 0, -1) for i, k in started if k == early]
    ops, rows = chosen.program.ops, chosen.rows
    ends: list[tuple[int, int]] = [(0, 0)] * len(ops)
    total = 0
    for i in order:
        n = rows[i].block
        length = g.blocks[n].last - g.blocks[n].first + 1 if n >= 0 else 1
        ends[i] = (total, total + length - 1)
        total += length
    for i in order:
        after = [Ref(ends[j][1], back) for j, back in ops[i].after]
        if rows[i].block < 0:
            b.row(ops[i].queue, rows[i], after)
            continue
        block = g.blocks[rows[i].block]
        for m in range(block.first, block.last + 1):
            b.compute(m, after if m == block.first else ())
    edges = memory_edges(b.steps, ops, ends, chosen.outcome)
    return b.plan(memory=edges)
