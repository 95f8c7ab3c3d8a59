"""Contexts for the engine's own work: its operators are neither counted nor recorded by autograd."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["modes_standing", "unrecorded", "unseen"]


_AS_IT_IS = contextlib.nullcontext()


def unrecorded() -> contextlib.AbstractContextManager[object]:
    """Returns a context in which autograd records nothing."""
    return torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS


modes_standing: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Returns the number of dispatch modes on this thread's stack. If it is 0, `unseen` has nothing to do."""


def unseen() -> contextlib.AbstractContextManager[object]:
    """Returns a context in which no dispatch mode sees the operators, which are the engine's own and not counted."""
    return _disable_current_modes() if modes_standing() else _AS_IT_IS
