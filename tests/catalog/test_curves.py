"""Measured curves: between two points, in and out of a machine file, and what contradicts itself."""

from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from pstar_sim.catalog.curves import best_rate, rate_at
from pstar_sim.catalog.loader import load_machine
from pstar_sim.catalog.machine import Fabric, Machine, Nvme
from pstar_sim.catalog.writing import machine_toml, save_machine
from pstar_sim.errors import CatalogError

CURVE = ((1.0, 10.0), (100.0, 30.0), (1000.0, 20.0))


@pytest.mark.parametrize(
    ("size", "rate"),
    [
        (0.5, 10.0),  # below the first point: its rate
        (1.0, 10.0),
        (10.0, 20.0),  # half of the way from 1 to 100 on a logarithmic axis
        (100.0, 30.0),
        (5000.0, 20.0),
    ],
)
def test_between_two_points_the_logarithm_of_the_size_counts(size: float, rate: float) -> None:
    assert rate_at(CURVE, size) == pytest.approx(rate)


def test_the_best_rate_may_be_in_the_middle() -> None:
    assert best_rate(CURVE) == 30.0


def calibrated() -> Machine:
    """The virtual machine as if it had been measured."""
    base = load_machine("virtual")
    gpu = replace(
        base.gpu,
        measured=True,
        flops_per_s={"fp32": 100e9, "bf16": 5e9},
        matmul_tables={"fp32": ((1e6, 60e9), (1e9, 100e9)), "bf16": ((1e6, 5e9),)},
        operator_bytes_per_s=15e9,
        launch_s=90e-6,
    )
    link = replace(
        base.link,
        name="my-link",
        measured=True,
        h2d_bytes_per_s=16e9,
        d2h_bytes_per_s=12e9,
        pageable_bytes_per_s=3e9,
        h2d_table=((65536.0, 6e9), (8e6, 16e9), (128e6, 11e9)),
        d2h_table=((65536.0, 6e9), (8e6, 12e9)),
    )
    host = replace(
        base.host,
        name="my-host",
        measured=True,
        adam_params_per_s=1e9,
        adam_table=((1.0, 1e9), (2.0, 1.9e9)),
        dram_bytes_per_s=23e9,
        dram_measured=True,
    )
    return replace(
        base,
        name="my",
        ranks=(replace(base.ranks[0], gpu=gpu, link=link),),
        host=host,
        peer=Fabric(
            name="my-gloo",
            bytes_per_s=3e8,
            latency_s=4e-4,
            measured=True,
            source="measured",
            table=((1e6, 1e8), (1e9, 3e8)),
        ),
        nvme=Nvme(
            name="my-disk",
            memory_bytes=10**11,
            read_bytes_per_s=2e9,
            write_bytes_per_s=1e9,
            latency_s=0.0,
            measured=True,
            source="measured",
        ),
        slowdowns={"compute_while_adam": 1.25, "h2d_while_d2h": 1.5},
    )


def test_a_measured_machine_comes_back_from_its_file(tmp_path: Path) -> None:
    machine = calibrated()
    file = tmp_path / "my.toml"
    save_machine(machine, file)
    back = load_machine(file)
    assert back.name == "my"
    assert back.calibrated
    assert back.slowdowns == machine.slowdowns
    for dtype, curve in machine.gpu.matmul_tables.items():
        for found, wanted in zip(back.gpu.matmul_tables[dtype], curve, strict=True):
            assert found == pytest.approx(wanted)
    for found, wanted in (
        (back.link.h2d_table, machine.link.h2d_table),
        (back.link.d2h_table, machine.link.d2h_table),
        (back.host.adam_table, machine.host.adam_table),
    ):
        assert [pytest.approx(point) for point in found] == list(wanted)
    assert back.gpu.operator_bytes_per_s == pytest.approx(15e9)
    assert back.gpu.launch_s == pytest.approx(90e-6)
    assert back.host.dram_bytes_per_s == pytest.approx(23e9)
    assert back.host.dram_measured
    assert back.peer is not None and back.peer.measured
    assert [pytest.approx(point) for point in back.peer.table] == [(1e6, 1e8), (1e9, 3e8)]
    assert back.nvme is not None and back.nvme.measured


def test_confidence_is_said_for_each_input() -> None:
    machine = calibrated()
    assert machine.confidence_by_input == {
        "compute": "calibrated",
        "link": "calibrated",
        "CPU Adam": "calibrated",
        "DRAM": "calibrated",
        "operators": "calibrated",
        "disk": "calibrated",
    }
    half = replace(machine, nvme=None, host=replace(machine.host, dram_measured=False))
    assert half.confidence_by_input["DRAM"] == "datasheet"
    assert "disk" not in half.confidence_by_input
    assert set(load_machine("a100-80x8").confidence_by_input) >= {"network"}


def text_of(machine: Machine) -> str:
    return machine_toml(machine, checked=date(2026, 11, 21))


@pytest.mark.parametrize(
    ("line", "instead", "message"),
    [
        ("h2d_gb_per_s = 16.0\n", "h2d_gb_per_s = 50.0\n", r"h2d_gb_per_s = 50.0; must be at most the best rate of"),
        ("fp32_tflops = 0.1\n", "fp32_tflops = 0.3\n", r"fp32_tflops = 0.3; must be at most the best rate of fp32"),
        ("[2.0, 1.9]", "[4.0, 1.9]", r"adam_table = .* must be of at most cores = 2 threads"),
        ("adam_gparams_per_s = 1.0\n", "adam_gparams_per_s = 5.0\n", r"adam_gparams_per_s = 5.0; must be one of"),
        ("compute_while_adam = 1.25", "compute_while_adam = 0.5", r"compute_while_adam = 0.5; must be a number from 1"),
        ("compute_while_adam", "compute_while_lunch", r"compute_while_lunch = 1.25 is not a known field"),
        ("[8.0, 16.0]", "[0.01, 16.0]", r"h2d_table = .* must be a list of \[MB of a copy, GB/s\] pairs .* ascending"),
        ("[8.0, 16.0]", "[8.0, -16.0]", r"h2d_table = .* pairs of positive numbers"),
        ("[8.0, 16.0]", "[8.0]", r"h2d_table"),
        ("[8.0, 16.0]", "8.0", r"h2d_table"),
    ],
)  # fmt: skip
def test_tables_that_contradict_something_name_the_field(tmp_path: Path, line: str, instead: str, message: str) -> None:
    text = text_of(calibrated())
    head, mark, rest = text.partition(".calibrated]")
    if line in rest:  # of the measured figures; a datasheet figure beside them is another matter
        rest = rest.replace(line, instead)
    changed = head + mark + rest
    assert changed != text
    file = tmp_path / "my.toml"
    file.write_text(changed)
    with pytest.raises(CatalogError, match=message) as caught:
        load_machine(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_table_without_its_best_rate(tmp_path: Path) -> None:
    text = text_of(calibrated())
    head, mark, rest = text.partition('[links."my-link".calibrated]')
    file = tmp_path / "my.toml"
    file.write_text(head + mark + rest.replace("h2d_gb_per_s = 16.0\n", "", 1))
    with pytest.raises(CatalogError, match=r"h2d_table = .* must be given together with h2d_gb_per_s, its best rate"):
        load_machine(file)


def test_a_users_own_figure_displaces_the_curve_behind_it(tmp_path: Path) -> None:
    from pstar_sim.catalog.catalog import _merged

    known = {"h2d_gb_per_s": 16, "calibrated": {"h2d_gb_per_s": 16, "h2d_table": [[1, 16]], "d2h_table": [[1, 12]]}}
    merged = _merged("own.toml", known, {"h2d_gb_per_s": 50})
    assert isinstance(merged, dict)
    assert merged["calibrated"] == {"d2h_table": [[1, 12]]}


def test_a_figure_set_by_hand_beyond_its_curve_is_written_without_it(tmp_path: Path) -> None:
    machine = calibrated()
    link = replace(machine.link, h2d_bytes_per_s=50e9, d2h_bytes_per_s=1e9)
    faster = replace(machine, ranks=(replace(machine.ranks[0], link=link),))
    save_machine(faster, tmp_path / "my.toml")
    back = load_machine(tmp_path / "my.toml").link
    assert (back.h2d_bytes_per_s, back.h2d_table) == (pytest.approx(50e9), ())
    assert back.d2h_bytes_per_s == pytest.approx(1e9)
    assert len(back.d2h_table) == 2  # a throttled link keeps its curve


def test_hbm_set_by_hand_takes_the_measured_operators_along() -> None:
    from pstar_sim.catalog.overrides import override

    machine = calibrated()
    twice = override(machine, ["gpu.hbm=x2"])
    assert twice.gpu.operator_bytes_per_s == pytest.approx(30e9)
