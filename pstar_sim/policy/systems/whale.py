"""whale: data parallelism where GPUs differ, with shares of the batch by speed (Jia et al., 2022).

Of the B sequences of a micro-batch, rank r with speed F_r takes B * F_r / sum(F), in whole sequences and at least one.
A GPU without room for its share takes all sequences that fit. Each remaining sequence goes to the GPU that then ends
first. The schedule is that of another policy: plain data parallelism, or the first of the others for which the GPUs
have room. All ranks run one plan, and an iteration lasts as long as the slowest rank takes. The gradient is the mean
weighted by each rank's sequences, which equals the gradient of the joint batch. On equal GPUs all shares are equal, and
the plan is that of the other policy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from heapq import heapify, heappop, heappush

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.cost import CostModel, flops_rate
from pstar_sim.errors import CannotPlan, DoesNotFit
from pstar_sim.policy.family.tide import tide
from pstar_sim.policy.kit.capabilities import Capabilities
from pstar_sim.policy.kit.options import Option, one_of
from pstar_sim.policy.systems.all_on_gpu import all_on_gpu
from pstar_sim.policy.systems.zero3_resident import zero3_resident
from pstar_sim.policy.systems.zero_offload import zero_offload
from pstar_sim.units import format_count
from pstar_sim.workload.workload import Workload

__all__ = ["CAPABILITIES", "OPTIONS", "balance", "deal", "whale"]

_SCHEDULES: Mapping[str, Callable[[Workload, Machine, Settings], Plan]] = {
    "all_on_gpu": all_on_gpu,
    "zero3_resident": zero3_resident,
    "zero_offload": zero_offload,
    "tide": tide,
}
FITTING = "fitting"  # value of the option `schedule`: the first of _SCHEDULES that fits
OPTIONS = {
    "speed": Option(
        one_of("flops", "seconds"), "speed of a GPU: its matrix rate, or what it does of this job", "flops"
    ),
    "schedule": Option(
        one_of(FITTING, *_SCHEDULES), "policy that schedules the memory of every rank, or the first that fits", FITTING
    ),
}


def whale(
    workload: Workload,
    machine: Machine,
    settings: Settings,
    *,
    speed: str = "flops",
    schedule: str = FITTING,
) -> Plan:
    """Returns the plan of `schedule` for the shares of the machine's ranks, which `balance` has chosen.

    workload: the job of the rank that has least room and takes longest (`bounds.shares.tightest`).

    Raises the errors of `schedule`, or that which lacks least.
    """
    reason: DoesNotFit | None = None
    for name in _schedules(schedule):
        try:
            plan = _SCHEDULES[name](workload, machine, settings)
        except DoesNotFit as short:
            reason = short if reason is None else min(reason, short, key=lambda each: each.short_bytes)
        else:
            return replace(plan, policy="whale", choices={**plan.choices, "schedule": f"that of {name}"})
    assert reason is not None
    raise reason.restated(policy="whale") from reason


def _schedules(schedule: str) -> tuple[str, ...]:
    return tuple(_SCHEDULES) if schedule == FITTING else (schedule,)


def balance(
    batch: int,
    machine: Machine,
    workload_of: Callable[[int], Workload],
    settings: Settings,
    *,
    speed: str = "flops",
    schedule: str = FITTING,
) -> tuple[int, ...]:
    """Returns the number of sequences of a micro-batch of `batch` for each rank, at least one.

    workload_of: number of sequences -> the job of a rank.

    Raises CannotPlan for fewer sequences than ranks. Raises DoesNotFit if the GPUs have no room for all sequences
    together. Raises the errors of `schedule` if the host has no room. If several schedules are tried, the error is that
    of the first.
    """
    reason: DoesNotFit | None = None
    for name in _schedules(schedule):
        try:
            return _balance_under(name, batch, machine, workload_of, settings, speed)
        except DoesNotFit as short:
            reason = reason or short
    assert reason is not None
    raise reason


def _balance_under(
    schedule: str,
    batch: int,
    machine: Machine,
    workload_of: Callable[[int], Workload],
    settings: Settings,
    speed: str,
) -> tuple[int, ...]:
    if batch < machine.data_parallel_size:
        raise CannotPlan(
            f"whale: {batch} sequences for {machine.data_parallel_size} ranks; give each rank at least one"
        )
    even = workload_of(max(1, batch // machine.data_parallel_size))
    kinds = machine.kinds
    alone = {kind: _all_like(machine, kind) for kind in sorted(set(kinds))}
    speeds = {kind: _speed(where, even, speed) for kind, where in alone.items()}
    room: dict[int, int] = {}  # kind -> most sequences of one of its GPUs, if fewer than its share by speed

    def shortage(kind: int, sequences: int) -> DoesNotFit | None:
        return _shortage(workload_of(sequences), alone[kind], settings, schedule)

    while True:
        limits = [room.get(kind, batch) for kind in kinds]
        shares = deal(batch, [speeds[kind] for kind in kinds], limits)
        most = {kind: shares[kind] for kind in alone}  # of equal ranks, the first has the most sequences
        short = {k: error for k, n in most.items() if k not in room and (error := shortage(k, n)) is not None}
        if not short:
            return shares
        for kind, error in short.items():
            room[kind] = _most_with_room(most[kind], partial(shortage, kind))
            limits = [room.get(its, batch) for its in kinds]
            if not room[kind] or sum(limits) < batch:
                raise _without_room(error, alone[kind].gpu.name, most[kind], limits)


def _most_with_room(most: int, shortage: Callable[[int], DoesNotFit | None]) -> int:
    return bisect_left(range(1, most), True, key=lambda sequences: shortage(sequences) is not None)


def _shortage(workload: Workload, machine: Machine, settings: Settings, schedule: str) -> DoesNotFit | None:
    """Why the GPUs have no room; raises DoesNotFit if the host has none."""
    try:
        whale(workload, machine, settings, schedule=schedule)
    except DoesNotFit as short:
        if short.place != "gpu":
            raise
        return short
    return None


def deal(batch: int, speeds: Sequence[float], most: Sequence[int]) -> tuple[int, ...]:
    """Whole sequences of each rank, at least one. Each goes to the (first) rank that then ends first.

    speeds: sequences per second, in any unit.
    most: of each rank. Their sum is at least `batch`.
    """
    shares = [1] * len(speeds)
    ends = [(2 / speed, r) for r, speed in enumerate(speeds) if most[r] > 1]
    heapify(ends)
    for _ in range(batch - len(shares)):
        _, r = heappop(ends)
        shares[r] += 1
        if shares[r] < most[r]:
            heappush(ends, ((shares[r] + 1) / speeds[r], r))
    return tuple(shares)


def _all_like(machine: Machine, rank: int) -> Machine:
    one = machine.ranks[rank]
    share = 1 / machine.data_parallel_size
    ranks = tuple(replace(r, gpu=one.gpu, link=one.link, batch_share=share) for r in machine.ranks)
    return replace(machine, ranks=ranks)


def _speed(machine: Machine, workload: Workload, by: str) -> float:
    if by == "flops":
        return flops_rate(machine, workload.compute_dtype)
    seconds = sum(CostModel(workload, machine, build_layout(workload), rank=0).moments_s)
    return 1 / seconds if seconds > 0 else 1.0


def _without_room(short: DoesNotFit, gpu: str, sequences: int, room: Sequence[int]) -> DoesNotFit:
    words = f"; that is {gpu} with {format_count(sequences, 'sequence')}"
    if min(room):
        words += f", and all GPUs together have room for {sum(room)}"
    return short.restated(policy="whale", what=short.what + words)


CAPABILITIES = Capabilities(balance=balance)
