"""What torch keeps under private names and the executor needs, each in one function.

All of it has been there since before torch 2.6, the oldest that the executor runs on.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["buffer_table", "non_persistent_buffers", "parameter_table", "storage_key", "version_of"]


def storage_key(of: torch.Tensor | torch.UntypedStorage) -> int:
    """Address of the C++ storage of a tensor (or itself): the same for every view, and for no other storage as long as
    this one lives. Raises NotImplementedError or RuntimeError for a tensor without storage (sparse, ...)."""
    storage = of.untyped_storage() if isinstance(of, torch.Tensor) else of
    return int(storage._cdata)


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor, or another view of it, was written in place: what autograd compares."""
    return tensor._version


def parameter_table(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Name -> parameter that the module itself owns, None where it registered none. The module's own dict: what is
    written there is what the module has."""
    return module._parameters


def buffer_table(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Name -> buffer that the module itself owns, as `parameter_table`."""
    return module._buffers


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Names of buffers that its state_dict leaves out."""
    return module._non_persistent_buffers_set
