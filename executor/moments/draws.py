"""Draws: numbers that a model draws to decide which of its layers run.

[Note: draws] A model with LayerDrop draws a number for each layer, and leaves the layer out where the number lies below
a rate. A captured or recorded iteration has to show every layer: a plan has no optimizer states for a parameter that
never gets a gradient. There, each number drawn alone from [0, 1] is 0.5: no layer is dropped at a rate of at most 0.5.
An iteration of the training that drops a layer leaves its plan and is finished on demand. Of layers that were left out
by any other draw `prepare` warns.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from executor.moments.unseen import unseen

__all__ = ["DRAWN", "DRAWS", "Undropped", "host_draws"]

DRAWN = 0.5
DRAWS = frozenset({torch.ops.aten.rand.default, torch.ops.aten.rand_like.default})
_ON_THE_HOST = {"random": ("random", "uniform"), "numpy.random": ("random", "random_sample", "rand", "uniform")}
_STATES = {"random": ("getstate", "setstate"), "numpy.random": ("get_state", "set_state")}


class Undropped(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes each number that real operators draw alone `DRAWN`.

    drew: whether there was one.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in DRAWS and out.numel() == 1:
            self.drew = True
            with unseen(), torch.no_grad():
                out.fill_(DRAWN)
        return out


@contextlib.contextmanager
def host_draws() -> Iterator[None]:
    """Inside this context, each number that Python or NumPy draws alone lies in the middle of its range. Afterwards
    their global generators are where they were."""
    with contextlib.ExitStack() as undo:
        for key, names in _ON_THE_HOST.items():
            module = sys.modules.get(key)
            if module is None:
                continue
            get, put = _STATES[key]
            undo.callback(getattr(module, put), getattr(module, get)())
            for name in names:
                plain = getattr(module, name)
                undo.callback(setattr, module, name, plain)
                setattr(module, name, _middle_of(plain))
        yield


def _middle_of(plain: Callable[..., Any]) -> Callable[..., Any]:
    bounded = plain.__name__ == "uniform"

    def draw(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) not in ((0, 2) if bounded else (0,)):
            return plain(*args, **kwargs)  # numbers of which no one decides alone
        return sum(args) / 2 if args else DRAWN

    return draw
