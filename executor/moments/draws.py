"""Numbers that a model draws to decide which layers run.

[Note: draws] A model with LayerDrop draws a number per layer, some as one array, and leaves out layers below a rate. A
capture or recording has to show every layer: a plan has no states for a parameter without a gradient. So each number
from [0, 1] is one of ANSWERS: the middle, which drops no layer at rates up to 0.5, and only where some parameter got no
gradient, the ends of the range. A training iteration that drops a layer is finished on demand. `prepare` warns of
layers left out by other draws.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from executor.moments.unseen import unseen

_Run = TypeVar("_Run")
_UNIFORM = torch.ops.aten.uniform_.default
_DRAWING = frozenset({torch.ops.aten.rand.default, torch.ops.aten.rand_like.default})
_ON_THE_HOST = {"random": ("random", "uniform"), "numpy.random": ("random", "random_sample", "rand", "uniform")}
_STATES = {"random": ("getstate", "setstate"), "numpy.random": ("get_state", "set_state")}


@dataclass(kw_only=True)
class Draws:
    """answer: of each number from [0, 1] drawn alone.
    arrays: also of one-dimensional arrays, which may be data.
    drew: whether any was drawn.
    """

    answer: float = 0.5
    arrays: bool = False
    drew: bool = False

    def answers(self, out: Any, *, alone: bool) -> bool:
        if not alone and out.ndim != 1:
            return False
        self.drew = True
        return alone or self.arrays


ANSWERS = ((0.5, False), (1 - 2**-24, True), (0.0, True))
"""The ends of the range: fp32's greatest number below 1, for layers that run where it is above a rate, and 0."""


def with_every_layer(run: Callable[[Draws], _Run], left_out: Callable[[_Run], int]) -> tuple[_Run, Draws]:
    """What `run` returns, and its draws, for the answer that leaves out least.

    left_out: parameters without a gradient.
    """
    runs = []
    for answer, arrays in ANSWERS:
        draws = Draws(answer=answer, arrays=arrays)
        result = run(draws)
        runs.append((left_out(result), result, draws))
        if not runs[-1][0] or not draws.drew:
            break
    _, result, draws = min(runs, key=lambda one: one[0])
    return result, draws


def drawn(func: Any, args: Any, out: Any) -> bool:
    """An operator filled all of the result with numbers from [0, 1]."""
    if func is _UNIFORM:
        return len(args) == 1 and out.untyped_storage().nbytes() == out.numel() * out.element_size()
    return func in _DRAWING


class Undropped(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers what real operators draw."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if drawn(func, args, out) and self._draws.answers(out, alone=out.numel() == 1):
            with unseen(), torch.no_grad():
                out.fill_(self._draws.answer)
        return out


@contextlib.contextmanager
def host_draws(draws: Draws) -> Iterator[None]:
    """Python's and NumPy's draws are answered in the range asked for; global generators keep their state."""
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
                setattr(module, name, _answered(plain, draws))
        yield


def _answered(plain: Callable[..., Any], draws: Draws) -> Callable[..., Any]:
    ranged = plain.__name__ == "uniform"

    def draw(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        if kwargs.keys() - {"size"} or (ranged and len(args) == 1):
            return out  # numbers of another range
        low, high = args[:2] if ranged and args else (0.0, 1.0)
        alone = isinstance(out, float)
        if draws.answers(out, alone=alone):
            value = low + (high - low) * draws.answer
            if alone:
                return value
            out[:] = value
        return out

    return draw
