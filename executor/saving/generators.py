"""Global random generators (torch's, Python's, numpy's) as bytes, for checkpoints."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy
import torch

from pstar_sim.errors import CheckpointError


def seed_generators(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def generator_states() -> dict[str, torch.Tensor]:
    """Name -> state, uint8. numpy's is the global one, which data loaders use."""
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
    for action in checked_generators(states):
        action()


def checked_generators(states: Mapping[str, torch.Tensor]) -> list[Callable[[], object]]:
    """Functions that set these states, each first tried on a generator of its own. Missing devices' are left out.
    Raises CheckpointError."""
    actions = []
    for name, state in states.items():
        try:
            action = _checked(name, state)
        except (ValueError, TypeError, RuntimeError, OverflowError) as error:
            reason = str(error).splitlines()[0]
            raise CheckpointError(f"the state of the random number generator {name!r} is damaged ({reason})") from error
        if action is not None:
            actions.append(action)
    return actions


def _checked(name: str, state: torch.Tensor) -> Callable[[], object] | None:
    if name == "torch":
        torch.Generator().set_state(state)
        return partial(torch.set_rng_state, state)
    if name.startswith("cuda."):
        number = int(name.removeprefix("cuda."))
        if not torch.cuda.is_available() or number >= torch.cuda.device_count():
            return None
        torch.Generator(f"cuda:{number}").set_state(state)
        return partial(torch.cuda.set_rng_state, state, number)
    if name == "python":
        version, words, gauss = json.loads(bytes(state.numpy()))
        python = (version, tuple(words), gauss)
        random.Random().setstate(python)
        return partial(random.setstate, python)
    kind, keys, *rest = json.loads(bytes(state.numpy()))
    legacy = (kind, numpy.array(keys, dtype=numpy.uint32), *rest)
    numpy.random.RandomState().set_state(legacy)
    return partial(numpy.random.set_state, legacy)
