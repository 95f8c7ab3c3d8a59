"""Rates of products by shape and of fused attention: the figures of `ProductShape`.

[Note: shapes as training has them] A linear layer of k inputs and n outputs on m rows makes products (m, k, n) in
forward, (m, n, k) for its input's gradient and (k, m, n) for its weight's. The rate of large products is the best of
`compute.matmul_rates`, others are fitted by least squares of the logarithms. An accelerator of one thread has one
multiprocessor, so no loss of a last wave is fitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import cycle

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import least_squares
from torch.nn import functional

from executor.calibration.bench import Bench
from executor.calibration.measured_device import Device
from executor.devices.dtypes import TORCH_DTYPES
from executor.moments.live_bytes import LiveStorages
from pstar_sim.catalog.attention import needed_flops
from pstar_sim.catalog.product_shape import ProductShape
from pstar_sim.dtypes import MASTER, NATIVE
from pstar_sim.workload.workload import Product

Layer = tuple[int, int, int]
"""Rows, inputs and outputs of a linear layer: m, k, n."""

TIMED_DTYPE = {"virtual": (MASTER,), "cuda": NATIVE}
"""Kind of device -> dtypes in which products by shape are timed; the first that the device multiplies in."""

_ROWS = {"virtual": (16, 64, 256), "cuda": (256, 2048, 16384)}
_WEIGHTS = {
    "virtual": ((256, 256), (512, 2048), (2048, 512), (1024, 1024)),
    "cuda": ((1024, 1024), (2048, 8192), (8192, 2048), (4096, 4096)),
}
_ATTENTION = {"virtual": (2, 8, 256, 64), "cuda": (2, 16, 4096, 128)}  # batch, heads, sequence, width of a head
_COLD_BYTES = 48 << 20
_MOST_WEIGHTS = 64
_START = (0.5, 32.0, 1e10, 1e-5)  # wave_loss over what is not lost, depth, bytes_per_s, kernel_s
_WEAK = 0.02  # weight of the start, so that a figure that the rows do not determine stays there


def product_seconds(
    device: Device, bench: Bench, dtype: str, layers: Sequence[Layer] | None = None
) -> dict[Product, float]:
    """By [Note: shapes as training has them].

    layers: linear ones; None: what suits the device.
    """
    if layers is None:
        layers = [(m, k, n) for k, n in _WEIGHTS[device.kind] for m in _ROWS[device.kind]]
    actions: dict[Product, Callable[[], object]] = {}
    for layer in layers:
        actions |= _of_layer(device, layer, TORCH_DTYPES[dtype])
    with device.using():
        return bench.medians(actions, device.timed, longest_s=0.25)


def _of_layer(device: Device, layer: Layer, dtype: torch.dtype) -> dict[Product, Callable[[], object]]:
    m, k, n = layer
    count = max(1, min(_MOST_WEIGHTS, _COLD_BYTES // (k * n * dtype.itemsize)))
    weights = cycle([torch.full((k, n), 0.5 / k, dtype=dtype, device=device.device) for _ in range(count)])
    x = torch.full((m, k), 0.5, dtype=dtype, device=device.device)
    y = torch.full((m, n), 0.5, dtype=dtype, device=device.device)
    return {
        (1, m, k, n): lambda: torch.mm(x, next(weights)),
        (1, m, n, k): lambda: torch.mm(y, next(weights).t()),
        (1, k, m, n): lambda: torch.mm(x.t(), y),
    }


def fit_products(
    seconds: dict[Product, float], *, flops_per_s: float, itemsize: int, sms: int, tile: tuple[int, int]
) -> ProductShape:
    """The figures with predicted seconds nearest to the measured.

    flops_per_s: of large products.
    sms, tile: as in `ProductShape`, not fitted.
    """

    def shape_of(logs: NDArray[np.float64]) -> ProductShape:
        loss, depth, bytes_per_s, kernel_s = (s * math.exp(x) for s, x in zip(_START, logs.tolist()))
        return ProductShape(
            sms=sms,
            tile=tile,
            wave_loss=loss / (1 + loss) if sms > 1 else 0.0,
            depth=depth,
            bytes_per_s=bytes_per_s,
            kernel_s=kernel_s,
        )

    def errors(logs: NDArray[np.float64]) -> list[float]:
        shape = shape_of(logs)
        rows = [
            math.log(shape.seconds(product, flops_per_s, itemsize * _elements(product)) / took_s)
            for product, took_s in seconds.items()
        ]
        return rows + [_WEAK * x for x in logs.tolist()]

    found = least_squares(errors, [0.0] * len(_START), bounds=(-7.0, 7.0), loss="soft_l1", f_scale=0.1)
    return shape_of(found.x)


def _elements(product: Product) -> int:
    batches, m, k, n = product
    return batches * (m * k + k * n + m * n)


def attention_share(device: Device, bench: Bench, dtype: str, flops_per_s: float) -> float:
    """Of `flops_per_s`, for torch's causal attention, forward and backward together, without the flops that the mask
    saves; at most 1."""
    batch, heads, rows, width = _ATTENTION[device.kind]
    made = torch.full((3, batch, heads, rows, width), 0.1, dtype=TORCH_DTYPES[dtype], device=device.device)
    q, k, v = (part.detach().requires_grad_() for part in made)

    def action() -> None:
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out.backward(torch.ones_like(out))  # type: ignore[no-untyped-call]

    counted = LiveStorages([])
    with device.using():
        with counted:
            action()
        seconds = bench.medians({"attention": action}, device.timed)
    flops = sum(map(needed_flops, counted.attentions)) or counted.flops  # torch 2.6 computes it as products on a CPU
    return min(1.0, flops / flops_per_s / seconds["attention"])
