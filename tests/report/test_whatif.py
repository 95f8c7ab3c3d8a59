"""The what-if page holds the points of its sweeps, their prices and their errors, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import pstar_sim as ps
from pstar_sim.cli import main
from pstar_sim.planner.grid import load_grid
from pstar_sim.planner.sweep import load_results
from pstar_sim.planner.trust import untuned
from pstar_sim.report.web.whatif import whatif_page

pytest.importorskip("plotly", reason="the extra `report` is not installed")

GRID: dict[str, Any] = {
    "machine": ["a100-80", "v100-32"],
    "model": ["gpt2", "1B"],
    "batch": 1,
    "seq": 128,
    "policy": ["zero_offload"],
    "set": {"link.bandwidth": ["x1", "+10%"]},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whatif") / "results.parquet"
    ps.sweep(GRID, path, jobs=1, backend="threading")
    return path


def page_values(path: Path) -> dict[str, Any]:
    return values_in(path.read_text(encoding="utf-8"))


def values_in(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="values">(.*?)</script>', text)
    assert found is not None and len(text.encode()) < 6e6
    return dict(json.loads(found[1]))


def test_every_point_is_on_the_page_with_its_figures_and_its_error(results: Path) -> None:
    out = results.with_name("whatif.html")
    assert main(["page", str(results), "-o", str(out)]) == 0
    page = page_values(out)
    text = out.read_text(encoding="utf-8")
    assert "; in all: batch 1, tokens per sequence 128, policy zero_offload.</p>" in text
    assert f"± {untuned():.0%}".replace("%", " %") in text, "the bar of a class without rows"
    axes, points = load_results(results)
    names = [axis["name"] for axis in page["axes"]]
    assert sorted(names) == sorted(axes) and len(page["rows"]) == len(points) == 8
    columns = [*names, *page["figures"]]
    shown = [dict(zip(columns, row)) for row in page["rows"]]
    for row, point in zip(shown, points):
        for axis in page["axes"]:
            assert axis["values"][row[axis["name"]]] == point[axis["name"]]
        assert row.pop("why") is None
        assert all(row[name] == point[name] for name in page["figures"] if name in row)
    assert {row["expected_error"] is None for row in shown} == {False}, "both machines were validated"


def test_a_machine_without_a_price_has_none_and_a_file_of_prices_comes_first(results: Path, tmp_path: Path) -> None:
    own = tmp_path / "prices.toml"
    own.write_text("[a100-80]\nusd_per_hour = 1.5\n", encoding="utf-8")
    out = tmp_path / "whatif.html"
    assert main(["page", str(results), "--prices", str(own), "-o", str(out)]) == 0
    prices = page_values(out)["prices"]
    assert prices["a100-80|x1"][0] == prices["a100-80|+10%"][0] == 1.5
    assert prices["v100-32|x1"] is None


def test_points_of_several_sweeps_are_joined(results: Path, tmp_path: Path) -> None:
    """A sweep without an axis has that figure as it is; a file that is given twice adds nothing."""
    ps.sweep({**GRID, "set": {}, "machine": "h100-80", "model": "gpt2"}, tmp_path / "more.parquet", jobs=1)
    out = tmp_path / "whatif.html"
    assert main(["page", str(results), str(tmp_path / "more.parquet"), str(results), "-o", str(out)]) == 0
    page = page_values(out)
    link = next(axis for axis in page["axes"] if axis["name"] == "set.link.bandwidth")
    assert link["values"] == ["x1", "+10%"] and len(page["rows"]) == 9


def test_a_job_without_a_plan_is_not_called_too_large_and_folders_of_files_stay_here(results: Path) -> None:
    _, points = load_results(results)
    without = {**points[0], "fits": None, "reason": "no disks", "machine": "/home/me/mine.toml"}
    said = "tide does not fit: gpu needs 9 GB (moment 2 (a, 1 GB); b) but has 8 GB, short by 1 GB"
    large = {**points[0], "fits": False, "reason": said, "policy": "tide"}
    page = values_in(whatif_page([*points, without, large], ["machine", "model", "policy", "set.link.bandwidth"]))
    assert page["reasons"] == ["no disks", "gpu needs 9 GB but has 8 GB, short by 1 GB"]
    assert page["rows"].pop()[-1] == 1
    row = dict(zip(page["figures"], page["rows"][-1][4:]))
    assert row["fits"] is None and page["reasons"][row["why"]] == "no disks"
    assert all(one[-1] is None for one in page["rows"][:-1])
    machine = page["axes"][0]
    assert (machine["labels"][-1], machine["values"][-1]) == ("mine.toml", "/home/me/mine.toml")


def test_a_point_of_several_files_counts_once(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = results.with_name("twice.html")
    assert main(["page", str(results), str(results), "-o", str(out)]) == 0
    assert f"{out}: 8 points; " in capsys.readouterr().out and len(page_values(out)["rows"]) == 8


def test_the_shipped_grid_answers_the_questions_of_the_page() -> None:
    grid = load_grid("whatif")
    assert {"rtx4090-128gb"} <= {*grid.axes["machine"]} and {"8B"} <= {*grid.axes["model"]}
    assert grid.axes["set.host.memory"] == ("x1", "64GB") and grid.axes["set.link.bandwidth"] == ("x1", "+10%")


def test_mistakes_are_named(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "no.parquet"
    text.write_text("no", encoding="utf-8")
    out = str(tmp_path / "whatif.html")
    nothing = tmp_path / "none.parquet"
    for file, said in (
        (text, f"{text}: is not a results file of a sweep"),
        (nothing, f"{nothing}: cannot be read: No such file or directory"),
        (tmp_path, f"{tmp_path}: cannot be read: Is a directory"),
    ):
        assert main(["page", str(file), "-o", out]) == 2
        assert said in capsys.readouterr().err
    import pandas

    pandas.DataFrame({"a": [1]}).to_parquet(text)
    assert main(["page", str(text), "-o", out]) == 2
    assert "`pstar sweep` writes one" in capsys.readouterr().err and not Path(out).exists()
