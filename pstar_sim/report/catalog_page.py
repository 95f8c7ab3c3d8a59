"""The catalog as pages: every figure, and how it is known.

[Note: how a figure is known] Figures of `calibrated` tables were measured, as a card's memory; other sizes, peaks and
line rates are a datasheet's. Shares of peaks, latencies and reserved memory are assumed, as is all of an entry whose
source calls it an estimate or a placeholder. Fitted figures are in files of their own (efficiency.toml,
frameworks.toml, generations.toml), which say how.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pstar_sim.catalog.efficiency import efficiency_tables
from pstar_sim.catalog.entries import TABLES, Entry
from pstar_sim.catalog.figures import keys_of
from pstar_sim.catalog.generations import generations
from pstar_sim.catalog.loader import load_catalog
from pstar_sim.catalog.machine import Gpu, Host, Link, Nvme

PAGES = ("gpus", "links", "hosts", "disks", "generations", "efficiency", "frameworks")

_PARTS: dict[str, type] = {"gpus": Gpu, "links": Link, "hosts": Host, "disks": Nvme}
_KNOWN = {table: {key.name: key.known for key in keys_of(part)} for table, part in _PARTS.items()}
"""Table -> key of a shipped entry -> how its figure is known, unless the entry's source says otherwise."""
_GUESSED = ("an estimate", "placeholder", "from memory")


def catalog_page(table: str) -> str:
    """Markdown: figure, value, how it is known, source.

    Raises KeyError for another name.
    """
    lines = ["| entry | figure | value | known | source |", "|---|---|---|---|---|"]
    for name, figures in known_figures(table).items():
        for i, (figure, value, known, source) in enumerate(figures):
            first = i == 0 or figures[i - 1][3] != source
            lines.append(f"| `{name}` | `{figure}` | {value} | {known} | {source if first else ''} |")
    return "\n".join(lines)


def known_figures(table: str) -> dict[str, list[tuple[str, str, str, str]]]:
    """Entry -> (figure, value, how it is known (`machine.KNOWN`), source)."""
    if table == "generations":
        return {
            name: [
                (figure, _text(getattr(g, figure)), known, _cell(f"{g.source} (checked {g.checked})"))
                for figure, known in g.known.items()
            ]
            for name, g in generations().items()
        }
    if table == "efficiency":
        return {known: list(_of_table(raw, "", known)) for known, raw in efficiency_tables().items()}
    return {name: list(_of_entry(table, entry)) for name, entry in _entries(table).items()}


def _entries(table: str) -> Mapping[str, Entry[Any]]:
    if table not in PAGES or table not in TABLES:
        raise KeyError(table)
    entries: Mapping[str, Entry[Any]] = getattr(load_catalog(), table)
    return entries


def _of_entry(table: str, entry: Entry[Any]) -> Iterator[tuple[str, str, str, str]]:
    raw = entry.raw
    assert isinstance(raw, dict)
    yield from _of_table(raw, "", raw["known"] if not hasattr(entry.values, "calibrated") else "", table)
    for below in ("calibrated", "products"):
        if isinstance(raw.get(below), dict):
            yield from _of_table(raw[below], f"{below}.")


def _of_table(
    raw: Mapping[str, Any], prefix: str, known: str = "", table: str = ""
) -> Iterator[tuple[str, str, str, str]]:
    source = str(raw.get("source", ""))
    for figure, value in raw.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield prefix + figure, _text(value), known or _kind(table, figure, prefix, source), _cell(source)


def _kind(table: str, figure: str, prefix: str, source: str) -> str:
    if prefix:
        return "measured" if prefix == "calibrated." else "assumed"
    return "assumed" if any(word in source for word in _GUESSED) else _KNOWN[table].get(figure, "assumed")


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}" if isinstance(value, float) else str(value)


def _cell(source: str) -> str:
    return source.replace("|", "/")
