"""Generations of GPUs: how the rate of a matrix product depends on its shape, as read from generations.toml.

Cards of one generation differ in datasheet figures alone. A machine whose entry says `rates = "curves"` takes the
figures of its GPUs' generation: products by shape ([Note: seconds of a product]), the plateau as the rate of large
products in 16 bit, and everything else by the efficiency model ([Note: fitted rates]).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Annotated, Literal

from pstar_sim.catalog.efficiency import Efficiency
from pstar_sim.catalog.machine import Gpu
from pstar_sim.catalog.product_shape import ProductShape
from pstar_sim.errors import CatalogError
from pstar_sim.schema.fields import Checked, Table, Text, between, says
from pstar_sim.schema.parsing import parse_toml
from pstar_sim.schema.reading import read_table

__all__ = ["Generation", "generations", "read_generations"]

_Known = Literal["measured", "fitted", "datasheet", "assumed"]
_Share = Annotated[float, between(0.01, 1)]
_Extent = Annotated[int, between(1, 100_000)]


class GenerationEntry(Table, frozen=True, kw_only=True):
    """A table of generations.toml."""

    sms: Annotated[int, between(1, 100_000), says("streaming multiprocessors")]
    tile: Annotated[tuple[_Extent, _Extent], says("rows and columns of a tile of the result")]
    plateau: Annotated[_Share, says("share of the 16-bit peak that large products run at")]
    wave_loss: Annotated[float, between(0, 1), says("share of the last wave's idle time that is lost")]
    depth: Annotated[float, between(0, 1e6), says("terms of a dot product that a tile's beginning and end take")]
    memory: Annotated[_Share, says("share of the memory's peak rate at which factors and result move")]
    kernel_us: Annotated[float, between(0, 1e5), says("beginning and end of a kernel")]
    known: Annotated[Mapping[str, _Known], says("how each figure is known")]
    source: Annotated[Text, says("where the figures come from")]
    checked: Annotated[Checked, says("date when the figures were looked up")]


OF_KERNELS = ("plateau", "wave_loss", "depth", "memory", "kernel_us")
FIGURES = ("sms", "tile", *OF_KERNELS)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Figures of a generation, as generations.toml has them.

    known: figure -> "measured", "fitted", "datasheet" or "assumed".
    """

    name: str
    sms: int
    tile: tuple[int, int]
    plateau: float
    wave_loss: float
    depth: float
    memory: float
    kernel_us: float
    known: Mapping[str, str]
    source: str

    def gpu(self, gpu: Gpu, hbm_peak_bytes_per_s: float, e: Efficiency) -> Gpu:
        """`gpu`, whose rates are those of the efficiency model `e`, with products by shape."""
        shape = ProductShape(
            sms=self.sms,
            tile=self.tile,
            wave_loss=self.wave_loss,
            depth=self.depth,
            bytes_per_s=self.memory * hbm_peak_bytes_per_s,
            kernel_s=self.kernel_us * 1e-6,
            assumed=any(self.known[figure] == "assumed" for figure in OF_KERNELS),
        )
        rates = {
            dtype: rate if dtype == "fp32" else rate / e.matmul * self.plateau
            for dtype, rate in gpu.flops_per_s.items()
        }
        return replace(gpu, flops_per_s=rates, products=shape, source=f"{gpu.source}; products: {self.source}")


def read_generations(file: str, text: str) -> dict[str, Generation]:
    """The generations of a file like generations.toml by name. Raises CatalogError for a field that is missing or
    wrong."""
    found = {}
    for name, raw in parse_toml(file, text).items():
        e = read_table(GenerationEntry, file, name, raw)
        if set(e.known) != set(FIGURES):
            raise CatalogError(f"{file}: [{name}] known names {', '.join(e.known)}; it must name {', '.join(FIGURES)}")
        figures = {figure: getattr(e, figure) for figure in FIGURES}
        found[name] = Generation(name=name, **figures, known=e.known, source=f"{e.source} (checked {e.checked})")
    return found


@cache
def generations() -> Mapping[str, Generation]:
    """The generations shipped with the project."""
    name = "generations.toml"
    return read_generations(name, (files("pstar_sim.catalog") / name).read_text(encoding="utf-8"))
