"""Dtypes of torch by the names of pstar_sim.dtypes, and the reverse."""

from __future__ import annotations

import torch

from pstar_sim.dtypes import DTYPES, STORAGE

TORCH_DTYPES: dict[str, torch.dtype] = {row.name: getattr(torch, row.torch_name) for row in DTYPES.values()}
STORED_DTYPES: dict[str, torch.dtype] = {row.name: getattr(torch, row.torch_name) for row in STORAGE.values()}
"""Of chunks: packed matrices are bytes."""
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
