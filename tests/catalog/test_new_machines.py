"""Machines with one memory for CPU and GPU, hosts that can pin little, disks that wear out."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from pstar_sim.catalog.loader import load_machine, machine_names
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.writing import machine_toml
from pstar_sim.core.plan import Settings
from pstar_sim.cost import CostModel
from pstar_sim.errors import CatalogError
from pstar_sim.planner.compare import compare
from pstar_sim.planner.fits import fits
from pstar_sim.planner.machine_notes import disk_life
from pstar_sim.policy.systems.zero_infinity import zero_infinity
from pstar_sim.report.capacity_tables import fits_text
from pstar_sim.sim.play import play
from pstar_sim.units import GB, format_bytes
from pstar_sim.workload.presets import preset
from pstar_sim.workload.workload import Workload

UNIFIED = [name for name in machine_names() if load_machine(name).unified]


@pytest.fixture(scope="module")
def small() -> Workload:
    return preset("1B", batch=2, seq=256)


def test_the_machines_that_the_issue_names_are_there() -> None:
    wanted = {"gh200", "b200", "b200x8", "gb200x4", "gb10", "rtxpro6000", "l40s", "mi300x", "m4-max", "m3-ultra"}
    wanted |= {"h200x8", "h20x8", "gh200x4", "rtx3090x8", "rtx4090x8", "rtx5090x8", "rtxa6000", "rtx2080ti-64gb"}
    wanted |= {"v100-16x8", "mi250", "rx7900xtx-128gb"}
    assert wanted <= set(machine_names())
    assert set(UNIFIED) == {"gb10", "m4-max", "m3-ultra"}


@pytest.mark.parametrize("name", UNIFIED)
def test_nothing_of_one_memory_is_counted_twice(name: str) -> None:
    m = load_machine(name)
    assert m.pool_bytes == m.gpu.memory_bytes == m.gpu.usable_bytes + m.host.memory_bytes
    assert m.gpu_budget_bytes + m.host_budget_bytes == m.pool_bytes - m.gpu.context_bytes - m.host.reserved_bytes
    moved: list[Machine] = [
        load_machine(name, host_memory="48GB"),
        load_machine(name, overrides={"host.memory": "48GB"}),
        load_machine(name, overrides={"gpu.memory": m.pool_bytes - 48 * GB}),
        load_machine(name, gpu_memory=m.pool_bytes - 48 * GB),
    ]
    for other in moved:
        assert (other.host.memory_bytes, other.pool_bytes) == (48 * GB, m.pool_bytes)
    for wrong in ({"host_memory": "2TB"}, {"gpu_memory": "2TB"}, {"gpu_memory": "60GB", "host_memory": "500GB"}):
        with pytest.raises(CatalogError, match=f"{name} has one memory of"):
            load_machine(name, **wrong)


def test_nodes_of_consumer_cards_have_256_gb_and_no_nvlink() -> None:
    for name in ("rtx3090x8", "rtx4090x8", "rtx5090x8"):
        m = load_machine(name)
        assert (m.local_ranks, m.peer, m.host.memory_bytes) == (8, None, 251 * 2**30)


def test_a_unified_machine_is_written_and_read_again(tmp_path: Path) -> None:
    m = load_machine("gb10", host_memory="40GB")
    (tmp_path / "my.toml").write_text(machine_toml(m, checked=date(2026, 11, 23)))
    again = load_machine(tmp_path / "my.toml")
    assert (again.unified, again.pool_bytes) == (True, m.pool_bytes)
    assert (again.gpu_budget_bytes, again.host_budget_bytes) == (m.gpu_budget_bytes, m.host_budget_bytes)
    assert again.nvme is not None and again.nvme.life_bytes == 1200 * 10**12


def test_a_unified_machine_whose_gpu_takes_all_is_refused(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text('machine = "gb10"\n[gpus.gb10]\nusable_gb = 126\n')
    with pytest.raises(CatalogError, match=r"\[gb10\] host = 'gb10'; must be one whose memory_gb is above usable_gb"):
        load_machine(tmp_path / "my.toml")


def test_a_file_of_a_unified_machine_says_so_in_the_answer(small: Workload) -> None:
    answer = compare(small, "gb10", policies=["tide"], settings=Settings(clip=True))
    assert any("one memory of 128.53 GB" in note for note in answer.notes)
    assert not compare(small, "a100-80", policies=["tide"], settings=Settings(clip=True)).notes


def test_what_cannot_be_pinned_is_copied_at_the_pageable_rate(small: Workload) -> None:
    free = load_machine("rtx4090-wsl2", overrides={"host.pinned": "60GB"})
    little, none = load_machine("rtx4090-wsl2"), load_machine("rtx4090-wsl2", overrides={"host.pinned": "1MB"})
    seconds = [play(zero_infinity(small, m, Settings(clip=True))).iteration_s for m in (free, little, none)]
    assert seconds[0] < seconds[1] < seconds[2]
    # Everything the job keeps on the host is 14 bytes per parameter, of which 0.8 GB are pinned.
    layout = zero_infinity(small, little, Settings(clip=True)).layout
    kept = ("param", *layout.state_lists)
    share = 0.8e9 / sum(layout.payload_bytes(c.index, name) for c in layout.chunks for name in kept)
    link = CostModel(small, little, layout).link
    assert link.h2d_bytes_per_s == pytest.approx(1 / (share / little.link.h2d_bytes_per_s + (1 - share) / 2.8e9))
    assert CostModel(small, free, layout).link.h2d_bytes_per_s == pytest.approx(free.link.h2d_bytes_per_s)


def test_little_pinned_memory_needs_a_pageable_rate() -> None:
    machine = load_machine("rtx4090-128gb", overrides={"host.pinned": "1GB"})
    unknown = replace(machine.ranks[0], link=replace(machine.link, pageable_bytes_per_s=None))
    with pytest.raises(CatalogError, match=r"can pin 1\.00 GB only, so its link needs the rate of copies"):
        replace(machine, ranks=(unknown,))


def test_what_is_written_to_disks_stands_beside_their_life() -> None:
    machine = load_machine("gb10")
    small = preset("gpt2", batch=4, seq=256)
    answer = compare(small, machine, policies=["zero_infinity:states=nvme"], settings=Settings(clip=True))
    (plan,) = (p.plan for p in answer.planned.values())
    per_day = plan.moved_bytes["nvme_write"] / answer.best().row.iteration_s * 86400
    (note,) = (n for n in answer.notes if "per day" in n)
    written = plan.moved_bytes["nvme_write"]
    assert f"writes {format_bytes(written)} per iteration to the disks of a node" in note
    assert f"{format_bytes(written / (4 * 256) * 1e6)} per million tokens, {per_day / 1e12:,.1f} TB per day" in note
    assert "nvme-gen4 is rated for 1,200 TB, which lasts " in note
    assert f"{1.2e15 / per_day:,.1f} days" in note
    fit = fits(small, machine, policies=["zero_infinity:states=nvme", "zero_offload"], settings=Settings(clip=True))
    assert [row.disk_life for row in fit.rows] == [note, None]
    assert f"note: {note}" in fits_text(fit, width=1000)
    unknown = replace(plan, machine=replace(machine, nvme=replace(machine.nvme, life_bytes=None)))
    assert "a rating of 1,200 TB is assumed, 600 times their room" in disk_life(unknown, 1.0)


def test_host_memory_is_advised_as_a_share_of_one_memory() -> None:
    """79.3 GB for 4B: of the 128 GB that m4-max has, 32 GB are left to the GPU, which needs 9.5 GB."""
    job = preset("4B", batch=1, seq=512)
    (one,) = fits(job, load_machine("m4-max"), policies=["zero_offload"], times=False).rows
    assert one.changes[-1] == "with --host-memory 96GB of its one memory, the rest for the GPU"
    added = load_machine("rtx4090-128gb", host_memory="32GB")
    (two,) = fits(job, added, policies=["zero_offload"], times=False).rows
    assert two.changes[-1].endswith("with --host-memory 96GB")


def test_more_host_memory_than_one_memory_has_is_no_advice() -> None:
    """Without its disks, of which each memory tried would want a plan of its own."""
    big = preset("gpt-oss-20b", batch=1, seq=1024)
    answer = fits(big, replace(load_machine("gb10"), nvme=None), policies=["tide"], times=False)
    assert not answer.any and "--host-memory" not in str(answer.change)
