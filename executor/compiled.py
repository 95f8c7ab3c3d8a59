"""torch.compile beside the engine: the engine's hooks are never traced, and a capture runs compiled blocks eagerly.

A compiled block under a plan keeps its graphs; where a hook of the engine is called between two modules the graph is
cut, because chunks come and go there. Nothing here imports torch's compiler (seconds) unless somebody did.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["eagerly", "untraced"]

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """`function`, which torch.compile calls and never looks into. Every torch optimizer imports the compiler; so does
    this."""
    return torch._dynamo.disable(function)  # type: ignore[no-any-return, no-untyped-call]


def eagerly() -> contextlib.AbstractContextManager[Any]:
    """Inside, what was compiled runs as it was written."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]
