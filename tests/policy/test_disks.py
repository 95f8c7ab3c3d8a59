"""Which states live on disks, and the least seconds that takes."""

from __future__ import annotations

import pytest

import pstar_sim as ps
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Settings
from pstar_sim.core.workspace import with_host_budget
from pstar_sim.policy.family.disks import disks_s, least_disks_s, with_disks
from pstar_sim.policy.family.searched import as_left_open
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.points import Point
from pstar_sim.policy.kit.schedule import Modes


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("share", [0.05, 0.4, 0.9, 2.0])
def test_the_least_seconds_of_disks_are_below_those_of_any_number_of_pins(share: float, micro_batches: int) -> None:
    workload = ps.preset("1B", batch=1, seq=256, micro_batches=micro_batches)
    machine = with_host_budget(ps.machine("rtxpro6000"), round(share * workload.states_bytes))
    job = Job("tide", workload, machine, Settings(), Point())
    least_s = least_disks_s(job)
    assert len(least_s) == len(job.candidates) + 1 and least_s[-1] == 0
    seconds = [
        disks_s(job, with_disks(job, Modes(frozenset(job.candidates[:pins])))) for pins in range(len(job.candidates))
    ]
    assert all(least <= one * (1 + 1e-12) for least, one in zip(least_s, seconds))
    assert (least_s[0] > 0.2 * seconds[0] > 0) == (share < 1)


def test_only_the_usual_chunk_size_is_left_open() -> None:
    workload, machine = ps.preset("1B", batch=1, seq=256), ps.machine("rtxpro6000")
    usual = build_layout(workload).chunk_bytes
    assert as_left_open(Settings(chunk_bytes=usual, effort=0.5), workload, machine) == Settings(effort=0.5)
    for settings in (Settings(), Settings(chunk_bytes=2 * usual)):
        assert as_left_open(settings, workload, machine) == settings
