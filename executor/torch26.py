"""What torch 2.6 and 2.7 have not yet: asking whether hooks on saved tensors are in force in this thread.

Newer ones answer themselves; for the older ones the two functions through which every such hook comes and goes are
counted, thread by thread, from the import of the executor on.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["count_hooks", "saved_tensor_hooks_in_force"]

_PUSH, _POP = "_push_saved_tensors_default_hooks", "_pop_saved_tensors_default_hooks"


def count_hooks(where: Any) -> Callable[[], bool]:
    """Wrap the two functions of `where` (torch._C._autograd) so that they count; returns the question."""
    count = threading.local()

    def counted(function: Callable[..., Any], change: int) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            result = function(*args)
            count.hooks = getattr(count, "hooks", 0) + change
            return result

        return call

    setattr(where, _PUSH, counted(getattr(where, _PUSH), +1))
    setattr(where, _POP, counted(getattr(where, _POP), -1))
    return lambda: getattr(count, "hooks", 0) > 0


if hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):

    def saved_tensor_hooks_in_force() -> bool:
        """Whether what autograd saves now goes through somebody's hooks."""
        return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None

else:
    saved_tensor_hooks_in_force = count_hooks(torch._C._autograd)
