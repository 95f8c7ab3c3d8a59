"""`--machine here` on made-up machines: nvidia-smi's words, /proc and both versions of cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from pstar_sim.catalog.efficiency import fitted
from pstar_sim.catalog.here import read_cores, read_memory, read_numa, this_machine
from pstar_sim.catalog.loader import load_catalog, load_machine
from pstar_sim.catalog.machine import Machine
from pstar_sim.errors import CatalogError

GB = 10**9
MIB = 2**20
CATALOG = load_catalog()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """64 GiB of RAM, 60 of them available, no cgroup."""
    put(tmp_path, "proc/meminfo", f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {60 * 2**20} kB\n")
    return tmp_path


def put(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def here(root: Path, smi: str | None = None, cores: int = 4) -> Machine:
    return this_machine(CATALOG, gpus=lambda: smi, root=root, cores=cores)


@pytest.mark.parametrize("smi", [None, "", "\n"])
def test_without_a_gpu_it_says_so_and_takes_the_virtual_one(root: Path, smi: str | None) -> None:
    m = here(root, smi)
    assert m.gpu.name == "virtual"
    assert "no GPU found" in m.notes
    assert m.host.memory_bytes == 64 * 2**30
    assert m.host_budget_bytes == 60 * 2**30
    assert not m.calibrated
    assert m.host.cores == 4


def test_adam_rate_is_bounded_by_cores_and_dram(root: Path) -> None:
    # 0.8e9 a core, and at most 40e9 B/s / 28 B = 1.43e9.
    e = fitted()
    assert here(root, cores=1).host.adam_params_per_s == e.adam_params_per_core_s
    assert here(root, cores=64).host.adam_params_per_s == pytest.approx(40e9 * e.adam_dram / 28)
    assert here(root, cores=64).confidence_by_input["CPU Adam"] == "assumed"


def test_a_gpu_and_its_free_memory(root: Path) -> None:
    m = here(root, "NVIDIA GeForce RTX 4090, 24564, 20000, 4, 16\n")
    assert m.gpu.name == "rtx4090"
    assert m.gpu.memory_bytes == 24564 * MIB
    assert m.gpu.usable_bytes == 20000 * MIB
    assert m.gpu_budget_bytes == 20000 * MIB - GB
    assert m.link.name == "pcie4-x16"
    assert "24564" not in m.notes
    assert "20.97 GB of 25.76 GB free" in m.notes


def test_fewer_lanes_and_an_older_slot(root: Path) -> None:
    link = here(root, "NVIDIA GeForce RTX 4090, 24564, 20000, 3, 8\n").link
    assert (link.name, link.h2d_bytes_per_s) == ("pcie3-x8", pytest.approx(15.75e9 * 0.78 / 2))


def test_a_hidden_link_is_assumed_to_be_the_cards_usual_one(root: Path) -> None:
    m = here(root, "NVIDIA H100 80GB HBM3, 81559, 81000, [N/A], [N/A]\n")
    assert m.link.name == "pcie5-x16"
    assert "hidden" in m.notes


def test_several_gpus_share_the_batch(root: Path) -> None:
    m = here(root, "Tesla T4, 15360, 15000, 3, 16\nTesla T4, 15360, 14000, 3, 16\n")
    assert [r.gpu.usable_bytes for r in m.ranks] == [15000 * MIB, 14000 * MIB]
    assert [r.batch_share for r in m.ranks] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("smi", "message"),
    [
        ("Voodoo 2, 12, 12, 1, 1\n", "GPU 'Voodoo 2' is not in the catalog; describe it"),
        ("Tesla T4, 15360, 500, 3, 16\n", "524.3 MB free, and the driver context takes all of it"),
        ("Tesla T4, 15360\n", "has 2 fields"),
        ("Tesla T4, [N/A], 15000, 3, 16\n", "is not a number of MiB"),
    ],
)
def test_gpus_that_cannot_be_used(root: Path, smi: str, message: str) -> None:
    with pytest.raises(CatalogError, match=message.replace("[", r"\[")):
        here(root, smi)


def test_cgroup_version_2_limits_memory_and_cores(root: Path) -> None:
    put(root, "proc/self/cgroup", "0::/outer/inner\n")
    put(root, "sys/fs/cgroup/outer/inner/memory.max", "max\n")
    put(root, "sys/fs/cgroup/outer/memory.max", f"{8 * 2**30}\n")
    put(root, "sys/fs/cgroup/outer/inner/cpu.max", "50000 100000\n")
    assert read_memory(root) == (8 * 2**30, 8 * 2**30)
    assert read_cores(root) == 1
    assert here(root).host_budget_bytes == 8 * 2**30 - GB, "1 GB is left to the system all the same"


def test_cgroup_version_1_limits_memory_and_cores(root: Path) -> None:
    put(root, "proc/self/cgroup", "5:memory:/job\n4:cpu,cpuacct:/job\n1:name=systemd:/job\n")
    put(root, "sys/fs/cgroup/memory/job/memory.limit_in_bytes", f"{16 * 2**30}\n")
    put(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    put(root, "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "100000\n")
    put(root, "sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n")
    assert read_memory(root)[0] == 16 * 2**30
    assert read_cores(root) == 1


def test_a_system_that_does_not_tell_its_memory(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="meminfo: cannot be read"):
        read_memory(tmp_path)
    put(tmp_path, "proc/meminfo", "nothing\n")
    with pytest.raises(CatalogError, match="has no MemTotal"):
        read_memory(tmp_path)


def test_the_real_machine() -> None:
    m = load_machine("here", host_memory="64GB")
    assert m.name == "here"
    assert m.host.memory_bytes == 64 * GB
    assert m.host.cores >= 1
    assert m.gpu_budget_bytes > 0


def test_numa_nodes_of_the_cores_that_the_process_may_use(tmp_path: Path) -> None:
    for node, cores in ((0, "0-3,8"), (1, "4-7"), (2, "")):  # the third has memory only
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    assert read_numa(tmp_path, {1, 8}) == (1, 2)
    assert read_numa(tmp_path, {3, 4}) == (2, 2)
    assert read_numa(tmp_path / "none", {0}) is None
