"""Prices: rent of machines, from prices.toml and a user's file over it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from pstar_sim.schema.fields import Checked, Table, Text, between, says
from pstar_sim.schema.parsing import parse_toml, read_toml
from pstar_sim.schema.reading import read_table

__all__ = ["Price", "load_prices"]

VERSION = 1
"""Newest version of a user's file of prices. The key `version` at the head of a file gives the file's version; files of
the first edition lack the key."""


class OwnPrice(Table, frozen=True, kw_only=True):
    """The rent of a machine, in a user's file."""

    usd_per_hour: Annotated[
        float, between(1e-3, 1e6), says("list price of one node, on demand if nothing else is said")
    ]
    as_of: Annotated[Checked | None, says("when the source gives it")] = None
    offer: Annotated[Text | None, says("what is offered at that price")] = None
    source: Annotated[Text | None, says("where the price comes from; default: the file")] = None
    checked: Annotated[Checked | None, says("date when the figure was looked up")] = None


class ShippedPrice(OwnPrice, frozen=True, kw_only=True):
    """The rent of a machine, in prices.toml."""

    as_of: Checked
    offer: Text
    source: Text
    checked: Checked


@dataclass(frozen=True, kw_only=True)
class Price:
    """USD per hour of one node.

    as_of: date of the price by its source; None where a user's file does not say.
    own: whether the price is from a user's file.
    """

    machine: str
    usd_per_hour: float
    as_of: date | None
    offer: str
    source: str
    own: bool


def load_prices(user_file: str | Path | None = None) -> dict[str, Price]:
    """Returns the price by machine. Raises CatalogError for an entry that is wrong.

    user_file: entries [MACHINE] usd_per_hour = ... that replace the shipped entries; other fields are optional.
    """
    text = (files("pstar_sim.catalog") / "prices.toml").read_text(encoding="utf-8")
    prices = {
        name: _price("prices.toml", name, read_table(ShippedPrice, "prices.toml", name, raw), own=False)
        for name, raw in parse_toml("prices.toml", text).items()
    }
    if user_file is not None:
        file = str(user_file)
        for name, raw in read_toml(Path(user_file), "price file", VERSION).items():
            prices[name] = _price(file, name, read_table(OwnPrice, file, name, raw), own=True)
    return prices


def _price(file: str, name: str, given: OwnPrice, *, own: bool) -> Price:
    return Price(
        machine=name,
        usd_per_hour=given.usd_per_hour,
        as_of=given.as_of,
        offer=given.offer or "",
        source=given.source or file,
        own=own,
    )
