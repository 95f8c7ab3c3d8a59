"""Generations of GPUs: how the rate of a matrix product depends on its shape, as read from generations.toml.

Cards of one generation differ only in datasheet figures: peaks and the number of SMs. A card names its generation and
takes three figures from it: products by shape ([Note: seconds of a product]), the plateau as the rate of large products
in 16 bit, and the rate of fused attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Annotated

from pstar_sim.catalog.figures import Efficiency, Known
from pstar_sim.catalog.product_shape import Extent, ProductShape
from pstar_sim.errors import CatalogError
from pstar_sim.schema.fields import Checked, Table, Text, between, says
from pstar_sim.schema.parsing import parse_toml
from pstar_sim.schema.reading import read_table

__all__ = ["Generation", "generations", "read_generations"]


class GenerationEntry(Table, frozen=True, kw_only=True):
    """A table of generations.toml with figures of its own."""

    tile: Annotated[tuple[Extent, Extent], says("rows and columns of a tile of the result")]
    plateau: Annotated[Efficiency, says("share of the 16-bit peak that large products run at")]
    wave_loss: Annotated[float, between(0, 1), says("share of the last wave's idle time that is lost")]
    depth: Annotated[float, between(0, 1e6), says("terms of a dot product that a tile's beginning and end take")]
    memory: Annotated[Efficiency, says("share of the memory's peak rate at which factors and result move")]
    kernel_us: Annotated[float, between(0, 1e5), says("beginning and end of a kernel")]
    flash: Annotated[Efficiency, says("share of the rate of large products that fused attention reaches")]
    known: Annotated[Mapping[str, Known], says("how each figure is known")]
    source: Annotated[Text, says("where the figures come from")]
    checked: Annotated[Checked, says("date when the figures were looked up")]


class LikeEntry(Table, frozen=True, kw_only=True):
    """A table of generations.toml whose figures are assumed to be those of another generation."""

    like: Annotated[Text, says("name of the other generation")]
    plateau: Annotated[Efficiency | None, says("share of the 16-bit peak that large products run at")] = None
    flash: Annotated[Efficiency | None, says("share of the rate of large products that fused attention reaches")] = None
    source: Annotated[Text, says("why")]
    checked: Annotated[Checked, says("date when it was looked up")]


FIGURES = ("tile", "plateau", "wave_loss", "depth", "memory", "kernel_us", "flash")


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Figures of a generation, from generations.toml.

    known: figure -> "measured", "fitted", "datasheet" or "assumed".
    """

    name: str
    tile: tuple[int, int]
    plateau: float
    wave_loss: float
    depth: float
    memory: float
    kernel_us: float
    flash: float
    known: Mapping[str, str]
    source: str

    @property
    def assumed(self) -> bool:
        """Whether the plateau is assumed. All products depend on it in proportion."""
        return self.known["plateau"] == "assumed"

    def shape(self, sms: int, hbm_peak_bytes_per_s: float) -> ProductShape:
        """Returns the products of a card with `sms` streaming multiprocessors and this datasheet bandwidth."""
        return ProductShape(
            sms=sms,
            tile=self.tile,
            wave_loss=self.wave_loss,
            depth=self.depth,
            bytes_per_s=self.memory * hbm_peak_bytes_per_s,
            kernel_s=self.kernel_us * 1e-6,
            flash=self.flash,
        )


def read_generations(file: str, text: str) -> dict[str, Generation]:
    """Returns the generations of a file like generations.toml, by name. Raises CatalogError for a field that is missing
    or wrong, and for a `like` that does not name a generation with figures of its own.
    """
    found: dict[str, Generation] = {}
    raws = parse_toml(file, text)
    alike = {name for name, raw in raws.items() if isinstance(raw, dict) and "like" in raw}
    for name, raw in raws.items():
        if name not in alike:
            e = read_table(GenerationEntry, file, name, raw)
            if set(e.known) != set(FIGURES):
                raise CatalogError(
                    f"{file}: [{name}] known names {', '.join(e.known)}; it must name {', '.join(FIGURES)}"
                )
            figures = {figure: getattr(e, figure) for figure in FIGURES}
            found[name] = Generation(name=name, **figures, known=e.known, source=f"{e.source} (checked {e.checked})")
    for name, raw in raws.items():
        if name in alike:
            other = read_table(LikeEntry, file, name, raw)
            if other.like not in found:
                raise CatalogError(f"{file}: [{name}] like = {other.like!r}; must be one of {', '.join(found)}")
            source = f"{other.source} (checked {other.checked})"
            base = found[other.like]
            own = {figure: value for figure in ("plateau", "flash") if (value := getattr(other, figure)) is not None}
            known = dict.fromkeys(FIGURES, "assumed")
            found[name] = replace(base, name=name, known=known, source=source, **own)
    return found


@cache
def generations() -> Mapping[str, Generation]:
    """Returns the generations shipped with the project."""
    name = "generations.toml"
    return read_generations(name, (files("pstar_sim.catalog") / name).read_text(encoding="utf-8"))
