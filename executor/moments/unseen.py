"""What the engine does beside the model: its operators are not counted, and who counts hears where a moment ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["Watching", "modes_standing", "unrecorded", "unseen"]


_AS_IT_IS = contextlib.nullcontext()


def unrecorded() -> contextlib.AbstractContextManager[object]:
    """Autograd records nothing of what runs inside."""
    return torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS


modes_standing: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Dispatch modes on this thread's stack: without any, `unseen` has nothing to do."""


def unseen() -> contextlib.AbstractContextManager[object]:
    """The engine's own operators must not be counted: no dispatch mode sees what runs inside."""
    return _disable_current_modes() if modes_standing() else _AS_IT_IS


class Watching(Protocol):
    """Told by a session of its moments."""

    def closes(self, moment: int) -> None: ...

    def opens(self) -> None: ...
