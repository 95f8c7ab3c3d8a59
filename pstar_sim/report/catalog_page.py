"""The catalog as pages: every figure of every entry, and whether it is measured, fitted, from a datasheet or assumed.

[Note: how a figure is known] A figure in an entry's `calibrated` table was measured. Sizes, peaks and line rates come
from a datasheet. Shares of peaks that a machine reaches, latencies and reserved memory are assumed, and so is every
figure of an entry whose source calls it an estimate or a placeholder. Figures fitted to published runs are in files of
their own (efficiency.toml, frameworks.toml, generations.toml), which say how each figure is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pstar_sim.catalog.efficiency import efficiency_tables
from pstar_sim.catalog.entries import TABLES, Entry, FrameworkEntry
from pstar_sim.catalog.generations import generations
from pstar_sim.catalog.loader import load_catalog

__all__ = ["catalog_page", "known_figures"]

PAGES = ("gpus", "links", "hosts", "disks", "generations", "efficiency", "frameworks")

_DATASHEET = {
    "memory_gb", "hbm_gb_per_s", "fp32_tflops", "fp16_tflops", "bf16_tflops", "sms", "h2d_gb_per_s", "d2h_gb_per_s",
    "dram_peak_gb_per_s", "cores", "size_gb", "read_gb_per_s", "write_gb_per_s", "life_tb",
}  # fmt: skip
_MEASURED = {"pinned_gb"}
_GUESSED = ("an estimate", "placeholder", "from memory")


def catalog_page(table: str) -> str:
    """Returns a table of the catalog in Markdown: a row per figure with its value, how it is known, and its source.

    table: one of PAGES.

    Raises KeyError for another name.
    """
    lines = ["| entry | figure | value | known | source |", "|---|---|---|---|---|"]
    for name, figures in known_figures(table).items():
        for i, (figure, value, known, source) in enumerate(figures):
            first = i == 0 or figures[i - 1][3] != source
            lines.append(f"| `{name}` | `{figure}` | {value} | {known} | {source if first else ''} |")
    return "\n".join(lines)


def known_figures(table: str) -> dict[str, list[tuple[str, str, str, str]]]:
    """Returns the figures of each entry of a table: (figure, its value, how it is known, its source). How a figure is
    known is one of `machine.KNOWN`, by [Note: how a figure is known]."""
    if table == "generations":
        return {
            name: [(figure, _text(getattr(g, figure)), known, _cell(g.source)) for figure, known in g.known.items()]
            for name, g in generations().items()
        }
    if table == "efficiency":
        return {known: list(_of_table(raw, "", known)) for known, raw in efficiency_tables().items()}
    return {name: list(_of_entry(entry)) for name, entry in _entries(table).items()}


def _entries(table: str) -> Mapping[str, Entry[Any]]:
    if table not in PAGES or table not in TABLES:
        raise KeyError(table)
    entries: Mapping[str, Entry[Any]] = getattr(load_catalog(), table)
    return entries


def _of_entry(entry: Entry[Any]) -> Iterator[tuple[str, str, str, str]]:
    raw = entry.raw
    assert isinstance(raw, dict)
    yield from _of_table(raw, "", raw["known"] if isinstance(entry.values, FrameworkEntry) else "")
    for below in ("calibrated", "products"):
        if isinstance(raw.get(below), dict):
            yield from _of_table(raw[below], f"{below}.")


def _of_table(raw: Mapping[str, Any], prefix: str, known: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yields the rows of a table.

    known: how all its figures are known, where the table says so.
    """
    source = str(raw.get("source", ""))
    for figure, value in raw.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield prefix + figure, _text(value), known or _kind(figure, prefix, source), _cell(source)


def _kind(figure: str, prefix: str, source: str) -> str:
    if prefix == "calibrated." or (figure in _MEASURED and not prefix):
        return "measured"
    if figure not in _DATASHEET or any(word in source for word in _GUESSED):
        return "assumed"
    return "datasheet"


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _cell(source: str) -> str:
    return source.replace("|", "/")
