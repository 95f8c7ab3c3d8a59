"""Calls of a session's parts by objects that outlive it and must not keep it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def weakly(method: Callable[P, R]) -> Callable[P, R]:
    """Does not hold the method's object, and raises ReferenceError once that is gone."""
    keeper = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = keeper()
        if bound is None:
            raise ReferenceError("the session is gone")
        return bound(*args, **kwargs)

    return call
