"""PlanSet: the plans of a pipeline's stages, or of kinds of GPUs that split layers, and where their steps meet.

[Note: shares of layers] Kinds of GPUs that split layers may have unlike shares (`PlanSet.shares`), of the node's host
and disks too, and a plan each. A moment with sums over them ends on all with the last, as if all its sums came at its
end. All run their moments in one order, so these meetings make no circle.

All ranks of a stage run one plan. A send and its receive begin when both stages have come to them, and end together (a
rendezvous; nothing is buffered). Where Adam waits for all gradients of the model, the optimizer steps of all stages
meet too: the norm is of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pstar_sim.core.plan import Plan
from pstar_sim.core.step import Kind
from pstar_sim.errors import PlanError
from pstar_sim.units import format_count
from pstar_sim.workload.parallelism import Parallelism
from pstar_sim.workload.tape import TENSOR
from pstar_sim.workload.workload import Border


@dataclass(frozen=True, slots=True)
class Meeting:
    """(stage, id of its step) of steps that begin together."""

    steps: tuple[tuple[int, int], ...]


class Share(NamedTuple):
    """Of a kind of GPU: its ranks in a group that splits layers, and the parts of each, of a layer and of the node (0:
    as many)."""

    ranks: int
    parts: int
    node: int = 0


@dataclass(frozen=True, slots=True)
class Split:
    """Of layers."""

    names: tuple[str, ...]
    shares: tuple[Share, ...]

    @property
    def equal(self) -> bool:
        return len({share.parts for share in self.shares}) == 1

    def __str__(self) -> str:
        """Such as "a100-40 5/8, v100-16 3/8"."""
        whole = sum(share.ranks * share.parts for share in self.shares)
        return ", ".join(f"{name} {share.parts}/{whole}" for name, share in zip(self.names, self.shares))


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanSet:
    """checker/meetings.py proves it.

    plans: in the order of the stages, or of `shares`.
    shares: [Note: shares of layers]; () for equal ones.

    Raises PlanError for another number of plans than stages or shares.
    """

    parallelism: Parallelism
    plans: tuple[Plan, ...]
    meetings: tuple[Meeting, ...]
    shares: tuple[Share, ...] = ()

    def __post_init__(self) -> None:
        count, what = (len(self.shares), "share") if self.shares else (self.parallelism.pipeline, "stage")
        if len(self.plans) != count:
            raise PlanError(f"{len(self.plans)} plans for {count} {what}s; each {what} has one")

    @property
    def names(self) -> tuple[str, ...]:
        if self.shares:
            return tuple(plan.machine.gpu.name for plan in self.plans)
        return tuple(f"stage {stage}" for stage in range(len(self.plans)))

    @property
    def count(self) -> str:
        return f"{len(self.plans)} kinds of GPUs" if self.shares else format_count(len(self.plans), "stage")

    @property
    def counts(self) -> tuple[int, ...]:
        """Ranks for which each plan stands, in proportion."""
        return tuple(share.ranks for share in self.shares) or (1,) * len(self.plans)

    @property
    def split(self) -> Split | None:
        return Split(self.names, self.shares) if self.shares else None


def sums_of(plan: Plan) -> dict[int, int]:
    """Step -> its moment, of those with sums over ranks that split layers."""
    summed = {n for n, m in enumerate(plan.workload.moments) if any(group == TENSOR for _, group, _ in m.collectives)}
    return {s.id: s.moment for s in plan.steps if s.kind is Kind.COMPUTE and s.moment in summed}


BorderKey = tuple[int, int, str, int, int]


def border_key(stage: int, border: Border) -> BorderKey:
    """(sender, receiver, what, micro-batch, part), the same at both ends."""
    ends = (border.peer, stage) if border.receives else (stage, border.peer)
    return (*ends, border.what, border.micro_batch, border.part)


def meetings_of(plans: Sequence[Plan]) -> tuple[Meeting, ...]:
    """Transfers first. Raises PlanError for a border without its other end."""
    ends: dict[BorderKey, dict[int, int]] = {}
    sizes: dict[BorderKey, int] = {}
    for stage, plan in enumerate(plans):
        for step in plan.steps:
            if step.kind in (Kind.SEND, Kind.RECEIVE) and step.stash is not None:
                border = plan.workload.borders[step.stash]
                key = border_key(stage, border)
                if stage in ends.setdefault(key, {}):
                    raise PlanError(f"stage {stage}: the {border.what} of micro-batch {border.micro_batch} cross twice")
                ends[key][stage] = step.id
                if sizes.setdefault(key, border.bytes) != border.bytes:
                    raise PlanError(
                        f"the {border.what} of micro-batch {border.micro_batch} have {sizes[key]} bytes at one end and "
                        f"{border.bytes} at the other, of stage {stage}"
                    )
    alone = next((key for key, steps in ends.items() if set(steps) != set(key[:2])), None)
    if alone is not None:
        sender, receiver, what, micro_batch, _ = alone
        raise PlanError(
            f"the {what} of micro-batch {micro_batch} that stage {sender} sends to stage {receiver} have one end only"
        )
    meetings = [Meeting(tuple(sorted(steps.items()))) for steps in ends.values()]
    if has_barrier(plans):
        meetings.append(Meeting(tuple((stage, _last_moment(plan)) for stage, plan in enumerate(plans))))
    return tuple(meetings)


def has_barrier(plans: Sequence[Plan]) -> bool:
    """Whether an update has to wait for the gradients of all stages."""
    return any(plan.settings.barrier(plan.workload.compute_dtype) is not None for plan in plans)


def slices_as(plan: Plan, shard: str | None) -> bool:
    """Whether ranks that share a batch slice `shard` (one of SHARDS, None: anything)."""
    if shard is None or plan.machine.data_parallel_size == 1:
        return True
    sliced, whole = plan.layout.ranks > 1, whole_chunks(plan)
    large = {chunk.index for chunk in plan.layout.chunks if not chunk.small}  # small ones may stay whole
    kinds = {"none": not sliced, "states": sliced and len(whole) == len(plan.layout.chunks)}
    return kinds.get(shard, sliced and not (large and large <= whole))


def whole_chunks(plan: Plan) -> frozenset[int]:
    """Of ranks that slice, those that every rank has whole."""
    return frozenset(resident.chunk for resident in plan.initial if resident.list == "remote")


def _last_moment(plan: Plan) -> int:
    last = len(plan.workload.moments) - 1
    return next(s.id for s in reversed(plan.steps) if s.kind is Kind.COMPUTE and s.moment == last)
