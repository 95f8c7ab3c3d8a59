"""The catalog: every shipped entry, the calibrated machines by hand, users' files over it, every kind of bad field."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from pstar_sim.catalog.efficiency import fitted
from pstar_sim.catalog.listing_rows import list_machines
from pstar_sim.catalog.loader import load_catalog, load_machine, machine_names
from pstar_sim.errors import CatalogError, PstarError, UnknownName

GB, GIB = 10**9, 2**30

GOOD = {
    "gpus": """
memory_gb = 10
usable_gb = 9
context_gb = 1
hbm_gb_per_s = 500
hbm_efficiency = 0.8
fp32_tflops = 10
fp16_tflops = 40
fp32_efficiency = 0.5
tensor_core_efficiency = 0.25
""",
    "links": """
connects = "host-gpu"
h2d_gb_per_s = 10
d2h_gb_per_s = 8
efficiency = 0.5
latency_us = 10
duplex = true
""",
    "hosts": """
memory_gb = 32
reserved_gb = 2
dram_peak_gb_per_s = 50
dram_efficiency = 0.8
cores = 8
adam_gparams_per_s = 1
""",
    "machines": """
gpu = "mine"
gpus = 1
link = "mine"
host = "mine"
""",
}


def write(folder: Path, text: str) -> Path:
    path = folder / "my.toml"
    path.write_text(text, encoding="utf-8")
    return path


def complete(**changed: str) -> str:
    """A user's file with one entry of each kind, all named "mine"; changed: kind -> its text."""
    return "\n".join(f"[{kind}.mine]\n{changed.get(kind, text)}" for kind, text in GOOD.items())


def test_every_machine_the_issue_names_is_there() -> None:
    wanted = """v100-32 a100-40 a100-80 h100-80 h200 rtx3090-64gb rtx4090-128gb rtx4090 v100-32x8 a100-80x8 virtual"""
    assert set(wanted.split()) <= set(machine_names())


@pytest.mark.parametrize("name", machine_names())
def test_every_machine_is_positive_and_finite(name: str) -> None:
    m = load_machine(name)
    assert 0 < m.gpu_budget_bytes <= m.gpu.memory_bytes
    assert 0 < m.host_budget_bytes < m.host.memory_bytes
    rates = [
        m.gpu.hbm_bytes_per_s,
        *m.gpu.flops_per_s.values(),
        m.link.h2d_bytes_per_s,
        m.link.d2h_bytes_per_s,
        m.host.dram_bytes_per_s,
        m.host.adam_params_per_s,
    ]
    assert all(rate > 0 and math.isfinite(rate) for rate in rates)
    assert m.link.latency_s >= 0
    assert m.host.cores >= 1
    assert sum(rank.batch_share for rank in m.ranks) == pytest.approx(1)
    assert "fp32" in m.gpu.flops_per_s
    # The one reserve, 1 GB; the virtual accelerator has none.
    assert m.gpu.context_bytes == (0 if name == "virtual" else GB)


@pytest.mark.parametrize("table", ["gpus", "links", "hosts", "machines"])
def test_every_entry_names_its_source_and_date(table: str) -> None:
    for entry in getattr(load_catalog(), table).values():
        assert len(entry.values.source) > 10, entry.name
        assert entry.values.checked.year >= 2015
        calibrated = entry.values.calibrated if table != "machines" else None
        if calibrated is not None:
            assert calibrated.source != entry.values.source


# Worked out by hand: GiB that CUDA reports, line rate and share, 16-bit TFLOPS and plateau, GB/s of HBM and DRAM.
@pytest.mark.parametrize(
    ("name", "usable", "link", "flops", "hbm", "dram"),
    [
        ("v100-32", 31.74, 15.75 * 0.78, 125 * 0.774, 900, 128),
        ("a100-80", 79.1, 31.5 * 0.8, 312 * 0.774, 2039, 204.8),
        ("rtx4090", 23.64, 31.5 * 0.8, 165.2, 1008, 204.8),
        ("h100-80", 79.1, 63 * 0.87, 989 * 0.604, 3350, 307.2),
    ],
)
def test_machines_differ_in_data_alone(
    name: str, usable: float, link: float, flops: float, hbm: float, dram: float
) -> None:
    m, e = load_machine(name), fitted()
    assert m.gpu.usable_bytes == m.gpu.memory_bytes == round(usable * GIB)
    assert m.gpu_budget_bytes == round(usable * GIB) - GB
    assert m.link.h2d_bytes_per_s == m.link.d2h_bytes_per_s == pytest.approx(link * GB)
    assert m.gpu.flops_per_s["fp16"] == pytest.approx(flops * 1e12)
    assert m.gpu.hbm_bytes_per_s == pytest.approx(hbm * GB * e.hbm)
    assert m.host.adam_params_per_s == pytest.approx(dram * GB * e.adam_dram / 28)
    assert m.host.memory_bytes == 503 * GIB
    assert m.gpu.launch_s == e.launch_s and m.gpu.products is not None
    assert m.framework is not None and m.framework.name == "pytorch"
    assert not m.calibrated


def test_no_shipped_machine_carries_rates_of_whole_iterations() -> None:
    for name in machine_names():
        m = load_machine(name)
        assert m.gpu.launch_s is not None, name
        assert (m.gpu.products is None) == (m.framework is None) == (name == "virtual"), name


def test_cards_without_bf16_have_no_rate_for_it() -> None:
    without = {name for name in machine_names() if "bf16" not in load_machine(name).gpu.flops_per_s}
    assert without == {"p100-16", "v100-16", "v100-32", "v100-32x8", "v100-16x8", "dgx2", "t4", "rtx2080ti-64gb"}


def test_nodes_share_one_host() -> None:
    node = load_machine("v100-32x8")
    assert len(node.ranks) == 8
    assert node.host.memory_bytes == 240 * GB
    assert node.ranks[3].batch_share == 1 / 8
    assert node.peer is not None and node.peer.bytes_per_s == pytest.approx(150e9 * 0.85)
    assert load_machine("a100-80x8").host.memory_bytes == 1007 * GIB


def test_desktops_have_two_channels() -> None:
    # DDR4-3600: 2 x 3600e6 x 8 B = 57.6 GB/s, of which 80 % are reached.
    assert load_machine("rtx3090-64gb").host.dram_bytes_per_s == pytest.approx(46.08e9)
    assert load_machine("rtx4090-128gb").host.dram_bytes_per_s < load_machine("rtx4090").host.dram_bytes_per_s / 3
    assert load_machine("rtx4090-128gb").confidence_by_input["compute"] == "assumed"


def test_uncalibrated_rates_are_peak_times_efficiency(tmp_path: Path) -> None:
    m = load_machine(write(tmp_path, complete()))
    assert m.name == "mine"
    assert m.gpu.flops_per_s == {"fp32": 5e12, "fp16": 10e12}
    assert m.gpu.hbm_bytes_per_s == pytest.approx(400e9)
    assert m.gpu_budget_bytes == 8 * GB
    assert (m.link.h2d_bytes_per_s, m.link.d2h_bytes_per_s, m.link.latency_s) == (5e9, 4e9, pytest.approx(1e-5))
    assert m.host_budget_bytes == 30 * GB
    assert m.host.dram_bytes_per_s == 40e9
    assert not m.calibrated
    assert "my.toml" in m.gpu.source


def test_a_calibration_is_preferred_field_by_field(tmp_path: Path) -> None:
    text = GOOD["gpus"] + "[gpus.mine.calibrated]\nfp16_tflops = 33\nusable_gb = 8.5\n"
    gpu = load_machine(str(write(tmp_path, complete(gpus=text)))).gpu
    assert gpu.flops_per_s == {"fp32": 5e12, "fp16": 33e12}
    assert gpu.usable_bytes == 8.5 * GB
    assert gpu.measured


def test_a_user_file_overrides_single_fields(tmp_path: Path) -> None:
    user = write(tmp_path, "[hosts.epyc-ddr4-3200]\nmemory_gb = 128\n")
    m = load_machine("a100-80", user_file=user)
    assert m.host.memory_bytes == 128 * GB
    assert m.host.adam_params_per_s == load_machine("a100-80").host.adam_params_per_s, (
        "what the file leaves alone stays"
    )
    assert "my.toml" in m.host.source
    assert load_machine("a100-80").host.memory_bytes == 503 * GIB, "the catalog itself is not changed"


def test_a_users_datasheet_figure_displaces_the_catalogs(tmp_path: Path) -> None:
    user = write(tmp_path, "[gpus.rtx4090]\nfp16_tflops = 100\n")
    gpu = load_machine("rtx4090", user_file=user).gpu
    assert gpu.flops_per_s["fp16"] == pytest.approx(100e12)
    assert gpu.flops_per_s["bf16"] == pytest.approx(165.2e12)


def test_collectives_slow_compute_by_the_framework_that_drives_the_gpus(tmp_path: Path) -> None:
    fsdp, zero = (load_catalog().framework(name) for name in ("pytorch", "deepspeed"))
    assert fsdp.net_loss > zero.net_loss > 0
    node = load_machine("a100-80x8")
    assert node.compute_while_net == 1 / (1 - fsdp.net_loss)
    assert replace(node, framework=zero).compute_while_net == 1 / (1 - zero.net_loss)
    assert load_machine("virtual").compute_while_net == 1
    own = '[machines.mine]\ngpu = "a10"\ngpus = 2\nlink = "pcie4-x16"\nhost = "cloud-ddr4-64gb"\n'
    own += "[machines.mine.slowdowns]\ncompute_while_net = 1.25\n"
    assert load_machine(write(tmp_path, own)).compute_while_net == 1.25


def test_a_users_calibration_goes_over_the_catalogs(tmp_path: Path) -> None:
    user = write(tmp_path, "[links.pcie4-x16.calibrated]\nh2d_gb_per_s = 22\n")
    link = load_machine("rtx4090", user_file=user).link
    assert (link.h2d_bytes_per_s, link.d2h_bytes_per_s) == (22e9, pytest.approx(25.2e9))


def test_a_file_with_several_machines_says_which(tmp_path: Path) -> None:
    two = '[machines.a]\ngpu = "a10"\ngpus = 1\nlink = "pcie4-x16"\nhost = "cloud-ddr4-64gb"\n'
    two += two.replace("machines.a", "machines.b").replace('"a10"', '"l4"')
    with pytest.raises(CatalogError, match=r"defines 2 machines \(a, b\); choose a machine with machine = NAME"):
        load_machine(write(tmp_path, two))
    assert load_machine(write(tmp_path, 'machine = "b"\n' + two)).gpu.name == "l4"
    assert load_machine("a", user_file=write(tmp_path, two)).gpu.name == "a10"


def test_a_file_may_name_a_machine_of_the_catalog(tmp_path: Path) -> None:
    m = load_machine(write(tmp_path, 'machine = "v100-32"\n[hosts.xeon-ddr4-2666]\nmemory_gb = 64\n'))
    assert m.host.memory_bytes == 64 * GB


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = ", "not a TOML file"),
        ("", "defines no machine"),
        ('machine = "x"\n', "machine = 'x'; must be one of"),
        ("machine = 3\n", "machine = 3; must be the name"),
        ("[gpu.x]\n", "'gpu' is not a known table"),
        ("gpus = 3\n", "'gpus' is not a known table"),
        ("[gpus]\nx = 3\n", r"gpus\.x = 3; must be a table: \[gpus\.x\] and"),
    ],
)
def test_a_bad_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CatalogError, match=message) as error:
        load_machine(write(tmp_path, text))
    assert "my.toml" in str(error.value)


def test_a_file_may_say_its_version(tmp_path: Path) -> None:
    assert load_machine(write(tmp_path, "version = 1\n" + complete())).name == "mine"
    with pytest.raises(
        CatalogError, match=r"my\.toml: was written by a newer pstar-sim \(machine file version 2; this"
    ):
        load_machine(write(tmp_path, "version = 2\n" + complete()))
    with pytest.raises(CatalogError, match=r"my\.toml: field 'version' is '1', not a version number"):
        load_machine(write(tmp_path, 'version = "1"\n' + complete()))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match=r"none\.toml: cannot be read: No such file"):
        load_machine(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CatalogError, match="not a text file in UTF-8"):
        load_machine(tmp_path / "bytes.toml")
    with pytest.raises(CatalogError, match="is a file of machines itself"):
        load_machine(write(tmp_path, complete()), user_file=tmp_path / "my.toml")


FIELDS = [(kind, line.split(" = ")[0]) for kind, text in GOOD.items() for line in text.strip().splitlines()]


OPTIONAL = {
    "usable_gb", "context_gb", "fp16_tflops", "hbm_efficiency", "fp32_efficiency", "tensor_core_efficiency",
    "adam_gparams_per_s",
}  # fmt: skip


@pytest.mark.parametrize(("kind", "field"), [(kind, field) for kind, field in FIELDS if field not in OPTIONAL])
def test_a_missing_field(tmp_path: Path, kind: str, field: str) -> None:
    text = "\n".join(line for line in GOOD[kind].splitlines() if not line.startswith(f"{field} ="))
    with pytest.raises(CatalogError, match=rf"my\.toml: \[{kind}\.mine\] {field} is missing; it must be "):
        load_machine(write(tmp_path, complete(**{kind: text})))


NUMBERS = tuple(
    (kind, field) for kind, field in FIELDS if field.endswith(("_gb", "_tflops", "_s", "efficiency", "_us"))
)
NEVER_ZERO = {"memory_gb", "usable_gb", "fp32_tflops", "h2d_gb_per_s", "dram_peak_gb_per_s", "hbm_efficiency"}
ABSURD = [
    *[(k, f, v) for k, f in NUMBERS for v in ("-1", "1e15", "inf", "nan", '"8"', "true")],
    *[(k, f, "0") for k, f in NUMBERS if f in NEVER_ZERO],
    ("links", "h2d_gb_per_s", "1e6"),  # 1e15 bytes per second
    ("links", "latency_us", "-1"),
    ("links", "latency_us", "1e9"),
    ("links", "duplex", "1"),
    ("links", "connects", '"gpu"'),
    ("hosts", "cores", "0"),
    ("hosts", "cores", "2.5"),
    ("hosts", "adam_gparams_per_s", "0"),
    ("machines", "gpus", "0"),
    ("machines", "gpus", "1.0"),
    ("machines", "gpu", '""'),
    ("machines", "gpu", '"rtx4091"'),
    ("machines", "link", '"pcie6"'),
    ("machines", "link", '"nvlink3"'),  # joins GPUs, not GPU and host
    ("machines", "host", '"nobody"'),
    # in range, but contradicting another field
    ("gpus", "usable_gb", "11"),
    ("gpus", "context_gb", "9"),
    ("hosts", "reserved_gb", "32"),
]  # fmt: skip


@pytest.mark.parametrize("kind", list(GOOD))
def test_an_absurd_field(tmp_path: Path, kind: str) -> None:
    rows = [(field, value) for k, field, value in ABSURD if k == kind]
    assert rows
    for field, value in rows:
        lines = [f"{field} = {value}" if x.startswith(f"{field} =") else x for x in GOOD[kind].splitlines()]
        with pytest.raises(CatalogError, match=rf"my\.toml: \[{kind}\.mine\] \w+ = .*; must be ") as error:
            load_machine(write(tmp_path, complete(**{kind: "\n".join(lines)})))
        assert ("usable_gb" if (field, value) == ("context_gb", "9") else field) in str(error.value), (field, value)


@pytest.mark.parametrize("kind", list(GOOD))
def test_an_unknown_field(tmp_path: Path, kind: str) -> None:
    with pytest.raises(
        CatalogError, match=rf"my\.toml: \[{kind}\.mine\] colour = 'red' is not a known field; it takes "
    ):
        load_machine(write(tmp_path, complete(**{kind: GOOD[kind] + 'colour = "red"\n'})))


def test_a_misspelt_field_is_guessed(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match=r"memory_gbs = 32 is not a known field; did you mean memory_gb\?"):
        load_machine(write(tmp_path, complete(hosts=GOOD["hosts"] + "memory_gbs = 32\n")))


def test_a_size_may_be_given_in_gib(tmp_path: Path) -> None:
    text = "[gpus.rtx4090]\nmemory_gib = 24\n[hosts.workstation-ddr4-3200]\nmemory_gib = 256\nreserved_gib = 6\n"
    m = load_machine("rtx4090", user_file=write(tmp_path, text))
    assert (m.gpu.memory_bytes, m.gpu.usable_bytes, m.gpu_budget_bytes) == (24 * GIB, 24 * GIB, 24 * GIB - GB)
    assert m.host_budget_bytes == 250 * GIB
    assert load_machine("rtx4090", gpu_memory="24GiB", host_memory="256GiB").gpu_budget_bytes == 24 * GIB - GB
    assert load_machine("rtx4090", overrides=["gpu.memory=24GiB"]).gpu_budget_bytes == 24 * GIB - GB


def test_a_size_given_in_both_units_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match=r"\[hosts\.mine\] memory_gib = 32 beside memory_gb; give one of them"):
        load_machine(write(tmp_path, complete(hosts=GOOD["hosts"] + "memory_gib = 32\n")))


def test_a_card_without_a_size_of_its_own_is_wholly_usable_less_the_one_reserve(tmp_path: Path) -> None:
    lines = GOOD["gpus"].replace("usable_gb = 9\n", "").replace("context_gb = 1\n", "")
    gpu = load_machine(write(tmp_path, complete(gpus=lines))).gpu
    assert (gpu.usable_bytes, gpu.budget_bytes) == (10 * GB, 9 * GB)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('source = ""', "source = ''; must be a text"),
        ('checked = "2026-01-01"', "must be a date"),
        ("checked = 1999-01-01", "must be a date"),
        ("device_names = [1]", "must be a list of texts"),
        ("calibrated = 3", "must be a table"),
        ("[gpus.mine.calibrated]\nspeed = 3", r"\[gpus\.mine\.calibrated\] speed = 3 is not a known field"),
        ("[gpus.mine.calibrated]\nfp16_tflops = 0", r"\[gpus\.mine\.calibrated\] fp16_tflops = 0; must be"),
    ],
)
def test_bad_source_date_and_calibration(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        load_machine(write(tmp_path, complete(gpus=f"{GOOD['gpus']}\n{line}\n")))


def test_an_override_is_checked_like_the_catalog(tmp_path: Path) -> None:
    for text in (
        "[gpus.rtx4090]\nmemory_gb = 0\n",
        "[gpus.rtx4090.calibrated]\nfp16_tflops = -1\n",
        "[gpus]\nrtx4090 = 3\n",
    ):
        with pytest.raises(CatalogError, match=r"my\.toml"):
            load_machine("rtx4090", user_file=write(tmp_path, text))


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(UnknownName, match="unknown machine 'rtx409'; did you mean rtx4090"):
        load_machine("rtx409")
    with pytest.raises(UnknownName, match="did you mean rtx4090, rtx4090-wsl2, rtx4090-128gb"):
        load_machine("4090")
    with pytest.raises(UnknownName, match="did you mean polaris-a100-40x4"):
        load_machine("a100-40x4")


def test_sizes_from_the_command_line() -> None:
    m = load_machine("v100-32", gpu_memory="8GB", host_memory=64 * GB)
    assert m.gpu.memory_bytes == m.gpu.usable_bytes == 8 * GB
    assert m.gpu_budget_bytes == 7 * GB, "the context still comes off it"
    assert m.host.memory_bytes == 64 * GB
    assert m.host_budget_bytes == 56 * GB
    assert load_machine("virtual", gpu_memory="512MiB").gpu_budget_bytes == 2**29
    assert {r.gpu.usable_bytes for r in load_machine("v100-32x8", gpu_memory="16GB").ranks} == {16 * GB}


@pytest.mark.parametrize("size", ["0", 0, -5, "much", "8 parsecs", ""])
def test_sizes_that_are_none(size: str | int) -> None:
    with pytest.raises(PstarError):
        load_machine("v100-32", gpu_memory=size)
    with pytest.raises(PstarError):
        load_machine("v100-32", host_memory=size)


def test_sizes_that_leave_nothing() -> None:
    with pytest.raises(CatalogError, match=r"gpu memory of 1\.00 GB leaves nothing: the driver context"):
        load_machine("v100-32", gpu_memory="1GB")
    with pytest.raises(CatalogError, match=r"host memory of 8\.00 GB leaves nothing"):
        load_machine("v100-32", host_memory="8GB")


def test_listing_has_a_row_for_each_machine() -> None:
    rows = list_machines()
    assert [row["machine"] for row in rows] == list(machine_names())
    assert len({tuple(row) for row in rows}) == 1, "the same columns in every row"
    v100 = next(row for row in rows if row["machine"] == "v100-32")
    assert (v100["GPU GB"], v100["host GB"], v100["Adam G/s"], v100["compute is"]) == (34.1, 540, 1.24, "assumed")
