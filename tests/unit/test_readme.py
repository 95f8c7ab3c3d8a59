"""What the README shows is what happens: its Python runs as written, its terminal sessions print what they claim."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from pstar_sim.cli import main

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
SESSIONS = [text for language, text in BLOCKS if language == "console"]


def test_the_readme_has_both() -> None:
    assert PYTHON and SESSIONS


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_python_runs_as_written(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    matplotlib.use("Agg")
    (tmp_path / "traces").symlink_to(ROOT / "traces")
    monkeypatch.chdir(tmp_path)
    exec(compile(PYTHON[number], f"README.md, python block {number}", "exec"), {"__name__": "readme"})
    from matplotlib import pyplot

    pyplot.close("all")


@pytest.mark.parametrize("number", range(len(SESSIONS)))
def test_a_terminal_session_prints_what_it_claims(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands begin with "$ "; the lines up to the next one are their output, where a last "..." skips the rest."""
    (tmp_path / "traces").symlink_to(ROOT / "traces")
    monkeypatch.chdir(tmp_path)
    for command, claimed in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", SESSIONS[number], re.MULTILINE):
        words = shlex.split(command)
        assert words[0] == "pstar", "a terminal session of the README shows pstar"
        assert main(words[1:]) == 0
        printed = [line.rstrip() for line in capsys.readouterr().out.strip().splitlines()]
        shown = [line.rstrip() for line in claimed.strip().splitlines()]
        if shown and shown[-1] == "...":
            shown.pop()
            printed = printed[: len(shown)]
        assert printed == shown


def test_the_loop_contract_is_that_of_the_executor() -> None:
    docstring = ast.get_docstring(ast.parse((ROOT / "executor" / "contract.py").read_text(encoding="utf-8"))) or ""
    table = "\n".join(line for line in docstring.splitlines() if line.startswith("|"))
    assert table and f"<!-- contract -->\n\n{table}\n" in README, "run .ci/refresh_readme.py"


def test_every_link_of_the_readme_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert links and not missing
