"""The catalog's pages: a row for each figure of each entry, each with one of four words."""

from __future__ import annotations

from pathlib import Path

import pytest

from pstar_sim.catalog.loader import load_catalog
from pstar_sim.catalog.machine import KNOWN
from pstar_sim.report.catalog_page import PAGES, catalog_page, known_figures

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "catalog.md"


@pytest.mark.parametrize("table", PAGES)
def test_each_figure_says_how_it_is_known(table: str) -> None:
    figures = known_figures(table)
    if table not in ("efficiency", "generations"):
        assert set(figures) == set(getattr(load_catalog(), table))
    for name, rows in figures.items():
        assert rows, name
        for figure, _value, known, source in rows:
            assert known in KNOWN, (name, figure)
            assert len(source) > 10, (name, figure)
    assert catalog_page(table).count("\n") == 1 + sum(map(len, figures.values()))
    assert f"<!-- catalog: {table} -->" in PAGE.read_text().splitlines()


def test_words_by_hand() -> None:
    known = {figure: kind for figure, _, kind, _ in known_figures("gpus")["l40s"]}
    assert (known["memory_gb"], known["bf16_tflops"]) == ("measured", "datasheet")
    assert {kind for _, _, kind, _ in known_figures("gpus")["m4-max"]} == {"assumed"}, "its source says: an estimate"
    host = {figure: kind for figure, _, kind, _ in known_figures("hosts")["wsl2-64gb"]}
    assert (host["pinned_gb"], host["cores"], host["reserved_gb"]) == ("measured", "datasheet", "assumed")


def test_what_was_set_by_hand_is_not_called_fitted() -> None:
    words = {figure: known for rows in known_figures("efficiency").values() for figure, _, known, _ in rows}
    assert (words["hbm"], words["launch_us"]) == ("assumed", "assumed")
    assert {figure for figure, known in words.items() if known == "fitted"} == {
        "matmul", "adam_dram", "adam_gparams_core", "adam_found_gparams_per_s", "pageable_gb_per_s",
    }  # fmt: skip
    assert {known for rows in known_figures("frameworks").values() for _, _, known, _ in rows} == {"assumed"}
    h100 = {figure: (known, source) for figure, _, known, source in known_figures("generations")["h100"]}
    assert all(known == "assumed" for known, _ in h100.values())
    assert "after errors of tested rows on H100 had been seen" in h100["plateau"][1]


def test_a_table_that_is_not_there() -> None:
    with pytest.raises(KeyError):
        known_figures("machines")
