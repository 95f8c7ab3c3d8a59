"""Prices: what a machine costs to rent, from prices.toml and a user's file over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from importlib.resources import files
from pathlib import Path

from pstar_sim.catalog.fields import Date, Entry, Field, Number, Text, parse_toml, read_toml

__all__ = ["Price", "load_prices"]

_USD = Number(1e-3, 1e6)
_SHIPPED: dict[str, Field] = {
    "usd_per_hour": _USD,
    "as_of": Date(),
    "offer": Text(),
    "source": Text(),
    "checked": Date(),
}
_OWN: dict[str, Field] = {
    "usd_per_hour": _USD,
    "as_of": Date(required=False),
    "offer": Text(required=False),
    "source": Text(required=False),
    "checked": Date(required=False),
}


@dataclass(frozen=True, kw_only=True)
class Price:
    """USD per hour of one node. as_of: when its source gives it, None where a user's file does not say. own: from a
    user's file."""

    machine: str
    usd_per_hour: float
    as_of: date | None
    offer: str
    source: str
    own: bool


def load_prices(user_file: str | Path | None = None) -> dict[str, Price]:
    """Price by machine. user_file: entries [MACHINE] usd_per_hour = ... that come before the shipped ones; only that
    field is needed. Raises CatalogError for an entry that is wrong."""
    text = (files("pstar_sim.catalog") / "prices.toml").read_text(encoding="utf-8")
    prices = {name: _price(Entry.read("prices.toml", name, raw, _SHIPPED), own=False) for name, raw in _entries(text)}
    if user_file is not None:
        file = str(user_file)
        for name, raw in read_toml(Path(user_file)).items():
            prices[name] = _price(Entry.read(file, name, raw, _OWN), own=True)
    return prices


def _entries(text: str) -> list[tuple[str, object]]:
    content: Mapping[str, object] = parse_toml("prices.toml", text)
    return list(content.items())


def _price(e: Entry, *, own: bool) -> Price:
    when = e.values.get("as_of")
    return Price(
        machine=e.name,
        usd_per_hour=e.number("usd_per_hour"),
        as_of=when if isinstance(when, date) else None,
        offer=e.text("offer"),
        source=e.text("source", e.file),
        own=own,
    )
