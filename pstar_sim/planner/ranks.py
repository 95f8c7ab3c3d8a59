"""Ranks: the shares of a batch, one job for ranks that differ, and what is said of parallelism that is not modelled.

Knows machines, workloads and timelines; plans nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.timeline import Timeline
from pstar_sim.cost import flops_rate
from pstar_sim.errors import PstarError
from pstar_sim.units import format_s
from pstar_sim.workload.workload import Moment, Workload

__all__ = ["UNMODELLED", "shares_of_batch", "tightest", "unmodelled_notes"]

UNMODELLED = (
    "tensor, pipeline, sequence and expert parallelism are not modelled: all ranks share each layer's data only"
)
WAITING = 0.25
"""Share of an iteration that GPUs wait, from which splitting layers or depth instead of data is worth a look."""


def shares_of_batch(batch: int, machine: Machine) -> list[int]:
    """Sequences of each rank of a micro-batch of `batch` sequences, by the ranks' batch shares.

    Raises PstarError where a share is not a whole number, with the nearest batches that would do.
    """
    ranks = machine.ranks
    parts = [Fraction(r.batch_share).limit_denominator(10**6) for r in ranks]
    whole = sum(parts)
    parts = [p / whole for p in parts]
    shares = [batch * p for p in parts]
    if batch > 0 and all(s.denominator == 1 and s >= 1 for s in shares):
        return [int(s) for s in shares]
    unit = 1
    for p in parts:
        unit = unit * p.denominator // _gcd(unit, p.denominator)
    near = sorted({batch // unit * unit, (batch // unit + 1) * unit} - {0})
    split = "evenly by" if len(set(parts)) == 1 else f"{':'.join(str(int(p * unit)) for p in parts)} among"
    raise PstarError(
        f"batch {batch} cannot be shared {split} the {len(ranks)} ranks of {machine.name}; give "
        f"{' or '.join(map(str, near))}"
    )


def _gcd(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a


def tightest(workloads: Sequence[Workload], machine: Machine) -> Workload:
    """One workload that is as hard on `machine.gpu` (the weakest of each figure) as the hardest of `workloads` (one a
    rank) is on its own GPU, moment by moment: as little room, and at least as much time.

    Raises PstarError for workloads that are not one a rank or not of one model and shape of iteration.
    """
    if len(workloads) != len(machine.ranks):
        raise PstarError(f"{len(workloads)} workloads for the {len(machine.ranks)} ranks of {machine.name}; one a rank")
    first = workloads[0]
    for r, w in enumerate(workloads):
        if (w.fingerprint, w.uses, len(w.moments), w.optimizer) != (
            first.fingerprint,
            first.uses,
            len(first.moments),
            first.optimizer,
        ):
            raise PstarError(
                f"rank {r} of {machine.name} is given another model, another order of its layers or another number of "
                "micro-batches than rank 0; ranks may differ in their sequences only"
            )
        if w.stashes != first.stashes:
            raise PstarError(
                f"rank {r} of {machine.name} would move other bytes of activations to the host than rank 0, and all "
                "ranks run one plan; give each rank the same share, or keep or recompute activations"
            )
    weak = machine.gpu
    rate = flops_rate(machine, first.dtype)
    # Per rank: what its GPU has more than the weakest, and how much faster it is.
    kinds: dict[tuple[int, int], tuple[int, float, float, Workload]] = {}
    for rank, w in zip(machine.ranks, workloads):
        own = replace(machine, ranks=(rank,), nodes=1)
        kinds[id(rank.gpu), id(w)] = (
            rank.gpu.budget_bytes - weak.budget_bytes,
            rate / flops_rate(own, w.dtype),
            weak.hbm_bytes_per_s / rank.gpu.hbm_bytes_per_s,
            w,
        )
    if len(kinds) == 1:
        return first
    moments: list[Moment] = []
    for i, m in enumerate(first.moments):
        rows = [(more, work, stream, w.moments[i]) for more, work, stream, w in kinds.values()]
        moments.append(
            replace(
                m,
                flops=max(int(row.flops * work) for _, work, _, row in rows),
                bytes_read=max(int(row.bytes_read * stream) for _, _, stream, row in rows),
                bytes_written=max(int(row.bytes_written * stream) for _, _, stream, row in rows),
                start_bytes=max(0, *(row.start_bytes - more for more, _, _, row in rows)),
                peak_bytes=max(0, *(row.peak_bytes - more for more, _, _, row in rows)),
                end_bytes=max(0, *(row.end_bytes - more for more, _, _, row in rows)),
            )
        )
    return replace(first, moments=tuple(moments), batch=max(w.batch for w in workloads))


def unmodelled_notes(
    workload: Workload, machine: Machine, timelines: Mapping[str, Timeline], *, short_of_gpu: bool
) -> tuple[str, ...]:
    """What an answer for several GPUs leaves out, and where that is the likely winner.

    timelines: of the policies that fit, by name. short_of_gpu: some policy does not fit the GPU.
    """
    if len(machine.ranks) == 1:
        return ()
    notes = [UNMODELLED]
    if not timelines:
        if short_of_gpu:
            notes.append(
                "no policy fits the GPUs: a layer and what it needs beside it would have to be split over several of "
                "them (tensor or sequence parallelism), which could well fit"
            )
        return tuple(notes)
    name, best = min(timelines.items(), key=lambda row: row[1].iteration_s)
    waits = sum(best.stall_s.values())
    share = waits / best.iteration_s
    if share < WAITING:
        return tuple(notes)
    worst = max(best.stall_s, key=lambda cause: best.stall_s[cause])
    said = (
        f"even under {name} the GPUs wait {format_s(waits)} of {format_s(best.iteration_s)} (most for {_WAITS[worst]}) "
        f"with {workload.batch} sequence{'s' if workload.batch > 1 else ''} a GPU and micro-batch"
    )
    if worst == "net" and machine.nodes > 1:
        notes.append(f"{said}: pipeline parallelism between the nodes, which exchanges activations only, may be faster")
    elif machine.peer is not None:
        notes.append(
            f"{said}: tensor parallelism over {machine.peer.name}, which leaves each GPU its part of every layer, may "
            "be faster; so may more sequences a GPU"
        )
    else:
        notes.append(f"{said}: pipeline parallelism may be faster; so may more sequences a GPU")
    return tuple(notes)


_WAITS = {
    "net": "collectives",
    "h2d": "copies to the GPU",
    "d2h": "copies to the host",
    "adam": "CPU Adam",
    "barrier": "CPU Adam behind the barrier",
    "dram": "host DRAM",
    "nvme": "disks",
    "compute": "the GPU itself",
}
