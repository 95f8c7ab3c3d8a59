"""Ways are known before their workloads are written down: what is said of them then is true of the workloads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pstar_sim.bounds.bounds import lower_bound
from pstar_sim.bounds.stash_bound import stash_bound_s
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Settings
from pstar_sim.cost import CostModel
from pstar_sim.planner.ways import Way, candidates, relayed_ways, words
from pstar_sim.testing import chain_workload, round_machine
from pstar_sim.units import KIB, MIB
from pstar_sim.workload.workload import Workload

EAGER, BARRIER = Settings(update="eager", clip=False), Settings(update="step", clip=True)
CHUNK = 2 * MIB


def variant(batch: int, checkpointing: bool) -> Workload:
    """Ten layers of 2 MiB; each leaves 1 MiB per sequence behind where its activations are kept, else 64 KiB."""
    up = [(64 * KIB if checkpointing else MIB) * batch * n for n in range(1, 11)]
    back = [size for size in up[::-1] for _ in range(1 + checkpointing)]
    w = chain_workload(10, MIB, tide_bytes=[*up, *back, 0], flops=batch * 10**12, checkpointing=checkpointing)
    return replace(w, batch=batch)


@pytest.fixture(scope="module")
def ways() -> Sequence[Way]:
    made = candidates([variant(batch, how) for batch in (2, 8) for how in (True, False)], 8)
    return (*made, *relayed_ways(made, "optimal"))


@pytest.fixture(scope="module")
def machine() -> Machine:
    """What a layer leaves behind takes twice as long to copy as the layer's forward pass takes."""
    return round_machine(gpu_memory_bytes=40 * MIB, h2d_bytes_per_s=MIB / 2, cores=4)


def test_what_a_way_is_called_and_does_is_what_its_workload_does(ways: Sequence[Way]) -> None:
    assert len(ways) == 28 and len({(way.key, way.relay) for way in ways}) == len(ways)
    for way in ways:
        w = way.workload
        assert words(way, ways) == words(w, ways)
        said = (way.batch, way.micro_batches, way.checkpointing, way.activations, way.order)
        assert said == (w.batch, w.micro_batches, w.checkpointing, w.activations, w.order)
        if not w.boundaries_on_host:
            assert way.stash_bytes == sum(stash.bytes for stash in w.stashes)


def test_what_computing_and_stashes_take_is_known_without_the_workload(ways: Sequence[Way], machine: Machine) -> None:
    waiting = 0
    for way in ways:
        w = way.workload
        cost = CostModel(w, machine, build_layout(w, chunk_bytes=CHUNK))
        known_s, waits_s = way.compute_s(machine, CHUNK), stash_bound_s(w, cost)
        waiting += waits_s > sum(cost.moments_s) * 1.001
        if way.boundaries_on_host:
            assert known_s == pytest.approx(sum(cost.moments_s)) and known_s <= waits_s
        else:
            assert known_s == pytest.approx(waits_s)
    assert waiting > 5  # of some ways computing waits for stashes


@pytest.mark.parametrize("settings", [EAGER, pytest.param(BARRIER, marks=pytest.mark.whole)])
def test_no_stand_in_promises_less_than_its_way_can_do(
    ways: Sequence[Way], machine: Machine, settings: Settings
) -> None:
    """Bounds of stand-ins are at most the way's own: for plans that stream chunks, and for those that do not."""
    near = 0
    for way in ways:
        for stream in (True, False):
            found = []
            for count in way.stand_ins():
                w = way.stand_in(count)
                layout = build_layout(w, chunk_bytes=CHUNK)
                costs = way.costs(count, machine, layout)
                found.append(lower_bound(w, machine, settings, layout, stream=stream, costs=costs).seconds)
            assert max(found) <= found[-1] * (1 + 1e-7), (words(way), found)
            near += len(found) > 1 and found[0] >= 0.8 * found[-1]
    assert near > 10  # they are worth something
