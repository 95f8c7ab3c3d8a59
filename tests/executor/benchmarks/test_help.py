"""Every benchmark answers `--help` and measures nothing then."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"
FILES = sorted(FOLDER.glob("[a-z]*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_benchmark_answers_help(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", [str(file), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(file), run_name="__main__")
    said = capsys.readouterr().out
    assert not ended.value.code and said.startswith("usage: ") and "--help" in said
