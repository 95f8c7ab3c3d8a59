"""Stochastic rounding of fp32 to bf16: to a neighbour, so that the mean is the value.

[Note: random bits without a state] An element's bits are a hash of the number of the tensor's update, the tensor and
the element's offset in it: the same on every device, wherever a plan cuts and moves chunks.
"""

from __future__ import annotations

import torch

from pstar_sim.core.workspace import CAST_ELEMENTS

NEAREST, STOCHASTIC = "nearest", "stochastic"
ROUND_BLOCK = CAST_ELEMENTS
_MASK, _FACTOR = (1 << 32) - 1, 0x45D9F3B  # products of a 32-bit number and the factor have less than 60 bits
_LOW = 0xFFFF  # bits of fp32 that bf16 lacks


def _key(*numbers: int) -> int:
    key = 0
    for number in numbers:
        key = (key ^ number) & _MASK
        for _ in range(2):
            key = (((key >> 16) ^ key) * _FACTOR) & _MASK
        key ^= key >> 16
    return key


def _bits(first: int, count: int, key: int, device: torch.device) -> torch.Tensor:
    """int64 [count], 16 random bits each."""
    bits = torch.arange(first, first + count, dtype=torch.int64, device=device).bitwise_and_(_MASK).bitwise_xor_(key)
    for _ in range(2):
        bits.bitwise_xor_(bits >> 16).mul_(_FACTOR).bitwise_and_(_MASK)
    return bits.bitwise_xor_(bits >> 16).bitwise_and_(_LOW)


def round_stochastically(target: torch.Tensor, value: torch.Tensor, *, update: int, tensor: int, offset: int) -> None:
    """Writes fp32 values into a flat bf16 tensor; those that bf16 has stay as they are.

    offset: of the first value in its tensor.
    """
    key = _key(update, tensor)
    for start in range(0, value.numel(), ROUND_BLOCK):
        piece = value[start : start + ROUND_BLOCK]
        bits = _bits(offset + start, piece.numel(), key, value.device)
        bits.add_(piece.view(torch.int32)).bitwise_and_(~_LOW)
        rounded = bits.to(torch.int32).view(torch.float32)
        target[start : start + ROUND_BLOCK].copy_(torch.where(piece.isfinite(), rounded, piece))
