"""Nested values as JSON, tensors apart, for a user's own state in a checkpoint.

Numbers, texts, None, lists, tuples and mappings (with text, number or bool keys) keep their types; nothing is pickled,
so a checkpoint from elsewhere cannot run code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pstar_sim.errors import CheckpointError

_TUPLE, _MAPPING, _TENSOR = "$tuple", "$mapping", "$tensor"


def encode(value: Any, tensors: dict[str, torch.Tensor], where: str) -> Any:
    """Tensors go into `tensors`. Raises CheckpointError for a value of another type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        tensors[where] = value.detach()
        return {_TENSOR: where}
    if isinstance(value, (list, tuple)):
        items = [encode(item, tensors, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    if isinstance(value, Mapping):
        if not all(isinstance(key, (str, int, float, bool)) for key in value):
            raise CheckpointError(f"{where}: keys {list(value)[:3]} cannot be saved; use texts or numbers")
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(item, tensors, f"{where}[{key!r}]") for key, item in value.items()}
        return {_MAPPING: [[key, encode(item, tensors, f"{where}[{key!r}]")] for key, item in value.items()]}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold; give its state_dict(), or numbers, "
        "texts, tensors, lists and dicts"
    )


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Reverses `encode`. Raises KeyError for a tensor that is not in the table."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if isinstance(value, dict):
        if _TENSOR in value:
            return tensors[value[_TENSOR]]
        if _TUPLE in value:
            return tuple(decode(item, tensors) for item in value[_TUPLE])
        if _MAPPING in value:
            return {key: decode(item, tensors) for key, item in value[_MAPPING]}
        return {key: decode(item, tensors) for key, item in value.items()}
    return value
