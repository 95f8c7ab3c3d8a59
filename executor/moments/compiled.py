"""torch.compile beside the engine: hooks are never traced, and captures and counted iterations run compiled blocks
eagerly.

A graph ends where the engine's hook is called between two modules, because chunks move there. While operators are
counted, compiled functions run as written: torch does not compile under a dispatch mode, and never what it has passed
    over there. Importing torch's compiler takes seconds: only `untraced` does it.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from executor.devices.torch26 import compiler_watches
from executor.devices.torch_private import outside_compiled_code

R = TypeVar("R")


def untraced(function: Callable[..., R]) -> Callable[..., R]:
    """Called and never traced by torch.compile, with positional arguments only.

    The compiler's own wrapper switches it off and on at every call, of hundreds per iteration; where the compiler is
    not active (torch 2.9 and newer can tell), `function` is called directly.
    """
    aside: Callable[..., R] = torch._dynamo.disable(function)  # type: ignore[no-untyped-call]
    compiler = compiler_watches()
    if compiler is None:
        return aside

    def call_1(a: Any) -> R:
        return function(a) if compiler() is None else aside(a)

    def call_2(a: Any, b: Any) -> R:
        return function(a, b) if compiler() is None else aside(a, b)

    def call_3(a: Any, b: Any, c: Any) -> R:
        return function(a, b, c) if compiler() is None else aside(a, b, c)

    def call_any(*args: Any) -> R:
        return function(*args) if compiler() is None else aside(*args)

    takes = inspect.signature(function).parameters.values()
    fixed = all(one.kind is one.POSITIONAL_OR_KEYWORD and one.default is one.empty for one in takes)
    calls: dict[int, Callable[..., R]] = {1: call_1, 2: call_2, 3: call_3} if fixed else {}
    return torch._dynamo.decorators.skip(calls.get(len(takes), call_any))


def eagerly() -> contextlib.AbstractContextManager[Any]:
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


_LOCK = threading.RLock()  # a collection of garbage may end another pause at any point, in this thread too
_pauses: set[object] = set()
_stance: list[Any] = []  # the stance that all pauses together have taken, at most one


def pause_compiler() -> Callable[[], None]:
    """Compiled functions run as written, in all threads, until the returned function is called. Pauses may overlap, and
    begin or end inside compiled code, which keeps its graphs."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled
        return lambda: None
    mine = object()

    def resume() -> None:
        with _LOCK, outside_compiled_code():
            _pauses.discard(mine)
            if not _pauses and _stance:
                _stance.pop().__exit__(None, None, None)

    with _LOCK, outside_compiled_code():
        _pauses.add(mine)
        if not _stance:
            stance = torch.compiler.set_stance("force_eager")
            stance.__enter__()
            _stance.append(stance)
    return resume
