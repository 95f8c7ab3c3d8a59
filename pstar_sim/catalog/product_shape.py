"""Seconds of a matrix product by its shape, from a few physical figures of a GPU.

[Note: seconds of a product] A product of m x k by k x n is cut into tiles of the result. Each streaming multiprocessor
(SM) computes one tile at a time, so the tiles go in waves, and the last wave leaves SMs idle. Each tile begins and ends
with work that does not depend on k. Meanwhile the factors and the result move through the memory of the GPU. So

    waves      = batches * ceil(m / tile rows) * ceil(n / tile columns) / SMs
    arithmetic = flops / rate * (1 + wave_loss * (ceil(waves) / waves - 1)) * (1 + depth / k)
    memory     = bytes / bytes_per_s
    seconds    = (arithmetic ** 4 + memory ** 4) ** (1 / 4) + kernel_s

where `rate` is the rate of large products (`Gpu.flops_per_s`). The longer of arithmetic and memory decides; the fourth
power rounds the corner between them. GPUs of a generation differ in SMs and rates alone.

benchmarks/gemm.py fits the figures to measured products and gives their errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pstar_sim.arguments import number, whole
from pstar_sim.errors import CatalogError

__all__ = ["ProductShape"]


@dataclass(frozen=True, kw_only=True)
class ProductShape:
    """Figures of one GPU by [Note: seconds of a product].

    sms: number of streaming multiprocessors.
    tile: rows and columns of a tile of the result.
    wave_loss: share of the idle time of the last wave that is lost, from 0 to 1: kernels that split tiles lose less.
    depth: terms of a dot product (k) that take as long as the beginning and the end of a tile.
    bytes_per_s: rate at which a product's factors and result move through the memory of the GPU.
    kernel_s: seconds of the beginning and end of a kernel, whatever its size.
    flash: share of `rate` that fused attention reaches.
    """

    sms: int
    tile: tuple[int, int]
    wave_loss: float
    depth: float
    bytes_per_s: float
    kernel_s: float
    flash: float = 1.0

    def __post_init__(self) -> None:
        for name, count in (("sms", self.sms), ("tile rows", self.tile[0]), ("tile columns", self.tile[1])):
            whole(f"products: {name}", count, error=CatalogError)
        for name in ("bytes_per_s", "flash"):
            number(f"products: {name}", getattr(self, name), error=CatalogError)
        for name in ("wave_loss", "depth", "kernel_s"):
            number(f"products: {name}", getattr(self, name), also=True, error=CatalogError)
        if self.wave_loss > 1:
            raise CatalogError(f"products: wave_loss = {self.wave_loss!r}: it must be a share from 0 to 1")

    def seconds(self, product: Sequence[int], flops_per_s: float, moved_bytes: float) -> float:
        """Returns the seconds of a product (batches, m, k, n).

        flops_per_s: rate of large products.
        moved_bytes: bytes of its factors and its result.
        """
        batches, m, k, n = product
        waves = batches * -(-m // self.tile[0]) * -(-n // self.tile[1]) / self.sms
        loss = 1 + self.wave_loss * (math.ceil(waves) / waves - 1)
        arithmetic_s = 2 * batches * m * k * n / flops_per_s * loss * (1 + self.depth / k)
        memory_s = moved_bytes / self.bytes_per_s
        return math.sqrt(math.hypot(arithmetic_s**2, memory_s**2)) + self.kernel_s
