"""Host memory that the driver will not pin."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from executor.devices.cuda import CudaBackend


def test_what_the_driver_will_not_pin_is_ordinary_memory_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Under WSL2 about 1 GB can be pinned: the plan still runs, with slower copies."""
    empty = torch.empty

    def refuse(*size: Any, **options: Any) -> torch.Tensor:
        if options.pop("pin_memory", False):
            raise RuntimeError("CUDA error: out of memory\nmore")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    backend = CudaBackend.__new__(CudaBackend)  # there is no device here
    backend._pins_all = True
    with caplog.at_level(logging.WARNING, "executor"):
        slabs = [backend.host_slab(2**20) for _ in range(2)]
    assert [(slab.numel(), slab.dtype, slab.is_pinned()) for slab in slabs] == [(2**20, torch.uint8, False)] * 2
    said = "the driver pins no more host memory (CUDA error: out of memory); copies of the rest are slower"
    assert [record.getMessage() for record in caplog.records] == [said]
