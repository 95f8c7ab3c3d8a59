"""Figures of a machine replaced by hand: what they mean, and what is refused with one clear error."""

from __future__ import annotations

import pytest

import pstar_sim as ps
from pstar_sim.catalog.overrides import override, override_paths
from pstar_sim.cli import main


@pytest.fixture(scope="module")
def v100() -> ps.Machine:
    return ps.machine("v100-32")


def test_a_size_a_rate_and_a_change(v100: ps.Machine) -> None:
    m = override(v100, ["gpu.memory=48GB", "link.bandwidth=25GB/s", "host.memory=+50%"])
    assert m.gpu_budget_bytes == 47 * 10**9  # 1 GB of context comes off
    assert m.link.h2d_bytes_per_s == m.link.d2h_bytes_per_s == 25e9
    assert m.host.memory_bytes == 754.5 * 2**30  # 503 GiB and a half more
    assert v100.gpu_budget_bytes == round(31.74 * 2**30) - 10**9  # the old one is as it was


def test_the_same_through_the_loader() -> None:
    assert ps.machine("v100-32", overrides={"link.h2d": "x2"}).link.h2d_bytes_per_s == 2 * 15.75e9 * 0.78
    assert ps.machine("v100-32", overrides=["host.reserved=20GB"]).host_budget_bytes == 503 * 2**30 - 20 * 10**9


def test_cores_scale_adam_up_to_what_the_dram_allows(v100: ps.Machine) -> None:
    assert override(v100, {"host.cores": 30}).host.adam_params_per_s == pytest.approx(
        v100.host.adam_params_per_s * 30 / 24
    )
    # 102.4 GB/s of DRAM over 28 bytes per parameter: 3.657e9 parameters per second, no matter how many cores
    assert override(v100, {"host.cores": 240}).host.adam_params_per_s == pytest.approx(102.4e9 / 28)
    assert override(v100, {"host.dram": "14GB/s"}).host.adam_params_per_s == pytest.approx(0.5e9)


def test_what_changed_says_so_and_a_faster_gpu_is_another_machine(v100: ps.Machine) -> None:
    m = override(v100, ["host.memory=64GB"])
    assert m.name == "v100-32"
    assert "by hand: host.memory = 64GB" in m.host.source
    assert override(v100, ["gpu.flops.fp16=x2"]).name == "v100-32 (gpu.flops.fp16=x2)"


def test_nodes_and_gpus_multiply(v100: ps.Machine) -> None:
    m = override(v100, ["gpus=4", "nodes=2", "network.bandwidth=10GB/s"])
    assert (len(m.ranks), m.nodes, m.local_ranks) == (8, 2, 4)
    assert sum(r.batch_share for r in m.ranks) == pytest.approx(1)
    assert m.network is not None
    assert m.network.bytes_per_s == 10e9


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["gpu.memory=0"], "gpu.memory = '0': it must be positive; write 48GB"),
        (["gpu.memory=-4GB"], "gpu.memory = '-4GB': it must be positive"),
        (["gpu.memory=-100%"], "it must be positive"),
        (["gpu.memory=1e30"], "gpu.memory = '1e30' is absurd; it must be between 1 MB and"),
        (["host.cores=5000000"], "is absurd"),
        (["gpu.memory=many"], "gpu.memory = 'many' is no size; write 48GB, or a change such as"),
        (["host.cores=2.5"], "host.cores = '2.5' is no count"),
        (["link.duplex=maybe"], "is no yes or no"),
        (["gpu.memry=4GB"], "there is no such figure of a machine; did you mean gpu.memory"),
        (["gpu.memory"], "'gpu.memory' is not PATH=VALUE"),
        (["gpu.memory=4GB", "gpu.memory=8GB"], "gpu.memory is set twice, to 4GB and to 8GB"),
        (["gpu.memory=1GB"], "the driver context takes 1.00 GB of 1.00 GB; nothing would be left"),
        (["host.memory=8GB"], "8.00 GB of 8.00 GB are reserved for the system"),
        (["host.adam=20G"], "Adam at that rate moves 560.00 GB/s, its DRAM only 102.40 GB/s; give at most 3.66G"),
        (["link.bandwidth=10GB/s", "link.h2d=5GB/s"], "link.bandwidth sets both directions"),
        (["nodes=2"], "it has no network between nodes; set network.bandwidth too"),
        (["network.latency=5us"], "has no network; set network.bandwidth too"),
        (["nvme.read=5GB/s"], "a disk needs all three"),
        (["nvme.life=5000TB"], "a disk needs all three"),
        (
            ["nvme.read=5GB/s", "nvme.write=2GB/s", "nvme.memory=1TB", "nvme.read_beside=3GB/s"],
            "both rates count together; set nvme.write_beside too",
        ),
        (["gpu.flops.bf16=+10%"], "has no gpu.flops.bf16 to change; give it as 150T"),
    ],
)
def test_contradictory_and_absurd_figures_are_one_clear_error(v100: ps.Machine, given: list[str], said: str) -> None:
    with pytest.raises(ps.PstarError) as error:
        override(v100, given)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_two_ways_to_say_the_same_figure_are_refused() -> None:
    with pytest.raises(ps.PstarError, match=r"gpu.memory = 4GB and gpu_memory = 8GB are the same figure"):
        ps.machine("v100-32", gpu_memory="8GB", overrides=["gpu.memory=4GB"])


def test_every_path_can_be_set_to_what_it_is(v100: ps.Machine) -> None:
    node = ps.machine("a100-80x8")
    for path in override_paths():
        for machine in (v100, node):
            try:
                same = override(machine, {path: "x1"})
            except ps.PstarError as error:
                assert "has no" in str(error) or "yes or no" in str(error)
                continue
            assert same.gpu_budget_bytes == machine.gpu_budget_bytes, path
            assert len(same.ranks) == len(machine.ranks), path


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    job = [
        "compare",
        "--model",
        "1B",
        "--batch",
        "1",
        "--seq",
        "1024",
        "--policy",
        "all_on_gpu",
        "--machine",
        "v100-32",
    ]
    assert main([*job, "--set", "gpu.memory=8GB"]) == 3
    assert "has 7.00 GB" in capsys.readouterr().out
    assert main([*job, "--set", "gpu.memory=none"]) == 2
    assert capsys.readouterr().err.startswith("pstar: gpu.memory = 'none' is no size")


def test_a_machine_file_without_a_link_is_one_clear_error(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    from pathlib import Path

    file = Path(str(tmp_path)) / "mine.toml"
    file.write_text('[machines.mine]\ngpu = "v100-32"\ngpus = 1\nhost = "xeon-ddr4-2666"\n')
    assert main(["fits", "--model", "1B", "--batch", "1", "--seq", "64", "--machine", str(file)]) == 2
    said = capsys.readouterr().err
    assert "[machines.mine] link is missing" in said
    assert said.count("\n") == 1
