"""The page of each format, made of the types that its files are read by."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pstar_sim.catalog.attention import ATTENTION
from pstar_sim.catalog.overrides import override_paths
from pstar_sim.report.formats import FORMATS, format_page

PAGES = Path(__file__).resolve().parents[2] / "docs" / "reference" / "formats"


def lines(name: str) -> list[list[str]]:
    """The cells of each line of the format's tables, the key first."""
    table = [line for line in format_page(name).splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table]


def rows(name: str) -> dict[str, list[str]]:
    """Key -> the other cells of its first line."""
    found: dict[str, list[str]] = {}
    for key, *cells in lines(name):
        found.setdefault(key.strip("`"), cells)
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_every_key_has_a_meaning_and_every_format_a_version(name: str) -> None:
    table = lines(name)
    assert [cells[0] for cells in table if not (cells[3] if len(cells) == 5 else all(cells))] == []
    version = {"trace": 3, "plan": 2}.get(name, 1)
    assert name == "options" or re.search(rf"^Version {version}, said by ", format_page(name), re.MULTILINE)


def test_a_key_is_shown_as_it_is_declared() -> None:
    assert rows("machine")["memory_gb"] == [
        "number from 0.001 to 100000",
        "GB",
        "what the driver gives to a process",
        "required",
    ]
    assert rows("grid")["batch"][0] == "whole number from 1 to 1e+09"
    kernels = list(ATTENTION)
    words = f"{', '.join(kernels[:-1])} or math"
    assert rows("grid")["attention"] == [f"one of {', '.join(kernels)}", "", words, '`"flash"`']
    assert rows("plan")["gpu_budget_bytes"][1:] == ["bytes", "what one rank may take of its GPU", "required"]
    assert rows("plan")["nvme_budget_bytes"][3] == "`0`"
    assert rows("plan")["numel"][0] == "whole number of at least 0 (64 bits)"
    assert rows("options")["streams"][0] == "on \\| off"
    assert set(override_paths()) <= set(rows("grid"))


def test_the_documentation_has_a_page_of_every_format() -> None:
    """A hook of `make docs` (.ci/docs_hooks.py) puts the reference where a page asks for it."""
    asked = {path.stem: path.read_text(encoding="utf-8") for path in PAGES.glob("*.md")}
    assert set(asked) == set(FORMATS)
    for name, text in asked.items():
        assert text.splitlines()[-1] == f"<!-- format: {name} -->"
