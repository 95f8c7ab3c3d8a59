"""The jobs of the members of a set of plans: of stages, or of kinds of GPUs that split layers.

[Note: cut by speed] Whale's rule: each layer goes to the stage that then ends first, by the cost model, with embedding
and head where they are. Kinds of GPUs that split layers take whole parts of each (`parts_of`) with which moments end
first. Those without room give some away.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil
from typing import Any

from pstar_sim.bounds.stages import seconds_in_step
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.model_shapes import ModelEntry, model_entry
from pstar_sim.core.plan_set import Share
from pstar_sim.cost import Computing
from pstar_sim.errors import DoesNotFit, ModelError, PstarError
from pstar_sim.planner.jobs import Job
from pstar_sim.planner.stages_machines import divisors, kinds_of, machine_of_stage
from pstar_sim.workload.parallelism import CUTS, Parallelism
from pstar_sim.workload.pipeline import Part, cells_of, in_schedule
from pstar_sim.workload.presets import check_blocks, check_split, parts_of, stage_of
from pstar_sim.workload.presets.shared import Stage
from pstar_sim.workload.presets.shortened import Shortened, shortened
from pstar_sim.workload.workload import Workload

_FINE = 1000
_STEPS = 8
"""From shares to their reverse."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """Raises PstarError for a job that cannot be cut so, when asked.

    shape: the model's, if it is not in the catalog.
    most: layers of each stage that is cut by speed, or parts of each kind of GPU, if limited.
    even: kinds take equal parts.
    nodes: parts of the node of a rank of each kind; (): as many as of a layer.
    ends: (seconds, unevenness) of splits, also relieved.
    pieces, jobs: written so far.
    """

    job: Job
    machine: Machine
    parallelism: Parallelism
    shape: ModelEntry | None = None
    most: tuple[int, ...] = ()
    even: bool = False
    nodes: tuple[int, ...] = ()
    ends: dict[tuple[Share, ...], tuple[float, int]] = field(default_factory=dict, repr=False)
    pieces: dict[Stage, Part] = field(default_factory=dict, repr=False)
    jobs: dict[tuple[object, ...], Workload] = field(default_factory=dict, repr=False)

    @property
    def members(self) -> int:
        return len(self.shares) or self.parallelism.pipeline

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        """() where GPUs that split layers are alike."""
        shares = _shares_of(self) if kinds_of(self.machine, self.parallelism) else ()
        return tuple(share._replace(node=node) for share, node in zip(shares, self.nodes)) if self.nodes else shares

    @cached_property
    def machines(self) -> list[Machine]:
        """Of each member."""
        if not self.shares:
            return [machine_of_stage(self.machine, self.parallelism, n) for n in range(self.members)]
        shares = _fractions([Share(share.ranks, share.node or share.parts) for share in self.shares])
        return [machine_of_stage(self.machine, self.parallelism, n, share) for n, share in enumerate(shares)]

    @property
    def workloads(self) -> list[Workload]:
        """Of one rank of each member."""
        return list(map(self.workload, range(self.members)))

    def workload(self, member: int) -> Workload:
        spread, count = self.parallelism, self.job.micro_batches or 1
        stages = self.stages[member :: self.members]
        if (key := (member, count, *stages)) not in self.jobs:
            cells = cells_of(spread.schedule, spread.pipeline, count, spread.virtual)
            self.jobs[key] = in_schedule([*map(self.written, stages)], cells, 0 if self.shares else member)
        return self.jobs[key]

    @property
    def entry(self) -> ModelEntry:
        if self.job.model is None or self.job.batch is None or self.job.seq is None:
            raise PstarError("a trace is of a whole model; give --model, whose preset is cut into stages")
        return self.shape or model_entry(self.job.model)

    @cached_property
    def stages(self) -> list[Stage]:
        """The parts of all stages, or of kinds of GPUs."""
        job, spread = self.job, self.parallelism
        check_way(self.entry, job, self.machine, spread)
        layers = layers_of(job, self.machine, spread, shape=self.shape, most=self.most)
        stages = [_part(spread, number, one) for number, one in enumerate(layers)]
        return [replace(stages[0], share=share) for share in _fractions(self.shares)] if self.shares else stages

    def parts(self) -> Iterator[Part]:
        """One micro-batch of each."""
        return map(self.written, self.stages)

    def written(self, stage: Stage) -> Part:
        if stage not in self.pieces:
            self.pieces[stage] = stage_of(self.entry, stage, **self._axes)
        return self.pieces[stage]

    def shortened(self, stage: Stage) -> Shortened:
        return shortened(self.entry, stage, **self._axes)

    @cached_property
    def _axes(self) -> dict[str, Any]:
        job = self.job
        assert job.batch is not None
        batch = job.batch // self.parallelism.data_on(self.machine.world_size)
        return {"batch": batch, "sequence": job.seq, **job.but(dtype=job.dtype_on(self.machine)).given}

    def after(self, member: int, refusal: DoesNotFit) -> Cut | None:
        """Relieved of a layer, or the parts without room. Of the node a kind first gets what it needs."""
        if refusal.place != "gpu":
            nodes = self._with_room(member, refusal)
            return replace(self, nodes=nodes) if nodes else self.nearer_equal
        if not self.shares:
            return self.relieved(member)
        return self.relieved(member, ceil(self.shares[member].parts * refusal.short_bytes / refusal.needed_bytes))

    @property
    def nearer_equal(self) -> Cut | None:
        """None from equal parts."""
        parts = [share.parts for share in self.shares]
        gap = max(parts, default=0) - min(parts, default=0)
        return self.relieved(parts.index(max(parts)), max(1, gap // _STEPS)) if gap else None

    def _with_room(self, member: int, refusal: DoesNotFit) -> tuple[int, ...]:
        """Parts of the node; () once they were given."""
        if self.nodes or not self.shares:
            return ()
        each, sums = self.shares[member], [share.ranks * share.parts for share in self.shares]
        own = each.parts * refusal.needed_bytes / refusal.available_bytes
        left = (sum(sums) - each.ranks * own) / (sum(sums) - sums[member])
        nodes = [max(1, int(_FINE * left * share.parts)) for share in self.shares]
        nodes[member] = ceil((_FINE + 1) * own)
        return tuple(nodes) if left > 0 else ()

    def relieved(self, member: int, parts: int = 1) -> Cut | None:
        """Others take some, or kinds equal parts; None if they cannot."""
        if self.even or (not self.shares and self.parallelism.cut == CUTS[0]):
            return None
        layers = layers_of(self.job, self.machine, self.parallelism, shape=self.shape, most=self.most)
        has = [share.parts for share in self.shares] or [len(one) for one in layers]
        most = list(self.most or [sys.maxsize] * self.members)
        most[member] = max(has[member] - parts, min(1, has[member] - 1))
        less = replace(self, most=tuple(most), nodes=(), jobs={})
        if self.shares:
            return next((each for each in (less, replace(less, most=(), even=True)) if _splits(each)), None)
        return less if most[member] and sum(most) >= layers[-1].stop else None


def _fractions(shares: Sequence[Share]) -> list[Fraction]:
    whole = sum(share.ranks * share.parts for share in shares)
    return [Fraction(share.parts, whole) for share in shares]


def _splits(cut: Cut) -> list[tuple[Share, ...]]:
    assert cut.job.model is not None
    counts, whole = _ranks_of_kinds(cut), parts_of(cut.shape or model_entry(cut.job.model))
    most = cut.most or (whole,) * len(counts)
    found: list[tuple[int, ...]] = [()]
    for n, count in enumerate(counts):
        others = sum(counts[n + 1 :])
        found = [
            (*parts, own)
            for parts in found
            for left in (whole - sum(a * b for a, b in zip(counts, parts)),)
            for own in range(1, min(most[n], (left - others) // count) + 1)
            if others or own * count == left
        ]
    if cut.even:
        found = [parts for parts in found if len(set(parts)) == 1]
    return [tuple(map(Share, counts, parts)) for parts in found]


def _shares_of(cut: Cut) -> tuple[Share, ...]:
    """[Note: cut by speed]. Raises PstarError, with the nearest number of ranks that could."""
    job, spread = cut.job, cut.parallelism
    assert job.model is not None
    entry = cut.shape or model_entry(job.model)
    if spread.sequence:
        raise PstarError(
            f"parallelism {spread}: ranks of sp have equal parts of the tokens, and {cut.machine.name} has GPUs that "
            "differ; leave sp out"
        )
    splits, counts = _splits(cut), _ranks_of_kinds(cut)
    if not splits:
        raise _unsplit(cut, entry, counts)
    machines = [machine_of_stage(cut.machine, spread, n) for n in range(len(counts))]
    jobs: dict[tuple[int, int, Share], tuple[Workload, Sequence[float]]] = {}

    def seconds(layers: int, split: tuple[Share, ...]) -> float:
        members = []
        for n, (share, fraction) in enumerate(zip(split, _fractions(split))):
            if (layers, n, share) not in jobs:
                one, _ = cut.written(replace(_part(spread, 0, range(layers)), share=fraction))
                jobs[layers, n, share] = one, Computing(one, machines[n]).moments_s
            members.append(jobs[layers, n, share])
        return seconds_in_step(members)

    for split in splits:
        if split not in cut.ends:
            first, second = (seconds(layers, split) for layers in (1, 2))
            parts = [share.parts for share in split]
            cut.ends[split] = first + (entry.layers - 1) * (second - first), max(parts) - min(parts)
    return min(splits, key=cut.ends.__getitem__)


def _ranks_of_kinds(cut: Cut) -> list[int]:
    groups = cut.machine.world_size // cut.parallelism.tensor
    return [len(alike) // groups for alike in kinds_of(cut.machine, cut.parallelism)]


def _unsplit(cut: Cut, entry: ModelEntry, counts: Sequence[int]) -> PstarError:
    spread, gpus = cut.parallelism, cut.machine.world_size
    able = []
    for n in divisors(cut.machine.local_ranks):
        other = replace(cut, parallelism=replace(spread, tensor=n, data=None), most=())
        if n > 1 and gpus % (n * spread.context) == 0 and kinds_of(cut.machine, other.parallelism) and _splits(other):
            able.append(n)
    best = min(able, key=lambda n: (abs(n - spread.tensor), n), default=None)
    would = "leave tp out" if best is None else f"tp={best} would"
    return ModelError(
        f"model {entry.name}: a layer has {parts_of(entry)} parts (heads of keys, columns), of which "
        f"{' and '.join(map(str, counts))} ranks of GPUs that differ cannot have whole ones, the same on equal GPUs; "
        f"{would}"
    )


def check_way(
    entry: ModelEntry, job: Job, machine: Machine, parallelism: Parallelism, *, sequences: str = "batch"
) -> None:
    """Raises PstarError for what no workload of the stages can be written for.

    sequences: what the job's batch is called.
    """
    assert job.batch is not None and job.seq is not None
    data = parallelism.data_on(machine.world_size)
    part = _part(parallelism, 0, _even(entry.layers, parallelism, entry.name)[0])
    if kinds_of(machine, parallelism):
        part = replace(part, share=Fraction(1, parts_of(entry)))
    check_split(entry, part, sequence=job.seq, **job.given)
    if job.batch % data:
        raise PstarError(
            f"{sequences} is {job.batch}; the {data} ranks of a stage share it, so give a multiple of {data}"
        )
    check_blocks(entry, job)


def _part(parallelism: Parallelism, number: int, layers: range) -> Stage:
    return Stage(
        layers=layers,
        first=number == 0,
        last=number == parallelism.pipeline * parallelism.virtual - 1,
        tensor=parallelism.tensor,
        sequence=parallelism.sequence,
        context=parallelism.context,
        experts=parallelism.experts,
    )


def layers_of(
    job: Job, machine: Machine, parallelism: Parallelism, *, shape: ModelEntry | None, most: Sequence[int]
) -> list[range]:
    assert job.model is not None and job.batch is not None and job.seq is not None
    entry, stages = shape or model_entry(job.model), parallelism.pipeline
    even = _even(entry.layers, parallelism, job.model)
    if parallelism.cut == CUTS[0] or stages == 1:
        return even
    axes = job.but(dtype=job.dtype_on(machine)).given
    batch = job.batch // parallelism.data_on(machine.world_size)
    each_s, ends_s = [], []
    for number in range(stages):
        own, seconds = machine_of_stage(machine, parallelism, number), []
        for layers in (1, 2):
            part = _part(parallelism, number, range(layers))
            one, _ = stage_of(entry, part, batch=batch, sequence=job.seq, **axes)
            seconds.append(sum(Computing(one, own).moments_s))
        each_s.append(seconds[1] - seconds[0])
        ends_s.append(seconds[0])
    counts = [1] * stages
    for _ in range(entry.layers - stages):
        able = [n for n in range(stages) if not most or counts[n] < most[n]]
        counts[min(able, key=lambda n: ends_s[n] + counts[n] * each_s[n])] += 1
    return [range(begin, end) for begin, end in pairwise(accumulate(counts, initial=0))]


def _even(layers: int, spread: Parallelism, model: str) -> list[range]:
    parts = spread.pipeline * spread.virtual
    if parts > layers:
        said = f"pp is {spread.pipeline}" + (f" and v is {spread.virtual}" if spread.virtual > 1 else "")
        what = "stages" if spread.virtual == 1 else "parts of stages"
        raise ModelError(f"model {model}: {said}; the model has {layers} blocks, so at most {layers} {what}")
    each, more = divmod(layers, parts)
    ends = [each * (n + 1) + min(more, n + 1) for n in range(parts)]
    return [range(begin, end) for begin, end in zip([0, *ends], ends)]
