"""Seconds of matrix products by their shape, by hand; the generations of GPUs, and the fit that they come from."""

from __future__ import annotations

import csv
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pstar_sim.catalog.catalog import load_catalog
from pstar_sim.catalog.generations import generations, read_generations
from pstar_sim.catalog.loader import load_machine
from pstar_sim.catalog.overrides import override
from pstar_sim.catalog.product_shape import ProductShape
from pstar_sim.catalog.writing import save_machine
from pstar_sim.core.layout import build_layout
from pstar_sim.cost import CostModel
from pstar_sim.errors import CatalogError
from pstar_sim.planner.confidence import confidence, confidence_line
from pstar_sim.testing import chain_workload

ROOT = Path(__file__).resolve().parents[2]
RATE = 1e12  # flops/s of large products
SHAPE = ProductShape(sms=10, tile=(100, 100), wave_loss=1.0, depth=0.0, bytes_per_s=1e18, kernel_s=0.0)


def seconds(shape: ProductShape, *product: int, moved_bytes: float = 0.0) -> float:
    return shape.seconds(product, RATE, moved_bytes)


def test_the_last_wave_leaves_sms_idle() -> None:
    full = 2 * 1000 * 500 * 1000 / RATE
    assert seconds(SHAPE, 1, 1000, 500, 1000) == pytest.approx(full)  # 100 tiles: ten waves
    # 110 tiles are eleven waves, and so are 101: an eleventh row of one column of tiles.
    assert seconds(SHAPE, 1, 1100, 500, 1000) == pytest.approx(1.1 * full)
    assert seconds(SHAPE, 1, 10_100, 500, 100) == pytest.approx(1.1 * full)
    assert seconds(replace(SHAPE, wave_loss=0.0), 1, 10_100, 500, 100) == pytest.approx(1.01 * full)
    assert seconds(SHAPE, 1, 100, 500, 100) == pytest.approx(full / 10)  # one tile takes as long as ten
    assert seconds(SHAPE, 10, 100, 500, 100) == pytest.approx(full / 10)


def test_products_in_fp32_have_tiles_of_their_own() -> None:
    # 300 x 300 is nine tiles of 100 x 100, less than a wave of ten; of 50 x 100 it is 18, two waves.
    full = 2 * 300 * 500 * 300 / RATE
    own = replace(SHAPE, tile_fp32=(50, 100))
    assert own.seconds((1, 300, 500, 300), RATE, 0) == pytest.approx(full * 10 / 9)
    assert own.seconds((1, 300, 500, 300), RATE, 0, fp32=True) == pytest.approx(full * 20 / 18)
    assert SHAPE.seconds((1, 200, 500, 200), RATE, 0, fp32=True) == pytest.approx(full * 4 / 9 * 10 / 4)
    assert own.seconds((1, 200, 500, 200), RATE, 0, fp32=True) == pytest.approx(full * 4 / 9 * 10 / 8)


def test_short_dot_products_little_work_and_many_bytes_cost_more() -> None:
    full = 2 * 1000 * 500 * 1000 / RATE
    assert seconds(replace(SHAPE, depth=250.0), 1, 1000, 500, 1000) == pytest.approx(1.5 * full)
    assert seconds(replace(SHAPE, kernel_s=1e-3), 1, 1000, 500, 1000) == pytest.approx(full + 1e-3)
    # As long for the bytes as for the arithmetic: the corner is round, the fourth root of 2.
    assert seconds(replace(SHAPE, bytes_per_s=1e9), 1, 1000, 500, 1000, moved_bytes=1e6) == pytest.approx(
        full * 2**0.25
    )
    assert seconds(replace(SHAPE, bytes_per_s=1e9), 1, 1000, 500, 1000, moved_bytes=1e8) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sms": 0}, "sms"),
        ({"tile": (0, 4)}, "tile rows"),
        ({"wave_loss": 1.5}, "from 0 to 1"),
        ({"depth": -1}, "depth"),
    ],
)
def test_figures_that_no_gpu_has_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(CatalogError, match=words):
        replace(SHAPE, **change)


def by_curves(tmp_path: Path) -> Path:
    file = tmp_path / "my.toml"
    host = next(iter(load_catalog().hosts))
    file.write_text(f'[machines.my]\ngpu = "a100-40"\ngpus = 1\nlink = "pcie4-x16"\nhost = "{host}"\n')
    return file


def test_a_machine_with_curves_times_each_product_by_its_shape(tmp_path: Path) -> None:
    machine = load_machine(by_curves(tmp_path))
    gpu, a100 = machine.gpu, generations()["a100"]
    assert gpu.products is not None and gpu.launch_s is not None
    assert gpu.products.bytes_per_s == pytest.approx(a100.memory * 1555e9)
    assert gpu.flops_per_s["bf16"] == pytest.approx(312e12 * a100.plateau)
    w = chain_workload(2, 1024)
    products = ((1, 4096, 512, 1024), (4, 64, 64, 64))
    first = replace(w.moments[0], flops=10**11, bytes_read=10**9, bytes_written=0, products=products)
    own = [2 * b * (m * k + k * n + m * n) for b, m, k, n in products]
    work = [2 * b * m * k * n for b, m, k, n in products]
    rate = gpu.flops_per_s["bf16"]
    expected = (
        sum(gpu.products.seconds(p, rate, size) for p, size in zip(products, own, strict=True))
        + (10**11 - sum(work)) / rate
        + (10**9 - sum(own)) / gpu.hbm_bytes_per_s
        + gpu.launch_s
    )
    w = replace(w, moments=(first, *w.moments[1:]))
    assert CostModel(w, machine, build_layout(w)).moments_s[0] == pytest.approx(expected)
    # A moment that names no products has all its flops at the rate of large ones.
    plain = replace(w, moments=(replace(first, products=()), *w.moments[1:]))
    assert CostModel(plain, machine, build_layout(plain)).moments_s[0] == pytest.approx(
        10**11 / rate + 10**9 / gpu.hbm_bytes_per_s + gpu.launch_s
    )


def test_figures_of_products_come_back_from_a_machine_file_and_follow_the_memory(tmp_path: Path) -> None:
    machine = load_machine(by_curves(tmp_path))
    save_machine(machine, tmp_path / "again.toml")
    before, after = machine.gpu.products, load_machine(tmp_path / "again.toml").gpu.products
    assert before is not None and after is not None
    assert (after.sms, after.tile, after.wave_loss, after.depth) == (108, (128, 256), before.wave_loss, before.depth)
    assert after.flash == before.flash
    assert after.bytes_per_s == pytest.approx(before.bytes_per_s)
    assert after.kernel_s == pytest.approx(before.kernel_s)
    hbm = machine.gpu.hbm_bytes_per_s
    faster = override(machine, {"gpu.hbm": f"{2 * hbm / 1e9}GB/s"}).gpu.products
    assert faster is not None and faster.bytes_per_s == pytest.approx(2 * before.bytes_per_s)


def test_figures_of_another_generation_are_called_assumed(tmp_path: Path) -> None:
    file = by_curves(tmp_path)
    assert load_machine(file).confidence_by_input["compute"] == "fitted"
    file.write_text(file.read_text().replace("a100-40", "h100-80"))
    machine = load_machine(file)
    save_machine(machine, tmp_path / "again.toml")
    for m in (machine, load_machine(tmp_path / "again.toml")):
        assert confidence(chain_workload(2, 1024), m)["compute"] == "assumed"
    line = confidence_line(confidence(chain_workload(2, 1024), machine))
    assert line == "calibrated: none; fitted: CPU Adam; datasheet: link, DRAM; assumed: compute, operators, framework"


def test_fused_attention_runs_at_its_share_of_the_rate(tmp_path: Path) -> None:
    machine = load_machine(by_curves(tmp_path))
    w = chain_workload(2, 1024)
    w = replace(w, moments=(replace(w.moments[0], flops=10**12), *w.moments[1:]))
    shape, rate = machine.gpu.products, machine.gpu.flops_per_s["bf16"]
    assert shape is not None and shape.flash < 1
    plain, flash = (CostModel(x, machine, build_layout(x)).moments_s[0] for x in (w, replace(w, attention="flash")))
    assert flash - plain == pytest.approx(1e12 / rate * (1 / shape.flash - 1))


CALIBRATED = """[gpus.mine.calibrated]
fp16_tflops = 100
"""
"""Rates without launches: those of whole iterations."""

OWN = """
[gpus.mine]
memory_gb = 40
usable_gb = 39
context_gb = 1
hbm_gb_per_s = 1555
hbm_efficiency = 0.8
fp32_tflops = 19.5
fp16_tflops = 312
fp32_efficiency = 0.8
tensor_core_efficiency = 0.5
generation = "a100"
launch_us = 400
[gpus.mine.products]
sms = 108
tile = [128, 256]
wave_loss = 0.5
depth = 100
gb_per_s = 800
kernel_us = 1
"""


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (
            "launch_us = 400\n",
            CALIBRATED,
            r"mine\] launch_us = None; must be given, because \[gpus\.mine\.products\] has",
        ),
        ("tile = [128, 256]", "tile = [128]", r"mine.products\] tile = \[128\]; must be a list of 2 whole numbers"),
        ("[gpus.mine.products]\nsms = 108", "[gpus.mine.products]", r"mine.products\] sms is missing"),
    ],
)
def test_a_table_of_products_says_what_it_needs(tmp_path: Path, before: str, after: str, words: str) -> None:
    file = by_curves(tmp_path)
    file.write_text(file.read_text().replace("a100-40", "mine") + OWN.replace(before, after))
    with pytest.raises(CatalogError, match=words):
        load_machine(file)
    file.write_text(file.read_text().replace(OWN.replace(before, after), OWN))
    products = load_machine(file).gpu.products
    assert products is not None and products.depth == 100  # the card's own, not its generation's 125


def test_a_generation_needs_the_cards_sms(tmp_path: Path) -> None:
    file, own = by_curves(tmp_path), OWN.partition("[gpus.mine.products]")[0]
    file.write_text(file.read_text().replace("a100-40", "mine") + own)
    with pytest.raises(CatalogError, match=r"mine\] sms = None; must be given, because a generation's figures"):
        load_machine(file)
    file.write_text(file.read_text() + "sms = 100\n")
    products = load_machine(file).gpu.products
    assert products is not None and (products.sms, products.depth) == (100, generations()["a100"].depth)


def test_a_card_of_no_generation_says_what_it_reaches_of_its_16_bit_peak(tmp_path: Path) -> None:
    file, own = by_curves(tmp_path), OWN.partition("[gpus.mine.products]")[0]
    own = "".join(line for line in own.splitlines(keepends=True) if not line.startswith(("generation", "tensor_core")))
    start = file.read_text().replace("a100-40", "mine")
    file.write_text(start + own)
    with pytest.raises(CatalogError, match=r"mine\] tensor_core_efficiency = None; must be given beside .*generation"):
        load_machine(file)
    file.write_text(start + own + "tensor_core_efficiency = 0.5\n")
    card = load_catalog(file).gpus["mine"].values
    peak = next(getattr(card, f"{dtype}_tflops") for dtype in ("fp16", "bf16") if getattr(card, f"{dtype}_tflops"))
    assert max(rate for d, rate in load_machine(file).gpu.flops_per_s.items() if d != "fp32") == peak * 1e12 * 0.5


def test_every_generation_has_a_card() -> None:
    assert {card.values.generation for card in load_catalog().gpus.values()} - {None} == set(generations())


def test_every_figure_of_a_generation_says_how_it_is_known() -> None:
    text = "[x]\ntile = [1, 1]\ntile_fp32 = [1, 1]\nplateau = 0.5\nwave_loss = 0\ndepth = 0\nmemory = 0.5\n"
    text += "kernel_us = 0\nflash = 1\n"
    text += 'attention = "a100"\nsource = "by hand"\nchecked = 2026-11-23\n'
    with pytest.raises(CatalogError, match=r"x\.toml: \[x\] known names tile; it must name tile, tile_fp32, plateau"):
        read_generations("x.toml", text + 'known = { tile = "measured" }\n')
    with pytest.raises(CatalogError, match="guessed"):
        read_generations("x.toml", text + 'known = { tile = "guessed" }\n')


def test_a_generation_may_be_like_another_one() -> None:
    shipped = generations()
    v100, h100, a100 = shipped["v100"], shipped["h100"], shipped["a100"]
    assert (v100.plateau, v100.depth) == (a100.plateau, a100.depth)
    assert shipped["b200"].plateau < h100.plateau < a100.plateau
    assert v100.assumed and h100.assumed and not a100.assumed
    with pytest.raises(CatalogError, match=r"\[x\] like = 'y'; must be one of "):
        read_generations("g.toml", '[x]\nlike = "y"\nsource = "by hand"\nchecked = 2026-11-23\n')


def test_fitted_generations_are_those_of_the_benchmark() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "gemm.json").read_text(encoding="utf-8"))
    for name, gpu, memory in (("a100", "A100-PCIe", 1935), ("b200", "B200", 7700)):
        made, fit = generations()[name], result[gpu]
        assert {e.values.sms for e in load_catalog().gpus.values() if e.values.generation == name} == {fit["sms"]}
        assert list(made.tile) == fit["tile"]
        for figure in ("plateau", "wave_loss", "depth", "kernel_us"):
            assert made.known[figure] == "fitted"
            assert getattr(made, figure) == pytest.approx(fit[figure], rel=0.01)
        assert made.memory * memory == pytest.approx(fit["gb_per_s"], rel=0.01)


def test_a_rows_repetition_is_the_same_product_in_the_same_layout() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "gemm.json").read_text(encoding="utf-8"))
    with (ROOT / "benchmarks" / "data" / "gemm_efficiency.csv").open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    for gpu in ("A100-PCIe", "B200"):
        kinds = Counter(
            tuple(r[name] for name in ("b", "m", "k", "n", "layout", "accumulate")) for r in rows if r["gpu"] == gpu
        )
        pairs = sum(count == 2 for count in kinds.values())
        assert (result[gpu]["repeated"] or {"pairs": 0})["pairs"] == pairs


def test_the_fit_reaches_shapes_that_it_has_not_seen() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "gemm.json").read_text(encoding="utf-8"))
    a100, b200 = (result[gpu]["left_out"] for gpu in ("A100-PCIe", "B200"))
    assert a100["median"] <= 0.03 and a100["p90"] <= 0.20
    assert b200["median"] <= 0.06 and result["B200"]["from_a100"]["median"] <= 0.12
