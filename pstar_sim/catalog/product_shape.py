"""Seconds of a matrix product by its shape, from a few figures of a GPU.

[Note: seconds of a product] A product of m x k by k x n is cut into tiles of the result, of which each streaming
multiprocessor (SM) computes one at a time. They go in waves, the last of which leaves SMs idle, and begin and end with
work that does not depend on k. So

    waves      = batches * ceil(m / tile rows) * ceil(n / tile columns) / SMs
    arithmetic = flops / rate * (1 + wave_loss * (ceil(waves) / waves - 1)) * (1 + depth / k)
    memory     = bytes / bytes_per_s
    seconds    = (arithmetic ** 4 + memory ** 4) ** (1 / 4) + kernel_s

where `rate` is for large products (`Gpu.flops_per_s`); the longer of arithmetic and memory decides, with its corner
rounded by the fourth power.

benchmarks/gemm.py fits the figures to measurements and gives errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Annotated

from pstar_sim.arguments import whole
from pstar_sim.catalog.attention import AttentionCall, needed_flops
from pstar_sim.catalog.attention_rates import attention_rate
from pstar_sim.catalog.figures import Figure, Key, Known, Latency, Rate, Share, check_figures
from pstar_sim.errors import CatalogError
from pstar_sim.schema.fields import between

Extent = Annotated[int, between(1, 100_000)]


@dataclass(frozen=True, kw_only=True)
class ProductShape:
    """Figures of one GPU by [Note: seconds of a product].

    wave_loss: share of the idle time of the last wave that is lost, from 0 to 1: kernels that split tiles lose less.
    depth: terms of a dot product (k) that take as long as the beginning and the end of a tile.
    flash: of the kernel that torch takes, both passes together, without a mask, on long sequences and wide heads.
    generation: whose attention kernels relate to each other as this card's do; "" if that is not known.
    """

    sms: Annotated[int, Figure("sms", Extent, "streaming multiprocessors")]
    tile: Annotated[
        tuple[int, int],
        Figure("tile", tuple[Extent, Extent], "rows and columns of a tile of the result", worst=partial(max, key=prod)),
    ]
    tile_fp32: Annotated[
        tuple[int, int] | None,
        Figure(
            "tile_fp32",
            tuple[Extent, Extent],
            "those of a product in fp32; left out: the same",
            None,
            worst=partial(max, key=prod),
        ),
    ] = None
    wave_loss: Annotated[
        float,
        Figure(
            "wave_loss", Annotated[float, between(0, 1)], "share of the last wave's idle time that is lost", worst=max
        ),
    ]
    depth: Annotated[
        float,
        Figure(
            "depth",
            Annotated[float, between(0, 1e6)],
            "terms of a dot product that a tile's beginning and end take",
            worst=max,
        ),
    ]
    bytes_per_s: Annotated[
        float, Figure("gb_per_s", Rate, "rate at which factors and result move through the card's memory")
    ]
    kernel_s: Annotated[float, Figure("kernel_us", Latency, "beginning and end of a kernel")]
    flash: Annotated[
        float,
        Figure("flash", Share, "share of the rate of large products that fused attention reaches", 1.0),
        Key("known", Known, "how the figures are known", "measured"),
    ] = 1.0
    generation: str = ""

    def __post_init__(self) -> None:
        check_figures("products", self)
        for kind, tile in (("tile", self.tile), ("tile_fp32", self.tile_fp32 or self.tile)):
            for name, count in zip(("rows", "columns"), tile):
                whole(f"products: {kind} {name}", count, error=CatalogError)
        if self.wave_loss > 1:
            raise CatalogError(f"products: wave_loss = {self.wave_loss!r}: it must be a share from 0 to 1")

    def seconds(self, product: Sequence[int], flops_per_s: float, moved_bytes: float, *, fp32: bool = False) -> float:
        """product: (batches, m, k, n).

        flops_per_s: of large products.
        fp32: whether the factors are, instead of in 16 bit.
        """
        batches, m, k, n = product
        rows, columns = (self.tile_fp32 if fp32 else None) or self.tile
        waves = batches * -(-m // rows) * -(-n // columns) / self.sms
        loss = 1 + self.wave_loss * (math.ceil(waves) / waves - 1)
        arithmetic_s = 2 * batches * m * k * n / flops_per_s * loss * (1 + self.depth / k)
        memory_s = moved_bytes / self.bytes_per_s
        return math.sqrt(math.hypot(arithmetic_s**2, memory_s**2)) + self.kernel_s

    def attention_s(self, kernel: str, call: AttentionCall, flops_per_s: float) -> float:
        """kernel: a name of catalog/attention.py."""
        relative = attention_rate(self.generation, kernel, call)
        return needed_flops(call) / (flops_per_s * self.flash * relative) + self.kernel_s
