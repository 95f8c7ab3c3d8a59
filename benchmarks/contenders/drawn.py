"""Random weights without the minutes that a CPU takes to draw billions of them: one buffer is drawn, and every weight
is a piece of the buffer at an offset of its own. For measurements of time and bytes; a model that is to learn is
initialised by its own code."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["draw_weights"]

_SCALE = 0.02
_APART = 64  # distance in numbers: no two weights begin at the same byte, which would tie them


def draw_weights(module: nn.Module, *, seed: int, shared: bool) -> nn.Module:
    """Give the parameters on meta values, the same for one seed: normal values for matrices, ones for vectors (norms
    and biases). Ties hold. Returns the module.

    shared: whether weights are views of the buffer, so that the model takes no more memory than the buffer; for a
        program that copies them elsewhere before it changes any, as `prepare` does. Otherwise each has memory of its
        own.
    """
    parameters = [p for p in module.parameters() if p.is_meta]
    buffers: dict[torch.dtype, torch.Tensor] = {}
    for dtype in {p.dtype for p in parameters}:
        same = [p for p in parameters if p.dtype == dtype]
        generator = torch.Generator().manual_seed(seed)
        buffer = torch.empty(max(p.numel() for p in same) + _APART * len(same), dtype=dtype)
        buffers[dtype] = buffer.normal_(0.0, _SCALE, generator=generator)
    for number, parameter in enumerate(parameters):
        begin = _APART * number
        value = buffers[parameter.dtype][begin : begin + parameter.numel()].view(parameter.shape)
        if parameter.dim() < 2:
            value = torch.ones_like(value)
        elif not shared:
            value = value.clone()
        torch.utils.swap_tensors(parameter, nn.Parameter(value, parameter.requires_grad))
    return module
