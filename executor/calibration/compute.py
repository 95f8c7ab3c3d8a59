"""Rates of compute: products by size and dtype, and the bandwidth of device memory.

[Note: a product as training has it] A linear layer's product and the two of its backward are timed, with weights that
are not in a cache: a pass of training reads each once. Rows are a quarter of the inner extent: n x n weights and n/4
rows are n**3 / 2 flops. Sizes on the axis are flops of one product.

[Note: the operators between products] Activation functions, norms, sums and softmax of a transformer block, in forward,
repeated forward and backward, are timed together against the bytes that a capture counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

import torch
from torch.nn import functional

from executor.calibration.bench import Bench
from executor.calibration.measured_device import Device
from executor.devices.dtypes import TORCH_DTYPES
from executor.moments.live_bytes import LiveStorages

_EXTENTS = {"virtual": (64, 128, 256, 512, 1024, 1536, 2048), "cuda": (256, 512, 1024, 2048, 4096, 8192, 12288)}
_LAYER_ROWS = {"virtual": (8, 32, 128, 512), "cuda": (64, 512, 4096, 16384)}
_COLD_BYTES = 48 << 20  # more than the last cache of a CPU or GPU holds
_MOST_WEIGHTS = 64
_MOST_INPUTS = 8
_WIDTH = 1024
_COPY_BYTES = {"virtual": 64 << 20, "cuda": 512 << 20}


def product(device: Device, n: int, dtype: torch.dtype) -> tuple[int, Callable[[], object]]:
    """(flops of one product, an action of it and the two of its backward)."""
    rows = max(1, n // 4)
    count = max(1, min(_MOST_WEIGHTS, _COLD_BYTES // (n * n * dtype.itemsize)))
    weights = cycle([torch.full((n, n), 0.5 / n, dtype=dtype, device=device.device) for _ in range(count)])
    x = torch.full((rows, n), 0.5, dtype=dtype, device=device.device)

    def action() -> None:
        weight = next(weights)
        y = torch.mm(x, weight)
        torch.mm(y, weight.t())
        torch.mm(x.t(), y)

    return 2 * rows * n * n, action


def matmul_rates(
    device: Device, bench: Bench, extents: Sequence[int] | None = None
) -> dict[str, tuple[tuple[float, float], ...]]:
    """dtype -> ((flops of one product, flops/s), ...), ascending. An emulated dtype's curve ends early.

    extents: n of each product, ascending; None: what suits the device.
    """
    table: dict[str, tuple[tuple[float, float], ...]] = {}
    with device.using():
        for dtype in device.dtypes:
            points = dict(product(device, n, TORCH_DTYPES[dtype]) for n in extents or _EXTENTS[device.kind])
            seconds = bench.medians(points, device.timed, longest_s=0.25)
            table[dtype] = tuple((float(flops), 3 * flops / s) for flops, s in seconds.items())
    return table


def between_products(device: Device, rows: int) -> tuple[int, Callable[[], object]]:
    """(bytes, an action) of one block on [rows, 1024] fp32, four times as wide for the activation function: [Note: the
    operators between products]."""
    generator = torch.Generator().manual_seed(0)
    count = max(1, min(_MOST_INPUTS, _COLD_BYTES // (rows * 5 * _WIDTH * 4)))
    inputs = cycle(
        [
            [torch.randn(rows, width, generator=generator).to(device.device) for width in (_WIDTH, 4 * _WIDTH)]
            for _ in range(count)
        ]
    )

    def forward(x: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
        y = x + functional.layer_norm(x, (_WIDTH,))
        gelu = 0.5 * wide * (1.0 + torch.tanh(0.8 * (wide + 0.045 * torch.pow(wide, 3.0))))  # as in models
        return torch.log_softmax(y, dim=-1).sum() + gelu.sum()

    def action() -> None:
        x, wide = next(inputs)
        with torch.no_grad():
            forward(x, wide)
        forward(x.detach().requires_grad_(), wide.detach().requires_grad_()).backward()  # type: ignore[no-untyped-call]

    counted = LiveStorages([])
    with counted:
        action()
    return counted.bytes_read + counted.bytes_written, action


def memory_rates(device: Device, bench: Bench) -> tuple[tuple[float, float], ...]:
    """((bytes moved in a moment, bytes/s), ...), ascending."""
    with device.using():
        points = dict(between_products(device, rows) for rows in _LAYER_ROWS[device.kind])
        seconds = bench.medians(points, device.timed)
    return tuple((float(size), size / s) for size, s in seconds.items())


def memory_rate(device: Device, bench: Bench) -> float:
    """Bytes/s, read and written together, of a copy inside device memory."""
    size = min(_COPY_BYTES[device.kind], bench.effort.memory_bytes // 2)
    source = torch.ones(size, dtype=torch.uint8, device=device.device)
    target = torch.empty_like(source)
    with device.using():
        seconds = bench.medians({size: lambda: target.copy_(source)}, device.timed)
    return 2 * size / seconds[size]
