"""Contexts for the engine's own work: its operators are neither counted nor recorded by autograd.

Counters of the model's operators (`Watching`) get the points at which a moment ends and the next begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["Watching", "modes_standing", "unrecorded", "unseen"]


_AS_IT_IS = contextlib.nullcontext()


def unrecorded() -> contextlib.AbstractContextManager[object]:
    """Returns a context in which autograd records nothing."""
    return torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS


modes_standing: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Returns the number of dispatch modes on this thread's stack. If it is 0, `unseen` has nothing to do."""


def unseen() -> contextlib.AbstractContextManager[object]:
    """Returns a context in which no dispatch mode sees the operators: they are the engine's own and must not be
    counted."""
    return _disable_current_modes() if modes_standing() else _AS_IT_IS


class Watching(Protocol):
    """A counter of operators per moment; the session's loop calls its methods."""

    def close_moment(self, moment: int) -> None:
        """Close the open moment, given by its index in the plan. The engine's own work comes next."""
        ...

    def open_moment(self) -> None:
        """Open the moment that has just begun. The engine's own work is done."""
        ...
