"""A figure of a part is declared once: its table in a file, its checks, its override and its page follow."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated

import pytest

import pstar_sim as ps
from pstar_sim.catalog.figures import Figure, Key, calibrated_figures, check_figures, figures_of, table_of, worst_of
from pstar_sim.catalog.overrides import override, override_rows
from pstar_sim.catalog.writing import machine_toml
from pstar_sim.errors import CatalogError
from pstar_sim.schema.fields import between, fields_of
from pstar_sim.schema.reading import read_table


@dataclass(frozen=True, kw_only=True)
class Pump:
    """Of a test."""

    tank_bytes: Annotated[int, Figure("tank_gb", Annotated[float, between(0.5, 8)], "what it holds", path="tank")]
    flow_bytes_per_s: Annotated[
        float,
        Figure(
            "flow_gb_per_s", Annotated[float, between(1, 10)], "datasheet", calibrated="measured", share="efficiency"
        ),
        Key("efficiency", Annotated[float, between(0, 1)], "what it reaches of the datasheet"),
    ]
    start_s: Annotated[float | None, Figure("start_us", Annotated[float, between(0, 100)], "first drop", None)] = None


def test_keys_of_a_table_follow_from_the_attributes() -> None:
    table = table_of(Pump, "A pump.", "A pump, measured.")
    assert list(fields_of(table)) == [
        "tank_gb", "flow_gb_per_s", "efficiency", "start_us", "calibrated", "source", "checked",
    ]  # fmt: skip
    assert [f.calibrated_key for f in calibrated_figures(Pump)] == ["flow_gb_per_s"]
    with pytest.raises(CatalogError, match=r"^f: \[p\] flow_gb_per_s = 11; must be a number from 1 to 10$"):
        read_table(
            table,
            "f",
            "p",
            {"tank_gb": 1, "flow_gb_per_s": 11, "efficiency": 1, "source": "s", "checked": date(2026, 11, 21)},
        )


def test_one_error_has_all_faults_of_a_table() -> None:
    table = table_of(Pump, "A pump.", "A pump, measured.")
    with pytest.raises(CatalogError) as refused:
        read_table(table, "f", "p", {"tank_gb": "full", "flow_gb_per_s": 11, "colour": 1, "source": "s"})
    assert [line.split(";")[0] for line in str(refused.value).splitlines()] == [
        "f: [p] colour = 1 is not a known field",
        "f: [p] tank_gb = 'full'",
        "f: [p] flow_gb_per_s = 11",
        "f: [p] efficiency is missing",
        "f: [p] checked is missing",
    ]


def test_a_file_has_the_unit_of_the_key_and_an_attribute_si_units() -> None:
    tank, flow, start = figures_of(Pump)
    pump = Pump(tank_bytes=2_500_000_000, flow_bytes_per_s=3e9, start_s=4e-6)
    assert (tank.of(pump), flow.of(pump), start.of(pump)) == (2.5, 3.0, 4.0)
    assert (tank.from_file(2.5), flow.from_file(3.0)) == (2_500_000_000, 3e9)
    assert (tank.range, start.range) == ((0.5e9, 8e9), (0.0, 1e-4))
    assert tank.put(pump, 1e9).tank_bytes == 10**9
    assert (tank.unit[0].example, start.unit[0].example) == ("48GB", "10us")


def test_a_figure_is_positive_unless_its_range_begins_at_zero() -> None:
    check_figures("pump", Pump(tank_bytes=1, flow_bytes_per_s=1.0, start_s=0.0))
    check_figures("pump", Pump(tank_bytes=1, flow_bytes_per_s=1.0))
    with pytest.raises(CatalogError, match=r"^pump: tank_bytes = 0: it must be a finite number above 0$"):
        check_figures("pump", Pump(tank_bytes=0, flow_bytes_per_s=1.0))


def test_the_worst_of_several_is_the_smallest_the_slowest_and_the_latest() -> None:
    one = Pump(tank_bytes=3, flow_bytes_per_s=2.0, start_s=1e-6)
    other = Pump(tank_bytes=4, flow_bytes_per_s=1.0, start_s=2e-6)
    assert worst_of([one, other]) == {"tank_bytes": 3, "flow_bytes_per_s": 1.0, "start_s": 2e-6}
    assert worst_of([one, Pump(tank_bytes=4, flow_bytes_per_s=1.0)])["start_s"] is None


@pytest.mark.parametrize(
    "path",
    [
        "gpu.memory", "gpu.hbm", "gpu.flops.fp16", "host.memory", "host.pinned", "host.dram", "host.cores", "link.h2d",
        "link.d2h", "link.latency", "link.pageable", "peer.bandwidth", "network.bandwidth",
    ],
)  # fmt: skip
def test_what_can_be_set_can_be_written_and_read(path: str, tmp_path: Path) -> None:
    most = {row[0].strip("`"): row[3] for row in override_rows()}[path]
    machine = override(
        ps.machine("a100-80x8"),
        {path: most, "nodes": 2, "network.latency": "1us"}
        | ({} if path == "network.bandwidth" else {"network.bandwidth": "10GB/s"}),
    )
    file = tmp_path / "most.toml"
    file.write_text(machine_toml(machine, checked=date(2026, 11, 21)))
    again = ps.machine(file)
    assert (again.host.memory_bytes, again.gpu.memory_bytes) == (machine.host.memory_bytes, machine.gpu.memory_bytes)
    assert again.link.h2d_bytes_per_s == pytest.approx(machine.link.h2d_bytes_per_s)
