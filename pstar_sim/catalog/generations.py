"""How a GPU generation's matrix products depend on their shape, as read from generations.toml.

Cards of one differ only in peaks and SMs, and take from it products by shape ([Note: seconds of a product]), the
plateau of large products in 16 bit, and the rate of fused attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Annotated

from msgspec import structs

from pstar_sim.catalog.figures import Known, Latency, Origin, Share
from pstar_sim.catalog.product_shape import Extent, ProductShape
from pstar_sim.errors import CatalogError
from pstar_sim.schema.fields import Text, between, says
from pstar_sim.schema.parsing import parse_toml
from pstar_sim.schema.reading import read_table

FIGURES = ("tile", "tile_fp32", "plateau", "wave_loss", "depth", "memory", "kernel_us", "flash")


class Generation(Origin, frozen=True, kw_only=True):
    """A table of generations.toml with figures of its own."""

    tile: Annotated[tuple[Extent, Extent], says("rows and columns of a tile of the result")]
    tile_fp32: Annotated[tuple[Extent, Extent], says("those of a product in fp32")]
    plateau: Annotated[Share, says("share of the 16-bit peak that large products run at")]
    wave_loss: Annotated[float, between(0, 1), says("share of the last wave's idle time that is lost")]
    depth: Annotated[float, between(0, 1e6), says("terms of a dot product that a tile's beginning and end take")]
    memory: Annotated[Share, says("share of the memory's peak rate at which factors and result move")]
    kernel_us: Annotated[Latency, says("beginning and end of a kernel")]
    flash: Annotated[Share, says("share of the rate of large products that fused attention reaches")]
    known: Annotated[Mapping[str, Known], says("how each figure is known")]
    attention: Annotated[Text, says("generation of attention.toml that has the rates of its attention kernels")]

    @property
    def assumed(self) -> bool:
        """All products depend on the plateau in proportion."""
        return self.known["plateau"] == "assumed"

    def shape(self, sms: int, hbm_peak_bytes_per_s: float) -> ProductShape:
        """With `sms` streaming multiprocessors and this datasheet bandwidth."""
        return ProductShape(
            sms=sms,
            tile=self.tile,
            tile_fp32=self.tile_fp32,
            wave_loss=self.wave_loss,
            depth=self.depth,
            bytes_per_s=self.memory * hbm_peak_bytes_per_s,
            kernel_s=self.kernel_us * 1e-6,
            flash=self.flash,
            generation=self.attention,
        )


class _Like(Origin, frozen=True, kw_only=True):
    """Figures assumed to be another generation's."""

    like: Annotated[Text, says("name of the other generation")]
    plateau: Annotated[Share | None, says("share of the 16-bit peak that large products run at")] = None
    flash: Annotated[Share | None, says("share of the rate of large products that fused attention reaches")] = None
    attention: Annotated[Text | None, says("generation of attention.toml, if another")] = None


def read_generations(file: str, text: str) -> dict[str, Generation]:
    """file: like generations.toml. Raises CatalogError for a field missing or wrong, and a `like` that names no
    generation with figures of its own."""
    found: dict[str, Generation] = {}
    raws = parse_toml(file, text)
    alike = [name for name, raw in raws.items() if isinstance(raw, dict) and "like" in raw]
    for name in (name for name in raws if name not in alike):
        generation = found[name] = read_table(Generation, file, name, raws[name])
        if set(generation.known) != set(FIGURES):
            raise CatalogError(
                f"{file}: [{name}] known names {', '.join(generation.known)}; it must name {', '.join(FIGURES)}"
            )
    for name in alike:
        other = read_table(_Like, file, name, raws[name])
        if other.like not in found:
            raise CatalogError(f"{file}: [{name}] like = {other.like!r}; must be one of {', '.join(found)}")
        own = {key: value for key, value in structs.asdict(other).items() if key != "like" and value is not None}
        found[name] = structs.replace(found[other.like], known=dict.fromkeys(FIGURES, "assumed"), **own)
    return found


@cache
def generations() -> Mapping[str, Generation]:
    """Shipped with the project."""
    name = "generations.toml"
    return read_generations(name, (files("pstar_sim.catalog") / name).read_text(encoding="utf-8"))
