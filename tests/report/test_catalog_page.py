"""The catalog's pages: a row for each figure of each entry, each with one of four words."""

from __future__ import annotations

from pathlib import Path

import pytest

from pstar_sim.catalog.loader import load_catalog
from pstar_sim.report.catalog_page import KINDS, PAGES, catalog_page, known_figures

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "catalog.md"


@pytest.mark.parametrize("table", PAGES)
def test_each_figure_says_how_it_is_known(table: str) -> None:
    figures = known_figures(table)
    if table != "generations":
        assert set(figures) == set(getattr(load_catalog(), table))
    for name, rows in figures.items():
        assert rows, name
        for figure, _value, known, source in rows:
            assert known in KINDS, (name, figure)
            assert len(source) > 10, (name, figure)
    assert catalog_page(table).count("\n") == 1 + sum(map(len, figures.values()))
    assert f"<!-- catalog: {table} -->" in PAGE.read_text().splitlines()


def test_words_by_hand() -> None:
    known = {figure: kind for figure, _, kind, _ in known_figures("gpus")["l40s"]}
    assert (known["memory_gb"], known["bf16_tflops"], known["context_gb"]) == ("datasheet", "datasheet", "assumed")
    assert {kind for _, _, kind, _ in known_figures("gpus")["m4-max"]} == {"assumed"}, "its source says: an estimate"
    host = {figure: kind for figure, _, kind, _ in known_figures("hosts")["wsl2-64gb"]}
    assert (host["pinned_gb"], host["cores"], host["reserved_gb"]) == ("measured", "datasheet", "assumed")


def test_a_table_that_is_not_there() -> None:
    with pytest.raises(KeyError):
        known_figures("machines")
