"""karma: blocks whose activations are kept, recomputed or swapped (KARMA; Wahib et al., SC'20).

Out-of-core data-parallel training, by blocks of layers.

[Note: capacity rule] Only data beyond the capacity leaves the GPU. The last blocks keep their activations, because
their backward pass comes first. The blocks before them are swapped or recomputed, as few as memory allows.

[Note: interleave] Swapped and recomputed blocks alternate: a recomputed block gives the copies of its swapped
neighbours time on the link. For each of INTERLEAVES, `ways` offers the workload with the fewest blocks beyond memory.
The fastest plan decides among them, as the publication's performance model does.

Parameters follow the same rule. A block's chunks come and leave together, and stay between two uses where there is
room, the last blocks first. On one GPU parameters, states and Adam stay there if all of them fit. Otherwise, and always
on several GPUs, gradients leave block by block during the backward pass, there summed over the ranks first (the phased
gradient exchange). Adam then runs on the host in their order, and parameters come back before their next use.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.errors import DoesNotFit, TraceError
from pstar_sim.policy.family.plan_visits import plan_visits, room_beside
from pstar_sim.policy.family.residency import belady, gaps_of
from pstar_sim.policy.kit.blocks import Stretch, merged
from pstar_sim.policy.kit.capabilities import Capabilities
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.points import Point
from pstar_sim.policy.kit.visits import Visit
from pstar_sim.workload.mixing import block_names, block_runs, mix_blocks, offload_blocks
from pstar_sim.workload.workload import Workload, repeat_micro_batch, single_micro_batch

__all__ = ["CAPABILITIES", "karma", "ways"]

INTERLEAVES = (*((share, 0) for share in (0.0, 1 / 12, 1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 1.0)), (1.0, 1))
"""(share of the blocks beyond memory that is swapped while the others recompute, number of blocks before them)
pairs."""


def karma(workload: Workload, machine: Machine, settings: Settings) -> Plan:
    """Returns the plan for the workload's activations as they are; `ways` chooses the activations.

    Raises DoesNotFit if not even the chunks of single moments fit the GPU beside the tide, or if parameters and states
    exceed the host.
    """
    job = Job("karma", workload, machine, settings)
    refusal: DoesNotFit | None = None
    for where, pinned, visits in _residences(job):
        try:
            plan = plan_visits(job, visits, pinned=pinned, adam="fifo")
        except DoesNotFit as short:
            refusal = short
            continue
        adam = "on the GPU" if pinned else "on the host, as gradients arrive"
        return replace(plan, choices={**plan.choices, "capacity": where, "adam": adam})
    assert refusal is not None
    raise refusal


def _residences(job: Job) -> Iterator[tuple[str, Collection[int], Sequence[Visit]]]:
    if job.machine.data_parallel_size == 1:
        end = len(job.workload.moments) - 1
        frozen = [Visit(c, 0, end) for c in job.moving if not job.uses.updated(c)]
        yield "parameters and states stay on the GPU", job.candidates, frozen
    yield "parameters stay until their last gradient, where there is room", (), _kept(job, _by_block(job))
    yield "parameters are there for the moments that use them", (), _by_use(job)


def _until_last_use(job: Job, chunks: Sequence[int]) -> list[Visit]:
    touched = job.uses.touched
    return [Visit(c, touched[c][0], touched[c][-1]) for c in chunks if touched[c]]


def _by_use(job: Job) -> list[Visit]:
    return [Visit(c, m, m) for c in job.moving for m in job.uses.touched[c]]


def _by_block(job: Job) -> list[Visit]:
    run_of = [run for _, _, run in block_runs(job.workload) for _ in run]
    runs = {(c, run_of[m][0], run_of[m][-1]) for c in job.moving for m in job.uses.touched[c]}
    return [Visit(*run) for run in sorted(runs)]


def _kept(job: Job, visits: Sequence[Visit]) -> list[Visit]:
    """Visits, and gaps over which chunks stay, by [Note: capacity rule]."""
    at: dict[int, list[Stretch]] = {c: [] for c in job.moving}
    for visit in visits:
        at[visit.chunk].append(Stretch(job.block_of[visit.first], job.block_of[visit.last]))
    gaps = [gap for c, mine in at.items() for gap in gaps_of(c, merged(sorted(mine)))]
    sizes = [job.whole_bytes(c) for c in range(len(job.sizes))]
    kept = belady(gaps, sizes, room_beside(job, visits))
    return [*visits, *(Visit(g.chunk, job.blocks[g.start].first, job.blocks[g.end].last) for g in kept)]


def ways(recomputed: Workload, kept: Workload, machine: Machine, settings: Settings) -> Iterator[Workload]:
    """One workload per interleave and per way to keep the model data, by [Note: capacity rule]; none if the model is
    not a stack of blocks, or if no interleave fits.

    recomputed, kept: the job with all activations recomputed, and with all kept.
    """
    try:
        variants = single_micro_batch(recomputed), single_micro_batch(kept)
        count = len(block_names(kept))
        mix_blocks(*variants, ())
    except TraceError:
        return
    seen: set[object] = set()
    for room_bytes in _rooms(Job("karma", recomputed, machine, settings)):
        for share, begin in INTERLEAVES:
            fits = partial(_fits, *variants, share, begin, room_bytes)
            fewest = bisect_left(range(count + 1), True, key=fits)
            way = _beyond(*variants, share, begin, fewest) if fewest <= count else None
            if way is not None and (way.checkpointing, way.activations) not in seen:
                seen.add((way.checkpointing, way.activations))
                yield repeat_micro_batch(way, kept.micro_batches)


def _fits(recomputed: Workload, kept: Workload, share: float, begin: int, room_bytes: int, end: int) -> bool:
    way = _beyond(recomputed, kept, share, begin, end)
    return way is not None and way.peak_non_model_bytes <= room_bytes


def _beyond(recomputed: Workload, kept: Workload, share: float, begin: int, end: int) -> Workload | None:
    """Blocks from `begin` up to `end` keep no activations: `share`, evenly spread, swap, others recompute. The first
    never swaps, nor the last two, needed again at once. None if a swap has no time."""
    blocks = block_names(kept)
    could = range(1, min(end, len(blocks) - 2))
    swapped = [blocks[n] for n in could if int(n * share) > int((n - 1) * share)]
    recompute = set(blocks[begin:end]) - set(swapped)
    mixed = mix_blocks(recomputed, kept, [block for block in blocks if block not in recompute])
    with contextlib.suppress(TraceError):
        return offload_blocks(mixed, swapped)
    return None


def _rooms(job: Job) -> list[int]:
    """What each way to keep model data leaves for activations, if enough with all recomputed; parameters swap by block
    only if no other way does."""
    rooms = [_least(job, _until_last_use(job, job.moving))]
    if job.machine.data_parallel_size == 1:
        rooms[:0] = [job.machine.gpu_budget_bytes - job.small_bytes - sum(job.permanent[c] for c in job.moving)]
    enough = [room for room in rooms if room >= max(job.tide)]
    return enough or [_least(job, _by_block(job)), _least(job, _by_use(job))]


def _least(job: Job, visits: Sequence[Visit]) -> int:
    return min(room + block.tide_bytes for room, block in zip(room_beside(job, visits), job.blocks))


CAPABILITIES = Capabilities(near=Point(adam="fifo"), activations=ways)
