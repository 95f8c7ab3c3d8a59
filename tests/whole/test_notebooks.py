"""The notebooks run from top to bottom, were committed with the outputs that they have today, and stay thin."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

OF_THIS_MACHINE = {
    ("03_execute", "def gpt2():"): "a comparison on rates that were measured and a tide that was recorded",
    ("03_execute", "predicted = best.timeline"): "measured milliseconds",
    ("03_execute", "rows = iter(batches(2))"): "moments of the plan that those rates lead to",
    ("03_execute", "session.status()"): "measured seconds and tokens per second",
}
"""How the cells begin whose text holds what depends on the speed of the machine, and what that is."""

IN_SMALL = {
    ("01_tide_curves", "import warnings"): {'"1.2GB"': '"3MB"', 'model="gpt2"': 'model="tiny-gpt2"'},
    ("01_tide_curves", "rows = []"): {"(True, False)": "(True,)", "(1, 4)": "(4,)"},
    ("02_capacity_planning", "memory = ["): {"(10, 14, 20, 28, 48, 84)": "(14, 84)"},
    ("02_capacity_planning", 'links = ["6GB/s"'): {
        '"6GB/s", "12GB/s", "25GB/s", "50GB/s"': '"6GB/s", "50GB/s"',
        '"batch": [1, 2, 4, 8]': '"batch": [1, 2]',
    },
    ("02_capacity_planning", "w = ps.preset("): {'"4B"': '"1B"', '"12GB"': '"24GB"'},
    ("02_capacity_planning", "ablation"): {},  # shows what the cell above it has found
    ("03_execute", "def gpt2():"): {
        '"zero_offload", "static_partition", "tide", "optimal"': '"tide"',
        "barrier_cost=True": "barrier_cost=False",
    },
    ("02_capacity_planning", 'links = ["2GB/s"'): {
        '"2GB/s", "6GB/s", "12GB/s", "25GB/s"': '"2GB/s", "25GB/s"',
        '"micro_batches": [1, 2, 4]': '"micro_batches": [1, 4]',
    },
}
"""How the cells begin that take long, and what stands for what in them without --whole. Their text is compared
with --whole alone; test_readme.py compares another ablation's, test_record.py and test_parity_training.py see to peaks
and losses."""

ASKED = ("00_tour", "01_tide_curves", "02_capacity_planning")
"""Notebooks that ask what commands of the documents ask too, and run with --whole alone."""

NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def figures(cell: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The text that a cell has put out, its numbers replaced; and the numbers. Pictures and HTML show the same."""
    texts = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell["outputs"]]
    whole = "\n".join(text if isinstance(text, str) else "".join(text) for text in texts)
    words = NUMBER.sub("#", whole)
    return re.sub(r"[\s─]+", " ", words), NUMBER.findall(whole)


def last_digit(number: str) -> float:
    """One unit of the last digit that is printed: 0.001 of 3.428, 1e-6 of 1.30e-04."""
    digits, _, exponent = number.partition("e")
    return 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))


def same(number_now: str, number: str) -> bool:
    """Whether figures are equal. A loss or a norm comes from kernels, which round otherwise on another processor: to
    1e-4, or to one unit of the last digit. A count is exact, and so is a difference of zero."""
    now, then = float(number_now), float(number)
    if number.isdigit() or not then:
        return now == then
    unit = min(last_digit(number_now), last_digit(number))
    return abs(now - then) <= max(1.001 * unit, 1e-4 * abs(then))


def test_a_figure_may_differ_by_one_unit_of_its_last_digit() -> None:
    assert same("3.427", "3.428") and same("1.31e-04", "1.30e-04") and same("5.541822", "5.541829")
    assert not same("3.426", "3.428") and not same("1.32e-04", "1.30e-04") and not same("5.5425", "5.5418")
    assert not same("5612049", "5612050") and not same("1.2e-07", "0.0")


def begins(table: Mapping[tuple[str, str], Any], path: Path, source: str) -> Any:
    """The table's entry for a cell, or None."""
    return next((v for (stem, begin), v in table.items() if path.stem == stem and source.startswith(begin)), None)


def test_the_notebooks_are_there() -> None:
    assert [p.name for p in NOTEBOOKS][:4] == [
        "00_tour.ipynb",
        "01_tide_curves.ipynb",
        "02_capacity_planning.ipynb",
        "03_execute.ipynb",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_was_committed_executed_and_is_thin(path: Path) -> None:
    cells = [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
    assert all(c["execution_count"] for c in cells), "run `make notebooks`"
    assert sum(bool(c["outputs"]) for c in cells) >= len(cells) / 2
    assert not [o for c in cells for o in c["outputs"] if o["output_type"] == "error" or o.get("name") == "stderr"]
    assert max(len("".join(c["source"]).splitlines()) for c in cells) <= 25, (
        "load, call, plot: the rest belongs in the package"
    )
    assert path.stat().st_size < 1_500_000


@pytest.mark.slow
@pytest.mark.timeout(1200)  # half a minute each where nothing else runs, two with --whole
@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=[pytest.mark.whole] * (p.stem in ASKED), id=p.stem) for p in NOTEBOOKS]
)
def test_a_notebook_runs(path: Path, whole: bool, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --whole, the cells of IN_SMALL ask for less. The kernel is `python` with what it would import."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setattr("sys.executable", python)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.delenv("COLUMNS", raising=False)
    notebook = nbformat.read(path, as_version=4)
    committed = json.loads(path.read_text(encoding="utf-8"))["cells"]
    for cell in notebook.cells:
        for long, short in ({} if whole else begins(IN_SMALL, path, cell.source) or {}).items():
            assert long in cell.source, f"IN_SMALL: {path.stem} has no {long!r}"
            cell.source = cell.source.replace(long, short)
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    ).execute()
    compared = 0
    for old, new in zip(committed, notebook.cells, strict=True):
        source = "".join(old["source"])
        tables = [OF_THIS_MACHINE] if whole else [OF_THIS_MACHINE, IN_SMALL]
        if old["cell_type"] != "code" or any(begins(table, path, source) is not None for table in tables):
            continue
        (words, numbers), (words_now, numbers_now) = figures(old), figures(new)
        assert words_now == words, f"run `make notebooks`: {source[:80]!r} puts out other text"
        others = [pair for pair in zip(numbers_now, numbers, strict=True) if not same(*pair)]
        assert others == [], f"run `make notebooks`: {source[:80]!r} puts out other figures"
        compared += len(numbers)
    assert compared > 10


def test_every_exception_is_a_cell_that_is_there() -> None:
    for stem, begin in [*OF_THIS_MACHINE, *IN_SMALL]:
        cells = json.loads((ROOT / "notebooks" / f"{stem}.ipynb").read_text(encoding="utf-8"))["cells"]
        assert any("".join(c["source"]).startswith(begin) for c in cells), f"{stem} has no cell {begin!r}"
