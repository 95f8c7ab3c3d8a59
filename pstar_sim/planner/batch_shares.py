"""The shares of a batch, one job for ranks that differ, and notes on parallelism that is not modelled."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from pstar_sim.arguments import refused, whole
from pstar_sim.bounds.shares import tightest
from pstar_sim.catalog.loader import load_machine
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.figures import BINDS_WORDS
from pstar_sim.core.timeline import Timeline
from pstar_sim.dtypes import same_size
from pstar_sim.errors import PstarError
from pstar_sim.units import format_count, format_s
from pstar_sim.workload.presets import default_dtype, variant
from pstar_sim.workload.workload import Workload, retype

UNMODELLED = (
    "every GPU has the whole model and a share of the batch; tensor, context, expert and pipeline parallelism are "
    "another question (--parallel auto)"
)
WAITING = 0.25
"""From this share of an iteration that GPUs wait, splitting layers or depth instead of data may be faster."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Share:
    """The part of a job of each GPU ([Note: one meaning of batch]).

    workload: the job of one rank. If ranks take different shares, a job at least as hard as each of theirs.
    ranked: each rank's own job, None if they are alike.
    batch: sequences per micro-batch, of all GPUs together.
    tokens: per iteration, of all GPUs together.
    """

    workload: Workload
    ranked: tuple[Workload, ...] | None
    batch: int
    tokens: int


def machine_of(machine: Machine | str) -> Machine:
    if isinstance(machine, Machine):
        return machine
    if isinstance(machine, str) and machine:
        return load_machine(machine)
    raise refused("machine", machine, "a Machine or the name of one, such as ps.machine('v100-32')")


def share_out(workload: Workload | Sequence[Workload], machine: Machine, *, nearly: bool = False) -> Share:
    """[Note: one meaning of batch] `batch` is the batch of all GPUs together, on the command line and in Python. So a
    single workload is the job of the whole machine: a preset is written again for each rank's share. A captured
    workload cannot be cut, so on several GPUs it comes as a list, one workload per rank, and a plan's workload is the
    job of one rank.

    A preset whose dtype was left open gets the dtype of the GPU. Raises PstarError for a value that is not a workload,
    a batch that the ranks cannot share, a single captured workload for several GPUs, and a list without one workload
    per rank.

    nearly: as in `shares_of_batch`.
    """
    if isinstance(workload, Workload):
        given = _divided(workload, machine, nearly=nearly)
    elif isinstance(workload, Sequence) and workload and all(isinstance(w, Workload) for w in workload):
        known = {id(w): _typed(w, machine) for w in workload}
        given = tuple(known[id(w)] for w in workload)
    else:
        what = "a Workload, such as ps.preset('12B', batch=8, seq=1024), or a list of them, one per GPU"
        raise refused("workload", workload, what)
    alike = len(given) == machine.world_size and all(w is given[0] for w in given)
    return Share(
        workload=given[0] if alike else tightest(given, machine),
        ranked=None if alike else given,
        batch=sum(w.batch for w in given),
        tokens=sum(w.tokens for w in given),
    )


def _divided(workload: Workload, machine: Machine, *, nearly: bool) -> tuple[Workload, ...]:
    if machine.data_parallel_size == 1:
        return (_typed(workload, machine),)
    shares = shares_of_batch(workload.batch, machine, nearly=nearly)
    if workload.source != "preset" or workload.activations:
        each = shares[0] if len(set(shares)) == 1 else "a share of it"
        raise PstarError(
            f"workload {workload.model!r} has batch {workload.batch}, which is that of all {len(shares)} GPUs of "
            f"{machine.name} together, and cannot be cut: it was not written from a preset. Trace the model with batch "
            f"{each} and give a list of workloads, one per GPU: [workload] * {len(shares)}"
        )
    dtype = default_dtype(machine) if workload.dtype_open else None
    return of_shares(shares, lambda batch: variant(workload, batch=batch, dtype=dtype))


def _typed(workload: Workload, machine: Machine) -> Workload:
    if not workload.dtype_open:
        return workload
    dtype = default_dtype(machine)
    if not same_size(dtype, workload.dtype):
        return variant(workload, dtype=dtype)
    return retype(workload, dtype)


def shares_of_batch(batch: int, machine: Machine, *, nearly: bool = False) -> list[int]:
    """Returns each rank's sequences in a micro-batch.

    nearly: shares need not be whole numbers; ranks then take equally many sequences, or one more.

    Raises PstarError, with the nearest batches that the ranks can share.
    """
    ranks, parts = machine.ranks, _parts(machine)
    whole("batch", batch)
    shares = [batch * p for p in parts]
    if all(s.denominator == 1 and s >= 1 for s in shares):
        return [int(s) for s in shares]
    if nearly and batch >= len(ranks):
        return equal_shares(batch, len(ranks))
    unit = least_batch(machine)
    near = sorted({batch // unit * unit, (batch // unit + 1) * unit} - {0})
    split = "evenly by" if len(set(parts)) == 1 else f"{':'.join(str(int(p * unit)) for p in parts)} among"
    raise PstarError(
        f"batch {batch} cannot be shared {split} the {len(ranks)} ranks of {machine.name}; give "
        f"{' or '.join(map(str, near))}"
    )


def of_shares(shares: Sequence[int], write: Callable[[int], Workload]) -> tuple[Workload, ...]:
    """Ranks with equal shares have the same object."""
    written = {share: write(share) for share in sorted(set(shares))}
    return tuple(written[share] for share in shares)


def equal_shares(batch: int, ranks: int) -> list[int]:
    return [batch // ranks + (r < batch % ranks) for r in range(ranks)]


def least_batch(machine: Machine) -> int:
    """The smallest batch that the ranks can share. All others are its multiples."""
    return math.lcm(*(p.denominator for p in _parts(machine)))


def _parts(machine: Machine) -> list[Fraction]:
    parts = [Fraction(r.batch_share).limit_denominator(10**6) for r in machine.ranks]
    return [p / sum(parts) for p in parts]


def unmodelled_notes(
    workload: Workload, machine: Machine, timelines: Mapping[str, Timeline], *, short_of_gpu: bool
) -> tuple[str, ...]:
    """What an answer for several GPUs omits, and parallelism that is likely faster.

    short_of_gpu: whether every policy that does not fit is.
    """
    if machine.data_parallel_size == 1:
        return ()
    notes = [UNMODELLED]
    if workload.optimizer.whole:
        notes.append(
            f"{workload.optimizer.name} updates whole tensors, which slices of several GPUs cut: its plans run under "
            "all_on_gpu, and are answers about time and memory alone under other policies"
        )
    if not timelines:
        if short_of_gpu:
            notes.append(
                "no policy fits the GPUs: each layer would have to be split over several of them (tensor or sequence "
                "parallelism), which may well fit"
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
        f"with {format_count(workload.batch, 'sequence')} per GPU and micro-batch"
    )
    if worst == "net" and machine.nodes > 1:
        notes.append(f"{said}: pipeline parallelism between the nodes, which exchanges activations only, may be faster")
    elif machine.peer is not None:
        notes.append(
            f"{said}: tensor parallelism over {machine.peer.name}, which leaves each GPU its part of every layer, may "
            "be faster; so may more sequences per GPU"
        )
    else:
        notes.append(f"{said}: pipeline parallelism may be faster; so may more sequences per GPU")
    return tuple(notes)


_WAITS = BINDS_WORDS | {"barrier": "CPU Adam behind the barrier", "compute": "the GPU itself"}
