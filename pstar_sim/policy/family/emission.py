"""Emission: an attempt that was chosen becomes a plan, its order and its memory edges those of the event loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pstar_sim.core.choose import Op
from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Kind, Place, Ref
from pstar_sim.policy.family.ground import Ground
from pstar_sim.policy.family.program import Attempt, What
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
    ops, what = chosen.program.ops, chosen.what
    ends: list[tuple[int, int]] = [(0, 0)] * len(ops)
    total = 0
    for i in order:
        block = g.blocks[what[i].block] if what[i].block >= 0 else None
        length = block.last - block.first + 1 if block is not None else 1
        ends[i] = (total, total + length - 1)
        total += length
    for i in order:
        _step(g, b, ops[i], what[i], ends)
    edges = memory_edges(b.steps, ops, ends, chosen.outcome)
    return b.plan(memory=edges)


def _step(g: Ground, b: Builder, op: Op, meaning: What, ends: Sequence[tuple[int, int]]) -> None:
    c = meaning.chunk
    after = [Ref(ends[j][1], back) for j, back in op.after]
    match meaning.kind:
        case Kind.COMPUTE:
            block = g.blocks[meaning.block]
            for m in range(block.first, block.last + 1):
                b.compute(m, after if m == block.first else ())
        case Kind.STASH_OUT:
            b.stash_out(meaning.stash, after)
        case Kind.STASH_IN:
            b.stash_in(meaning.stash, after)
        case Kind.FETCH:
            b.fetch(c, meaning.moment, after, list_name=meaning.list_name)
        case Kind.WRITEBACK:
            b.writeback(c, meaning.list_name, meaning.moment, after)
        case Kind.DROP:
            b.drop(op.queue, c, meaning.moment, after, meaning.list_name)
        case Kind.ALLOC:
            b.alloc(op.queue, c, meaning.list_name, Place.GPU, meaning.moment, after)
        case Kind.FREE:
            b.free(op.queue, c, meaning.list_name, Place.GPU, meaning.moment, after)
        case Kind.GATHER:
            b.gather(c, meaning.moment, after)
        case Kind.REDUCE_SCATTER:
            b.reduce_scatter(c, meaning.moment, after, meaning.list_name)
        case Kind.CPU_ADD:
            b.cpu_add(c, meaning.list_name, meaning.moment, after)
        case Kind.CPU_ADAM:
            b.cpu_adam(c, after)
        case Kind.GPU_ADAM:
            b.gpu_adam(c, after)
        case kind:
            raise AssertionError(kind)
