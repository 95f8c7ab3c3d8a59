"""The CPU update of a chunk much larger than others, in parts ([Note: parts of a step] in core/step.py): its gradient's
way down, Adam and its parameters' way up overlap. It works on a finished plan: parts replace their step, in the same
order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from pstar_sim.core.layout import Layout
from pstar_sim.core.plan import Plan, Resident
from pstar_sim.core.step import Kind, Part, Place, Ref, Step
from pstar_sim.policy.passes.edges import without_implied
from pstar_sim.units import MIB

# A chunk LARGE times as large as the median chunk is updated in parts of about the median chunk's size
# (benchmarks/search_constants.md). There are at most MOST_PARTS of them, of at least LEAST_BYTES of the working list:
# limits that no job of the benchmarks reaches.
LARGE, MOST_PARTS, LEAST_BYTES = 2.0, 8, 16 * MIB


def parts_of(layout: Layout) -> dict[int, int]:
    """Large chunk -> parts of its CPU update, without chunks updated in one piece, such as those of whole tensors
    ([Note: granularity] in optimizers.py)."""
    sizes = {c.index: layout.payload_bytes(c.index, "param") for c in layout.chunks if not (c.small or c.frozen)}
    usual = sorted(sizes.values())[len(sizes) // 2] if sizes else 0
    large = {c: size for c, size in sizes.items() if size >= LARGE * usual and not layout.states_of(c).whole}
    counts = {c: min(MOST_PARTS, round(size / usual), size // LEAST_BYTES) for c, size in large.items()}
    return {c: count for c, count in counts.items() if count > 1}


def in_parts(plan: Plan, counts: Mapping[int, int] | None = None) -> Plan:
    """counts: by default `parts_of`. A chunk whose gradient does not go down once, or parameters do not come up,
    stays."""
    counts = parts_of(plan.layout) if counts is None else counts
    chains = [chain for c, count in counts.items() if (chain := _chain(plan, c, count)) is not None]
    if not chains:
        return plan
    return replace(plan, steps=without_implied(_split(plan.steps, plan.layout, chains), {}))


@dataclass(frozen=True, slots=True)
class _Chain:
    """Steps of one update.

    down: write-back of the complete gradient.
    up: fetch of the updated working list.
    """

    count: int
    down: int
    adam: int
    up: int


def _chain(plan: Plan, chunk: int, count: int) -> _Chain | None:
    mine = [step for step in plan.steps if step.chunk == chunk]
    adam = next((step for step in mine if step.kind is Kind.CPU_UPDATE), None)
    if adam is None or not _at_home(plan, chunk):
        return None
    down, up = _last_gradient_down(mine, adam), _parameters_up(mine, adam)
    if down is None or up is None or not (_plain(plan.layout, down) and _plain(plan.layout, up)):
        return None
    return _Chain(count, down.id, adam.id, up.id)


def _last_gradient_down(mine: Sequence[Step], adam: Step) -> Step | None:
    found = [s for s in mine if s.kind is Kind.WRITEBACK and s.moment == adam.moment and s.list in ("param", "grad32")]
    return found[0] if len(found) == 1 else None


def _parameters_up(mine: Sequence[Step], adam: Step) -> Step | None:
    up = next((s for s in mine if s.kind is Kind.FETCH and s.list == "param"), None)
    behind = up is not None and ((up.moment or 0) >= (adam.moment or 0) or Ref(adam.id) in up.after)
    return None if behind else up


def _at_home(plan: Plan, chunk: int) -> bool:
    return all(
        Resident(chunk, name, Place.HOST) in plan.initial for name in ("param", *plan.layout.states_of(chunk).names)
    )


def _plain(layout: Layout, step: Step) -> bool:
    assert step.chunk is not None and step.list is not None
    return step.via is None and step.bytes == layout.payload_bytes(step.chunk, step.list)


def _split(steps: Sequence[Step], layout: Layout, chains: Sequence[_Chain]) -> list[Step]:
    chain_of = {step: chain for chain in chains for step in (chain.down, chain.adam, chain.up)}
    first: dict[int, int] = {}  # old id -> id of its first part
    total = 0
    for step in steps:
        first[step.id] = total
        total += chain_of[step.id].count if step.id in chain_of else 1
    last = {i: n + (chain_of[i].count - 1 if i in chain_of else 0) for i, n in first.items()}
    out: list[Step] = []
    for step in steps:
        after = tuple(Ref(last[ref.id], ref.back) for ref in step.after)
        chain = chain_of.get(step.id)
        if chain is None:
            out.append(_numbered(step, len(out), step.bytes, after, None))
            continue
        before = {chain.adam: (chain.down, 0), chain.up: (chain.adam, 1)}.get(step.id)
        for n in range(chain.count):
            part = Part(n, chain.count)
            waits = after if n == 0 else ()
            if before is not None:
                waits = (*(r for r in waits if r.id != last[before[0]]), Ref(first[before[0]] + n, before[1]))
            assert step.chunk is not None
            size = layout.part_bytes(step.chunk, part, step.bytes)
            out.append(_numbered(step, len(out), size, waits, part))
    return out


def _numbered(step: Step, number: int, size_bytes: int, after: tuple[Ref, ...], part: Part | None) -> Step:
    return structs.replace(step, id=number, bytes=size_bytes, after=after, part=part)
