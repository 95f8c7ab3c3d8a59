"""Tiny instances on two GPUs, the second of which is faster: exact optima and bounds over all shares of a batch."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from exact_optimum import Tiny, exact_optimum
from tiny import as_job

from pstar_sim.bounds.fluid import fluid_bound
from pstar_sim.bounds.shares import AnyShares
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import build_layout
from pstar_sim.testing import round_machine
from pstar_sim.workload.workload import Workload

__all__ = ["bounds_of_two", "exact_of_two"]


def _two_gpus(machine: Machine, speed: float) -> Machine:
    """Returns two ranks, the second with `speed` times the flops of the first, each with the machine's Adam and DRAM.
    Collectives take no time to speak of."""
    one = machine.ranks[0]
    rates = {dtype: rate * speed for dtype, rate in one.gpu.flops_per_s.items()}
    other = replace(one, gpu=replace(one.gpu, flops_per_s=rates))
    peer = round_machine(ranks=2, peer_bytes_per_s=1e18).peer
    host = replace(machine.host, adam_params_per_s=2 * machine.host.adam_params_per_s, memory_bytes=2**42)
    ranks = tuple(replace(rank, batch_share=0.5) for rank in (one, other))
    return replace(machine, name="two", ranks=ranks, peer=peer, host=host)


def _with_share(t: Tiny, sequences: int, speed: int) -> Tiny:
    """A sequence takes 6 times the units of the instance on a GPU of speed 1, so that all are whole numbers."""
    return replace(t, forward=t.forward * sequences * 6 // speed)


def exact_of_two(t: Tiny, speed: int, batch: int, *, most_states: int) -> Fraction | None:
    """Returns the least over all shares of the larger exact optimum of the two ranks."""
    known: list[Fraction] = []
    for first in range(1, batch):
        each = [
            exact_optimum(_with_share(t, n, s), most_states=most_states)
            for n, s in ((first, 1), (batch - first, speed))
        ]
        if None not in each:
            known.append(max(x for x in each if x is not None))
    return min(known, default=None)


def bounds_of_two(t: Tiny, speed: int, batch: int) -> tuple[float | None, float | None]:
    """Returns the joint and the fluid bound over all shares."""
    _, machine, settings = as_job(_with_share(t, 1, 1))
    there = _two_gpus(machine, speed)
    jobs = {n: replace(as_job(_with_share(t, n, 1))[0], batch=n) for n in range(1, batch + 1)}
    layout = build_layout(jobs[1], chunk_bytes=settings.chunk_bytes)

    def fluid(workload: Workload, ranked: object) -> object:
        return fluid_bound(workload, there, settings, layout, ranked=ranked)  # type: ignore[arg-type]

    found = [AnyShares(batch, there, settings, layout, jobs.__getitem__, of).bound() for of in (None, fluid)]  # type: ignore[arg-type]
    joint, finer = (None if bound is None else bound.seconds for bound in found)
    return joint, finer
