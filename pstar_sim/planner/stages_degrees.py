"""The ways to spread a job over GPUs that a question tries.

[Note: which parallelisms] The ways are every degree that divides the GPUs, the layers and the sequences of an
iteration, with the micro-batches asked for (or the nearest number that divides a rank's sequences), and with single
sequences: the smallest bubble and the fewest activations. Without a pipeline also with a quarter as many: parameters
move less often. "auto" takes sequence parallelism wherever ranks can split the sequence: as many bytes cross the links,
and ranks keep less. It splits sequences over ranks (cp), which leaves a rank as much of the model and gathers keys,
only where they are too few for all ranks, or one takes LONG of the GPU. Experts are whole on each rank, or shared by
those of a node or all. Stages have one part, or two (interleaved) with the micro-batches asked for. Pipelines whose
bubble, (p-1)/(v m+p-1) for v parts, is above MOST_BUBBLE are left out. "all" plans every way, schedule, two and four
parts, and sequence parallelism or not.

[Note: what is recomputed] If the job does not say, nothing, every second block (or the scores of attention that keeps
them) and all are tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from pstar_sim.arguments import text
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.model_shapes import ModelEntry, model_entry
from pstar_sim.errors import PstarError
from pstar_sim.planner.jobs import Job
from pstar_sim.planner.stages_cut import check_way
from pstar_sim.planner.stages_machines import divisors, kinds_of, machine_of_stage
from pstar_sim.policy.registry import Policy, can
from pstar_sim.units import format_count
from pstar_sim.workload.parallelism import CUTS, Parallelism
from pstar_sim.workload.pipeline import INTERLEAVED, SCHEDULES
from pstar_sim.workload.workload import ATTENTION_ALONE

ASKED = ("auto", "all")
"""Questions about parallelism: the ways that can be the fastest, and every way."""
_FEWER = 4
"""How many times fewer micro-batches are tried too where there is no pipeline."""
LONG = 0.5
"""Share of a GPU, by Korthikanti's terms, that one sequence takes where "auto" splits it."""
NOTHING, ALL_BLOCKS = "none", "all"
"""What is recomputed, beside the values of the axis."""
_SECOND = "every-2"
_ENOUGH = "ranks can share the sequences, and each has room for one"
MOST_BUBBLE = 0.5
"""Largest bubble, by its closed form, of a pipeline that "auto" plans."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """recompute: NOTHING, ALL_BLOCKS or as the axis; None: as the job says."""

    parallelism: Parallelism
    batch: int
    micro_batches: int
    recompute: str | None = None

    def __str__(self) -> str:
        how = "" if self.recompute is None else f" recomputing {self.recompute}"
        return f"{self.parallelism} {self.batch} x {self.micro_batches}{how}"

    @property
    def keeps(self) -> int:
        """More with less recomputation."""
        return {NOTHING: 2, ALL_BLOCKS: 0, None: 0}.get(self.recompute, 1)

    def but(self, recompute: str | None) -> Way:
        return replace(self, recompute=recompute)

    def of(self, job: Job) -> Job:
        job = replace(job, batch=self.batch, micro_batches=self.micro_batches)
        if self.recompute is None:
            return job
        whole = {NOTHING: False, ALL_BLOCKS: True}.get(self.recompute)
        return replace(job, checkpointing=whole, recompute=None if whole is not None else self.recompute)


def ways_of(
    job: Job, machine: Machine, parallel: str | Parallelism, *, shape: ModelEntry | None = None
) -> tuple[list[Way], list[str]]:
    """The ways that a question names, and what is left out.

    parallel: one of ASKED, a parallelism, or its text.
    shape: the model's, if it is not in the catalog.

    Raises PstarError for a text that names none, and for a job of no preset.
    """
    if parallel in ASKED:
        ways, left_out = ways_to_spread(job, machine, every=parallel == ASKED[1], shape=shape)
        return [way.but(how) for way in ways for how in _recomputations(job, shape)], left_out
    if job.model is None or job.batch is None:
        raise PstarError("a trace is of a whole model; give a model, whose preset is spread, with batch and seq")
    of_file = isinstance(parallel, Parallelism)  # which says its micro-batches, too
    if not isinstance(parallel, Parallelism):
        parallel = Parallelism.parse(text("parallel", parallel, "auto, all, or a parallelism such as tp=2,pp=4"))
    one = Way(parallelism=parallel, batch=job.batch, micro_batches=job.micro_batches or 1)
    data, sequences = parallel.data_on(machine.world_size), one.batch * one.micro_batches
    if of_file or parallel.pipeline == 1 or sequences % data or one.batch <= data:
        return [one], []
    single = f"{parallel} in single sequences, --batch {data} --micro-batches {sequences // data}"
    return [one], [f"{single}: a way that is named runs in the micro-batches asked; auto tries both"]


def recomputing_all(ways: Iterable[Way]) -> list[Way]:
    """Those that recompute all blocks if they may choose."""
    return [way for way in ways if way.recompute in (None, ALL_BLOCKS)]


def _recomputations(job: Job, shape: ModelEntry | None) -> list[str | None]:
    """[Note: what is recomputed]."""
    assert job.model is not None
    if job.checkpointing is not None or job.recompute is not None:
        return [None]
    part = ATTENTION_ALONE if job.given.get("attention") == "math" else _SECOND
    some = [part] if part != _SECOND or (shape or model_entry(job.model)).layers > 1 else []
    return [NOTHING, *some, ALL_BLOCKS]


def ways_to_spread(
    job: Job, machine: Machine, *, every: bool = False, shape: ModelEntry | None = None
) -> tuple[list[Way], list[str]]:
    """[Note: which parallelisms], and what is left out.

    every: all schedules, any bubble.
    shape: as in `ways_of`.

    Raises PstarError for a job of no preset.
    """
    if job.model is None or job.batch is None:
        raise PstarError("a trace is of a whole model; give --model, whose preset is cut into stages")
    entry, ways = shape or model_entry(job.model), list[Way]()
    missing: dict[str, list[str]] = {}  # reason -> ways
    for one in _degrees_on(machine):
        if why := _why_not(entry, job, machine, one, every=every):
            missing.setdefault(why, []).append(str(one))
            continue
        for way in _in_all_orders(entry, job, machine, one, every=every):
            bubble = closed_bubble(way.parallelism, way.micro_batches)
            if every or bubble <= MOST_BUBBLE:
                ways.append(way)
                continue
            of_way = f"{way.parallelism} with {format_count(way.micro_batches, 'micro-batch')} ({bubble:.0%})"
            missing.setdefault(f"a bubble of more than {MOST_BUBBLE:.0%}", []).append(of_way)
    left_out = [f"{'; '.join(of)}: {why}" for why, of in missing.items() if why != _ENOUGH]
    if _ENOUGH in missing:
        left_out.append(f"{format_count(len(missing[_ENOUGH]), 'way')} with cp: {_ENOUGH}")
    return ways, left_out


def _degrees_on(machine: Machine) -> Iterator[Parallelism]:
    """All that divide the GPUs, with ranks that split a layer in one node."""
    gpus = machine.world_size
    for tensor in divisors(machine.local_ranks):
        for stages in divisors(gpus // tensor):
            for context in divisors(gpus // tensor // stages):
                data = gpus // stages // tensor // context
                yield Parallelism(tensor=tensor, context=context, pipeline=stages, data=data)


def _why_not(entry: ModelEntry, job: Job, machine: Machine, one: Parallelism, *, every: bool) -> str:
    assert job.batch is not None and one.data is not None
    sequences = job.batch * (job.micro_batches or 1)
    if one.context > 1 and not every and sequences % (one.data * one.context) == 0:
        if _bytes_of_sequence(entry, job, one.tensor, one.pipeline) < LONG * machine.gpu.memory_bytes:
            return _ENOUGH
    try:
        check_way(entry, replace(job, batch=sequences), machine, one, sequences="the iteration's batch")
        for stage in range(one.pipeline if machine.mixed and not kinds_of(machine, one) else 1):
            machine_of_stage(machine, one, stage)
    except PstarError as error:
        return str(error)
    return ""


def _in_all_orders(entry: ModelEntry, job: Job, machine: Machine, one: Parallelism, *, every: bool) -> Iterator[Way]:
    assert job.batch is not None and one.data is not None
    stages, asked = one.pipeline, job.micro_batches or 1
    splits = one.tensor > 1 and (job.seq or 0) % (one.tensor * one.context) == 0 and job.autocast is None
    splits = splits and not kinds_of(machine, one)
    splitting = (True, False) if splits and every else (splits,)
    cuts = CUTS if machine.mixed and stages > 1 else CUTS[:1]
    experts = _degrees_of_experts(entry, one.data * one.context, machine.local_ranks // one.tensor, every=every)
    each = job.batch * asked // one.data
    usual = min(divisors(each), key=lambda count: (abs(count - asked), count))
    fewer = min(divisors(each), key=lambda count: (abs(count - usual // _FEWER), count))
    for micro_batches in dict.fromkeys((usual, each, *((fewer,) if stages == 1 else ()))):
        orders = _orders(entry.layers, stages, micro_batches, usual, every=every)
        for (schedule, virtual), split, cut, share in product(orders, splitting, cuts, experts):
            if virtual == 1 or cut == CUTS[0]:
                spread = replace(one, schedule=schedule, virtual=virtual, sequence=split, cut=cut, experts=share)
                yield Way(parallelism=spread, batch=job.batch * asked // micro_batches, micro_batches=micro_batches)


def _degrees_of_experts(entry: ModelEntry, sharing: int, local: int, *, every: bool) -> list[int]:
    """Of ranks that share sequences or split them, `local` of them in a node."""
    count = 1 if entry.experts is None else entry.experts.count
    degrees = [n for n in divisors(sharing) if count % n == 0 and (local % n == 0 or n % local == 0)]
    return degrees if every else sorted({1, max(n for n in degrees if n <= local), degrees[-1]})


def _bytes_of_sequence(entry: ModelEntry, job: Job, tensor: int, stages: int) -> float:
    """What a rank keeps of one, by Korthikanti et al., 2022: 34 bytes of an element of the hidden size and layer, or
    2 and one layer's if it recomputes; and logits in 16 and in 32 bits."""
    assert job.seq is not None
    layers, whole = -(-entry.layers // stages), 34 / tensor
    each = whole * layers if job.checkpointing is False else 2 * layers + whole
    return job.seq * (entry.hidden * each + 6 * entry.vocab / tensor)


def _orders(layers: int, stages: int, micro_batches: int, usual: int, *, every: bool) -> list[tuple[str, int]]:
    if stages == 1:
        return [(SCHEDULES[0], 1)]
    plain = [(schedule, 1) for schedule in SCHEDULES if schedule != INTERLEAVED]
    parts = (2, 4) if every else (2,) if micro_batches == usual else ()
    able = [v for v in parts if stages * v <= layers and micro_batches % stages == 0]
    return plain[: None if every else 1] + [(INTERLEAVED, v) for v in able]


def closed_bubble(spread: Parallelism, micro_batches: int) -> float:
    """Of equal stages whose links take no time."""
    return (spread.pipeline - 1) / (spread.virtual * micro_batches + spread.pipeline - 1)


def with_shards(
    policies: Mapping[str, str | Policy], way: Way, machine: Machine, *, alone: bool
) -> Iterator[tuple[str, Way]]:
    """Each policy with the way and, if several are asked about (not `alone`), what else it can slice."""
    spread = way.parallelism
    shared = spread.data_on(machine.world_size) * spread.context > 1
    for name, policy in policies.items():
        able = can(policy)
        more = [word for word, options in able.shards.items() if options and not able.tries_others]
        for shard in (spread.shard, *(more if shared and not alone and spread.shard is None else ())):
            yield name, replace(way, parallelism=replace(spread, shard=shard))
