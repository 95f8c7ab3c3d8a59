"""The notebooks run from top to bottom, were committed with outputs, and stay thin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


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
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    ).execute()
