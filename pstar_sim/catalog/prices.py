"""Rent of machines, from prices.toml and a user's file over it."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

from msgspec import structs

from pstar_sim.schema.fields import Checked, Table, Text, between, says
from pstar_sim.schema.parsing import parse_toml, read_toml
from pstar_sim.schema.reading import read_table

VERSION = 1
"""Newest version of a user's file of prices. The key `version` at the head of a file gives the file's version; files of
the first edition lack the key."""


class Price(Table, frozen=True, kw_only=True):
    """The rent of a machine, in a user's file."""

    usd_per_hour: Annotated[
        float, between(1e-3, 1e6), says("list price of one node, on demand if nothing else is said")
    ]
    as_of: Annotated[Checked | None, says("when the source gives it")] = None
    offer: Annotated[Text | None, says("what is offered at that price")] = None
    source: Annotated[Text | None, says("where the price comes from; default: the file")] = None
    checked: Annotated[Checked | None, says("date when the figure was looked up")] = None

    @property
    def own(self) -> bool:
        return not isinstance(self, _Shipped)


class _Shipped(Price, frozen=True, kw_only=True):
    """The rent of a machine, in prices.toml."""

    as_of: Checked
    offer: Text
    source: Text
    checked: Checked


def load_prices(user_file: str | Path | None = None) -> dict[str, Price]:
    """By machine. Raises CatalogError for an entry that is wrong.

    user_file: entries [MACHINE] usd_per_hour = ..., other fields optional, over the shipped ones.
    """
    text = (files("pstar_sim.catalog") / "prices.toml").read_text(encoding="utf-8")
    shipped = parse_toml("prices.toml", text).items()
    prices: dict[str, Price] = {name: read_table(_Shipped, "prices.toml", name, raw) for name, raw in shipped}
    if user_file is not None:
        file = str(user_file)
        for name, raw in read_toml(Path(user_file), "price file", VERSION).items():
            price = read_table(Price, file, name, raw)
            prices[name] = structs.replace(price, source=price.source or file)
    return prices
