"""Rates of folders of disks, and the machine file that is made of them."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest
import torch

from executor.calibration import folders
from executor.disks import folders as disk_folders
from executor.disks.store import DiskStore
from pstar_sim.catalog.loader import load_machine
from pstar_sim.cli import main
from pstar_sim.errors import DiskError


def test_rates_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every transfer takes half a second of this clock: 8 kB take 16 kB/s."""
    monkeypatch.setattr(folders, "SIZES", (4096, 8192))
    monkeypatch.setattr(disk_folders, "file_system", lambda folder: "ext4")
    ticks = itertools.count()
    rates = folders.folder_rates([tmp_path], clock=lambda: next(ticks) / 2)
    assert [(p.threads, p.size_bytes) for p in rates.points] == [(n, size) for n in (1, 4, 8) for size in (4096, 8192)]
    assert {(p.read_bytes_per_s, p.write_bytes_per_s) for p in rates.points} == {(8192, 8192), (16384, 16384)}
    assert rates.usual is rates.points[3] and rates.latency_s == 0.5 and min(rates.together) > 0
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(disk_folders, "file_system", lambda folder: "overlay")
    with pytest.raises(DiskError, match=rf"{tmp_path} is on overlay, where transfers go through memory"):
        folders.folder_rates([tmp_path])


def test_a_transfer_that_fails_ends_the_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write that fails is one of those that run beside reads."""
    monkeypatch.setattr(folders, "SIZES", (4096, 8192))
    monkeypatch.setattr(disk_folders, "file_system", lambda folder: "ext4")
    write = DiskStore.write

    def full(store: DiskStore[tuple[int, int]], key: tuple[int, int], memory: torch.Tensor) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise DiskError("the disk is full")
        write(store, key, memory)

    monkeypatch.setattr(DiskStore, "write", full)
    with pytest.raises(DiskError, match="the disk is full"):
        folders.folder_rates([tmp_path])
    assert list(tmp_path.iterdir()) == []


def test_the_machine_file_has_the_rates_of_the_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = folders.DiskPoint(4, 32 << 20, 2e9, 1e9)
    rates = folders.FolderRates((point,), point, (1.5e9, 0.5e9), 1e-4)
    monkeypatch.setattr(folders, "folder_rates", lambda given: rates)
    path = tmp_path / "my.toml"
    assert main(["calibrate", "--disks", str(tmp_path), "--machine", "virtual", "-o", str(path)]) == 0
    disks = load_machine(path).nvme
    assert disks is not None and disks.measured
    assert (disks.read_bytes_per_s, disks.write_bytes_per_s, disks.latency_s) == pytest.approx((2e9, 1e9, 1e-4))
    assert (disks.read_beside_bytes_per_s, disks.write_beside_bytes_per_s) == pytest.approx((1.5e9, 0.5e9))
    assert disks.beside == pytest.approx((0.75, 0.5))
    there = load_machine("virtual", disks=[tmp_path]).nvme
    assert there is not None and not there.measured and "pstar calibrate --disks FOLDER" in there.source
    again = load_machine(path, disks=[tmp_path]).nvme
    assert again is not None and again.measured and again.read_bytes_per_s == 2e9
