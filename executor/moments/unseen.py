"""Contexts for the engine's own work: its operators are neither counted nor recorded by autograd."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _disable_current_modes

_AS_IT_IS = contextlib.nullcontext()


def unrecorded() -> contextlib.AbstractContextManager[object]:
    return torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS


modes_standing: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Returns the number of dispatch modes on this thread's stack. If it is 0, `unseen` has nothing to do."""


def unseen() -> contextlib.AbstractContextManager[object]:
    return _disable_current_modes() if modes_standing() else _AS_IT_IS
