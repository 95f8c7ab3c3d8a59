"""Modules that an iteration runs beside its model: a reference model, a teacher, an average of weights.

Their parameters and buffers stay on the GPU, outside a plan, as non-model data of every moment, like the model's
buffers. Outputs count while they live.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from executor.moments.unseen import unseen
from pstar_sim.units import format_bytes


@contextlib.contextmanager
def runs_beside(model: nn.Module, on_call: Callable[[nn.Module], None]) -> Iterator[Iterable[nn.Module]]:
    """Calls `on_call` before the first call of each outermost such module with parameters or buffers, and yields those
    alive."""
    inside = {id(part) for part in model.modules()}
    own = {id(tensor) for tensor in itertools.chain(model.parameters(), model.buffers())}
    modules: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()

    def see(module: nn.Module, args: Any) -> None:
        if id(module) in inside or any(module is part for other in modules for part in other.modules()):
            return
        if any(id(tensor) not in own for tensor in tensors_beside([module])):
            modules[module] = None
            with unseen():
                on_call(module)

    handle = register_module_forward_pre_hook(see)
    try:
        yield modules
    finally:
        handle.remove()


def tensors_beside(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    for module in modules:
        yield from module.parameters()
        yield from module.buffers()


def note_of(modules: Iterable[nn.Module]) -> str:
    names = [
        f"{type(module).__name__} ({format_bytes(sum(t.nbytes for t in tensors_beside([module])))})"
        for module in modules
    ]
    return f"beside the model, on the GPU throughout: {', '.join(names)}" if names else ""
