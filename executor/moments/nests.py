"""Nests: tensors in nested tuples, lists, mappings and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with `change` applied to its nested tensors, in containers of the same types; the same object where none
    changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return _with_items(value, list(value), change)
    if isinstance(value, (tuple, list)):
        return _with_items(value, range(len(value)), change)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _with_fields(value, change)
    return value


def _with_fields(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    old = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
    new = {name: map_tensors(item, change) for name, item in old.items()}
    changed = {name: item for name, item in new.items() if item is not old[name]}
    made = copy.copy(value) if changed else value
    for name, item in changed.items():
        object.__setattr__(made, name, item)
    return made


def _with_items(value: Any, keys: Sequence[Any], change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    items = [map_tensors(value[key], change) for key in keys]
    if all(item is value[key] for key, item in zip(keys, items)):
        return value
    if isinstance(value, tuple):
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    made = copy.copy(value)
    for key, item in zip(keys, items):
        if item is not value[key]:
            made[key] = item
    return made
