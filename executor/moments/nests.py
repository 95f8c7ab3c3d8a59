"""What modules take and give: tensors in nests of tuples, lists, mappings and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["change_tensors"]


def change_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with its tensors changed: a tensor, tuples, lists, mappings and dataclasses, nested,
    each of its own type. The same object where no tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        keys: list[Any] = list(value)
    elif isinstance(value, (tuple, list)):
        keys = list(range(len(value)))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        keys = [f.name for f in dataclasses.fields(value)]
        new = {key: change_tensors(getattr(value, key, None), change) for key in keys}
        changed = {key: item for key, item in new.items() if item is not getattr(value, key, None)}
        made = copy.copy(value) if changed else value
        for key, item in changed.items():
            object.__setattr__(made, key, item)
        return made
    else:
        return value
    items = [change_tensors(value[key], change) for key in keys]
    if all(item is value[key] for key, item in zip(keys, items)):
        return value
    if isinstance(value, tuple):
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    made = copy.copy(value)
    for key, item in zip(keys, items):
        if item is not value[key]:
            made[key] = item
    return made
