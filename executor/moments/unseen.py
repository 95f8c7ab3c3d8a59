"""What the engine does beside the model: its operators are not counted, and who counts hears where a moment ends."""

from __future__ import annotations

import contextlib
from typing import Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["Watching", "unseen"]


_AS_IT_IS = contextlib.nullcontext()


def unrecorded() -> contextlib.AbstractContextManager[object]:
    """Autograd records nothing of what runs inside."""
    return torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS


def unseen() -> contextlib.AbstractContextManager[object]:
    """The engine's own operators must not be counted: no dispatch mode sees what runs inside."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return _AS_IT_IS
    return _disable_current_modes()


class Watching(Protocol):
    """Told by a session of its moments."""

    def closes(self, moment: int) -> None: ...

    def opens(self) -> None: ...
