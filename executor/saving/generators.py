"""Generators: the global random number generators (torch's, Python's, numpy's) as tensors of bytes, for checkpoints."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch

__all__ = ["generator_states", "set_generators"]


def generator_states() -> dict[str, torch.Tensor]:
    """Returns name of each generator -> its state, uint8. numpy's generator is its global generator, which data loaders
    use."""
    kind, keys, *rest = numpy.random.get_state()
    found = {
        "torch": torch.get_rng_state(),
        "python": _as_bytes(random.getstate()),
        "numpy": _as_bytes([kind, [int(k) for k in keys], *rest]),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found |= {f"cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return found


def _as_bytes(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def set_generators(states: Mapping[str, torch.Tensor]) -> None:
    """Set the generators to these states. States of devices that are not here are left out."""
    for name, state in states.items():
        if name == "torch":
            torch.set_rng_state(state)
        elif name.startswith("cuda."):
            number = int(name.removeprefix("cuda."))
            if torch.cuda.is_available() and number < torch.cuda.device_count():
                torch.cuda.set_rng_state(state, number)
        elif name == "python":
            version, words, gauss = json.loads(bytes(state.numpy()))
            random.setstate((version, tuple(words), gauss))
        else:
            kind, keys, *rest = json.loads(bytes(state.numpy()))
            numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
